//! Turns: whoever changes a port does it on the thread that wants it, one after the other, in the order in which they
//! came.
//!
//! The thread that reads the VMM's connection, the one that looks at interfaces, one that registered memory, the
//! operator's: each draws a number, and waits until it is called. While it has its turn it may wait for the kernel, for
//! the steward or for the VMM; those behind it wait, and nobody else does.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// What a turn is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// A VMM connected.
    Connect,
    /// Its VMM asks for something, or what it asked for goes on: memory is registered.
    Request,
    /// The connection is over.
    Disconnect,
    /// The interface may have changed.
    Link,
    /// The operator changes something of it.
    Change,
    /// The daemon ends, or the port alone.
    End,
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connect => "a VMM that connected",
            Self::Request => "a request of its VMM",
            Self::Disconnect => "the end of its session",
            Self::Link => "a look at its interface",
            Self::Change => "a change of its configuration",
            Self::End => "its end",
        })
    }
}

/// A number that was drawn, and must be used.
pub(super) struct Number(u64);

/// A state, and who has it when.
pub(super) struct Turns<S> {
    state: Mutex<S>,
    /// The number that is drawn next. It orders nothing but the turns.
    next: AtomicU64,
    /// The number whose turn it is.
    called: Mutex<u64>,
    changed: Condvar,
}

impl<S> Turns<S> {
    pub(super) fn new(state: S) -> Self {
        Self {
            state: Mutex::new(state),
            next: AtomicU64::new(0),
            called: Mutex::new(0),
            changed: Condvar::new(),
        }
    }

    /// A place behind all who wait.
    pub(super) fn draw(&self) -> Number {
        Number(self.next.fetch_add(1, Relaxed))
    }

    /// A place if nobody is before it.
    pub(super) fn draw_first(&self) -> Option<Number> {
        let called = *self.called();
        let drawn = self.next.compare_exchange(called, called + 1, Relaxed, Relaxed);
        drawn.ok().map(Number)
    }

    /// Whether its turn has come.
    pub(super) fn is_called(&self, number: &Number) -> bool {
        *self.called() == number.0
    }

    /// Waits for its turn, and uses it.
    #[expect(clippy::needless_pass_by_value, reason = "it is used up")]
    pub(super) fn take<R>(&self, number: Number, act: impl FnOnce(&mut S) -> R) -> R {
        let not_yet = |called: &mut u64| *called != number.0;
        drop(self.changed.wait_while(self.called(), not_yet));
        let result = act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        *self.called() += 1;
        self.changed.notify_all();
        result
    }

    fn called(&self) -> MutexGuard<'_, u64> {
        self.called.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_come_in_the_order_in_which_numbers_were_drawn() {
        let turns = &Turns::new(Vec::new());
        let [first, second, third] = [(); 3].map(|()| turns.draw());
        assert!(turns.is_called(&first) && !turns.is_called(&second) && turns.draw_first().is_none());
        std::thread::scope(|scope| {
            for (number, what) in [(third, 3), (second, 2)] {
                scope.spawn(move || turns.take(number, |done| done.push(what)));
            }
            turns.take(first, |done| done.push(1));
        });
        let free = turns.draw_first().expect("nobody is before it");
        assert_eq!(turns.take(free, std::mem::take), [1, 2, 3]);
    }
}
