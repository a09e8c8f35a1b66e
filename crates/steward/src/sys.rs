//! System calls that no crate offers in a suitable form.
#![allow(unsafe_code)]
pub mod child;

use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, getrlimit};
use std::ffi::{CStr, c_int, c_uint, c_ulong};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

/// Makes an interface accept frames to a station, or stop accepting them, for a packet socket (packet(7),
/// PACKET_MR_UNICAST).
pub(crate) fn accept_station(
    socket: BorrowedFd<'_>,
    ifindex: u32,
    mac: [u8; 6],
    accepts: bool,
) -> io::Result<()> {
    let mut address = [0; 8];
    address[..mac.len()].copy_from_slice(&mac);
    let request = libc::packet_mreq {
        mr_ifindex: c_int::try_from(ifindex).map_err(|_| io::ErrorKind::InvalidInput)?,
        mr_type: libc::PACKET_MR_UNICAST as libc::c_ushort,
        mr_alen: 6,
        mr_address: address,
    };
    let what = match accepts {
        true => libc::PACKET_ADD_MEMBERSHIP,
        false => libc::PACKET_DROP_MEMBERSHIP,
    };
    set_option(socket, libc::SOL_PACKET, what, &request)
}

/// Offloads of a tap's reader: partial checksums and GSO packets.
const CSUM_TSO: c_uint = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
const USO: c_uint = libc::TUN_F_USO4 | libc::TUN_F_USO6;

/// A new tap device, by the descriptors of its queues, which do not block; each frame has the virtio-net header before
/// it, of 12 bytes in VirtIO's order. Whether it takes and gives UDP packets that are to be cut, too. Of what is
/// written by a queue at most so many bytes may wait to be sent.
pub(crate) fn new_tap(name: &CStr, most_unsent: c_int, queues: usize) -> io::Result<(Vec<OwnedFd>, bool)> {
    let several = if queues > 1 { libc::IFF_MULTI_QUEUE } else { 0 };
    let first = new_tap_queue(name, several | libc::IFF_TUN_EXCL)?;
    // Without an owner every user may attach a queue to a device that takes several (`tun_not_capable`,
    // drivers/net/tun.c), and would receive some of its frames.
    if several != 0 {
        let owner = rustix::process::geteuid().as_raw();
        ioctl(&first, libc::TUNSETOWNER, owner.into())?;
    }
    let further = (1..queues).map(|_| new_tap_queue(name, several));
    let further: Vec<OwnedFd> = further.collect::<io::Result<_>>()?;
    // Of all queues that the device has now.
    for (request, value) in [
        (libc::TUNSETVNETHDRSZ, 12),
        (libc::TUNSETVNETLE, 1),
        (libc::TUNSETSNDBUF, most_unsent),
    ] {
        let value: c_int = value;
        ioctl(&first, request, (&raw const value) as c_ulong)?;
    }
    // Declared with unsigned int and given by value.
    let offload = |which: c_uint| ioctl(&first, libc::TUNSETOFFLOAD, which.into());
    let cuts_udp = offload(CSUM_TSO | USO).is_ok();
    if !cuts_udp {
        offload(CSUM_TSO)?;
    }
    Ok((std::iter::once(first).chain(further).collect(), cuts_udp))
}

/// A queue of the tap device of that name.
fn new_tap_queue(name: &CStr, flags: c_int) -> io::Result<OwnedFd> {
    let open = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let tap = rustix::fs::open("/dev/net/tun", open, Mode::empty())?;
    // SAFETY: all zeros are a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let mut bytes = name.to_bytes().iter();
    // One byte less: the name ends with a zero.
    let room = request.ifr_name.len() - 1;
    for (to, &from) in request.ifr_name[..room].iter_mut().zip(&mut bytes) {
        *to = from.cast_signed() as libc::c_char;
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | flags;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    ioctl(&tap, libc::TUNSETIFF, (&raw mut request) as c_ulong)?;
    Ok(tap)
}

/// `argument`: a number, or the address of the request's structure, which is valid during the call.
fn ioctl(file: &OwnedFd, request: libc::Ioctl, argument: c_ulong) -> io::Result<()> {
    // SAFETY: these requests read or write no more than the structure that the caller names.
    done(unsafe { libc::ioctl(file.as_raw_fd(), request, argument) })
}

/// Lets a socket be bound to this interface only; without CAP_NET_RAW that cannot be undone (`sock_bindtoindex_locked`,
/// net/core/sock.c). AF_XDP honours it since Linux 6.5, and in stable kernels that have taken that over (`xsk_bind`,
/// net/xdp/xsk.c).
pub(crate) fn confine(socket: BorrowedFd<'_>, ifindex: u32) -> io::Result<()> {
    let ifindex = c_int::try_from(ifindex).map_err(|_| io::ErrorKind::InvalidInput)?;
    set_option(socket, libc::SOL_SOCKET, libc::SO_BINDTOIFINDEX, &ifindex)
}

/// Whether this process may set a user's limit of locked memory to `bytes`: its own hard limit is at least that. An
/// unlimited amount (`u64::MAX`) need not be charged.
pub(crate) fn can_limit_memory(bytes: u64) -> bool {
    let limit = getrlimit(Resource::Memlock).maximum;
    bytes < u64::MAX && limit.is_none_or(|limit| bytes <= limit)
}

/// Longest busy poll of a system call that a lessee may set, µs.
const BUSY_POLL_MOST_US: c_int = 1_000_000;

/// Lets an AF_XDP socket poll the driver, `budget` frames at a time at most, and keep its interrupts off meanwhile:
/// what needs a privilege (CAP_NET_ADMIN; `sk_setsockopt`, net/core/sock.c). In older kernels (6.1) SO_BUSY_POLL is one
/// of these, and a lessee may lower it only: it says how long, or 0 for not at all.
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

/// SO_PASSRIGHTS, Linux 6.16 (include/uapi/asm-generic/socket.h).
const SO_PASSRIGHTS: c_int = 83;

/// Sets whether descriptors can be sent to a Unix socket; connections inherit it from the listener.
pub(crate) fn let_files(socket: BorrowedFd<'_>, may: bool) -> io::Result<()> {
    set_option(socket, libc::SOL_SOCKET, SO_PASSRIGHTS, &c_int::from(may))
}

/// Whether descriptors can be sent to a Unix socket; always before Linux 6.16.
pub(crate) fn lets_files(socket: BorrowedFd<'_>) -> bool {
    let mut lets = [1];
    let read = program::peer::option(socket, SO_PASSRIGHTS, &mut lets);
    read.is_err() || lets != [0]
}

/// The result of a system call that returns 0 or -1.
pub(crate) fn done(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn limit_of_memory_is_at_most_our_own() {
        assert!(can_limit_memory(0) && !can_limit_memory(u64::MAX));
        let most = getrlimit(Resource::Memlock).maximum.unwrap_or(u64::MAX - 1);
        assert!(can_limit_memory(most) && !can_limit_memory(most + 1));
    }

    /// Always, before Linux 6.16.
    #[test]
    fn descriptors_can_be_sent_unless_that_is_switched_off() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().expect("two sockets");
        assert!(lets_files(socket.as_fd()));
        let switched_off = let_files(socket.as_fd(), false);
        assert_eq!(lets_files(socket.as_fd()), switched_off.is_err());
    }
}
