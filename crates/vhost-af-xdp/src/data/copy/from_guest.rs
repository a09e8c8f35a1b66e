//! Copy placement, guest → NIC: frames copied into chunks of the UMEM.

use virtqueue::Chains;
use xsk::{TxDesc, UmemOffset};

use super::{CopyLane, MOST_PIECES};
use crate::data::copy_bytes::guest_to_umem;
use crate::data::guest::{Fault, Piece, Sending, pieces};
use crate::data::lane::BATCH;
use crate::data::nic::Nic;

impl<N: Nic> CopyLane<N> {
    /// Guest → NIC.
    pub(super) fn from_guest(&mut self) -> Result<usize, Fault> {
        if self.nic.unsent() > 0 {
            for frame in self.nic.sent(BATCH * 2) {
                self.pool.put(frame);
            }
        }
        if !self.guest.from_guest.enabled {
            return Ok(0);
        }
        let room = BATCH.min(self.nic.room_to_nic()).min(self.pool.len());
        if room == 0 {
            self.counters.from_guest_waits.add(1);
            self.kick();
            return Ok(0);
        }
        let mut chains = std::mem::take(&mut self.scratch.from_guest);
        let taken = self.guest.from_guest.queue.pop(&mut chains, room);
        let moved = taken.map_err(Fault::from).and_then(|_| self.send(&chains));
        self.scratch.from_guest = chains;
        moved
    }

    /// Copies a batch of the guest's chains into chunks and hands them to the NIC.
    fn send(&mut self, chains: &Chains) -> Result<usize, Fault> {
        let (mut bytes, mut frames, mut done) = (0, 0, 0);
        for (at, chain) in chains.iter().enumerate() {
            let segments = chains.segments(chain);
            let judged = self.guest.judge(chain, segments, self.link, &self.counters)?;
            if let Sending::Frame { from, skip, len } = judged {
                let Some(sent) = self.copy_out(pieces(segments, from, skip), len, chains.len() - at) else {
                    // Needs more chunks than are free or than the ring has room for: later.
                    self.guest.from_guest.queue.unpop(chains.slots(at));
                    break;
                };
                frames += u64::from(sent);
                bytes += if sent { u64::from(len) } else { 0 };
            }
            self.guest.from_guest.queue.push_used(chain.id, 0);
            done += 1;
        }
        if !chains.is_empty() {
            // Given back before they are sent: should we die in between, they are lost; the other way
            // round a successor would send them once more.
            self.guest.from_guest.publish(&self.counters);
            self.flush_outgoing();
        } else if self.nic.unsent() > 0 {
            self.kick();
        }
        self.counters.from_guest_frames.add(frames);
        self.counters.from_guest_bytes.add(bytes);
        Ok(done)
    }

    /// Copies one frame into one chunk, or several; false when it had to be dropped, `None` when
    /// there is no room for it now. `reserved` chunks are wanted by this chain and the ones behind it.
    #[inline]
    fn copy_out(&mut self, pieces: impl Iterator<Item = Piece>, len: u32, reserved: usize) -> Option<bool> {
        if len > self.chunk_bytes {
            return self.copy_out_in_pieces(pieces, len, reserved);
        }
        let frame = self.pool.take()?;
        let data = frame.offset();
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
        Some(true)
    }

    /// A frame longer than a chunk, as a multi-buffer frame.
    #[cold]
    fn copy_out_in_pieces(
        &mut self,
        pieces: impl Iterator<Item = Piece>,
        len: u32,
        reserved: usize,
    ) -> Option<bool> {
        let chunks = len.div_ceil(self.chunk_bytes) as usize;
        if !self.multi_buffer || chunks > MOST_PIECES {
            self.counters.from_guest_too_many_pieces.add(1);
            return Some(false);
        }
        let room = self.nic.room_to_nic().saturating_sub(self.scratch.outgoing.len());
        if chunks > self.pool.len() || chunks + reserved - 1 > room {
            return None;
        }
        let mut left = len;
        let mut pieces = pieces;
        let mut piece = pieces.next()?;
        while left > 0 {
            let frame = self.pool.take()?;
            let data = frame.offset();
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
        Some(true)
    }
}
