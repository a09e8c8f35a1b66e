//! One holder's connection: bytes in, bytes out, nothing that waits.
//!
//! A holder is not trusted. It can send anything at any rate, not read, or die at any moment. So:
//!  - a message is read whole into a buffer that is longer than any; one that is cut, empty or carries descriptors
//!    ends the connection (no room is given for descriptors, so that the kernel closes them by itself);
//!  - at most one answer is stored; until it is sent no further request is read. The send buffer is small, so that few
//!    sockets are on their way;
//!  - requests are read at a limited rate, one of each user a round, so that all users get their turn;
//!  - a change of the interface is a flag, not a queue: what is told is the state at the time of sending.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg, sockopt,
};

use super::limits::{Bucket, Rate};
use crate::peer::{self, Credentials};
use crate::protocol::{Answer, MESSAGE_MAX, Malformed, QUEUES_MAX, Reason, Refusal, Wanted};
use crate::sys;

/// Send buffer, bytes as SO_SNDBUF counts them: some twenty answers.
const SEND_BUFFER: usize = 16 << 10;
/// Requests that a holder may send: restarting the lanes of 128 queues takes 384.
const REQUESTS: Rate = Rate {
    burst: 512,
    each: Duration::from_millis(1),
};

/// Why a socket cannot be handed over.
const TOO_MANY_ON_THEIR_WAY: &str = "more descriptors are on their way between processes of the steward's user than it \
                                     may have open: raise LimitNOFILE of the steward";

/// The queues that a connection has.
#[derive(Debug, Clone)]
pub(super) struct Held {
    /// Number of the interface in the server's table.
    pub(super) interface: u64,
    /// What was asked for, and given.
    pub(super) wanted: Wanted,
    /// The policy's rule that it is charged to.
    pub(super) rule: usize,
}

/// What a request led to.
pub(super) struct Reply {
    pub(super) answer: Answer,
    /// Sockets that go along.
    pub(super) sockets: Vec<OwnedFd>,
}

impl From<Answer> for Reply {
    fn from(answer: Answer) -> Self {
        let sockets = Vec::new();
        Self { answer, sockets }
    }
}

/// A reply that is to be sent.
#[derive(Debug)]
struct Unsent {
    serial: u32,
    bytes: Vec<u8>,
    sockets: Vec<OwnedFd>,
}

/// What a connection is waited for.
pub(super) struct Interest {
    pub(super) events: PollFlags,
    /// When to look at it again, whatever happens.
    pub(super) wake: Option<Instant>,
}

/// What a connection had to say.
#[derive(Debug)]
pub(super) enum Incoming {
    Nothing,
    Message(Vec<u8>),
    Broken(Malformed),
    End,
}

#[derive(Debug)]
pub(super) struct Connection {
    socket: OwnedFd,
    pub(super) peer: Credentials,
    pub(super) held: Option<Held>,
    /// The policy's rule that it counts for; none: the rules do not know its user, who is root.
    pub(super) rule: Option<usize>,
    /// Since when it has no lease.
    pub(super) since: Instant,
    /// Facts changed, and the holder has not been told.
    pub(super) dirty: bool,
    /// An answer that did not fit into the send buffer.
    unsent: Option<Unsent>,
    requests: Bucket,
}

impl Connection {
    /// Takes over an accepted connection, which does not block.
    pub(super) fn new(socket: OwnedFd) -> io::Result<Self> {
        sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER)?;
        Ok(Self {
            peer: peer::credentials(socket.as_fd())?,
            socket,
            held: None,
            rule: None,
            since: Instant::now(),
            dirty: false,
            unsent: None,
            requests: Bucket::full(REQUESTS, Instant::now()),
        })
    }

    pub(super) fn interest(&mut self, now: Instant) -> Interest {
        self.requests.refill(REQUESTS, now);
        let events = match (&self.unsent, self.requests.left) {
            (Some(_), _) => PollFlags::OUT,
            (None, 0) => PollFlags::empty(),
            (None, _) => PollFlags::IN,
        };
        // A few requests at a time, so that waiting for one costs no round each.
        let wake = events.is_empty().then(|| now + Duration::from_millis(20));
        Interest { events, wake }
    }

    /// The next message, if there is one.
    pub(super) fn receive(&mut self) -> Incoming {
        let mut bytes = vec![0; MESSAGE_MAX + 1];
        let mut control = RecvAncillaryBuffer::default();
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        match recvmsg(
            &self.socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            flags,
        ) {
            Err(Errno::AGAIN | Errno::INTR) => Incoming::Nothing,
            Err(_) => Incoming::End,
            Ok(received) => {
                self.requests.left = self.requests.left.saturating_sub(1);
                if received.flags.contains(ReturnFlags::CTRUNC) {
                    return Incoming::Broken(Malformed::Descriptors);
                }
                if received.flags.contains(ReturnFlags::TRUNC) || received.bytes > MESSAGE_MAX {
                    return Incoming::Broken(Malformed::Long);
                }
                // The end, or an empty message, which is none.
                if received.bytes == 0 {
                    return Incoming::End;
                }
                bytes.truncate(received.bytes);
                Incoming::Message(bytes)
            }
        }
    }

    /// Sends a reply, or stores it until it can be sent; none may be stored. False: the connection is over.
    pub(super) fn answer(&mut self, serial: u32, reply: Reply) -> bool {
        self.unsent = Some(Unsent {
            serial,
            bytes: reply.answer.encode(serial),
            sockets: reply.sockets,
        });
        self.flush()
    }

    /// Sends the stored reply, if it can be sent now. False: the connection is over.
    pub(super) fn flush(&mut self) -> bool {
        let Some(unsent) = &self.unsent else {
            return true;
        };
        let borrowed: Vec<BorrowedFd<'_>> = unsent.sockets.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(QUEUES_MAX as usize))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
            return false;
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(&self.socket, &[IoSlice::new(&unsent.bytes)], &mut control, flags) {
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => true,
            // Of all processes of our user (too_many_unix_fds, net/core/scm.c): not this holder's doing, or not its
            // alone.
            Err(Errno::TOOMANYREFS) => {
                let refusal = Refusal::new(Reason::Kernel, TOO_MANY_ON_THEIR_WAY);
                let serial = unsent.serial;
                self.answer(serial, Answer::Refused(refusal).into())
            }
            Err(_) => false,
            Ok(_) => {
                self.unsent = None;
                true
            }
        }
    }

    /// Whether an answer waits to be sent.
    pub(super) fn has_unsent(&self) -> bool {
        self.unsent.is_some()
    }

    /// Says why the connection ends, if it can be said now.
    pub(super) fn refuse(mut self, refusal: Refusal) {
        if self.unsent.is_none() {
            let _ = self.answer(0, Answer::Refused(refusal).into());
        }
    }

    /// Raises the locked-memory limit of the process that connected.
    pub(super) fn raise_memlock(&self, bytes: u64) -> io::Result<()> {
        let gone = || io::Error::from_raw_os_error(libc::ESRCH);
        // Before Linux 6.5 there is no such descriptor; then its number has to do.
        let process = match peer::process_descriptor(self.socket.as_fd()) {
            Ok(process) => Some(process),
            Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => None,
            Err(error) => return Err(error),
        };
        // Readable once the process has ended: only then can another one have its number.
        let alive = || {
            process
                .as_ref()
                .is_none_or(|process| !is_readable(process.as_fd()))
        };
        if self.peer.pid <= 0 || !alive() {
            return Err(gone());
        }
        sys::raise_memlock(self.peer.pid, bytes)?;
        if alive() { Ok(()) } else { Err(gone()) }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn is_readable(fd: BorrowedFd<'_>) -> bool {
    use rustix::event::{PollFd, Timespec, poll};
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}
