//! Direct placement, NIC → guest: receive buffers are posted or deferred, and returned with frames.

use virtqueue::{Buffer, Chain, ChainId, Chains};
use xsk::{Frame, Umem, UmemOffset};

use super::{CHUNK_BYTES, Deferred, DirectReceiver, MOST_BOUNCES_POSTED, MOST_DEFERRED_BUFFERS, Posted};
use crate::backend::receiver::Receive;
use crate::frame::bytes::UmemRange;
use crate::guest::rx_queue::RxQueue;
use crate::guest::to_guest::{NO_OFFLOAD, UmemBytes, with_buffers, write};
use crate::lane::Work;
use crate::lane::limits::BATCH;
use crate::nic::endpoint::NicQueue;
use crate::nic::queue::Nic;
use device::meter;
use device::pair::{Fault, Vring};

impl Receive for DirectReceiver {
    const POSTS_BUFFERS: bool = true;

    /// Each poll posts the guest's new buffers.
    fn has_frames<N: Nic>(&mut self, _queue: &mut NicQueue<N>) -> bool {
        true
    }

    fn deliver<N: Nic>(&mut self, queue: &mut NicQueue<N>, guest: &mut RxQueue) -> Result<usize, Fault> {
        if !guest.vring.enabled {
            return Ok(0);
        }
        let received = self.collect(queue, guest);
        if received > 0 {
            guest.vring.publish(&guest.counters);
        }
        self.take_buffers(queue, guest)?;
        // The queue's chunk tracker does not get them: they are in `posted`.
        queue.nic.give(&mut self.empty, |_| ());
        Ok(received)
    }

    fn enable_notifications<N: Nic>(&mut self, queue: &mut NicQueue<N>, to_guest: &mut Vring) -> Work {
        self.awaits_nic = to_guest.enabled;
        if to_guest.enabled {
            let room = queue.nic.room_to_give() > 0 && self.posted.room() > 0 && !queue.is_awaited;
            if queue.nic.received() > 0 || (to_guest.queue.enable_kicks() && room) {
                return Work::Now;
            }
        }
        Work::None
    }

    /// Frames have the length that the NIC wrote.
    fn set_frame_limit(&mut self, _bytes: u32) {}

    /// Received frames are in the guest's buffers already, and never wait for room.
    fn awaits_nic(&self) -> bool {
        self.awaits_nic
    }

    /// As [`Self::deliver`]; wakes the NIC only if there are new buffers.
    fn post_more<N: Nic>(&mut self, queue: &mut NicQueue<N>, guest: &mut RxQueue) -> Result<(), Fault> {
        if guest.vring.enabled {
            self.take_buffers(queue, guest)?;
            if !self.empty.is_empty() {
                queue.nic.give(&mut self.empty, |_| ());
            }
        }
        Ok(())
    }

    fn finish<N: Nic>(&mut self, queue: &mut NicQueue<N>, guest: &mut RxQueue) {
        while self.collect(queue, guest) > 0 {}
        guest.counters.to_guest_queue_stopped.add(self.posted.len_done());
        guest.vring.publish(&guest.counters);
    }

    /// Rewinds the queue to the first unused buffer of the NIC, or deferred one, or, where that is impossible, returns
    /// them empty.
    fn give_up(mut self, guest: &mut RxQueue) {
        let queue = &mut guest.vring.queue;
        let overtaken = self.posted.has_overtaken();
        let posted = std::iter::from_fn(|| self.posted.pop_any()).filter_map(|posted| match posted {
            Posted::Guest { chain, .. } => Some(chain),
            Posted::Bounce { .. } => None,
        });
        let held = posted.chain(self.deferred.iter().map(|deferred| deferred.chain));
        match overtaken {
            true => held.for_each(|chain| queue.push_used_in_any_order(chain, 0)),
            false => queue.unpop(held.map(|chain| chain.slots).sum()),
        }
        guest.vring.publish(&guest.counters);
    }
}

impl DirectReceiver {
    /// Delivers received frames to the guest, in the order in which buffers were posted, or in that of arrival; returns
    /// how many. Only a received frame completes a buffer.
    fn collect<N: Nic>(&mut self, queue: &mut NicQueue<N>, guest: &mut RxQueue) -> usize {
        match self.take_received(queue, guest) {
            false => 0,
            true => self.give_done(queue, guest),
        }
    }

    /// Records in `posted` the received frame of each buffer that the NIC completed; returns whether there was one.
    #[inline]
    fn take_received<N: Nic>(&mut self, queue: &mut NicQueue<N>, guest: &mut RxQueue) -> bool {
        let (mut any, mut taken) = (false, 0);
        for piece in queue.nic.from_nic(BATCH) {
            any = true;
            taken += usize::from(!piece.more);
            let inside = std::mem::replace(&mut self.inside, piece.more);
            let Some(posted) = self.posted.complete(piece.frame.offset().get()) else {
                guest.counters.to_guest_stray.add(1);
                continue;
            };
            match posted {
                _ if inside || piece.more => {
                    // Never, because no frame is longer than a chunk. A frame in pieces is dropped.
                    guest.counters.to_guest_in_pieces.add(u64::from(!piece.more));
                    if let Posted::Bounce { .. } = posted {
                        queue.pool.put(piece.frame);
                    }
                }
                Posted::Guest { len, .. } => {
                    *len = piece.len;
                    let header = guest.vring.guest.header_bytes;
                    if let Some(look) = &mut self.look {
                        let offload = look.look(&queue.umem, UmemRange::of(&piece), &guest.counters);
                        let place = UmemOffset::new(piece.data.get() - u64::from(header));
                        if offload != NO_OFFLOAD {
                            // Replaces the header of the steering program, except for the number of buffers.
                            let _ = queue.umem.write(place, &offload);
                        }
                    }
                    // The header lies right before the frame: see the head of `direct`.
                    let found = UmemOffset::new(piece.data.get() - u64::from(header));
                    let (start, bytes) = (self.place.start(piece.frame.offset()), header + piece.len);
                    if found != start && move_frame(&queue.umem, found, start, bytes).is_none() {
                        guest.counters.to_guest_stray.add(1);
                        *len = 0;
                        continue;
                    }
                    guest.vring.log_write(start.get(), bytes);
                }
                Posted::Bounce { filled } => *filled = Some(piece),
            }
        }
        meter::count_taken(taken);
        any
    }

    /// Returns completed buffers to the guest, up to the first incomplete one; returns the number of frames in them.
    #[inline]
    fn give_done<N: Nic>(&mut self, queue: &mut NicQueue<N>, guest: &mut RxQueue) -> usize {
        let (mut frames, mut bytes) = (0, 0u64);
        while let Some(posted) = self.posted.pop_done() {
            match posted {
                Posted::Guest { chain, len: 0 } => {
                    // It has no whole frame, and is returned empty.
                    give_back(&mut guest.vring, self.any_order, chain, 0);
                }
                Posted::Guest { chain, len } => {
                    let written = guest.vring.guest.header_bytes + len;
                    give_back(&mut guest.vring, self.any_order, chain, written);
                    bytes += u64::from(len);
                    frames += 1;
                }
                Posted::Bounce { filled: Some(piece) } => {
                    self.bounce_is_back(queue);
                    if self.deliver_bounced(queue, guest, UmemRange::of(&piece)) {
                        bytes += u64::from(piece.len);
                        frames += 1;
                    }
                    queue.pool.put(piece.frame);
                }
                Posted::Bounce { filled: None } => self.bounce_is_back(queue),
            }
        }
        guest.counters.to_guest_frames.add(frames);
        guest.counters.to_guest_bytes.add(bytes);
        meter::count_delivered(frames);
        usize::try_from(frames).unwrap_or(usize::MAX)
    }

    fn take_buffers<N: Nic>(&mut self, queue: &mut NicQueue<N>, guest: &mut RxQueue) -> Result<(), Fault> {
        let room = BATCH.min(queue.nic.room_to_give()).min(self.posted.room());
        // A buffer that could not be deferred is not read again before there is room: it may have very many segments.
        if room > 0 && !queue.is_awaited {
            guest.vring.pop_buffers(&mut guest.buffers, room)?;
            self.post_chains(queue, &mut guest.vring, &guest.buffers);
        }
        if self.defer_all {
            self.post_bounces(queue, &guest.vring);
        }
        Ok(())
    }

    fn post_chains<N: Nic>(&mut self, queue: &mut NicQueue<N>, vring: &mut Vring, chains: &Chains) {
        for (at, chain) in chains.iter().enumerate() {
            let buffers = chains.buffers(chain);
            if let Some(fill) = self.fill_address(buffers)
                && let Ok(frame) = queue.umem.adopt(UmemOffset::new(fill))
            {
                self.posted.push(
                    fill,
                    Posted::Guest {
                        chain: chain.id,
                        len: 0,
                    },
                );
                self.empty.push(frame);
            } else if !self.defer(queue, vring, chain, buffers) {
                queue.is_awaited = true;
                vring.queue.unpop(chains.slots(at));
                break;
            }
        }
    }

    /// Defers a buffer, and, unless all are deferred, posts the bounce chunk that it is paired with. False: there is no
    /// chunk now, or enough is deferred.
    fn defer<N>(
        &mut self,
        queue: &mut NicQueue<N>,
        vring: &Vring,
        chain: &Chain,
        buffers: &[Buffer],
    ) -> bool {
        if self.deferred_buffers.len() >= MOST_DEFERRED_BUFFERS {
            return false;
        }
        self.defer_all |= u64::from(chain.writable_bytes) < longest(vring);
        if !self.defer_all {
            let Some(frame) = self.bounce_to_post(queue) else {
                return false;
            };
            self.post_bounce(frame);
        }
        let bytes = u64::from(chain.writable_bytes);
        self.deferred.push_back(Deferred {
            chain: chain.id,
            buffers: buffers.len(),
            bytes,
        });
        self.deferred_buffers.extend(buffers.iter().copied());
        self.deferred_bytes += bytes;
        true
    }

    fn bounce_is_back<N>(&mut self, queue: &mut NicQueue<N>) {
        self.bounces_posted -= 1;
        queue.is_awaited = false;
    }

    fn bounce_to_post<N>(&mut self, queue: &mut NicQueue<N>) -> Option<Frame> {
        (self.bounces_posted < MOST_BOUNCES_POSTED)
            .then(|| queue.pool.take())
            .flatten()
    }

    fn post_bounce(&mut self, frame: Frame) {
        self.posted
            .push(frame.offset().get(), Posted::Bounce { filled: None });
        self.bounces_posted += 1;
        self.empty.push(frame);
    }

    /// The fill address that makes the kernel put header and frame at the start of a buffer;
    /// `None` for a buffer that must be served through the bounce area.
    #[inline]
    fn fill_address(&self, buffers: &[Buffer]) -> Option<u64> {
        match buffers {
            [buffer] if !self.defer_all => self.place.fill_address(buffer),
            _ => None,
        }
    }

    /// Posts bounce chunks for as many frames as the deferred buffers hold.
    fn post_bounces<N: Nic>(&mut self, queue: &mut NicQueue<N>, vring: &Vring) {
        let frames = if vring.guest.mergeable {
            usize::try_from(self.deferred_bytes / longest(vring)).unwrap_or(usize::MAX)
        } else {
            self.deferred.len()
        };
        while self.bounces_posted < frames
            && self.posted.room() > 0
            && queue.nic.room_to_give() > self.empty.len()
        {
            let Some(frame) = self.bounce_to_post(queue) else {
                return;
            };
            self.post_bounce(frame);
        }
    }

    /// Copies a frame from a bounce chunk into deferred buffers; false when they are too small.
    #[inline(never)]
    fn deliver_bounced<N>(&mut self, queue: &NicQueue<N>, guest: &mut RxQueue, frame: UmemRange) -> bool {
        let mut wanted = u64::from(guest.vring.guest.header_bytes) + u64::from(frame.len);
        let mut count = 0;
        for deferred in &self.deferred {
            count += 1;
            wanted = wanted.saturating_sub(deferred.bytes);
            if wanted == 0 || !guest.vring.guest.mergeable {
                break;
            }
        }
        if wanted > 0 {
            guest.counters.to_guest_buffer_too_small.add(1);
            return false;
        }
        guest.counters.bounced_frames.add(1);
        let offload = match &mut self.look {
            Some(look) => look.look(&queue.umem, frame, &guest.counters),
            None => NO_OFFLOAD,
        };
        let ranges = [frame];
        let mut bytes = UmemBytes::new(&queue.umem, &ranges);
        let mut header = Some(with_buffers(offload, count));
        let mut left = frame.len;
        for _ in 0..count {
            let Some(deferred) = self.deferred.pop_front() else {
                return false;
            };
            self.deferred_bytes -= deferred.bytes;
            self.buffers.clear();
            self.buffers
                .extend(self.deferred_buffers.drain(..deferred.buffers));
            let written = write(&guest.vring, &self.buffers, header.take(), &mut left, &mut bytes);
            give_back(&mut guest.vring, self.any_order, deferred.chain, written);
        }
        true
    }
}

/// Header and longest frame, bytes: what a buffer must hold to take any frame.
fn longest(vring: &Vring) -> u64 {
    u64::from(vring.guest.header_bytes) + u64::from(vring.guest.frame_limit)
}

/// Moves header and frame to the start of their buffer: igb and igc leave a time stamp of 16 bytes before a frame if a
/// user enabled those (`igb_ptp_rx_pktstamp`, drivers/net/ethernet/intel/igb/igb_ptp.c). `None`: too long, or outside.
#[cold]
fn move_frame(umem: &Umem, from: UmemOffset, to: UmemOffset, len: u32) -> Option<()> {
    let mut bytes = [0; CHUNK_BYTES as usize];
    let bytes = bytes.get_mut(..len as usize)?;
    umem.read(from, bytes)?;
    umem.write(to, bytes)
}

/// Returns a buffer with `len` bytes written.
#[inline]
fn give_back(vring: &mut Vring, any_order: bool, chain: ChainId, len: u32) {
    match any_order {
        true => vring.queue.push_used_in_any_order(chain, len),
        false => vring.queue.push_used(chain, len),
    }
}
