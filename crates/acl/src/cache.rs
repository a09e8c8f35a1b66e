//! A cache of decisions for flows.
//!
//! A fixed number of places, in sets of four. A flow's hash selects two sets, so that most places are used
//! before flows evict each other. The hash is only a hint: a decision is found only if its whole key equals
//! the flow's. Tags (a part of the hash, for each place of a set) are stored apart, so that checking both
//! sets touches two cache lines, and one more for the matching place.
//!
//! A NIC's hash may be the same for many flows: it may use addresses only, or a sender may know its key. If all
//! eight places of such a hash are taken ([`FlowCache::has_room`]), a flow is stored by the computed hash, so that
//! such flows evict no others, and are found nevertheless. A sender can also find flows with the same computed
//! hash, so that none is in the cache: then each is looked up in the rules, whose cost is bounded.

use crate::key::FlowKey;
use crate::rules::{RuleSlot, Verdict};

/// Number of sets; a power of two.
const SETS: usize = 4096;
const WAYS: usize = 4;

/// A decision; 64 bytes, one cache line.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Place<D> {
    key: FlowKey,
    station: u64,
    /// The generation in which it is valid; 0: in none.
    generation: u32,
    destination: D,
    slot: RuleSlot,
    allows: bool,
}

impl<D: Copy + Default> Place<D> {
    fn empty() -> Self {
        const { assert!(size_of::<Self>() == 64) };
        Self {
            key: FlowKey::NONE,
            station: 0,
            generation: 0,
            destination: D::default(),
            slot: RuleSlot(0),
            allows: false,
        }
    }

    #[inline]
    fn decision(&self) -> (Verdict, D) {
        let verdict = Verdict {
            allows: self.allows,
            slot: self.slot,
        };
        (verdict, self.destination)
    }
}

/// The tags of a set: 16 bits for each place.
#[derive(Debug, Clone, Copy)]
struct Tags(u64);

/// The lowest bit of each place.
const LOWEST: u64 = 0x0001_0001_0001_0001;
const _: () = assert!(WAYS == 4);

impl Tags {
    /// Marks the places with this tag by the highest of their 16 bits. Places above a match may be marked by mistake.
    #[inline]
    fn alike(self, tag: u16) -> u64 {
        let differ = self.0 ^ (u64::from(tag) * LOWEST);
        differ.wrapping_sub(LOWEST) & !differ & (LOWEST << 15)
    }

    fn put(&mut self, way: usize, tag: u16) {
        let at = way * 16;
        self.0 = self.0 & !(0xffff << at) | u64::from(tag) << at;
    }
}

/// See the module's head.
#[derive(Debug)]
pub(crate) struct FlowCache<D> {
    tags: Box<[Tags; SETS]>,
    places: Box<[[Place<D>; WAYS]; SETS]>,
    generation: u32,
    /// Which place of two full sets is evicted next.
    next: usize,
}

impl<D: Copy + Default> FlowCache<D> {
    pub(crate) fn new() -> Self {
        Self {
            tags: sets_of(Tags(0)),
            places: sets_of([Place::empty(); WAYS]),
            generation: 1,
            next: 0,
        }
    }

    /// The decision about a flow; `None`: not in the cache.
    #[inline(always)]
    pub(crate) fn find(&self, key: &FlowKey, station: u64, hash: u64) -> Option<(Verdict, D)> {
        let (sets, tag) = places_of(hash);
        let mut tagged = self.tagged(sets, tag);
        while tagged != 0 {
            let place = self.first_tagged(sets, tagged);
            if place.generation == self.generation && place.station == station && place.key.is(key) {
                return Some(place.decision());
            }
            tagged &= tagged - 1;
        }
        None
    }

    /// The places of both sets with this tag, one bit in the 16 bits of each. Both sets at once, because the
    /// CPU could not predict which one has the flow.
    #[inline(always)]
    fn tagged(&self, [first, second]: [usize; 2], tag: u16) -> u64 {
        self.tags[first].alike(tag) | self.tags[second].alike(tag) >> 1
    }

    /// The first of these places; an arbitrary one if there is none.
    #[inline(always)]
    fn first_tagged(&self, sets: [usize; 2], tagged: u64) -> &Place<D> {
        let at = tagged.trailing_zeros() as usize;
        // The first set has odd bits. No branch, because it would be unpredictable.
        let first = 0usize.wrapping_sub(at % 2);
        let set = sets[0] & first | sets[1] & !first;
        &self.places[set][at / 16 % WAYS]
    }

    /// Whether a place of this hash is free.
    pub(crate) fn has_room(&self, hash: u64) -> bool {
        let (sets, _) = places_of(hash);
        let places = sets.into_iter().flat_map(|set| &self.places[set]);
        places
            .into_iter()
            .any(|place| place.generation != self.generation)
    }

    /// Stores the decision about a flow that was not found; returns whether another one was evicted.
    pub(crate) fn note(&mut self, key: &FlowKey, station: u64, hash: u64, decision: (Verdict, D)) -> bool {
        let (sets, tag) = places_of(hash);
        let is_free = |place: &Place<D>| place.generation != self.generation;
        let free = sets
            .into_iter()
            .find_map(|set| Some((set, self.places[set].iter().position(is_free)?)));
        let (set, way) = free.unwrap_or((sets[self.next % 2], self.next / 2));
        if free.is_none() {
            self.next = (self.next + 1) % (2 * WAYS);
        }
        let (verdict, destination) = decision;
        self.places[set][way] = Place {
            key: *key,
            station,
            generation: self.generation,
            destination,
            slot: verdict.slot,
            allows: verdict.allows,
        };
        self.tags[set].put(way, tag);
        free.is_none()
    }

    /// Invalidates all decisions.
    pub(crate) fn forget(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        if self.generation == 0 {
            // Decisions of the first generations would be valid again.
            self.places.fill([Place::empty(); WAYS]);
            self.generation = 1;
        }
    }
}

/// One value per set, created on the heap: they are too large for a stack.
fn sets_of<T: Clone>(set: T) -> Box<[T; SETS]> {
    let sets = vec![set; SETS].into_boxed_slice();
    sets.try_into()
        .unwrap_or_else(|_| unreachable!("as many as there are"))
}

/// The two sets and the tag of a hash. Mixes it first, as its entropy may be in any of its bits.
#[inline]
fn places_of(hash: u64) -> ([usize; 2], u16) {
    let mixed = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    // Truncation is intended.
    #[allow(clippy::cast_possible_truncation)]
    let (first, second, tag) = (
        (mixed >> 52) as usize,
        (mixed >> 40) as usize,
        (mixed >> 24) as u16,
    );
    ([first % SETS, second % SETS], tag)
}
