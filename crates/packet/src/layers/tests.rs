//! Tests of refused frames; `tests/segment_properties.rs` compares accepted ones with etherparse.

use super::parse;

/// Ethernet, IPv4, UDP with four bytes.
fn udp_frame() -> Vec<u8> {
    let mut frame = vec![0; 14 + 20 + 8 + 4];
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[14] = 0x45;
    frame[17] = 32;
    frame[23] = 17;
    frame
}

fn with(at: usize, byte: u8) -> Vec<u8> {
    let mut frame = udp_frame();
    frame[at] = byte;
    frame
}

fn parses(frame: &[u8]) -> bool {
    parse(frame, frame.len() as u32).is_some()
}

#[test]
fn contradictions_are_refused() {
    assert!(parses(&udp_frame()));
    for (what, frame) in [
        ("another ethertype", with(13, 6)),
        ("another version", with(14, 0x65)),
        ("a header shorter than IPv4's", with(14, 0x44)),
        ("a packet longer than the frame", with(17, 33)),
        ("a packet shorter than its headers", with(17, 27)),
        ("more fragments", with(20, 0x20)),
        ("a later fragment", with(21, 1)),
        ("another protocol", with(23, 1)),
        ("TCP whose header is not there", with(23, 6)),
    ] {
        assert!(!parses(&frame), "{what}");
    }
    let frame = udp_frame();
    assert!((0..frame.len()).all(|len| !parses(&frame[..len])), "cut");
}

#[test]
fn dont_fragment_and_padding_are_fine() {
    assert!(parses(&with(20, 0x40)));
    let layers = parse(&with(17, 28), 46).unwrap();
    assert_eq!((layers.payload, layers.ip_len_end), (42, 42));
}

#[test]
fn three_tags_are_one_too_many() {
    for (tags, good) in [(1, true), (2, true), (3, false)] {
        let mut frame = udp_frame();
        for _ in 0..tags {
            frame.splice(12..12, [0x81, 0, 0, 7]);
        }
        assert_eq!(parses(&frame), good, "{tags}");
    }
}

#[test]
fn extension_headers_end_at_the_limit() {
    for (extensions, good) in [(0, true), (1, true), (24, true), (25, false), (180, false)] {
        let mut frame = vec![0; 14 + 40];
        frame[12..14].copy_from_slice(&[0x86, 0xdd]);
        frame[14] = 0x60;
        frame[18..20].copy_from_slice(&(extensions as u16 * 8 + 8).to_be_bytes());
        frame[20] = if extensions == 0 { 17 } else { 60 };
        for left in (0..extensions).rev() {
            frame.extend([if left == 0 { 17 } else { 60 }, 0, 1, 4, 0, 0, 0, 0]);
        }
        frame.extend([0; 8]);
        assert_eq!(parses(&frame), good, "{extensions}");
    }
}
