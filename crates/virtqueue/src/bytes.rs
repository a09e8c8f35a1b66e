//! Bytes in and out of the map.
//!
//! Theory of operation: each function checks its range against the length of the map, once, and then moves
//! bytes through raw pointers. No reference to bytes of guest memory is ever made: the guest writes to them
//! at will, and a reference would promise the compiler that nobody does. What is copied out is only bytes; a
//! torn copy is the guest's own loss. A value that is looked at twice must be copied out first and then be
//! looked at in the copy.
//!
//! All return `false` or `None` for a range that is not wholly inside the map, and have then done nothing.
//! Offsets come from [`MemoryMap::translate`] or from a checked [`Buffer`](crate::Buffer); then this cannot
//! happen.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::MemoryMap;

impl MemoryMap {
    /// Pointer to `len` bytes at `offset`, if they are all inside the map. Valid as long as the map is;
    /// others write there at any time, so read it only by volatile, atomic or raw copies.
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
        // SAFETY: the source range is mapped (ptr), the destination is a slice of ours, which cannot overlap
        // the map as nobody makes slices of that.
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
        // SAFETY: as in copy_from_guest, the other way.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), dst.as_ptr(), src.len()) };
        true
    }

    /// Sets `len` bytes at `offset` to `value`.
    #[inline]
    #[must_use]
    pub fn fill(&self, offset: u64, value: u8, len: usize) -> bool {
        let Some(dst) = self.ptr(offset, len) else {
            return false;
        };
        // SAFETY: the range is mapped (ptr).
        unsafe { ptr::write_bytes(dst.as_ptr(), value, len) };
        true
    }

    /// Reads a value of plain bytes at `offset`, of any alignment.
    #[inline]
    #[must_use]
    pub fn read_obj<T: FromBytes>(&self, offset: u64) -> Option<T> {
        let src = self.ptr(offset, size_of::<T>())?;
        let mut value = MaybeUninit::<T>::uninit();
        // SAFETY: the source is mapped (ptr), the destination is ours and of that size; and T takes any
        // bytes.
        unsafe {
            ptr::copy_nonoverlapping(src.as_ptr(), value.as_mut_ptr().cast::<u8>(), size_of::<T>());
            Some(value.assume_init())
        }
    }

    /// Writes a value of plain bytes at `offset`, of any alignment.
    #[inline]
    #[must_use]
    pub fn write_obj<T: IntoBytes + Immutable>(&self, offset: u64, value: &T) -> bool {
        self.copy_to_guest(offset, value.as_bytes())
    }

    /// The 16-bit word at `offset` for atomic access. `None` also if it is not aligned.
    #[inline]
    #[must_use]
    pub fn atomic_u16(&self, offset: u64) -> Option<&AtomicU16> {
        let word = self.ptr(offset, 2)?.cast::<AtomicU16>();
        if !word.is_aligned() {
            return None;
        }
        // SAFETY: mapped (ptr), aligned (here), and for as long as self lives. Others may write: that is what
        // atomics are for.
        Some(unsafe { word.as_ref() })
    }

    /// The 32-bit word at `offset` for atomic access. `None` also if it is not aligned.
    #[inline]
    #[must_use]
    pub fn atomic_u32(&self, offset: u64) -> Option<&AtomicU32> {
        let word = self.ptr(offset, 4)?.cast::<AtomicU32>();
        if !word.is_aligned() {
            return None;
        }
        // SAFETY: mapped (ptr), aligned (here), and for as long as self lives. Others may write: that is what
        // atomics are for.
        Some(unsafe { word.as_ref() })
    }

    /// The 64-bit word at `offset` for atomic access. `None` also if it is not aligned.
    #[inline]
    #[must_use]
    pub fn atomic_u64(&self, offset: u64) -> Option<&AtomicU64> {
        let word = self.ptr(offset, 8)?.cast::<AtomicU64>();
        if !word.is_aligned() {
            return None;
        }
        // SAFETY: mapped (ptr), aligned (here), and for as long as self lives. Others may write: that is what
        // atomics are for.
        Some(unsafe { word.as_ref() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_outside_the_map_is_moved() {
        let map = MemoryMap::anonymous(4096).unwrap();
        let mut byte = [7u8; 2];
        for offset in [4095, 4096, 4097, u64::MAX, u64::MAX - 1] {
            assert!(!map.copy_from_guest(offset, &mut byte));
            assert!(!map.copy_to_guest(offset, &byte));
            assert!(!map.fill(offset, 1, 2));
            assert!(map.read_obj::<u16>(offset).is_none());
            assert!(map.atomic_u16(offset).is_none());
        }
        assert_eq!(byte, [7; 2]);
        assert!(map.ptr(0, usize::MAX).is_none());
        assert!(map.ptr(4096, 0).is_some());
    }

    #[test]
    fn bytes_arrive_exactly() {
        let map = MemoryMap::anonymous(4096).unwrap();
        assert!(map.copy_to_guest(4090, b"abcdef"));
        let mut bytes = [0; 8];
        assert!(map.copy_from_guest(4088, &mut bytes));
        assert_eq!(&bytes, b"\0\0abcdef");
        assert!(map.write_obj(1, &0x0102_0304u32));
        assert_eq!(map.read_obj::<u32>(1), Some(0x0102_0304));
        assert!(map.atomic_u16(1).is_none());
        assert!(map.fill(0, 9, 4096));
        assert_eq!(map.read_obj::<[u8; 4096]>(0), Some([9; 4096]));
    }
}
