//! Buffers and frames in as many pieces as the queue has entries, through whole lanes: the guest can extend neither a
//! poll nor the memory of a lane.

use std::sync::Arc;

use virtqueue::driver::{Buffer, QueueDriver};
use virtqueue::{GuestAddr, Journal, QueueFeatures};

use crate::lane::Lane;
use crate::lane::limits::{BATCH, DESCRIPTORS, DESCRIPTORS_A_FRAME};
use crate::port_lane::PortLane;
use crate::tests::test_guest::{HEADER, Memory};
use crate::tests::test_nic::Over;
use crate::tests::test_siblings::Others;
use device::counters::PairCounters;
use device::offloads::Offloads;
use device::pair::{Direction, QueuePair};
use model::config::Placement;

/// Entries of the queue, and pieces of a buffer: more than a poll reads.
const QUEUE: u32 = 2 * DESCRIPTORS as u32;
const BUFFERS: usize = 8;
const FRAME: u32 = 60;
const RAM: u64 = 4 << 20;

/// A guest with `first` and then buffers of [`QUEUE`] bytes, each a descriptor of its own.
fn guest(memory: &Memory, first: &[Buffer]) -> (QueuePair, QueueDriver) {
    let features = QueueFeatures {
        indirect: true,
        ..QueueFeatures::default()
    };
    let vring = || memory.vring(QUEUE, features, Journal::None);
    let ((to_guest, mut driver), (from_guest, _)) = (vring(), vring());
    if !first.is_empty() {
        driver.add(first).expect("room in the ring");
    }
    for _ in 0..BUFFERS {
        let begin = memory.ram.alloc(QUEUE.into(), 1).expect("memory is left").get();
        let bytes: Vec<_> = (0..u64::from(QUEUE))
            .map(|at| Buffer::writable(GuestAddr(begin + at), 1))
            .collect();
        driver.add_indirect(&bytes).expect("room in the ring");
    }
    driver.publish();
    (memory.side(from_guest, to_guest, Offloads::NONE), driver)
}

/// Polls until all buffers are used; returns how many each poll used.
fn polls(mut poll: impl FnMut(), driver: &mut QueueDriver) -> Vec<usize> {
    let mut used = Vec::new();
    while used.iter().sum::<usize>() < BUFFERS && used.len() < 2 * BUFFERS {
        poll();
        let lens = std::iter::from_fn(|| driver.take_used()).map(|used| used.len);
        used.push(lens.inspect(|&len| assert_eq!(len, HEADER + FRAME)).count());
    }
    used
}

#[test]
fn pieces_of_buffers_do_not_extend_the_budget_of_a_copy_lane() {
    let looked_at = Offloads {
        guest_csum: true,
        guest_tso4: true,
        ..Offloads::NONE
    };
    for offloads in [Offloads::NONE, looked_at] {
        let over = Over::new(Placement::Copy, 64);
        let memory = over.memory(RAM);
        let (mut guest, mut driver) = guest(&memory, &[]);
        guest.set_offloads(offloads);
        let (mut lane, wire) = over.lane(guest, &memory, &Arc::default());
        for _ in 0..BUFFERS {
            wire.lock().expect("no panic").receive(FRAME, false);
        }
        let poll = || {
            lane.poll(&mut Others::default()).expect("no fault");
        };
        assert_eq!(polls(poll, &mut driver), [1; BUFFERS], "{offloads:?}");
    }
}

#[test]
fn pieces_of_buffers_do_not_extend_the_budget_of_a_cable() {
    let (guest, mut driver) = guest(&Memory::new(RAM, 0), &[]);
    let mut receiver = PortLane::of_cable(guest, Arc::default());
    let memory = Memory::new(RAM, 0);
    let vring = || memory.vring(64, QueueFeatures::default(), Journal::None);
    let ((to_guest, _), (from_guest, mut sending)) = (vring(), vring());
    for _ in 0..BUFFERS {
        let addr = memory
            .ram
            .alloc((HEADER + FRAME).into(), 64)
            .expect("memory is left");
        let frame = Buffer::readable(addr, HEADER + FRAME);
        sending.add(&[frame]).expect("room in the ring");
    }
    sending.publish();
    let mut sender = PortLane::of_cable(memory.side(from_guest, to_guest, Offloads::NONE), Arc::default());
    let poll = || {
        sender.poll(&mut Others::one(&mut receiver)).expect("no fault");
    };
    assert_eq!(polls(poll, &mut driver), [1; BUFFERS]);
}

#[test]
fn direct_lane_keeps_few_pieces_of_buffers_and_uses_them_all() {
    let short = Buffer::writable(GuestAddr(64), 100);
    // Buffers that wait each with a chunk of its own, and those behind one that is too small for that.
    for first in [&[][..], &[short]] {
        let over = Over {
            fill: 32,
            pieces: QUEUE as usize,
            ..Over::new(Placement::Direct, 32)
        };
        let memory = over.memory(RAM);
        let _first = memory.ram.alloc(4096, 64).expect("memory");
        let (guest, mut driver) = guest(&memory, first);
        let counters = Arc::<PairCounters>::default();
        let (mut lane, wire) = over.lane(guest, &memory, &counters);
        for _ in 0..2 * BUFFERS {
            lane.poll(&mut Others::default()).expect("no fault");
        }
        let mut taken = 0;
        lane.change_vrings(&mut |of, vring| {
            if of == Direction::ToGuest {
                taken = vring.queue.base() as usize;
            }
        });
        assert!((1..=2).contains(&taken), "{taken} buffers taken");
        let mut used = 0;
        for _ in 0..BUFFERS + first.len() {
            // One frame needs the short buffer and the next one.
            if used < BUFFERS + first.len() {
                wire.lock().expect("no panic").receive(FRAME, false);
            }
            lane.poll(&mut Others::default()).expect("no fault");
            used += std::iter::from_fn(|| driver.take_used()).count();
        }
        assert_eq!(used, BUFFERS + first.len());
        assert_eq!(counters.bounced_frames.get(), used as u64);
    }
}

/// Its pieces are as much work as many frames: a neighbour on the same worker waits for no more than a budget of them.
#[test]
fn pieces_of_what_a_guest_sends_use_up_the_budget() {
    const FRAMES: usize = 20;
    for placement in [Placement::Copy, Placement::SendDirect, Placement::Direct] {
        for pieces in [100, HEADER + 1514] {
            let over = Over::new(placement, 64);
            let memory = over.memory(RAM);
            let features = QueueFeatures {
                indirect: true,
                ..QueueFeatures::default()
            };
            let vring = || memory.vring(QUEUE, features, Journal::None);
            let ((from_guest, mut driver), (to_guest, _)) = (vring(), vring());
            for _ in 0..FRAMES {
                let begin = memory.ram.alloc(pieces.into(), 1).expect("memory is left");
                let bytes: Vec<_> = (0..pieces.into())
                    .map(|at| Buffer::readable(begin.checked_add(at).expect("inside"), 1))
                    .collect();
                driver.add_indirect(&bytes).expect("room in the ring");
            }
            driver.publish();
            let guest = memory.side(from_guest, to_guest, Offloads::NONE);
            let (mut lane, wire) = over.lane(guest, &memory, &Arc::default());
            let most = BATCH.div_ceil((u64::from(pieces) / DESCRIPTORS_A_FRAME) as usize);
            let (mut sent, mut polls) = (0, 0);
            while sent < FRAMES {
                lane.poll(&mut Others::default()).expect("no fault");
                let now = wire.lock().expect("no panic").sent.len();
                let what = format!("{placement:?}, {pieces}");
                assert!(now - sent <= most, "{what}: {} in a poll", now - sent);
                (sent, polls) = (now, polls + 1);
                assert!(polls < 10 * FRAMES, "{what}: {sent} were sent");
            }
        }
    }
}
