//! The headers are compared with those that etherparse builds.

use std::net::IpAddr;

use etherparse::{EtherType, Ethernet2Header, IpNumber, Ipv4Header, Ipv6Header, SingleVlanHeader, UdpHeader};
use proptest::prelude::*;

use super::*;
use crate::ip::{Fragment, Ipv4};
use crate::layers;
use crate::segment::{Gso, GsoKind, Plan, Tunnel};

const MACS: (Mac, Mac) = ([2, 0, 0, 0, 9, 1], [2, 0, 0, 0, 9, 2]);

fn addresses(v6: bool) -> (IpAddr, IpAddr) {
    let [local, remote] = match v6 {
        false => ["10.9.0.1", "10.9.0.2"],
        true => ["fd00::1", "fd00::2"],
    }
    .map(|text| text.parse().expect("an address"));
    (local, remote)
}

fn outer(v6: bool) -> Outer {
    Outer::new(&ends(v6)).expect("one family")
}

/// Of VXLAN, without a tag.
fn ends(v6: bool) -> Endpoints {
    let (local, remote) = addresses(v6);
    Endpoints {
        to: MACS.0,
        from: MACS.1,
        vlan: 0,
        local,
        remote,
        ttl: 64,
        is_geneve: false,
        port: 4789,
        vni: 0x12_3456,
    }
}

/// A frame of that type, behind these tags, whose payload begins with these bytes.
fn inner(tags: &[u8], ethertype: u16, payload: &[u8]) -> Vec<u8> {
    [&[4; 12][..], tags, &ethertype.to_be_bytes(), payload].concat()
}

/// The headers as etherparse builds them.
fn expected(ends: &Endpoints, ecn: u8, len: u16, flow: u16, id: u16) -> Vec<u8> {
    let mut bytes = Vec::new();
    let ether_type = if ends.local.is_ipv6() {
        EtherType::IPV6
    } else {
        EtherType::IPV4
    };
    let tag = (ends.vlan != 0).then(|| SingleVlanHeader {
        vlan_id: ends.vlan.try_into().expect("12 bits"),
        ether_type,
        ..SingleVlanHeader::default()
    });
    let ethernet = Ethernet2Header {
        destination: MACS.0,
        source: MACS.1,
        ether_type: tag.as_ref().map_or(ether_type, |_| EtherType::VLAN_TAGGED_FRAME),
    };
    ethernet.write(&mut bytes).expect("memory");
    tag.iter().for_each(|tag| tag.write(&mut bytes).expect("memory"));
    let udp = UdpHeader {
        source_port: 49_152 + flow,
        destination_port: ends.port,
        length: len + 16,
        checksum: 0,
    };
    match (ends.local, ends.remote) {
        (IpAddr::V4(local), IpAddr::V4(remote)) => {
            let octets = (local.octets(), remote.octets());
            let mut ip = Ipv4Header::new(len + 16, 64, IpNumber::UDP, octets.0, octets.1).expect("short");
            (ip.identification, ip.dont_fragment) = (id, false);
            ip.ecn = ecn.try_into().expect("two bits");
            ip.header_checksum = ip.calc_header_checksum();
            ip.write(&mut bytes).expect("memory");
        }
        (IpAddr::V6(local), IpAddr::V6(remote)) => {
            let ip = Ipv6Header {
                traffic_class: ecn,
                payload_length: len + 16,
                next_header: IpNumber::UDP,
                hop_limit: 64,
                source: local.octets(),
                destination: remote.octets(),
                ..Ipv6Header::default()
            };
            ip.write(&mut bytes).expect("memory");
        }
        _ => unreachable!("one family"),
    }
    udp.write(&mut bytes).expect("memory");
    let tunnel = if ends.is_geneve {
        [0, 0, 0x65, 0x58]
    } else {
        [8, 0, 0, 0]
    };
    bytes.extend(tunnel);
    bytes.extend([0x12, 0x34, 0x56, 0]);
    bytes
}

proptest! {
    #[test]
    fn headers_are_those_of_another_implementation(
        (v6, inner_v6, ecn) in (any::<bool>(), any::<bool>(), 0u8..4),
        vlan in prop_oneof![Just(0u16), 1u16..4095],
        is_geneve: bool,
        len in 14u16..9000,
        flow in 0u16..1 << 14,
        id in any::<u16>(),
    ) {
        let frame = match inner_v6 {
            false => inner(&[], IPV4, &[0x45, 0xfc | ecn]),
            true => inner(&[], IPV6, &[0x6f, 0xcf | ecn << 4]),
        };
        let ends = Endpoints { vlan, is_geneve, ..ends(v6) };
        let outer = Outer::new(&ends).expect("one family");
        let headers = outer.headers(&frame, len, flow, id);
        // A mark of congestion stays inside.
        let marked = if ecn == 3 { 2 } else { ecn };
        prop_assert_eq!(headers.as_ref(), expected(&ends, marked, len, flow, id));
        prop_assert_eq!(headers.as_ref().len(), outer.len());
        prop_assert!(OUTER_LENS.contains(&(outer.len() as u64)));
    }

    #[test]
    fn no_bytes_and_no_length_do_harm(frame in prop::collection::vec(any::<u8>(), 0..80), len: u16, flow: u16) {
        for v6 in [false, true] {
            let _ = outer(v6).headers(&frame, len, flow, 0);
        }
    }
}

#[test]
fn our_own_readers_find_a_right_packet_with_that_frame_inside() {
    let frame = inner(&[], IPV4, &[0; 46]);
    for (is_geneve, port) in [(false, 4789), (true, 6081)] {
        let ends = Endpoints {
            is_geneve,
            port,
            ..ends(false)
        };
        let outer = Outer::new(&ends).expect("one family");
        let whole = [outer.headers(&frame, frame.len() as u16, 5, 6).as_ref(), &frame].concat();
        let ip = Ipv4::at(&whole, HEADER_BYTES).expect("IPv4");
        assert_eq!((ip.span.end, ip.upper.fragment), (whole.len(), Fragment::None));
        let sum = Sum::of(&whole[HEADER_BYTES..ip.span.payload]).fold();
        assert_eq!(sum, 0xffff, "its checksum");
        let layers = layers::parse(&whole, whole.len() as u32).expect("UDP");
        assert!(super::super::is_tunnel(&whole, &layers));
        let read = if is_geneve {
            super::super::geneve
        } else {
            super::super::vxlan
        };
        let payload = read(&whole, layers.payload.into()).expect("a tunnel");
        assert_eq!((payload.at, payload.ethertype), (outer.len(), ETHERNET));
    }
}

#[test]
fn segments_have_the_headers_of_their_tunnel_before_their_own() {
    // IPv4 and TCP, 3000 bytes of payload.
    let mut packet = inner(&[], IPV4, &[0; 40 + 3000]);
    (packet[14], packet[23], packet[46]) = (0x45, protocol::TCP, 0x50);
    put16(&mut packet, 16, 3040);
    let (kind, ecn, size) = (GsoKind::Tcp4, false, 1400);
    let plan = Plan::new(&packet, packet.len() as u32, Gso { kind, ecn, size }).expect("a GSO packet");
    let (outer, flow, id) = (outer(false), 5, 0xffff);
    let before = outer.len();
    let in_tunnel = plan.clone().in_tunnel(Tunnel {
        outer: outer.clone(),
        flow,
        id,
    });
    assert_eq!((plan.outer_len(), in_tunnel.outer_len()), (0, before));
    assert_eq!(
        usize::from(in_tunnel.checksum_at().start),
        usize::from(plan.checksum_at().start) + before
    );
    for (index, payload_bytes) in [(0, 1400), (2, 200)] {
        let (mut own, mut all) = ([0; 54], vec![0; in_tunnel.header_len()]);
        plan.write_header(index, &mut own);
        in_tunnel.write_header(index, &mut all);
        let headers = outer.headers(&own, 54 + payload_bytes, flow, id.wrapping_add(index as u16));
        assert_eq!(all, [headers.as_ref(), &own].concat(), "{index}");
    }
}

#[test]
fn ecn_bits_are_those_of_the_packet_inside_but_congestion() {
    let vlan = [0x81, 0x00, 0x00, 0x07];
    let ecn = |frame: &[u8]| outer(false).headers(frame, 60, 0, 0).as_ref()[HEADER_BYTES + 1];
    assert_eq!(ecn(&inner(&vlan, IPV4, &[0x45, 0x01])), 1);
    assert_eq!(ecn(&inner(&[vlan, vlan].concat(), IPV6, &[0x60, 0x10])), 1);
    assert_eq!(ecn(&inner(&[], 0x0806, &[0xff; 28])), 0, "ARP");
    assert_eq!(ecn(&inner(&[], IPV4, &[0x45])), 0, "it ends before");
}

#[test]
fn addresses_are_of_one_family_and_a_vni_has_24_bits() {
    let with = |v6, change: fn(&mut Endpoints)| {
        let mut ends = ends(v6);
        change(&mut ends);
        Outer::new(&ends)
    };
    assert!(with(false, |ends| ends.remote = addresses(true).1).is_none());
    assert!(with(false, |ends| ends.vni = 1 << 24).is_none());
    assert!(with(true, |ends| ends.vni = (1 << 24) - 1).is_some());
}
