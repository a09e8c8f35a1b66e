//! Units of this crate: guest addresses and queue sizes.

use std::fmt;

/// An address as the driver writes it into descriptors: guest-physical, or an IOVA if the VMM uses an IOMMU.
/// Unchecked until [`MemoryMap::translate`](crate::MemoryMap::translate) has accepted it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestAddr(pub u64);

impl GuestAddr {
    /// The address as a number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The address plus `bytes`, or `None` past the end of the 64-bit space.
    #[must_use]
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }
}

impl fmt::Display for GuestAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Entries of a queue, 1 to 32768: a power of two for split rings (VirtIO 1.3, 2.7), any number for packed
/// ones (2.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueSize(u16);

/// The largest queue there is (VirtIO 1.3, 2.7 and 2.8).
pub const MAX_QUEUE_SIZE: u16 = 32768;

/// A queue size that the ring cannot have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueSizeError {
    /// For a split ring.
    #[error("queue size {0} is not a power of two between 1 and 32768")]
    Split(u32),
    /// For a packed ring.
    #[error("queue size {0} is not between 1 and 32768")]
    Packed(u32),
}

impl QueueSize {
    /// One entry.
    pub const SMALLEST: Self = Self(1);

    /// Checks `entries` for a split ring.
    ///
    /// # Errors
    /// Zero, more than 32768, or not a power of two.
    pub const fn new(entries: u32) -> Result<Self, QueueSizeError> {
        if entries.is_power_of_two() && entries <= MAX_QUEUE_SIZE as u32 {
            Ok(Self(entries as u16))
        } else {
            Err(QueueSizeError::Split(entries))
        }
    }

    /// Checks `entries` for a packed ring.
    ///
    /// # Errors
    /// Zero, or more than 32768.
    pub const fn packed(entries: u32) -> Result<Self, QueueSizeError> {
        if entries > 0 && entries <= MAX_QUEUE_SIZE as u32 {
            Ok(Self(entries as u16))
        } else {
            Err(QueueSizeError::Packed(entries))
        }
    }

    /// Number of entries.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0
    }

    /// The mask that turns a free-running 16-bit index into a slot of a split ring.
    #[must_use]
    pub(crate) const fn mask(self) -> u16 {
        self.0 - 1
    }
}

impl fmt::Display for QueueSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_size_is_a_power_of_two_up_to_32768() {
        for good in [1u32, 2, 256, 1024, 32768] {
            let size = QueueSize::new(good).unwrap();
            assert_eq!(
                (u32::from(size.get()), size.to_string()),
                (good, good.to_string())
            );
        }
        for bad in [0u32, 3, 255, 32769, 65536, u32::MAX] {
            assert_eq!(QueueSize::new(bad), Err(QueueSizeError::Split(bad)));
        }
    }

    #[test]
    fn packed_queue_size_is_any_up_to_32768() {
        for good in [1u32, 3, 255, 32768] {
            assert_eq!(u32::from(QueueSize::packed(good).unwrap().get()), good);
        }
        for bad in [0u32, 32769, u32::MAX] {
            assert_eq!(QueueSize::packed(bad), Err(QueueSizeError::Packed(bad)));
        }
    }

    #[test]
    fn guest_address_past_the_end_is_none() {
        assert_eq!(GuestAddr(u64::MAX).checked_add(1), None);
        assert_eq!(GuestAddr(1).checked_add(2), Some(GuestAddr(3)));
        assert_eq!(GuestAddr(0x1f).to_string(), "0x1f");
    }
}
