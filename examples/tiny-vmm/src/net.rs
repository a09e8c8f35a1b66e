//! The network device: crate `device`, its control queue and its data path, behind one lock.
//!
//! The vCPU's thread locks it for the registers, the notifiers' thread to serve a queue, the worker to move frames.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::Result;
use device::config_space::ConfigSpace;
use device::control::{self, ControlQueue};
use device::net_device::{NetDevice, Path};
use device::offloads::Offloads;
use notifier::notifiers::{Left, Serve};
use virtqueue::{RingAddresses, RingFormat};

use crate::memory::Memory;
use crate::port::{Port, SinkFailed};
use crate::sink::{LONGEST_FRAME, Sink};

/// Maximum number of entries of a queue.
pub const MOST_ENTRIES: u16 = 256;
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const MTU: u16 = 1500;
/// Maximum number of commands that one look answers.
const MOST_COMMANDS: usize = MOST_ENTRIES as usize;

/// A queue as the driver has set it up. Only the limit of its size was checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueSetting {
    /// Number of entries.
    pub size: u32,
    /// Guest addresses.
    pub rings: RingAddresses,
    /// QueueReady.
    pub ready: bool,
}

/// The device, shared by the threads.
pub struct Net {
    state: Mutex<NetState>,
    /// Threads that wait for the lock in [`Net::lock`].
    waiting: AtomicU32,
}

/// The device, locked.
pub struct NetState {
    /// Features, rings, and what the control queue has set.
    pub device: NetDevice,
    control: Option<ControlQueue>,
    /// Queue pairs and sink.
    pub port: Port,
    /// DEVICE_NEEDS_RESET (VirtIO 1.3, 2.1.2): the driver broke a rule, or the host has failed.
    pub needs_reset: bool,
    /// ConfigGeneration.
    pub generation: u32,
    /// Interrupts the guest.
    call: OwnedFd,
    /// Receives the host's errors.
    failed: Sender<Result<()>>,
}

impl Net {
    /// A device with this memory, whose frames go to this sink. `polled`: a worker polls the queue pairs. `call`
    /// interrupts the guest; `failed` receives errors of the host.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn new(
        (pairs, polled): (u16, bool),
        memory: &Memory,
        sink: Box<dyn Sink>,
        call: OwnedFd,
        failed: Sender<Result<()>>,
    ) -> Result<Arc<Self>> {
        let mut device = NetDevice::new(pairs, Offloads::NONE).with_control(MAC, control::OFFERED);
        device.set_memory(Some(Arc::clone(&memory.map)));
        let state = NetState {
            port: Port::new(sink, &device, polled),
            device,
            control: None,
            needs_reset: false,
            generation: 0,
            call,
            failed,
        };
        Ok(Arc::new(Self {
            state: Mutex::new(state),
            waiting: AtomicU32::new(0),
        }))
    }

    /// Locks the device.
    ///
    /// # Panics
    /// If a thread panicked that had it.
    pub fn lock(&self) -> MutexGuard<'_, NetState> {
        // Relaxed, here and below: the mutex orders everything. A stale value costs one more turn.
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let state = self.state.lock().expect("no thread panicked");
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        state
    }

    /// Like [`Net::lock`], for threads that lock the device again and again: other threads go first.
    ///
    /// # Panics
    /// If a thread panicked that had it.
    pub fn lock_after_others(&self) -> MutexGuard<'_, NetState> {
        while self.waiting.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        self.state.lock().expect("no thread panicked")
    }
}

impl NetState {
    /// Serves the queue pairs.
    pub fn serve(&mut self) -> Left {
        if self.needs_reset {
            return Left::Nothing;
        }
        self.port.serve().unwrap_or_else(|error| {
            self.fail(error);
            Left::Nothing
        })
    }

    /// Moves a batch of frames in each direction, without kicks.
    pub fn poll(&mut self) {
        if !self.needs_reset
            && let Err(error) = self.port.poll()
        {
            self.fail(error);
        }
    }

    fn serve_control(&mut self) -> Left {
        let Some(queue) = &mut self.control else {
            return Left::Nothing;
        };
        let served = queue.serve(&mut self.device, MOST_COMMANDS, |device, _| {
            self.port.follow(device);
            self.generation += 1;
            true
        });
        match served {
            Ok(MOST_COMMANDS) => Left::Something,
            Ok(_) => Left::Nothing,
            Err(fault) => {
                self.control = None;
                self.fail(fault.into());
                Left::Nothing
            }
        }
    }

    /// Sets DEVICE_NEEDS_RESET, and interrupts the driver. An error of the host also ends the run.
    fn fail(&mut self, error: anyhow::Error) {
        if error.is::<SinkFailed>() || error.root_cause().is::<io::Error>() {
            // The receiver may be gone, at the end of the machine.
            let _ = self.failed.send(Err(error));
        }
        if !std::mem::replace(&mut self.needs_reset, true) {
            // A full counter means that an interrupt is pending already.
            let _ = rustix::io::write(&self.call, &1_u64.to_ne_bytes());
        }
    }

    /// The config space (VirtIO 1.3, 5.1.4).
    #[must_use]
    pub fn config(&self) -> Vec<u8> {
        let state = self.device.control_state().expect("it has a control queue");
        let space = ConfigSpace {
            mac: state.mac(),
            link_up: true,
            max_pairs: self.device.pairs() as u16,
            mtu: MTU,
            announce: state.announce(),
            hashing: self.device.hash_limits(),
        };
        space.bytes()
    }

    /// DRIVER_OK: starts the queues that are ready. If they cannot be started, the device needs a reset.
    pub fn start(&mut self, queues: &[QueueSetting]) {
        if let Err(error) = self.try_start(queues) {
            self.fail(error);
        }
    }

    fn try_start(&mut self, queues: &[QueueSetting]) -> Result<()> {
        let device = &mut self.device;
        let base = RingFormat::of(device.has_packed_rings()).first_base();
        for (index, queue) in (0..).zip(queues).filter(|(_, queue)| queue.ready) {
            device.set_size(index, queue.size)?;
            device.set_addresses(index, queue.rings)?;
            device.set_base(index, base)?;
            device.set_call(index, Some(self.call.try_clone()?))?;
            // The notifiers have the kicks.
            device.start(index, None)?;
        }
        for index in [0, 1] {
            // The first pair. The driver enables others by the control queue.
            device.set_enabled(index, true)?;
        }
        let path = Path {
            frame_limit: LONGEST_FRAME as u32,
            partial_checksums: false,
            in_place: false,
        };
        // Without multiqueue the control queue follows the first pair.
        let usable = device.control_index() / 2;
        let pairs = (0..usable as u16).map(|pair| {
            let is_whole = device.is_whole(pair.into());
            is_whole.then(|| device.queue_pair(pair, path)).transpose()
        });
        let pairs = pairs.collect::<Result<_, _>>()?;
        if device.vring(device.control_index())?.started {
            self.control = Some(device.control_queue()?);
        }
        self.port.set_pairs(pairs);
        self.port.follow(device);
        Ok(())
    }

    /// Stops a queue. A pair needs both of its queues: the other one is not served any more, either.
    pub fn stop_queue(&mut self, queue: u16) {
        if self.device.is_control(queue.into()) {
            self.control = None;
        } else if let Some(pair) = self.port.take_pair((queue / 2).into()) {
            self.device.keep_bases((queue / 2).into(), pair.bases());
        }
        // An error: it was not started.
        let _ = self.device.stop(queue.into());
        // Frames behind one that waited for the pair can move now.
        self.serve();
    }

    /// Forgets all that the driver has set.
    pub fn reset(&mut self) {
        self.port.set_pairs(Vec::new());
        self.control = None;
        self.device.reset();
        self.port.follow(&self.device);
        self.needs_reset = false;
    }
}

/// A queue, by its index, as the notifiers serve it.
pub struct NetQueue(pub Arc<Net>, pub u16);

impl Serve for NetQueue {
    fn look(&mut self) -> Left {
        let mut state = self.0.lock_after_others();
        // Which queue it is depends on the features.
        if !state.device.is_control(self.1.into()) {
            return state.serve();
        }
        match state.serve_control() {
            // A pair that the driver has just enabled may have frames already.
            Left::Nothing => state.serve(),
            left => left,
        }
    }
}
