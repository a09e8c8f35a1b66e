//! Copies bytes into and out of the map.
//!
//! Theory of operation: each function checks its range against the length of the map, once, and then copies
//! bytes through raw pointers. It never makes a reference to guest memory: the guest may write there at any
//! time, and a reference would promise the compiler that nobody does. Only plain bytes are copied out, so a
//! copy that a concurrent write tears harms only the guest. A value that is used twice must be copied out
//! first, and both uses must read the copy.
//!
//! For a range that is not wholly inside the map all of them return `false` or `None` and copy nothing. This
//! cannot happen for offsets from [`MemoryMap::translate`] or from a checked [`Buffer`](crate::Buffer).
#![allow(unsafe_code)]

use std::ptr::{self, NonNull};

use crate::MemoryMap;
#[cfg(any(test, feature = "driver"))]
use crate::cell::Cell;

impl MemoryMap {
    /// Pointer to `len` bytes at `offset`, if they are all inside the map. Valid as long as the map is; the
    /// guest and the VMM may write there at any time, so access it only by volatile, atomic or raw copies.
    #[inline]
    #[must_use]
    pub fn ptr(&self, offset: u64, len: usize) -> Option<NonNull<u8>> {
        let map_len = self.len() as u64;
        (offset <= map_len && len as u64 <= map_len - offset)
            // SAFETY: offset is at most the length of the mapping.
            .then(|| unsafe { self.base().add(offset as usize) })
    }

    /// Copies `dst.len()` bytes at `offset` into `dst`.
    #[inline]
    #[must_use]
    pub fn copy_from_guest(&self, offset: u64, dst: &mut [u8]) -> bool {
        let Some(src) = self.ptr(offset, dst.len()) else {
            return false;
        };
        // SAFETY: the source range is mapped (ptr), the destination is our slice. They cannot overlap:
        // nothing makes slices of the map.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), dst.as_mut_ptr(), dst.len()) };
        true
    }

    /// Copies `src` to `offset`.
    #[inline]
    #[must_use]
    pub fn copy_to_guest(&self, offset: u64, src: &[u8]) -> bool {
        let Some(dst) = self.ptr(offset, src.len()) else {
            return false;
        };
        // SAFETY: as in copy_from_guest, in the other direction.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), dst.as_ptr(), src.len()) };
        true
    }

    /// The word at `offset` for atomic access. `None` also if it is not aligned.
    #[cfg(any(test, feature = "driver"))]
    pub(crate) fn atomic<T: Cell<V>, V>(&self, offset: u64) -> Option<&T> {
        let word = self.ptr(offset, size_of::<T>())?.cast::<T>();
        if !word.is_aligned() {
            return None;
        }
        // SAFETY: mapped (ptr), aligned (here), and for as long as self lives. Others may write: a Cell is an atomic.
        Some(unsafe { word.as_ref() })
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU16;

    use crate::GuestAddr;
    use crate::driver::GuestRam;

    #[test]
    fn nothing_outside_the_map_is_moved() {
        let ram = GuestRam::new(&[(GuestAddr(0), 4096)]).unwrap();
        let map = ram.map();
        let mut byte = [7u8; 2];
        for offset in [4095, 4096, 4097, u64::MAX, u64::MAX - 1] {
            assert!(!map.copy_from_guest(offset, &mut byte));
            assert!(!map.copy_to_guest(offset, &byte));
            assert!(map.atomic::<AtomicU16, _>(offset).is_none());
        }
        assert_eq!(byte, [7; 2]);
        assert!(map.ptr(0, usize::MAX).is_none());
        assert!(map.ptr(4096, 0).is_some());
    }

    #[test]
    fn bytes_arrive_exactly() {
        let ram = GuestRam::new(&[(GuestAddr(0), 4096)]).unwrap();
        let map = ram.map();
        assert!(map.copy_to_guest(4090, b"abcdef"));
        let mut bytes = [0; 8];
        assert!(map.copy_from_guest(4088, &mut bytes));
        assert_eq!(&bytes, b"\0\0abcdef");
        assert!(map.atomic::<AtomicU16, _>(1).is_none());
        assert!(map.copy_to_guest(0, &[9; 4096]));
        let mut all = [0; 4096];
        assert!(map.copy_from_guest(0, &mut all));
        assert_eq!(all, [9; 4096]);
    }
}
