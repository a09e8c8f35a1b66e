//! Calls: the interrupts of a guest, each a write to an eventfd from its VMM.
//!
//! The VMM shares the open file, and so its flags: it can clear O_NONBLOCK at any time and fill the counter.
//! A write then waits until the VMM reads. So a thread writes only if another one can end that wait:
//!
//!  - the watchdog interrupts a worker (supervision/interrupt.rs). The worker sees EINTR and makes no more
//!    calls for that session, even if it has several of its lanes: a session blocks a worker only once.
//!  - a lane that has left its worker writes nothing ([`Call::leave`]). The thread that stopped it makes the
//!    pending call by `interrupt::write`, which also ends a wait.
//!
//! A Unix socket is written with MSG_DONTWAIT, which a VMM cannot undo. Otherwise SO_SNDTIMEO could make each write
//! wait and then fail as if the socket were full, which neither the watchdog nor the thread's CPU time would show.
//!
//! A write that does not wait may also take long: the kernel visits all waiters of the eventfd, with
//! interrupts off (`__wake_up_common`, kernel/sched/wait.c), and a VMM may have `fs.epoll.max_user_watches`
//! of them: with a million, a call took 150 ms in a test. So calls are timed (`CallTimes`), and a slow call
//! has the same result as a blocking one.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SendFlags, send, sockopt};
use rustix::time::{ClockId, clock_gettime};

use super::counters::PairCounters;
use super::meter::{self, KernelCall};

/// The time from which a call is slow. It normally takes one or a few microseconds; tens if waking a thread
/// causes a VM exit.
const SLOW: Duration = Duration::from_micros(250);
/// It must also take this many times as long as a minimal system call. That takes less than a microsecond,
/// but more on an interpreted virtual machine, where every call takes longer than [`SLOW`].
const MANY: u32 = 250;
/// The worker's time that consecutive slow calls of a vring may take. Softirqs, whose time the kernel may charge
/// to the worker, cannot reach that: each run lasts a few ms, and they do not hit that many calls in a row.
const TOO_MUCH: Duration = Duration::from_millis(100);
/// The maximum that one slow call counts: the host of a virtual machine may take a CPU away for any time, and
/// the kernel may charge that, too, to the worker. But not in each of ten calls in a row.
const MOST_OF_ONE: Duration = Duration::from_millis(10);

/// Set when a call of a session has blocked a thread, and never cleared. It publishes no other data.
pub type CallBlocked = Arc<AtomicBool>;

/// Who makes a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Delivery {
    /// The worker writes it.
    Written,
    /// Another thread makes it.
    Left,
    /// The worker skipped a call, and another thread must make it.
    Due,
}

/// A vring's call eventfd.
pub struct Call {
    /// `None`: the driver polls.
    event: Option<OwnedFd>,
    /// Whether it is a socket instead of an eventfd.
    is_socket: bool,
    delivery: Delivery,
    times: CallTimes,
    blocked: CallBlocked,
}

/// How long calls take. A call also seems slow if the worker loses its CPU meanwhile. So after a call that
/// was slow by wall clock, which is cheap to read, the next one is measured by the thread's CPU time, and
/// compared with a system call that no VMM can slow down.
#[derive(Debug, Default)]
struct CallTimes {
    /// The last call was slow by wall clock.
    suspected: bool,
    /// CPU time of the consecutive slow calls so far.
    spent: Duration,
    /// Minimum time of a minimal system call; a VMM cannot increase it.
    nothing: Option<Duration>,
}

impl Call {
    /// A call eventfd of the session that `blocked` belongs to.
    pub fn new(event: Option<OwnedFd>, blocked: CallBlocked) -> Self {
        Self {
            is_socket: is_socket(event.as_ref()),
            event,
            delivery: Delivery::Written,
            times: CallTimes::default(),
            blocked,
        }
    }

    /// Sets another eventfd; returns the old one. A worker must not close the old one: it may be the last
    /// descriptor, and closing it removes its waiters, of which there may be very many.
    #[must_use]
    pub fn replace(&mut self, event: Option<OwnedFd>) -> Option<OwnedFd> {
        self.is_socket = is_socket(event.as_ref());
        std::mem::replace(&mut self.event, event)
    }

    /// Interrupts the guest.
    #[inline]
    pub fn make(&mut self, counters: &PairCounters) {
        let Some(event) = &self.event else { return };
        if self.delivery != Delivery::Written {
            self.delivery = Delivery::Due;
        } else if !self.blocked.load(Relaxed) {
            let used = self.times.suspected.then(cpu_time);
            let begun = Instant::now();
            // A full counter (EAGAIN) means that the driver has a call pending already. EINTR: the watchdog
            // ended the wait. A write that need not wait is never interrupted (eventfd_write, fs/eventfd.c).
            let one = 1u64.to_ne_bytes();
            let written = match self.is_socket {
                true => send(event, &one, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
                false => rustix::io::write(event, &one),
            };
            let waited = written == Err(Errno::INTR);
            let took = begun.elapsed();
            meter::called(KernelCall::Call, took);
            if waited || ((took >= SLOW || used.is_some()) && self.times.is_too_much(took, used)) {
                self.blocked.store(true, Relaxed);
            }
        }
        counters.calls.add_shared(1);
    }

    /// Whether a call of this session blocked a thread.
    #[inline]
    pub fn is_blocked(&self) -> bool {
        self.blocked.load(Relaxed)
    }

    /// The session's own record of that.
    pub fn blocked(&self) -> &CallBlocked {
        &self.blocked
    }

    /// From now on the worker writes nothing.
    pub fn leave(&mut self) {
        if self.delivery == Delivery::Written {
            self.delivery = Delivery::Left;
        }
    }

    /// The eventfd to be written, if a call is due.
    pub fn take_due(&mut self) -> Option<OwnedFd> {
        let due = std::mem::replace(&mut self.delivery, Delivery::Left) == Delivery::Due;
        self.event.take_if(|_| due)
    }
}

impl CallTimes {
    /// Whether calls are too slow. `took`: time of the last call; `used`: the thread's CPU time before it.
    #[cold]
    fn is_too_much(&mut self, took: Duration, used: Option<Duration>) -> bool {
        let used = used.map(|before| {
            let after = cpu_time();
            Used {
                call: after.saturating_sub(before),
                nothing: cpu_time().saturating_sub(after),
            }
        });
        self.note(took, used)
    }

    fn note(&mut self, took: Duration, used: Option<Used>) -> bool {
        self.suspected = took >= SLOW;
        match used {
            Some(used) if used.call >= self.slow(used.nothing) => self.spent += used.call.min(MOST_OF_ONE),
            _ => self.spent = Duration::ZERO,
        }
        self.spent >= TOO_MUCH
    }

    /// The time from which a call is slow; `nothing`: the time of a minimal system call.
    fn slow(&mut self, nothing: Duration) -> Duration {
        let least = self.nothing.map_or(nothing, |least| least.min(nothing));
        self.nothing = Some(least);
        SLOW.max(least.saturating_mul(MANY))
    }
}

/// CPU time of a call, and of a minimal system call directly after it.
#[derive(Debug, Clone, Copy)]
struct Used {
    call: Duration,
    nothing: Duration,
}

fn is_socket(event: Option<&OwnedFd>) -> bool {
    event.is_some_and(|event| sockopt::socket_type(event).is_ok())
}

/// CPU time of this thread so far.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn call_to_a_full_socket_that_blocks_does_not_wait() {
        let (ours, _theirs) = UnixStream::pair().expect("sockets");
        ours.set_nonblocking(true).expect("ours");
        while rustix::io::write(&ours, &[0; 4096]).is_ok() {}
        ours.set_nonblocking(false).expect("ours");
        let mut call = Call::new(None, CallBlocked::default());
        assert!(call.replace(Some(ours.into())).is_none());
        // If it waited, this call would never return.
        call.make(&PairCounters::default());
        assert!(!call.is_blocked());
    }

    #[test]
    fn calls_that_last_are_too_much_and_a_worker_without_its_cpu_is_not() {
        let ms = Duration::from_millis;
        let used = |call| {
            let nothing = Duration::from_nanos(200);
            Some(Used { call, nothing })
        };
        let mut times = CallTimes::default();
        // Slow only by wall clock, however often.
        for _ in 0..1000 {
            assert!(!times.note(ms(30), used(ms(0))) && times.suspected);
        }
        // A call that is not slow ends the series.
        for _ in 0..1000 {
            assert!(!times.note(ms(60), used(ms(60))));
            assert!(!times.note(ms(0), used(ms(0))) && !times.suspected);
        }
        // However long the slow one was: the worker may have lost its CPU during it.
        for _ in 0..1000 {
            assert!(!times.note(ms(3000), used(ms(3000))));
            assert!(!times.note(ms(0), used(ms(0))));
        }
        assert!(!times.note(ms(60), None));
        for _ in 0..9 {
            assert!(!times.note(ms(60), used(ms(60))));
        }
        assert!(times.note(ms(60), used(ms(60))));
    }

    #[test]
    fn calls_are_not_too_much_on_a_machine_where_everything_takes_long() {
        let mut times = CallTimes::default();
        let call = Duration::from_millis(2);
        let nothing = Duration::from_micros(20);
        for _ in 0..1000 {
            assert!(!times.note(call, Some(Used { call, nothing })));
        }
    }

    #[test]
    fn vmm_whose_calls_make_other_system_calls_slow_gains_nothing() {
        let mut times = CallTimes::default();
        let call = Duration::from_millis(60);
        let nothing = Duration::from_nanos(600);
        assert!(!times.note(call, Some(Used { call, nothing })));
        let nothing = Duration::from_micros(500);
        for _ in 0..8 {
            assert!(!times.note(call, Some(Used { call, nothing })));
        }
        assert!(times.note(call, Some(Used { call, nothing })));
    }

    #[test]
    fn lane_that_left_its_worker_writes_nothing_and_owes_what_it_called() {
        let ours = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        let count = || {
            let mut bytes = [0; 8];
            rustix::io::read(ours.as_fd(), &mut bytes).map(|_| u64::from_ne_bytes(bytes))
        };
        let counters = PairCounters::default();
        let theirs = ours.try_clone().expect("a descriptor");
        let mut call = Call::new(Some(theirs), CallBlocked::default());
        call.make(&counters);
        assert_eq!(count(), Ok(1));
        call.leave();
        assert!(call.take_due().is_none());
        call.make(&counters);
        call.leave();
        assert_eq!(count(), Err(Errno::AGAIN));
        assert!(call.take_due().is_some() && call.take_due().is_none());
    }
}
