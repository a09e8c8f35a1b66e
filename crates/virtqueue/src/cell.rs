//! Atomic words of a ring in shared memory, which driver and device access.

use std::sync::atomic::Ordering;

/// An atomic that driver and device access, little-endian as VirtIO requires.
pub(crate) trait Cell<T> {
    fn load(&self, order: Ordering) -> T;
    fn store(&self, value: T, order: Ordering);
    fn fence(order: Ordering);
}

macro_rules! cells {
    ($fence:path: $($atomic:ty => $value:ty),+) => {$(
        impl Cell<$value> for $atomic {
            #[inline(always)]
            fn load(&self, order: Ordering) -> $value {
                <$value>::from_le(<$atomic>::load(self, order))
            }
            #[inline(always)]
            fn store(&self, value: $value, order: Ordering) {
                <$atomic>::store(self, value.to_le(), order);
            }
            #[inline(always)]
            fn fence(order: Ordering) {
                $fence(order);
            }
        }
    )+};
}

mod memory {
    use super::{Cell, Ordering};
    use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, fence};

    cells!(fence: AtomicU16 => u16, AtomicU32 => u32, AtomicU64 => u64);
}

#[cfg(all(test, loom))]
mod model {
    use super::{Cell, Ordering};
    use loom::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, fence};

    cells!(fence: AtomicU16 => u16, AtomicU32 => u32, AtomicU64 => u64);
}
