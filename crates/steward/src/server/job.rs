//! Jobs: work for which the kernel may take long, done by child processes: registering memory, binding, and waiting for
//! a queue.
//!
//! # Theory of operation
//!
//! A lessee's memory is pinned page by page, seconds for a large guest; a bind waits for the lock of all interfaces,
//! and for a driver that starts its rings again. Neither may delay other lessees. And the files of that memory are the
//! lessee's: reading from one, or closing it, may wait forever for a file system that the lessee itself serves (FUSE).
//!
//! So a child of the steward (fork(2)) does each such request, and then exits. The child receives the descriptors from
//! the connection itself: they are never in the steward's own table. It checks each with F_GET_SEALS, which calls no
//! file system and succeeds only for files of tmpfs and hugetlbfs (`memfd_file_seals_ptr`, mm/memfd.c), maps them one
//! after the other, and registers them with the socket. Memory stays registered when the child and its mappings are
//! gone: it belongs to the socket, of which the steward also has a descriptor.
//!
//! The child reports a failure over a pipe as two numbers, step and errno; the steward reads them when the child has
//! ended (pidfd_open(2)). A child that is killed, or that hangs in the kernel, reports nothing. It counts against the
//! jobs of its user and rule, so it harms only the user whose memory it was. It dies with the steward.
//!
//! Before it registers, the child sets its real user to the lessee's, so that the kernel charges the memory to that
//! user, as long as any process has a socket with it. Connections, too, are closed by a child that exits ([`close`]).

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::interface::Holds;
use super::{Answered, Server};
use crate::capabilities::ChildWork;
use crate::sys::child::{self, Child};
use steward_protocol::{Answer, Reason, Refusal, Step, enumerated};

/// Concurrent jobs under one rule of the policy, and of one user: one user alone cannot use up those of a rule.
pub(super) const OF_A_RULE: usize = 4;
pub(super) const OF_A_USER: usize = 3;

/// Pause between two attempts to bind to a busy queue.
const PAUSE: Duration = Duration::from_millis(2);

/// A queue, which may be busy.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueueAt {
    pub(super) ifindex: u32,
    pub(super) queue: u32,
    /// How long the queue may be busy.
    pub(super) wait: Duration,
    /// How to test whether it is free.
    pub(super) probe: Probe,
}

/// The kind of bind that only tests whether a queue is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Probe {
    /// Zero-copy multi-buffer, which the driver lacks: the kernel rejects it after it has checked whether the queue is
    /// free (`xp_assign_dev`, net/xdp/xsk_buff_pool.c).
    Refused,
    /// Copy mode, if the driver has multi-buffer. The probe owns the queue for a moment; the driver is not called.
    Copy,
}

impl Probe {
    /// `most_pieces`: how many descriptors the driver takes for a frame in zero-copy mode.
    pub(super) fn of(most_pieces: usize) -> Self {
        match most_pieces <= 1 {
            true => Self::Refused,
            false => Self::Copy,
        }
    }

    fn flags(self) -> u16 {
        match self {
            Self::Refused => libc::XDP_ZEROCOPY | libc::XDP_USE_SG,
            Self::Copy => libc::XDP_COPY,
        }
    }

    /// Whether the result of a bind shows that the queue is free. Errors that may precede the kernel's check of the
    /// queue's owner, such as a lack of memory, are returned.
    fn is_free(self, bound: Result<(), Errno>) -> Result<(), Errno> {
        match (self, bound) {
            // Rejected as intended; or the interface or the queue does not exist any more, which the kernel allows
            // only if the queue has no owner.
            (_, Err(Errno::OPNOTSUPP | Errno::NODEV)) | (Self::Copy, Err(Errno::INVAL)) => Ok(()),
            (_, bound) => bound,
        }
    }
}

/// Most bytes that a child reports.
const REPORT_MAX: usize = 128;

/// The value that a child has made, as bytes.
#[derive(Debug, Clone, Copy)]
pub struct Report {
    bytes: [u8; REPORT_MAX],
    len: usize,
}

impl Report {
    /// The value; `None`: it is not one of this type.
    #[must_use]
    pub fn read<T: FromBytes>(&self) -> Option<T> {
        T::read_from_bytes(self.bytes.get(..self.len)?).ok()
    }
}

/// The outcome of a job.
#[derive(Debug, Clone, Copy)]
pub enum Outcome {
    /// With what the child has made.
    Done(Report),
    /// A step failed.
    Failed {
        /// The step.
        step: Step,
        /// The kernel's error number.
        errno: u32,
    },
    /// The child has not reported anything.
    Lost,
}

impl Outcome {
    /// The answer if a job has failed or was lost.
    pub(super) fn not_done(self) -> Answered {
        match self {
            Self::Failed { step, errno } => Ok(Answer::Failed { step, errno }.into()),
            Self::Done(_) | Self::Lost => Err(lost()),
        }
    }
}

/// The refusal if a child has ended without a report.
#[must_use]
pub fn lost() -> Refusal {
    Reason::Kernel.because("the process that was to do it has ended too early (out of memory?): try again")
}

/// What the child has made, or the step that failed in it.
pub type Attempt<T> = Result<T, (Step, Errno)>;

/// A running child process. Kill it, or read its outcome, before dropping this value.
#[derive(Debug)]
pub struct Job {
    child: Child,
    report: OwnedFd,
}

/// The job that a connection waits for.
pub struct Pending {
    pub(super) job: Job,
    /// Serial number of the request; 0 until it is known.
    pub(super) serial: u32,
    /// The memory that the job registers or binds.
    pub(super) holds: Holds,
    /// The queue, of an interface's index, that it changes for the part.
    pub(super) queue: Option<(u32, u32)>,
    pub(super) conclude: Conclude,
}

/// Runs when a connection's job has ended, and returns the answer.
type Conclude = Box<dyn FnOnce(&mut Server, u64, Outcome) -> Answered + Send>;

impl Pending {
    /// A job, and what concludes it.
    pub fn new(
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

    /// The same job, which changes this queue of an interface.
    #[must_use]
    pub fn changing(self, queue: Option<(u32, u32)>) -> Self {
        Self { queue, ..self }
    }

    /// The same job, after its connection has ended: its resources are released, and no lease changes.
    pub(super) fn of_nobody(self) -> Self {
        Self {
            conclude: Box::new(|_, _, outcome| outcome.not_done()),
            ..self
        }
    }

    /// The same job, with this memory.
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
    /// Starts a child that keeps only these descriptors and the capabilities for its `kind` of work, does `work`, and
    /// reports the value that it returns. The child is a copy of a process that may have had other threads: nothing in
    /// `work` may allocate, lock or log.
    ///
    /// # Errors
    /// There is no process for it.
    pub fn begin<T: IntoBytes + Immutable>(
        kind: ChildWork,
        kept: &[BorrowedFd<'_>],
        work: impl FnOnce() -> Attempt<T>,
    ) -> Result<Self, Refusal> {
        const { assert!(size_of::<T>() <= REPORT_MAX, "a report is cut") };
        let begun = pipe_with(PipeFlags::CLOEXEC)
            .map_err(io::Error::from)
            .and_then(|(report, report_to)| {
                let kept: Vec<_> = kept.iter().copied().chain([report_to.as_fd()]).collect();
                let child = child::begin(&kept, kind, || tell(report_to.as_fd(), work()))?;
                Ok(Self { child, report })
            });
        begun.map_err(|error| {
            Reason::Kernel.because(format!(
                "no process for it (the steward's TasksMax, or memory): {error}"
            ))
        })
    }

    /// Starts a child that only receives, and so closes, the descriptors in a connection's next message.
    ///
    /// # Errors
    /// There is no process for it.
    pub fn discard(connection: BorrowedFd<'_>) -> Result<Self, Refusal> {
        Self::begin(ChildWork::Files, &[connection], || {
            let taken = child::take_files(connection).map(std::mem::forget);
            taken.map_err(failed(Step::Map))
        })
    }

    /// The outcome; `None` until the child has ended, when [`AsFd`]'s descriptor becomes readable.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        self.child.has_ended().then(|| self.read())
    }

    fn read(&self) -> Outcome {
        let mut report = [0u8; 8];
        let read = rustix::io::read(&self.report, &mut report);
        let [step, errno] = zerocopy::transmute!(report);
        match (read, step, enumerated("step", step)) {
            (Ok(8), 0, _) => Outcome::Done(self.report()),
            (Ok(8), _, Ok(step)) => Outcome::Failed { step, errno },
            _ => Outcome::Lost,
        }
    }

    fn report(&self) -> Report {
        let mut bytes = [0; REPORT_MAX];
        let len = rustix::io::read(&self.report, &mut bytes).unwrap_or(0);
        Report { bytes, len }
    }

    /// Kills the child, without waiting until it has ended.
    pub(super) fn kill(&self) {
        self.child.kill();
    }
}

impl AsFd for Job {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.child.as_fd()
    }
}

/// Writes the report of a child: step and errno, then the value that it has made.
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

/// A failure of this step.
pub fn failed(step: Step) -> impl Fn(Errno) -> (Step, Errno) {
    move |errno| (step, errno)
}

/// Closes connections by the exit of a child that holds the last descriptors of them. That also closes the lessee's
/// files in unread messages. A process that closes a TCP socket may have to wait until all is sent (SO_LINGER), for as
/// long as its owner likes, but an exiting process does not wait (`inet_release`, net/ipv4/af_inet.c).
/// On success `connections` is empty.
pub(super) fn close(connections: &mut Vec<OwnedFd>) -> io::Result<Child> {
    let (closed, closes) = pipe_with(PipeFlags::CLOEXEC)?;
    let kept: Vec<_> = connections.iter().chain([&closed]).map(AsFd::as_fd).collect();
    let child = child::begin(&kept, ChildWork::Files, || child::await_close(closed.as_fd()))?;
    // The child exits when this pipe end is closed, after the steward's own descriptors of them.
    connections.clear();
    drop(closes);
    Ok(child)
}

impl QueueAt {
    /// Tries until the deadline. A queue is free an RCU grace period after its last socket was closed. An earlier
    /// attempt fails; with much memory it fails only after the kernel has made its tables for all chunks, which takes
    /// longer than the grace period. Then a socket with one chunk tests first (`probes`).
    pub(super) fn bind(&self, socket: BorrowedFd<'_>, flags: u16, probes: bool) -> Result<(), Errno> {
        let deadline = self.deadline();
        if probes && let Ok(probe) = child::probe() {
            let _ = self.bind_by(deadline, probe.as_fd(), self.probe.flags());
        }
        self.bind_by(deadline, socket, flags)
    }

    /// Until when the queue may be busy.
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.wait
    }

    /// Waits until the queue is free. Then the driver no longer uses the memory of its last socket either: the kernel
    /// takes that away first (`xp_clear_dev`, net/xdp/xsk_buff_pool.c).
    /// Errors: EBUSY, if the queue is not free in time; other errors that prevent the test.
    pub(super) fn run(&self) -> Result<(), Errno> {
        let (probe, deadline) = (child::probe()?, self.deadline());
        let ask = |kind: Probe| kind.is_free(self.bind_by(deadline, probe.as_fd(), kind.flags()));
        match ask(self.probe) {
            // Before Linux 6.6, which lacks multi-buffer and has not checked the queue.
            Err(Errno::INVAL) => ask(Probe::Copy),
            free => free,
        }
    }

    /// Binds a socket; retries until the deadline while the queue is busy.
    fn bind_by(&self, deadline: Instant, socket: BorrowedFd<'_>, flags: u16) -> Result<(), Errno> {
        in_time(deadline, || child::bind(socket, self.ifindex, self.queue, flags))
    }
}

/// Calls `bind` until the deadline while it returns EBUSY.
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
        // The kernel rejects what a driver without multi-buffer cannot do.
        assert_eq!(
            [0, 1, 2].map(Probe::of),
            [Probe::Refused, Probe::Refused, Probe::Copy]
        );
        assert_eq!(Probe::Refused.flags(), 1 << 2 | 1 << 4);
        // A flag that the kernel does not know.
        let unknown = Err(Errno::INVAL);
        assert_eq!(Probe::Refused.is_free(unknown), unknown);
        assert_eq!(Probe::Copy.is_free(unknown), Ok(()), "no such queue");
    }

    #[test]
    fn bind_is_repeated_while_the_queue_is_busy_and_there_is_time() {
        let mut tries = 0;
        let mut bind = || {
            tries += 1;
            if tries == 1 { Err(Errno::BUSY) } else { Ok(()) }
        };
        let later = Instant::now() + Duration::from_secs(3600);
        assert_eq!(in_time(later, &mut bind), Ok(()));
        assert_eq!(tries, 2);
        assert_eq!(in_time(later, || Err(Errno::PERM)), Err(Errno::PERM));
        assert_eq!(in_time(Instant::now(), || Err(Errno::BUSY)), Err(Errno::BUSY));
    }

    #[test]
    fn report_is_read_by_its_length() {
        let mut bytes = [0; REPORT_MAX];
        bytes[..4].copy_from_slice(&7u32.to_ne_bytes());
        let report = Report { bytes, len: 4 };
        assert_eq!((report.read::<u32>(), report.read::<u64>()), (Some(7), None));
    }
}
