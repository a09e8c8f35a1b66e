//! The dirty log of a live migration: which pages of guest memory were written.
//!
//! Theory of operation (vhost-user, "Migration"): the VMM shares a bitmap with a bit for every 4096 bytes of
//! guest-physical address space. A process that writes guest memory sets the bits *after* the write. The VMM
//! takes a bit (and clears it) before it copies the page, so if a bit is set too early, the VMM may copy the
//! page with its old content, and the write is lost.
//!
//! The VMM sets the size of the bitmap. Pages beyond its end are not logged: the VMM does not want them, and
//! no value from it or from the guest can make us write elsewhere.
#![allow(unsafe_code)]

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::mapping::{FileError, FileMapping, FileRange, ForeignFiles};
use crate::{GuestAddr, MemoryMap};

/// Bytes of guest memory for each bit (vhost-user, `VHOST_LOG_PAGE`; not the system's page size).
pub const LOG_PAGE_BYTES: u64 = 4096;

/// The VMM's bitmap, mapped.
pub struct DirtyLog {
    bitmap: FileMapping,
}

impl DirtyLog {
    /// Maps the bitmap that is `range` of `fd` (VHOST_USER_SET_LOG_BASE).
    ///
    /// # Errors
    /// [`FileError`].
    pub fn open(fd: BorrowedFd<'_>, range: FileRange, files: &dyn ForeignFiles) -> Result<Self, FileError> {
        let bitmap = FileMapping::open(fd, range, range.bytes, files)?;
        Ok(Self { bitmap })
    }

    /// Marks `len` bytes at guest address `addr` as written. Call it after the write.
    #[inline]
    pub fn note(&self, addr: GuestAddr, len: u64) {
        if len == 0 {
            return;
        }
        let first = addr.get() / LOG_PAGE_BYTES;
        let last = addr.get().saturating_add(len - 1) / LOG_PAGE_BYTES;
        for page in first..=last.min((self.bitmap.len() * 8).saturating_sub(1)) {
            self.set(page);
        }
    }

    /// Sets the bit of `page`, which is inside the bitmap.
    #[inline]
    fn set(&self, page: u64) {
        let (at, bit) = (page / 8, 1u8 << (page % 8));
        // SAFETY: the mapping is valid as long as self, and a byte needs no alignment.
        let byte = unsafe { self.bitmap.at(at).cast::<AtomicU8>().as_ref() };
        // Publishes the write to the page before the bit. Pairs with the VMM's atomic exchange of the bitmap
        // before it copies pages (vhost_dev_sync_region in QEMU, hw/virtio/vhost.c). Without it the VMM takes
        // the bit, copies the old page, and the write is lost. The exchange may happen between any two
        // accesses of ours, so this is one atomic operation instead of load and store. It is done even if the
        // bit is set, because a load that finds it set orders nothing.
        byte.fetch_or(bit, Ordering::Release);
    }
}

impl fmt::Debug for DirtyLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirtyLog")
            .field("bytes", &self.bitmap.len())
            .finish_non_exhaustive()
    }
}

impl MemoryMap {
    /// Marks `len` bytes at `offset` in the map as written in `log`. The range is within one region; one in
    /// no region (the private area) is not the guest's and is not logged.
    #[inline]
    pub fn log(&self, log: &DirtyLog, offset: u64, len: u64) {
        if let Some(addr) = self.guest_addr(offset) {
            log.note(addr, len);
        }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "log_tests.rs"]
mod tests;
