//! Segments of ours are the kernel's: a GSO packet goes to both, and what the kernel's software segmentation sends is
//! compared byte for byte.
//!
//! The GSO packet enters the near end of a veth pair by a packet socket, with its virtio-net header. The near end has
//! neither checksum nor segmentation offload, so the kernel cuts the GSO packet and completes the checksums before it
//! leaves; it is read from the far end.

use std::time::Duration;

use packet::HEADERS_MAX;
use packet::checksum;
use packet::segment::{Plan, Request};
use rstest::rstest;
use testkit::gso_packet::{ACK, CWR, ECE, FIN, GsoPacket, Ip, PSH, Transport};
use testkit::{PacketPort, VethPair, frame, require};

/// Payload bytes of a segment: of an MTU of 1500 with and without timestamps, the classic one, less than a header, odd,
/// jumbo.
const SIZES: [u16; 7] = [1448, 1460, 536, 48, 1001, 8000, 7];
/// Payload bytes of a GSO packet.
const LENGTHS: [usize; 4] = [2896, 10_000, 40_001, 65_000];
/// Most segments that are on their way at once: net.core.netdev_max_backlog is 1000.
const MOST: usize = 900;
/// Most segments of UDP that the kernel makes (UDP_MAX_SEGMENTS, `linux/udp.h`).
const MOST_UDP: usize = 128;
const ARRIVAL_LIMIT: Duration = testkit::wait::SOON;

struct Kernel {
    _pair: VethPair,
    near: PacketPort,
    far: PacketPort,
}

impl Kernel {
    fn new() -> Self {
        let pair = VethPair::with(1, 9000);
        pair.near.run(
            "ethtool",
            &[
                "-K",
                VethPair::NIC,
                "tx",
                "off",
                "tso",
                "off",
                "tx-udp-segmentation",
                "off",
            ],
        );
        pair.await_near();
        let near = PacketPort::open_with_header(&pair.near, VethPair::NIC);
        let far = PacketPort::open(&pair.far, VethPair::WIRE);
        Self {
            _pair: pair,
            near,
            far,
        }
    }

    fn assert_same_segments(&self, gso_packet: &GsoPacket, size: u16) {
        let bytes = gso_packet.bytes();
        let request = gso_packet.request(size);
        let ours = cut(&bytes, &request);
        self.near.send(&[&request[..], &bytes].concat());
        for (index, ours) in ours.iter().enumerate() {
            let what = || format!("segment {index} of {size} bytes of {gso_packet:?}");
            let kernel = self
                .far
                .receive(ARRIVAL_LIMIT)
                .unwrap_or_else(|| panic!("nothing came for {}", what()));
            if &kernel != ours {
                eprintln!("{}", what());
                frame::assert_same(ours, &kernel);
            }
        }
        let more = self.far.receive(Duration::ZERO);
        assert_eq!(
            more,
            None,
            "the kernel makes more than {} of {gso_packet:?}",
            ours.len()
        );
    }

    fn assert_same_for_all_sizes(&self, gso_packet: &GsoPacket) {
        let most = if matches!(gso_packet.transport, Transport::Udp) {
            MOST_UDP
        } else {
            MOST
        };
        for payload_len in LENGTHS {
            for size in SIZES
                .into_iter()
                .filter(|&size| payload_len.div_ceil(size.into()) <= most)
            {
                let gso_packet = GsoPacket {
                    payload_len,
                    ..gso_packet.clone()
                };
                self.assert_same_segments(&gso_packet, size);
            }
        }
    }
}

/// The segments of a GSO packet.
pub(crate) fn cut(bytes: &[u8], request: &[u8; 10]) -> Vec<Vec<u8>> {
    let request = Request::from_header(request).expect("a good request");
    let headers = &bytes[..bytes.len().min(HEADERS_MAX)];
    let plan =
        Plan::new(headers, bytes.len() as u32, request.gso.expect("asked for")).expect("a good GSO packet");
    assert_eq!(request.csum, Some(plan.checksum_at()));
    let cut_one = |index| {
        let payload = plan.payload(index);
        let mut segment = vec![0; plan.header_len()];
        plan.write_header(index, &mut segment);
        segment.extend(&bytes[payload.start as usize..payload.end as usize]);
        checksum::complete(&mut segment, plan.checksum_at()).expect("in the header");
        segment
    };
    (0..plan.segments()).map(cut_one).collect()
}

fn networks() -> [Ip; 5] {
    let (hop_by_hop, destination, routing) = (0, 60, 43);
    [
        Ip::V4(0),
        Ip::V4(3),
        Ip::V6(vec![]),
        Ip::V6(vec![destination]),
        Ip::V6(vec![hop_by_hop, routing, destination]),
    ]
}

#[rstest]
#[case::tcp(GsoPacket::tcp)]
#[case::udp(GsoPacket::udp)]
fn segments_are_the_kernels(#[case] packet: fn(Ip, usize) -> GsoPacket) {
    require!(Root);
    let kernel = Kernel::new();
    for ip in networks() {
        kernel.assert_same_for_all_sizes(&packet(ip, 0));
    }
}

#[test]
fn tagged_segments_are_the_kernels() {
    require!(Root);
    let kernel = Kernel::new();
    for ip in [Ip::V4(0), Ip::V6(vec![])] {
        for tags in [1, 2] {
            for gso_packet in [
                GsoPacket::tcp(ip.clone(), 20_000),
                GsoPacket::udp(ip.clone(), 20_000),
            ] {
                kernel.assert_same_segments(&GsoPacket { tags, ..gso_packet }, 1400);
            }
        }
    }
}

/// FIN and PSH on the last one only, CWR on the first only, with and without `GSO_ECN`; and every other flag on all.
#[test]
fn flags_are_where_the_kernel_has_them() {
    require!(Root);
    let kernel = Kernel::new();
    for ip in [Ip::V4(0), Ip::V6(vec![])] {
        for flags in 0..=u8::MAX {
            for options in [0, 3, 10] {
                let transport = Transport::Tcp(flags, options);
                let gso_packet = GsoPacket {
                    transport,
                    ..GsoPacket::tcp(ip.clone(), 4000)
                };
                kernel.assert_same_segments(&gso_packet, 1448);
            }
        }
        let transport = Transport::Tcp(ACK | FIN | PSH | ECE | CWR, 0);
        kernel.assert_same_for_all_sizes(&GsoPacket {
            transport,
            ..GsoPacket::tcp(ip, 0)
        });
    }
}

/// What is no longer than one segment leaves as it is, its checksum completed. (Where the payload alone fits and the
/// payload with options does not, the kernel takes it for a GSO packet, and then refuses to cut it:
/// `linux/virtio_net.h` virtio_net_hdr_to_skb.)
#[test]
fn short_gso_packets_are_one_segment() {
    require!(Root);
    let kernel = Kernel::new();
    for ip in [Ip::V4(0), Ip::V6(vec![])] {
        for payload_len in [1, 100, 1436] {
            kernel.assert_same_segments(&GsoPacket::tcp(ip.clone(), payload_len), 1448);
            kernel.assert_same_segments(&GsoPacket::udp(ip.clone(), payload_len), 1448);
        }
    }
}
