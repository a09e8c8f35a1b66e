//! The device's state, as its VMM sets it up message by message: features, status, memory, vrings.
//!
//! A front end turns a VMM's messages into calls of [`NetDevice`]. When both vrings of a pair are started and
//! there is memory, [`NetDevice::queue_pair`] makes the pair's [`QueuePair`] of them, and its owner moves
//! frames. The device does not access a running queue pair. So stop a queue pair before you change its vrings
//! here, and set their positions with [`NetDevice::keep_bases`]; the next queue pair continues from there.
//!
//! ```text
//!     set_size, set_addresses, set_base, set_call, start (kick) ─▶ is_started ─▶ queue_pair ─▶ frames move
//!                                    stop, reset, other memory ◀─ keep_bases ◀─ bases ◀──────────┘
//! ```

use std::os::fd::OwnedFd;
use std::sync::Arc;

use virtqueue::{
    DirtyLog, InflightRegion, Journal, MemoryMap, Queue, QueueSize, QueueStart, RingAddresses, RingError,
};

use crate::call::{Call, CallBlocked};
use crate::driver_state::State;
use crate::features::{
    self, F_ACCESS_PLATFORM, F_CTRL_VQ, F_RING_PACKED, F_RING_RESET, Negotiated, OnRequest, Unmet,
};
use crate::offloads::Offloads;
use crate::pair::{Bases, Guest, QueuePair, Vring};
use crate::vring::{VringError, VringState};

/// Invalid requests of a VMM.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// An invalid request for a vring.
    #[error(transparent)]
    Vring(#[from] VringError),
    /// Features were acknowledged that were not offered.
    #[error("features {0:#x} were acknowledged that were not offered")]
    Features(u64),
    /// A feature was acknowledged without one that it needs.
    #[error(transparent)]
    Unmet(#[from] Unmet),
    /// The device status has more than 8 bits (VirtIO 1.3, 2.1).
    #[error("device status {0:#x} has bits beyond the 8 that VirtIO defines")]
    Status(u64),
}

/// Why a queue pair cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum PairError {
    /// A vring is not set up correctly.
    #[error(transparent)]
    Vring(#[from] VringError),
    /// The ring cannot be used in its present state.
    #[error("vring {index}: {source}")]
    Ring {
        /// Index of the vring.
        index: u32,
        /// What is wrong with it.
        source: RingError,
    },
    /// A kick or call eventfd could not be duplicated; the process is short of descriptors.
    #[error("cannot duplicate a descriptor")]
    Duplicate(#[source] std::io::Error),
    /// There are rings, but no guest memory.
    #[error(
        "vrings were started before guest memory was set: it must be shared with the device (QEMU: \
         memory-backend-memfd,share=on)"
    )]
    NoMemory,
}

/// Properties of the data path behind a queue pair.
#[derive(Debug, Clone, Copy)]
pub struct Path {
    /// Maximum frame length, bytes.
    pub frame_limit: u32,
    /// Frames may come from a stack on the same machine, with partial checksums.
    pub partial_checksums: bool,
    /// Frames are sent from guest memory without a copy, or were by a predecessor that died: frames that it
    /// had taken are not sent twice.
    pub in_place: bool,
}

/// See the module's head.
pub struct NetDevice {
    offered: u64,
    features: u64,
    status: u8,
    memory: Option<Arc<MemoryMap>>,
    log: Option<Arc<DirtyLog>>,
    /// Records the chains in flight for a successor, if the VMM keeps such a region.
    inflight: Option<Arc<InflightRegion>>,
    /// The vrings of the pairs, and of the control queue if the device can serve it.
    vrings: Vec<VringState>,
    /// The driver's state, set by the control queue; `None`: the VMM serves the queue.
    pub(crate) control: Option<State>,
    /// The VMM may serve the control queue; the device then does not use it.
    passed_on: bool,
    /// A call blocked a thread.
    call_blocked: CallBlocked,
}

impl NetDevice {
    /// A device with `pairs` queue pairs, 1 to 0x8000 (VirtIO 1.3, 5.1.4.1), that offers these offloads. The
    /// caller checks the number: a device without pairs is useless, and no driver can address more.
    #[must_use]
    pub fn new(pairs: u16, offload: Offloads) -> Self {
        Self {
            offered: features::offered(pairs, offload),
            features: 0,
            status: 0,
            memory: None,
            log: None,
            inflight: None,
            vrings: (0..usize::from(pairs) * 2)
                .map(|_| VringState::default())
                .collect(),
            control: None,
            passed_on: false,
            call_blocked: CallBlocked::default(),
        }
    }

    /// Offers these features, too.
    #[must_use]
    pub fn offering(mut self, features: OnRequest) -> Self {
        self.offered |= features.features();
        self
    }

    /// Lets the device serve its control queue, with these features. `passed_on`: only if a front end passes it on.
    pub(crate) fn add_control(&mut self, state: State, features: u64, passed_on: bool) {
        self.offered |= features;
        self.vrings.push(VringState::default());
        self.control = Some(state);
        self.passed_on = passed_on;
    }

    /// Whether this device serves the control queue. If a front end passes it on, the driver has acknowledged
    /// it; a front end that serves it itself does not acknowledge it here, or never sets its vring up.
    fn has_control_vring(&self) -> bool {
        self.control.is_some() && (!self.passed_on || self.features & F_CTRL_VQ != 0)
    }

    /// Whether `index` is the vring of the control queue.
    #[must_use]
    pub fn is_control(&self, index: u32) -> bool {
        self.has_control_vring() && index == self.control_index()
    }

    /// Number of queue pairs.
    pub fn pairs(&self) -> usize {
        self.vrings.len() / 2
    }

    /// Features that may be acknowledged.
    pub fn offered(&self) -> u64 {
        self.offered
    }

    /// Features that were acknowledged.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// The properties that follow from the acknowledged features and the driver's commands.
    pub fn negotiated(&self) -> Negotiated {
        let negotiated = Negotiated::from(self.features);
        let offloads = self
            .control
            .as_ref()
            .map(|state| state.offloads(negotiated.offloads));
        Negotiated {
            offloads: offloads.unwrap_or(negotiated.offloads),
            ..negotiated
        }
    }

    /// The driver acknowledges features. If they change, all running queue pairs must be created again.
    ///
    /// # Errors
    /// [`DeviceError::Features`]. If the device serves its control queue in a VMM, so that the features come
    /// from the driver itself, also [`DeviceError::Unmet`]: then FEATURES_OK must not be set.
    pub fn acknowledge(&mut self, features: u64) -> Result<(), DeviceError> {
        match features & !self.offered {
            0 => (),
            unknown => return Err(DeviceError::Features(unknown)),
        }
        if self.control.is_some() && !self.passed_on {
            features::check_requirements(features)?;
        }
        self.features = features;
        Ok(())
    }

    /// Device status as the driver set it.
    pub fn status(&self) -> u8 {
        self.status
    }

    /// Sets the device status; 0 resets the device, but keeps the positions of the rings, because a VMM may
    /// read them afterwards.
    ///
    /// # Errors
    /// [`DeviceError::Status`].
    pub fn set_status(&mut self, status: u64) -> Result<(), DeviceError> {
        let status = u8::try_from(status).map_err(|_| DeviceError::Status(status))?;
        if status == 0 {
            let bases: Vec<_> = self.vrings.iter().map(|vring| vring.base).collect();
            self.reset();
            for (vring, base) in self.vrings.iter_mut().zip(bases) {
                vring.base = base;
            }
        }
        self.status = status;
        Ok(())
    }

    /// Stops and disables all vrings and forgets the driver's state, and the dirty log: a migration sets it again.
    /// Memory, and the eventfds for notifications to the VMM, stay.
    pub fn reset(&mut self) {
        for vring in &mut self.vrings {
            *vring = VringState {
                call: vring.call.take(),
                err: vring.err.take(),
                ..VringState::default()
            };
        }
        (self.log, self.inflight) = (None, None);
        (self.features, self.status) = (0, 0);
        if let Some(state) = &mut self.control {
            state.reset();
        }
    }

    /// Guest memory, once there is some.
    pub fn memory(&self) -> Option<&Arc<MemoryMap>> {
        self.memory.as_ref()
    }

    /// Sets the memory for queue pairs created from now on.
    pub fn set_memory(&mut self, memory: Option<Arc<MemoryMap>>) {
        self.memory = memory;
    }

    /// The dirty log, while the guest is migrated.
    pub fn log(&self) -> Option<&Arc<DirtyLog>> {
        self.log.as_ref()
    }

    /// Sets the dirty log for queue pairs created from now on; for running ones call [`Vring::set_log`] on both vrings.
    pub fn set_log(&mut self, log: Option<Arc<DirtyLog>>) {
        self.log = log;
    }

    /// Whether the VMM keeps an inflight region that includes that vring: it may be for fewer vrings.
    #[must_use]
    pub fn has_inflight(&self, index: u16) -> bool {
        let region = self.inflight.as_ref();
        region.is_some_and(|region| region.queue(index).is_some())
    }

    /// Sets the inflight region. Queue pairs created from now on use it, and start with a predecessor's records.
    pub fn set_inflight(&mut self, inflight: Arc<InflightRegion>) {
        self.inflight = Some(inflight);
    }

    /// Whether rings are packed.
    pub fn has_packed_rings(&self) -> bool {
        self.features & F_RING_PACKED != 0
    }

    /// A vring; the receive vring of pair N is 2 N, the transmit vring 2 N + 1.
    ///
    /// # Errors
    /// [`VringError::Unknown`].
    pub fn vring(&self, index: u32) -> Result<&VringState, VringError> {
        let count = self.pairs() * 2 + usize::from(self.has_control_vring());
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        if index >= count {
            return Err(VringError::Unknown { index, count });
        }
        let vring = usize::try_from(index).ok().and_then(|at| self.vrings.get(at));
        vring.ok_or(VringError::Unknown { index, count })
    }

    fn vring_mut(&mut self, index: u32) -> Result<&mut VringState, VringError> {
        self.vring(index)?;
        Ok(&mut self.vrings[index as usize])
    }

    /// Sets the number of its entries. Checked again when the ring is used, because features may still change.
    ///
    /// # Errors
    /// [`VringError`].
    pub fn set_size(&mut self, index: u32, entries: u32) -> Result<(), VringError> {
        let size = match self.has_packed_rings() {
            true => QueueSize::packed(entries),
            false => QueueSize::new(entries),
        };
        let size = size.map_err(|source| VringError::Size { index, source })?;
        self.vring_mut(index)?.size = Some(size);
        Ok(())
    }

    /// Sets the addresses of its parts, in the VMM's address space.
    ///
    /// # Errors
    /// [`VringError`].
    pub fn set_addresses(&mut self, index: u32, addresses: RingAddresses) -> Result<(), VringError> {
        self.vring_mut(index)?.addresses = Some(addresses);
        Ok(())
    }

    /// Sets the next chain.
    ///
    /// # Errors
    /// [`VringError`].
    pub fn set_base(&mut self, index: u32, base: u32) -> Result<(), VringError> {
        if base > u16::MAX.into() && !self.has_packed_rings() {
            return Err(VringError::Base { index, base });
        }
        self.vring_mut(index)?.base = base;
        Ok(())
    }

    /// Starts it. `kick`: the driver notifies the device with it; without one the ring is polled.
    ///
    /// # Errors
    /// [`VringError`].
    pub fn start(&mut self, index: u32, kick: Option<OwnedFd>) -> Result<(), VringError> {
        let vring = self.vring_mut(index)?;
        vring.kick = kick;
        (vring.started, vring.stopped) = (true, false);
        Ok(())
    }

    /// Stops it; returns its position. This may be the first half of a reset of a single vring; the second is
    /// [`start`](Self::start), after addresses and base are set. The control queue's vring can be stopped
    /// even after a reset of the device, which clears CTRL_VQ.
    ///
    /// # Errors
    /// [`VringError`].
    pub fn stop(&mut self, index: u32) -> Result<u32, VringError> {
        let count = u32::try_from(self.vrings.len()).unwrap_or(u32::MAX);
        let vring = usize::try_from(index).ok().and_then(|at| self.vrings.get_mut(at));
        let vring = vring.ok_or(VringError::Unknown { index, count })?;
        vring.stopped |= vring.started;
        vring.started = false;
        vring.kick = None;
        Ok(vring.base)
    }

    /// Sets the eventfd that interrupts the driver; without one the driver polls.
    ///
    /// # Errors
    /// [`VringError`].
    pub fn set_call(&mut self, index: u32, call: Option<OwnedFd>) -> Result<(), VringError> {
        self.vring_mut(index)?.call = call;
        Ok(())
    }

    /// Sets the eventfd that reports a fault to the VMM.
    ///
    /// # Errors
    /// [`VringError`].
    pub fn set_err(&mut self, index: u32, err: Option<OwnedFd>) -> Result<(), VringError> {
        self.vring_mut(index)?.err = err;
        Ok(())
    }

    /// Enables or disables it; a running queue pair is changed by its [`Vring::enabled`].
    ///
    /// # Errors
    /// [`VringError`].
    pub fn set_enabled(&mut self, index: u32, enabled: bool) -> Result<(), VringError> {
        self.vring_mut(index)?.enabled = enabled;
        Ok(())
    }

    /// Removes and returns the error eventfds of all vrings.
    #[must_use]
    pub fn take_errors(&mut self) -> Vec<OwnedFd> {
        let errors = self.vrings.iter_mut().filter_map(|vring| vring.err.take());
        errors.collect()
    }

    /// Whether both vrings of a pair are started.
    #[must_use]
    pub fn is_whole(&self, pair: usize) -> bool {
        let vrings = self.vrings.get(pair * 2..pair * 2 + 2);
        vrings.is_some_and(|vrings| vrings.iter().all(|vring| vring.started))
    }

    /// Whether frames can move in a pair: both its vrings are started, or one is and the driver may have
    /// reset the other (VIRTIO_F_RING_RESET). A vring that was never started keeps the pair from starting.
    #[must_use]
    pub fn is_started(&self, pair: usize) -> bool {
        if u32::try_from(pair * 2).is_ok_and(|index| self.is_control(index)) {
            return false;
        }
        let Some([one, other]) = self.vrings.get(pair * 2..pair * 2 + 2) else {
            return false;
        };
        let resets = self.features & F_RING_RESET != 0;
        match (one.started, other.started) {
            (true, true) => true,
            (true, false) => resets && other.stopped,
            (false, true) => resets && one.stopped,
            (false, false) => false,
        }
    }

    /// Whether the guest receives on all pairs but the first, which it cannot disable.
    pub fn all_pairs_on(&self) -> bool {
        (1..self.pairs()).all(|pair| {
            let to_guest = &self.vrings[pair * 2];
            to_guest.started && to_guest.enabled && self.is_started(pair)
        })
    }

    /// Entries of the longer vring of a pair; 0 while none is known.
    #[must_use]
    pub fn longest_vring(&self, pair: u16) -> u32 {
        let first = usize::from(pair) * 2;
        let vrings = self.vrings.iter().skip(first).take(2);
        let sizes = vrings.filter_map(|vring| vring.size.map(|size| u32::from(size.get())));
        sizes.max().unwrap_or(0)
    }

    /// Whether a call of this device blocked the thread that made it.
    pub fn call_blocked(&self) -> &CallBlocked {
        &self.call_blocked
    }

    /// Creates the queue pair `pair`, with duplicates of its kicks and calls. A vring that is not started
    /// becomes a disabled [`Queue::reset`]; if the pair is not [started](Self::is_started), both do.
    ///
    /// # Errors
    /// [`PairError`].
    pub fn queue_pair(&self, pair: u16, path: Path) -> Result<QueuePair, PairError> {
        let memory = self.memory.as_ref().ok_or(PairError::NoMemory)?;
        let guest = self.guest(memory, path);
        // Only frames that are sent from guest memory can be sent twice. The record in a split ring, one
        // store per batch, is always written, so that it is up to date if `in_place` changes.
        let marks = match path.in_place || !self.negotiated().ring.packed {
            true => Journal::Ring,
            false => Journal::None,
        };
        let index = u32::from(pair) * 2;
        let enter = |index, journal| match self.is_started(pair.into()) {
            true => self.enter(index, &guest, journal),
            false => self.enter_reset(index, &guest),
        };
        let (mut from_guest, to_guest) = (enter(index + 1, marks)?, enter(index, Journal::None)?);
        if path.in_place {
            from_guest.sent_before = from_guest.queue.taken_before();
        }
        Ok(QueuePair { from_guest, to_guest })
    }

    /// The guest, as its driver has set up the device.
    fn guest(&self, memory: &Arc<MemoryMap>, path: Path) -> Guest {
        let negotiated = self.negotiated();
        Guest {
            memory: Arc::clone(memory),
            header_bytes: negotiated.header_bytes,
            mergeable: negotiated.mergeable,
            frame_limit: path.frame_limit,
            offloads: negotiated.offloads,
            partial_checksums: path.partial_checksums,
            log: self.log.clone(),
        }
    }

    /// Opens a ring; chains in flight are recorded in the inflight region, or by `marks` if there is none.
    fn enter(&self, index: u32, guest: &Guest, marks: Journal) -> Result<Vring, PairError> {
        let (state, ring) = (self.vring(index)?, self.negotiated().ring);
        if !state.started {
            return self.enter_reset(index, guest);
        }
        let memory = &guest.memory;
        let layout = state
            .layout(index, memory, ring.packed)
            .map_err(|error| self.explain(error))?;
        let region = u16::try_from(index).ok().zip(self.inflight.as_ref());
        let start = QueueStart {
            base: state.base,
            journal: region
                .and_then(|(index, region)| region.queue(index))
                .map_or(marks, Journal::Inflight),
            log: self.log.clone(),
        };
        let queue =
            Queue::new(memory, layout, ring, start).map_err(|source| PairError::Ring { index, source })?;
        let duplicate = |fd: &Option<OwnedFd>| {
            let copy = fd.as_ref().map(OwnedFd::try_clone);
            copy.transpose().map_err(PairError::Duplicate)
        };
        Ok(Vring {
            queue,
            kick: duplicate(&state.kick)?,
            call: Call::new(duplicate(&state.call)?, Arc::clone(&self.call_blocked)),
            enabled: state.enabled,
            guest: guest.clone(),
            sent_before: 0,
        })
    }

    /// Opens the control queue's ring.
    pub(crate) fn enter_control(&self, index: u32, memory: &Arc<MemoryMap>) -> Result<Vring, PairError> {
        // A command that was taken and not answered is executed again: it sets a state that does not depend
        // on the previous one.
        let path = Path {
            frame_limit: 0,
            partial_checksums: false,
            in_place: false,
        };
        self.enter(index, &self.guest(memory, path), Journal::None)
    }

    /// A placeholder for a ring that is not started.
    fn enter_reset(&self, index: u32, guest: &Guest) -> Result<Vring, PairError> {
        let state = self.vring(index)?;
        // The size of a ring that was never set up is unknown.
        let size = state.size.unwrap_or(QueueSize::SMALLEST);
        Ok(Vring {
            queue: Queue::reset(&guest.memory, size, self.negotiated().ring, state.base),
            kick: None,
            call: Call::new(None, Arc::clone(&self.call_blocked)),
            enabled: false,
            guest: guest.clone(),
            sent_before: 0,
        })
    }

    /// Explains a ring outside guest memory: its address may be an IOMMU's.
    fn explain(&self, error: VringError) -> VringError {
        match error {
            VringError::Layout { index, source } if self.features & F_ACCESS_PLATFORM != 0 => {
                VringError::Translated { index, source }
            }
            error => error,
        }
    }

    /// Keeps the positions of a stopped queue pair, from which the next one continues. Ignores vrings that
    /// are not started.
    ///
    /// # Panics
    /// If there is no such pair.
    pub fn keep_bases(&mut self, pair: usize, bases: Bases) {
        let vrings = &mut self.vrings[pair * 2..pair * 2 + 2];
        for (vring, base) in vrings.iter_mut().zip([bases.to_guest, bases.from_guest]) {
            if vring.started {
                vring.base = base;
            }
        }
    }
}

#[cfg(test)]
#[path = "net_device_tests.rs"]
mod tests;
