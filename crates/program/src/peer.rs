//! The peer of a Unix socket.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Instant;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::descriptors;

/// SO_PEERPIDFD, Linux 6.5 (include/uapi/asm-generic/socket.h).
const SO_PEERPIDFD: c_int = 77;

/// Process, user and group that connected, at the time of connect(2) (unix(7), SO_PEERCRED).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are described above")]
pub struct Ids {
    /// 0: a process that this PID namespace does not show.
    pub pid: i32,
    pub uid: u32,
    pub gid: u32,
}

/// Those of the process at the other end of a Unix socket.
///
/// Not rustix's `socket_peercred`: the type that it returns cannot hold a process number of 0.
///
/// # Errors
/// An error of the kernel.
pub fn ids(socket: BorrowedFd<'_>) -> io::Result<Ids> {
    let mut ids = [0, u32::MAX, u32::MAX];
    option(socket, libc::SO_PEERCRED, &mut ids)?;
    let [pid, uid, gid] = ids;
    let pid = pid.cast_signed();
    Ok(Ids { pid, uid, gid })
}

/// The process at the other end of a Unix socket; `None` for one that this PID namespace does not show.
#[must_use]
pub fn process(socket: BorrowedFd<'_>) -> Option<i32> {
    ids(socket).ok().map(|ids| ids.pid).filter(|&pid| pid > 0)
}

/// Whether that process has ended: then data that was read by its number may be another process's. Always false before
/// Linux 6.5, which does not report it.
#[must_use]
pub fn has_ended(socket: BorrowedFd<'_>) -> bool {
    match process_of(socket) {
        // A kernel that has no such option.
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => false,
        // No process has that number, or another process has it now.
        Err(_) => true,
        Ok(process) => descriptors::await_readable(process, Some(Instant::now())).unwrap_or(true),
    }
}

/// The process at the other end of a Unix socket, by a descriptor (pidfd_open(2)).
///
/// # Errors
/// The kernel's: ENOPROTOOPT before Linux 6.5.
pub fn process_of(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut number = [u32::MAX];
    option(socket, SO_PEERPIDFD, &mut number)?;
    // SAFETY: a descriptor that the kernel has just made for this process, and that no other code knows.
    Ok(unsafe { OwnedFd::from_raw_fd(number[0].cast_signed()) })
}

/// Reads an option of a socket that consists of 32-bit numbers (getsockopt(2), SOL_SOCKET); how many there are.
///
/// # Errors
/// The kernel's: ERANGE if there are more.
pub fn option(socket: BorrowedFd<'_>, name: c_int, numbers: &mut [u32]) -> io::Result<usize> {
    let mut len = libc::socklen_t::try_from(size_of_val(numbers)).map_err(|_| io::ErrorKind::InvalidInput)?;
    let (socket, level, to) = (socket.as_raw_fd(), libc::SOL_SOCKET, numbers.as_mut_ptr());
    // SAFETY: the kernel writes at most `len` bytes to the numbers, for which any bytes are valid.
    match unsafe { libc::getsockopt(socket, level, name, to.cast(), &raw mut len) } {
        0 => Ok(len as usize / size_of::<u32>()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Most supplementary groups that are looked at. A process may have 65,536 (`NGROUPS_MAX`,
/// include/uapi/linux/limits.h), and a user with subordinate ones can make one: reading, comparing and recording so
/// many for each connection would delay all others.
const GROUPS_MAX: usize = 4096;

/// The process that connected, at the time of connect(2) (unix(7), SO_PEERCRED).
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Credentials {
    /// 0: a process that this PID namespace does not show.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Supplementary groups; none where there are more than [`GROUPS_MAX`].
    pub groups: Vec<u32>,
}

impl Credentials {
    /// Whether the process has ended, as far as it can be seen.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        let pid = Pid::from_raw(self.pid).filter(|_| self.pid > 0);
        pid.is_some_and(|pid| test_kill_process(pid) == Err(Errno::SRCH))
    }
}

/// The peer of a Unix socket, with its groups.
///
/// # Errors
/// An error of the kernel.
pub fn credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    let Ids { pid, uid, gid } = ids(socket)?;
    let mut groups = vec![u32::MAX; GROUPS_MAX];
    let count = match option(socket, libc::SO_PEERGROUPS, &mut groups) {
        // There are more, and none were copied.
        Err(error) if error.raw_os_error() == Some(libc::ERANGE) => 0,
        read => read?,
    };
    groups.truncate(count);
    groups.shrink_to_fit();
    Ok(Credentials {
        pid,
        uid,
        gid,
        groups,
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn own_process_is_its_own_peer_and_goes_on() {
        let (one, _other) = UnixStream::pair().expect("sockets");
        let pid = i32::try_from(std::process::id()).expect("small");
        let (uid, gid) = (rustix::process::getuid(), rustix::process::getgid());
        let own = Ids {
            pid,
            uid: uid.as_raw(),
            gid: gid.as_raw(),
        };
        assert_eq!(ids(one.as_fd()).expect("known"), own);
        assert_eq!(process(one.as_fd()), Some(pid));
        assert!(!has_ended(one.as_fd()));
    }

    #[test]
    fn own_process_is_its_own_peer() {
        let (one, _other) = UnixStream::pair().expect("sockets");
        let peer = credentials(one.as_fd()).expect("known");
        assert_eq!(Ok(peer.pid), i32::try_from(std::process::id()));
        assert_eq!(peer.uid, rustix::process::getuid().as_raw());
        assert_eq!(peer.gid, rustix::process::getgid().as_raw());
        let own = rustix::process::getgroups().expect("groups");
        assert_eq!(
            peer.groups,
            own.into_iter()
                .map(rustix::process::Gid::as_raw)
                .collect::<Vec<_>>()
        );
    }

    #[test]
    #[allow(unsafe_code)]
    fn who_has_more_groups_than_are_looked_at_has_none() {
        testkit::require!(Root);
        let groups_with = |count: usize| {
            let body = move || {
                let groups: Vec<libc::gid_t> = (0..).map(|number| 100_000 + number).take(count).collect();
                // SAFETY: the kernel reads `count` numbers from a live vector. By the bare call only this thread has
                // them.
                let set = unsafe { libc::syscall(libc::SYS_setgroups, count, groups.as_ptr()) };
                assert_eq!(set, 0, "{}", io::Error::last_os_error());
                let (one, _other) = UnixStream::pair().expect("sockets");
                credentials(one.as_fd()).expect("known").groups.len()
            };
            std::thread::spawn(body).join().expect("no panic")
        };
        assert_eq!(groups_with(GROUPS_MAX), GROUPS_MAX);
        assert_eq!((groups_with(GROUPS_MAX + 1), groups_with(65_536)), (0, 0));
    }
}
