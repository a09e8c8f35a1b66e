//! Functions of a ring for tests: its guest addresses, the chains in flight, and tables for indirect chains.

use super::DriverRing;
use crate::{GuestAddr, RingAddresses, layout};

impl DriverRing {
    /// Guest addresses of the ring.
    pub fn ring_guest_addresses(&self) -> RingAddresses {
        self.guest
    }

    /// Chains that were added and that the device has not returned.
    pub fn in_flight(&self) -> usize {
        self.order.len()
    }

    /// Offset in the driver's map of entry `index` of a table in guest memory.
    pub(in crate::driver) fn table_entry(&self, table: GuestAddr, index: u16) -> u64 {
        let addr = table
            .checked_add(u64::from(index) * layout::DESC_BYTES)
            .expect("a table in guest memory");
        self.ram.offset(addr, layout::DESC_BYTES as usize)
    }

    /// A table of so many entries for this chain.
    pub(in crate::driver) fn table(&mut self, chain: u16, entries: usize) -> GuestAddr {
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
