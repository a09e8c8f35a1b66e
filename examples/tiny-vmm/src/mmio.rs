//! The virtio-mmio transport (VirtIO 1.3, 4.2): the registers of a device.
//!
//! A guest reads and writes registers at any offset, of any width, with any value, in any order. Each access is
//! answered as the specification says, and where that forbids one to drivers: a read gives 0, a write does nothing.
//! None panics, and none allocates more than a copy of the config space.
//!
//! # Interrupts
//! Used buffers are told by an eventfd that goes to KVM straight from the data path (irqfd), and no register learns of
//! it. So InterruptStatus says "used buffers" from DRIVER_OK on, whenever it is read: a driver then looks at its
//! queues, and may find nothing new there. "Configuration change" is said exactly.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

/// VIRTIO_F_VERSION_1; without it there is no such transport (4.2.2.1, version 2).
pub const F_VERSION_1: u64 = 1 << 32;

/// Offsets of registers (4.2.2).
mod reg {
    pub(super) const MAGIC: u64 = 0x00;
    pub(super) const VERSION: u64 = 0x04;
    pub(super) const DEVICE_ID: u64 = 0x08;
    pub(super) const VENDOR_ID: u64 = 0x0c;
    pub(super) const DEVICE_FEATURES: u64 = 0x10;
    pub(super) const DEVICE_FEATURES_SEL: u64 = 0x14;
    pub(super) const DRIVER_FEATURES: u64 = 0x20;
    pub(super) const DRIVER_FEATURES_SEL: u64 = 0x24;
    pub(super) const QUEUE_SEL: u64 = 0x30;
    pub(super) const QUEUE_NUM_MAX: u64 = 0x34;
    pub(super) const QUEUE_NUM: u64 = 0x38;
    pub(super) const QUEUE_READY: u64 = 0x44;
    pub(super) const INTERRUPT_STATUS: u64 = 0x60;
    pub(super) const INTERRUPT_ACK: u64 = 0x64;
    pub(super) const STATUS: u64 = 0x70;
    pub(super) const QUEUE_DESC_LOW: u64 = 0x80;
    pub(super) const QUEUE_DESC_HIGH: u64 = 0x84;
    pub(super) const QUEUE_DRIVER_LOW: u64 = 0x90;
    pub(super) const QUEUE_DRIVER_HIGH: u64 = 0x94;
    pub(super) const QUEUE_DEVICE_LOW: u64 = 0xa0;
    pub(super) const QUEUE_DEVICE_HIGH: u64 = 0xa4;
    /// Length and base of shared memory regions, of which there are none.
    pub(super) const SHM_FIRST: u64 = 0xb0;
    pub(super) const SHM_LAST: u64 = 0xbc;
    pub(super) const CONFIG_GENERATION: u64 = 0xfc;
    pub(super) const CONFIG: u64 = 0x100;
}

const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const VERSION: u32 = 2;
const VENDOR: u32 = u32::from_le_bytes(*b"tiny");
const STATUS_DRIVER_OK: u32 = 4;
const STATUS_FEATURES_OK: u32 = 8;
const STATUS_NEEDS_RESET: u32 = 64;
const STATUS_FAILED: u32 = 128;
/// Bits that a driver sets: ACKNOWLEDGE and DRIVER beside the above.
const STATUS_OF_DRIVER: u32 = 1 | 2 | STATUS_DRIVER_OK | STATUS_FEATURES_OK | STATUS_FAILED;
const INTERRUPT_USED: u32 = 1;
const INTERRUPT_CONFIG: u32 = 2;

/// A queue as its driver set it up; nothing of it is checked yet but that `size` is not more than there may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueSetting {
    /// Entries.
    pub size: u32,
    /// Guest address of the descriptors.
    pub descriptors: u64,
    /// Guest address of what the driver writes beside them: available ring, driver event structure.
    pub driver: u64,
    /// Guest address of what the device writes: used ring, device event structure.
    pub device: u64,
    /// QueueReady.
    pub ready: bool,
}

/// What a device needs the transport to be told of, and is told by it. Its driver is not trusted.
pub trait Device: Send {
    /// Its type (VirtIO 1.3, 5).
    fn device_type(&self) -> u32;
    /// How many queues it has at most.
    fn queues(&self) -> u16;
    /// Most entries of a queue.
    fn most_entries(&self) -> u16;
    /// Features that it offers.
    fn features(&self) -> u64;
    /// The driver chose these. `false`: not with those; FEATURES_OK is not set then.
    fn acknowledge(&mut self, features: u64) -> bool;
    /// Its config space now.
    fn config(&self) -> Vec<u8>;
    /// A queue was set up; nothing is to be read of it before [`Device::start`].
    fn enable_queue(&mut self, _queue: u16) {}
    /// Whether it found a fault in what its driver did, and does nothing more until it is reset.
    fn needs_reset(&self) -> bool;
    /// It does, as it did where it was saved.
    fn set_needs_reset(&mut self);
    /// DRIVER_OK: works from now on. `false`: it cannot, with such queues; it needs a reset, and has told its driver.
    fn start(&mut self, queues: &[QueueSetting]) -> bool;
    /// Somebody outside of the VMM's threads has that queue, and must not touch it any more when this returns; which
    /// queues were taken back with it.
    fn stop_backend(&mut self, _queue: u16) -> &'static [u16] {
        &[]
    }
    /// QueueReady is 0 from now on: nothing of that queue is touched any more when this returns.
    fn disable_queue(&mut self, queue: u16);
    /// Where its queues stand, for each that there may be: a VM that moves goes on there. No queue is touched any more
    /// when this returns, and until [`Device::resume`]. The VM stands.
    fn leave(&mut self) -> Vec<u32>;
    /// [`Device::start`] of queues that stand there; `queues` and `bases` are as many as there may be.
    fn resume(&mut self, queues: &[QueueSetting], bases: &[u32]) -> bool;
    /// Forgets all that the driver said; no queue is touched any more when this returns.
    fn reset(&mut self);
}

/// By which a device says from any thread that it needs a reset (VirtIO 1.3, 2.1.2), and what interrupts its driver.
/// Devices set it once DRIVER_OK is set, so that the driver is always to be told.
#[derive(Debug, Default)]
pub struct NeedsReset {
    needed: AtomicBool,
    /// In words, if it was not its driver that did wrong.
    hosts_fault: Mutex<Option<String>>,
    call: Option<OwnedFd>,
}

impl NeedsReset {
    /// It does not yet. `call` interrupts the guest; `None`: it polls.
    #[must_use]
    pub fn new(call: Option<OwnedFd>) -> Self {
        Self {
            needed: AtomicBool::new(false),
            hosts_fault: Mutex::default(),
            call,
        }
    }

    /// It does from now on, and the driver is interrupted, once: InterruptStatus says "configuration change" when it is
    /// read after this.
    pub fn set(&self) {
        // Release: with the acquire in `get`, on the vCPU's thread, which reads InterruptStatus in the interrupt that
        // follows. Were it later than that, the driver would find no reason for the interrupt (4.2.2).
        let before = self.needed.swap(true, Ordering::Release);
        if let Some(call) = self.call.as_ref().filter(|_| !before) {
            // A full counter means that an interrupt is pending already.
            let _ = rustix::io::write(call, &1_u64.to_ne_bytes());
        }
    }

    /// The same, but its driver has done nothing wrong.
    pub fn set_for_host(&self, fault: String) {
        *self.fault() = Some(fault);
        self.set();
    }

    /// What the host has done wrong, until it is reset.
    #[must_use]
    pub fn hosts_fault(&self) -> Option<String> {
        self.fault().clone()
    }

    fn fault(&self) -> MutexGuard<'_, Option<String>> {
        self.hosts_fault.lock().expect("nobody panicked with the fault")
    }

    /// It was reset.
    pub fn clear(&self) {
        *self.fault() = None;
        // Nobody learns of anything else by it: who serves the device is kept out by its locks meanwhile.
        self.needed.store(false, Ordering::Relaxed);
    }

    /// Whether it does.
    #[must_use]
    pub fn get(&self) -> bool {
        // With the release in `set`.
        self.needed.load(Ordering::Acquire)
    }
}

/// What of a transport goes with a VM that moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    status: u32,
    features: u64,
    device_features_sel: u32,
    driver_features_sel: u32,
    queue_sel: u32,
    interrupt: u32,
    queues: Vec<QueueSetting>,
    /// Where the device's queues stand; as long as the device has them, it alone knows.
    bases: Vec<u32>,
}

impl Saved {
    /// Features that the driver chose.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Whether the driver is ready.
    #[must_use]
    pub fn driver_ok(&self) -> bool {
        self.has(STATUS_DRIVER_OK)
    }

    fn has(&self, status: u32) -> bool {
        self.status & status != 0
    }

    /// The device found a fault in what its driver did.
    fn set_needs_reset(&mut self) {
        if self.driver_ok() {
            self.interrupt |= INTERRUPT_CONFIG;
        }
        self.status |= STATUS_NEEDS_RESET;
    }

    /// Its queues.
    #[must_use]
    pub fn queues(&self) -> &[QueueSetting] {
        &self.queues
    }
}

/// The registers of a device.
pub struct Transport<D> {
    device: D,
    registers: Saved,
    /// The config space as it was when it was last looked at, and how often it was another one.
    config: Vec<u8>,
    generation: u32,
}

impl<D: Device> Transport<D> {
    /// As after a reset.
    pub fn new(device: D) -> Self {
        let queues = vec![QueueSetting::default(); device.queues().into()];
        Self {
            config: device.config(),
            device,
            registers: Saved {
                status: 0,
                features: 0,
                device_features_sel: 0,
                driver_features_sel: 0,
                queue_sel: 0,
                interrupt: 0,
                bases: vec![0; queues.len()],
                queues,
            },
            generation: 0,
        }
    }

    /// The device behind it.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The same, to be changed.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Whether the driver is ready.
    #[must_use]
    pub fn driver_ok(&self) -> bool {
        self.registers.driver_ok()
    }

    /// InterruptStatus says that the config space is another one; the device interrupts the guest.
    pub fn config_changed(&mut self) {
        self.registers.interrupt |= INTERRUPT_CONFIG;
    }

    /// What goes with a VM that moves. It stands, and the device's queues are with nobody when this returns.
    pub fn save(&mut self) -> Saved {
        let mut saved = self.registers.clone();
        if self.device.needs_reset() {
            saved.set_needs_reset();
        }
        saved.bases = self.device.leave();
        saved
    }

    /// Goes on where another one was saved. `false`: it cannot, as its features or the number of its queues are others.
    /// A device that cannot go on with its queues needs a reset, as it would after DRIVER_OK: the guest's VM goes on.
    #[must_use]
    pub fn restore(&mut self, saved: &Saved) -> bool {
        let queues = self.registers.queues.len();
        if saved.queues.len() != queues || saved.bases.len() != queues {
            return false;
        }
        // Queues may be set up by them already, also before DRIVER_OK.
        if saved.has(STATUS_FEATURES_OK) && !self.device.acknowledge(saved.features) {
            return false;
        }
        self.registers = saved.clone();
        if saved.has(STATUS_NEEDS_RESET) {
            // It has nothing to go on with until then. Its driver is told once more: that may have been under way.
            self.device.set_needs_reset();
        } else if saved.driver_ok() && !self.device.resume(&saved.queues, &saved.bases) {
            self.registers.set_needs_reset();
        }
        true
    }

    /// The guest reads `data.len()` bytes at `offset`.
    pub fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(at) = offset.checked_sub(reg::CONFIG) {
            self.look_at_config();
            read_part(&self.config, at, data);
        } else if let Ok(word) = <&mut [u8; 4]>::try_from(data)
            && offset.is_multiple_of(4)
        {
            *word = self.read_register(offset).to_le_bytes();
        }
    }

    fn read_register(&mut self, offset: u64) -> u32 {
        if self.registers.status & STATUS_NEEDS_RESET == 0 && self.device.needs_reset() {
            self.registers.set_needs_reset();
        }
        let registers = &self.registers;
        let queue = registers.queues.get(registers.queue_sel as usize);
        match offset {
            reg::MAGIC => MAGIC,
            reg::VERSION => VERSION,
            reg::DEVICE_ID => self.device.device_type(),
            reg::VENDOR_ID => VENDOR,
            reg::DEVICE_FEATURES => half(self.device.features(), registers.device_features_sel),
            reg::QUEUE_NUM_MAX => queue.map_or(0, |_| self.device.most_entries().into()),
            reg::QUEUE_READY => queue.map_or(0, |queue| queue.ready.into()),
            reg::INTERRUPT_STATUS if registers.driver_ok() => registers.interrupt | INTERRUPT_USED,
            reg::INTERRUPT_STATUS => registers.interrupt,
            reg::STATUS => registers.status,
            // "Reading from a non-existent region results in" all ones (4.2.2).
            reg::SHM_FIRST..=reg::SHM_LAST => u32::MAX,
            reg::CONFIG_GENERATION => {
                self.look_at_config();
                self.generation
            }
            _ => 0,
        }
    }

    /// The generation goes with what is read, not with when it changed.
    fn look_at_config(&mut self) {
        let config = self.device.config();
        if config != self.config {
            self.config = config;
            self.generation = self.generation.wrapping_add(1);
        }
    }

    /// The guest writes `data` at `offset`. Config spaces of devices here are read-only.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let Ok(word) = <[u8; 4]>::try_from(data) else {
            return;
        };
        if !offset.is_multiple_of(4) || offset >= reg::CONFIG {
            return;
        }
        let value = u32::from_le_bytes(word);
        let registers = &mut self.registers;
        match offset {
            reg::DEVICE_FEATURES_SEL => registers.device_features_sel = value,
            reg::DRIVER_FEATURES_SEL => registers.driver_features_sel = value,
            reg::DRIVER_FEATURES => self.choose_features(value),
            reg::QUEUE_SEL => registers.queue_sel = value,
            reg::INTERRUPT_ACK => registers.interrupt &= !value,
            reg::STATUS => self.write_status(value),
            reg::QUEUE_READY => self.write_ready(value),
            _ => self.write_queue(offset, value),
        }
    }

    /// Features are settled with FEATURES_OK.
    fn choose_features(&mut self, value: u32) {
        let registers = &mut self.registers;
        if registers.status & STATUS_FEATURES_OK != 0 || registers.driver_features_sel > 1 {
            return;
        }
        let shift = registers.driver_features_sel * 32;
        registers.features &= !(u64::from(u32::MAX) << shift);
        registers.features |= u64::from(value) << shift;
    }

    /// A queue that is ready is not changed (4.2.2.2).
    fn write_queue(&mut self, offset: u64, value: u32) {
        let most = self.device.most_entries();
        let selected = self.registers.queue_sel as usize;
        let Some(queue) = self
            .registers
            .queues
            .get_mut(selected)
            .filter(|queue| !queue.ready)
        else {
            return;
        };
        match offset {
            reg::QUEUE_NUM if value <= most.into() => queue.size = value,
            reg::QUEUE_DESC_LOW => set_low(&mut queue.descriptors, value),
            reg::QUEUE_DESC_HIGH => set_high(&mut queue.descriptors, value),
            reg::QUEUE_DRIVER_LOW => set_low(&mut queue.driver, value),
            reg::QUEUE_DRIVER_HIGH => set_high(&mut queue.driver, value),
            reg::QUEUE_DEVICE_LOW => set_low(&mut queue.device, value),
            reg::QUEUE_DEVICE_HIGH => set_high(&mut queue.device, value),
            _ => (),
        }
    }

    /// Queues are set up between FEATURES_OK and DRIVER_OK (3.1.1), and may be taken away at any time.
    fn write_ready(&mut self, value: u32) {
        let selected = self.registers.queue_sel;
        let may_start = self.registers.status & (STATUS_FEATURES_OK | STATUS_DRIVER_OK) == STATUS_FEATURES_OK;
        let Some(queue) = self.registers.queues.get_mut(selected as usize) else {
            return;
        };
        // There is such a queue, and queues are counted with 16 bits.
        let Ok(index) = u16::try_from(selected) else {
            return;
        };
        match (queue.ready, value) {
            (false, 1) if may_start => {
                queue.ready = true;
                self.device.enable_queue(index);
            }
            (true, 0) => {
                queue.ready = false;
                self.device.disable_queue(index);
            }
            _ => (),
        }
    }

    /// Bits are only ever added by a driver, and all go when it writes 0 (2.1).
    fn write_status(&mut self, value: u32) {
        if value == 0 {
            return self.reset();
        }
        let before = self.registers.status;
        let new = value & STATUS_OF_DRIVER & !before;
        self.registers.status |= new & !(STATUS_FEATURES_OK | STATUS_DRIVER_OK);
        if new & STATUS_FAILED != 0 {
            // The driver has given up: it is not served, but may still be told of its bits.
            self.device.reset();
            self.registers.queues.fill(QueueSetting::default());
            self.registers.status &= !STATUS_DRIVER_OK;
            return;
        }
        let features = self.registers.features;
        if new & STATUS_FEATURES_OK != 0 && features & F_VERSION_1 != 0 && self.device.acknowledge(features) {
            self.registers.status |= STATUS_FEATURES_OK;
        }
        let may_start = self.registers.status & (STATUS_FEATURES_OK | STATUS_FAILED) == STATUS_FEATURES_OK;
        if new & STATUS_DRIVER_OK != 0 && may_start {
            self.registers.status |= STATUS_DRIVER_OK;
            if !self.device.start(&self.registers.queues) {
                self.registers.set_needs_reset();
            }
        }
    }

    fn reset(&mut self) {
        self.device.reset();
        let registers = &mut self.registers;
        registers.queues.fill(QueueSetting::default());
        (registers.status, registers.features, registers.interrupt) = (0, 0, 0);
        (
            registers.device_features_sel,
            registers.driver_features_sel,
            registers.queue_sel,
        ) = (0, 0, 0);
    }
}

/// 32 bits of 64; none beyond.
fn half(features: u64, select: u32) -> u32 {
    match select {
        // What is cut off is the other half.
        #[allow(clippy::cast_possible_truncation)]
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

fn set_low(address: &mut u64, value: u32) {
    *address = *address & !u64::from(u32::MAX) | u64::from(value);
}

fn set_high(address: &mut u64, value: u32) {
    *address = *address & u64::from(u32::MAX) | u64::from(value) << 32;
}

/// What there is of `bytes` from `at` on, into `data`.
fn read_part(bytes: &[u8], at: u64, data: &mut [u8]) {
    let rest = usize::try_from(at)
        .ok()
        .and_then(|at| bytes.get(at..))
        .unwrap_or(&[]);
    for (to, from) in data.iter_mut().zip(rest) {
        *to = *from;
    }
}
