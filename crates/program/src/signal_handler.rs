//! Signal handlers that need more than a flag or a pipe, which is all that `signal_hook` offers: they inspect the
//! signal's cause, or interrupt system calls.
#![allow(unsafe_code)]

use std::io;
use std::ptr;

use libc::{c_int, c_void, siginfo_t};

/// Gets the signal's number, its cause, and the context that was interrupted.
pub type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

/// Installs a handler, for the process. It runs on the alternate stack where the thread has one (std gives one to
/// each), with the signals of `blocked` held back.
///
/// # Errors
/// sigaction's.
///
/// # Safety
/// The handler does only what signal-safety(7) allows.
pub unsafe fn install(signal: c_int, handler: Handler, flags: c_int, blocked: &[c_int]) -> io::Result<()> {
    // SAFETY: sigaction is plain data, for which zeros are a value; the handler has the signature that SA_SIGINFO asks
    // for.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | flags;
        libc::sigemptyset(&raw mut action.sa_mask);
        for &signal in blocked {
            libc::sigaddset(&raw mut action.sa_mask, signal);
        }
        libc::sigaction(signal, &raw const action, ptr::null_mut())
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
