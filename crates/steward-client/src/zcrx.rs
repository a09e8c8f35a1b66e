//! The lessee's side of a lease for io_uring zero-copy receive.
//!
//! ```text
//!   QueueLease::take      the steward checks the policy, and sets up the NIC if the policy allows that
//!   a ring, disabled      io_uring_setup: R_DISABLED, SINGLE_ISSUER, DEFER_TASKRUN, CQE32; CQEs enough
//!   QueueLease::register  the steward gets the ring from this process, registers the queue, and steers the flows
//!   the ring, enabled     IORING_REGISTER_ENABLE_RINGS, by the thread that is to use it; then it is mapped and read
//! ```
//!
//! The connection is the lease: dropping a [`QueueLease`] ends it, and the queue receives no more frames. The queue
//! itself stays registered with the rings until all of them are closed: close them with the lease, or no other
//! process can lease the queue.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use super::connection::Incoming;
use super::{Connection, LeaseError, Waiting};
use steward_protocol::{Answer, Part, Request, ZcrxRegistered, ZcrxRings, ZcrxWanted};

/// Lower estimate of the rate at which memory is registered, bytes/s.
const PINNED_A_SECOND: u64 = 256 << 20;

/// Memory that payload is received into: a part of a file of tmpfs or hugetlbfs (memfd_create(2)) whose pages are all
/// allocated.
#[derive(Debug, Clone, Copy)]
pub struct Area<'a> {
    /// Its file.
    pub file: BorrowedFd<'a>,
    /// The part of the file.
    pub part: Part,
}

/// The refill ring and the size of buffers.
#[derive(Debug, Clone, Copy)]
pub struct Refill {
    /// Entries of the refill ring: a power of two.
    pub entries: u32,
    /// Bytes of a buffer: a power of two, or 0 for a page.
    pub buffer_bytes: u32,
}

/// A lease of a queue for zero-copy receive.
#[derive(Debug)]
pub struct QueueLease {
    connection: Connection,
    waiting: Waiting,
}

impl QueueLease {
    /// Asks the steward at `path` for a queue. `waiting` limits this and all later requests.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn take(path: &Path, wanted: &ZcrxWanted, waiting: Waiting) -> Result<Self, LeaseError> {
        let connection = Connection::to(path, waiting.answer)?;
        let mut lease = Self { connection, waiting };
        match lease.ask(&Request::Zcrx(wanted.clone()), &[], Duration::ZERO)? {
            Answer::Done => Ok(lease),
            other => Err(refused(other)),
        }
    }

    /// Has the queue registered with rings of this process, which must still be disabled and all receive into `area`.
    /// The first ring has the mapping of the refill ring. Call this once for a lease.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn register(
        &mut self,
        rings: &[BorrowedFd<'_>],
        area: Area<'_>,
        refill: Refill,
    ) -> Result<ZcrxRegistered, LeaseError> {
        let request = Request::ZcrxRegister(ZcrxRings {
            rings: rings.iter().map(AsRawFd::as_raw_fd).collect(),
            area: area.part,
            entries: refill.entries,
            buffer_bytes: refill.buffer_bytes,
        });
        // The kernel pins page by page.
        let longer = Duration::from_secs(area.part.len / PINNED_A_SECOND);
        match self.ask(&request, &[area.file], longer)? {
            Answer::ZcrxRegistered(registered) => Ok(registered),
            other => Err(refused(other)),
        }
    }

    /// Checks whether the lease continues, without waiting.
    ///
    /// # Errors
    /// [`LeaseError`]: the steward ended the lease, with the reason, or the steward itself ended.
    pub fn check(&mut self) -> Result<(), LeaseError> {
        loop {
            match self.connection.receive()? {
                Incoming::Nothing => return Ok(()),
                Incoming::End => return Err(LeaseError::Gone),
                // Left over from a request that timed out.
                Incoming::Message(message) if message.serial != 0 => {}
                Incoming::Message(message) => self.connection.note(message.answer)?,
            }
        }
    }

    /// Readable when there is something to [check](Self::check).
    #[must_use]
    pub fn readable(&self) -> Option<BorrowedFd<'_>> {
        self.connection.socket.as_ref().map(AsFd::as_fd)
    }

    fn ask(
        &mut self,
        request: &Request,
        files: &[BorrowedFd<'_>],
        longer: Duration,
    ) -> Result<Answer, LeaseError> {
        let deadline = Instant::now() + self.waiting.answer + longer;
        let answered = self.connection.ask(request, files, &self.waiting, deadline)?;
        Ok(answered.ok_or(LeaseError::Gone)?.answer)
    }
}

fn refused(answer: Answer) -> LeaseError {
    match answer {
        Answer::Refused(refusal) => LeaseError::Refused(refusal),
        _ => LeaseError::Mismatch,
    }
}
