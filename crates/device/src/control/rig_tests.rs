//! A device, its control queue and a driver: for the tests of this module and the fuzz target `control`.

use std::sync::Arc;

use device::control::{Change, ControlQueue, OFFERED};
use device::net_device::NetDevice;
use device::offloads::Offloads;
use device::pair::Fault;
use virtqueue::driver::{Buffer, DriverFeatures, GuestRam, SplitDriver};
use virtqueue::{GuestAddr, MemoryMap, QueueSize, TrustedFiles};

pub(super) const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub(super) const PAIRS: u16 = 4;
/// Entries of the queue.
const SIZE: u32 = 64;

/// A device with four pairs, its control queue, and the driver of that.
pub(super) struct Rig {
    pub(super) device: NetDevice,
    pub(super) queue: ControlQueue,
    pub(super) driver: SplitDriver,
    pub(super) ram: Arc<GuestRam>,
    pub(super) area: GuestAddr,
    pub(super) ack: GuestAddr,
    /// The changes that the data path received.
    pub(super) changes: Vec<Change>,
    /// The data path can apply changes.
    pub(super) follows: bool,
}

impl Rig {
    pub(super) fn new(features: u64) -> Self {
        let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), 1 << 20)]).expect("memory"));
        let mut device = NetDevice::new(PAIRS, Offloads::all()).with_control(MAC, OFFERED);
        let memory = MemoryMap::new(ram.regions().expect("regions"), 0, &TrustedFiles).expect("a map");
        device.set_memory(Some(Arc::new(memory)));
        device.acknowledge(features).expect("offered");
        let size = QueueSize::new(SIZE).expect("a size");
        let driver = SplitDriver::new(&ram, size, DriverFeatures::default()).expect("room");
        let index = device.control_index();
        device.set_size(index, SIZE).expect("a size");
        let addresses = driver.ring_user_addresses();
        device.set_addresses(index, addresses).expect("there");
        device.start(index, None).expect("there");
        Self {
            queue: device.control_queue().expect("a ring"),
            device,
            driver,
            area: ram.alloc(1 << 16, 64).expect("room"),
            ack: ram.alloc(256, 64).expect("room"),
            ram,
            changes: Vec::new(),
            follows: true,
        }
    }

    /// Sends a command in descriptors of these lengths, as many as there is room for, and a last one of the rest, with
    /// so many bytes for the answer; returns the answer.
    pub(super) fn exchange(
        &mut self,
        command: &[u8],
        cuts: impl Iterator<Item = usize>,
        answer_bytes: u8,
    ) -> Result<u8, Fault> {
        self.ram.write(self.area, command);
        self.ram.write(self.ack, &[0xaa; 256]);
        let mut buffers = Vec::new();
        let mut at = 0;
        for cut in cuts.take(SIZE as usize - 2).chain([command.len()]) {
            let len = cut.min(command.len() - at);
            if len > 0 {
                let addr = self.area.checked_add(at as u64).expect("inside");
                buffers.push(Buffer::readable(addr, len as u32));
                at += len;
            }
        }
        if answer_bytes > 0 {
            buffers.push(Buffer::writable(self.ack, answer_bytes.into()));
        }
        self.driver.add(&buffers).expect("room");
        self.driver.publish();
        let served = self.queue.serve(&mut self.device, 8, |_, change| {
            let answer = self.ram.read_vec(self.ack, 1);
            assert_eq!(answer, [0xaa], "answered before the data path knew");
            self.changes.push(change);
            self.follows
        })?;
        assert_eq!(served, 1);
        let used = self.driver.take_used().expect("answered");
        let answer = self.ram.read_vec(self.ack, 256);
        assert_eq!(
            (used.len, &answer[1..]),
            (1, &[0xaa; 255][..]),
            "one byte is written"
        );
        Ok(answer[0])
    }
}
