//! No allocation while frames move, between any endpoints: each pair of them is warmed up, and then polled again.
//!
//! The test program counts the allocations of each thread. The drivers and NICs of the tests allocate, too, so only
//! polls are counted.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use model::config::MemberOptions;
use virtqueue::driver::{Buffer, QueueDriver};
use virtqueue::{Journal, QueueFeatures};
use xsk::Umem;

use crate::backend::arrivals::Arrivals;
use crate::direct::{CHUNK_BYTES, DirectMemory};
use crate::fdb::forwarding::Forwarding;
use crate::fdb::{Fdb, FdbPort, PortNumber};
use crate::frame::bytes::GuestRam as Ram;
use crate::lane::Lane;
use crate::nic::coupled::Coupled;
use crate::nic::endpoint::NicQueue;
use crate::nic::null::{NullConfig, NullNic};
use crate::nic::queue::{MOST_PIECES, Sends};
use crate::policy::filter::{Action, Filter, LaneFilter, PortFilter, Rule};
use crate::port_lane::PortLane;
use crate::tests::test_guest::{HEADER, Memory};
use crate::tests::test_lanes::{copy_lane, direct_lane, send_direct_lane};
use crate::tests::test_nic::{TestNic, Wire, own_memory, queue};
use crate::tests::test_siblings::Others;
use device::counters::PairCounters;
use device::offloads::Offloads;

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    // At the end of a thread there is nothing to count with.
    let _ = COUNT.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: all is the system allocator's; that it is counted changes nothing of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: as the caller promises.
        unsafe { System.realloc(block, layout, bytes) }
    }
}

pub(crate) const ROUNDS: usize = 60;
const FRAMES: usize = 20;
const CHUNKS: usize = 2048;

/// A guest's driver of both queues, that sends the same frames again and again.
struct Guest {
    memory: Memory,
    to_guest: QueueDriver,
    from_guest: QueueDriver,
    frames: Vec<Vec<Buffer>>,
    /// What each head stands for.
    buffers: HashMap<u16, Buffer>,
}

impl Guest {
    /// With frames of these bytes, headers included, each in two buffers; and our half.
    fn new(frames: &[Vec<u8>], offloads: Offloads, private: usize) -> (Self, device::pair::QueuePair) {
        let memory = Memory::new(8 << 20, private);
        let vring = || memory.vring(256, QueueFeatures::default(), Journal::None);
        let ((to_guest, receiving), (from_guest, sending)) = (vring(), vring());
        let pair = memory.side(from_guest, to_guest, offloads);
        let frames = frames.iter().map(|bytes| {
            let addr = memory.ram.alloc(bytes.len() as u64, 64).expect("memory");
            memory.ram.write(addr, bytes);
            let rest = addr.checked_add(40).expect("inside");
            vec![
                Buffer::readable(addr, 40),
                Buffer::readable(rest, bytes.len() as u32 - 40),
            ]
        });
        let frames = frames.collect();
        let mut guest = Self {
            to_guest: receiving,
            from_guest: sending,
            frames,
            memory,
            buffers: HashMap::new(),
        };
        for _ in 0..128 {
            let addr = guest.memory.ram.alloc(2048, 2048).expect("memory");
            guest.give(Buffer::writable(addr, 2048));
        }
        guest.to_guest.publish();
        (guest, pair)
    }

    fn give(&mut self, buffer: Buffer) {
        let head = self.to_guest.add(&[buffer]).expect("room");
        self.buffers.insert(head, buffer);
    }

    /// Sends what it can, and gives buffers back that it received frames in; how many.
    fn work(&mut self) -> usize {
        while self.from_guest.take_used().is_some() {}
        for at in 0..FRAMES {
            if self.from_guest.free_descriptors() < 8 {
                break;
            }
            self.from_guest
                .add(&self.frames[at % self.frames.len()])
                .expect("room");
        }
        self.from_guest.publish();
        let mut received = 0;
        while let Some(used) = self.to_guest.take_used() {
            received += 1;
            let buffer = self.buffers.remove(&used.head).expect("it was given");
            self.give(buffer);
        }
        self.to_guest.publish();
        received
    }
}

/// Polls; returns the allocations of polls after the first half, when all scratch memory has its full size.
pub(crate) fn allocations(mut poll: impl FnMut(), mut between: impl FnMut()) -> u64 {
    let mut made = 0;
    for round in 0..ROUNDS {
        between();
        let before = COUNT.get();
        poll();
        if round >= ROUNDS / 2 {
            made += COUNT.get() - before;
        }
    }
    made
}

fn plain() -> Vec<Vec<u8>> {
    [60, 300, 1514].map(|len| vec![0; HEADER as usize + len]).into()
}

/// TCP over IPv4 with so much payload, to be cut into segments of 1000 bytes.
fn packet(payload: usize) -> Vec<u8> {
    let mut frame = vec![0; 54 + payload];
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[14] = 0x45;
    frame[16..18].copy_from_slice(&((40 + payload) as u16).to_be_bytes());
    (frame[22], frame[23]) = (64, 6);
    (frame[46], frame[47]) = (0x50, 0x18);
    let [low, high] = 1000u16.to_le_bytes();
    [&[1, 1, 54, 0, low, high, 34, 0, 16, 0, 0, 0], &frame[..]].concat()
}

/// Such a packet, one for which only a checksum is asked, and plain ones.
fn asking() -> Vec<Vec<u8>> {
    let mut summed = packet(400);
    (summed[1], summed[4], summed[5]) = (0, 0, 0);
    [vec![packet(9000), packet(60_000), summed], plain()].concat()
}

const ALL: Offloads = Offloads {
    csum: true,
    tso4: true,
    guest_csum: true,
    guest_tso4: true,
    ..Offloads::NONE
};
const SENDS: Offloads = Offloads {
    csum: true,
    tso4: true,
    ..Offloads::NONE
};

/// A queue of a null NIC that has frames all the time.
fn null_queue() -> NicQueue<NullNic> {
    let umem = own_memory(CHUNKS);
    let config = NullConfig {
        frame_bytes: 200,
        header_bytes: 0,
        at_once: usize::MAX,
    };
    queue(NullNic::new(umem.clone(), config, 256), umem, 256, Sends::PLAIN)
}

#[test]
fn copying_to_and_from_a_null_nic_allocates_nothing() {
    let guests = [(plain(), Offloads::NONE), (asking(), ALL), (asking(), SENDS)];
    for (is_filtered, (frames, offloads)) in [false, true]
        .into_iter()
        .flat_map(|is| guests.clone().map(|it| (is, it)))
    {
        let (mut guest, pair) = Guest::new(&frames, offloads, 0);
        let mut lane = copy_lane(pair, null_queue(), Arc::default());
        if is_filtered {
            drop(lane.set_filter(filter(true)));
        }
        let (mut received, poll) = (0, || {
            lane.poll(&mut Others::default()).expect("no fault");
        });
        assert_eq!(allocations(poll, || received += guest.work()), 0, "{offloads:?}");
        assert!(received > ROUNDS, "frames moved");
    }
}

/// Else the first frames of each lane would allocate it anew.
#[test]
fn queue_keeps_its_room_for_received_frames_from_lane_to_lane() {
    let (_guest, pair) = Guest::new(&plain(), ALL, 0);
    let (mut queue, counters) = (null_queue(), PairCounters::default());
    let room = queue.received.capacity();
    assert!(room > 0);
    let mut arrivals = Arrivals::new(&pair.to_guest, &mut queue, &counters);
    assert_eq!(queue.received.capacity(), room);
    arrivals.leave(&mut queue);
    assert_eq!(queue.received.capacity(), room);
}

#[test]
fn segments_by_reference_allocate_nothing() {
    let sends = Sends {
        most_pieces: MOST_PIECES,
        refers: true,
        ..Sends::PLAIN
    };
    let (mut guest, pair) = Guest::new(&asking(), SENDS, 0);
    let umem = own_memory(CHUNKS);
    let wire = Arc::new(Mutex::new(Wire::new(umem.clone(), 1024, 0)));
    let nic = TestNic(Arc::clone(&wire));
    // What this NIC keeps it allocates; not while frames only come to it.
    wire.lock().expect("no panic").ring.reserve(1024);
    let mut lane = copy_lane(pair, queue(nic, umem, 0, sends), Arc::default());
    let mut made = 0;
    for round in 0..ROUNDS {
        guest.work();
        let before = COUNT.get();
        lane.poll(&mut Others::default()).expect("no fault");
        let some = COUNT.get() - before;
        made += if round < ROUNDS / 2 { 0 } else { some };
        let mut wire = wire.lock().expect("no panic");
        let sent: Vec<_> = wire.ring.drain(..).map(|desc| desc.frame).collect();
        wire.done.extend(sent);
    }
    // The test's NIC collects completions: one allocation a poll.
    assert!(made <= ROUNDS as u64 / 2, "{made}");
}

/// Frames of the guest's are sent from its memory, and received into that, or into ours.
#[test]
fn direct_placements_allocate_nothing() {
    let guests = [(plain(), Offloads::NONE), (asking(), SENDS)];
    let ways = [(true, false), (false, false), (true, true), (false, true)];
    for ((into_guest, is_filtered), (frames, offloads)) in ways
        .into_iter()
        .flat_map(|way| guests.clone().map(|it| (way, it)))
    {
        let private = 192 * CHUNK_BYTES as usize;
        let (mut guest, pair) = Guest::new(&frames, offloads, private);
        let own = guest.memory.map.guest_len();
        let map = Arc::clone(&guest.memory.map);
        let umem = Umem::unaligned(Arc::new(Ram(map)), CHUNK_BYTES, 0).expect("good");
        let config = NullConfig {
            frame_bytes: 200,
            header_bytes: if into_guest { HEADER } else { 0 },
            at_once: usize::MAX,
        };
        let nic = NullNic::new(umem.clone(), config, 256);
        let to_receive = if into_guest { 0 } else { 64 };
        let memory = DirectMemory::new(umem, own..own + private as u64, to_receive, 2048).expect("inside");
        let sends = Sends {
            most_pieces: MOST_PIECES,
            ..Sends::PLAIN
        };
        let queue = Coupled::new(nic, sends);
        let mut lane: Box<dyn Lane> = match into_guest {
            true => Box::new(direct_lane(pair, queue, memory, Arc::default())),
            false => Box::new(send_direct_lane(pair, queue, memory, Arc::default())),
        };
        drop(lane.set_filter(filter(is_filtered)));
        let (mut received, poll) = (0, || {
            lane.poll(&mut Others::default()).expect("no fault");
        });
        assert_eq!(
            allocations(poll, || received += guest.work()),
            0,
            "{offloads:?}, into guest memory: {into_guest}"
        );
        assert!(received > ROUNDS, "frames moved");
    }
}

#[test]
fn guest_to_guest_allocates_nothing() {
    // Taken whole, or cut and summed for a guest that takes nothing.
    for (offloads, is_filtered) in [(ALL, false), (SENDS, false), (ALL, true)] {
        let (mut sender, from) = Guest::new(&asking(), ALL, 0);
        let (mut receiver, to) = Guest::new(&plain(), offloads, 0);
        let mut from = PortLane::of_cable(from, Arc::default());
        let mut to = PortLane::of_cable(to, Arc::default());
        for lane in [&mut from, &mut to] {
            drop(lane.set_filter(filter(is_filtered)));
        }
        let poll = || {
            from.poll(&mut Others::one(&mut to)).expect("no fault");
            to.poll(&mut Others::default()).expect("no fault");
        };
        let mut received = 0;
        let between = || {
            sender.work();
            received += receiver.work();
        };
        assert_eq!(allocations(poll, between), 0, "{offloads:?}");
        assert!(received > ROUNDS, "frames moved");
    }
}

/// Rules for what a guest sends and gets, if there are some; all frames pass.
fn filter(are_some: bool) -> LaneFilter {
    let rule = |direction: &str| format!("direction={direction} action=allow ethertype=llc").parse::<Rule>();
    let rules = ["from-guest", "to-guest"].map(|direction| rule(direction).expect("a rule"));
    PortFilter::new(&Filter {
        rule: if are_some { rules.to_vec() } else { Vec::new() },
        from_guest_default: are_some.then_some(Action::Allow),
        to_guest_default: are_some.then_some(Action::Allow),
    })
    .for_a_lane(0)
}

#[test]
fn frames_that_come_back_allocate_nothing() {
    for (offloads, is_filtered) in [(ALL, false), (SENDS, false), (ALL, true)] {
        let (mut guest, pair) = Guest::new(&asking(), offloads, 0);
        // All addresses of its frames are 0.
        let port = FdbPort {
            options: MemberOptions {
                hairpin: true,
                ..MemberOptions::default()
            },
            ..FdbPort::default()
        };
        let fdb = Fdb::new(vec![Some(port)]);
        let mut lane = PortLane::new(pair, Arc::default(), (PortNumber(0), 0));
        lane.set_forwarding(&Arc::new(Forwarding::new(Arc::new(fdb), &[])));
        if is_filtered {
            drop(lane.set_filter(filter(true)));
        }
        let poll = || {
            lane.poll(&mut Others::default()).expect("no fault");
        };
        let mut received = 0;
        assert_eq!(allocations(poll, || received += guest.work()), 0, "{offloads:?}");
        assert!(received > ROUNDS, "frames moved");
    }
}

#[test]
fn frames_of_a_pair_that_is_off_allocate_nothing() {
    let (mut first, to) = Guest::new(&plain(), ALL, 0);
    let (_second, mut off) = Guest::new(&plain(), ALL, 0);
    off.to_guest.enabled = false;
    let mut lane = copy_lane(off, null_queue(), Arc::default());
    let mut other = PortLane::of_cable(to, Arc::default());
    let (mut received, poll) = (0, || {
        lane.poll(&mut Others::one(&mut other)).expect("no fault");
    });
    assert_eq!(allocations(poll, || received += first.work()), 0);
    assert!(received > ROUNDS, "frames moved");
}
