//! The rules of one direction, compiled.
//!
//! Each field of the rules' conditions is a [`Dimension`]. For a frame, each returns the set of rules that
//! match its value; the first rule in all sets decides. The time depends only on the number of rules, not on
//! their content: with 10,000 it is below a microsecond (examples/filter_cost.rs). They take about 0.3 KiB of
//! memory each, and at most 2.4 KiB if each has fifteen port ranges on both sides.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device::counters::Counter;
use model::config::{Action, Direction, Intervals, MOST_RULES, NO_PORT, Rule};

use crate::dimension::{Dimension, words_for};
use crate::key::FlowKey;

/// Words of a set for the maximum number of rules.
const MOST_WORDS: usize = MOST_RULES.div_ceil(64);
/// Cost of a look-up with few rules, in frames; mostly for storing the result, in memory that is not in the
/// CPU's caches.
const CACHE_FRAMES: usize = 3;
/// Number of rules whose look-up costs as much as a frame: each such number adds one frame to the cost.
const RULES_A_FRAME: usize = 1024;

/// What decided: a rule, by its index among those of its direction, or one of the two slots after them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RuleSlot(pub u16);

/// The decision of the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// Whether the frame passes.
    pub allows: bool,
    /// What decided.
    pub slot: RuleSlot,
}

impl Verdict {
    /// The verdict for a frame without rules.
    pub const UNFILTERED: Self = Self {
        allows: true,
        slot: RuleSlot(u16::MAX),
    };
}

/// See the module's head.
#[derive(Debug)]
pub struct Rules {
    kinds: Dimension<u32>,
    sources: Dimension<u128>,
    destinations: Dimension<u128>,
    source_ports: Dimension<u32>,
    destination_ports: Dimension<u32>,
    /// `None`: no rule has a condition on fragments.
    fragments: Option<Dimension<u64>>,
    /// `None`: no rule has a condition on marks.
    marks: Option<Dimension<u64>>,
    /// Whether the rule of each slot allows.
    allow: Vec<bool>,
    /// Index of each slot's rule in the port's list.
    numbers: Vec<usize>,
    default: Action,
    to_guest: bool,
    counted: Mutex<Counted>,
}

/// Frames by slot: of each rule, of the default, and of link messages that pass in spite of it.
#[derive(Debug)]
struct Counted {
    /// The sum of dropped classifiers.
    before: Vec<Counter>,
    /// The counters of each classifier.
    now: Vec<Arc<[Counter]>>,
}

impl Counted {
    fn get(&self, slot: usize) -> u64 {
        let now = self.now.iter().map(|counters| counters[slot].get());
        now.fold(self.before[slot].get(), u64::wrapping_add)
    }

    /// Adds the counters of dropped classifiers to the sum.
    fn tidy(&mut self) {
        let before = &self.before;
        self.now.retain_mut(|counters| {
            let is_gone = Arc::get_mut(counters).is_some();
            if is_gone {
                let each = before.iter().zip(counters.iter());
                each.for_each(|(sum, counter)| sum.add(counter.get()));
            }
            !is_gone
        });
    }
}

fn counters(slots: usize) -> impl Iterator<Item = Counter> {
    (0..slots).map(|_| Counter::default())
}

impl Rules {
    /// Compiles rules of one direction, at most [`MOST_RULES`], with their indexes in the port's list.
    pub(crate) fn new(rules: &[(usize, &Rule)], default: Action, direction: Direction) -> Self {
        let rules = &rules[..rules.len().min(MOST_RULES)];
        let count = rules.len();
        let each = || (0..).zip(rules.iter().map(|(_, rule)| *rule));
        let ports = |of: fn(&Rule) -> Intervals| {
            let intervals = each().flat_map(move |(at, rule)| {
                let its = of(rule).into_iter();
                its.map(move |(first, last)| (at, first, Some(last + 1).filter(|_| last < NO_PORT)))
            });
            Dimension::new(count, intervals, 0)
        };
        let addresses = |of: fn(&Rule) -> (u128, u128)| {
            let intervals = each().map(move |(at, rule)| {
                let (first, last) = of(rule);
                (at, first, last.checked_add(1))
            });
            Dimension::new(count, intervals, 0)
        };
        // A rule without a value matches any.
        let optional = |of: fn(&Rule) -> Option<u64>| {
            let intervals = each().map(move |(at, rule)| {
                let value = of(rule);
                (at, value.unwrap_or(0), value.map(|value| value + 1))
            });
            let is_used = rules.iter().any(|(_, rule)| of(rule).is_some());
            is_used.then(|| Dimension::new(count, intervals, 0))
        };
        let kinds = each().flat_map(|(at, rule)| {
            let its = rule.kinds().into_iter();
            its.map(move |(first, last)| (at, first, last.checked_add(1)))
        });
        Self {
            kinds: Dimension::new(count, kinds, 0),
            sources: addresses(Rule::sources),
            destinations: addresses(Rule::destinations),
            source_ports: ports(Rule::source_ports),
            destination_ports: ports(Rule::destination_ports),
            fragments: optional(|rule| rule.fragment().map(u64::from)),
            marks: optional(Rule::mark),
            allow: each().map(|(_, rule)| rule.action == Action::Allow).collect(),
            numbers: rules.iter().map(|(number, _)| *number).collect(),
            default,
            to_guest: direction == Direction::ToGuest,
            counted: Mutex::new(Counted {
                before: counters(count + 2).collect(),
                now: Vec::new(),
            }),
        }
    }

    /// The verdict about a frame. `second_key`: for a frame to the guest its mark, 0 for none; for one from the
    /// guest any value, since its rules have no marks.
    pub fn find(&self, key: &FlowKey, second_key: u64) -> Verdict {
        if let Some(at) = self.first(key, second_key) {
            return Verdict {
                allows: self.allow[at],
                slot: slot(at),
            };
        }
        let is_default = self.default == Action::Allow || !key.is_of_the_link(self.to_guest);
        Verdict {
            allows: !is_default || self.default == Action::Allow,
            slot: slot(self.allow.len() + usize::from(!is_default)),
        }
    }

    /// The index of the first rule that matches.
    fn first(&self, key: &FlowKey, mark: u64) -> Option<usize> {
        let words = words_for(self.allow.len());
        let (mut found, mut room) = ([u64::MAX; MOST_WORDS], [0; MOST_WORDS]);
        let (found, room) = (&mut found[..words], &mut room[..words]);
        self.kinds.narrow(kind_of(key), found, room);
        self.sources.narrow(key.source(), found, room);
        self.destinations.narrow(key.destination(), found, room);
        let port = |port: Option<u16>| port.map_or(NO_PORT, u32::from);
        self.source_ports.narrow(port(key.source_port()), found, room);
        self.destination_ports
            .narrow(port(key.destination_port()), found, room);
        if let Some(fragments) = &self.fragments {
            fragments.narrow(key.is_fragment().into(), found, room);
        }
        if let Some(marks) = &self.marks {
            marks.narrow(mark, found, room);
        }
        let word = found.iter().position(|&word| word != 0)?;
        Some(word * 64 + found[word].trailing_zeros() as usize)
    }

    /// The cost of a look-up, in frames of a sender's budget.
    #[inline]
    pub(crate) fn miss_work(&self) -> u64 {
        (CACHE_FRAMES + self.allow.len() / RULES_A_FRAME) as u64
    }

    /// Counters for one more classifier, by slot.
    pub(crate) fn new_counters(&self) -> Arc<[Counter]> {
        let new: Arc<[Counter]> = counters(self.allow.len() + 2).collect();
        let mut counted = self.counted();
        counted.tidy();
        counted.now.push(Arc::clone(&new));
        new
    }

    /// The index of a slot's rule in the port's list; `None`: the slot is not a rule's.
    pub(crate) fn number_of(&self, slot: RuleSlot) -> Option<usize> {
        self.numbers.get(usize::from(slot.0)).copied()
    }

    /// For control only: workers have their own counters. A poisoned lock is harmless: no update is left half done.
    fn counted(&self) -> MutexGuard<'_, Counted> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frames decided by each rule, with its index in the port's list.
    pub fn counts(&self) -> Vec<(usize, u64)> {
        let counted = self.counted();
        let counts = (0..).map(|slot| counted.get(slot));
        self.numbers.iter().copied().zip(counts).collect()
    }

    /// Frames that no rule matched: decided by the default, and link messages that passed although the default denies.
    pub fn default_counts(&self) -> [u64; 2] {
        let counted = self.counted();
        [0, 1].map(|at: usize| counted.get(self.allow.len() + at))
    }

    /// The action for frames that no rule matches.
    #[cfg(test)]
    pub fn default(&self) -> Action {
        self.default
    }

    /// Memory that they use, bytes.
    pub fn bytes(&self) -> usize {
        let dimensions = self.kinds.bytes()
            + self.sources.bytes()
            + self.destinations.bytes()
            + self.source_ports.bytes()
            + self.destination_ports.bytes()
            + self.fragments.as_ref().map_or(0, Dimension::bytes)
            + self.marks.as_ref().map_or(0, Dimension::bytes);
        let lists = 1 + self.counted().now.len();
        let each = size_of::<bool>() + lists * size_of::<Counter>() + size_of::<usize>();
        dimensions + self.allow.len() * each
    }
}

/// Fits: at most [`MOST_RULES`] and two.
#[allow(clippy::cast_possible_truncation)]
fn slot(at: usize) -> RuleSlot {
    RuleSlot(at as u16)
}

/// The frame's value for [`Rule::kinds`].
#[inline]
fn kind_of(key: &FlowKey) -> u32 {
    u32::from(key.ethertype()) << 8 | u32::from(key.protocol())
}
