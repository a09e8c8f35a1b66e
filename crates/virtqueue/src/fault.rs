//! How a driver can break the rules of a ring.
//!
//! A fault is the guest's: the caller closes the port, counts [`GuestFault::name`] and logs it once. The
//! numbers in a variant were read from the guest; use them only for the message.

use crate::GuestAddr;

/// A violation of the specification by the driver. The queue must not be used after it.
///
/// `head` is the chain's first descriptor, or its place in a packed ring; in [`Self::HeadOutOfRange`] it is
/// the invalid number that was read. `found` and `addr` are as read from the ring; `size` and `limit` are
/// entries, of the queue or of the table; `len` is the descriptor's length in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "fields are described above")]
pub enum GuestFault {
    /// `avail.idx` is ahead by more entries than the ring has, or went back (VirtIO 1.3, 2.7.13.3).
    #[error("avail.idx jumped to {found} while {next} is next and the queue has {size} entries")]
    AvailIndexJump {
        found: u16,
        /// The next entry that the device would take.
        next: u16,
        size: u16,
    },
    /// Packed ring: a descriptor was made available again before the device had used it, or a list reaches
    /// such a descriptor (2.8.21).
    #[error("descriptor {at} was made available again before it was used")]
    RingOverrun {
        /// Its slot in the ring.
        at: u16,
    },
    /// Packed ring: a list continues in a descriptor that is not available; the first one must be made
    /// available last (2.8.21.1).
    #[error("chain {head} continues in descriptor {at}, which is not available")]
    ChainIncomplete {
        head: u16,
        /// Slot of the descriptor that is not available.
        at: u16,
    },
    /// An entry of the available ring refers to a descriptor that does not exist.
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
    /// The chain has more descriptors than its table or the queue: so it must be a loop (2.7.5.2).
    #[error("chain {head} has more than {limit} descriptors")]
    DescriptorLoop { head: u16, limit: u16 },
    /// A buffer of no bytes, which no correct driver uses.
    #[error("chain {head}: descriptor of zero length")]
    ZeroLength { head: u16 },
    /// A buffer or an indirect table that is not wholly inside one memory region.
    #[error("chain {head}: {len} bytes at {addr} are not inside guest memory")]
    OutsideMemory { head: u16, addr: GuestAddr, len: u32 },
    /// Address plus length exceeds 64 bits.
    #[error("chain {head}: {len} bytes at {addr} wrap around the address space")]
    AddressWrap { head: u16, addr: GuestAddr, len: u32 },
    /// A chain with 4 GiB or more to read, or to write (2.7.5.2).
    #[error("chain {head} has 4 GiB or more")]
    ChainTooLong { head: u16 },
    /// An indirect descriptor that is not allowed here, or a table of invalid size (2.7.5.3).
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
