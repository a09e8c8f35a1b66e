//! Frames are built and taken apart by etherparse, which shares nothing with us; GSO packets are cut again by
//! [`crate::segment`].

mod properties;
mod rules;

use etherparse::{
    EtherType, Ethernet2Header, IpNumber, Ipv4Header, Ipv6FlowLabel, Ipv6Header, SingleVlanHeader,
    SlicedPacket, TcpHeader, TcpOptionElement, TransportSlice, UdpHeader, VlanId,
};

use super::*;
use crate::checksum::ChecksumAt;
use crate::segment::{Gso, GsoKind, Plan, Request};
use crate::{checksum, verify};

const ALL: Rules = Rules {
    tcp4: true,
    tcp6: true,
    ecn: true,
    udp4: true,
    udp6: true,
};

/// A TCP or UDP packet in a frame.
#[derive(Debug, Clone)]
struct Spec {
    mac: u8,
    vlan: Option<u16>,
    v6: bool,
    udp: bool,
    ttl: u8,
    tos: u8,
    label: u32,
    id: u16,
    df: bool,
    ports: (u16, u16),
    seq: u32,
    ack: u32,
    window: u16,
    /// Of the TCP header's byte 13.
    flags: u8,
    stamps: Option<(u32, u32)>,
    payload: Vec<u8>,
    partial: bool,
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
            flags: ACK,
            stamps: Some((10, 20)),
            payload: vec![0x5a; 100],
            partial: false,
        }
    }
}

const ACK: u8 = 1 << 4;

impl Spec {
    /// The segment after this one, with as much payload.
    fn next(&self) -> Self {
        Self {
            id: self.id.wrapping_add(1),
            seq: self.seq.wrapping_add(self.payload.len() as u32),
            payload: self
                .payload
                .iter()
                .map(|byte| byte.wrapping_mul(3).wrapping_add(1))
                .collect(),
            ..self.clone()
        }
    }

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

    fn frame(&self) -> Vec<u8> {
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
fn mend_ip(frame: &mut [u8], ip: usize) {
    frame[ip + 10..ip + 12].fill(0);
    let sum = checksum::Sum::of_portable(&frame[ip..ip + 20]).complement();
    frame[ip + 10..ip + 12].copy_from_slice(&sum.to_be_bytes());
}

fn checksum_at(layers: &Layers) -> usize {
    usize::from(layers.transport + layers.transport_kind.checksum_offset())
}

/// Leaves the pseudo-header's sum, as a local sender does.
fn make_partial(frame: &mut [u8]) {
    if let Some(layers) = layers::parse(frame, frame.len() as u32) {
        let partial = verify::pseudo(frame, &layers).fold();
        frame[checksum_at(&layers)..][..2].copy_from_slice(&partial.to_be_bytes());
    }
}

/// Writes the right transport checksum.
fn complete(frame: &mut [u8]) {
    make_partial(frame);
    let layers = layers::parse(frame, frame.len() as u32).expect("TCP or UDP");
    let end = layers.ip_len_end as usize;
    checksum::complete(&mut frame[..end], layers.checksum_at()).expect("inside");
}

fn judge(frame: &[u8], layers: &Layers) -> Verdict {
    let transport = &frame[usize::from(layers.transport)..layers.ip_len_end as usize];
    verify::verify(frame, layers, true, || checksum::Sum::of(transport))
}

fn batch_of(rules: Rules, frames: &[Vec<u8>]) -> Batch {
    let mut batch = Batch::new(rules);
    for frame in frames {
        let headers = &frame[..frame.len().min(crate::HEADERS_MAX)];
        assert!(batch.add(headers, frame.len() as u32, |layers| judge(frame, layers)));
    }
    batch
}

/// The fields of a virtio-net header without `num_buffers` (VirtIO 1.3, 5.1.6; include/uapi/linux/virtio_net.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NetHeader {
    flags: u8,
    gso_type: u8,
    hdr_len: u16,
    gso_size: u16,
    csum_start: u16,
    csum_offset: u16,
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
struct Delivered {
    header: NetHeader,
    frame: Vec<u8>,
    members: Vec<usize>,
}

fn deliver(batch: &Batch, frames: &[Vec<u8>], room: impl Fn(usize) -> u32) -> Vec<Delivered> {
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
        delivered.push(Delivered {
            header: batch.header(&run).into(),
            frame: bytes,
            members,
        });
        batch.advance(&mut position, &run);
    }
    delivered
}

fn coalesced(frames: &[Vec<u8>]) -> Vec<Delivered> {
    deliver(&batch_of(ALL, frames), frames, |_| u32::MAX)
}

fn coalesced_specs(specs: &[Spec]) -> Vec<Delivered> {
    coalesced(&specs.iter().map(Spec::frame).collect::<Vec<_>>())
}

/// Numbers of the frames in each delivered unit.
fn units(specs: &[Spec]) -> Vec<Vec<usize>> {
    coalesced_specs(specs)
        .into_iter()
        .map(|unit| unit.members)
        .collect()
}

/// Checks a GSO packet: etherparse must parse it, and segmenting it must return the frames that it was made of, except
/// for what merging loses: timestamps, fixed ids, the positions of PSH and FIN.
fn assert_gso_packet(delivered: &Delivered, frames: &[Vec<u8>]) {
    let Delivered {
        header,
        frame,
        members,
    } = delivered;
    let sliced = SlicedPacket::from_ethernet(frame).expect("a good packet");
    let layers = layers::parse(frame, frame.len() as u32).expect("TCP or UDP");
    assert_eq!(layers.ip_len_end as usize, frame.len());
    assert_eq!((header.flags, header.csum_start), (1, layers.transport));
    assert_eq!(header.csum_offset, layers.transport_kind.checksum_offset());
    assert_eq!(header.hdr_len, layers.payload);
    let mut whole = frame.clone();
    complete(&mut whole);
    assert_eq!(
        frame[checksum_at(&layers)..][..2],
        verify::pseudo(frame, &layers).fold().to_be_bytes()
    );
    let kind = match (header.gso_type & 0x7f, sliced.transport) {
        (1, Some(TransportSlice::Tcp(_))) => GsoKind::Tcp4,
        (4, Some(TransportSlice::Tcp(_))) => GsoKind::Tcp6,
        (5, Some(TransportSlice::Udp(_))) => GsoKind::Udp,
        other => panic!("{other:?}"),
    };
    if let Some(etherparse::NetSlice::Ipv4(ip)) = &sliced.net {
        assert_eq!(
            ip.header().to_header().calc_header_checksum(),
            ip.header().header_checksum()
        );
    }
    let gso = Gso {
        kind,
        ecn: header.gso_type & 0x80 != 0,
        size: header.gso_size,
    };
    assert_eq!(
        gso.ecn,
        kind != GsoKind::Udp && frame[usize::from(layers.transport) + 13] & 0x80 != 0
    );
    let plan = Plan::new(frame, frame.len() as u32, gso).expect("a good request");
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
    if layers.version == Ip::V4 {
        if frame[ip + 6] & 0x40 != 0 {
            frame[ip + 4..ip + 6].fill(0);
        }
        mend_ip(&mut frame, ip);
    }
    if layers.transport_kind == Transport::Tcp {
        frame[transport + 13] &= !9;
        let end = usize::from(layers.payload);
        if end - transport == 32 {
            frame[transport + 24..end].fill(0);
        }
    }
    complete(&mut frame);
    frame
}
