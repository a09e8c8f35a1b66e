//! Sockets of a lease. The lessee provides the memory; the steward registers and binds.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use xsk::{First, MemoryPart, RingSize, Socket, SocketConfig, Umem, Unbound};

use super::{Lease, LeaseError};
use steward_protocol::{Answer, BIND_WAIT_MAX, Part, Reason, Request, Rings, Step, UmemLayout};

/// Lower estimate of the rate at which memory is registered, even if each page has to be allocated, bytes/s.
const PINNED_A_SECOND: u64 = 256 << 20;

/// A socket of a lease with registered memory, not bound yet.
#[derive(Debug)]
pub struct Prepared {
    umem: Umem,
    config: SocketConfig,
    /// Before Linux 6.4 the lessee has the socket, and binds it.
    socket: Option<Unbound>,
}

impl Prepared {
    /// Its memory.
    pub fn umem(&self) -> &Umem {
        &self.umem
    }
}

impl Lease {
    /// Has the steward make a socket for the queue of `config`, with this memory and four rings. The queue continues
    /// with its current socket. The new one can be [bound](Self::bind) once that is closed.
    ///
    /// The memory has to be of files of tmpfs or hugetlbfs ([`UmemMemory::parts`](xsk::UmemMemory::parts)), and counts
    /// against what the policy lets this user have.
    ///
    /// # Errors
    /// [`LeaseError`]; [`LeaseError::Open`] if the kernel does not register the memory.
    pub fn register(&self, umem: &Umem, config: &SocketConfig) -> Result<Prepared, LeaseError> {
        let socket = self.ask_for_socket(umem, config)?;
        let socket = socket.map(|fd| Unbound::registered(fd, umem, config));
        Ok(Prepared {
            umem: umem.clone(),
            config: config.clone(),
            socket: socket.transpose()?,
        })
    }

    fn ask_for_socket(&self, umem: &Umem, config: &SocketConfig) -> Result<Option<OwnedFd>, LeaseError> {
        // If this fails, the steward's error has the reason.
        let _ = umem.populate();
        let parts = umem.memory().parts();
        let files: Vec<BorrowedFd<'_>> = parts.iter().map(|part| part.file).collect();
        let request = Request::Register {
            queue: config.queue.0,
            umem: layout(umem, &parts),
            rings: rings(config),
        };
        // The kernel pins page by page, and may have to allocate each.
        let longer = Duration::from_secs(umem.len() / PINNED_A_SECOND);
        let deadline = self.deadline() + longer;
        let mut answered = self.ask_by(&mut self.state(), &request, &files, deadline)?;
        match answered.answer {
            Answer::Done => Ok(answered.descriptors.pop()),
            Answer::Failed {
                step: Step::Register,
                errno,
            } => Err(umem.refusal(&error_of(errno)).into()),
            other => Err(failed(&other)),
        }
    }

    /// Has the steward bind the socket that was registered last for its queue, in the best mode that works, like
    /// [`Socket::open`]. Frames continue as before until [`Lease::activate`].
    ///
    /// # Errors
    /// [`LeaseError`]; [`LeaseError::Open`] if the kernel does not bind it.
    pub fn bind(&self, prepared: Prepared) -> Result<Socket, LeaseError> {
        let Prepared { umem, config, socket } = prepared;
        if let Some(socket) = socket {
            return Ok(socket.bind()?);
        }
        Socket::bound_by(&umem, &config, |flags| match self.attempt(&config, flags) {
            // It was registered with a previous steward.
            Err(LeaseError::Refused(refusal)) if refusal.reason == Reason::Unregistered => {
                self.ask_for_socket(&umem, &config)?;
                self.attempt(&config, flags)
            }
            attempted => attempted,
        })
    }

    /// Has the steward make a socket over the memory of one that it bound for this user, for another queue of any
    /// lease, and bind it in that one's mode. Memory counts once. Frames continue as before until [`Lease::activate`].
    ///
    /// # Errors
    /// [`LeaseError`]; [`Reason::Unregistered`] if this steward does not know the socket; [`LeaseError::Open`] if the
    /// kernel does not bind it.
    pub fn share(&self, first: &First, config: &SocketConfig) -> Result<Socket, LeaseError> {
        let wait = config.bind_timeout;
        let request = Request::Share {
            queue: config.queue.0,
            wait_ms: milliseconds(wait),
            cookie: first.cookie()?,
            rings: rings(config),
        };
        Socket::shared_by(first, config, || {
            let deadline = self.deadline() + wait;
            self.ask_for_bound(&request, &[first.as_fd()], deadline)
        })
    }

    /// Waits until no socket has the queue, `longest` at most: only then has the kernel taken the memory of a closed
    /// socket from the driver, which may read and write it until then. This waits even if
    /// [`Waiting::end`](super::Waiting::end) is readable: the memory may be a guest's, which outlives this process.
    ///
    /// # Errors
    /// [`LeaseError`]; [`LeaseError::Failed`] with EBUSY on timeout.
    pub fn await_free(&self, queue: u32, longest: Duration) -> Result<(), LeaseError> {
        let request = Request::Await {
            queue,
            wait_ms: milliseconds(longest),
        };
        let deadline = self.deadline() + longest;
        match self.ask_to_the_end(&request, deadline)?.answer {
            Answer::Done => Ok(()),
            other => Err(failed(&other)),
        }
    }

    /// One attempt, with these flags of `struct sockaddr_xdp`.
    fn attempt(&self, config: &SocketConfig, flags: u16) -> Result<io::Result<OwnedFd>, LeaseError> {
        let wait = config.bind_timeout;
        let request = Request::Bind {
            queue: config.queue.0,
            flags: flags.into(),
            wait_ms: milliseconds(wait),
        };
        self.ask_for_bound(&request, &[], self.deadline() + wait)
    }

    /// Sends a request whose answer is a bound socket.
    fn ask_for_bound(
        &self,
        request: &Request,
        files: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<io::Result<OwnedFd>, LeaseError> {
        let mut answered = self.ask_by(&mut self.state(), request, files, deadline)?;
        match (answered.answer, answered.descriptors.pop()) {
            (Answer::Done, Some(socket)) => Ok(Ok(socket)),
            (
                Answer::Failed {
                    step: Step::Bind,
                    errno,
                },
                _,
            ) => Ok(Err(error_of(errno))),
            (other, _) => Err(failed(&other)),
        }
    }
}

/// In milliseconds, at most [`BIND_WAIT_MAX`].
fn milliseconds(wait: Duration) -> u32 {
    let wait = u32::try_from(wait.as_millis()).unwrap_or(BIND_WAIT_MAX);
    wait.min(BIND_WAIT_MAX)
}

fn layout(umem: &Umem, parts: &[MemoryPart<'_>]) -> UmemLayout {
    let part = |part: &MemoryPart<'_>| Part {
        file_offset: part.file_offset,
        len: part.len,
    };
    UmemLayout {
        parts: parts.iter().map(part).collect(),
        chunk_bytes: umem.chunk_size(),
        headroom_bytes: umem.headroom(),
        tx_metadata_bytes: umem.tx_metadata_len(),
        flags: umem.flags(),
    }
}

fn rings(config: &SocketConfig) -> Rings {
    let entries = |size: Option<RingSize>| size.unwrap_or(RingSize::DEFAULT).get();
    Rings {
        fill: config.fill.get(),
        completion: config.completion.get(),
        rx: entries(config.rx),
        tx: entries(config.tx),
    }
}

fn error_of(errno: u32) -> io::Error {
    io::Error::from_raw_os_error(errno.cast_signed())
}

/// The error for an answer other than the expected one.
fn failed(answer: &Answer) -> LeaseError {
    match *answer {
        Answer::Failed { step, errno } => LeaseError::Failed {
            step,
            source: error_of(errno),
        },
        _ => LeaseError::Mismatch,
    }
}
