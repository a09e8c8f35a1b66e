//! Ends a write(2) that blocks on an eventfd of a VMM.
//!
//! The VMM has the call and error eventfds, too. The daemon makes them non-blocking, but that flag belongs to the open
//! file: the VMM can clear it and fill the counter. Then a writer waits until the VMM reads, which may be never, and a
//! check before the write is no protection. So the watchdog sends SIGURG to a thread that stays in such a write.
//! Its handler does nothing, but makes a waiting write fail with EINTR (eventfd_write, fs/eventfd.c: interruptible, and
//! no SA_RESTART here); a write that does not wait is never interrupted. A signal before the write begins is lost; the
//! next one, [`PERIOD`] later, is not.
//!
//! Writers:
//!  - workers, for each call (`device/src/call.rs`). The watchdog cannot know whether they write, so it sends the
//!    signal to each that is awake and has finished no round between two checks, whatever it does. All other work of a
//!    worker tolerates that: its only other system call that waits is ppoll, after whose EINTR it checks its queues
//!    again, and an interrupted kick is repeated ([`xsk`]'s `Kick`);
//!  - control threads, only in [`write`]: for calls of lanes that they stopped, and error eventfds. They get the
//!    signal only while they are in [`write`], so their other system calls need not handle EINTR.
//!
//! The signal is sent to existing threads only: workers exist as long as the process, and a control thread removes
//! itself from the list under the same lock that is held while the signal is sent.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::thread::JoinHandleExt;
use std::sync::Mutex;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use common::lock::Locked;
use dataplane::worker::progress::Watcher;
use program::signal_handler;

/// Time between two checks whether a thread waits.
pub(crate) const PERIOD: Duration = Duration::from_millis(20);

/// Its default action is to be ignored, so one from elsewhere does no harm.
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

/// Ends a write of that thread that blocks, if it is in one.
pub(crate) fn interrupt(thread: &JoinHandle<()>) {
    // SAFETY: a thread with a handle has not been joined, so its number is valid.
    let _ = unsafe { libc::pthread_kill(thread.as_pthread_t(), SIGNAL) };
}

/// Writes to a call or error eventfd of a VMM, on a control thread; `false` if the write blocked and was
/// interrupted.
#[must_use]
pub(crate) fn write(event: &OwnedFd, watcher: &Watcher) -> bool {
    let _writer = Writer::enter(watcher);
    // A full counter (EAGAIN) means that the VMM has unread events already. MSG_DONTWAIT keeps a socket from blocking.
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

/// Interrupts control threads that have been in [`write`] for longer than [`PERIOD`].
pub(crate) fn interrupt_writers() {
    for writing in WRITERS.locked().iter() {
        if writing.since.elapsed() >= PERIOD {
            // SAFETY: a thread in the list cannot leave `write` before this lock is released, so it exists.
            let _ = unsafe { libc::pthread_kill(writing.thread, SIGNAL) };
        }
    }
}

/// Keeps this thread in the list.
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
