//! The network device: crate `device` behind the transport of [`crate::mmio`].
//!
//! ```text
//!     registers ─▶ Net (Device) ─▶ NetDevice: features, rings, what the control queue said
//!     notifiers ─▶ NetQueue (Serve) ─▶ control queue, or the port ─▶ sink
//! ```
//!
//! Locks are taken in this order, each for short: control queue, device, port. A backend's is taken before all of them.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use device::config_space::ConfigSpace;
use device::control::{self, ControlQueue, RestoreError};
use device::features::F_GUEST_ANNOUNCE;
use device::net_device::{DeviceError, NetDevice, PairError, Path};
use device::offloads::Offloads;
use notifier::notifiers::{Left, Serve};
use rustix::event::{EventfdFlags, eventfd};
use steer::with_sources;
use virtqueue::{RingAddresses, RingFormat};

use crate::backend_slot::BackendSlot;
use crate::memory::Memory;
use crate::mmio::{Device, NeedsReset, QueueSetting};
use crate::port::{Port, PortSlot};
use crate::sink::{LONGEST_FRAME, Sink};

/// VirtIO 1.3, 5.1.1.
const NETWORK_DEVICE: u32 = 1;
/// Most entries of a queue.
const MOST_ENTRIES: u16 = 256;
/// Bytes of a frame behind its Ethernet header.
const MTU: u16 = 1500;
/// Commands that one look answers at most: a ring's length. Kicks are on meanwhile, so that there is another look for
/// those that come later.
const MOST_COMMANDS: usize = MOST_ENTRIES as usize;

/// What the device is made of.
pub struct NetConfig {
    /// Its address.
    pub mac: [u8; 6],
    /// Queue pairs: 1 to [`MOST_PAIRS`](crate::machine::MOST_PAIRS).
    pub pairs: u16,
    /// Somebody calls the port's `poll` again and again, and kicks are off.
    pub polled: bool,
    /// Interrupts the guest; `None`: it polls.
    pub call: Option<OwnedFd>,
}

/// What all threads share.
pub struct NetShared {
    device: Mutex<NetDevice>,
    control: Mutex<Option<ControlQueue>>,
    port: PortSlot,
    backend: BackendSlot,
    needs_reset: Arc<NeedsReset>,
    /// Wakes the worker: there is more to be done than one call's share.
    again: OwnedFd,
    call: Option<OwnedFd>,
    max_pairs: u16,
}

impl NetShared {
    /// The device with that memory, and with that sink for its frames.
    ///
    /// # Errors
    /// No descriptor is left for an eventfd.
    pub fn new(config: NetConfig, memory: &Memory, sink: Box<dyn Sink>) -> std::io::Result<Arc<Self>> {
        let mut device =
            NetDevice::new(config.pairs, Offloads::NONE).with_control(config.mac, control::OFFERED);
        device.set_memory(Some(Arc::clone(memory.map())));
        let needs_reset = Arc::new(NeedsReset::new(duplicate(config.call.as_ref())?));
        let port = Port::new(sink, &device, Arc::clone(&needs_reset), config.polled);
        Ok(Arc::new(Self {
            device: Mutex::new(device),
            control: Mutex::new(None),
            port: PortSlot::new(port)?,
            backend: BackendSlot::default(),
            needs_reset,
            again: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            call: config.call,
            max_pairs: config.pairs,
        }))
    }

    /// Where its data path lies.
    #[must_use]
    pub fn port(&self) -> &PortSlot {
        &self.port
    }

    /// Where its backend is, if it has one.
    #[must_use]
    pub fn backend(&self) -> &BackendSlot {
        &self.backend
    }

    /// Readable when the worker is to look at the port once more.
    #[must_use]
    pub fn again(&self) -> &OwnedFd {
        &self.again
    }

    /// Whether the device needs a reset.
    #[must_use]
    pub fn needs_reset(&self) -> bool {
        self.needs_reset.get()
    }

    /// What the host has done wrong that it needs a reset. Of the sink's failure [`PortSlot::failure`] tells.
    #[must_use]
    pub fn hosts_fault(&self) -> Option<String> {
        self.needs_reset.hosts_fault()
    }

    /// How many queues it has: a control queue beside the pairs.
    #[must_use]
    pub fn queues(&self) -> u16 {
        2 * self.max_pairs + 1
    }

    fn control(&self) -> MutexGuard<'_, Option<ControlQueue>> {
        self.control
            .lock()
            .expect("nobody panicked with the control queue")
    }

    fn device(&self) -> MutexGuard<'_, NetDevice> {
        self.device.lock().expect("nobody panicked with the device")
    }

    /// Serves the port, if no backend has it.
    pub fn serve_port(&self) {
        let Some(port) = &mut *self.port.lock_giving_way() else {
            return;
        };
        // The worker also waits for the sink or not, by what is left: it is told.
        let took = port.takes_from_sink();
        if port.serve() == Left::Something || took != port.takes_from_sink() {
            self.wake_worker();
        }
    }

    /// Makes the worker look at the port.
    pub fn wake_worker(&self) {
        // A full counter wakes it, too.
        let _ = rustix::io::write(&self.again, &1_u64.to_ne_bytes());
    }

    fn serve_control(&self) -> Left {
        let mut control = self.control();
        let Some(queue) = control.as_mut() else {
            return Left::Nothing;
        };
        let mut device = self.device();
        let served = queue.serve(&mut *device, MOST_COMMANDS, |device, _| {
            // The guest is answered when frames go as it said: a backend must not hold that up for long.
            self.port.with(|port| port.follow(device));
            // A pair that was off may have frames that nobody kicks for.
            self.wake_worker();
            true
        });
        match served {
            Ok(served) if served == MOST_COMMANDS => Left::Something,
            Ok(_) => Left::Nothing,
            Err(_) => {
                *control = None;
                self.needs_reset.set();
                Left::Nothing
            }
        }
    }
}

/// A queue, as the notifiers look at it.
pub struct NetQueue {
    shared: Arc<NetShared>,
    queue: u16,
}

impl NetQueue {
    /// The one with that index.
    #[must_use]
    pub fn new(shared: &Arc<NetShared>, queue: u16) -> Self {
        Self {
            shared: Arc::clone(shared),
            queue,
        }
    }
}

impl Serve for NetQueue {
    fn look(&mut self) -> Left {
        // Which one it is depends on what was negotiated.
        let control = self.shared.device().control_index();
        if u32::from(self.queue) == control {
            return self.shared.serve_control();
        }
        // What is left is the worker's, who is woken.
        self.shared.serve_port();
        Left::Nothing
    }
}

/// The network device for the transport.
pub struct Net(pub Arc<NetShared>);

impl Net {
    /// What its driver said by the control queue, as commands that say it again.
    #[must_use]
    pub fn control_commands(&self) -> Vec<Vec<u8>> {
        self.0.device().control_commands()
    }

    /// Goes on with what another one's driver said by the control queue. That one's features are acknowledged, and
    /// nobody serves the queues yet.
    ///
    /// # Errors
    /// [`RestoreError`].
    pub fn restore_control(&mut self, commands: &[Vec<u8>]) -> Result<(), RestoreError> {
        let mut device = self.0.device();
        device.restore_control(commands)?;
        self.0.port.with(|port| port.follow(&device));
        Ok(())
    }

    /// Asks the guest to announce itself (VirtIO 1.3, 5.1.6.5.4), and interrupts it. `false`: its driver cannot.
    pub fn announce(&mut self) -> bool {
        let mut device = self.0.device();
        if device.features() & F_GUEST_ANNOUNCE == 0 {
            return false;
        }
        device.announce();
        if let Some(call) = &self.0.call {
            // A full counter interrupts it, too.
            let _ = rustix::io::write(call, &1_u64.to_ne_bytes());
        }
        true
    }

    /// Takes the queue pairs out of the port, and notes where they stand.
    fn stop_pairs(&self) {
        let mut control = self.0.control();
        let mut device = self.0.device();
        let bases: Vec<_> = self
            .0
            .port
            .with(|port| (0..device.pairs()).map(|pair| port.take_pair(pair)).collect());
        for (pair, bases) in bases.into_iter().enumerate() {
            if let Some(bases) = bases {
                device.keep_bases(pair, bases);
            }
        }
        if let Some(queue) = control.take() {
            // It is there, as the queue is.
            let _ = device.keep_control_base(&queue);
        }
    }

    fn start_at(&mut self, queues: &[QueueSetting], bases: &[u32]) -> bool {
        let started = self.try_start(queues, bases);
        match &started {
            Ok(()) => (),
            Err(error) if error.is_hosts() => self.0.needs_reset.set_for_host(with_sources(error)),
            Err(_) => self.0.needs_reset.set(),
        }
        started.is_ok()
    }

    fn try_start(&mut self, queues: &[QueueSetting], bases: &[u32]) -> Result<(), StartError> {
        if self.0.port.failure().is_some() {
            return Err(StartError::Sink);
        }
        let mut device = self.0.device();
        for (index, (queue, base)) in (0..).zip(queues.iter().zip(bases)) {
            if !queue.ready {
                continue;
            }
            device.set_size(index, queue.size)?;
            device.set_addresses(index, addresses(queue))?;
            device.set_base(index, *base)?;
            device.set_call(index, duplicate(self.0.call.as_ref())?)?;
            // The notifiers have the kicks.
            device.start(index, None)?;
        }
        for index in [0, 1] {
            // Until the driver says otherwise by the control queue.
            device.set_enabled(index, true)?;
        }
        let path = Path {
            frame_limit: LONGEST_FRAME as u32,
            partial_checksums: false,
            in_place: false,
        };
        let mut pairs = Vec::new();
        // Without multiqueue the control queue follows the first pair, and is no other pair's.
        let usable = device.control_index() / 2;
        for pair in 0..self.0.max_pairs {
            let used = u32::from(pair) < usable && device.is_whole(pair.into());
            pairs.push(if used {
                Some(device.queue_pair(pair, path)?)
            } else {
                None
            });
        }
        let is_there = device
            .vring(device.control_index())
            .is_ok_and(|vring| vring.started);
        let control = if is_there {
            Some(device.control_queue()?)
        } else {
            None
        };
        self.0.port.with(|port| {
            for (at, pair) in pairs.into_iter().enumerate() {
                if let Some(pair) = pair {
                    port.set_pair(at, pair);
                }
            }
            port.follow(&device);
        });
        drop(device);
        *self.0.control() = control;
        // From now on it waits for the sink, too.
        self.0.wake_worker();
        Ok(())
    }
}

/// Why the device cannot work with queues as they were set up.
#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Vring(#[from] device::vring::VringError),
    #[error(transparent)]
    Pair(#[from] PairError),
    #[error("frames have nowhere to go")]
    Sink,
    #[error("no descriptor is left for an interrupt: see `ulimit -n`")]
    Duplicate(#[from] std::io::Error),
}

impl StartError {
    /// Of a sink that has failed the port knows.
    fn is_hosts(&self) -> bool {
        matches!(self, Self::Duplicate(_) | Self::Pair(PairError::Duplicate(_)))
    }
}

fn addresses(queue: &QueueSetting) -> RingAddresses {
    RingAddresses {
        desc: queue.descriptors,
        avail: queue.driver,
        used: queue.device,
    }
}

fn duplicate(fd: Option<&OwnedFd>) -> std::io::Result<Option<OwnedFd>> {
    fd.map(OwnedFd::try_clone).transpose()
}

impl Device for Net {
    fn device_type(&self) -> u32 {
        NETWORK_DEVICE
    }

    fn queues(&self) -> u16 {
        self.0.queues()
    }

    fn most_entries(&self) -> u16 {
        MOST_ENTRIES
    }

    fn features(&self) -> u64 {
        self.0.device().offered()
    }

    fn acknowledge(&mut self, features: u64) -> bool {
        self.0.device().acknowledge(features).is_ok()
    }

    fn config(&self) -> Vec<u8> {
        let device = self.0.device();
        let Some(state) = device.control_state() else {
            return Vec::new();
        };
        let space = ConfigSpace {
            mac: state.mac(),
            link_up: true,
            max_pairs: self.0.max_pairs,
            mtu: MTU,
            announce: state.announce(),
            hashing: device.hash_limits(),
        };
        space.bytes()
    }

    fn stop_backend(&mut self, queue: u16) -> &'static [u16] {
        let queues = self.0.backend.end(queue);
        // What the sink has is the worker's to look at again.
        self.0.wake_worker();
        queues
    }

    fn needs_reset(&self) -> bool {
        self.0.needs_reset()
    }

    fn set_needs_reset(&mut self) {
        self.0.needs_reset.set();
    }

    fn start(&mut self, queues: &[QueueSetting]) -> bool {
        let base = RingFormat::of(self.0.device().has_packed_rings()).first_base();
        self.0.port.with(Port::discard);
        self.start_at(queues, &vec![base; queues.len()])
    }

    fn leave(&mut self) -> Vec<u32> {
        self.stop_pairs();
        let device = self.0.device();
        let queues = u32::from(self.0.queues());
        (0..queues)
            .map(|queue| device.vring(queue).map_or(0, |vring| vring.base))
            .collect()
    }

    fn resume(&mut self, queues: &[QueueSetting], bases: &[u32]) -> bool {
        self.start_at(queues, bases)
    }

    fn disable_queue(&mut self, queue: u16) {
        let mut device = self.0.device();
        if u32::from(queue) != device.control_index() {
            // The pair as a whole: frames go by both its queues or by none.
            let pair = usize::from(queue / 2);
            if let Some(bases) = self.0.port.with(|port| port.take_pair(pair)) {
                device.keep_bases(pair, bases);
            }
        } else {
            drop(device);
            *self.0.control() = None;
            device = self.0.device();
        }
        // There is such a queue.
        let _ = device.stop(queue.into());
        // Frames that waited for the pair keep others back no longer.
        self.0.wake_worker();
    }

    /// Of a device whose sink has failed the next driver learns when it starts.
    fn reset(&mut self) {
        self.0.port.with(Port::reset);
        *self.0.control() = None;
        let mut device = self.0.device();
        device.reset();
        self.0.port.with(|port| port.follow(&device));
        self.0.needs_reset.clear();
    }
}
