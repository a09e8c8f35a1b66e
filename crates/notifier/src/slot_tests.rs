use std::sync::mpsc::channel;
use std::thread;

use testkit::wait;

use super::*;
use crate::notifiers::{By, Left, Serve};

struct Nothing;

impl Serve for Nothing {
    fn look(&mut self) -> Left {
        Left::Nothing
    }
}

/// A look is under way; another one and a transition wait, in either order.
#[test]
fn a_transition_that_waits_goes_before_a_look_that_waits() {
    let address = NotifyAddress::mmio(0, 0).unwrap();
    let slot = Slot::new(address, Queue::new(By::Exit, true, Box::new(Nothing)).unwrap());
    let (slot, taken) = (&slot, |mutex: &Mutex<()>| mutex.try_lock().is_err());
    for look_first in [true, false] {
        let (tell, order) = channel();
        thread::scope(|scope| {
            let look = || {
                let tell = tell.clone();
                scope.spawn(move || {
                    slot.look(|_| tell.send("look").unwrap());
                });
            };
            slot.look(|_| {
                if look_first {
                    look();
                }
                let tell = tell.clone();
                scope.spawn(move || {
                    let _queue = slot.enter();
                    tell.send("transition").unwrap();
                });
                assert!(wait::until(wait::SOON, || taken(&slot.next)));
                if !look_first {
                    look();
                }
            });
        });
        drop(tell);
        assert_eq!(order.iter().collect::<Vec<_>>(), ["transition", "look"]);
    }
}
