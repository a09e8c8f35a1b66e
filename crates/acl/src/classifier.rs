//! A lane's filter for frames of one direction: compiled rules, with a cache of decisions for flows.

use std::num::NonZeroU64;
use std::sync::Arc;

use device::counters::{Counter, PairCounters};
use device::meter;
use packet::HEADERS_MAX;
use xsk::metadata::Hints;

use crate::cache::FlowCache;
use crate::flow_hints::FlowHints;
use crate::key::{FlowKey, Looked};
use crate::rules::{Rules, Verdict};

/// Facts about a frame to a guest that are not in its first bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Facts {
    /// Length of the frame, bytes.
    pub len: usize,
    /// Where its sender requests a checksum to be stored. That must not be inside the checked bytes.
    pub stored: Option<usize>,
    /// The mark of its flow, from the XDP program; `None`: none, or the frame is not from a NIC.
    pub mark: Option<u32>,
    /// The NIC's hash of its flow, the same for all its frames; `None`: a hash is computed.
    pub hash: Option<u32>,
    /// When the NIC received it, nanoseconds of the NIC's clock; `None`: unknown, or not from a NIC.
    pub received: Option<u64>,
}

impl Facts {
    /// Facts of a frame of that length, with the NIC's hints.
    #[inline]
    pub fn with_hints(len: usize, hints: &Hints) -> Self {
        Self {
            received: hints.timestamp.map(NonZeroU64::get),
            ..Self::of_flow(len, FlowHints::of(hints))
        }
    }

    /// Facts of a frame of that length, with the hints of its flow.
    #[inline]
    pub fn of_flow(len: usize, flow: FlowHints) -> Self {
        Self {
            mark: flow.mark(),
            hash: flow.hash(),
            ..Self::of_len(len)
        }
    }

    /// Facts of a frame of that length, without others.
    #[inline]
    pub fn of_len(len: usize) -> Self {
        Self {
            len,
            ..Self::default()
        }
    }
}

/// The decision about a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision<D> {
    /// The verdict of the rules.
    pub verdict: Verdict,
    /// The flow's destination, from the `find` of [`Classifier::decide`] when the decision was made.
    pub destination: D,
}

/// Filters frames of one direction for one lane, and caches a `D` for each flow. See the module's head.
#[derive(Debug)]
pub struct Classifier<D> {
    pub(crate) rules: Arc<Rules>,
    /// This classifier's counters of the rules.
    counts: Arc<[Counter]>,
    cache: FlowCache<D>,
    /// Cost of rule look-ups that is not yet charged to a sender's budget, in frames.
    work: u64,
}

impl<D: Copy + Default> Classifier<D> {
    /// A classifier for these rules, with an empty cache of its own.
    #[must_use]
    pub fn new(rules: Arc<Rules>) -> Self {
        Self {
            counts: rules.new_counters(),
            rules,
            cache: FlowCache::new(),
            work: 0,
        }
    }

    /// Decides about a flow. `hash`: any hash of the flow, the NIC's or [`FlowKey::hash`]. `second_key`: what the
    /// decision depends on besides the flow. For frames from a guest it is their destination, which `find` looks up if
    /// the cache does not have it; for frames to a guest it is the flow's mark, which rules match. `counters`: of the
    /// lane.
    // The result stays in registers: in memory it would be written in pieces and read whole, which stalls.
    #[inline(always)]
    pub fn decide(
        &mut self,
        (key, second_key, hash): (&FlowKey, u64, u64),
        counters: &PairCounters,
        find: impl FnOnce() -> D,
    ) -> Decision<D> {
        if let Some((verdict, destination)) = self.cache.find(key, second_key, hash) {
            counters.filter_hits.add_shared(1);
            meter::count_lookups(1, 0);
            return Decision { verdict, destination };
        }
        // By value, so that the key stays in registers on a hit.
        self.miss((*key, second_key, hash), counters, find)
    }

    #[cold]
    #[inline(never)]
    fn miss(
        &mut self,
        (key, second_key, hash): (FlowKey, u64, u64),
        counters: &PairCounters,
        find: impl FnOnce() -> D,
    ) -> Decision<D> {
        let computed = key.hash();
        if hash != computed
            && let Some((verdict, destination)) = self.cache.find(&key, second_key, computed)
        {
            counters.filter_hits.add_shared(1);
            meter::count_lookups(1, 0);
            return Decision { verdict, destination };
        }
        let destination = find();
        let verdict = self.rules.find(&key, second_key);
        let hash = if hash == computed || self.cache.has_room(hash) {
            hash
        } else {
            computed
        };
        let evicts = self.cache.note(&key, second_key, hash, (verdict, destination));
        counters.filter_misses.add_shared(1);
        counters.filter_nic_hashes.add_shared((hash != computed).into());
        counters.filter_evictions.add_shared(evicts.into());
        // Statistics of the worker's thread, for all its lanes.
        meter::count_lookups(0, 1);
        meter::count_evictions(evicts.into());
        self.work += self.rules.miss_work();
        Decision { verdict, destination }
    }

    /// The rules' verdict about a flow, without the cache.
    #[cfg(feature = "fuzzing")]
    pub fn look_up(&self, key: &FlowKey, mark: Option<u32>) -> Verdict {
        self.rules.find(key, mark.unwrap_or(0).into())
    }

    /// Whether the guest gets a frame; counts one that it does not get. `head`: all the frame's bytes, or enough of
    /// the first ones to find its flow. Errors: the verdict by which it does not get the frame, or `None` if the
    /// headers are malformed.
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

    // Inlined in both callers: otherwise the key would be passed through memory.
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

    /// As [`admits`](Self::admits), and counts the frame for its rule; for frames that are checked only once.
    pub fn allows(&mut self, head: &[u8], facts: Facts, counters: &PairCounters) -> bool {
        let verdict = self.admits(head, facts, counters);
        verdict.map(|verdict| self.count(verdict)).is_ok()
    }

    /// The index in the port's list of the rule that decided; `None`: no rule did.
    #[must_use]
    pub fn number_of(&self, verdict: Verdict) -> Option<u16> {
        u16::try_from(self.rules.number_of(verdict.slot)?).ok()
    }

    /// Counts a frame for the rule that decided.
    #[inline]
    pub fn count(&self, verdict: Verdict) {
        self.counts[usize::from(verdict.slot.0)].add(1);
    }

    /// Empties the cache. Call it when the FDB has changed.
    pub fn forget(&mut self) {
        self.cache.forget();
    }

    /// Cost of rule look-ups since the last call, in frames of a sender's budget.
    #[inline]
    pub fn take_work(&mut self) -> u64 {
        std::mem::take(&mut self.work)
    }
}
