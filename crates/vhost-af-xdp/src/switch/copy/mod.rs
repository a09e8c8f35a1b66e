//! A lane with `--memory=copy`: the UMEM is ours, each frame is copied once.
//!
//! Chunks of the UMEM circulate: free pool → (filled from the guest) → TX ring → completion →
//! pool, and pool → fill ring → RX ring → (copied to the guest) → fill ring. A frame that the
//! guest has no buffer for stays in the RX ring: back-pressure reaches the kernel, which counts
//! what it then drops (`rx_ring_full`, `rx_fill_ring_empty_descs`).
//!
//! A super-frame of the guest is cut while it is copied (`cutter.rs`), each segment into a chunk of its own or, where the
//! NIC reads by DMA, into descriptors that refer to one copy of the payload. All segments are built in one go: it waits in
//! the guest's queue until there is room for all. One with more segments than that ([`SEGMENTS`]), or than there can ever be
//! room for, is copied away whole, and goes out in portions ([`Rest`]). So a chain is used, here too, before anything of it is with the NIC: a daemon
//! that comes after one that died sends nothing twice.

mod cutter;
mod from_guest;
mod incoming;
mod to_guest;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use offload::segment::Plan;
use virtqueue::{Chains, MemoryMap};
use xsk::{Frame, FramePool, RxDesc, TxDesc, Umem, UmemOffset};

use super::lane::{BATCH, Lane, Rest as Resting, SEGMENTS, Takes, Turns};
use super::spill::{Spill, SpillEnd};
use super::super_frame::Builder;
use crate::nic::queue::{Link, MOST_PIECES, Nic, Sends};
use crate::nic::resident::{self, Home, Resident, Share};
use device::counters::PairCounters;
use device::pair::Stopped;
use device::pair::{Fault, QueuePair};

pub(crate) use cutter::References;
pub(crate) use to_guest::{NO_OFFLOAD, with_buffers, write_header};

use cutter::Cutter;
use incoming::{Incoming, Range};

/// See the module's head.
pub(crate) struct CopyLane<N> {
    guest: QueuePair,
    /// What a port of several pairs does with frames of pairs that are off.
    spill: Option<SpillEnd>,
    nic: N,
    umem: Umem,
    /// Bytes of a chunk that hold a sent frame's data.
    chunk_bytes: u32,
    sends: Sends,
    /// What is left of a super-frame with more segments than leave at once.
    rest: Rest,
    turns: Turns,
    takes: Takes,
    /// The guest's next frame waits until frames that were sent come back.
    waits_for_room: bool,
    pool: FramePool,
    /// Of descriptors that are with the NIC, to chunks that are not in the pool.
    references: References,
    counters: Arc<PairCounters>,
    link: Link,
    scratch: Scratch,
    /// Pieces of the received frame in hand; complete when the last one says so.
    held: Vec<RxDesc>,
    /// Instead of `held`, where frames are looked at before they are delivered.
    incoming: Option<Box<Incoming>>,
    /// The guest has buffers, but fewer than the frame in hand needs.
    short: bool,
    /// See [`Lane::awaits_nic`].
    awaits_nic: bool,
    /// The guest did wrong: its queues are not used any more.
    faulted: bool,
    /// Where the NIC's queue and the memory go when the lane is stopped, if they stay.
    home: Option<(Home<N>, Share)>,
}

/// Buffers that every batch uses anew.
struct Scratch {
    from_guest: Chains,
    to_guest: Chains,
    outgoing: Vec<TxDesc>,
    empty: Vec<Frame>,
    ranges: Vec<Range>,
}

/// A super-frame that was taken from the guest whole, payload and all, and goes out in portions.
#[derive(Default)]
struct Rest {
    /// How it is cut; `None`: there is none.
    plan: Option<Plan>,
    /// Its first segment that has not been built.
    next: u32,
    /// Its payload; kept for the next one.
    payload: Vec<u8>,
}

impl<N: Nic> CopyLane<N> {
    /// Joins a guest with a NIC. `pool` holds every free chunk of `umem`; `to_receive` of them go
    /// to the NIC to receive into.
    pub(crate) fn new(
        guest: QueuePair,
        nic: N,
        memory: (Umem, FramePool, usize),
        sends: Sends,
        counters: Arc<PairCounters>,
    ) -> Self {
        let (umem, mut pool, to_receive) = memory;
        let mut nic = nic;
        let count = to_receive.min(nic.room_to_give());
        let mut empty: Vec<Frame> = std::iter::from_fn(|| pool.take()).take(count).collect();
        nic.give(&mut empty);
        let chunk_bytes = umem.max_sent_bytes();
        let references = References::new(&umem);
        let scratch = Scratch {
            from_guest: Chains::default(),
            to_guest: Chains::default(),
            outgoing: Vec::with_capacity(SEGMENTS * 2),
            empty,
            ranges: Vec::with_capacity(BATCH * 2),
        };
        let incoming = Incoming::of(&guest);
        let held = Vec::with_capacity(MOST_PIECES);
        Self {
            guest,
            spill: None,
            nic,
            umem,
            chunk_bytes,
            sends,
            rest: Rest::default(),
            turns: Turns::default(),
            takes: Takes::default(),
            waits_for_room: false,
            pool,
            references,
            counters,
            link: Link::Up,
            scratch,
            held,
            incoming,
            short: false,
            awaits_nic: true,
            faulted: false,
            home: None,
        }
    }

    /// Joins a guest with a queue that stays when the guest goes, and then goes back to `home`.
    pub(crate) fn visiting(
        guest: QueuePair,
        resident: Resident<N>,
        home: &Home<N>,
        (sends, counters): (Sends, Arc<PairCounters>),
    ) -> Self {
        let missing = resident.missing();
        let Resident {
            nic,
            umem,
            pool,
            references,
            share,
        } = resident;
        let mut lane = Self::new(guest, nic, (umem, pool, missing), sends, counters);
        lane.references = references;
        lane.home = Some((Arc::clone(home), share));
        lane
    }

    /// With frames of pairs that are off.
    pub(crate) fn with_spill(mut self, spill: Option<SpillEnd>) -> Self {
        self.spill = spill;
        self
    }

    /// Frames of other pairs that this one delivers.
    #[inline]
    fn spilled(&self) -> Option<&Arc<Spill>> {
        match &self.spill {
            Some(SpillEnd::Delivers(spill)) => Some(spill),
            _ => None,
        }
    }

    /// Where frames of this pair go while it is off.
    fn spills_to(&self) -> Option<&Arc<Spill>> {
        match &self.spill {
            Some(SpillEnd::Gives(spill)) => Some(spill),
            _ => None,
        }
    }

    /// Puts queue and memory back, with every chunk that the kernel does not have in the pool.
    fn go_home(self, (home, share): (Home<N>, Share)) {
        let Self {
            nic,
            umem,
            mut pool,
            mut references,
            ..
        } = self;
        pool.extend(self.held.into_iter().map(|piece| piece.frame));
        pool.extend(
            self.incoming
                .into_iter()
                .flat_map(|incoming| incoming.into_chunks()),
        );
        let unsent = self.scratch.outgoing.into_iter();
        pool.extend(unsent.filter_map(|desc| references.give_back(desc.frame)));
        pool.extend(self.scratch.empty);
        let resident = Resident {
            nic,
            umem,
            pool,
            references,
            share,
        };
        *resident::look(&home) = Some(resident);
    }

    /// What builds frames that ask for more than being sent, who counts what they share, and where their bytes come from.
    fn builder(&mut self) -> (Builder<'_>, &mut References, &MemoryMap) {
        let builder = Builder {
            umem: &self.umem,
            own_from: UmemOffset::new(0),
            pool: &mut self.pool,
            outgoing: &mut self.scratch.outgoing,
            sends: self.sends,
            counters: &self.counters,
        };
        (builder, &mut self.references, &self.guest.memory)
    }

    /// What builds segments of a super-frame, and where their payload comes from; see [`Cutter::new`].
    fn cutter(&mut self, plan: &Plan, most_queued: usize) -> Option<(Cutter<'_>, &MemoryMap)> {
        let (builder, references, memory) = self.builder();
        Some((Cutter::new(builder, references, plan, most_queued)?, memory))
    }

    /// Guest → NIC.
    fn flush_outgoing(&mut self) {
        self.nic.to_nic(self.scratch.outgoing.drain(..));
        self.kick();
    }

    fn kick(&mut self) {
        self.link = self.nic.kick();
        self.counters.nic_kicks.add(1);
    }
}

/// A descriptor that sends `frame` from a chunk of ours, cut to what that holds.
pub(crate) fn copied(chunk: Frame, frame: &[u8], umem: &Umem) -> TxDesc {
    let frame = &frame[..frame.len().min(umem.max_sent_bytes() as usize)];
    let offset = umem.send_offset(&chunk);
    // The chunk is inside the UMEM, and the frame not longer than it.
    let _ = umem.write(offset, frame);
    TxDesc {
        frame: chunk,
        offset,
        // At most the size of a chunk.
        #[allow(clippy::cast_possible_truncation)]
        len: frame.len() as u32,
        more: false,
        metadata: false,
    }
}

impl<N: Nic> Lane for CopyLane<N> {
    fn breathe(&mut self) -> Result<usize, Fault> {
        let moved = self.from_guest().and_then(|sent| Ok(sent + self.to_guest()?));
        self.faulted |= moved.is_err();
        moved
    }

    fn arm(&mut self) -> Result<Resting, Fault> {
        let spilled = self.spilled().is_some_and(|spill| !spill.is_empty());
        let waiting = spilled || self.nic.has_frames() || self.has_in_hand();
        self.awaits_nic = !waiting;
        if self.guest.from_guest.enabled && self.guest.from_guest.queue.enable_kicks() {
            let full = self.nic.room_to_nic() == 0 || self.pool.is_empty();
            let wants_room = self.waits_for_room || self.rest.plan.is_some();
            let stuck = full || (wants_room && self.nic.unsent() > 0);
            return Ok(if stuck { Resting::Soon } else { Resting::Busy });
        }
        if waiting && !self.guest.to_guest.enabled && self.spills_to().is_some() {
            // They came after the last look, and the first pair is to have them: no kick tells of that.
            return Ok(Resting::Busy);
        }
        if waiting && self.guest.to_guest.enabled && self.guest.to_guest.queue.enable_kicks() {
            return Ok(if self.short { Resting::Soon } else { Resting::Busy });
        }
        let soon = self.nic.unsent() > 0 || self.rest.plan.is_some() || self.guest.is_polled();
        Ok(if soon { Resting::Soon } else { Resting::Idle })
    }

    fn guest(&self) -> &QueuePair {
        &self.guest
    }

    fn guest_mut(&mut self) -> &mut QueuePair {
        &mut self.guest
    }

    fn wakers(&self) -> Vec<BorrowedFd<'_>> {
        let spilled = self.spilled().map(|spill| std::os::fd::AsFd::as_fd(&**spill));
        self.guest.kicks().chain(spilled).collect()
    }

    fn nic(&self) -> Option<BorrowedFd<'_>> {
        self.nic.fd()
    }

    fn awaits_nic(&self) -> bool {
        self.awaits_nic
    }

    fn replace_guest(&mut self, guest: QueuePair) {
        self.guest = guest;
    }

    fn inject(&mut self, frame: &[u8]) {
        if self.nic.room_to_nic() == 0 {
            return;
        }
        if let Some(chunk) = self.pool.take() {
            self.scratch.outgoing.push(copied(chunk, frame, &self.umem));
            self.flush_outgoing();
        }
    }

    fn stop(mut self: Box<Self>) -> Stopped {
        self.guest.leave_calls();
        self.send_at_last();
        self.deliver_at_last();
        // Frames without buffers: whole ones in the ring, and perhaps one in hand.
        let mut rest = 0;
        for piece in self.nic.from_nic(usize::MAX) {
            rest += u64::from(!piece.more);
            self.pool.put(piece.frame);
        }
        let waiting = self
            .incoming
            .as_ref()
            .map_or(0, |incoming| incoming.waiting() as u64);
        // Of pairs that are off.
        let spilled = self.spilled().map_or(0, |spill| spill.clear() as u64);
        self.counters
            .to_guest_queue_stopped
            .add(rest + waiting + spilled + u64::from(!self.held.is_empty()));
        let stopped = self.guest.stopped();
        if let Some(home) = self.home.take() {
            self.go_home(home);
        }
        stopped
    }
}

#[cfg(test)]
#[path = "stop_tests.rs"]
mod stop_tests;
