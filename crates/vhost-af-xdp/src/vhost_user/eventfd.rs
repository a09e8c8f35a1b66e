//! Kick, call and error descriptors of a VMM: which are accepted.
//!
//! The daemon reads kicks, and writes calls and errors. A VMM may clear O_NONBLOCK, so that a write blocks. The
//! watchdog interrupts such a write (`supervision/interrupt.rs`), but only if its wait is interruptible:
//!
//! - eventfd: accepted. The wait in write(2) is interruptible (`eventfd_write`, fs/eventfd.c).
//! - Unix stream socket: accepted for calls and errors. User-mode Linux sends one end of a socket pair, because an
//!   eventfd raises no SIGIO (`vu_setup_vq_call_fd`, arch/um/drivers/virtio_uml.c; `os_pipe`, arch/um/os-Linux/file.c,
//!   is a socketpair(2)). Its reader cannot hold up its writer (`unix_stream_sendmsg` takes no lock in which the reader
//!   copies). It is written with MSG_DONTWAIT: a full socket returns EAGAIN, which means that calls are pending.
//! - pipe: its reader copies under the lock that the writer takes (`pipe_read` and `pipe_write`, fs/pipe.c). A VMM that
//!   reads into a mapping of its own FUSE file holds a worker for as long as it likes, and no signal helps. So a pipe
//!   is accepted from VMMs whose files are trusted only (memory-files=any).

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use anyhow::{Context, bail};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::ioctl_fionread;
use rustix::net::{AddressFamily, Shutdown, SocketType, getpeername, shutdown, sockopt};

use crate::config::FileKinds;

/// Takes over a kick, call or error descriptor of a VMM, if its kind of file is allowed, and makes it non-blocking: a
/// worker writes to call descriptors, and must not hang on one that the VMM filled up.
pub(crate) fn take(
    index: u32,
    role: &'static str,
    fd: Option<OwnedFd>,
    kinds: FileKinds,
) -> anyhow::Result<Option<OwnedFd>> {
    let Some(fd) = fd else { return Ok(None) };
    let examine = || format!("vring {index}: cannot examine the {role} descriptor");
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).with_context(examine)?;
    if link.as_os_str() != "anon_inode:[eventfd]" {
        if role == "kick" {
            bail!("vring {index}: the {role} descriptor is not an eventfd");
        }
        if link.to_string_lossy().starts_with("pipe:[") {
            if kinds != FileKinds::Any {
                bail!(
                    "vring {index}: the {role} descriptor is a pipe, whose reader can hold up the daemon: use an eventfd \
                     or a Unix stream socket, or, if the VMM is trusted, set memory-files=any"
                );
            }
        } else if is_stream(&fd) {
            if !ends_reading(&fd) {
                bail!(
                    "vring {index}: the {role} socket holds bytes of its peer, which the daemon never reads"
                );
            }
        } else {
            bail!("vring {index}: the {role} descriptor is neither an eventfd nor a Unix stream socket");
        }
    }
    let flags = fcntl_getfl(fd.as_fd()).with_context(examine)?;
    fcntl_setfl(fd.as_fd(), flags | OFlags::NONBLOCK).with_context(examine)?;
    Ok(Some(fd))
}

/// Whether it is a connected Unix stream socket. A socket that listens, or may do so later, queues connections with
/// descriptors in them, which [`ends_reading`] does not see.
pub(super) fn is_stream(fd: &OwnedFd) -> bool {
    sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX)
        && sockopt::socket_type(fd) == Ok(SocketType::STREAM)
        && getpeername(fd).is_ok()
}

/// Shuts down the receiving direction of a stream socket; returns whether it is empty. Descriptors that are queued in
/// it would be closed with it, by a thread that others wait for, and closing one may take long (`files.rs`). Receiving
/// them first is no way out: a reader waits for any other reader (`iolock` in `unix_stream_read_generic`), and the VMM
/// may read into a page that its file system never provides.
pub(super) fn ends_reading(socket: &OwnedFd) -> bool {
    shutdown(socket, Shutdown::Read).is_ok() && ioctl_fionread(socket) == Ok(0)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
    use testkit::assert_has;

    use super::*;

    fn call(fd: impl Into<OwnedFd>, kinds: FileKinds) -> anyhow::Result<Option<OwnedFd>> {
        take(1, "call", Some(fd.into()), kinds)
    }

    #[test]
    fn pipe_is_a_call_descriptor_of_a_trusted_vmm_only() {
        let (_reader, writer) = std::io::pipe().expect("pipe");
        let again = writer.try_clone().expect("a descriptor");
        let error = call(writer, FileKinds::Shared).expect_err("a pipe");
        assert_has(&error.to_string(), &["memory-files=any"]);
        let taken = call(again, FileKinds::Any).expect("accepted").expect("present");
        // A full pipe returns an error, and does not wait.
        let full = loop {
            if let Err(errno) = rustix::io::write(&taken, &1u64.to_ne_bytes()) {
                break errno;
            }
        };
        assert_eq!(full, rustix::io::Errno::AGAIN);
    }

    #[test]
    fn socket_is_a_call_descriptor_and_no_kick() {
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        let kick = OwnedFd::from(ours.try_clone().expect("a descriptor"));
        let error = take(1, "kick", Some(kick), FileKinds::Any).expect_err("not an eventfd");
        assert_has(&error.to_string(), &["kick descriptor is not an eventfd"]);
        let taken = call(ours, FileKinds::Shared).expect("accepted").expect("present");
        rustix::io::write(&taken, &1u64.to_ne_bytes()).expect("written");
        let mut bytes = [0; 8];
        theirs.read_exact(&mut bytes).expect("8 bytes");
        assert_eq!(u64::from_ne_bytes(bytes), 1);
        // The VMM can send nothing to the daemon.
        assert!(rustix::io::write(&theirs, &[0]).is_err());
        while rustix::io::write(&taken, &1u64.to_ne_bytes()).is_ok() {}
        assert_eq!(
            rustix::io::write(&taken, &1u64.to_ne_bytes()),
            Err(rustix::io::Errno::AGAIN)
        );
        drop(theirs);
        assert_eq!(
            rustix::io::write(&taken, &1u64.to_ne_bytes()),
            Err(rustix::io::Errno::PIPE)
        );
    }

    #[test]
    fn socket_that_holds_bytes_is_no_call_descriptor() {
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        theirs.write_all(&[1]).expect("written");
        let error = call(ours, FileKinds::Any).expect_err("not empty");
        assert_has(&error.to_string(), &["never reads"]);
    }

    #[test]
    fn datagram_and_listening_socket_and_file_are_no_call_descriptors() {
        let (one, _other) = std::os::unix::net::UnixDatagram::pair().expect("sockets");
        let name = SocketAddr::from_abstract_name(format!("vax-listens-{}", std::process::id()));
        let listener = UnixListener::bind_addr(&name.expect("a name")).expect("a socket");
        for fd in [
            OwnedFd::from(one),
            OwnedFd::from(listener),
            File::open("/dev/null").expect("there is one").into(),
        ] {
            let error = call(fd, FileKinds::Any).expect_err("neither");
            assert_has(&error.to_string(), &["neither an eventfd nor"]);
        }
    }

    #[test]
    fn blocking_eventfd_is_made_non_blocking() {
        let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).expect("eventfd");
        let taken = take(0, "kick", Some(fd), FileKinds::Shared)
            .expect("accepted")
            .expect("present");
        assert!(fcntl_getfl(&taken).expect("flags").contains(OFlags::NONBLOCK));
    }
}
