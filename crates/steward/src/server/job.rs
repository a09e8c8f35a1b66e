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

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::thread::CapabilitySet;
use zerocopy::{Immutable, IntoBytes};

use super::interface::Holds;
use super::zcrx_lease::QueueKey;
use super::{Answered, Server};
use crate::capabilities::TO_TAKE_RINGS;
use crate::protocol::{Answer, Reason, Refusal, Step, enumerated};
use crate::sys::child::{self, Child};
use crate::sys::zcrx::Made;

/// Jobs at a time of those to whom one rule of the policy applies, and of one user: there is always one for another.
pub(super) const OF_A_RULE: usize = 4;
pub(super) const OF_A_USER: usize = 3;

/// Between two attempts on a queue that is busy.
const PAUSE: Duration = Duration::from_millis(2);

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
#[derive(Debug, Clone, Copy)]
pub(super) enum Outcome {
    /// With the registration of a queue, for a job that makes one.
    Done(Option<Made>),
    Failed {
        step: Step,
        errno: u32,
    },
    /// The child has not reported anything.
    Lost,
}

impl Outcome {
    /// The answer about a job that is not done.
    pub(super) fn not_done(self) -> Answered {
        match self {
            Self::Failed { step, errno } => Ok(Answer::Failed { step, errno }.into()),
            Self::Done(_) | Self::Lost => Err(lost()),
        }
    }
}

/// Of a child that has ended without a word.
pub(super) fn lost() -> Refusal {
    Reason::Kernel.because("the process that was to do it has ended too early (out of memory?): try again")
}

/// What the child has made, or the step that failed in it.
pub(super) type Attempt<T> = Result<T, (Step, Errno)>;

/// A child at work. Whoever drops it has killed it or seen its outcome before.
#[derive(Debug)]
pub(super) struct Job {
    child: Child,
    report: OwnedFd,
}

/// The job that a connection waits for.
pub(super) struct Pending {
    pub(super) job: Job,
    /// Of the request, once that is known.
    pub(super) serial: u32,
    /// The memory that it is about.
    pub(super) holds: Holds,
    /// The queue for zero-copy receive that it registers.
    pub(super) queue: Option<QueueKey>,
    pub(super) conclude: Conclude,
}

/// What follows when a connection's job has ended, and the answer.
type Conclude = Box<dyn FnOnce(&mut Server, u64, Outcome) -> Answered + Send>;

impl Pending {
    pub(super) fn new(
        job: Job,
        conclude: impl FnOnce(&mut Server, u64, Outcome) -> Answered + Send + 'static,
    ) -> Self {
        Self {
            job,
            serial: 0,
            holds: Holds::default(),
            queue: None,
            conclude: Box::new(conclude),
        }
    }

    /// The same for nobody: what it has is let go.
    pub(super) fn of_nobody(self) -> Self {
        Self {
            conclude: Box::new(|_, _, outcome| outcome.not_done()),
            ..self
        }
    }

    /// The same, about this memory.
    pub(super) fn holding(self, holds: Holds) -> Self {
        Self { holds, ..self }
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pending").field(&self.job).finish()
    }
}

impl Job {
    /// Begins work in a child that has these descriptors. The child is a copy of a process that may have had other
    /// threads: nothing in `work` may allocate, lock or log.
    pub(super) fn begin(
        kept: &[BorrowedFd<'_>],
        work: impl FnOnce() -> Attempt<()>,
    ) -> Result<Self, Refusal> {
        Self::begin_without(TO_TAKE_RINGS, kept, work)
    }

    /// The same, without these capabilities; the child reports what it makes.
    pub(super) fn begin_without<T: IntoBytes + Immutable>(
        without: CapabilitySet,
        kept: &[BorrowedFd<'_>],
        work: impl FnOnce() -> Attempt<T>,
    ) -> Result<Self, Refusal> {
        let begun = pipe_with(PipeFlags::CLOEXEC)
            .map_err(io::Error::from)
            .and_then(|(report, report_to)| {
                let kept: Vec<_> = kept.iter().copied().chain([report_to.as_fd()]).collect();
                let child = child::begin(&kept, without, || tell(report_to.as_fd(), work()))?;
                Ok(Self { child, report })
            });
        begun.map_err(|error| {
            Reason::Kernel.because(format!(
                "no process for it (the steward's TasksMax, or memory): {error}"
            ))
        })
    }

    /// A child takes the files that come with a connection's next message, in a process that has no other work.
    pub(super) fn discard(connection: BorrowedFd<'_>) -> Result<Self, Refusal> {
        Self::begin(&[connection], || {
            let taken = child::take_files(connection).map(std::mem::forget);
            taken.map_err(failed(Step::Map))
        })
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
            (Ok(8), 0, _) => Outcome::Done(self.made()),
            (Ok(8), _, Ok(step)) => Outcome::Failed { step, errno },
            _ => Outcome::Lost,
        }
    }

    fn made(&self) -> Option<Made> {
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

/// The report of a child: two numbers, then what it has made.
fn tell<T: IntoBytes + Immutable>(report: BorrowedFd<'_>, attempt: Attempt<T>) {
    let numbers: [u32; 2] = match &attempt {
        Ok(_) => [0, 0],
        Err((step, errno)) => [*step as u32, errno.raw_os_error().cast_unsigned()],
    };
    let _ = rustix::io::write(report, numbers.as_bytes());
    if let Ok(made) = attempt {
        let _ = rustix::io::write(report, made.as_bytes());
    }
}

pub(super) fn failed(step: Step) -> impl Fn(Errno) -> (Step, Errno) {
    move |errno| (step, errno)
}

/// Closes connections by the end of a child that has them last. What nobody has read there goes with them, files of the
/// lessee's perhaps: a process that closes a TCP socket may have to wait until all is sent (SO_LINGER), for as long as
/// its owner likes, but not one that is about to end (`inet_release`, net/ipv4/af_inet.c).
/// On success none are left here.
pub(super) fn close(connections: &mut Vec<OwnedFd>) -> io::Result<Child> {
    let (closed, closes) = pipe_with(PipeFlags::CLOEXEC)?;
    let kept: Vec<_> = connections.iter().chain([&closed]).map(AsFd::as_fd).collect();
    let child = child::begin(&kept, TO_TAKE_RINGS, || child::await_close(closed.as_fd()))?;
    // It closes them when no other process has them, and then ends.
    connections.clear();
    drop(closes);
    Ok(child)
}

impl Bind {
    /// Tries until the time is up. A queue is free an RCU grace period after its last socket was closed; an attempt
    /// before that fails, but for much memory only after the kernel has made its tables for all chunks, which takes
    /// longer than the grace period. So a socket with one chunk asks first.
    pub(super) fn run(&self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        let at = &self.at;
        let deadline = at.deadline();
        if self.probes
            && let Ok(probe) = child::probe()
        {
            let _ = at.bind_by(deadline, probe.as_fd(), at.probe.flags());
        }
        at.bind_by(deadline, socket, self.flags)
    }
}

impl QueueAt {
    /// Until when the queue may be busy.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.wait
    }

    /// Waits until nobody has it. Then the driver has no memory of its last socket's any more either: the kernel takes
    /// that away first (`xp_clear_dev`, net/xdp/xsk_buff_pool.c).
    /// Errors: EBUSY, if it is not so in time; what else keeps the kernel from saying so.
    pub(super) fn run(&self) -> Result<(), Errno> {
        let (probe, deadline) = (child::probe()?, self.deadline());
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
pub(super) fn in_time(deadline: Instant, mut bind: impl FnMut() -> Result<(), Errno>) -> Result<(), Errno> {
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
