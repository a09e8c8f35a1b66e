//! A position in a packed ring.

use crate::QueueSize;
use crate::layout::{PACKED_AVAIL, PACKED_USED};

/// A slot of a packed ring and its lap (VirtIO 1.3, 2.8.1): the wrap counter changes with each lap, and so
/// distinguishes the flags of this lap from those of the previous one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    /// The slot, below the queue size.
    pub(crate) offset: u16,
    /// Ring wrap counter, initially 1.
    pub(crate) wrap: bool,
}

/// The bit of the wrap counter in the 16-bit form of a position (2.8.10, and the vring base of vhost-user).
const WRAP_BIT: u16 = 1 << 15;

impl Position {
    /// Both sides start here.
    #[cfg(any(test, feature = "test-driver"))]
    pub(crate) const START: Self = Self {
        offset: 0,
        wrap: true,
    };

    /// As one number: offset in bits 0 to 14, wrap counter in bit 15.
    #[inline(always)]
    pub(crate) const fn to_bits(self) -> u16 {
        self.offset | if self.wrap { WRAP_BIT } else { 0 }
    }

    /// From one number. The offset is not checked.
    #[inline(always)]
    pub(crate) const fn from_bits(bits: u16) -> Self {
        Self {
            offset: bits & !WRAP_BIT,
            wrap: bits & WRAP_BIT != 0,
        }
    }

    /// The position `slots` (at most the size) after this one.
    #[inline(always)]
    #[must_use]
    pub(crate) const fn forward(self, slots: u16, size: QueueSize) -> Self {
        let to = self.offset as u32 + slots as u32;
        let size = size.get() as u32;
        if to >= size {
            Self {
                offset: (to - size) as u16,
                wrap: !self.wrap,
            }
        } else {
            Self {
                offset: to as u16,
                wrap: self.wrap,
            }
        }
    }

    /// The position `slots` (at most the size) before this one.
    #[inline(always)]
    #[must_use]
    pub(crate) const fn back(self, slots: u16, size: QueueSize) -> Self {
        if slots > self.offset {
            Self {
                offset: (self.offset as u32 + size.get() as u32 - slots as u32) as u16,
                wrap: !self.wrap,
            }
        } else {
            Self {
                offset: self.offset - slots,
                wrap: self.wrap,
            }
        }
    }

    /// AVAIL and USED of a descriptor that the driver made available here.
    #[inline(always)]
    pub(crate) const fn available_flags(self) -> u16 {
        if self.wrap { PACKED_AVAIL } else { PACKED_USED }
    }

    /// AVAIL and USED of a descriptor that the device used here.
    #[inline(always)]
    pub(crate) const fn used_flags(self) -> u16 {
        if self.wrap { PACKED_AVAIL | PACKED_USED } else { 0 }
    }

    /// Whether `flags`, read here, say that the descriptor is available.
    #[inline(always)]
    pub(crate) const fn is_available(self, flags: u16) -> bool {
        flags & (PACKED_AVAIL | PACKED_USED) == self.available_flags()
    }

    /// Whether `flags`, read here, say that the descriptor was used in this lap.
    #[inline(always)]
    pub(crate) const fn is_used(self, flags: u16) -> bool {
        flags & (PACKED_AVAIL | PACKED_USED) == self.used_flags()
    }

    /// Whether the device has passed this slot in this lap. Then USED is this lap's: set by the device, and
    /// kept by a driver that has made the slot available for the next lap since.
    #[inline(always)]
    pub(crate) const fn is_passed(self, flags: u16) -> bool {
        (flags & PACKED_USED != 0) == self.wrap
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lap_forward_and_back_changes_the_wrap_counter() {
        for size in [1u32, 3, 256, 32768] {
            let size = QueueSize::packed(size).unwrap();
            let mut at = Position::START;
            for step in 0..2 * u32::from(size.get()) {
                assert_eq!(u32::from(at.offset), step % u32::from(size.get()));
                assert_eq!(at.wrap, step < size.get().into());
                assert_eq!(Position::from_bits(at.to_bits()), at);
                let next = at.forward(1, size);
                assert_eq!(next.back(1, size), at);
                at = next;
            }
            assert_eq!(at, Position::START);
            let lap = at.forward(size.get(), size);
            assert_eq!((lap.offset, lap.wrap), (0, false));
            assert_eq!(lap.back(size.get(), size), at);
        }
    }

    #[test]
    fn flags_are_this_laps_or_the_others() {
        let first = Position::START;
        assert!(!first.is_available(0) && !first.is_used(0) && !first.is_passed(0));
        assert!(first.is_available(PACKED_AVAIL));
        assert!(first.is_used(PACKED_AVAIL | PACKED_USED) && first.is_passed(PACKED_AVAIL | PACKED_USED));
        // Made available for the next lap.
        assert!(first.is_passed(PACKED_USED) && !first.is_available(PACKED_USED));
        let second = Position { wrap: false, ..first };
        assert!(second.is_available(PACKED_USED) && second.is_used(0) && second.is_passed(0));
    }
}
