//! A lane of a cable: a guest's frames go to another guest of this process, and theirs come to it.
//!
//! Super-frames and partial checksums pass as they are: no wire carries them that could not, and the receiving guest completes
//! what it needs. Only a guest that did not accept an offload gets the work done here: its super-frames are cut, its checksums
//! completed.
//!
//! What a guest asks for is checked before it goes on, so that no guest can have another parse headers that say something else
//! than its bytes (`QueuePair::judge`, [`Plan`]).

mod wire;

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use offload::checksum;
use offload::packet::HEADERS_MAX;
use offload::segment::{Gso, GsoKind, Plan, Request};
use virtqueue::Chains;

use wire::Inbox;
pub(crate) use wire::{Parcel, Wire};

use super::lane::{BATCH, DESCRIPTORS, Lane, Rest};
use super::super_frame::MOST_SEGMENTS;
use device::counters::PairCounters;
use device::pair::Stopped;
use device::pair::{Fault, HEADER_BYTES, LONGEST_SUPER_FRAME, QueuePair, Sending, pieces};

/// One end of a cable, as a port has it: the wire, and which of its ends.
pub(crate) type PortEnd = (Arc<Wire>, usize);

/// One end of a cable, as a pair's lane has it.
pub(crate) struct CableEnd {
    pub(crate) wire: Arc<Wire>,
    /// Which end: 0 or 1.
    pub(crate) end: usize,
    pub(crate) pair: u16,
}

impl CableEnd {
    fn inbox(&self) -> &Inbox {
        self.wire.inbox(self.end, self.pair)
    }
}

/// See the module's head.
pub(crate) struct CableLane {
    guest: QueuePair,
    end: CableEnd,
    counters: Arc<PairCounters>,
    chains: Chains,
    outgoing: Vec<Parcel>,
    /// Taken from the inbox, not delivered yet.
    held: VecDeque<Parcel>,
}

impl CableLane {
    /// Joins a guest with its end.
    pub(crate) fn new(guest: QueuePair, end: CableEnd, counters: Arc<PairCounters>) -> Self {
        end.inbox().open();
        Self {
            guest,
            end,
            counters,
            chains: Chains::default(),
            outgoing: Vec::with_capacity(BATCH),
            held: VecDeque::with_capacity(BATCH),
        }
    }

    /// Guest → the other's inbox.
    fn from_guest(&mut self) -> Result<usize, Fault> {
        if !self.guest.from_guest.enabled {
            return Ok(0);
        }
        let wire = Arc::clone(&self.end.wire);
        let target = wire.target(self.end.end, self.end.pair);
        let room = target.map_or(BATCH, |inbox| inbox.room(LONGEST_SUPER_FRAME as usize));
        if room == 0 {
            self.counters.from_guest_waits.add(1);
            return Ok(0);
        }
        let mut chains = std::mem::take(&mut self.chains);
        let popped = self.guest.from_guest.queue.pop(&mut chains, room.min(BATCH));
        let sent = popped
            .map_err(Fault::from)
            .and_then(|_| self.send(&chains, target));
        self.chains = chains;
        sent
    }

    fn send(&mut self, chains: &Chains, target: Option<&Inbox>) -> Result<usize, Fault> {
        let mut bytes = 0;
        for chain in chains {
            let judged = self
                .guest
                .judge(chain, chains.buffers(chain), None, &self.counters)?;
            if let Some(Sending {
                start: (from, skip),
                len,
                request,
            }) = judged
                && let Some(parcel) = self.pack(pieces(chains.buffers(chain), from, skip), len, request)
            {
                bytes += parcel.bytes.len() as u64;
                self.outgoing.push(parcel);
            }
            self.guest.from_guest.queue.push_used(chain.id, 0);
        }
        let count = chains.len();
        if count == 0 {
            return Ok(0);
        }
        self.guest.from_guest.publish(&self.counters);
        let sent = self.outgoing.len() as u64;
        let lost = match target {
            Some(inbox) => inbox.push(&mut self.outgoing),
            None => self.outgoing.drain(..).count(),
        };
        if lost > 0 {
            self.counters.from_guest_no_peer.add(lost as u64);
        } else {
            self.counters.from_guest_frames.add(sent);
            self.counters.from_guest_bytes.add(bytes);
        }
        Ok(count)
    }

    /// Copies a frame out of guest memory; `None`, counted, if its headers are not what it asks for.
    fn pack(
        &self,
        from: impl Iterator<Item = device::pair::Piece>,
        len: u32,
        request: Request,
    ) -> Option<Parcel> {
        let mut bytes = vec![0; len as usize];
        let mut at = 0;
        for piece in from {
            let end = at + piece.len as usize;
            // Checked when the descriptor was read.
            let _ = self
                .guest
                .memory
                .copy_from_guest(piece.offset, bytes.get_mut(at..end)?);
            at = end;
        }
        let header_len = match request.gso {
            None => 0,
            Some(gso) => match plan(&bytes, gso) {
                Some(plan) if plan.segment_bytes_max() > self.guest.frame_limit => {
                    self.counters.from_guest_too_long.add(1);
                    return None;
                }
                // The other guest may not take it whole.
                Some(plan) if plan.segments() > MOST_SEGMENTS => {
                    self.counters.from_guest_too_many_segments.add(1);
                    return None;
                }
                Some(plan) if request.csum == Some(plan.checksum_at()) => {
                    // A header's length is at most HEADERS_MAX.
                    #[allow(clippy::cast_possible_truncation)]
                    {
                        plan.header_len() as u16
                    }
                }
                _ => {
                    self.counters.from_guest_offload_malformed.add(1);
                    return None;
                }
            },
        };
        Some(Parcel {
            request,
            header_len,
            bytes,
        })
    }

    /// Inbox → guest.
    fn to_guest(&mut self) -> Result<usize, Fault> {
        let missing = BATCH.saturating_sub(self.held.len());
        self.end.inbox().take(&mut self.held, missing);
        if self.held.is_empty() {
            return Ok(0);
        }
        if !self.guest.to_guest.enabled {
            return Ok(self.pass_on());
        }
        let mut chains = std::mem::take(&mut self.chains);
        let delivered = self.deliver(&mut chains);
        self.chains = chains;
        let delivered = delivered?;
        if delivered > 0 {
            self.guest.to_guest.publish(&self.counters);
        }
        Ok(delivered)
    }

    /// The guest has this pair switched off: its first one delivers.
    fn pass_on(&mut self) -> usize {
        let count = self.held.len();
        let mut parcels: Vec<Parcel> = self.held.drain(..).collect();
        let first = self.end.wire.inbox(self.end.end, 0);
        if self.end.pair == 0 || first.room(LONGEST_SUPER_FRAME as usize) == 0 {
            self.counters.to_guest_pair_off.add(count as u64);
        } else {
            self.counters.spilled_frames.add(count as u64);
            let lost = first.push(&mut parcels);
            self.counters.to_guest_pair_off.add(lost as u64);
        }
        count
    }

    fn deliver(&mut self, chains: &mut Chains) -> Result<usize, Fault> {
        let mut frames = 0;
        let mut next = 0;
        self.guest.pop_buffers(chains, BATCH)?;
        let mut read = chains.buffers.len();
        while frames < BATCH as u64
            && let Some(parcel) = self.held.pop_front()
        {
            let Some(parcel) = self.adapt(parcel) else {
                continue;
            };
            let wanted = self.guest.header_bytes as usize + parcel.bytes.len();
            let mut count = self.buffers_for(chains, next, wanted);
            if count.is_none() && next > 0 {
                if read >= DESCRIPTORS {
                    self.held.push_front(parcel);
                    break;
                }
                self.guest.to_guest.queue.unpop(chains.slots(next));
                next = 0;
                self.guest.pop_buffers(chains, BATCH)?;
                read += chains.buffers.len();
                count = self.buffers_for(chains, next, wanted);
            }
            match count {
                Some(count) if count == 1 || self.guest.mergeable => {
                    self.write(chains, next, count, &parcel);
                    next += count;
                    frames += 1;
                    self.counters.to_guest_bytes.add(parcel.bytes.len() as u64);
                }
                None if chains.len() < BATCH && (self.guest.mergeable || chains.is_empty()) => {
                    self.counters.to_guest_waits.add(1);
                    self.held.push_front(parcel);
                    break;
                }
                _ => self.counters.to_guest_buffer_too_small.add(1),
            }
        }
        self.guest.to_guest.queue.unpop(chains.slots(next));
        chains.clear();
        self.counters.to_guest_frames.add(frames);
        Ok(usize::try_from(frames).unwrap_or(usize::MAX))
    }

    /// What of a frame the guest takes: as it is, or completed. One that must be cut goes back to `held` in pieces.
    fn adapt(&mut self, mut parcel: Parcel) -> Option<Parcel> {
        let takes = &self.guest.offloads;
        if let Some(gso) = parcel.request.gso {
            let kind = match gso.kind {
                GsoKind::Tcp4 => takes.guest_tso4,
                GsoKind::Tcp6 => takes.guest_tso6,
                GsoKind::Udp if is_ipv6(&parcel.bytes) => takes.guest_uso6,
                GsoKind::Udp => takes.guest_uso4,
            };
            if kind && (takes.guest_ecn || !gso.ecn) {
                return Some(parcel);
            }
            self.cut(&parcel, gso);
            return None;
        }
        if let Some((start, offset)) = parcel.request.csum
            && !takes.guest_csum
        {
            // Inside the frame: judged.
            let _ = checksum::complete(&mut parcel.bytes, start, offset);
            parcel.request = Request::default();
        }
        Some(parcel)
    }

    /// Puts the segments of a super-frame in front of what is held.
    fn cut(&mut self, parcel: &Parcel, gso: Gso) {
        // It was planned when it was packed.
        let Some(plan) = plan(&parcel.bytes, gso) else {
            return;
        };
        for index in (0..plan.segments()).rev() {
            let payload = plan.payload(index);
            let payload = &parcel.bytes[payload.start as usize..payload.end as usize];
            let mut bytes = vec![0; plan.header_len()];
            plan.write_header(index, &mut bytes);
            bytes.extend_from_slice(payload);
            let request = Request {
                csum: Some(plan.checksum_at()),
                gso: None,
            };
            self.held.push_front(Parcel {
                request,
                header_len: 0,
                bytes,
            });
        }
    }

    /// How many of the buffers from `next` on hold `wanted` bytes; `None`: all of them do not.
    fn buffers_for(&self, chains: &Chains, next: usize, wanted: usize) -> Option<usize> {
        let mut left = wanted as u64;
        for (at, chain) in chains.iter().skip(next).enumerate() {
            if u64::from(chain.writable_bytes) >= left {
                return Some(at + 1);
            }
            if !self.guest.mergeable {
                // It has one buffer, and that is too small.
                return Some(2);
            }
            left -= u64::from(chain.writable_bytes);
        }
        None
    }

    fn write(&mut self, chains: &Chains, next: usize, count: usize, parcel: &Parcel) {
        let header = header(parcel, count);
        let mut sources = [&header[..self.guest.header_bytes as usize], &parcel.bytes];
        for chain in chains.iter().skip(next).take(count) {
            let mut written = 0;
            for target in pieces(chains.buffers(chain), 0, 0) {
                let (mut offset, mut room) = (target.offset, target.len as usize);
                for source in &mut sources {
                    let (now, rest) = source.split_at(room.min(source.len()));
                    let _ = self.guest.memory.copy_to_guest(offset, now);
                    (*source, room, offset) = (rest, room - now.len(), offset + now.len() as u64);
                }
                let len = target.len - u32::try_from(room).unwrap_or(0);
                self.guest.wrote(target.offset, len);
                written += len;
            }
            self.guest.to_guest.queue.push_used(chain.id, written);
        }
    }
}

impl Lane for CableLane {
    fn breathe(&mut self) -> Result<usize, Fault> {
        Ok(self.from_guest()? + self.to_guest()?)
    }

    fn arm(&mut self) -> Result<Rest, Fault> {
        if self.guest.from_guest.enabled && self.guest.from_guest.queue.enable_kicks() {
            let target = self.end.wire.target(self.end.end, self.end.pair);
            let stuck = target.is_some_and(|inbox| inbox.room(LONGEST_SUPER_FRAME as usize) == 0);
            return Ok(if stuck { Rest::Soon } else { Rest::Busy });
        }
        if !self.held.is_empty() {
            let more = self.guest.to_guest.enabled && self.guest.to_guest.queue.enable_kicks();
            // Buffers are there, but fewer than the frame needs: their kick may have come already.
            return Ok(if more { Rest::Soon } else { Rest::Idle });
        }
        if !self.end.inbox().sleep() {
            return Ok(Rest::Busy);
        }
        Ok(if self.guest.is_polled() {
            Rest::Soon
        } else {
            Rest::Idle
        })
    }

    fn guest(&self) -> &QueuePair {
        &self.guest
    }

    fn guest_mut(&mut self) -> &mut QueuePair {
        &mut self.guest
    }

    fn wakers(&self) -> Vec<BorrowedFd<'_>> {
        let mut wakers: Vec<_> = self.guest.kicks().collect();
        wakers.push(self.end.inbox().as_fd());
        wakers
    }

    fn nic(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn awaits_nic(&self) -> bool {
        false
    }

    fn replace_guest(&mut self, guest: QueuePair) {
        self.guest = guest;
    }

    fn inject(&mut self, frame: &[u8]) {
        if let Some(inbox) = self.end.wire.target(self.end.end, self.end.pair) {
            self.outgoing.push(Parcel {
                request: Request::default(),
                header_len: 0,
                bytes: frame.to_vec(),
            });
            inbox.push(&mut self.outgoing);
        }
    }

    fn stop(mut self: Box<Self>) -> Stopped {
        let lost = self.end.inbox().close() + self.held.len();
        self.counters.to_guest_queue_stopped.add(lost as u64);
        self.guest.stopped()
    }
}

fn plan(bytes: &[u8], gso: Gso) -> Option<Plan> {
    let len = u32::try_from(bytes.len()).ok()?;
    Plan::new(&bytes[..bytes.len().min(HEADERS_MAX)], len, gso).ok()
}

/// Whether a frame that was judged to be UDP is one of IPv6: by its last ethertype.
fn is_ipv6(bytes: &[u8]) -> bool {
    let len = u32::try_from(bytes.len()).unwrap_or(0);
    offload::packet::parse(&bytes[..bytes.len().min(HEADERS_MAX)], len)
        .is_some_and(|layers| layers.version == offload::packet::Ip::V6)
}

/// The virtio-net header of a frame over so many buffers (VirtIO 1.3, 5.1.6.4).
fn header(parcel: &Parcel, buffers: usize) -> [u8; HEADER_BYTES as usize] {
    let mut header = [0; HEADER_BYTES as usize];
    header[..10].copy_from_slice(&parcel.request.to_header(parcel.header_len));
    // A batch holds far fewer than 65,536 chains.
    #[allow(clippy::cast_possible_truncation)]
    header[10..].copy_from_slice(&(buffers as u16).to_le_bytes());
    header
}
