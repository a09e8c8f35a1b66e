//! VXLAN towards a guest, of a stack at the far end of a veth: the checksum of the packet inside, which it
//! leaves unfinished, is completed, and the outer one is right then.

use std::net::UdpSocket;

use packet::checksum;
use packet::layers::{self, Layers};
use packet::verify::{self, Verdict};
use rstest::rstest;
use testkit::daemon::{Mode, Placement};
use testkit::driver::F_GUEST_ALL;
use testkit::pair::Received;
use testkit::{Rig, VethPair, frame, require, skip_half, wait};

use super::local_stack::make_stack;
use super::{DATA_VALID, completed, rig};

const VXLAN: &str = "vx0";
/// Of the VXLAN header, bytes.
const VXLAN_HEADER: usize = 8;

fn parse(frame: &[u8]) -> Layers {
    layers::parse(frame, frame.len() as u32).expect("TCP or UDP")
}

/// What the outer checksum of a frame says.
fn outer(frame: &[u8]) -> Verdict {
    let layers = parse(frame);
    let datagram = &frame[usize::from(layers.transport)..layers.ip_len_end as usize];
    verify::verify(frame, &layers, false, || checksum::Sum::of(datagram))
}

/// The next datagram from that port in VXLAN; what the stack sends besides is its own affair.
fn receive_tunnelled(rig: &mut Rig, from: u16) -> (Received, Vec<u8>) {
    loop {
        let got = rig.pair().receive(wait::SOON).expect("it arrives");
        let Some(layers) = layers::parse(&got.frame, got.frame.len() as u32) else {
            continue;
        };
        let inside = got.frame.get(usize::from(layers.payload) + VXLAN_HEADER..);
        let inside = inside.map_or_else(Vec::new, <[u8]>::to_vec);
        let inner = layers::parse(&inside, inside.len() as u32);
        let ports = inner.and_then(|inner| inside.get(inner.transport.into()..)?.get(..2));
        if ports == Some(&from.to_be_bytes()) {
            return (got, inside);
        }
    }
}

#[rstest]
fn datagrams_in_vxlan_of_a_local_stack_have_a_right_checksum(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
    #[values(0, F_GUEST_ALL)] features: u64,
) {
    skip_half!(placement, mode, features);
    require!(Root);
    let mut rig = rig(placement, mode, features);
    make_stack(&rig);
    let ends = [
        ["local", "10.77.0.1", "remote", "10.77.0.2"],
        ["local", "fd77::1", "remote", "fd77::2"],
    ];
    let tunnels = [
        (ends[0], "4789", "udpcsum", true),
        (ends[0], "8472", "noudpcsum", false),
        (ends[1], "4789", "noudp6zerocsumtx", true),
        (ends[1], "8472", "udp6zerocsumtx", false),
    ];
    for (number, (ends, port, sums, has_outer)) in (0u16..).zip(tunnels) {
        far_tunnel(&rig, &ends, port, sums);
        let from = 7100 + number;
        let socket = rig.veth.far.enter(|| {
            let socket = UdpSocket::bind(("10.88.0.1", from)).expect("an address of its own");
            socket.connect("10.88.0.2:7002").expect("a route");
            socket
        });
        for len in [1, 18, 999, 1300] {
            let payload = frame::plain(len, len as u8);
            socket.send(&payload).expect("there is a neighbour");
            let (got, inside) = receive_tunnelled(&mut rig, from);
            let at = usize::from(parse(&inside).payload);
            frame::assert_same(&inside[at..at + len], &payload);
            frame::assert_same(&inside, &completed(&inside));
            let verdict = if has_outer {
                Verdict::Valid
            } else {
                Verdict::Unknown
            };
            assert_eq!(outer(&got.frame), verdict, "{ends:?} {sums}");
            let is_told = has_outer && features != 0 && placement != Placement::Direct;
            assert_eq!(got.header[0], if is_told { DATA_VALID } else { 0 });
        }
        rig.veth.far.ip(&["link", "delete", VXLAN]);
    }
    assert!(rig.daemon.counter("to_guest_checksums_completed") >= 16);
}

/// A VXLAN interface at the far end, and a neighbour behind it.
fn far_tunnel(rig: &Rig, ends: &[&str], port: &str, sums: &str) {
    let far = &rig.veth.far;
    let what = ["link", "add", VXLAN, "type", "vxlan", "id", "42", "dstport", port];
    far.ip(&[&what, ends, &[sums, "dev", VethPair::WIRE]].concat());
    far.ip(&["address", "add", "10.88.0.1/24", "dev", VXLAN]);
    far.ip(&["link", "set", VXLAN, "mtu", "1400", "up"]);
    let neighbour = ["10.88.0.2", "lladdr", "02:00:00:00:00:0c", "dev", VXLAN];
    far.ip(&[&["neigh", "add"], &neighbour[..]].concat());
}
