//! Copy placement, guest → NIC: frames copied into chunks of the UMEM, super-frames cut on the way.

use offload::segment::{Gso, Request};
use virtqueue::{Buffer, Chains};
use xsk::{TxDesc, UmemOffset};

use super::CopyLane;
use crate::nic::queue::{Link, Nic};
use crate::switch::copy_bytes::guest_to_umem;
use crate::switch::lane::SEGMENTS;
use crate::switch::super_frame::{FromChain, LAST_KICKS, LAST_WAIT, LAST_WAITS, SuperFrame, Tally, read};
use device::pair::{Cursor, Fault, Piece, Sending, pieces};

impl<N: Nic> CopyLane<N> {
    /// Guest → NIC.
    pub(super) fn from_guest(&mut self) -> Result<usize, Fault> {
        self.reclaim();
        let turn = self.turns.begin();
        if turn == 0 {
            if self.nic.unsent() > 0 {
                self.kick();
            }
            return Ok(0);
        }
        if self.rest.plan.is_some() {
            let sent = self.send_rest(turn);
            if sent > 0 || self.rest.plan.is_some() {
                return Ok(sent);
            }
        }
        if !self.guest.from_guest.enabled {
            if self.nic.unsent() > 0 {
                self.kick();
            }
            return Ok(0);
        }
        let room = self.nic.room_to_nic();
        let most = turn.min(self.takes.most()).min(room).min(self.pool.len());
        if most == 0 {
            self.counters.from_guest_waits.add(1);
            self.kick();
            return Ok(0);
        }
        let mut chains = std::mem::take(&mut self.scratch.from_guest);
        let taken = self.guest.from_guest.queue.pop(&mut chains, most);
        let moved = taken
            .map_err(Fault::from)
            .and_then(|_| self.send(&chains, (room, turn)));
        self.scratch.from_guest = chains;
        moved
    }

    /// Takes back what was sent.
    #[inline]
    fn reclaim(&mut self) {
        if self.nic.unsent() > 0 {
            let references = &mut self.references;
            let free = |frame| references.give_back(frame);
            self.pool.extend(self.nic.sent(SEGMENTS * 2).filter_map(free));
        }
    }

    /// Copies a batch of the guest's chains into chunks and hands them to the NIC, which has so much room; no further one when
    /// the turn's frames are used up.
    fn send(&mut self, chains: &Chains, (room, turn): (usize, usize)) -> Result<usize, Fault> {
        let (mut tally, mut done) = (Tally::default(), 0);
        for (at, chain) in chains.iter().enumerate() {
            if tally.work() >= turn as u64 {
                self.guest.from_guest.queue.unpop(chains.slots(at));
                break;
            }
            let segments = chains.buffers(chain);
            let judged =
                self.guest
                    .judge(chain, segments, self.link.loses(&self.counters), &self.counters)?;
            let left = room - self.scratch.outgoing.len();
            let sent = match judged {
                None => Some(()),
                Some(Sending {
                    start: (from, skip),
                    len,
                    request: Request { csum: None, .. },
                }) => self.copy_out(pieces(segments, from, skip), len, (left, &mut tally)),
                Some(asking) => self.copy_out_asking(segments, &asking, (left, turn, &mut tally)),
            };
            self.waits_for_room = sent.is_none();
            if self.waits_for_room {
                // Needs more chunks than are free or than the ring has room for: later.
                self.counters.from_guest_waits.add(1);
                self.guest.from_guest.queue.unpop(chains.slots(at));
                break;
            }
            self.guest.from_guest.queue.push_used(chain.id, 0);
            tally.use_chain(segments.len());
            done += 1;
            if self.rest.plan.is_some() {
                // Nothing overtakes it.
                self.guest.from_guest.queue.unpop(chains.slots(at + 1));
                break;
            }
        }
        self.takes.note(chains.len(), done);
        self.spend(&tally);
        // Counted before they are given back: who sees a chain again finds it counted.
        self.counters.from_guest_frames.add(tally.frames);
        self.counters.from_guest_bytes.add(tally.bytes);
        if !chains.is_empty() {
            // Given back before they are sent: should we die in between, they are lost; the other way
            // round a successor would send them once more.
            self.guest.from_guest.publish(&self.counters);
            self.flush_outgoing();
        } else if self.nic.unsent() > 0 {
            self.kick();
        }
        Ok(done)
    }

    fn spend(&mut self, tally: &Tally) {
        self.turns
            .spend(usize::try_from(tally.work()).unwrap_or(usize::MAX));
    }

    /// Copies one frame into one chunk, or several; `None` when there is no room for it now.
    #[inline]
    fn copy_out(
        &mut self,
        pieces: impl Iterator<Item = Piece>,
        len: u32,
        (room, tally): (usize, &mut Tally),
    ) -> Option<()> {
        if len > self.chunk_bytes {
            return self.copy_out_in_pieces(pieces, len, (room, tally));
        }
        if room == 0 {
            return None;
        }
        let frame = self.pool.take()?;
        let data = self.umem.send_offset(&frame);
        let mut at = data.get();
        for piece in pieces {
            guest_to_umem(&self.guest.memory, piece, &self.umem, UmemOffset::new(at))?;
            at += u64::from(piece.len);
        }
        self.scratch.outgoing.push(TxDesc {
            frame,
            offset: data,
            len,
            more: false,
            metadata: false,
        });
        tally.add(len);
        Some(())
    }

    /// A frame longer than a chunk, as a multi-buffer frame.
    #[cold]
    fn copy_out_in_pieces(
        &mut self,
        pieces: impl Iterator<Item = Piece>,
        len: u32,
        (room, tally): (usize, &mut Tally),
    ) -> Option<()> {
        let Some(chunks) = self.chunks(len) else {
            return Some(());
        };
        if chunks > room.min(self.pool.len()) {
            return None;
        }
        let mut left = len;
        let mut pieces = pieces;
        let mut piece = pieces.next()?;
        while left > 0 {
            let frame = self.pool.take()?;
            let data = self.umem.send_offset(&frame);
            let fill = left.min(self.chunk_bytes);
            let mut done = 0;
            while done < fill {
                if piece.len == 0 {
                    piece = pieces.next()?;
                }
                let (part, rest) = piece.split(piece.len.min(fill - done));
                let to = UmemOffset::new(data.get() + u64::from(done));
                guest_to_umem(&self.guest.memory, part, &self.umem, to)?;
                piece = rest;
                done += part.len;
            }
            left -= fill;
            self.scratch.outgoing.push(TxDesc {
                frame,
                offset: data,
                len: fill,
                more: left > 0,
                metadata: false,
            });
        }
        tally.add(len);
        Some(())
    }

    /// Chunks that a frame needs; `None`: more than one can have, which is counted.
    #[inline]
    fn chunks(&self, len: u32) -> Option<usize> {
        let chunks = len.div_ceil(self.chunk_bytes) as usize;
        if chunks > self.sends.most_pieces {
            self.counters.from_guest_too_many_pieces.add(1);
            return None;
        }
        Some(chunks)
    }

    /// A frame that asks for more than being sent; `None` when there is no room for it now.
    #[inline(never)]
    fn copy_out_asking(
        &mut self,
        segments: &[Buffer],
        asking: &Sending,
        (room, turn, tally): (usize, usize, &mut Tally),
    ) -> Option<()> {
        let &Sending { start, len, request } = asking;
        match request {
            Request {
                gso: Some(gso),
                csum: Some(checksum),
            } => self.cut((segments, start, len), (gso, checksum), (room, turn, tally)),
            Request { csum: Some(at), .. } => {
                let Some(chunks) = self.chunks(len) else {
                    return Some(());
                };
                if chunks > room.min(self.pool.len()) {
                    return None;
                }
                let (mut builder, _, memory) = self.builder();
                let mut source = FromChain {
                    memory,
                    segments,
                    at: &mut Cursor::at(start),
                };
                builder.frame(len, at, &mut source);
                tally.add(len);
                Some(())
            }
            Request { csum: None, .. } => Some(()),
        }
    }

    /// Cuts a super-frame, all of it in one go unless it has very many segments; `None` when there is no room for that now.
    fn cut(
        &mut self,
        (segments, start, len): (&[Buffer], (usize, u32), u32),
        asked: (Gso, (u16, u16)),
        (room, turn, tally): (usize, usize, &mut Tally),
    ) -> Option<()> {
        let frame = SuperFrame::open(&self.guest, (segments, start), len, asked, &self.counters);
        let Some(mut frame) = frame else {
            return Some(());
        };
        let most_queued = self.scratch.outgoing.len() + room;
        let Some((mut cutter, memory)) = self.cutter(&frame.plan, most_queued) else {
            self.counters.from_guest_too_many_pieces.add(1);
            return Some(());
        };
        let many = frame.plan.segments() as usize > SEGMENTS;
        if many || !cutter.has_room(&frame.plan, 0..frame.plan.segments()) {
            if !many && (self.nic.unsent() > 0 || !self.scratch.outgoing.is_empty()) {
                return None;
            }
            // It would take more than a few turns, or everything that can come back is back, and there will never be more
            // room than now.
            self.keep(&frame, segments, len);
            self.build_rest((room, turn), tally);
            return Some(());
        }
        let mut source = FromChain {
            memory,
            segments,
            at: &mut frame.payload,
        };
        for index in 0..frame.plan.segments() {
            tally.add(cutter.segment(&frame.plan, index, &mut source));
        }
        self.counters.from_guest_super_frames.add(1);
        Some(())
    }

    /// Copies a super-frame away.
    #[cold]
    fn keep(&mut self, frame: &SuperFrame, segments: &[Buffer], len: u32) {
        self.counters.from_guest_super_frames.add(1);
        self.rest
            .payload
            .resize(len as usize - frame.plan.header_len(), 0);
        read(
            &self.guest.memory,
            segments,
            frame.payload,
            &mut self.rest.payload,
        );
        self.rest.next = 0;
        self.rest.plan = Some(frame.plan.clone());
    }

    /// Builds as many segments of the super-frame in hand as there is room for, and as the turn has left.
    #[cold]
    fn build_rest(&mut self, (room, turn): (usize, usize), tally: &mut Tally) {
        let Some(plan) = self.rest.plan.take() else {
            return;
        };
        let first = plan.payload(self.rest.next).start as usize - plan.header_len();
        let payload = std::mem::take(&mut self.rest.payload);
        let (mut source, mut next) = (&payload[first..], self.rest.next);
        let most_queued = self.scratch.outgoing.len() + room;
        if let Some((mut cutter, _)) = self.cutter(&plan, most_queued) {
            while next < plan.segments()
                && tally.frames < turn as u64
                && cutter.has_room(&plan, next..next + 1)
            {
                tally.add(cutter.segment(&plan, next, &mut source));
                next += 1;
            }
        }
        self.rest.next = next;
        self.rest.payload = payload;
        if next < plan.segments() {
            self.rest.plan = Some(plan);
        }
    }

    /// Goes on with the super-frame in hand for a turn of so many frames; the segments that were sent.
    #[cold]
    fn send_rest(&mut self, turn: usize) -> usize {
        if self.link == Link::Gone {
            self.rest.plan = None;
            self.counters.from_guest_rest_of_super_frame.add(1);
            return 0;
        }
        let mut tally = Tally::default();
        let room = self.nic.room_to_nic();
        self.build_rest((room, turn), &mut tally);
        self.spend(&tally);
        if tally.frames == 0 {
            self.counters.from_guest_waits.add(1);
        }
        self.flush_outgoing();
        self.counters.from_guest_frames.add(tally.frames);
        self.counters.from_guest_bytes.add(tally.bytes);
        usize::try_from(tally.frames).unwrap_or(usize::MAX)
    }

    /// The lane is stopped, on a thread that may wait: what is in hand goes out now, as far as the kernel takes it.
    pub(super) fn send_at_last(&mut self) {
        let mut waits = 0;
        while self.rest.plan.is_some() && self.link == Link::Up && waits < LAST_WAITS {
            self.reclaim();
            if self.send_rest(usize::MAX) == 0 {
                std::thread::sleep(LAST_WAIT);
                waits += 1;
            }
        }
        if self.rest.plan.take().is_some() {
            self.counters.from_guest_rest_of_super_frame.add(1);
        }
        // What a kick left in the ring.
        for _ in 0..LAST_KICKS {
            self.reclaim();
            if self.nic.unsent() == 0 || self.link != Link::Up {
                break;
            }
            self.kick();
        }
    }
}
