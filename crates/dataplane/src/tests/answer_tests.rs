//! A guest that posts a buffer, sends a frame, and may be answered at once: direct placement, over a NIC that the test
//! plays.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use virtqueue::driver::{Buffer, QueueDriver};
use virtqueue::{Journal, QueueFeatures};

use crate::lane::Lane;
use crate::tests::test_guest::{HEADER, Memory};
use crate::tests::test_nic::{Over, Wire};
use crate::tests::test_siblings::Others;
use device::offloads::Offloads;
use model::config::Placement;

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
    fn new(receives: bool) -> (Self, Box<dyn Lane>, Arc<Mutex<Wire>>) {
        let over = Over {
            fill: ENTRIES,
            ..Over::new(Placement::Direct, CHUNKS)
        };
        let memory = over.memory(1 << 20);
        let vring = || memory.vring(ENTRIES as u32, QueueFeatures::default(), Journal::None);
        let ((from, from_guest), (mut to, to_guest)) = (vring(), vring());
        to.enabled = receives;
        let pair = memory.side(from, to, Offloads::NONE);
        let (lane, wire) = over.lane(pair, &memory, &Arc::default());
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
