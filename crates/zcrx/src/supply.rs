//! Where buffers come from and go back to: zcrx, provided buffers, or blocks.
//!
//! A supply arms receives, finds the pieces that completions filled, and passes returned buffers to the kernel in
//! batches. The modes of receiving differ only in this.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::io::Errno;

use crate::abi;
use crate::config::{Config, Mode};
use crate::error::OpenError;
use crate::instance::{self, Shared};
use crate::piece::{Piece, Pool};
use crate::provided::{self, ProvidedRing};
use crate::ring::{Completion, Ring};

/// Alignment that suffices for O_DIRECT on all file systems in use.
const BLOCK_UNIT: u32 = 4096;

/// One mode of receiving.
pub(crate) enum Supply {
    Zcrx {
        shared: Arc<Shared>,
        /// The instance's number in the ring.
        id: u32,
        /// The kernel can flush the refill ring; assumed until the first flush fails.
        can_flush: bool,
    },
    Provided {
        pool: Arc<Pool>,
        ring: ProvidedRing,
    },
    Blocks {
        pool: Arc<Pool>,
        free: Vec<u32>,
    },
}

/// A receive could not be armed for lack of a buffer.
pub(crate) struct NoBuffer;

impl Supply {
    pub(crate) fn zcrx(shared: Arc<Shared>, id: u32) -> Self {
        let can_flush = true;
        Self::Zcrx {
            shared,
            id,
            can_flush,
        }
    }

    /// Ordinary receives.
    pub(crate) fn copy(ring: BorrowedFd<'_>, config: &Config) -> Result<Self, OpenError> {
        let pool = |bytes: u32, most, whole| -> Result<_, OpenError> {
            Ok(Arc::new(Pool::new(instance::area(config, bytes, most)?, whole)))
        };
        if let Some(bytes) = config.block_bytes {
            if bytes == 0 || bytes % BLOCK_UNIT != 0 {
                let (what, must) = ("blocks", "a multiple of 4096");
                return Err(OpenError::Size { what, bytes, must });
            }
            let pool = pool(bytes, u32::MAX, true)?;
            let free = (0..pool.area.buffers()).rev().collect();
            return Ok(Self::Blocks { pool, free });
        }
        let bytes = config.copy_buffer_bytes;
        if bytes == 0 {
            let (what, must) = ("buffers", "1 at least");
            return Err(OpenError::Size { what, bytes, must });
        }
        let pool = pool(bytes, provided::MOST_ENTRIES, true)?;
        let buffers = pool.area.buffers();
        let mut ring = ProvidedRing::register(ring, buffers)
            .map_err(|source| OpenError::Provided { buffers, source })?;
        for buffer in 0..buffers {
            ring.push(
                buffer as u16,
                pool.area.address() + pool.area.offset_of(buffer),
                bytes,
            );
        }
        ring.publish();
        Ok(Self::Provided { pool, ring })
    }

    pub(crate) fn mode(&self) -> Mode {
        match self {
            Self::Zcrx { shared, .. } if shared.no_device => Mode::ZcrxNoDevice,
            Self::Zcrx { .. } => Mode::Zcrx,
            Self::Provided { .. } => Mode::Copy,
            Self::Blocks { .. } => Mode::Blocks,
        }
    }

    pub(crate) fn pool(&self) -> &Arc<Pool> {
        match self {
            Self::Zcrx { shared, .. } => &shared.pool,
            Self::Provided { pool, .. } | Self::Blocks { pool, .. } => pool,
        }
    }

    /// Arms a receive; returns the buffer that it will fill, if that is known.
    pub(crate) fn arm(
        &mut self,
        ring: &mut Ring,
        socket: BorrowedFd<'_>,
        slot: u32,
    ) -> io::Result<Result<Option<u32>, NoBuffer>> {
        match self {
            Self::Zcrx { id, .. } => ring.receive_zcrx(socket, *id, slot)?,
            Self::Provided { .. } => ring.receive_provided(socket, slot)?,
            Self::Blocks { pool, free } => {
                let Some(buffer) = free.pop() else {
                    return Ok(Err(NoBuffer));
                };
                let len = pool.area.buffer_bytes();
                let Some(place) = pool.area.find(pool.area.offset_of(buffer), len) else {
                    return Ok(Err(NoBuffer));
                };
                // SAFETY: the buffer is in no list and in no piece from here on until it is completed, and its memory
                // is the pool's, which the receiver keeps until all requests are ended.
                unsafe { ring.receive_block(socket, place.start.as_ptr(), len, slot) }?;
                return Ok(Ok(Some(buffer)));
            }
        }
        Ok(Ok(None))
    }

    /// The piece that a completion filled; `block`: the armed buffer. `None` if it names no buffer of the pool.
    pub(crate) fn piece(&mut self, done: &Completion, block: Option<u32>) -> Option<Piece> {
        let len = u32::try_from(done.result).ok()?;
        match self {
            Self::Zcrx { shared, .. } => {
                let area = done.offset >> abi::AREA_SHIFT;
                let offset = done.offset & ((1 << abi::AREA_SHIFT) - 1);
                // There is one area, and it has number 0 (`io_zcrx_create_area`).
                if area != 0 {
                    return None;
                }
                shared.pool.lend(offset, len)
            }
            Self::Provided { pool, .. } => pool.lend(pool.area.offset_of(done.buffer?.into()), len),
            Self::Blocks { pool, .. } => pool.lend(pool.area.offset_of(block?), len),
        }
    }

    /// Takes back a buffer that was armed, or selected, and not filled.
    pub(crate) fn unused(&mut self, done: &Completion, block: Option<u32>) {
        match self {
            Self::Zcrx { .. } => {}
            Self::Provided { pool, ring } => {
                if let Some(buffer) = done.buffer {
                    give(pool, ring, buffer.into());
                    ring.publish();
                }
            }
            Self::Blocks { free, .. } => free.extend(block),
        }
    }

    /// Passes returned buffers to the kernel; returns how many pieces.
    pub(crate) fn restock(&mut self) -> u64 {
        let pieces = match self {
            Self::Zcrx { shared, .. } => {
                if shared.pool.returns.is_empty() {
                    return 0;
                }
                let mut refill = shared.refill();
                let area = &shared.pool.area;
                let pieces = shared
                    .pool
                    .take(|buffer, count| refill.push(area.offset_of(buffer), count));
                refill.publish();
                drop(refill);
                pieces
            }
            Self::Provided { pool, ring } => {
                let pieces = pool.take(|buffer, _| give(pool, ring, buffer));
                ring.publish();
                pieces
            }
            Self::Blocks { pool, free } => pool.take(|buffer, _| free.push(buffer)),
        };
        // Another receiver of the instance may sleep until there are buffers.
        self.pool().count_taken(pieces);
        pieces
    }

    /// Makes the kernel take the entries of the refill ring. With a device it also takes them as packets arrive,
    /// without one only here. `now`: always; else only without a device, if there are many. Returns whether it took.
    pub(crate) fn flush(&mut self, ring: BorrowedFd<'_>, now: bool) -> bool {
        let Self::Zcrx {
            shared,
            id,
            can_flush,
        } = self
        else {
            return false;
        };
        let mut refill = shared.refill();
        let enough = refill.unflushed >= (shared.pool.area.buffers() / 4).min(refill.entries() / 4).max(1);
        let wanted = refill.unflushed > 0 && (now || shared.no_device && enough);
        if !wanted || !*can_flush {
            return false;
        }
        refill.publish();
        if let Err(error) = abi::flush_refill(ring, *id) {
            // Before Linux 7.0: EINVAL. The NIC takes them.
            *can_flush = Errno::from_io_error(&error) == Some(Errno::INTR);
            return false;
        }
        refill.unflushed = 0;
        // Entries that had no room before may have some now.
        refill.publish();
        true
    }

    /// Another handle on the instance, for other threads.
    pub(crate) fn instance(&self) -> Option<(&Arc<Shared>, u32)> {
        match self {
            Self::Zcrx { shared, id, .. } => Some((shared, *id)),
            _ => None,
        }
    }
}

fn give(pool: &Pool, ring: &mut ProvidedRing, buffer: u32) {
    let area = &pool.area;
    ring.push(
        buffer as u16,
        area.address() + area.offset_of(buffer),
        area.buffer_bytes(),
    );
}
