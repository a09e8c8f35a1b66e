//! Who is at the other end of a Unix socket (SO_PEERCRED, unix(7)).
//!
//! A function of our own: a peer whose process this PID namespace does not show has PID 0, which the
//! type of the library for it cannot hold.

#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};

/// The peer's process, if the kernel tells and we can see it.
pub(crate) fn process(socket: BorrowedFd<'_>) -> Option<i32> {
    let mut credentials = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let target: *mut libc::ucred = &raw mut credentials;
    // SAFETY: `target` points to `len` bytes that are ours for the call, as both live on this stack;
    // every bit pattern is a valid ucred.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            target.cast(),
            &raw mut len,
        )
    };
    (result == 0 && credentials.pid > 0).then_some(credentials.pid)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn own_process_is_named_as_peer() {
        let (one, _other) = UnixStream::pair().expect("pair");
        assert_eq!(
            super::process(one.as_fd()),
            i32::try_from(std::process::id()).ok()
        );
    }
}
