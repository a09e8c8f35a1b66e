//! The copy between guest memory and a UMEM. Both are shared, so bytes move by pointer, and no reference to them is made:
//! that is why this needs unsafe code. A daemon of many guests has more of the kind
//! (`crates/vhost-af-xdp/src/switch/frame/bytes.rs`).

#![allow(unsafe_code)]

use std::ptr;

use device::pair::Piece;
use virtqueue::MemoryMap;
use xsk::{Umem, UmemOffset};

/// `None`: a range is outside its mapping, nothing was copied.
#[inline]
pub(super) fn guest_to_umem(guest: &MemoryMap, from: Piece, umem: &Umem, to: UmemOffset) -> Option<()> {
    let len = from.len as usize;
    let source = guest.ptr(from.offset, len)?;
    let target = umem.ptr(to, len)?;
    // SAFETY: both ranges were just checked to lie within mappings that outlive this call, and which are different ones:
    // the UMEM is memory of its own. The guest and the kernel may change the bytes meanwhile; what is copied is only
    // bytes, and any are valid.
    unsafe { ptr::copy_nonoverlapping(source.as_ptr(), target.as_ptr(), len) };
    Some(())
}
