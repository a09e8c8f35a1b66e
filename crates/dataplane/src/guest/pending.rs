//! A GSO packet that waits to be segmented for a guest that receives frames of other guests.
//!
//! Frames wait in their sender's queue while the receiver has no buffers. But a GSO packet that the receiver does not
//! accept whole becomes many frames, and not all of them may find buffers at once. So it is copied and segmented here,
//! a budget of segments at a time. Frames of the same sender wait behind it; those of others do not. There is room for
//! one packet. Further ones wait in their senders' queues, and get the room in turn.

use std::time::{Duration, Instant};

use device::counters::PairCounters;
use device::pair::{Fault, Vring};
use packet::checksum::{self, ChecksumAt};
use packet::segment::Request;
use virtqueue::Chains;

use crate::frame::gso::{GsoPacket, Remainder};
use crate::guest::guest_frame::GuestFrame;
use crate::guest::to_guest::{Delivery, Fit};
use crate::lane::limits::BATCH;

/// How long frames of a network wait at most for a guest that takes none; after that, frames are lost until it does.
const MOST_PATIENCE: Duration = Duration::from_millis(5);
/// A guest earns this much waiting time with each frame and each KiB that it takes. A slower guest (below 50,000 frames
/// or 250 Mb a second) loses frames, and does not slow down senders that send to other guests, too.
const FOR_A_FRAME: Duration = Duration::from_micros(20);
const FOR_A_KIB: Duration = Duration::from_micros(32);
/// How long the place for a packet is reserved for the next sender. By then all lanes of a worker have been polled; a
/// sender that has not used it has nothing more to send, or is gone.
const MOST_KEPT: Duration = Duration::from_millis(1);

/// How long other guests' frames wait for a guest.
#[derive(Debug)]
struct Patience {
    left: Duration,
    /// Since when it takes no frames although some wait with their senders.
    starving: Option<Instant>,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            left: MOST_PATIENCE,
            starving: None,
        }
    }
}

impl Patience {
    /// Whether a frame that finds no buffer may wait for one.
    fn may_wait(&mut self, now: Instant) -> bool {
        now.duration_since(*self.starving.get_or_insert(now)) < self.left
    }

    /// The guest has taken frames, of `bytes` in all.
    #[inline]
    fn took(&mut self, frames: u64, bytes: u64) {
        if let Some(since) = self.starving.take() {
            self.left = self.left.saturating_sub(since.elapsed());
        }
        if self.left < MOST_PATIENCE {
            self.earn(frames, bytes);
        }
    }

    #[cold]
    fn earn(&mut self, frames: u64, bytes: u64) {
        let times = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        let earned = FOR_A_FRAME.saturating_mul(times(frames));
        let earned = earned.saturating_add(FOR_A_KIB.saturating_mul(times(bytes >> 10)));
        self.left = self.left.saturating_add(earned).min(MOST_PATIENCE);
    }
}

/// Which sender's packet is next. Without it the lane that is polled right after the guest's own would find the place
/// free each time, and the others never.
#[derive(Default)]
struct NextSender {
    /// The first sender that found the place taken; 0: none.
    sender: usize,
    /// Since when the place is free, and reserved for that sender.
    kept: Option<Instant>,
}

impl NextSender {
    /// Records a sender that finds the place taken.
    fn wait(&mut self, sender: usize) {
        if self.sender == 0 {
            self.sender = sender;
        }
    }

    /// Whether a sender that finds the place free may use it.
    fn take(&mut self, sender: usize) -> bool {
        if self.sender != 0 && self.sender != sender {
            let now = Instant::now();
            if now.duration_since(*self.kept.get_or_insert(now)) < MOST_KEPT {
                return false;
            }
        }
        *self = Self::default();
        true
    }
}

#[derive(Default)]
pub(crate) struct Pending {
    patience: Patience,
    packet: Remainder,
    /// The sender, identified by its counters.
    sender: usize,
    next: NextSender,
    /// The current frame; the memory is reused.
    frame: Vec<u8>,
}

impl Pending {
    /// Whether something waits.
    #[inline]
    pub(crate) fn is_some(&self) -> bool {
        self.packet.is_some()
    }

    /// Whether something waits that this guest sent.
    #[inline]
    pub(crate) fn is_of(&self, sender: &PairCounters) -> bool {
        self.packet.is_some() && self.sender == std::ptr::from_ref(sender).addr()
    }

    /// Whether a packet of this sender can be stored now.
    #[cold]
    pub(crate) fn admits(&mut self, sender: &PairCounters) -> bool {
        let sender = std::ptr::from_ref(sender).addr();
        if self.is_some() {
            self.next.wait(sender);
            return false;
        }
        self.next.take(sender)
    }

    /// The guest has taken frames, of `bytes` in all.
    #[inline]
    pub(crate) fn took(&mut self, frames: usize, bytes: u64) {
        self.patience.took(frames as u64, bytes);
    }

    /// Whether a frame that finds no buffer may wait for one.
    #[cold]
    pub(crate) fn may_wait(&mut self) -> bool {
        self.patience.may_wait(Instant::now())
    }

    /// Stores a copy of a GSO packet.
    #[cold]
    pub(crate) fn keep(&mut self, frame: GuestFrame<'_>, packet: &GsoPacket, sender: &PairCounters) {
        self.sender = std::ptr::from_ref(sender).addr();
        self.packet.keep(frame, packet);
    }

    /// How many frames wait.
    pub(crate) fn frames(&self) -> u64 {
        let plan = self.packet.plan.as_ref();
        plan.map_or(0, |plan| u64::from(plan.segments() - self.packet.next))
    }

    /// Delivers as many frames as the guest has buffers for; returns how many.
    /// Errors: the guest's fault.
    #[cold]
    pub(crate) fn deliver(
        &mut self,
        vring: &mut Vring,
        buffers: &mut Chains,
        counters: &PairCounters,
    ) -> Result<usize, Fault> {
        let mut delivery = Delivery::begin(vring, buffers, counters)?;
        self.segment_into(&mut delivery)?;
        let bytes = delivery.bytes();
        let frames = delivery.finish();
        if frames > 0 {
            self.took(frames, bytes);
        }
        Ok(frames)
    }

    /// Delivers at most [`BATCH`] frames within a burst.
    /// Errors: the guest's fault.
    #[cold]
    pub(crate) fn segment_into(&mut self, delivery: &mut Delivery<'_>) -> Result<(), Fault> {
        let sums = delivery.vring().guest.offloads.guest_csum;
        for _ in 0..BATCH {
            let Some(request) = self.segment(sums) else { break };
            let len = u32::try_from(self.frame.len()).unwrap_or(u32::MAX);
            match delivery.fit(len)? {
                Fit::Now => delivery.write(len, request.to_header(0), &mut &self.frame[..]),
                Fit::Later => break,
                Fit::Never => {}
            }
            self.next();
        }
        Ok(())
    }

    /// Builds the next segment in `frame`, and completes its checksum unless the guest accepts partial ones (`sums`).
    /// Returns what the guest is requested to do; `None`: there is no segment.
    fn segment(&mut self, sums: bool) -> Option<Request> {
        let plan = self.packet.plan.as_ref()?;
        let index = self.packet.next;
        let payload = plan.payload(index);
        let header_len = plan.header_len();
        let at = payload.start as usize - header_len..payload.end as usize - header_len;
        self.frame.clear();
        self.frame.resize(header_len, 0);
        plan.write_header(index, &mut self.frame);
        self.frame.extend_from_slice(&self.packet.payload[at]);
        if sums {
            return Some(Request {
                csum: Some(plan.checksum_at()),
                gso: None,
            });
        }
        // The field lies in the headers, as was planned.
        let _ = checksum::complete(&mut self.frame, plan.checksum_at());
        Some(Request::default())
    }

    fn next(&mut self) {
        self.packet.next += 1;
        let plan = self.packet.plan.as_ref();
        if plan.is_some_and(|plan| self.packet.next == plan.segments()) {
            self.packet.plan = None;
        }
    }

    /// Copies a frame of another guest, and completes its checksum, at `at`; returns the bytes.
    pub(crate) fn complete(&mut self, frame: GuestFrame<'_>, at: ChecksumAt) -> &[u8] {
        self.frame.resize(frame.sending.len as usize, 0);
        frame.read_start(&mut self.frame);
        // Inside the frame, as was checked.
        let _ = checksum::complete(&mut self.frame, at);
        &self.frame
    }
}
