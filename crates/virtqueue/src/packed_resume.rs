//! Finds the device's position in a packed ring from the ring itself.
//!
//! Theory of operation. A split ring contains the device's position: used.idx is in memory. A packed ring does
//! not, and the base that a VMM sends after the device died may be as old as the device's start (QEMU uses the
//! result of the last GET_VRING_BASE). So [`PackedQueue`](crate::packed::PackedQueue) leaves in every slot that it
//! has passed the USED bit of that lap, and a correct driver keeps the bit when it makes the slot available for
//! the next lap. So along the ring the bit changes in one place, and that is the device's position:
//!
//! ```text
//!     slot   0 1 2 3 4 5 6 7
//!     USED   1 1 1 1 1 0 0 0     position 5 in a lap with wrap counter 1
//!     USED   1 1 1 1 1 1 1 1     position 0 in a lap with wrap counter 0
//! ```
//!
//! If there is no such place, or more than one, then another program wrote this ring (a device need not mark
//! the later slots of a list, a driver may write anything), and the base from the VMM is used.
//!
//! A device that dies between [`push_used`](crate::packed::PackedQueue::push_used) and
//! [`publish`](crate::packed::PackedQueue::publish) leaves a batch whose first slot is still available, while
//! the later slots of the batch, if any, are used: a hole of one slot.
//!
//! ```text
//!     USED   1 1 1 0 1 1 0 0     position 3; the batch in 3, 4, 5 is written and not published
//! ```
//!
//! The chains of that batch are done, and their descriptors overwritten. So the batch is published: the used
//! descriptor of the first slot is stored in its address ([`stash`]).

use std::sync::atomic::Ordering;

use crate::RingError;
use crate::cell::Cell;
use crate::crash;
use crate::layout::{DESC_NEXT, DESC_WRITE, PACKED_AVAIL, PACKED_USED, PackedDescriptor};
use crate::packed_ring::PackedRing;
use crate::position::Position;

/// Value of the upper 16 bits of a word that is no address: no machine has guest-physical addresses that large.
const STASH: u64 = 0xa55a << 48;
const STASH_MASK: u64 = 0xffff << 48;

/// The second word of a used descriptor, without its flags, in the form in which the slot's address keeps it
/// until publication.
#[inline(always)]
pub(crate) const fn stash(word: u64) -> u64 {
    word & !STASH_MASK | STASH
}

/// Where a device with the given `base` continues. Publishes an unpublished batch. Errors: neither the base
/// nor the ring gives a valid slot.
pub(crate) fn position(ring: &PackedRing, base: u32) -> Result<Position, RingError> {
    if let Some(at) = search(ring) {
        return Ok(finish_batch(ring, at));
    }
    // The slot to be used next, since chains are used in order; some VMMs send only the one to be taken next.
    let [taken, used] = [base as u16, (base >> 16) as u16].map(Position::from_bits);
    let believed = if stands_at(ring, used) { used } else { taken };
    if believed.offset < ring.size.get() {
        Ok(finish_batch(ring, believed))
    } else {
        Err(RingError::Base {
            base,
            size: ring.size.get(),
        })
    }
}

/// Whether `at` may be the device's position: it has passed the slot before in this lap, and not this one.
fn stands_at(ring: &PackedRing, at: Position) -> bool {
    at.offset < ring.size.get() && {
        let before = at.back(1, ring.size);
        !at.is_passed(ring.flags(at.offset)) && before.is_passed(ring.flags(before.offset))
    }
}

/// Whether the slot after `at` was used before `at`: there is an unpublished batch of more than one slot.
fn is_unpublished(ring: &PackedRing, at: Position) -> bool {
    let next = at.forward(1, ring.size);
    next.is_used(ring.flags(next.offset)) && stashed(ring, at).is_some()
}

/// The device's position, if only one is possible.
pub(crate) fn search(ring: &PackedRing) -> Option<Position> {
    let laps = [true, false].into_iter();
    let all = laps.flat_map(|wrap| (0..ring.size.get()).map(move |offset| Position { offset, wrap }));
    let mut places = all.filter(|at| stands_at(ring, *at));
    let first = places.next()?;
    let Some(second) = places.next() else {
        return Some(whole_ring(ring, first));
    };
    // The two sides of the hole that an unpublished batch leaves, and its end: the bit changes in three places.
    let hole = |at: &Position| is_unpublished(ring, *at);
    match (places.next(), places.next()) {
        (Some(third), None) => [first, second, third].into_iter().find(hole),
        _ => None,
    }
}

/// An unpublished batch that fills the ring leaves no hole: it looks as if the device were after its first slot, at
/// `at`. But then the first slot is available for the next lap and `at` not for this one, while drivers go in order.
fn whole_ring(ring: &PackedRing, at: Position) -> Position {
    let first = at.back(1, ring.size).forward(ring.size.get(), ring.size);
    if is_unpublished(ring, first) && !at.is_available(ring.flags(at.offset)) {
        first
    } else {
        at
    }
}

/// The used descriptor that [`stash`] kept in the slot at `at`, if that slot is still available.
fn stashed(ring: &PackedRing, at: Position) -> Option<PackedDescriptor> {
    let word = ring.load_low(at.offset);
    let is_stashed = at.is_available(ring.flags(at.offset)) && word & STASH_MASK == STASH;
    is_stashed.then(|| PackedDescriptor::from_words(0, word))
}

/// Undoes the batch at `at`, if an unpublished one is there, because its chains, with descriptors `descs`,
/// will be done again. Otherwise the driver would find them used once those before them are. Backwards, so
/// that at any moment it looks like an unpublished batch.
pub(crate) fn take_back(ring: &PackedRing, at: Position, descs: &[PackedDescriptor]) {
    for (step, desc) in (0..).zip(descs).skip(1).collect::<Vec<_>>().into_iter().rev() {
        let at = at.forward(step, ring.size);
        if at.is_used(ring.flags(at.offset)) {
            let flags = desc.flags & !(PACKED_AVAIL | PACKED_USED) | at.available_flags();
            ring.store_low_after(at.offset, desc.addr);
            ring.store_high(at.offset, PackedDescriptor { flags, ..*desc }.to_words()[1]);
        }
    }
    if let (Some(first), Some(_)) = (descs.first(), stashed(ring, at)) {
        ring.store_low_after(at.offset, first.addr);
    }
}

/// Publishes the batch at `at`, if an unpublished one is there; returns where it ends.
fn finish_batch(ring: &PackedRing, at: Position) -> Position {
    let Some(first) = stashed(ring, at) else {
        return at;
    };
    let mut end = at.forward(1, ring.size);
    let mut in_list = ring.flags(at.offset) & DESC_NEXT != 0;
    // At most once around.
    for _ in 1..ring.size.get() {
        let flags = ring.flags(end.offset);
        if !end.is_used(flags) {
            if !in_list {
                break;
            }
            // The device died within a list: the rest of the list is used, too.
            let rest = PackedDescriptor {
                flags: end.used_flags() | flags & DESC_NEXT,
                ..PackedDescriptor::default()
            };
            ring.store_high(end.offset, rest.to_words()[1]);
        }
        in_list = flags & DESC_NEXT != 0;
        end = end.forward(1, ring.size);
    }
    let written = if first.len > 0 { DESC_WRITE } else { 0 };
    let first = PackedDescriptor {
        flags: at.used_flags() | written,
        ..first
    };
    crash::point();
    // As in `publish`; the new device calls the driver with its first publication.
    Cell::store(ring.high(at.offset), first.to_words()[1], Ordering::Release);
    end
}
