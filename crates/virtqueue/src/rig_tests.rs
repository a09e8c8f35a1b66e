//! Support for the tests of split and packed rings: a driver and a device of either kind.

use std::sync::Arc;

use proptest::prelude::*;

use crate::driver::{Buffer, GuestRam, QueueDriver};
use crate::layout::{Descriptor, PACKED_AVAIL, PackedDescriptor};
use crate::packed_notify::EventSuppression;
use crate::position::Position;
use crate::split::SplitQueue;
use crate::{
    ChainId, Chains, GuestAddr, GuestFault, MemoryMap, Queue, QueueFeatures, QueueStart, RingFormat,
    RingLayout, TrustedFiles,
};

/// A driver and a device on one ring. Memory is two regions with a gap between; the ring is in the first.
pub(crate) struct Pair {
    pub(crate) ram: Arc<GuestRam>,
    pub(crate) driver: QueueDriver,
    pub(crate) queue: Queue,
    pub(crate) chains: Chains,
}

pub(crate) const LOW: u64 = 0x10_0000;
pub(crate) const LOW_LEN: u64 = 0x8_0000;
pub(crate) const HIGH: u64 = 0x1_0000_0000;
pub(crate) const HIGH_LEN: u64 = 0x4000;
/// Buffers, and tables that tests write, are from here on.
pub(crate) const GOOD: u64 = LOW + 0x4_0000;

/// Every feature of the ring but event idx and in-order.
pub(crate) const fn full(format: RingFormat) -> QueueFeatures {
    QueueFeatures {
        event_idx: false,
        indirect: true,
        in_order: false,
        packed: matches!(format, RingFormat::Packed),
    }
}

/// The buffer of a descriptor, with any values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    addr: u64,
    len: u32,
    flags: u16,
}

pub(crate) fn part(addr: u64, len: u32, flags: u16) -> Part {
    Part { addr, len, flags }
}

impl Part {
    /// Descriptor `index` of `count` that follow each other around.
    pub(crate) fn split(self, index: u16, count: u16) -> Descriptor {
        let Self { addr, len, flags } = self;
        let next = (index + 1) % count;
        Descriptor {
            addr,
            len,
            flags,
            next,
        }
    }

    /// Available in the first lap.
    pub(crate) fn packed(self) -> PackedDescriptor {
        PackedDescriptor {
            addr: self.addr,
            len: self.len,
            id: 7,
            flags: self.flags | PACKED_AVAIL,
        }
    }
}

impl Pair {
    pub(crate) fn new(format: RingFormat, size: u16) -> Self {
        Self::with(size, full(format), 0)
    }

    /// After `start` entries.
    pub(crate) fn with(size: u16, features: QueueFeatures, start: u16) -> Self {
        let ram = [(GuestAddr(LOW), LOW_LEN), (GuestAddr(HIGH), HIGH_LEN)];
        Self::over(&ram, size, features, start)
    }

    /// In memory of these regions.
    pub(crate) fn over(regions: &[(GuestAddr, u64)], size: u16, features: QueueFeatures, start: u16) -> Self {
        let ram = Arc::new(GuestRam::new(regions).unwrap());
        let mut driver = QueueDriver::for_device(&ram, size.into(), features);
        if start != 0 {
            driver.start_at(start);
        }
        let memory = Arc::new(MemoryMap::new(ram.regions().unwrap(), 4096, &TrustedFiles).unwrap());
        let queue = Queue::new(
            &memory,
            driver.rings(&memory),
            features,
            QueueStart::at(driver.base()),
        )
        .unwrap();
        Self {
            ram,
            queue,
            chains: Chains::for_queue(driver.size(), 16),
            driver,
        }
    }

    /// Where its ring is.
    pub(crate) fn rings(&self) -> RingLayout {
        self.driver.rings(self.queue.memory())
    }

    /// Replaces the device, as if it had died, by another one that starts at `base`.
    pub(crate) fn replace(&mut self, base: u32) {
        let (memory, features) = (Arc::clone(self.queue.memory()), self.queue.features());
        self.queue = Queue::new(&memory, self.rings(), features, QueueStart::at(base)).unwrap();
    }

    pub(crate) fn split(&mut self) -> &mut SplitQueue {
        match &mut self.queue {
            Queue::Split(queue) => queue,
            Queue::Packed(_) | Queue::Reset(_) => panic!("the ring is not split"),
        }
    }

    pub(crate) fn pop(&mut self) -> Result<usize, GuestFault> {
        self.queue.pop(&mut self.chains, 64)
    }

    /// Adds `count` chains of one byte.
    pub(crate) fn add(&mut self, count: u64) {
        for i in 0..count {
            let byte = [Buffer::readable(GuestAddr(GOOD + i), 1)];
            self.driver.add(&byte).unwrap();
        }
        self.driver.publish();
    }

    /// Takes all chains, and returns them to the driver.
    pub(crate) fn serve(&mut self) -> usize {
        let count = self.pop().unwrap();
        for chain in &self.chains {
            self.queue.push_used(chain.id, 0);
        }
        self.queue.publish();
        count
    }

    /// Number of chains that the device returned.
    pub(crate) fn back(&mut self) -> usize {
        std::iter::from_fn(|| self.driver.take_used()).count()
    }

    /// Makes a chain of `parts` in entries 0, 1, … of the ring available, in its first lap.
    pub(crate) fn post(&mut self, parts: &[Part]) {
        match &self.driver {
            QueueDriver::Split(driver) => {
                let count = parts.len() as u16;
                for (index, part) in (0..).zip(parts) {
                    driver.write_descriptor(index, part.split(index, count));
                }
                driver.set_avail_entry(0, 0);
                driver.set_avail_idx(1);
            }
            QueueDriver::Packed(driver) => {
                for (slot, part) in (0..).zip(parts).collect::<Vec<_>>().into_iter().rev() {
                    driver.write_slot(slot, part.packed());
                }
            }
        }
    }

    /// Writes an indirect table.
    pub(crate) fn write_table(&self, table: u64, parts: &[Part]) {
        let table = GuestAddr(table);
        for (index, part) in (0..).zip(parts) {
            match &self.driver {
                QueueDriver::Split(driver) => {
                    driver.write_table_entry(table, index, part.split(index, parts.len() as u16));
                }
                QueueDriver::Packed(driver) => driver.write_table_entry(table, index, part.packed()),
            }
        }
    }

    /// The fault of a chain of `parts`.
    pub(crate) fn fault(&mut self, parts: &[Part]) -> GuestFault {
        self.post(parts);
        self.refused()
    }

    /// The fault of the next chain.
    pub(crate) fn refused(&mut self) -> GuestFault {
        let base = self.queue.base();
        let fault = self.pop().expect_err("must be refused");
        assert!(
            self.chains.is_empty() && self.chains.buffers.is_empty(),
            "a fault leaves nothing behind"
        );
        assert_eq!(self.queue.base(), base, "a fault takes nothing");
        fault
    }

    pub(crate) fn gather(&self, index: usize) -> Vec<u8> {
        let chain = &self.chains.chains[index];
        let mut bytes = Vec::new();
        for buffer in self.chains.readable(chain) {
            let mut part = vec![0; buffer.len as usize];
            assert!(self.queue.memory().copy_from_guest(buffer.offset, &mut part));
            bytes.extend(part);
        }
        bytes
    }

    /// Whether the device asks for no kicks, where there is no event idx.
    pub(crate) fn kicks_are_off(&self) -> bool {
        match &self.driver {
            QueueDriver::Split(driver) => driver.used_flags() == 1,
            QueueDriver::Packed(driver) => driver.device_events() == 1 << 16,
        }
    }

    /// Asks for a call when entry `index`, counted from the first, is used.
    pub(crate) fn call_at(&self, index: u16) {
        match &self.driver {
            QueueDriver::Split(driver) => driver.set_used_event(index),
            QueueDriver::Packed(driver) => {
                let start = Position {
                    offset: 0,
                    wrap: true,
                };
                let lap = |at: Position, slots| at.forward(slots, driver.size());
                let (laps, rest) = (index / driver.size().get(), index % driver.size().get());
                let at = (0..laps).fold(start, |at, _| lap(at, driver.size().get()));
                driver.set_driver_events(EventSuppression::at(lap(at, rest)).0);
            }
        }
    }

    /// Checks what holds for every batch, whatever the driver does.
    pub(crate) fn assert_sound(&self) {
        let size = usize::from(self.driver.size().get());
        assert!(usize::from(self.chains.slots(0)) <= size);
        for chain in &self.chains {
            let buffers = self.chains.buffers(chain);
            assert!(!buffers.is_empty() && buffers.len() <= size);
            assert!(buffers.iter().all(|buffer| buffer.is_inside(self.queue.memory())));
            let sum = |part: &[crate::Buffer]| part.iter().map(|buffer| u64::from(buffer.len)).sum::<u64>();
            assert_eq!(u64::from(chain.readable_bytes), sum(self.chains.readable(chain)));
            assert_eq!(u64::from(chain.writable_bytes), sum(self.chains.writable(chain)));
        }
    }
}

/// A chain of one entry.
pub(crate) fn single(head: u16) -> ChainId {
    ChainId { head, slots: 1 }
}

/// Addresses and lengths, some of them valid, the others invalid in all ways.
pub(crate) fn lies() -> impl Strategy<Value = (u64, u32)> {
    let addr = prop_oneof![
        6 => LOW..LOW + LOW_LEN,
        2 => HIGH..HIGH + HIGH_LEN + 0x100,
        1 => Just(LOW + LOW_LEN - 1),
        1 => any::<u64>(),
        1 => (0u64..0x100).prop_map(|back| u64::MAX - back),
    ];
    let len =
        prop_oneof![6 => 1u32..0x200, 3 => (1u32..10).prop_map(|n| 16 * n), 1 => any::<u32>(), 1 => Just(0)];
    (addr, len)
}
