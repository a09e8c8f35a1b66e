//! Maps files of the VMM other than guest memory: the dirty log, the inflight region.
//!
//! Whole pages of the file are mapped, huge ones for hugetlbfs, so that the mapped range can be replaced and
//! unmapped. The VMM may truncate the file, as it may guest memory: [`ForeignFiles`] is called for each
//! mapping before its first byte is touched.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{FileType, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::region;

/// A part of a file that a VMM passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileRange {
    /// Its start in the file, bytes.
    pub offset: u64,
    /// Its length, bytes.
    pub bytes: u64,
}

/// How a process protects itself when it maps files that are not its own.
///
/// The owner of such a file can truncate it (unless it is sealed), or its file system may be full. An access
/// to the mapping is then SIGBUS, which ends the process if nothing handles it. So nothing here maps a file
/// without calling this before its first byte is touched.
pub trait ForeignFiles {
    /// Called when `[start, start + bytes)` maps such a file, in whole pages of the file. The returned guard
    /// lives as long as anything may touch the range, and is dropped just before the range is unmapped.
    ///
    /// # Errors
    /// The range cannot be guarded: the caller then unmaps it untouched.
    fn guard(&self, start: NonNull<u8>, bytes: usize) -> io::Result<Guard>;

    /// Maximum bytes of guest memory: a larger [`MemoryMap`](crate::MemoryMap) is refused.
    fn most_guest_bytes(&self) -> u64;
}

/// Keeps a mapping guarded until it is dropped.
pub type Guard = Box<dyn Send + Sync>;

/// For files of this process, or of an owner that may end this process by SIGBUS: guards nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct TrustedFiles;

impl ForeignFiles for TrustedFiles {
    fn guard(&self, _start: NonNull<u8>, _bytes: usize) -> io::Result<Guard> {
        Ok(Box::new(()))
    }

    fn most_guest_bytes(&self) -> u64 {
        u64::MAX
    }
}

/// Creates a memfd of `bytes` zeros, sealed against any change of its length.
pub(crate) fn sealed_file(name: &str, bytes: u64) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, bytes)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(file)
}

/// A range of a file, mapped shared and writable until drop.
pub(crate) struct FileMapping {
    /// First, so that it is dropped before the memory is unmapped.
    _guard: Guard,
    pages: Pages,
    /// Offset of the range in the pages, and its length, bytes.
    lead: usize,
    len: u64,
}

/// Whole pages, unmapped on drop.
struct Pages {
    start: NonNull<u8>,
    bytes: usize,
}

/// A file of the VMM that cannot be used: the VMM's fault, except [`Map`](Self::Map) and [`Guard`](Self::Guard).
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Not a regular file (a memfd is one).
    #[error("the descriptor is not a shared memory file")]
    NotAFile,
    /// The range is empty, or not inside the file.
    #[error("{bytes} bytes at {offset} are not in a file of {size} bytes")]
    Range {
        /// Where it starts in the file.
        offset: u64,
        /// Its length in bytes.
        bytes: u64,
        /// Length of the file.
        size: u64,
    },
    /// fstat, fstatfs or mmap failed.
    #[error("cannot map the file")]
    Map(#[source] io::Error),
    /// See [`ForeignFiles::guard`].
    #[error("cannot guard the file against truncation")]
    Guard(#[source] io::Error),
}

// SAFETY: the pages are owned by this value, users of `at` reach them by atomics, and no thread is tied to them.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl FileMapping {
    /// Maps the first `len` bytes of `range` of `fd`. The file must contain the whole range.
    pub(crate) fn open(
        fd: BorrowedFd<'_>,
        range: FileRange,
        len: u64,
        files: &dyn ForeignFiles,
    ) -> Result<Self, FileError> {
        let system = |errno: rustix::io::Errno| FileError::Map(errno.into());
        let stat = rustix::fs::fstat(fd).map_err(system)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(FileError::NotAFile);
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let FileRange { offset, bytes } = range;
        let outside = FileError::Range { offset, bytes, size };
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= size);
        if len == 0 || len > bytes || !inside {
            return Err(outside);
        }
        let page = region::page_size(fd, rustix::param::page_size() as u64).map_err(FileError::Map)?;
        let lead = offset % page;
        let bytes = (lead + len)
            .checked_next_multiple_of(page)
            .and_then(|bytes| usize::try_from(bytes).ok())
            .ok_or(outside)?;
        // SAFETY: no address is asked for, so no existing mapping is touched.
        let start = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd.as_fd(),
                offset - lead,
            )
        }
        .map_err(system)?;
        let start =
            NonNull::new(start.cast()).ok_or_else(|| FileError::Map(io::ErrorKind::OutOfMemory.into()))?;
        let pages = Pages { start, bytes };
        // Before anything can access the bytes.
        let guard = files.guard(pages.start, pages.bytes).map_err(FileError::Guard)?;
        Ok(Self {
            _guard: guard,
            pages,
            lead: lead as usize,
            len,
        })
    }

    /// Length of the range, bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Pointer to byte `at` of the range, valid until drop.
    ///
    /// # Panics
    /// In debug builds, if it is not in the range: a bug of the caller.
    #[inline]
    pub(crate) fn at(&self, at: u64) -> NonNull<u8> {
        debug_assert!(at < self.len, "the caller stays inside the range");
        // SAFETY: the range is inside the pages (open), and `at` inside the range.
        unsafe { self.pages.start.add(self.lead + at as usize) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by open, in whole pages; pointers from `at` are valid only until this drop.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
