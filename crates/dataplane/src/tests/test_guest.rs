//! A guest for tests of lanes: its memory, and its queues with both the device's half and the driver.

use std::sync::Arc;

use virtqueue::driver::{GuestRam, QueueDriver};
use virtqueue::{GuestAddr, Journal, MemoryMap, Queue, QueueFeatures, QueueStart, TrustedFiles};

use device::call::{Call, CallBlocked};
use device::offloads::Offloads;
use device::pair::{Guest, QueuePair, Vring};

/// Bytes of the virtio-net header.
pub(crate) const HEADER: u32 = 12;

/// Memory of the guest, and the daemon's map of it.
pub(crate) struct Memory {
    pub(crate) ram: Arc<GuestRam>,
    pub(crate) map: Arc<MemoryMap>,
}

impl Memory {
    /// `bytes` of guest memory; `private` bytes of the daemon behind them.
    pub(crate) fn new(bytes: u64, private: usize) -> Self {
        let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), bytes)]).expect("memory"));
        let regions = ram.regions().expect("descriptors");
        let map = MemoryMap::new(regions, private, &TrustedFiles).expect("mapped");
        Self {
            ram,
            map: Arc::new(map),
        }
    }

    /// Stores bytes somewhere in it.
    pub(crate) fn put(&self, bytes: &[u8]) -> GuestAddr {
        let addr = self.ram.alloc(bytes.len() as u64, 64).expect("memory is left");
        self.ram.write(addr, bytes);
        addr
    }

    /// A polled queue of `size` entries, and its driver.
    pub(crate) fn vring(&self, size: u32, features: QueueFeatures, journal: Journal) -> (Vring, QueueDriver) {
        let driver = QueueDriver::for_device(&self.ram, size, features);
        (self.enter(&driver, features, journal), driver)
    }

    /// The device's half of a queue, polled; continues where an earlier user stopped.
    pub(crate) fn enter(&self, driver: &QueueDriver, features: QueueFeatures, journal: Journal) -> Vring {
        let start = QueueStart {
            base: driver.base(),
            journal,
            log: None,
        };
        Vring {
            queue: Queue::new(&self.map, driver.rings(&self.map), features, start).expect("a good ring"),
            kick: None,
            call: Call::new(None, CallBlocked::default()),
            enabled: true,
            guest: Guest {
                memory: Arc::clone(&self.map),
                header_bytes: HEADER,
                mergeable: true,
                frame_limit: 1518,
                offloads: Offloads::NONE,
                partial_checksums: false,
                log: None,
            },
            sent_before: 0,
        }
    }

    /// The queue pair of a guest with these queues, mergeable buffers and an MTU of 1500.
    pub(crate) fn side(&self, from_guest: Vring, to_guest: Vring, offloads: Offloads) -> QueuePair {
        let mut pair = QueuePair { from_guest, to_guest };
        pair.set_offloads(offloads);
        pair
    }
}
