//! Received bytes: pieces, and the pool that their buffers are returned to.
//!
//! # Theory of operation
//!
//! A pool lends a [`Piece`] when the kernel reports a filled range. Dropping the piece, in any thread, returns it: by a
//! count and a list ([`Returns`]), without a lock or a system call unless a receiver sleeps. The receiving thread
//! passes returned buffers to the kernel, in batches.
//!
//! A receiver that has run out of buffers sleeps. It sets `hungry` first, and then checks once more whether a
//! buffer was returned; a returning thread does it in the other order: it returns the buffer, then reads `hungry`.
//! Between the two steps of each there is a full fence, so at least one sees the other. Without the fences both could
//! see the old value, and the receiver would sleep on.
//!
//! Invariant **P1**: the range of a piece is written by nobody while the piece lives. The kernel has filled it, and
//! takes the buffer again only after as many returns as pieces; a NIC that goes on filling a buffer fills other bytes
//! of it.
//!
//! [`Returns`]: crate::returns::Returns
#![allow(unsafe_code)]

use std::fmt;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::event::{EventfdFlags, eventfd};

use crate::area::{Area, Place};
use crate::returns::Returns;

/// What wakes a receiver: an eventfd that its ring watches.
#[derive(Debug)]
pub(crate) struct Bell(OwnedFd);

impl Bell {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(crate) fn ring(&self) {
        // Fails only if the counter is at its maximum: then the receiver wakes anyway.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    pub(crate) fn silence(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Buffers of one area, and the receivers that wait for them.
pub(crate) struct Pool {
    pub(crate) area: Area,
    pub(crate) returns: Returns,
    /// Each piece has a buffer of its own, from its start: nobody else writes behind it.
    whole_buffers: bool,
    /// Pieces that were made.
    lent: AtomicU64,
    /// Pieces that were returned to the kernel.
    taken: AtomicU64,
    /// A receiver sleeps until a buffer is returned.
    hungry: AtomicBool,
    bells: Mutex<Vec<Weak<Bell>>>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} buffers)", self.area.buffers())
    }
}

impl Pool {
    pub(crate) fn new(area: Area, whole_buffers: bool) -> Self {
        Self {
            whole_buffers,
            returns: Returns::new(area.buffers()),
            area,
            lent: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            hungry: AtomicBool::new(false),
            bells: Mutex::default(),
        }
    }

    /// Adds a receiver that is woken when buffers are returned.
    pub(crate) fn add_bell(&self, bell: &Arc<Bell>) {
        let mut bells = self.bells.lock().unwrap_or_else(PoisonError::into_inner);
        bells.retain(|bell| bell.strong_count() > 0);
        bells.push(Arc::downgrade(bell));
    }

    /// A piece of what the kernel has filled. `None` if that is not inside a buffer.
    pub(crate) fn lend(self: &Arc<Self>, offset: u64, len: u32) -> Option<Piece> {
        let place = self.area.find(offset, len)?;
        self.lent.fetch_add(1, Ordering::Relaxed);
        let pool = self.clone();
        Some(Piece { pool, place })
    }

    /// Calls `each` with each returned buffer and its number of pieces. Returns the number of all pieces, to be
    /// [counted](Self::count_taken) when the kernel sees them.
    pub(crate) fn take(&self, mut each: impl FnMut(u32, u32)) -> u64 {
        let mut pieces = 0;
        self.returns.take(|buffer, count| {
            pieces += u64::from(count);
            each(buffer, count);
        });
        pieces
    }

    /// Counts pieces that are with the kernel again, and wakes receivers that wait for them.
    pub(crate) fn count_taken(&self, pieces: u64) {
        if pieces > 0 {
            self.taken.fetch_add(pieces, Ordering::Relaxed);
            self.feed();
        }
    }

    /// Pieces that are with the kernel again.
    pub(crate) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Pieces that readers hold, or that are not yet returned to the kernel.
    pub(crate) fn out(&self) -> u64 {
        let taken = self.taken();
        self.lent.load(Ordering::Relaxed).saturating_sub(taken)
    }

    /// Announces that a receiver is about to sleep until a buffer is returned; false if one was.
    pub(crate) fn starve(&self) -> bool {
        self.hungry.store(true, Ordering::Relaxed);
        // See the head of the file. Pairs with that in `feed`.
        fence(Ordering::SeqCst);
        self.returns.is_empty()
    }

    /// Wakes receivers that sleep until a buffer is returned.
    pub(crate) fn feed(&self) {
        fence(Ordering::SeqCst);
        if self.hungry.load(Ordering::Relaxed) && self.hungry.swap(false, Ordering::Relaxed) {
            let bells = self.bells.lock().unwrap_or_else(PoisonError::into_inner);
            bells
                .iter()
                .filter_map(Weak::upgrade)
                .for_each(|bell| bell.ring());
        }
    }
}

/// Received bytes, where the kernel or the NIC wrote them. Dropping it, in any thread, returns its buffer: keep it as
/// short as you can, since later receives lack the buffers of pieces that are kept.
///
/// A piece does not correspond to what the peer sent at once: a stream has no message boundaries.
pub struct Piece {
    pool: Arc<Pool>,
    place: Place,
}

// SAFETY: a piece is the only one with its range (P1) but for readers of the same memory; the pool is Send and Sync.
unsafe impl Send for Piece {}
// SAFETY: shared use reads bytes that nobody writes (P1).
unsafe impl Sync for Piece {}

impl Piece {
    /// The bytes, padded with zeros to a multiple of `unit` bytes, as O_DIRECT requires for the last block of a file.
    /// `None` if the buffer ends before that, or may have other data after the piece, as with zcrx. With
    /// [`Config::block_bytes`](crate::Config::block_bytes) there is room for each `unit` that divides the
    /// block.
    pub fn padded(&mut self, unit: usize) -> Option<&[u8]> {
        let area = &self.pool.area;
        let len = (self.place.len as usize).checked_next_multiple_of(unit)?;
        let begins = self.place.start.as_ptr() as u64 - area.address();
        if !self.pool.whole_buffers
            || area.offset_of(self.place.buffer) != begins
            || len > area.buffer_bytes() as usize
        {
            return None;
        }
        // SAFETY: start..start + len is this buffer's (checked above, A1), of which no other piece exists, and which
        // the kernel does not write (P1 and `whole_buffers`); zeroes are bytes.
        unsafe {
            let behind = self.place.start.add(self.place.len as usize);
            behind.write_bytes(0, len - self.place.len as usize);
            Some(std::slice::from_raw_parts(self.place.start.as_ptr(), len))
        }
    }
}

impl Deref for Piece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range is mapped (A1, A2) and written by nobody while the piece lives (P1).
        unsafe { std::slice::from_raw_parts(self.place.start.as_ptr(), self.place.len as usize) }
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Piece({} bytes of buffer {})",
            self.place.len, self.place.buffer
        )
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.pool.returns.give(self.place.buffer);
        self.pool.feed();
    }
}
