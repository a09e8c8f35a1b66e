//! The tx ring: frames for the kernel to send.

use crate::desc::{CONTINUED, Descriptor, METADATA};
use crate::frame::Frame;
use crate::ring::{Heap, Producer, Reserved};
use crate::umem::AddressCodec;
use crate::units::UmemOffset;

/// The tx ring. We produce, the kernel consumes.
#[derive(Debug)]
pub struct TxRing {
    ring: Producer<Descriptor>,
    codec: AddressCodec,
}

impl TxRing {
    pub(crate) fn new(ring: Producer<Descriptor>, codec: AddressCodec) -> Self {
        Self { ring, codec }
    }

    /// A ring with no entries, for a socket that only receives.
    pub(crate) fn absent(codec: AddressCodec) -> Self {
        Self::new(Producer::heap(Heap::new(0), 0), codec)
    }

    /// The number of entries that fit.
    #[inline]
    pub fn size(&self) -> u32 {
        self.ring.size()
    }

    /// The number of free entries now. (Reads the kernel's counter: [`reserve`](Self::reserve) does so only when it must.)
    #[inline]
    pub fn free(&self) -> u32 {
        self.ring.free()
    }

    /// Reserves up to `wanted` entries, fewer if fewer are free.
    #[inline]
    pub fn reserve(&mut self, wanted: u32) -> TxBatch<'_> {
        TxBatch {
            codec: self.codec,
            slots: self.ring.reserve(wanted),
        }
    }

    /// Whether the kernel waits to be told of new frames: then call [`Socket::kick_tx`](crate::Socket::kick_tx).
    ///
    /// Ask after submitting. In copy mode the answer is always yes.
    #[inline]
    pub fn needs_wakeup(&self) -> bool {
        self.ring.needs_wakeup()
    }
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
    /// The chunk; it comes back through the completion ring.
    pub frame: Frame,
    /// Where the bytes start: in the chunk (in unaligned mode at most 32,766 bytes after its start).
    pub offset: UmemOffset,
    /// How many bytes.
    pub len: u32,
    /// Whether the frame goes on in the next descriptor (only with multi-buffer).
    pub more: bool,
    /// Whether [`tx_metadata_len`](crate::Umem::tx_metadata_len) bytes before `offset` are metadata (first piece only).
    pub metadata: bool,
}

impl TxDesc {
    /// The whole of a frame that lies at the start of its chunk.
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

/// Reserved entries of the tx ring. What was pushed goes to the kernel on [`submit`](Self::submit) or drop.
///
/// End a batch with a whole frame: the kernel holds an unfinished one back until its last piece comes.
#[derive(Debug)]
#[must_use = "a batch that is dropped at once submits nothing"]
pub struct TxBatch<'a> {
    codec: AddressCodec,
    slots: Reserved<'a, Descriptor>,
}

impl TxBatch<'_> {
    /// How many more descriptors may be pushed.
    #[inline]
    pub fn room(&self) -> u32 {
        self.slots.room()
    }

    /// Gives a frame, or a piece of one, to the kernel.
    ///
    /// # Panics
    /// If there is no [`room`](Self::room): the caller pushes more than was granted.
    #[inline]
    pub fn push(&mut self, desc: TxDesc) {
        let address = self.codec.address(&desc.frame, desc.offset);
        let options = (u32::from(desc.more) * CONTINUED) | (u32::from(desc.metadata) * METADATA);
        let _gone = desc.frame.into_offset();
        self.slots.push(Descriptor {
            address,
            len: desc.len,
            options,
        });
    }

    /// Publishes what was pushed; says how many descriptors that were.
    #[inline]
    pub fn submit(self) -> u32 {
        self.slots.pushed()
    }
}
