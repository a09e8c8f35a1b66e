//! An entropy device (VirtIO 1.3, 5.4): one queue, into whose buffers it writes random bytes.
//!
//! What it shows is that notifiers and transport are for any device. Of crate `device` it uses what is no network's:
//! how the guest is interrupted, with the counters that belong to it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use device::call::{Call, CallBlocked};
use device::counters::PairCounters;
use notifier::notifiers::{Left, Serve};
use rustix::rand::{GetRandomFlags, getrandom};
use steer::with_sources;
use virtqueue::{
    Chains, GuestFault, MemoryMap, Queue, QueueFeatures, QueueSize, QueueSizeError, QueueStart,
    RingAddresses, RingError, RingFormat, RingLayout, RingShape,
};

use crate::memory::Memory;
use crate::mmio::{Device, F_VERSION_1, NeedsReset, QueueSetting};

/// VirtIO 1.3, 5.4.1.
const ENTROPY_DEVICE: u32 = 4;
const F_RING_PACKED: u64 = 1 << 34;
const MOST_ENTRIES: u16 = 64;
/// Most bytes that one buffer gets: a device may write less than there is room for (5.4.6.1).
const MOST_BYTES: usize = 256;
/// Buffers that are taken at a time.
const BATCH: usize = 16;

/// What all threads share.
pub struct EntropyShared {
    memory: Arc<MemoryMap>,
    queue: Mutex<Option<(Queue, Call)>>,
    needs_reset: NeedsReset,
    call: Option<OwnedFd>,
    /// `calls` alone counts here.
    counters: PairCounters,
    random: Random,
}

/// Fills the bytes with random ones; how many it did.
pub type Random = fn(&mut [u8]) -> io::Result<usize>;

/// The kernel's.
fn kernels_random(bytes: &mut [u8]) -> io::Result<usize> {
    Ok(getrandom(bytes, GetRandomFlags::empty())?)
}

impl EntropyShared {
    /// With that memory; `call` interrupts the guest.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(memory: &Memory, call: Option<OwnedFd>) -> io::Result<Arc<Self>> {
        Self::with_random(memory, call, kernels_random)
    }

    /// The same with another source of random bytes.
    ///
    /// # Errors
    /// As of [`EntropyShared::new`].
    pub fn with_random(memory: &Memory, call: Option<OwnedFd>, random: Random) -> io::Result<Arc<Self>> {
        let copy = call.as_ref().map(OwnedFd::try_clone).transpose()?;
        Ok(Arc::new(Self {
            memory: Arc::clone(memory.map()),
            queue: Mutex::new(None),
            needs_reset: NeedsReset::new(copy),
            call,
            counters: PairCounters::default(),
            random,
        }))
    }

    /// Whether it needs a reset.
    #[must_use]
    pub fn needs_reset(&self) -> bool {
        self.needs_reset.get()
    }

    /// What the host has done wrong that it needs a reset.
    #[must_use]
    pub fn hosts_fault(&self) -> Option<String> {
        self.needs_reset.hosts_fault()
    }

    fn serve(&self) {
        let mut place = self.queue.lock().expect("nobody panicked with the queue");
        let Some((queue, call)) = place.as_mut() else {
            return;
        };
        let filled = fill_all(queue, &self.memory, self.random);
        if queue.publish() {
            call.make(&self.counters);
        }
        let Err(error) = filled else {
            return;
        };
        *place = None;
        match error {
            FillError::Guest(_) => self.needs_reset.set(),
            FillError::Random(_) => self.needs_reset.set_for_host(with_sources(&error)),
        }
    }

    /// Interrupts that were made.
    #[must_use]
    pub fn interrupts(&self) -> u64 {
        self.counters.calls.get()
    }

    fn enter(&self, setting: &QueueSetting, packed: bool, base: u32) -> Result<(), EnterError> {
        let size = match packed {
            true => QueueSize::packed(setting.size),
            false => QueueSize::new(setting.size),
        }?;
        let features = QueueFeatures {
            packed,
            ..QueueFeatures::default()
        };
        let shape = RingShape::new(RingFormat::of(packed), size);
        let addresses = RingAddresses {
            desc: setting.descriptors,
            avail: setting.driver,
            used: setting.device,
        };
        let rings = RingLayout::from_user(&self.memory, shape, addresses)?;
        let queue = Queue::new(&self.memory, rings, features, QueueStart::at(base))?;
        let event = self.call.as_ref().map(OwnedFd::try_clone).transpose()?;
        let call = Call::new(event, CallBlocked::default());
        *self.queue.lock().expect("nobody panicked with the queue") = Some((queue, call));
        Ok(())
    }
}

/// Why there is no queue.
#[derive(Debug, thiserror::Error)]
enum EnterError {
    #[error(transparent)]
    Size(#[from] QueueSizeError),
    #[error(transparent)]
    Ring(#[from] RingError),
    #[error("no descriptor is left for an interrupt: see `ulimit -n`")]
    Duplicate(#[from] io::Error),
}

/// Why buffers are filled no more.
#[derive(Debug, thiserror::Error)]
enum FillError {
    #[error(transparent)]
    Guest(#[from] GuestFault),
    #[error("there are no random bytes")]
    Random(#[from] io::Error),
}

/// Fills all buffers that there are, a ring's length at most. A device has to write one byte at least (5.4.6.1):
/// without random bytes it gives none back.
fn fill_all(queue: &mut Queue, memory: &MemoryMap, random_bytes: Random) -> Result<(), FillError> {
    let mut chains = Chains::default();
    for _ in 0..usize::from(MOST_ENTRIES).div_ceil(BATCH) {
        if queue.pop(&mut chains, BATCH)? == 0 {
            break;
        }
        for chain in &chains {
            let mut random = [0; MOST_BYTES];
            let filled = match random_bytes(&mut random)? {
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                filled => filled,
            };
            let mut rest = &random[..filled];
            let mut written = 0;
            for buffer in chains.writable(chain) {
                let (now, later) = rest.split_at(rest.len().min(buffer.len as usize));
                // Inside the map, as checked when the descriptor was read.
                let _ = memory.copy_to_guest(buffer.offset, now);
                // At most MOST_BYTES.
                written += now.len() as u32;
                rest = later;
            }
            queue.push_used(chain.id, written);
        }
    }
    Ok(())
}

/// Its queue, as the notifiers look at it.
pub struct EntropyQueue(pub Arc<EntropyShared>);

impl Serve for EntropyQueue {
    fn look(&mut self) -> Left {
        self.0.serve();
        // The driver notifies what it adds meanwhile: kicks are never off.
        Left::Nothing
    }
}

/// The entropy device for the transport.
pub struct Entropy {
    shared: Arc<EntropyShared>,
    packed: bool,
}

impl Entropy {
    /// Over what the notifiers have, too.
    #[must_use]
    pub fn new(shared: &Arc<EntropyShared>) -> Self {
        Self {
            shared: Arc::clone(shared),
            packed: false,
        }
    }
}

impl Device for Entropy {
    fn device_type(&self) -> u32 {
        ENTROPY_DEVICE
    }

    fn queues(&self) -> u16 {
        1
    }

    fn most_entries(&self) -> u16 {
        MOST_ENTRIES
    }

    fn features(&self) -> u64 {
        F_VERSION_1 | F_RING_PACKED
    }

    fn acknowledge(&mut self, features: u64) -> bool {
        self.packed = features & F_RING_PACKED != 0;
        features & !self.features() == 0
    }

    fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    fn needs_reset(&self) -> bool {
        self.shared.needs_reset()
    }

    fn set_needs_reset(&mut self) {
        self.shared.needs_reset.set();
    }

    fn start(&mut self, queues: &[QueueSetting]) -> bool {
        let base = RingFormat::of(self.packed).first_base();
        self.resume(queues, &[base])
    }

    fn leave(&mut self) -> Vec<u32> {
        let mut place = self.shared.queue.lock().expect("nobody panicked with the queue");
        vec![place.take().map_or(0, |(queue, _)| queue.base())]
    }

    fn resume(&mut self, queues: &[QueueSetting], bases: &[u32]) -> bool {
        let ready = queues.iter().zip(bases).find(|(queue, _)| queue.ready);
        let Some((queue, &base)) = ready else {
            return true;
        };
        let entered = self.shared.enter(queue, self.packed, base);
        match &entered {
            Ok(()) => (),
            Err(error @ EnterError::Duplicate(_)) => {
                self.shared.needs_reset.set_for_host(with_sources(error));
            }
            Err(_) => self.shared.needs_reset.set(),
        }
        entered.is_ok()
    }

    fn disable_queue(&mut self, _queue: u16) {
        *self.shared.queue.lock().expect("nobody panicked with the queue") = None;
    }

    fn reset(&mut self) {
        self.disable_queue(0);
        self.shared.needs_reset.clear();
    }
}
