//! A lease, seen by its holder.
//!
//! One connection is one lease: dropping the [`Lease`] ends it, as does the end of the process. All methods take `&self`; threads may share
//! it, one request at a time goes out.
//!
//! Changes of the interface come unasked. Whoever waits for them polls the lease's descriptor ([`AsFd`]) and calls [`Lease::take_changes`], which does not
//! wait; what another thread's request found on its way is not lost.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, send, socket_with,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use steer::{QueueConf, QueueCounters};

use crate::links::DriverSends;
use crate::protocol::{Answer, Facts, MESSAGE_MAX, Malformed, QUEUES_MAX, Refusal, Request, Steered, Wanted};

/// How long a steward may take for an answer; attaching a program takes the longest, some 100 ms.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why there is no lease, or no answer.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// Nobody listens.
    #[error("no steward at {}: start vhost-af-xdp-steward, or name its socket", .path.display())]
    Connect {
        /// As given.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The steward said no, and why.
    #[error("the steward refuses: {0}")]
    Refused(Refusal),
    /// The steward is gone, and the lease with it.
    #[error("the steward has ended the connection; the lease is over")]
    Gone,
    /// The steward does not answer.
    #[error("the steward has not answered for {} s", PATIENCE.as_secs())]
    Silent,
    /// The steward does not keep to the protocol.
    #[error("the steward does not keep to the protocol: {0}")]
    Protocol(#[from] Malformed),
    /// An answer to something else, or without its descriptors.
    #[error(
        "the steward's answer is not one to the request, or lacks its descriptors (is LimitNOFILE too low?)"
    )]
    Mismatch,
    /// Another failure of the socket.
    #[error("talking to the steward")]
    Io(#[from] io::Error),
}

/// A lease of queues.
#[derive(Debug)]
pub struct Lease {
    socket: OwnedFd,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    serial: u32,
    facts: Facts,
    /// Facts came that nobody has taken.
    changed: bool,
    over: bool,
}

/// A message with the descriptors that came with it.
type Received = (Vec<u8>, Vec<OwnedFd>);

impl Lease {
    /// Asks the steward at `path` for a lease. With it come the AF_XDP sockets of its queues, in order, unbound.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn take(path: &Path, wanted: &Wanted) -> Result<(Self, Vec<OwnedFd>), LeaseError> {
        let source = |source: io::Error| LeaseError::Connect {
            path: path.to_owned(),
            source,
        };
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|errno| source(errno.into()))?;
        let address = SocketAddrUnix::new(path).map_err(|errno| source(errno.into()))?;
        connect(&socket, &address).map_err(|errno| source(errno.into()))?;
        let lease = Self {
            socket,
            state: Mutex::new(State {
                serial: 0,
                facts: Facts::nothing(wanted),
                changed: false,
                over: false,
            }),
        };
        let (answer, sockets) = lease.ask(&Request::Lease(wanted.clone()))?;
        let Answer::Facts(facts) = answer else {
            return Err(LeaseError::Mismatch);
        };
        if sockets.len() != wanted.queues as usize {
            return Err(LeaseError::Mismatch);
        }
        lease.state().facts = facts;
        Ok((lease, sockets))
    }

    /// The interface as it is, as far as the steward told.
    #[must_use]
    pub fn facts(&self) -> Facts {
        self.state().facts.clone()
    }

    /// A new socket for a queue of the lease; frames go on as before until [`Lease::activate`]. So a successor can be prepared while the
    /// queue's socket is in use; it can be bound once that is closed.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn socket(&self, queue: u32) -> Result<OwnedFd, LeaseError> {
        match self.ask(&Request::Socket { queue })? {
            (Answer::Done, mut sockets) if sockets.len() == 1 => sockets.pop().ok_or(LeaseError::Mismatch),
            _ => Err(LeaseError::Mismatch),
        }
    }

    /// From now on the queue's frames go to its last socket, which is bound.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn activate(&self, queue: u32, conf: QueueConf) -> Result<(), LeaseError> {
        self.do_it(&Request::Activate { queue, conf })
    }

    /// From now on the queue's frames go to the host.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn deactivate(&self, queue: u32) -> Result<(), LeaseError> {
        self.do_it(&Request::Deactivate { queue })
    }

    /// Sees to it that this process's locked-memory limit is so many bytes at least; the steward is asked where the process may not raise it
    /// itself.
    ///
    /// The kernel counts locked memory for each user, over all of its processes, against the limit of the process that locks more: a user of its own
    /// for each holder keeps their sums apart.
    ///
    /// # Errors
    /// [`LeaseError`]; refused beyond what the policy allows.
    pub fn raise_memlock(&self, bytes: u64) -> Result<(), LeaseError> {
        let limit = getrlimit(Resource::Memlock);
        if limit.current.is_none_or(|current| current >= bytes) {
            return Ok(());
        }
        if limit.maximum.is_none_or(|maximum| maximum >= bytes) {
            let raised = Rlimit {
                current: Some(bytes),
                ..limit
            };
            return setrlimit(Resource::Memlock, raised).map_err(|errno| io::Error::from(errno).into());
        }
        self.do_it(&Request::Memlock { bytes })
    }

    /// What the program did with the queue's frames.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn counters(&self, queue: u32) -> Result<QueueCounters, LeaseError> {
        match self.ask(&Request::Counters { queue })?.0 {
            Answer::Counters(counters) => Ok(counters),
            _ => Err(LeaseError::Mismatch),
        }
    }

    /// What changed since it was asked last: the interface as it is now, or nothing.
    ///
    /// # Errors
    /// [`LeaseError::Gone`] when the lease is over.
    pub fn take_changes(&self) -> Result<Option<Facts>, LeaseError> {
        let mut state = self.state();
        while let Some((bytes, _)) = self.receive(&mut state)? {
            let (_, answer) = Answer::decode(&bytes)?;
            state.note(answer)?;
        }
        Ok(std::mem::take(&mut state.changed).then(|| state.facts.clone()))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn do_it(&self, request: &Request) -> Result<(), LeaseError> {
        match self.ask(request)?.0 {
            Answer::Done => Ok(()),
            _ => Err(LeaseError::Mismatch),
        }
    }

    /// Asks, and waits for the answer.
    fn ask(&self, request: &Request) -> Result<(Answer, Vec<OwnedFd>), LeaseError> {
        let mut state = self.state();
        if state.over {
            return Err(LeaseError::Gone);
        }
        // Serial number 0 is the steward's.
        state.serial = state.serial.checked_add(1).unwrap_or(1);
        let (asked, deadline) = (state.serial, Instant::now() + PATIENCE);
        match send(&self.socket, &request.encode(asked), SendFlags::NOSIGNAL) {
            // What it said before it went is worth reading.
            Ok(_) | Err(Errno::PIPE | Errno::CONNRESET) => {}
            Err(errno) => return Err(io::Error::from(errno).into()),
        }
        loop {
            let Some((bytes, descriptors)) = self.receive(&mut state)? else {
                self.wait(deadline)?;
                continue;
            };
            match Answer::decode(&bytes)? {
                (serial, Answer::Refused(refusal)) if serial == asked => {
                    return Err(LeaseError::Refused(refusal));
                }
                (serial, answer) if serial == asked => return Ok((answer, descriptors)),
                // Left over from a request that timed out.
                (serial, _) if serial != 0 => {}
                (_, answer) => state.note(answer)?,
            }
        }
    }

    /// The next message, if there is one.
    fn receive(&self, state: &mut State) -> Result<Option<Received>, LeaseError> {
        let mut bytes = vec![0; MESSAGE_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(QUEUES_MAX as usize))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut read = || {
            recvmsg(
                &self.socket,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut control,
                flags,
            )
        };
        // A peer that closes with our request unread leaves this error behind, and what it said before (unix_release_sock,
        // net/unix/af_unix.c): asking again gives that.
        let received = match read().or_else(|errno| {
            if errno == Errno::CONNRESET {
                read()
            } else {
                Err(errno)
            }
        }) {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(Errno::CONNRESET) => return state.end(),
            Err(errno) => return Err(io::Error::from(errno).into()),
        };
        if received.bytes == 0 {
            return state.end();
        }
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(Malformed::Long.into());
        }
        // Descriptors that found no room in our table; the others are closed by dropping them.
        let lost = received.flags.contains(ReturnFlags::CTRUNC);
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        if lost {
            descriptors.clear();
        }
        bytes.truncate(received.bytes);
        Ok(Some((bytes, descriptors)))
    }

    fn wait(&self, deadline: Instant) -> Result<(), LeaseError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| LeaseError::Silent)?;
        match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&left)) {
            Ok(0) => Err(LeaseError::Silent),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(io::Error::from(errno).into()),
        }
    }
}

impl AsFd for Lease {
    /// Readable when there may be changes: then call [`Lease::take_changes`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl State {
    /// Takes note of what came unasked.
    fn note(&mut self, answer: Answer) -> Result<(), LeaseError> {
        match answer {
            Answer::Changed(facts) => {
                (self.facts, self.changed) = (facts, true);
                Ok(())
            }
            Answer::Refused(refusal) => {
                self.over = true;
                Err(LeaseError::Refused(refusal))
            }
            _ => Err(LeaseError::Mismatch),
        }
    }

    fn end<T>(&mut self) -> Result<T, LeaseError> {
        self.over = true;
        Err(LeaseError::Gone)
    }
}

impl Facts {
    /// Before anything was told.
    fn nothing(wanted: &Wanted) -> Self {
        Self {
            ifindex: 0,
            name: wanted.interface.clone(),
            mtu: 0,
            mac: [0; 6],
            rx_queues: 0,
            up: false,
            partial_checksums: false,
            mode: None,
            program: 0,
            sends: DriverSends::NOTHING,
            generation: 0,
            steered: Steered::ByQueue,
            impaired: false,
            note: String::new(),
        }
    }
}
