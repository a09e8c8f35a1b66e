//! The lane of a guest's queue pair. In a network it sends frames to other ports, the uplink and the host, by their
//! addresses. Outside of networks they have one destination ([`Route`]), and are checked only if the port has a source
//! guard, filter rules or a rate limit ([`checks`]). Taps of a network have such a lane, too ([`From`]).
//!
//! In a network a batch takes two steps. First all its chains are classified: the lane copies the first bytes of each
//! frame out of guest memory, and decides from that copy whether the guest may send the frame, and where it goes. Then
//! it passes on runs of frames with the same destination. The checked bytes are the sent ones: the copy replaces the
//! bytes in guest memory, which the guest may have changed meanwhile.
//!
//! A frame to another port, of any worker, is copied once, from RAM to RAM, with its segmentation and checksum
//! request ([`Passing`]), and so is one to the host ([`crate::host::to_tap`]). A frame to the uplink is copied
//! into a chunk, and segmented if it requests that ([`crate::backend::to_nic`]); the uplink's lane has the
//! kernel send the frames of all lanes ([`crate::uplink::uplink_lane`]). Frames to other hosts of a tunnel (VXLAN,
//! Geneve) may leave by the NIC below the uplink ([`remote`]).
//!
//! A pair may have a queue of a NIC for itself ([`OwnQueue`]): then its frames to the LAN leave through it, and frames
//! that it receives are for the pair's guest. While the pair is disabled, they go to the port's first pair, which is
//! always enabled (VirtIO 1.3, 5.1.6.5.5).
//!
//! A frame waits in its sender's queue until the destination has room, but not for long: while a guest takes no frames
//! for some time, further frames to it are dropped ([`Passing::may_wait`]). Multicast waits for no guest.

pub(crate) mod batch;
pub(crate) mod checks;
pub(crate) mod classified;
pub(crate) mod copies;
pub(crate) mod exits;
pub(crate) mod filtered;
pub(crate) mod hairpin;
pub(crate) mod known;
pub(crate) mod learning;
pub(crate) mod mirror;
pub(crate) mod of_tap;
pub(crate) mod remote;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use device::counters::{Counter, PairCounters};
use device::pair::{Direction, Fault, QueuePair, Vring};

use self::classified::{Classified, with_tag};
use self::copies::pass_copy;
use self::remote::Underlay;
use crate::backend::own_queue::{NoQueue, OwnQueue};
use crate::backend::receiver::Receive;
use crate::backend::to_nic::Transmit;
use crate::fdb::forwarding::{Forwarding, LaneRef};
use crate::fdb::{Destination, PortNumber};
use crate::guest::copies::write_announcement;
use crate::guest::from_guest::{Budget, Sender};
use crate::guest::guest_frame::GuestFrame;
use crate::guest::passing::{Passed, Passing};
use crate::guest::rx_queue::RxQueue;
use crate::lane::limits::BATCH;
use crate::lane::shared::{Shared, Waits};
use crate::lane::{Lane, Siblings, SlotAt, Stopped, Work, enable_kicks};
use crate::nic::hints::XdpMetadata;
use crate::nic::queue::Nic;
use crate::policy::filter::{Acl, LaneFilter};
use crate::policy::guard::Guard;
use crate::policy::rate_limit::{Cost, PortLimits};

/// A counter of a guest.
type CounterOf = fn(&PairCounters) -> &Counter;

/// Counts frames to addresses that no port has.
const NO_FDB_ENTRY: CounterOf = |counters| &counters.from_guest_no_station;

/// Numbers of the port and the pair of a lane that has neither.
const NO_PORT: (PortNumber, u16) = (PortNumber(u16::MAX), 0);

/// See the module's head.
pub struct PortLane<O = NoQueue> {
    /// The guest's transmit queue.
    from_guest: Vring,
    /// The guest's receive queue.
    to_guest: Shared<RxQueue>,
    /// See [`RxQueue::waits`].
    rx_waits: Waits,
    /// The kick eventfd of the receive queue.
    rx_kick: Option<OwnedFd>,
    counters: Arc<PairCounters>,
    number: PortNumber,
    /// The pair's number within the port.
    pair_number: u16,
    forwarding: Arc<Forwarding>,
    sender: Sender,
    /// The first `classified` belong to the present batch. Written in place: a value that is built elsewhere and moved
    /// here is stored in pieces and loaded as a whole, which waits for the stores.
    chains: Box<[Classified]>,
    classified: usize,
    /// By classified chain: what it took of the port's rate limit, if there is one.
    costs: Vec<Cost>,
    /// State of its frames to the uplink.
    transmit: Transmit,
    /// State of its frames to other hosts that it encapsulates.
    underlay: Underlay,
    /// Its own NIC queue, if it has one: its frames to the LAN leave through that.
    own: O,
    /// Identifies the sender of copies to promiscuous ports: pending frames identify senders by the address of their
    /// counters. Never read: errors of a frame were counted when it was sent to its destination.
    uncounted: Box<PairCounters>,
    /// Which frames its guest may send; `None`: all.
    filter: Option<Box<Acl>>,
    route: Route,
    /// Which source addresses its guest may use, outside of networks; `None`: any.
    guard: Option<Box<Guard>>,
    /// A frame of its guest waits for room.
    waits: bool,
    /// It waits only until another worker has unlocked the uplink's queue.
    is_locked_out: bool,
    from: From,
}

/// Destination of a lane's frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    /// The FDB of its network decides.
    Fdb,
    /// All go to the lane's own NIC queue.
    OwnQueue,
    /// All go to the guest at the other end of a cable.
    Cable,
}

/// Origin of a lane's frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum From {
    Guest,
    /// A tap: that of the host, or that of the uplink in tap mode.
    Tap,
}

/// A lane's batch, and the other lanes that its frames may go to.
struct Batch<'a> {
    siblings: &'a mut dyn Siblings,
    budget: Budget,
    /// Chains that are done.
    done: usize,
    /// The fault of the lane's own guest, which ends the batch.
    fault: Option<Fault>,
}

impl PortLane {
    /// The lane of a port's pair; `of`: the numbers of both.
    pub fn new(pair: QueuePair, counters: Arc<PairCounters>, of: (PortNumber, u16)) -> Self {
        Self::with_queue(pair, counters, of, NoQueue)
    }

    /// The lane of a pair of a port that a cable connects to another one (`--cable`).
    pub fn of_cable(pair: QueuePair, counters: Arc<PairCounters>) -> Self {
        Self {
            route: Route::Cable,
            sender: Sender::default(),
            ..Self::new(pair, counters, NO_PORT)
        }
    }

    /// The lane of a tap ([`crate::host::tap_lane`]).
    pub(crate) fn of_tap(pair: QueuePair, counters: Arc<PairCounters>) -> Self {
        let lane = Self {
            from: From::Tap,
            ..Self::new(pair, counters, NO_PORT)
        };
        if let Some(mut rx) = lane.to_guest.lock() {
            rx.is_tap = true;
        }
        lane
    }
}

impl<O: OwnQueue> PortLane<O> {
    /// The lane of a pair that has a NIC queue for itself, outside of networks.
    pub fn alone(pair: QueuePair, counters: Arc<PairCounters>, own: O) -> Self {
        Self {
            route: Route::OwnQueue,
            sender: Sender::default(),
            ..Self::with_queue(pair, counters, NO_PORT, own)
        }
    }

    /// The lane of a port's pair, with the NIC queue that the pair has for itself.
    pub fn with_queue(
        pair: QueuePair,
        counters: Arc<PairCounters>,
        (number, pair_number): (PortNumber, u16),
        own: O,
    ) -> Self {
        let mut queue = RxQueue::new(pair.to_guest, Arc::clone(&counters));
        let rx_kick = queue.vring.kick.take();
        Self {
            rx_waits: queue.waits.clone(),
            rx_kick,
            to_guest: Shared::new(queue),
            from_guest: pair.from_guest,
            counters,
            number,
            pair_number,
            forwarding: Arc::default(),
            sender: Sender::shared(),
            chains: (0..BATCH).map(|_| Classified::NOTHING).collect(),
            classified: 0,
            costs: Vec::with_capacity(BATCH),
            transmit: Transmit::shared(),
            underlay: Underlay::default(),
            own,
            uncounted: Box::default(),
            filter: None,
            route: Route::Fdb,
            guard: None,
            waits: false,
            is_locked_out: false,
            from: From::Guest,
        }
    }

    /// Whether nothing waits: neither frames of other guests for buffers, nor the rest of a GSO packet for room.
    pub(crate) fn is_idle(&self) -> bool {
        !self.rx_waits.is_set() && !self.has_rest()
    }

    /// The port that sends its frames; `None`: they come from the host, or in tap mode from the wire.
    #[inline]
    fn source(&self) -> Option<PortNumber> {
        (self.from == From::Guest).then_some(self.number)
    }

    /// Passes a run of frames to a port.
    fn to_port(&mut self, port: PortNumber, run: usize, batch: &mut Batch<'_>) {
        if port == self.number {
            return self.to_itself(run, batch);
        }
        let (guest, run) = self.lane_for(port, batch.done, run);
        let Some(guest) = guest else {
            // The port's guest may still be on another host, or on another one by now.
            if self.from == From::Guest
                && let Some(&to) = self.chains[batch.done].head.first_chunk()
                && let Destination::Remote(vtep) = self.forwarding.fdb.find_remote(to)
            {
                return self.to_remote(vtep, 1, batch);
            }
            return match self.from == From::Guest || self.forwarding.is_absent(port) {
                true => self.leave(run, batch, |counters| &counters.from_guest_no_peer),
                false => self.lose(run, batch, |counters| &counters.from_guest_no_peer),
            };
        };
        let is_tagged = self.forwarding.is_tagged(port);
        match self.pass_to(guest.at, is_tagged, run, batch) {
            Ok(true) => {}
            Ok(false) => self.lose(run, batch, |counters| &counters.from_guest_no_peer),
            Err(fault) => batch.siblings.blame(guest.at, fault),
        }
    }

    /// Which lane of a port takes the next frame of a run to it, and how many of the run that one takes.
    #[inline]
    fn lane_for(&self, port: PortNumber, first: usize, run: usize) -> (Option<LaneRef>, usize) {
        match self.forwarding.lanes(port) {
            [] => (None, run),
            [one] => (Some(*one), run),
            _ => {
                let lane = |at: usize| self.forwarding.lane_for(port, self.chains[at].flow());
                let one = lane(first);
                let others = (first + 1..first + run).take_while(|&at| lane(at) == one);
                (one, 1 + others.count())
            }
        }
    }

    /// Passes a run of frames to the lane at an index; false: its guest takes no frames.
    /// Errors: that guest's fault.
    fn pass_to(
        &mut self,
        at: SlotAt,
        is_tagged: bool,
        run: usize,
        batch: &mut Batch<'_>,
    ) -> Result<bool, Fault> {
        let Some(mut target) = batch.siblings.guest(at) else {
            return Ok(false);
        };
        let mut passing = Passing::begin(&mut target, run)?;
        let (budget, done) = (&mut batch.budget, &mut batch.done);
        let (first, end) = (*done, *done + run.min(self.own.places()));
        self.pass_whole(&mut passing, is_tagged, end, (budget, done));
        let passed = self.pass_each(&mut passing, is_tagged, end, (budget, done));
        let chains = &self.sender.chains.chains[first..*done];
        self.own.give_back(&mut self.from_guest, chains);
        passed?;
        budget.charge_look_ups(passing.take_work());
        passing.finish();
        Ok(true)
    }

    /// Passes the next frames, before `end`, with what they request; the caller returns their chains.
    /// Errors: the fault of the guest that receives them.
    #[inline]
    fn pass_each(
        &mut self,
        passing: &mut Passing<'_>,
        is_tagged: bool,
        end: usize,
        (budget, done): (&mut Budget, &mut usize),
    ) -> Result<(), Fault> {
        while self.goes_on(*done, end, budget) {
            let (entry, chain) = (&self.chains[*done], self.sender.chains.chains[*done]);
            let buffers = self.sender.chains.buffers(&chain);
            if let Some(frame) = entry.frame(&self.from_guest, buffers) {
                let passed = with_tag(entry, frame, is_tagged, |frame| {
                    passing.pass(frame, &self.counters)
                })?;
                match passed {
                    Passed::Later if passing.may_wait() => {
                        self.waits = true;
                        self.counters.from_guest_waits.add(1);
                        break;
                    }
                    passed => passed.charge(budget, frame.sending.len),
                }
            }
            budget.charge_descriptors(buffers.len());
            *done += 1;
        }
        Ok(())
    }

    /// The common case of [`Self::pass_each`]: passes the next frames as long as they need nothing but a copy. Leaves the
    /// first other one, and those behind it. The caller returns the chains, too. A separate function, so that the loop has
    /// all registers.
    #[inline(never)]
    fn pass_whole(
        &self,
        passing: &mut Passing<'_>,
        is_tagged: bool,
        end: usize,
        (budget, done): (&mut Budget, &mut usize),
    ) {
        // At most the classified ones. Descriptors beyond the budget become a deficit ([`Sender::charge`]).
        let (most, most_bytes) = budget.left();
        let next = *done..end.min(done.saturating_add(most));
        let taken = &self.sender.chains;
        let (count, memory) = (next.len(), &self.from_guest.guest.memory);
        let most = || Cost::most(count, self.from_guest.guest.frame_limit);
        let frames = self.chains[next.clone()].iter().zip(&taken.chains[next]);
        let frames =
            frames.map_while(|(entry, chain)| entry.whole(is_tagged, &self.from_guest, taken.buffers(chain)));
        let (count, bytes) = passing.pass_whole(memory, frames, (most_bytes, most), &self.counters);
        budget.charge_descriptors(taken.count_buffers(*done..*done + count));
        budget.tally.add_all(count as u64, bytes);
        *done += count;
    }

    /// Passes a multicast frame to the uplink, to the host, to all other ports that receive, and to the port itself if
    /// it has hairpin. In tap mode, a frame that asks for a MAC address is written to the uplink's tap, so that the
    /// kernel's programs can leave it to a bridge that knows the answer (`bpf/tap.bpf.c`).
    fn to_multicast(&mut self, batch: &mut Batch<'_>) {
        let first = batch.done;
        let from = self.source();
        let wire = self.forwarding.wire;
        let wire = wire.filter(|_| from.is_some() && self.chains[first].may_ask());
        let has_uplink = from.is_some() && wire.is_none() && self.put_to_nic(1, batch).is_some();
        if batch.done == first && (has_uplink || (wire.is_none() && self.wait_for_uplink())) {
            return;
        }
        if let Some((entry, frame)) = self.frame_at(first) {
            self.counters.from_guest_multicast_frames.add(1);
            if !has_uplink {
                batch.budget.tally.add(frame.sending.len);
            }
            let mut copies = 0;
            let host = self.forwarding.host.filter(|_| from.is_some());
            let ports = self.forwarding.ports_of(entry.vlan, from);
            let ports = ports.map(|(port, guest)| (guest, self.forwarding.is_tagged(port)));
            let taps = host.into_iter().chain(wire).map(|tap| (tap, true));
            for (guest, is_tagged) in taps.chain(ports) {
                with_tag(entry, frame, is_tagged, |frame| {
                    pass_copy(batch.siblings, guest.at, frame, &self.counters, &mut batch.budget);
                });
                copies += 1;
            }
            batch.budget.charge_copies(copies, frame.sending.len);
            let own = self.forwarding.fdb.port(self.number);
            if own.is_some_and(|own| own.options.hairpin && !own.options.unicast_only) {
                self.copy_to_itself(first, batch);
            }
        }
        if !has_uplink {
            self.next(&mut batch.budget, &mut batch.done);
        }
    }

    /// The frame of a chain of the batch, if it may be sent, and how it was classified.
    #[inline]
    fn frame_at(&self, at: usize) -> Option<(&Classified, GuestFrame<'_>)> {
        let (entry, taken) = (&self.chains[at], &self.sender.chains);
        let frame = entry.frame(&self.from_guest, taken.buffers(&taken.chains[at]))?;
        Some((entry, frame))
    }

    /// Returns the next chain to the guest.
    #[inline]
    fn next(&mut self, budget: &mut Budget, done: &mut usize) {
        let chain = self.sender.chains.chains[*done];
        budget.charge_descriptors(usize::from(chain.readable));
        self.own.give_back(&mut self.from_guest, &[chain]);
        *done += 1;
    }

    /// The number that spreads lanes over the uplink's queues.
    fn flow(&self) -> usize {
        usize::from(self.number.0)
    }
}

impl<O: OwnQueue> Lane for PortLane<O> {
    fn poll(&mut self, siblings: &mut dyn Siblings) -> Result<usize, Fault> {
        let mut moved = 0;
        if self.rx_waits.is_set()
            && let Some(mut rx) = self.to_guest.lock()
        {
            moved = rx.deliver_pending()?;
        }
        match O::IS_THERE {
            true => Ok(moved + self.poll_own(siblings)?),
            false => Ok(moved + self.send(siblings)?),
        }
    }

    fn enable_notifications(&mut self, siblings: &mut dyn Siblings) -> Work {
        let (held, frames) = enable_kicks(&self.sender.throttle, &mut self.from_guest);
        if frames && !self.waits && self.own.places() > 0 {
            return Work::Now;
        }
        if !frames {
            self.transmit.pause();
            self.own.pause();
        }
        let held = held.max(self.kick_untaken(siblings));
        let (mut own, mut buffers, mut receives) = (Work::None, false, true);
        if (O::IS_THERE || self.rx_waits.is_set() || self.rx_kick.is_none())
            && let Some(mut rx) = self.to_guest.lock()
        {
            receives = rx.vring.enabled;
            own = self.own.enable_notifications(&mut rx.vring);
            buffers = rx.pending.is_some() && receives && rx.vring.queue.enable_kicks();
        }
        // Inner queues have no kicks: this thread fills them. The queues of a guest without a kick eventfd have to be
        // polled.
        let is_polled =
            self.from == From::Guest && (self.from_guest.is_polled() || (receives && self.rx_kick.is_none()));
        // Received frames of a disabled pair wait for buffers of the port's first pair; a kick reports new ones.
        let spills = O::SHARES_BUFFERS
            && !receives
            && self.own.has_frames()
            && has_buffers(self.first_pair(siblings), siblings);
        let waits = match self.route {
            // A kick reports buffers at the other end. If it has some, they are fewer than the frame needs, and their
            // kick may have come already.
            Route::Cable => frames && has_buffers(siblings.target(), siblings),
            // No event reports room in the queue of another lane.
            Route::Fdb | Route::OwnQueue => frames,
        };
        let soon = match waits && self.is_locked_out {
            true => Work::LOCKED,
            false => Work::SOON,
        };
        match waits || buffers || self.has_rest() || is_polled || spills {
            true => own.max(held).max(soon),
            false => own.max(held),
        }
    }

    fn carried(&self) -> u64 {
        self.counters.carried()
    }

    fn receives(&self) -> bool {
        self.to_guest.lock().is_some_and(|rx| rx.vring.enabled)
    }

    fn call_blocks(&self) -> bool {
        self.from_guest.call.is_blocked()
    }

    fn kicks(&self, show: &mut dyn FnMut(BorrowedFd<'_>)) {
        let kicks = [&self.from_guest.kick, &self.rx_kick];
        kicks.into_iter().flatten().for_each(|kick| show(kick.as_fd()));
    }

    fn change_vrings(&mut self, change: &mut dyn FnMut(Direction, &mut Vring)) {
        change(Direction::FromGuest, &mut self.from_guest);
        if let Some(mut rx) = self.to_guest.lock() {
            change(Direction::ToGuest, &mut rx.vring);
        }
    }

    fn rx(&self) -> Option<&Shared<RxQueue>> {
        O::SHARES_BUFFERS.then_some(&self.to_guest)
    }

    fn nic(&self) -> Option<BorrowedFd<'_>> {
        self.own.parts()?.0.nic.fd()
    }

    fn awaits_nic(&self) -> bool {
        self.own
            .parts()
            .is_some_and(|(_, receiver)| receiver.awaits_nic())
    }

    fn has_edges(&self) -> bool {
        self.own.parts().is_some_and(|(queue, _)| queue.nic.has_edges())
    }

    fn set_metadata(&mut self, metadata: &XdpMetadata) {
        if let Some((queue, _)) = self.own.parts_mut() {
            queue.set_metadata(metadata);
        }
    }

    fn set_frame_limit(&mut self, bytes: u32) {
        self.change_vrings(&mut |_, vring| vring.guest.frame_limit = bytes);
        self.own.set_frame_limit(bytes);
    }

    fn set_limits(&mut self, limits: &PortLimits) {
        self.sender.throttle.set(limits.from_guest.as_ref());
        if let Some(mut rx) = self.to_guest.lock() {
            rx.limit.clone_from(&limits.to_guest);
        }
    }

    fn set_filter(&mut self, filter: LaneFilter) -> LaneFilter {
        let LaneFilter { from_guest, to_guest } = filter;
        LaneFilter {
            from_guest: std::mem::replace(&mut self.filter, from_guest),
            to_guest: match self.to_guest.lock() {
                Some(mut rx) => std::mem::replace(&mut rx.filter, to_guest),
                None => to_guest,
            },
        }
    }

    fn set_guard(&mut self, guard: Option<&Guard>) {
        self.guard = guard.cloned().map(Box::new);
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.own.parts()?.1.tap()
    }

    fn note_event(&mut self) {
        if let Some((_, receiver)) = self.own.parts_mut() {
            receiver.note_event();
        }
    }

    fn set_forwarding(&mut self, forwarding: &Arc<Forwarding>) {
        let is_same = Arc::ptr_eq(&self.forwarding.fdb, &forwarding.fdb);
        self.forwarding = Arc::clone(forwarding);
        // With another FDB, the destinations that the filter remembers may be wrong.
        if let Some(filter) = &mut self.filter
            && !is_same
        {
            filter.forget();
        }
    }

    fn inject(&mut self, frame: &[u8], siblings: &mut dyn Siblings) {
        match self.route {
            Route::Fdb => self.announce(frame, siblings),
            Route::OwnQueue => self.own.inject(frame, &self.counters),
            Route::Cable => {
                if let Some(at) = siblings.target() {
                    write_announcement(siblings, at, frame);
                }
            }
        }
    }

    fn stop(self: Box<Self>) -> Stopped {
        let mut lane = *self;
        // Lanes of other workers deliver nothing from now on.
        let Some(mut rx) = lane.to_guest.take() else {
            return Stopped::default();
        };
        lane.from_guest.call.leave();
        rx.vring.call.leave();
        lane.transmit.lose(&lane.counters);
        lane.underlay.transmit.lose(&lane.counters);
        lane.counters.to_guest_queue_stopped.add(rx.pending.frames());
        rx.limit = None;
        let queue = lane.own.stop(&mut lane.from_guest, &mut rx);
        let mut pair = QueuePair {
            from_guest: lane.from_guest,
            to_guest: rx.vring,
        };
        Stopped {
            pair: Some(pair.stopped()),
            queue,
        }
    }
}

/// Asks the guest of another lane for kicks; returns whether it has buffers already.
fn has_buffers(lane: Option<SlotAt>, siblings: &mut dyn Siblings) -> bool {
    let target = lane.and_then(|at| siblings.guest(at));
    target.is_some_and(|mut target| target.vring.queue.enable_kicks())
}
