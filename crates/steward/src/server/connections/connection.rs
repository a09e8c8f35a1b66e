//! One lessee's connection. Nothing here blocks.
//!
//! A lessee is not trusted. It can send anything at any rate, not read, or die at any moment. So:
//!  - a message is read whole into a buffer that is longer than any message. One that is truncated, empty, or carries
//!    descriptors where none are allowed ends the connection. The steward gives recvmsg(2) no room for descriptors, so
//!    that it never has to close one: closing a stranger's descriptor may block forever. Only a connection with a
//!    lease may send descriptors; a child receives them (`job`);
//!  - at most one answer is stored. No further request is read until it is sent, or while a job runs. The send buffer
//!    is small, so that few descriptors are in flight;
//!  - requests are read at a limited rate, one of each user per round, so that all users get their turn;
//!  - a change of the interface is a flag, not a queue: a notification has the state at the time of sending.

use std::collections::BTreeMap;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use program::descriptors;
use program::rate::{Bucket, Rate};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, RecvMsg, ReturnFlags, SendFlags, recvmsg, sockopt};

use zerocopy::FromBytes;

use crate::server::job::Pending;
use crate::sys;
use program::peer::{self, Credentials};
use steward_protocol::{
    Answer, Head, HintRequest, MESSAGE_MAX, Malformed, Reason, Refusal, Request, Token, Wanted,
};

/// Send buffer, bytes as SO_SNDBUF counts them: some twenty answers, each with at most
/// [`TAP_QUEUES_MAX`](steward_protocol::TAP_QUEUES_MAX) descriptors.
const SEND_BUFFER: usize = 16 << 10;
/// Rate of a lessee's requests: restarting the lanes of 128 queues takes 384 requests.
const REQUESTS: Rate = Rate {
    burst: 512,
    each: Duration::from_millis(1),
};

/// Error text if a socket cannot be handed over.
const TOO_MANY_ON_THEIR_WAY: &str = "more descriptors are on their way between processes of the steward's user than it \
                                     may have open: raise LimitNOFILE of the steward";

/// The queues that a connection has.
#[derive(Debug, Clone)]
pub struct Held {
    /// Number of the interface in the server's table.
    pub interface: u64,
    /// The request, which was granted.
    pub wanted: Wanted,
    /// The policy's rule that it is charged to.
    pub rule: usize,
    /// The hints that it requests for its frames.
    pub hint_request: HintRequest,
}

impl Held {
    /// Checks that the lease has this queue.
    ///
    /// # Errors
    /// It has not.
    pub fn check(&self, queue: u32) -> Result<u32, Refusal> {
        let queues = self.wanted.range();
        if queues.contains(&queue) {
            return Ok(queue);
        }
        let (first, last) = (queues.start, queues.end - 1);
        Reason::Lease.refuse(format!(
            "queue {queue} is not of this lease, which has queues {first} to {last}"
        ))
    }
}

/// The reply to a request.
pub struct Reply {
    pub(crate) answer: Answer,
    /// Descriptors for the lessee: a socket, a map, or the queues of a tap.
    pub(crate) files: Vec<OwnedFd>,
}

impl Reply {
    /// An answer with descriptors.
    #[must_use]
    pub fn with(answer: Answer, files: Vec<OwnedFd>) -> Self {
        Self { answer, files }
    }
}

impl From<Answer> for Reply {
    fn from(answer: Answer) -> Self {
        Self::with(answer, Vec::new())
    }
}

/// A reply that is to be sent.
#[derive(Debug)]
struct Unsent {
    serial: u32,
    bytes: Vec<u8>,
    files: Vec<OwnedFd>,
}

/// The poll events of interest of a connection.
pub(crate) struct Interest {
    pub(crate) events: PollFlags,
    /// When to compute this again, even if no event occurs.
    pub(crate) wake: Option<Instant>,
}

/// The process that executes an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// The steward itself, at once.
    Steward,
    /// A child of the steward: it may take long.
    Child,
    /// A child, which also receives the descriptors that the message carries: the steward never has them.
    ChildWithFiles,
}

/// The result of reading from a connection.
#[derive(Debug)]
pub(crate) enum Incoming {
    Nothing,
    /// Serial number, request, and who serves it. The message of a request for a child stays in the socket.
    Request(u32, Request, By),
    Broken(Malformed),
    End,
}

#[derive(Debug)]
pub(crate) struct Connection {
    socket: OwnedFd,
    pub(crate) peer: Arc<Credentials>,
    pub(crate) held: Option<Held>,
    /// The rule that a lease of the part is charged to, which it has instead.
    pub(crate) by_part: Option<usize>,
    /// The policy's rule that its connection is counted under; `None`: no rule names its user, which is root.
    pub(crate) rule: Option<usize>,
    /// Since when it has no lease.
    pub(crate) since: Instant,
    /// By which the lessee may resume its lease with the next steward.
    pub(crate) token: Option<Token>,
    /// Facts changed, and the lessee has not been notified.
    pub(crate) dirty: bool,
    /// The hints that the lessee requested; `None`: it has sent no `Hints` request.
    pub(crate) hint_request: Option<HintRequest>,
    /// The hints changed, and the lessee has not been notified.
    pub(crate) other_hints: bool,
    /// Stations behind the bridge of its interface have changed.
    pub(crate) other_behind: bool,
    /// The peer can send descriptors, or could do so before.
    pub(crate) may_have_files: bool,
    /// The job that runs for it.
    pub(crate) pending: Option<Pending>,
    /// Its next message needs a job, and its user or rule has as many jobs as allowed.
    pub(crate) waits: bool,
    /// An answer that did not fit into the send buffer.
    unsent: Option<Unsent>,
    requests: Bucket,
}

impl Connection {
    /// Takes over an accepted, non-blocking connection.
    pub(crate) fn new(socket: OwnedFd) -> io::Result<Self> {
        sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER)?;
        Ok(Self {
            peer: Arc::new(peer::credentials(socket.as_fd())?),
            may_have_files: sys::lets_files(socket.as_fd()),
            socket,
            held: None,
            by_part: None,
            rule: None,
            since: Instant::now(),
            token: None,
            dirty: false,
            hint_request: None,
            other_hints: false,
            other_behind: false,
            pending: None,
            waits: false,
            unsent: None,
            requests: Bucket::full(REQUESTS, Instant::now()),
        })
    }

    /// The rule that its lease is charged to.
    pub(crate) fn charged(&self) -> Option<usize> {
        self.held.as_ref().map(|held| held.rule).or(self.by_part)
    }

    /// Whether it has a lease, of either kind.
    pub(crate) fn has_lease(&self) -> bool {
        self.held.is_some() || self.by_part.is_some()
    }

    /// Stores the lease, and lets the peer send descriptors from now on.
    pub(crate) fn hold(&mut self, held: Held) {
        self.held = Some(held);
        self.let_files();
    }

    /// The same, for a lease of the part.
    pub(crate) fn hold_by_part(&mut self, rule: usize) {
        self.by_part = Some(rule);
        self.let_files();
    }

    fn let_files(&mut self) {
        if !self.may_have_files {
            let _ = sys::let_files(self.socket.as_fd(), true);
            self.may_have_files = true;
        }
    }

    pub(crate) fn interest(&mut self, now: Instant) -> Interest {
        self.requests.refill(REQUESTS, now);
        let events = match self.has_unsent() {
            true => PollFlags::OUT,
            false if self.is_busy() || self.requests.left == 0 => PollFlags::empty(),
            false => PollFlags::IN,
        };
        // Wake for a few requests at a time, not for each.
        let spent = self.unsent.is_none() && self.requests.left == 0;
        let wake = spent.then(|| now + Duration::from_millis(20));
        Interest { events, wake }
    }

    /// Reads the next message, if there is one. The message of a request for a child stays in the socket.
    pub(crate) fn receive(&mut self, by: fn(&Request) -> By) -> Incoming {
        let mut bytes = vec![0; MESSAGE_MAX + 1];
        let received = match self.look_at(&mut bytes, RecvFlags::PEEK) {
            Err(Errno::AGAIN | Errno::INTR) => return Incoming::Nothing,
            Err(_) => return Incoming::End,
            Ok(received) => received,
        };
        self.requests.left = self.requests.left.saturating_sub(1);
        // End of the connection, or an empty message, which is not allowed.
        if received.bytes == 0 {
            return Incoming::End;
        }
        let is_long = received.flags.contains(ReturnFlags::TRUNC) || received.bytes > MESSAGE_MAX;
        bytes.truncate(received.bytes);
        let decoded = match is_long {
            true => Err(Malformed::Long),
            false => Request::decode(&bytes),
        };
        let has_files = received.flags.contains(ReturnFlags::CTRUNC);
        match decoded {
            Ok((_, request)) if has_files && !(self.has_lease() && by(&request) == By::ChildWithFiles) => {
                Incoming::Broken(Malformed::Descriptors)
            }
            Ok((serial, request)) => {
                let by = by(&request);
                if by == By::Steward {
                    self.discard();
                }
                Incoming::Request(serial, request, by)
            }
            Err(malformed) => {
                if !has_files {
                    self.discard();
                }
                Incoming::Broken(malformed)
            }
        }
    }

    fn look_at(&self, bytes: &mut [u8], flags: RecvFlags) -> Result<RecvMsg, Errno> {
        let mut control = RecvAncillaryBuffer::default();
        let flags = flags | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        recvmsg(&self.socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)
    }

    /// Removes the next message, which must carry no descriptors: closing a file's last one may block on its owner.
    ///
    /// If a connection is closed with unread messages, its peer gets ECONNRESET (`unix_release_sock`,
    /// net/unix/af_unix.c) instead of the message that says why it was closed.
    pub(crate) fn discard(&self) {
        // `receive` has peeked at it.
        let _ = self.look_at(&mut [0], RecvFlags::empty());
    }

    /// Whether the next message in the socket is still this request.
    pub(crate) fn has_request(&self, serial: u32) -> bool {
        let mut head = [0; size_of::<Head>()];
        let is_same = |head: Head| head.serial == serial;
        self.look_at(&mut head, RecvFlags::PEEK).is_ok() && Head::read_from_bytes(&head).is_ok_and(is_same)
    }

    /// Sends a reply, or stores it until it can be sent; none may be stored. False: the connection is over.
    pub(crate) fn answer(&mut self, serial: u32, reply: Reply) -> bool {
        self.unsent = Some(Unsent {
            serial,
            bytes: reply.answer.encode(serial),
            files: reply.files,
        });
        self.flush()
    }

    /// Sends the stored reply, if it can be sent now. False: the connection is over.
    pub(crate) fn flush(&mut self) -> bool {
        let Some(unsent) = &self.unsent else {
            return true;
        };
        let borrowed: Vec<BorrowedFd<'_>> = unsent.files.iter().map(AsFd::as_fd).collect();
        let sent = descriptors::send(&self.socket, &unsent.bytes, &borrowed, SendFlags::DONTWAIT);
        match sent.map_err(|error| Errno::from_io_error(&error)) {
            Err(Some(Errno::AGAIN | Errno::NOBUFS)) => true,
            // Counted over all processes of our user (too_many_unix_fds, net/core/scm.c): this lessee may not be the
            // cause.
            Err(Some(Errno::TOOMANYREFS)) => {
                let refusal = Reason::Kernel.because(TOO_MANY_ON_THEIR_WAY);
                let serial = unsent.serial;
                self.answer(serial, Answer::Refused(refusal).into())
            }
            Err(_) => false,
            Ok(()) => {
                self.unsent = None;
                true
            }
        }
    }

    /// Whether an answer waits to be sent.
    pub(crate) fn has_unsent(&self) -> bool {
        self.unsent.is_some()
    }

    /// Whether its next message is not read for now.
    pub(crate) fn is_busy(&self) -> bool {
        self.has_unsent() || self.pending.is_some() || self.waits
    }

    /// Sends the reason why the connection ends, if no answer waits to be sent.
    pub(crate) fn refuse(&mut self, refusal: Refusal) {
        if self.unsent.is_none() {
            let _ = self.answer(0, Answer::Refused(refusal).into());
        }
    }

    /// Its socket, to be closed.
    pub(crate) fn into_socket(self) -> OwnedFd {
        self.socket
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Connections with such leases.
pub(crate) fn lessees(
    connections: &mut BTreeMap<u64, Connection>,
    is_such: impl Fn(&Held) -> bool,
) -> impl Iterator<Item = &mut Connection> {
    let has = move |other: &&mut Connection| other.held.as_ref().is_some_and(&is_such);
    connections.values_mut().filter(has)
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, send, socketpair};

    use super::*;

    fn pair() -> (OwnedFd, Connection) {
        let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
        let (lessee, ours) = socketpair(family, SocketType::SEQPACKET, flags, None).expect("two sockets");
        (lessee, Connection::new(ours).expect("a connection"))
    }

    fn by_child(_: &Request) -> By {
        By::ChildWithFiles
    }

    #[test]
    fn requests_are_read_at_a_limited_rate_and_while_nothing_else_is_to_be_done() {
        let (lessee, mut connection) = pair();
        let now = Instant::now();
        let interest = |connection: &mut Connection| {
            let Interest { events, wake } = connection.interest(now);
            (events, wake.map(|at| at - now))
        };
        assert_eq!(interest(&mut connection), (PollFlags::IN, None));
        connection.waits = true;
        assert_eq!(interest(&mut connection), (PollFlags::empty(), None));
        assert!(connection.is_busy());
        connection.waits = false;
        connection.requests.left = 0;
        let pause = Some(Duration::from_millis(20));
        assert_eq!(interest(&mut connection), (PollFlags::empty(), pause));
        while connection.answer(1, Answer::Done.into()) && !connection.has_unsent() {}
        assert_eq!(interest(&mut connection), (PollFlags::OUT, None));
        // Sent when there is room, unless the lessee is gone.
        assert!(connection.flush() && connection.has_unsent() && connection.is_busy());
        recv(&lessee, &mut [0; 64], RecvFlags::DONTWAIT).expect("an answer");
        assert!(connection.flush() && !connection.has_unsent() && !connection.is_busy());
        while connection.answer(1, Answer::Done.into()) && !connection.has_unsent() {}
        drop(lessee);
        assert!(!connection.flush());
    }

    #[test]
    fn message_that_is_too_long_or_has_files_that_are_not_allowed_is_malformed() {
        let (lessee, mut connection) = pair();
        let none = |connection: &mut Connection| matches!(connection.receive(by_child), Incoming::Nothing);
        assert!(none(&mut connection));
        send(&lessee, &[0; MESSAGE_MAX], SendFlags::empty()).expect("room");
        let received = connection.receive(by_child);
        assert!(
            !matches!(received, Incoming::Broken(Malformed::Long)),
            "{received:?}"
        );
        for len in [MESSAGE_MAX + 1, MESSAGE_MAX + 9] {
            send(&lessee, &vec![0; len], SendFlags::empty()).expect("room");
            let received = connection.receive(by_child);
            assert!(
                matches!(received, Incoming::Broken(Malformed::Long)),
                "{received:?}"
            );
            assert!(none(&mut connection), "it was read");
        }
        let request = Request::Facts.encode(7);
        let with_file = || descriptors::send(&lessee, &request, &[lessee.as_fd()], SendFlags::empty());
        for (rule, by) in [(None, by_child as fn(&Request) -> By), (Some(3), |_| By::Child)] {
            connection.by_part = rule;
            assert_eq!(
                (connection.charged(), connection.has_lease()),
                (rule, rule.is_some())
            );
            with_file().expect("room");
            let received = connection.receive(by);
            assert!(
                matches!(received, Incoming::Broken(Malformed::Descriptors)),
                "{received:?}"
            );
            connection.discard();
        }
        with_file().expect("room");
        let received = connection.receive(by_child);
        assert!(
            matches!(received, Incoming::Request(7, Request::Facts, By::ChildWithFiles)),
            "{received:?}"
        );
        assert!(
            connection.has_request(7) && !connection.has_request(8),
            "a child reads it"
        );
        connection.discard();
        assert!(!connection.has_request(7));
    }
}
