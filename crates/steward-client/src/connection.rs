//! A connection to a steward: requests and their answers, and notifications.

use std::io::{self, ErrorKind};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use program::descriptors;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, connect};

use super::Waiting;
use super::error::LeaseError;
use program::backoff::Backoff;
use steward_protocol::{Answer, Facts, HintRequest, Hinted, MESSAGE_MAX, Malformed, Request, new_socket};

/// Pauses between attempts to reach a steward that is away: the first, and the longest, to which they double.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(320);

/// The connection to the steward, and the state received over it.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(super) socket: Option<OwnedFd>,
    pub(super) phase: Phase,
    pub(super) known: Known,
    /// Pauses between attempts to reconnect.
    pub(super) pauses: Backoff,
    /// Serial number of the last request.
    serial: u32,
    /// The requested hints; `None`: the caller does not use hints.
    pub(super) hint_request: Option<HintRequest>,
    /// Facts or hints changed, and the caller has not taken the change yet.
    pub(super) changed: bool,
    /// The lease is over.
    pub(super) over: bool,
}

/// State of a lease that is known without a request.
#[derive(Debug, Clone, Default)]
pub(super) struct Known {
    pub(super) facts: Facts,
    /// Hints before frames.
    pub(super) hinted: Option<Hinted>,
    /// How often something changed behind the bridge of the interface; it wraps.
    pub(super) behind: u32,
    /// How often the steward was away and is back.
    pub(super) returns: u32,
    /// The steward is away.
    pub(super) away: bool,
}

/// State of the connection.
#[derive(Debug, Clone, Copy)]
pub(super) enum Phase {
    /// There is no lease yet, hence nothing to resume.
    New,
    Here,
    /// There is no connection; the next attempt is due at `next`.
    Away {
        next: Instant,
    },
    /// Connected, and a request was sent to resume the lease, or before that one for hints.
    Asked {
        serial: u32,
        until: Instant,
    },
}

/// A message of a steward, with its descriptors.
pub(crate) struct Message {
    /// Serial number of the request; 0 for notifications.
    pub(super) serial: u32,
    pub(crate) answer: Answer,
    pub(super) descriptors: Vec<OwnedFd>,
}

/// The result of reading from the connection.
pub(super) enum Incoming {
    Nothing,
    Message(Message),
    /// The connection is over.
    End,
}

/// A socket connected to the steward at `path`. Connecting blocks, for at most `longest`, while the listen queue of
/// a steward that does not accept is full.
pub(super) fn connect_to(path: &Path, flags: SocketFlags, longest: Duration) -> Result<OwnedFd, LeaseError> {
    let connected = || {
        let socket = new_socket(flags)?;
        set_socket_timeout(&socket, Timeout::Send, Some(longest))?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(socket)
    };
    connected().map_err(|errno: Errno| LeaseError::Connect {
        path: path.to_owned(),
        source: errno.into(),
    })
}

impl Connection {
    /// No connection yet, for a lease with this known state.
    pub(super) fn new(known: Known) -> Self {
        Self {
            socket: None,
            phase: Phase::New,
            known,
            pauses: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE),
            serial: 0,
            hint_request: None,
            changed: false,
            over: false,
        }
    }

    /// A connection without a lease, to the steward at `path`.
    pub(crate) fn to(path: &Path, longest: Duration) -> Result<Self, LeaseError> {
        Ok(Self {
            socket: Some(connect_to(path, SocketFlags::empty(), longest)?),
            ..Self::new(Known::default())
        })
    }

    /// Sends a request, and waits for the answer; `None` if the connection is over.
    pub(crate) fn ask(
        &mut self,
        request: &Request,
        files: &[BorrowedFd<'_>],
        waiting: &Waiting,
        deadline: Instant,
    ) -> Result<Option<Message>, LeaseError> {
        let asked = self.next_serial();
        let Some(socket) = &self.socket else {
            return Ok(None);
        };
        // A stopped steward's receive queue may be full: do not block beyond the deadline.
        let sent = descriptors::send(socket, &request.encode(asked), files, SendFlags::DONTWAIT);
        match sent.map_err(|error| (error.kind(), error)) {
            // Read what the steward sent before it closed the connection.
            Ok(()) | Err((ErrorKind::BrokenPipe | ErrorKind::ConnectionReset, _)) => {}
            Err((ErrorKind::WouldBlock, _)) => return Err(LeaseError::Silent(waiting.answer)),
            Err((_, error)) => return Err(error.into()),
        }
        loop {
            let message = match self.receive()? {
                Incoming::Message(message) => message,
                Incoming::End => return Ok(None),
                Incoming::Nothing => {
                    self.wait(waiting, deadline)?;
                    continue;
                }
            };
            match (message.serial, message.answer) {
                (serial, Answer::Refused(refusal)) if serial == asked => {
                    return Err(LeaseError::Refused(refusal));
                }
                (serial, answer) if serial == asked => return Ok(Some(Message { answer, ..message })),
                // Left over from a request that timed out.
                (serial, _) if serial != 0 => {}
                (_, answer) => self.note(answer)?,
            }
        }
    }

    /// Waits for a message.
    pub(super) fn wait(&self, waiting: &Waiting, deadline: Instant) -> Result<(), LeaseError> {
        let silent = LeaseError::Silent(waiting.answer);
        let Some(socket) = &self.socket else {
            return Ok(());
        };
        let Ok(left) = Timespec::try_from(deadline.saturating_duration_since(Instant::now())) else {
            return Err(silent);
        };
        let mut fds = vec![PollFd::new(socket, PollFlags::IN)];
        fds.extend(waiting.end.as_deref().map(|end| PollFd::new(end, PollFlags::IN)));
        match poll(&mut fds, Some(&left)) {
            Ok(0) => Err(silent),
            Ok(_) if fds[1..].iter().any(|end| !end.revents().is_empty()) => Err(LeaseError::Ending),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(io::Error::from(errno).into()),
        }
    }

    /// The next message, if there is one.
    pub(super) fn receive(&self) -> Result<Incoming, LeaseError> {
        let Some(socket) = &self.socket else {
            return Ok(Incoming::End);
        };
        let mut bytes = vec![0; MESSAGE_MAX];
        let mut read = || descriptors::receive(socket, &mut bytes, RecvFlags::DONTWAIT);
        // A peer that closes with our request unread leaves this error behind, and what it said before
        // (unix_release_sock, net/unix/af_unix.c): asking again gives that.
        let mut received = match read().or_else(|errno| {
            if errno == Errno::CONNRESET {
                read()
            } else {
                Err(errno)
            }
        }) {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Incoming::Nothing),
            Err(Errno::CONNRESET) => return Ok(Incoming::End),
            Err(errno) => return Err(io::Error::from(errno).into()),
        };
        if received.bytes == 0 {
            return Ok(Incoming::End);
        }
        if received.is_truncated {
            return Err(Malformed::Long.into());
        }
        // Those that found room in our table are closed.
        if received.lacks_descriptors {
            received.descriptors.clear();
        }
        let (serial, answer) = Answer::decode(&bytes[..received.bytes])?;
        Ok(Incoming::Message(Message {
            serial,
            answer,
            descriptors: received.descriptors,
        }))
    }

    /// Stores a notification.
    pub(super) fn note(&mut self, answer: Answer) -> Result<(), LeaseError> {
        match answer {
            Answer::Changed(facts) => {
                (self.known.facts, self.changed) = (facts, true);
                Ok(())
            }
            Answer::Hinted(hinted) => {
                self.changed |= self.known.hinted.as_ref() != Some(&hinted);
                self.known.hinted = Some(hinted);
                Ok(())
            }
            Answer::Behind(_) => {
                self.known.behind = self.known.behind.wrapping_add(1);
                Ok(())
            }
            Answer::Refused(refusal) => {
                self.over = true;
                Err(LeaseError::Refused(refusal))
            }
            _ => Err(LeaseError::Mismatch),
        }
    }

    /// The next serial number; 0 is reserved for notifications.
    pub(super) fn next_serial(&mut self) -> u32 {
        self.serial = self.serial.checked_add(1).unwrap_or(1);
        self.serial
    }
}
