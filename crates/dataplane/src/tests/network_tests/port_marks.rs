//! What stands before frames that come from the NIC: who they are for, the tag that it took off, hash and mark.

mod alone;
mod switched;

use model::config::MemberOptions;
use proptest::prelude::*;
use steer::{HintSet, NOTE_BYTES, note_layout};
use xsk::metadata::{Field, Layout};
use xsk::{RxDesc, UmemOffset, XDP_PACKET_HEADROOM};

use super::*;
use crate::backend::own_queue::CopyQueue;
use crate::fdb::PortMark;
use crate::fdb::UnderlayOf;
use crate::nic::endpoint::NicQueue;
use crate::nic::hints::XdpMetadata;
use crate::policy::filter::{Filter, PortFilter, Rule};
use crate::tests::test_nic::frame_at;

/// Id of [`layout`].
const HINTS: u32 = 0x8001_0007;
/// `XDP_RSS_L4`, of `enum xdp_rss_hash_type`.
const OF_PORTS: u16 = 1 << 3;
/// Bits of `absent`.
const NO_TAG: u16 = 2;
const NO_MARK: u16 = 8;
const NO_PORT: u16 = 16;

/// Hash, mark, port and tag, as the bound program leaves them.
fn layout() -> Layout {
    let fields = [
        (Field::Hash, 0),
        (Field::Mark, 4),
        (Field::Port, 8),
        (Field::HashType, 12),
        (Field::VlanProto, 14),
        (Field::VlanTci, 16),
        (Field::Absent, 18),
    ];
    Layout::new(HINTS, 24, &fields).expect("all are inside")
}

/// Bytes of the layout.
#[derive(Clone, Copy, Default)]
pub(super) struct Left {
    hash: (u32, u16),
    mark: Option<u32>,
    port: Option<u32>,
    tag: Option<(u16, u16)>,
}

impl Left {
    pub(super) fn marked(mark: Option<u32>) -> Self {
        Self {
            mark,
            ..Self::default()
        }
    }

    fn tag(proto: u16, tci: u16) -> Self {
        Self {
            tag: Some((proto, tci)),
            ..Self::default()
        }
    }

    pub(super) fn bytes(self) -> Vec<u8> {
        let absent = |field: bool, bit| if field { 0 } else { bit };
        let absent = absent(self.mark.is_some(), NO_MARK)
            | absent(self.port.is_some(), NO_PORT)
            | absent(self.tag.is_some(), NO_TAG);
        let (proto, tci) = self.tag.unwrap_or_default();
        let mut bytes = Vec::new();
        bytes.extend(self.hash.0.to_ne_bytes());
        bytes.extend(self.mark.unwrap_or(0).to_ne_bytes());
        bytes.extend(self.port.unwrap_or(0).to_ne_bytes());
        bytes.extend(self.hash.1.to_ne_bytes());
        bytes.extend(proto.to_be_bytes());
        bytes.extend(tci.to_ne_bytes());
        bytes.extend(absent.to_ne_bytes());
        bytes.extend(HINTS.to_ne_bytes());
        bytes
    }
}

/// What the plain program leaves.
fn note(port: u32) -> Vec<u8> {
    let mark = [port.to_ne_bytes(), note_layout().id().to_ne_bytes()].concat();
    assert_eq!(steer::noted_port(mark[..].try_into().expect("both")), Some(port));
    assert_eq!(mark.len(), NOTE_BYTES);
    mark
}

impl World {
    /// An uplink whose frames have notes, and those hints.
    fn with_hints(self, hints: HintSet) -> Self {
        let mut world = self.with_uplink_of(256, |queue| offer(queue, hints));
        world.poll();
        world
    }

    /// A frame comes with that before it.
    pub(super) fn arrive_behind(&mut self, before: &[u8], frame: &[u8]) {
        self.arrive(frame);
        self.leave(before);
    }

    /// A frame arrives so far behind the usual place in its chunk, behind a note; which port gets it, and no other.
    fn got_at(&mut self, moved: u64, mark: Option<u32>, frame: &[u8]) -> Option<usize> {
        self.arrive(frame);
        let mut wire = self.wire();
        let piece = wire.received.back_mut().expect("just now");
        piece.data = UmemOffset::new(piece.data.get() + moved);
        let at = piece.data;
        wire.umem.write(at, frame).expect("inside");
        let before = mark.map_or_else(|| vec![0; NOTE_BYTES], note);
        let begin = UmemOffset::new(at.get() - NOTE_BYTES as u64);
        wire.umem.write(begin, &before).expect("inside");
        drop(wire);
        self.poll();
        let mut receivers = Vec::new();
        for (at, port) in self.ports.iter_mut().enumerate() {
            receivers.extend(port.got().iter().map(|got| (at, got == frame)));
        }
        match receivers[..] {
            [] => None,
            [(at, true)] => Some(at),
            _ => panic!("{receivers:?}"),
        }
    }

    /// That is before the piece that came last.
    pub(super) fn leave(&self, before: &[u8]) {
        let wire = self.wire();
        let at = wire.received.back().expect("just now").data;
        let begin = UmemOffset::new(at.get() - before.len() as u64);
        wire.umem.write(begin, before).expect("inside");
    }

    /// Ports are these from now on, by number.
    pub(super) fn tell(&mut self, ports: Vec<Option<FdbPort>>) {
        self.lanes.fdbs.insert(NETWORK.into(), Arc::new(Fdb::new(ports)));
        self.rebuild_forwarding();
    }
}

/// The latest layout is that of the program: one without hints leaves notes.
pub(super) fn offer(queue: &mut NicQueue<TestNic>, hints: HintSet) {
    let layouts = match hints.is_empty() {
        true => [note_layout(), layout()],
        false => [layout(), note_layout()],
    };
    queue.set_metadata(&XdpMetadata::of(hints, &layouts));
}

pub(super) fn port(of: Mac, generation: u16, vlans: Vlans) -> FdbPort {
    FdbPort {
        mac: of,
        generation,
        vlans,
        ..FdbPort::default()
    }
}

fn mark_of(number: u16, generation: u16) -> u32 {
    FdbPort {
        generation,
        ..FdbPort::default()
    }
    .mark(PortNumber(number))
    .0
}

#[test]
fn address_of_a_frame_with_a_valid_mark_is_not_looked_up() {
    let untagged = |at: u8| port(mac(at), 7 + u16::from(at), Vlans::Untagged);
    let mut world = World::of((0..3).map(untagged).collect())
        .with_hints(HintSet::HASH)
        .posting(16);
    // Nobody has it.
    let sent = frame(STRANGER, STRANGER, 60);
    world.arrive_behind(&note(mark_of(1, 8)), &sent);
    let hints = Left {
        port: Some(mark_of(2, 9)),
        ..Left::default()
    };
    world.arrive_behind(&hints.bytes(), &sent);
    world.poll();
    for port in [1, 2] {
        assert_eq!(world.ports[port].got(), std::slice::from_ref(&sent));
    }
    // Of nobody, and of another life.
    for stale in [mark_of(3, 10), mark_of(1, 0), mark_of(1, 9), u32::MAX, 0] {
        world.arrive_behind(&note(stale), &sent);
        world.arrive_behind(&note(stale), &frame(mac(0), STRANGER, 61));
    }
    world.poll();
    assert_eq!(world.uplink.to_guest_no_port.get(), 5);
    assert_eq!(world.ports[0].got().len(), 5);
    assert_eq!(world.given(), 128, "all chunks are with the NIC again");
}

/// What happens to a network.
#[derive(Debug, Clone)]
enum Event {
    /// The port of that number ends.
    Leave(usize),
    /// One begins with that number and address, or is changed to it.
    Become(usize, u8),
    /// A frame for that port comes, as the program notes it now or as it did then.
    Frame(usize),
    Late(usize),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (0..3usize).prop_map(Event::Leave),
        (0..3usize, 0..5u8).prop_map(|(port, mac)| Event::Become(port, mac)),
        (0..3usize).prop_map(Event::Frame),
        (0..64usize).prop_map(Event::Late),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Numbers are used again, and frames that were noted wait meanwhile: nobody gets what was for another.
    #[test]
    fn stale_mark_is_never_trusted(events in proptest::collection::vec(event(), 1..40)) {
        let mut ports: Vec<Option<FdbPort>> = vec![None; 3];
        let mut world = World::new(&[0, 0, 0]).with_hints(HintSet::NONE).posting(64);
        world.tell(ports.clone());
        let (mut generation, mut noted) = (0, Vec::new());
        for event in events {
            let late = match event {
                Event::Leave(at) => {
                    ports[at] = None;
                    None
                }
                Event::Become(_, of) if ports.iter().flatten().any(|port| port.mac == mac(of)) => None,
                Event::Become(at, of) => {
                    generation += 1;
                    ports[at] = Some(port(mac(of), generation, Vlans::Untagged));
                    None
                }
                Event::Frame(at) => ports[at].as_ref().map(|port| {
                    let mark = port.mark(PortNumber(at as u16)).0;
                    noted.push((mark, port.mac));
                    (mark, port.mac)
                }),
                Event::Late(at) => noted.get(at).copied(),
            };
            world.tell(ports.clone());
            let Some((its, to)) = late else { continue };
            let sent = frame(to, STRANGER, 60);
            world.arrive_behind(&note(its), &sent);
            world.poll();
            for (port, guest) in ports.iter().zip(&mut world.ports) {
                let is_its = port.as_ref().is_some_and(|port| port.mac == to);
                let wanted = if is_its { vec![sent.clone()] } else { Vec::new() };
                prop_assert_eq!(guest.take(), wanted);
            }
        }
    }
}

#[test]
fn tag_that_the_nic_took_off_is_as_if_it_were_in_the_frame() {
    let vlans = [
        Vlans::Access(100),
        Vlans::Trunk(vec![100, 101]),
        Vlans::Untagged,
        Vlans::Trunk(vec![100]),
    ];
    for by_note in [false, true] {
        let known = (0..).zip(&vlans).map(|(at, vlans)| FdbPort {
            options: MemberOptions {
                promiscuous: at == 3,
                ..MemberOptions::default()
            },
            ..port(mac(at), 5, vlans.clone())
        });
        let mut world = World::of(known.collect()).with_hints(HintSet::VLAN).posting(64);
        let left = |port: u16, proto, tci| {
            let port = by_note.then_some(mark_of(port, 5));
            Left {
                port,
                ..Left::tag(proto, tci)
            }
        };
        let to = |port: u8, len| frame(mac(port), STRANGER, len);
        world.arrive_behind(&left(0, 0x8100, 0xe064).bytes(), &to(0, 60));
        world.arrive_behind(&left(1, 0x8100, 0x6065).bytes(), &to(1, 61));
        world.arrive_behind(&left(1, 0x8100, 100).bytes(), &to(1, 62));
        // A priority only, and a service tag: of no VLAN, and seen by the guest as sent.
        world.arrive_behind(&left(2, 0x8100, 0xe000).bytes(), &to(2, 63));
        world.arrive_behind(&left(2, 0x88a8, 100).bytes(), &to(2, 64));
        // Tags in frames are as ever.
        let nothing = Left {
            port: by_note.then_some(mark_of(0, 5)),
            ..Left::default()
        };
        world.arrive_behind(&nothing.bytes(), &tagged(&to(0, 65), 100));
        world.arrive_behind(&Left::tag(0x8100, 100).bytes(), &frame(BROADCAST, STRANGER, 66));
        world.poll();
        world.poll();
        let with = |frame: Vec<u8>, tag: [u8; 4]| [&frame[..12], &tag, &frame[12..]].concat();
        let group = frame(BROADCAST, STRANGER, 66);
        let in_vlan = [0x81, 0, 0, 100];
        assert_eq!(world.ports[0].got(), [to(0, 60), to(0, 65), group.clone()]);
        let its = [
            with(to(1, 61), [0x81, 0, 0x60, 101]),
            with(to(1, 62), in_vlan),
            with(group.clone(), in_vlan),
        ];
        assert_eq!(world.ports[1].got(), its);
        let its = [
            with(to(2, 63), [0x81, 0, 0xe0, 0]),
            with(to(2, 64), [0x88, 0xa8, 0, 100]),
        ];
        assert_eq!(world.ports[2].got(), its);
        // It hears its VLAN's, with their tags, also of whom they are taken off for.
        let mut heard = world.ports[3].got();
        heard.sort_by_key(Vec::len);
        let its = [
            with(to(0, 60), [0x81, 0, 0xe0, 100]),
            with(to(1, 62), in_vlan),
            tagged(&to(0, 65), 100),
            with(group, in_vlan),
        ];
        assert_eq!(heard, its);
        assert_eq!(world.uplink.to_guest_tags_put_back.get(), 5);
        assert_eq!(world.given(), 128);
    }
}

#[test]
fn vlan_in_the_hint_only_is_respected() {
    let vlans = [Vlans::Access(100), Vlans::Untagged];
    let known = (0..).zip(vlans).map(|(at, vlans)| port(mac(at), 1, vlans));
    let mut world = World::of(known.collect()).with_hints(HintSet::VLAN).posting(16);
    // Of another VLAN, of none, and of one for who has none.
    world.arrive_behind(&Left::tag(0x8100, 101).bytes(), &frame(mac(0), STRANGER, 60));
    world.arrive_behind(&Left::default().bytes(), &frame(mac(0), STRANGER, 60));
    world.arrive_behind(&Left::tag(0x8100, 100).bytes(), &frame(mac(1), STRANGER, 60));
    world.poll();
    assert!(world.ports.iter_mut().all(|port| port.got().is_empty()));
    assert_eq!(world.uplink.to_guest_no_port.get(), 3);
}

#[test]
fn unknown_metadata_is_counted_and_drops_the_frame_where_it_may_have_a_tag() {
    for (hints, is_lost) in [
        (HintSet::NONE, false),
        (HintSet::HASH, false),
        (HintSet::VLAN, true),
    ] {
        let mut world = World::new(&[16, 16]).with_hints(hints);
        let before = [7u32.to_ne_bytes(), 0x8009_0001u32.to_ne_bytes()].concat();
        let sent = frame(mac(1), STRANGER, 60);
        world.arrive_behind(&before, &sent);
        // In two pieces, and one with nothing before it.
        let (first, last) = sent.split_at(30);
        world.arrive_piece(first, true);
        world.leave(&before);
        world.arrive_piece(last, false);
        world.arrive(&sent);
        world.poll();
        let got = if is_lost { 1 } else { 3 };
        assert_eq!(world.ports[1].got(), vec![sent; got], "{hints:?}");
        let counted = [
            &world.uplink.to_guest_tag_unknown,
            &world.uplink.to_guest_hints_unknown,
        ];
        let counted = counted.map(device::counters::Counter::get);
        assert_eq!(counted, if is_lost { [2, 0] } else { [0, 2] }, "{hints:?}");
        assert_eq!(world.given(), 128, "{hints:?}");
    }
}

#[test]
fn mark_is_trusted_at_its_usual_place_only() {
    let mut world = World::of(vec![port(mac(0), 3, Vlans::Untagged)]).with_hints(HintSet::NONE);
    world.ports[0].post(16);
    let bytes = [note(mark_of(0, 3)), frame(STRANGER, STRANGER, 60)].concat();
    let mut wire = world.wire();
    wire.receive(60, false);
    let piece = wire.received.back_mut().expect("just now");
    // As of a driver that moves frames, into what a frame was before.
    piece.data = UmemOffset::new(piece.data.get() + NOTE_BYTES as u64);
    let at = piece.data.get() - NOTE_BYTES as u64;
    wire.umem.write(UmemOffset::new(at), &bytes).expect("inside");
    drop(wire);
    world.poll();
    assert!(world.ports[0].got().is_empty());
    assert_eq!(world.uplink.to_guest_no_port.get(), 1);
    assert_eq!(world.uplink.to_guest_hints_unknown.get(), 0, "nothing is missed");
}

/// Port 1 is port 0 of another network, and both networks have the same address.
#[test]
fn networks_that_share_an_underlay_are_told_by_the_mark() {
    let known = [0, 1].map(|at| port(mac(at), 3, Vlans::Untagged));
    let mut world = World::of(known.into()).with_hints(HintSet::NONE).posting(64);
    let network = || Arc::<str>::from("other");
    world.lanes.slots[1].role = Role::Member {
        network: network(),
        port: PortNumber(0),
        pair: 0,
    };
    let underlay = |interface| UnderlayOf {
        network: NETWORK.into(),
        interface,
    };
    world.lanes.slots[2].role = Role::Underlay {
        underlay: underlay(1),
        queue: 0,
    };
    let other = || Fdb::new(vec![Some(port(mac(0), 9, Vlans::Untagged))]);
    let sharing = other().sharing(Some((underlay(1), 1)));
    world.lanes.fdbs.insert(network(), Arc::new(sharing));
    world.rebuild_forwarding();
    let mark = |network, generation| {
        let mark = PortMark(mark_of(0, generation)).of_network(network);
        Some(mark.expect("a low number").0)
    };
    let cases = [
        (mark(0, 3), STRANGER, Some(0)),
        (mark(1, 9), STRANGER, Some(1)),
        // Of an earlier port: the table of its network decides.
        (mark(0, 2), mac(0), Some(0)),
        (mark(1, 8), mac(0), Some(1)),
        (mark(2, 3), mac(0), None),
        (None, mac(0), None),
    ];
    // Where the frame is in its chunk, in zero-copy mode if headers were removed, over IPv4 and IPv6, with and without a tag.
    for moved in [0, 50, 54, 70, 74] {
        for (number, (mark, to, receiver)) in (0..).zip(cases) {
            let mut sent = frame(to, STRANGER, 60);
            sent[59] = number;
            assert_eq!(world.got_at(moved, mark, &sent), receiver, "{moved} {number}");
        }
    }
    // At another place the program has written nothing.
    assert_eq!(world.got_at(8, mark(1, 9), &frame(mac(0), STRANGER, 60)), None);
    // It is alone now: also if the other network uses queues of another NIC, which its owner has left.
    for alone in [other(), other().sharing(Some((underlay(2), 1)))] {
        world.lanes.fdbs.insert(network(), Arc::new(alone));
        world.rebuild_forwarding();
        for (mark, receiver) in [(mark(1, 9), None), (mark(0, 3), Some(0)), (None, Some(0))] {
            assert_eq!(world.got_at(0, mark, &frame(mac(0), STRANGER, 60)), receiver);
        }
    }
    assert_eq!(PortMark(mark_of(1024, 3)).of_network(0), None);
}

/// A UDP packet to a port of the first one, of a flow of that source port.
pub(super) fn udp(source: u16) -> Vec<u8> {
    let ip = [0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 9, 10, 0, 0, 1];
    let ports = [source.to_be_bytes(), 53u16.to_be_bytes()].concat();
    let mut bytes = [&mac(0)[..], &STRANGER, &[8, 0], &ip, &ports].concat();
    bytes.resize(60, 0);
    bytes
}

/// Rules of the first port, a line each.
pub(super) fn filter(world: &mut World, rules: &str) {
    let rules = rules.lines().map(|words| words.parse::<Rule>().expect(words));
    let filter = PortFilter::new(&Filter {
        rule: rules.collect(),
        ..Filter::default()
    });
    world.lanes.change(0, |lane, _| {
        drop(lane.set_filter(filter.for_a_lane(0)));
    });
    world.rebuild_forwarding();
}

#[test]
fn rule_uses_the_programs_mark_with_any_hash() {
    let mut world = World::new(&[64]).with_hints(HintSet::MARK.with(HintSet::HASH));
    filter(&mut world, "direction=to-guest action=allow mark=7");
    let mut wanted = Vec::new();
    for round in 0..3u16 {
        for (at, mark) in [Some(7), None, Some(8), Some(0), Some(7)].into_iter().enumerate() {
            let sent = udp(round % 2 * 100 + at as u16);
            let left = Left {
                mark,
                // The same of all flows.
                hash: (5, OF_PORTS),
                ..Left::default()
            };
            world.arrive_behind(&left.bytes(), &sent);
            wanted.extend((mark == Some(7)).then_some(sent));
        }
    }
    world.poll();
    assert_eq!(world.ports[0].got(), wanted);
    assert_eq!(world.ports[0].counters.to_guest_filter.get(), 9);
}

#[test]
fn flow_follows_its_pair_also_by_the_nics_hash() {
    let known = FdbPort {
        flows: Some(Arc::default()),
        ..port(mac(0), 1, Vlans::Untagged)
    };
    let mut world = World::of(vec![known]);
    world.add_pair(0, 1, Offloads::NONE);
    world.rebuild_forwarding();
    let mut world = world.with_hints(HintSet::HASH).posting(64);
    let back = |source: u16| {
        let mut bytes = udp(source);
        let (to, from) = (STRANGER, mac(0));
        bytes[..6].copy_from_slice(&to);
        bytes[6..12].copy_from_slice(&from);
        let ends: Vec<u8> = bytes[26..38].to_vec();
        bytes[26..30].copy_from_slice(&ends[4..8]);
        bytes[30..34].copy_from_slice(&ends[..4]);
        bytes[34..36].copy_from_slice(&ends[10..12]);
        bytes[36..38].copy_from_slice(&ends[8..10]);
        bytes
    };
    for pair in [1usize, 0, 1] {
        world.ports[pair].send(&back(9));
        world.poll();
        for kind in [OF_PORTS, 0, OF_PORTS] {
            let left = Left {
                hash: (77, kind),
                port: Some(mark_of(0, 1)),
                ..Left::default()
            };
            world.arrive_behind(&left.bytes(), &udp(9));
            world.poll();
            assert_eq!(world.ports[pair].got(), [udp(9)], "pair {pair}");
        }
    }
    // Without a choice of its pair: what is chosen by hash is by its flow.
    world.lanes.slots.remove(1).lane.stop();
    world.rebuild_forwarding();
    let left = Left {
        hash: (77, OF_PORTS),
        ..Left::default()
    };
    world.arrive_behind(&left.bytes(), &udp(9));
    world.poll();
    assert_eq!(world.ports[0].got(), [udp(9)]);
}

#[test]
fn piece_that_is_none_spoils_its_frame_only() {
    let mut world = World::new(&[16, 16]).with_hints(HintSet::NONE);
    let sent = |len| frame(mac(1), STRANGER, len);
    for more in [false, true] {
        world.arrive_piece(&sent(1000), true);
        let mut wire = world.wire();
        // Nothing that the NIC has.
        let frame = frame_at(UmemOffset::new(300 * 2048));
        let data = UmemOffset::new(frame.offset().get() + u64::from(XDP_PACKET_HEADROOM));
        wire.received.push_back(RxDesc {
            frame,
            data,
            len: 100,
            more,
        });
        drop(wire);
        if more {
            world.arrive_piece(&sent(200), false);
        }
        world.arrive(&sent(60));
        world.arrive_in_pieces(&sent(1200));
        world.poll();
        let got = world.ports[1].got();
        assert!(got == [sent(60), sent(1200)], "{more}: {}", got.len());
        world.ports[1].post(2);
    }
    assert_eq!(world.uplink.to_guest_stray.get(), 2);
    assert_eq!(world.uplink.to_guest_in_pieces.get(), 2);
    assert_eq!(world.given(), 128, "all chunks are with the NIC again");
}

/// A port with a queue of its own, with these hints. Its wire is the world's.
fn with_own_queue(hints: HintSet, untags: bool) -> World {
    let vlans = if untags {
        Vlans::Access(100)
    } else {
        Vlans::Untagged
    };
    let mut world = World::default();
    let umem = own_memory(64);
    let mut wire = Wire::new(umem.clone(), 64, 64);
    wire.fill = 64;
    let wire = Arc::new(Mutex::new(wire));
    let mut queue = queue(TestNic(Arc::clone(&wire)), umem, 32, Sends::PLAIN);
    offer(&mut queue, hints);
    world.wire = Some(wire);
    let fdb = Fdb::new(vec![Some(port(mac(0), 1, vlans))]);
    world.lanes.fdbs.insert(NETWORK.into(), Arc::new(fdb));
    world.add_lane((0, 0), Offloads::NONE, |pair, counters, of| {
        let own = CopyQueue::new(&pair.to_guest, queue, untags, &counters);
        Box::new(PortLane::with_queue(pair, counters, of, own))
    });
    world.rebuild_forwarding();
    world.ports[0].post(32);
    world.poll();
    world
}

#[test]
fn queue_of_a_ports_own_puts_tags_back_or_leaves_them_off() {
    for untags in [false, true] {
        let mut world = with_own_queue(HintSet::VLAN, untags);
        let bare = frame(mac(0), STRANGER, 60);
        world.arrive_behind(&Left::tag(0x8100, 0x6064).bytes(), &bare);
        world.arrive_behind(&Left::default().bytes(), &bare);
        world.arrive_behind(&Left::default().bytes(), &tagged(&bare, 100));
        // The tag of one in pieces.
        world.arrive_piece(&bare, true);
        world.leave(&Left::tag(0x8100, 100).bytes());
        world.arrive_piece(&[9; 100], false);
        for _ in 0..3 {
            world.poll();
        }
        let long = [&bare[..], &[9; 100]].concat();
        let with = [&bare[..12], &[0x81, 0, 0x60, 100], &bare[12..]].concat();
        let wanted = match untags {
            true => [bare.clone(), bare.clone(), bare.clone(), long],
            false => [with, bare.clone(), tagged(&bare, 100), tagged(&long, 100)],
        };
        assert_eq!(world.ports[0].got(), wanted);
        let put_back = world.ports[0].counters.to_guest_tags_put_back.get();
        assert_eq!(put_back, if untags { 0 } else { 2 });
        assert_eq!(world.given(), 32);
    }
}

#[test]
fn own_queue_drops_frames_of_unknown_vlan_and_follows_marks() {
    let mut world = with_own_queue(HintSet::VLAN, false);
    world.arrive_piece(&udp(1), true);
    world.leave(&0x8009_0001u32.to_ne_bytes());
    world.arrive_piece(&[1; 50], true);
    world.arrive_piece(&[2; 50], false);
    world.arrive(&udp(2));
    for _ in 0..3 {
        world.poll();
    }
    assert_eq!(world.ports[0].got(), [udp(2)]);
    assert_eq!(world.ports[0].counters.to_guest_tag_unknown.get(), 1);
    assert_eq!(world.given(), 32);
    let mut world = with_own_queue(HintSet::MARK, false);
    filter(&mut world, "direction=to-guest action=allow mark=7");
    for mark in [Some(7), Some(6), None] {
        let left = Left::marked(mark);
        world.arrive_behind(&left.bytes(), &udp(3));
    }
    for _ in 0..3 {
        world.poll();
    }
    assert_eq!(world.ports[0].got(), [udp(3)]);
    assert_eq!(world.ports[0].counters.to_guest_filter.get(), 2);
}
