//! Waiting for something to become so, up to a limit.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Time given to what should happen at once. It only ends what hangs: on a busy machine the kernel alone may take ten seconds to end a
/// process that has a socket on an interface.
pub const SOON: Duration = Duration::from_secs(30);
/// Time after which something that must not happen is taken not to.
pub const QUIET: Duration = Duration::from_millis(300);

/// Polls until `condition` holds; `false` if it does not within `limit`.
pub fn until(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    until_some(limit, || condition().then_some(())).is_some()
}

/// Polls until there is a value; `None` if there is none within `limit`.
pub fn until_some<T>(limit: Duration, mut poll: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = poll() {
            return Some(value);
        }
        if Instant::now() > deadline {
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Lets the daemon see what it cannot say that it has seen.
pub fn a_moment() {
    std::thread::sleep(Duration::from_millis(100));
}

/// Whether there is something to be read within `limit`.
pub(crate) fn readable(fd: &impl AsRawFd, limit: Duration) -> bool {
    // SAFETY: the owner is borrowed for as long as the descriptor is used, and owns it.
    let fd = unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
    let timeout = Timespec::try_from(limit).expect("short");
    poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&timeout)).expect("a good descriptor") > 0
}
