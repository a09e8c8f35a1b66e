//! Memory that tests map as a guest's would be, or as it must not be.
#![allow(unsafe_code)]

use std::fs::File;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};
use xsk::UmemMemory;

struct Mapped {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a plain mapping, used by pointer only.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

// SAFETY: mapped until drop, never moved, no references made. (`with_hole` breaks the rule about holes on purpose: the
// kernel must refuse it before anything touches the bytes.)
unsafe impl UmemMemory for Mapped {
    fn base(&self) -> NonNull<u8> {
        self.base
    }

    fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: what mmap returned, and the last user is gone.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A memfd of `len` bytes, mapped shared as guest RAM is, and the file.
pub(crate) fn memfd(len: usize) -> (Arc<dyn UmemMemory>, File) {
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = File::from(file);
    (shared(&file, len), file)
}

/// A file, made `len` bytes long and mapped shared.
pub(crate) fn shared(file: &File, len: usize) -> Arc<dyn UmemMemory> {
    file.set_len(len as u64).unwrap();
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base = unsafe {
        mmap(
            ptr::null_mut(),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            file,
            0,
        )
    };
    let base = NonNull::new(base.unwrap().cast()).unwrap();
    Arc::new(Mapped { base, len })
}

/// Anonymous memory with one PROT_NONE page at `hole`.
pub(crate) fn with_hole(len: usize, hole: usize) -> Arc<dyn UmemMemory> {
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base = unsafe {
        mmap_anonymous(
            ptr::null_mut(),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )
    };
    let base: NonNull<u8> = NonNull::new(base.unwrap().cast()).unwrap();
    // SAFETY: one page of the mapping just made.
    unsafe { mprotect(base.as_ptr().add(hole).cast(), 4096, MprotectFlags::empty()) }.unwrap();
    Arc::new(Mapped { base, len })
}
