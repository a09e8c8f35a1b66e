//! Direct placement, guest → NIC: frames are sent from guest memory, or gathered in the bounce area.

use std::time::Duration;

use device::counters::{Counter, PairCounters};
use device::pair::{Cursor, Piece, Sending, Vring};
use packet::checksum::ChecksumAt;
use packet::segment::Request;
use steer::with_sources;
use virtqueue::{Buffer, ChainId};
use xsk::{TxDesc, UmemOffset};

use super::{DirectQueue, Outbound};
use crate::backend::receiver::Receive;
use crate::backend::to_nic::{STOP_KICKS, STOP_WAIT, STOP_WAITS, fill_up};
use crate::frame::gso::{Builder, FromChain, Source};
use crate::guest::from_guest::{Budget, Put, Sink};
use crate::guest::guest_frame::GuestFrame;
use crate::guest::rx_queue::RxQueue;
use crate::lane::limits::SEGMENTS;
use crate::nic::coupled::Release;
use crate::nic::queue::{LinkState, Nic};

/// Guest memory is contiguous for DMA only within pages of this size.
const PAGE_BYTES: u64 = 4096;

impl<N: Nic, R: Receive> Sink for DirectQueue<N, R> {
    #[inline]
    fn unsendable<'c>(&self, counters: &'c PairCounters) -> Option<&'c Counter> {
        self.link.loses(counters)
    }

    #[inline]
    fn has_room(&self) -> bool {
        self.room() > 0
    }

    #[inline]
    fn put(&mut self, chain: ChainId, frame: Option<GuestFrame<'_>>, budget: &mut Budget) -> Put {
        let Some(frame) = frame else {
            self.return_unsent(chain);
            return Put::Taken;
        };
        let &Sending { len, ref request, .. } = frame.sending;
        let queued = match *request {
            Request { csum: None, .. } => match self.queue_frame(chain, frame) {
                Some(true) => {
                    budget.tally.add(len);
                    Some(())
                }
                dropped => dropped.map(|_| ()),
            },
            Request {
                csum: Some(at),
                gso: None,
            } => {
                let queued = self.queue_summed(chain, frame, at);
                if queued.is_some() {
                    budget.tally.add(len);
                }
                queued
            }
            Request { gso: Some(gso), .. } => {
                self.segment(chain, frame, gso, budget);
                Some(())
            }
        };
        queued.map_or(Put::NoRoom, |()| Put::Taken)
    }

    #[inline]
    fn has_rest(&self) -> bool {
        self.segmentation.is_some()
    }
}

impl<N: Nic, R: Receive> DirectQueue<N, R> {
    /// Chains that can be taken now.
    pub(super) fn room(&self) -> usize {
        self.ring_room().min(self.sending.room())
    }

    #[inline]
    pub(super) fn begin_batch(&mut self) {
        self.ring = self.queue.nic.room_to_nic();
    }

    /// Descriptors that can be queued now.
    #[inline]
    pub(super) fn ring_room(&self) -> usize {
        self.ring.saturating_sub(self.outgoing.len())
    }

    /// Returns the chains of sent frames to the guest; the result is how many entries have left the table.
    pub(super) fn reap(&mut self, vring: &mut Vring) -> usize {
        let mut back = 0;
        for frame in self.queue.nic.sent(SEGMENTS * 2) {
            let Some(outbound) = self.sending.complete(frame.offset().get()) else {
                self.counters.from_guest_strays.add(1);
                continue;
            };
            back += 1;
            if outbound.bounce {
                self.queue.pool.put(frame);
                self.queue.is_awaited = false;
            }
        }
        self.queue.came_back(back);
        let mut count = 0;
        // A NIC that is gone completes nothing: all its descriptors count as done.
        let gone = self.link == LinkState::Gone;
        if gone {
            self.counters.from_guest_interface_gone.add(self.frames_out());
        }
        while let Some(outbound) = if gone {
            self.sending.pop_any()
        } else {
            self.sending.pop_done()
        } {
            if let Some(chain) = outbound.chain {
                vring.queue.push_used(chain, 0);
            }
            count += 1;
        }
        if count > 0 {
            vring.publish(&self.counters);
        }
        count
    }

    pub(super) fn hand_over(&mut self) {
        self.queue.nic.to_nic(self.outgoing.drain(..));
        self.begin_batch();
    }

    /// Returns an unsent chain once all older ones have been returned.
    pub(super) fn return_unsent(&mut self, chain: ChainId) {
        self.sending.push_done(Outbound {
            chain: Some(chain),
            bounce: false,
            ends: false,
        });
    }

    /// Frames that the NIC has not sent.
    fn frames_out(&self) -> u64 {
        let ends = self.sending.open().filter(|outbound| outbound.ends);
        ends.count() as u64
    }

    /// Queues one frame; false: it was dropped, `None`: there is no room for it now.
    #[inline]
    fn queue_frame(&mut self, chain: ChainId, frame: GuestFrame<'_>) -> Option<bool> {
        if !frame.head.is_empty() {
            return self.queue_checked(chain, frame);
        }
        let &Sending { start, len, .. } = frame.sending;
        if len > self.queue.umem.max_sent_bytes() {
            return self.queue_multi_buffer(chain, start, frame.buffers);
        }
        if let [buffer] = &frame.buffers[start.buffer..] {
            let offset = buffer.offset + u64::from(start.within);
            if self.can_refer(Piece { offset, len }) && !self.queue.sends.must_fill_up(len) {
                self.queue_piece(Some(chain), UmemOffset::new(offset), len, false);
                return Some(true);
            }
        }
        self.queue_gathered(chain, frame)
    }

    /// Whether a descriptor may refer to this piece of guest memory.
    #[inline]
    pub(super) fn can_refer(&self, piece: Piece) -> bool {
        // The kernel wants room for metadata before each descriptor's bytes, used or not.
        let Some(from) = piece.offset.checked_sub(self.queue.umem.tx_metadata_len().into()) else {
            return false;
        };
        let last = piece.offset + u64::from(piece.len.max(1)) - 1;
        !self.queue.sends.by_dma || from / PAGE_BYTES == last / PAGE_BYTES
    }

    /// Queues a descriptor that refers to guest memory. (Without `always` it is not inlined: 4 instructions a frame.)
    #[inline(always)]
    pub(super) fn queue_piece(&mut self, chain: Option<ChainId>, data: UmemOffset, len: u32, more: bool) {
        // The kernel uses the lowest bit of a sent address itself (6.18), so the address by which the completion is
        // recognized must be even.
        if let Ok(frame) = self.queue.umem.adopt(UmemOffset::new(data.get() & !1)) {
            let outbound = Outbound {
                chain,
                bounce: false,
                ends: !more,
            };
            self.sending.push(frame.offset().get(), outbound);
            self.outgoing.push(TxDesc {
                frame,
                offset: data,
                len,
                more,
                metadata: false,
            });
        } else {
            // Never: the address was checked when the descriptor was read. A drop is milder than a panic.
            self.counters.from_guest_too_many_pieces.add(1);
            self.sending.push_done(Outbound {
                chain,
                bounce: false,
                ends: false,
            });
        }
    }

    /// Queues a frame from a copy in a bounce chunk, for example because it is in several pieces.
    fn queue_gathered(&mut self, chain: ChainId, frame: GuestFrame<'_>) -> Option<bool> {
        let len = frame.sending.len;
        let chunk = self.queue.pool.take()?;
        let offset = self.queue.umem.send_offset(&chunk);
        FromChain::frame(frame, &mut Cursor::default()).copy(len, &self.queue.umem, offset);
        self.outgoing.push(TxDesc {
            frame: chunk,
            offset,
            len: fill_up(&self.queue.umem, offset, len, self.queue.sends),
            more: false,
            metadata: false,
        });
        self.note_bounced(self.outgoing.len() - 1, Some(chain));
        Some(true)
    }

    /// Queues a frame whose first bytes were checked: they are sent from a copy in a bounce chunk. The rest is sent
    /// directly from guest memory if the socket takes references, or if the frame is longer than a chunk.
    #[inline(never)]
    fn queue_checked(&mut self, chain: ChainId, frame: GuestFrame<'_>) -> Option<bool> {
        // At most the frame's length.
        #[allow(clippy::cast_possible_truncation)]
        let (head, len) = (frame.head.len() as u32, frame.sending.len);
        let is_long = len > self.queue.umem.max_sent_bytes();
        let refers = (is_long || self.queue.sends.refers)
            && self.find_pieces(frame.place_of(head), frame.buffers, len - head);
        match (refers, is_long) {
            (true, _) => {}
            (false, false) => return self.queue_gathered(chain, frame),
            (false, true) => {
                self.counters.from_guest_too_many_pieces.add(1);
                self.return_unsent(chain);
                return Some(false);
            }
        }
        if self.pieces.len() >= self.ring_room().min(self.sending.room()) {
            return None;
        }
        let bounce = self.queue.pool.take()?;
        let offset = self.queue.umem.send_offset(&bounce);
        // Always inside the chunk.
        let _ = self.queue.umem.write(offset, frame.head);
        self.outgoing.push(TxDesc {
            frame: bounce,
            offset,
            len: head,
            more: true,
            metadata: false,
        });
        self.note_bounced(self.outgoing.len() - 1, None);
        let parts = std::mem::take(&mut self.pieces);
        self.queue_pieces(chain, &parts);
        self.pieces = parts;
        Some(true)
    }

    /// Queues a frame that is longer than a chunk: descriptors that refer to its pieces.
    fn queue_multi_buffer(&mut self, chain: ChainId, from: Cursor, buffers: &[Buffer]) -> Option<bool> {
        let mut parts = std::mem::take(&mut self.pieces);
        parts.clear();
        let (mut at, most) = (from, self.queue.umem.max_sent_bytes());
        parts.extend(std::iter::from_fn(|| at.next(buffers, most)));
        let queued = self.queue_parts(chain, &parts);
        self.pieces = parts;
        queued
    }

    fn queue_parts(&mut self, chain: ChainId, parts: &[Piece]) -> Option<bool> {
        if parts.len() > self.queue.sends.most_pieces || !parts.iter().all(|&part| self.can_refer(part)) {
            self.counters.from_guest_too_many_pieces.add(1);
            self.return_unsent(chain);
            return Some(false);
        }
        if parts.len() > self.ring_room().min(self.sending.room()) {
            return None;
        }
        self.queue_pieces(chain, parts);
        Some(true)
    }

    /// Queues the last pieces of a frame; `chain` is returned when the last one was sent.
    fn queue_pieces(&mut self, chain: ChainId, parts: &[Piece]) {
        for (at, part) in parts.iter().enumerate() {
            let last = at + 1 == parts.len();
            let data = UmemOffset::new(part.offset);
            self.queue_piece(last.then_some(chain), data, part.len, !last);
        }
    }

    /// Queues a frame with an open checksum from a copy in a bounce chunk, where the guest can change neither the
    /// summed bytes nor the metadata. The builder completes the checksum, or requests it from the NIC.
    #[inline(never)]
    fn queue_summed(&mut self, chain: ChainId, frame: GuestFrame<'_>, at: ChecksumAt) -> Option<()> {
        if self.queue.pool.is_empty() {
            return None;
        }
        let first = self.outgoing.len();
        let mut from = Cursor::default();
        let mut source = FromChain::frame(frame, &mut from);
        self.builder().frame(frame.sending.len, at, &mut source);
        self.note_bounced(first, Some(chain));
        Some(())
    }

    /// Records the queued descriptors from `first` on, which refer to bounce chunks; `chain` is returned with the last.
    pub(super) fn note_bounced(&mut self, first: usize, chain: Option<ChainId>) {
        self.counters.bounced_frames.add(1);
        let descs = &self.outgoing[first..];
        for (at, desc) in descs.iter().enumerate() {
            let chain = chain.filter(|_| at + 1 == descs.len());
            let outbound = Outbound {
                chain,
                bounce: true,
                ends: !desc.more,
            };
            self.sending.push(desc.frame.offset().get(), outbound);
        }
    }

    /// A builder of frames in the bounce area.
    pub(super) fn builder(&mut self) -> Builder<'_> {
        Builder {
            umem: &self.queue.umem,
            pool: &mut self.queue.pool,
            outgoing: &mut self.outgoing,
            sends: self.queue.sends,
            counters: &self.counters,
        }
    }

    /// Whether descriptors can refer to the next `bytes` of a chain, behind one descriptor of a bounce chunk. If so,
    /// stores their pieces in `pieces`.
    pub(super) fn find_pieces(&mut self, from: Cursor, buffers: &[Buffer], bytes: u32) -> bool {
        self.pieces.clear();
        let (mut from, mut left) = (from, bytes);
        while left > 0
            && self.pieces.len() + 1 < self.queue.sends.most_pieces
            && let Some(piece) = from.next(buffers, left.min(self.queue.umem.max_sent_bytes()))
            && self.can_refer(piece)
        {
            left -= piece.len;
            self.pieces.push(piece);
        }
        left == 0 && bytes > 0
    }

    /// Sends queued frames when the lane is stopped, on a thread that may wait. Frames not sent by then are dropped: to
    /// repeat a frame would be worse than to lose it. Returns the chain of a GSO packet that was sent only in part.
    pub(super) fn send_before_stop(&mut self, vring: &mut Vring) -> Option<ChainId> {
        let half_sent = self.segment_before_stop(vring);
        // Where the NIC reads by DMA, a kick only starts it, so time has to pass; a copying kernel sends in the kick.
        let (kicks, wait) = match self.queue.sends.by_dma {
            true => (STOP_WAITS, STOP_WAIT),
            false => (STOP_KICKS, Duration::ZERO),
        };
        for _ in 0..kicks {
            if self.queue.nic.unsent() == 0 || self.link != LinkState::Up {
                break;
            }
            self.kick();
            std::thread::sleep(wait);
            self.reap(vring);
        }
        half_sent
    }

    /// Closes the socket, and waits until the kernel and the NIC neither read nor write the guest's memory any more.
    /// Only then are the remaining chains and buffers returned, and may the VMM get the bases. Counts the frames that
    /// were not sent.
    pub(super) fn close(self, vring: &mut Vring, guest: &mut RxQueue, half_sent: Option<ChainId>) {
        self.counters.from_guest_queue_stopped.add(self.frames_out());
        let Self {
            queue,
            receiver,
            mut sending,
            counters,
            release,
            ..
        } = self;
        release.iter().for_each(|release| release.begin());
        drop(queue);
        if let Err(error) = release.map_or(Ok(()), Release::wait) {
            tracing::error!(
                "nobody knows whether the NIC has let go of the guest's memory, so buffers that it had are not given \
                 back, and the guest lacks them until its driver starts anew: {}",
                with_sources(&*error)
            );
            return;
        }
        let unsent = std::iter::from_fn(|| sending.pop_any()).filter_map(|outbound| outbound.chain);
        for chain in unsent.chain(half_sent) {
            vring.queue.push_used(chain, 0);
        }
        vring.publish(&counters);
        receiver.give_up(guest);
    }

    pub(super) fn kick(&mut self) {
        self.link = self.queue.nic.kick();
        self.counters.nic_kicks.add(1);
    }
}
