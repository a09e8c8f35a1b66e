//! The io_uring of a receiver: its set-up, and the requests that are made of it.
//!
//! Each request has a tag with its kind and its slot ([`Tag`]), which its completions return. For requests that name
//! memory, `# Safety` defines how long that must live.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use io_uring::types::{CancelBuilder, Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};

use crate::config::Config;
use crate::error::OpenError;

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Receive,
    Send,
    Accept,
    Bell,
    /// Cancels a receive.
    CancelReceive,
    /// Cancels a send.
    CancelSend,
    /// Cancels all accepts of a listener.
    CancelAccepts,
}

impl Kind {
    /// In the order of declaration, as [`Tag::from_word`] expects.
    const ALL: [Self; 7] = [
        Self::Receive,
        Self::Send,
        Self::Accept,
        Self::Bell,
        Self::CancelReceive,
        Self::CancelSend,
        Self::CancelAccepts,
    ];
}

/// The kind of a request, and the slot that it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag {
    pub(crate) kind: Kind,
    pub(crate) slot: u32,
}

impl Tag {
    /// The kind, from 1 on, in the upper half, and the slot in the lower one.
    pub(crate) fn to_word(self) -> u64 {
        (1 + self.kind as u64) << 32 | u64::from(self.slot)
    }

    pub(crate) fn from_word(word: u64) -> Option<Self> {
        let number = usize::try_from(word >> 32).ok()?;
        let kind = *Kind::ALL.get(number.checked_sub(1)?)?;
        let slot = word as u32;
        Some(Self { kind, slot })
    }
}

/// A completion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    pub(crate) tag: Tag,
    pub(crate) result: i32,
    /// More completions of the request follow.
    pub(crate) more: bool,
    /// The provided buffer that was filled.
    pub(crate) buffer: Option<u16>,
    /// zcrx: the offset in the area, with the area's number in the upper bits.
    pub(crate) offset: u64,
}

/// An io_uring with completions of 32 bytes.
pub(crate) struct Ring(IoUring<squeue::Entry, cqueue::Entry32>);

impl Ring {
    /// With `dormant` no requests can be made until [`enable`](Self::enable), and every process that has the
    /// descriptor can register something.
    pub(crate) fn new(config: &Config, dormant: bool) -> Result<Self, OpenError> {
        let mut builder = IoUring::<squeue::Entry, cqueue::Entry32>::builder();
        builder
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_submit_all()
            .setup_clamp()
            .setup_cqsize(config.completions);
        if dormant {
            builder.setup_r_disabled();
        }
        let ring = builder.build(config.requests).map_err(|source| OpenError::Ring {
            requests: config.requests,
            completions: config.completions,
            source,
        })?;
        Ok(Self(ring))
    }

    pub(crate) fn enable(&self) -> io::Result<()> {
        self.0.submitter().register_enable_rings()
    }

    /// Queues a request; if there is no room, the queued requests are submitted first.
    ///
    /// # Safety
    /// Memory that the request names must live, and not be used otherwise, until its last completion or the end of the
    /// ring.
    unsafe fn push(&mut self, entry: squeue::Entry, kind: Kind, slot: u32) -> io::Result<()> {
        let entry = entry.user_data(Tag { kind, slot }.to_word());
        // SAFETY: the caller's promise.
        while unsafe { self.0.submission().push(&entry) }.is_err() {
            match self.0.submit() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => {
                    result?;
                }
            }
        }
        Ok(())
    }

    pub(crate) fn receive_zcrx(
        &mut self,
        socket: BorrowedFd<'_>,
        instance: u32,
        slot: u32,
    ) -> io::Result<()> {
        let entry = opcode::RecvZc::new(Fd(socket.as_raw_fd()), 0)
            .ifq(instance)
            .build();
        // SAFETY: it names no memory of ours but the registered area's.
        unsafe { self.push(entry, Kind::Receive, slot) }
    }

    pub(crate) fn receive_provided(&mut self, socket: BorrowedFd<'_>, slot: u32) -> io::Result<()> {
        let entry = opcode::RecvMulti::new(Fd(socket.as_raw_fd()), 0).build();
        // SAFETY: it names no memory of ours but provided buffers.
        unsafe { self.push(entry, Kind::Receive, slot) }
    }

    /// Fills `len` bytes, if the peer sends so many.
    ///
    /// # Safety
    /// The bytes must live, and not be used otherwise, until the completion or the end of the ring.
    pub(crate) unsafe fn receive_block(
        &mut self,
        socket: BorrowedFd<'_>,
        at: *mut u8,
        len: u32,
        slot: u32,
    ) -> io::Result<()> {
        let entry = opcode::Recv::new(Fd(socket.as_raw_fd()), at, len)
            .flags(libc::MSG_WAITALL)
            .build();
        // SAFETY: the caller's promise.
        unsafe { self.push(entry, Kind::Receive, slot) }
    }

    /// Sends bytes.
    ///
    /// # Safety
    /// The bytes must live, and not change, until the completion or the end of the ring.
    pub(crate) unsafe fn send(&mut self, socket: BorrowedFd<'_>, bytes: &[u8], slot: u32) -> io::Result<()> {
        let len = u32::try_from(bytes.len()).unwrap_or(1 << 30);
        let entry = opcode::Send::new(Fd(socket.as_raw_fd()), bytes.as_ptr(), len)
            .flags(libc::MSG_NOSIGNAL | libc::MSG_WAITALL)
            .build();
        // SAFETY: the caller's promise.
        unsafe { self.push(entry, Kind::Send, slot) }
    }

    /// Sends what a message's vectors name.
    ///
    /// # Safety
    /// The message, its vectors and their bytes must live, and not change, until the completion or the end of the
    /// ring.
    pub(crate) unsafe fn send_message(
        &mut self,
        socket: BorrowedFd<'_>,
        message: *const libc::msghdr,
        slot: u32,
    ) -> io::Result<()> {
        let flags = (libc::MSG_NOSIGNAL | libc::MSG_WAITALL).cast_unsigned();
        let entry = opcode::SendMsg::new(Fd(socket.as_raw_fd()), message)
            .flags(flags)
            .build();
        // SAFETY: the caller's promise.
        unsafe { self.push(entry, Kind::Send, slot) }
    }

    pub(crate) fn accept(&mut self, listener: BorrowedFd<'_>, slot: u32) -> io::Result<()> {
        let nobody = std::ptr::null_mut();
        let entry = opcode::Accept::new(Fd(listener.as_raw_fd()), nobody, nobody.cast())
            .flags(libc::SOCK_CLOEXEC)
            .build();
        // SAFETY: it names no memory.
        unsafe { self.push(entry, Kind::Accept, slot) }
    }

    pub(crate) fn watch(&mut self, bell: BorrowedFd<'_>) -> io::Result<()> {
        let entry = opcode::PollAdd::new(Fd(bell.as_raw_fd()), libc::POLLIN.cast_unsigned().into()).build();
        // SAFETY: it names no memory.
        unsafe { self.push(entry, Kind::Bell, 0) }
    }

    /// Cancels a connection's receive; its last completion follows.
    pub(crate) fn cancel_receive(&mut self, slot: u32) -> io::Result<()> {
        self.cancel(Kind::Receive, Kind::CancelReceive, slot)
    }

    /// Cancels a connection's send; its completion follows.
    pub(crate) fn cancel_send(&mut self, slot: u32) -> io::Result<()> {
        self.cancel(Kind::Send, Kind::CancelSend, slot)
    }

    /// Cancels a listener's accepts; their completions follow.
    pub(crate) fn cancel_accepts(&mut self, slot: u32) -> io::Result<()> {
        let tag = Tag {
            kind: Kind::Accept,
            slot,
        };
        let entry = opcode::AsyncCancel2::new(CancelBuilder::user_data(tag.to_word()).all()).build();
        // SAFETY: it names no memory.
        unsafe { self.push(entry, Kind::CancelAccepts, slot) }
    }

    fn cancel(&mut self, what: Kind, kind: Kind, slot: u32) -> io::Result<()> {
        let entry = opcode::AsyncCancel::new(Tag { kind: what, slot }.to_word()).build();
        // SAFETY: it names no memory.
        unsafe { self.push(entry, kind, slot) }
    }

    /// Ends all requests, including those that are only queued.
    pub(crate) fn cancel_all(&mut self) {
        // Submits queued requests first: after the cancellation, the next call would start them.
        let _ = self.wait(Some(Duration::ZERO));
        let submitter = self.0.submitter();
        let _ = submitter.register_sync_cancel(None, CancelBuilder::any());
        // Cancelled requests complete in a call of this thread.
        let _ = self.wait(Some(Duration::ZERO));
    }

    /// Hands queued requests to the kernel, and waits until something is completed or the time is over.
    pub(crate) fn wait(&mut self, limit: Option<Duration>) -> io::Result<()> {
        let result = match limit {
            None => self.0.submit_and_wait(1),
            Some(limit) => {
                let time = Timespec::from(limit);
                self.0
                    .submitter()
                    .submit_with_args(1, &SubmitArgs::new().timespec(&time))
            }
        };
        match result {
            Ok(_) => Ok(()),
            // Timed out, interrupted, or completions must be read first.
            Err(error) => match error.raw_os_error() {
                Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => Ok(()),
                _ => Err(error),
            },
        }
    }

    /// Reads what is completed.
    pub(crate) fn completed(&mut self, mut each: impl FnMut(Completion)) {
        for entry in self.0.completion() {
            let Some(tag) = Tag::from_word(entry.user_data()) else {
                continue;
            };
            each(Completion {
                tag,
                result: entry.result(),
                more: cqueue::more(entry.flags()),
                buffer: cqueue::buffer_select(entry.flags()),
                offset: entry.big_cqe()[0],
            });
        }
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_come_back_as_they_were() {
        for kind in Kind::ALL {
            for slot in [0, 7, u32::MAX] {
                let tag = Tag { kind, slot };
                assert_eq!(Tag::from_word(tag.to_word()), Some(tag));
            }
        }
        assert_eq!(Tag::from_word(0), None);
        assert_eq!(Tag::from_word(u64::MAX), None);
    }
}
