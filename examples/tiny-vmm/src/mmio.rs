//! The registers of the network device: virtio-mmio (VirtIO 1.3, 4.2).
//!
//! The driver is not trusted: it reads and writes registers at any offset, of any width, with any value, in any order.
//! Where the specification forbids an access, a read returns 0 and a write has no effect. No access panics.
//!
//! Used buffers interrupt the guest by an eventfd, straight from the data path (irqfd). So InterruptStatus shows "used
//! buffers" whenever DRIVER_OK is set.

use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::Result;
use kvm_ioctls::VmFd;
use notifier::address::{Bus, NotifyAddress};
use notifier::notifiers::{By, Notifiers, QueueSetup};
use notifier::state::Event;
use virtio_bindings::virtio_config::*;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_mmio::*;
use vm_device::DeviceMmio;
use vm_device::bus::{MmioAddress, MmioAddressOffset};

use crate::net::{MOST_ENTRIES, Net, NetQueue, QueueSetting};

/// Size of the registers, bytes.
pub const DEVICE_BYTES: u64 = 0x1000;
const MAGIC: u32 = u32::from_le_bytes(*b"virt");
/// ACKNOWLEDGE, DRIVER, DRIVER_OK, FEATURES_OK and FAILED (2.1).
const STATUS_OF_DRIVER: u32 = 0x8f;

/// Nothing here lends a queue to a backend in another process, which would have to be stopped first.
const NEVER_REFUSED: &str = "events of a guest are never refused";

/// What the driver has written.
#[derive(Default)]
struct Registers {
    status: u32,
    features: u64,
    device_features_sel: u32,
    driver_features_sel: u32,
    queue_sel: u32,
    interrupt: u32,
    queues: Vec<QueueSetting>,
}

impl Registers {
    fn reset(&mut self, queues: usize, status: u32) {
        let queues = vec![QueueSetting::default(); queues];
        *self = Self {
            status,
            queues,
            ..Self::default()
        };
    }

    fn has(&self, status: u32) -> bool {
        self.status & status != 0
    }
}

/// The network device on the bus, and its notifiers.
pub struct NetMmio {
    net: Arc<Net>,
    /// Decide which thread serves which queue.
    pub notifiers: Notifiers<Arc<VmFd>>,
    /// Locked before the device; never while a queue is served, so that the notifiers may be called.
    registers: Mutex<Registers>,
}

impl NetMmio {
    /// The registers of `net` at `base`, whose queues are notified `by`.
    ///
    /// # Errors
    /// There is no descriptor or thread left for the notifiers.
    pub fn new(vm: &Arc<VmFd>, base: u64, net: &Arc<Net>, by: By) -> Result<Self> {
        // Two for each pair, and the control queue.
        let count = 2 * net.lock().device.pairs() as u16 + 1;
        let setup = |queue| {
            let address = NotifyAddress::mmio(base, queue)?;
            let serve = Box::new(NetQueue(Arc::clone(net), queue));
            Ok(QueueSetup { address, by, serve })
        };
        let queues: Vec<_> = (0..count).map(setup).collect::<Result<_>>()?;
        let mut registers = Registers::default();
        registers.reset(queues.len(), 0);
        Ok(Self {
            net: Arc::clone(net),
            notifiers: Notifiers::new(Arc::clone(vm), queues, true)?,
            registers: Mutex::new(registers),
        })
    }

    fn registers(&self) -> MutexGuard<'_, Registers> {
        self.registers.lock().expect("no thread panicked")
    }

    fn read_register(&self, offset: u32) -> u32 {
        let (mut registers, net) = (self.registers(), self.net.lock());
        if net.needs_reset && !registers.has(VIRTIO_CONFIG_S_NEEDS_RESET) {
            registers.status |= VIRTIO_CONFIG_S_NEEDS_RESET;
            registers.interrupt |= VIRTIO_MMIO_INT_CONFIG;
        }
        let queue = registers.queues.get(registers.queue_sel as usize);
        match offset {
            VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            VIRTIO_MMIO_VERSION => 2,
            VIRTIO_MMIO_DEVICE_ID => VIRTIO_ID_NET,
            VIRTIO_MMIO_DEVICE_FEATURES => {
                let shift = registers.device_features_sel.saturating_mul(32);
                net.device.offered().checked_shr(shift).unwrap_or(0) as u32
            }
            VIRTIO_MMIO_QUEUE_NUM_MAX => queue.map_or(0, |_| MOST_ENTRIES.into()),
            VIRTIO_MMIO_QUEUE_READY => queue.map_or(0, |queue| queue.ready.into()),
            VIRTIO_MMIO_INTERRUPT_STATUS if registers.has(VIRTIO_CONFIG_S_DRIVER_OK) => {
                registers.interrupt | VIRTIO_MMIO_INT_VRING
            }
            VIRTIO_MMIO_INTERRUPT_STATUS => registers.interrupt,
            VIRTIO_MMIO_STATUS => registers.status,
            // There is no shared memory region (4.2.2).
            VIRTIO_MMIO_SHM_LEN_LOW..=VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            VIRTIO_MMIO_CONFIG_GENERATION => net.generation,
            _ => 0,
        }
    }

    fn write_register(&self, offset: u32, value: u32) {
        let mut registers = self.registers();
        match offset {
            VIRTIO_MMIO_DEVICE_FEATURES_SEL => registers.device_features_sel = value,
            VIRTIO_MMIO_DRIVER_FEATURES_SEL => registers.driver_features_sel = value,
            // Fixed by FEATURES_OK.
            VIRTIO_MMIO_DRIVER_FEATURES if registers.has(VIRTIO_CONFIG_S_FEATURES_OK) => (),
            VIRTIO_MMIO_DRIVER_FEATURES => {
                if let sel @ (0 | 1) = registers.driver_features_sel {
                    set_half(&mut registers.features, sel == 1, value);
                }
            }
            VIRTIO_MMIO_QUEUE_SEL => registers.queue_sel = value,
            VIRTIO_MMIO_INTERRUPT_ACK => registers.interrupt &= !value,
            VIRTIO_MMIO_STATUS => self.write_status(&mut registers, value),
            VIRTIO_MMIO_QUEUE_READY => self.write_ready(&mut registers, value),
            _ => write_queue(&mut registers, offset, value),
        }
    }

    /// Queues are set up between FEATURES_OK and DRIVER_OK (3.1.1), and may be disabled at any time.
    fn write_ready(&self, registers: &mut Registers, value: u32) {
        let may_start =
            registers.has(VIRTIO_CONFIG_S_FEATURES_OK) && !registers.has(VIRTIO_CONFIG_S_DRIVER_OK);
        let index = registers.queue_sel;
        let Some(queue) = registers.queues.get_mut(index as usize) else {
            return;
        };
        // There is such a queue.
        let index = index as u16;
        match (queue.ready, value) {
            (false, 1) if may_start => {
                queue.ready = true;
                let event = Event::QueueEnable;
                self.notifiers.queue_event(index, event).expect(NEVER_REFUSED);
            }
            (true, 0) => {
                queue.ready = false;
                // First no thread serves it any more, then its rings are gone.
                let event = Event::QueueReset;
                self.notifiers.queue_event(index, event).expect(NEVER_REFUSED);
                self.net.lock().stop_queue(index);
            }
            _ => (),
        }
    }

    /// A driver only adds bits, and clears all by writing 0 (2.1).
    fn write_status(&self, registers: &mut Registers, value: u32) {
        let (features_ok, driver_ok) = (VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_DRIVER_OK);
        let new = value & STATUS_OF_DRIVER & !registers.status;
        if value == 0 || value & VIRTIO_CONFIG_S_FAILED != 0 {
            // First no thread serves the queues any more, then their rings are gone.
            self.notifiers.event(Event::Reset).expect(NEVER_REFUSED);
            self.net.lock().reset();
            registers.reset(registers.queues.len(), value & STATUS_OF_DRIVER & !driver_ok);
            return;
        }
        registers.status |= new & !(features_ok | driver_ok);
        let features = registers.features;
        if new & features_ok != 0
            && features & (1 << VIRTIO_F_VERSION_1) != 0
            && self.net.lock().device.acknowledge(features).is_ok()
        {
            registers.status |= features_ok;
        }
        if new & driver_ok != 0 && registers.has(features_ok) {
            registers.status |= driver_ok;
            // First the device has its rings, then they are served.
            self.net.lock().start(&registers.queues);
            self.notifiers.event(Event::DriverOk).expect(NEVER_REFUSED);
        }
    }
}

/// A queue that is ready is not changed (4.2.2.2).
fn write_queue(registers: &mut Registers, offset: u32, value: u32) {
    let selected = registers.queues.get_mut(registers.queue_sel as usize);
    let Some(queue) = selected.filter(|queue| !queue.ready) else {
        return;
    };
    let rings = &mut queue.rings;
    match offset {
        VIRTIO_MMIO_QUEUE_NUM if value <= MOST_ENTRIES.into() => queue.size = value,
        VIRTIO_MMIO_QUEUE_DESC_LOW => set_half(&mut rings.desc, false, value),
        VIRTIO_MMIO_QUEUE_DESC_HIGH => set_half(&mut rings.desc, true, value),
        VIRTIO_MMIO_QUEUE_AVAIL_LOW => set_half(&mut rings.avail, false, value),
        VIRTIO_MMIO_QUEUE_AVAIL_HIGH => set_half(&mut rings.avail, true, value),
        VIRTIO_MMIO_QUEUE_USED_LOW => set_half(&mut rings.used, false, value),
        VIRTIO_MMIO_QUEUE_USED_HIGH => set_half(&mut rings.used, true, value),
        _ => (),
    }
}

fn set_half(whole: &mut u64, is_high: bool, half: u32) {
    let shift = if is_high { 32 } else { 0 };
    *whole = *whole & !(u64::from(u32::MAX) << shift) | u64::from(half) << shift;
}

impl DeviceMmio for NetMmio {
    fn mmio_read(&self, _base: MmioAddress, offset: MmioAddressOffset, data: &mut [u8]) {
        data.fill(0);
        if let Some(at) = offset.checked_sub(VIRTIO_MMIO_CONFIG.into()) {
            let config = self.net.lock().config();
            for (to, from) in data.iter_mut().zip(config.iter().skip(at as usize)) {
                *to = *from;
            }
        } else if let Ok(word) = <&mut [u8; 4]>::try_from(data)
            && offset.is_multiple_of(4)
        {
            *word = self.read_register(offset as u32).to_le_bytes();
        }
    }

    /// A notification locks no registers. The config space is read-only.
    fn mmio_write(&self, base: MmioAddress, offset: MmioAddressOffset, data: &[u8]) {
        if self.notifiers.exit(Bus::Mmio, base.0 + offset, data).is_none()
            && let Ok(word) = <[u8; 4]>::try_from(data)
            && offset.is_multiple_of(4)
            && offset < VIRTIO_MMIO_CONFIG.into()
        {
            self.write_register(offset as u32, u32::from_le_bytes(word));
        }
    }
}
