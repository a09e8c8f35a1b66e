//! Filter rules of a port: which IP packets its guest may send, and which it gets.
//!
//! Theory of operation. A port has a list of rules for each direction ([`Rule`]), of which the first that matches a
//! frame decides, and a default for frames that none matches. Rules are stateless: nothing is known of connections, so
//! replies need rules of their own. Control compiles a list as a whole ([`Rules`]); it is never changed, and reaches a
//! lane by message.
//!
//! A lane has for each direction what it judges by ([`Classifier`]): the compiled rules, and in front of them a cache
//! of decisions for flows that were seen ([`FlowCache`]). A flow is all that rules look at ([`FlowKey`], and its mark)
//! and the station that the frame is for. What is found there costs the same however many rules there are. What is not
//! found is looked up in the rules, whose cost is bounded ([`Rules::find`]), and counts as work of whoever sends the
//! frame ([`Classifier::take_work`]): a flood of new flows shortens the turns of who floods.
//!
//! Caches are a lane's own, so that no guest displaces what another one's lane knows. Their memory is fixed, and taken
//! by control before the lane gets it. A decision is valid for one generation: with other rules, or another table of
//! stations, those before are as if they were not there.
//!
//! What is not IP is judged by rules that name its ethertype, and else by the default; ARP, and what IPv6 needs instead
//! of it, pass unless a rule says otherwise ([`FlowKey::is_of_the_link`]). Headers that contradict themselves are
//! refused wherever there are rules ([`Malformed`]).

mod cache;
mod dimension;
mod judge;
mod key;
mod rules;
#[cfg(test)]
mod tests;

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use device::counters::PairCounters;
use device::meter;
pub(crate) use model::config::{Action, Direction, Filter, Rule};
use xsk::metadata::Hints;

use self::cache::FlowCache;
pub(crate) use self::judge::Judge;
pub(crate) use self::key::{FlowKey, Looked, is_long};
pub(crate) use self::rules::{Rules, Verdict};
use super::capture::Capture;
use super::flow_hints::FlowHints;
use super::guard::LOOK_BYTES;
use super::table::Destination;

/// Compiles the rules of a direction; `None`: all frames pass.
fn compile(filter: &Filter, direction: Direction) -> Option<Arc<Rules>> {
    let numbered = (0..).zip(&filter.rule);
    let its: Vec<(usize, &Rule)> = numbered.filter(|(_, rule)| rule.direction == direction).collect();
    let default = filter.default_for(direction);
    (!its.is_empty() || default == Action::Deny).then(|| Arc::new(Rules::new(&its, default, direction)))
}

/// The rules of a port, compiled, as the lanes of its pairs have them in common.
#[derive(Debug, Clone, Default)]
pub(crate) struct PortFilter {
    pub(crate) from_guest: Option<Arc<Rules>>,
    pub(crate) to_guest: Option<Arc<Rules>>,
    /// Somebody who watches.
    pub(crate) capture: Option<Arc<Capture>>,
}

impl PortFilter {
    pub(crate) fn new(filter: &Filter) -> Self {
        Self {
            from_guest: compile(filter, Direction::FromGuest),
            to_guest: compile(filter, Direction::ToGuest),
            capture: None,
        }
    }

    /// What the lane of a queue pair judges by, with memory of its own; `None`: it looks at nothing.
    pub(crate) fn for_a_lane(&self, pair: u16) -> Option<Box<LaneFilter>> {
        let judge = |rules: &Option<Arc<Rules>>, to_guest| {
            Judge::new(rules.as_ref(), self.capture.as_ref(), (to_guest, pair))
        };
        let (from_guest, to_guest) = (judge(&self.from_guest, false), judge(&self.to_guest, true));
        (from_guest.is_some() || to_guest.is_some()).then(|| Box::new(LaneFilter { from_guest, to_guest }))
    }
}

/// What a lane judges frames by.
#[derive(Debug, Default)]
pub(crate) struct LaneFilter {
    pub(crate) from_guest: Option<Judge>,
    pub(crate) to_guest: Option<Judge>,
}

/// What is known of a frame that a guest is to get, beside its first bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Facts {
    pub(crate) len: usize,
    /// Where its sender asks for a checksum to be stored. In what was looked at that would make another frame of it.
    pub(crate) stored: Option<usize>,
    /// Of its flow, as the program at the NIC noted it; `None`: it has none, or came from no NIC.
    pub(crate) mark: Option<u32>,
    /// The NIC's of its flow, whose frames all have the same; `None`: one is computed.
    pub(crate) hash: Option<u32>,
    /// When the NIC received it, nanoseconds of the NIC's clock; `None`: that is not known, or it came from elsewhere.
    pub(crate) received: Option<u64>,
}

impl Facts {
    /// One of that length, with what came before it from the NIC.
    #[inline]
    pub(crate) fn with_hints(len: usize, hints: &Hints) -> Self {
        Self {
            received: hints.timestamp.map(NonZeroU64::get),
            ..Self::of_flow(len, FlowHints::of(hints))
        }
    }

    /// One of that length, of a flow of which that is known.
    #[inline]
    pub(crate) fn of_flow(len: usize, flow: FlowHints) -> Self {
        Self {
            mark: flow.mark(),
            hash: flow.hash(),
            ..Self::of_len(len)
        }
    }

    /// One of that length of which nothing else is known.
    pub(crate) fn of_len(len: usize) -> Self {
        Self {
            len,
            ..Self::default()
        }
    }
}

/// What was found for a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Decision {
    pub(crate) verdict: Verdict,
    /// Where frames of the flow go, as the table of stations said that the decision was made with.
    pub(crate) destination: Destination,
}

/// Judges frames of one direction for one lane. See the module's head.
#[derive(Debug)]
pub(crate) struct Classifier {
    rules: Arc<Rules>,
    /// Of the rules, what this one counts.
    counts: Arc<[RuleCounter]>,
    cache: FlowCache,
    /// What was looked up is work for that nobody was charged with yet, in frames of a turn.
    work: u64,
}

impl Classifier {
    pub(crate) fn new(rules: Arc<Rules>) -> Self {
        Self {
            counts: rules.new_counters(),
            rules,
            cache: FlowCache::new(),
            work: 0,
        }
    }

    /// Decides about a flow. `hash`: any hash of the flow, the NIC's or [`FlowKey::hash`]; `beside`: what else decides.
    /// Of what a guest sends that is the station, of which `find` says where frames to it go where the cache does not
    /// know it; of what it gets the mark, which rules look at. `counters`: of the lane.
    // What is found stays in registers: in memory it would be written in pieces and read at once.
    #[inline(always)]
    pub(crate) fn decide(
        &mut self,
        (key, beside, hash): (&FlowKey, u64, u64),
        counters: &PairCounters,
        find: impl FnOnce() -> Destination,
    ) -> Decision {
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
    pub(crate) fn look_ahead(&self, hashes: impl Iterator<Item = u32>) {
        self.cache.look_ahead(hashes);
    }

    #[cold]
    #[inline(never)]
    fn miss(
        &mut self,
        (key, beside, hash): (FlowKey, u64, u64),
        counters: &PairCounters,
        find: impl FnOnce() -> Destination,
    ) -> Decision {
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
    pub(crate) fn look_up(&self, key: &FlowKey, mark: Option<u32>) -> Verdict {
        self.rules.find(key, mark.unwrap_or(0).into())
    }

    /// Whether the guest gets a frame, which is counted if it does not. `head`: the frame's first bytes, all of them or
    /// as many as tell its flow.
    /// Errors: it does not, by that verdict; `None`: its headers cannot be judged.
    #[inline]
    pub(crate) fn admits(
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
        let head = &head[..head.len().min(LOOK_BYTES)];
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
        let Decision { verdict, .. } = self.decide(flow, counters, || Destination::Unknown);
        if !verdict.allows {
            self.count(verdict);
            counters.to_guest_filter.add(1);
            return Err(Some(verdict));
        }
        Ok(verdict)
    }

    /// The same of a frame that does not come again.
    pub(crate) fn lets_pass(&mut self, head: &[u8], facts: Facts, counters: &PairCounters) -> bool {
        let verdict = self.admits(head, facts, counters);
        verdict.map(|verdict| self.count(verdict)).is_ok()
    }

    /// The rule that decided, by its place in the port's list; `None`: none did.
    fn number_of(&self, verdict: Verdict) -> Option<u16> {
        u16::try_from(self.rules.number_of(verdict.slot)?).ok()
    }

    /// A frame on which that was decided is done.
    #[inline]
    pub(crate) fn count(&self, verdict: Verdict) {
        self.counts[usize::from(verdict.slot.0)].add_one();
    }

    /// The table of stations is another one.
    pub(crate) fn forget(&mut self) {
        self.cache.forget();
    }

    /// What was looked up since this was asked last, in frames of a turn.
    #[inline]
    pub(crate) fn take_work(&mut self) -> u64 {
        std::mem::take(&mut self.work)
    }
}

/// A rule's counter, or a default's, of one classifier: whoever has that is the only one who adds. Relaxed, as nothing
/// is published through it.
#[derive(Debug, Default)]
pub(crate) struct RuleCounter(AtomicU64);

impl RuleCounter {
    #[inline]
    fn add_one(&self) {
        self.add(1);
    }

    #[inline]
    fn add(&self, frames: u64) {
        self.0.store(self.get().wrapping_add(frames), Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}
