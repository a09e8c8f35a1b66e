//! What a driver can do wrong.
//!
//! A fault blames the guest: the caller closes the port, counts [`GuestFault::name`] and says it once. The
//! numbers in a variant are the guest's own, as read; they are for the message and must not be used as
//! anything else.

use crate::GuestAddr;

/// A ring that breaks the specification. After one, the queue must not be used any more.
///
/// `head` is the chain's first descriptor, or its place in a packed ring; in [`Self::HeadOutOfRange`] it is what was
/// read where one should be. `found` and `addr` are as read from the ring; `size` and `limit` are entries, of the queue
/// or of the table; `len` is bytes, as the descriptor says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "fields are described above")]
pub enum GuestFault {
    /// `avail.idx` is further ahead than the ring has entries, or went back (VirtIO 1.3, 2.7.13.3).
    #[error("avail.idx jumped to {found} while {next} is next and the queue has {size} entries")]
    AvailIndexJump {
        found: u16,
        /// The next entry that the device would take.
        next: u16,
        size: u16,
    },
    /// Packed ring: a descriptor was made available again before the device had used it, or a list runs into
    /// such a descriptor (2.8.21).
    #[error("descriptor {at} was made available again before it was used")]
    RingOverrun {
        /// Its place in the ring.
        at: u16,
    },
    /// Packed ring: a list goes on in a descriptor that is not available; the first one must be made available
    /// last (2.8.21.1).
    #[error("chain {head} goes on in descriptor {at}, which is not available")]
    ChainIncomplete {
        head: u16,
        /// Place of the one that is missing.
        at: u16,
    },
    /// An entry of the available ring names a descriptor that is not there.
    #[error("available head {head} is not below the queue size {size}")]
    HeadOutOfRange { head: u16, size: u16 },
    /// `next` leads out of the descriptor table, or out of an indirect one.
    #[error("chain {head}: next descriptor {next} is not below the table size {size}")]
    NextOutOfRange {
        head: u16,
        /// `next` as read.
        next: u16,
        size: u16,
    },
    /// The chain has more descriptors than its table or the queue: it must be a loop (2.7.5.2).
    #[error("chain {head} has more than {limit} descriptors")]
    DescriptorLoop { head: u16, limit: u16 },
    /// A buffer of no bytes, which no driver makes.
    #[error("chain {head}: descriptor of zero length")]
    ZeroLength { head: u16 },
    /// A buffer or an indirect table that is not wholly inside one memory region.
    #[error("chain {head}: {len} bytes at {addr} are not inside guest memory")]
    OutsideMemory { head: u16, addr: GuestAddr, len: u32 },
    /// Address plus length is more than 64 bits hold.
    #[error("chain {head}: {len} bytes at {addr} wrap around the address space")]
    AddressWrap { head: u16, addr: GuestAddr, len: u32 },
    /// A chain of 4 GiB or more (2.7.5.2).
    #[error("chain {head} is longer than 4 GiB")]
    ChainTooLong { head: u16 },
    /// An indirect descriptor that must not be there, or a table of impossible size (2.7.5.3).
    #[error("chain {head}: indirect table of {len} bytes: {why}")]
    IndirectInvalid {
        head: u16,
        len: u32,
        /// The rule that it breaks.
        why: IndirectRule,
    },
    /// An indirect descriptor inside an indirect table (2.7.5.3.1).
    #[error("chain {head}: indirect descriptor inside an indirect table")]
    NestedIndirect { head: u16 },
    /// A device-readable buffer after a device-writable one (2.7.4.2).
    #[error("chain {head}: device-readable descriptor after a writable one")]
    WritableBeforeReadable { head: u16 },
}

/// Rules on indirect descriptors (VirtIO 1.3, 2.7.5.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IndirectRule {
    /// The feature was not negotiated.
    #[error("VIRTIO_F_INDIRECT_DESC was not negotiated")]
    NotNegotiated,
    /// INDIRECT and NEXT in one descriptor.
    #[error("the descriptor has NEXT set too")]
    WithNext,
    /// Not a multiple of 16 bytes, or none.
    #[error("the length is not a multiple of 16, or is zero")]
    Length,
    /// More entries than the queue.
    #[error("it has more entries than the queue")]
    TooLong,
}

impl GuestFault {
    /// The fault without its values: a static name for counters and for the reason of closing a port.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::AvailIndexJump { .. } => "avail-index-jump",
            Self::RingOverrun { .. } => "ring-overrun",
            Self::ChainIncomplete { .. } => "chain-incomplete",
            Self::HeadOutOfRange { .. } => "head-out-of-range",
            Self::NextOutOfRange { .. } => "next-out-of-range",
            Self::DescriptorLoop { .. } => "descriptor-loop",
            Self::ZeroLength { .. } => "zero-length",
            Self::OutsideMemory { .. } => "outside-memory",
            Self::AddressWrap { .. } => "address-wrap",
            Self::ChainTooLong { .. } => "chain-too-long",
            Self::IndirectInvalid { why, .. } => match why {
                IndirectRule::NotNegotiated => "indirect-not-negotiated",
                IndirectRule::WithNext => "indirect-with-next",
                IndirectRule::Length => "indirect-length",
                IndirectRule::TooLong => "indirect-too-long",
            },
            Self::NestedIndirect { .. } => "nested-indirect",
            Self::WritableBeforeReadable { .. } => "writable-before-readable",
        }
    }
}
