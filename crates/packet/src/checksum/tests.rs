//! Compares the implementations with the definition, and with each other.

use proptest::prelude::*;

use super::{ChecksumAt, OutOfFrame, Sum, complete, pseudo_v4, pseudo_v6, update};

/// RFC 1071 as it is written: 16-bit words, end-around carry.
fn plain(bytes: &[u8]) -> u16 {
    let words = bytes
        .chunks(2)
        .map(|word| u32::from(word[0]) << 8 | word.get(1).map_or(0, |&low| low.into()));
    let mut sum = 0u32;
    for word in words {
        sum += word;
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[test]
fn example_of_rfc_1071() {
    let sum = Sum::of(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]);
    assert_eq!(sum.fold(), 0xddf2);
    assert_eq!(sum.complement(), 0x220d);
}

#[test]
fn nothing_is_zero_and_all_ones_stay() {
    assert_eq!(Sum::of(&[]).fold(), 0);
    for len in (2..400).step_by(2) {
        assert_eq!(Sum::of(&vec![0xff; len]).fold(), 0xffff, "{len}");
    }
    for len in [1 << 20, (1 << 20) + 2] {
        for byte in [0xff, 0x7f, 0x80, 0] {
            let bytes = vec![byte; len];
            assert_eq!(Sum::of(&bytes).fold(), plain(&bytes), "{len} times {byte:#x}");
        }
    }
    assert_eq!(Sum(u64::MAX).fold(), 0xffff);
    assert_eq!((Sum(u64::MAX) + Sum(u64::MAX)).fold(), 0xffff);
}

fn at(start: u16, offset: u16) -> ChecksumAt {
    ChecksumAt { start, offset }
}

#[test]
fn udp_never_gets_zero() {
    let mut udp = [0xff, 0xff, 0, 0, 0, 0, 0, 0];
    complete(&mut udp, at(0, 6)).unwrap();
    assert_eq!(udp[6..], [0xff, 0xff]);
    let mut other = [0xff, 0xff, 0, 0, 0, 0, 0, 0];
    complete(&mut other, at(0, 4)).unwrap();
    assert_eq!(other[4..], [0, 0, 0, 0]);
}

#[test]
fn field_outside_is_refused() {
    let mut frame = [7; 20];
    for (start, offset) in [(20, 0), (19, 0), (0, 19), (u16::MAX, u16::MAX), (10, 9)] {
        let at = at(start, offset);
        assert_eq!(complete(&mut frame, at), Err(OutOfFrame { at, len: 20 }));
    }
    assert_eq!(frame, [7; 20]);
    assert_eq!(complete(&mut frame, at(10, 8)), Ok(()));
}

proptest! {
    #[test]
    fn every_way_gives_the_same(bytes in prop::collection::vec(any::<u8>(), 0..2000), from in 0usize..64) {
        let bytes = &bytes[from.min(bytes.len())..];
        prop_assert_eq!(Sum::of(bytes).fold(), plain(bytes));
        prop_assert_eq!(Sum::of_portable(bytes).fold(), plain(bytes));
    }

    #[test]
    fn pieces_add_up(bytes in prop::collection::vec(any::<u8>(), 0..600), cut in 0usize..600) {
        let (head, tail) = bytes.split_at(cut.min(bytes.len()));
        let tail = if head.len() % 2 == 0 { Sum::of(tail) } else { Sum::of(tail).swapped() };
        prop_assert_eq!((Sum::of(head) + tail).fold(), plain(&bytes));
        prop_assert_eq!((tail + Sum::of(head)).fold(), plain(&bytes));
    }

    #[test]
    fn pseudo_headers_are_their_bytes(
        src in any::<[u8; 16]>(), dst in any::<[u8; 16]>(), protocol: u8, len in 0u32..70000,
    ) {
        let bytes = [&src[..], &dst, &len.to_be_bytes(), &[0, 0, 0, protocol]].concat();
        prop_assert_eq!(pseudo_v6(src, dst, protocol, len).fold(), plain(&bytes));
        let (src, dst) = ([src[0], src[1], src[2], src[3]], [dst[0], dst[1], dst[2], dst[3]]);
        let bytes = [&src[..], &dst, &len.to_be_bytes(), &[0, 0, 0, protocol]].concat();
        prop_assert_eq!(pseudo_v4(src, dst, protocol, len).fold(), plain(&bytes));
    }

    #[test]
    fn update_is_as_good_as_anew(mut bytes in prop::collection::vec(any::<u8>(), 4..100), new: u16) {
        let before = Sum::of(&bytes).complement();
        let old = u16::from_be_bytes([bytes[2], bytes[3]]);
        bytes[2..4].copy_from_slice(&new.to_be_bytes());
        // A receiver adds the checksum to the rest and wants all ones, whichever of the two zeros is stored.
        let updated = update(before, old, new);
        let verified = Sum::of(&bytes).add_word(updated).fold();
        prop_assert!(verified == 0xffff || bytes.iter().all(|&byte| byte == 0), "{:x}", verified);
    }

    #[test]
    fn completed_frames_verify(
        mut frame in prop::collection::vec(any::<u8>(), 2..300), start in 0u16..300, offset in 0u16..300,
    ) {
        let before = frame.clone();
        match complete(&mut frame, at(start, offset)) {
            Err(_) => {
                prop_assert!(usize::from(start + offset) + 2 > frame.len());
                prop_assert_eq!(frame, before);
            }
            Ok(()) if offset % 2 == 0 => {
                // The old value was the partial sum: added again, all is ones.
                let field = usize::from(start + offset);
                let partial = u16::from_be_bytes([before[field], before[field + 1]]);
                let verified = Sum::of(&frame[start.into()..]).add_word(partial).fold();
                prop_assert!(verified == 0xffff || verified == 0);
            }
            Ok(()) => {}
        }
    }
}
