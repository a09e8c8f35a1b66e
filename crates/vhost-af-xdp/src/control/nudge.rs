//! Ends a wait of a worker in write(2).
//!
//! A worker writes to call eventfds, which VMMs own as well. We make them non-blocking, but that flag belongs to the open file: the
//! VMM takes it off and fills the counter up, and the worker waits until the VMM reads, with all its lanes. Nothing that could be
//! asked before the write would hold at the write, so the watchdog sends SIGURG to a worker that stays where it is. Its handler does
//! nothing; but a write that waits ends with EINTR (eventfd_write, fs/eventfd.c: interruptible, and no SA_RESTART here), and one that
//! does not wait is never interrupted.
#![allow(unsafe_code)]

use std::io;
use std::os::unix::thread::JoinHandleExt;
use std::ptr;
use std::thread::JoinHandle;

/// Its default action is to do nothing, so one that comes from elsewhere does no harm either.
const SIGNAL: libc::c_int = libc::SIGURG;

/// Installs the handler, for the process.
///
/// # Errors
/// sigaction's.
pub(crate) fn install() -> io::Result<()> {
    let handler: extern "C" fn(libc::c_int) = nothing;
    // SAFETY: sigaction is plain data, for which zeros are a value; the handler has the signature that no SA_SIGINFO asks for, and
    // does nothing.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(SIGNAL, &raw const action, ptr::null_mut())
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

extern "C" fn nothing(_signal: libc::c_int) {}

/// Ends a wait of that thread, if it is in one.
pub(crate) fn nudge(thread: &JoinHandle<()>) {
    // SAFETY: a thread whose handle is there has not been joined, so its number is valid.
    let _ = unsafe { libc::pthread_kill(thread.as_pthread_t(), SIGNAL) };
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn write_to_a_full_eventfd_that_blocks_is_ended() {
        install().expect("installed");
        let full = eventfd(0, EventfdFlags::empty()).expect("an eventfd");
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).expect("it is empty");
        let writer = std::thread::spawn(move || {
            let result = rustix::io::write(&full, &1u64.to_ne_bytes());
            assert_eq!(result, Err(rustix::io::Errno::INTR));
        });
        while !writer.is_finished() {
            nudge(&writer);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        writer.join().expect("it was interrupted");
    }
}
