//! Where the guest's exits go: to the registers of the devices, and to their notifiers.
//!
//! A notification is looked for first, and takes no lock of the registers. In which order a device and its notifiers
//! learn of what the driver did is in [`Attached`], the whole of what a VMM has to do for crate `notifier`.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use kvm_ioctls::VmFd;
use notifier::address::{AddressError, Bus, NotifyAddress};
use notifier::bus::Ioeventfds;
use notifier::notifiers::{By, DeviceEvent, NotifierError, Notifiers, QueueEvent, QueueSetup, Report, Serve};
use rustix::io::Errno;
use vmm_sys_util::eventfd::EventFd;

use crate::layout::DEVICE_BYTES;
use crate::mmio::{Device, QueueSetting, Transport};

/// The notifiers of a device of ours.
pub type DeviceNotifiers = Notifiers<EventBus>;

/// Where eventfds are bound to addresses: KVM, or KVM as if it had room for so many more only, as old kernels had.
#[derive(Clone)]
pub struct EventBus {
    vm: Arc<VmFd>,
    room: Option<Arc<AtomicUsize>>,
}

impl EventBus {
    /// All devices of a machine share it. `most`: so many, and then ENOSPC.
    #[must_use]
    pub fn new(vm: &Arc<VmFd>, most: Option<usize>) -> Self {
        Self {
            vm: Arc::clone(vm),
            room: most.map(|most| Arc::new(AtomicUsize::new(most))),
        }
    }
}

impl Ioeventfds for EventBus {
    fn assign(&self, at: &NotifyAddress, event: &EventFd) -> io::Result<()> {
        if let Some(room) = &self.room {
            let taken = room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
            taken.map_err(|_| io::Error::from(Errno::NOSPC))?;
        }
        let assigned = self.vm.assign(at, event);
        if let (Err(_), Some(room)) = (&assigned, &self.room) {
            room.fetch_add(1, Ordering::Relaxed);
        }
        assigned
    }

    fn deassign(&self, at: &NotifyAddress, event: &EventFd) -> io::Result<()> {
        self.vm.deassign(at, event)?;
        if let Some(room) = &self.room {
            room.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Why a device cannot be attached.
#[derive(Debug, thiserror::Error)]
pub enum BoardError {
    /// Its registers.
    #[error("the device's registers cannot be at {base:#x}")]
    Address {
        /// Where they were to be.
        base: u64,
        /// Why.
        #[source]
        source: AddressError,
    },
    /// Its notifiers.
    #[error("cannot make the notifiers of a device")]
    Notifiers(#[from] NotifierError),
}

/// A device whose notifiers learn of what its driver does.
pub struct Attached<D> {
    /// The device.
    pub device: D,
    notifiers: Arc<DeviceNotifiers>,
}

impl<D: Device> Attached<D> {
    /// A guest's event is never refused. What could not be bound is in the notifiers' status.
    fn tell(&self, event: DeviceEvent) -> Report {
        self.notifiers.event(event).unwrap_or_default()
    }

    fn tell_queue(&self, queue: u16, event: QueueEvent) -> Report {
        self.notifiers.queue_event(queue, event).unwrap_or_default()
    }

    /// Backends are told by what the device has done: it took the rings out of their hands.
    fn backends_stopped(&self, report: &Report) {
        for &queue in &report.stop_backends {
            self.tell_queue(queue, QueueEvent::BackendStop);
        }
    }
}

impl<D: Device> Device for Attached<D> {
    fn device_type(&self) -> u32 {
        self.device.device_type()
    }

    fn queues(&self) -> u16 {
        self.device.queues()
    }

    fn most_entries(&self) -> u16 {
        self.device.most_entries()
    }

    fn features(&self) -> u64 {
        self.device.features()
    }

    fn acknowledge(&mut self, features: u64) -> bool {
        self.device.acknowledge(features)
    }

    fn config(&self) -> Vec<u8> {
        self.device.config()
    }

    fn enable_queue(&mut self, queue: u16) {
        self.device.enable_queue(queue);
        self.tell_queue(queue, QueueEvent::QueueEnable);
    }

    fn needs_reset(&self) -> bool {
        self.device.needs_reset()
    }

    /// First the device has its rings, then they are looked at.
    fn start(&mut self, queues: &[QueueSetting]) -> bool {
        let started = self.device.start(queues);
        if started {
            self.tell(DeviceEvent::DriverOk);
        }
        started
    }

    /// First nobody looks any more, then the rings are gone.
    fn disable_queue(&mut self, queue: u16) {
        let report = self.tell_queue(queue, QueueEvent::QueueReset);
        self.device.disable_queue(queue);
        self.backends_stopped(&report);
    }

    /// As [`disable_queue`](Self::disable_queue), for all.
    fn reset(&mut self) {
        let report = self.tell(DeviceEvent::Reset);
        self.device.reset();
        self.backends_stopped(&report);
    }
}

/// A device at its place in the guest's address space.
pub struct Place<D> {
    base: u64,
    notifiers: Arc<DeviceNotifiers>,
    transport: Mutex<Transport<Attached<D>>>,
}

impl<D: Device> Place<D> {
    /// The registers of `device` at `base`; each of its queues is served by one of `serve`, which is notified `by`.
    ///
    /// # Errors
    /// [`BoardError`].
    pub fn new(
        bus: &EventBus,
        base: u64,
        device: D,
        serve: Vec<(By, Box<dyn Serve>)>,
    ) -> Result<Self, BoardError> {
        let setup = |(queue, (by, serve))| {
            let address = NotifyAddress::mmio(base, queue);
            let address = address.map_err(|source| BoardError::Address { base, source })?;
            Ok::<_, BoardError>(QueueSetup { address, by, serve })
        };
        let queues = (0..).zip(serve).map(setup).collect::<Result<_, _>>()?;
        let notifiers = Arc::new(Notifiers::new(bus.clone(), queues, true)?);
        let attached = Attached {
            device,
            notifiers: Arc::clone(&notifiers),
        };
        Ok(Self {
            base,
            notifiers,
            transport: Mutex::new(Transport::new(attached)),
        })
    }

    /// Its notifiers.
    #[must_use]
    pub fn notifiers(&self) -> &Arc<DeviceNotifiers> {
        &self.notifiers
    }

    /// Its registers.
    ///
    /// # Panics
    /// If a thread panicked that had them.
    pub fn transport(&self) -> MutexGuard<'_, Transport<Attached<D>>> {
        self.transport.lock().expect("nobody panicked with the registers")
    }

    /// Where in its registers an address is.
    fn offset(&self, address: u64) -> Option<u64> {
        address
            .checked_sub(self.base)
            .filter(|offset| *offset < DEVICE_BYTES)
    }

    fn read(&self, address: u64, data: &mut [u8]) -> bool {
        let offset = self.offset(address);
        if let Some(offset) = offset {
            self.transport().read(offset, data);
        }
        offset.is_some()
    }

    fn write(&self, address: u64, data: &[u8]) -> bool {
        let offset = self.offset(address);
        if let Some(offset) = offset
            && self.notifiers.exit(Bus::Mmio, address, data).is_none()
        {
            self.transport().write(offset, data);
        }
        offset.is_some()
    }
}

/// The devices of the machine.
pub struct Board<N, E> {
    /// The network device.
    pub net: Place<N>,
    /// The entropy device.
    pub entropy: Place<E>,
}

impl<N: Device, E: Device> Board<N, E> {
    /// The guest reads. Where nothing is, all bits are 1.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        if !self.net.read(address, data) && !self.entropy.read(address, data) {
            data.fill(0xff);
        }
    }

    /// The guest writes. Where nothing is, nothing happens.
    pub fn write(&self, address: u64, data: &[u8]) {
        if !self.net.write(address, data) {
            self.entropy.write(address, data);
        }
    }
}
