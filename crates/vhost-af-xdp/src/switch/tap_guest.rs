//! A guest joined with a tap: a port in tap mode that is of no network.
//!
//! Its frames are written from where they lie ([`super::to_tap`]). Frames for it the kernel writes into its buffers
//! ([`FromTap`]), segmented and with complete checksums as far as the guest did not accept such offloads ([`Tap`]). Each
//! byte is copied once, by the kernel.
//!
//! A frame that cannot be written from where it lies goes by a queue of ours, as in a network: one in too many pieces,
//! and a GSO packet that this kernel does not segment, or with too many segments, which is segmented for the queue.
//!
//! What finds no buffers of the guest waits in the tap. The kernel drops what finds no room there, and counts it.
//!
//! [`Tap`]: crate::nic::tap::Tap

mod from_tap;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use device::counters::{Counter, PairCounters};
use device::offloads::Offloads;
use device::pair::{Fault, QueuePair};
use steer::TapTo;
use virtqueue::{ChainId, Chains};

use self::from_tap::FromTap;
use super::filter::LaneFilter;
use super::from_guest::{Put, Sender, Sink, Turn};
use super::guard::Guard;
use super::guest_frame::GuestFrame;
use super::guests::{GuestLane, Passed, Passing};
use super::inner_queue::{BUFFERS, InnerQueueError, Memory, Received};
use super::lane::{Blame, Lane, Near, Peer, Stopped, Work};
use super::limits::BATCH;
use super::rate_limit::{PortLimits, RateLimit};
use super::to_tap::{TapPut, ToTap};
use crate::nic::interface_tap::{LentTap, Receiving};
use crate::nic::queue::LinkState;

/// See the module's head.
pub(crate) struct TapGuestLane {
    pair: QueuePair,
    counters: Arc<PairCounters>,
    sender: Sender,
    buffers: Chains,
    /// What its guest may get.
    limit: Option<Arc<RateLimit>>,
    to_tap: ToTap,
    /// Its guest's half of the queue to the tap.
    queue: GuestLane,
    from_tap: FromTap,
    /// The guest's next frame waits for room.
    waits_for_room: bool,
    /// `None`: another lane of the port gets the frames.
    receiving: Option<Receiving>,
}

impl TapGuestLane {
    /// Joins a guest with a tap. `link`: the uplink's.
    /// Errors: [`InnerQueueError`].
    pub(crate) fn new(
        pair: QueuePair,
        lent: LentTap,
        link: LinkState,
        counters: Arc<PairCounters>,
    ) -> Result<Self, InnerQueueError> {
        let LentTap {
            tap,
            cuts_udp,
            receiving,
        } = lent;
        let frame_limit = pair.frame_limit;
        let memory = Memory::new(BUFFERS.into(), 2)?;
        let (mut to_guest, received) = memory.queue(None, None)?;
        let (from_guest, _) = memory.queue(None, None)?;
        to_guest.enabled = true;
        // GSO packets that cannot be written from where they lie are segmented, in portions.
        let offloads = Offloads::all().without(Offloads::coalescing());
        let queue = memory.pair(from_guest, to_guest, offloads);
        Ok(Self {
            pair,
            sender: Sender::default(),
            buffers: Chains::default(),
            limit: None,
            to_tap: ToTap {
                frame_limit,
                tap,
                to: TapTo::Uplink,
                link,
                is_stuck: false,
                waiting: Received::new(received, &memory)?,
                ram: memory.ram,
                cuts_udp,
                counters: Arc::clone(&counters),
                is_member: false,
                may_wait: false,
                is_given: false,
            },
            counters,
            queue: GuestLane::new(queue, Arc::default()),
            from_tap: FromTap::default(),
            waits_for_room: false,
            receiving,
        })
    }

    fn from_guest(&mut self) -> Result<usize, Fault> {
        let left = self.sender.begin();
        let went_on = self.go_on();
        self.waits_for_room = has_rest(&mut self.queue) || self.to_tap.is_stuck;
        if left == 0 || !self.pair.from_guest.enabled {
            return Ok(went_on);
        }
        if self.waits_for_room {
            self.counters.from_guest_waits.add(1);
            return Ok(went_on);
        }
        let mut sink = TapSink {
            to_tap: &mut self.to_tap,
            queue: &mut self.queue,
            counters: &self.counters,
        };
        let burst = self
            .sender
            .burst(&mut self.pair, &mut sink, BATCH, &self.counters)?;
        // Also what of this burst's frames the tap had no room for, and segments that follow.
        self.waits_for_room = burst.full || has_rest(&mut self.queue) || self.to_tap.is_stuck;
        if burst.done > 0 {
            self.pair.from_guest.publish(&self.counters);
        }
        Ok(went_on + burst.done)
    }

    /// Goes on with frames in the queue to the tap, and with the segments of a GSO packet that follow.
    fn go_on(&mut self) -> usize {
        if has_rest(&mut self.queue) {
            // Both ends are ours.
            let _ = self.queue.breathe(Near::Nobody);
            self.to_tap.may_wait = true;
        }
        self.to_tap.write_waiting()
    }

    fn to_guest(&mut self) -> Result<usize, Fault> {
        let guest = Peer::new(&mut self.pair, &mut self.buffers, &self.counters);
        let guest = guest.filtered(self.sender.gate.to_guest());
        self.from_tap
            .deliver(&self.to_tap.tap, guest.limited(self.limit.as_ref()))
    }

    /// Whether the tap is read in this round.
    fn is_read_due(&mut self) -> bool {
        self.receiving.is_some() && self.pair.to_guest.enabled && self.from_tap.is_due()
    }
}

/// Whether segments of a GSO packet have not found room in the queue.
fn has_rest(queue: &mut GuestLane) -> bool {
    let pending = queue.peer().and_then(|peer| peer.pending);
    pending.is_some_and(|pending| pending.is_some())
}

/// Where frames of the guest go in one burst.
struct TapSink<'a> {
    to_tap: &'a mut ToTap,
    queue: &'a mut GuestLane,
    counters: &'a PairCounters,
}

impl Sink for TapSink<'_> {
    #[inline]
    fn unsendable<'c>(&self, counters: &'c PairCounters) -> Option<&'c Counter> {
        self.to_tap.link.loses(counters)
    }

    fn put(&mut self, _chain: ChainId, frame: Option<GuestFrame<'_>>, turn: &mut Turn) -> Put {
        let Some(frame) = frame else { return Put::Done };
        let len = frame.sending.len;
        let has_room = match self.to_tap.put(frame, self.counters) {
            TapPut::Done => {
                turn.tally.add(len);
                true
            }
            TapPut::Whole { segments, headers } => {
                turn.tally.add_unsegmented(len, segments.into(), headers);
                true
            }
            TapPut::NoRoom => false,
            TapPut::Queue => self.queue(frame, turn),
        };
        if has_room {
            return Put::Done;
        }
        self.counters.from_guest_waits.add(1);
        Put::NoRoom
    }

    #[inline]
    fn has_rest(&self) -> bool {
        self.to_tap.is_stuck
    }
}

impl TapSink<'_> {
    /// Passes a frame by the queue; whether it has room.
    #[cold]
    fn queue(&mut self, frame: GuestFrame<'_>, turn: &mut Turn) -> bool {
        let peer = self.queue.peer();
        // Both ends are ours, and do nothing wrong.
        let Some(Ok(Some(mut passing))) = peer.map(|peer| Passing::begin(peer, BATCH)) else {
            return true;
        };
        let passed = passing.pass(frame, self.counters);
        passing.finish();
        self.to_tap.may_wait = true;
        match passed {
            Ok(Passed::Later) => return false,
            Ok(Passed::Yes) => turn.tally.add(frame.sending.len),
            Ok(Passed::Cut(frames)) => {
                turn.tally.add(frame.sending.len);
                turn.note_cut(frames);
            }
            Ok(Passed::Dropped) | Err(_) => {}
        }
        self.to_tap.write_waiting();
        true
    }
}

impl Lane for TapGuestLane {
    fn breathe(&mut self, _near: Near<'_>) -> Result<usize, Blame> {
        let moved = self.from_guest().and_then(|sent| {
            let received = match self.is_read_due() {
                true => self.to_guest()?,
                false => 0,
            };
            Ok(sent + received)
        });
        moved.map_err(|fault| {
            (self.pair.from_guest.enabled, self.pair.to_guest.enabled) = (false, false);
            Blame::Own(fault)
        })
    }

    fn arm(&mut self, _near: Near<'_>) -> Work {
        // Kicks of a guest that is held back tell nothing.
        let held = Work::after(self.sender.throttle.held());
        if held == Work::None && self.pair.from_guest.enabled && self.pair.from_guest.queue.enable_kicks() {
            return match self.waits_for_room {
                true => Work::SOON,
                false => Work::Now,
            };
        }
        let mut work = held;
        if self.receiving.is_some() && self.pair.to_guest.enabled && self.from_tap.may_have_frames() {
            // Buffers are there, or came just now.
            if self.pair.to_guest.queue.enable_kicks() {
                work = work.max(match self.from_tap.is_short() {
                    true => Work::SOON,
                    false => Work::Now,
                });
            }
        }
        let soon = self.waits_for_room || self.pair.is_polled();
        if soon { work.max(Work::SOON) } else { work }
    }

    fn carried(&self) -> u64 {
        self.counters.carried()
    }

    fn pair(&self) -> Option<&QueuePair> {
        Some(&self.pair)
    }

    fn pair_mut(&mut self) -> Option<&mut QueuePair> {
        Some(&mut self.pair)
    }

    fn set_link(&mut self, link: LinkState) {
        self.to_tap.link = link;
    }

    fn set_frame_limit(&mut self, bytes: u32) {
        self.pair.frame_limit = bytes;
        self.to_tap.frame_limit = bytes;
    }

    fn set_guard(&mut self, guard: Option<&Guard>) {
        self.sender.gate.set_guard(guard);
    }

    fn set_filter(&mut self, filter: Option<Box<LaneFilter>>) -> Option<Box<LaneFilter>> {
        self.sender.gate.set_filter(filter)
    }

    fn set_limits(&mut self, limits: &PortLimits) {
        self.sender.throttle.set(limits.from_guest.as_ref());
        self.limit.clone_from(&limits.to_guest);
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.receiving.as_ref().map(|_| self.to_tap.tap.as_fd())
    }

    fn note_event(&mut self) {
        self.from_tap.note_event();
    }

    fn inject(&mut self, frame: &[u8], _near: Near<'_>) {
        self.to_tap.inject(frame);
    }

    fn stop(mut self: Box<Self>) -> Stopped {
        self.pair.leave_calls();
        self.go_on();
        let stuck = self.to_tap.is_stuck || has_rest(&mut self.queue);
        self.counters.from_guest_queue_stopped.add(stuck.into());
        self.counters
            .to_guest_queue_stopped
            .add(self.from_tap.is_short().into());
        Stopped {
            pair: Some(self.pair.stopped()),
            queue: None,
        }
    }
}

#[cfg(test)]
mod tests;
