//! From a guest: takes a batch of its frames, within a budget.
//!
//! A port's lane ([`crate::port_lane`]) takes chains ([`Sender::take`]), delivers their frames until the budget
//! is used up or there is no more room, and ends the batch ([`Sender::settle`]). Chains that do not fit stay with the
//! guest. Frames to a NIC are put into a [`Sink`]: a NIC queue that frames are copied to (`to_nic.rs`), or one that
//! reads guest RAM (`direct`).

use device::counters::{Counter, PairCounters};
use device::pair::{Fault, Vring};
use virtqueue::{ChainId, Chains};

use crate::guest::guest_frame::GuestFrame;
use crate::lane::limits::{
    BATCH, BYTES_A_FRAME, DESCRIPTORS_A_FRAME, LOOK_UP_WEIGHT, SHARED_BYTES_A_FRAME, SHORT_SEGMENT_BYTES,
};
use crate::policy::rate_limit::Throttle;

/// Result of putting a chain into a sink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// The sink is done with the chain: the caller returns it to the guest.
    Done,
    /// The sink keeps the chain, and returns it later, in the order in which it took chains.
    Taken,
    /// There is no room for it now.
    NoRoom,
}

/// Where frames of a guest go.
pub trait Sink {
    /// The counter of frames that cannot be sent now and are dropped; `None`: they can be sent.
    fn unsendable<'c>(&self, counters: &'c PairCounters) -> Option<&'c Counter>;
    /// Whether it can take another chain at all; [`Self::put`] finds out whether there is room for the chain's frame.
    #[inline]
    fn has_room(&self) -> bool {
        true
    }
    /// Takes a chain with its frame; `None`: the chain has no frame that can be sent.
    fn put(&mut self, chain: ChainId, frame: Option<GuestFrame<'_>>, budget: &mut Budget) -> Put;
    /// Part of a frame is left, which no other frame may overtake.
    fn has_rest(&self) -> bool;
}

impl<S: Sink> Sink for &mut S {
    #[inline]
    fn unsendable<'c>(&self, counters: &'c PairCounters) -> Option<&'c Counter> {
        (**self).unsendable(counters)
    }

    #[inline]
    fn has_room(&self) -> bool {
        (**self).has_room()
    }

    #[inline]
    fn put(&mut self, chain: ChainId, frame: Option<GuestFrame<'_>>, budget: &mut Budget) -> Put {
        (**self).put(chain, frame, budget)
    }

    #[inline]
    fn has_rest(&self) -> bool {
        (**self).has_rest()
    }
}

/// Frames that were sent, their bytes, and the descriptors of the chains that they were in.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    pub(crate) frames: u64,
    pub(crate) bytes: u64,
    descriptors: u64,
    /// Additional work, in frames: copies beyond the first, look-ups, and segments that the receiving side makes.
    extra: u64,
    /// Frames beyond one each that the kernel or the NIC makes of these, and the bytes of their headers: sent, but no
    /// work here.
    made: (u64, u64),
}

impl Tally {
    #[inline]
    pub(crate) fn add(&mut self, bytes: u32) {
        self.add_all(1, bytes.into());
    }

    /// Adds several frames at once.
    #[inline]
    pub(crate) fn add_all(&mut self, frames: u64, bytes: u64) {
        self.frames += frames;
        self.bytes += bytes;
    }

    /// Adds a packet of `bytes`, of which the kernel or the NIC makes `frames`, each with `headers` bytes of headers.
    /// Short ones count as work, too: they cost the kernel as much as if they were sent from here.
    #[inline]
    pub(crate) fn add_unsegmented(&mut self, bytes: u32, frames: u64, headers: u32) {
        self.add(bytes);
        self.made.0 += frames - 1;
        self.made.1 += (frames - 1) * u64::from(headers);
        if u64::from(bytes) < frames * SHORT_SEGMENT_BYTES {
            self.extra += frames - 1;
        }
    }

    /// Adds to the counters of the guest that sent.
    #[inline]
    pub(crate) fn count(&self, counters: &PairCounters) {
        counters.from_guest_frames.add(self.frames + self.made.0);
        counters.from_guest_bytes.add(self.bytes + self.made.1);
    }
}

/// The work that a poll may do, and the frames sent in it.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    /// Frames that it allows in all.
    frames: u64,
    /// Bytes that are as much work as one frame.
    bytes_a_frame: u64,
    /// Factor by which the cost of look-ups counts.
    look_up_weight: u64,
    pub(crate) tally: Tally,
}

impl Budget {
    pub(crate) fn new(frames: usize) -> Self {
        Self {
            frames: frames as u64,
            bytes_a_frame: BYTES_A_FRAME,
            look_up_weight: LOOK_UP_WEIGHT,
            tally: Tally::default(),
        }
    }

    /// A budget for a guest of a network.
    pub(crate) fn shared(frames: usize) -> Self {
        Self {
            bytes_a_frame: SHARED_BYTES_A_FRAME,
            ..Self::new(frames)
        }
    }

    /// The same budget for frames of several guests: look-ups count once.
    pub(crate) fn for_many(self) -> Self {
        Self {
            look_up_weight: 1,
            ..self
        }
    }

    /// A budget of the same size, of which nothing is used.
    pub(crate) fn fresh(&self) -> Self {
        Self {
            tally: Tally::default(),
            ..*self
        }
    }

    /// Whether it allows another frame.
    #[inline]
    pub(crate) fn has_frames(&self) -> bool {
        self.tally.frames + self.tally.extra < self.frames
    }

    /// The work charged so far, in frames.
    #[inline]
    fn work(&self) -> u64 {
        let Tally {
            frames,
            bytes,
            descriptors,
            extra,
            ..
        } = self.tally;
        let others = (descriptors / DESCRIPTORS_A_FRAME).max(bytes / self.bytes_a_frame);
        frames.max(others) + extra
    }

    /// Charges a taken chain.
    #[inline]
    pub(crate) fn charge_descriptors(&mut self, descriptors: usize) {
        self.tally.descriptors += descriptors as u64;
    }

    /// Charges copies of a frame of `len` bytes.
    #[inline]
    pub(crate) fn charge_copies(&mut self, copies: u64, len: u32) {
        self.tally.extra += copies * (1 + u64::from(len) / self.bytes_a_frame);
    }

    /// Charges look-ups of flows, which took as long as `frames` frames.
    #[inline]
    pub(crate) fn charge_look_ups(&mut self, frames: u64) {
        self.tally.extra += frames * self.look_up_weight;
    }

    /// Charges the segments that the receiving side makes of a packet.
    #[inline]
    pub(crate) fn charge_segments(&mut self, frames: u32) {
        self.tally.extra += u64::from(frames);
    }

    /// Charges what a copy cost besides itself: look-ups and segments.
    pub(crate) fn charge_besides(&mut self, of_copy: &Self) {
        self.tally.extra += of_copy.tally.extra;
    }

    /// How many more chains of one descriptor, and how many more bytes, it allows.
    #[inline]
    pub(crate) fn left(&self) -> (usize, u64) {
        let most = self.frames.saturating_sub(self.tally.extra);
        let left = |allowed: u64, taken| most.saturating_mul(allowed).saturating_sub(taken);
        let chains = left(1, self.tally.frames).min(left(DESCRIPTORS_A_FRAME, self.tally.descriptors));
        let bytes = left(self.bytes_a_frame, self.tally.bytes);
        (usize::try_from(chains).unwrap_or(usize::MAX), bytes)
    }

    /// Charges chains of one descriptor, each with one frame; `bytes`: the sum of their lengths.
    #[inline]
    pub(crate) fn charge_plain(&mut self, chains: usize, bytes: u64) {
        self.tally.add_all(chains as u64, bytes);
        self.charge_descriptors(chains);
    }

    /// Whether another chain may be taken: the work is less than the budget. Without a division, since it runs once for
    /// each chain.
    #[inline]
    pub(crate) fn has_left(&self) -> bool {
        let (chains, bytes) = self.left();
        chains > 0 && bytes > 0
    }
}

/// Sends for a guest, with a budget for each poll. Work beyond a budget is charged to the next ones, so that a guest
/// whose packets become many frames sends no more than its neighbours.
#[derive(Debug, Default)]
pub struct Sender {
    /// Frames left of this poll's budget.
    left: usize,
    /// Work beyond earlier budgets, in frames.
    deficit: usize,
    takes: Takes,
    pub(crate) chains: Chains,
    /// Delays a guest that sends more than its limit.
    pub(crate) throttle: Throttle,
    /// The guest shares a worker's time and a NIC with other guests of a network.
    is_shared: bool,
}

impl Sender {
    /// For a guest of a network.
    pub(crate) fn shared() -> Self {
        Self {
            is_shared: true,
            ..Self::default()
        }
    }

    /// A budget of what is left of this poll's.
    #[inline]
    pub(crate) fn budget(&self) -> Budget {
        match self.is_shared {
            true => Budget::shared(self.left),
            false => Budget::new(self.left),
        }
    }

    /// Begins a poll; returns its budget in frames.
    #[inline]
    pub(crate) fn begin(&mut self) -> usize {
        self.left = match self.throttle.is_held() {
            true => 0,
            false => BATCH.saturating_sub(self.deficit),
        };
        self.deficit = self.deficit.saturating_sub(BATCH);
        self.left
    }

    /// Charges work, which may be more than was left.
    #[inline]
    pub(crate) fn charge(&mut self, budget: &Budget) {
        let frames = usize::try_from(budget.work()).unwrap_or(usize::MAX);
        self.deficit += frames.saturating_sub(self.left);
        self.left = self.left.saturating_sub(frames);
    }

    /// Takes at most `room` chains for the rest of the budget. The caller delivers their frames, and then calls
    /// [`Self::settle`].
    /// Errors: the guest's fault.
    #[inline]
    pub(crate) fn take(&mut self, vring: &mut Vring, room: usize) -> Result<(), Fault> {
        let most = self.left.min(self.takes.most).min(room);
        vring.queue.pop(&mut self.chains, most)?;
        Ok(())
    }

    /// Ends a batch, of which the caller has returned the first `done` chains: puts the others back into the queue, and
    /// counts what was sent.
    #[inline(always)]
    pub(crate) fn settle(
        &mut self,
        vring: &mut Vring,
        budget: &Budget,
        done: usize,
        counters: &PairCounters,
    ) {
        if done < self.chains.len() {
            vring.queue.unpop(self.chains.slots(done));
        }
        self.takes.adapt(self.chains.len(), done);
        self.charge(budget);
        budget.tally.count(counters);
    }

    /// What is left of this poll's budget.
    #[inline]
    pub(crate) fn left(&self) -> usize {
        self.left
    }
}

/// How many chains are taken from a guest at once. A guest whose packets become many frames uses up a budget with a few
/// chains, and reading the chains behind them in each poll would be useless.
#[derive(Debug)]
struct Takes {
    most: usize,
}

impl Default for Takes {
    fn default() -> Self {
        Self { most: BATCH }
    }
}

impl Takes {
    /// Adapts to a batch: of `taken` chains `used` were sent, and the others were put back.
    #[inline]
    fn adapt(&mut self, taken: usize, used: usize) {
        if used < taken {
            self.most = (used * 2).clamp(2, BATCH);
        } else if used == self.most {
            self.most = (used * 2).min(BATCH);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_allows_chains_until_their_work_uses_it_up() {
        for frames in 0..4 {
            for descriptors in 0..20 {
                for bytes in (0..5 * BYTES_A_FRAME).step_by(1024).chain([BYTES_A_FRAME - 1]) {
                    for extra in 0..4 {
                        let tally = Tally {
                            frames,
                            bytes,
                            descriptors,
                            extra,
                            made: (0, 0),
                        };
                        let budget = Budget {
                            tally,
                            ..Budget::new(3)
                        };
                        assert_eq!(budget.has_left(), budget.work() < 3, "{budget:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn chains_beyond_the_budget_are_not_taken_again_and_again() {
        let mut takes = Takes::default();
        assert_eq!(takes.most, BATCH);
        takes.adapt(BATCH, 2);
        assert_eq!(takes.most, 4);
        // All that were taken were sent: there may be more. A short batch proves nothing.
        takes.adapt(4, 4);
        takes.adapt(3, 3);
        assert_eq!(takes.most, 8);
    }
}
