//! A queue of a network's uplink: it delivers received frames to their ports, and sends the frames that port lanes put
//! into its TX ring.
//!
//! Frames leave the NIC's ring a batch at a time and are sorted by port. Each port has an inbox here, in which frames
//! wait for the guest's buffers, still in the chunks that the NIC wrote them to, so that each is copied once. A slow
//! guest must not use up the chunks: an inbox grows to at most twice the unused part of three quarters of all receive
//! chunks (dynamic thresholds, as in switches with a shared buffer). Frames beyond that are dropped, and counted for
//! that guest.
//!
//! The XDP program has already found the port of a frame, and left the port's mark before the frame with other metadata
//! ([`crate::backend::metadata_reader`]). The mark is trusted if the port's generation still matches
//! ([`PortMark`](crate::fdb::PortMark)), so that the address is looked up only once. If not, or if the program
//! leaves no marks, the FDB decides. A VLAN tag that the NIC removed counts as if it were in the frame, and is inserted
//! again for ports with tags.
//!
//! A frame in several pieces is forwarded only when all of them have arrived.
//!
//! Port lanes put their frames into the queue's TX ring. This lane kicks the kernel once a round, for port lanes of its
//! own worker; those of other workers kick the kernel themselves.

mod choices;
mod inbox_index;
mod inboxes;
mod mirror;
mod multicast;
mod route;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use device::counters::PairCounters;
use device::meter;
use device::pair::Fault;
use packet::HEADERS_MAX;
use xsk::RxDesc;
use xsk::metadata::Hints;

use self::choices::Choices;
use self::inbox_index::{InboxIndex, Route};
use self::inboxes::{Inbox, Inboxes};
use self::mirror::Mirror;
use crate::backend::arrivals::Origin;
use crate::backend::metadata_reader::MetadataReader;
use crate::backend::to_nic::{NicSink, Transmit};
use crate::fdb::forwarding::Forwarding;
use crate::fdb::{PortMark, PortNumber, SHARED_PORTS};
use crate::frame::bytes::UmemRange;
use crate::lane::limits::{BATCH, SEGMENTS};
use crate::lane::shared::Shared;
use crate::lane::{Lane, Siblings, Stopped, Work};
use crate::nic::endpoint::NicQueue;
use crate::nic::hints::XdpMetadata;
use crate::nic::lent::Lent;
use crate::nic::queue::LinkState;
use crate::nic::xdp::XdpNic;
use crate::policy::bucket::Ticks;
use crate::policy::filter::read_received;
use crate::policy::rate_limit::Cost;

/// See the module's head.
pub struct UplinkLane<N> {
    queue: Shared<NicQueue<N>>,
    /// The queue's socket, on which the worker waits without the lock.
    nic: Option<Arc<OwnedFd>>,
    /// Properties of the received frames.
    origin: Origin,
    counters: Arc<PairCounters>,
    forwarding: Arc<Forwarding>,
    /// Of an underlay: the other networks that receive frames by it, with their numbers. `None`: it is an uplink.
    sharing: Option<Vec<(u16, Arc<Forwarding>)>>,
    /// The forwarding state has changed since the inboxes were made.
    is_stale: bool,
    inboxes: Vec<Inbox>,
    /// By port number: its inboxes. Of an underlay: by the number in marks ([`PortMark::of_network`]), which all its port
    /// numbers are.
    inbox_of: Vec<Inboxes>,
    /// Indices of the inboxes in which frames wait, each once: of many inboxes, few have any.
    filled: Vec<usize>,
    /// Chunks in all inboxes.
    waiting: usize,
    /// Route of the frame whose next piece has not arrived.
    route: Option<Route>,
    /// The pieces of that frame so far.
    unfinished: Vec<RxDesc>,
    /// The port of the current frame, even if the frame is lost.
    found: Option<PortNumber>,
    /// Scratch space for a batch from the NIC; empty between batches.
    incoming: Vec<RxDesc>,
    /// Pieces of multicast frames that wait for delivery.
    multicast: Vec<RxDesc>,
    ranges: Vec<UmemRange>,
    /// Time of the batch, once something has read the clock for it.
    now: Option<Ticks>,
    choices: Choices,
    mirror: Mirror,
    /// By how much earlier batches exceeded their budgets, in frames: the next batches are shorter by that.
    deficit: usize,
    /// Cost of filtering multicast frames in this round, in frames: each port has a look-up of its own.
    multicast_work: usize,
    awaits_nic: bool,
    /// Bytes received so far.
    carried: u64,
}

impl<N: Lent> UplinkLane<N> {
    /// A lane for a queue.
    pub fn new(mut queue: NicQueue<N>, origin: Origin, counters: Arc<PairCounters>) -> Self {
        queue.begin();
        Self {
            nic: queue.nic.socket(),
            queue: Shared::new(queue),
            origin,
            counters,
            forwarding: Arc::default(),
            sharing: None,
            is_stale: false,
            inboxes: Vec::new(),
            inbox_of: Vec::new(),
            filled: Vec::new(),
            waiting: 0,
            route: None,
            unfinished: Vec::with_capacity(BATCH),
            found: None,
            incoming: Vec::with_capacity(BATCH),
            multicast: Vec::with_capacity(BATCH),
            ranges: Vec::with_capacity(BATCH),
            now: None,
            choices: Choices::default(),
            mirror: Mirror::default(),
            deficit: 0,
            multicast_work: 0,
            awaits_nic: true,
            carried: 0,
        }
    }

    /// Takes a batch from the NIC, and sorts it.
    fn receive(&mut self, queue: &mut NicQueue<N>, siblings: &mut dyn Siblings) {
        self.now = None;
        let mut incoming = std::mem::take(&mut self.incoming);
        let budget = BATCH.saturating_sub(self.deficit);
        self.deficit = self.deficit.saturating_sub(BATCH);
        incoming.extend(queue.nic.from_nic(budget));
        let is_heard = self
            .networks()
            .any(|(_, forwarding)| forwarding.has_promiscuous());
        let mut taken = 0;
        for piece in incoming.drain(..) {
            self.carried = self.carried.wrapping_add(u64::from(piece.len));
            let more = piece.more;
            let route = match queue.tracker.accept(piece) {
                Ok(piece) => match self.inbox_by_mark(queue, &piece, is_heard) {
                    Some(at) => {
                        self.queue_for(at, piece);
                        taken += 1;
                        continue;
                    }
                    None => self.take(queue, piece, is_heard, siblings),
                },
                Err(_) => {
                    self.counters.to_guest_stray.add(1);
                    self.mirror.spoil();
                    self.tear(queue);
                    Route::Dropped
                }
            };
            taken += usize::from(!more);
            self.route = more.then_some(route);
        }
        meter::count_taken(taken);
        self.incoming = incoming;
    }

    /// The inbox of a frame that is only queued: it is in one piece, the program left nothing but the mark of its port,
    /// which takes it as it is and has room, and no filter rules, rate limit or promiscuous ports matter.
    #[inline]
    fn inbox_by_mark(&self, queue: &NicQueue<N>, piece: &RxDesc, is_heard: bool) -> Option<usize> {
        if is_heard || self.route.is_some() || piece.more {
            return None;
        }
        let mark = self.reader(queue).mark_only(piece)?;
        let Inboxes {
            index: InboxIndex::One(at),
            untags: false,
            ..
        } = *self.marked(PortMark(mark))?.1
        else {
            return None;
        };
        let inbox = &self.inboxes[at];
        let is_checked = inbox.is_filtered || inbox.limit.is_some();
        (!is_checked && inbox.len() < self.room(queue)).then_some(at)
    }

    /// The reader of metadata before the queue's frames.
    #[inline]
    fn reader<'q>(&self, queue: &'q NicQueue<N>) -> MetadataReader<'q> {
        MetadataReader {
            decapsulated: self.sharing.is_some(),
            ..MetadataReader::of(queue)
        }
    }

    /// Handles a received piece; returns the route for further pieces of its frame.
    // Not inlined, so that the loop over plain frames has all registers.
    #[inline(never)]
    fn take(
        &mut self,
        queue: &mut NicQueue<N>,
        mut piece: RxDesc,
        is_heard: bool,
        siblings: &mut dyn Siblings,
    ) -> Route {
        let (is_first, more) = (self.route.is_none(), piece.more);
        let mut hints = Hints::default();
        let mut lost = false;
        if is_first {
            self.found = None;
            match self.reader(queue).read(&piece, &self.counters) {
                Some(found) => hints = found,
                None => lost = true,
            }
        }
        // Promiscuous ports get the frame as it arrived: before `route_of` changes its tag.
        if is_heard {
            self.mirror.take(&queue.umem, &piece, is_first.then_some(&hints));
        }
        let route = match self.route {
            _ if lost => Route::Dropped,
            Some(route) => route,
            None => self.route_of(queue, &mut piece, &hints),
        };
        if lost {
            self.mirror.spoil();
        }
        let route = self.sort(queue, piece, route, &hints, siblings);
        if is_heard && !more && !matches!(route, Route::Multicast) {
            self.deficit += self.mirror_frame(siblings);
        }
        route
    }

    /// The forwarding states of all networks, with their numbers.
    fn networks(&self) -> impl Iterator<Item = (u16, &Arc<Forwarding>)> {
        let sharing = self.sharing.iter().flatten();
        let sharing = sharing.map(|(number, forwarding)| (*number, forwarding));
        std::iter::once((0, &self.forwarding)).chain(sharing)
    }

    /// The forwarding state that knows a port, and the port's number there; `None`: its network is gone.
    #[inline]
    fn known_by(&self, port: PortNumber) -> Option<(&Arc<Forwarding>, PortNumber)> {
        if self.sharing.is_none() {
            return Some((&self.forwarding, port));
        }
        let forwarding = self.network(port.0 / SHARED_PORTS)?;
        Some((forwarding, PortNumber(port.0 % SHARED_PORTS)))
    }

    /// The forwarding state of the network of this number.
    fn network(&self, number: u16) -> Option<&Arc<Forwarding>> {
        let mut networks = self.networks();
        networks.find_map(|(of, forwarding)| (of == number).then_some(forwarding))
    }

    /// Delivers a whole unicast frame to promiscuous ports of its network; returns the work of filters.
    #[cold]
    fn mirror_frame(&mut self, siblings: &mut dyn Siblings) -> usize {
        let (forwarding, found) = match (self.found, &self.sharing) {
            (Some(port), _) => match self.known_by(port) {
                Some((forwarding, port)) => (Arc::clone(forwarding), Some(port)),
                None => return 0,
            },
            // Its network is not known.
            (None, Some(_)) => return 0,
            (None, None) => (Arc::clone(&self.forwarding), None),
        };
        let of = (found, self.origin);
        self.mirror.give(of, &forwarding, &self.counters, siblings)
    }

    /// Queues or drops a piece by its route; returns the route for further pieces of its frame.
    #[inline]
    fn sort(
        &mut self,
        queue: &mut NicQueue<N>,
        piece: RxDesc,
        route: Route,
        hints: &Hints,
        siblings: &mut dyn Siblings,
    ) -> Route {
        match route {
            // Only a frame's first piece is checked for room: a few chunks too many are better than half a frame.
            Route::Inbox(at)
                if (self.route.is_some() || self.waiting_with(at) < self.room(queue))
                    && (!self.inboxes[at].is_filtered || self.admits(queue, at, &piece, hints, siblings))
                    && (self.inboxes[at].limit.is_none() || self.may_get(at, &piece, siblings)) =>
            {
                self.put(piece, route);
                route
            }
            Route::Inbox(at) => self.lose(queue, at, piece, siblings),
            Route::Multicast => {
                self.put(piece, route);
                route
            }
            Route::NoPort => {
                self.counters.to_guest_no_port.add(1);
                queue.empty.push(piece.frame);
                Route::Dropped
            }
            Route::Dropped => {
                queue.empty.push(piece.frame);
                route
            }
        }
    }

    /// Drops a frame for an inbox; returns the route for its further pieces. Counts only a lack of room, since filter
    /// and limit have counted their own drops.
    #[cold]
    fn lose(
        &mut self,
        queue: &mut NicQueue<N>,
        at: usize,
        piece: RxDesc,
        siblings: &mut dyn Siblings,
    ) -> Route {
        if self.waiting_with(at) >= self.room(queue) {
            match siblings.guest(self.inboxes[at].guest.at) {
                Some(target) => target.counters.to_guest_no_buffer.add(1),
                None => self.counters.to_guest_no_buffer.add(1),
            }
        }
        queue.empty.push(piece.frame);
        Route::Dropped
    }

    /// Queues a piece: at once if it is the whole frame, otherwise with the frame's last piece.
    #[inline]
    fn put(&mut self, piece: RxDesc, route: Route) {
        if piece.more || !self.unfinished.is_empty() {
            self.put_whole(piece, route);
            return;
        }
        match route {
            Route::Inbox(at) => self.queue_for(at, piece),
            _ => self.multicast.push(piece),
        }
    }

    /// Queues a frame in one piece for an inbox.
    #[inline(always)]
    fn queue_for(&mut self, at: usize, piece: RxDesc) {
        self.note_filled(at);
        self.inboxes[at].waiting.push_back(piece);
        self.waiting += 1;
    }

    /// [`Self::put`] for a frame in several pieces.
    #[cold]
    fn put_whole(&mut self, piece: RxDesc, route: Route) {
        let more = piece.more;
        self.unfinished.push(piece);
        match route {
            _ if more => {}
            Route::Inbox(at) => {
                self.note_filled(at);
                self.waiting += self.unfinished.len();
                self.inboxes[at].waiting.extend(self.unfinished.drain(..));
            }
            _ => self.multicast.append(&mut self.unfinished),
        }
    }

    /// Lists an inbox in `filled` before a frame is added to it.
    #[inline]
    fn note_filled(&mut self, at: usize) {
        if self.inboxes[at].len() == 0 {
            self.filled.push(at);
        }
    }

    /// Drops the pieces of an unfinished frame, because one of them is missing.
    #[cold]
    fn tear(&mut self, queue: &mut NicQueue<N>) {
        if !self.unfinished.is_empty() {
            self.counters.to_guest_in_pieces.add(1);
            let pieces = self.unfinished.drain(..).map(|piece| piece.frame);
            queue.empty.extend(pieces);
        }
    }

    /// Whether the guest's filter rules admit a frame; counts a denied one. Further pieces of an admitted frame are not
    /// checked.
    #[cold]
    fn admits(
        &mut self,
        queue: &mut NicQueue<N>,
        at: usize,
        piece: &RxDesc,
        hints: &Hints,
        siblings: &mut dyn Siblings,
    ) -> bool {
        if self.route.is_some() {
            return true;
        }
        let Some(mut target) = siblings.guest(self.inboxes[at].guest.at) else {
            return true;
        };
        let mut head = [0; HEADERS_MAX];
        let (head, facts) = read_received(&queue.umem, piece, hints, &mut head);
        let admits = target.allows(head, facts);
        self.deficit += target.take_work();
        admits
    }

    /// Whether the guest's rate limit admits a frame; counts a denied one. Further pieces of an admitted frame always
    /// pass, and are charged to the limit.
    #[cold]
    fn may_get(&mut self, at: usize, piece: &RxDesc, siblings: &mut dyn Siblings) -> bool {
        let inbox = &self.inboxes[at];
        let Some(limit) = &inbox.limit else { return true };
        if self.route.is_some() {
            limit.charge(Cost::bytes(piece.len), &mut self.now);
            return true;
        }
        let now = *self.now.get_or_insert_with(Ticks::now);
        let may = limit.take(Cost::frame(piece.len), now).is_ok();
        if !may && let Some(target) = siblings.guest(inbox.guest.at) {
            target.counters.to_guest_limit.add(1);
        }
        may
    }

    /// Chunks in all inboxes of the port that this inbox belongs to.
    #[inline]
    fn waiting_with(&self, at: usize) -> usize {
        let port = usize::from(self.inboxes[at].port.0);
        match self.inbox_of.get(port).map(|its| its.index) {
            Some(InboxIndex::Several { first, .. }) => {
                let its = self.inboxes[first..].iter();
                its.take_while(|inbox| usize::from(inbox.port.0) == port)
                    .map(Inbox::len)
                    .sum()
            }
            _ => self.inboxes[at].len(),
        }
    }

    /// Chunks that a port may have now: twice the unused part of three quarters of all receive chunks. So one port
    /// alone gets up to half of all, and the NIC keeps a quarter.
    #[inline]
    fn room(&self, queue: &NicQueue<N>) -> usize {
        2 * (queue.to_receive() / 4 * 3).saturating_sub(self.waiting)
    }

    /// Delivers waiting frames, as far as guests have buffers; returns how many frames guests got.
    fn deliver(&mut self, queue: &mut NicQueue<N>, siblings: &mut dyn Siblings) -> usize {
        let mut frames = 0;
        self.filled.retain(|&at| {
            let inbox = &mut self.inboxes[at];
            let before = inbox.len();
            frames += inbox.deliver(&queue.umem, &mut queue.empty, siblings);
            self.waiting -= before - inbox.len();
            inbox.len() > 0
        });
        frames + self.deliver_multicast(queue, siblings)
    }
}

impl<N: Lent> Lane for UplinkLane<N> {
    fn poll(&mut self, siblings: &mut dyn Siblings) -> Result<usize, Fault> {
        let shared = self.queue.clone();
        let Some(mut queue) = shared.lock() else {
            return Ok(0);
        };
        let queue = &mut *queue;
        if self.is_stale {
            self.renew_inboxes(queue, siblings);
        }
        let is_kicked = queue.kick_queued(SEGMENTS * 2, &self.counters);
        let kicks = queue.nic.unsent() > 0 || queue.link != LinkState::Up;
        if kicks && !is_kicked {
            queue.kick(&self.counters);
        }
        self.multicast_work = 0;
        // Waiting frames first: they arrived earlier.
        let mut moved = self.deliver(queue, siblings);
        self.receive(queue, siblings);
        moved += self.deliver(queue, siblings);
        queue.give();
        Ok(moved)
    }

    fn enable_notifications(&mut self, siblings: &mut dyn Siblings) -> Work {
        let Some(mut queue) = self.queue.lock() else {
            return Work::None;
        };
        // Sends frames that port lanes have queued since the last poll.
        let (was_awaited, unsent) = (queue.is_awaited, queue.nic.unsent());
        queue.kick_queued(SEGMENTS * 2, &self.counters);
        if was_awaited && queue.nic.unsent() < unsent {
            // There is room now for waiting lanes.
            return Work::Now;
        }
        self.awaits_nic = queue.nic.received() == 0;
        if !self.awaits_nic || self.is_stale || self.has_multicast() {
            return Work::Now;
        }
        let mut work = Work::None;
        for inbox in self.filled.iter().map(|&at| &self.inboxes[at]) {
            // A kick for new buffers reaches the guest's own worker only.
            if inbox.guest.is_remote {
                work = work.max(Work::SOON);
            } else if let Some(mut target) = siblings.guest(inbox.guest.at)
                && target.vring.queue.enable_kicks()
            {
                work = match inbox.arrivals.short {
                    true => work.max(Work::SOON),
                    false => Work::Now,
                };
            }
        }
        work.max(Work::after(queue.until_copies_sent()))
    }

    fn carried(&self) -> u64 {
        self.carried
    }

    fn uplink(&self) -> Option<&Shared<NicQueue<XdpNic>>> {
        N::uplink(&self.queue)
    }

    fn set_metadata(&mut self, metadata: &XdpMetadata) {
        if let Some(mut queue) = self.queue.lock() {
            queue.set_metadata(metadata);
        }
    }

    fn set_frame_limit(&mut self, bytes: u32) {
        self.origin.frame_limit = bytes;
        if let Some(mut queue) = self.queue.lock() {
            queue.frame_limit = bytes;
        }
        for inbox in &mut self.inboxes {
            inbox.arrivals.set_frame_limit(bytes);
        }
    }

    fn set_forwarding(&mut self, forwarding: &Arc<Forwarding>) {
        self.forwarding = Arc::clone(forwarding);
        self.is_stale = true;
    }

    fn set_sharing(&mut self, networks: Vec<(u16, Arc<Forwarding>)>) {
        self.sharing = Some(networks);
        self.is_stale = true;
    }

    fn nic(&self) -> Option<BorrowedFd<'_>> {
        self.nic.as_ref().map(AsFd::as_fd)
    }

    fn awaits_nic(&self) -> bool {
        self.awaits_nic
    }

    fn stop(self: Box<Self>) -> Stopped {
        let mut lane = *self;
        // Lanes of other workers send nothing from now on.
        let Some(mut queue) = lane.queue.take() else {
            return Stopped::default();
        };
        for inbox in &mut lane.inboxes {
            inbox.empty(&mut queue.empty, &lane.counters);
        }
        let pieces = lane.multicast.drain(..).chain(lane.unfinished.drain(..));
        queue.empty.extend(pieces.map(|piece| piece.frame));
        NicSink::new(&mut queue, &mut Transmit::default(), &lane.counters).send_before_stop();
        Stopped {
            pair: None,
            queue: N::give_back(queue, &lane.counters),
        }
    }
}
