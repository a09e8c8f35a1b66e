//! The UMEM: memory divided into chunks, and their allocation.
//!
//! # Theory of operation
//!
//! A [`Umem`] describes how memory is registered with a socket (`XDP_UMEM_REG`, `net/xdp/xdp_umem.c`): which
//! bytes, the chunk size, headroom, and whether frames may start anywhere (unaligned) or only at chunks.
//! Registration itself happens when a socket opens; several sockets may register one `Umem`: each has its own
//! rings and is charged separately. Or one registers it and others share it: they also have their own rings,
//! but the memory is charged once.
//!
//! Frames come from two sources that must not overlap:
//!  - [`Umem::frames`] hands out the chunks of a range; it records these ranges, and refuses to hand one out twice;
//!  - [`Umem::adopt`] makes a frame at an offset that the *caller* tracks, for guest RAM, where the guest
//!    decides which buffer is free. It is on the data path, so it checks only bounds.
//!
//! The record of chunks handed out belongs to the `Umem`, not to the memory: after a socket is closed, get
//! the frames that were in its rings back by creating a new `Umem` over the same memory.

use std::fmt;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

#[cfg(not(loom))]
use rustix::io::Errno;
use rustix::net::xdp::XdpUmemRegFlags;
#[cfg(not(loom))]
use rustix::process::{Resource, getrlimit};

use crate::codec::{ADDRESS_MASK, AddressCodec};
#[cfg(not(loom))]
use crate::error::OpenError;
use crate::frame::Frame;
use crate::memory::{UmemMemory, View};
#[cfg(not(loom))]
use crate::numa::NumaNode;
#[cfg(not(loom))]
use crate::sys;
use crate::units::UmemOffset;

/// Smallest chunk that the kernel accepts (`XDP_UMEM_MIN_CHUNK_SIZE`, `include/net/xdp_sock.h`).
pub const MIN_CHUNK_BYTES: u32 = 2048;

/// Room that the kernel leaves before each received frame, after the requested headroom (`XDP_PACKET_HEADROOM`,
/// `include/uapi/linux/bpf.h`).
pub const XDP_PACKET_HEADROOM: u32 = 256;

/// `XDP_UMEM_TX_METADATA_LEN`, `include/uapi/linux/if_xdp.h` (Linux 6.8; before that the length alone was enough).
const UMEM_TX_METADATA_LEN: u32 = 1 << 2;

/// Largest chunk in unaligned mode: distances inside it stay below `ODD_SHIFT` (`codec.rs`).
const UNALIGNED_CHUNK_MAX: u32 = 1 << 15;

/// Memory that cannot be a UMEM, or an offset that is not in it.
///
/// `chunk_bytes`, `headroom_bytes` and `bytes` are the requested ones; `len_bytes` is the length of the memory,
/// `page_bytes` the machine's page. `offset` and `start` are offsets of requested chunks in the UMEM, in bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum UmemError {
    /// The kernel accepts chunks from 2048 bytes to a page; unaligned ones must leave room in the 16 bits of distance.
    #[error("chunk size {chunk_bytes} is not from {MIN_CHUNK_BYTES} to {largest_bytes} bytes")]
    ChunkSize {
        chunk_bytes: u32,
        /// The largest valid size: a page, in unaligned mode at most 32 KiB.
        largest_bytes: u32,
    },
    /// Aligned chunks must be a power of two.
    #[error("chunk size {chunk_bytes} is not a power of two; use one, or unaligned chunks")]
    ChunkNotPowerOfTwo { chunk_bytes: u32 },
    /// The headroom leaves no room for a frame.
    #[error(
        "headroom {headroom_bytes} and the kernel's {XDP_PACKET_HEADROOM} bytes leave nothing of a {chunk_bytes}-byte \
         chunk"
    )]
    Headroom { headroom_bytes: u32, chunk_bytes: u32 },
    /// The memory does not start on a page.
    #[error("UMEM memory at {address:#x} does not start on a page of {page_bytes} bytes")]
    BaseNotPageAligned {
        /// Where it starts.
        address: u64,
        page_bytes: u32,
    },
    /// The memory is less than a chunk, or (aligned mode) not a whole number of chunks.
    #[error("UMEM length {len_bytes} is not a positive multiple of the chunk size {chunk_bytes}")]
    Length { len_bytes: u64, chunk_bytes: u32 },
    /// More memory than the rings can address.
    #[error("UMEM length {len_bytes} is more than the 2^48 bytes that unaligned mode can address")]
    TooLong { len_bytes: u64 },
    /// TX metadata must be a multiple of 8, below 256.
    #[error("TX metadata length {bytes} is not a multiple of 8 below 256")]
    TxMetadata { bytes: u32 },
    /// A chunk at this offset is not wholly inside the UMEM.
    #[error(
        "offset {offset} does not leave room for a {chunk_bytes}-byte chunk in a UMEM of {len_bytes} bytes"
    )]
    Outside {
        offset: UmemOffset,
        chunk_bytes: u32,
        len_bytes: u64,
    },
    /// In aligned mode frames start where chunks start.
    #[error("offset {offset} is not a multiple of the chunk size {chunk_bytes}")]
    Misaligned { offset: UmemOffset, chunk_bytes: u32 },
    /// Some chunk of the range was handed out before.
    #[error("chunks from {start} to {end} were handed out already, at least in part")]
    AlreadyHandedOut {
        start: UmemOffset,
        /// The offset after the last requested one.
        end: UmemOffset,
    },
}

/// Memory divided into chunks, which sockets can register. Cheap to clone: clones share everything.
#[derive(Clone)]
pub struct Umem {
    view: View,
    chunk_size: u32,
    headroom: u32,
    unaligned: bool,
    tx_metadata_len: u32,
    handed_out: Arc<Mutex<Vec<Range<u64>>>>,
}

impl Umem {
    /// Memory in aligned mode: chunks of `chunk_size` bytes (a power of two, 2048 to a page), each frame in one,
    /// `headroom` bytes left free before each received frame in addition to [`XDP_PACKET_HEADROOM`].
    ///
    /// # Errors
    /// [`UmemError`], naming the value that the kernel would refuse with EINVAL.
    pub fn aligned(memory: Arc<dyn UmemMemory>, chunk_size: u32, headroom: u32) -> Result<Self, UmemError> {
        if !chunk_size.is_power_of_two() {
            return Err(UmemError::ChunkNotPowerOfTwo {
                chunk_bytes: chunk_size,
            });
        }
        Self::checked(memory, chunk_size, headroom, false)
    }

    /// Memory in unaligned mode (`XDP_UMEM_UNALIGNED_CHUNK_FLAG`): frames start at any offset.
    ///
    /// # Errors
    /// [`UmemError`], naming the value that the kernel would refuse with EINVAL.
    pub fn unaligned(memory: Arc<dyn UmemMemory>, chunk_size: u32, headroom: u32) -> Result<Self, UmemError> {
        Self::checked(memory, chunk_size, headroom, true)
    }

    /// The same UMEM with `bytes` of metadata before each sent frame with [`metadata`](crate::TxDesc::metadata) in its
    /// descriptor (`XDP_UMEM_TX_METADATA_LEN`, Linux 6.8).
    ///
    /// # Errors
    /// [`UmemError::TxMetadata`] if that is no multiple of 8 below 256.
    pub fn with_tx_metadata(mut self, bytes: u32) -> Result<Self, UmemError> {
        if bytes >= 256 || !bytes.is_multiple_of(8) {
            return Err(UmemError::TxMetadata { bytes });
        }
        self.tx_metadata_len = bytes;
        Ok(self)
    }

    fn checked(
        memory: Arc<dyn UmemMemory>,
        chunk_size: u32,
        headroom: u32,
        unaligned: bool,
    ) -> Result<Self, UmemError> {
        let page_bytes = u32::try_from(rustix::param::page_size()).unwrap_or(u32::MAX);
        let view = View::new(memory);
        let (chunk_bytes, len_bytes, address) = (chunk_size, view.len(), view.address());
        let largest = if unaligned {
            page_bytes.min(UNALIGNED_CHUNK_MAX)
        } else {
            page_bytes
        };
        if !(MIN_CHUNK_BYTES..=largest).contains(&chunk_size) {
            return Err(UmemError::ChunkSize {
                chunk_bytes,
                largest_bytes: largest,
            });
        }
        if headroom >= chunk_size - XDP_PACKET_HEADROOM {
            return Err(UmemError::Headroom {
                headroom_bytes: headroom,
                chunk_bytes,
            });
        }
        if !address.is_multiple_of(u64::from(page_bytes)) {
            return Err(UmemError::BaseNotPageAligned { address, page_bytes });
        }
        let whole = unaligned || len_bytes.is_multiple_of(u64::from(chunk_size));
        if len_bytes < u64::from(chunk_size) || !whole {
            return Err(UmemError::Length {
                len_bytes,
                chunk_bytes,
            });
        }
        if len_bytes > ADDRESS_MASK {
            return Err(UmemError::TooLong { len_bytes });
        }
        let handed_out = Arc::default();
        Ok(Self {
            view,
            chunk_size,
            headroom,
            unaligned,
            tx_metadata_len: 0,
            handed_out,
        })
    }

    /// Hands out the whole chunks of `range` (byte offsets), each exactly once in the lifetime of this `Umem`.
    ///
    /// # Errors
    /// [`UmemError`] if the range is not inside, does not start on a chunk (aligned mode), or overlaps one that was
    /// handed out before.
    pub fn frames(&self, range: Range<u64>) -> Result<Frames, UmemError> {
        let chunk = u64::from(self.chunk_size);
        let chunks = range.end.saturating_sub(range.start) / chunk;
        let frames = Frames {
            next: range.start,
            left: chunks,
            chunk,
        };
        if chunks == 0 {
            return Ok(frames);
        }
        self.check(range.start)?;
        let end = range.start.saturating_add(chunks * chunk);
        self.check(end - chunk)?;
        let mut handed_out = self.handed_out.lock().unwrap_or_else(PoisonError::into_inner);
        if handed_out
            .iter()
            .any(|taken| taken.start < end && range.start < taken.end)
        {
            let (start, end) = (UmemOffset::new(range.start), UmemOffset::new(end));
            return Err(UmemError::AlreadyHandedOut { start, end });
        }
        handed_out.push(range.start..end);
        Ok(frames)
    }

    /// Hands out all chunks.
    ///
    /// # Errors
    /// [`UmemError::AlreadyHandedOut`] if any was handed out before.
    pub fn all_frames(&self) -> Result<Frames, UmemError> {
        self.frames(0..self.len())
    }

    /// Makes a frame at an offset that the caller tracks, for memory whose chunks are allocated elsewhere.
    ///
    /// The caller must ensure that the bytes of no other [`Frame`], in a ring or not, overlap those of this one, unless
    /// it accepts garbled frames (a guest that posts one buffer twice garbles only its own). Several frames of
    /// one chunk may exist for sending, if the caller counts them and their descriptors have no byte in common.
    ///
    /// # Errors
    /// [`UmemError::Outside`] if the chunk is not wholly inside; [`UmemError::Misaligned`] in aligned mode.
    #[inline]
    pub fn adopt(&self, offset: UmemOffset) -> Result<Frame, UmemError> {
        self.check(offset.get())?;
        Ok(Frame::new(offset.get()))
    }

    #[inline]
    fn check(&self, offset: u64) -> Result<(), UmemError> {
        let chunk = u64::from(self.chunk_size);
        if offset > self.view.len() - chunk {
            return Err(self.outside(offset));
        }
        if !self.unaligned && offset & (chunk - 1) != 0 {
            let (offset, chunk_bytes) = (UmemOffset::new(offset), self.chunk_size);
            return Err(UmemError::Misaligned { offset, chunk_bytes });
        }
        Ok(())
    }

    #[cold]
    fn outside(&self, offset: u64) -> UmemError {
        let offset = UmemOffset::new(offset);
        UmemError::Outside {
            offset,
            chunk_bytes: self.chunk_size,
            len_bytes: self.len(),
        }
    }

    /// The address of `len` bytes at `offset`, for raw copies; `None` if they are not all inside.
    ///
    /// The kernel, and others that share the memory, may change the bytes at any time: make no reference from it.
    #[inline]
    pub fn ptr(&self, offset: UmemOffset, len: usize) -> Option<NonNull<u8>> {
        self.view.ptr(offset.get(), len as u64)
    }

    /// Copies `bytes` to `offset`; `None`, and nothing written, if they do not all fit into the UMEM.
    #[inline]
    #[must_use]
    pub fn write(&self, offset: UmemOffset, bytes: &[u8]) -> Option<()> {
        self.view.write(offset.get(), bytes)
    }

    /// Fills `bytes` from `offset`; `None`, and nothing read, if they are not all in the UMEM.
    #[inline]
    #[must_use]
    pub fn read(&self, offset: UmemOffset, bytes: &mut [u8]) -> Option<()> {
        self.view.read(offset.get(), bytes)
    }

    /// The length in bytes.
    #[inline]
    pub fn len(&self) -> u64 {
        self.view.len()
    }

    /// From this offset on, to the end, only this process and the kernel can write.
    #[inline]
    pub fn private_from(&self) -> UmemOffset {
        UmemOffset::new(self.view.private_from())
    }

    /// Never true: there are no empty UMEMs.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of whole chunks.
    pub fn chunks(&self) -> u64 {
        self.len() / u64::from(self.chunk_size)
    }

    /// The chunk size in bytes.
    #[inline]
    pub fn chunk_size(&self) -> u32 {
        self.chunk_size
    }

    /// The requested headroom in bytes, without the kernel's own [`XDP_PACKET_HEADROOM`].
    #[inline]
    pub fn headroom(&self) -> u32 {
        self.headroom
    }

    /// Whether frames may start anywhere.
    #[inline]
    pub fn is_unaligned(&self) -> bool {
        self.unaligned
    }

    /// The length in bytes of the metadata before a sent frame; 0 if there is none.
    #[inline]
    pub fn tx_metadata_len(&self) -> u32 {
        self.tx_metadata_len
    }

    /// The longest piece of a received frame that one chunk holds, in bytes.
    pub fn max_frame_bytes(&self) -> u32 {
        self.chunk_size - XDP_PACKET_HEADROOM - self.headroom
    }

    /// Where a frame that is sent from the start of a chunk begins: after the metadata, for which the kernel requires
    /// room before each descriptor's bytes, used or not (`xp_aligned_validate_desc`, `net/xdp/xsk_queue.h`).
    #[inline]
    pub fn send_offset(&self, frame: &Frame) -> UmemOffset {
        UmemOffset::new(frame.offset().get() + u64::from(self.tx_metadata_len))
    }

    /// The maximum number of bytes that one descriptor sends: a chunk less the metadata, used or not.
    #[inline]
    pub fn max_sent_bytes(&self) -> u32 {
        self.chunk_size - self.tx_metadata_len
    }

    /// Makes the kernel allocate all missing pages, charged to this process (`MADV_POPULATE_WRITE`, Linux 5.14); call
    /// it before another process registers the memory, which would be charged for them.
    ///
    /// # Errors
    /// The kernel's: out of memory, or a file is shorter than its mapping.
    pub fn populate(&self) -> io::Result<()> {
        self.view.populate()
    }

    /// Flags of its registration (`struct xdp_umem_reg`).
    pub fn flags(&self) -> u32 {
        let unaligned = match self.unaligned {
            true => XdpUmemRegFlags::XDP_UMEM_UNALIGNED_CHUNK_FLAG.bits(),
            false => 0,
        };
        match self.tx_metadata_len {
            0 => unaligned,
            _ => unaligned | UMEM_TX_METADATA_LEN,
        }
    }

    /// The error for the errno of its registration.
    #[cfg(not(loom))]
    pub fn refusal(&self, error: &io::Error) -> OpenError {
        let (address, len_bytes) = (self.address(), self.len());
        match Errno::from_io_error(error) {
            Some(Errno::NOBUFS) => OpenError::MemoryLock {
                needed_bytes: len_bytes,
                limit_bytes: getrlimit(Resource::Memlock).current,
            },
            Some(Errno::NOMEM) => OpenError::MemoryHole { address, len_bytes },
            Some(Errno::FAULT) => OpenError::MemoryKind { address },
            Some(Errno::BUSY) => OpenError::InUse,
            errno => OpenError::Umem {
                len_bytes,
                chunk_bytes: self.chunk_size,
                headroom_bytes: self.headroom,
                tx_metadata_bytes: self.tx_metadata_len,
                source: errno.unwrap_or(Errno::IO).into(),
            },
        }
    }

    /// The registered memory.
    pub fn memory(&self) -> &Arc<dyn UmemMemory> {
        self.view.memory()
    }

    /// The NUMA node of most of its pages, from a sample of 64; `None` if none is in this process's page
    /// table, or the kernel does not report it.
    #[cfg(not(loom))]
    #[must_use]
    pub fn node(&self) -> Option<NumaNode> {
        const SAMPLE: u64 = 64;
        let step = (self.len() / SAMPLE).max(1);
        let starts = (0..self.len()).step_by(usize::try_from(step).ok()?);
        let pages: Vec<_> = starts
            .filter_map(|at| self.view.ptr(at, 0))
            .map(|page| page.as_ptr().cast_const().cast())
            .collect();
        let nodes: Vec<_> = sys::nodes_of(&pages)
            .ok()?
            .into_iter()
            .filter_map(NumaNode::new)
            .collect();
        let with = |node: &NumaNode| nodes.iter().filter(|&other| other == node).count();
        nodes.iter().copied().max_by_key(with)
    }

    pub(crate) fn address(&self) -> u64 {
        self.view.address()
    }

    pub(crate) fn codec(&self) -> AddressCodec {
        AddressCodec::new(self.chunk_size, self.unaligned)
    }
}

impl fmt::Debug for Umem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Umem")
            .field("address", &format_args!("{:#x}", self.address()))
            .field("len", &self.len())
            .field("chunk_size", &self.chunk_size)
            .field("headroom", &self.headroom)
            .field("unaligned", &self.unaligned)
            .finish_non_exhaustive()
    }
}

/// The chunks of a range, see [`Umem::frames`]. Chunks not taken when it is dropped stay handed out.
#[derive(Debug)]
pub struct Frames {
    next: u64,
    left: u64,
    chunk: u64,
}

impl Iterator for Frames {
    type Item = Frame;

    #[inline]
    fn next(&mut self) -> Option<Frame> {
        self.left = self.left.checked_sub(1)?;
        let frame = Frame::new(self.next);
        self.next += self.chunk;
        Some(frame)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = usize::try_from(self.left).unwrap_or(usize::MAX);
        (left, Some(left))
    }
}

impl ExactSizeIterator for Frames {}

#[cfg(test)]
#[path = "umem_tests.rs"]
mod tests;
