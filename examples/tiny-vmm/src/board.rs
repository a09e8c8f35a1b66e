//! Where the guest's exits go: to the registers of the devices, and to their notifiers.
//!
//! A notification is looked for first, and takes no lock of the registers. In which order a device and its notifiers
//! learn of what the driver did is in [`Attached`], the whole of what a VMM has to do for crate `notifier`.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use kvm_ioctls::VmFd;
use notifier::address::{AddressError, Bus, NotifyAddress};
use notifier::bus::Ioeventfds;
use notifier::notifiers::{
    BindError, By, DeviceEvent, NotifierError, Notifiers, QueueEvent, QueueSetup, Report, Saved, Serve,
};
use rustix::io::Errno;
use vmm_sys_util::eventfd::EventFd;

use crate::layout::DEVICE_BYTES;
use crate::mmio::{self, Device, QueueSetting, Transport};

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
        // Relaxed, here and below: a number of its own, with which nothing else is published. What one gives back
        // another may take late: then it has no eventfd until the next event, as with a full bus.
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
    /// What was saved is of a device that this one is not like.
    #[error(
        "a saved device of type {device_type} cannot go on: it has other features or another number of queues"
    )]
    Restore {
        /// Its type (VirtIO 1.3, 5).
        device_type: u32,
    },
    /// Its notifiers.
    #[error("the notifiers of a device cannot work")]
    Notifiers(#[from] NotifierError),
}

/// Why queues had no eventfd when they were to have one: the first reason of each, since the machine was made. The
/// guest can make as many as it likes by resetting.
#[derive(Default)]
pub struct Unbound(Mutex<BTreeMap<u16, Arc<BindError>>>);

impl Unbound {
    /// Of what the notifiers answered.
    pub fn note(&self, report: &Report) {
        let mut reasons = self.0.lock().expect("nobody panicked with the reasons");
        for reason in &report.unbound {
            reasons.entry(reason.queue).or_insert_with(|| Arc::clone(reason));
        }
    }

    /// By queue.
    #[must_use]
    pub fn reasons(&self) -> Vec<Arc<BindError>> {
        let reasons = self.0.lock().expect("nobody panicked with the reasons");
        reasons.values().map(Arc::clone).collect()
    }
}

/// A device whose notifiers learn of what its driver does.
pub struct Attached<D> {
    /// The device.
    pub device: D,
    notifiers: Arc<DeviceNotifiers>,
    unbound: Arc<Unbound>,
}

impl<D: Device> Attached<D> {
    /// A guest's event is never refused: see the table of crate `notifier`.
    fn tell(&self, event: DeviceEvent) -> Report {
        let report = self.notifiers.event(event);
        self.noted(report.expect("a guest's event is allowed in each state"))
    }

    /// Nor is this, of a queue that there is; the backend that gives one back has had it.
    fn tell_queue(&self, queue: u16, event: QueueEvent) -> Report {
        let report = self.notifiers.queue_event(queue, event);
        self.noted(report.expect("there is such a queue, in a state for that"))
    }

    fn noted(&self, report: Report) -> Report {
        self.unbound.note(&report);
        report
    }

    /// Each backend that must give a queue back is stopped, and then its queues are the VMM's. One that gave back what
    /// it had before this came to it is not there any more.
    fn stop_backends(&mut self, report: &Report) {
        for &queue in &report.stop_backends {
            for &queue in self.device.stop_backend(queue) {
                self.tell_queue(queue, QueueEvent::BackendStop);
            }
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

    fn stop_backend(&mut self, queue: u16) -> &'static [u16] {
        self.device.stop_backend(queue)
    }

    fn enable_queue(&mut self, queue: u16) {
        self.tell_queue(queue, QueueEvent::QueueEnable);
    }

    fn needs_reset(&self) -> bool {
        self.device.needs_reset()
    }

    fn set_needs_reset(&mut self) {
        self.device.set_needs_reset();
    }

    /// First the device has its rings, then they are looked at.
    fn start(&mut self, queues: &[QueueSetting]) -> bool {
        let started = self.device.start(queues);
        if started {
            self.tell(DeviceEvent::DriverOk);
        }
        started
    }

    fn leave(&mut self) -> Vec<u32> {
        self.device.leave()
    }

    /// The notifiers have their own state, and begin with it when the VM runs: [`Place::restore`].
    fn resume(&mut self, queues: &[QueueSetting], bases: &[u32]) -> bool {
        self.device.resume(queues, bases)
    }

    /// First nobody looks any more, then the rings are gone.
    fn disable_queue(&mut self, queue: u16) {
        let report = self.tell_queue(queue, QueueEvent::QueueReset);
        self.stop_backends(&report);
        self.device.disable_queue(queue);
    }

    /// As [`disable_queue`](Self::disable_queue), for all.
    fn reset(&mut self) {
        let report = self.tell(DeviceEvent::Reset);
        self.stop_backends(&report);
        self.device.reset();
    }
}

/// A device of a VM that moves.
pub struct SavedPlace {
    transport: mmio::Saved,
    notifiers: Saved,
}

/// A device at its place in the guest's address space.
pub struct Place<D> {
    base: u64,
    notifiers: Arc<DeviceNotifiers>,
    unbound: Arc<Unbound>,
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
        let unbound = Arc::new(Unbound::default());
        let attached = Attached {
            device,
            notifiers: Arc::clone(&notifiers),
            unbound: Arc::clone(&unbound),
        };
        Ok(Self {
            base,
            unbound,
            notifiers,
            transport: Mutex::new(Transport::new(attached)),
        })
    }

    /// Its notifiers.
    #[must_use]
    pub fn notifiers(&self) -> &Arc<DeviceNotifiers> {
        &self.notifiers
    }

    /// Which of its queues had no eventfd at some time, and why.
    #[must_use]
    pub fn unbound(&self) -> &Unbound {
        &self.unbound
    }

    /// Its registers.
    ///
    /// # Panics
    /// If a thread panicked that had them.
    pub fn transport(&self) -> MutexGuard<'_, Transport<Attached<D>>> {
        self.transport.lock().expect("nobody panicked with the registers")
    }

    /// What goes with a VM that moves. It stands, and is not to go on here: the device's queues are with nobody.
    ///
    /// # Errors
    /// [`NotifierError::Refused`]: the VM runs, or a backend has a queue.
    pub fn save(&self) -> Result<SavedPlace, NotifierError> {
        let notifiers = self.notifiers.save()?;
        let transport = self.transport().save();
        Ok(SavedPlace { transport, notifiers })
    }

    /// Goes on where another one was saved, when the VM runs.
    ///
    /// # Errors
    /// [`BoardError::Restore`], [`BoardError::Notifiers`].
    pub fn restore(&self, saved: &SavedPlace) -> Result<(), BoardError> {
        let mut transport = self.transport();
        if !transport.restore(&saved.transport) {
            let device_type = transport.device().device_type();
            return Err(BoardError::Restore { device_type });
        }
        Ok(self.notifiers.restore(&saved.notifiers)?)
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
