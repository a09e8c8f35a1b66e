//! Ends a wait in write(2) on an eventfd of a VMM's.
//!
//! Call and error eventfds are the VMM's as well. The daemon makes them non-blocking, but that flag belongs to the open
//! file: the VMM can clear it and fill the counter, and a writer waits until the VMM reads, which may be never. No
//! check before the write would hold at the write, so the watchdog sends SIGURG to a thread that stays in one. Its
//! handler does nothing; but a waiting write ends with EINTR (eventfd_write, fs/eventfd.c: interruptible, and no
//! SA_RESTART here), and one that does not wait is never interrupted. A signal before the write begins is lost; the
//! next one, [`PERIOD`] later, is not.
//!
//! Writers:
//!  - workers, for each call (`device/src/call.rs`). The watchdog cannot know that they write, so it sends the signal
//!    to one that is awake and has finished no round between two looks, whatever it does. All other work of a worker
//!    tolerates that: it waits in no other system call but ppoll, whose EINTR means to look again, and an interrupted
//!    kick is repeated ([`xsk`]'s `Kick`);
//!  - control threads, with [`write`] alone: the calls of lanes that they stopped, and error eventfds. Only they get
//!    the signal, and only while they are in there: their other system calls need not know of it.
//!
//! Threads that get the signal exist: workers exist as long as the process, and a control thread leaves the list under
//! the lock under which the signal is sent.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::thread::JoinHandleExt;
use std::sync::Mutex;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::lock::Locked;
use crate::switch::progress::Watcher;
use program::signal_handler;

/// Between two looks whether a thread waits.
pub(crate) const PERIOD: Duration = Duration::from_millis(20);

/// Its default action is to do nothing, so one from elsewhere does no harm either.
pub(super) const SIGNAL: libc::c_int = libc::SIGURG;

/// Control threads that are in [`write`].
static WRITERS: Mutex<Vec<Writing>> = Mutex::new(Vec::new());

struct Writing {
    thread: libc::pthread_t,
    since: Instant,
}

/// Installs the handler, for the process.
pub(crate) fn install() -> io::Result<()> {
    // SAFETY: it does nothing.
    unsafe { signal_handler::install(SIGNAL, nothing, 0, &[]) }
}

extern "C" fn nothing(_signal: libc::c_int, _info: *mut libc::siginfo_t, _context: *mut libc::c_void) {}

/// Ends a wait of that thread, if it is in one.
pub(crate) fn interrupt(thread: &JoinHandle<()>) {
    // SAFETY: a thread with a handle has not been joined, so its number is valid.
    let _ = unsafe { libc::pthread_kill(thread.as_pthread_t(), SIGNAL) };
}

/// Writes to a call or error eventfd of a VMM's, on a control thread; `false` if that made us wait, which was ended
/// then.
#[must_use]
pub(crate) fn write(event: &OwnedFd, watcher: &Watcher) -> bool {
    let _writer = Writer::enter(watcher);
    // A full counter (EAGAIN) means that the VMM has something to look at already. A socket never makes us wait.
    let one = 1u64.to_ne_bytes();
    let written = match send(event, &one, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Err(Errno::NOTSOCK) => rustix::io::write(event, &one),
        sent => sent,
    };
    written != Err(Errno::INTR)
}

/// Whether a control thread is in [`write`].
pub(crate) fn has_writers() -> bool {
    !WRITERS.locked().is_empty()
}

/// Ends waits of those that are in [`write`] for longer than they need.
pub(crate) fn interrupt_writers() {
    for writing in WRITERS.locked().iter() {
        if writing.since.elapsed() >= PERIOD {
            // SAFETY: a thread in the list cannot leave `write` before this lock is released, so it exists.
            let _ = unsafe { libc::pthread_kill(writing.thread, SIGNAL) };
        }
    }
}

/// This thread is in the list.
struct Writer(libc::pthread_t);

impl Writer {
    fn enter(watcher: &Watcher) -> Self {
        // SAFETY: it has no condition.
        let thread = unsafe { libc::pthread_self() };
        let since = Instant::now();
        WRITERS.locked().push(Writing { thread, since });
        watcher.rouse();
        Self(thread)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        WRITERS.locked().retain(|writing| writing.thread != self.0);
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn full() -> OwnedFd {
        let full = eventfd(0, EventfdFlags::empty()).expect("an eventfd");
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).expect("it is empty");
        full
    }

    #[test]
    fn write_to_a_full_eventfd_that_blocks_is_ended() {
        install().expect("installed");
        let full = full();
        let writer = std::thread::spawn(move || {
            let result = rustix::io::write(&full, &1u64.to_ne_bytes());
            assert_eq!(result, Err(Errno::INTR));
        });
        while !writer.is_finished() {
            interrupt(&writer);
            std::thread::sleep(Duration::from_millis(5));
        }
        writer.join().expect("it was interrupted");
    }

    #[test]
    fn control_thread_that_writes_to_one_is_found_and_goes_on() {
        install().expect("installed");
        let full = full();
        let event = eventfd(0, EventfdFlags::empty()).expect("an eventfd");
        let writer = std::thread::spawn(move || {
            let watcher = Watcher::default();
            [write(&event, &watcher), write(&full, &watcher)]
        });
        while !writer.is_finished() {
            interrupt_writers();
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(writer.join().expect("it was interrupted"), [true, false]);
        assert!(!has_writers());
    }
}
