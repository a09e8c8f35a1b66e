//! Direct placement, guest → NIC: frames sent from where they lie, or gathered in the bounce area.

use virtqueue::{Chains, Segment};
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
            let _ = self.sending.complete(frame.offset().get());
        }
        if self.link == Link::Gone {
            // Nothing comes back from a NIC that is gone.
            let all: Vec<Outbound> = self.sending.drain().collect();
            let count = all.len();
            all.into_iter().for_each(|outbound| self.give_back(outbound));
            return self.publish_sent(count);
        }
        let mut count = 0;
        while let Some(outbound) = self.sending.pop_done() {
            self.give_back(outbound);
            count += 1;
        }
        self.publish_sent(count)
    }

    fn publish_sent(&mut self, count: usize) -> usize {
        if count > 0 {
            self.guest.from_guest.publish(&self.counters);
        }
        count
    }

    #[inline]
    pub(super) fn give_back(&mut self, outbound: Outbound) {
        if let Some(frame) = outbound.bounce {
            self.pool.put(frame);
        }
        if let Some(head) = outbound.head {
            self.guest.from_guest.queue.push_used(head, 0);
        }
    }

    fn send(&mut self, chains: &Chains) -> Result<usize, Fault> {
        let (mut frames, mut bytes, mut done) = (0, 0, 0);
        for (at, chain) in chains.iter().enumerate() {
            let segments = chains.segments(chain);
            match self.guest.judge(chain, segments, &self.counters)? {
                Sending::Drop => self.sending.push_done(Outbound {
                    head: Some(chain.head),
                    bounce: None,
                }),
                Sending::Frame { from, skip, len } => {
                    if !self.queue_frame(chain.head, (&segments[from..], skip), len, chains.len() - at) {
                        self.guest.from_guest.queue.unpop(chains.len() - at);
                        break;
                    }
                    frames += 1;
                    bytes += u64::from(len);
                }
            }
            done += 1;
        }
        self.nic.to_nic(self.scratch.outgoing.drain(..));
        self.counters.from_guest_frames.add(frames);
        self.counters.from_guest_bytes.add(bytes);
        Ok(done)
    }

    /// Queues one frame; false when there is no room for it now.
    #[inline]
    fn queue_frame(
        &mut self,
        head: u16,
        (segments, skip): (&[Segment], u32),
        len: u32,
        behind: usize,
    ) -> bool {
        let count = match self.link {
            Link::Up if segments.len() == 1 && len <= CHUNK_BYTES => {
                let data = UmemOffset::new(segments[0].offset + u64::from(skip));
                self.queue_piece(Some(head), data, len, false);
                return true;
            }
            Link::Up => return self.queue_pieces(head, (segments, skip), len, behind),
            Link::Down => &self.counters.from_guest_interface_down,
            Link::Gone => &self.counters.from_guest_interface_gone,
        };
        count.add(1);
        self.sending.push_done(Outbound {
            head: Some(head),
            bounce: None,
        });
        true
    }

    /// Queues a descriptor that refers to guest memory.
    #[inline]
    fn queue_piece(&mut self, head: Option<u16>, data: UmemOffset, len: u32, more: bool) {
        // The kernel keeps the lowest bit of a sent address for itself (6.18), so that the chunk,
        // by which the completion is recognised, starts at an even one.
        if let Ok(frame) = self.umem.adopt(UmemOffset::new(data.get() & !1)) {
            self.sending
                .push(frame.offset().get(), Outbound { head, bounce: None });
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
            self.sending.push_done(Outbound { head, bounce: None });
        }
    }

    /// A frame in several pieces: gathered in a bounce chunk, or sent as multi-buffer frame.
    fn queue_pieces(
        &mut self,
        head: u16,
        (segments, skip): (&[Segment], u32),
        len: u32,
        behind: usize,
    ) -> bool {
        if len <= CHUNK_BYTES {
            let Some(frame) = self.pool.take() else {
                return false;
            };
            let data = frame.offset();
            let mut at = data.get();
            for piece in pieces(segments, 0, skip) {
                let _ = guest_to_umem(&self.guest.memory, piece, &self.umem, UmemOffset::new(at));
                at += u64::from(piece.len);
            }
            self.counters.bounced_frames.add(1);
            let Ok(sent) = self.umem.adopt(data) else {
                return false;
            };
            self.sending.push(
                data.get(),
                Outbound {
                    head: Some(head),
                    bounce: Some(frame),
                },
            );
            self.scratch.outgoing.push(TxDesc {
                frame: sent,
                offset: data,
                len,
                more: false,
                metadata: false,
            });
            return true;
        }
        let mut parts = std::mem::take(&mut self.scratch.pieces);
        parts.clear();
        parts.extend(pieces(segments, 0, skip).flat_map(chunks));
        let queued = self.queue_multi_buffer(head, &parts, behind);
        self.scratch.pieces = parts;
        queued
    }

    fn queue_multi_buffer(&mut self, head: u16, parts: &[Piece], behind: usize) -> bool {
        if !self.multi_buffer || parts.len() > MOST_PIECES {
            self.counters.from_guest_too_many_pieces.add(1);
            self.sending.push_done(Outbound {
                head: Some(head),
                bounce: None,
            });
            return true;
        }
        let room = self
            .nic
            .room_to_nic()
            .saturating_sub(self.scratch.outgoing.len())
            .min(self.sending.room());
        if parts.len() + behind - 1 > room {
            return false;
        }
        for (at, part) in parts.iter().enumerate() {
            let last = at + 1 == parts.len();
            self.queue_piece(
                last.then_some(head),
                UmemOffset::new(part.offset),
                part.len,
                !last,
            );
        }
        true
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
