//! Frames in the tunnel of a network (VXLAN, Geneve): those to a station go to the socket without their outer headers, all
//! others to the host as they came.

mod left;

use crate::common;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;

use common::hinted;
use common::receiver::Receiver;
use common::{Pair, bare, frame_to};
use steer::{
    Flow, HintSet, InterfaceMarks, ModeRequest, MulticastLimit, MulticastRing, NOTE_BYTES, Program, Station,
    Tunnel, network_number, noted_port,
};
use testkit::{BpfFs, VethPair, frame, wait};
use xsk::metadata::{Found, Layouts};

const OURS: [u8; 6] = [2, 0, 0, 0, 0, 0x11];
const STRANGER: [u8; 6] = [2, 0, 0, 0, 0, 0x13];
const GROUP: [u8; 6] = [0x01, 0, 0x5e, 0, 0, 1];
const VNI: u32 = 0x01_0203;

fn tunnel(local: &str) -> Tunnel {
    Tunnel {
        device: 7,
        remote: is_geneve(local).then(|| sender(local)),
        vni: VNI,
        port: if is_geneve(local) { 6081 } else { 4789 },
        local: local.parse().expect("an address"),
        vlan: 0,
        drops_unknown: false,
    }
}

/// Both families; of VXLAN, and of Geneve.
const LOCALS: [&str; 4] = ["10.9.0.1", "2001:db8::1", "10.9.0.6", "2001:db8::6"];

fn is_geneve(local: &str) -> bool {
    local.ends_with('6')
}

fn is_ipv4(local: &str) -> bool {
    local.contains('.')
}

/// The host that sends such a packet ([`frame::vxlan`]).
fn sender(local: &str) -> IpAddr {
    match local.parse().expect("an address") {
        IpAddr::V4(_) => [10, 9, 0, 2].into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    }
}

/// A packet of the tunnel to this address, with this frame in it.
fn packed(local: &str, inner: &[u8]) -> Vec<u8> {
    packed_in(VNI, local, inner)
}

fn packed_in(vni: u32, local: &str, inner: &[u8]) -> Vec<u8> {
    let make = if is_geneve(local) {
        frame::geneve
    } else {
        frame::vxlan
    };
    make(local.parse().expect("an address"), vni, inner)
}

/// Computes the checksum of the outer header again, if it has one.
fn sum(packed: &mut [u8]) {
    if packed[12..14] == [8, 0] {
        frame::sum_ipv4(packed);
    }
}

/// A program with queue 0 of the pair as a network in this tunnel.
fn network(pair: &Pair, request: ModeRequest, frags: bool, local: &str) -> (Program, MulticastRing) {
    let program = Program::attach(pair.ifindex(), request, frags).expect("veth takes XDP");
    let ring = put_network(&program, local);
    (program, ring)
}

fn put_network(program: &Program, local: &str) -> MulticastRing {
    let ring = MulticastRing::new().expect("memory");
    let limit = MulticastLimit::default();
    program.set_network(0..1, limit, &ring).expect("queue 0");
    put_tunnel(program, tunnel(local));
    for (vlan, port) in [(0, 7), (100, 8)] {
        let station = Station { vlan, mac: OURS };
        program.set_station(0, station, port).expect("room");
    }
    ring
}

fn put_tunnel(program: &Program, tunnel: Tunnel) {
    program.set_tunnel(0..1, 0, tunnel).expect("queue 0");
    assert_eq!(program.tunnels(0).get(&0), Some(&tunnel));
    if tunnel.remote.is_none() {
        let vtep = (sender(&tunnel.local.to_string()), true);
        program.change_vtep(0, vtep).expect("room");
    }
}

/// Type and content.
type Tag = (u16, u16);

/// The same frame behind these tags.
fn behind(tags: &[Tag], frame: &[u8]) -> Vec<u8> {
    let words = tags.iter().flat_map(|&(kind, tci)| [kind, tci]);
    let tags: Vec<u8> = words.flat_map(u16::to_be_bytes).collect();
    [&frame[..12], &tags, &frame[12..]].concat()
}

/// The next frame of the socket, and its note.
fn next(receiver: &mut Receiver) -> (Vec<u8>, Option<u32>) {
    let (note, received) = receiver.take(NOTE_BYTES);
    (received, noted_port(note.try_into().expect("eight")))
}

#[test]
fn frame_of_a_station_comes_without_its_outer_headers() {
    let Some(pair) = Pair::new(1500) else { return };
    for request in [ModeRequest::Native, ModeRequest::Skb] {
        for local in LOCALS {
            let (program, _ring) = network(&pair, request, false, local);
            let mut receiver = Receiver::of_queue_0(&pair, &program);
            let mut plain = frame::plain(1430, 3);
            plain[..6].copy_from_slice(&OURS);
            let tagged = frame_to(OURS, &[(0x8100, 100)]);
            let nested = [&OURS[..], &packed(local, &plain)[6..1444]].concat();
            for (inner, port) in [
                (&plain[..], 7),
                (&plain[..14], 7),
                (&tagged[..], 8),
                (&nested[..1400], 7),
            ] {
                pair.far_socket.send(&packed(local, inner));
                let (received, noted) = next(&mut receiver);
                frame::assert_same(&received, inner);
                assert_eq!(noted, Some(port), "{request:?} {local}");
            }
            // DF, and ECN of a sender that supports it.
            let mut sent = packed(local, &plain);
            match is_ipv4(local) {
                true => (sent[15], sent[20]) = (0xb9, 0x40),
                false => sent[15] = 0x20,
            }
            sum(&mut sent);
            pair.far_socket.send(&sent);
            frame::assert_same(&next(&mut receiver).0, &plain);
            let counters = program.counters(0).expect("counters");
            assert_eq!(counters.redirected, 5);
            assert_eq!((counters.not_ours, counters.dropped()), (0, 0));
        }
    }
}

#[test]
fn packets_of_the_tunnel_have_one_tag_with_its_vlan_or_none() {
    let Some(pair) = Pair::new(1500) else { return };
    // With the only VLAN of a tunnel of whose packets it is.
    let all: [(&[Tag], Option<u16>); 14] = [
        (&[], Some(0)),
        (&[(0x8100, 0)], Some(0)),
        (&[(0x8100, 0xf000)], Some(0)),
        (&[(0x8100, 100)], Some(100)),
        (&[(0x8100, 0xf064)], Some(100)),
        (&[(0x8100, 101)], None),
        (&[(0x88a8, 100)], None),
        (&[(0x88a8, 0)], None),
        (&[(0x9100, 100)], None),
        (&[(0x8100, 100), (0x8100, 100)], None),
        (&[(0x8100, 100), (0x8100, 0)], None),
        (&[(0x8100, 0), (0x8100, 100)], None),
        (&[(0x88a8, 0), (0x8100, 100)], None),
        (&[(0x8100, 100), (0x88a8, 0)], None),
    ];
    for request in [ModeRequest::Native, ModeRequest::Skb] {
        for local in LOCALS {
            let (program, _ring) = network(&pair, request, false, local);
            let mut receiver = Receiver::open(&pair, &program);
            program
                .enable_queue(0, receiver.socket.as_fd(), bare(1514))
                .expect("queue 0");
            let passes = |sent: &[u8]| {
                pair.far_socket.send(sent);
                let passed = pair.near_socket.receive(wait::SOON);
                assert_eq!(passed.as_deref(), Some(sent), "{request:?}");
            };
            for vlan in [0, 100] {
                let inside = tunnel(local);
                put_tunnel(&program, Tunnel { vlan, ..inside });
                let inner = frame_to(OURS, &[(0x8100, 100)]);
                for (tags, of) in all {
                    let sent = behind(tags, &packed(local, &inner));
                    if of == Some(vlan) {
                        pair.far_socket.send(&sent);
                        assert_eq!(next(&mut receiver), (inner.clone(), Some(8)), "{tags:x?}");
                    } else {
                        passes(&sent);
                    }
                }
                // What is not taken after all has its tag again.
                let tag = &[(0x8100, vlan)];
                for inner in [
                    frame_to(STRANGER, &[]),
                    frame_to(OURS, &[(0x8100, 7)]),
                    frame_to(GROUP, &[]),
                ] {
                    passes(&behind(tag, &packed(local, &inner)));
                }
                let mut to_group = behind(tag, &packed(local, &inner));
                to_group[..6].copy_from_slice(&GROUP);
                passes(&to_group);
                passes(&behind(tag, &packed(local, &inner)[..48]));
            }
            let counters = program.counters(0).expect("counters");
            assert_eq!((counters.redirected, counters.dropped()), (5, 0), "{counters:?}");
            let not_ours = || program.counters(0).expect("counters").not_ours;
            let before = not_ours();
            // The tag is cut off.
            let tagged = behind(&[(0x8100, 100)], &packed(local, &[]));
            pair.far_socket.send(&tagged[..15]);
            assert!(wait::until(wait::SOON, || not_ours() > before));
        }
    }
}

/// Queue 0 is the only one that has frames: what they get decides whose stations it finds.
#[test]
fn stations_of_a_tunnel_are_of_one_network() {
    let Some(pair) = Pair::new(1500) else { return };
    let (program, ring) = network(&pair, ModeRequest::Native, false, LOCALS[0]);
    let mut receiver = Receiver::of_queue_0(&pair, &program);
    let (station, limit) = (Station { vlan: 0, mac: OURS }, MulticastLimit::default());
    for number in 1..4 {
        program
            .set_network(number..number + 1, limit, &ring)
            .expect("a queue");
    }
    let other = Tunnel {
        vni: VNI + 1,
        ..tunnel(LOCALS[0])
    };
    // Before it has a tunnel, and with one.
    program.set_station(1, station, 20).expect("room");
    program.set_tunnel(1..2, 1, other).expect("queue 1");
    assert_eq!(program.stations(1), []);
    for (network, port) in [(1, 21), (2, 22)] {
        program.set_station(network, station, port).expect("room");
        assert_eq!(program.stations(network), [(station, port)]);
    }
    let taken = program.set_station(3, station, 23).expect_err("it is 2's");
    assert!(taken.to_string().contains("another network"), "{taken}");
    let inner = frame_to(OURS, &[]);
    let in_tunnel = packed(LOCALS[0], &inner);
    let in_other = packed_in(VNI + 1, LOCALS[0], &inner);
    pair.far_socket.send(&in_tunnel);
    assert_eq!(next(&mut receiver), (inner.clone(), Some(7)));
    for sent in [&in_other, &inner] {
        pair.far_socket.send(sent);
        assert_eq!(pair.near_socket.receive(wait::SOON).as_ref(), Some(sent));
    }
    program.remove_station(0, station).expect("there");
    pair.far_socket.send(&in_tunnel);
    assert_eq!(pair.near_socket.receive(wait::SOON).as_ref(), Some(&in_tunnel));
    assert_eq!(program.stations(1), [(station, 21)]);
    // Queue 0 becomes one of a network without a tunnel.
    program.end_network(0..1).expect("there");
    program.end_network(2..3).expect("there");
    program.set_network(0..1, limit, &ring).expect("queue 0");
    program.set_station(0, station, 9).expect("no other has it");
    pair.far_socket.send(&inner);
    assert_eq!(next(&mut receiver), (inner, Some(9)));
    for sent in [&in_tunnel, &in_other] {
        pair.far_socket.send(sent);
        assert_eq!(pair.near_socket.receive(wait::SOON).as_ref(), Some(sent));
    }
    program.end_network(1..2).expect("there");
    assert_eq!(program.stations(1), []);
}

#[test]
fn networks_that_share_queues_are_told_by_the_tunnel() {
    let Some(pair) = Pair::new(1500) else { return };
    for local in LOCALS {
        let (program, ring) = network(&pair, ModeRequest::Native, false, local);
        let mut receiver = Receiver::of_queue_0(&pair, &program);
        let (station, shares) = (
            Station { vlan: 0, mac: OURS },
            [1, 63].map(|share| network_number(0, share)),
        );
        for (network, vni) in shares.into_iter().zip([VNI + 1, VNI + 2]) {
            let other = Tunnel { vni, ..tunnel(local) };
            program.set_tunnel(0..1, network, other).expect("queue 0");
            program.change_vtep(network, (sender(local), true)).expect("room");
            program.set_station(network, station, network).expect("room");
        }
        let inner = frame_to(OURS, &[]);
        let sent = |vni| packed_in(vni, local, &inner);
        for (vni, port) in [(VNI, 7), (VNI + 1, shares[0]), (VNI + 2, shares[1])] {
            pair.far_socket.send(&sent(vni));
            assert_eq!(next(&mut receiver), (inner.clone(), Some(port)));
        }
        assert_eq!(program.tunnels(0).len(), 3);
        // Each has senders and a tunnel of its own.
        program
            .change_vtep(shares[0], (sender(local), false))
            .expect("there");
        program
            .set_tunnel(0..1, shares[1], Tunnel::none(7))
            .expect("queue 0");
        for vni in [VNI + 1, VNI + 2, VNI + 3] {
            pair.far_socket.send(&sent(vni));
            assert_eq!(pair.near_socket.receive(wait::SOON), Some(sent(vni)));
        }
        pair.far_socket.send(&sent(VNI));
        assert_eq!(next(&mut receiver), (inner.clone(), Some(7)));
        program.end_network(0..1).expect("there");
        let limit = MulticastLimit::default();
        program.set_network(0..1, limit, &ring).expect("queue 0");
        program.set_tunnel(0..1, 0, tunnel(local)).expect("queue 0");
        assert_eq!(program.tunnels(0).len(), 1);
        assert_eq!(program.stations(shares[0]), []);
    }
}

#[test]
fn frame_in_several_buffers_is_taken_or_left_whole() {
    let Some(pair) = Pair::new(9000) else { return };
    let (program, _ring) = network(&pair, ModeRequest::Native, true, LOCALS[0]);
    let xsk = pair.unbound_xsk();
    program.enable_queue(0, xsk.as_fd(), bare(9014)).expect("queue 0");
    let mut inner = frame::plain(8950, 3);
    inner[..6].copy_from_slice(&STRANGER);
    let sent = packed(LOCALS[0], &inner);
    pair.far_socket.send(&sent);
    let passed = pair.near_socket.receive(wait::SOON).expect("the host gets it");
    frame::assert_same(&passed, &sent);
    inner[..6].copy_from_slice(&OURS);
    pair.far_socket.send(&packed(LOCALS[0], &inner));
    let redirected = || program.counters(0).expect("counters").redirected == 1;
    assert!(wait::until(wait::SOON, redirected));
}

#[test]
fn frame_that_cannot_be_delivered_without_its_headers_is_counted() {
    let Some(pair) = Pair::new(1500) else { return };
    let (program, _ring) = network(&pair, ModeRequest::Native, false, LOCALS[0]);
    let xsk = pair.unbound_xsk();
    let sent = packed(LOCALS[0], &frame_to(OURS, &[]));
    program.enable_queue(0, xsk.as_fd(), bare(79)).expect("queue 0");
    pair.far_socket.send(&sent);
    let counted = |wanted| {
        let counted = || {
            let counters = program.counters(0).expect("counters");
            (counters.too_long, counters.no_socket, counters.redirected) == wanted
        };
        assert!(wait::until(wait::SOON, counted), "{:?}", program.counters(0));
    };
    counted((1, 0, 0));
    program.activate_queue(0, bare(80)).expect("queue 0");
    drop(xsk);
    pair.far_socket.send(&sent);
    counted((1, 1, 0));
    // Nothing of it reached the host.
    program.deactivate_queue(0).expect("queue 0");
    let last = frame::last();
    pair.far_socket.send(&last);
    assert!(pair.near_socket.receive_before(&last).is_empty());
}

#[test]
fn hints_are_those_of_the_frame_in_the_tunnel() {
    let Some(pair) = hinted::pair() else { return };
    let program = hinted::attach(&pair, HintSet::ALL);
    let _ring = put_network(&program, LOCALS[0]);
    let mut receiver = hinted::receiver(&pair, &program);
    let (from, to) = (Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2));
    let ip = frame::ipv4(from, to, 17, &frame::udp_ports([1000, 2000]));
    let inner = [&OURS[..], &[2, 0, 0, 0, 0, 2], &[8, 0], &ip].concat();
    let flow = Flow {
        from: Some((from.into(), 1000)),
        to: (to.into(), 2000),
        protocol: 17,
    };
    let marks = InterfaceMarks::of(pair.ifindex()).expect("of this program");
    marks.set(&flow, 77).expect("room");
    pair.far_socket.send(&packed(LOCALS[0], &inner));
    let desc = receiver.next();
    frame::assert_same(&receiver.bytes(desc.data.get(), desc.len as usize), &inner);
    let Found::Hints(hints) = Layouts::new(&program.layouts()).read(&receiver.umem, desc.data) else {
        panic!("no hints")
    };
    assert_eq!((hints.port, hints.mark), (Some(7), Some(77)));
    assert_eq!((hints.hash, hints.tag), (None, None));
    receiver.pool.put(desc.frame);
    receiver.post();
    // A tag that the driver took off is outside of the tunnel.
    let tagged = testkit::TaggedPort::on((&pair.veth.far, VethPair::WIRE), 0x8100, 100);
    tagged.port().send(&packed(LOCALS[0], &inner));
    let passed = |wanted| {
        let passed = || program.counters(0).expect("counters").not_ours == wanted;
        assert!(wait::until(wait::SOON, passed), "{:?}", program.counters(0));
    };
    passed(1);
    let vlan = 100;
    let inside = tunnel(LOCALS[0]);
    put_tunnel(&program, Tunnel { vlan, ..inside });
    let inner = frame_to(OURS, &[(0x8100, 100)]);
    tagged.port().send(&packed(LOCALS[0], &inner));
    let desc = receiver.next();
    frame::assert_same(&receiver.bytes(desc.data.get(), desc.len as usize), &inner);
    let Found::Hints(hints) = Layouts::new(&program.layouts()).read(&receiver.umem, desc.data) else {
        panic!("no hints")
    };
    assert_eq!((hints.port, hints.tag), (Some(8), None));
    receiver.pool.put(desc.frame);
    receiver.post();
    // One more tag is in the frame, or it is a service tag.
    tagged
        .port()
        .send(&behind(&[(0x8100, 100)], &packed(LOCALS[0], &inner)));
    drop(tagged);
    let tagged = testkit::TaggedPort::on((&pair.veth.far, VethPair::WIRE), 0x88a8, 100);
    tagged.port().send(&packed(LOCALS[0], &inner));
    passed(3);
}

#[test]
fn tunnel_goes_on_with_the_next_owner_of_the_program_and_ends_with_the_network() {
    let Some(pair) = Pair::new(1500) else { return };
    let bpffs = BpfFs::new();
    let dir = bpffs.pins();
    std::fs::create_dir(&dir).expect("new");
    let (mut program, ring) = network(&pair, ModeRequest::Native, false, LOCALS[1]);
    program.pin(&dir).expect("a bpffs");
    drop(program);
    let program = Program::open_pinned(pair.ifindex(), &dir).expect("all is there");
    assert_eq!(
        [program.tunnels(0), program.tunnels(1)],
        [[(0, tunnel(LOCALS[1]))].into(), BTreeMap::new()]
    );
    let mut receiver = Receiver::of_queue_0(&pair, &program);
    let (inner, other) = (frame_to(OURS, &[]), packed(LOCALS[0], &frame_to(OURS, &[])));
    pair.far_socket.send(&packed(LOCALS[1], &inner));
    assert_eq!(next(&mut receiver).0, inner);
    program.set_tunnel(0..1, 0, tunnel(LOCALS[0])).expect("queue 0");
    program.change_vtep(0, (sender(LOCALS[0]), true)).expect("room");
    pair.far_socket.send(&other);
    assert_eq!(next(&mut receiver).0, inner);
    // Not even frames outside of the tunnel.
    program.set_tunnel(0..1, 0, Tunnel::none(7)).expect("queue 0");
    for sent in [&other, &inner] {
        pair.far_socket.send(sent);
        assert_eq!(pair.near_socket.receive(wait::SOON).as_ref(), Some(sent));
    }
    program.end_network(0..1).expect("it is there");
    assert!(program.tunnels(0).is_empty());
    // Its hosts are gone with it.
    let limit = MulticastLimit::default();
    program.set_network(0..1, limit, &ring).expect("queue 0");
    program.set_tunnel(0..1, 0, tunnel(LOCALS[0])).expect("queue 0");
    pair.far_socket.send(&other);
    assert_eq!(pair.near_socket.receive(wait::SOON), Some(other));
    program.end_network(0..1).expect("it is there");
    let limit = MulticastLimit::default();
    program.set_network(0..1, limit, &ring).expect("queue 0");
    let station = Station { vlan: 0, mac: OURS };
    program.set_station(0, station, 9).expect("room");
    pair.far_socket.send(&inner);
    assert_eq!(next(&mut receiver), (inner, Some(9)));
    drop(program);
    steer::detach_pinned(&dir).expect("ours");
}
