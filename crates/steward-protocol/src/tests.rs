use proptest::prelude::*;
use steer::{Filter, HintSet, Mode, ModeRequest, QueueConf, VirtioHeader};
use xsk::NumaNode;
use xsk::metadata::{Field, Layout, MAX_LAYOUTS};

use super::*;
use crate::Listed;
use host::links::{DriverSends, Link};

fn facts() -> Facts {
    Facts {
        ifindex: 7,
        name: "eth1".to_owned(),
        mtu: 1500,
        mac: [2, 0, 0, 0, 0, 1],
        rx_queues: 4,
        driver: "igb".to_owned(),
        up: true,
        partial_checksums: true,
        node: NumaNode::new(1),
        translated: true,
        strips_tags: true,
        loses: true,
        mode: Some(Mode::Skb),
        program: 99,
        sends: DriverSends {
            checksum: true,
            most_pieces: 17,
            zero_copy: true,
        },
        generation: 1,
        steered: Steered::ByRules,
        impaired: true,
        note: "native mode: no".to_owned(),
        steering: "no rules".to_owned(),
    }
}

fn wanted() -> Wanted {
    Wanted {
        interface: "eth1".to_owned(),
        start_queue: 2,
        queues: 3,
        mode: ModeRequest::Native,
        filter: Filter {
            macs: vec![[2, 0, 0, 0, 0, 1], [0; 6]],
            vlans: vec![0, 100],
        },
        network: false,
    }
}

const RINGS: Rings = Rings {
    fill: RING_MAX,
    completion: 1,
    rx: 2048,
    tx: 1024,
};

fn layout(parts: u64) -> UmemLayout {
    let part = |number| Part {
        file_offset: 4096 * number,
        len: 8192,
    };
    UmemLayout {
        parts: (0..parts).map(part).collect(),
        chunk_bytes: 4096,
        headroom_bytes: 0,
        tx_metadata_bytes: 64,
        flags: UMEM_FLAGS,
    }
}

fn requests() -> Vec<Request> {
    let conf = |virtio_header| QueueConf {
        virtio_header,
        frame_limit: 1518,
        hints: false,
    };
    vec![
        Request::Lease(wanted()),
        Request::Register {
            queue: 2,
            umem: layout(2),
            rings: RINGS,
        },
        Request::Bind {
            queue: 2,
            flags: BIND_FLAGS,
            wait_ms: BIND_WAIT_MAX,
        },
        Request::Share {
            queue: 2,
            wait_ms: BIND_WAIT_MAX,
            cookie: u64::MAX,
            rings: RINGS,
        },
        Request::Await {
            queue: 2,
            wait_ms: BIND_WAIT_MAX,
        },
        Request::Activate {
            queue: 2,
            conf: conf(None),
        },
        Request::Activate {
            queue: 3,
            conf: conf(Some(VirtioHeader::HashReport)),
        },
        Request::Activate {
            queue: 3,
            conf: QueueConf {
                hints: true,
                ..conf(None)
            },
        },
        Request::Hints(HintRequest::default()),
        Request::Hints(HintRequest {
            asked: HintSet::ALL,
            tags: true,
        }),
        Request::Deactivate { queue: 4 },
        Request::Counters { queue: 0 },
        Request::Facts,
        Request::Stations {
            changes: vec![change(5, 1, Some(7)), change(0, 2, None)],
        },
        Request::Groups,
        Request::Host { has: 7 },
        Request::Uplink { has: 7, queues: 1 },
        Request::Uplink {
            has: 7,
            queues: TAP_QUEUES_MAX as u32,
        },
        Request::Behind { after: station(0, 0) },
        Request::Advertise {
            changes: vec![
                address(None),
                address(Some("192.0.2.1")),
                address(Some("2001:db8::1")),
            ],
        },
        Request::Behind {
            after: station(ANY_VLAN, 2),
        },
        Request::Lease(Wanted {
            filter: Filter::default(),
            network: true,
            ..wanted()
        }),
        Request::Zcrx(zcrx()),
        Request::ZcrxRegister(zcrx_rings()),
        Request::Netkit(NetkitWanted {
            queue: 2,
            name: "pod0".to_owned(),
        }),
        Request::SendTap {
            queue: 3,
            only_with_tso: true,
        },
        Request::Tunnel {
            share: 0,
            device: "vx100".to_owned(),
        },
        Request::TunnelStations {
            share: 7,
            changes: vec![StationChange {
                station: station(0, 2),
                port: Some(9),
            }],
        },
        Request::Vteps {
            share: SHARES_MAX,
            changes: vec![
                VtepChange {
                    vtep: [10, 9, 0, 2].into(),
                    is_added: true,
                },
                VtepChange {
                    vtep: "2001:db8::1".parse().expect("an address"),
                    is_added: false,
                },
            ],
        },
        Request::DropUnknown { share: 63 },
        Request::Leases { after: u64::MAX },
        Request::Keep { token: [0xa5; 16] },
        Request::Resume { token: [0; 16] },
    ]
}

fn station(vlan: u16, byte: u8) -> steer::Station {
    steer::Station { vlan, mac: [byte; 6] }
}

#[test]
fn stations_behind_a_bridge_are_possible_ones_and_in_no_list_that_is_too_long() {
    let decoded = |stations| Answer::decode(&Answer::Behind(stations).encode(1)).is_ok();
    assert!(decoded(vec![station(4094, 2)]));
    assert!(!decoded(vec![station(4095, 2)]) && !decoded(vec![station(0, 3)]));
    assert!(!decoded(vec![station(ANY_VLAN, 3)]), "a group");
    let many = |count: u16| (1..=count).map(|vlan| station(vlan, 2)).collect();
    assert!(decoded(many(64)) && !decoded(many(65)));
    let too_many = HostEnd {
        interface: "vaxh3-0".to_owned(),
        behind: 1025,
        ..HostEnd::default()
    };
    assert!(Answer::decode(&Answer::Host(too_many).encode(1)).is_err());
}

fn zcrx() -> ZcrxWanted {
    let flows = ["192.0.2.1:443", "[2001:db8::1]:443"];
    ZcrxWanted {
        interface: "eth1".to_owned(),
        queue: 7,
        flows: flows
            .map(|flow| flow.parse().expect("an address and a port"))
            .to_vec(),
    }
}

fn zcrx_rings() -> ZcrxRings {
    ZcrxRings {
        rings: vec![9, 0],
        area: Part {
            file_offset: 4096,
            len: 1 << 20,
        },
        entries: ZCRX_ENTRIES_MAX,
        buffer_bytes: 0,
    }
}

#[test]
fn flows_and_rings_that_cannot_be_are_malformed() {
    let wanted = |change: fn(&mut ZcrxWanted)| {
        let mut wanted = zcrx();
        change(&mut wanted);
        Request::decode(&Request::Zcrx(wanted).encode(1)).is_ok()
    };
    assert!(wanted(|_| {}));
    // Bytes after an IPv4 address.
    let mut behind = Request::Zcrx(zcrx()).encode(1);
    let at = behind
        .windows(4)
        .position(|bytes| bytes == [192, 0, 2, 1])
        .expect("the first flow");
    behind[at + 15] = 1;
    assert!(Request::decode(&behind).is_err());
    for change in [
        (|wanted| wanted.flows.clear()) as fn(&mut ZcrxWanted),
        |wanted| wanted.flows = vec![wanted.flows[0]; 2],
        |wanted| wanted.flows = (1..=9).map(|port| ([192, 0, 2, 1], port).into()).collect(),
        |wanted| wanted.flows[0].set_port(0),
        |wanted| wanted.flows[0] = ([0, 0, 0, 0], 443).into(),
        |wanted| wanted.flows[0] = ([224, 0, 0, 1], 443).into(),
        |wanted| wanted.interface = "eth/1".to_owned(),
    ] {
        assert!(!wanted(change));
    }
    let rings = |change: fn(&mut ZcrxRings)| {
        let mut rings = zcrx_rings();
        change(&mut rings);
        Request::decode(&Request::ZcrxRegister(rings).encode(1)).is_ok()
    };
    assert!(rings(|_| {}));
    for change in [
        (|rings| rings.rings.clear()) as fn(&mut ZcrxRings),
        |rings| rings.rings = vec![3, 3],
        |rings| rings.rings = vec![-1],
        |rings| rings.rings = (0..17).collect(),
        |rings| rings.area.len = 0,
        |rings| rings.area.len = u64::MAX - 4095,
        |rings| rings.area.file_offset = 7,
        |rings| rings.entries = 0,
        |rings| rings.entries = 3,
        |rings| rings.entries = 2 * ZCRX_ENTRIES_MAX,
        |rings| rings.buffer_bytes = 4097,
        |rings| rings.buffer_bytes = 2 * ZCRX_BUFFER_MAX,
    ] {
        assert!(!rings(change));
    }
}

fn address(ip: Option<&str>) -> AddressChange {
    AddressChange {
        station: station(7, 2),
        ip: ip.map(|ip| ip.parse().expect("an address")),
        is_added: ip.is_none(),
    }
}

#[test]
fn only_addresses_of_one_host_are_advertised() {
    let decoded =
        |changes: Vec<AddressChange>| Request::decode(&Request::Advertise { changes }.encode(1)).is_ok();
    assert!(decoded(vec![address(None); ADVERTISED_CHANGES_MAX]));
    assert!(!decoded(Vec::new()));
    for ip in [
        "224.0.0.1",
        "ff02::1",
        "0.0.0.0",
        "255.255.255.255",
        "127.0.0.1",
        "::1",
    ] {
        assert!(!decoded(vec![address(Some(ip))]), "{ip}");
    }
    for station in [station(4095, 2), station(0, 3), station(0, 0)] {
        let change = AddressChange {
            station,
            ..address(None)
        };
        assert!(!decoded(vec![change]), "{station:?}");
    }
}

fn change(vlan: u16, last: u8, port: Option<u32>) -> StationChange {
    let mac = [2, 0, 0, 0, 0, last];
    StationChange {
        station: steer::Station { vlan, mac },
        port,
    }
}

#[test]
fn stations_that_cannot_be_are_malformed() {
    let decoded = |changes: Vec<StationChange>| Request::decode(&Request::Stations { changes }.encode(1));
    let many = |count: u8| {
        (0..count)
            .map(|last| change(7, last, Some(1)))
            .collect::<Vec<_>>()
    };
    assert!(decoded(many(64)).is_ok());
    assert!(decoded(many(65)).is_err(), "too many");
    assert!(decoded(Vec::new()).is_err(), "none");
    assert!(
        decoded(vec![change(1, 1, None), change(1, 1, Some(2))]).is_err(),
        "twice"
    );
    assert!(decoded(vec![change(4095, 1, Some(2))]).is_err(), "no such VLAN");
    let mut group = change(1, 1, Some(2));
    group.station.mac[0] = 3;
    assert!(decoded(vec![group]).is_err(), "a group");
    // A network has no filter.
    let both = Wanted {
        network: true,
        ..wanted()
    };
    assert!(Request::decode(&Request::Lease(both).encode(1)).is_err());
}

fn answers() -> Vec<Answer> {
    vec![
        Answer::Done,
        Answer::Facts(facts()),
        Answer::Facts(Facts {
            ifindex: 0,
            mode: None,
            up: false,
            ..facts()
        }),
        Answer::Counters(zerocopy::transmute!([1u64, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])),
        Answer::SendTap(SendTapEnd {
            interface: "vaxs3-0".to_owned(),
            cuts_udp: true,
        }),
        Answer::Host(HostEnd {
            interface: "vaxh3-0".to_owned(),
            index: 9,
            cuts_udp: true,
            macs: vec![[2; 6], [4; 6]],
            bridge: "br0".to_owned(),
            behind: 1024,
            left_out: 7,
        }),
        Answer::Host(HostEnd {
            interface: "vaxh3-0".to_owned(),
            ..HostEnd::default()
        }),
        Answer::Behind(vec![station(0, 2), station(7, 4), station(ANY_VLAN, 2)]),
        Answer::Behind(Vec::new()),
        Answer::Hinted(Hinted {
            possible: HintSet::ALL,
            on: HintSet::HASH,
            why: "no timestamp".to_owned(),
            layouts: vec![Layout::new(0x8001_0007, 16, &[(Field::Hash, 0)]).expect("inside"); MAX_LAYOUTS],
        }),
        Answer::Hinted(Hinted::default()),
        Answer::ZcrxRegistered(ZcrxRegistered {
            numbers: vec![0, 7],
            entries: 4096,
            buffer_bytes: 4096,
            offsets: [0, 4, 64],
            map_offset: 1 << 40,
            map_bytes: 1 << 17,
        }),
        Answer::Netkit(NetkitEnd {
            name: "pod0".to_owned(),
            ifindex: 9,
            queue: 1,
        }),
        Answer::Refused(Refusal::new(Reason::Taken, "queue 2 is taken")),
        Answer::Changed(facts()),
        Answer::Lease(Listed {
            number: 1 << 40,
            namespace: 4_026_531_840,
            pid: 7,
            uid: 65_534,
            interface: "eth1".to_owned(),
            start_queue: 2,
            queues: 3,
            filter: wanted().filter,
            steered: Steered::ByContext,
            impaired: false,
            orphaned: true,
            zcrx: true,
        }),
        Answer::Failed {
            step: Step::Bind,
            errno: 16,
        },
    ]
}

#[test]
fn facts_of_an_interface_are_those_of_its_link() {
    let of = facts();
    let link = Link {
        index: of.ifindex,
        name: of.name.clone(),
        mtu: of.mtu,
        mac: of.mac,
        rx_queues: of.rx_queues,
        driver: of.driver.clone(),
        up: true,
        partial_checksums: true,
        node: of.node,
        translated: true,
        ..Link::default()
    };
    let found = Facts::of(&link);
    assert_eq!(
        (found.ifindex, &found.name, found.mtu, found.mac),
        (of.ifindex, &of.name, of.mtu, of.mac)
    );
    assert_eq!(
        (found.rx_queues, &found.driver, found.node),
        (of.rx_queues, &of.driver, of.node)
    );
    assert!(found.up && found.partial_checksums && found.translated);
}

#[test]
fn every_message_is_read_as_it_was_written() {
    for (serial, request) in (1..).zip(requests()) {
        let bytes = request.encode(serial);
        assert!(bytes.len() <= MESSAGE_MAX);
        assert_eq!(Request::decode(&bytes), Ok((serial, request)));
    }
    for (serial, answer) in (0..).zip(answers()) {
        let bytes = answer.encode(serial);
        assert!(bytes.len() <= MESSAGE_MAX);
        assert_eq!(Answer::decode(&bytes), Ok((serial, answer)));
    }
}

#[test]
fn counters_have_one_length() {
    let counters: [u64; 11] = std::array::from_fn(|at| at as u64);
    let answer = Answer::Counters(zerocopy::transmute!(counters));
    let encoded = answer.encode(1);
    assert_eq!(encoded.len(), 8 + 88);
    assert_eq!(Answer::decode(&encoded), Ok((1, answer)));
    assert!(
        Answer::decode(&encoded[..8 + 72]).is_err(),
        "of an earlier release"
    );
}

#[test]
fn netkit_has_a_name_that_an_interface_can_have_and_nothing_beside() {
    let wanted = NetkitWanted {
        queue: 2,
        name: "pod0".to_owned(),
    };
    let changed = |at: usize, byte: u8| {
        let mut bytes = Request::Netkit(wanted.clone()).encode(1);
        bytes[at] = byte;
        Request::decode(&bytes)
    };
    assert!(changed(8, 3).is_ok());
    assert!(matches!(changed(12, 1), Err(Malformed::Value { .. })));
    assert!(matches!(changed(17, b'/'), Err(Malformed::Interface(_))));
    assert!(matches!(
        changed(16, 0),
        Err(Malformed::Interface(_) | Malformed::Text(_))
    ));
}

#[test]
fn message_of_any_other_length_is_malformed() {
    let messages = requests().into_iter().map(|request| request.encode(1));
    for bytes in messages {
        for len in 0..bytes.len() {
            assert!(Request::decode(&bytes[..len]).is_err(), "{len} of {bytes:?}");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(matches!(Request::decode(&longer), Err(Malformed::Length { .. })));
    }
}

/// A valid lease request, changed.
fn changed(change: impl FnOnce(&mut Vec<u8>)) -> Result<(u32, Request), Malformed> {
    let mut bytes = Request::Lease(wanted()).encode(1);
    change(&mut bytes);
    Request::decode(&bytes)
}

fn raw(kind: u16, serial: u32, body: &[u32]) -> Vec<u8> {
    message(serial, |to| {
        to.extend_from_slice(body.as_bytes());
        kind
    })
}

#[test]
fn impossible_values_are_malformed() {
    let number = |at: usize, value: u32| {
        changed(|bytes| bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes())).expect_err("impossible")
    };
    assert!(matches!(number(0, 1), Malformed::Version(1)));
    assert!(matches!(number(4, 0), Malformed::Serial));
    for (at, value) in [(24, u32::MAX), (28, 0), (28, QUEUES_MAX + 1), (32, 5)] {
        assert!(
            matches!(number(at, value), Malformed::Value { .. }),
            "{value} at {at}"
        );
    }
    let activate = |header_bytes, frame_limit| {
        let body = [0, header_bytes, frame_limit];
        Request::decode(&raw(3, 1, &body))
    };
    assert!(activate(12, 1518).is_ok());
    assert_eq!(mode_request(ModeRequest::Tap as u32), Ok(ModeRequest::Tap));
    assert!(mode_request(99).is_err());
    for (header, limit) in [(11, 1518), (u32::MAX, 1518), (0, 13), (0, 65_554)] {
        assert!(matches!(activate(header, limit), Err(Malformed::Value { .. })));
    }
}

/// So stewards know it that know of one queue only.
#[test]
fn uplink_of_one_queue_is_a_message_of_its_own() {
    let one = Request::Uplink { has: 7, queues: 1 }.encode(1);
    assert_eq!((&one[2..4], one.len()), (&22u16.to_ne_bytes()[..], 12));
    let several = |queues: u32| Request::decode(&raw(23, 1, &[7, queues]));
    assert!(several(2).is_ok());
    for queues in [0, 1, TAP_QUEUES_MAX as u32 + 1, u32::MAX] {
        assert!(
            matches!(several(queues), Err(Malformed::Value { .. })),
            "{queues}"
        );
    }
}

#[test]
fn impossible_memory_is_malformed() {
    let register = |parts: u64, change: &dyn Fn(&mut UmemLayout, &mut Rings)| {
        let (mut umem, mut rings) = (layout(parts), RINGS);
        change(&mut umem, &mut rings);
        let queue = 0;
        Request::decode(&Request::Register { queue, umem, rings }.encode(1))
    };
    let most = PARTS_MAX as u64;
    assert!(register(most, &|_, _| {}).is_ok());
    assert!(register(0, &|_, _| {}).is_err() && register(most + 1, &|_, _| {}).is_err());
    assert!(register(1, &|umem, _| umem.parts[0].len = UMEM_MAX).is_ok());
    let last = i64::MAX.cast_unsigned() - 4095 - 8192;
    assert!(register(1, &|umem, _| umem.parts[0].file_offset = last).is_ok());
    for len in [
        0,
        1,
        4095,
        4097,
        UMEM_MAX,
        UMEM_MAX + 4096,
        u64::MAX,
        u64::MAX - 4095,
    ] {
        let parts = register(2, &|umem, _| umem.parts[1].len = len);
        assert!(matches!(parts, Err(Malformed::Value { .. })), "{len}");
    }
    for offset in [1, 4095, i64::MAX.cast_unsigned() - 4095, u64::MAX - 4095] {
        let parts = register(2, &|umem, _| umem.parts[1].file_offset = offset);
        assert!(matches!(parts, Err(Malformed::Value { .. })), "{offset}");
    }
    assert!(register(1, &|umem, _| umem.flags = 2).is_err());
    for entries in [0, 3, RING_MAX + 1, RING_MAX * 2, u32::MAX] {
        assert!(register(1, &|_, rings| rings.tx = entries).is_err(), "{entries}");
    }
    let bind = |flags, wait_ms| {
        Request::decode(
            &Request::Bind {
                queue: 0,
                flags,
                wait_ms,
            }
            .encode(1),
        )
    };
    assert!(bind(0, 0).is_ok());
    // XDP_SHARED_UMEM.
    assert!(bind(1, 0).is_err() && bind(1 << 5, 0).is_err() && bind(0, BIND_WAIT_MAX + 1).is_err());
}

#[test]
fn lists_that_are_too_long_double_or_go_on_are_malformed() {
    let number = |at: usize, value: u8| changed(|bytes| bytes[at] = value).expect_err("impossible");
    // Counts, something after the end, the same twice.
    for (at, value) in [
        (36, 17),
        (36, 0),
        (39, 1),
        (40, 255),
        (60, 1),
        (171, 1),
        (44, 0),
        (142, 0),
    ] {
        let error = if at == 44 {
            changed(|bytes| bytes[44..50].fill(0)).expect_err("twice")
        } else {
            number(at, value)
        };
        assert!(matches!(error, Malformed::List(_)), "{value} at {at}: {error}");
    }
    assert!(
        matches!(number(44, 1), Malformed::Value { .. }),
        "a group of stations"
    );
    let vlan = |vlan: u16| changed(|bytes| bytes[142..144].copy_from_slice(&vlan.to_ne_bytes()));
    assert!(vlan(4094).is_ok() && matches!(vlan(4095), Err(Malformed::Value { .. })));
}

#[test]
fn names_that_no_interface_has_are_malformed() {
    let named = |name: &[u8; 16]| changed(|bytes| bytes[8..24].copy_from_slice(name));
    assert!(named(b"fifteen-bytes..\0").is_ok());
    for (name, shown) in [
        (b"sixteen-bytes-xx", "\"sixteen-bytes-xx\""),
        (b"\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", "\"\""),
        (b"../eth1\0\0\0\0\0\0\0\0\0", "\"../eth1\""),
        (b"..\0\0\0\0\0\0\0\0\0\0\0\0\0\0", "\"..\""),
        (b"eth 1\0\0\0\0\0\0\0\0\0\0\0", "\"eth 1\""),
    ] {
        let report = named(name).expect_err(shown).to_string();
        assert!(
            report.starts_with(&format!("{shown} is not a name of an interface")),
            "{report}"
        );
        assert!(report.contains("`ip link` lists them"), "{report}");
    }
    for name in [
        b"eth1\0x\0\0\0\0\0\0\0\0\0\0",
        b"eth\n1\0\0\0\0\0\0\0\0\0\0\0",
        b"eth\xff\0\0\0\0\0\0\0\0\0\0\0\0",
    ] {
        assert!(matches!(named(name), Err(Malformed::Text(_))), "{name:?}");
    }
}

#[test]
fn long_text_is_cut_where_a_character_ends() {
    let refusal = Refusal::new(Reason::Kernel, "ä".repeat(300));
    let (_, answer) = Answer::decode(&Answer::Refused(refusal).encode(1)).expect("still text");
    let Answer::Refused(refusal) = answer else {
        panic!("{answer:?}")
    };
    assert_eq!(refusal.text, "ä".repeat(240));
    let note = format!("x{}", "ä".repeat(300));
    let (_, answer) = Answer::decode(&Answer::Changed(Facts { note, ..facts() }).encode(0)).expect("text");
    let Answer::Changed(facts) = answer else {
        panic!("{answer:?}")
    };
    assert_eq!(facts.note, format!("x{}", "ä".repeat(119)));
}

proptest! {
    #[test]
    fn any_body_of_a_queues_messages_is_read_or_refused(
        which in 0usize..5, mut body in prop::collection::vec(0u8..5, 184), at in 0usize..184, any in any::<u8>(),
    ) {
        let (kind, len) = [
            // Zcrx, ZcrxRegister, ZcrxRegistered, Netkit and its answer.
            (18, 184), (19, 96), (72, 104), (20, 24), (73, 24),
        ][which];
        body.truncate(len);
        body[at % len] = any;
        let head = Head { version: VERSION, kind, serial: 9 };
        let bytes = [head.as_bytes(), &body].concat();
        if let Ok((serial, request)) = Request::decode(&bytes) {
            prop_assert_eq!(request.encode(serial), bytes.clone());
        }
        if let Ok((serial, answer)) = Answer::decode(&bytes) {
            prop_assert_eq!(answer.encode(serial), bytes);
        }
    }

    #[test]
    fn any_body_of_the_right_kind_is_read_or_refused(
        kind in 0u16..81, body in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let head = Head { version: VERSION, kind, serial: 9 };
        let bytes = [head.as_bytes(), &body].concat();
        if let Ok((serial, request)) = Request::decode(&bytes) {
            prop_assert_eq!(request.encode(serial), bytes.clone());
        }
        if let Ok((serial, answer)) = Answer::decode(&bytes) {
            prop_assert_eq!(answer.encode(serial), bytes);
        }
    }
}

/// Messages between releases have the same bytes: FNV-1a over all of them.
#[test]
fn messages_have_the_bytes_of_this_version() {
    let requests = requests().into_iter().map(|request| request.encode(1));
    let answers = answers().into_iter().map(|answer| answer.encode(1));
    let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let hash = requests.chain(answers).flatten().fold(0xcbf2_9ce4_8422_2325, fnv);
    assert_eq!(
        hash, 9_558_812_237_210_048_971,
        "raise VERSION if a format changes that scripts/upgrade needs"
    );
}
