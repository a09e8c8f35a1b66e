//! The process that has connected to the steward.

use std::io;
use std::os::fd::BorrowedFd;

use program::peer::{Ids, ids, option};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

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
    pub(crate) fn is_gone(&self) -> bool {
        let pid = Pid::from_raw(self.pid).filter(|_| self.pid > 0);
        pid.is_some_and(|pid| test_kill_process(pid) == Err(Errno::SRCH))
    }
}

/// The peer of a Unix socket.
pub(crate) fn credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
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
