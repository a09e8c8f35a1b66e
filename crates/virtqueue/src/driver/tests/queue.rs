//! A driver of either kind, for tests that run with both.

use std::ops::Deref;
use std::sync::Arc;

use super::{Buffer, DriverFeatures, DriverRing, GuestRam, PackedDriver, RamError, SplitDriver, Used};
use crate::{MemoryMap, QueueFeatures, QueueSize, RingFormat, RingLayout, RingShape};

/// The driver's side of one virtqueue. To break the rules, use [`split`](Self::split) or [`packed`](Self::packed).
#[derive(Debug)]
pub enum QueueDriver {
    /// VirtIO 1.3, 2.7.
    Split(SplitDriver),
    /// VirtIO 1.3, 2.8.
    Packed(PackedDriver),
}

/// Forwards a call to the split or packed driver.
macro_rules! of_either {
    ($queue:expr, $driver:ident => $call:expr) => {
        match $queue {
            QueueDriver::Split($driver) => $call,
            QueueDriver::Packed($driver) => $call,
        }
    };
}

impl Deref for QueueDriver {
    type Target = DriverRing;

    fn deref(&self) -> &DriverRing {
        of_either!(self, driver => driver)
    }
}

impl QueueDriver {
    /// Makes a ring of `size` entries in `ram`.
    ///
    /// # Errors
    /// No room.
    pub fn new(ram: &Arc<GuestRam>, shape: RingShape, features: DriverFeatures) -> Result<Self, RamError> {
        let RingShape { format, size } = shape;
        Ok(match format {
            RingFormat::Split => Self::Split(SplitDriver::new(ram, size, features)?),
            RingFormat::Packed => Self::Packed(PackedDriver::new(ram, size, features)?),
        })
    }

    /// Makes a ring of `size` entries for a device with these features, whose driver uses all of them.
    ///
    /// # Panics
    /// If there is no room, or no such ring.
    pub fn for_device(ram: &Arc<GuestRam>, size: u32, features: QueueFeatures) -> Self {
        let size = match features.packed {
            true => QueueSize::packed(size),
            false => QueueSize::new(size),
        };
        let shape = RingShape::new(RingFormat::of(features.packed), size.expect("a possible size"));
        let used = DriverFeatures {
            event_idx: features.event_idx,
            in_order: features.in_order,
        };
        Self::new(ram, shape, used).expect("room")
    }

    /// Where the device finds the ring in its map of the memory.
    ///
    /// # Panics
    /// If the ring is not in it.
    pub fn rings(&self, memory: &MemoryMap) -> RingLayout {
        let shape = RingShape::new(self.format(), self.size());
        RingLayout::from_user(memory, shape, self.ring_user_addresses()).expect("inside")
    }

    /// Which kind of ring.
    pub fn format(&self) -> RingFormat {
        RingFormat::of(matches!(self, Self::Packed(_)))
    }

    /// The split driver, to break the rules.
    ///
    /// # Panics
    /// If it is packed.
    pub fn split(&self) -> &SplitDriver {
        match self {
            Self::Split(driver) => driver,
            Self::Packed(_) => panic!("the ring is packed"),
        }
    }

    /// The packed driver, to break the rules.
    ///
    /// # Panics
    /// If it is split.
    pub fn packed(&self) -> &PackedDriver {
        match self {
            Self::Packed(driver) => driver,
            Self::Split(_) => panic!("the ring is split"),
        }
    }

    /// Makes entry `index` the next one, as after some laps: for tests of the wrap. Only before the first
    /// `add`.
    pub fn start_at(&mut self, index: u16) {
        match self {
            Self::Split(driver) => driver.start_at(index),
            Self::Packed(driver) => {
                let size = driver.size().get();
                driver.start_at(index % size, (index / size).is_multiple_of(2));
            }
        }
    }

    /// The position from which the device must continue, in the form of VHOST_USER_SET_VRING_BASE.
    pub fn base(&self) -> u32 {
        match self {
            Self::Split(driver) => driver.used_idx().into(),
            Self::Packed(driver) => driver.base(),
        }
    }

    /// Ring descriptors that are free.
    pub fn free_descriptors(&self) -> usize {
        of_either!(self, driver => driver.free_descriptors())
    }

    /// Puts a chain of `buffers` into the ring, not yet visible. Returns its [`Used::head`]; `None` if there are not
    /// enough descriptors.
    ///
    /// # Panics
    /// If there is no buffer.
    pub fn add(&mut self, buffers: &[Buffer]) -> Option<u16> {
        of_either!(self, driver => driver.add(buffers))
    }

    /// As [`add`](Self::add), with an indirect table.
    ///
    /// # Panics
    /// If there is no buffer, or no memory for a table.
    pub fn add_indirect(&mut self, buffers: &[Buffer]) -> Option<u16> {
        of_either!(self, driver => driver.add_indirect(buffers))
    }

    /// Makes all added chains visible with one store. Returns whether the device wants a kick.
    pub fn publish(&mut self) -> bool {
        of_either!(self, driver => driver.publish())
    }

    /// Takes the next chain that the device returned, and frees its descriptors.
    ///
    /// # Panics
    /// If the device breaks the rules.
    pub fn take_used(&mut self) -> Option<Used> {
        of_either!(self, driver => driver.take_used())
    }

    /// Asks for a call with the next chain that the device returns. `true`: it has returned one already.
    pub fn enable_calls(&mut self) -> bool {
        of_either!(self, driver => driver.enable_calls())
    }

    /// Tells the device that no calls are needed.
    pub fn disable_calls(&mut self) {
        of_either!(self, driver => driver.disable_calls());
    }
}
