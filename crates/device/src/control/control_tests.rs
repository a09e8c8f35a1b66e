//! The control queue, as drivers use it and as hostile ones do.

use proptest::prelude::*;
use virtqueue::driver::Buffer;

use super::*;
use crate::counters::ReceiveCounters;
use crate::features::{F_CTRL_VQ, F_GUEST_ANNOUNCE, F_MQ, F_VERSION_1};
use crate::hash::{HashType, HashTypes};
use crate::offloads::Offloads;
use crate::receive::{Place, Receive};
use rig::{MAC, PAIRS, Rig};

#[path = "rig_tests.rs"]
mod rig;

const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 9];
const GROUP: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
const KEY: [u8; 40] = [0x5a; 40];
/// All features that a command may need.
const ALL: u64 = F_VERSION_1 | F_CTRL_VQ | F_MQ | F_GUEST_ANNOUNCE | OFFERED;

impl Rig {
    fn serve(&mut self) -> Result<usize, Fault> {
        let (changes, follows) = (&mut self.changes, self.follows);
        let apply = |_: &mut NetDevice, change| {
            changes.push(change);
            follows
        };
        self.queue.serve(&mut self.device, 8, apply)
    }

    /// A command in descriptors of these lengths, and a last one of the rest; the answer.
    fn send_in(&mut self, command: &[u8], cuts: &[usize]) -> u8 {
        let answer = self.exchange(command, cuts.iter().copied(), 2);
        answer.expect("a sound chain")
    }

    fn send(&mut self, command: &[u8]) -> bool {
        match self.send_in(command, &[2]) {
            ACK_OK => true,
            ACK_ERR => false,
            other => panic!("{other:#x} is no answer"),
        }
    }

    fn receive(&self) -> Receive {
        self.device.receive(None)
    }

    /// Whether a frame to this address is accepted.
    fn accepts(&self, to: [u8; 6]) -> bool {
        let frame = [&to[..], &OTHER, &[8, 0]].concat();
        let counters = ReceiveCounters::default();
        self.receive().place(&frame, None, &counters).is_some()
    }
}

fn command(class: u32, command: u32, data: &[u8]) -> Vec<u8> {
    [&[class as u8, command as u8], data].concat()
}

fn table(unicast: &[[u8; 6]], multicast: &[[u8; 6]]) -> Vec<u8> {
    let list = |macs: &[[u8; 6]]| [&(macs.len() as u32).to_le_bytes(), macs.as_flattened()].concat();
    let data = [list(unicast), list(multicast)].concat();
    command(
        net::VIRTIO_NET_CTRL_MAC,
        net::VIRTIO_NET_CTRL_MAC_TABLE_SET,
        &data,
    )
}

fn pairs(count: u16) -> Vec<u8> {
    let data = count.to_le_bytes();
    command(
        net::VIRTIO_NET_CTRL_MQ,
        net::VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET,
        &data,
    )
}

/// The fields of RSS_CONFIG, each of which a driver may set to an invalid value.
#[derive(Clone)]
struct Rss {
    types: u32,
    mask: u16,
    unclassified: u16,
    table: Vec<u16>,
    send_pairs: u16,
    key: Vec<u8>,
}

impl Rss {
    fn right() -> Self {
        Self {
            types: HashTypes::ALL.bits(),
            mask: 3,
            unclassified: 2,
            table: vec![0, 1, 2, 1],
            send_pairs: 2,
            key: KEY.to_vec(),
        }
    }

    fn command(&self) -> Vec<u8> {
        let mut data = self.types.to_le_bytes().to_vec();
        let words = [self.mask, self.unclassified].into_iter();
        let words = words.chain(self.table.iter().copied()).chain([self.send_pairs]);
        data.extend(words.flat_map(u16::to_le_bytes));
        data.push(self.key.len() as u8);
        data.extend(&self.key);
        command(net::VIRTIO_NET_CTRL_MQ, net::VIRTIO_NET_CTRL_MQ_RSS_CONFIG, &data)
    }
}

fn hash_config(types: u32, key: &[u8]) -> Vec<u8> {
    let data = [&types.to_le_bytes()[..], &[0; 8], &[key.len() as u8], key].concat();
    command(
        net::VIRTIO_NET_CTRL_MQ,
        net::VIRTIO_NET_CTRL_MQ_HASH_CONFIG,
        &data,
    )
}

#[test]
fn receive_modes_take_effect_each_with_its_own_command() {
    let mut rig = Rig::new(ALL);
    assert!(rig.accepts(MAC) && !rig.accepts(OTHER) && !rig.accepts(GROUP));
    let mut switch = |mode: u32, on: u8| rig.send(&command(net::VIRTIO_NET_CTRL_RX, mode, &[on]));
    assert!(switch(net::VIRTIO_NET_CTRL_RX_ALLMULTI, 1) && switch(net::VIRTIO_NET_CTRL_RX_NOUNI, 1));
    assert!(!switch(net::VIRTIO_NET_CTRL_RX_NOBCAST, 2), "0 or 1");
    assert!(!switch(6, 1), "no such mode");
    assert!(!rig.accepts(MAC) && rig.accepts(GROUP) && rig.accepts([0xff; 6]));
    assert!(rig.send(&command(0, net::VIRTIO_NET_CTRL_RX_PROMISC, &[1])));
    assert!(rig.accepts(OTHER));
    assert!(rig.send(&command(0, net::VIRTIO_NET_CTRL_RX_PROMISC, &[0])));
    assert!(!rig.accepts(OTHER));
    assert_eq!(rig.changes, [Change::Filter; 4]);
}

#[test]
fn address_table_is_replaced_as_a_whole_and_kept_within_bounds() {
    let mut rig = Rig::new(ALL);
    assert!(rig.send(&table(&[OTHER], &[GROUP])));
    assert!(rig.accepts(OTHER) && rig.accepts(GROUP) && !rig.accepts([2; 6]));
    assert!(rig.send(&table(&[], &[])));
    assert!(!rig.accepts(OTHER) && !rig.accepts(GROUP));
    let many: Vec<_> = (0..2000u16)
        .map(|at| [2, 0, 0, 7, (at >> 8) as u8, at as u8])
        .collect();
    assert!(rig.send(&table(&many, &[GROUP])));
    assert!(rig.accepts([2; 6]) && rig.accepts(GROUP) && !rig.accepts([1; 6]));
    // Counts that exceed the data.
    for entries in [3u32, u32::MAX, u32::MAX / 6 + 1, 1 << 31] {
        let data = [&entries.to_le_bytes()[..], &[2; 12], &[0; 4]].concat();
        assert!(
            !rig.send(&command(1, net::VIRTIO_NET_CTRL_MAC_TABLE_SET, &data)),
            "{entries}"
        );
    }
    assert!(rig.accepts(GROUP), "nothing changed");
}

#[test]
fn address_of_the_device_is_a_stations() {
    let mut rig = Rig::new(ALL);
    let set = |mac: &[u8]| command(net::VIRTIO_NET_CTRL_MAC, net::VIRTIO_NET_CTRL_MAC_ADDR_SET, mac);
    assert!(rig.send(&set(&OTHER)));
    assert!(rig.accepts(OTHER) && !rig.accepts(MAC));
    assert_eq!(rig.device.control_state().expect("one").mac(), OTHER);
    for wrong in [&GROUP[..], &[0; 6], &[0xff; 6], &[2; 5], &[2; 7]] {
        assert!(!rig.send(&set(wrong)), "{wrong:x?}");
    }
    assert_eq!(rig.changes, [Change::Mac]);
    rig.device.reset();
    assert_eq!(rig.device.control_state().expect("one").mac(), MAC);
}

#[test]
fn change_that_the_data_path_cannot_follow_is_no_change() {
    let mut rig = Rig::new(ALL);
    rig.follows = false;
    let set = command(
        net::VIRTIO_NET_CTRL_MAC,
        net::VIRTIO_NET_CTRL_MAC_ADDR_SET,
        &OTHER,
    );
    assert!(!rig.send(&set) && !rig.send(&pairs(3)) && !rig.send(&Rss::right().command()));
    assert_eq!(rig.changes, [Change::Mac, Change::Steering, Change::Steering]);
    let state = rig.device.control_state().expect("one");
    assert_eq!((state.mac(), state.pairs(), state.hash()), (MAC, 1, None));
    assert!(!rig.device.vring(2).expect("there").enabled);
}

#[test]
fn vlans_are_added_and_removed_one_by_one() {
    let mut rig = Rig::new(ALL);
    let frame = |vlan: u16| [&MAC[..], &OTHER, &[0x81, 0], &vlan.to_be_bytes(), &[8, 0]].concat();
    let accepts = |rig: &Rig, vlan| {
        let counters = ReceiveCounters::default();
        let place = rig.receive().place(&frame(vlan), None, &counters);
        assert_eq!(counters.to_guest_filtered.get(), u64::from(place.is_none()));
        place.is_some()
    };
    assert!(!accepts(&rig, 7));
    let vlan = |what, id: u16| command(net::VIRTIO_NET_CTRL_VLAN, what, &id.to_le_bytes());
    assert!(rig.send(&vlan(net::VIRTIO_NET_CTRL_VLAN_ADD, 7)));
    assert!(rig.send(&vlan(net::VIRTIO_NET_CTRL_VLAN_ADD, 4095)));
    assert!(!rig.send(&vlan(net::VIRTIO_NET_CTRL_VLAN_ADD, 4096)));
    assert!(accepts(&rig, 7) && accepts(&rig, 0x6000 | 7) && accepts(&rig, 4095) && !accepts(&rig, 8));
    assert!(rig.send(&vlan(net::VIRTIO_NET_CTRL_VLAN_DEL, 7)));
    assert!(!accepts(&rig, 7) && accepts(&rig, 4095));
    assert!(Rig::new(ALL & !F_CTRL_VLAN).accepts([0xff; 6]));
}

#[test]
fn announcement_is_asked_for_until_the_guest_says_that_it_was_made() {
    let mut rig = Rig::new(ALL);
    let announced = |rig: &Rig| rig.device.control_state().expect("one").announce();
    rig.device.announce();
    assert!(announced(&rig));
    let ack = command(
        net::VIRTIO_NET_CTRL_ANNOUNCE,
        net::VIRTIO_NET_CTRL_ANNOUNCE_ACK,
        &[],
    );
    assert!(rig.send(&ack) && !announced(&rig));
    assert_eq!(rig.changes, [Change::Announced]);
    assert!(!rig.send(&command(net::VIRTIO_NET_CTRL_ANNOUNCE, 1, &[])));
}

#[test]
fn pairs_are_switched_on_before_the_answer_and_never_more_than_there_are() {
    let mut rig = Rig::new(ALL);
    let enabled = |rig: &Rig| [0, 2, 4, 6].map(|index| rig.device.vring(index).expect("there").enabled);
    for (count, ok) in [
        (0, false),
        (3, true),
        (PAIRS, true),
        (PAIRS + 1, false),
        (u16::MAX, false),
    ] {
        assert_eq!(rig.send(&pairs(count)), ok, "{count}");
    }
    assert_eq!(enabled(&rig), [true; 4]);
    let frame = [0; 64];
    let place = |rig: &Rig| rig.receive().place(&frame, None, &ReceiveCounters::default());
    assert!(rig.send(&command(0, net::VIRTIO_NET_CTRL_RX_PROMISC, &[1])));
    assert_eq!(place(&rig).expect("let through").pair, None, "automatic");
    assert!(rig.send(&pairs(1)));
    assert_eq!(enabled(&rig), [true, false, false, false]);
    assert_eq!(place(&rig).expect("let through").pair, Some(0));
}

#[test]
fn rss_leads_frames_by_the_drivers_table_and_the_last_command_decides() {
    let mut rig = Rig::new(ALL & !F_CTRL_RX & !F_CTRL_RX_EXTRA & !F_CTRL_VLAN);
    assert!(rig.send(&Rss::right().command()));
    let state = rig.device.control_state().expect("one");
    assert_eq!((state.pairs(), state.hash().expect("said").key), (3, KEY));
    // Not IP: unclassified. An IPv4 packet: by its hash, which is reported.
    let counters = ReceiveCounters::default();
    let place = |rig: &Rig, frame: &[u8]| rig.receive().place(frame, None, &counters).expect("no filter");
    let unclassified = Place {
        pair: Some(2),
        report: Default::default(),
    };
    assert_eq!(place(&rig, &[0; 60]), unclassified);
    let mut packet = [0; 60];
    (packet[12], packet[14], packet[33]) = (8, 0x45, 1);
    // The key is one byte over and over: a hash is too, and the last bit of the input takes it as it is, one bit off.
    let placed = place(&rig, &packet);
    assert_eq!(placed.report.kind, Some(HashType::Ipv4));
    let expected = crate::hash::toeplitz::Toeplitz::new(&KEY).hash(&[&[0, 0, 0, 0, 0, 0, 0, 1]]);
    assert_eq!(placed.report.value, expected);
    let entry = [0, 1, 2, 1][expected as usize & 3];
    assert_eq!(placed.pair, Some(entry));
    assert_eq!(
        (counters.hashes_computed.get(), counters.hashes_none.get()),
        (1, 1)
    );
    // Automatic receive steering again; the hash is reported as before.
    assert!(rig.send(&pairs(2)));
    let placed = place(&rig, &packet);
    assert_eq!((placed.pair, placed.report.value), (None, expected));
}

#[test]
fn rss_without_hash_reports_steers_and_says_nothing() {
    let mut rig = Rig::new(F_VERSION_1 | F_CTRL_VQ | F_RSS);
    let place = |rig: &Rig, frame: &[u8]| {
        let place = rig.receive().place(frame, None, &ReceiveCounters::default());
        place.expect("no filter")
    };
    assert_eq!(place(&rig, &[0; 60]).pair, Some(0), "nothing was said yet");
    assert!(!rig.send(&pairs(2)), "that is VIRTIO_NET_F_MQ's");
    assert!(rig.send(&Rss::right().command()));
    let mut packet = [0; 60];
    (packet[12], packet[14]) = (8, 0x45);
    let placed = place(&rig, &packet);
    assert_eq!(
        (placed.pair, placed.report),
        (Some(0), Default::default()),
        "hash 0 of zeros"
    );
}

#[test]
fn rss_configuration_with_a_part_that_is_wrong_is_refused_as_a_whole() {
    let wrong: [fn(&mut Rss); 13] = [
        |rss| rss.types = 1 << 9,
        |rss| (rss.mask, rss.table) = (2, vec![0; 3]),
        |rss| (rss.mask, rss.table) = (MOST_TABLE_ENTRIES, vec![0; 513]),
        |rss| rss.mask = u16::MAX,
        |rss| rss.unclassified = PAIRS,
        |rss| rss.unclassified = 0x8000,
        |rss| rss.table[3] = PAIRS,
        |rss| rss.table[0] = 0x8001,
        |rss| rss.send_pairs = 0,
        |rss| rss.send_pairs = PAIRS + 1,
        |rss| rss.key = vec![1; 41],
        |rss| rss.key = vec![],
        |rss| rss.mask = 7,
    ];
    let mut rig = Rig::new(ALL);
    for (at, change) in wrong.iter().enumerate() {
        let mut rss = Rss::right();
        change(&mut rss);
        assert!(!rig.send(&rss.command()), "change {at}");
    }
    assert!(rig.changes.is_empty());
    let mut least = Rss::right();
    (least.types, least.mask, least.table, least.key) = (0, 0, vec![3], vec![]);
    assert!(rig.send(&least.command()), "no hash, one queue");
    let mut most = Rss::right();
    (most.mask, most.table) = (MOST_TABLE_ENTRIES - 1, vec![1; usize::from(MOST_TABLE_ENTRIES)]);
    assert!(rig.send(&most.command()));
}

#[test]
fn hash_configuration_is_for_drivers_without_rss() {
    let mut rig = Rig::new(ALL & !F_RSS);
    assert!(!rig.send(&Rss::right().command()));
    assert!(
        rig.receive().hashing().is_none(),
        "all hash types are disabled at first"
    );
    assert!(!rig.send(&hash_config(1 << 9, &KEY)) && !rig.send(&hash_config(1, &[])));
    assert!(!rig.send(&hash_config(1, &[0; 41])));
    assert!(rig.send(&hash_config(HashTypes::ALL.bits(), &KEY[..7])));
    let hash = rig.device.control_state().expect("one").hash().expect("said");
    assert_eq!((&hash.key[..7], &hash.key[7..]), (&KEY[..7], &[0; 33][..]));
    assert_eq!(rig.receive().hashing().expect("said").types(), HashTypes::ALL);
    assert!(!Rig::new(ALL).send(&hash_config(1, &KEY)), "RSS_CONFIG says it");
    assert!(!Rig::new(ALL & !F_HASH_REPORT).send(&hash_config(1, &KEY)));
}

#[test]
fn offloads_are_switched_among_those_that_were_negotiated() {
    let set = |features: u64| {
        let data = features.to_le_bytes();
        command(
            net::VIRTIO_NET_CTRL_GUEST_OFFLOADS,
            net::VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET,
            &data,
        )
    };
    let named = |name| Offloads::named(name).expect("a name");
    let negotiated = ["csum", "tso4", "guest-csum", "guest-tso4"].map(named);
    let negotiated = negotiated.into_iter().fold(Offloads::NONE, Offloads::with);
    let mut rig = Rig::new(ALL | negotiated.features());
    let now = |rig: &Rig| rig.device.negotiated().offloads;
    assert_eq!(now(&rig), negotiated);
    assert!(rig.send(&set(named("guest-csum").features())));
    assert_eq!(now(&rig), negotiated.without(named("guest-tso4")));
    assert!(!rig.send(&set(named("guest-tso6").features())), "not negotiated");
    assert!(!rig.send(&set(named("csum").features())), "not for the guest");
    assert!(rig.send(&set(named("guest-tso4").features())));
    assert_eq!(
        now(&rig),
        negotiated.without(negotiated.for_guest()),
        "it rests on guest-csum"
    );
    assert!(rig.send(&set(negotiated.for_guest().features())));
    assert_eq!(now(&rig), negotiated);
    assert_eq!(rig.changes, [Change::Offloads; 3]);
}

/// A valid command of each kind, and the features that it needs.
fn commands() -> Vec<(Vec<u8>, u64)> {
    vec![
        (command(0, 0, &[1]), F_CTRL_RX),
        (command(0, 1, &[1]), F_CTRL_RX),
        (command(0, 2, &[1]), F_CTRL_RX_EXTRA),
        (command(0, 5, &[1]), F_CTRL_RX_EXTRA),
        (table(&[OTHER], &[GROUP]), F_CTRL_RX),
        (command(1, 1, &OTHER), F_CTRL_MAC_ADDR),
        (command(2, 0, &[7, 0]), F_CTRL_VLAN),
        (command(2, 1, &[7, 0]), F_CTRL_VLAN),
        (command(3, 0, &[]), F_GUEST_ANNOUNCE),
        (pairs(2), F_MQ),
        (Rss::right().command(), F_RSS),
        (hash_config(1, &KEY), F_HASH_REPORT),
        (command(5, 0, &[0; 8]), F_CTRL_GUEST_OFFLOADS),
    ]
}

#[test]
fn command_needs_its_feature_and_no_other() {
    for (bytes, feature) in commands() {
        let features = F_VERSION_1 | F_CTRL_VQ | feature;
        assert!(Rig::new(features).send(&bytes), "{bytes:x?}");
        let mut without = Rig::new(ALL & !feature);
        assert!(!without.send(&bytes) && without.changes.is_empty(), "{bytes:x?}");
    }
}

#[test]
fn command_cut_anywhere_is_the_same_and_one_that_is_short_or_long_is_refused() {
    for (bytes, feature) in commands() {
        let mut rig = Rig::new(F_VERSION_1 | F_CTRL_VQ | feature);
        assert_eq!(rig.send_in(&bytes, &[]), ACK_OK, "in one");
        assert_eq!(rig.send_in(&bytes, &[1; 60]), ACK_OK, "byte by byte: {bytes:x?}");
        assert_eq!(rig.send_in(&bytes, &[3, 1, 2]), ACK_OK);
        let told = rig.changes.len();
        for len in 0..bytes.len() {
            assert_eq!(rig.send_in(&bytes[..len], &[2]), ACK_ERR, "{len} of {bytes:x?}");
        }
        let long = [&bytes[..], &[0]].concat();
        assert_eq!(rig.send_in(&long, &[2]), ACK_ERR, "{bytes:x?}");
        assert_eq!(rig.changes.len(), told);
    }
}

#[test]
fn unknown_class_or_command_is_refused() {
    let mut rig = Rig::new(ALL);
    for class in 0..=u8::MAX {
        for what in [3, 6, 7, 0xff] {
            if class > 0 || what > 5 {
                assert!(!rig.send(&[class, what, 0]), "{class} {what}");
            }
        }
    }
    assert!(rig.changes.is_empty());
}

#[test]
fn chain_without_a_byte_for_the_answer_is_a_fault_and_what_came_before_is_answered() {
    let mut rig = Rig::new(ALL);
    rig.ram.write(rig.area, &command(0, 0, &[1]));
    let readable = Buffer::readable(rig.area, 3);
    rig.driver
        .add(&[readable, Buffer::writable(rig.ack, 1)])
        .expect("room");
    rig.driver.add(&[readable]).expect("room");
    rig.driver.publish();
    let fault = rig.serve().expect_err("no place for an answer");
    assert_eq!(fault.name(), "control-without-ack");
    assert!(rig.driver.take_used().is_some() && rig.driver.take_used().is_none());
    assert_eq!(rig.ram.read_vec(rig.ack, 1), [ACK_OK]);
}

#[test]
fn commands_are_served_in_order_and_no_more_at_a_time_than_was_said() {
    let mut rig = Rig::new(ALL);
    for on in (1..21).map(|at| at % 2) {
        let at = rig.ram.alloc(4, 4).expect("room");
        rig.ram.write(at, &command(0, 0, &[on]));
        let answer = Buffer::writable(rig.ack, 1);
        rig.driver.add(&[Buffer::readable(at, 3), answer]).expect("room");
    }
    rig.driver.publish();
    let served = [(); 4].map(|()| rig.serve().expect("sound"));
    assert_eq!(served, [8, 8, 4, 0]);
    assert!(!rig.accepts(OTHER), "the last one says off");
}

#[test]
fn queue_is_behind_the_pairs_that_can_be_used() {
    for (features, index) in [(F_CTRL_VQ, 2), (F_CTRL_VQ | F_MQ, 8), (F_CTRL_VQ | F_RSS, 8)] {
        assert_eq!(Rig::new(F_VERSION_1 | features).device.control_index(), index);
    }
    let rig = Rig::new(ALL);
    assert_eq!(rig.device.pairs(), usize::from(PAIRS));
    assert!(NetDevice::new(2, Offloads::NONE).control_state().is_none());
    assert!(NetDevice::new(2, Offloads::NONE).vring(4).is_err());
}

#[test]
fn driver_that_accepts_a_feature_without_what_it_rests_on_is_refused() {
    let mut device = NetDevice::new(2, Offloads::NONE).with_control(MAC, OFFERED);
    let error = device.acknowledge(F_VERSION_1 | F_RSS).expect_err("no CTRL_VQ");
    assert!(
        error.to_string().contains("RSS was acknowledged without CTRL_VQ"),
        "{error}"
    );
    assert_eq!(device.features(), 0);
    // If the VMM serves the queue, the VMM checks this.
    let mut device = NetDevice::new(2, Offloads::NONE);
    device.acknowledge(F_VERSION_1 | F_MQ).expect("offered");
    assert!(device.acknowledge(F_RSS).is_err(), "never offered");
    assert_eq!(device.hash_limits(), None);
}

#[test]
fn reset_forgets_all_that_the_driver_said() {
    let mut rig = Rig::new(ALL);
    for (bytes, _) in commands() {
        rig.send(&bytes);
    }
    rig.device.announce();
    rig.device.set_status(0).expect("valid");
    rig.device.acknowledge(ALL).expect("offered");
    let state = rig.device.control_state().expect("one");
    let plain = (state.mac(), state.pairs(), state.hash(), state.announce());
    assert_eq!(plain, (MAC, 1, None, false));
    assert!(rig.accepts(MAC) && !rig.accepts(OTHER) && !rig.accepts(GROUP));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Any bytes after any class: the device answers, and stays consistent.
    #[test]
    fn no_command_breaks_the_device(
        bytes in prop::collection::vec((0u8..7, 0u8..7, prop::collection::vec(any::<u8>(), 0..90)), 1..20),
        cut in 1usize..40,
    ) {
        let mut rig = Rig::new(ALL);
        for (class, what, data) in bytes {
            let command = command(class.into(), what.into(), &data);
            let before = rig.changes.len();
            let answer = rig.send_in(&command, &[cut]);
            prop_assert_eq!(answer == ACK_OK, rig.changes.len() > before);
            let pairs = rig.device.control_state().expect("one").pairs();
            prop_assert!((1..=PAIRS).contains(&pairs));
            if let Some(place) = rig.receive().place(&data, None, &ReceiveCounters::default()) {
                prop_assert!(place.pair.is_none_or(|pair| pair < pairs));
            }
        }
    }
}

#[path = "saved_tests.rs"]
mod saved;
