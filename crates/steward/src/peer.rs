//! The peer of a Unix socket.
#![allow(unsafe_code)]
#![cfg_attr(not(feature = "server"), allow(dead_code))]

use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::sys;

/// Most supplementary groups that are looked at. A process may have 65,536 (`NGROUPS_MAX`,
/// include/uapi/linux/limits.h), and a user with subordinate ones can make one: reading, comparing and recording so
/// many for each connection would delay all others.
const GROUPS_MAX: usize = 4096;

/// The process that connected, at the time of connect(2) (unix(7), SO_PEERCRED).
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "server", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct Credentials {
    /// 0: a process that this PID namespace does not show.
    pub(crate) pid: i32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Supplementary groups; none where there are more than [`GROUPS_MAX`].
    pub(crate) groups: Vec<u32>,
}

impl Credentials {
    /// Whether the process has ended, as far as it can be seen.
    pub(crate) fn is_gone(&self) -> bool {
        let pid = Pid::from_raw(self.pid).filter(|_| self.pid > 0);
        pid.is_some_and(|pid| test_kill_process(pid) == Err(Errno::SRCH))
    }
}

/// The peer of a Unix socket.
pub(crate) fn credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    let ucred = ucred(socket)?;
    let mut groups = vec![u32::MAX; GROUPS_MAX];
    let bytes = match sys::get_option(
        socket,
        libc::SO_PEERGROUPS,
        groups.as_mut_ptr().cast(),
        size_of_val(groups.as_slice()),
    ) {
        // There are more, and none were copied.
        Err(error) if error.raw_os_error() == Some(libc::ERANGE) => 0,
        result => result?,
    };
    groups.truncate(bytes / size_of::<u32>());
    groups.shrink_to_fit();
    Ok(Credentials {
        pid: ucred.pid,
        uid: ucred.uid,
        gid: ucred.gid,
        groups,
    })
}

/// The process at the other end of a Unix socket; `None` for one that this PID namespace does not show.
///
/// Not rustix's `socket_peercred`: the type that it returns cannot hold a process number of 0.
#[must_use]
pub fn process(socket: BorrowedFd<'_>) -> Option<i32> {
    ucred(socket).ok().map(|ucred| ucred.pid).filter(|&pid| pid > 0)
}

/// SO_PEERPIDFD, Linux 6.5 (include/uapi/asm-generic/socket.h).
const SO_PEERPIDFD: libc::c_int = 77;

/// Whether that process has ended, as far as the kernel tells: what was read of its number until now may be another's.
/// Before Linux 6.5 it does not tell.
#[must_use]
pub fn has_ended(socket: BorrowedFd<'_>) -> bool {
    match process_of(socket) {
        // A kernel that has no such option.
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => false,
        // Nobody has its number, or it was another's.
        Err(_) => true,
        Ok(process) => {
            let mut readable = [PollFd::new(&process, PollFlags::IN)];
            !matches!(poll(&mut readable, Some(&Timespec::default())), Ok(0))
        }
    }
}

/// The process at the other end of a Unix socket, by a descriptor (pidfd_open(2)).
///
/// # Errors
/// The kernel's: ENOPROTOOPT before Linux 6.5.
pub(crate) fn process_of(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut number: libc::c_int = -1;
    let len = size_of::<libc::c_int>();
    sys::get_option(socket, SO_PEERPIDFD, (&raw mut number).cast(), len)?;
    // SAFETY: a descriptor that the kernel has just made for this process, and that no other code knows.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn ucred(socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
    let mut ucred = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let len = size_of::<libc::ucred>();
    sys::get_option(socket, libc::SO_PEERCRED, (&raw mut ucred).cast(), len)?;
    Ok(ucred)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn own_process_is_its_own_peer() {
        let (one, _other) = UnixStream::pair().expect("sockets");
        assert_eq!(process(one.as_fd()), i32::try_from(std::process::id()).ok());
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
