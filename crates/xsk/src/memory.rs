//! Memory for frames: the contract for its owner, memory allocated here, and the raw copies.
//!
//! # Theory of operation
//!
//! A UMEM is shared with the kernel, with hardware, and (guest RAM) with a virtual machine, which may write
//! at any time. So its bytes never become `&[u8]` or `&mut [u8]`: all access is by pointer, through [`View`],
//! which checks bounds once and copies. This is the only file of the crate that touches UMEM bytes.
//!
//! Invariants, established by the types that implement [`UmemMemory`] and used by each SAFETY line below:
//!  - **M1** `base()..base()+len()` is mapped readable and writable for as long as the value exists;
//!  - **M2** both never change;
//!  - **M3** no Rust reference to these bytes exists, except that the owner of a private chunk may have one.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use derive_more::Display;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

const HUGE_PAGE: usize = 2 << 20;

/// Memory that can be registered as a UMEM: one contiguous mapping.
///
/// # Safety
///
/// For as long as the value exists, `base()` and `len()` must not change; the bytes from `base()` to `base() + len()`
/// must stay mapped readable and writable without a hole; and no Rust reference to any of them may exist, for the
/// kernel (and perhaps a guest) writes there at any time. From `private_from()` on, which must not change either, only
/// this process and the kernel can write; there, and only there, the owner of a chunk may make references to its bytes.
pub unsafe trait UmemMemory: Send + Sync {
    /// The first byte. Must be page-aligned to be registered.
    fn base(&self) -> NonNull<u8>;
    /// The length in bytes.
    fn len(&self) -> usize;
    /// Whether there is no byte at all.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// From this byte on, to the end, only this process and the kernel can write. Before it another process, or a
    /// guest, may write, too. By default the end: nothing is private.
    fn private_from(&self) -> usize {
        self.len()
    }
    /// The files that it is mapped from, in order and without a gap, so that another process can map it, too.
    /// By default none.
    fn parts(&self) -> Vec<MemoryPart<'_>> {
        Vec::new()
    }
}

/// A piece of memory and its file.
#[derive(Clone, Copy, Debug)]
pub struct MemoryPart<'a> {
    /// Its file, mapped shared.
    pub file: BorrowedFd<'a>,
    /// Offset of the piece in the file, bytes.
    pub file_offset: u64,
    /// Length of the piece, bytes.
    pub len: u64,
}

/// The pages that back a piece of [`OwnMemory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Display)]
pub enum Backing {
    /// Reserved huge pages of 2 MiB (`/proc/sys/vm/nr_hugepages`).
    #[display("hugetlb 2 MiB pages")]
    Hugetlb,
    /// Transparent huge pages; the kernel confirmed that there is at least one (`ShmemPmdMapped` in smaps).
    #[display("transparent huge pages")]
    Thp,
    /// Ordinary 4 KiB pages.
    #[display("4 KiB pages")]
    Pages4K,
}

/// Memory could not be allocated.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The requested size is 0.
    #[error("a UMEM of 0 bytes was requested")]
    Empty,
    /// The kernel refused it.
    #[error("cannot allocate {len_bytes} bytes of memory: {source}")]
    Map {
        /// The requested size, in bytes.
        len_bytes: usize,
        /// The kernel's error.
        source: io::Error,
    },
}

/// Memory of this process: reserved huge pages if there are any, otherwise transparent ones, otherwise 4 KiB
/// pages. Memory smaller than a huge page gets 4 KiB pages. It is a file without a name (memfd_create(2)), so
/// that a more privileged process can register it.
///
/// It is populated at once, so that the data path never faults. Unmapped on drop; the kernel holds the pages of a
/// registered UMEM itself until its socket is closed.
#[derive(Debug)]
pub struct OwnMemory {
    mapping: NonNull<u8>,
    mapping_len: usize,
    base: NonNull<u8>,
    len: usize,
    backing: Backing,
    file: OwnedFd,
}

// SAFETY: the value owns its mapping outright and only reads its own fields; munmap works from any thread.
unsafe impl Send for OwnMemory {}
// SAFETY: as above; shared use reads fields that never change.
unsafe impl Sync for OwnMemory {}

impl OwnMemory {
    /// Maps `len_bytes`, rounded up to whole pages.
    ///
    /// # Errors
    /// [`MemoryError`] if that is zero, or if the kernel refuses it.
    pub fn new(len_bytes: usize) -> Result<Self, MemoryError> {
        let refused = |source| MemoryError::Map { len_bytes, source };
        if len_bytes == 0 {
            return Err(MemoryError::Empty);
        }
        let too_long = || refused(io::ErrorKind::OutOfMemory.into());
        let len = len_bytes
            .checked_next_multiple_of(rustix::param::page_size())
            .ok_or_else(too_long)?;
        let huge_len = len.checked_next_multiple_of(HUGE_PAGE).ok_or_else(too_long)?;
        if len >= HUGE_PAGE
            && let Ok(memory) = Self::of_huge_pages(len, huge_len)
        {
            return Ok(memory);
        }
        Self::of_any_pages(len, huge_len).map_err(refused)
    }

    /// Reserved huge pages.
    fn of_huge_pages(len: usize, huge_len: usize) -> io::Result<Self> {
        let file = file_of(huge_len, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)?;
        let mapping = map_file(&file, ptr::null_mut(), huge_len, MapFlags::empty())?;
        let memory = Self {
            mapping,
            mapping_len: huge_len,
            base: mapping,
            len,
            backing: Backing::Hugetlb,
            file,
        };
        // A container may be allowed to map huge pages but not to use them: then this fails, instead of a
        // SIGBUS at the first access.
        memory.populate()?;
        Ok(memory)
    }

    /// Transparent huge pages, if available.
    fn of_any_pages(len: usize, huge_len: usize) -> io::Result<Self> {
        let file = file_of(huge_len, MemfdFlags::empty())?;
        // One huge page more than needed, so that the start can be moved to a huge page's boundary.
        let mapping_len = huge_len + HUGE_PAGE;
        let mapping = reserve(mapping_len)?;
        let skip = mapping.as_ptr().align_offset(HUGE_PAGE);
        // SAFETY: skip < HUGE_PAGE and the mapping is HUGE_PAGE + huge_len long, so the sum stays inside it.
        let base = unsafe { mapping.add(skip) };
        let mut memory = Self {
            mapping,
            mapping_len,
            base,
            len,
            backing: Backing::Pages4K,
            file,
        };
        map_file(&memory.file, base.as_ptr(), huge_len, MapFlags::FIXED)?;
        let is_large = len >= HUGE_PAGE;
        memory.advise(
            huge_len,
            match is_large {
                true => libc::MADV_HUGEPAGE,
                false => libc::MADV_NOHUGEPAGE,
            },
        );
        memory.populate()?;
        if is_large && !has_huge_pages(base) {
            memory.advise(huge_len, libc::MADV_COLLAPSE);
        }
        if has_huge_pages(base) {
            memory.backing = Backing::Thp;
        }
        Ok(memory)
    }

    /// Advice only: the call fails, and 4 KiB pages are used, if the kernel has no transparent huge pages, or
    /// none for files without a name (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`), and has no
    /// MADV_COLLAPSE either (Linux 6.1).
    fn advise(&self, len: usize, advice: c_int) {
        // SAFETY: M1: base..base+len lies inside the mapping; no advice used here changes contents.
        unsafe { libc::madvise(self.base.as_ptr().cast(), len, advice) };
    }

    /// The pages that back it.
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// Makes the kernel allocate all pages now.
    fn populate(&self) -> io::Result<()> {
        // SAFETY: M1: base..base+len lies inside the mapping. The call touches pages and changes none.
        match unsafe { madvise(self.base.as_ptr().cast(), self.len, Advice::LinuxPopulateWrite) } {
            // A kernel before 5.14 does not support it; it allocates the pages when they are pinned for the UMEM.
            Err(Errno::INVAL) => Ok(()),
            result => Ok(result?),
        }
    }
}

// SAFETY: M1: `new` mapped base..base+len readable and writable and only Drop unmaps it. M2: no method changes the
// fields. M3: the mapping is private to this value, which makes no reference to its bytes.
unsafe impl UmemMemory for OwnMemory {
    fn base(&self) -> NonNull<u8> {
        self.base
    }

    fn len(&self) -> usize {
        self.len
    }

    fn private_from(&self) -> usize {
        0
    }

    fn parts(&self) -> Vec<MemoryPart<'_>> {
        // Whole pages of the file, which may be huge ones.
        let len = match self.backing {
            Backing::Hugetlb => self.mapping_len,
            Backing::Thp | Backing::Pages4K => self.len,
        };
        let file = self.file.as_fd();
        vec![MemoryPart {
            file,
            file_offset: 0,
            len: len as u64,
        }]
    }
}

impl Drop for OwnMemory {
    fn drop(&mut self) {
        // SAFETY: `new` got mapping and mapping_len from mmap; all users hold the Arc, so none is left.
        let _ = unsafe { munmap(self.mapping.as_ptr().cast(), self.mapping_len) };
    }
}

/// A file of `len` bytes whose length is sealed.
fn file_of(len: usize, flags: MemfdFlags) -> io::Result<OwnedFd> {
    let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create(c"packets", flags)?;
    ftruncate(&file, len as u64)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Reserves address space without access.
fn reserve(len: usize) -> io::Result<NonNull<u8>> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), flags) }?;
    NonNull::new(start.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Maps a file from its start, at an address in a reservation of the caller, or at one that the kernel chooses.
fn map_file(file: &OwnedFd, at: *mut u8, len: usize, extra: MapFlags) -> io::Result<NonNull<u8>> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: with MAP_FIXED at..at+len is in a reservation without references; otherwise it touches no existing
    // memory.
    let start = unsafe { mmap(at.cast(), len, protection, MapFlags::SHARED | extra, file, 0) }?;
    NonNull::new(start.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Whether the kernel backs the mapping that contains `address` with at least one transparent huge page.
fn has_huge_pages(address: NonNull<u8>) -> bool {
    let Ok(smaps) = std::fs::read_to_string("/proc/self/smaps") else {
        return false;
    };
    let address = address.as_ptr() as usize;
    let mut inside = false;
    for line in smaps.lines() {
        let first = line.split_whitespace().next().unwrap_or_default();
        if let Some(range) = parse_range(first) {
            inside = range.contains(&address);
        } else if inside && first == "ShmemPmdMapped:" {
            return line.split_whitespace().nth(1).is_some_and(|kib| kib != "0");
        }
    }
    false
}

fn parse_range(text: &str) -> Option<Range<usize>> {
    let (start, end) = text.split_once('-')?;
    Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
}

/// A bounds-checked window on memory, which it keeps alive.
#[derive(Clone)]
pub(crate) struct View {
    base: NonNull<u8>,
    len: u64,
    private_from: u64,
    memory: Arc<dyn UmemMemory>,
}

// SAFETY: the pointer is to memory that `memory` (Send + Sync) keeps mapped (M1); every access is a raw copy.
unsafe impl Send for View {}
// SAFETY: as above; concurrent copies may garble bytes, as the kernel and a guest may at any time, and bytes are all
// they are ever read as.
unsafe impl Sync for View {}

impl View {
    /// Makes the kernel allocate the missing pages, for this process; see [`Umem::populate`](crate::Umem::populate).
    pub(crate) fn populate(&self) -> io::Result<()> {
        // SAFETY: the memory is mapped as long as this value exists; the advice changes no content.
        unsafe {
            madvise(
                self.base.as_ptr().cast(),
                self.len as usize,
                Advice::LinuxPopulateWrite,
            )
        }?;
        Ok(())
    }

    pub(crate) fn new(memory: Arc<dyn UmemMemory>) -> Self {
        Self {
            base: memory.base(),
            len: memory.len() as u64,
            private_from: memory.private_from() as u64,
            memory,
        }
    }

    pub(crate) fn memory(&self) -> &Arc<dyn UmemMemory> {
        &self.memory
    }

    pub(crate) fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    #[inline]
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    #[inline]
    pub(crate) fn private_from(&self) -> u64 {
        self.private_from
    }

    /// The address of `len` bytes from `at`; `None` if they are not all inside.
    #[inline]
    pub(crate) fn ptr(&self, at: u64, len: u64) -> Option<NonNull<u8>> {
        if at > self.len || len > self.len - at {
            return None;
        }
        // SAFETY: at <= self.len, so the result stays inside base..=base+len (M1, M2).
        Some(unsafe { self.base.add(at as usize) })
    }

    /// Copies bytes in; `None`, and nothing written, if they do not fit.
    #[inline]
    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> Option<()> {
        let target = self.ptr(at, bytes.len() as u64)?;
        // SAFETY: `ptr` checked that the target range is inside the memory (M1); `bytes` is a Rust reference, so by
        // M3 it does not overlap it.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), target.as_ptr(), bytes.len()) };
        Some(())
    }

    /// Copies bytes out; `None`, and nothing read, if they are not all inside.
    #[inline]
    pub(crate) fn read(&self, at: u64, bytes: &mut [u8]) -> Option<()> {
        let source = self.ptr(at, bytes.len() as u64)?;
        // SAFETY: as in `write`, in the other direction.
        unsafe { ptr::copy_nonoverlapping(source.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_memory_is_page_aligned_and_writable_to_its_last_byte() {
        let memory = OwnMemory::new(5000).unwrap();
        assert_eq!(memory.len() % rustix::param::page_size(), 0);
        assert_eq!(memory.base().as_ptr() as usize % rustix::param::page_size(), 0);
        let last = memory.len() as u64 - 1;
        let view = View::new(Arc::new(memory));
        assert_eq!(view.write(last, &[7]), Some(()));
        let mut byte = [0];
        assert_eq!(view.read(last, &mut byte), Some(()));
        assert_eq!(byte, [7]);
    }

    #[test]
    fn own_memory_of_less_than_a_huge_page_takes_none() {
        let memory = OwnMemory::new(HUGE_PAGE - 4096).unwrap();
        assert_eq!(memory.backing(), Backing::Pages4K);
        assert!(!has_huge_pages(memory.base()));
    }

    #[test]
    fn own_memory_of_nothing_or_of_everything_is_refused() {
        assert!(matches!(OwnMemory::new(0), Err(MemoryError::Empty)));
        assert!(matches!(OwnMemory::new(usize::MAX), Err(MemoryError::Map { .. })));
        assert!(matches!(OwnMemory::new(1 << 60), Err(MemoryError::Map { .. })));
    }

    #[test]
    fn view_refuses_what_is_not_wholly_inside() {
        let view = View::new(Arc::new(OwnMemory::new(8192).unwrap()));
        assert!(view.ptr(0, 8192).is_some());
        assert!(view.ptr(8192, 0).is_some());
        assert!(view.ptr(8192, 1).is_none());
        assert!(view.ptr(1, 8192).is_none());
        assert!(view.ptr(u64::MAX, 1).is_none());
        assert!(view.ptr(1, u64::MAX).is_none());
        assert_eq!(view.write(8190, &[0; 3]), None);
    }
}
