//! A lane with `--memory=copy`: the UMEM is ours, each frame is copied once.
//!
//! Chunks of the UMEM circulate: free pool → (filled from the guest) → TX ring → completion →
//! pool, and pool → fill ring → RX ring → (copied to the guest) → fill ring. A frame that the
//! guest has no buffer for stays in the RX ring: back-pressure reaches the kernel, which counts
//! what it then drops (`rx_ring_full`, `rx_fill_ring_empty_descs`).

mod from_guest;
mod to_guest;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use virtqueue::Chains;
use xsk::{Frame, FramePool, RxDesc, TxDesc, Umem};

use super::counters::LaneCounters;
use super::guest::{Fault, GuestSide};
use super::lane::{BATCH, Bases, Lane, Rest};
use super::nic::{Link, Nic};

pub(super) use to_guest::write_header;

/// Most pieces of one multi-buffer frame (the kernel's limit on veth, MAX_SKB_FRAGS + 1).
const MOST_PIECES: usize = 18;

/// See the module's head.
pub(crate) struct CopyLane<N> {
    guest: GuestSide,
    nic: N,
    umem: Umem,
    /// Bytes of a chunk that hold a sent frame's data.
    chunk_bytes: u32,
    /// The socket takes frames of several descriptors.
    multi_buffer: bool,
    pool: FramePool,
    counters: Arc<LaneCounters>,
    link: Link,
    scratch: Scratch,
    /// Pieces of the received frame in hand; complete when the last one says so.
    held: Vec<RxDesc>,
    /// The guest has buffers, but fewer than the frame in hand needs.
    short: bool,
    /// See [`Lane::awaits_nic`].
    awaits_nic: bool,
}

/// Buffers that every batch uses anew.
struct Scratch {
    from_guest: Chains,
    to_guest: Chains,
    outgoing: Vec<TxDesc>,
    empty: Vec<Frame>,
}

impl<N: Nic> CopyLane<N> {
    /// Joins a guest with a NIC. `pool` holds every free chunk of `umem`; `to_receive` of them go
    /// to the NIC to receive into.
    pub(crate) fn new(
        guest: GuestSide,
        nic: N,
        memory: (Umem, FramePool, usize),
        multi_buffer: bool,
        counters: Arc<LaneCounters>,
    ) -> Self {
        let (umem, mut pool, to_receive) = memory;
        let mut nic = nic;
        let count = to_receive.min(nic.room_to_give());
        let mut empty: Vec<Frame> = std::iter::from_fn(|| pool.take()).take(count).collect();
        nic.give(&mut empty);
        let chunk_bytes = umem.chunk_size();
        let scratch = Scratch {
            from_guest: Chains::default(),
            to_guest: Chains::default(),
            outgoing: Vec::with_capacity(BATCH * 2),
            empty,
        };
        let held = Vec::with_capacity(MOST_PIECES);
        Self {
            guest,
            nic,
            umem,
            chunk_bytes,
            multi_buffer,
            pool,
            counters,
            link: Link::Up,
            scratch,
            held,
            short: false,
            awaits_nic: true,
        }
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
pub(super) fn copied(chunk: Frame, frame: &[u8], umem: &Umem) -> TxDesc {
    let frame = &frame[..frame.len().min(umem.chunk_size() as usize)];
    let offset = chunk.offset();
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
        Ok(self.from_guest()? + self.to_guest()?)
    }

    fn arm(&mut self) -> Result<Rest, Fault> {
        let spilled = self.guest.spilled().is_some_and(|spill| !spill.is_empty());
        let waiting = spilled || self.nic.has_frames() || !self.held.is_empty();
        self.awaits_nic = !waiting;
        if self.guest.from_guest.enabled && self.guest.from_guest.queue.enable_kicks() {
            let stuck = self.nic.room_to_nic() == 0 || self.pool.is_empty();
            return Ok(if stuck { Rest::Soon } else { Rest::Busy });
        }
        if waiting && self.guest.to_guest.enabled && self.guest.to_guest.queue.enable_kicks() {
            return Ok(if self.short { Rest::Soon } else { Rest::Busy });
        }
        let soon = self.nic.unsent() > 0 || self.guest.is_polled();
        Ok(if soon { Rest::Soon } else { Rest::Idle })
    }

    fn guest(&self) -> &GuestSide {
        &self.guest
    }

    fn guest_mut(&mut self) -> &mut GuestSide {
        &mut self.guest
    }

    fn nic(&self) -> Option<BorrowedFd<'_>> {
        self.nic.fd()
    }

    fn awaits_nic(&self) -> bool {
        self.awaits_nic
    }

    fn replace_guest(&mut self, guest: GuestSide) {
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

    fn stop(mut self: Box<Self>) -> Bases {
        // Frames without buffers: whole ones in the ring, and perhaps one in hand.
        let rest = self.nic.from_nic(usize::MAX).filter(|piece| !piece.more).count() as u64;
        self.counters
            .to_guest_queue_stopped
            .add(rest + u64::from(!self.held.is_empty()));
        self.guest.bases()
    }
}
