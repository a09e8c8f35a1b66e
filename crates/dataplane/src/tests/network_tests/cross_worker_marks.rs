//! What goes with frames from one worker to another: the second one goes by it, and reads no address.

use model::config::MemberOptions;
use proptest::prelude::*;
use steer::HintSet;

use super::links::Workers;
use super::port_marks::{Left, filter, port, udp};
use super::*;
use crate::fdb::learned::Learned;
use crate::tests::fairness_tests::gso_packet;

/// Four ports without VLANs, in their first lives.
fn plain() -> Vec<Option<FdbPort>> {
    (0..4)
        .map(|at| Some(port(mac(at), 1 + u16::from(at), Vlans::Untagged)))
        .collect()
}

/// They are spread over two workers, with an uplink that tells of marks.
fn workers() -> Workers {
    let known = plain().into_iter().flatten().collect();
    let mut workers = Workers::hinted(known, Some(HintSet::MARK));
    workers.post(64);
    workers
}

impl Workers {
    /// The first one has that given to it by its uplink: it is in the link then.
    fn arrive(&mut self, mark: Option<u32>, frame: &[u8]) {
        let left = Left::marked(mark);
        self.0[0].arrive_behind(&left.bytes(), frame);
        self.0[0].poll();
    }

    /// The same of what a guest there sends.
    fn give(&mut self, from: usize, frame: &[u8]) {
        self.port(from).send(frame);
        self.0[0].poll();
    }
}

#[test]
fn frame_goes_where_the_first_worker_found_while_its_ports_live_as_they_did() {
    // What the second worker knows by then: the third port has another address, and the fourth has its.
    let others = |generation: u16| {
        let mut others = plain();
        others[2] = Some(port(mac(7), generation, Vlans::Untagged));
        others[3] = Some(port(mac(2), 40, Vlans::Untagged));
        others
    };
    for (generation, to) in [(3, 2), (30, 3)] {
        let mut workers = workers();
        let sent = [
            frame(mac(2), mac(0), 60),
            frame(mac(2), STRANGER, 61),
            frame(mac(2), mac(1), 62),
        ];
        workers.give(0, &sent[0]);
        workers.arrive(None, &sent[1]);
        workers.give(1, &sent[2]);
        workers.0[1].tell(others(generation));
        workers.poll();
        for port in [2, 3] {
            let wanted = if port == to { &sent[..] } else { &[] };
            assert_eq!(workers.port(port).got(), wanted, "life {generation}, port {port}");
        }
    }
}

#[test]
fn frame_for_a_port_whose_number_was_reused_is_lost() {
    let mut workers = workers();
    workers.give(0, &frame(mac(2), mac(0), 60));
    workers.arrive(None, &frame(mac(2), STRANGER, 60));
    let mut ports = plain();
    ports[2] = Some(port(mac(9), 30, Vlans::Untagged));
    workers.0[1].tell(ports);
    workers.poll();
    assert!(workers.port(2).got().is_empty());
    assert!(workers.port(3).got().is_empty());
}

#[test]
fn frame_of_a_replaced_port_follows_its_source_address() {
    let news = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd"));
    let isolated = |at: u8, generation| FdbPort {
        options: MemberOptions {
            isolated: at != 3,
            ..MemberOptions::default()
        },
        learned: (at == 0).then(|| Arc::new(Learned::new(Arc::clone(&news)))),
        ..port(mac(at), generation, Vlans::Untagged)
    };
    let known = |generation| (0..4).map(move |at| isolated(at, if at == 0 { generation } else { 1 }));
    // Of an address that no table has: who may not hear it must not, and nobody knows who sent it.
    let inner = [2, 0, 0, 0, 5, 1];
    for (generation, got) in [(1, 4), (2, 2)] {
        let mut workers = Workers::new(known(1).collect(), false);
        workers.post(16);
        let ends = [
            (BROADCAST, inner),
            (mac(3), inner),
            (BROADCAST, mac(0)),
            (mac(3), mac(0)),
        ];
        let sent = ends.map(|(to, from)| frame(to, from, 60));
        sent.iter().for_each(|frame| workers.give(0, frame));
        workers.0[1].tell(known(generation).map(Some).collect());
        workers.poll();
        assert_eq!(workers.port(3).got(), sent[4 - got..], "life {generation}");
        assert!(workers.port(2).got().is_empty(), "life {generation}");
    }
}

#[test]
fn frame_of_a_removed_port_is_not_attributed_to_the_new_owner_of_its_address() {
    let known = (0..4).map(|at| FdbPort {
        options: MemberOptions {
            isolated: at % 2 == 0,
            ..MemberOptions::default()
        },
        ..port(mac(at), 1, Vlans::Untagged)
    });
    let mut workers = Workers::new(known.clone().collect(), false);
    workers.post(16);
    for to in [mac(3), BROADCAST] {
        workers.give(0, &frame(to, mac(0), 60));
    }
    let mut others: Vec<_> = known.map(Some).collect();
    others[0] = None;
    others[1] = Some(port(mac(0), 2, Vlans::Untagged));
    workers.0[1].tell(others);
    workers.poll();
    assert!(workers.port(2).got().is_empty(), "both were isolated");
    assert!(workers.port(3).got().is_empty(), "nobody knows who sent it");
    assert_eq!(workers.lost_as_isolated(), 2);
}

/// By its source it would be one of an isolated port.
#[test]
fn frame_that_came_by_the_uplink_is_no_ports_at_either_worker() {
    let known = plain().into_iter().flatten();
    let known = known.map(|port| FdbPort {
        options: MemberOptions {
            isolated: true,
            ..MemberOptions::default()
        },
        ..port
    });
    let mut workers = Workers::new(known.collect(), true);
    workers.post(16);
    let group = frame(BROADCAST, mac(2), 61);
    let sent = |to| [frame(mac(to), mac(0), 60), group.clone()];
    for to in [1, 2] {
        workers.arrive(None, &sent(to)[0]);
    }
    workers.arrive(None, &group);
    workers.poll();
    for to in [1, 2] {
        assert_eq!(workers.port(to.into()).got(), sent(to), "{to}");
    }
}

#[test]
fn mark_of_a_flow_is_matched_by_rules_of_ports_of_the_other_worker() {
    let mut workers = workers();
    filter(&mut workers.0[1], "direction=to-guest action=allow mark=7");
    let to_it = |source: u16| {
        let mut bytes = udp(source);
        bytes[..6].copy_from_slice(&mac(2));
        bytes
    };
    let mut wanted = Vec::new();
    for (at, mark) in [Some(7), None, Some(8), Some(0), Some(7)].into_iter().enumerate() {
        let sent = to_it(at as u16);
        workers.arrive(mark, &sent);
        wanted.extend((mark == Some(7)).then_some(sent));
    }
    // In pieces: what stands before the first is the frame's.
    let in_pieces = to_it(9);
    for (mark, is_its) in [(7, true), (8, false)] {
        let (first, last) = in_pieces.split_at(50);
        let left = Left::marked(Some(mark));
        workers.0[0].arrive_piece(first, true);
        workers.0[0].leave(&left.bytes());
        workers.0[0].arrive_piece(last, false);
        wanted.extend(is_its.then(|| in_pieces.clone()));
    }
    // No NIC told of this one.
    workers.port(0).send(&frame(mac(2), mac(0), 60));
    workers.poll();
    assert_eq!(workers.port(2).got(), wanted);
    assert_eq!(workers.port(2).counters.to_guest_filter.get(), 5);
}

#[test]
fn frames_of_a_flow_with_different_marks_are_not_merged() {
    for marks in [[7, 7], [7, 8]] {
        let mut workers = workers();
        filter(&mut workers.0[1], "direction=to-guest action=allow mark=7");
        // Segments, as a guest of the first worker gets them that takes no packets.
        slots::change(&mut workers.0[0].slots, 0, &mut Vec::new(), |lane, _| {
            lane.pair_mut().expect("a guest's").offloads = Offloads::all();
        });
        let (asked, packet) = gso_packet(mac(1), mac(0), 8000, 1000);
        let mut header = [0; HEADER as usize];
        header[..asked.len()].copy_from_slice(&asked);
        workers.port(0).send_with(header, &packet);
        workers.poll();
        let mut segments = workers.port(1).got();
        assert_eq!(segments.len(), 8);
        for (at, segment) in segments.iter_mut().enumerate() {
            segment[..6].copy_from_slice(&mac(2));
            let left = Left::marked(Some(marks[at / 4]));
            workers.0[0].arrive_behind(&left.bytes(), segment);
        }
        workers.poll();
        assert!(workers.merged() > 0, "frames of one mark are");
        let its = if marks[1] == 7 {
            &segments[..]
        } else {
            &segments[..4]
        };
        assert_eq!(workers.port(2).got(), its);
    }
}

#[test]
fn copy_for_a_listener_of_the_other_worker_is_filtered_by_the_mark() {
    let known = plain().into_iter().flatten().enumerate();
    let known = known.map(|(at, port)| FdbPort {
        options: MemberOptions {
            promiscuous: at == 2,
            ..MemberOptions::default()
        },
        ..port
    });
    let mut workers = Workers::hinted(known.collect(), Some(HintSet::MARK));
    workers.post(16);
    filter(&mut workers.0[1], "direction=to-guest action=allow mark=7");
    // To a port of the first worker, and to one beside the listener.
    for to in [1, 3] {
        let mut sent = udp(5);
        sent[..6].copy_from_slice(&mac(to));
        for mark in [7, 8] {
            workers.arrive(Some(mark), &sent);
        }
        workers.poll();
        assert_eq!(workers.port(2).got(), std::slice::from_ref(&sent), "{to}");
        assert_eq!(workers.port(to.into()).got(), [sent.clone(), sent]);
    }
}

#[test]
fn order_to_each_port_is_kept_with_any_marks() {
    let mut workers = workers();
    let mut wanted = [Vec::new(), Vec::new()];
    for at in 0..50usize {
        let to = 2 + at % 3 % 2;
        let sent = frame(mac(to as u8), STRANGER, 60 + at);
        let left = Left::marked((at % 5 < 2).then_some(at as u32 % 2));
        workers.0[0].arrive_behind(&left.bytes(), &sent);
        wanted[to - 2].push(sent);
    }
    workers.poll();
    for (to, wanted) in wanted.iter().enumerate() {
        assert_eq!(workers.port(2 + to).got(), *wanted, "{to}");
    }
}

/// Several with different notes are given at once, and each buffer of the link is used twice.
#[test]
fn each_frame_has_its_own_mark_in_a_used_buffer() {
    let mut workers = workers();
    filter(&mut workers.0[1], "direction=to-guest action=allow mark=7");
    let (mut wanted, mut got) = (Vec::new(), Vec::new());
    for round in 0..12u16 {
        for number in 0..40 {
            let mut sent = udp(round * 40 + number);
            sent[..6].copy_from_slice(&mac(2));
            let mark = [Some(7), Some(8), None][usize::from(round + number) % 3];
            workers.0[0].arrive_behind(&Left::marked(mark).bytes(), &sent);
            wanted.extend((mark == Some(7)).then_some(sent));
        }
        workers.0[0].poll();
        if round % 3 == 2 {
            // New flows are work, so that they are taken in several polls.
            for _ in 0..8 {
                workers.poll();
                got.extend(workers.port(2).take());
            }
        }
    }
    assert_eq!(got, wanted);
}

/// What happens to a network on two workers.
#[derive(Debug, Clone)]
enum Event {
    /// The port of that number ends.
    Leave(usize),
    /// One begins with that number and address, or is changed to it.
    Become(usize, u8),
    /// The worker of that number learns which ports there are.
    Tell(usize),
    /// The first port sends a frame to that address, or the uplink brings it.
    Send(u8),
    Arrive(u8),
    /// The second worker takes what it was given.
    Take,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (1..4usize).prop_map(Event::Leave),
        (1..4usize, 1..6u8).prop_map(|(port, mac)| Event::Become(port, mac)),
        (0..2usize).prop_map(Event::Tell),
        (1..6u8).prop_map(Event::Send),
        (1..6u8).prop_map(Event::Arrive),
        Just(Event::Take),
    ]
}

/// What control has said, and what is on its way.
struct Model {
    ports: Vec<Option<FdbPort>>,
    /// What each worker knows of it.
    told: [Vec<Option<FdbPort>>; 2],
    generation: u16,
    /// Frames in the link: to whom, as that was when they were given.
    given: Vec<(usize, u16, Vec<u8>)>,
    /// By port: frames that it gets.
    wanted: [Vec<Vec<u8>>; 4],
}

impl Model {
    fn find(&self, worker: usize, to: &[u8]) -> Option<usize> {
        let its = |port: &Option<FdbPort>| port.as_ref().is_some_and(|port| port.mac[..] == to[..6]);
        self.told[worker].iter().position(its)
    }

    /// The first worker has a frame.
    fn give(&mut self, sent: &[u8]) {
        match self.find(0, sent) {
            Some(port @ ..=1) => self.wanted[port].push(sent.to_vec()),
            Some(port) => {
                let generation = self.told[0][port].as_ref().map_or(0, |port| port.generation);
                self.given.push((port, generation, sent.to_vec()));
            }
            None => {}
        }
    }

    /// The second one takes what it was given.
    fn take(&mut self) {
        for (port, generation, sent) in std::mem::take(&mut self.given) {
            let is_its = |port: &FdbPort| port.generation == generation;
            let to = match self.told[1][port].as_ref().is_some_and(is_its) {
                true => Some(port),
                false => self.find(1, &sent).filter(|&port| port > 1),
            };
            if let Some(port) = to {
                self.wanted[port].push(sent);
            }
        }
    }

    fn change(&mut self, event: &Event) {
        match *event {
            Event::Leave(at) => self.ports[at] = None,
            Event::Become(at, of) if !self.ports.iter().flatten().any(|port| port.mac == mac(of)) => {
                self.generation += 1;
                self.ports[at] = Some(port(mac(of), self.generation, Vlans::Untagged));
            }
            _ => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Numbers and addresses are used again, workers learn of it one after the other, and frames wait between them.
    #[test]
    fn frame_follows_the_fdb_of_either_worker(
        events in proptest::collection::vec(event(), 1..60),
    ) {
        let mut workers = workers();
        let (ports, told) = (plain(), [plain(), plain()]);
        let wanted = Default::default();
        let mut model = Model { ports, told, generation: 100, given: Vec::new(), wanted };
        for (event, len) in events.into_iter().zip(60..) {
            model.change(&event);
            match event {
                Event::Leave(_) | Event::Become(..) => {}
                Event::Tell(worker) => {
                    model.told[worker] = model.ports.clone();
                    workers.0[worker].tell(model.ports.clone());
                }
                Event::Send(to) => {
                    let sent = frame(mac(to), mac(0), len);
                    workers.give(0, &sent);
                    model.give(&sent);
                }
                Event::Arrive(to) => {
                    let sent = frame(mac(to), STRANGER, len);
                    workers.arrive(None, &sent);
                    model.give(&sent);
                }
                Event::Take => {
                    workers.poll();
                    model.take();
                }
            }
            for at in 0..4 {
                let wanted = std::mem::take(&mut model.wanted[at]);
                prop_assert_eq!(workers.port(at).take(), wanted);
            }
        }
    }
}
