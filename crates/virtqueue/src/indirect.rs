//! Indirect tables (VirtIO 1.3, 2.7.5.3 and 2.8.7), of both kinds of ring.
//!
//! A table is checked as one range, and each of its entries is read once, into a copy.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use crate::cell::Cell;
use crate::layout::{self, DESC_NEXT, Descriptor};
use crate::{Buffer, GuestAddr, GuestFault, IndirectRule, MemoryMap, QueueSize, chain};

/// A table, inside guest memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table<'a> {
    start: NonNull<u8>,
    /// Number of entries: at least one, at most the queue size.
    pub(crate) entries: u16,
    memory: PhantomData<&'a MemoryMap>,
}

impl<'a> Table<'a> {
    /// The table that `desc`, an indirect descriptor of chain `head`, refers to. `negotiated` is
    /// VIRTIO_F_INDIRECT_DESC.
    #[inline(always)]
    pub(crate) fn find(
        memory: &'a MemoryMap,
        size: QueueSize,
        negotiated: bool,
        head: u16,
        desc: Descriptor,
    ) -> Result<Self, GuestFault> {
        let len = desc.len;
        let invalid = |why| Err(GuestFault::IndirectInvalid { head, len, why });
        if !negotiated {
            return invalid(IndirectRule::NotNegotiated);
        }
        if desc.has(DESC_NEXT) {
            return invalid(IndirectRule::WithNext);
        }
        if len == 0 || !len.is_multiple_of(layout::DESC_BYTES as u32) {
            return invalid(IndirectRule::Length);
        }
        if u64::from(len) > layout::desc_bytes(size.get()) {
            return invalid(IndirectRule::TooLong);
        }
        // Not by the region hint of the frames: tables are often in another region.
        let offset = memory.translate(GuestAddr(desc.addr), u64::from(len));
        let Some(start) = offset.and_then(|offset| memory.ptr(offset, len as usize)) else {
            return Err(chain::bad_buffer(head, desc));
        };
        Ok(Self {
            start,
            entries: (len / layout::DESC_BYTES as u32) as u16,
            memory: PhantomData,
        })
    }

    /// The two words of entry `index` in the machine's own order, each byte read once; `None`, if there is no such
    /// entry. The specification demands no alignment of such tables, so an unaligned one is read byte by byte.
    #[inline(always)]
    pub(crate) fn read(self, index: u16) -> Option<[u64; 2]> {
        if index >= self.entries {
            return None;
        }
        // SAFETY: the entry is inside the table, which is inside the map (find), which lives longer than this value.
        let entry = unsafe { self.start.add(usize::from(index) * layout::DESC_BYTES as usize) };
        let words = entry.cast::<AtomicU64>();
        if words.is_aligned() {
            // SAFETY: 16 bytes inside the map, aligned.
            let (low, high) = unsafe { (words.as_ref(), words.add(1).as_ref()) };
            return Some([low, high].map(|word| Cell::load(word, Ordering::Relaxed)));
        }
        // SAFETY: as above; bytes need no alignment.
        let byte = |i: usize| unsafe { entry.cast::<AtomicU8>().add(i).as_ref() }.load(Ordering::Relaxed);
        let word = |first: usize| u64::from_le_bytes(std::array::from_fn(|i| byte(first + i)));
        Some([word(0), word(8)])
    }
}

/// Prefetches a cache line. Harmless for any address.
#[inline(always)]
pub(crate) fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults and changes nothing but caches; SSE is part of x86_64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// As [`prefetch`], for a line that will be written: the CPU gets it exclusively at once, instead of shared
/// first and exclusively at the first store.
#[inline(always)]
fn prefetch_to_write(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as a prefetch; processors without this instruction execute it as a NOP (Intel SDM, PREFETCHW).
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// What a queue prefetches when it takes a chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefetch {
    /// The cache line with the virtio-net header, if header and frame are in one buffer of the ring; nothing
    /// of other chains. For frames that a NIC reads by DMA, and this CPU does not touch: other lines would be
    /// fetched in vain, and the driver's CPU would have to fetch them back for its next frame.
    Header,
    /// That line and the next one: drivers put the header at the end of a line, and the frame begins on the
    /// next. For a chain of several buffers, the first line of each.
    #[default]
    Frame,
}

impl Prefetch {
    /// The longest buffer of which only the first line is prefetched, bytes.
    #[inline(always)]
    fn one_line(self) -> u32 {
        match self {
            Self::Header => u32::MAX,
            Self::Frame => LINE as u32,
        }
    }
}

/// Bytes per cache line.
const LINE: usize = 64;

/// Whether the virtio-net header (12 bytes, VirtIO 1.3, 5.1.6) of a buffer at this map offset ends a cache
/// line, so that the frame begins on the next, as DPDK's driver arranges it. The guest's buffer mostly holds
/// an identical header already. A device that compares before it writes spares both sides the transfer of
/// that line, so it is prefetched for reading only.
#[inline(always)]
#[must_use]
pub fn header_ends_line(offset: u64) -> bool {
    const HEADER_BYTES: u64 = 12;
    offset % LINE as u64 == LINE as u64 - HEADER_BYTES
}

/// Prefetches the first cache lines of a buffer.
#[inline(always)]
pub(crate) fn prefetch_frame(base: NonNull<u8>, buffer: &Buffer, writable: bool, what: Prefetch) {
    let first = base.as_ptr().wrapping_add(buffer.offset as usize);
    let second = first.wrapping_add(LINE);
    let two = buffer.len > what.one_line();
    // Written out: a variable for the function would become an indirect call.
    if writable {
        if header_ends_line(buffer.offset) {
            prefetch(first);
        } else {
            prefetch_to_write(first);
        }
        if two {
            prefetch_to_write(second);
        }
    } else {
        prefetch(first);
        if two {
            prefetch(second);
        }
    }
}
