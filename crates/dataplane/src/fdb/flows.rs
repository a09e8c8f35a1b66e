//! Automatic receive steering (VirtIO 1.3, 5.1.6.5.6): a flow's frames go to the receive queue of the pair on which the
//! guest sends it.
//!
//! A flow is identified by a hash that is the same for both directions. A port with several pairs has a set-associative
//! table of a fixed size ([`Flows`]): its lanes record the flows that their guest sends, and lanes with frames for the
//! port look them up. A flow without an entry is spread by its hash, always to the same pair. A new flow replaces
//! another one where its set is full.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use packet::ethernet::{self, Skip};
use packet::ethertype::{IPV4, IPV6};
use packet::ip::{Follow, Fragment, Ipv4, Ipv6, Upper};
use packet::protocol::{TCP, UDP};
use packet::{SHORT_HEAD, word};

/// Sets of a port's table, of which a look-up searches one, and entries of a set.
const SETS: usize = 256;
const WAYS: usize = 4;

/// The part of an entry that identifies the flow.
const OF_FLOW: u32 = !0xffff;

/// A hash of a frame's addresses, and of its ports if it has any; the same in both directions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Flow(u64);

impl Flow {
    /// The flow of a frame with these first bytes; bytes beyond its end are 0.
    #[inline]
    pub(crate) fn of(head: &[u8; SHORT_HEAD]) -> Self {
        let payload = ethernet::payload(head, Skip::TwoTags);
        let ipv4 = payload.filter(|payload| payload.ethertype == IPV4);
        if let Some(ip) = ipv4.and_then(|payload| Ipv4::at(head, payload.at)) {
            let (from, to) = ports(head, Some(ip.upper));
            let end = |&address, port| u64::from(u32::from_be_bytes(address)) << 16 | port;
            let protocol = ip.upper.protocol;
            return Self::between(end(ip.source, from), end(ip.destination, to), protocol.into());
        }
        let ipv6 = payload.filter(|payload| payload.ethertype == IPV6);
        if let Some(ip) = ipv6.and_then(|payload| Ipv6::at(head, payload.at)) {
            let (from, to) = ports(head, ip.upper(head, Follow::Usual));
            let end =
                |address: &[u8; 16], port| mix(number(&address[..8])) ^ number(&address[8..]) ^ port << 48;
            let protocol = ip.next_header;
            return Self::between(end(ip.source, from), end(ip.destination, to), protocol.into());
        }
        let ethertype = payload.map_or(0, |payload| payload.ethertype);
        Self::between(number(&head[..6]), number(&head[6..12]), ethertype.into())
    }

    /// The flow between two ends, in either direction.
    fn between(one: u64, other: u64, protocol: u64) -> Self {
        Self(mix(mix(one).wrapping_add(mix(other)) ^ protocol))
    }

    /// Maps the hash to a number below `over`, which is at least one.
    #[inline]
    pub(crate) fn spread(self, over: usize) -> usize {
        // Less than `over`.
        #[allow(clippy::cast_possible_truncation)]
        let place = ((u128::from(self.0) * over as u128) >> 64) as usize;
        place
    }
}

/// TCP's and UDP's. Fragments but the first have no ports, so that none of the packet's are looked at.
fn ports(head: &[u8; SHORT_HEAD], upper: Option<Upper>) -> (u64, u64) {
    match upper {
        Some(Upper {
            protocol: TCP | UDP,
            at,
            fragment: Fragment::None,
        }) => {
            let port = |at| word(head, at).unwrap_or_default().into();
            (port(at), port(at + 2))
        }
        _ => (0, 0),
    }
}

/// At most eight bytes as a number.
fn number(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// Each bit of the result depends on all of `value`.
fn mix(value: u64) -> u64 {
    acl::fold(value ^ 0x2d35_8dcc_aa6c_78a5, 0x8bb8_4b93_962e_acc9)
}

/// See the module's head. Nothing is published through the shared words, so relaxed accesses suffice.
#[derive(Debug)]
pub struct Flows {
    /// The hash's highest bits, and the pair's number plus 1; 0: free.
    sets: Box<[[AtomicU32; WAYS]; SETS]>,
    /// How often an entry was changed; wraps after 2^32.
    changes: AtomicU32,
}

impl Default for Flows {
    fn default() -> Self {
        Self {
            sets: Box::new([const { [const { AtomicU32::new(0) }; WAYS] }; SETS]),
            changes: AtomicU32::new(0),
        }
    }
}

impl Flows {
    /// Records that the guest sends a flow on that pair.
    #[inline]
    pub(crate) fn note(&self, flow: Flow, pair: u16) {
        let (set, tag) = self.set(flow);
        let word = tag | (u32::from(pair) + 1);
        let is_its = |place: &&AtomicU32| place.load(Relaxed) & OF_FLOW == tag;
        let is_free = |place: &&AtomicU32| place.load(Relaxed) == 0;
        let place = set
            .iter()
            .find(is_its)
            .or_else(|| set.iter().find(is_free))
            // The flow's hash chooses the entry to replace.
            .unwrap_or(&set[(tag >> 16) as usize % WAYS]);
        if place.load(Relaxed) != word {
            place.store(word, Relaxed);
            self.changes.fetch_add(1, Relaxed);
        }
    }

    /// As long as this is the same, look-ups give the same results.
    #[inline]
    pub(crate) fn changes(&self) -> u32 {
        self.changes.load(Relaxed)
    }

    /// The pair on which the guest sent the flow last.
    #[inline]
    pub(crate) fn find(&self, flow: Flow) -> Option<u16> {
        let (set, tag) = self.set(flow);
        let known = set.iter().map(|place| place.load(Relaxed));
        let its = known.into_iter().find(|word| word & OF_FLOW == tag)?;
        // Less than 2^16, as when it was recorded.
        #[allow(clippy::cast_possible_truncation)]
        let pair = (its & !OF_FLOW).checked_sub(1)? as u16;
        Some(pair)
    }

    /// The set of a flow, and the tag of its entries: a part of the hash, not 0.
    #[inline]
    fn set(&self, Flow(hash): Flow) -> (&[AtomicU32; WAYS], u32) {
        // The highest and the lowest bits.
        #[allow(clippy::cast_possible_truncation)]
        let (tag, set) = ((hash >> 32) as u32 & OF_FLOW, hash as usize % SETS);
        (&self.sets[set], tag | 1 << 31)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Bytes at the beginning of a frame.
    fn head(parts: &[&[u8]]) -> [u8; SHORT_HEAD] {
        let mut head = [0; SHORT_HEAD];
        let bytes = parts.concat();
        let len = bytes.len().min(SHORT_HEAD);
        head[..len].copy_from_slice(&bytes[..len]);
        head
    }

    const MACS: [u8; 12] = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];

    fn ipv4(ends: [(u8, u16); 2], fragment: u16) -> [u8; SHORT_HEAD] {
        let [(from, from_port), (to, to_port)] = ends;
        let [a, b] = fragment.to_be_bytes();
        head(&[
            &MACS,
            &[8, 0, 0x45, 0, 0, 100, 0, 0, a, b, 64, TCP, 0, 0],
            &[10, 0, 0, from, 10, 0, 0, to],
            &from_port.to_be_bytes(),
            &to_port.to_be_bytes(),
        ])
    }

    fn ipv6(ends: [(u8, u16); 2]) -> [u8; SHORT_HEAD] {
        let [(from, from_port), (to, to_port)] = ends;
        head(&[
            &MACS,
            &[0x86, 0xdd, 0x60, 0, 0, 0, 0, 100, UDP, 64],
            &[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, from],
            &[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, to],
            &from_port.to_be_bytes(),
            &to_port.to_be_bytes(),
        ])
    }

    fn tagged(bytes: [u8; SHORT_HEAD]) -> [u8; SHORT_HEAD] {
        head(&[&bytes[..12], &[0x81, 0, 0, 100], &bytes[12..]])
    }

    #[test]
    fn flow_is_the_same_in_both_directions_with_and_without_a_tag() {
        let (one, other) = ((1, 1000), (2, 2000));
        for (forth, back) in [
            (ipv4([one, other], 0), ipv4([other, one], 0)),
            (ipv6([one, other]), ipv6([other, one])),
        ] {
            assert_eq!(Flow::of(&forth), Flow::of(&back));
            assert_eq!(Flow::of(&forth), Flow::of(&tagged(forth)));
        }
        let arp = head(&[&MACS, &[8, 6]]);
        let answer = head(&[&MACS[6..], &MACS[..6], &[8, 6]]);
        assert_eq!(Flow::of(&arp), Flow::of(&answer));
    }

    #[test]
    fn different_flows_have_different_hashes() {
        let mut seen = HashSet::new();
        for port in 0..1000 {
            assert!(seen.insert(Flow::of(&ipv4([(1, port), (2, 80)], 0)).0));
            assert!(seen.insert(Flow::of(&ipv6([(1, port), (2, 80)])).0));
        }
        // With the ports swapped it is another flow.
        let crossed = Flow::of(&ipv4([(1, 80), (2, 5)], 0));
        assert_ne!(crossed, Flow::of(&ipv4([(1, 5), (2, 80)], 0)));
    }

    #[test]
    fn fragments_of_a_packet_are_one_flow() {
        let first = Flow::of(&ipv4([(1, 1000), (2, 2000)], 0x2000));
        assert_eq!(first, Flow::of(&ipv4([(1, 7), (2, 9)], 185)));
    }

    #[test]
    fn flow_is_found_where_it_was_sent_last() {
        let flows = Flows::default();
        let flow = |port| Flow::of(&ipv4([(1, port), (2, 80)], 0));
        assert_eq!(flows.find(flow(1)), None);
        flows.note(flow(1), 3);
        flows.note(flow(2), 0);
        assert_eq!((flows.find(flow(1)), flows.find(flow(2))), (Some(3), Some(0)));
        flows.note(flow(1), 2);
        assert_eq!(flows.find(flow(1)), Some(2));
        assert_eq!(flows.find(flow(3)), None);
    }

    #[test]
    fn flows_that_are_not_noted_are_spread_evenly() {
        let mut pairs = [0; 4];
        for port in 0..4000 {
            pairs[Flow::of(&ipv4([(1, port), (2, 80)], 0)).spread(4)] += 1;
        }
        assert!(pairs.iter().all(|flows| (850..1150).contains(flows)), "{pairs:?}");
    }
}
