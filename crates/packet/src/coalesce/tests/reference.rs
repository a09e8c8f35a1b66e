//! Frames of TCP and UDP flows, and checks of what coalescing delivers of them: for the tests of this module and the
//! fuzz target `coalesce`. Frames are built and parsed by etherparse, which shares nothing with us; GSO packets are cut
//! again by [`packet::segment`].

use etherparse::{
    EtherType, Ethernet2Header, IpNumber, Ipv4Header, Ipv6FlowLabel, Ipv6Header, NetSlice, SingleVlanHeader,
    SlicedPacket, TcpHeader, TcpOptionElement, TransportSlice, UdpHeader, VlanId,
};
use packet::HEADERS_MAX;
use packet::checksum::{self, Sum};
use packet::coalesce::{Batch, Position, Rules};
use packet::layers::{Ip, Layers, Transport, parse};
use packet::segment::{GsoKind, Plan, Request};
use packet::tunnel;
use packet::verify::{self, Verdict};

/// A TCP or UDP packet in a frame.
#[derive(Debug, Clone)]
pub(super) struct Spec {
    pub(super) mac: u8,
    pub(super) vlan: Option<u16>,
    pub(super) v6: bool,
    pub(super) udp: bool,
    pub(super) ttl: u8,
    pub(super) tos: u8,
    pub(super) label: u32,
    pub(super) id: u16,
    pub(super) df: bool,
    pub(super) ports: (u16, u16),
    pub(super) seq: u32,
    pub(super) ack: u32,
    pub(super) window: u16,
    /// Of the TCP header's byte 13.
    pub(super) flags: u8,
    pub(super) stamps: Option<(u32, u32)>,
    pub(super) payload: Vec<u8>,
    pub(super) partial: bool,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            mac: 1,
            vlan: None,
            v6: false,
            udp: false,
            ttl: 64,
            tos: 0,
            label: 0,
            id: 100,
            df: true,
            ports: (1000, 2000),
            seq: 1,
            ack: 77,
            window: 500,
            flags: 1 << 4,
            stamps: Some((10, 20)),
            payload: vec![0x5a; 100],
            partial: false,
        }
    }
}

impl Spec {
    fn tcp(&self) -> TcpHeader {
        let mut tcp = TcpHeader::new(self.ports.0, self.ports.1, self.seq, self.window);
        let bit = |at: u8| self.flags & 1 << at != 0;
        (tcp.fin, tcp.syn, tcp.rst, tcp.psh) = (bit(0), bit(1), bit(2), bit(3));
        (tcp.ack, tcp.urg, tcp.ece, tcp.cwr) = (bit(4), bit(5), bit(6), bit(7));
        tcp.acknowledgment_number = self.ack;
        if let Some((now, echo)) = self.stamps {
            let options = [
                TcpOptionElement::Noop,
                TcpOptionElement::Noop,
                TcpOptionElement::Timestamp(now, echo),
            ];
            tcp.set_options(&options).expect("they fit");
        }
        tcp
    }

    fn v4(&self, len: usize) -> Ipv4Header {
        let number = if self.udp { IpNumber::UDP } else { IpNumber::TCP };
        let mut ip =
            Ipv4Header::new(len as u16, self.ttl, number, [10, 0, 0, 1], [10, 0, 0, 2]).expect("short");
        (ip.identification, ip.dont_fragment) = (self.id, self.df);
        ip
    }

    fn v6(&self, len: usize) -> Ipv6Header {
        Ipv6Header {
            traffic_class: self.tos,
            flow_label: Ipv6FlowLabel::try_new(self.label).expect("20 bits"),
            payload_length: len as u16,
            next_header: if self.udp { IpNumber::UDP } else { IpNumber::TCP },
            hop_limit: self.ttl,
            source: [0xfd; 16],
            destination: [0xfe; 16],
        }
    }

    fn transport(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        if self.udp {
            let len = (8 + self.payload.len()) as u16;
            let mut udp = UdpHeader {
                source_port: self.ports.0,
                destination_port: self.ports.1,
                length: len,
                checksum: 0,
            };
            udp.checksum = if self.v6 {
                udp.calc_checksum_ipv6(&self.v6(0), &self.payload)
            } else {
                udp.calc_checksum_ipv4(&self.v4(0), &self.payload)
            }
            .expect("short");
            bytes.extend(udp.to_bytes());
        } else {
            let mut tcp = self.tcp();
            tcp.checksum = if self.v6 {
                tcp.calc_checksum_ipv6(&self.v6(0), &self.payload)
            } else {
                tcp.calc_checksum_ipv4(&self.v4(0), &self.payload)
            }
            .expect("short");
            bytes.extend(tcp.to_bytes());
        }
        bytes
    }

    pub(super) fn frame(&self) -> Vec<u8> {
        let ether_type = if self.v6 { EtherType::IPV6 } else { EtherType::IPV4 };
        let outer = self.vlan.map_or(ether_type, |_| EtherType::VLAN_TAGGED_FRAME);
        let ethernet = Ethernet2Header {
            source: [2, 0, 0, 0, 0, self.mac],
            destination: [2; 6],
            ether_type: outer,
        };
        let mut frame = ethernet.to_bytes().to_vec();
        if let Some(vlan) = self.vlan {
            let tag = SingleVlanHeader {
                vlan_id: VlanId::try_new(vlan).expect("12 bits"),
                ether_type,
                ..Default::default()
            };
            frame.extend(tag.to_bytes());
        }
        let transport = self.transport();
        let len = transport.len() + self.payload.len();
        if self.v6 {
            frame.extend(self.v6(len).to_bytes());
        } else {
            let start = frame.len();
            frame.extend(self.v4(len).to_bytes());
            frame[start + 1] = self.tos;
            mend_ip(&mut frame, start);
        }
        frame.extend(transport);
        frame.extend(&self.payload);
        if self.partial {
            make_partial(&mut frame);
        }
        frame
    }
}

/// Writes an IPv4 header's checksum.
pub(super) fn mend_ip(frame: &mut [u8], ip: usize) {
    let end = ip + usize::from(frame[ip] & 15) * 4;
    frame[ip + 10..ip + 12].fill(0);
    let sum = Sum::of_portable(&frame[ip..end]).complement();
    frame[ip + 10..ip + 12].copy_from_slice(&sum.to_be_bytes());
}

/// Leaves the pseudo-header's sum, as a local sender does.
fn make_partial(frame: &mut [u8]) {
    if let Some(layers) = parse(frame, frame.len() as u32) {
        let partial = verify::pseudo(frame, &layers).fold();
        let at = usize::from(layers.transport + layers.transport_kind.checksum_offset());
        frame[at..at + 2].copy_from_slice(&partial.to_be_bytes());
    }
}

/// Writes the right transport checksum.
pub(super) fn complete(frame: &mut [u8]) {
    make_partial(frame);
    let layers = parse(frame, frame.len() as u32).expect("TCP or UDP");
    let end = layers.ip_len_end as usize;
    checksum::complete(&mut frame[..end], layers.checksum_at()).expect("inside");
}

/// Writes the checksums of the IPv4 header and of the transport, the latter partial or complete.
pub(super) fn write_sums(frame: &mut [u8], partial: bool) {
    let Some(layers) = parse(frame, frame.len() as u32) else {
        return;
    };
    if layers.version == Ip::V4 {
        mend_ip(frame, layers.ip.into());
    }
    if partial {
        make_partial(frame);
    } else {
        complete(frame);
    }
}

pub(super) fn judge(frame: &[u8], layers: &Layers) -> Verdict {
    if let Some((inner, _)) = tunnel::unfinished(frame, layers) {
        assert!(inner.at.field() + 2 <= inner.end as usize && inner.end as usize <= frame.len());
    }
    let transport = &frame[usize::from(layers.transport)..layers.ip_len_end as usize];
    verify::verify(frame, layers, true, || Sum::of(transport))
}

pub(super) fn batch_of(rules: Rules, frames: &[Vec<u8>]) -> Batch {
    let mut batch = Batch::new(rules);
    for frame in frames {
        let headers = &frame[..frame.len().min(HEADERS_MAX)];
        assert!(batch.add(headers, frame.len() as u32, |layers| judge(frame, layers)));
    }
    batch
}

/// The fields of a virtio-net header without `num_buffers` (VirtIO 1.3, 5.1.6; include/uapi/linux/virtio_net.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NetHeader {
    pub(super) flags: u8,
    pub(super) gso_type: u8,
    pub(super) hdr_len: u16,
    pub(super) gso_size: u16,
    pub(super) csum_start: u16,
    pub(super) csum_offset: u16,
}

impl From<[u8; 10]> for NetHeader {
    fn from(bytes: [u8; 10]) -> Self {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Self {
            flags: bytes[0],
            gso_type: bytes[1],
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
        }
    }
}

/// What is delivered: header, bytes, and the numbers of the frames in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Delivered {
    pub(super) header: NetHeader,
    request: Request,
    pub(super) frame: Vec<u8>,
    pub(super) members: Vec<usize>,
}

pub(super) fn deliver(batch: &Batch, frames: &[Vec<u8>], room: impl Fn(usize) -> u32) -> Vec<Delivered> {
    let (mut position, mut delivered) = (Position::default(), Vec::new());
    while let Some(run) = batch.run(&position, room(delivered.len())) {
        let mut first = frames[run.first()].clone();
        batch.rewrite(&run, &mut first);
        let (mut bytes, mut members) = (Vec::new(), Vec::new());
        for (number, range) in batch.members(&run) {
            let frame = if number == run.first() {
                &first
            } else {
                &frames[number]
            };
            bytes.extend(&frame[range.start as usize..range.end as usize]);
            members.push(number);
        }
        assert_eq!((bytes.len(), members.len()), (run.bytes() as usize, run.frames()));
        let header = batch.header(&run);
        delivered.push(Delivered {
            header: header.into(),
            request: Request::from_header(&header).expect("a good header"),
            frame: bytes,
            members,
        });
        batch.advance(&mut position, &run);
    }
    delivered
}

/// Checks all that was delivered of `frames`: each once, those of a flow in order, a frame alone unchanged, a GSO packet
/// no longer than the room that it had.
pub(super) fn check(delivered: &[Delivered], frames: &[Vec<u8>], room: impl Fn(usize) -> u32) {
    check_order(delivered, frames);
    for (at, unit) in delivered.iter().enumerate() {
        if let [number] = unit.members[..] {
            let NetHeader {
                gso_type,
                hdr_len,
                gso_size,
                ..
            } = unit.header;
            assert_eq!(
                (&unit.frame, gso_type, hdr_len, gso_size),
                (&frames[number], 0, 0, 0)
            );
        } else {
            assert!(unit.frame.len() <= room(at) as usize);
            check_gso_packet(unit, frames);
        }
    }
}

/// A frame that is not parsed as TCP or UDP overtakes no other, and is not overtaken.
fn check_order(delivered: &[Delivered], frames: &[Vec<u8>]) {
    let mut order: Vec<_> = delivered.iter().flat_map(|unit| unit.members.clone()).collect();
    let flows: Vec<_> = frames.iter().map(|frame| flow_of(frame)).collect();
    for (at, &number) in order.iter().enumerate() {
        for &later in &order[at..] {
            let apart = flows[number].is_some() && flows[later].is_some() && flows[number] != flows[later];
            assert!(number <= later || apart, "frame {later} overtook {number}");
        }
    }
    order.sort_unstable();
    assert_eq!(order, (0..frames.len()).collect::<Vec<_>>());
}

/// Addresses, protocol and ports of a frame that is parsed as TCP or UDP.
fn flow_of(frame: &[u8]) -> Option<Vec<u8>> {
    let layers = parse(frame, frame.len() as u32)?;
    let (ip, transport) = (usize::from(layers.ip), usize::from(layers.transport));
    let addresses = match layers.version {
        Ip::V4 => &frame[ip + 12..ip + 20],
        Ip::V6 => &frame[ip + 8..ip + 40],
    };
    let protocol = [layers.transport_kind.protocol()];
    let flow = [addresses, &protocol, &frame[transport..transport + 4]].concat();
    if let Some(same) = flow_by_etherparse(frame) {
        assert_eq!(flow, same);
    }
    Some(flow)
}

fn flow_by_etherparse(frame: &[u8]) -> Option<Vec<u8>> {
    let sliced = SlicedPacket::from_ethernet(frame).ok()?;
    let addresses = match sliced.net? {
        NetSlice::Ipv4(ip) => [ip.header().source(), ip.header().destination()].concat(),
        NetSlice::Ipv6(ip) => [ip.header().source(), ip.header().destination()].concat(),
        _ => return None,
    };
    let (protocol, ports) = match sliced.transport? {
        TransportSlice::Tcp(tcp) => (6, [tcp.source_port(), tcp.destination_port()]),
        TransportSlice::Udp(udp) => (17, [udp.source_port(), udp.destination_port()]),
        _ => return None,
    };
    Some([&addresses[..], &[protocol], &ports.map(u16::to_be_bytes).concat()].concat())
}

/// Checks a GSO packet: etherparse must parse it, and segmenting it must return the frames that it was made of, except
/// for what merging loses: timestamps, fixed ids, the positions of PSH and FIN.
pub(super) fn check_gso_packet(delivered: &Delivered, frames: &[Vec<u8>]) {
    let Delivered {
        header,
        request,
        frame,
        members,
    } = delivered;
    let sliced = SlicedPacket::from_ethernet(frame).expect("a good packet");
    let layers = parse(frame, frame.len() as u32).expect("TCP or UDP");
    assert_eq!(layers.ip_len_end as usize, frame.len());
    assert_eq!((header.flags, header.hdr_len), (1, layers.payload));
    let mut partial = frame.clone();
    make_partial(&mut partial);
    assert_eq!(frame, &partial);
    let gso = request.gso.expect("a GSO packet");
    let kind = match (header.gso_type & 0x7f, sliced.transport) {
        (1, Some(TransportSlice::Tcp(_))) => GsoKind::Tcp4,
        (4, Some(TransportSlice::Tcp(_))) => GsoKind::Tcp6,
        (5, Some(TransportSlice::Udp(_))) => GsoKind::Udp,
        other => panic!("{other:?}"),
    };
    assert_eq!((gso.kind, gso.size), (kind, header.gso_size));
    if let Some(NetSlice::Ipv4(ip)) = &sliced.net {
        assert_eq!(
            ip.header().to_header().calc_header_checksum(),
            ip.header().header_checksum()
        );
    }
    assert_eq!(
        gso.ecn,
        kind != GsoKind::Udp && frame[usize::from(layers.transport) + 13] & 0x80 != 0
    );
    let plan = Plan::new(frame, frame.len() as u32, gso).expect("a good request");
    assert_eq!(
        [layers.checksum_at(), plan.checksum_at()].map(Some),
        [request.csum; 2]
    );
    assert_eq!(plan.segments() as usize, members.len());
    for (index, &member) in (0..).zip(members) {
        let mut segment = vec![0; plan.header_len()];
        plan.write_header(index, &mut segment);
        let payload = plan.payload(index);
        segment.extend(&frame[payload.start as usize..payload.end as usize]);
        assert_eq!(
            given_up(&segment, &layers),
            given_up(&frames[member], &layers),
            "frame {member}"
        );
    }
}

/// A frame without what merging loses.
fn given_up(frame: &[u8], layers: &Layers) -> Vec<u8> {
    let mut frame = frame.to_vec();
    let (ip, transport) = (usize::from(layers.ip), usize::from(layers.transport));
    if layers.version == Ip::V4 && frame[ip + 6] & 0x40 != 0 {
        frame[ip + 4..ip + 6].fill(0);
    }
    if layers.transport_kind == Transport::Tcp {
        frame[transport + 13] &= !9;
        blank_stamps(&mut frame[transport + 20..usize::from(layers.payload)]);
    }
    write_sums(&mut frame, false);
    frame
}

fn blank_stamps(options: &mut [u8]) {
    let mut at = 0;
    while let Some(&kind) = options.get(at) {
        let len = usize::from(*options.get(at + 1).unwrap_or(&0));
        match kind {
            0 => return,
            1 => at += 1,
            8 if len == 10 && at + 10 <= options.len() => return options[at + 2..at + 10].fill(0),
            _ => at += len.max(2),
        }
    }
}
