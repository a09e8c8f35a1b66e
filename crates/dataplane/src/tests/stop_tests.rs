//! What a stopped lane still delivers: a null NIC has frames, and the lane has not been polled.

use std::sync::{Arc, Mutex};

use virtqueue::driver::Buffer;
use virtqueue::{GuestAddr, QueueFeatures};

use crate::backend::own_queue::CopyQueue;
use crate::lane::Lane;
use crate::nic::null::{NullConfig, NullNic};
use crate::nic::queue::Sends;
use crate::port_lane::PortLane;
use crate::tests::test_guest::Memory;
use crate::tests::test_lanes::{copy_lane, switch};
use crate::tests::test_nic::{TestNic, Wire, own_memory, queue};
use crate::tests::test_port::Port;
use crate::tests::test_siblings::Others;
use device::counters::PairCounters;
use device::offloads::Offloads;
use device::pair::{Direction, QueuePair};

const FRAME_BYTES: u32 = 60;
/// Frames that the NIC has.
const ARRIVED: usize = 40;
const COALESCED: Offloads = Offloads {
    guest_csum: true,
    guest_tso4: true,
    ..Offloads::NONE
};

/// A guest with so many receive buffers.
fn guest(packed: bool, offloads: Offloads, buffers: usize) -> (Port, QueuePair) {
    let features = QueueFeatures {
        packed,
        ..QueueFeatures::default()
    };
    let (mut guest, pair) = Port::new(Memory::new(1 << 20, 0), 64, features, offloads);
    guest.post(buffers);
    (guest, pair)
}

/// A lane of that guest's, over a null NIC that has frames.
fn lane(side: QueuePair) -> (Box<PortLane<CopyQueue<NullNic>>>, Arc<PairCounters>) {
    let umem = own_memory(2 * ARRIVED);
    let config = NullConfig {
        frame_bytes: FRAME_BYTES,
        header_bytes: 0,
        at_once: usize::MAX,
    };
    let nic = NullNic::new(umem.clone(), config, ARRIVED);
    let counters = Arc::new(PairCounters::default());
    let queue = queue(nic, umem, ARRIVED, Sends::PLAIN);
    let lane = copy_lane(side, queue, Arc::clone(&counters));
    (Box::new(lane), counters)
}

/// Stops a lane that has frames for a guest with so many buffers; frames that were delivered, and those counted as
/// lost.
fn delivered_and_lost(packed: bool, offloads: Offloads, buffers: usize) -> (usize, u64) {
    let (mut guest, side) = guest(packed, offloads, buffers);
    let (lane, counters) = lane(side);
    let bases = lane.stop().pair.expect("a guest").bases;
    let used: Vec<_> = std::iter::from_fn(|| guest.to_guest.take_used()).collect();
    assert!(used.iter().all(|used| used.len == 12 + FRAME_BYTES));
    let slots = u32::try_from(used.len()).expect("few");
    assert_eq!(bases.to_guest & 0x7fff, slots, "the base is behind them");
    (used.len(), counters.to_guest_queue_stopped.get())
}

#[test]
fn what_has_come_is_delivered_when_a_lane_is_stopped_and_the_rest_is_counted() {
    for packed in [false, true] {
        for offloads in [Offloads::NONE, COALESCED] {
            for buffers in [0, 3, 60] {
                let (delivered, lost) = delivered_and_lost(packed, offloads, buffers);
                let what = format!("packed {packed}, {offloads:?}, {buffers} buffers");
                assert_eq!(delivered, buffers, "{what}");
                // A null NIC makes new frames of chunks that it gets back.
                assert!(lost as usize + buffers >= ARRIVED, "{lost}: {what}");
            }
        }
    }
}

#[test]
fn lane_of_a_guest_that_did_wrong_uses_no_further_buffer() {
    for packed in [false, true] {
        let (mut guest, side) = guest(packed, Offloads::NONE, 60);
        // A buffer to be written, where it sends.
        let buffer = Buffer::writable(GuestAddr(4096), 64);
        guest.from_guest.add(&[buffer]).expect("room");
        guest.from_guest.publish();
        let (mut lane, counters) = lane(side);
        assert!(lane.poll(&mut Others::default()).is_err());
        let before = guest.got().len();
        lane.stop();
        assert_eq!((before, guest.to_guest.take_used()), (0, None), "packed {packed}");
        assert!(counters.to_guest_queue_stopped.get() >= ARRIVED as u64);
    }
}

/// Stopped in the middle of a batch, as for another memory table: the next lane on that queue goes on from there.
#[test]
fn next_lane_of_a_queue_repeats_no_frame_of_the_batch_in_hand() {
    const FRAMES: usize = 8;
    for had in [0, 3, FRAMES] {
        let umem = own_memory(2 * FRAMES);
        let wire = Arc::new(Mutex::new(Wire::new(umem.clone(), 8, 8)));
        wire.lock().expect("no panic").fill = 2 * FRAMES;
        let nic = queue(TestNic(Arc::clone(&wire)), umem, 2 * FRAMES, Sends::PLAIN);
        let (mut of_first, side) = guest(false, COALESCED, had);
        let mut first = Box::new(copy_lane(side, nic, Arc::default()));
        for _ in 0..FRAMES {
            wire.lock().expect("no panic").receive(FRAME_BYTES, false);
        }
        let _ = first
            .poll(&mut Others::default())
            .expect("the guest does no wrong");
        first.stop();
        assert_eq!(of_first.got().len(), had);
        let nic = wire.lock().expect("no panic").given_back.take().expect("stopped");
        let (mut of_next, side) = guest(false, COALESCED, 60);
        let mut next = Box::new(copy_lane(side, nic, Arc::default()));
        let _ = next
            .poll(&mut Others::default())
            .expect("the guest does no wrong");
        assert_eq!(of_next.got().len(), FRAMES - had, "{had} had been delivered");
        next.stop();
        let mut wire = wire.lock().expect("no panic");
        let nic = wire.given_back.take().expect("stopped");
        assert_eq!(nic.pool.len() + wire.given.len(), 2 * FRAMES);
    }
}

/// The lane of another pair, which is off, finds out that this guest did wrong.
#[test]
fn guest_that_did_wrong_with_frames_of_another_pair_gets_no_more_when_its_own_lane_stops() {
    for packed in [false, true] {
        let (_, other) = guest(packed, Offloads::NONE, 0);
        let (mut other, _) = lane(other);
        switch(&mut *other, Direction::ToGuest, false);
        let (mut guest, side) = guest(packed, Offloads::NONE, 0);
        let driver = &mut guest.to_guest;
        let (mut own, counters) = lane(side);
        // The first buffer is one to be read.
        driver
            .add(&[Buffer::readable(GuestAddr(4096), 2048)])
            .expect("room in the ring");
        driver.publish();
        let mut siblings = Others::one(&mut *own);
        other.poll(&mut siblings).expect("no fault of its own guest");
        assert!(siblings.fault.is_some());
        for _ in 0..9 {
            driver
                .add(&[Buffer::writable(GuestAddr(8192), 2048)])
                .expect("room in the ring");
        }
        driver.publish();
        own.stop();
        assert_eq!(driver.take_used(), None, "packed {packed}");
        assert!(counters.to_guest_queue_stopped.get() >= ARRIVED as u64);
    }
}
