//! Frames are built by etherparse, with right checksums; then the inner one is made partial, as a Linux stack leaves it.

use std::ops::Range;

use etherparse::{PacketBuilder, PacketBuilderStep, UdpHeader};
use proptest::prelude::*;

use super::*;
use crate::checksum;

/// The parameters of a frame.
#[derive(Debug, Clone, Copy)]
struct Spec {
    v6: [bool; 2],
    tcp: bool,
    tagged: [bool; 2],
    port: u16,
    /// Words of options, of Geneve.
    options: u8,
    /// Geneve carries an IP packet.
    bare: bool,
    outer_sum: bool,
    payload: usize,
}

const PLAIN: Spec = Spec {
    v6: [false; 2],
    tcp: true,
    tagged: [false; 2],
    port: 4789,
    options: 0,
    bare: false,
    outer_sum: true,
    payload: 1000,
};

fn ip(v6: bool, tagged: bool, hosts: [u8; 2]) -> PacketBuilderStep<etherparse::IpHeaders> {
    let ethernet = PacketBuilder::ethernet2([2; 6], [4; 6]);
    let [from, to] = hosts;
    match (v6, tagged) {
        (false, false) => ethernet.ipv4([10, 0, 0, from], [10, 0, 0, to], 64),
        (true, false) => ethernet.ipv6([from; 16], [to; 16], 64),
        (v6, true) => {
            let tagged = ethernet.single_vlan(etherparse::VlanId::try_new(7).expect("a VLAN"));
            match v6 {
                false => tagged.ipv4([10, 0, 0, from], [10, 0, 0, to], 64),
                true => tagged.ipv6([from; 16], [to; 16], 64),
            }
        }
    }
}

impl Spec {
    /// The frame with both checksums right, and where in it the inner frame is.
    fn whole(&self) -> (Vec<u8>, Range<usize>) {
        let payload: Vec<u8> = (0..self.payload).map(|at| (at * 7) as u8).collect();
        let mut inner = Vec::new();
        let step = ip(self.v6[1], self.tagged[1], [3, 4]);
        match self.tcp {
            true => step.tcp(80, 5000, 1, 64).write(&mut inner, &payload),
            false => step.udp(80, 5000).write(&mut inner, &payload),
        }
        .expect("memory");
        let ethertype = u16::from_be_bytes([inner[12], inner[13]]);
        if self.port == 6081 && self.bare {
            inner.drain(..14);
        }
        let mut tunnelled = match self.port {
            6081 => {
                let kind = if self.bare {
                    ethertype
                } else {
                    crate::ethertype::ETHERNET
                };
                let mut header = vec![self.options, 0];
                header.extend(kind.to_be_bytes());
                header.extend([0, 0, 42, 0]);
                header.extend(vec![0xc5; usize::from(self.options) * 4]);
                header
            }
            _ => vec![VXLAN_HAS_VNI, 0, 0, 0, 0, 0, 42, 0],
        };
        tunnelled.extend(&inner);
        let mut frame = Vec::new();
        let outer = ip(self.v6[0], self.tagged[0], [1, 2]).udp(40_000, self.port);
        outer.write(&mut frame, &tunnelled).expect("memory");
        if !self.outer_sum {
            let udp = frame.len() - tunnelled.len() - UdpHeader::LEN;
            frame[udp + 6..udp + 8].fill(0);
        }
        let inner = frame.len() - inner.len()..frame.len();
        (frame, inner)
    }

    /// The same with the inner checksum as a stack leaves it.
    fn partial(&self) -> Vec<u8> {
        let (mut frame, inner) = self.whole();
        self.make_partial(&mut frame[inner]);
        frame
    }

    fn make_partial(&self, inner: &mut [u8]) {
        let layers = self.parse_inner(inner);
        let at = layers.checksum_at().field();
        let sum = verify::pseudo(inner, &layers).fold();
        inner[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    }

    fn parse_inner(&self, inner: &[u8]) -> Layers {
        let len = inner.len() as u32;
        match self.port == 6081 && self.bare {
            true => layers::parse_ip(inner, len, 0, if self.v6[1] { 0x86dd } else { 0x0800 }),
            false => layers::parse(inner, len),
        }
        .expect("TCP or UDP")
    }
}

fn look(frame: &[u8]) -> Option<(Unfinished, Verdict)> {
    let outer = layers::parse(frame, frame.len() as u32).expect("UDP");
    let whole = unfinished(frame, &outer);
    let known = &frame[..frame.len().min(TUNNEL_HEADERS_MAX)];
    assert_eq!(unfinished(known, &outer), whole, "so many bytes are enough");
    whole
}

/// Completes the partial checksum, if one is found.
fn complete(frame: &mut [u8]) -> Option<Verdict> {
    let (found, verdict) = look(frame)?;
    checksum::complete(&mut frame[..found.end as usize], found.at).expect("inside");
    Some(verdict)
}

fn spec() -> impl Strategy<Value = Spec> {
    let port = prop_oneof![Just(4789), Just(8472), Just(6081)];
    let flags = any::<[bool; 7]>();
    (flags, port, 0u8..64, 0usize..1400).prop_map(|(flags, port, options, payload)| {
        let [outer_v6, inner_v6, tcp, outer_tag, inner_tag, bare, outer_sum] = flags;
        Spec {
            v6: [outer_v6, inner_v6],
            tcp,
            tagged: [outer_tag, inner_tag && !(port == 6081 && bare)],
            port,
            options,
            bare,
            outer_sum,
            payload,
        }
    })
}

proptest! {
    /// The frame is then as it was before the stack left the checksum out, and its outer checksum is right.
    #[test]
    fn unfinished_checksum_is_found_and_completed(spec in spec(), padding in 0usize..8) {
        let mut frame = spec.partial();
        let whole = spec.whole().0;
        // Padding after the outer packet, as in a short frame.
        frame.extend(vec![0xa5; padding]);
        let wanted = if spec.outer_sum { Verdict::Valid } else { Verdict::Unknown };
        prop_assert_eq!(complete(&mut frame), Some(wanted), "{:?}", spec);
        prop_assert_eq!(&frame[..whole.len()], &whole[..]);
    }

    #[test]
    fn finished_checksum_is_left_alone(spec in spec()) {
        let whole = spec.whole().0;
        let mut frame = whole.clone();
        // One valid checksum in 65,536 looks partial; completing it does not change it.
        let _ = complete(&mut frame);
        prop_assert_eq!(frame, whole);
    }

    /// A change of one word is seen by the outer checksum, wherever the headers have it.
    #[test]
    fn frame_whose_outer_checksum_is_wrong_is_left_alone(spec in spec(), at in any::<prop::sample::Index>(), by in 1u8..) {
        let spec = Spec { outer_sum: true, ..spec };
        let mut frame = spec.partial();
        let outer = layers::parse(&frame, frame.len() as u32).expect("UDP");
        let (found, _) = look(&frame).expect("unfinished");
        let udp = usize::from(outer.transport);
        // Neither the length, nor the outer checksum to "none"; the pseudo-header of the inner one is no matter.
        let from = udp + 8;
        let at = from + at.index(usize::from(found.at.start) - from);
        frame[at] ^= by;
        if let Some((other, _)) = look(&frame) {
            prop_assert_ne!(other, found, "{} in {:?}", at - udp, spec);
        }
    }

    #[test]
    fn no_change_of_a_frame_leads_out_of_it(
        spec in spec(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut frame = spec.partial();
        for (at, byte) in changes {
            let at = at.index(frame.len().min(300));
            frame[at] = byte;
        }
        let outer = layers::parse(&frame, frame.len() as u32);
        for known in [frame.len(), cut.index(frame.len())] {
            if let Some(outer) = outer.filter(|outer| usize::from(outer.payload) <= known)
                && let Some((found, _)) = unfinished(&frame[..known], &outer)
            {
                prop_assert!(found.end as usize <= frame.len());
                prop_assert!(found.at.field() + 2 <= found.end as usize);
            }
        }
    }
}

#[test]
fn other_frames_are_not_looked_into() {
    for (what, spec, at, bytes) in [
        ("another port", PLAIN, 36, &[0x12, 0xb6][..]),
        ("VXLAN without an identifier", PLAIN, 42, &[0]),
        (
            "another version of Geneve",
            Spec { port: 6081, ..PLAIN },
            42,
            &[0x40],
        ),
        (
            "Geneve with something else",
            Spec { port: 6081, ..PLAIN },
            44,
            &[0x08, 0x06],
        ),
        ("a length that is not the packet's", PLAIN, 38, &[0, 60]),
        ("no IP inside", PLAIN, 62, &[0x08, 0x06]),
        ("a fragment inside", PLAIN, 70, &[0x20]),
        ("an inner packet that is longer", PLAIN, 66, &[0xff, 0xff]),
    ] {
        let mut frame = Spec {
            outer_sum: false,
            ..spec
        }
        .partial();
        assert!(look(&frame).is_some(), "{what}: before");
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        assert_eq!(look(&frame), None, "{what}");
    }
}

#[test]
fn padding_inside_the_tunnel_is_left_alone() {
    let mut frame = Spec {
        outer_sum: false,
        ..PLAIN
    }
    .partial();
    frame.extend([0; 6]);
    for at in [16, 38] {
        let len = u16::from_be_bytes([frame[at], frame[at + 1]]) + 6;
        frame[at..at + 2].copy_from_slice(&len.to_be_bytes());
    }
    assert_eq!(look(&frame), None);
}

#[test]
fn bytes_that_are_looked_at_are_bounded() {
    // Headers, the longest options of Geneve, headers.
    assert_eq!(TUNNEL_HEADERS_MAX, 256 + (8 + 252) + 256);
}
