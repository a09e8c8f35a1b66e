//! A split ring whose entry i always has the same buffer: what a driver does for a frame is done once, before anything
//! is measured.
//!
//! Theory of operation. Descriptors and available entries are written when the ring is made. To give the device a batch
//! is to store avail.idx then, and to wait for one is to read used.idx and, where it is not there, the call eventfd,
//! which blocks. No used element is read, but by [`FixedRing::take`]. So buffers have to come back in the order in which the device got them, which
//! [`FixedRing::check`] looks at afterwards. One call is asked for a batch, as by a driver that coalesces interrupts.

use std::sync::atomic::{Ordering, fence};

use virtqueue::GuestAddr;
use virtqueue::driver::Buffer;

use crate::pair::Ring;
use crate::wait;

/// Bytes before the elements of a used ring, and of an element (VirtIO 1.3, 2.7.8).
const USED_HEADER: u64 = 4;
const USED_ELEMENT: u64 = 8;

/// A ring of such a driver.
pub struct FixedRing<'a> {
    ring: &'a Ring,
    /// What the device got, and what has come back.
    shown: u16,
    back: u16,
}

impl<'a> FixedRing<'a> {
    /// Lays the buffers into the ring, again and again if they are fewer than its entries. The device sees none.
    ///
    /// # Panics
    /// If the ring is packed.
    pub fn new(ring: &'a Ring, buffers: &[Buffer]) -> Self {
        let split = ring.driver.split();
        for (entry, &buffer) in (0..ring.driver.size().get()).zip(buffers.iter().cycle()) {
            split.write_descriptor(entry, buffer.descriptor(None));
            split.set_avail_entry(entry, entry);
        }
        wait::set_blocking(&ring.call);
        Self {
            ring,
            shown: 0,
            back: 0,
        }
    }

    /// Gives the device the next `count` buffers, and kicks it if it wants that.
    pub fn show(&mut self, count: u16) {
        let split = self.ring.driver.split();
        let old = self.shown;
        self.shown = old.wrapping_add(count);
        split.set_avail_idx(self.shown);
        // Pairs with the device's fence after it wrote avail_event (VirtIO 1.3, 2.7.13.4.1).
        fence(Ordering::SeqCst);
        let event = split.avail_event();
        if self.shown.wrapping_sub(event).wrapping_sub(1) < count {
            self.ring.kick();
        }
    }

    /// Wants no call for what is shown.
    pub fn disable_calls(&self) {
        self.ring
            .driver
            .split()
            .set_used_event(self.shown.wrapping_add(1 << 14));
    }

    /// Waits until `count` further buffers are back, with one call for all of them.
    ///
    /// # Panics
    /// If the call eventfd cannot be read.
    pub fn wait(&mut self, count: u16) {
        let split = self.ring.driver.split();
        self.back = self.back.wrapping_add(count);
        split.set_used_event(self.back.wrapping_sub(1));
        // used_event is visible before used.idx is read: the device writes used.idx and then reads used_event (VirtIO
        // 1.3, 2.7.10). Without it, both sides could see the old value, and no call would come.
        fence(Ordering::SeqCst);
        while self.back.wrapping_sub(split.used_idx()).cast_signed() > 0 {
            self.ring.call.read().expect("it blocks");
        }
    }

    /// The next buffer that is back, which is awaited: its entry, and how many bytes the device has written to it.
    ///
    /// # Panics
    /// If the call eventfd cannot be read.
    pub fn take(&mut self) -> (u16, u32) {
        let driver = &self.ring.driver;
        let split = driver.split();
        while split.used_idx() == self.back {
            split.set_used_event(self.back);
            // As in `wait`.
            fence(Ordering::SeqCst);
            if split.used_idx() == self.back {
                self.ring.call.read().expect("it blocks");
            }
        }
        let entry = self.back % driver.size().get();
        let mut len = [0; 4];
        let element = driver.ring_guest_addresses().used + USED_HEADER + USED_ELEMENT * u64::from(entry);
        driver.ram().read(GuestAddr(element + 4), &mut len);
        self.back = self.back.wrapping_add(1);
        (entry, u32::from_le_bytes(len))
    }

    /// Fails unless each buffer came back in its turn.
    ///
    /// # Panics
    /// If one did not.
    pub fn check(&self) {
        let driver = &self.ring.driver;
        let used = driver.ring_guest_addresses().used;
        let size = driver.size().get();
        for at in (0..size).map(|back| self.back.wrapping_sub(1 + back)) {
            let entry = at % size;
            let mut id = [0; 4];
            let element = used + USED_HEADER + USED_ELEMENT * u64::from(entry);
            driver.ram().read(GuestAddr(element), &mut id);
            // Zero: not used so far, or entry 0.
            let id = u32::from_le_bytes(id);
            assert!(
                id == u32::from(entry) || id == 0,
                "entry {entry} has buffer {id}: out of order"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use virtqueue::driver::GuestRam;

    use super::*;
    use crate::driver::{DriverConfig, F_EVENT_IDX, F_VERSION_1};
    use crate::pair::Pair;

    fn pair() -> Pair {
        let config = DriverConfig::default();
        let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), 1 << 20)]).expect("memory"));
        Pair::new(&ram, &config, F_VERSION_1 | F_EVENT_IDX)
    }

    /// Gives back buffers as a device does, and makes no call.
    fn give_back(ring: &Ring, ids: &[u32]) {
        let (ram, used) = (ring.driver.ram(), ring.driver.ring_guest_addresses().used);
        for (element, id) in (0..).zip(ids) {
            let at = used + USED_HEADER + USED_ELEMENT * element;
            ram.write(GuestAddr(at), &id.to_le_bytes());
        }
        let count = u16::try_from(ids.len()).expect("few");
        ram.write(GuestAddr(used + 2), &count.to_le_bytes());
    }

    #[test]
    fn batch_is_shown_by_one_index_and_kicks_once() {
        let pair = pair();
        let mut ring = FixedRing::new(&pair.from_guest, &[Buffer::readable(GuestAddr(0x1000), 60)]);
        ring.show(3);
        assert_eq!(pair.from_guest.kick.read().expect("kicked"), 1);
        // The device asks for a kick with entry 0 only, which it has seen.
        ring.show(3);
        assert!(pair.from_guest.kick.read().is_err());
        give_back(&pair.from_guest, &[0, 1, 2, 3, 4, 5]);
        ring.wait(6);
        ring.check();
    }

    #[test]
    #[should_panic(expected = "out of order")]
    fn buffers_that_come_back_out_of_order_are_found() {
        let pair = pair();
        let mut ring = FixedRing::new(&pair.from_guest, &[Buffer::readable(GuestAddr(0x1000), 60)]);
        ring.show(3);
        give_back(&pair.from_guest, &[0, 2, 1]);
        ring.wait(3);
        ring.check();
    }
}
