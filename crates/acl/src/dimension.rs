//! One field of the rules' conditions: finds the rules that match a value of it.
//!
//! A rule matches one or more intervals of values. Along the line of all values, the set of matching rules
//! changes only at the ends of intervals; so the changes are stored, with a whole set at every [`SPACING`]th
//! change. Finding the set of a value takes a binary search, one whole set, and fewer than [`SPACING`] single
//! rules to add or remove. So memory (two changes per interval, a bit per rule for each whole set) and time
//! are bounded for any rules.

/// Number of changes between two whole sets.
const SPACING: usize = 64;

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Dimension<V> {
    /// From this value on the rule is added to the set, or removed if it was in it; in ascending order.
    values: Vec<V>,
    rules: Vec<u16>,
    /// The sets before every `SPACING`th change, one after the other.
    sets: Vec<u64>,
    words: usize,
}

/// Words of a set for this number of rules.
pub(crate) fn words_for(rules: usize) -> usize {
    rules.div_ceil(64)
}

impl<V: Ord + Copy> Dimension<V> {
    /// `rules` is their number. `intervals`: a rule's number with the first value and the one after the last (`None`:
    /// no end) of each interval that it matches. Intervals of one rule do not touch. `least`: the least value.
    pub(crate) fn new(rules: usize, intervals: impl Iterator<Item = (u16, V, Option<V>)>, least: V) -> Self {
        let words = words_for(rules);
        let mut set = vec![0; words];
        let mut changes = Vec::new();
        for (rule, first, behind) in intervals {
            match first > least {
                true => changes.push((first, rule)),
                false => flip(&mut set, rule),
            }
            changes.extend(behind.map(|behind| (behind, rule)));
        }
        changes.sort_unstable();
        let mut sets = Vec::with_capacity((changes.len() / SPACING + 1) * words);
        for chunk in changes.chunks(SPACING) {
            sets.extend_from_slice(&set);
            chunk.iter().for_each(|&(_, rule)| flip(&mut set, rule));
        }
        if changes.len().is_multiple_of(SPACING) {
            sets.extend_from_slice(&set);
        }
        Self {
            values: changes.iter().map(|(value, _)| *value).collect(),
            rules: changes.iter().map(|(_, rule)| *rule).collect(),
            sets,
            words,
        }
    }

    /// Removes from `found` the rules that do not match a value. `room`: scratch space as long as a set.
    #[inline]
    pub(crate) fn narrow(&self, value: V, found: &mut [u64], room: &mut [u64]) {
        let changes = self.values.partition_point(|&change| change <= value);
        let before = changes / SPACING;
        let set = &self.sets[before * self.words..][..self.words];
        let rest = &self.rules[before * SPACING..changes];
        if rest.is_empty() {
            return narrow_by(found, set);
        }
        room.copy_from_slice(set);
        rest.iter().for_each(|&rule| flip(room, rule));
        narrow_by(found, room);
    }

    /// Memory that it uses, bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.values.len() * (size_of::<V>() + size_of::<u16>()) + self.sets.len() * size_of::<u64>()
    }
}

#[inline]
fn flip(set: &mut [u64], rule: u16) {
    set[usize::from(rule / 64)] ^= 1 << (rule % 64);
}

#[inline]
fn narrow_by(found: &mut [u64], set: &[u64]) {
    found.iter_mut().zip(set).for_each(|(found, set)| *found &= set);
}
