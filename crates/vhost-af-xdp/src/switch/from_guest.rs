//! From a guest: takes a batch of its frames, within a budget, and sends them.
//!
//! Outside of networks [`Sender::burst`] does both: it takes chains, has the queue pair check them, and puts each into
//! a [`Sink`], until the budget is used up or the sink is full. Chains that do not fit stay with the guest. Frames that
//! need nothing but a copy are sent first, in a loop of the sink's own ([`Sink::put_plain`]). Sinks are a NIC queue
//! that frames are copied to (`to_nic.rs`), one that reads guest RAM (`direct`), and another guest (`guest_lane.rs`).
//! In a network the lane delivers the frames itself, between [`Sender::take`] and [`Sender::settle`].

use device::counters::{Counter, PairCounters};
use device::meter;
use device::pair::{Fault, QueuePair, Sending};
use virtqueue::{ChainId, Chains};

use super::guest_frame::GuestFrame;
use super::limits::{
    BATCH, BYTES_A_FRAME, DESCRIPTORS_A_FRAME, LOOK_UP_WEIGHT, SHARED_BYTES_A_FRAME, SHORT_SEGMENT_BYTES,
};
use super::policy::Policy;
use super::rate_limit::Throttle;

/// Result of putting a chain into a sink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Put {
    /// The sink is done with the chain: the caller returns it to the guest.
    Done,
    /// The sink keeps the chain, and returns it later, in the order in which it took chains.
    Taken,
    /// There is no room for it now.
    NoRoom,
}

/// Where frames of a guest go.
pub(crate) trait Sink {
    /// The counter of frames that cannot be sent now and are dropped; `None`: they can be sent.
    fn unsendable<'c>(&self, counters: &'c PairCounters) -> Option<&'c Counter>;
    /// Whether it can take another chain at all; [`Self::put`] finds out whether there is room for the chain's frame.
    #[inline]
    fn has_room(&self) -> bool {
        true
    }
    /// Takes a chain with its frame; `None`: the chain has no frame that can be sent.
    fn put(&mut self, chain: ChainId, frame: Option<GuestFrame<'_>>, budget: &mut Budget) -> Put;
    /// Takes chains from the first on, as long as their frames need nothing but a copy ([`QueuePair::plain`]); returns
    /// how many. The caller marks them used.
    #[inline]
    fn put_plain(&mut self, _pair: &QueuePair, _chains: &Chains, _budget: &mut Budget) -> usize {
        0
    }
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
    fn put_plain(&mut self, pair: &QueuePair, chains: &Chains, budget: &mut Budget) -> usize {
        (**self).put_plain(pair, chains, budget)
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
pub(crate) struct Budget {
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
pub(crate) struct Sender {
    /// Frames left of this poll's budget.
    left: usize,
    /// Work beyond earlier budgets, in frames.
    deficit: usize,
    takes: Takes,
    pub(super) chains: Chains,
    /// Delays a guest that sends more than its limit.
    pub(crate) throttle: Throttle,
    /// Checks the guest's frames, outside of networks.
    pub(crate) policy: Policy,
}

/// Result of a burst.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Burst {
    /// The guest had chains.
    pub(crate) any: bool,
    /// Chains that were taken.
    pub(crate) done: usize,
    /// A chain waits because the sink had no room for it.
    pub(crate) full: bool,
}

impl Sender {
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

    /// Takes chains of a network's guest for the rest of the budget. The caller delivers their frames, and then calls
    /// [`Self::settle`].
    /// Errors: the guest's fault.
    #[inline]
    pub(crate) fn take(&mut self, pair: &mut QueuePair) -> Result<Budget, Fault> {
        let most = self.left.min(self.takes.most);
        pair.from_guest.queue.pop(&mut self.chains, most)?;
        Ok(Budget::shared(self.left))
    }

    /// The chains that were taken last.
    #[inline]
    pub(crate) fn chains(&self) -> &Chains {
        &self.chains
    }

    /// Ends a batch, of which the caller has returned the first `done` chains: puts the others back into the queue, and
    /// counts what was sent.
    #[inline]
    pub(crate) fn settle(
        &mut self,
        pair: &mut QueuePair,
        budget: &Budget,
        done: usize,
        counters: &PairCounters,
    ) {
        pair.from_guest.queue.unpop(self.chains.slots(done));
        self.takes.adapt(self.chains.len(), done);
        self.charge(budget);
        budget.tally.count(counters);
    }

    /// What is left of this poll's budget.
    #[inline]
    pub(crate) fn left(&self) -> usize {
        self.left
    }

    /// Takes at most `room` chains within the rest of the budget, and puts them into `sink`. Chains that the sink does
    /// not keep are marked used, but not published.
    /// Errors: the guest's fault.
    #[inline]
    pub(crate) fn burst<S: Sink>(
        &mut self,
        pair: &mut QueuePair,
        sink: &mut S,
        room: usize,
        counters: &PairCounters,
    ) -> Result<Burst, Fault> {
        let most = self.left.min(self.takes.most).min(room);
        let mut budget = Budget::new(self.left);
        pair.from_guest.queue.pop(&mut self.chains, most)?;
        let is_open = self.policy.is_open();
        let is_checked = !is_open || self.throttle.is_on();
        let mut done = match self.chains.is_empty() || is_checked {
            true => 0,
            false => sink.put_plain(pair, &self.chains, &mut budget),
        };
        for chain in &self.chains.chains[..done] {
            pair.from_guest.queue.push_used(chain.id, 0);
        }
        let mut full = false;
        let mut sending = Sending::default();
        for (at, chain) in self.chains.iter().enumerate().skip(done) {
            let buffers = self.chains.buffers(chain);
            let put = match budget.has_left() && sink.has_room() {
                false => None,
                true => {
                    match pair.check_into(chain, buffers, sink.unsendable(counters), counters, &mut sending) {
                        Err(fault) => return Err(fault),
                        Ok(is_one) => {
                            let frame = is_one.then(|| GuestFrame::new(pair, buffers, &sending));
                            let frame = match frame {
                                Some(frame) if !is_open => self.policy.check(frame, counters),
                                frame => frame,
                            };
                            if self.throttle.holds(|| Some(frame?.cost()), counters) {
                                None
                            } else {
                                let put = sink.put(chain.id, frame, &mut budget);
                                full = put == Put::NoRoom;
                                if full && frame.is_some() {
                                    let cost = self.throttle.last();
                                    self.throttle.give_back(cost);
                                }
                                Some(put).filter(|_| !full)
                            }
                        }
                    }
                }
            };
            if !is_open {
                budget.charge_look_ups(self.policy.take_work());
                self.policy.settle(put.is_some(), counters);
            }
            let Some(put) = put else {
                pair.from_guest.queue.unpop(self.chains.slots(at));
                break;
            };
            if put == Put::Done {
                pair.from_guest.queue.push_used(chain.id, 0);
            }
            budget.tally.descriptors += buffers.len() as u64;
            done += 1;
            if sink.has_rest() {
                pair.from_guest.queue.unpop(self.chains.slots(at + 1));
                break;
            }
        }
        self.takes.adapt(self.chains.len(), done);
        self.charge(&budget);
        // Counted before the chains are published: an observer that sees a returned chain finds its frame counted.
        budget.tally.count(counters);
        meter::count_taken(done);
        Ok(Burst {
            any: !self.chains.is_empty(),
            done,
            full,
        })
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
