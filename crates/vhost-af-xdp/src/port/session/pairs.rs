//! The lanes of a session's queue pairs: started, stopped, and moved to other memory.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use virtqueue::Region;

use super::{ActiveLane, FaultCell, PortContext, Session};
use crate::config::Placement;
use crate::nic::interface_queue::{Fit, InterfaceQueue};
use crate::nic::lane_facts::LaneFacts;
use crate::nic::mode::Fallback;
use crate::port::attachment::Attachment;
use crate::port::lanes::{BuiltLane, LaneError, LaneParts, LentQueue};
use crate::port::memory::{MemoryTable, RegionKey};
use crate::port::registration::{Registered, Registration, UnderWay};
use crate::supervision::alarm::Alarm;
use crate::supervision::interrupt;
use common::lock::Locked;
use dataplane::lane::Lane;
use dataplane::lane::new_lane::NewLane;
use dataplane::lane::role::Role;
use dataplane::nic::endpoint::NicQueue;
use dataplane::nic::xdp::XdpNic;
use dataplane::worker::workers::{LaneAt, Workers};
use device::pair::Fault;
use steer::with_sources;

/// The lent queue of a lane that was stopped, for the next lane of the same pair.
pub(super) struct HeldQueue {
    queue: NicQueue<XdpNic>,
    facts: Arc<LaneFacts>,
    lent: LentQueue,
}

impl Session {
    /// SET_MEM_TABLE.
    pub(crate) fn set_memory(
        &mut self,
        regions: Vec<Region>,
        context: &PortContext<'_>,
    ) -> anyhow::Result<()> {
        self.around_lanes(context, |memory| memory.replace(regions))
    }

    /// ADD_MEM_REG.
    pub(crate) fn add_memory(&mut self, region: Region, context: &PortContext<'_>) -> anyhow::Result<()> {
        if self.memory.is_repeated(RegionKey::from(&region), true) {
            return Ok(());
        }
        self.around_lanes(context, |memory| memory.add(region))
    }

    /// REM_MEM_REG.
    pub(crate) fn remove_memory(&mut self, key: RegionKey, context: &PortContext<'_>) -> anyhow::Result<()> {
        if self.memory.is_repeated(key, false) {
            return Ok(());
        }
        self.around_lanes(context, |memory| memory.remove(key))
    }

    /// Changes the memory table; on failure the old one stays. In copy placement lanes keep their sockets and continue
    /// with the new map; in direct placement the map is the socket's memory, so both are made again.
    fn around_lanes(
        &mut self,
        context: &PortContext<'_>,
        change: impl FnOnce(&mut MemoryTable) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        // Lanes keep using the old map, which they hold, until they are moved.
        change(&mut self.memory)?;
        self.stop_control();
        self.device.set_memory(self.memory.map().cloned());
        self.start_control()?;
        self.rebuild_lanes(context)
    }

    /// Rebuilds running lanes for the present state of the device, and starts those that can run.
    pub(super) fn rebuild_lanes(&mut self, context: &PortContext<'_>) -> anyhow::Result<()> {
        (0..self.lanes.len()).try_for_each(|pair| {
            match self.placement_of(pair, context).has_guest_ram() {
                false => self.move_pair(pair, context),
                true => self.move_direct_pair(pair, context),
            }
        })?;
        match self.device.memory() {
            Some(_) => self.start_all(context),
            None => Ok(()),
        }
    }

    /// Rebuilds a running direct lane on the present memory table. Memory is registered first, while the old lane runs,
    /// because that takes long; if the limit on locked memory does not allow both at a time, the old one is stopped
    /// first.
    fn move_direct_pair(&mut self, pair: usize, context: &PortContext<'_>) -> anyhow::Result<()> {
        if self.lanes[pair].is_none() {
            return Ok(());
        }
        // A running registration is for the earlier table.
        self.end_registration(pair);
        if self.device.memory().is_none() || !context.opens {
            self.stop_pair(pair, context.workers);
            return Ok(());
        }
        let moved = match self.parts(pair, context).registration()?.run() {
            Ok(registered) => self.replace_by_direct(pair, registered, context),
            Err(_) => {
                self.stop_pair(pair, context.workers);
                self.build_pair(pair, context.placement, context)
            }
        };
        moved.or_else(|error| self.copy_instead(pair, &error, context))
    }

    /// Starts a pair in a placement.
    fn build_pair(
        &mut self,
        pair: usize,
        placement: Placement,
        context: &PortContext<'_>,
    ) -> anyhow::Result<()> {
        let built = self.parts(pair, context).build(placement)?;
        self.run(pair, built, context);
        Ok(())
    }

    /// Switches a pair from a failed direct lane to copy placement, and logs why. If the host lacks resources for that,
    /// too, the pair waits like one that cannot be started. Direct placement is retried when its queues restart.
    fn copy_instead(
        &mut self,
        pair: usize,
        error: &anyhow::Error,
        context: &PortContext<'_>,
    ) -> anyhow::Result<()> {
        let why = Fallback::PlacementRefused(context.placement, with_sources(&**error));
        let mut lines = context.lines.locked();
        if let Some(left_out) = lines.allow() {
            tracing::warn!(port = %context.name, pair, "{why}{left_out}");
        }
        drop(lines);
        if self.lanes[pair].is_none() {
            let copies = self.build_pair(pair, Placement::Copy, context);
            self.or_wait(copies)?;
        }
        if let Some(lane) = &self.lanes[pair] {
            // Set once: each lane becomes direct at most once.
            let _ = lane.facts.copies_on.set(why);
        }
        Ok(())
    }

    /// Replaces the running lane by a direct lane on registered memory.
    fn replace_by_direct(
        &mut self,
        pair: usize,
        registered: Registered,
        context: &PortContext<'_>,
    ) -> anyhow::Result<()> {
        self.stop_pair(pair, context.workers);
        let built = self.parts(pair, context).build_direct(registered)?;
        self.run(pair, built, context);
        Ok(())
    }

    /// Rebuilds a running lane over the present memory table, on the same queue.
    fn move_pair(&mut self, pair: usize, context: &PortContext<'_>) -> anyhow::Result<()> {
        if self.lanes[pair].is_none() {
            return Ok(());
        }
        if self.device.memory().is_none() {
            self.stop_pair(pair, context.workers);
            return Ok(());
        }
        let held = self.hold_pair(pair, context.workers);
        self.release_pair(pair, held, context)
    }

    /// Stops the lane of a pair, if there is one, while its vrings change; keeps the lent queue for
    /// [`Self::release_pair`].
    pub(super) fn hold_pair(&mut self, pair: usize, workers: &Workers) -> Option<HeldQueue> {
        self.end_registration(pair);
        let ActiveLane { at, facts, lent, .. } = self.lanes[pair].take()?;
        let Some(lent) = lent else {
            // As in `stop_pair`.
            drop(facts);
            self.stop_lane(pair, at, workers);
            return None;
        };
        let queue = self.stop_lane(pair, at, workers)?;
        Some(HeldQueue { queue, facts, lent })
    }

    /// Continues a pair after [`Self::hold_pair`] with the present vrings, on the held queue if it can continue there.
    pub(super) fn release_pair(
        &mut self,
        pair: usize,
        held: Option<HeldQueue>,
        context: &PortContext<'_>,
    ) -> anyhow::Result<()> {
        let Some(HeldQueue { queue, facts, lent }) = held else {
            return self.start_pair(pair, context);
        };
        let copies = self.placement_of(pair, context) == Placement::Copy;
        if !copies || !self.wants_lane(pair, context) || context.attachment.get(pair).is_none() {
            drop(facts);
            lent.give_back(queue);
            return self.start_pair(pair, context);
        }
        match self.parts(pair, context).copying_side() {
            Ok(guest) => {
                let lane = self.parts(pair, context).copying(guest, queue);
                let at = self.give_to_worker(pair, lane, context);
                facts.is_idle.store(!self.device.is_started(pair), Relaxed);
                self.lanes[pair] = Some(ActiveLane {
                    at,
                    wanted: Placement::Copy,
                    facts,
                    lent: Some(lent),
                });
                Ok(())
            }
            Err(error) => {
                drop(facts);
                lent.give_back(queue);
                self.or_wait(Err(error.into()))
            }
        }
    }

    /// Starts every pair that can run.
    /// Errors: the first lane that cannot be built.
    pub(crate) fn start_all(&mut self, context: &PortContext<'_>) -> anyhow::Result<()> {
        (0..self.lanes.len()).try_for_each(|pair| self.start_pair(pair, context))?;
        self.settle(context)
    }

    /// Adapts lanes to the guest's use of its pairs. If a pair is off or not set up, all pairs copy, and the first one,
    /// once it runs, gets the NIC's frames for that pair. While the first does not run, the others stay as they are.
    /// Errors: a fault of the VMM or its guest.
    pub(crate) fn settle(&mut self, context: &PortContext<'_>) -> anyhow::Result<()> {
        if !context.opens {
            // Lanes that were stopped now could not be built again.
            return Ok(());
        }
        for pair in 0..self.lanes.len() {
            let first_runs = self.lanes[0].is_some();
            let is_started = self.device.is_started(pair);
            let is_right = match &self.lanes[pair] {
                Some(lane) if is_started => !first_runs || lane.wanted == self.placement_of(pair, context),
                Some(_) => first_runs,
                None => is_started || !first_runs,
            };
            if !is_right {
                self.stop_pair(pair, context.workers);
                self.start_pair(pair, context)?;
            }
        }
        Ok(())
    }

    /// Whether a pair needs a lane: because the guest uses it, or because it has a queue of an interface whose frames
    /// go to the first pair, which runs.
    fn wants_lane(&self, pair: usize, context: &PortContext<'_>) -> bool {
        let attachment = context.attachment.get(pair);
        let has_queue = attachment.is_some_and(|attachment| attachment.queue().is_some());
        self.device.is_started(pair) || (pair > 0 && has_queue && self.lanes[0].is_some())
    }

    /// Stops every pair; the vrings stay started.
    pub(crate) fn stop_all(&mut self, workers: &Workers) {
        (0..self.lanes.len()).for_each(|pair| self.stop_pair(pair, workers));
    }

    /// Applies the interface's MTU to lanes. Those with suitable queues get another limit, without a stop. Of the
    /// others one is set up again, while the rest keep running; returns whether one was: then there may be more.
    /// Errors: a fault of the VMM or its guest.
    pub(crate) fn follow_mtu(&mut self, context: &PortContext<'_>) -> anyhow::Result<bool> {
        let mut unfit = None;
        for (pair, attachment) in context.attachment.iter().enumerate().take(self.lanes.len()) {
            let (Some(lane), Some(queue)) = (&self.lanes[pair], attachment.queue()) else {
                continue;
            };
            match queue.fit() {
                Fit::Same => {}
                // A registration in progress for it is for another MTU, so it is set up again.
                Fit::Limit if self.registering[pair].is_none() => follow_limit(queue, lane, context.workers),
                Fit::Limit | Fit::Replace => unfit = unfit.or(Some(pair)),
            }
        }
        let Some(pair) = unfit else { return Ok(false) };
        self.stop_pair(pair, context.workers);
        self.start_pair(pair, context).map(|()| true)
    }

    /// As [`Self::go_direct`] for every pair whose memory is registered by now.
    pub(crate) fn go_direct_all(&mut self, context: &PortContext<'_>) -> anyhow::Result<()> {
        (0..self.lanes.len()).try_for_each(|pair| self.go_direct(pair, context))
    }

    /// Whether a pair that should have a lane has none.
    pub(crate) fn lacks_lanes(&self) -> bool {
        let mut pairs = (0..).zip(&self.lanes);
        pairs.any(|(pair, lane)| lane.is_none() && self.device.is_started(pair))
    }

    /// Starts a pair, if it can run. If the host lacks something the VMM stays connected, and the pair is retried later
    /// (`Port::look`): without a connection the VMM would reconnect at once, and QEMU's guest stands still while it
    /// connects.
    /// Errors: a fault of the VMM or its guest.
    pub(super) fn start_pair(&mut self, pair: usize, context: &PortContext<'_>) -> anyhow::Result<()> {
        let started = self.try_start_pair(pair, context);
        self.or_wait(started)
    }

    /// Stores an error that is a shortage of this host, for [`Self::take_shortage`]: the pair waits until it ends.
    /// Errors: any other one.
    fn or_wait(&mut self, result: anyhow::Result<()>) -> anyhow::Result<()> {
        match result {
            Err(error) if error.downcast_ref().is_some_and(LaneError::is_of_host) => {
                self.shortage = Some(with_sources(error));
                Ok(())
            }
            result => result,
        }
    }

    fn try_start_pair(&mut self, pair: usize, context: &PortContext<'_>) -> anyhow::Result<()> {
        let wanted = self.lanes[pair].is_none() && self.wants_lane(pair, context);
        if !wanted || !context.opens || context.attachment.get(pair).is_none() {
            return Ok(());
        }
        let placement = self.placement_of(pair, context);
        let registration = self.parts(pair, context).registration()?;
        if placement.has_guest_ram() && registration.takes_long() {
            return self.start_by_copying(pair, registration, context);
        }
        let mut built = self.parts(pair, context).build(placement)?;
        if !self.device.is_started(pair) {
            built.facts.is_idle.store(true, Relaxed);
        } else if placement != context.placement {
            built.facts.fallbacks.push(match self.device.is_whole(pair) {
                true => Fallback::PairsOff(context.placement),
                false => Fallback::QueueReset(context.placement),
            });
        }
        self.run(pair, built, context);
        Ok(())
    }

    /// Starts a pair with a lane that copies, so that the guest does not wait until its memory is registered for the
    /// direct lane.
    fn start_by_copying(
        &mut self,
        pair: usize,
        registration: Registration,
        context: &PortContext<'_>,
    ) -> anyhow::Result<()> {
        let mut built = self.parts(pair, context).build(Placement::Copy)?;
        built.facts.fallbacks.push(Fallback::NotYet(context.placement));
        self.run(pair, built, context);
        self.begin_registration(pair, registration)
            .or_else(|error| self.copy_instead(pair, &error, context))
    }

    /// Runs a registration in parallel to the pair's lane; [`Self::go_direct`] is called when it is done.
    fn begin_registration(&mut self, pair: usize, registration: Registration) -> anyhow::Result<()> {
        let registered = Arc::clone(&self.registered);
        let under_way = registration.begin(move || registered(pair));
        self.registering[pair] = Some(under_way.map_err(LaneError::Thread)?);
        Ok(())
    }

    /// Replaces the pair's copying lane by a direct lane, if its memory is registered. Does nothing if that
    /// registration is not wanted any more.
    pub(crate) fn go_direct(&mut self, pair: usize, context: &PortContext<'_>) -> anyhow::Result<()> {
        // Without an attachment the result is kept; it is read when the attachment is back.
        if !context.opens || context.attachment.get(pair).is_none() {
            return Ok(());
        }
        let Some(done) = self.registering[pair].as_ref().and_then(UnderWay::result) else {
            return Ok(());
        };
        self.registering[pair] = None;
        let is_for_now =
            |registered: &Registered| match (&registered.socket, context.attachment[pair].queue()) {
                (Some(socket), Some(queue)) => socket.is_for(&queue.interface),
                _ => true,
            };
        let became = match done {
            Ok(registered) if is_for_now(&registered) => self.replace_by_direct(pair, registered, context),
            Err(error) if !error.is_away() => Err(LaneError::from(error).into()),
            // It was for another MTU, or needed a socket while the steward was away.
            again => {
                drop(again);
                let registration = self.parts(pair, context).registration()?;
                self.begin_registration(pair, registration)
            }
        };
        // The guest is served already: the pair continues to copy, and the session does not end.
        became.or_else(|error| self.copy_instead(pair, &error, context))
    }

    /// Waits for the end of a registration that is not needed any more: its requests for sockets must not be mixed with
    /// those of the next one.
    fn end_registration(&mut self, pair: usize) {
        if let Some(under_way) = self.registering[pair].take() {
            under_way.wait();
        }
    }

    /// Forgets running registrations without a wait for their end.
    pub(crate) fn forget_registrations(&mut self) {
        self.registering
            .iter_mut()
            .for_each(|under_way| *under_way = None);
    }

    /// The present placement of the port's lanes. While a pair is off, or not set up, the first pair gets its frames,
    /// which needs a copy: all lanes copy until it is on.
    pub(super) fn placement(&self, context: &PortContext<'_>) -> Placement {
        match self.device.all_pairs_on() {
            true => context.placement,
            false => Placement::Copy,
        }
    }

    /// The present placement of a pair's lane. While one of its vrings is reset it copies: the kernel cannot return
    /// guest memory of one direction only.
    fn placement_of(&self, pair: usize, context: &PortContext<'_>) -> Placement {
        match self.device.is_whole(pair) {
            true => self.placement(context),
            false => Placement::Copy,
        }
    }

    /// The parts of the lane of a pair whose attachment is there.
    fn parts<'a>(&'a self, pair: usize, context: &PortContext<'_>) -> LaneParts<'a> {
        LaneParts {
            pair: u16::try_from(pair).unwrap_or(u16::MAX),
            placement: context.placement,
            device: &self.device,
            attachment: context.attachment[pair].clone(),
            counters: Arc::clone(&context.counters[pair]),
        }
    }

    /// Starts a lane.
    fn run(&mut self, pair: usize, built: BuiltLane, context: &PortContext<'_>) {
        let BuiltLane { lane, facts, lent } = built;
        let at = self.give_to_worker(pair, lane, context);
        self.reached.ran = true;
        tracing::debug!(pair, worker = at.worker, mode = %facts.mode, "lane runs");
        self.lanes[pair] = Some(ActiveLane {
            at,
            wanted: self.placement_of(pair, context),
            facts: Arc::new(facts),
            lent,
        });
    }

    /// Gives a lane to the worker that it belongs to.
    fn give_to_worker(&self, pair: usize, mut lane: Box<dyn Lane>, context: &PortContext<'_>) -> LaneAt {
        let (cell, alarm) = (Arc::clone(&self.fault), self.connection.alarm.clone());
        let on_fault = Box::new(move |fault| report(&cell, fault, &alarm));
        let pair = u16::try_from(pair).unwrap_or(u16::MAX);
        let live = &context.live;
        drop(live.apply(&mut *lane, live.filter.for_a_lane(pair)));
        let attachment = context.attachment.get(usize::from(pair));
        let role = match attachment {
            Some(attachment) => attachment.role(context.name, pair),
            None => Role::Pair {
                port: Arc::clone(context.name),
                pair,
            },
        };
        let node = attachment.and_then(Attachment::node);
        let lane = NewLane {
            lane,
            role,
            node,
            on_fault,
        };
        context.workers.add(lane, context.name)
    }

    /// Moves a running lane to the worker that it belongs to, now that its pair is on or off.
    pub(super) fn change_worker(&mut self, pair: usize, context: &PortContext<'_>) {
        if let Some(active) = self.lanes[pair].take()
            && let Some(lane) = context.workers.remove(active.at)
        {
            let at = self.give_to_worker(pair, lane, context);
            self.lanes[pair] = Some(ActiveLane { at, ..active });
        }
    }

    pub(super) fn stop_pair(&mut self, pair: usize, workers: &Workers) {
        self.end_registration(pair);
        if let Some(active) = self.lanes[pair].take() {
            // First: its duplicate of the socket would keep a coupled queue bound, and the kernel would still write to
            // guest memory.
            drop(active.facts);
            let queue = self.stop_lane(pair, active.at, workers);
            if let (Some(queue), Some(lent)) = (queue, active.lent) {
                lent.give_back(queue);
            }
        }
    }

    /// Stops a lane; returns the NIC queue that was lent to it.
    fn stop_lane(&mut self, pair: usize, at: LaneAt, workers: &Workers) -> Option<NicQueue<XdpNic>> {
        let stopped = workers.remove(at)?.stop();
        if let Some(guest) = stopped.pair {
            self.device.keep_bases(pair, guest.bases);
            guest.calls.iter().for_each(|call| self.call(call, workers));
        }
        stopped.queue
    }

    /// Makes a pending call of a stopped lane.
    pub(super) fn call(&self, event: &OwnedFd, workers: &Workers) {
        let blocked = self.device.call_blocked();
        if !blocked.load(Relaxed) && !interrupt::write(event, &workers.watcher) {
            blocked.store(true, Relaxed);
            report(&self.fault, Fault::CallBlocks, &self.connection.alarm);
        }
    }
}

/// Sets the frame limit of a queue and its lane to the interface's. If the program cannot be updated, the next check
/// does it.
fn follow_limit(queue: &InterfaceQueue, lane: &ActiveLane, workers: &Workers) {
    let bytes = queue.interface.frame_limit();
    lane.change(workers, move |lane, _| lane.set_frame_limit(bytes));
    if let Err(error) = queue.follow_limit() {
        tracing::debug!(queue = queue.number, "frame limit: {}", with_sources(&error));
    }
}

/// Stores a fault, and wakes the thread that reads the VMM's connection. Called by a worker, or by the thread that
/// stopped the lane; does not wait.
pub(super) fn report(cell: &FaultCell, fault: Fault, alarm: &Alarm) {
    cell.locked().get_or_insert(fault);
    alarm.raise();
}
