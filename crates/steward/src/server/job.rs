//! Jobs: work for which the kernel may take long, done by child processes: registering memory, binding, and waiting for
//! a queue.
//!
//! # Theory of operation
//!
//! A lessee's memory is pinned page by page, seconds for a large guest; a bind waits for the lock of all interfaces,
//! and for a driver that starts its rings again. Neither may delay other lessees. And the files of that memory are the
//! lessee's: reading from one, or closing it, may wait forever for a file system that the lessee itself serves (FUSE).
//!
//! So each such request is done by a child of the steward (fork(2)), which ends when it is done. The child takes the
//! descriptors from the connection itself: they are never in the steward's own table. It looks at each by
//! F_GET_SEALS, which asks nobody and only files of tmpfs and hugetlbfs answer (`memfd_file_seals_ptr`, mm/memfd.c),
//! maps them side by side, and registers them with the socket. Memory that is registered stays so when the child and
//! its mappings are gone: it belongs to the socket, which the steward has, too.
//!
//! The child reports a failure over a pipe as two numbers, step and errno; the steward reads them when the child has
//! ended (pidfd_open(2)). A child that is killed, or that hangs in the kernel, reports nothing. It counts against the
//! jobs of its user and rule, so it harms only the user whose memory it was. It dies with the steward.
//!
//! Before it registers, the child takes the lessee's user for its real one, so that the kernel counts the memory for
//! that user, as long as anybody has a socket with it. And connections are closed by the end of a child ([`close`]).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::thread::CapabilitySet;
use zerocopy::IntoBytes;

use super::interface::{Holds, Memory, Registered};
use super::zcrx_lease::QueueKey;
use crate::capabilities::TO_TAKE_RINGS;
use crate::protocol::{Refusal, Rings, Step, UmemLayout, ZcrxRings, enumerated};
use crate::sys::child::{self, Child, LockedFor};
use crate::sys::netkit::{self, NetkitOrder};
use crate::sys::zcrx::{self, Made, QueueOrder};

/// Jobs at a time of those to whom one rule of the policy applies, and of one user: there is always one for another.
pub(super) const OF_A_RULE: usize = 4;
pub(super) const OF_A_USER: usize = 3;

/// Between two attempts on a queue that is busy.
const PAUSE: Duration = Duration::from_millis(2);

/// The work of the child.
pub(super) enum Task<'a> {
    /// The next message of this connection has the files.
    Register {
        socket: BorrowedFd<'a>,
        connection: BorrowedFd<'a>,
        umem: &'a UmemLayout,
        rings: &'a Rings,
        /// None: it may be as much as there is, or this process cannot have the kernel count it.
        locked_for: Option<LockedFor>,
    },
    /// The same message is refused: its files are to go, in a process that has no other work.
    Discard {
        connection: BorrowedFd<'a>,
    },
    Bind {
        socket: BorrowedFd<'a>,
        bind: Bind,
    },
    /// The next message of this connection has the socket with that cookie, over whose memory this one is bound.
    Share {
        socket: BorrowedFd<'a>,
        connection: BorrowedFd<'a>,
        cookie: u64,
        rings: &'a Rings,
        at: QueueAt,
    },
    /// Nobody is to have the queue any more.
    Await(QueueAt),
    /// The next message of this connection has the memory that a queue is to receive into, for these rings of that
    /// process.
    Queue {
        process: BorrowedFd<'a>,
        connection: BorrowedFd<'a>,
        rings: &'a ZcrxRings,
        order: QueueOrder,
    },
    /// The next message of this connection may have the network namespace that a netkit goes to.
    Netkit {
        connection: BorrowedFd<'a>,
        order: NetkitOrder,
    },
}

/// A queue, which may be taken.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueueAt {
    pub(super) ifindex: u32,
    pub(super) queue: u32,
    /// How long the queue may be busy.
    pub(super) wait: Duration,
    /// How to test whether it is free.
    pub(super) probe: Probe,
}

/// How a socket is bound.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bind {
    pub(super) at: QueueAt,
    pub(super) flags: u16,
    /// The kernel is to be asked with little memory whether the queue is free, see [`Bind::run`].
    pub(super) probes: bool,
}

/// The kind of bind that only tests whether a queue is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Probe {
    /// Zero-copy in pieces, which the driver lacks: the kernel rejects it after it has checked whether the queue is
    /// free (`xp_assign_dev`, net/xdp/xsk_buff_pool.c).
    Refused,
    /// A copy mode, where the driver has that. The queue is then the probe's for a moment, and the driver is not told.
    Copy,
}

impl Probe {
    /// With a driver that takes so many descriptors for a frame in zero-copy.
    pub(super) fn of(most_pieces: usize) -> Self {
        match most_pieces <= 1 {
            true => Self::Refused,
            false => Self::Copy,
        }
    }

    fn flags(self) -> u16 {
        match self {
            Self::Refused => child::ZERO_COPY_IN_PIECES,
            Self::Copy => child::COPY,
        }
    }

    /// Whether nobody has the queue, by what became of a bind. What is not known to come after the look at who has it,
    /// as a lack of memory, reports nothing.
    fn is_free(self, bound: Result<(), Errno>) -> Result<(), Errno> {
        match (self, bound) {
            // Refused as meant; or the interface is gone, or has no such queue any more, which the kernel allows only
            // where nobody has it.
            (_, Err(Errno::OPNOTSUPP | Errno::NODEV)) | (Self::Copy, Err(Errno::INVAL)) => Ok(()),
            (_, bound) => bound,
        }
    }
}

/// The outcome of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    Failed {
        step: Step,
        errno: u32,
    },
    /// The child has not report anything.
    Lost,
}

/// The step that failed in a child.
#[derive(Debug, Clone, Copy)]
struct Failure {
    step: Step,
    errno: Errno,
}

type Attempt = Result<(), Failure>;

/// A child at work. Whoever drops it has killed it or seen its outcome before.
#[derive(Debug)]
pub(super) struct Job {
    child: Child,
    report: OwnedFd,
}

/// The job that a connection waits for.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) job: Job,
    /// Of the request.
    pub(super) serial: u32,
    pub(super) step: Pends,
}

#[derive(Debug)]
pub(super) enum Pends {
    Registration {
        queue: u32,
        registered: Registered,
        /// By the kernel, for the lessee's user.
        is_counted: bool,
    },
    Bind {
        queue: u32,
        registered: Registered,
    },
    Share {
        queue: u32,
        socket: OwnedFd,
        /// Of the one that it is bound over.
        memory: Memory,
    },
    /// Waits until a queue is free.
    Await,
    /// A queue that is registered with a ring of its lessee's; none: of no interface.
    Queue {
        key: Option<QueueKey>,
    },
    /// A netkit for a queue that goes where it is to be; one that is there already, if there is nothing to be done.
    Netkit {
        queue: u32,
    },
    /// The answer.
    Refusal(Refusal),
}

impl Pends {
    /// The memory that it is about.
    pub(super) fn holds(&self) -> Holds {
        match self {
            Self::Registration { registered, .. } | Self::Bind { registered, .. } => Holds {
                waiting: Some(registered.memory),
                bound: None,
            },
            Self::Share { memory, .. } => Holds {
                waiting: None,
                bound: Some((*memory, true)),
            },
            Self::Await | Self::Queue { .. } | Self::Netkit { .. } | Self::Refusal(_) => Holds::default(),
        }
    }

    /// The queue that is being registered.
    pub(super) fn queue(&self) -> Option<QueueKey> {
        match self {
            Self::Queue { key } => *key,
            _ => None,
        }
    }
}

impl Job {
    /// Begins it.
    pub(super) fn begin(task: &Task<'_>) -> io::Result<Self> {
        let (report, report_to) = pipe_with(PipeFlags::CLOEXEC)?;
        let report_to = report_to.as_fd();
        let [first, second] = match *task {
            Task::Register {
                socket, connection, ..
            }
            | Task::Share {
                socket, connection, ..
            } => [socket, connection],
            Task::Discard { connection } | Task::Netkit { connection, .. } => [connection, report_to],
            Task::Bind { socket, .. } => [socket, report_to],
            Task::Await(_) => [report_to, report_to],
            Task::Queue {
                process, connection, ..
            } => [process, connection],
        };
        let without = match task {
            Task::Queue { .. } => CapabilitySet::empty(),
            _ => TO_TAKE_RINGS,
        };
        let child = child::begin(&[first, second, report_to], without, || task.report(report_to))?;
        Ok(Self { child, report })
    }

    /// What came of it, once the child has ended, which [`AsFd`] tells; `None` before that.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        self.child.has_ended().then(|| self.read())
    }

    fn read(&self) -> Outcome {
        let mut report = [0u8; 8];
        let read = rustix::io::read(&self.report, &mut report);
        let [step, errno] = zerocopy::transmute!(report);
        match (read, step, enumerated("step", step)) {
            (Ok(8), 0, _) => Outcome::Done,
            (Ok(8), _, Ok(step)) => Outcome::Failed { step, errno },
            _ => Outcome::Lost,
        }
    }

    /// The registration that it made, for a task that makes one, after the outcome was read.
    pub(super) fn made(&self) -> Option<Made> {
        let mut report = [0u8; size_of::<Made>()];
        match rustix::io::read(&self.report, &mut report) {
            Ok(read) if read == report.len() => Some(zerocopy::transmute!(report)),
            _ => None,
        }
    }

    /// Ends the child; that may take its time.
    pub(super) fn kill(&self) {
        self.child.kill();
    }
}

impl AsFd for Job {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.child.as_fd()
    }
}

/// Closes connections by the end of a child that has them last. What nobody has read there goes with them, files of the
/// lessee's perhaps: a process that closes a TCP socket may have to wait until all is sent (SO_LINGER), for as long as
/// its owner likes, but not one that is about to end (`inet_release`, net/ipv4/af_inet.c).
pub(super) fn close(connections: &[OwnedFd]) -> io::Result<Close> {
    let (closed, closes) = pipe_with(PipeFlags::CLOEXEC)?;
    let connections = connections.iter().map(AsFd::as_fd);
    let kept: Vec<BorrowedFd<'_>> = connections.chain([closed.as_fd()]).collect();
    let child = child::begin(&kept, TO_TAKE_RINGS, || child::await_close(closed.as_fd()))?;
    Ok(Close { child, closes })
}

/// A child that waits until no other process has the connections that it is to close.
pub(super) struct Close {
    child: Child,
    closes: OwnedFd,
}

impl Close {
    /// Now it has them last.
    pub(super) fn end(self) -> Child {
        drop(self.closes);
        self.child
    }
}

/// What the child does. It is a copy of a process that may have had other threads: nothing here allocates, locks or
/// logs.
impl Task<'_> {
    fn report(&self, report: BorrowedFd<'_>) {
        let mut made = None;
        let numbers: [u32; 2] = match self.run(&mut made) {
            Ok(()) => [0, 0],
            Err(Failure { step, errno }) => [step as u32, errno.raw_os_error().cast_unsigned()],
        };
        let bytes: [u8; 8] = zerocopy::transmute!(numbers);
        let _ = rustix::io::write(report, &bytes);
        if let Some(made) = made {
            let _ = rustix::io::write(report, made.as_bytes());
        }
    }

    /// `made`: set to the device to report.
    fn run(&self, made: &mut Option<Made>) -> Attempt {
        match self {
            Self::Queue {
                process,
                connection,
                rings,
                order,
            } => {
                let parts = std::slice::from_ref(&rings.area);
                let memory = child::map_parts(*connection, parts).map_err(failed(Step::Map))?;
                let registered = zcrx::register(*process, &rings.rings, memory, order);
                *made = Some(registered.map_err(|(step, errno)| Failure { step, errno })?);
                Ok(())
            }
            Self::Register {
                socket,
                connection,
                umem,
                rings,
                locked_for,
            } => {
                locked_for
                    .map_or(Ok(()), child::count_for)
                    .map_err(failed(Step::Register))?;
                let memory = child::map_parts(*connection, &umem.parts).map_err(failed(Step::Map))?;
                child::register(*socket, memory, umem).map_err(failed(Step::Register))?;
                child::make_rings(*socket, rings).map_err(failed(Step::Rings))
            }
            Self::Netkit { connection, order } => {
                netkit::settle(*connection, order).map_err(|(step, errno)| Failure { step, errno })
            }
            Self::Discard { connection } => child::take_files(*connection)
                .map(std::mem::forget)
                .map_err(failed(Step::Map)),
            Self::Share {
                socket,
                connection,
                cookie,
                rings,
                at,
            } => {
                let first = child::take_socket(*connection, *cookie).map_err(failed(Step::Share))?;
                child::make_rings(*socket, rings).map_err(failed(Step::Rings))?;
                let bind = || child::bind_sharing(*socket, at.ifindex, at.queue, first.as_fd());
                let bound = in_time(Instant::now() + at.wait, bind);
                std::mem::forget(first);
                bound.map_err(failed(Step::Bind))
            }
            Self::Bind { socket, bind } => bind.run(*socket).map_err(failed(Step::Bind)),
            Self::Await(at) => at.run().map_err(failed(Step::Await)),
        }
    }
}

fn failed(step: Step) -> impl Fn(Errno) -> Failure {
    move |errno| Failure { step, errno }
}

impl Bind {
    /// Tries until the time is up. A queue is free an RCU grace period after its last socket was closed; an attempt
    /// before that fails, but for much memory only after the kernel has made its tables for all chunks, which takes
    /// longer than the grace period. So a socket with one chunk asks first.
    fn run(&self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        let at = &self.at;
        let deadline = Instant::now() + at.wait;
        if self.probes
            && let Ok(probe) = child::probe()
        {
            let _ = at.bind_by(deadline, probe.as_fd(), at.probe.flags());
        }
        at.bind_by(deadline, socket, self.flags)
    }
}

impl QueueAt {
    /// Waits until nobody has it. Then the driver has no memory of its last socket's any more either: the kernel takes
    /// that away first (`xp_clear_dev`, net/xdp/xsk_buff_pool.c).
    /// Errors: EBUSY, if it is not so in time; what else keeps the kernel from saying so.
    fn run(&self) -> Result<(), Errno> {
        let (probe, deadline) = (child::probe()?, Instant::now() + self.wait);
        let ask = |kind: Probe| kind.is_free(self.bind_by(deadline, probe.as_fd(), kind.flags()));
        match ask(self.probe) {
            // Before Linux 6.6, which knows of no pieces and has not looked at the queue.
            Err(Errno::INVAL) => ask(Probe::Copy),
            free => free,
        }
    }

    /// Binds a socket, again and again until then while somebody has the queue.
    fn bind_by(&self, deadline: Instant, socket: BorrowedFd<'_>, flags: u16) -> Result<(), Errno> {
        in_time(deadline, || child::bind(socket, self.ifindex, self.queue, flags))
    }
}

/// Tries again and again until then while somebody has the queue.
fn in_time(deadline: Instant, mut bind: impl FnMut() -> Result<(), Errno>) -> Result<(), Errno> {
    loop {
        match bind() {
            Err(Errno::BUSY) if Instant::now() < deadline => std::thread::sleep(PAUSE),
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_is_free_only_if_the_kernel_has_checked_its_owner() {
        for probe in [Probe::Refused, Probe::Copy] {
            let free = |bound| probe.is_free(bound);
            assert_eq!(free(Ok(())), Ok(()));
            assert_eq!(free(Err(Errno::OPNOTSUPP)), Ok(()));
            for errno in [Errno::BUSY, Errno::NOMEM, Errno::NOBUFS, Errno::PERM] {
                assert_eq!(free(Err(errno)), Err(errno), "{probe:?}");
            }
        }
        // A flag that the kernel does not know.
        let unknown = Err(Errno::INVAL);
        assert_eq!(Probe::Refused.is_free(unknown), unknown);
        assert_eq!(Probe::Copy.is_free(unknown), Ok(()), "no such queue");
    }
}
