//! Where the three parts of a ring lie in the map, checked.

use std::fmt;

use crate::{GuestAddr, MemoryMap, QueueSize, layout};

/// Addresses of the three parts of a ring, in whichever space they were told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingAddresses {
    /// Descriptor table.
    pub desc: u64,
    /// Available ring ("driver area").
    pub avail: u64,
    /// Used ring ("device area").
    pub used: u64,
}

/// A part of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingPart {
    /// Descriptor table.
    DescriptorTable,
    /// Available ring.
    AvailableRing,
    /// Used ring.
    UsedRing,
}

impl fmt::Display for RingPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DescriptorTable => "descriptor table",
            Self::AvailableRing => "available ring",
            Self::UsedRing => "used ring",
        })
    }
}

/// A ring that cannot be used. The VMM's or the guest's doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// Not wholly inside one region of guest memory.
    #[error("{part}: {len} bytes at {addr:#x} are not inside guest memory")]
    OutsideMemory {
        /// Which part.
        part: RingPart,
        /// Where it was said to be, in the space in which it was said.
        addr: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// Not aligned as the table in VirtIO 1.3, 2.7 demands.
    #[error("{part} at {addr:#x} is not aligned to {align} bytes")]
    Misaligned {
        /// Which part.
        part: RingPart,
        /// Where it was said to be, in the space in which it was said.
        addr: u64,
        /// What it must be a multiple of, in bytes.
        align: u64,
    },
}

/// A ring's size and the offsets of its parts in a [`MemoryMap`]: inside guest memory and aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    size: QueueSize,
    offsets: RingAddresses,
}

impl RingLayout {
    /// From addresses in the VMM's space, as vhost-user gives them (VHOST_USER_SET_VRING_ADDR).
    ///
    /// # Errors
    /// A part that is misaligned or not wholly inside one region.
    pub fn from_user(
        memory: &MemoryMap,
        size: QueueSize,
        addresses: RingAddresses,
    ) -> Result<Self, RingError> {
        Self::locate(size, addresses, |addr, len| memory.translate_user(addr, len))
    }

    /// From guest addresses, as a transport's registers give them.
    ///
    /// # Errors
    /// A part that is misaligned or not wholly inside one region.
    pub fn from_guest(
        memory: &MemoryMap,
        size: QueueSize,
        addresses: RingAddresses,
    ) -> Result<Self, RingError> {
        Self::locate(size, addresses, |addr, len| {
            memory.translate(GuestAddr(addr), len)
        })
    }

    /// From offsets in the map.
    ///
    /// # Errors
    /// A part that is misaligned or not wholly inside the guest's part of the map.
    pub fn from_offsets(
        memory: &MemoryMap,
        size: QueueSize,
        offsets: RingAddresses,
    ) -> Result<Self, RingError> {
        let guest_len = memory.guest_len();
        Self::locate(size, offsets, |offset, len| {
            (offset <= guest_len && len <= guest_len - offset).then_some(offset)
        })
    }

    fn locate(
        size: QueueSize,
        addresses: RingAddresses,
        translate: impl Fn(u64, u64) -> Option<u64>,
    ) -> Result<Self, RingError> {
        let find = |part, addr: u64, len, align: u64| {
            let offset = translate(addr, len).ok_or(RingError::OutsideMemory { part, addr, len })?;
            // The map starts on a page: aligned in it means aligned for us. A region that starts in the
            // middle of a page can make the two differ, so both count.
            let aligned = addr.is_multiple_of(align) && offset.is_multiple_of(align);
            aligned
                .then_some(offset)
                .ok_or(RingError::Misaligned { part, addr, align })
        };
        let entries = size.get();
        let offsets = RingAddresses {
            desc: find(
                RingPart::DescriptorTable,
                addresses.desc,
                layout::desc_bytes(entries),
                layout::DESC_ALIGN,
            )?,
            avail: find(
                RingPart::AvailableRing,
                addresses.avail,
                layout::avail_bytes(entries),
                layout::AVAIL_ALIGN,
            )?,
            used: find(
                RingPart::UsedRing,
                addresses.used,
                layout::used_bytes(entries),
                layout::USED_ALIGN,
            )?,
        };
        Ok(Self { size, offsets })
    }

    /// Entries of the queue.
    #[must_use]
    pub fn size(&self) -> QueueSize {
        self.size
    }

    /// Offsets of the parts in the map, in bytes.
    #[must_use]
    pub fn offsets(&self) -> RingAddresses {
        self.offsets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(desc: u64, avail: u64, used: u64) -> Result<RingLayout, RingError> {
        let map = MemoryMap::anonymous(1 << 16).unwrap();
        let size = QueueSize::new(256).unwrap();
        RingLayout::from_guest(&map, size, RingAddresses { desc, avail, used })
    }

    #[test]
    fn ring_parts_must_be_aligned() {
        assert!(layout(0, 4096, 8192).is_ok());
        let align = |error: Result<RingLayout, RingError>| match error {
            Err(RingError::Misaligned { align, .. }) => align,
            other => panic!("{other:?}"),
        };
        assert_eq!(align(layout(8, 4096, 8192)), 16);
        assert_eq!(align(layout(0, 4097, 8192)), 2);
        assert_eq!(align(layout(0, 4096, 8194)), 4);
    }

    #[test]
    fn ring_parts_must_be_wholly_inside_memory() {
        let end = 1u64 << 16;
        assert!(layout(end - 4096, 0, 1024).is_ok());
        for (desc, avail, used) in [
            (end - 4080, 0, 1024),
            (0, end - 516, 1024),
            (0, 4096, end - 2052),
            (u64::MAX - 15, 0, 0),
            (0, u64::MAX - 1, 0),
        ] {
            assert!(matches!(
                layout(desc, avail, used),
                Err(RingError::OutsideMemory { .. })
            ));
        }
    }
}
