//! Direct placement, guest → NIC: frames sent from where they lie, or gathered in the bounce area.

use virtqueue::{ChainId, Chains, Segment};
use xsk::{TxDesc, UmemOffset};

use super::{CHUNK_BYTES, DirectLane, MOST_PIECES, Outbound};
use crate::data::copy_bytes::guest_to_umem;
use crate::data::guest::{Fault, Piece, Sending, pieces};
use crate::data::lane::BATCH;
use crate::data::nic::{Link, Nic};

impl<N: Nic> DirectLane<N> {
    pub(super) fn from_guest(&mut self) -> Result<usize, Fault> {
        let mut moved = self.reap();
        if self.guest.from_guest.enabled {
            let room = BATCH.min(self.nic.room_to_nic()).min(self.sending.room());
            if room == 0 {
                self.counters.from_guest_waits.add(1);
            } else {
                let mut chains = std::mem::take(&mut self.scratch.chains);
                let taken = self.guest.from_guest.queue.pop(&mut chains, room);
                let sent = taken.map_err(Fault::from).and_then(|_| self.send(&chains));
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
        for frame in self.nic.sent(BATCH * 2) {
            // An address that we never gave cannot be attributed; the kernel does not do that.
            if self
                .sending
                .complete(frame.offset().get())
                .is_some_and(|outbound| outbound.bounce)
            {
                self.pool.put(frame);
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

    fn send(&mut self, chains: &Chains) -> Result<usize, Fault> {
        let (mut frames, mut bytes, mut done) = (0, 0, 0);
        for (at, chain) in chains.iter().enumerate() {
            let segments = chains.segments(chain);
            if self.sent_before > 0 {
                // It was sent, or is lost; sending it once more would be worse.
                self.sent_before -= 1;
                self.counters.from_guest_fate_unknown.add(1);
                self.sending.push_done(Outbound {
                    chain: Some(chain.id),
                    bounce: false,
                });
                done += 1;
                continue;
            }
            match self.guest.judge(chain, segments, self.link, &self.counters)? {
                Sending::Drop => self.sending.push_done(Outbound {
                    chain: Some(chain.id),
                    bounce: false,
                }),
                Sending::Frame { from, skip, len } => {
                    let frame = (&segments[from..], skip);
                    let Some(sent) = self.queue_frame(chain.id, frame, len, chains.len() - at) else {
                        self.guest.from_guest.queue.unpop(chains.slots(at));
                        break;
                    };
                    frames += u64::from(sent);
                    bytes += if sent { u64::from(len) } else { 0 };
                }
            }
            done += 1;
        }
        self.nic.to_nic(self.scratch.outgoing.drain(..));
        self.counters.from_guest_frames.add(frames);
        self.counters.from_guest_bytes.add(bytes);
        Ok(done)
    }

    /// Queues one frame; false when it had to be dropped, `None` when there is no room for it now.
    #[inline]
    fn queue_frame(
        &mut self,
        chain: ChainId,
        (segments, skip): (&[Segment], u32),
        len: u32,
        behind: usize,
    ) -> Option<bool> {
        if len > CHUNK_BYTES {
            return self.queue_multi_buffer(chain, (segments, skip), behind);
        }
        if let [segment] = segments {
            let data = UmemOffset::new(segment.offset + u64::from(skip));
            self.queue_piece(Some(chain), data, len, false);
            return Some(true);
        }
        self.queue_gathered(chain, (segments, skip), len)
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
        (segments, skip): (&[Segment], u32),
        len: u32,
    ) -> Option<bool> {
        let frame = self.pool.take()?;
        let offset = frame.offset();
        let mut at = offset.get();
        for piece in pieces(segments, 0, skip) {
            let _ = guest_to_umem(&self.guest.memory, piece, &self.umem, UmemOffset::new(at));
            at += u64::from(piece.len);
        }
        self.counters.bounced_frames.add(1);
        self.sending.push(
            offset.get(),
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
        (segments, skip): (&[Segment], u32),
        behind: usize,
    ) -> Option<bool> {
        let mut parts = std::mem::take(&mut self.scratch.pieces);
        parts.clear();
        parts.extend(pieces(segments, 0, skip).flat_map(chunks));
        let queued = self.queue_parts(chain, &parts, behind);
        self.scratch.pieces = parts;
        queued
    }

    fn queue_parts(&mut self, chain: ChainId, parts: &[Piece], behind: usize) -> Option<bool> {
        if !self.multi_buffer || parts.len() > MOST_PIECES {
            self.counters.from_guest_too_many_pieces.add(1);
            self.sending.push_done(Outbound {
                chain: Some(chain),
                bounce: false,
            });
            return Some(false);
        }
        let room = self
            .nic
            .room_to_nic()
            .saturating_sub(self.scratch.outgoing.len())
            .min(self.sending.room());
        if parts.len() + behind - 1 > room {
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

    pub(super) fn kick(&mut self) {
        self.link = self.nic.kick();
        self.counters.nic_kicks.add(1);
    }
}

/// Cuts a piece of guest memory into pieces that a descriptor can refer to.
fn chunks(piece: Piece) -> impl Iterator<Item = Piece> {
    let mut rest = piece;
    std::iter::from_fn(move || {
        let part;
        (part, rest) = rest.split(rest.len.min(CHUNK_BYTES));
        (part.len > 0).then_some(part)
    })
}
