//! Direct placement, guest → NIC: frames sent from where they lie, or gathered in the bounce area; super-frames cut.

use offload::segment::{Gso, Request};
use virtqueue::{Buffer, ChainId, Chains};
use xsk::{TxDesc, UmemOffset};

use super::{Cutting, DirectLane, Outbound};
use crate::nic::queue::{Link, Nic};
use crate::switch::copy_bytes::guest_to_umem;
use crate::switch::lane::SEGMENTS;
use crate::switch::super_frame::{Builder, FromChain, LAST_WAIT, LAST_WAITS, SuperFrame, Tally};
use device::pair::{Cursor, Fault, Piece, Sending, pieces};

impl<N: Nic> DirectLane<N> {
    pub(super) fn from_guest(&mut self) -> Result<usize, Fault> {
        let mut moved = self.reap();
        let mut turn = self.turns.begin();
        if self.cutting.is_some() && turn > 0 {
            let sent = self.go_on_cutting(turn);
            (moved, turn) = (moved + sent, turn.saturating_sub(sent));
        }
        if self.guest.from_guest.enabled && self.cutting.is_none() && turn > 0 {
            let room = self.nic.room_to_nic();
            let most = turn.min(self.takes.most()).min(room).min(self.sending.room());
            if most == 0 {
                self.counters.from_guest_waits.add(1);
            } else {
                let mut chains = std::mem::take(&mut self.scratch.chains);
                let taken = self.guest.from_guest.queue.pop(&mut chains, most);
                let sent = taken
                    .map_err(Fault::from)
                    .and_then(|_| self.send(&chains, (room, turn)));
                self.scratch.chains = chains;
                moved += sent?;
            }
        }
        // While the interface is down every breath that sends asks whether it is up again.
        if self.nic.unsent() > 0 || (moved > 0 && self.link == Link::Down) {
            self.kick();
            moved += self.reap();
        }
        Ok(moved)
    }

    /// Gives the guest back what was sent.
    pub(super) fn reap(&mut self) -> usize {
        for frame in self.nic.sent(SEGMENTS * 2) {
            // An address that we never gave cannot be attributed; the kernel does not do that.
            if self
                .sending
                .complete(frame.offset().get())
                .is_some_and(|outbound| outbound.bounce)
            {
                self.pool.put(frame);
                self.bounces_out = false;
            }
        }
        let mut count = 0;
        // Nothing comes back from a NIC that is gone: all its descriptors are done.
        let gone = self.link == Link::Gone;
        while let Some(outbound) = if gone {
            self.sending.pop_any()
        } else {
            self.sending.pop_done()
        } {
            if let Some(chain) = outbound.chain {
                self.guest.from_guest.queue.push_used(chain, 0);
            }
            count += 1;
        }
        if count > 0 {
            self.guest.from_guest.publish(&self.counters);
        }
        count
    }

    /// Queues a batch of the guest's chains and hands them to the NIC, which has so much room; of segments no more than the turn
    /// has frames.
    fn send(&mut self, chains: &Chains, (room, turn): (usize, usize)) -> Result<usize, Fault> {
        let (mut tally, mut done) = (Tally::default(), 0);
        for (at, chain) in chains.iter().enumerate() {
            let segments = chains.buffers(chain);
            let left = room - self.scratch.outgoing.len();
            let queued = if left.min(self.sending.room()) == 0 || tally.work() >= turn as u64 {
                None
            } else {
                // By reference: to copy what was just written in other sizes waits for the stores.
                match self
                    .guest
                    .judge(chain, segments, self.link.loses(&self.counters), &self.counters)
                {
                    Ok(ref judged) => {
                        self.queue(chain.id, segments, judged.as_ref(), (left, turn, &mut tally))
                    }
                    Err(fault) => return Err(fault),
                }
            };
            if queued.is_none() {
                self.guest.from_guest.queue.unpop(chains.slots(at));
                break;
            }
            tally.use_chain(segments.len());
            done += 1;
            if self.cutting.is_some() {
                // Nothing overtakes it.
                self.guest.from_guest.queue.unpop(chains.slots(at + 1));
                break;
            }
        }
        self.takes.note(chains.len(), done);
        self.hand_over(&tally);
        Ok(done)
    }

    fn hand_over(&mut self, tally: &Tally) {
        self.turns
            .spend(usize::try_from(tally.work()).unwrap_or(usize::MAX));
        self.nic.to_nic(self.scratch.outgoing.drain(..));
        self.counters.from_guest_frames.add(tally.frames);
        self.counters.from_guest_bytes.add(tally.bytes);
    }

    /// Gives a chain back in its turn, unsent.
    fn give_back(&mut self, chain: ChainId) {
        self.sending.push_done(Outbound {
            chain: Some(chain),
            bounce: false,
        });
    }

    /// Queues one chain; `None` when there is no room for it now. There is room for one descriptor.
    #[inline]
    fn queue(
        &mut self,
        chain: ChainId,
        segments: &[Buffer],
        judged: Option<&Sending>,
        (room, turn, tally): (usize, usize, &mut Tally),
    ) -> Option<()> {
        let Some(&Sending {
            start,
            len,
            ref request,
        }) = judged
        else {
            self.give_back(chain);
            return Some(());
        };
        let (from, skip) = start;
        match *request {
            Request { csum: None, .. } => {
                if self.queue_frame(chain, (&segments[from..], skip), len, room)? {
                    tally.add(len);
                }
                Some(())
            }
            Request {
                csum: Some(at),
                gso: None,
            } => {
                self.queue_summed(chain, (segments, start), len, at)?;
                tally.add(len);
                Some(())
            }
            Request {
                csum: Some(checksum),
                gso: Some(gso),
            } => self.cut(
                chain,
                (segments, start, len),
                (gso, checksum),
                (room, turn, tally),
            ),
        }
    }

    /// Queues one frame; false when it had to be dropped, `None` when there is no room for it now.
    #[inline]
    fn queue_frame(
        &mut self,
        chain: ChainId,
        (segments, skip): (&[Buffer], u32),
        len: u32,
        room: usize,
    ) -> Option<bool> {
        if len > self.umem.max_sent_bytes() {
            return self.queue_multi_buffer(chain, (segments, skip), room);
        }
        if let [segment] = segments {
            let offset = segment.offset + u64::from(skip);
            if self.can_refer(Piece { offset, len }) {
                self.queue_piece(Some(chain), UmemOffset::new(offset), len, false);
                return Some(true);
            }
        }
        self.queue_gathered(chain, (segments, skip), len)
    }

    /// Whether a descriptor may refer to this piece of guest memory.
    #[inline]
    fn can_refer(&self, piece: Piece) -> bool {
        // The kernel wants room for metadata before each descriptor's bytes, used or not.
        piece.offset >= u64::from(self.umem.tx_metadata_len())
    }

    /// Queues a descriptor that refers to guest memory.
    #[inline]
    fn queue_piece(&mut self, chain: Option<ChainId>, data: UmemOffset, len: u32, more: bool) {
        // The kernel keeps the lowest bit of a sent address for itself (6.18), so that the chunk,
        // by which the completion is recognised, starts at an even one.
        if let Ok(frame) = self.umem.adopt(UmemOffset::new(data.get() & !1)) {
            self.sending
                .push(frame.offset().get(), Outbound { chain, bounce: false });
            self.scratch.outgoing.push(TxDesc {
                frame,
                offset: data,
                len,
                more,
                metadata: false,
            });
        } else {
            // Checked when the descriptor was read; kept as a drop, not as a panic.
            self.counters.from_guest_too_many_pieces.add(1);
            self.sending.push_done(Outbound { chain, bounce: false });
        }
    }

    /// A frame in several pieces, gathered in a bounce chunk.
    fn queue_gathered(
        &mut self,
        chain: ChainId,
        (segments, skip): (&[Buffer], u32),
        len: u32,
    ) -> Option<bool> {
        let frame = self.pool.take()?;
        let offset = self.umem.send_offset(&frame);
        let mut at = offset.get();
        for piece in pieces(segments, 0, skip) {
            let _ = guest_to_umem(&self.guest.memory, piece, &self.umem, UmemOffset::new(at));
            at += u64::from(piece.len);
        }
        self.counters.bounced_frames.add(1);
        self.sending.push(
            frame.offset().get(),
            Outbound {
                chain: Some(chain),
                bounce: true,
            },
        );
        self.scratch.outgoing.push(TxDesc {
            frame,
            offset,
            len,
            more: false,
            metadata: false,
        });
        Some(true)
    }

    /// A frame longer than a chunk: descriptors that refer to its pieces.
    fn queue_multi_buffer(
        &mut self,
        chain: ChainId,
        (segments, skip): (&[Buffer], u32),
        room: usize,
    ) -> Option<bool> {
        let mut parts = std::mem::take(&mut self.scratch.pieces);
        parts.clear();
        let most = self.umem.max_sent_bytes();
        let mut at = Cursor::at((0, skip));
        parts.extend(std::iter::from_fn(|| at.next(segments, most)));
        let queued = self.queue_parts(chain, &parts, room);
        self.scratch.pieces = parts;
        queued
    }

    fn queue_parts(&mut self, chain: ChainId, parts: &[Piece], room: usize) -> Option<bool> {
        if parts.len() > self.sends.most_pieces || !parts.iter().all(|&part| self.can_refer(part)) {
            self.counters.from_guest_too_many_pieces.add(1);
            self.give_back(chain);
            return Some(false);
        }
        if parts.len() > room.min(self.sending.room()) {
            return None;
        }
        for (at, part) in parts.iter().enumerate() {
            let last = at + 1 == parts.len();
            self.queue_piece(
                last.then_some(chain),
                UmemOffset::new(part.offset),
                part.len,
                !last,
            );
        }
        Some(true)
    }

    /// A frame whose checksum is to be completed, gathered in a bounce chunk: the guest must not change what
    /// was summed, nor reach the metadata.
    #[inline(never)]
    fn queue_summed(
        &mut self,
        chain: ChainId,
        (segments, start): (&[Buffer], (usize, u32)),
        len: u32,
        at: (u16, u16),
    ) -> Option<()> {
        if self.pool.is_empty() {
            return None;
        }
        let first = self.scratch.outgoing.len();
        let (mut builder, memory) = self.builder();
        let mut source = FromChain {
            memory,
            segments,
            at: &mut Cursor::at(start),
        };
        builder.frame(len, at, &mut source);
        self.note_bounced(first, Some(chain));
        Some(())
    }

    /// Notes descriptors of the bounce area from the first one on; the last one gives `chain` back.
    fn note_bounced(&mut self, first: usize, chain: Option<ChainId>) {
        self.counters.bounced_frames.add(1);
        let descs = &self.scratch.outgoing[first..];
        for (at, desc) in descs.iter().enumerate() {
            let chain = chain.filter(|_| at + 1 == descs.len());
            let outbound = Outbound { chain, bounce: true };
            self.sending.push(desc.frame.offset().get(), outbound);
        }
    }

    /// What builds frames in the bounce area, and where their bytes come from.
    fn builder(&mut self) -> (Builder<'_>, &virtqueue::MemoryMap) {
        let builder = Builder {
            umem: &self.umem,
            own_from: self.own_from,
            pool: &mut self.pool,
            outgoing: &mut self.scratch.outgoing,
            sends: self.sends,
            counters: &self.counters,
        };
        (builder, &self.guest.memory)
    }

    /// Begins to cut a super-frame.
    #[inline(never)]
    fn cut(
        &mut self,
        chain: ChainId,
        (segments, start, len): (&[Buffer], (usize, u32), u32),
        asked: (Gso, (u16, u16)),
        (room, turn, tally): (usize, usize, &mut Tally),
    ) -> Option<()> {
        let frame = SuperFrame::open(&self.guest, (segments, start), len, asked, &self.counters);
        let Some(frame) = frame else {
            self.give_back(chain);
            return Some(());
        };
        if frame.plan.segment_bytes_max() > self.umem.max_sent_bytes() {
            self.counters.from_guest_too_many_pieces.add(1);
            self.give_back(chain);
            return Some(());
        }
        self.counters.from_guest_super_frames.add(1);
        self.cut_segments.clear();
        self.cut_segments.extend_from_slice(segments);
        self.cutting = Some(Cutting { frame, chain });
        self.queue_segments((room, turn), tally);
        Some(())
    }

    /// Queues as many segments of the super-frame in hand as there is room for, and as the turn has left.
    fn queue_segments(&mut self, (room, turn): (usize, usize), tally: &mut Tally) {
        let Some(mut cutting) = self.cutting.take() else {
            return;
        };
        let end = self.scratch.outgoing.len() + room;
        let segments = std::mem::take(&mut self.cut_segments);
        while cutting.frame.left() > 0 && tally.frames < turn as u64 {
            let left = (end - self.scratch.outgoing.len()).min(self.sending.room());
            let Some(bytes) = self.queue_segment(&mut cutting, &segments, left) else {
                break;
            };
            tally.add(bytes);
        }
        self.cut_segments = segments;
        if cutting.frame.left() > 0 {
            self.cutting = Some(cutting);
        }
    }

    /// Queues the next segment; its bytes, or `None` when there is no room for it now.
    fn queue_segment(&mut self, cutting: &mut Cutting, segments: &[Buffer], room: usize) -> Option<u32> {
        if room == 0 || self.pool.is_empty() {
            return None;
        }
        let frame = &mut cutting.frame;
        let index = frame.next;
        let chain = (frame.left() == 1).then_some(cutting.chain);
        let first = self.scratch.outgoing.len();
        let payload = frame.plan.payload(index);
        let bytes = payload.end - payload.start;
        if self.sends.refers && self.refer_to(frame.payload, segments, bytes) {
            if self.scratch.pieces.len() + 1 > room {
                return None;
            }
            self.builder().0.headers(&frame.plan, index);
            self.note_bounced(first, None);
            let parts = std::mem::take(&mut self.scratch.pieces);
            for (at, part) in parts.iter().enumerate() {
                let last = at + 1 == parts.len();
                let data = UmemOffset::new(part.offset);
                self.queue_piece(chain.filter(|_| last), data, part.len, !last);
            }
            self.scratch.pieces = parts;
            frame.payload.pass(segments, bytes);
            self.counters.from_guest_referred_segments.add(1);
        } else {
            let (mut builder, memory) = self.builder();
            let mut source = FromChain {
                memory,
                segments,
                at: &mut frame.payload,
            };
            builder.segment(&frame.plan, index, &mut source);
            self.note_bounced(first, chain);
        }
        frame.next += 1;
        Some(frame.plan.header_len() as u32 + bytes)
    }

    /// Whether the next `bytes` of a chain can be sent by reference behind a descriptor with headers: then `scratch.pieces`
    /// are the pieces. The checksum must be left to the NIC, since the guest may change them.
    fn refer_to(&mut self, from: Cursor, segments: &[Buffer], bytes: u32) -> bool {
        self.scratch.pieces.clear();
        let (mut from, mut left) = (from, bytes);
        while left > 0
            && self.scratch.pieces.len() + 1 < self.sends.most_pieces
            && let Some(piece) = from.next(segments, left.min(self.umem.max_sent_bytes()))
            && self.can_refer(piece)
        {
            left -= piece.len;
            self.scratch.pieces.push(piece);
        }
        left == 0 && bytes > 0 && self.sends.checksum
    }

    /// Goes on with the super-frame in hand for a turn of so many frames; the segments that were queued.
    #[cold]
    fn go_on_cutting(&mut self, turn: usize) -> usize {
        let room = self.nic.room_to_nic();
        if self.link == Link::Gone
            && self.sending.room() > 0
            && let Some(cutting) = self.cutting.take()
        {
            self.counters.from_guest_rest_of_super_frame.add(1);
            self.give_back(cutting.chain);
            return 1;
        }
        let mut tally = Tally::default();
        self.queue_segments((room, turn), &mut tally);
        if tally.frames == 0 {
            self.counters.from_guest_waits.add(1);
        }
        self.hand_over(&tally);
        usize::try_from(tally.frames).unwrap_or(usize::MAX)
    }

    /// The lane is stopped, on a thread that may wait: the super-frame in hand goes out now, as far as the kernel takes it. Its chain, if
    /// that was not all of it.
    pub(super) fn cut_at_last(&mut self) -> Option<ChainId> {
        let mut waits = 0;
        while self.cutting.is_some() && self.link == Link::Up && waits < LAST_WAITS {
            let sent = self.go_on_cutting(usize::MAX);
            self.kick();
            if sent + self.reap() == 0 {
                std::thread::sleep(LAST_WAIT);
                waits += 1;
            }
        }
        let cutting = self.cutting.take()?;
        self.counters.from_guest_rest_of_super_frame.add(1);
        Some(cutting.chain)
    }

    pub(super) fn kick(&mut self) {
        self.link = self.nic.kick();
        self.counters.nic_kicks.add(1);
    }
}
