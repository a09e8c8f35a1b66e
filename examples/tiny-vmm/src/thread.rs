//! Threads: where they run, how much CPU time they use, and how they stop.
//!
//! To stop a thread, the VMM sets a flag, which the thread checks again and again, and sends SIGRTMIN, which interrupts
//! a system call such as KVM_RUN. It repeats the signal: one between the check and the system call has no effect.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Pid;
use rustix::thread::{CpuSet, gettid, sched_setaffinity};
use vmm_sys_util::signal::{Killable as _, SIGRTMIN, register_signal_handler, unblock_signal};

/// A thread that runs until it is stopped, and then returns a `T`.
pub struct Thread<T> {
    /// The kernel's id.
    pub id: Pid,
    handle: JoinHandle<T>,
    stop: Arc<AtomicBool>,
}

impl<T: Send + 'static> Thread<T> {
    /// Starts a thread on this CPU; `None`: on any. `work` returns when its argument is true.
    ///
    /// # Errors
    /// There is no such CPU, or no thread is left.
    pub fn start(
        name: &str,
        cpu: Option<usize>,
        work: impl FnOnce(&AtomicBool) -> T + Send + 'static,
    ) -> Result<Self> {
        // Only a signal with a handler interrupts system calls.
        register_signal_handler(SIGRTMIN(), nothing)?;
        let stop = Arc::new(AtomicBool::new(false));
        let (flag, (send, receive)) = (Arc::clone(&stop), mpsc::channel());
        let handle = Builder::new().name(name.into()).spawn(move || {
            // A new thread inherits the signal mask, in which the signal may be blocked.
            let _ = unblock_signal(SIGRTMIN());
            // Cannot fail: the receiver waits below.
            let _ = send.send(gettid());
            work(&flag)
        })?;
        let id = receive.recv()?;
        pin(id, cpu)?;
        Ok(Self { id, handle, stop })
    }

    /// Stops it. `None`: it panicked.
    pub fn stop(self) -> Option<T> {
        // Relaxed: the flag publishes no other data. Pairs with the load in `work`; a late one costs a signal more.
        self.stop.store(true, Ordering::Relaxed);
        while !self.handle.is_finished() {
            // The thread exists until it is joined.
            let _ = self.handle.kill(SIGRTMIN());
            std::thread::sleep(Duration::from_millis(1));
        }
        self.handle.join().ok()
    }
}

extern "C" fn nothing(_: i32, _: *mut libc::siginfo_t, _: *mut std::ffi::c_void) {}

/// Makes a thread run on this CPU only; `None`: on any.
///
/// # Errors
/// There is no such CPU.
pub fn pin(thread: Pid, cpu: Option<usize>) -> Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    ensure!(cpu < CpuSet::MAX_CPU, "there is no CPU {cpu}");
    let mut only = CpuSet::new();
    only.set(cpu);
    sched_setaffinity(Some(thread), &only).with_context(|| format!("no CPU {cpu}: see `taskset -p $$`"))
}

/// CPU time of a thread, ms: the first number of schedstat (Documentation/scheduler/sched-stats.rst). `None`: the
/// kernel has no such statistics.
#[must_use]
pub fn cpu_ms(thread: Pid) -> Option<f64> {
    let path = format!("/proc/self/task/{}/schedstat", thread.as_raw_nonzero());
    let text = std::fs::read_to_string(path).ok()?;
    let ns: f64 = text.split_whitespace().next()?.parse().ok()?;
    Some(ns / 1e6)
}
