//! What the drivers of both kinds of ring are alike in: where the ring lies, and tables for indirect chains.

use std::sync::Arc;

use super::GuestRam;
use crate::{GuestAddr, QueueSize, RingAddresses, layout};

/// A ring in a guest's memory. Both drivers dereference to theirs.
#[derive(Debug)]
pub struct DriverRing {
    pub(super) ram: Arc<GuestRam>,
    pub(super) size: QueueSize,
    guest: RingAddresses,
    /// The same as offsets in the driver's map.
    pub(super) offsets: RingAddresses,
    /// For each chain, a table and how many entries it has, made when first needed.
    tables: Vec<Option<(GuestAddr, usize)>>,
}

impl DriverRing {
    /// A ring of `size` entries at these guest addresses.
    pub(super) fn new(ram: &Arc<GuestRam>, size: QueueSize, guest: RingAddresses) -> Self {
        let offset = |addr| ram.offset(GuestAddr(addr), 1);
        Self {
            ram: Arc::clone(ram),
            size,
            guest,
            offsets: RingAddresses {
                desc: offset(guest.desc),
                avail: offset(guest.avail),
                used: offset(guest.used),
            },
            tables: vec![None; usize::from(size.get())],
        }
    }

    /// Entries of the queue.
    #[must_use]
    pub fn size(&self) -> QueueSize {
        self.size
    }

    /// The guest's memory.
    #[must_use]
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// Where the ring is for the guest.
    #[must_use]
    pub fn ring_guest_addresses(&self) -> RingAddresses {
        self.guest
    }

    /// Where the ring is in this process: what VHOST_USER_SET_VRING_ADDR wants.
    #[must_use]
    pub fn ring_user_addresses(&self) -> RingAddresses {
        let user = |addr| self.ram.user_addr(GuestAddr(addr));
        RingAddresses {
            desc: user(self.guest.desc),
            avail: user(self.guest.avail),
            used: user(self.guest.used),
        }
    }

    /// A table of so many entries for the chain of this name.
    pub(super) fn table(&mut self, chain: u16, entries: usize) -> GuestAddr {
        let slot = &mut self.tables[usize::from(chain)];
        match *slot {
            Some((addr, capacity)) if capacity >= entries => addr,
            _ => {
                let capacity = entries.next_power_of_two().max(4);
                let addr = self
                    .ram
                    .alloc(layout::DESC_BYTES * capacity as u64, 16)
                    .expect("guest memory for a table");
                *slot = Some((addr, capacity));
                addr
            }
        }
    }
}
