//! Indirect tables (VirtIO 1.3, 2.7.5.3 and 2.8.7), which both rings have.
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
    /// Entries that it has: at least one, at most the queue size.
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
        // Without the hint of the frames: tables often live in another region.
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
    /// entry. The specification demands no alignment of such tables, so an odd one is read bytewise.
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

/// Asks for a cache line that will be needed soon. Harmless for any address.
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

/// As [`prefetch`], for a line that will be written: it comes as one's own at once, and not first to be read and
/// then once more to be written.
#[inline(always)]
fn prefetch_to_write(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as a prefetch; processors that do not know this one take it for a NOP (Intel SDM, PREFETCHW).
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// What is fetched ahead when a chain is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefetch {
    /// The cache line with the virtio-net header, if one buffer of the ring holds header and frame; nothing of other
    /// chains. Right where this CPU does not touch the frame (a NIC reads it by DMA): a line fetched in vain is one
    /// that the driver's CPU must get back before it can write its next frame there.
    Header,
    /// That and the line behind it: drivers put the header at the end of one line, and the frame begins on the next. Of
    /// several buffers the first line of each.
    #[default]
    Frame,
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Whether the virtio-net header (12 bytes, VirtIO 1.3, 5.1.6) of a buffer at this offset of the map has the end of a
/// cache line, and the frame begins on the next one, as DPDK's driver has it. To the guest such a header is mostly the
/// one that was there before. Who then leaves it as it is spares both sides a line that goes to and fro: so it is
/// fetched ahead to be read only, and to be compared before it is written.
#[inline(always)]
#[must_use]
pub fn header_ends_line(offset: u64) -> bool {
    const HEADER_BYTES: u64 = 12;
    offset % LINE as u64 == LINE as u64 - HEADER_BYTES
}

/// Asks for the first cache lines of a buffer.
#[inline(always)]
pub(crate) fn prefetch_frame(base: NonNull<u8>, buffer: &Buffer, writable: bool, what: Prefetch) {
    let first = base.as_ptr().wrapping_add(buffer.offset as usize);
    let second = first.wrapping_add(LINE);
    let two = what == Prefetch::Frame && buffer.len as usize > LINE;
    // Spelled out: a choice between the two functions becomes a call by pointer.
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
