//! One connection of a VMM: what it negotiated, and the lanes that run because of it.
//!
//! A queue pair's lane runs while both its vrings are started (SET_VRING_KICK) and there is memory
//! and an interface for it. Whatever would pull the ground from under a lane (another memory table,
//! an interface that goes) stops the lane first, which yields the exact vring bases, and starts it
//! again afterwards from there:
//!
//!     vring started ∧ its partner started ─▶ start_pair ─▶ lane in a worker
//!     GET_VRING_BASE, interface gone ──────▶ stop_pair  ─▶ bases kept in the vrings
//!     memory table changes ────────────────▶ stop all, change, start all again

use std::fs::File;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use vhost::vhost_user::message::VhostUserMemoryRegion;
use virtio_bindings::bindings::virtio_net as net;
use virtio_bindings::bindings::{virtio_config, virtio_ring};
use virtqueue::{QueueFeatures, QueueSize, RingAddresses};

use super::config::Placement;
use super::lanes::{FarSide, LaneError, LaneFacts, LaneParts, Negotiated, private_bytes};
use super::memory::{MemoryError, MemoryTable};
use super::peer;
use super::vring::{self, VringError, VringState};
use crate::data::counters::LaneCounters;
use crate::data::guest::{Fault, HEADER_BYTES, LEGACY_HEADER_BYTES};
use crate::data::lane::Direction;
use crate::data::worker::{LaneId, Workers};

/// VHOST_USER_F_PROTOCOL_FEATURES.
pub(crate) const F_PROTOCOL_FEATURES: u64 = 1 << 30;
const F_VERSION_1: u64 = 1 << virtio_config::VIRTIO_F_VERSION_1;
const F_IN_ORDER: u64 = 1 << virtio_config::VIRTIO_F_IN_ORDER;
const F_INDIRECT: u64 = 1 << virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;
const F_EVENT_IDX: u64 = 1 << virtio_ring::VIRTIO_RING_F_EVENT_IDX;
const F_MRG_RXBUF: u64 = 1 << net::VIRTIO_NET_F_MRG_RXBUF;
const F_MAC: u64 = 1 << net::VIRTIO_NET_F_MAC;
const F_MTU: u64 = 1 << net::VIRTIO_NET_F_MTU;
const F_STATUS: u64 = 1 << net::VIRTIO_NET_F_STATUS;
const F_MQ: u64 = 1 << net::VIRTIO_NET_F_MQ;

/// The virtio features that a port with so many queue pairs offers.
pub(crate) fn offered_features(pairs: u16) -> u64 {
    let multi_queue = if pairs > 1 { F_MQ } else { 0 };
    F_VERSION_1
        | F_IN_ORDER
        | F_INDIRECT
        | F_EVENT_IDX
        | F_MRG_RXBUF
        | F_MAC
        | F_MTU
        | F_STATUS
        | F_PROTOCOL_FEATURES
        | multi_queue
}

/// Why a request of the VMM was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Vring(#[from] VringError),
    #[error(transparent)]
    Lane(#[from] LaneError),
    #[error("features {0:#x} were acknowledged that were not offered")]
    Features(u64),
    #[error("memory=direct needs a VIRTIO 1.0 driver (VIRTIO_F_VERSION_1): use memory=copy for this guest")]
    LegacyDirect,
    #[error("SET_VRING_ENABLE with state {0}: 0 and 1 are defined")]
    EnableState(u32),
    #[error("{0} is not supported")]
    Unsupported(&'static str),
    #[error("config space: {len} bytes at offset {offset} are not within its {size} bytes")]
    Config { offset: u32, len: u32, size: usize },
    #[error("the connection is closed already")]
    Closed,
}

/// What a session needs of its port.
pub(crate) struct Ground<'a> {
    pub(crate) placement: Placement,
    pub(crate) workers: &'a Workers,
    pub(crate) counters: &'a [Arc<LaneCounters>],
    /// The far side of each pair; empty while the interface is gone.
    pub(crate) far: &'a [FarSide],
}

/// A fault that a worker reported, until the control thread takes note of it.
pub(crate) type FaultCell = Arc<Mutex<Option<Fault>>>;

/// A lane that is in a worker's hands.
pub(crate) struct ActiveLane {
    id: LaneId,
    worker: usize,
    pub(crate) facts: LaneFacts,
}

/// See the module's head.
pub(crate) struct Session {
    pub(crate) features: u64,
    /// REPLY_ACK was negotiated.
    pub(crate) reply_ack: bool,
    memory: MemoryTable,
    vrings: Vec<VringState>,
    pub(crate) lanes: Vec<Option<ActiveLane>>,
    peer: Option<i32>,
    connection: UnixStream,
    fault: FaultCell,
}

impl Session {
    /// A fresh session over `connection` for a port of so many queue pairs.
    pub(crate) fn new(connection: UnixStream, pairs: u16, fault: FaultCell) -> Self {
        let peer = peer::process(connection.as_fd());
        Self {
            features: 0,
            reply_ack: false,
            memory: MemoryTable::default(),
            vrings: (0..pairs * 2).map(|_| VringState::default()).collect(),
            lanes: (0..pairs).map(|_| None).collect(),
            peer,
            connection,
            fault,
        }
    }

    /// Process that connected, if the kernel tells.
    pub(crate) fn peer(&self) -> Option<i32> {
        self.peer
    }

    /// SET_FEATURES.
    pub(crate) fn set_features(&mut self, features: u64, ground: &Ground<'_>) -> Result<(), SessionError> {
        let offered = offered_features(u16::try_from(self.lanes.len()).unwrap_or(u16::MAX));
        if features & !offered != 0 {
            return Err(SessionError::Features(features & !offered));
        }
        if ground.placement == Placement::Direct && features & F_VERSION_1 == 0 {
            return Err(SessionError::LegacyDirect);
        }
        self.features = features;
        Ok(())
    }

    fn negotiated(&self) -> Negotiated {
        let has = |feature| self.features & feature != 0;
        let long_header = has(F_VERSION_1) || has(F_MRG_RXBUF);
        Negotiated {
            header_bytes: if long_header {
                HEADER_BYTES
            } else {
                LEGACY_HEADER_BYTES
            },
            mergeable: has(F_MRG_RXBUF),
            ring: QueueFeatures {
                event_idx: has(F_EVENT_IDX),
                indirect: has(F_INDIRECT),
                in_order: has(F_IN_ORDER),
            },
        }
    }

    /// SET_MEM_TABLE.
    pub(crate) fn set_memory(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        ground: &Ground<'_>,
    ) -> Result<(), SessionError> {
        let (private, peer) = (self.private_bytes(ground), self.peer);
        self.around_lanes(ground, |memory| memory.replace(regions, files, private, peer))
    }

    /// ADD_MEM_REG.
    pub(crate) fn add_memory(
        &mut self,
        region: &VhostUserMemoryRegion,
        file: File,
        ground: &Ground<'_>,
    ) -> Result<(), SessionError> {
        if self.memory.is_repeated(region, true) {
            return Ok(());
        }
        let (private, peer) = (self.private_bytes(ground), self.peer);
        self.around_lanes(ground, |memory| memory.add(region, file, private, peer))
    }

    /// REM_MEM_REG.
    pub(crate) fn remove_memory(
        &mut self,
        region: &VhostUserMemoryRegion,
        ground: &Ground<'_>,
    ) -> Result<(), SessionError> {
        if self.memory.is_repeated(region, false) {
            return Ok(());
        }
        let private = self.private_bytes(ground);
        self.around_lanes(ground, |memory| memory.remove(region, private))
    }

    fn private_bytes(&self, ground: &Ground<'_>) -> usize {
        private_bytes(
            ground.placement,
            u16::try_from(self.lanes.len()).unwrap_or(u16::MAX),
        )
    }

    /// Changes the memory table while no lane uses the old one.
    fn around_lanes(
        &mut self,
        ground: &Ground<'_>,
        change: impl FnOnce(&mut MemoryTable) -> Result<(), MemoryError>,
    ) -> Result<(), SessionError> {
        self.stop_all(ground.workers);
        let changed = change(&mut self.memory);
        // On failure the old table stands, and the lanes go on with it.
        if self.memory.map().is_some() {
            self.start_all(ground)?;
        }
        Ok(changed?)
    }

    fn vring(&mut self, index: u32) -> Result<&mut VringState, SessionError> {
        let count = u32::try_from(self.vrings.len()).unwrap_or(u32::MAX);
        let at = usize::try_from(index).unwrap_or(usize::MAX);
        Ok(self
            .vrings
            .get_mut(at)
            .ok_or(VringError::Unknown { index, count })?)
    }

    /// A vring that may be changed: its lane is stopped if it runs.
    fn idle_vring(&mut self, index: u32, ground: &Ground<'_>) -> Result<&mut VringState, SessionError> {
        self.vring(index)?;
        self.stop_pair(index as usize / 2, ground.workers);
        self.vring(index)
    }

    /// SET_VRING_NUM.
    pub(crate) fn set_vring_num(
        &mut self,
        index: u32,
        num: u32,
        ground: &Ground<'_>,
    ) -> Result<(), SessionError> {
        let size = QueueSize::new(num).map_err(|source| VringError::Size { index, source })?;
        self.idle_vring(index, ground)?.size = Some(size);
        Ok(())
    }

    /// SET_VRING_ADDR.
    pub(crate) fn set_vring_addr(
        &mut self,
        index: u32,
        addresses: RingAddresses,
        ground: &Ground<'_>,
    ) -> Result<(), SessionError> {
        self.idle_vring(index, ground)?.addresses = Some(addresses);
        // A running vring whose addresses are set again (to turn dirty logging on) goes on.
        self.start_pair(index as usize / 2, ground)
    }

    /// SET_VRING_BASE.
    pub(crate) fn set_vring_base(
        &mut self,
        index: u32,
        base: u32,
        ground: &Ground<'_>,
    ) -> Result<(), SessionError> {
        if base > u16::MAX.into() {
            return Err(VringError::Base { index, base }.into());
        }
        self.idle_vring(index, ground)?.base = base;
        Ok(())
    }

    /// GET_VRING_BASE: stops the vring, and with it the pair; returns where it stands.
    pub(crate) fn stop_vring(&mut self, index: u32, ground: &Ground<'_>) -> Result<u32, SessionError> {
        let vring = self.idle_vring(index, ground)?;
        vring.started = false;
        vring.kick = None;
        Ok(vring.base)
    }

    /// SET_VRING_KICK: starts the vring, and the pair with its second one.
    pub(crate) fn set_vring_kick(
        &mut self,
        index: u32,
        file: Option<File>,
        ground: &Ground<'_>,
    ) -> Result<(), SessionError> {
        let kick = vring::eventfd(index, "kick", file)?;
        let enabled_from_start = self.features & F_PROTOCOL_FEATURES == 0;
        let vring = self.idle_vring(index, ground)?;
        vring.kick = kick;
        vring.started = true;
        vring.enabled |= enabled_from_start;
        self.start_pair(index as usize / 2, ground)
    }

    /// SET_VRING_CALL.
    pub(crate) fn set_vring_call(
        &mut self,
        index: u32,
        file: Option<File>,
        ground: &Ground<'_>,
    ) -> Result<(), SessionError> {
        let call = vring::eventfd(index, "call", file)?;
        let duplicate = call
            .as_ref()
            .map(OwnedFd::try_clone)
            .transpose()
            .map_err(LaneError::Duplicate)?;
        self.vring(index)?.call = call;
        if let Some(lane) = &self.lanes[index as usize / 2] {
            ground
                .workers
                .set_call(lane.worker, lane.id, direction(index), duplicate);
        }
        Ok(())
    }

    /// SET_VRING_ERR.
    pub(crate) fn set_vring_err(&mut self, index: u32, file: Option<File>) -> Result<(), SessionError> {
        let err = vring::eventfd(index, "error", file)?;
        self.vring(index)?.err = err;
        Ok(())
    }

    /// SET_VRING_ENABLE.
    pub(crate) fn set_vring_enable(
        &mut self,
        index: u32,
        enabled: bool,
        ground: &Ground<'_>,
    ) -> Result<(), SessionError> {
        self.vring(index)?.enabled = enabled;
        if let Some(lane) = &self.lanes[index as usize / 2] {
            ground
                .workers
                .set_enabled(lane.worker, lane.id, direction(index), enabled);
        }
        Ok(())
    }

    /// Starts every pair that can run.
    ///
    /// # Errors
    /// The first lane that cannot be built.
    pub(crate) fn start_all(&mut self, ground: &Ground<'_>) -> Result<(), SessionError> {
        (0..self.lanes.len()).try_for_each(|pair| self.start_pair(pair, ground))
    }

    /// Stops every pair; the vrings stay started.
    pub(crate) fn stop_all(&mut self, workers: &Workers) {
        (0..self.lanes.len()).for_each(|pair| self.stop_pair(pair, workers));
    }

    fn start_pair(&mut self, pair: usize, ground: &Ground<'_>) -> Result<(), SessionError> {
        let [to_guest, from_guest] = [&self.vrings[pair * 2], &self.vrings[pair * 2 + 1]];
        let Some(far) = ground.far.get(pair) else {
            return Ok(());
        };
        if self.lanes[pair].is_some() || !(to_guest.started && from_guest.started) {
            return Ok(());
        }
        let parts = LaneParts {
            pair: u16::try_from(pair).unwrap_or(u16::MAX),
            map: self.memory.map().ok_or(LaneError::NoMemory)?,
            vrings: [to_guest, from_guest],
            negotiated: self.negotiated(),
            far: far.clone(),
            counters: Arc::clone(&ground.counters[pair]),
        };
        let (lane, facts) = parts.build(ground.placement)?;
        let connection = self.connection.try_clone().map_err(LaneError::Duplicate)?;
        let err = [&from_guest.err, &to_guest.err].into_iter().flatten().next();
        let err = err
            .map(OwnedFd::try_clone)
            .transpose()
            .map_err(LaneError::Duplicate)?;
        let cell = Arc::clone(&self.fault);
        let (worker, id) = ground.workers.add(
            lane,
            Box::new(move |fault| report(&cell, fault, &connection, err)),
        );
        tracing::debug!(pair, worker, mode = facts.mode, "lane started");
        self.lanes[pair] = Some(ActiveLane { id, worker, facts });
        Ok(())
    }

    fn stop_pair(&mut self, pair: usize, workers: &Workers) {
        let Some(lane) = self.lanes[pair].take() else {
            return;
        };
        // Closed before the lane is: a second descriptor would keep the queue bound.
        drop(lane.facts);
        let Some(stopping) = workers.remove(lane.worker, lane.id) else {
            return;
        };
        let bases = stopping.stop();
        self.vrings[pair * 2].base = bases.to_guest;
        self.vrings[pair * 2 + 1].base = bases.from_guest;
    }
}

fn direction(index: u32) -> Direction {
    if index.is_multiple_of(2) {
        Direction::ToGuest
    } else {
        Direction::FromGuest
    }
}

/// On the worker's thread: notes the fault, tells the VMM, and wakes the control thread by closing
/// the connection. Nothing here waits.
fn report(cell: &FaultCell, fault: Fault, connection: &UnixStream, err: Option<OwnedFd>) {
    cell.lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
        .get_or_insert(fault);
    if let Some(err) = err {
        let _ = rustix::io::write(&err, &1u64.to_ne_bytes());
    }
    let _ = connection.shutdown(Shutdown::Both);
}
