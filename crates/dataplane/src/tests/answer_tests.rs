//! A guest that posts a buffer, sends a frame, and may be answered at once: direct placement, over a NIC that the test
//! plays.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use virtqueue::QueueFeatures;

use crate::lane::Lane;
use crate::tests::test_nic::{Over, Wire};
use crate::tests::test_port::Port;
use crate::tests::test_siblings::Others;
use device::offloads::Offloads;
use model::config::Placement;

const ENTRIES: usize = 64;
const CHUNKS: usize = 40;
const GUESTS: usize = 200;

/// A guest in direct placement with its lane, and the NIC. Its receive queue may be off.
fn guest(receives: bool) -> (Port, Box<dyn Lane>, Arc<Mutex<Wire>>) {
    let over = Over {
        fill: ENTRIES,
        ..Over::new(Placement::Direct, CHUNKS)
    };
    let (memory, features) = (over.memory(1 << 20), QueueFeatures::default());
    let (guest, mut pair) = Port::new(memory, ENTRIES as u32, features, Offloads::NONE);
    pair.to_guest.enabled = receives;
    let (lane, wire) = over.lane(pair, &guest.memory, &guest.counters);
    (guest, lane, wire)
}

fn post_and_send(guest: &mut Port) {
    guest.post(1);
    guest.send(&[0; 60]);
}

/// The guest does both while the lane is at any place of a round.
#[test]
fn nic_has_the_buffers_that_were_posted_before_a_frame_when_that_is_sent() {
    for _ in 0..GUESTS {
        let (mut guest, mut lane, wire) = guest(true);
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..ENTRIES).for_each(|_| post_and_send(&mut guest));
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
    let (mut guest, mut lane, wire) = guest(false);
    post_and_send(&mut guest);
    lane.poll(&mut Others::default()).expect("no fault");
    let wire = wire.lock().expect("no panic");
    assert_eq!((wire.sent.len(), wire.given.len()), (1, 0));
}
