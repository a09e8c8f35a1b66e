//! The guard of a guest that has IP addresses: any frame.
//!
//! Invariants: a verdict rests on the bytes that it names, so that what lies behind them does not change it; what may
//! be sent by a guest that is neither router nor server may be sent by one that is both; what may be sent names none
//! but the guest's addresses, where a look that knows nothing of extension headers finds them.

use dataplane::fuzzing::Addresses;

const MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
const V4: [u8; 4] = [192, 0, 2, 10];
/// The first half of `2001:db8:1::/64`, and the link-local address of [`MAC`].
const V6: [u8; 8] = [0x20, 0x01, 0x0d, 0xb8, 0, 1, 0, 0];
const LINK_LOCAL: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x50, 0x54, 0, 0xff, 0xfe, 0, 0, 1];

#[derive(arbitrary::Arbitrary, Debug)]
struct Input<'a> {
    kind: Kind,
    tagged: bool,
    /// What replaces the bytes that the verdict does not rest on.
    other: u8,
    packet: &'a [u8],
}

/// What stands in the Ethernet header.
#[derive(arbitrary::Arbitrary, Debug)]
enum Kind {
    V4,
    V6,
    Arp,
    Other(u16),
}

/// Runs one input.
///
/// # Panics
/// If an invariant does not hold.
pub fn run(data: &[u8]) {
    let Some(input) = crate::decode::<Input>(data) else {
        return;
    };
    let kind = match input.kind {
        Kind::V4 => 0x0800,
        Kind::V6 => 0x86dd,
        Kind::Arp => 0x0806,
        // A tag: that is what `tagged` is for.
        Kind::Other(0x8100) => return,
        Kind::Other(kind) => kind,
    };
    let tag: &[u8] = if input.tagged { &[0x81, 0, 0, 7] } else { &[] };
    let frame = [&[2; 6][..], &MAC, tag, &u16::to_be_bytes(kind), input.packet].concat();
    let guard = |router, server| {
        let addresses = ["192.0.2.10", "2001:db8:1::/64"];
        Addresses::new(&addresses, router, server).expect("addresses")
    };
    let Some(end) = guard(false, false).check(MAC, &frame) else {
        return;
    };
    assert!((14..=frame.len()).contains(&end), "{end} of {}", frame.len());
    let mut changed = frame.clone();
    changed[end..].fill(input.other);
    assert_eq!(
        guard(false, false).check(MAC, &changed),
        Some(end),
        "it rests on more"
    );
    assert!(
        guard(true, true).check(MAC, &frame).is_some(),
        "a router may do less"
    );
    assert_names_its_own(kind, input.packet);
}

fn assert_names_its_own(kind: u16, packet: &[u8]) {
    match kind {
        0x0800 => {
            let asks = packet[12..16] == [0; 4] && packet[16..20] == [0xff; 4];
            assert!(packet[12..16] == V4 || asks, "a source of IPv4");
        }
        0x86dd => {
            let source = &packet[8..24];
            let own = |address: &[u8]| address[..8] == V6 || *address == LINK_LOCAL;
            assert!(own(source) || *source == [0; 16], "a source of IPv6");
            // Neighbour advertisement, directly behind the header.
            if packet[6] == 58 && packet.get(40) == Some(&136) {
                assert!(own(&packet[48..64]), "a target");
            }
            assert!(
                !(packet[6] == 58 && packet.get(40) == Some(&134)),
                "an advertisement"
            );
        }
        0x0806 => {
            assert_eq!(packet[8..14], MAC, "an address of hardware");
            assert!(packet[14..18] == V4 || packet[24..28] == V4, "nobody's address");
        }
        other => panic!("EtherType {other:#x}"),
    }
}
