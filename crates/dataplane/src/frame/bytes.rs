//! Copies between guest memory, UMEMs and the daemon's memory.
//!
//! Purpose: the one place of the data path that dereferences pointers. Both sides are shared (the guest writes its RAM
//! whenever it likes, the kernel writes chunks that it holds), so bytes are copied through raw pointers, and no
//! reference to them is ever formed. A chunk in the daemon's private memory is not shared while the NIC does not have
//! it; a caller that makes a slice of one promises that this holds ([`own_bytes`], [`received_bytes`]).
//!
//! Invariant: every range is checked against its mapping here, whatever earlier checks found; two comparisons are
//! cheaper than a proof that they are not needed.

#![allow(unsafe_code)]

use std::ptr::{self, NonNull};

use virtqueue::{MappedFile, MemoryMap, header_ends_line};
use xsk::{MemoryPart, RxDesc, TxDesc, Umem, UmemMemory, UmemOffset};

use device::pair::{HEADER_BYTES, Piece};

/// Frames of the minimum length have 60 bytes without their checksum, and switching by address reads the first 64 of
/// each: most copies have 32 to 64 bytes, and are four copies of [`PART`] bytes, which may overlap.
const PART: usize = size_of::<u128>();
const HALF: usize = 2 * PART;
const SHORT: usize = 4 * PART;

/// Guest RAM with the bounce area behind it, as memory for a UMEM (direct placement).
pub struct GuestRam(pub std::sync::Arc<MemoryMap>);

// SAFETY: the mapping is `len` bytes from `base`, without a hole, and exists until the last `Arc` of it is dropped;
// `MemoryMap` establishes that in its constructor and never moves or shrinks it.
unsafe impl UmemMemory for GuestRam {
    fn base(&self) -> NonNull<u8> {
        self.0.base()
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn private_from(&self) -> usize {
        self.0.guest_len() as usize
    }

    fn parts(&self) -> Vec<MemoryPart<'_>> {
        let part = |MappedFile {
                        file,
                        file_offset,
                        len,
                    }| MemoryPart {
            file,
            file_offset,
            len,
        };
        self.0.files().into_iter().map(part).collect()
    }
}

/// Copies the first bytes of a received frame out of its first piece, at most as many as there is `room` for; none if
/// that piece is not inside the UMEM.
#[inline]
pub(crate) fn read_start<'a>(umem: &Umem, piece: &RxDesc, room: &'a mut [u8]) -> &'a [u8] {
    let known = room.len().min(piece.len as usize);
    match umem.read(piece.data, &mut room[..known]) {
        Some(()) => &room[..known],
        None => &[],
    }
}

/// Bytes in a UMEM.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UmemRange {
    pub(crate) start: UmemOffset,
    /// Its length, bytes.
    pub(crate) len: u32,
}

impl UmemRange {
    /// The bytes of a received piece.
    #[inline]
    pub(crate) fn of(piece: &RxDesc) -> Self {
        Self {
            start: piece.data,
            len: piece.len,
        }
    }
}

/// Copies a piece of guest memory into the UMEM. `None`: a range is outside its mapping, and nothing is copied.
#[inline]
pub(crate) fn guest_to_umem(guest: &MemoryMap, from: Piece, umem: &Umem, to: UmemOffset) -> Option<()> {
    let source = guest.ptr(from.offset, from.len as usize)?;
    let target = umem.ptr(to, from.len as usize)?;
    copy_short(source, target, from.len as usize);
    Some(())
}

/// Copies bytes of guest memory into the daemon's memory; as [`guest_to_umem`].
#[inline(always)]
pub(crate) fn guest_to_own(guest: &MemoryMap, offset: u64, to: &mut [u8]) -> Option<()> {
    let source = guest.ptr(offset, to.len())?;
    copy_short(source, NonNull::from(&mut *to).cast(), to.len());
    Some(())
}

/// Copies a piece of the UMEM into guest memory; as [`guest_to_umem`].
#[inline]
pub(crate) fn umem_to_guest(umem: &Umem, from: UmemOffset, guest: &MemoryMap, to: Piece) -> Option<()> {
    let source = umem.ptr(from, to.len as usize)?;
    let target = guest.ptr(to.offset, to.len as usize)?;
    copy(source, target, to.len as usize);
    Some(())
}

/// Copies a piece of a guest's memory into the memory of another guest, or of the same; as [`guest_to_umem`].
#[inline]
pub(crate) fn guest_to_guest(from: &MemoryMap, piece: Piece, to: &MemoryMap, offset: u64) -> Option<()> {
    let source = from.ptr(piece.offset, piece.len as usize)?;
    let target = to.ptr(offset, piece.len as usize)?;
    copy(source, target, piece.len as usize);
    Some(())
}

/// Copies a guest's frame into the memory of another guest, or of the same, and writes its virtio-net header before it.
/// The frame consists of `head`, in the daemon's memory, and of `rest`; as [`guest_to_umem`].
#[inline]
pub(crate) fn between_guests(
    from: &MemoryMap,
    head: &[u8],
    rest: Piece,
    to: &MemoryMap,
    offset: u64,
    header: [u8; HEADER_BYTES as usize],
) -> Option<()> {
    let source = from.ptr(rest.offset, rest.len as usize)?;
    let target = to.ptr(offset, header.len() + head.len() + rest.len as usize)?;
    put_header(header, target, offset);
    // SAFETY: `target` has room for all three, one behind the other, as was just checked.
    let (at_head, at_rest) = unsafe {
        let at_head = target.add(header.len());
        (at_head, at_head.add(head.len()))
    };
    copy_short(NonNull::from(head).cast(), at_head, head.len());
    copy_short(source, at_rest, rest.len as usize);
    Some(())
}

/// Copies a guest's frame into the UMEM: `outer` and `head`, from the daemon's memory, and behind them `rest`; as
/// [`guest_to_umem`].
#[inline(always)]
pub(crate) fn head_and_rest_to_umem(
    guest: &MemoryMap,
    (outer, head): (&[u8], &[u8]),
    rest: Piece,
    umem: &Umem,
    to: UmemOffset,
) -> Option<()> {
    let source = guest.ptr(rest.offset, rest.len as usize)?;
    let target = umem.ptr(to, outer.len() + head.len() + rest.len as usize)?;
    // SAFETY: `target` has room for all three, one behind the other, as was just checked.
    let (at_head, at_rest) = unsafe {
        let at_head = target.add(outer.len());
        (at_head, at_head.add(head.len()))
    };
    copy_short(NonNull::from(outer).cast(), target, outer.len());
    copy_short(NonNull::from(head).cast(), at_head, head.len());
    copy_short(source, at_rest, rest.len as usize);
    Some(())
}

/// Copies a whole frame into guest memory, with its virtio-net header in front; as [`guest_to_umem`].
#[inline]
pub(crate) fn frame_to_guest(
    umem: &Umem,
    frame: UmemRange,
    guest: &MemoryMap,
    to: u64,
    header: [u8; HEADER_BYTES as usize],
) -> Option<()> {
    let len = frame.len as usize;
    let source = umem.ptr(frame.start, len)?;
    let target = guest.ptr(to, header.len() + len)?;
    put_header(header, target, to);
    // SAFETY: `target` has room for header and frame, as was just checked.
    copy_short(source, unsafe { target.add(header.len()) }, len);
    Some(())
}

/// The bytes that a descriptor sends from a chunk of the daemon; `None` if they are not all in the UMEM's private
/// memory. The memory before that may be guest memory, of which no slice is ever made.
///
/// # Safety
/// The descriptor has not been passed to a NIC, its chunk is private memory of the daemon, and no other descriptor that
/// refers to one of these bytes is with a NIC or in use elsewhere.
#[inline]
pub(crate) unsafe fn own_bytes<'a>(umem: &'a Umem, desc: &'a mut TxDesc) -> Option<&'a mut [u8]> {
    if desc.offset < umem.private_from() {
        return None;
    }
    let start = umem.ptr(desc.offset, desc.len as usize)?;
    // SAFETY: the range is inside the mapping, as was just checked, which the UMEM keeps alive. No other code reads or
    // writes it, as the caller promises; the descriptor is borrowed for as long as the slice is. Any bytes are valid.
    Some(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), desc.len as usize) })
}

/// The bytes of a piece that was received into a chunk of the daemon; `None` if they are not all in the piece's chunk,
/// or the chunk is a guest's.
///
/// # Safety
/// The piece came from the NIC of this UMEM, and its chunk has not been given back to it.
#[inline]
pub(crate) unsafe fn received_bytes<'a>(umem: &'a Umem, piece: &'a RxDesc) -> Option<&'a [u8]> {
    let start = received_start(umem, piece)?;
    // SAFETY: by the contract of received_start; this lane owns the chunk, as the caller promises, and the piece, which
    // represents it, is borrowed for as long as the slice is.
    Some(unsafe { std::slice::from_raw_parts(start.as_ptr(), piece.len as usize) })
}

/// As [`received_bytes`], mutable.
///
/// # Safety
/// As [`received_bytes`].
#[inline]
pub(crate) unsafe fn received_bytes_mut<'a>(umem: &'a Umem, piece: &'a mut RxDesc) -> Option<&'a mut [u8]> {
    let start = received_start(umem, piece)?;
    // SAFETY: as received_bytes; the piece is borrowed mutably for as long as the slice is.
    Some(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), piece.len as usize) })
}

/// The position of a received piece. Its bytes are inside the mapping, which the UMEM keeps alive, and inside the chunk
/// that the piece owns: the kernel gave it up with the descriptor, and in private memory, which no guest maps, chunks
/// do not overlap ([`Umem::frames`]). A chunk in guest memory may reach over its end, but no byte of the daemon is sent
/// or received through it: buffers end where guest memory does.
#[inline]
fn received_start(umem: &Umem, piece: &RxDesc) -> Option<NonNull<u8>> {
    let into = piece.data.get().checked_sub(piece.frame.offset().get())?;
    let inside = into + u64::from(piece.len) <= u64::from(umem.chunk_size());
    (inside && piece.frame.offset() >= umem.private_from())
        .then(|| umem.ptr(piece.data, piece.len as usize))
        .flatten()
}

/// Writes a virtio-net header to `target`, which is at `offset` in guest memory. Skips the write where the same bytes
/// are there already, if that is cheaper: see [`header_ends_line`]. A guest that changes them meanwhile harms only
/// itself.
#[inline(always)]
fn put_header(header: [u8; HEADER_BYTES as usize], target: NonNull<u8>, offset: u64) {
    if header_ends_line(offset) {
        // SAFETY: as in `copy`; of any alignment.
        let there = unsafe { target.cast::<[u8; HEADER_BYTES as usize]>().read_unaligned() };
        if there == header {
            return;
        }
    }
    copy(NonNull::from(&header).cast(), target, header.len());
}

/// As `copy`, without a call where there is little to copy: most frames are short. The source may change meanwhile.
#[inline(always)]
fn copy_short(source: NonNull<u8>, target: NonNull<u8>, len: usize) {
    match len {
        0 => {}
        // SAFETY: as in `copy`; of any alignment, and all parts are in the ranges. All is read before it is written, so
        // the ranges may overlap.
        HALF..=SHORT => unsafe {
            let parts = [0, PART, len - HALF, len - PART];
            let copies = parts.map(|at| source.add(at).cast::<u128>().read_unaligned());
            for (at, copy) in parts.into_iter().zip(copies) {
                target.add(at).cast::<u128>().write_unaligned(copy);
            }
        },
        _ => copy(source, target, len),
    }
}

#[inline]
fn copy(source: NonNull<u8>, target: NonNull<u8>, len: usize) {
    // SAFETY: both ranges were just checked to be within mappings that outlive this call. They may overlap only if the
    // guest chooses so (direct placement, a chain that points at itself is still outside the bounce area), for which
    // `copy` is defined.
    unsafe { ptr::copy(source.as_ptr(), target.as_ptr(), len) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_bytes_are_copied_as_are_asked_for_and_no_others() {
        for len in 0..=80 {
            for (source, target) in [(0, 100), (100, 0), (50, 60), (60, 50)] {
                let mut memory: [u8; 200] = std::array::from_fn(|at| at as u8);
                let mut wanted = memory;
                wanted.copy_within(source..source + len, target);
                let start = NonNull::from(&mut memory).cast::<u8>();
                // SAFETY: both ranges end inside the array.
                unsafe { copy_short(start.add(source), start.add(target), len) };
                assert_eq!(memory, wanted, "{len} bytes from {source} to {target}");
            }
        }
    }

    #[test]
    fn header_is_written_at_any_offset_over_any_bytes() {
        let header = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];
        let other = |at: usize| {
            let mut other = header;
            other[at] ^= 0x80;
            other
        };
        for offset in 0..192 {
            for before in (0..header.len()).map(other).chain([header, [0xff; 12]]) {
                let mut memory = [0xee; 256];
                let at = offset as usize;
                memory[at..at + 12].copy_from_slice(&before);
                let mut wanted = memory;
                wanted[at..at + 12].copy_from_slice(&header);
                let target = NonNull::from(&mut memory[at..at + 12]).cast();
                put_header(header, target, offset);
                assert_eq!(memory, wanted, "at offset {offset}, over {before:?}");
            }
        }
    }
}
