//! A guest that posts a buffer, sends a frame, and may be answered at once: direct placement, over a NIC that the test
//! plays.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use virtqueue::driver::{Buffer, QueueDriver};
use virtqueue::{Journal, QueueFeatures};
use xsk::Umem;

use crate::direct::{CHUNK_BYTES, DirectMemory, DirectQueue};
use crate::frame::bytes::GuestRam as Ram;
use crate::lane::Lane;
use crate::nic::coupled::Coupled;
use crate::nic::queue::Sends;
use crate::port_lane::PortLane;
use crate::tests::test_guest::{HEADER, Memory};
use crate::tests::test_lanes::direct_lane;
use crate::tests::test_nic::{TestNic, Wire};
use crate::tests::test_siblings::Others;
use device::counters::PairCounters;
use device::offloads::Offloads;

const ENTRIES: usize = 64;
const CHUNKS: usize = 40;
const GUESTS: usize = 200;
/// Header and frame.
const SENT: [u8; HEADER as usize + 60] = [0; HEADER as usize + 60];

/// A guest in direct placement.
struct Guest {
    memory: Memory,
    from_guest: QueueDriver,
    to_guest: QueueDriver,
}

impl Guest {
    /// With its lane, and the NIC. Its receive queue may be off.
    fn new(receives: bool) -> (Self, PortLane<DirectQueue<TestNic>>, Arc<Mutex<Wire>>) {
        let memory = Memory::new(1 << 20, CHUNKS * CHUNK_BYTES as usize);
        let vring = || memory.vring(ENTRIES as u32, QueueFeatures::default(), Journal::None);
        let ((from, from_guest), (mut to, to_guest)) = (vring(), vring());
        to.enabled = receives;
        let pair = memory.side(from, to, Offloads::NONE);
        let own = memory.map.guest_len();
        let umem = Umem::unaligned(Arc::new(Ram(Arc::clone(&memory.map))), CHUNK_BYTES, 0).expect("good");
        let mut wire = Wire::new(umem.clone(), ENTRIES, ENTRIES);
        wire.fill = ENTRIES;
        let wire = Arc::new(Mutex::new(wire));
        let queue = Coupled::new(TestNic(Arc::clone(&wire)), Sends::PLAIN);
        let end = own + (CHUNKS * CHUNK_BYTES as usize) as u64;
        let direct = DirectMemory::new(umem, own..end, 0, 2 * ENTRIES).expect("inside");
        let lane = direct_lane(pair, queue, direct, Arc::<PairCounters>::default());
        let guest = Self {
            memory,
            from_guest,
            to_guest,
        };
        (guest, lane, wire)
    }

    /// Posts a buffer, and sends a frame then.
    fn post_and_send(&mut self) {
        let (buffer, frame) = (self.memory.put(&[0; 2048]), self.memory.put(&SENT));
        self.to_guest
            .add(&[Buffer::writable(buffer, 2048)])
            .expect("room");
        self.to_guest.publish();
        let frame = Buffer::readable(frame, SENT.len() as u32);
        self.from_guest.add(&[frame]).expect("room");
        self.from_guest.publish();
    }
}

/// The guest does both while the lane is at any place of a round.
#[test]
fn nic_has_the_buffers_that_were_posted_before_a_frame_when_that_is_sent() {
    for _ in 0..GUESTS {
        let (mut guest, mut lane, wire) = Guest::new(true);
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..ENTRIES).for_each(|_| guest.post_and_send());
                over.store(true, Ordering::Release);
            });
            let mut is_last = false;
            while !is_last {
                is_last = over.load(Ordering::Acquire);
                lane.poll(&mut Others::default()).expect("no fault");
                let wire = wire.lock().expect("no panic");
                assert!(wire.given.len() >= wire.sent.len(), "{} frames", wire.sent.len());
            }
        });
        assert_eq!(wire.lock().expect("no panic").sent.len(), ENTRIES);
    }
}

#[test]
fn nic_has_no_buffer_of_a_queue_that_is_off() {
    let (mut guest, mut lane, wire) = Guest::new(false);
    guest.post_and_send();
    lane.poll(&mut Others::default()).expect("no fault");
    let wire = wire.lock().expect("no panic");
    assert_eq!((wire.sent.len(), wire.given.len()), (1, 0));
}
