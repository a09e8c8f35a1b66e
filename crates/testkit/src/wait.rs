//! Waiting for something to become so, up to a limit.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

/// Time given to what should happen at once. It only ends what hangs: on a busy machine the kernel alone may take ten
/// seconds to end a process that has a socket on an interface.
pub const SOON: Duration = Duration::from_secs(30);
/// Time after which something that must not happen is taken not to.
pub const QUIET: Duration = Duration::from_millis(300);

/// Polls until `condition` holds; `false` if it does not within `limit`.
pub fn until(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    until_some(limit, || condition().then_some(())).is_some()
}

/// Asserts that an expression becomes true: it is evaluated until it is. Further arguments are those of [`assert!`].
#[macro_export]
macro_rules! assert_soon {
    ($holds:expr $(, $($message:tt)*)?) => {
        assert!($crate::wait::until($crate::wait::SOON, || $holds), $($($message)*)?)
    };
}

/// Polls until there is a value; `None` if there is none within `limit`.
pub fn until_some<T>(limit: Duration, mut poll: impl FnMut() -> Option<T>) -> Option<T> {
    let begun = Instant::now();
    loop {
        if let Some(value) = poll() {
            return Some(value);
        }
        let waited = begun.elapsed();
        if waited > limit {
            return None;
        }
        // The longer it takes the less often: looks take CPU time, most of all those that start a program.
        thread::sleep((waited / 8).clamp(Duration::from_millis(2), Duration::from_millis(100)));
    }
}

/// Lets the daemon see what it cannot say that it has seen.
pub fn a_moment() {
    thread::sleep(Duration::from_millis(100));
}

/// Raises a flag when it goes, also when a test fails.
#[must_use]
pub struct Raised<'a>(pub &'a AtomicBool);

impl Drop for Raised<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Does something in rounds, which are numbered, as long as something else lasts on a thread of its own, and once more
/// then; how many.
pub fn rounds_during(during: impl FnOnce() + Send, mut round: impl FnMut(u32)) -> u32 {
    let over = AtomicBool::new(false);
    let mut number = 0;
    thread::scope(|scope| {
        scope.spawn(|| {
            // Also if it panics.
            let _over = Raised(&over);
            during();
        });
        loop {
            let last = over.load(Ordering::Acquire);
            round(number);
            number += 1;
            if last {
                return;
            }
        }
    });
    number
}

/// Whether there is something to be read within `limit`.
pub(crate) fn readable(fd: &impl AsRawFd, limit: Duration) -> bool {
    // SAFETY: the owner is borrowed for as long as the descriptor is used, and owns it.
    let fd = unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
    let timeout = Timespec::try_from(limit).expect("short");
    poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&timeout)).expect("a good descriptor") > 0
}

/// Lets reads of a descriptor wait until there is something.
pub(crate) fn set_blocking(fd: &impl AsRawFd) {
    // SAFETY: the owner is borrowed for as long as the descriptor is used, and owns it.
    let fd = unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
    let flags = fcntl_getfl(fd).expect("a good descriptor");
    fcntl_setfl(fd, flags - OFlags::NONBLOCK).expect("a good descriptor");
}
