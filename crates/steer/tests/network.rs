//! Queues of a network: frames to a station go to the socket, with the number of its port; unicast frames to other
//! addresses go to the host, and multicast frames to both.

use crate::common;

use std::os::fd::AsFd;

use common::receiver::Receiver;
use common::{Pair, bare, frame_to, test_run};
use steer::{
    Filter, Group, ModeRequest, MulticastLimit, MulticastReader, MulticastRing, NOTE_BYTES, Program,
    QueueCounters, Station, noted_port,
};
use testkit::{BpfFs, assert_soon, frame, wait};

const OURS: [u8; 6] = [2, 0, 0, 0, 0, 0x11];
const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 0x12];
const STRANGER: [u8; 6] = [2, 0, 0, 0, 0, 0x13];
const EVERYBODY: [u8; 6] = [0xff; 6];
const GROUP: [u8; 6] = [0x01, 0, 0x5e, 0, 0, 1];
const NO_LIMIT: MulticastLimit = MulticastLimit {
    a_second: 0,
    burst: 1,
};
const XDP_PASS: u32 = 2;
const XDP_REDIRECT: u32 = 4;

fn station(vlan: u16, mac: [u8; 6]) -> Station {
    Station { vlan, mac }
}

/// A program with queue 0 of the pair as a network, and the reader of its ring.
struct Network {
    program: Program,
    groups: MulticastReader,
}

impl Network {
    fn new(pair: &Pair, request: ModeRequest, frags: bool, limit: MulticastLimit) -> Self {
        let program = Program::attach(pair.ifindex(), request, frags).expect("veth takes XDP");
        let ring = MulticastRing::new().expect("memory");
        program.set_network(0..1, limit, &ring).expect("queue 0");
        let ring = ring.as_fd().try_clone_to_owned().expect("a descriptor");
        let groups = MulticastReader::new(ring).expect("a ring");
        Self { program, groups }
    }

    fn counters(&self) -> QueueCounters {
        self.program.counters(0).expect("counters")
    }

    fn next_group(&mut self) -> Option<(Group, Vec<u8>)> {
        let mut frame = Vec::new();
        let group = wait::until_some(wait::SOON, || self.groups.read(&mut frame))?;
        Some((group, frame))
    }
}

#[test]
fn frame_of_a_station_comes_with_its_port_and_all_others_go_to_the_host() {
    let Some(pair) = Pair::new(1500) else { return };
    for request in [ModeRequest::Native, ModeRequest::Skb] {
        for frags in [false, true] {
            let network = Network::new(&pair, request, frags, NO_LIMIT);
            let program = &network.program;
            program.set_station(0, station(0, OURS), 7).expect("room");
            program
                .set_station(0, station(0, OTHER), 0xdead_beef)
                .expect("room");
            let mut receiver = Receiver::of_queue_0(&pair, program);
            for (mac, port) in [(OURS, 7), (OTHER, 0xdead_beef), (OURS, 7)] {
                for len in [60, 64, 65, 1513, 1514] {
                    let context = format!("{request:?}, frags {frags}, {len} bytes");
                    let mut sent = frame::plain(len, 3);
                    sent[..6].copy_from_slice(&mac);
                    pair.far_socket.send(&sent);
                    let desc = receiver.next();
                    assert_eq!(desc.len as usize, len, "{context}");
                    let data = desc.data.get();
                    frame::assert_same(&receiver.bytes(data, len), &sent);
                    let note = receiver.bytes(data - NOTE_BYTES as u64, NOTE_BYTES);
                    assert_eq!(
                        noted_port(note.try_into().expect("eight")),
                        Some(port),
                        "{context}"
                    );
                    receiver.pool.put(desc.frame);
                    receiver.post();
                }
            }
            let unknown = frame_to(STRANGER, &[]);
            pair.far_socket.send(&unknown);
            assert_eq!(pair.near_socket.receive(wait::SOON), Some(unknown));
            let counters = network.counters();
            assert_eq!(
                (counters.redirected, counters.not_ours, counters.dropped()),
                (15, 1, 0)
            );
        }
    }
}

#[test]
fn stations_are_told_apart_by_the_outermost_tag() {
    let Some(pair) = Pair::new(1500) else { return };
    let xsk = pair.unbound_xsk();
    let network = Network::new(&pair, ModeRequest::Native, false, NO_LIMIT);
    network
        .program
        .enable_queue(0, xsk.as_fd(), bare(1514))
        .expect("queue 0");
    for (vlan, port) in [(0, 1), (100, 2), (4094, 3)] {
        network
            .program
            .set_station(0, station(vlan, OURS), port)
            .expect("room");
    }
    network
        .program
        .set_station(0, station(100, OTHER), 4)
        .expect("room");
    let cases: [(_, &[(u16, u16)], _); 13] = [
        (OURS, &[], true),
        (OURS, &[(0x8100, 0)], true),
        (OURS, &[(0x8100, 0xe000)], true),
        (OURS, &[(0x8100, 100)], true),
        (OURS, &[(0x8100, 0xe000 | 100)], true),
        (OURS, &[(0x8100, 4094), (0x8100, 7)], true),
        // A service tag's number is no VLAN's: with it a frame is of none.
        (OURS, &[(0x88a8, 101), (0x8100, 7)], true),
        (OTHER, &[(0x88a8, 100), (0x8100, 100)], false),
        (OURS, &[(0x8100, 7), (0x8100, 100)], false),
        (OURS, &[(0x8100, 101)], false),
        (OTHER, &[], false),
        (OTHER, &[(0x8100, 0)], false),
        (OTHER, &[(0x8100, 100)], true),
    ];
    for (to, tags, expected) in cases {
        let before = network.counters();
        let sent = frame_to(to, tags);
        pair.far_socket.send(&sent);
        if !expected {
            assert_eq!(
                pair.near_socket.receive(wait::SOON),
                Some(sent),
                "{to:x?} {tags:?}"
            );
        }
        let counted = || {
            let now = network.counters();
            now.redirected - before.redirected == u64::from(expected)
                && now.not_ours - before.not_ours == u64::from(!expected)
        };
        assert_soon!(counted(), "{to:x?} {tags:?}: {:?}", network.counters());
    }
}

#[test]
fn frame_to_a_group_reaches_the_host_and_the_ring_byte_for_byte() {
    for mtu in [1500, 9000] {
        let Some(pair) = Pair::new(mtu) else { return };
        for request in [ModeRequest::Native, ModeRequest::Skb] {
            for frags in [false, true] {
                if mtu > 3000 && !frags {
                    continue;
                }
                let xsk = pair.unbound_xsk();
                let mut network = Network::new(&pair, request, frags, NO_LIMIT);
                network
                    .program
                    .enable_queue(0, xsk.as_fd(), bare(mtu + 14))
                    .expect("queue 0");
                // The border of each length of records is among them.
                let lengths = [60, 64, 247, 248, 249, 1513, 1514, 2039, 2040, 2041, 4100, 9014];
                let lengths: Vec<usize> = lengths
                    .into_iter()
                    .filter(|&len| len <= mtu as usize + 14)
                    .collect();
                for &len in &lengths {
                    for to in [EVERYBODY, GROUP] {
                        let mut sent = frame::plain(len, 9);
                        sent[..6].copy_from_slice(&to);
                        pair.far_socket.send(&sent);
                        let host = pair.near_socket.receive(wait::SOON).expect("the host gets it");
                        frame::assert_same(&host, &sent);
                        let (group, copy) = network.next_group().expect("so does the network");
                        assert_eq!((group.queue, group.vlan), (0, 0));
                        frame::assert_same(&copy, &sent);
                    }
                }
                let counters = network.counters();
                let expected = 2 * lengths.len() as u64;
                assert_eq!(
                    (counters.group_copied, counters.group_lost),
                    (expected, 0),
                    "{request:?} {frags}"
                );
            }
        }
    }
}

#[test]
fn group_is_of_the_vlan_of_its_outermost_tag() {
    let Some(pair) = Pair::new(1500) else { return };
    let xsk = pair.unbound_xsk();
    let mut network = Network::new(&pair, ModeRequest::Native, false, NO_LIMIT);
    network
        .program
        .enable_queue(0, xsk.as_fd(), bare(1514))
        .expect("queue 0");
    let cases: [(&[(u16, u16)], u16); 5] = [
        (&[], 0),
        (&[(0x8100, 0x6000)], 0),
        (&[(0x8100, 0x2000 | 100)], 100),
        (&[(0x8100, 4094), (0x8100, 7)], 4094),
        (&[(0x88a8, 4094), (0x8100, 7)], 0),
    ];
    for (tags, vlan) in cases {
        let sent = frame_to(EVERYBODY, tags);
        pair.far_socket.send(&sent);
        let (group, copy) = network.next_group().expect("a copy");
        assert_eq!((group.vlan, copy), (vlan, sent), "{tags:?}");
    }
}

#[test]
fn groups_beyond_the_limit_reach_the_host_only_and_are_counted() {
    let Some(pair) = Pair::new(1500) else { return };
    let xsk = pair.unbound_xsk();
    // The test ends before the limit allows a frame more than the burst.
    let limit = MulticastLimit {
        a_second: 1,
        burst: 3,
    };
    let mut network = Network::new(&pair, ModeRequest::Native, false, limit);
    network
        .program
        .enable_queue(0, xsk.as_fd(), bare(1514))
        .expect("queue 0");
    let sent = frame_to(GROUP, &[]);
    // On this CPU alone, as the limit is each CPU's own.
    let id = network.program.id();
    common::on_one_cpu(|| (0..20).for_each(|_| assert_eq!(test_run(id, 0, &sent), XDP_PASS)));
    let counters = network.counters();
    assert_eq!(counters.group_copied + counters.group_limited, 20);
    assert!((3..=8).contains(&counters.group_copied), "{counters:?}");
    for _ in 0..counters.group_copied {
        assert_eq!(network.next_group().expect("copied").1, sent);
    }
    assert_eq!(network.groups.read(&mut Vec::new()), None);
}

#[test]
fn groups_that_find_no_room_in_the_ring_are_counted_and_it_goes_on() {
    let Some(pair) = Pair::new(1500) else { return };
    let xsk = pair.unbound_xsk();
    let mut network = Network::new(&pair, ModeRequest::Native, false, NO_LIMIT);
    network
        .program
        .enable_queue(0, xsk.as_fd(), bare(1514))
        .expect("queue 0");
    let id = network.program.id();
    let sent = |seed: u8| {
        let mut sent = frame::plain(1514, seed);
        sent[..6].copy_from_slice(&GROUP);
        sent
    };
    // More than once round the ring, so that records cross its end.
    for round in 0..5u8 {
        let before = network.counters();
        for seed in 0..200 {
            assert_eq!(test_run(id, 0, &sent(seed)), XDP_PASS);
        }
        let counters = network.counters();
        let copied = counters.group_copied - before.group_copied;
        assert_eq!(copied + counters.group_lost - before.group_lost, 200);
        assert!((100..200).contains(&copied), "round {round}: {counters:?}");
        for seed in 0..copied {
            let (_, copy) = network.next_group().expect("copied");
            frame::assert_same(&copy, &sent(seed as u8));
        }
        assert_eq!(network.groups.read(&mut Vec::new()), None);
    }
    let before = network.counters();
    // Longer than the queue takes.
    network.program.activate_queue(0, bare(1513)).expect("queue 0");
    assert_eq!(test_run(id, 0, &sent(1)), XDP_PASS);
    assert_eq!(network.counters().group_lost - before.group_lost, 1);
}

#[test]
fn frame_without_room_for_a_note_comes_without() {
    let Some(pair) = Pair::new(1500) else { return };
    let xsk = pair.unbound_xsk();
    let network = Network::new(&pair, ModeRequest::Native, false, NO_LIMIT);
    network.program.set_station(0, station(0, OURS), 7).expect("room");
    network
        .program
        .enable_queue(0, xsk.as_fd(), bare(1514))
        .expect("queue 0");
    assert_eq!(
        test_run(network.program.id(), 212, &frame_to(OURS, &[])),
        XDP_REDIRECT
    );
    assert_eq!(
        test_run(network.program.id(), 0, &frame_to(OURS, &[])),
        XDP_REDIRECT
    );
    let counters = network.counters();
    assert_eq!((counters.redirected, counters.no_header_room), (2, 0));
}

#[test]
fn networks_of_one_interface_have_neither_stations_nor_groups_in_common() {
    let Some(pair) = Pair::new(1500) else { return };
    let xsk = pair.unbound_xsk();
    let mut network = Network::new(&pair, ModeRequest::Native, false, NO_LIMIT);
    let program = &network.program;
    let other = MulticastRing::new().expect("memory");
    program.set_network(2..4, NO_LIMIT, &other).expect("in range");
    program.set_station(2, station(0, OTHER), 1).expect("room");
    let taken = program
        .set_station(0, station(0, OTHER), 1)
        .expect_err("it is 2's");
    assert!(taken.to_string().contains("another network"), "{taken}");
    program
        .remove_station(0, station(0, OTHER))
        .expect("not ours, hence nothing to do");
    assert_eq!(program.stations(2), [(station(0, OTHER), 1)]);
    program.enable_queue(0, xsk.as_fd(), bare(1514)).expect("queue 0");
    // A frame for the other network's station, on a queue of this one.
    assert_eq!(test_run(program.id(), 0, &frame_to(OTHER, &[])), XDP_PASS);
    assert_eq!(program.counters(0).expect("counters").not_ours, 1);
    let mut theirs =
        MulticastReader::new(other.as_fd().try_clone_to_owned().expect("a descriptor")).expect("a ring");
    let sent = frame_to(GROUP, &[]);
    assert_eq!(test_run(program.id(), 0, &sent), XDP_PASS);
    assert_eq!(network.next_group().expect("ours").1, sent);
    assert_eq!(theirs.read(&mut Vec::new()), None);
}

#[test]
fn stations_change_and_go_with_their_network() {
    let Some(pair) = Pair::new(1500) else { return };
    let xsk = pair.unbound_xsk();
    let network = Network::new(&pair, ModeRequest::Native, false, NO_LIMIT);
    let program = &network.program;
    program.enable_queue(0, xsk.as_fd(), bare(1514)).expect("queue 0");
    let verdict = || test_run(program.id(), 0, &frame_to(OURS, &[]));
    assert_eq!(verdict(), XDP_PASS);
    for impossible in [station(4095, OURS), station(0, GROUP)] {
        let refused = program.set_station(0, impossible, 1).expect_err("impossible");
        assert!(refused.to_string().contains("no valid station"), "{refused}");
    }
    program.set_station(0, station(0, OURS), 1).expect("room");
    program.set_station(0, station(5, OURS), 2).expect("room");
    program.set_station(0, station(0, OURS), 3).expect("it is there");
    assert_eq!(
        program.stations(0),
        [(station(0, OURS), 3), (station(5, OURS), 2)]
    );
    assert_eq!(verdict(), XDP_REDIRECT);
    program.remove_station(0, station(0, OURS)).expect("it is there");
    assert_eq!(verdict(), XDP_PASS);
    program.set_station(0, station(0, OURS), 3).expect("room");
    // The network does not depend on its sockets.
    program.disable_queue(0).expect("queue 0");
    assert_eq!(verdict(), XDP_PASS);
    program.enable_queue(0, xsk.as_fd(), bare(1514)).expect("queue 0");
    assert_eq!(verdict(), XDP_REDIRECT);
    program.disable_queue(0).expect("queue 0");
    program.end_network(0..1).expect("it is there");
    program.end_network(0..1).expect("nothing to do");
    assert_eq!(program.stations(0), []);
    program.enable_queue(0, xsk.as_fd(), bare(1514)).expect("queue 0");
    assert_eq!(
        test_run(program.id(), 0, &frame_to(STRANGER, &[])),
        XDP_REDIRECT,
        "a queue like any"
    );
    program.set_filter(0, &Filter::default()).expect("none");
}

#[test]
fn network_goes_on_with_the_next_owner_of_the_program() {
    let Some(pair) = Pair::new(1500) else { return };
    let bpffs = BpfFs::new();
    let dir = bpffs.pins();
    std::fs::create_dir(&dir).expect("new");
    let xsk = pair.unbound_xsk();
    let mut program = Program::attach(pair.ifindex(), ModeRequest::Native, false).expect("veth takes XDP");
    program.pin(&dir).expect("a bpffs");
    let mut ring = MulticastRing::new().expect("memory");
    ring.pin(&dir.join("ring-0")).expect("a bpffs");
    program.set_network(0..1, NO_LIMIT, &ring).expect("queue 0");
    program.set_station(0, station(0, OURS), 7).expect("room");
    program.enable_queue(0, xsk.as_fd(), bare(1514)).expect("queue 0");
    drop((program, ring));

    let program = Program::open_pinned(pair.ifindex(), &dir).expect("all is there");
    let ring = MulticastRing::open_pinned(&dir.join("ring-0")).expect("a ring");
    MulticastRing::open_pinned(&dir.join("queues")).expect_err("another map");
    assert_eq!(program.stations(0), [(station(0, OURS), 7)]);
    assert_eq!(test_run(program.id(), 0, &frame_to(OURS, &[])), XDP_REDIRECT);
    let sent = frame_to(GROUP, &[]);
    assert_eq!(test_run(program.id(), 0, &sent), XDP_PASS);
    let ring = ring.as_fd().try_clone_to_owned().expect("a descriptor");
    let mut frame = Vec::new();
    let mut reader = MulticastReader::new(ring).expect("a ring");
    assert!(reader.read(&mut frame).is_some());
    assert_eq!(frame, sent);
    steer::detach_pinned(&dir).expect("ours");
}

#[test]
fn who_reads_a_ring_can_write_nothing_of_it_but_how_far_it_has_read() {
    let Some(pair) = Pair::new(1500) else { return };
    let xsk = pair.unbound_xsk();
    let network = Network::new(&pair, ModeRequest::Native, false, NO_LIMIT);
    network
        .program
        .enable_queue(0, xsk.as_fd(), bare(1514))
        .expect("queue 0");
    common::assert_ring_not_writable(network.groups.as_fd());
    // An invalid position loses frames of this network, and has no other effect.
    let sent = frame_to(GROUP, &[]);
    for nonsense in [1, 8, 12_345, usize::MAX, usize::MAX / 2 + 5] {
        common::set_ring_position(network.groups.as_fd(), nonsense);
        for _ in 0..4 {
            assert_eq!(test_run(network.program.id(), 0, &sent), XDP_PASS);
        }
        let ring = network.groups.as_fd().try_clone_to_owned().expect("a descriptor");
        let mut reader = MulticastReader::new(ring).expect("a ring");
        let mut frame = Vec::new();
        (0..5000).for_each(|_| assert!(reader.read(&mut frame).is_none_or(|_| frame.len() < 16_384)));
    }
}
