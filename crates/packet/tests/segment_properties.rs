//! Segments GSO packets of every kind, and compares with etherparse: it builds the GSO packet and each expected
//! segment, with fields changed by the rules, and it parses the segments.

use etherparse::{
    EtherType, Ethernet2Header, IpNumber, Ipv4Header, Ipv6Extensions, Ipv6Header, Ipv6RawExtHeader,
    Ipv6RoutingExtensions, NetHeaders, PacketHeaders, PayloadSlice, SingleVlanHeader, TcpHeader,
    TransportHeader, UdpHeader,
};
use packet::HEADERS_MAX;
use packet::checksum;
use packet::layers::{Ip, Transport, parse};
use packet::segment::{Gso, GsoKind, Malformed, Plan};
use proptest::prelude::*;

/// A frame as its headers.
#[derive(Debug, Clone)]
struct Packet {
    /// TPID and tag control information.
    tags: Vec<(u16, u16)>,
    net: NetHeaders,
    transport: TransportHeader,
    payload: Vec<u8>,
}

impl Packet {
    /// All of it, with lengths and checksums by etherparse.
    fn bytes(mut self) -> Vec<u8> {
        let protocol = if self.is_tcp() {
            IpNumber::TCP
        } else {
            IpNumber::UDP
        };
        let transport_len = self.transport.header_len() + self.payload.len();
        if let TransportHeader::Udp(udp) = &mut self.transport {
            udp.length = transport_len as u16;
        }
        let mut out = self.link();
        match &mut self.net {
            NetHeaders::Ipv4(ip, _) => {
                ip.protocol = protocol;
                ip.set_payload_len(transport_len).unwrap();
                ip.header_checksum = ip.calc_header_checksum();
                ip.write(&mut out).unwrap();
                self.transport.update_checksum_ipv4(ip, &self.payload).unwrap();
            }
            NetHeaders::Ipv6(ip, extensions) => {
                ip.next_header = extensions.set_next_headers(protocol);
                ip.set_payload_length(extensions.header_len() + transport_len)
                    .unwrap();
                ip.write(&mut out).unwrap();
                extensions.write(&mut out, ip.next_header).unwrap();
                self.transport.update_checksum_ipv6(ip, &self.payload).unwrap();
            }
            NetHeaders::Arp(_) => unreachable!(),
        }
        self.transport.write(&mut out).unwrap();
        out.extend(self.payload);
        out
    }

    fn link(&self) -> Vec<u8> {
        let is_v4 = matches!(self.net, NetHeaders::Ipv4(..));
        let mut types: Vec<u16> = self.tags.iter().map(|(tpid, _)| *tpid).collect();
        types.push(if is_v4 { EtherType::IPV4 } else { EtherType::IPV6 }.0);
        let ethernet = Ethernet2Header {
            source: [2; 6],
            destination: [4; 6],
            ether_type: EtherType(types[0]),
        };
        let mut out = ethernet.to_bytes().to_vec();
        for ((_, tci), next) in self.tags.iter().zip(&types[1..]) {
            let [a, b] = tci.to_be_bytes();
            let [c, d] = next.to_be_bytes();
            out.extend(SingleVlanHeader::from_bytes([a, b, c, d]).to_bytes());
        }
        out
    }

    /// The packet as a guest sends it: the checksum field holds the sum of the pseudo-header.
    fn as_gso_packet(&self) -> Vec<u8> {
        let mut bytes = self.clone().bytes();
        let layers = parse(&bytes, bytes.len() as u32).expect("a good frame");
        let len = bytes.len() as u32 - u32::from(layers.transport);
        let protocol = layers.transport_kind.protocol();
        let sum = match &self.net {
            NetHeaders::Ipv4(ip, _) => checksum::pseudo_v4(ip.source, ip.destination, protocol, len),
            NetHeaders::Ipv6(ip, _) => checksum::pseudo_v6(ip.source, ip.destination, protocol, len),
            NetHeaders::Arp(_) => unreachable!(),
        };
        let at = usize::from(layers.transport + layers.transport_kind.checksum_offset());
        bytes[at..at + 2].copy_from_slice(&sum.fold().to_be_bytes());
        bytes
    }

    /// The expected segment by the rules.
    fn segment(&self, index: usize, size: usize) -> Self {
        let mut segment = self.clone();
        let first = index == 0;
        let last = (index + 1) * size >= self.payload.len();
        segment.payload = self.payload.chunks(size).nth(index).unwrap_or_default().to_vec();
        if let NetHeaders::Ipv4(ip, _) = &mut segment.net {
            ip.identification = ip.identification.wrapping_add(index as u16);
        }
        if let TransportHeader::Tcp(tcp) = &mut segment.transport {
            tcp.sequence_number = tcp.sequence_number.wrapping_add((index * size) as u32);
            tcp.fin &= last;
            tcp.psh &= last;
            tcp.cwr &= first;
        }
        segment
    }

    fn is_tcp(&self) -> bool {
        matches!(self.transport, TransportHeader::Tcp(_))
    }

    fn kind(&self) -> GsoKind {
        match (&self.net, self.is_tcp()) {
            (_, false) => GsoKind::Udp,
            (NetHeaders::Ipv4(..), true) => GsoKind::Tcp4,
            _ => GsoKind::Tcp6,
        }
    }
}

/// Every segment of a GSO packet, checksums completed.
fn cut(frame: &[u8], gso: Gso) -> Result<Vec<Vec<u8>>, Malformed> {
    let headers = &frame[..frame.len().min(HEADERS_MAX)];
    let plan = Plan::new(headers, frame.len() as u32, gso)?;
    let cut_one = |index| {
        let payload = plan.payload(index);
        let mut segment = vec![0xaa; plan.header_len()];
        plan.write_header(index, &mut segment);
        segment.extend(&frame[payload.start as usize..payload.end as usize]);
        assert!(segment.len() as u32 <= plan.segment_bytes_max());
        checksum::complete(&mut segment, plan.checksum_at()).expect("in the header");
        segment
    };
    Ok((0..plan.segments()).map(cut_one).collect())
}

fn extension() -> impl Strategy<Value = Ipv6RawExtHeader> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 6),
        prop::collection::vec(any::<u8>(), 14)
    ]
    .prop_map(|data| Ipv6RawExtHeader::new_raw(IpNumber::UDP, &data).expect("a good length"))
}

fn ipv4() -> impl Strategy<Value = NetHeaders> {
    let fields = (
        any::<[u8; 4]>(),
        any::<[u8; 4]>(),
        any::<u16>(),
        any::<u8>(),
        any::<bool>(),
        0usize..=10,
    );
    fields.prop_map(
        |(source, destination, identification, time_to_live, dont_fragment, options)| {
            let mut ip = Ipv4Header {
                source,
                destination,
                identification,
                time_to_live,
                dont_fragment,
                ..Default::default()
            };
            ip.options = vec![1; options * 4].as_slice().try_into().expect("a good length");
            NetHeaders::Ipv4(ip, etherparse::Ipv4Extensions::default())
        },
    )
}

fn ipv6() -> impl Strategy<Value = NetHeaders> {
    let extensions = (
        prop::option::of(extension()),
        prop::option::of(extension()),
        prop::option::of((extension(), prop::option::of(extension()))),
    );
    (any::<[u8; 16]>(), any::<[u8; 16]>(), any::<u8>(), extensions).prop_map(
        |(source, destination, hop_limit, all)| {
            let ip = Ipv6Header {
                source,
                destination,
                hop_limit,
                ..Default::default()
            };
            let (hop_by_hop_options, destination_options, routing) = all;
            let routing = routing.map(|(routing, last)| Ipv6RoutingExtensions {
                routing,
                final_destination_options: last,
            });
            let extensions = Ipv6Extensions {
                hop_by_hop_options,
                destination_options,
                routing,
                fragment: None,
                auth: None,
            };
            NetHeaders::Ipv6(ip, extensions)
        },
    )
}

fn tcp() -> impl Strategy<Value = TransportHeader> {
    (
        any::<[u16; 3]>(),
        any::<[u32; 2]>(),
        any::<[bool; 8]>(),
        0usize..=10,
    )
        .prop_map(|(words, numbers, flags, options)| {
            let mut tcp = TcpHeader::new(words[0], words[1], numbers[0], words[2]);
            tcp.acknowledgment_number = numbers[1];
            [
                tcp.fin, tcp.syn, tcp.rst, tcp.psh, tcp.ack, tcp.urg, tcp.ece, tcp.cwr,
            ] = flags;
            tcp.set_options_raw(&vec![1; options * 4]).expect("a good length");
            TransportHeader::Tcp(tcp)
        })
}

fn udp() -> impl Strategy<Value = TransportHeader> {
    any::<[u16; 2]>().prop_map(|[source_port, destination_port]| {
        TransportHeader::Udp(UdpHeader {
            source_port,
            destination_port,
            length: 0,
            checksum: 0,
        })
    })
}

fn packet() -> impl Strategy<Value = Packet> {
    let tags = prop::collection::vec((prop_oneof![Just(0x8100u16), Just(0x88a8)], any::<u16>()), 0..=2);
    let payload = (0usize..12_000, any::<u8>())
        .prop_map(|(len, seed)| (0..len).map(|at| (at * 7 + at / 256) as u8 ^ seed).collect());
    (
        tags,
        prop_oneof![ipv4(), ipv6()],
        prop_oneof![tcp(), udp()],
        payload,
    )
        .prop_map(|(tags, net, transport, payload)| Packet {
            tags,
            net,
            transport,
            payload,
        })
}

/// What a receiver finds in a segment: its payload, if both checksums are right.
fn received(segment: &[u8]) -> Result<Vec<u8>, TestCaseError> {
    let parsed = PacketHeaders::from_ethernet_slice(segment)
        .map_err(|error| TestCaseError::fail(error.to_string()))?;
    let (PayloadSlice::Tcp(payload) | PayloadSlice::Udp(payload)) = parsed.payload else {
        return Err(TestCaseError::fail("neither TCP nor UDP"));
    };
    let transport = parsed.transport.expect("as the payload says");
    let mut again = transport.clone();
    match parsed.net.expect("as the payload says") {
        NetHeaders::Ipv4(ip, _) => {
            prop_assert_eq!(ip.header_checksum, ip.calc_header_checksum());
            again.update_checksum_ipv4(&ip, payload).expect("a good length");
        }
        NetHeaders::Ipv6(ip, _) => again.update_checksum_ipv6(&ip, payload).expect("a good length"),
        NetHeaders::Arp(_) => unreachable!(),
    }
    prop_assert_eq!(again, transport);
    Ok(payload.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn segments_are_what_the_rules_say(packet in packet(), size in prop_oneof![1u16..100, 100u16..10_000]) {
        prop_assume!(packet.payload.len() / usize::from(size) < 2000);
        let frame = packet.as_gso_packet();
        let segments = cut(&frame, Gso { kind: packet.kind(), ecn: false, size }).expect("a good GSO packet");
        prop_assert_eq!(segments.len(), packet.payload.len().div_ceil(size.into()).max(1));
        let mut payload = Vec::new();
        for (index, segment) in segments.iter().enumerate() {
            prop_assert_eq!(segment, &packet.segment(index, size.into()).bytes(), "segment {}", index);
            payload.extend(received(segment)?);
        }
        prop_assert_eq!(payload, packet.payload);
    }

    #[test]
    fn layers_are_those_that_etherparse_finds(packet in packet(), padding in 0usize..20) {
        let mut bytes = packet.clone().bytes();
        let end = bytes.len();
        bytes.extend(vec![0; padding]);
        let layers = parse(&bytes[..bytes.len().min(HEADERS_MAX)], bytes.len() as u32).expect("a good frame");
        let ip = 14 + 4 * packet.tags.len();
        prop_assert_eq!(usize::from(layers.ip), ip);
        prop_assert_eq!(usize::from(layers.transport), ip + packet.net.header_len());
        prop_assert_eq!(usize::from(layers.payload), end - packet.payload.len());
        prop_assert_eq!(layers.ip_len_end as usize, end);
        prop_assert_eq!(layers.version == Ip::V4, matches!(packet.net, NetHeaders::Ipv4(..)));
        prop_assert_eq!(layers.transport_kind == Transport::Tcp, packet.is_tcp());
    }

    /// Any part may be missing or overwritten: nothing panics, and a plan's payload stays within the frame.
    #[test]
    fn nothing_breaks_it(packet in packet(), changes in prop::collection::vec((0usize..160, any::<u8>()), 0..6),
        keep in prop_oneof![Just(usize::MAX), 0usize..200], size in 1u16..)
    {
        let mut frame = packet.as_gso_packet();
        for (at, byte) in changes {
            let at = at % frame.len();
            frame[at] = byte;
        }
        frame.truncate(keep);
        for kind in [GsoKind::Tcp4, GsoKind::Tcp6, GsoKind::Udp] {
            if let Ok(segments) = cut(&frame, Gso { kind, ecn: true, size }) {
                let headers = usize::from(parse(&frame, frame.len() as u32).expect("was planned").payload);
                let payload: Vec<u8> = segments.iter().flat_map(|segment| segment[headers..].to_vec()).collect();
                prop_assert_eq!(&payload, &frame[headers..]);
            }
        }
    }
}
