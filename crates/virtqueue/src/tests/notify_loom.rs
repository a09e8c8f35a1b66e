//! Loom's model of `notify.rs`: every interleaving, and every reordering that the memory model allows, of a
//! driver and a device that sleep. Run by `RUSTFLAGS="--cfg loom" cargo test -p virtqueue --lib
//! --profile loom`.
//!
//! A lost kick or call is a sleeper that nobody wakes: loom reports a deadlock. Each entry carries a value,
//! stored relaxed before its index is published, so a missing Release or Acquire shows as a wrong value.

use loom::sync::atomic::{AtomicU16 as LoomU16, Ordering};
use loom::sync::{Arc, Notify};
use loom::thread;

use super::{NO_KICK, Words};

/// A ring of two entries each way. `start` is where all indices begin.
struct Ring {
    words: [LoomU16; 6],
    avail: [LoomU16; 2],
    used: [LoomU16; 2],
    /// The eventfds: a write before the read is remembered.
    kick: Notify,
    call: Notify,
    event_idx: bool,
}

impl Ring {
    fn new(start: u16, event_idx: bool) -> Arc<Self> {
        let (zero, at) = (|| LoomU16::new(0), || LoomU16::new(start));
        // Events lie where `disable_*` puts them.
        let off = |past: u16| LoomU16::new(if event_idx { start.wrapping_add(past) } else { 1 });
        let words = if event_idx {
            [zero(), at(), off(u16::MAX), zero(), at(), off(NO_KICK)]
        } else {
            [off(0), at(), zero(), off(0), at(), zero()]
        };
        Arc::new(Self {
            words,
            avail: [zero(), zero()],
            used: [zero(), zero()],
            kick: Notify::new(),
            call: Notify::new(),
            event_idx,
        })
    }

    fn words(&self) -> Words<'_, LoomU16> {
        let [
            avail_flags,
            avail_idx,
            used_event,
            used_flags,
            used_idx,
            avail_event,
        ] = &self.words;
        Words {
            avail_flags,
            avail_idx,
            used_event,
            used_flags,
            used_idx,
            avail_event,
            event_idx: self.event_idx,
        }
    }
}

/// The value that an entry must carry.
fn mark(index: u16) -> u16 {
    index.wrapping_mul(3) | 0x8000
}

fn slot(index: u16) -> usize {
    usize::from(index & 1)
}

/// Publishes two entries, one by one; kicks when wanted.
fn driver_publishes(ring: &Ring, start: u16) {
    for step in 0..2 {
        let index = start.wrapping_add(step);
        ring.avail[slot(index)].store(mark(index), Ordering::Relaxed);
        if ring.words().publish_avail(index, index.wrapping_add(1)) {
            ring.kick.notify();
        }
    }
}

/// Takes two entries; sleeps when there is none.
fn device_takes(ring: &Ring, start: u16, mut taken: impl FnMut(u16)) {
    let end = start.wrapping_add(2);
    let mut next = start;
    while next != end {
        let seen = ring.words().avail_idx.load(Ordering::Acquire);
        while next != seen {
            assert_eq!(
                ring.avail[slot(next)].load(Ordering::Relaxed),
                mark(next),
                "entry before its content"
            );
            next = next.wrapping_add(1);
            taken(next);
        }
        if next != end && !ring.words().enable_kicks(next, next) {
            ring.kick.wait();
        }
        ring.words().disable_kicks(next);
    }
}

fn no_kick_is_lost(event_idx: bool, start: u16) {
    loom::model(move || {
        let ring = Ring::new(start, event_idx);
        let driver = thread::spawn({
            let ring = Arc::clone(&ring);
            move || driver_publishes(&ring, start)
        });
        device_takes(&ring, start, |_| {});
        driver.join().unwrap();
    });
}

fn no_call_is_lost(event_idx: bool, start: u16) {
    loom::model(move || {
        let ring = Ring::new(start, event_idx);
        let device = thread::spawn({
            let ring = Arc::clone(&ring);
            move || {
                for step in 0..2 {
                    let index = start.wrapping_add(step);
                    ring.used[slot(index)].store(mark(index), Ordering::Relaxed);
                    if ring.words().publish_used(index, index.wrapping_add(1)) {
                        ring.call.notify();
                    }
                }
            }
        });
        let end = start.wrapping_add(2);
        let mut next = start;
        while next != end {
            let seen = ring.words().used_idx.load(Ordering::Acquire);
            while next != seen {
                assert_eq!(
                    ring.used[slot(next)].load(Ordering::Relaxed),
                    mark(next),
                    "element before its content"
                );
                next = next.wrapping_add(1);
            }
            if next != end && !ring.words().enable_calls(next) {
                ring.call.wait();
            }
            ring.words().disable_calls(next);
        }
        device.join().unwrap();
    });
}

#[test]
fn no_kick_is_lost_with_flags() {
    no_kick_is_lost(false, 0);
}

#[test]
fn no_kick_is_lost_with_event_idx() {
    no_kick_is_lost(true, 0);
}

#[test]
fn no_kick_is_lost_over_the_wrap() {
    no_kick_is_lost(true, 65535);
}

#[test]
fn no_call_is_lost_with_flags() {
    no_call_is_lost(false, 0);
}

#[test]
fn no_call_is_lost_with_event_idx() {
    no_call_is_lost(true, 0);
}

#[test]
fn no_call_is_lost_over_the_wrap() {
    no_call_is_lost(true, 65535);
}

/// One chain there and back with both sides asleep in between: neither wake-up is lost.
#[test]
fn a_round_trip_wakes_both_sides() {
    for event_idx in [false, true] {
        loom::model(move || {
            let ring = Ring::new(65535, event_idx);
            let device = thread::spawn({
                let ring = Arc::clone(&ring);
                move || {
                    while ring.words().avail_idx.load(Ordering::Acquire) == 65535 {
                        if !ring.words().enable_kicks(65535, 65535) {
                            ring.kick.wait();
                        }
                    }
                    if ring.words().publish_used(65535, 0) {
                        ring.call.notify();
                    }
                }
            });
            if ring.words().publish_avail(65535, 0) {
                ring.kick.notify();
            }
            while ring.words().used_idx.load(Ordering::Acquire) == 65535 {
                if !ring.words().enable_calls(65535) {
                    ring.call.wait();
                }
            }
            device.join().unwrap();
        });
    }
}
