//! What a lane judges frames of one direction by: rules, and in front of them decisions about flows that were seen.

use std::num::NonZeroU64;
use std::sync::Arc;

use device::counters::PairCounters;
use device::meter;
use packet::HEADERS_MAX;
use xsk::metadata::Hints;

use crate::cache::FlowCache;
use crate::flow_hints::FlowHints;
use crate::key::{FlowKey, Looked};
use crate::rules::{RuleCounter, Rules, Verdict};

/// Facts about a frame to a guest that its first bytes do not show.
#[derive(Debug, Clone, Copy, Default)]
pub struct Facts {
    /// Bytes of the frame.
    pub len: usize,
    /// Where its sender asks for a checksum to be stored. In what was looked at that would make another frame of it.
    pub stored: Option<usize>,
    /// Of its flow, as the program at the NIC noted it; `None`: it has none, or came from no NIC.
    pub mark: Option<u32>,
    /// The NIC's of its flow, whose frames all have the same; `None`: one is computed.
    pub hash: Option<u32>,
    /// When the NIC received it, nanoseconds of the NIC's clock; `None`: that is not known, or it came from elsewhere.
    pub received: Option<u64>,
}

impl Facts {
    /// One of that length, with what came before it from the NIC.
    #[inline]
    pub fn with_hints(len: usize, hints: &Hints) -> Self {
        Self {
            received: hints.timestamp.map(NonZeroU64::get),
            ..Self::of_flow(len, FlowHints::of(hints))
        }
    }

    /// One of that length, of a flow of which that is known.
    #[inline]
    pub fn of_flow(len: usize, flow: FlowHints) -> Self {
        Self {
            mark: flow.mark(),
            hash: flow.hash(),
            ..Self::of_len(len)
        }
    }

    /// One of that length of which nothing else is known.
    #[inline]
    pub fn of_len(len: usize) -> Self {
        Self {
            len,
            ..Self::default()
        }
    }
}

/// What was found for a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision<D> {
    /// What the rules decided.
    pub verdict: Verdict,
    /// Where frames of the flow go, as `find` of [`Classifier::decide`] returned it when the decision was made.
    pub destination: D,
}

/// Judges frames of one direction for one lane, and remembers `D` of each flow. See the module's head.
#[derive(Debug)]
pub struct Classifier<D> {
    pub(crate) rules: Arc<Rules>,
    /// Of the rules, what this one counts.
    counts: Arc<[RuleCounter]>,
    cache: FlowCache<D>,
    /// Cost of look-ups that is not charged yet to a sender's budget, in frames.
    work: u64,
}

impl<D: Copy + Default> Classifier<D> {
    /// Of these rules, with a cache of its own in which nothing is yet.
    #[must_use]
    pub fn new(rules: Arc<Rules>) -> Self {
        Self {
            counts: rules.new_counters(),
            rules,
            cache: FlowCache::new(),
            work: 0,
        }
    }

    /// Decides about a flow. `hash`: any hash of the flow, the NIC's or [`FlowKey::hash`]. `beside`: a second key. For
    /// frames from a guest it is their destination, which `find` looks up if the cache does not have it; for frames to
    /// a guest it is the flow's mark, which rules match. `counters`: of the lane.
    // What is found stays in registers: in memory it would be written in pieces and read at once.
    #[inline(always)]
    pub fn decide(
        &mut self,
        (key, beside, hash): (&FlowKey, u64, u64),
        counters: &PairCounters,
        find: impl FnOnce() -> D,
    ) -> Decision<D> {
        if let Some((verdict, destination)) = self.cache.find(key, beside, hash) {
            counters.filter_hits.add(1);
            meter::looked_up(1, 0);
            return Decision { verdict, destination };
        }
        // By value, so that where it is known it stays in registers.
        self.miss((*key, beside, hash), counters, find)
    }

    /// Frames with these hashes, of the NIC's, are about to be judged.
    #[inline]
    pub fn look_ahead(&self, hashes: impl Iterator<Item = u32>) {
        self.cache.look_ahead(hashes);
    }

    #[cold]
    #[inline(never)]
    fn miss(
        &mut self,
        (key, beside, hash): (FlowKey, u64, u64),
        counters: &PairCounters,
        find: impl FnOnce() -> D,
    ) -> Decision<D> {
        let computed = key.hash();
        if hash != computed
            && let Some((verdict, destination)) = self.cache.find(&key, beside, computed)
        {
            counters.filter_hits.add(1);
            meter::looked_up(1, 0);
            return Decision { verdict, destination };
        }
        let destination = find();
        let verdict = self.rules.find(&key, beside);
        let hash = if hash == computed || self.cache.has_room(hash) {
            hash
        } else {
            computed
        };
        let evicts = self.cache.note(&key, beside, hash, (verdict, destination));
        counters.filter_misses.add(1);
        counters.filter_nic_hashes.add((hash != computed).into());
        counters.filter_evictions.add(evicts.into());
        // What the worker did, whichever lane it was for.
        meter::looked_up(0, 1);
        meter::evicted(evicts.into());
        self.work += self.rules.miss_work();
        Decision { verdict, destination }
    }

    /// What the rules say of a flow, whatever the cache knows.
    #[cfg(feature = "fuzzing")]
    pub fn look_up(&self, key: &FlowKey, mark: Option<u32>) -> Verdict {
        self.rules.find(key, mark.unwrap_or(0).into())
    }

    /// Whether the guest gets a frame, which is counted if it does not. `head`: the frame's first bytes, all of them or
    /// as many as tell its flow.
    /// Errors: it does not, by that verdict; `None`: its headers cannot be judged.
    #[inline]
    pub fn admits(
        &mut self,
        head: &[u8],
        facts: Facts,
        counters: &PairCounters,
    ) -> Result<Verdict, Option<Verdict>> {
        match FlowKey::of_plain(head, facts.len) {
            Some(looked) => self.admits_flow(Some(looked), facts, counters),
            None => self.admits_any(head, facts, counters),
        }
    }

    #[inline(never)]
    fn admits_any(
        &mut self,
        head: &[u8],
        facts: Facts,
        counters: &PairCounters,
    ) -> Result<Verdict, Option<Verdict>> {
        let head = &head[..head.len().min(HEADERS_MAX)];
        self.admits_flow(FlowKey::of(head, facts.len).ok(), facts, counters)
    }

    // For each of both callers: from one to the other a key would go through memory.
    #[inline(always)]
    fn admits_flow(
        &mut self,
        looked: Option<Looked>,
        facts: Facts,
        counters: &PairCounters,
    ) -> Result<Verdict, Option<Verdict>> {
        let Some(Looked { key, .. }) =
            looked.filter(|looked| facts.stored.is_none_or(|field| field >= looked.bytes))
        else {
            counters.to_guest_filter_headers.add(1);
            return Err(None);
        };
        let hash = facts.hash.map_or_else(|| key.hash(), u64::from);
        let flow = (&key, facts.mark.unwrap_or(0).into(), hash);
        let Decision { verdict, .. } = self.decide(flow, counters, D::default);
        if !verdict.allows {
            self.count(verdict);
            counters.to_guest_filter.add(1);
            return Err(Some(verdict));
        }
        Ok(verdict)
    }

    /// The same of a frame that does not come again.
    pub fn allows(&mut self, head: &[u8], facts: Facts, counters: &PairCounters) -> bool {
        let verdict = self.admits(head, facts, counters);
        verdict.map(|verdict| self.count(verdict)).is_ok()
    }

    /// The rule that decided, by its place in the port's list; `None`: none did.
    #[must_use]
    pub fn number_of(&self, verdict: Verdict) -> Option<u16> {
        u16::try_from(self.rules.number_of(verdict.slot)?).ok()
    }

    /// A frame on which that was decided is done.
    #[inline]
    pub fn count(&self, verdict: Verdict) {
        self.counts[usize::from(verdict.slot.0)].add_one();
    }

    /// The table of stations is another one.
    pub fn forget(&mut self) {
        self.cache.forget();
    }

    /// What was looked up since this was asked last, in frames of a turn.
    #[inline]
    pub fn take_work(&mut self) -> u64 {
        std::mem::take(&mut self.work)
    }
}
