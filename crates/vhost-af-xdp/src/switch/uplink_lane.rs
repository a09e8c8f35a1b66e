//! A queue of a network's uplink: what it receives goes to the ports that frames are for, and what ports put there is
//! sent.
//!
//! Frames leave the NIC's ring a batch at a time and are sorted by port. Each port has an inbox here, in which frames
//! wait for the guest's buffers, still in the chunks that they came in: each is copied once. A guest that is slow must
//! not take the chunks from the others: an inbox takes no more than twice what is left of three quarters of them (dynamic
//! thresholds, as in switches with a shared buffer). What comes beyond is lost, and counted as that guest's.
//!
//! Who a frame is for the XDP program has found already, and left before the frame with what else is known of it
//! ([`super::before`]). It is believed if the port still is what it was then ([`PortNote`](super::table::PortNote)): so
//! the address is looked up once. Else, and where no program of ours is on the interface, the table tells. A VLAN tag that
//! the NIC took off counts as if it were in the frame, and is put back for who has frames with it.
//!
//! A frame in several pieces goes nowhere before all of them are here.
//!
//! The lanes of ports put what they send into the queue's TX ring; this one has the kernel send it, once a round.

mod choices;
mod groups;
mod mirror;
mod route;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use device::counters::PairCounters;
use device::meter;
use device::pair::{Fault, QueuePair};
use xsk::metadata::Hints;
use xsk::{Frame, RxDesc, Umem};

use self::choices::Choices;
use self::mirror::Mirror;
use self::route::{Inboxes, Route};
use super::arrivals::{Arrivals, Origin};
use super::before::Before;
use super::bucket::Ticks;
use super::bytes::UmemRange;
use super::checksums::PrivateLook;
use super::filter::Facts;
use super::guard::LOOK_BYTES as LONG_LOOK_BYTES;
use super::lane::{Blame, Lane, Near, Network, Stopped, Work};
use super::limits::{BATCH, SEGMENTS};
use super::members::{Guest, Members};
use super::rate_limit::{Cost, RateLimit};
use super::table::PortNumber;
use super::to_guest::Delivery;
use super::to_nic::{NicSink, Transmit};
use crate::nic::endpoint::NicQueue;
use crate::nic::hints::Promise;
use crate::nic::lent::Lent;
use crate::nic::queue::LinkState;
use crate::nic::xdp::XdpNic;

/// Frames that wait for a guest's buffers.
struct Inbox {
    port: PortNumber,
    guest: Guest,
    arrivals: Arrivals,
    /// Those that the arrivals have in hand.
    received: Vec<RxDesc>,
    waiting: VecDeque<RxDesc>,
    /// For frames to groups.
    look: Option<PrivateLook>,
    /// What the guest may get.
    limit: Option<Arc<RateLimit>>,
    /// Rules say which frames it gets.
    is_filtered: bool,
}

impl Inbox {
    fn new(port: PortNumber, guest: Guest, pair: &QueuePair, origin: Origin) -> Self {
        Self {
            port,
            guest,
            arrivals: Arrivals::from(origin, pair),
            received: Vec::with_capacity(BATCH),
            waiting: VecDeque::with_capacity(BATCH),
            look: PrivateLook::of(pair, origin.partial_checksums),
            limit: None,
            is_filtered: false,
        }
    }

    /// Chunks that wait.
    fn len(&self) -> usize {
        self.received.len() + self.waiting.len()
    }

    /// What waits is for nobody.
    fn empty(&mut self, empty: &mut Vec<Frame>, counters: &PairCounters) {
        let pieces = self.received.drain(..).chain(self.waiting.drain(..));
        for piece in pieces {
            counters.to_guest_queue_stopped.add(u64::from(!piece.more));
            empty.push(piece.frame);
        }
    }
}

/// See the module's head.
pub(crate) struct UplinkLane<N> {
    queue: NicQueue<N>,
    /// Of what it receives.
    origin: Origin,
    counters: Arc<PairCounters>,
    members: Arc<Members>,
    /// Other members than those that there are inboxes for.
    is_stale: bool,
    inboxes: Vec<Inbox>,
    /// By port number: its inboxes.
    inbox_of: Vec<Inboxes>,
    /// Chunks in all inboxes.
    waiting: usize,
    /// Of a frame whose next piece has not come.
    route: Option<Route>,
    /// Its pieces.
    unfinished: Vec<RxDesc>,
    /// Who the frame in hand is for, whatever becomes of it.
    found: Option<PortNumber>,
    /// Pieces as the NIC gives them, for a moment.
    incoming: Vec<RxDesc>,
    /// Pieces of frames to groups.
    group: Vec<RxDesc>,
    ranges: Vec<UmemRange>,
    /// When the batch was received, once that was asked for.
    now: Option<Ticks>,
    choices: Choices,
    mirror: Mirror,
    /// What was done for frames beyond turns so far, in frames: the next batches are shorter.
    owed: usize,
    /// Of it, what asking filter rules about frames to groups was in this round: one frame is a look-up for each port.
    of_groups: usize,
    awaits_nic: bool,
}

impl<N: Lent> UplinkLane<N> {
    /// Of a queue.
    pub(crate) fn new(mut queue: NicQueue<N>, origin: Origin, counters: Arc<PairCounters>) -> Self {
        queue.discard(&counters);
        queue.begin();
        Self {
            queue,
            origin,
            counters,
            members: Arc::default(),
            is_stale: false,
            inboxes: Vec::new(),
            inbox_of: Vec::new(),
            waiting: 0,
            route: None,
            unfinished: Vec::with_capacity(BATCH),
            found: None,
            incoming: Vec::with_capacity(BATCH),
            group: Vec::with_capacity(BATCH),
            ranges: Vec::with_capacity(BATCH),
            now: None,
            choices: Choices::default(),
            mirror: Mirror::default(),
            owed: 0,
            of_groups: 0,
            awaits_nic: true,
        }
    }

    /// Takes a batch from the NIC, and sorts it.
    fn receive(&mut self, network: &mut dyn Network) {
        self.now = None;
        let mut incoming = std::mem::take(&mut self.incoming);
        let turn = BATCH.saturating_sub(self.owed);
        self.owed = self.owed.saturating_sub(BATCH);
        incoming.extend(self.queue.nic.from_nic(turn));
        let is_heard = self.members.has_promiscuous();
        let mut taken = 0;
        for piece in incoming.drain(..) {
            let more = piece.more;
            let route = match self.queue.custody.judge(piece) {
                Ok(piece) => self.take(piece, is_heard, network),
                Err(_) => {
                    self.counters.to_guest_stray.add(1);
                    self.mirror.spoil();
                    self.tear();
                    Route::Lost
                }
            };
            taken += usize::from(!more);
            self.route = more.then_some(route);
        }
        meter::took(taken);
        self.incoming = incoming;
    }

    /// Takes a piece in; where further ones of its frame go.
    #[inline]
    fn take(&mut self, mut piece: RxDesc, is_heard: bool, network: &mut dyn Network) -> Route {
        let (is_first, more) = (self.route.is_none(), piece.more);
        let mut hints = Hints::default();
        let mut lost = false;
        if is_first {
            self.found = None;
            match Before::of(&self.queue).read(&piece, &self.counters) {
                Some(found) => hints = found,
                None => lost = true,
            }
        }
        // As it came.
        if is_heard {
            self.mirror
                .take(&self.queue.umem, &piece, is_first.then_some(&hints));
        }
        let route = match self.route {
            _ if lost => Route::Lost,
            Some(route) => route,
            None => self.route_of(&mut piece, &hints),
        };
        if lost {
            self.mirror.spoil();
        }
        let route = self.sort(piece, route, &hints, network);
        if is_heard && !more && !matches!(route, Route::Group) {
            let (members, counters) = (&self.members, &self.counters);
            self.owed += self
                .mirror
                .give((self.found, self.origin), members, counters, network);
        }
        route
    }

    /// Puts a piece where it goes; where further ones of its frame do.
    #[inline]
    fn sort(&mut self, piece: RxDesc, route: Route, hints: &Hints, network: &mut dyn Network) -> Route {
        match route {
            // All of a frame or nothing: a few chunks too many are better than half a frame.
            Route::Inbox(at)
                if (self.route.is_some() || self.waiting_with(at) < self.room())
                    && (!self.inboxes[at].is_filtered || self.admits(at, &piece, hints, network))
                    && (self.inboxes[at].limit.is_none() || self.may_get(at, &piece, network)) =>
            {
                self.put(piece, route);
                route
            }
            Route::Inbox(at) => {
                if self.waiting_with(at) >= self.room()
                    && let Some(peer) = network.guest(self.inboxes[at].guest.at)
                {
                    peer.counters.to_guest_no_buffer.add(1);
                }
                self.queue.empty.push(piece.frame);
                Route::Lost
            }
            Route::Group => {
                self.put(piece, route);
                route
            }
            Route::Nobody => {
                self.counters.to_guest_no_port.add(1);
                self.queue.empty.push(piece.frame);
                Route::Lost
            }
            Route::Lost => {
                self.queue.empty.push(piece.frame);
                route
            }
        }
    }

    /// Puts a piece where its frame waits, as soon as that is whole.
    #[inline]
    fn put(&mut self, piece: RxDesc, route: Route) {
        if piece.more || !self.unfinished.is_empty() {
            self.put_whole(piece, route);
            return;
        }
        match route {
            Route::Inbox(at) => {
                self.inboxes[at].waiting.push_back(piece);
                self.waiting += 1;
            }
            _ => self.group.push(piece),
        }
    }

    /// The same of a frame in several pieces.
    #[cold]
    fn put_whole(&mut self, piece: RxDesc, route: Route) {
        let more = piece.more;
        self.unfinished.push(piece);
        match route {
            _ if more => {}
            Route::Inbox(at) => {
                self.waiting += self.unfinished.len();
                self.inboxes[at].waiting.extend(self.unfinished.drain(..));
            }
            _ => self.group.append(&mut self.unfinished),
        }
    }

    /// A piece of the frame in hand is missing: the others are of no use.
    #[cold]
    fn tear(&mut self) {
        if !self.unfinished.is_empty() {
            self.counters.to_guest_in_pieces.add(1);
            let pieces = self.unfinished.drain(..).map(|piece| piece.frame);
            self.queue.empty.extend(pieces);
        }
    }

    /// Whether the guest of an inbox gets a frame, by its rules; if not that is counted. Of further pieces of one it does.
    #[cold]
    fn admits(&mut self, at: usize, piece: &RxDesc, hints: &Hints, network: &mut dyn Network) -> bool {
        if self.route.is_some() {
            return true;
        }
        let Some(mut peer) = network.guest(self.inboxes[at].guest.at) else {
            return true;
        };
        let mut head = [0; LONG_LOOK_BYTES];
        let head = first_bytes(&self.queue.umem, piece, &mut head);
        // Of one in several pieces only the first is there.
        let len = if piece.more {
            usize::MAX
        } else {
            piece.len as usize
        };
        let admits = peer.lets_pass(head, Facts::with_hints(len, hints));
        self.owed += peer.take_work();
        admits
    }

    /// Whether the guest of an inbox may get a frame, by its limit; if not that is counted. Of further pieces of one it
    /// may.
    #[cold]
    fn may_get(&mut self, at: usize, piece: &RxDesc, network: &mut dyn Network) -> bool {
        let now = *self.now.get_or_insert_with(Ticks::now);
        let inbox = &self.inboxes[at];
        let Some(limit) = &inbox.limit else { return true };
        if self.route.is_some() {
            limit.owe(piece.len, now);
            return true;
        }
        let may = limit.take(Cost::frame(piece.len), now).is_ok();
        if !may && let Some(peer) = network.guest(inbox.guest.at) {
            peer.counters.to_guest_limit.add(1);
        }
        may
    }

    /// Chunks in an inbox and those of the same port.
    #[inline]
    fn waiting_with(&self, at: usize) -> usize {
        let port = usize::from(self.inboxes[at].port.0);
        match self.inbox_of.get(port) {
            Some(&Inboxes {
                first, count: 2.., ..
            }) => {
                let its = self.inboxes[first..].iter();
                its.take_while(|inbox| usize::from(inbox.port.0) == port)
                    .map(Inbox::len)
                    .sum()
            }
            _ => self.inboxes[at].len(),
        }
    }

    /// Chunks that a port may have now: twice what is left of three quarters. So one alone gets up to half of them, and the NIC always has
    /// a quarter.
    #[inline]
    fn room(&self) -> usize {
        2 * (self.queue.to_receive() / 4 * 3).saturating_sub(self.waiting)
    }

    /// Delivers what waits, as far as guests have buffers; the frames that they got.
    fn deliver(&mut self, network: &mut dyn Network) -> usize {
        let mut frames = 0;
        if self.waiting > 0 {
            for inbox in self.inboxes.iter_mut().filter(|inbox| inbox.len() > 0) {
                let before = inbox.len();
                match deliver_inbox(inbox, &self.queue.umem, &mut self.queue.empty, network) {
                    Ok(delivered) => frames += delivered,
                    Err(fault) => network.blame(inbox.guest.at, fault),
                }
                self.waiting -= before - inbox.len();
            }
        }
        frames + self.deliver_groups(network)
    }

    /// Inboxes for those who belong to the network now; what waits for one who does not any more is lost.
    #[cold]
    fn renew_inboxes(&mut self, network: &mut dyn Network) {
        self.is_stale = false;
        self.choices.forget();
        let members = Arc::clone(&self.members);
        let unfinished = match self.route {
            Some(Route::Inbox(at)) => self.inboxes.get(at).map(|inbox| inbox.guest.id),
            _ => None,
        };
        let mut before = std::mem::take(&mut self.inboxes);
        self.inbox_of.clear();
        let lanes = |(port, _)| members.lanes(port).iter().map(move |&guest| (port, guest));
        for (port, guest) in members.ports().flat_map(lanes) {
            let known = before.iter().position(|inbox| inbox.guest.id == guest.id);
            let peer = network.guest(guest.at);
            let limit = peer.as_ref().and_then(|peer| peer.policer.limit.cloned());
            let is_filtered = peer.as_ref().is_some_and(|peer| peer.filter.is_some());
            let inbox = match (known, peer) {
                (Some(at), _) => Inbox {
                    port,
                    guest,
                    limit,
                    is_filtered,
                    ..before.swap_remove(at)
                },
                (None, Some(peer)) => Inbox {
                    limit,
                    is_filtered,
                    ..Inbox::new(port, guest, peer.pair, self.origin)
                },
                (None, None) => continue,
            };
            let at = usize::from(port.0);
            if self.inbox_of.len() <= at {
                self.inbox_of.resize(at + 1, Inboxes::default());
            }
            let its = &mut self.inbox_of[at];
            if its.count == 0 {
                *its = inboxes_of(&members, port, self.inboxes.len());
            }
            its.count += 1;
            self.inboxes.push(inbox);
        }
        for (port, link) in &members.far {
            let at = usize::from(port.0);
            if self.inbox_of.len() <= at {
                self.inbox_of.resize(at + 1, Inboxes::default());
            }
            if let Some(first) = self.inboxes.iter().position(|inbox| inbox.guest.id == link.id) {
                let its = inboxes_of(&members, *port, first);
                self.inbox_of[at] = Inboxes { count: 1, ..its };
            }
        }
        for mut inbox in before {
            inbox.empty(&mut self.queue.empty, &self.counters);
        }
        self.waiting = self.inboxes.iter().map(Inbox::len).sum();
        if let Some(Route::Inbox(_)) = self.route {
            let at = self
                .inboxes
                .iter()
                .position(|inbox| Some(inbox.guest.id) == unfinished);
            self.route = Some(at.map_or(Route::Lost, Route::Inbox));
            if at.is_none() {
                self.tear();
            }
        }
    }
}

/// Inboxes of a port from that place on, none yet.
fn inboxes_of(members: &Members, port: PortNumber, first: usize) -> Inboxes {
    let known = members.table.port(port);
    Inboxes {
        first,
        count: 0,
        life: known.map_or(0, |port| port.life),
        untags: !members.is_tagged(port) && known.is_some_and(|port| port.vlans.untags()),
    }
}

/// The first bytes of a frame, as many as rules look at, by its first piece.
fn first_bytes<'a>(umem: &Umem, piece: &RxDesc, room: &'a mut [u8; LONG_LOOK_BYTES]) -> &'a [u8] {
    let known = (piece.len as usize).min(LONG_LOOK_BYTES);
    // Inside the piece; else there is none to be judged.
    match umem.read(piece.data, &mut room[..known]) {
        Some(_) => &room[..known],
        None => &[],
    }
}

/// Delivers what waits in an inbox, as far as its guest has buffers; the frames that it got.
/// Errors: what the guest did wrong.
fn deliver_inbox(
    inbox: &mut Inbox,
    umem: &Umem,
    empty: &mut Vec<Frame>,
    network: &mut dyn Network,
) -> Result<usize, Fault> {
    let Some(peer) = network.guest(inbox.guest.at) else {
        return Ok(0);
    };
    let mut delivery = Delivery::begin_with(peer.pair, peer.buffers, peer.counters, inbox.len())?;
    let Inbox {
        arrivals,
        received,
        waiting,
        ..
    } = inbox;
    arrivals.deliver_waiting(waiting, received, umem, empty, &mut delivery)?;
    Ok(delivery.finish())
}

impl<N: Lent> Lane for UplinkLane<N> {
    fn breathe(&mut self, near: Near<'_>) -> Result<usize, Blame> {
        let Near::Network(network) = near else {
            return Ok(0);
        };
        if self.is_stale {
            self.renew_inboxes(network);
        }
        self.queue.reclaim(SEGMENTS * 2, &self.counters);
        if self.queue.nic.unsent() > 0 || self.queue.link != LinkState::Up {
            self.queue.kick(&self.counters);
        }
        self.of_groups = 0;
        // What waited first: it came first.
        let mut moved = self.deliver(network);
        self.receive(network);
        moved += self.deliver(network);
        self.queue.give();
        Ok(moved)
    }

    fn arm(&mut self, near: Near<'_>) -> Work {
        self.awaits_nic = !self.queue.nic.has_frames();
        if !self.awaits_nic || self.is_stale || self.has_group() {
            return Work::Now;
        }
        let mut work = Work::None;
        if let Near::Network(network) = near
            && self.waiting > 0
        {
            for inbox in self.inboxes.iter().filter(|inbox| inbox.len() > 0) {
                if let Some(peer) = network.guest(inbox.guest.at)
                    && peer.pair.to_guest.queue.enable_kicks()
                {
                    work = match inbox.arrivals.short {
                        true => work.max(Work::Soon),
                        false => Work::Now,
                    };
                }
            }
        }
        match self.queue.nic.unsent() > 0 {
            true => work.max(Work::Soon),
            false => work,
        }
    }

    fn pair(&self) -> Option<&QueuePair> {
        None
    }

    fn pair_mut(&mut self) -> Option<&mut QueuePair> {
        None
    }

    fn uplink(&mut self) -> Option<&mut NicQueue<XdpNic>> {
        N::uplink(&mut self.queue)
    }

    fn promise(&mut self, promise: &Promise) {
        self.queue.promise(promise);
    }

    fn meet(&mut self, members: &Arc<Members>) {
        self.members = Arc::clone(members);
        self.is_stale = true;
    }

    fn nic(&self) -> Option<BorrowedFd<'_>> {
        self.queue.nic.fd()
    }

    fn awaits_nic(&self) -> bool {
        self.awaits_nic
    }

    fn inject(&mut self, _frame: &[u8], _near: Near<'_>) {}

    fn stop(self: Box<Self>) -> Stopped {
        let mut lane = *self;
        for inbox in &mut lane.inboxes {
            inbox.empty(&mut lane.queue.empty, &lane.counters);
        }
        let pieces = lane.group.drain(..).chain(lane.unfinished.drain(..));
        lane.queue.empty.extend(pieces.map(|piece| piece.frame));
        NicSink::new(&mut lane.queue, &mut Transmit::default(), &lane.counters).send_at_last();
        Stopped {
            pair: None,
            queue: N::give_back(lane.queue, &lane.counters),
        }
    }
}
