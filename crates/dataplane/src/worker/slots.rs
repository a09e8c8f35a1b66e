//! The lanes of a worker: the state that the worker keeps for each of them, and how they reach each other.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::epoll::{self, EventData, EventFlags};

use crate::fdb::Fdb;
use crate::fdb::forwarding::{Forwarding, LaneRef};
use crate::guest::rx_queue::RxQueue;
use crate::host::to_tap::ToTap;
use crate::lane::new_lane::{NewLane, OnFault};
use crate::lane::role::Role;
use crate::lane::shared::{Busy, Shared, SharedGuard};
use crate::lane::spread::{LanesChange, SharedLane};
use crate::lane::{Lane, LaneId, Siblings, SlotAt, Uplink, Work};
use crate::worker::moderation::Share;
use crate::worker::statistics::LaneCounted;
use device::pair::Fault;

/// Polls without a frame after which a lane of a network tries to become idle: most guests of a network are idle, and
/// polling them would slow down the busy ones.
const IDLE_AFTER: u32 = 256;
/// Epoll data of the event that a NIC has frames; no lane has this number.
pub(crate) const NIC_EVENT: u64 = u64::MAX;
/// A bit: set with a lane's number, it is the epoll data of its [`Lane::event_fd`]; the number alone is that of its
/// kicks.
pub(crate) const EVENT_FD: u64 = 1 << 63;

/// A lane, and the state that its worker keeps for it.
pub(crate) struct Slot {
    pub(crate) id: LaneId,
    pub(crate) lane: Box<dyn Lane>,
    pub(crate) role: Role,
    /// Its part of the worker's counters.
    pub(crate) counted: Arc<LaneCounted>,
    /// Index of the slot that takes this lane's frames, if it delivers to one guest ([`crate::lane::role`]).
    pub(crate) target: Option<usize>,
    /// Reports a fault. Taken when it is called: a slot without it is no longer in the rounds.
    pub(crate) on_fault: Option<OnFault>,
    /// How often it woke the worker since it last moved a frame, or its guest got one.
    pub(crate) futile: u32,
    /// [`Lane::carried`] when it last woke the worker.
    carried: u64,
    /// Until this time its eventfds are not watched, and it cannot become idle.
    pub(crate) muted_until: Option<Instant>,
    /// Polls in a row in which no frame moved, and sleeps of its worker that it slept through.
    pub(crate) empty_polls: u32,
    /// Its part in pauses ([`crate::worker::moderation`]).
    pub(crate) share: Share,
    /// Its notifications are enabled, and it is not polled until a kick or frames from another lane arrive.
    pub(crate) is_idle: bool,
    /// It may stay asleep when its worker wakes from the next sleep.
    pub(crate) is_quiet: bool,
    /// The sleep of its worker with which it became idle ([`crate::worker::sleeping`]).
    pub(crate) asleep_since: Option<u32>,
    /// The worker's epoll set has its NIC.
    is_nic_watched: bool,
    /// State of its guest, as other lanes know it.
    guest: GuestState,
    /// How often that has changed.
    pub(crate) changes: u32,
}

/// State of a lane's guest that other lanes keep a copy of.
#[derive(Default, PartialEq)]
struct GuestState {
    receives: bool,
    /// Rules decide about its frames.
    is_filtered: bool,
    /// The address of its rate limit.
    limit: Option<usize>,
}

/// Result of a poll of one lane.
pub(crate) struct Polled {
    /// Frames that moved.
    pub(crate) frames: usize,
    /// This lane or another one left the rounds.
    pub(crate) left: bool,
}

impl Slot {
    pub(crate) fn new(id: LaneId, new: NewLane) -> Self {
        let mut slot = Self {
            id,
            lane: new.lane,
            role: new.role,
            counted: Arc::default(),
            target: None,
            on_fault: Some(new.on_fault),
            futile: 0,
            carried: 0,
            muted_until: None,
            empty_polls: 0,
            share: Share::default(),
            is_idle: false,
            is_quiet: false,
            asleep_since: None,
            is_nic_watched: false,
            guest: GuestState::default(),
            changes: 0,
        };
        slot.refresh();
        slot
    }

    /// Looks at its guest again; returns whether that receives, if others have to know of a change.
    pub(crate) fn refresh(&mut self) -> Option<bool> {
        let receives = self.lane.receives();
        let rx = self.lane.rx().and_then(Shared::lock);
        let guest = GuestState {
            receives,
            is_filtered: rx.as_ref().is_some_and(|rx| rx.filter.is_some()),
            limit: rx
                .as_ref()
                .and_then(|rx| Some(Arc::as_ptr(rx.limit.as_ref()?).addr())),
        };
        drop(rx);
        let has_changed = guest != self.guest;
        self.guest = guest;
        self.changes = self.changes.wrapping_add(u32::from(has_changed));
        has_changed.then_some(receives)
    }

    /// Counts that it woke the worker; returns how often it did since it last moved a frame.
    pub(crate) fn note_wake(&mut self) -> u32 {
        let carried = self.lane.carried();
        // Other lanes may have delivered to its guest.
        if std::mem::replace(&mut self.carried, carried) != carried {
            self.futile = 0;
        }
        self.futile += 1;
        self.futile
    }

    /// Ends its idle time because there is work: it is polled again. Returns whether it was idle.
    pub(crate) fn wake(&mut self) -> bool {
        self.empty_polls = 0;
        self.end_idle()
    }

    /// The same without any work for it: the count of empty polls continues.
    pub(crate) fn end_idle(&mut self) -> bool {
        self.asleep_since = None;
        if self.is_idle {
            self.lane.disable_notifications();
        }
        std::mem::take(&mut self.is_idle)
    }

    /// Whether it may stay asleep when its worker wakes: it has no NIC, its kicks are watched, and lanes that deliver
    /// frames to it wake it, as those of a network do.
    pub(crate) fn may_sleep_on(&self) -> bool {
        self.role.network().is_some() && self.lane.nic().is_none() && self.muted_until.is_none()
    }

    /// Whether it is in the rounds.
    #[inline]
    pub(crate) fn is_in_rounds(&self) -> bool {
        self.on_fault.is_some()
    }

    /// Whether its guest receives frames, and it is in the rounds.
    fn receives(&self) -> bool {
        self.is_in_rounds() && self.guest.receives
    }

    /// Shows the lane's descriptors for the worker's epoll set, each with its event data.
    fn event_fds(&self, show: &mut dyn FnMut(BorrowedFd<'_>, u64)) {
        self.lane.kicks(&mut |kick| show(kick, self.id.0));
        if let Some(fd) = self.lane.event_fd() {
            show(fd, self.id.0 | EVENT_FD);
        }
    }

    /// Adds its descriptors to the worker's epoll set.
    pub(crate) fn watch_fds(&self, epoll: &OwnedFd) {
        self.event_fds(&mut |fd, number| {
            let flags = EventFlags::IN | EventFlags::ET;
            // A descriptor that cannot be watched (a regular file as kick fd) is only polled.
            let _ = epoll::add(epoll, fd, EventData::new_u64(number), flags);
        });
    }

    pub(crate) fn unwatch_fds(&self, epoll: &OwnedFd) {
        self.event_fds(&mut |fd, _| _ = epoll::delete(epoll, fd));
    }

    /// Adds its NIC to the epoll set of a worker that is about to sleep, if `is_wanted` and frames that arrive have to
    /// wake the lane; removes it otherwise, as the set reports each frame.
    pub(crate) fn watch_nic(&mut self, epoll: &OwnedFd, is_wanted: bool) {
        if !(is_wanted && self.awaits_nic() && self.lane.has_edges()) {
            return self.unwatch_nic(epoll);
        }
        if !self.is_nic_watched
            && let Some(nic) = self.lane.nic()
        {
            let flags = EventFlags::IN | EventFlags::ET;
            self.is_nic_watched = epoll::add(epoll, nic, EventData::new_u64(NIC_EVENT), flags).is_ok();
        }
    }

    /// Removes its NIC from the epoll set. Called before the lane gets another NIC, too.
    pub(crate) fn unwatch_nic(&mut self, epoll: &OwnedFd) {
        if std::mem::take(&mut self.is_nic_watched)
            && let Some(nic) = self.lane.nic()
        {
            let _ = epoll::delete(epoll, nic);
        }
    }

    /// The NIC that a sleeping worker has to poll because its epoll set does not have it.
    pub(crate) fn polled_nic(&self) -> Option<BorrowedFd<'_>> {
        let is_polled = !self.is_nic_watched && self.awaits_nic();
        is_polled.then(|| self.lane.nic()).flatten()
    }

    /// Whether frames that arrive have to wake it.
    fn awaits_nic(&self) -> bool {
        self.is_in_rounds() && !self.share.is_let_alone() && self.lane.awaits_nic()
    }

    /// Removes the lane from the rounds if a call to its guest blocked the worker. It makes no further calls then.
    pub(crate) fn check_calls(&mut self) {
        if self.lane.call_blocks() {
            self.report(Fault::CallBlocks);
        }
    }

    /// Removes the lane from the rounds after a fault of its guest. Its queues are not used any more, not even when the
    /// lane is stopped.
    pub(crate) fn fail(&mut self, fault: Fault) {
        self.lane.change_vrings(&mut |_, vring| vring.enabled = false);
        self.report(fault);
    }

    fn report(&mut self, fault: Fault) {
        if let Some(on_fault) = self.on_fault.take() {
            on_fault(fault);
        }
    }
}

/// The lanes of a worker, and what they need to reach each other and lanes of other workers.
#[derive(Default)]
pub(crate) struct Lanes {
    /// Number of the worker.
    pub(crate) number: usize,
    /// Its lanes, sorted by id.
    pub(crate) slots: Vec<Slot>,
    /// Indices of the lanes that are not idle. Rounds and sleeps visit only these, so that idle guests cost the others
    /// nothing.
    pub(crate) awake: Vec<usize>,
    /// By network: its FDB.
    pub(crate) fdbs: HashMap<Arc<str>, Arc<Fdb>>,
    /// Networks' lanes of other workers. In the forwarding state their indices follow those of the worker's own lanes.
    pub(crate) remote: Vec<SharedLane>,
}

impl Lanes {
    /// Polls the lane at an index; `None`: it is not in the rounds. Lanes that are no longer idle are added to `awake`.
    #[inline]
    pub(crate) fn poll(&mut self, at: usize) -> Option<Polled> {
        let (slot, mut others) = Others::of(self, at)?;
        let mut can_idle = false;
        let frames = match slot.lane.poll(&mut others) {
            Ok(0) => {
                // A NIC wakes a lane only while its worker sleeps, too.
                can_idle = slot.role.may_idle() && slot.lane.nic().is_none();
                0
            }
            Ok(frames) => {
                (slot.futile, slot.empty_polls) = (0, 0);
                slot.share.moved();
                slot.check_calls();
                others.left |= !slot.is_in_rounds();
                frames
            }
            Err(fault) => {
                slot.fail(fault);
                others.left = true;
                0
            }
        };
        let left = others.left;
        drop(others);
        if can_idle {
            slot.empty_polls += 1;
            if slot.empty_polls >= IDLE_AFTER {
                slot.empty_polls = 0;
                self.try_idle(at);
            }
        }
        Some(Polled { frames, left })
    }

    /// Makes the lane at an index idle, if it has no work.
    #[cold]
    fn try_idle(&mut self, at: usize) {
        // The worker ignores its kicks now, and a worker that never sleeps would not begin to watch them again.
        if self.slots[at].muted_until.is_some() {
            return;
        }
        let is_quiet = self.enable_notifications(at) == Some(Work::None);
        let slot = &mut self.slots[at];
        match is_quiet {
            true => {
                slot.is_idle = true;
                self.awake.retain(|&other| other != at);
            }
            false => slot.lane.disable_notifications(),
        }
    }

    /// Enables notifications of the lane at an index; `None`: it is not in the rounds. Lanes that are no longer idle are
    /// added to `awake`.
    pub(crate) fn enable_notifications(&mut self, at: usize) -> Option<Work> {
        let (slot, mut others) = Others::of(self, at)?;
        slot.check_calls();
        Some(slot.lane.enable_notifications(&mut others))
    }

    /// Changes the lane at an index; returns whether another one left the rounds.
    pub(crate) fn change(
        &mut self,
        at: usize,
        change: impl FnOnce(&mut dyn Lane, &mut dyn Siblings),
    ) -> bool {
        let (slot, mut others) = Others::around(self, at);
        change(&mut *slot.lane, &mut others);
        others.left
    }

    /// Applies a change of the lanes of other workers.
    pub(crate) fn change_remote(&mut self, change: LanesChange) {
        match change {
            LanesChange::Add(lane) => self.remote.push(lane),
            LanesChange::Remove(id) => self.remote.retain(|lane| lane.id != id),
            LanesChange::Refresh(id, receives) => {
                if let Some(lane) = self.remote.iter_mut().find(|lane| lane.id == id) {
                    lane.receives = receives;
                    lane.changes = lane.changes.wrapping_add(1);
                }
            }
        }
    }

    /// Recomputes the lanes' targets and the networks' forwarding state. It visits each lane, but none of their guests.
    #[cold]
    pub(crate) fn rebuild_forwarding(&mut self) {
        self.find_targets();
        let mut sharing: HashMap<_, Vec<_>> = HashMap::new();
        for (own, all) in self.forwardings() {
            if let Some((underlay, number)) = &all.fdb.shares {
                let its = sharing.entry(underlay.clone()).or_default();
                its.push((*number, Arc::clone(&all)));
            }
            for at in own {
                let slot = &mut self.slots[at];
                match &slot.role {
                    Role::Host { .. } => slot.lane.set_forwarding(&Arc::new(all.without_host())),
                    Role::UplinkTap { .. } => slot.lane.set_forwarding(&Arc::new(all.without_ways_out())),
                    _ => slot.lane.set_forwarding(&all),
                }
            }
        }
        for slot in &mut self.slots {
            if let Some(underlay) = slot.role.underlay() {
                slot.lane
                    .set_sharing(sharing.get(underlay).cloned().unwrap_or_default());
            }
        }
    }

    /// Sets the lanes' targets. Lanes of networks neither have targets nor are any.
    fn find_targets(&mut self) {
        let receivers = self.slots.iter().enumerate();
        let receivers = receivers.filter(|(_, slot)| slot.role.network().is_none() && slot.receives());
        let receivers: HashMap<_, _> = receivers.map(|(at, slot)| (slot.role.clone(), at)).collect();
        for slot in self.slots.iter_mut().filter(|slot| slot.role.network().is_none()) {
            let wanted = slot.role.targets(slot.guest.receives);
            let mut wanted = wanted.iter().flatten();
            slot.target = wanted.find_map(|role| receivers.get(role).copied());
        }
    }

    /// The forwarding state of each network of which frames arrive here, with the indices of its lanes of this worker.
    fn forwardings(&self) -> Vec<(Vec<usize>, Arc<Forwarding>)> {
        let mut networks: BTreeMap<&str, Vec<usize>> =
            self.fdbs.keys().map(|network| (&**network, Vec::new())).collect();
        for at in 0..self.slots.len() + self.remote.len() {
            if let Some(network) = self.role(at).network() {
                networks.entry(network).or_default().push(at);
            }
        }
        let of_network = |(&network, its): (&&str, &Vec<usize>)| {
            let fdb = self.fdbs.get(network).cloned().unwrap_or_default();
            let mut lanes = its.clone();
            if let Some((underlay, _)) = &fdb.shares {
                let owners = networks.get(&*underlay.network).into_iter().flatten();
                lanes.extend(owners.filter(|at| self.role(**at).underlay() == Some(underlay)));
            }
            let is_own = |at: &usize| *at < self.slots.len();
            let is_here = lanes.iter().any(is_own);
            let own = its.iter().copied().take_while(is_own).collect();
            is_here.then(|| (own, Arc::new(self.forwarding_of(fdb, &lanes))))
        };
        networks.iter().filter_map(of_network).collect()
    }

    /// The forwarding state with these lanes.
    fn forwarding_of(&self, fdb: Arc<Fdb>, lanes: &[usize]) -> Forwarding {
        let (mut members, mut others) = (Vec::with_capacity(lanes.len()), Vec::new());
        for &at in lanes {
            match self.lane(at) {
                (Role::Member { port, .. }, lane, receives) => members.push((*port, lane, receives)),
                (role, lane, _) => others.push((role, lane)),
            }
        }
        members.sort_by_key(|(port, lane, _)| (*port, lane.pair));
        let mut forwarding = Forwarding::new(fdb, &members);
        // Lanes of other workers are the way out only where this worker has none.
        let has_own =
            |is_it: fn(&Role) -> bool| others.iter().any(|(role, lane)| !lane.is_remote && is_it(role));
        let has_uplink = has_own(|role| matches!(role, Role::Uplink { .. }));
        let has_underlay = has_own(|role| matches!(role, Role::Underlay { .. }));
        let has_host = has_own(|role| matches!(role, Role::Host { .. }));
        for &(role, lane) in &others {
            match role {
                Role::Uplink { .. } if !lane.is_remote || !has_uplink => forwarding.uplinks.push(lane.at),
                Role::Underlay { .. } if !lane.is_remote || !has_underlay => {
                    forwarding.underlays.push(lane.at);
                }
                Role::Host { .. } if !lane.is_remote || !has_host => forwarding.host = Some(lane),
                Role::UplinkTap { .. } if !lane.is_remote || forwarding.wire.is_none() => {
                    forwarding.wire = Some(lane);
                }
                _ => {}
            }
        }
        forwarding
    }

    /// The role of the lane at an index in the forwarding state.
    fn role(&self, at: usize) -> &Role {
        match self.slots.get(at) {
            Some(slot) => &slot.role,
            None => &self.remote[at - self.slots.len()].role,
        }
    }

    /// The lane at an index in the forwarding state, and whether its guest receives.
    fn lane(&self, at: usize) -> (&Role, LaneRef, bool) {
        let slot = self.slots.get(at);
        let (role, id, changes, receives) = match slot {
            Some(slot) => (&slot.role, slot.id, slot.changes, slot.receives()),
            None => {
                let lane = &self.remote[at - self.slots.len()];
                (&lane.role, lane.id, lane.changes, lane.receives)
            }
        };
        let lane = LaneRef {
            at: SlotAt(at),
            id,
            pair: role.pair(),
            is_remote: slot.is_none(),
            changes,
        };
        (role, lane, receives)
    }
}

/// All slots of a worker but one, and the lanes of other workers.
struct Others<'a> {
    front: &'a mut [Slot],
    back: &'a mut [Slot],
    /// See [`Slot::target`] of the excluded one.
    target: Option<usize>,
    /// One of the lanes left the rounds.
    left: bool,
    /// Lanes that are no longer idle are added here.
    awake: &'a mut Vec<usize>,
    remote: &'a [SharedLane],
    /// The last one of these that was delivered to.
    touched: Option<&'a SharedLane>,
}

impl<'a> Others<'a> {
    /// The slot at an index, if it is in the rounds, and the other slots.
    #[inline]
    fn of(lanes: &'a mut Lanes, at: usize) -> Option<(&'a mut Slot, Self)> {
        lanes.slots[at].is_in_rounds().then(|| Self::around(lanes, at))
    }

    #[inline]
    fn around(lanes: &'a mut Lanes, at: usize) -> (&'a mut Slot, Self) {
        let Lanes {
            slots, awake, remote, ..
        } = lanes;
        let (front, rest) = slots.split_at_mut(at);
        let (slot, back) = rest.split_at_mut(1);
        let others = Self {
            front,
            back,
            target: slot[0].target,
            left: false,
            awake,
            remote,
            touched: None,
        };
        (&mut slot[0], others)
    }

    /// The slot at an index other than that of the excluded lane.
    #[inline]
    fn slot(&mut self, at: usize) -> &mut Slot {
        match at.checked_sub(self.front.len() + 1) {
            Some(at) => &mut self.back[at],
            None => &mut self.front[at],
        }
    }

    /// The slot at an index, if it is in the rounds. `None` for the excluded lane, whose guest may send to itself.
    #[inline]
    fn other(&mut self, at: SlotAt) -> Option<&mut Slot> {
        let slot = (at.0 != self.front.len()).then(|| self.slot(at.0));
        slot.filter(|slot| slot.is_in_rounds())
    }

    /// The lane of another worker at an index.
    #[inline]
    fn remote(&self, at: SlotAt) -> Option<&'a SharedLane> {
        let own = self.front.len() + 1 + self.back.len();
        self.remote.get(at.0.checked_sub(own)?)
    }

    /// The receive queue of a lane of another worker.
    #[inline(never)]
    fn remote_guest(&mut self, lane: &'a SharedLane) -> Option<SharedGuard<'_, RxQueue>> {
        if self.touched.is_none_or(|touched| touched.id != lane.id) {
            self.leave_touched();
        }
        let rx = lane.rx.as_ref()?.lock().filter(|rx| rx.vring.enabled)?;
        self.touched = Some(lane);
        Some(rx)
    }

    /// See [`SharedLane::leave`].
    #[inline]
    fn leave_touched(&mut self) {
        if let Some(touched) = self.touched.take() {
            touched.leave();
        }
    }
}

impl Drop for Others<'_> {
    #[inline]
    fn drop(&mut self) {
        self.leave_touched();
    }
}

impl Siblings for Others<'_> {
    fn target(&self) -> Option<SlotAt> {
        self.target.map(SlotAt)
    }

    fn guest(&mut self, at: SlotAt) -> Option<SharedGuard<'_, RxQueue>> {
        if let Some(lane) = self.remote(at) {
            return self.remote_guest(lane);
        }
        let slot = self.other(at)?;
        let woke = slot.wake();
        slot.check_calls();
        let is_left = !slot.is_in_rounds();
        if woke {
            self.awake.push(at.0);
        }
        if is_left {
            self.left = true;
            return None;
        }
        self.other(at)?.lane.rx()?.lock()
    }

    fn uplink(&mut self, at: SlotAt) -> Uplink<'_> {
        let (queue, is_remote) = match self.remote(at) {
            // Does not wait for long: the queue's own worker may have it for as long as a system call takes.
            Some(lane) => match lane.uplink.as_ref().map(Shared::lock_soon) {
                Some(Err(Busy)) => return Uplink::Busy,
                queue => (queue.and_then(Result::ok).flatten(), true),
            },
            None => {
                let queue = self.other(at).and_then(|slot| slot.lane.uplink());
                (queue.and_then(Shared::lock), false)
            }
        };
        queue.map_or(Uplink::None, |queue| Uplink::Queue { queue, is_remote })
    }

    fn tap(&mut self, at: SlotAt) -> Option<SharedGuard<'_, ToTap>> {
        let tap = match self.remote(at) {
            Some(lane) => lane.tap.as_ref(),
            None => self.other(at)?.lane.tap(),
        };
        tap?.lock()
    }

    fn blame(&mut self, at: SlotAt, fault: Fault) {
        if let Some(lane) = self.remote(at) {
            lane.blame(fault);
        } else if let Some(slot) = self.other(at) {
            slot.fail(fault);
            self.left = true;
        }
    }
}
