//! What the drivers of split and packed rings share: the addresses of the ring, and the chains in flight.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{GuestRam, RamError};
use crate::cell::Cell;
use crate::{GuestAddr, QueueSize, RingAddresses, RingShape};

/// The negotiated features that concern the ring. Indirect descriptors are used when asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriverFeatures {
    /// VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
    /// VIRTIO_F_IN_ORDER: descriptors are used in ring order, and must come back in that order.
    pub in_order: bool,
}

/// A ring in a guest's memory. Both drivers dereference to their ring.
#[derive(Debug)]
pub struct DriverRing {
    pub(super) ram: Arc<GuestRam>,
    pub(super) size: QueueSize,
    pub(super) features: DriverFeatures,
    /// Chains in flight, in the order in which they were added.
    pub(super) order: VecDeque<u16>,
    guest: RingAddresses,
    /// The same as offsets in the driver's map.
    pub(super) offsets: RingAddresses,
    /// For each chain, its indirect table and the table's number of entries, allocated when first needed.
    #[cfg(feature = "test-driver")]
    tables: Vec<Option<(GuestAddr, usize)>>,
}

impl DriverRing {
    /// Makes a ring in `ram`.
    pub(super) fn new(
        ram: &Arc<GuestRam>,
        shape: RingShape,
        features: DriverFeatures,
    ) -> Result<Self, RamError> {
        // Each part on its own cache lines, so that measured costs contain no false sharing.
        let [desc, avail, used] = shape
            .parts()
            .map(|part| ram.alloc(part.len.next_multiple_of(64), 64));
        let guest = RingAddresses {
            desc: desc?.get(),
            avail: avail?.get(),
            used: used?.get(),
        };
        let offset = |addr| ram.offset(GuestAddr(addr), 1);
        let entries = usize::from(shape.size.get());
        Ok(Self {
            ram: Arc::clone(ram),
            size: shape.size,
            features,
            order: VecDeque::with_capacity(entries),
            guest,
            offsets: RingAddresses {
                desc: offset(guest.desc),
                avail: offset(guest.avail),
                used: offset(guest.used),
            },
            #[cfg(feature = "test-driver")]
            tables: vec![None; entries],
        })
    }

    /// Entries of the queue.
    pub fn size(&self) -> QueueSize {
        self.size
    }

    /// The guest's memory.
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// Addresses of the ring in this process, for VHOST_USER_SET_VRING_ADDR.
    pub fn ring_user_addresses(&self) -> RingAddresses {
        let user = |addr| self.ram.user_addr(GuestAddr(addr));
        RingAddresses {
            desc: user(self.guest.desc),
            avail: user(self.guest.avail),
            used: user(self.guest.used),
        }
    }

    /// Removes `chain`, which the device returned, from the chains in flight.
    ///
    /// # Panics
    /// If the device does not hold it, or with in-order holds an older one.
    pub(super) fn came_back(&mut self, chain: u16) {
        // Most devices return chains in their order.
        if self.order.front() == Some(&chain) {
            self.order.pop_front();
            return;
        }
        let position = self.order.iter().position(|&other| other == chain);
        let position =
            position.unwrap_or_else(|| panic!("the device returned chain {chain}, which it does not have"));
        assert!(
            !self.features.in_order,
            "the device returned chain {chain} out of order"
        );
        self.order.remove(position);
    }

    /// The word at `offset` in the driver's map.
    pub(super) fn word<T: Cell<V>, V>(&self, offset: u64) -> &T {
        self.ram.map().atomic(offset).expect("inside the ring")
    }

    /// Writes the two words of a descriptor. Atomic where alignment allows, since tests write while a device reads.
    pub(super) fn write_words(&self, offset: u64, [low, high]: [u64; 2]) {
        let map = self.ram.map();
        match (map.atomic(offset), map.atomic(offset + 8)) {
            (Some(first), Some(second)) => {
                <AtomicU64 as Cell<u64>>::store(first, low, Ordering::Relaxed);
                <AtomicU64 as Cell<u64>>::store(second, high, Ordering::Release);
            }
            _ => assert!(map.copy_to_guest(offset, [low, high].map(u64::to_le_bytes).as_flattened())),
        }
    }
}

#[cfg(feature = "test-driver")]
#[path = "tests/ring.rs"]
mod tests;
