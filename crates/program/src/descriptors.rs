//! Messages on Unix sockets that carry descriptors (SCM_RIGHTS), and waiting for one descriptor.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Most descriptors of a message: SCM_MAX_FD of the kernel.
const MOST: usize = 253;

/// A message that was received.
#[derive(Debug)]
pub struct Received {
    /// Bytes that were received; 0 at the end of the connection.
    pub bytes: usize,
    /// The descriptors that it carried.
    pub descriptors: Vec<OwnedFd>,
    /// It was longer than the buffer.
    pub is_truncated: bool,
    /// It carried more descriptors, for which this process had no room.
    pub lacks_descriptors: bool,
}

/// Waits until a descriptor is readable or at its end; returns false at the deadline. Without one it waits for ever.
///
/// # Errors
/// An error of the kernel.
pub fn await_readable(fd: impl AsFd, until: Option<Instant>) -> io::Result<bool> {
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left
            .map(Timespec::try_from)
            .transpose()
            .map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], left.as_ref()) {
            Err(Errno::INTR) => {}
            ready => return Ok(ready? > 0),
        }
    }
}

/// Sends `bytes` with `descriptors`. A closed connection raises no SIGPIPE.
///
/// # Errors
/// The kernel's, or more descriptors than a message can have.
pub fn send(
    socket: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = flags | SendFlags::NOSIGNAL;
    retry_on_intr(|| sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, flags))?;
    Ok(())
}

/// Receives a message into `bytes`.
///
/// # Errors
/// An error of the kernel.
pub fn receive(socket: impl AsFd, bytes: &mut [u8], flags: RecvFlags) -> rustix::io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut into = [IoSliceMut::new(bytes)];
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let message = retry_on_intr(|| recvmsg(&socket, &mut into, &mut control, flags))?;
    let mut descriptors = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            descriptors.extend(rights);
        }
    }
    Ok(Received {
        bytes: message.bytes,
        descriptors,
        is_truncated: message.flags.contains(ReturnFlags::TRUNC),
        lacks_descriptors: message.flags.contains(ReturnFlags::CTRUNC),
    })
}
