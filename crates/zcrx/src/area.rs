//! The memory that holds payload, divided into buffers of one size, and memory that is mapped from a file.
//!
//! # Theory of operation
//!
//! An area is shared with the kernel, and with a NIC. Its bytes become `&[u8]` in one place only, [`Piece`]: a piece
//! is the right to read a range that the kernel has filled and will not write until the buffer is given back.
//!
//! Invariants, used by the SAFETY lines here and in `piece.rs`:
//!  - **A1** `base..base + buffers * buffer_bytes` is mapped as long as `memory` lives ([`UmemMemory`]'s promise), and
//!    lies in that part of it to which nobody but this process and the kernel writes;
//!  - **A2** a range that [`Area::find`] returns lies wholly inside one buffer;
//!  - **A3** no other area of the process has any of its bytes ([`Area::claim`]): else what the kernel
//!    fills for one receiver would change pieces of another.
//!
//! [`Piece`]: crate::Piece
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use xsk::{Mapping, MemoryPart, UmemMemory};

/// The location of a piece.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) start: NonNull<u8>,
    pub(crate) len: u32,
    pub(crate) buffer: u32,
}

/// Memory, divided into buffers.
pub(crate) struct Area {
    memory: Arc<dyn UmemMemory>,
    base: NonNull<u8>,
    /// Where `base` is in `memory`.
    skipped: usize,
    buffer_bytes: u32,
    buffers: u32,
    claim: Option<Claim>,
}

/// The addresses that areas have.
static CLAIMED: Mutex<Vec<Range<u64>>> = Mutex::new(Vec::new());

/// Addresses that no other area may have while this lives.
struct Claim(Range<u64>);

impl Claim {
    fn new(wanted: Range<u64>) -> Option<Self> {
        let mut claimed = Self::all();
        let overlaps = |it: &Range<u64>| it.start < wanted.end && wanted.start < it.end;
        if claimed.iter().any(overlaps) {
            return None;
        }
        claimed.push(wanted.clone());
        Some(Self(wanted))
    }

    fn all() -> MutexGuard<'static, Vec<Range<u64>>> {
        CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        Self::all().retain(|it| *it != self.0);
    }
}

// SAFETY: the pointer stands for memory that `memory` (Send + Sync) keeps mapped (A1); here it is only computed with.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl Area {
    /// Divides the private part of the memory, page-aligned, into buffers of so many bytes, at most `most` of them.
    /// `None` if not one fits.
    pub(crate) fn new(memory: Arc<dyn UmemMemory>, buffer_bytes: u32, most: u32) -> Option<Self> {
        let skipped = memory
            .private_from()
            .checked_next_multiple_of(rustix::param::page_size())?;
        let len = memory.len().checked_sub(skipped)?;
        let buffers = u32::try_from(len.checked_div(buffer_bytes as usize)?).unwrap_or(u32::MAX);
        let buffers = buffers.min(most);
        if buffers == 0 {
            return None;
        }
        // SAFETY: skipped <= len of the memory, so the result stays inside or at its end.
        let base = unsafe { memory.base().add(skipped) };
        Some(Self {
            memory,
            base,
            skipped,
            buffer_bytes,
            buffers,
            claim: None,
        })
    }

    /// Claims its bytes for itself; `None` if another area has some of them.
    pub(crate) fn claim(mut self) -> Option<Self> {
        let begins = self.address();
        self.claim = Some(Claim::new(begins..begins + self.len())?);
        Some(self)
    }

    pub(crate) fn memory(&self) -> &Arc<dyn UmemMemory> {
        &self.memory
    }

    pub(crate) fn skipped(&self) -> usize {
        self.skipped
    }

    pub(crate) fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    pub(crate) fn len(&self) -> u64 {
        u64::from(self.buffer_bytes) * u64::from(self.buffers)
    }

    pub(crate) fn buffers(&self) -> u32 {
        self.buffers
    }

    pub(crate) fn buffer_bytes(&self) -> u32 {
        self.buffer_bytes
    }

    /// Where a buffer begins, from the start of the area.
    pub(crate) fn offset_of(&self, buffer: u32) -> u64 {
        u64::from(buffer) * u64::from(self.buffer_bytes)
    }

    /// The place of so many bytes at an offset; `None` if they are not wholly inside one buffer.
    pub(crate) fn find(&self, offset: u64, len: u32) -> Option<Place> {
        let buffer = u32::try_from(offset / u64::from(self.buffer_bytes)).ok()?;
        let within = offset % u64::from(self.buffer_bytes);
        if buffer >= self.buffers || within + u64::from(len) > u64::from(self.buffer_bytes) {
            return None;
        }
        // SAFETY: the offset is inside buffer number `buffer`, which is one of the area's (A1).
        let start = unsafe { self.base.add(offset as usize) };
        Some(Place { start, len, buffer })
    }
}

/// A file that is mapped: the area, or the refill ring, of an instance that another process registered.
#[derive(Debug)]
pub(crate) struct FileMemory {
    mapping: Mapping,
    file: OwnedFd,
    file_offset: u64,
}

impl FileMemory {
    pub(crate) fn map(file: OwnedFd, file_offset: u64, len: usize) -> io::Result<Self> {
        Ok(Self {
            mapping: Mapping::new(file.as_fd(), len, file_offset)?,
            file,
            file_offset,
        })
    }
}

// SAFETY: `map` mapped base..base+len readable and writable, only Drop unmaps it, no method changes the fields, and no
// reference to the bytes is made here. Who passes the file promises that nobody else writes (`Receiver::import`).
unsafe impl UmemMemory for FileMemory {
    fn base(&self) -> NonNull<u8> {
        self.mapping.start()
    }

    fn len(&self) -> usize {
        self.mapping.len()
    }

    fn private_from(&self) -> usize {
        0
    }

    fn parts(&self) -> Vec<MemoryPart<'_>> {
        vec![MemoryPart {
            file: self.file.as_fd(),
            file_offset: self.file_offset,
            len: self.mapping.len() as u64,
        }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xsk::OwnMemory;

    fn area(bytes: usize, buffer_bytes: u32, most: u32) -> Option<Area> {
        Area::new(Arc::new(OwnMemory::new(bytes).unwrap()), buffer_bytes, most)
    }

    #[test]
    fn a_range_is_inside_one_buffer_or_nowhere() {
        let area = area(3 * 4096, 4096, u32::MAX).unwrap();
        assert_eq!((area.buffers(), area.len()), (3, 3 * 4096));
        let place = area.find(4096 + 100, 3996).unwrap();
        assert_eq!((place.buffer, place.len), (1, 3996));
        assert_eq!(place.start.as_ptr() as u64, area.address() + 4196);
        for (offset, len) in [
            (4096 + 100, 3997),
            (3 * 4096, 0),
            (3 * 4096, 1),
            (u64::MAX, 1),
            (1 << 48, 1),
            (0, u32::MAX),
        ] {
            assert!(area.find(offset, len).is_none(), "{offset} {len}");
        }
    }

    #[test]
    fn bytes_are_of_one_area_at_a_time() {
        let memory: Arc<dyn UmemMemory> = Arc::new(OwnMemory::new(4 * 4096).unwrap());
        let area = |buffers| Area::new(memory.clone(), 4096, buffers).unwrap();
        let first = area(2).claim().unwrap();
        assert!(area(4).claim().is_none(), "two of them are taken");
        drop(first);
        assert!(area(4).claim().is_some());
    }

    #[test]
    fn memory_for_no_buffer_is_no_area() {
        assert!(area(4096, 8192, u32::MAX).is_none());
        assert!(area(4096, 0, u32::MAX).is_none());
        assert_eq!(area(8 * 4096, 4096, 5).unwrap().buffers(), 5);
    }
}
