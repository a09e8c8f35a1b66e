//! One connection of a VMM: what it negotiated, and the lanes that run because of it.
//!
//! A queue pair's lane runs while both its vrings are started (SET_VRING_KICK) and there is memory and an interface for
//! it. A change that would invalidate something that the lane uses (an interface that is gone, other addresses of a
//! ring) stops the lane first, which gives the exact vring bases, and starts it again from there afterwards:
//!
//! ```text
//!     vring started ∧ its partner started ─▶ start_pair ─▶ lane in a worker
//!     GET_VRING_BASE, interface gone ──────▶ stop_pair  ─▶ bases kept in the vrings
//!     … where single vrings are reset ─────▶ hold_pair  ─▶ release_pair: a lane with the other vring alone
//!     first pair runs, others not started ─▶ settle     ─▶ lanes without a guest, whose frames the first pair gets
//!     memory table changes ────────────────▶ new map, lanes moved to it one by one (pairs.rs)
//! ```

mod control;
mod pairs;

use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, mpsc};

use anyhow::{Context, bail};
use virtqueue::{DirtyLog, FileRange, InflightFile, InflightRegion, InflightShape, RingAddresses};

use crate::config::{Placement, PortConfig};
use crate::nic::lane_facts::LaneFacts;
use crate::port::announce;
use crate::port::attachment::Attachment;
use crate::port::features::{self, F_LOG_ALL, F_PROTOCOL_FEATURES, PASSED_CONTROL};
use crate::port::lanes::{LaneError, LentQueue, private_bytes};
use crate::port::live::Live;
use crate::port::memory::MemoryTable;
use crate::port::registration::UnderWay;
use crate::supervision::alarm::Alarm;
use crate::supervision::sigbus::{Watch, Watched};
use dataplane::lane::{Lane, Siblings};
use dataplane::nic::hints::XdpMetadata;
use dataplane::worker::workers::{LaneAt, Workers};
use device::control::ControlQueue;
use device::counters::PairCounters;
use device::features::F_VERSION_1;
use device::net_device::NetDevice;
use device::pair::{Direction, Fault};
use program::log_limit::LogLimit;
use program::peer;

/// The VMM asks for an MTU that is not possible.
#[derive(Debug, thiserror::Error)]
#[error(
    "the VMM tells the guest an MTU of {mtu} bytes, but the interface carries 68 to {limit}: raise the interface's MTU (ip \
     link set mtu) or lower the device's (QEMU: host_mtu)"
)]
pub(crate) struct WrongMtu {
    pub(crate) mtu: u64,
    pub(crate) limit: u16,
}

/// The parts of its port that a session uses.
pub(crate) struct PortContext<'a> {
    pub(crate) placement: Placement,
    pub(crate) workers: &'a Workers,
    /// The port's name.
    pub(crate) name: &'a Arc<str>,
    /// Limits log lines of lanes that the VMM can cause with its memory.
    pub(crate) lines: &'a Mutex<LogLimit>,
    pub(crate) counters: &'a [Arc<PairCounters>],
    pub(crate) live: Live,
    /// What each pair is attached to; empty while the interface is gone.
    pub(crate) attachment: &'a [Attachment],
    /// Queues can be opened now; open queues continue in any case.
    pub(crate) opens: bool,
}

/// Called on another thread when the memory of a pair is registered, to run [`Session::go_direct`].
pub(crate) type OnRegistered = Arc<dyn Fn(usize) + Send + Sync>;

/// Makes the VMM read the config space again.
pub(crate) type TellConfig = Box<dyn Fn() + Send>;

/// A fault that a worker reported, for the end of the session.
pub(crate) type FaultCell = Arc<Mutex<Option<Fault>>>;

/// A lane that a worker polls.
pub(crate) struct ActiveLane {
    at: LaneAt,
    /// The placement that was wanted when the lane was built. It copies if that was refused, or is not ready yet.
    wanted: Placement,
    /// Others only refer to them weakly: the socket in them keeps the queue bound.
    pub(crate) facts: Arc<LaneFacts>,
    lent: Option<LentQueue>,
}

/// What an inflight region is for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InflightQueues {
    /// How many queues.
    pub(crate) queues: u16,
    /// Entries of each.
    pub(crate) size: u16,
}

/// A VMM's connection.
pub(crate) struct VmmConnection {
    pub(crate) stream: UnixStream,
    /// Wakes the thread that reads it.
    pub(crate) alarm: Alarm,
}

/// How far a session came.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reached {
    /// The VMM has read the offered features.
    pub(crate) asked: bool,
    /// Its last request was for the number of queue pairs.
    pub(crate) counted: bool,
    /// It acknowledged features.
    pub(crate) took: bool,
    /// A lane ran.
    pub(crate) ran: bool,
}

pub(crate) struct Session {
    /// The acknowledged features, including those of vhost-user.
    pub(crate) features: u64,
    pub(crate) device: NetDevice,
    /// Set by SET_BACKEND_REQ_FD.
    channel: Option<TellConfig>,
    /// In use while VHOST_F_LOG_ALL is set.
    log: Option<Arc<DirtyLog>>,
    memory: MemoryTable,
    pub(crate) lanes: Vec<Option<ActiveLane>>,
    /// The control queue, while it runs.
    control: Option<ControlQueue>,
    /// Memory in registration for pairs whose lanes copy until then.
    registering: Vec<Option<UnderWay>>,
    registered: OnRegistered,
    /// What this host lacks for the lane of a pair, until [`Self::take_shortage`].
    shortage: Option<String>,
    /// How far it came.
    pub(crate) reached: Reached,
    /// Process that connected, if known.
    pub(crate) peer: Option<i32>,
    connection: VmmConnection,
    fault: FaultCell,
}

impl Session {
    /// A fresh session over `connection` for a port.
    pub(crate) fn new(
        connection: VmmConnection,
        config: &PortConfig,
        fault: FaultCell,
        registered: OnRegistered,
    ) -> Self {
        let pairs = config.queues;
        let peer = peer::process(connection.stream.as_fd());
        let files = Watched {
            watch: Watch::new(connection.stream.try_clone().ok(), Some(connection.alarm.clone())),
            most_bytes: config.memory.most_bytes,
        };
        Self {
            features: 0,
            // The device's address is in the config space, and no command changes it.
            device: NetDevice::new(pairs, config.offload)
                .offering(config.offer)
                .with_passed_control([0; 6], PASSED_CONTROL),
            channel: None,
            log: None,
            memory: MemoryTable::new(files, private_bytes(config.options.placement, pairs), peer),
            lanes: (0..pairs).map(|_| None).collect(),
            control: None,
            registering: (0..pairs).map(|_| None).collect(),
            registered,
            shortage: None,
            reached: Reached::default(),
            peer,
            connection,
            fault,
        }
    }

    /// What this host lacked for the lane of a pair since the last call; `None`: nothing.
    pub(crate) fn take_shortage(&mut self) -> Option<String> {
        self.shortage.take()
    }

    /// Ends the connection, and so the session.
    pub(crate) fn hang_up(&self) {
        let _ = self.connection.stream.shutdown(Shutdown::Both);
    }

    /// Whether the VMM took memory away that it had shared.
    pub(crate) fn lost_memory(&self) -> bool {
        self.memory.is_truncated()
    }

    pub(crate) fn set_features(&mut self, features: u64, context: &PortContext<'_>) -> anyhow::Result<()> {
        let unknown = features & !(self.device.offered() | features::TRANSPORT);
        if unknown != 0 {
            bail!(
                "features {unknown:#x} were acknowledged that were not offered: a guest keeps what it negotiated: start \
                 the daemon with the options that it had then, or restart the guest"
            );
        }
        if context.placement == Placement::Direct && features & F_VERSION_1 == 0 {
            bail!(
                "memory=direct needs a VIRTIO 1.0 driver (VIRTIO_F_VERSION_1): use memory=send-direct or copy for this \
                 guest"
            );
        }
        self.reached.took = true;
        let changed = self.features ^ features;
        if changed & !F_LOG_ALL != 0 {
            // The features also decide which vring is the control queue's.
            self.stop_control();
        }
        self.features = features;
        self.device.acknowledge(features & !features::TRANSPORT)?;
        self.device.set_log(self.active_log().cloned());
        if changed & !F_LOG_ALL != 0 {
            // Lanes were built for the earlier features; usually there are none, as drivers set features before rings.
            self.stop_all(context.workers);
            self.start_control()?;
            return self.start_all(context);
        }
        self.apply_log(context.workers);
        Ok(())
    }

    /// SET_LOG_BASE: where writes to guest memory are logged, once VHOST_F_LOG_ALL is set.
    pub(crate) fn set_log(
        &mut self,
        range: FileRange,
        file: &OwnedFd,
        context: &PortContext<'_>,
    ) -> anyhow::Result<()> {
        self.memory.check_log(range.bytes)?;
        let log = DirtyLog::open(file.as_fd(), range, self.memory.files()).context("SET_LOG_BASE")?;
        // Kept until no lane has it: if the VMM has closed it, its last user frees all its pages; not a worker's job.
        let before = self.log.replace(Arc::new(log));
        self.device.set_log(self.active_log().cloned());
        self.apply_log(context.workers);
        drop(before);
        Ok(())
    }

    /// GET_INFLIGHT_FD: a region for these queues.
    pub(crate) fn make_inflight(&self, queues: InflightQueues) -> anyhow::Result<InflightFile> {
        let InflightQueues { queues, size } = queues;
        let cannot =
            || format!("GET_INFLIGHT_FD: cannot make a region for {queues} queues of {size} entries");
        // One more, for a control queue; more would only waste memory.
        if usize::from(queues) > 2 * self.device.pairs() + 1 {
            bail!(cannot());
        }
        let shape = InflightShape {
            queues,
            entries: size,
            packed: self.device.has_packed_rings(),
        };
        InflightRegion::create(shape).with_context(cannot)
    }

    /// SET_INFLIGHT_FD: the region where rings that are started from now on record outstanding chains, and where a
    /// predecessor has recorded them.
    pub(crate) fn set_inflight(
        &mut self,
        range: FileRange,
        queues: InflightQueues,
        file: &OwnedFd,
        context: &PortContext<'_>,
    ) -> anyhow::Result<()> {
        // Further queues are the VMM's own.
        let ours = u16::try_from(2 * self.device.pairs()).unwrap_or(u16::MAX);
        let shape = InflightShape {
            queues: queues.queues.min(ours),
            entries: queues.size,
            packed: self.device.has_packed_rings(),
        };
        let region = InflightRegion::open(file.as_fd(), range, shape, self.memory.files());
        let region = region.context("SET_INFLIGHT_FD")?;
        self.stop_all(context.workers);
        self.device.set_inflight(Arc::new(region));
        self.start_all(context)
    }

    /// Runs `change` on all lanes, on their workers.
    fn change_lanes(&self, workers: &Workers, change: impl FnOnce(&mut dyn Lane) + Clone + Send + 'static) {
        for lane in self.lanes.iter().flatten() {
            let change = change.clone();
            lane.change(workers, move |lane, _| change(lane));
        }
    }

    /// The dirty log, if it is in use.
    fn active_log(&self) -> Option<&Arc<DirtyLog>> {
        self.log.as_ref().filter(|_| self.features & F_LOG_ALL != 0)
    }

    /// Turns the logging of writes by running lanes on or off; in effect when it returns, because the VMM begins to
    /// copy memory then.
    fn apply_log(&mut self, workers: &Workers) {
        let log = self.device.log();
        if let Some(queue) = &mut self.control {
            queue.set_log(log);
        }
        let log = log.cloned();
        self.change_lanes(workers, move |lane| {
            lane.change_vrings(&mut |_, vring| vring.set_log(log.as_ref()));
        });
    }

    /// Sets the longest frame, bytes.
    pub(crate) fn set_frame_limit(&self, bytes: u32, workers: &Workers) {
        self.change_lanes(workers, move |lane| lane.set_frame_limit(bytes));
    }

    /// SET_STATUS: 0 resets the device. QEMU before 8.1 sends GET_VRING_BASE only after this.
    pub(crate) fn set_status(&mut self, status: u64, context: &PortContext<'_>) -> anyhow::Result<()> {
        if status == 0 {
            self.stop_control();
            self.stop_all(context.workers);
            self.features = 0;
        }
        Ok(self.device.set_status(status)?)
    }

    /// RESET_DEVICE.
    pub(crate) fn reset(&mut self, workers: &Workers) {
        self.stop_control();
        self.stop_all(workers);
        self.features = 0;
        self.device.reset();
    }

    /// SET_BACKEND_REQ_FD.
    pub(crate) fn set_channel(&mut self, channel: TellConfig) {
        self.channel = Some(channel);
    }

    /// Notifies the VMM that the config space changed (link, MTU), if it asked for that.
    pub(crate) fn config_changed(&self) {
        if let Some(tell) = &self.channel {
            tell();
        }
    }

    /// SEND_RARP: announces the new place of `mac` to switches.
    pub(crate) fn announce(&self, mac: [u8; 6], context: &PortContext<'_>) {
        let frame = announce::rarp(mac);
        match self.lanes.iter().flatten().next() {
            Some(lane) => lane.change(context.workers, move |lane, siblings| {
                lane.inject(&frame, siblings);
            }),
            None => tracing::debug!("SEND_RARP with no queue running: nothing to send it by"),
        }
    }

    /// Sets the metadata of frames of a pair's queue.
    pub(crate) fn set_metadata(&self, pair: usize, metadata: &XdpMetadata, workers: &Workers) {
        if let Some(lane) = self.lanes.get(pair).and_then(Option::as_ref) {
            let metadata = metadata.clone();
            lane.change(workers, move |lane, _siblings| lane.set_metadata(&metadata));
        }
    }

    /// Sets rates, source guard and filter rules. The lanes' earlier rules are freed here, not by a worker.
    pub(crate) fn set_rules(&self, live: &Live, workers: &Workers) {
        for (pair, lane) in (0..).zip(&self.lanes) {
            let Some(lane) = lane else { continue };
            let (live, filter) = (live.clone(), live.filter.for_a_lane(pair));
            let (give, unused) = mpsc::channel();
            lane.change(workers, move |lane, _siblings| {
                let earlier = live.apply(lane, filter);
                let _ = give.send((earlier, live));
            });
            drop(unused.recv());
        }
    }

    /// The device, for SET_VRING_NUM, SET_VRING_ADDR and SET_VRING_BASE: the vring's lane is stopped if it runs with
    /// that vring.
    pub(crate) fn idle_vring(
        &mut self,
        index: u32,
        context: &PortContext<'_>,
    ) -> anyhow::Result<&mut NetDevice> {
        if self.device.vring(index)?.started {
            match self.pair_of(index) {
                Some(pair) => self.stop_pair(pair, context.workers),
                None => self.stop_control(),
            }
        }
        Ok(&mut self.device)
    }

    /// GET_VRING_BASE: stops the vring; returns its position. Its partner continues, if the driver may reset single
    /// vrings.
    pub(crate) fn stop_vring(&mut self, index: u32, context: &PortContext<'_>) -> anyhow::Result<u32> {
        let started = self.device.vring(index).is_ok_and(|vring| vring.started);
        let Some(pair) = self.pair_of(index).filter(|_| started) else {
            if self.device.is_control(index) {
                self.stop_control();
            }
            return Ok(self.device.stop(index)?);
        };
        let held = self.hold_pair(pair, context.workers);
        let base = self.device.stop(index)?;
        self.release_pair(pair, held, context)?;
        Ok(base)
    }

    pub(crate) fn set_vring_addr(
        &mut self,
        index: u32,
        addresses: RingAddresses,
        context: &PortContext<'_>,
    ) -> anyhow::Result<()> {
        // VMMs repeat it for a running vring to switch dirty logging on or off, which SET_FEATURES has done already.
        if self.device.vring(index)?.addresses == Some(addresses) {
            return Ok(());
        }
        self.idle_vring(index, context)?.set_addresses(index, addresses)?;
        match self.pair_of(index) {
            Some(pair) => self.start_pair(pair, context),
            None => self.start_control(),
        }
    }

    /// SET_VRING_KICK: starts the vring, and the pair once both its vrings are started.
    pub(crate) fn set_vring_kick(
        &mut self,
        index: u32,
        kick: Option<OwnedFd>,
        context: &PortContext<'_>,
    ) -> anyhow::Result<()> {
        self.device.vring(index)?;
        let pair = self.pair_of(index);
        let held = match pair {
            Some(pair) => self.hold_pair(pair, context.workers),
            None => {
                self.stop_control();
                None
            }
        };
        self.device.start(index, kick)?;
        if self.features & F_PROTOCOL_FEATURES == 0 {
            self.device.set_enabled(index, true)?;
        }
        match pair {
            Some(pair) => self.release_pair(pair, held, context),
            None => self.start_control(),
        }
    }

    pub(crate) fn set_vring_call(
        &mut self,
        index: u32,
        call: Option<OwnedFd>,
        context: &PortContext<'_>,
    ) -> anyhow::Result<()> {
        let duplicate = call
            .as_ref()
            .map(OwnedFd::try_clone)
            .transpose()
            .map_err(LaneError::Duplicate)?;
        self.device.set_call(index, call)?;
        let Some(pair) = self.pair_of(index) else {
            if let Some(queue) = &mut self.control {
                drop(queue.vring.call.replace(duplicate));
            }
            return Ok(());
        };
        if let Some(lane) = &self.lanes[pair] {
            // The worker returns the earlier eventfd, which is closed here.
            let (back, _before) = mpsc::channel();
            lane.change(context.workers, move |lane, _| {
                let mut duplicate = Some(duplicate);
                lane.change_vrings(&mut |of, vring| {
                    if let Some(duplicate) = duplicate.take_if(|_| of == direction(index)) {
                        let _ = back.send(vring.call.replace(duplicate));
                    }
                });
            });
        }
        Ok(())
    }

    pub(crate) fn set_vring_err(&mut self, index: u32, err: Option<OwnedFd>) -> anyhow::Result<()> {
        Ok(self.device.set_err(index, err)?)
    }

    pub(crate) fn set_vring_enable(
        &mut self,
        index: u32,
        enabled: bool,
        context: &PortContext<'_>,
    ) -> anyhow::Result<()> {
        self.device.set_enabled(index, enabled)?;
        self.follow_enabled(index, context)
    }

    /// Applies the new state of a vring that was switched on or off to its lane.
    fn follow_enabled(&mut self, index: u32, context: &PortContext<'_>) -> anyhow::Result<()> {
        let Some(pair) = self.pair_of(index) else {
            return Ok(());
        };
        // A vring that was reset stays off until it is started again, and so does one whose pair cannot run.
        let vring = self.device.vring(index)?;
        let (started, enabled) = (vring.started && self.device.is_started(pair), vring.enabled);
        if let Some(lane) = self.lanes[pair].as_ref().filter(|_| started) {
            lane.change(context.workers, move |lane, _| {
                lane.change_vrings(&mut |of, vring| {
                    if of == direction(index) {
                        vring.enabled = enabled;
                    }
                });
            });
            if direction(index) == Direction::ToGuest && index > 0 {
                self.change_worker(pair, context);
            }
        }
        Ok(())
    }
}

impl ActiveLane {
    fn change(
        &self,
        workers: &Workers,
        change: impl FnOnce(&mut dyn Lane, &mut dyn Siblings) + Send + 'static,
    ) {
        workers.change(self.at, change);
    }
}

fn direction(index: u32) -> Direction {
    if index.is_multiple_of(2) {
        Direction::ToGuest
    } else {
        Direction::FromGuest
    }
}
