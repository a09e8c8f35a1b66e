//! Holds one thread of another process, as a page fault that is never answered would, and lets it go again.
//!
//! SIGSTOP stops whole processes; a tracer stops one thread (ptrace(2), PTRACE_INTERRUPT).
#![allow(unsafe_code)]

use std::fs;
use std::ptr;

use crate::wait;

/// A thread that does not run. Goes on when dropped, which must be on the thread that froze it.
#[must_use]
pub struct Frozen {
    tid: libc::pid_t,
}

impl Frozen {
    /// Freezes the thread of that name.
    ///
    /// # Panics
    /// If there is none, or it may not be traced.
    pub fn thread(pid: u32, name: &str) -> Self {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
        let is_it = |path: &std::path::Path| {
            fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim_end() == name)
        };
        let task = tasks
            .flatten()
            .find(|task| is_it(&task.path()))
            .unwrap_or_else(|| panic!("process {pid} has no thread {name}"));
        let tid: libc::pid_t = task.file_name().to_string_lossy().parse().expect("a number");
        // SAFETY: both requests name a thread and pass no memory.
        let done = unsafe {
            libc::ptrace(libc::PTRACE_SEIZE, tid, 0, 0) == 0
                && libc::ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0) == 0
        };
        assert!(done, "thread {tid}: {}", std::io::Error::last_os_error());
        let mut frozen = Self { tid };
        assert!(wait::until(wait::SOON, || frozen.reap()), "it does not stop");
        frozen
    }

    /// Takes note of what became of it; whether there was anything. A thread that is traced is not gone before.
    pub fn reap(&mut self) -> bool {
        // SAFETY: nothing but the number is passed; no status is asked for.
        unsafe { libc::waitpid(self.tid, ptr::null_mut(), libc::__WALL | libc::WNOHANG) > 0 }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // SAFETY: names a thread and passes no memory. Fails if the thread is gone.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.tid, 0, 0) };
    }
}
