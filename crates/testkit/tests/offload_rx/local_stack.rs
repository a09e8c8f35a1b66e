//! Frames of a stack at the far end of a veth, which leaves checksums unfinished and packets uncut: they are marked or
//! completed, and a stream arrives whole.

use std::net::{SocketAddrV4, UdpSocket};
use std::os::fd::OwnedFd;

use packet::{checksum, layers};
use rstest::rstest;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, bind, socket_with};
use testkit::daemon::{Mode, Placement};
use testkit::driver::{F_GUEST_ALL, F_GUEST_CSUM, HEADER};
use testkit::pair::Received;
use testkit::{DriverConfig, Layout, Rig, Serve, VethPair, frame, require, skip_half, wait};

use super::{BUFFER, BUFFERS, NEEDS_CSUM, completed, rig};

/// The far end of the wire becomes one that a stack talks on, which leaves checksums unfinished.
pub(super) fn make_stack(rig: &Rig) {
    let far = &rig.veth.far;
    far.run("ethtool", &["-K", VethPair::WIRE, "tx", "on"]);
    far.run(
        "sysctl",
        &["-qw", &format!("net.ipv6.conf.{}.disable_ipv6=0", VethPair::WIRE)],
    );
    far.ip(&["link", "set", VethPair::WIRE, "arp", "on"]);
    for (address, neighbour) in [("10.77.0.1/24", "10.77.0.2"), ("fd77::1/64", "fd77::2")] {
        far.ip(&["address", "add", address, "dev", VethPair::WIRE, "nodad"]);
        let lladdr = "02:00:00:00:00:0b";
        far.ip(&["neigh", "add", neighbour, "lladdr", lladdr, "dev", VethPair::WIRE]);
    }
}

/// The next frame with these ports; others are the stack's own affairs.
fn receive_with_ports(rig: &mut Rig, ports: [u16; 2]) -> Option<Received> {
    loop {
        let got = rig.pair().receive(wait::SOON)?;
        let Some(layers) = layers::parse(&got.frame, got.frame.len() as u32) else {
            continue;
        };
        let at = usize::from(layers.transport);
        if got.frame[at..at + 4] == ports.map(u16::to_be_bytes).concat() {
            return Some(got);
        }
    }
}

#[rstest]
fn datagrams_of_a_local_stack_are_marked_or_completed(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
    #[values((0, BUFFER), (0, 300), (F_GUEST_CSUM, 4096), (F_GUEST_ALL, BUFFER))] (features, buffer): (
        u64,
        u32,
    ),
) {
    let odd = usize::from(features != 0);
    skip_half!(placement, mode, odd);
    require!(Root);
    let serve = Serve::interface(VethPair::NIC)
        .placement(placement)
        .mode(mode)
        .offload("all");
    let mut rig = Rig::with(VethPair::new(), &serve, &DriverConfig::with(features));
    rig.post(BUFFERS, &[buffer]);
    make_stack(&rig);
    for (local, remote, transport, most) in [
        ("10.77.0.1:7001", "10.77.0.2:7002", 34, 1472),
        ("[fd77::1]:7001", "[fd77::2]:7002", 54, 1452),
    ] {
        let socket = rig
            .veth
            .far
            .enter(|| UdpSocket::bind(local).expect("an address of its own"));
        for len in [0, 1, 17, 18, 999, most] {
            let payload = frame::plain(len, len as u8);
            socket.send_to(&payload, remote).expect("there is a neighbour");
            let got = receive_with_ports(&mut rig, [7001, 7002]).expect("it arrives");
            let end = transport + 8 + len;
            frame::assert_same(&got.frame[transport + 8..end], &payload);
            if features == 0 {
                assert_eq!(got.header[..10], [0; 10]);
                frame::assert_same(&got.frame, &completed(&got.frame));
            } else {
                assert_eq!(got.header[..6], [NEEDS_CSUM, 0, 0, 0, 0, 0]);
                assert_eq!(got.header[6..10], [transport as u8, 0, 6, 0]);
                assert_ne!(got.frame, completed(&got.frame), "it is partial");
            }
        }
    }
    let completed = rig.daemon.counter("to_guest_checksums_completed");
    assert_eq!(completed > 0, features == 0);
}

#[rstest]
fn stream_of_a_local_stack_arrives_whole(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
    #[values(0, F_GUEST_CSUM, F_GUEST_ALL)] features: u64,
) {
    skip_half!(placement, mode, features == F_GUEST_CSUM);
    require!(Root);
    let mut rig = rig(placement, mode, features);
    make_stack(&rig);
    if mode == Mode::Skb {
        // In native mode the kernel takes segmentation from the other end by itself (veth_xdp_set, drivers/net/veth.c).
        rig.veth
            .far
            .run("ethtool", &["-K", VethPair::WIRE, "tso", "off", "gso", "off"]);
    }
    let (socket, sequence, header) = connected(&mut rig);
    assert_eq!(header[0], if features == 0 { 0 } else { NEEDS_CSUM });
    let stream = frame::plain(14_600, 7);
    let mut left = &stream[..];
    let sent = wait::until(wait::SOON, || {
        let sent = net::send(&socket, left, net::SendFlags::NOSIGNAL).unwrap_or(0);
        left = &left[sent..];
        left.is_empty()
    });
    assert!(sent, "the connection was not made");
    let mut got = vec![None; stream.len()];
    let mut gso_packets = 0;
    while got.contains(&None) {
        let received = receive_with_ports(&mut rig, [7001, 7002]).expect("the rest of the stream");
        let frame = &received.frame;
        let at = u32::from_be_bytes(frame[38..42].try_into().expect("four bytes"));
        let at = at.wrapping_sub(sequence.wrapping_add(1)) as usize;
        let payload = &frame[54..];
        for (place, &byte) in got.iter_mut().skip(at).zip(payload) {
            *place = Some(byte);
        }
        gso_packets += usize::from(received.header[1] == 1);
        if features == 0 {
            frame::assert_same(frame, &completed(frame));
        } else if !payload.is_empty() {
            assert_eq!(received.header[0], NEEDS_CSUM);
        }
    }
    let got: Vec<_> = got.into_iter().flatten().collect();
    frame::assert_same(&got, &stream);
    let merges = features == F_GUEST_ALL && placement != Placement::Direct;
    assert_eq!(gso_packets > 0, merges, "{gso_packets} GSO packets");
}

/// Why it must not segment: in skb mode the kernel leaves that to the interface, and 64 KiB are no frame of this MTU.
#[rstest]
fn gso_packets_of_a_local_stack_in_skb_mode_are_dropped_and_counted() {
    require!(Root);
    let mut rig = rig(Placement::Copy, Mode::Skb, F_GUEST_ALL);
    make_stack(&rig);
    let (socket, ..) = connected(&mut rig);
    let sent = wait::until(wait::SOON, || {
        net::send(&socket, &frame::plain(14_600, 7), net::SendFlags::NOSIGNAL).is_ok()
    });
    assert!(sent, "the connection was not made");
    rig.daemon.await_counter("too_long", 1);
    let hints = rig.daemon.port(0)["lanes"][0]["fallbacks"].to_string();
    assert!(hints.contains("tso off gso off"), "{hints}");
}

/// A connection of the far end's stack with the guest; its first sequence number, and the header with which its SYN
/// came.
fn connected(rig: &mut Rig) -> (OwnedFd, u32, [u8; HEADER]) {
    let connect = || {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).expect("a socket");
        let local: SocketAddrV4 = "10.77.0.1:7001".parse().expect("an address");
        let remote: SocketAddrV4 = "10.77.0.2:7002".parse().expect("an address");
        bind(&socket, &local).expect("an address of its own");
        let _ = net::connect(&socket, &remote);
        socket
    };
    let socket = rig.veth.far.enter(connect);
    let syn = receive_with_ports(rig, [7001, 7002]).expect("a SYN");
    let sequence = u32::from_be_bytes(syn.frame[38..42].try_into().expect("four bytes"));
    rig.pair().send(&syn_ack(&syn.frame, sequence), Layout::Whole);
    (socket, sequence, syn.header)
}

/// The answer to a SYN over IPv4: a segment size of 1460, a window of 65,535.
fn syn_ack(syn: &[u8], sequence: u32) -> Vec<u8> {
    let mut frame = [&syn[6..12], &syn[..6], &[8, 0]].concat();
    frame.extend([0x45, 0, 0, 44, 0, 0, 0x40, 0, 64, 6, 0, 0]);
    frame.extend([&syn[30..34], &syn[26..30], &syn[36..38], &syn[34..36]].concat());
    frame.extend([0, 0, 0, 9]);
    frame.extend((sequence.wrapping_add(1)).to_be_bytes());
    frame.extend([0x60, 0x12, 0xff, 0xff, 0, 0, 0, 0, 2, 4, 0x05, 0xb4]);
    let sum = checksum::Sum::of(&frame[14..34]).complement();
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    completed(&frame)
}
