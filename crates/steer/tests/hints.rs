//! The metadata that a bound program writes before frames, compared byte by byte, and programs that replace each
//! other.

use crate::common;

use std::collections::HashMap;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;

use common::hinted::{self, L4, VLAN, all_sets, attach, enable, pair, set};
use common::receiver::{BEFORE, Receiver, UNTOUCHED};
use common::tap::Tap;
use common::{Pair, as_a_steward, bare, frame_to, program_on};
use libbpf_rs::MapHandle;
use steer::{
    Flow, HintSet, InterfaceMarks, LayoutOfError, ModeRequest, MulticastLimit, MulticastReader,
    MulticastRing, Program, QueueConf, Station, VirtioHeader, layout_of_map, layout_of_program, note_layout,
};
use testkit::{BpfFs, PacketPort, TaggedPort, VethPair, assert_soon, frame, wait};
use xsk::RxDesc;
use xsk::metadata::{Field, Found, Hash, Hints, Layout, Layouts, Tag};

const STATION: [u8; 6] = [2, 0, 0, 0, 0, 0x11];
const PEER: [u8; 6] = [2, 0, 0, 0, 0, 1];

fn ethernet(kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = [&STATION[..], &PEER, &kind.to_be_bytes(), payload].concat();
    frame.resize(frame.len().max(60), 0);
    frame
}

fn v4(protocol: u8, payload: &[u8]) -> Vec<u8> {
    let (from, to) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2));
    ethernet(0x0800, &frame::ipv4(from, to, protocol, payload))
}

fn v6(next: u8, payload: &[u8]) -> Vec<u8> {
    let [from, to] = ["fd00::1", "fd00::2"].map(|text| text.parse::<Ipv6Addr>().expect("an address"));
    ethernet(0x86dd, &frame::ipv6(from, to, next, payload))
}

/// The expected bytes before a frame with these hints. The hash is taken from `wrote`, because the kernel's seed is not
/// known.
fn expected_bytes(layout: &Layout, wrote: &[u8], hints: Hints) -> Vec<u8> {
    let mut bytes = vec![0; usize::from(layout.len_bytes())];
    let mut absent = 0u16;
    let mut put = |field, value: &[u8]| {
        if let Some(at) = layout.offset(field) {
            bytes[usize::from(at)..][..value.len()].copy_from_slice(value);
        }
    };
    match hints.hash {
        Some(hash) => {
            let at = usize::from(layout.offset(Field::Hash).expect("there is one"));
            assert_eq!(wrote[at..at + 4], hash.value.to_ne_bytes());
            put(Field::Hash, &wrote[at..at + 4]);
            put(Field::HashType, &hash.kind.to_ne_bytes());
        }
        None => absent |= 1,
    }
    match hints.tag {
        Some(tag) => {
            put(Field::VlanProto, &tag.proto.to_be_bytes());
            put(Field::VlanTci, &tag.tci.to_ne_bytes());
        }
        None => absent |= 2,
    }
    match hints.timestamp {
        Some(time) => put(Field::Timestamp, &time.get().to_ne_bytes()),
        None => absent |= 4,
    }
    match hints.mark {
        Some(mark) => put(Field::Mark, &mark.to_ne_bytes()),
        None => absent |= 8,
    }
    match hints.port {
        Some(port) => put(Field::Port, &port.to_ne_bytes()),
        None => absent |= 16,
    }
    put(Field::Absent, &absent.to_ne_bytes());
    let end = bytes.len() - 4;
    bytes[end..].copy_from_slice(&layout.id().to_ne_bytes());
    bytes
}

/// The hints of the next frame; checks the frame and the bytes before it.
#[track_caller]
fn next_hints(receiver: &mut Receiver, layout: &Layout, sent: &[u8]) -> Hints {
    let desc: RxDesc = receiver.next();
    let (data, len) = (desc.data.get(), usize::from(layout.len_bytes()));
    frame::assert_same(&receiver.bytes(data, desc.len as usize), sent);
    let found = Layouts::new(&[*layout]).read(&receiver.umem, desc.data);
    let Found::Hints(hints) = found else {
        panic!("{found:x?}")
    };
    let wrote = receiver.bytes(data - len as u64, len);
    assert_eq!(wrote, expected_bytes(layout, &wrote, hints), "{hints:?}");
    let before = receiver.bytes(data - len as u64 - 8, 8);
    assert_eq!(before, [UNTOUCHED; 8], "nothing else is written");
    receiver.pool.put(desc.frame);
    receiver.post();
    hints
}

#[test]
fn every_set_loads_in_both_variants_with_the_capabilities_of_a_steward() {
    for mtu in [1500, 9000] {
        let Some(pair) = Pair::new(mtu) else { return };
        let frags = mtu > 3000;
        let ifindex = pair.ifindex();
        let program = as_a_steward(|| Program::attach(ifindex, ModeRequest::Native, frags));
        let program = program.expect("veth takes XDP");
        let mut lens = HashMap::new();
        for hints in all_sets() {
            let before = program.id();
            as_a_steward(|| program.set_hints(hints)).expect("it takes no other capability");
            assert_eq!(program.hints(), hints);
            assert_eq!(program_on(pair.ifindex()), Some(program.id()));
            assert_eq!(program.id() == before, hints.is_empty(), "{hints}");
            if let Some(layout) = program.layouts().first().filter(|_| !hints.is_empty()) {
                lens.insert(hints, layout.len_bytes());
                assert!(layout.len_bytes() <= 32 && layout.has(Field::Port) && layout.has(Field::Absent));
                assert_eq!(layout.has(Field::Hash), hints.has(HintSet::HASH));
                assert_eq!(layout.has(Field::HashType), hints.has(HintSet::HASH));
                assert_eq!(layout.has(Field::VlanTci), hints.has(HintSet::VLAN));
                assert_eq!(layout.has(Field::Timestamp), hints.has(HintSet::TIMESTAMP));
                assert_eq!(layout.has(Field::Mark), hints.has(HintSet::MARK));
            }
        }
        assert_eq!(
            (lens.len(), lens[&HintSet::ALL], lens[&HintSet::HASH]),
            (15, 32, 16)
        );
    }
}

#[test]
fn each_kind_of_frame_has_the_bytes_that_its_layout_says() {
    let Some(pair) = pair() else { return };
    let tagged = TaggedPort::on((&pair.veth.far, VethPair::WIRE), 0x8100, VLAN);
    let cases: [(&str, Vec<u8>, Option<u16>); 6] = [
        ("IPv4 UDP", v4(17, &frame::udp_ports([1000, 2000])), Some(L4)),
        ("IPv6 UDP", v6(17, &frame::udp_ports([1000, 2000])), Some(L4)),
        ("IPv4 ICMP", v4(1, &[8, 0, 0, 0, 0, 1, 0, 1]), Some(0)),
        ("no IP", ethernet(0x88b5, &[7; 60]), Some(0)),
        ("tagged in the frame", frame_to(STATION, &[(0x8100, 7)]), None),
        ("cut off", ethernet(0x0800, &[0x45]), None),
    ];
    for hints in all_sets().filter(|hints| !hints.is_empty()) {
        let program = attach(&pair, hints);
        let layout = program.layouts()[0];
        let mut receiver = hinted::receiver(&pair, &program);
        for (name, sent, kind) in &cases {
            for (port, tag) in [(&pair.far_socket, None), (tagged.port(), Some(u16::from(VLAN)))] {
                port.send(sent);
                let got = next_hints(&mut receiver, &layout, sent);
                let context = format!("{hints}: {name}, {tag:?}");
                assert_eq!(got.hash.is_some(), hints.has(HintSet::HASH), "{context}");
                if let (Some(kind), Some(hash)) = (kind, got.hash) {
                    assert_eq!(hash.kind, *kind, "{context}");
                }
                let expected = tag.filter(|_| hints.has(HintSet::VLAN));
                assert_eq!(
                    got.tag,
                    expected.map(|tci| Tag { proto: 0x8100, tci }),
                    "{context}"
                );
                // veth has no clock, and no rule is set.
                assert_eq!(
                    (got.timestamp, got.mark, got.port),
                    (None, None, None),
                    "{context}"
                );
            }
        }
        let counters = program.counters(0).expect("counters");
        assert_eq!((counters.redirected, counters.dropped()), (12, 0));
    }
}

#[test]
fn hash_is_that_of_the_flow() {
    let Some(pair) = pair() else { return };
    let program = attach(&pair, HintSet::HASH);
    let layout = program.layouts()[0];
    let mut receiver = hinted::receiver(&pair, &program);
    let mut hash_of = |flow: u16, len| {
        let sent = frame::udp(flow, len);
        pair.far_socket.send(&sent);
        next_hints(&mut receiver, &layout, &sent).hash.expect("UDP")
    };
    let first: Vec<Hash> = (0..16).map(|flow| hash_of(flow, 64)).collect();
    let again: Vec<Hash> = (0..16).map(|flow| hash_of(flow, 900)).collect();
    assert_eq!(first, again);
    assert!(first.iter().any(|hash| hash.value != first[0].value));
}

#[test]
fn marks_are_those_of_the_flow_or_else_of_the_service() {
    let Some(pair) = pair() else { return };
    let program = attach(&pair, HintSet::MARK);
    let layout = program.layouts()[0];
    let mut receiver = hinted::receiver(&pair, &program);
    let tagged = TaggedPort::on((&pair.veth.far, VethPair::WIRE), 0x8100, VLAN);
    let mut mark_of = |port: &PacketPort, sent: &[u8]| {
        port.send(sent);
        next_hints(&mut receiver, &layout, sent).mark
    };
    let flow = |protocol, from: &str, to: &str, ports: [u16; 2]| Flow {
        protocol,
        from: Some((from.parse().expect("an address"), ports[0])),
        to: (to.parse().expect("an address"), ports[1]),
    };
    let over_v4 = flow(17, "10.0.0.1", "10.0.0.2", [1000, 2000]);
    let over_v6 = flow(6, "fd00::1", "fd00::2", [1000, 2000]);
    let ping = flow(1, "10.0.0.1", "10.0.0.2", [0, 0]);
    let service = Flow {
        from: None,
        ..over_v4
    };
    let marks = InterfaceMarks::of(pair.ifindex()).expect("of this program");
    for (flow, mark) in [(over_v4, 1), (over_v6, 0), (ping, u32::MAX), (service, 4)] {
        marks.set(&flow, mark).expect("room");
    }
    let udp = v4(17, &frame::udp_ports([1000, 2000]));
    let mut fragment = udp.clone();
    fragment[14 + 7] = 9;
    let mut options = v4(17, &[&[1; 4][..], &frame::udp_ports([1000, 2000])].concat());
    options[14] = 0x46;
    // It looks like the one of IPv4 in all but its version.
    let mut like_it = v6(17, &frame::udp_ports([1000, 2000]));
    like_it[22..38].copy_from_slice(&"::ffff:10.0.0.1".parse::<Ipv6Addr>().expect("v6").octets());
    like_it[38..54].copy_from_slice(&"::ffff:10.0.0.2".parse::<Ipv6Addr>().expect("v6").octets());
    let twice = [&udp[..12], &[0x88, 0xa8, 0, 5, 0x81, 0, 0, 6], &udp[12..]].concat();
    let cases = [
        (udp.clone(), Some(1)),
        (options, Some(1)),
        (like_it, None),
        (twice, Some(1)),
        (fragment, None),
        (v4(17, &frame::udp_ports([1001, 2000])), Some(4)),
        (v4(17, &frame::udp_ports([1000, 2001])), None),
        (v4(6, &frame::udp_ports([1000, 2000])), None),
        (v6(6, &frame::udp_ports([1000, 2000])), Some(0)),
        (v6(17, &frame::udp_ports([1000, 2000])), None),
        (v4(1, &[8, 0, 0, 0]), Some(u32::MAX)),
        (ethernet(0x0800, &[]), None),
        (ethernet(0x86dd, &[]), None),
    ];
    for (n, (sent, mark)) in cases.iter().enumerate() {
        for port in [&pair.far_socket, tagged.port()] {
            assert_eq!(mark_of(port, sent), *mark, "case {n}");
        }
    }
    let all = marks.all();
    assert_eq!(all.len(), 4);
    assert!(all.contains(&(service, 4)) && all.contains(&(over_v6, 0)));
    assert!(marks.remove(&over_v4).expect("it is there"));
    assert!(!marks.remove(&over_v4).expect("nothing to do"));
    assert_eq!(mark_of(&pair.far_socket, &udp), Some(4));
}

/// Makes queue 0 a network: [`STATION`] is port 7 in [`VLAN`], and port 8 without one.
fn network_of_two(program: &Program) -> MulticastRing {
    let ring = MulticastRing::new().expect("memory");
    let limit = MulticastLimit {
        a_second: 0,
        burst: 1,
    };
    program.set_network(0..1, limit, &ring).expect("queue 0");
    for (vlan, port) in [(VLAN.into(), 7), (0, 8)] {
        let station = Station { vlan, mac: STATION };
        program.set_station(0, station, port).expect("room");
    }
    ring
}

/// The next copy that is in the ring.
fn next_copy(groups: &mut MulticastReader) -> (u16, Vec<u8>) {
    let mut copy = Vec::new();
    let group = wait::until_some(wait::SOON, || groups.read(&mut copy)).expect("copied");
    (group.vlan, copy)
}

#[test]
fn station_is_found_by_the_tag_that_is_not_in_the_frame() {
    let Some(pair) = pair() else { return };
    let tagged = TaggedPort::on((&pair.veth.far, VethPair::WIRE), 0x8100, VLAN);
    let program = attach(&pair, set("hash,vlan"));
    let layout = program.layouts()[0];
    let ring = network_of_two(&program);
    let mut receiver = hinted::receiver(&pair, &program);
    let sent = frame_to(STATION, &[]);
    tagged.port().send(&sent);
    assert_eq!(next_hints(&mut receiver, &layout, &sent).port, Some(7));
    pair.far_socket.send(&sent);
    assert_eq!(next_hints(&mut receiver, &layout, &sent).port, Some(8));

    // A copy for the ring has the tag again, of every length.
    let ring = ring.as_fd().try_clone_to_owned().expect("a descriptor");
    let mut groups = MulticastReader::new(ring).expect("a ring");
    for len in [60, 243, 244, 245, 248, 249, 1510] {
        let mut sent = frame::plain(len, 9);
        sent[..6].copy_from_slice(&[0xff; 6]);
        tagged.port().send(&sent);
        let (vlan, copy) = next_copy(&mut groups);
        assert_eq!(vlan, u16::from(VLAN));
        let whole = [&sent[..12], &[0x81, 0, 0, VLAN], &sent[12..]].concat();
        frame::assert_same(&copy, &whole);
    }

    // The limit includes the tag.
    let mut sent = frame::plain(1511, 9);
    sent[..6].copy_from_slice(&STATION);
    tagged.port().send(&sent);
    assert_soon!(program.counters(0).expect("counters").too_long == 1);

    // The plain program leaves the old note, which is a layout like the others.
    program.set_hints(HintSet::NONE).expect("it was so");
    let sent = frame_to(STATION, &[]);
    pair.far_socket.send(&sent);
    let desc = receiver.next();
    let layouts = Layouts::new(&[layout, note_layout()]);
    let port = Hints {
        port: Some(8),
        ..Hints::default()
    };
    assert_eq!(layouts.read(&receiver.umem, desc.data), Found::Hints(port));
    receiver.pool.put(desc.frame);
}

/// The number in a service tag is not a VLAN, whether the tag is in the frame or in its metadata.
#[test]
fn service_tag_that_is_not_in_the_frame_is_of_no_vlan_and_is_told() {
    let Some(pair) = pair() else { return };
    let tagged = TaggedPort::on((&pair.veth.far, VethPair::WIRE), 0x88a8, VLAN);
    let program = attach(&pair, set("vlan"));
    let layout = program.layouts()[0];
    let ring = network_of_two(&program);
    let mut receiver = hinted::receiver(&pair, &program);
    let sent = frame_to(STATION, &[]);
    tagged.port().send(&sent);
    let tag = Tag {
        proto: 0x88a8,
        tci: VLAN.into(),
    };
    let got = next_hints(&mut receiver, &layout, &sent);
    assert_eq!((got.port, got.tag), (Some(8), Some(tag)));

    let ring = ring.as_fd().try_clone_to_owned().expect("a descriptor");
    let mut groups = MulticastReader::new(ring).expect("a ring");
    let mut sent = frame::plain(60, 9);
    sent[..6].copy_from_slice(&[0xff; 6]);
    tagged.port().send(&sent);
    let (vlan, copy) = next_copy(&mut groups);
    assert_eq!(vlan, 0);
    let whole = [&sent[..12], &[0x88, 0xa8, 0, VLAN], &sent[12..]].concat();
    frame::assert_same(&copy, &whole);
}

#[test]
fn before_a_virtio_header_nothing_is_left_and_no_foreign_hash_is_reported() {
    let Some(pair) = pair() else { return };
    for header in [VirtioHeader::Basic, VirtioHeader::HashReport] {
        let program = attach(&pair, HintSet::ALL);
        let mut receiver = Receiver::reading_hints(&pair, &program);
        let conf = QueueConf {
            virtio_header: Some(header),
            frame_limit: 1514,
            hints: true,
        };
        program
            .enable_queue(0, receiver.socket.as_fd(), conf)
            .expect("queue 0");
        let sent = frame::udp(1, 100);
        pair.far_socket.send(&sent);
        let desc = receiver.next();
        let len = header.len_bytes() as usize;
        let mut expected = [UNTOUCHED; BEFORE];
        expected[BEFORE - len..].fill(0);
        expected[BEFORE - len + 10] = 1;
        // veth says only that the hash is of a flow, which is no type of virtio's.
        assert_eq!(receiver.bytes(desc.data.get() - BEFORE as u64, BEFORE), expected);
        frame::assert_same(&receiver.bytes(desc.data.get(), sent.len()), &sent);
        receiver.pool.put(desc.frame);
    }
}

#[test]
fn queue_that_does_not_ask_has_nothing_before_its_frames() {
    let Some(pair) = pair() else { return };
    let program = attach(&pair, HintSet::ALL);
    let mut receiver = Receiver::reading_hints(&pair, &program);
    let conf = bare(1514);
    program
        .enable_queue(0, receiver.socket.as_fd(), conf)
        .expect("queue 0");
    pair.far_socket.send(&frame::udp(1, 100));
    let desc = receiver.next();
    let found = Layouts::new(&program.layouts()).read(&receiver.umem, desc.data);
    assert_eq!(found, Found::Nothing);
    receiver.pool.put(desc.frame);
    // If the socket is closed, the host gets the frame without the metadata.
    enable(&program, &receiver);
    drop(receiver);
    let sent = frame::udp(1, 100);
    pair.far_socket.send(&sent);
    assert_eq!(pair.near_socket.receive(wait::SOON), Some(sent));
}

#[test]
fn layout_that_nobody_knows_is_told_by_its_id() {
    let Some(pair) = pair() else { return };
    let program = attach(&pair, HintSet::HASH);
    let old = program.layouts();
    program.set_hints(set("hash,mark")).expect("all of them");
    let mut receiver = hinted::receiver(&pair, &program);
    pair.far_socket.send(&frame::udp(1, 100));
    let desc = receiver.next();
    let new = program.layouts()[0];
    let found = Layouts::new(&old).read(&receiver.umem, desc.data);
    assert_eq!(found, Found::Unknown(new.id()));
    assert_eq!(found.hints(), Hints::default());
    receiver.pool.put(desc.frame);
}

#[test]
fn hints_are_for_native_mode() {
    let Some(pair) = pair() else { return };
    let program = Program::attach(pair.ifindex(), ModeRequest::Skb, false).expect("skb works everywhere");
    let (id, refused) = (program.id(), program.set_hints(HintSet::HASH));
    let refused = refused.expect_err("skb mode").to_string();
    assert!(refused.contains("in skb mode"), "{refused}");
    program.set_hints(HintSet::NONE).expect("it has none");
    assert_eq!((program.id(), program.layouts()), (id, vec![]));
}

#[test]
fn hints_that_the_driver_lacks_are_absent_in_every_frame() {
    let Some(pair) = pair() else { return };
    let mut tap = Tap::new(&pair);
    if let Ok(driver) = HintSet::of_driver(tap.ifindex) {
        assert_eq!(driver, HintSet::NONE);
    }
    let program = Program::attach(tap.ifindex, ModeRequest::Native, false).expect("tun has native XDP");
    let mut receiver = Receiver::open_for(tap.ifindex, &program, true);
    enable(&program, &receiver);
    for hints in all_sets().filter(|hints| !hints.is_empty()) {
        program.set_hints(hints).expect("it loads all the same");
        let layout = program.layouts()[0];
        let sent = frame::udp(1, 100);
        tap.send(&sent);
        assert_eq!(
            next_hints(&mut receiver, &layout, &sent),
            Hints::default(),
            "{hints}"
        );
    }
}

#[test]
fn driver_says_what_it_can_tell() {
    let Some(pair) = Pair::new(1500) else { return };
    let Ok(driver) = HintSet::of_driver(pair.ifindex()) else {
        println!("SKIPPED: this kernel does not tell (Linux 6.3)");
        return;
    };
    assert!(driver.has(HintSet::HASH.with(HintSet::TIMESTAMP)), "{driver}");
    assert_eq!(driver.has(HintSet::VLAN), HintSet::of_kernel().has(HintSet::VLAN));
    assert_eq!(
        HintSet::of_driver(pair.loopback()).expect("it is there"),
        HintSet::NONE
    );
    HintSet::of_driver(4_000_000).expect_err("no such interface");
}

#[test]
fn layout_of_somebody_elses_program_is_read_from_its_types() {
    let Some(pair) = pair() else { return };
    let bpffs = BpfFs::new();
    let dir = bpffs.pins();
    std::fs::create_dir(&dir).expect("new");
    let mut program = attach(&pair, set("hash,timestamp"));
    program.pin(&dir).expect("a bpffs");
    let ours = program.layouts()[0];
    let theirs = layout_of_program(program.id(), "steer_hints_hash_timestamp").expect("it is there");
    assert_eq!(theirs.id(), ours.id() & 0xffff);
    let offsets = |layout: Layout| Field::ALL.map(|field| layout.offset(field));
    assert_eq!(
        (offsets(theirs), theirs.len_bytes()),
        (offsets(ours), ours.len_bytes())
    );
    let map = MapHandle::from_pinned_path(dir.join("sockets")).expect("it is pinned");
    assert_eq!(
        layout_of_map(map.as_fd(), "steer_hints_hash_timestamp").expect("it is used"),
        theirs
    );

    let error = |structure| layout_of_program(program.id(), structure).expect_err("no layout");
    assert!(matches!(error("no_such"), LayoutOfError::Missing { .. }));
    assert!(matches!(error("a\0b"), LayoutOfError::Missing { .. }));
    assert!(matches!(error("steer_counters"), LayoutOfError::Nameless { .. }));
    let nobody = layout_of_map(map.as_fd(), "no_such");
    assert!(matches!(nobody, Err(LayoutOfError::Owner { .. })), "{nobody:?}");
    steer::detach_pinned(&dir).expect("ours");
}
