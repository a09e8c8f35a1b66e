use std::sync::atomic::AtomicBool;

use testkit::wait;

use super::*;

struct Nothing;

impl Serve for Nothing {
    fn look(&mut self) {}
}

fn slot() -> Slot {
    let address = NotifyAddress::mmio(0, 0).unwrap();
    Slot::new(address, Queue::new(By::Exit, true, Box::new(Nothing)).unwrap())
}

#[test]
fn a_transition_that_waits_is_counted_until_it_has_the_queue() {
    let slot = slot();
    let waiting = || slot.waiting.load(Ordering::Relaxed);
    thread::scope(|scope| {
        let look = slot.enter_giving_way();
        let transition = scope.spawn(|| drop(slot.enter()));
        assert!(wait::until(wait::SOON, || waiting() == 1));
        drop(look);
        transition.join().unwrap();
    });
    assert_eq!(waiting(), 0);
}

#[test]
fn a_look_waits_for_a_transition_that_waits() {
    let (slot, looked) = (slot(), AtomicBool::new(false));
    slot.waiting.store(1, Ordering::Relaxed);
    thread::scope(|scope| {
        scope.spawn(|| {
            drop(slot.enter_giving_way());
            looked.store(true, Ordering::SeqCst);
        });
        // The lock is free all the time.
        thread::sleep(wait::QUIET);
        let too_early = looked.load(Ordering::SeqCst);
        slot.waiting.store(0, Ordering::Relaxed);
        assert!(!too_early);
        assert!(wait::until(wait::SOON, || looked.load(Ordering::SeqCst)));
    });
}
