//! Work of a child for a netkit: it takes the network namespace that came with the request, moves the netkit there,
//! names it and sets it up. No function here allocates.
//!
//! # Theory of operation
//!
//! The lessee's descriptor may be of any file: reading its attributes, or closing it, may take forever, so a child does
//! that. A namespace is recognised by its file system (nsfs).
//!
//! Every user can open files of namespaces below /run/netns. The kernel requires CAP_NET_ADMIN in the user namespace
//! of a network namespace from users that put an interface there, and the steward has that everywhere. So the
//! namespace must be the lessee's: its user is root, or owns that user namespace (ioctl_ns(2)). Without a descriptor
//! the netkit stays in the steward's namespace, which is the host's: there only root may have interfaces.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::fs::fstatfs;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with};
use zerocopy::FromBytes;

use steward::child::take_files;
use steward_protocol::Step;

/// `NSFS_MAGIC`, include/uapi/linux/magic.h.
const NSFS: i64 = 0x6e73_6673;
/// `NS_GET_USERNS`, `NS_GET_NSTYPE`, `NS_GET_OWNER_UID`, include/uapi/linux/nsfs.h.
const GET_USER_NAMESPACE: libc::c_ulong = 0xb701;
const GET_KIND: libc::c_ulong = 0xb703;
const GET_OWNER: libc::c_ulong = 0xb704;

/// `NLMSG_ERROR`, include/uapi/linux/netlink.h.
const ERROR: u16 = 2;
/// Bytes of the last attribute of the message, the namespace, and of the message's length at its beginning.
const NAMESPACE_BYTES: usize = 8;
const LENGTH_BYTES: usize = 4;

/// Error: the message has no namespace, and the user may not use the steward's. The kernel returns other errors.
pub(super) const NO_NAMESPACE: Errno = Errno::DESTADDRREQ;

/// Moves the netkit, by the message of [`moving`](super::device::moving), for a lessee's user. More than one
/// descriptor is an error.
pub(super) fn settle(connection: BorrowedFd<'_>, uid: u32, message: &mut [u8]) -> Result<(), (Step, Errno)> {
    let of_namespace = |errno| (Step::Namespace, errno);
    let mut files = take_files(connection).map_err(of_namespace)?;
    let namespace = files[0].take();
    let others = files.iter().flatten().count();
    std::mem::forget(files);
    let namespace = namespace.map(std::mem::ManuallyDrop::new);
    if others > 0 {
        return Err(of_namespace(Errno::BADMSG));
    }
    match &namespace {
        Some(namespace) => check(namespace.as_fd(), uid).map_err(of_namespace)?,
        None if uid != 0 => return Err(of_namespace(NO_NAMESPACE)),
        None => {}
    }
    let namespace = namespace.as_ref().map(|namespace| namespace.as_fd());
    set_link(message, namespace).map_err(|errno| (Step::Netkit, errno))
}

/// Checks that it is a network namespace of the user. Errors: EINVAL, EPERM.
fn check(file: BorrowedFd<'_>, uid: u32) -> Result<(), Errno> {
    if fstatfs(file)?.f_type != NSFS {
        return Err(Errno::INVAL);
    }
    let kind = ask(file, GET_KIND, std::ptr::null_mut())?;
    if kind != libc::CLONE_NEWNET {
        return Err(Errno::INVAL);
    }
    if uid == 0 {
        return Ok(());
    }
    let user_namespace = ask(file, GET_USER_NAMESPACE, std::ptr::null_mut())?;
    // SAFETY: the kernel has just made this descriptor for us, and no other code knows of it.
    let user_namespace = unsafe { OwnedFd::from_raw_fd(user_namespace) };
    let mut owner = u32::MAX;
    ask(user_namespace.as_fd(), GET_OWNER, &raw mut owner)?;
    match owner == uid {
        true => Ok(()),
        false => Err(Errno::PERM),
    }
}

fn ask(namespace: BorrowedFd<'_>, what: libc::c_ulong, argument: *mut u32) -> Result<i32, Errno> {
    // SAFETY: of a namespace's file, as the caller has seen; the one request with an argument writes a number to it.
    match unsafe { libc::ioctl(namespace.as_raw_fd(), what as _, argument) } {
        -1 => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)),
        answer => Ok(answer),
    }
}

fn set_link(message: &mut [u8], namespace: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let before = message.len().checked_sub(NAMESPACE_BYTES).ok_or(Errno::INVAL)?;
    let message = match namespace {
        Some(namespace) => {
            message[before + 4..].copy_from_slice(&namespace.as_raw_fd().to_ne_bytes());
            message
        }
        // It stays in its namespace.
        None => {
            message[..LENGTH_BYTES].copy_from_slice(&(before as u32).to_ne_bytes());
            &mut message[..before]
        }
    };
    send(&socket, message, SendFlags::empty())?;
    let mut answer = [0u8; 256];
    let (received, _) = recv(&socket, &mut answer, RecvFlags::empty())?;
    // The head, of 16 bytes, then 0 or an error number below it.
    let (Some(kind), Some(code)) = (answer.get(4..6), answer.get(16..20).filter(|_| received >= 20)) else {
        return Err(Errno::IO);
    };
    let kind = u16::read_from_bytes(kind).unwrap_or(0);
    let code = i32::read_from_bytes(code).unwrap_or(-libc::EIO);
    match (kind, code) {
        (ERROR, 0) => Ok(()),
        (ERROR, code) => Err(Errno::from_raw_os_error(-code)),
        _ => Err(Errno::IO),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::super::device::moving;
    use super::*;

    #[test]
    fn only_root_may_leave_a_netkit_in_the_namespace_of_the_steward() {
        let asked_by = |uid| {
            let (mut lessee, steward) = UnixStream::pair().expect("a pair");
            lessee.write_all(&[0]).expect("room");
            // There is no interface of that index.
            let mut message = moving(i32::MAX.cast_unsigned(), "x").expect("a name");
            let moved = settle(steward.as_fd(), uid, &mut message);
            moved.map_err(|(step, errno)| (step as u32, errno))
        };
        let refused = Err((Step::Namespace as u32, NO_NAMESPACE));
        assert_eq!(asked_by(1), refused);
        let by_root = asked_by(0);
        assert!(by_root.is_err_and(|(step, _)| step == Step::Netkit as u32));
    }
}
