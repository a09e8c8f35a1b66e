//! Compares the parsers, on any frame, with a slow and obvious reader.

mod reference;

use proptest::prelude::*;
use proptest::sample::select;

/// Known protocol numbers, and some unknown ones.
fn next() -> impl Strategy<Value = u8> {
    prop_oneof![
        3 => select(vec![6u8, 17, 58, 1, 132]),
        3 => select(vec![0u8, 43, 44, 51, 60, 135, 139, 140]),
        1 => any::<u8>(),
    ]
}

fn ethertype() -> impl Strategy<Value = u16> {
    prop_oneof![
        8 => select(vec![0x0800u16, 0x86dd]),
        2 => select(vec![0x0806u16, 0x8100, 0x88a8, 0x9100, 0x05ff, 0x0600, 46]),
        1 => any::<u16>(),
    ]
}

fn ipv4() -> impl Strategy<Value = Vec<u8>> {
    let fragment = select(vec![0u16, 0x4000, 0x2000, 1, 0x2001, 0x8000]);
    let options = prop_oneof![4 => Just(5u8), 2 => 5..16u8, 1 => 0..16u8];
    let wrong = prop_oneof![6 => Just(0i32), 1 => -60..60];
    (options, fragment, next(), wrong, rest()).prop_map(|(words, fragment, next, wrong, rest)| {
        let options = vec![1; usize::from(words.saturating_sub(5)) * 4];
        let len = (20 + options.len() + rest.len()) as i32 + wrong;
        let mut packet = vec![0x40 | words, 0];
        packet.extend((len.max(0) as u16).to_be_bytes());
        packet.extend([0, 0]);
        packet.extend(fragment.to_be_bytes());
        packet.extend([64, next, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        [packet, options, rest].concat()
    })
}

/// An extension header, mostly with a valid length.
fn extension() -> impl Strategy<Value = Vec<u8>> {
    let fragment = select(vec![0u16, 1, 8, 9, 0xfff8, 6]);
    let wrong = prop_oneof![8 => Just(0u8), 1 => any::<u8>()];
    (next(), 0..4usize, fragment, wrong).prop_map(|(next, eights, fragment, wrong)| {
        let mut header = vec![next, eights as u8 ^ wrong];
        header.extend(fragment.to_be_bytes());
        header.resize(8 + eights * 8, 5);
        header
    })
}

fn ipv6() -> impl Strategy<Value = Vec<u8>> {
    let wrong = prop_oneof![6 => Just(0i32), 1 => -60..60];
    let extensions = prop::collection::vec(extension(), 0..5);
    (next(), extensions, wrong, rest()).prop_map(|(next, extensions, wrong, rest)| {
        let payload = [extensions.concat(), rest].concat();
        let len = payload.len() as i32 + wrong;
        let mut packet = vec![0x60, 0, 0, 0];
        packet.extend((len.max(0) as u16).to_be_bytes());
        packet.extend([next, 255]);
        packet.extend([1; 32]);
        [packet, payload].concat()
    })
}

fn arp() -> impl Strategy<Value = Vec<u8>> {
    (0..5u16, 20..40usize).prop_map(|(operation, len)| {
        let mut message = packet::arp::Arp::about([2; 6], [10, 0, 0, 1], operation);
        message.resize(len, 0);
        message
    })
}

/// A payload, which may begin with a TCP header.
fn rest() -> impl Strategy<Value = Vec<u8>> {
    let tcp = (0..16u8).prop_map(|words| {
        let mut header = vec![0; 12];
        header.push(words << 4);
        header.resize(60, 7);
        header
    });
    prop_oneof![
        tcp,
        prop::collection::vec(any::<u8>(), 0..40),
        prop::collection::vec(any::<u8>(), 0..400)
    ]
}

fn frame() -> impl Strategy<Value = Vec<u8>> {
    let tags = prop::collection::vec(select(vec![0x8100u16, 0x88a8, 0x9100]), 0..3);
    let snap = select(vec![
        &[][..],
        &[0xaa, 0xaa, 3, 0, 0, 0],
        &[0xaa, 0xaa, 3, 0, 0, 0xf8],
        &[0x42, 0x42, 3],
    ]);
    let packet = prop_oneof![ipv4(), ipv6(), arp(), rest()];
    (tags, snap, ethertype(), packet, any::<bool>()).prop_map(|(tags, snap, ethertype, packet, fits)| {
        let mut frame = vec![2; 12];
        for tag in tags {
            frame.extend(tag.to_be_bytes());
            frame.extend([0, 7]);
        }
        if !snap.is_empty() {
            frame.extend([0, 100]);
            frame.extend(snap);
        }
        let of_packet = match packet.first().map(|first| first >> 4) {
            Some(4) => 0x0800u16,
            Some(6) => 0x86dd,
            _ => 0x0806,
        };
        frame.extend(if fits { of_packet } else { ethertype }.to_be_bytes());
        [frame, packet].concat()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn headers_are_what_the_slow_and_obvious_reader_finds(
        frame in frame(),
        change in prop::option::weighted(0.3, (any::<prop::sample::Index>(), any::<u8>())),
        cut in prop::option::weighted(0.3, any::<prop::sample::Index>()),
        longer in prop::option::weighted(0.3, 0..64usize),
    ) {
        let mut frame = frame;
        if let Some((at, byte)) = change {
            let at = at.index(frame.len());
            frame[at] = byte;
        }
        frame.truncate(cut.map_or(frame.len(), |cut| cut.index(frame.len())));
        frame.resize(frame.len() + longer.unwrap_or(0), 0);
        reference::compare(&frame[..frame.len().min(packet::HEADERS_MAX)], frame.len());
    }

    #[test]
    fn any_bytes_are_read(frame in prop::collection::vec(any::<u8>(), 0..300)) {
        reference::compare(&frame[..frame.len().min(packet::HEADERS_MAX)], frame.len());
    }
}
