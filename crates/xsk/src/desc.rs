//! The entries of the rings, as callers use them and in the kernel's layout.

use crate::codec::AddressCodec;
use crate::frame::{Frame, FramePool};
use crate::ring::{Consumer, FromKernel, Producer, ToKernel};
use crate::units::UmemOffset;

/// The fill ring: free frames to the kernel, for it to receive into.
pub type FillRing = Producer<Frame>;
/// The tx ring: frames for the kernel to send.
pub type TxRing = Producer<TxDesc>;
/// The rx ring: frames that the kernel received.
pub type RxRing = Consumer<RxDesc>;
/// The completion ring: sent frames, returned by the kernel. Each is the [`Frame`] of a descriptor pushed
/// into the tx ring; the order may differ.
pub type CompletionRing = Consumer<Frame>;

/// A received frame, or a piece of one.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the frame in it would be lost"]
pub struct RxDesc {
    /// The chunk, as it was given to the fill ring (aligned mode: rounded down to the chunk).
    pub frame: Frame,
    /// Where the bytes start.
    pub data: UmemOffset,
    /// How many bytes there are.
    pub len: u32,
    /// Whether the frame continues in the next descriptor (only with multi-buffer).
    pub more: bool,
}

/// A frame to be sent, or a piece of one.
///
/// The kernel skips a descriptor that it finds invalid and counts it
/// ([`tx_invalid_descs`](crate::Statistics::tx_invalid_descs)). Kernels before 6.18 do not complete it: its frame is
/// lost. (6.18 was seen to complete it.) Valid is: 1 to [`chunk_size`](crate::Umem::chunk_size) bytes inside the UMEM;
/// in aligned mode all in one chunk; at most 18 pieces a frame in copy mode (`MAX_SKB_FRAGS` + 1), or the device's
/// limit in zero-copy mode (`xskq_cons_is_valid_desc`, `net/xdp/xsk_queue.h`). A frame longer than the MTU is dropped,
/// but completed.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the frame in it would be lost"]
pub struct TxDesc {
    /// The chunk; the kernel returns it through the completion ring.
    pub frame: Frame,
    /// Where the bytes start: in the chunk (in unaligned mode at most 32,766 bytes after its start).
    pub offset: UmemOffset,
    /// How many bytes.
    pub len: u32,
    /// Whether the frame continues in the next descriptor (only with multi-buffer).
    pub more: bool,
    /// Whether [`tx_metadata_len`](crate::Umem::tx_metadata_len) bytes before `offset` are metadata (first piece only).
    pub metadata: bool,
}

impl TxDesc {
    /// A whole frame at the start of its chunk.
    #[inline]
    pub fn whole(frame: Frame, len: u32) -> Self {
        let offset = frame.offset();
        Self {
            frame,
            offset,
            len,
            more: false,
            metadata: false,
        }
    }
}

/// `struct xdp_desc`, `include/uapi/linux/if_xdp.h`: an entry of the rx and tx rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Descriptor {
    address: u64,
    len: u32,
    options: u32,
}

/// The frame continues in the next descriptor (`XDP_PKT_CONTD`).
const CONTINUED: u32 = 1 << 0;
/// There is metadata before the frame (`XDP_TX_METADATA`).
const METADATA: u32 = 1 << 1;

const _: () = assert!(size_of::<Descriptor>() == 16 && align_of::<Descriptor>() == 8);

impl ToKernel for Frame {
    type Entry = u64;

    #[inline]
    fn into_entry(self, _codec: AddressCodec) -> u64 {
        self.into_offset().get()
    }
}

impl FromKernel for Frame {
    type Entry = u64;

    #[inline]
    fn from_entry(address: u64, codec: AddressCodec) -> Self {
        codec.frame(address)
    }
}

impl ToKernel for TxDesc {
    type Entry = Descriptor;

    #[inline]
    fn into_entry(self, codec: AddressCodec) -> Descriptor {
        Descriptor {
            address: codec.address(&self.frame, self.offset),
            len: self.len,
            options: (u32::from(self.more) * CONTINUED) | (u32::from(self.metadata) * METADATA),
        }
    }
}

impl FromKernel for RxDesc {
    type Entry = Descriptor;

    #[inline]
    fn from_entry(entry: Descriptor, codec: AddressCodec) -> Self {
        Self {
            frame: codec.frame(entry.address),
            data: codec.data(entry.address),
            len: entry.len,
            more: entry.options & CONTINUED != 0,
        }
    }
}

impl FillRing {
    /// Moves up to `wanted` frames from `pool` to the kernel; returns how many.
    #[inline]
    pub fn refill(&mut self, pool: &mut FramePool, wanted: u32) -> u32 {
        let have = u32::try_from(pool.len()).unwrap_or(u32::MAX);
        let mut batch = self.reserve(wanted.min(have));
        while batch.room() > 0 {
            let Some(frame) = pool.take() else { break };
            batch.push(frame);
        }
        batch.submit()
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::{Heap, Ordering, Shared};

    #[test]
    fn refill_takes_no_more_than_pool_and_ring_have() {
        let heap = Heap::new(4);
        let mut fill = FillRing::new(Shared::heap(heap.clone(), 4), AddressCodec::new(2048, false));
        let mut pool: FramePool = (0..6).map(|chunk| Frame::new(chunk * 2048)).collect();
        assert_eq!(fill.refill(&mut pool, 3), 3);
        assert_eq!(fill.refill(&mut pool, 3), 1);
        assert_eq!((pool.len(), fill.free()), (2, 0));
        heap.consumer.store(4, Ordering::Release);
        assert_eq!(fill.refill(&mut pool, 64), 2);
        assert_eq!((pool.len(), fill.free()), (0, 2));
    }
}
