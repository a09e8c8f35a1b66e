//! System calls that no crate has in the form that is needed here: limits of another process, a socket confined to an
//! interface.
#![allow(unsafe_code)]
#![cfg_attr(not(feature = "server"), allow(dead_code))]

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

use rustix::net::xdp::{SocketAddrXdp, SocketAddrXdpFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::rand::{GetRandomFlags, getrandom};

/// Lets an interface accept frames to these stations, too, as long as the socket that comes back is open (packet(7),
/// PACKET_MR_UNICAST); it receives nothing.
pub(crate) fn accept_stations(ifindex: u32, macs: &[[u8; 6]]) -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    for mac in macs {
        let mut address = [0; 8];
        address[..mac.len()].copy_from_slice(mac);
        let request = libc::packet_mreq {
            mr_ifindex: c_int::try_from(ifindex).map_err(|_| io::ErrorKind::InvalidInput)?,
            mr_type: libc::PACKET_MR_UNICAST as libc::c_ushort,
            mr_alen: 6,
            mr_address: address,
        };
        set_option(
            socket.as_fd(),
            libc::SOL_PACKET,
            libc::PACKET_ADD_MEMBERSHIP,
            &request,
        )?;
    }
    Ok(socket)
}

/// Lets a netlink socket be told what a multicast group is told (netlink(7), NETLINK_ADD_MEMBERSHIP).
pub(crate) fn join_group(socket: BorrowedFd<'_>, group: u32) -> io::Result<()> {
    set_option(socket, libc::SOL_NETLINK, libc::NETLINK_ADD_MEMBERSHIP, &group)
}

/// A new AF_XDP socket.
pub(crate) fn new_xdp_socket() -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None)
}

/// Lets a socket be bound to this interface only; without CAP_NET_RAW that cannot be undone (`sock_bindtoindex_locked`,
/// net/core/sock.c; AF_XDP honours it since Linux 6.5, `xsk_bind`, net/xdp/xsk.c).
pub(crate) fn confine(socket: BorrowedFd<'_>, ifindex: u32) -> io::Result<()> {
    let ifindex = c_int::try_from(ifindex).map_err(|_| io::ErrorKind::InvalidInput)?;
    set_option(socket, libc::SOL_SOCKET, libc::SO_BINDTOIFINDEX, &ifindex)
}

/// Longest time that a holder may ask a system call to poll for, µs.
const BUSY_POLL_MOST_US: c_int = 1_000_000;

/// Lets an AF_XDP socket poll the driver, `budget` frames at a time at most, and keep its interrupts off meanwhile:
/// what needs a privilege (CAP_NET_ADMIN; `sk_setsockopt`, net/core/sock.c). In older kernels (6.1) SO_BUSY_POLL is one
/// of these, and a holder may lower it only: it says how long, or 0 for not at all.
pub(crate) fn allow_busy_poll(socket: BorrowedFd<'_>, budget: u16) -> io::Result<()> {
    for (name, value) in [
        (libc::SO_BUSY_POLL, BUSY_POLL_MOST_US),
        (libc::SO_PREFER_BUSY_POLL, 1),
        (libc::SO_BUSY_POLL_BUDGET, c_int::from(budget)),
    ] {
        set_option(socket, libc::SOL_SOCKET, name, &value)?;
    }
    Ok(())
}

fn set_option<T>(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: &T) -> io::Result<()> {
    let (value, len) = (ptr::from_ref(value), size_of::<T>() as libc::socklen_t);
    // SAFETY: the kernel reads `len` bytes from the address of a live T.
    done(unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, value.cast(), len) })
}

/// What a system call says that returns 0 or -1.
pub(crate) fn done(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether the kernel keeps an AF_XDP socket to the interface that it is confined to. Linux 6.5 does (f7306acec9aa),
/// and so do many stable kernels before it, so it is tried: a socket that is confined to an interface is bound to one
/// that does not exist, which is refused for the one reason or for the other.
pub(crate) fn sockets_are_confined() -> io::Result<bool> {
    // In a debug build tests may play an old kernel.
    if cfg!(debug_assertions) && std::env::var_os("STEWARD_UNCONFINED").is_some() {
        return Ok(false);
    }
    let socket = new_xdp_socket()?;
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
pub(crate) fn raise_memlock(pid: i32, bytes: u64) -> io::Result<()> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a null pointer asks for nothing to be set; the old limits are written to a live rlimit.
    done(unsafe { libc::prlimit(pid, libc::RLIMIT_MEMLOCK, ptr::null(), &raw mut limit) })?;
    if limit.rlim_cur >= bytes {
        return Ok(());
    }
    limit.rlim_cur = bytes;
    limit.rlim_max = limit.rlim_max.max(bytes);
    // SAFETY: the new limits are read from a live rlimit, the old ones are not asked for.
    done(unsafe { libc::prlimit(pid, libc::RLIMIT_MEMLOCK, &raw const limit, ptr::null_mut()) })
}

/// Random bytes that nobody can guess.
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
    use super::*;

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
