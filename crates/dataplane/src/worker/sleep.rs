//! How a worker sleeps: which notifications it enables, what wakes it, and which guests' kicks it ignores.

use std::cmp::Reverse;
use std::mem::MaybeUninit;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, Event};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{EVENTS, FEW, FUTILE_WAKES, IGNORE_KICKS, NO_TIME, OFTEN, Worker};
use crate::lane::{LaneId, Work};
use crate::worker::slots::{NIC_EVENT, Slot};

/// Result of an attempt to sleep.
pub(super) enum Rest {
    /// The worker slept, for how long, and when it woke.
    Slept { asleep: Duration, woken: Instant },
    /// The worker did not sleep, because there is work.
    HasWork,
}

impl Worker {
    /// How long lanes with much traffic pause now.
    pub(super) fn pause(&mut self, now: Instant) -> Duration {
        let lanes = self.lanes.slots.iter_mut();
        let lanes = lanes.map(|slot| (slot.lane.carried(), &mut slot.share));
        self.moderation.look(now, lanes);
        self.moderation.pause()
    }

    /// Enables notifications of all lanes except those in a pause, and sleeps until an event. `is_sure`: the last round
    /// moved no frame; otherwise the worker does not sleep if a lane wants to be polled soon ([`Work::SOON`]).
    pub(super) fn rest(&mut self, now: Instant, is_sure: bool) -> Rest {
        let mut work = self.watch_again();
        let (pause, mut is_pause) = (self.pause(now), false);
        let mut next = 0;
        // A lane that was idle may have to enable notifications again, because other lanes wait for its buffers.
        while let Some(&at) = self.lanes.awake.get(next) {
            next += 1;
            let Slot {
                share,
                lane,
                is_quiet,
                ..
            } = &mut self.lanes.slots[at];
            *is_quiet = false;
            if share.begin(!pause.is_zero(), now, || lane.carried()) {
                is_pause = true;
                work = work.max(Work::Later(Reverse(pause)));
                continue;
            }
            self.progress.take_up(self.lanes.slots[at].id);
            let of_lane = self.lanes.enable_notifications(at).unwrap_or(Work::None);
            work = work.max(of_lane);
            let slot = &mut self.lanes.slots[at];
            slot.is_quiet = of_lane == Work::None && slot.may_sleep_on();
        }
        if let Work::Later(_) = work {
            // Some lanes may wait for room: let another lane be the first of the next round.
            self.shift();
        }
        // A command may have arrived since the worker checked, and `watch_again` may have consumed its event.
        if self.posted.load(Ordering::Relaxed) {
            work = Work::Now;
        }
        if work == Work::Now || (work == Work::SOON && !is_sure) {
            self.is_woken = true;
            self.sleeping.end(&mut self.lanes, &self.progress);
            self.disable_notifications();
            return Rest::HasWork;
        }
        self.sleeping.begin(&mut self.lanes);
        self.counters.sleeps.add(1);
        if is_pause {
            self.counters.pauses.add(1);
            self.moderation.note_pause();
        }
        let wait = match work {
            Work::Later(Reverse(wait)) => Some(wait),
            Work::None | Work::Now => None,
        };
        let limit = wait.and_then(|wait| Timespec::try_from(wait).ok());
        let (asleep, woken) = self.wait(limit.as_ref());
        self.is_woken = wait.is_none_or(|wait| asleep < wait);
        self.disable_notifications();
        Rest::Slept { asleep, woken }
    }

    /// Disables notifications of the lanes that are polled.
    fn disable_notifications(&mut self) {
        for &at in &self.lanes.awake {
            let slot = &mut self.lanes.slots[at];
            self.progress.take_up(slot.id);
            slot.lane.disable_notifications();
        }
    }

    /// Sleeps until a guest kicks, a command arrives, an awaited NIC has frames, or `limit` has passed. Returns the
    /// time asleep and the time of waking.
    pub(super) fn wait(&mut self, limit: Option<&Timespec>) -> (Duration, Instant) {
        if std::mem::take(&mut self.moved) > FEW {
            self.nic_wakes = 0;
        }
        // A lane with a NIC is never idle (slots::poll).
        for &at in &self.lanes.awake {
            self.lanes.slots[at].watch_nic(&self.epoll, self.nic_wakes >= OFTEN);
        }
        let nics = self
            .lanes
            .awake
            .iter()
            .filter_map(|&at| self.lanes.slots[at].polled_nic());
        let mut fds = emptied(std::mem::take(&mut self.polled));
        fds.extend(nics.map(|nic| PollFd::from_borrowed_fd(nic, PollFlags::IN)));
        self.progress.sleep();
        let before = Instant::now();
        self.counters.time.fall_asleep(before);
        // After EINTR, as with a ready descriptor, the worker polls its lanes again.
        let (mut limit, mut is_nic, mut has_events) = (limit, false, true);
        if !fds.is_empty() {
            fds.push(PollFd::new(&self.epoll, PollFlags::IN));
            let ready = poll(&mut fds, limit).unwrap_or_default();
            has_events = fds.last().is_some_and(|epoll| !epoll.revents().is_empty());
            is_nic = ready > 0 && !has_events;
            limit = Some(&NO_TIME);
        }
        self.polled = emptied(fds);
        let mut events = [MaybeUninit::<Event>::uninit(); EVENTS];
        let events = match has_events.then(|| epoll::wait(&self.epoll, &mut events, limit)) {
            Some(Ok((events, _))) => &*events,
            _ => &[],
        };
        let now = Instant::now();
        self.counters.time.wake(now);
        self.progress.wake();
        is_nic |= events.iter().any(|event| event.data.u64() == NIC_EVENT);
        self.nic_wakes = match is_nic {
            true => (self.nic_wakes + 1).min(2 * OFTEN),
            false => self.nic_wakes.saturating_sub(1),
        };
        self.note_wakes(events);
        self.wake(events);
        (now.duration_since(before), now)
    }

    /// Counts kicks that woke the worker, and ignores further kicks of a guest that kicks without frames.
    pub(super) fn note_wakes(&mut self, events: &[Event]) {
        for event in events {
            let Some(at) = self.place_of(LaneId(event.data.u64())) else {
                continue;
            };
            let slot = &mut self.lanes.slots[at];
            if slot.note_wake() > FUTILE_WAKES && slot.muted_until.is_none() {
                slot.unwatch_fds(&self.epoll);
                slot.muted_until = Some(Instant::now() + IGNORE_KICKS);
            }
        }
    }

    /// Watches the kicks of lanes again that were ignored for long enough. Returns how long the others allow to sleep.
    pub(super) fn watch_again(&mut self) -> Work {
        // A lane whose kicks are ignored is never idle: try_idle refuses it, and its kick has woken it before.
        if self
            .lanes
            .awake
            .iter()
            .all(|&at| self.lanes.slots[at].muted_until.is_none())
        {
            return Work::None;
        }
        let now = Instant::now();
        for &at in &self.lanes.awake {
            let slot = &mut self.lanes.slots[at];
            if slot.muted_until.is_some_and(|until| until <= now) {
                slot.watch_fds(&self.epoll);
                slot.muted_until = None;
            }
        }
        // An eventfd that was written meanwhile is reported at once. Lanes find the work of these events when they
        // enable notifications, and the worker checks for commands before it sleeps.
        let mut events = [MaybeUninit::<Event>::uninit(); EVENTS];
        if let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, Some(&NO_TIME)) {
            self.wake(events);
        }
        match self
            .lanes
            .awake
            .iter()
            .any(|&at| self.lanes.slots[at].muted_until.is_some())
        {
            true => Work::SOON,
            false => Work::None,
        }
    }
}

/// Empties the list, and keeps its memory for descriptors of another lifetime: no sleep allocates.
fn emptied<'a>(mut fds: Vec<PollFd<'_>>) -> Vec<PollFd<'a>> {
    fds.clear();
    // `collect` reuses the memory, since elements of both types have the same size.
    fds.into_iter().map(|_| unreachable!()).collect()
}
