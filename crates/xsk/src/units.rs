//! Numbers that must not be confused: an offset in the UMEM, a ring's size, a queue's number.

use derive_more::Display;

/// A byte offset into a [`Umem`](crate::Umem), the address form that every AF_XDP ring uses.
///
/// Zero is the first byte of the registered memory. The upper 16 bits, which the kernel uses for a delta in
/// unaligned mode (`XSK_UNALIGNED_BUF_OFFSET_SHIFT`, `include/uapi/linux/if_xdp.h`), never appear here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Display)]
#[display("{_0:#x}")]
#[repr(transparent)]
pub struct UmemOffset(u64);

impl UmemOffset {
    /// Makes an offset from a number of bytes. It is checked where it is used, not here.
    #[inline]
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// The number of bytes from the start of the UMEM.
    #[inline]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The offset plus `bytes`; `None` if that exceeds 64 bits.
    #[inline]
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }
}

/// The number of entries of a ring: a power of two, from 1 to [`RingSize::MAX`].
///
/// The kernel requires a power of two (`xsk_init_queue`, `net/xdp/xsk.c`); the upper bound keeps a typing
/// error from allocating gigabytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Display)]
pub struct RingSize(u32);

impl RingSize {
    /// The largest size accepted: 2^20 entries.
    pub const MAX: u32 = 1 << 20;
    /// 2048 entries, the usual choice of AF_XDP programs.
    pub const DEFAULT: Self = Self(2048);

    /// The number of entries.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// All sizes, the largest first.
    pub(crate) fn descending() -> impl Iterator<Item = Self> {
        (0..=Self::MAX.ilog2()).rev().map(|exponent| Self(1 << exponent))
    }

    /// The smallest ring size that holds `entries`, or else the largest.
    pub fn at_least(entries: u32) -> Self {
        Self(entries.clamp(1, Self::MAX).next_power_of_two())
    }
}

impl Default for RingSize {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// A number that is no ring size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("ring size {0} is not a power of two from 1 to {max}", max = RingSize::MAX)]
pub struct InvalidRingSize(pub u32);

impl TryFrom<u32> for RingSize {
    type Error = InvalidRingSize;

    fn try_from(entries: u32) -> Result<Self, InvalidRingSize> {
        if entries.is_power_of_two() && entries <= Self::MAX {
            Ok(Self(entries))
        } else {
            Err(InvalidRingSize(entries))
        }
    }
}

/// The number of a queue of a network interface, counted from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Display)]
pub struct QueueId(pub u32);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_size_is_a_power_of_two() {
        for good in [1, 2, 64, 2048, RingSize::MAX] {
            assert_eq!(RingSize::try_from(good).map(RingSize::get), Ok(good));
        }
        for bad in [0, 3, 100, RingSize::MAX + 1, RingSize::MAX * 2, u32::MAX] {
            assert_eq!(RingSize::try_from(bad), Err(InvalidRingSize(bad)));
        }
    }

    #[test]
    fn ring_size_rounds_up_and_stays_in_bounds() {
        assert_eq!(RingSize::at_least(0).get(), 1);
        assert_eq!(RingSize::at_least(1025).get(), 2048);
        assert_eq!(RingSize::at_least(u32::MAX).get(), RingSize::MAX);
    }
}
