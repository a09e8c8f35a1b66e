//! Waiting for something to become so, with an end to the patience.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Time given to what should happen at once. It only ends what hangs: on a busy machine the kernel alone may take ten seconds to end a
/// process that has a socket on an interface.
pub const SOON: Duration = Duration::from_secs(30);
/// Time after which something that must not happen is taken not to.
pub const QUIET: Duration = Duration::from_millis(300);

/// Polls until `condition` holds; `false` if it does not within `patience`.
pub fn until(patience: Duration, mut condition: impl FnMut() -> bool) -> bool {
    until_some(patience, || condition().then_some(())).is_some()
}

/// Polls until there is a value; `None` if there is none within `patience`.
pub fn until_some<T>(patience: Duration, mut poll: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + patience;
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
pub fn settle() {
    std::thread::sleep(Duration::from_millis(100));
}

/// Whether there is something to be read within `patience`.
pub(crate) fn readable(fd: &impl AsRawFd, patience: Duration) -> bool {
    // SAFETY: the owner is borrowed for as long as the descriptor is used, and owns it.
    let fd = unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
    let timeout = Timespec::try_from(patience).expect("short");
    poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&timeout)).expect("a good descriptor") > 0
}
