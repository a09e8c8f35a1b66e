//! Filter rules of a port: any frame.
//!
//! Invariants: a frame is judged the same with a flow cache and without, whatever hash the NIC told; what lies behind
//! its packet does not change the verdict.

use dataplane::fuzzing::Filter;
use packet::HEADERS_MAX;

/// Rules that look at all that there is.
const RULES: &str = "\
direction=to-guest action=deny protocol=udp source=10.0.0.0/8 destination-ports=0-1023
direction=to-guest action=allow protocol=udp source-ports=53,67-68
direction=to-guest action=deny protocol=tcp destination=2001:db8::/32 destination-ports=22,80-443
direction=to-guest action=allow protocol=tcp
direction=to-guest action=deny mark=2
direction=to-guest action=allow protocol=udp mark=1
direction=to-guest action=allow protocol=icmp icmp-type=8
direction=to-guest action=deny protocol=icmpv6 icmp-type=134/0
direction=to-guest action=allow protocol=icmpv6
direction=to-guest action=allow ethertype=0x88cc";

#[derive(arbitrary::Arbitrary, Debug)]
struct Input<'a> {
    default_denies: bool,
    frames: Vec<Frame<'a>>,
}

#[derive(arbitrary::Arbitrary, Debug)]
struct Frame<'a> {
    kind: Kind,
    tagged: bool,
    mark: Option<u8>,
    hash: Option<u8>,
    packet: &'a [u8],
}

/// What stands in the Ethernet header.
#[derive(arbitrary::Arbitrary, Debug)]
enum Kind {
    V4,
    V6,
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
    let mut filter = Filter::new(RULES, input.default_denies).expect("rules");
    // Twice: the second time flows are known.
    for frame in input.frames.iter().chain(&input.frames) {
        let kind = match frame.kind {
            Kind::V4 => 0x0800,
            Kind::V6 => 0x86dd,
            Kind::Other(kind) => kind,
        };
        let tag: &[u8] = if frame.tagged { &[0x81, 0, 0, 7] } else { &[] };
        let bytes = [&[2; 12][..], tag, &u16::to_be_bytes(kind), frame.packet].concat();
        let head = &bytes[..bytes.len().min(HEADERS_MAX)];
        filter.mark(frame.mark.map(|mark| u32::from(mark) % 4));
        let passes = filter.allows(head, bytes.len(), frame.hash.map(u32::from));
        assert_eq!(passes, filter.looks_up(head, bytes.len()), "{frame:?}");
        if passes {
            let longer = [&bytes[..], &[0xff; 8]].concat();
            let head = &longer[..longer.len().min(HEADERS_MAX)];
            assert!(filter.looks_up(head, longer.len()), "{frame:?}");
        }
    }
}
