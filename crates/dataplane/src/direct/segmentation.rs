//! Direct placement, guest → NIC: segmentation of GSO packets. Headers are built in the bounce area. Payload is sent
//! directly from guest memory if the socket takes references and completes checksums; otherwise it is copied behind the
//! headers. One packet is segmented at a time: segments without room wait for the next poll.

use device::pair::{Cursor, Vring};
use packet::HEADERS_MAX;
use packet::segment::Gso;
use virtqueue::{Buffer, ChainId, MemoryMap};
use xsk::UmemOffset;

use super::{DirectQueue, Segmentation};
use crate::backend::receiver::Receive;
use crate::backend::to_nic::{STOP_WAIT, STOP_WAITS};
use crate::frame::gso::{FromChain, GsoPacket};
use crate::guest::from_guest::Budget;
use crate::guest::guest_frame::GuestFrame;
use crate::nic::queue::{LinkState, Nic};

impl<N: Nic, R: Receive> DirectQueue<N, R> {
    /// Begins to segment a GSO packet.
    #[inline(never)]
    pub(super) fn segment(&mut self, chain: ChainId, frame: GuestFrame<'_>, gso: Gso, budget: &mut Budget) {
        let packet = GsoPacket::open(frame, gso, &self.counters, &mut [0; HEADERS_MAX]);
        let Some(packet) = packet else {
            return self.return_unsent(chain);
        };
        if packet.plan.segment_bytes_max() > self.queue.umem.max_sent_bytes() {
            self.counters.from_guest_too_many_pieces.add(1);
            return self.return_unsent(chain);
        }
        self.counters.from_guest_super_frames.add(1);
        self.segmented_buffers.clear();
        self.segmented_buffers.extend_from_slice(frame.buffers);
        self.segmentation = Some(Segmentation { packet, chain });
        self.queue_segments(frame.memory, budget);
    }

    /// Queues as many segments of the present GSO packet as there is room for, and as the budget allows.
    fn queue_segments(&mut self, memory: &MemoryMap, budget: &mut Budget) {
        let Some(mut segmentation) = self.segmentation.take() else {
            return;
        };
        let buffers = std::mem::take(&mut self.segmented_buffers);
        while segmentation.packet.left() > 0 && budget.has_frames() {
            let Some(bytes) = self.queue_segment(memory, &mut segmentation, &buffers) else {
                break;
            };
            budget.tally.add(bytes);
        }
        self.segmented_buffers = buffers;
        if segmentation.packet.left() > 0 {
            self.segmentation = Some(segmentation);
        }
    }

    /// Queues the next segment; its bytes, or `None` when there is no room for it now.
    fn queue_segment(
        &mut self,
        memory: &MemoryMap,
        segmentation: &mut Segmentation,
        buffers: &[Buffer],
    ) -> Option<u32> {
        let room = self.ring_room().min(self.sending.room());
        if room == 0 || self.queue.pool.is_empty() {
            return None;
        }
        let packet = &mut segmentation.packet;
        let index = packet.next;
        let chain = (packet.left() == 1).then_some(segmentation.chain);
        let first = self.outgoing.len();
        let payload = packet.plan.payload(index);
        let bytes = payload.end - payload.start;
        if self.queue.sends.refers && self.refer_to(packet.payload, buffers, bytes) {
            if self.pieces.len() + 1 > room {
                return None;
            }
            self.builder().headers(&packet.plan, index);
            self.note_bounced(first, None);
            let parts = std::mem::take(&mut self.pieces);
            for (at, part) in parts.iter().enumerate() {
                let last = at + 1 == parts.len();
                let data = UmemOffset::new(part.offset);
                self.queue_piece(chain.filter(|_| last), data, part.len, !last);
            }
            self.pieces = parts;
            packet.payload.pass(buffers, bytes);
            self.counters.from_guest_referred_segments.add(1);
        } else {
            let mut source = FromChain {
                head: &[],
                memory,
                buffers,
                at: &mut packet.payload,
            };
            self.builder().segment(&packet.plan, index, &mut source);
            self.note_bounced(first, chain);
        }
        packet.next += 1;
        Some(packet.plan.header_len() as u32 + bytes)
    }

    /// Whether the next `bytes` of a chain can be sent by reference behind a descriptor with headers. If so, stores
    /// their pieces in `pieces`. The daemon cannot complete the checksum then, since the guest may change the bytes.
    fn refer_to(&mut self, from: Cursor, buffers: &[Buffer], bytes: u32) -> bool {
        self.find_pieces(from, buffers, bytes) && self.queue.sends.checksum
    }

    /// Continues the present GSO packet within the budget; returns how many segments were queued.
    #[cold]
    pub(super) fn continue_segmentation(&mut self, vring: &Vring, budget: &mut Budget) -> usize {
        if self.link == LinkState::Gone
            && self.sending.room() > 0
            && let Some(segmentation) = self.segmentation.take()
        {
            self.counters.from_guest_rest_of_super_frame.add(1);
            self.return_unsent(segmentation.chain);
            return 1;
        }
        self.queue_segments(&vring.guest.memory, budget);
        if budget.tally.frames == 0 {
            self.counters.from_guest_waits.add(1);
        }
        budget.tally.count(&self.counters);
        self.hand_over();
        usize::try_from(budget.tally.frames).unwrap_or(usize::MAX)
    }

    /// Queues the rest of the present GSO packet when the lane is stopped, on a thread that may wait, as far as the
    /// kernel takes it. Returns its chain if some segments were left.
    pub(super) fn segment_before_stop(&mut self, vring: &mut Vring) -> Option<ChainId> {
        let mut waits = 0;
        while self.segmentation.is_some() && self.link == LinkState::Up && waits < STOP_WAITS {
            self.begin_batch();
            let sent = self.continue_segmentation(vring, &mut Budget::new(usize::MAX));
            self.kick();
            if sent + self.reap(vring) == 0 {
                std::thread::sleep(STOP_WAIT);
                waits += 1;
            }
        }
        let segmentation = self.segmentation.take()?;
        self.counters.from_guest_rest_of_super_frame.add(1);
        Some(segmentation.chain)
    }
}
