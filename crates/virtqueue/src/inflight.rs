//! The inflight region: a file that the VMM keeps while a device dies and a successor replaces it.
//!
//! Theory of operation (vhost-user, "Inflight I/O tracking"): the device creates the file (GET_INFLIGHT_FD),
//! the VMM keeps it and passes it to the successor (SET_INFLIGHT_FD). It has a region for each queue, and
//! each region a state for each descriptor: which chains were taken and not returned, and in what order.
//! `inflight_split.rs` and `inflight_packed.rs` define what is written when; this file defines where.
//!
//! The layouts are those of the specification, with the padding that a C compiler gives them; regions start on
//! multiples of 64 bytes, as those of libvhost-user and DPDK do. All numbers are in the machine's own order.
//!
//! The VMM could write anything there, at any time. So each value is loaded once, and checked before it is
//! used as an index. A running device only writes there (a split queue also copies the last batch's head).
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::crash;
use crate::mapping::{FileError, FileMapping, FileRange, ForeignFiles, sealed_file};
use crate::{MAX_QUEUE_SIZE, QueueSize, RingError, RingFormat};

/// Version of the layout.
const VERSION: u16 = 1;
/// Each queue's region starts on a multiple of this many bytes.
const ALIGN: u64 = 64;

/// Bytes of a queue's header, which precedes its states, and of each state.
struct Bytes {
    header: u64,
    state: u64,
}

const SPLIT: Bytes = Bytes {
    header: 16,
    state: 16,
};
const PACKED: Bytes = Bytes {
    header: 32,
    state: 32,
};

/// Fields of the header, of both kinds of ring.
const FEATURES: Field<u64> = Field::at(0);
const VERSION_AT: Field<u16> = Field::at(8);
const DESC_NUM: Field<u16> = Field::at(10);

/// A number in a header or in a state.
#[derive(Clone, Copy)]
pub(crate) struct Field<T> {
    /// Its offset there, bytes.
    offset: u64,
    width: PhantomData<T>,
}

impl<T> Field<T> {
    pub(crate) const fn at(offset: u64) -> Self {
        Self {
            offset,
            width: PhantomData,
        }
    }
}

/// A number in the region, and the atomic type to access it. Stores are Release: see [`InflightQueue`].
pub(crate) trait Number: Copy {
    type Atomic;
    fn get(from: &Self::Atomic) -> Self;
    fn set(self, to: &Self::Atomic);
}

macro_rules! numbers {
    ($($number:ty: $atomic:ty),+) => {$(
        impl Number for $number {
            type Atomic = $atomic;
            fn get(from: &$atomic) -> Self {
                from.load(Ordering::Relaxed)
            }
            fn set(self, to: &$atomic) {
                to.store(self, Ordering::Release);
            }
        }
    )+};
}

numbers!(u8: AtomicU8, u16: AtomicU16, u32: AtomicU32, u64: AtomicU64);

/// A region that cannot be used: the VMM's fault, or out of memory.
///
/// `queues`, `queue_size` (entries of each), `offset` and `bytes` (of the file, both in bytes) are as
/// requested; `needed` is in bytes, too. `index` is the queue's; `entries` is the queue size in its region.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum InflightError {
    /// The file cannot be mapped.
    #[error(transparent)]
    File(#[from] FileError),
    /// The region does not start on a multiple of 64 bytes.
    #[error("an inflight region at {offset}, which is not a multiple of 64")]
    Misaligned { offset: u64 },
    /// No region has that many queues, or queues of that size.
    #[error("inflight region for {queues} queues of {queue_size} entries")]
    Shape { queues: u16, queue_size: u16 },
    /// Too short for the requested queues.
    #[error("inflight region of {bytes} bytes, {needed} are needed")]
    TooShort { bytes: u64, needed: u64 },
    /// Written in another layout, or for another queue size.
    #[error("inflight region of queue {index}: version {version}, features {features:#x}, {entries} entries")]
    Unknown {
        index: u16,
        /// Its version; supported: 1, and 0 for a region that was never used.
        version: u16,
        /// Its features, of which none is supported.
        features: u64,
        entries: u16,
    },
}

/// The queues that an inflight region is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightShape {
    /// Number of queues.
    pub queues: u16,
    /// Entries of each.
    pub entries: u16,
    /// Whether they are packed.
    pub packed: bool,
}

/// The file with the regions of all queues, mapped.
pub struct InflightRegion {
    file: FileMapping,
    shape: InflightShape,
}

impl InflightShape {
    /// Bytes of such a region; `None` for no queues or for an invalid queue size.
    #[must_use]
    pub fn bytes(self) -> Option<u64> {
        let good = self.queues > 0 && self.entries > 0 && self.entries <= MAX_QUEUE_SIZE;
        // Cannot overflow: less than 2^16 times 2^21.
        good.then(|| u64::from(self.queues) * self.queue_bytes())
    }

    const fn queue_bytes(self) -> u64 {
        let Bytes { header, state } = self.sizes();
        (header + state * self.entries as u64).next_multiple_of(ALIGN)
    }

    const fn sizes(self) -> Bytes {
        if self.packed { PACKED } else { SPLIT }
    }
}

/// A file to hold an [`InflightRegion`].
#[derive(Debug)]
pub struct InflightFile {
    /// The file.
    pub file: OwnedFd,
    /// Its length.
    pub bytes: u64,
}

impl InflightRegion {
    /// Creates a file (VHOST_USER_GET_INFLIGHT_FD): sealed, and all zeros, which means that no region was used yet.
    ///
    /// # Errors
    /// No memory, no descriptor, or a shape for which [`InflightShape::bytes`] is `None`.
    pub fn create(shape: InflightShape) -> io::Result<InflightFile> {
        let bytes = shape.bytes().ok_or(io::ErrorKind::InvalidInput)?;
        let file = sealed_file("vhost-inflight", bytes)?;
        Ok(InflightFile { file, bytes })
    }

    /// Maps as much of a file as the shape needs (VHOST_USER_SET_INFLIGHT_FD), and initialises regions that
    /// were never used.
    ///
    /// # Errors
    /// [`InflightError`].
    pub fn open(
        fd: BorrowedFd<'_>,
        range: FileRange,
        shape: InflightShape,
        files: &dyn ForeignFiles,
    ) -> Result<Self, InflightError> {
        let needed = shape.bytes().ok_or(InflightError::Shape {
            queues: shape.queues,
            queue_size: shape.entries,
        })?;
        let FileRange { offset, bytes } = range;
        if bytes < needed {
            return Err(InflightError::TooShort { bytes, needed });
        }
        if !offset.is_multiple_of(ALIGN) {
            return Err(InflightError::Misaligned { offset });
        }
        let file = FileMapping::open(fd, range, needed, files)?;
        let region = Self { file, shape };
        (0..shape.queues).try_for_each(|index| region.examine(index))?;
        Ok(region)
    }

    fn examine(&self, index: u16) -> Result<(), InflightError> {
        crash::before_load();
        let start = self.start(index);
        let version = u16::get(self.number(start, VERSION_AT));
        let features = u64::get(self.number(start, FEATURES));
        let entries = u16::get(self.number(start, DESC_NUM));
        if version == 0 {
            0u64.set(self.number(start, FEATURES));
            self.shape.entries.set(self.number(start, DESC_NUM));
            VERSION.set(self.number(start, VERSION_AT));
        } else if version != VERSION || features != 0 || entries != self.shape.entries {
            return Err(InflightError::Unknown {
                index,
                version,
                features,
                entries,
            });
        }
        Ok(())
    }

    /// The queues that it is for.
    pub fn shape(&self) -> InflightShape {
        self.shape
    }

    /// The region of queue `index`; `None` if there is none.
    #[must_use]
    pub fn queue(self: &Arc<Self>, index: u16) -> Option<InflightQueue> {
        (index < self.shape.queues).then(|| InflightQueue {
            start: self.start(index),
            entries: self.shape.entries,
            region: Arc::clone(self),
        })
    }

    fn start(&self, index: u16) -> u64 {
        u64::from(index) * self.shape.queue_bytes()
    }

    /// Field `field` of the header or state that starts at `start`.
    fn number<T: Number>(&self, start: u64, field: Field<T>) -> &T::Atomic {
        let (at, len) = (start + field.offset, size_of::<T::Atomic>() as u64);
        // Offsets are computed from a checked index and from constants of these files.
        assert!(
            at.is_multiple_of(len) && at + len <= self.file.len(),
            "{at} is a field of the inflight region"
        );
        // SAFETY: mapped for as long as self lives, aligned (above; the mapping starts on a page, the region on a
        // multiple of 64); and it is an atomic.
        unsafe { self.file.at(at).cast().as_ref() }
    }
}

impl fmt::Debug for InflightRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InflightRegion")
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

/// The region of one queue.
///
/// Stores are Release: a device that dies has made all stores up to some point, and none after it. The
/// machine guarantees that when a process is killed; Release keeps the compiler from reordering them.
#[derive(Debug)]
pub struct InflightQueue {
    region: Arc<InflightRegion>,
    start: u64,
    entries: u16,
}

impl InflightQueue {
    /// Entries of its queue: the number of states.
    pub(crate) fn entries(&self) -> u16 {
        self.entries
    }

    /// The part that such a queue needs: after a reset by its driver a queue may be shorter than the region.
    pub(crate) fn of_ring(self, size: QueueSize, packed: bool) -> Result<Self, RingError> {
        let shape = self.region.shape;
        if size.get() <= shape.entries && shape.packed == packed {
            let entries = size.get();
            Ok(Self { entries, ..self })
        } else {
            Err(RingError::Inflight {
                ring: RingFormat::of(packed),
                size: size.get(),
                region: RingFormat::of(shape.packed),
                entries: shape.entries,
            })
        }
    }

    /// Where the state of descriptor `index` starts.
    fn state(&self, index: u16) -> u64 {
        assert!(index < self.entries(), "the caller has checked the index");
        let Bytes { header, state } = self.region.shape.sizes();
        self.start + header + state * u64::from(index)
    }

    /// A field of the header.
    pub(crate) fn header<T: Number>(&self, field: Field<T>) -> T {
        crash::before_load();
        T::get(self.region.number(self.start, field))
    }

    pub(crate) fn set_header<T: Number>(&self, field: Field<T>, value: T) {
        crash::point();
        value.set(self.region.number(self.start, field));
    }

    /// A field of the state of descriptor `index`.
    pub(crate) fn get<T: Number>(&self, index: u16, field: Field<T>) -> T {
        crash::before_load();
        T::get(self.region.number(self.state(index), field))
    }

    pub(crate) fn set<T: Number>(&self, index: u16, field: Field<T>, value: T) {
        crash::point();
        value.set(self.region.number(self.state(index), field));
    }
}

#[cfg(all(test, not(loom)))]
#[path = "inflight_tests.rs"]
mod tests;
