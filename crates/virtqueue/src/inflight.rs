//! The inflight region: a file that the VMM keeps while a device dies and another one takes its place.
//!
//! Theory of operation (vhost-user, "Inflight I/O tracking"): the device makes the file (GET_INFLIGHT_FD), the
//! VMM keeps it and gives it to the successor (SET_INFLIGHT_FD). It has a region for each queue, and that a
//! state for each descriptor: which chains were taken and not given back, and in what order. What is written when is
//! in `inflight_split.rs` and `inflight_packed.rs`; here is where it lies.
//!
//! The layouts are those of the specification, with the padding that a C compiler gives them; regions start on
//! multiples of 64 bytes, as those of libvhost-user and DPDK do. All numbers are in the machine's own order.
//!
//! The VMM could write anything there, at any time. So each value is loaded by itself, once, and checked before it is used as an
//! index, and what a running device needs to know it does not ask the region, which is only written then.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};

use crate::crash;
use crate::mapping::{FileMapping, FileRange, ForeignFiles, MappingError};
use crate::{MAX_QUEUE_SIZE, QueueSize, RingError};

/// Version of the layout.
const VERSION: u16 = 1;
/// Each queue's region starts on a multiple of this many bytes.
const ALIGN: u64 = 64;

/// Bytes before the first state, and of each state.
const SPLIT: (u64, u64) = (16, 16);
const PACKED: (u64, u64) = (32, 32);

/// Where in a queue's region: of the header, both kinds.
const FEATURES: u64 = 0;
const VERSION_AT: u64 = 8;
const DESC_NUM: u64 = 10;

/// A region that cannot be used: the VMM's doing, or memory is missing.
#[derive(Debug, thiserror::Error)]
pub enum InflightError {
    /// The descriptor is no regular file (memfd are).
    #[error("the inflight region's descriptor is not a shared memory file")]
    NotAFile,
    /// The file ends before the region does, or the region is not aligned.
    #[error("an inflight region of {bytes} bytes at {offset} does not fit its file")]
    Range {
        /// Where it starts in the file; must be a multiple of 64.
        offset: u64,
        /// Its length in bytes.
        bytes: u64,
    },
    /// fstat or mmap failed.
    #[error("cannot map the inflight region")]
    Map(#[source] io::Error),
    /// See [`ForeignFiles::guard`].
    #[error("cannot guard the inflight region against truncation")]
    Guard(#[source] io::Error),
    /// No region has that many queues, or queues of that size.
    #[error("inflight region for {queues} queues of {queue_size} entries")]
    Shape {
        /// Queues.
        queues: u16,
        /// Entries of each.
        queue_size: u16,
    },
    /// Too short for what it is to hold.
    #[error("inflight region of {bytes} bytes, {needed} are needed")]
    TooShort {
        /// Bytes that there are.
        bytes: u64,
        /// Bytes that there must be.
        needed: u64,
    },
    /// Written by somebody who knows another layout.
    #[error("inflight region of queue {index}: version {version}, features {features:#x}, {entries} entries")]
    Unknown {
        /// Index of the queue.
        index: u16,
        /// Its version, of which 1 is known, and 0 for one never used.
        version: u16,
        /// Its features, of which none is known.
        features: u64,
        /// Its entries.
        entries: u16,
    },
}

/// What an inflight region is made for.
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
    queues: u16,
    entries: u16,
    packed: bool,
}

impl InflightRegion {
    /// Bytes for `queues` queues of `queue_size` entries; `None` for none, or for entries that no queue has.
    #[must_use]
    pub fn bytes_for(queues: u16, queue_size: u16, packed: bool) -> Option<u64> {
        let good = queues > 0 && queue_size > 0 && queue_size <= MAX_QUEUE_SIZE;
        // Less than 2^16 times 2^20 and some.
        good.then(|| u64::from(queues) * queue_bytes(queue_size, packed))
    }

    /// Makes a file (VHOST_USER_GET_INFLIGHT_FD): sealed, and of zeros, which means that no region was used yet. Returns it
    /// with its length.
    ///
    /// # Errors
    /// No memory, no descriptor, or a shape for which [`bytes_for`](Self::bytes_for) has no answer.
    pub fn create(queues: u16, queue_size: u16, packed: bool) -> io::Result<(OwnedFd, u64)> {
        let bytes = Self::bytes_for(queues, queue_size, packed).ok_or(io::ErrorKind::InvalidInput)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("vhost-inflight", flags)?;
        rustix::fs::ftruncate(&fd, bytes)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok((fd, bytes))
    }

    /// Maps a file (VHOST_USER_SET_INFLIGHT_FD), and no more of it than the shape needs. Regions that were never used are
    /// initialised.
    ///
    /// # Errors
    /// [`InflightError`].
    pub fn open(
        fd: BorrowedFd<'_>,
        range: FileRange,
        shape: InflightShape,
        files: &dyn ForeignFiles,
    ) -> Result<Self, InflightError> {
        let InflightShape {
            queues,
            entries,
            packed,
        } = shape;
        let refused = InflightError::Shape {
            queues,
            queue_size: entries,
        };
        let needed = Self::bytes_for(queues, entries, packed).ok_or(refused)?;
        let FileRange { offset, bytes } = range;
        if bytes < needed {
            return Err(InflightError::TooShort { bytes, needed });
        }
        if !offset.is_multiple_of(ALIGN) {
            return Err(InflightError::Range { offset, bytes });
        }
        let file = FileMapping::open(fd, range, needed, files).map_err(|error| match error {
            MappingError::NotAFile => InflightError::NotAFile,
            MappingError::Range { .. } => InflightError::Range { offset, bytes },
            MappingError::System(error) => InflightError::Map(error),
            MappingError::Guard(error) => InflightError::Guard(error),
        })?;
        let region = Self {
            file,
            queues,
            entries,
            packed,
        };
        (0..queues).try_for_each(|index| region.examine(index))?;
        Ok(region)
    }

    fn examine(&self, index: u16) -> Result<(), InflightError> {
        crash::before_load();
        let at = |field| self.start(index) + field;
        let (version, features) = (self.u16(at(VERSION_AT)), self.u64(at(FEATURES)));
        let (version, entries) = (load16(version), load16(self.u16(at(DESC_NUM))));
        let features = features.load(Ordering::Relaxed);
        if version == 0 {
            self.u64(at(FEATURES)).store(0, Ordering::Relaxed);
            store16(self.u16(at(DESC_NUM)), self.entries);
            store16(self.u16(at(VERSION_AT)), VERSION);
        } else if version != VERSION || features != 0 || entries != self.entries {
            return Err(InflightError::Unknown {
                index,
                version,
                features,
                entries,
            });
        }
        Ok(())
    }

    /// Entries of each queue.
    #[must_use]
    pub fn queue_size(&self) -> u16 {
        self.entries
    }

    /// The region of queue `index`; `None` if there is none.
    #[must_use]
    pub fn queue(self: &Arc<Self>, index: u16) -> Option<InflightQueue> {
        (index < self.queues).then(|| InflightQueue {
            start: self.start(index),
            region: Arc::clone(self),
        })
    }

    fn start(&self, index: u16) -> u64 {
        u64::from(index) * queue_bytes(self.entries, self.packed)
    }

    fn at(&self, at: u64, len: u64) -> NonNull<u8> {
        // Offsets are made of an index that was checked and of the constants of these files.
        assert!(
            at.is_multiple_of(len) && at + len <= self.file.len(),
            "{at} is a field of the inflight region"
        );
        self.file.at(at)
    }

    fn u8(&self, at: u64) -> &AtomicU8 {
        // SAFETY: mapped for as long as self lives, aligned (`at`; the mapping starts on a page, the region on a
        // multiple of 64).
        unsafe { self.at(at, 1).cast().as_ref() }
    }

    fn u16(&self, at: u64) -> &AtomicU16 {
        // SAFETY: as above.
        unsafe { self.at(at, 2).cast().as_ref() }
    }

    fn u32(&self, at: u64) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { self.at(at, 4).cast().as_ref() }
    }

    fn u64(&self, at: u64) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { self.at(at, 8).cast().as_ref() }
    }
}

impl fmt::Debug for InflightRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InflightRegion")
            .field("queues", &self.queues)
            .field("entries", &self.entries)
            .field("packed", &self.packed)
            .finish_non_exhaustive()
    }
}

const fn queue_bytes(entries: u16, packed: bool) -> u64 {
    let (header, state) = if packed { PACKED } else { SPLIT };
    (header + state * entries as u64).next_multiple_of(ALIGN)
}

fn load16(word: &AtomicU16) -> u16 {
    word.load(Ordering::Relaxed)
}

fn store16(word: &AtomicU16, value: u16) {
    word.store(value, Ordering::Release);
}

/// The region of one queue.
///
/// Stores are Release: whoever dies has made all of them up to some point, and none after it. That is so for the
/// machine when a process is killed; Release keeps the compiler to it.
#[derive(Debug)]
pub struct InflightQueue {
    region: Arc<InflightRegion>,
    start: u64,
}

impl InflightQueue {
    /// Entries of the queue that it is for.
    #[must_use]
    pub fn entries(&self) -> u16 {
        self.region.entries
    }

    /// Whether it is laid out for a packed ring.
    #[must_use]
    pub fn is_packed(&self) -> bool {
        self.region.packed
    }

    /// Itself, if it is for such a queue.
    pub(crate) fn check(self, size: QueueSize, packed: bool) -> Result<Self, RingError> {
        if self.entries() == size.get() && self.is_packed() == packed {
            Ok(self)
        } else {
            Err(RingError::Inflight {
                entries: self.entries(),
                packed: self.is_packed(),
            })
        }
    }

    /// Where field `field` of the state of descriptor `index` lies.
    fn state(&self, index: u16, field: u64) -> u64 {
        assert!(index < self.entries(), "the caller has checked the index");
        let (header, state) = if self.region.packed { PACKED } else { SPLIT };
        self.start + header + state * u64::from(index) + field
    }

    pub(crate) fn header_u8(&self, field: u64) -> u8 {
        crash::before_load();
        self.region.u8(self.start + field).load(Ordering::Relaxed)
    }

    pub(crate) fn header_u16(&self, field: u64) -> u16 {
        crash::before_load();
        load16(self.region.u16(self.start + field))
    }

    pub(crate) fn set_header_u8(&self, field: u64, value: u8) {
        crash::point();
        self.region.u8(self.start + field).store(value, Ordering::Release);
    }

    pub(crate) fn set_header_u16(&self, field: u64, value: u16) {
        crash::point();
        store16(self.region.u16(self.start + field), value);
    }

    pub(crate) fn u8(&self, index: u16, field: u64) -> u8 {
        crash::before_load();
        self.region.u8(self.state(index, field)).load(Ordering::Relaxed)
    }

    pub(crate) fn u16(&self, index: u16, field: u64) -> u16 {
        crash::before_load();
        load16(self.region.u16(self.state(index, field)))
    }

    pub(crate) fn u32(&self, index: u16, field: u64) -> u32 {
        crash::before_load();
        self.region.u32(self.state(index, field)).load(Ordering::Relaxed)
    }

    pub(crate) fn u64(&self, index: u16, field: u64) -> u64 {
        crash::before_load();
        self.region.u64(self.state(index, field)).load(Ordering::Relaxed)
    }

    pub(crate) fn set_u8(&self, index: u16, field: u64, value: u8) {
        crash::point();
        let at = self.state(index, field);
        self.region.u8(at).store(value, Ordering::Release);
    }

    pub(crate) fn set_u16(&self, index: u16, field: u64, value: u16) {
        crash::point();
        store16(self.region.u16(self.state(index, field)), value);
    }

    pub(crate) fn set_u32(&self, index: u16, field: u64, value: u32) {
        crash::point();
        let at = self.state(index, field);
        self.region.u32(at).store(value, Ordering::Release);
    }

    pub(crate) fn set_u64(&self, index: u16, field: u64, value: u64) {
        crash::point();
        let at = self.state(index, field);
        self.region.u64(at).store(value, Ordering::Release);
    }
}

#[cfg(test)]
#[path = "inflight_tests.rs"]
mod tests;
