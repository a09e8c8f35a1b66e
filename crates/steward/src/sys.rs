//! System calls that no crate has in the form that is needed here: who is at the other end of a socket, users by name, limits of
//! another process, a socket confined to an interface.
#![allow(unsafe_code)]
#![cfg_attr(not(feature = "server"), allow(dead_code))]

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use rustix::net::xdp::{SocketAddrXdp, SocketAddrXdpFlags};
use rustix::rand::{GetRandomFlags, getrandom};

/// `SO_PEERGROUPS`, include/uapi/asm-generic/socket.h.
const SO_PEERGROUPS: c_int = 59;
/// `SO_BINDTOIFINDEX`, same place (Linux 5.0).
const SO_BINDTOIFINDEX: c_int = 62;
/// `SO_PEERPIDFD`, same place (Linux 6.5).
const SO_PEERPIDFD: c_int = 77;
/// `PACKET_MR_UNICAST`, include/uapi/linux/if_packet.h.
const PACKET_MR_UNICAST: libc::c_ushort = 3;
/// Most supplementary groups that are looked at. A process may have 65,536 (`NGROUPS_MAX`, include/uapi/linux/limits.h), and whoever
/// has subordinate ones can: reading, comparing and recording so many for each connection would hold up all others.
const GROUPS_MAX: usize = 4096;

/// Who connected, at the time of connect(2) (unix(7), SO_PEERCRED).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Credentials {
    /// 0: a process that this PID namespace does not show.
    pub(crate) pid: i32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Supplementary groups; none where there are more than [`GROUPS_MAX`].
    pub(crate) groups: Vec<u32>,
}

/// Who is at the other end of a Unix socket.
///
/// # Errors
/// The kernel's.
pub(crate) fn credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    let mut ucred = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    get_option(
        socket,
        libc::SO_PEERCRED,
        (&raw mut ucred).cast(),
        size_of::<libc::ucred>(),
    )?;
    let mut groups = vec![u32::MAX; GROUPS_MAX];
    let bytes = match get_option(
        socket,
        SO_PEERGROUPS,
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

/// A descriptor of the process at the other end of a Unix socket, by which its number can be held against reuse.
///
/// # Errors
/// The kernel's; ENOPROTOOPT before Linux 6.5.
pub(crate) fn peer_process(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut fd: c_int = -1;
    get_option(socket, SO_PEERPIDFD, (&raw mut fd).cast(), size_of::<c_int>())?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// getsockopt(2) at SOL_SOCKET into `len` bytes at `value`; says how many were written.
fn get_option(
    socket: BorrowedFd<'_>,
    name: c_int,
    value: *mut libc::c_void,
    len: usize,
) -> io::Result<usize> {
    let mut len = libc::socklen_t::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the callers pass the address and size of a live value of theirs, for which any bytes are valid; the kernel
    // writes at most `len` bytes there.
    let result = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, value, &raw mut len) };
    if result == 0 {
        Ok(len as usize)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Lets an interface accept frames to these stations, too, as long as the socket that comes back is open (packet(7),
/// PACKET_MR_UNICAST); it receives nothing.
///
/// # Errors
/// The kernel's.
pub(crate) fn accept_stations(ifindex: u32, macs: &[[u8; 6]]) -> io::Result<OwnedFd> {
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let (family, kind) = (rustix::net::AddressFamily::PACKET, rustix::net::SocketType::RAW);
    let socket = rustix::net::socket_with(family, kind, flags, None)?;
    for mac in macs {
        let mut address = [0; 8];
        address[..mac.len()].copy_from_slice(mac);
        let request = libc::packet_mreq {
            mr_ifindex: c_int::try_from(ifindex).map_err(|_| io::ErrorKind::InvalidInput)?,
            mr_type: PACKET_MR_UNICAST,
            mr_alen: 6,
            mr_address: address,
        };
        let len = size_of::<libc::packet_mreq>() as libc::socklen_t;
        // SAFETY: the kernel reads `len` bytes from the address of a live packet_mreq.
        let result = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_ADD_MEMBERSHIP,
                (&raw const request).cast(),
                len,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(socket)
}

/// Lets a netlink socket be told what a multicast group is told (netlink(7), NETLINK_ADD_MEMBERSHIP).
///
/// # Errors
/// The kernel's.
pub(crate) fn join_group(socket: BorrowedFd<'_>, group: u32) -> io::Result<()> {
    let len = size_of::<u32>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes from the address of a live u32.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_NETLINK,
            libc::NETLINK_ADD_MEMBERSHIP,
            (&raw const group).cast(),
            len,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Lets a socket be bound to this interface only; without CAP_NET_RAW that cannot be undone (`sock_bindtoindex_locked`, net/core/sock.c;
/// AF_XDP honours it since Linux 6.5, `xsk_bind`, net/xdp/xsk.c).
///
/// # Errors
/// The kernel's.
pub(crate) fn confine(socket: BorrowedFd<'_>, ifindex: u32) -> io::Result<()> {
    let ifindex = c_int::try_from(ifindex).map_err(|_| io::ErrorKind::InvalidInput)?;
    let len = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes from the address of a live c_int.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_BINDTOIFINDEX,
            (&raw const ifindex).cast(),
            len,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Whether the kernel keeps an AF_XDP socket to the interface that it is confined to. Linux 6.5 does (f7306acec9aa), and so do
/// many stable kernels before it, so it is tried: a socket that is confined to an interface is bound to one that does not exist, which
/// is refused for the one reason or for the other.
///
/// # Errors
/// No such socket can be made here.
pub(crate) fn sockets_are_confined() -> io::Result<bool> {
    // In a debug build tests may play an old kernel.
    if cfg!(debug_assertions) && std::env::var_os("STEWARD_UNCONFINED").is_some() {
        return Ok(false);
    }
    let (family, kind) = (rustix::net::AddressFamily::XDP, rustix::net::SocketType::RAW);
    let socket = rustix::net::socket_with(family, kind, rustix::net::SocketFlags::CLOEXEC, None)?;
    // LOOPBACK_IFINDEX, include/net/flow.h: in each network namespace.
    confine(socket.as_fd(), 1)?;
    let nowhere = SocketAddrXdp::new(SocketAddrXdpFlags::empty(), i32::MAX.cast_unsigned(), 0);
    match rustix::net::bind(&socket, &nowhere) {
        Err(rustix::io::Errno::INVAL) => Ok(true),
        Err(rustix::io::Errno::NODEV) => Ok(false),
        Err(errno) => Err(errno.into()),
        Ok(()) => Err(io::Error::other("bound to an interface that cannot be")),
    }
}

/// Raises the locked-memory limit of a process, soft and hard, to `bytes` where it is lower.
///
/// # Errors
/// The kernel's.
pub(crate) fn raise_memlock(pid: i32, bytes: u64) -> io::Result<()> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a null pointer asks for nothing to be set; the old limits are written to a live rlimit.
    let asked = unsafe { libc::prlimit(pid, libc::RLIMIT_MEMLOCK, ptr::null(), &raw mut limit) };
    if asked != 0 {
        return Err(io::Error::last_os_error());
    }
    if limit.rlim_cur >= bytes {
        return Ok(());
    }
    limit.rlim_cur = bytes;
    limit.rlim_max = limit.rlim_max.max(bytes);
    // SAFETY: the new limits are read from a live rlimit, the old ones are not asked for.
    let set = unsafe { libc::prlimit(pid, libc::RLIMIT_MEMLOCK, &raw const limit, ptr::null_mut()) };
    if set == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Random bytes that nobody can guess.
///
/// # Errors
/// The kernel's.
pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    // Up to 256 come whole (getrandom(2)).
    if getrandom(&mut bytes, GetRandomFlags::empty())? == N {
        Ok(bytes)
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

#[cfg(test)]
mod tests {
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
    fn who_has_more_groups_than_are_looked_at_has_none() {
        testkit::require!(Root);
        let groups_with = |count: usize| {
            let body = move || {
                let groups: Vec<libc::gid_t> = (0..).map(|number| 100_000 + number).take(count).collect();
                // SAFETY: the kernel reads `count` numbers from a live vector. By the bare call only this thread has them.
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

    #[test]
    fn this_kernel_says_whether_it_confines_sockets() {
        testkit::require!(Root);
        // Those of today do.
        assert!(sockets_are_confined().expect("root may have one"));
    }

    #[test]
    fn lower_limit_is_left_alone() {
        let pid = i32::try_from(std::process::id()).expect("small");
        let before = rustix::process::getrlimit(rustix::process::Resource::Memlock);
        raise_memlock(pid, 0).expect("nothing to do");
        assert_eq!(
            rustix::process::getrlimit(rustix::process::Resource::Memlock),
            before
        );
    }
}
