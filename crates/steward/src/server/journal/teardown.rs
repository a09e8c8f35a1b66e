//! Taking a lease back, step by step.
//!
//! The parts of a lease in the kernel depend on each other: a rule of the NIC sends frames to a context or a queue, a
//! steering entry of the program lets them through, an entry of the socket map has their socket. They are
//! removed from the outside inwards, so that no part refers to one that is gone. The order is that of the
//! variants of [`Step`]; the program itself goes after the last lease's last step.
//!
//! A step that fails (a busy driver) delays steps of later kinds, not those of its kind, and is tried again with
//! growing pauses until it succeeds. Until then no lease can have the queues, see `Lessee::Leaving`. A step for
//! something that is gone already (the interface, the program) is done.

use std::collections::BTreeSet;
use std::mem::discriminant;
use std::time::Instant;

use crate::hardware::Part;
use program::backoff::{Backoff, LONGEST_RETRY, RETRY};

/// One thing to undo, in the order in which it has to be. A new kind goes where it belongs in that order: rules of
/// the NIC before the contexts that they point at, these before steering entries of the program, these before
/// sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Step {
    /// A rule of the NIC, or a context that rules pointed at; in this order, too.
    Nic(Part),
    /// The addresses and VLANs of a queue in the program.
    Entries {
        /// Of the interface.
        queue: u32,
    },
    /// A network in the program: its stations and its ring.
    Network {
        /// Queues of the interface: this one,
        first: u32,
        /// and all up to this one.
        end: u32,
    },
    /// The places of a queue in the socket map.
    Sockets {
        /// Of the interface.
        queue: u32,
    },
    /// The netkit that has a queue: it holds it until it is deleted.
    Netkit {
        /// Of the interface.
        queue: u32,
    },
}

impl Step {
    /// All steps that undo a queue, whatever its lease asked for.
    pub(crate) fn of_queue(queue: u32) -> [Self; 2] {
        [Self::Entries { queue }, Self::Sockets { queue }]
    }

    /// Steps of one kind do not wait for each other.
    fn kind(&self) -> impl PartialEq + use<> {
        let part = match self {
            Self::Nic(part) => Some(discriminant(part)),
            _ => None,
        };
        (discriminant(self), part)
    }
}

/// The steps that remain for one lease.
#[derive(Debug)]
pub(crate) struct Teardown {
    left: BTreeSet<Step>,
    tries: u32,
    retry: Backoff,
}

/// A step that has failed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{step:?} is not undone, try {tries}: {why}")]
pub(crate) struct Stuck {
    step: Step,
    why: String,
    /// Number of attempts.
    pub(crate) tries: u32,
}

impl Stuck {
    /// It is the first attempt of a step that waits until a socket is closed, which is usually soon.
    pub(crate) fn is_usual(&self) -> bool {
        self.tries == 1 && matches!(self.step, Step::Netkit { .. })
    }
}

impl Teardown {
    pub(crate) fn new(steps: impl IntoIterator<Item = Step>) -> Self {
        Self {
            left: steps.into_iter().collect(),
            tries: 0,
            // A look each second goes on with it: half of that is tried by the next one.
            retry: Backoff::new(RETRY / 2, LONGEST_RETRY),
        }
    }

    /// Whether no step was tried yet.
    pub(crate) fn is_new(&self) -> bool {
        self.tries == 0
    }

    /// Whether the next attempt is due. Events of other leases are no reason to call a driver again that has
    /// refused.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.retry.is_due(now)
    }

    /// Undoes what is left, as far as that goes. `undo` undoes one step and looks whether it is undone (what is not
    /// there any more is), or says in one line why not.
    /// Errors: the first step that failed; then continue when it is due.
    pub(crate) fn go_on(
        &mut self,
        now: Instant,
        mut undo: impl FnMut(&Step) -> Result<(), String>,
    ) -> Result<(), Stuck> {
        self.tries = self.tries.saturating_add(1);
        self.retry.failed(now);
        let mut stuck: Option<Stuck> = None;
        for step in self.left.clone() {
            let waits = stuck
                .as_ref()
                .is_some_and(|stuck| stuck.step.kind() != step.kind());
            if waits {
                break;
            }
            match undo(&step) {
                Ok(()) => {
                    self.left.remove(&step);
                }
                Err(why) => {
                    let tries = self.tries;
                    stuck.get_or_insert(Stuck { step, why, tries });
                }
            }
        }
        stuck.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::nic::{Rule, Target};

    /// Refuses some steps, and notes what it undid.
    #[derive(Default)]
    struct Driver {
        refuses: BTreeSet<Step>,
        undone: Vec<Step>,
    }

    impl Driver {
        fn undo(&mut self, step: &Step) -> Result<(), String> {
            if self.refuses.contains(step) {
                return Err("busy".to_owned());
            }
            self.undone.push(*step);
            Ok(())
        }
    }

    fn sockets(queues: impl IntoIterator<Item = u32>) -> Vec<Step> {
        queues.into_iter().map(|queue| Step::Sockets { queue }).collect()
    }

    #[test]
    fn step_that_is_refused_is_repeated_until_it_is_done_and_its_siblings_are_done_once() {
        let mut driver = Driver {
            refuses: sockets([1]).into_iter().collect(),
            undone: Vec::new(),
        };
        let mut teardown = Teardown::new(sockets(0..3));
        assert!(teardown.is_new());
        for tries in 1..4 {
            let stuck = teardown
                .go_on(Instant::now(), |step| driver.undo(step))
                .expect_err("refused");
            assert_eq!((&stuck.step, stuck.tries), (&Step::Sockets { queue: 1 }, tries));
            assert!(!stuck.is_usual() && !teardown.is_new());
        }
        assert_eq!(driver.undone, sockets([0, 2]));
        driver.refuses.clear();
        assert_eq!(teardown.go_on(Instant::now(), |step| driver.undo(step)), Ok(()));
        assert_eq!(driver.undone, sockets([0, 2, 1]));
        assert_eq!(teardown.go_on(Instant::now(), |step| driver.undo(step)), Ok(()));
        assert_eq!(driver.undone.len(), 3);
        // The socket on a netkit is usually closed soon.
        let mut teardown = Teardown::new([Step::Netkit { queue: 0 }]);
        let mut refused = || teardown.go_on(Instant::now(), |_| Err("busy".to_owned()));
        let usual = [(); 2].map(|()| refused().expect_err("refused").is_usual());
        assert_eq!(usual, [true, false]);
    }

    #[test]
    fn driver_that_refuses_is_asked_again_after_a_pause_that_grows_up_to_its_bound() {
        let mut driver = Driver {
            refuses: sockets([1]).into_iter().collect(),
            undone: Vec::new(),
        };
        let mut teardown = Teardown::new(sockets([1]));
        let mut now = Instant::now();
        assert!(teardown.is_due(now));
        let mut pause = RETRY / 2;
        for _ in 0..10 {
            assert!(teardown.go_on(now, |step| driver.undo(step)).is_err());
            assert!(!teardown.is_due(now + pause - RETRY / 1000));
            now += pause;
            assert!(teardown.is_due(now));
            pause = (pause * 2).min(LONGEST_RETRY);
        }
    }

    #[test]
    fn rule_that_stays_delays_its_context_and_later_steps() {
        let rule = Step::Nic(Part::Rule(Rule {
            mac: Some([2, 0, 0, 0, 0, 1]),
            vlan: None,
            flow: None,
            target: Target::Context(3),
        }));
        let other = Step::Nic(Part::Rule(Rule {
            mac: None,
            vlan: Some(5),
            flow: None,
            target: Target::Context(3),
        }));
        let context = Step::Nic(Part::Context(3));
        let entries = Step::Entries { queue: 0 };
        let mut driver = Driver {
            refuses: [rule].into(),
            undone: Vec::new(),
        };
        let mut teardown = Teardown::new([sockets([0])[0], entries, context, rule, other]);
        assert!(teardown.go_on(Instant::now(), |step| driver.undo(step)).is_err());
        assert_eq!(driver.undone, [other]);
        driver.refuses = [context].into();
        assert!(teardown.go_on(Instant::now(), |step| driver.undo(step)).is_err());
        driver.refuses = [entries].into();
        assert!(teardown.go_on(Instant::now(), |step| driver.undo(step)).is_err());
        assert_eq!(
            driver.undone,
            [other, rule, context],
            "sockets stay as long as entries"
        );
        driver.refuses.clear();
        assert_eq!(teardown.go_on(Instant::now(), |step| driver.undo(step)), Ok(()));
        assert_eq!(driver.undone[3..], [entries, sockets([0])[0]]);
    }
}
