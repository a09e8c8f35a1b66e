//! Decisions about flows that were seen.
//!
//! A fixed number of places, four to a set; its hash says which two sets a flow may be in, so that places are used up
//! before flows displace each other. The hash is a hint only: a decision is found if its whole key is the flow's. Tags,
//! a part of the hash for each place of a set, lie apart, so that a look at both sets touches two lines of the CPU's
//! cache, and one more for the place that is it.
//!
//! A NIC's hash may be the same for many flows: it may look at addresses only, or who sends may know its key. Where the
//! eight places that it has are taken ([`FlowCache::has_room`]) a flow goes by the hash that is computed, so that such
//! flows displace nobody, and are found nevertheless. Who sends can have flows that fall into one set by that one, too,
//! and none of them found: then each is looked up in the rules, which is bounded.

use crate::key::FlowKey;
use crate::rules::{RuleSlot, Verdict};

/// Sets; a power of two.
const SETS: usize = 4096;
const WAYS: usize = 4;

/// A decision; 64 bytes, as a line of the CPU's cache has.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Place<D> {
    key: FlowKey,
    station: u64,
    /// It is valid in this one only; 0: in none.
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

/// Those of a set: 16 bits for each place.
#[derive(Debug, Clone, Copy)]
struct Tags(u64);

/// The lowest bit for each place.
const LOWEST: u64 = 0x0001_0001_0001_0001;
const _: () = assert!(WAYS == 4);

impl Tags {
    /// Which places have this one: the highest of the bits for each. Those above one that has it may seem to.
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
    /// Which place of two full sets makes room next.
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

    /// What was decided about a flow; `None`: that is not known.
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

    /// The places of both sets that have the tag, 16 bits for each, of which one says so. Both at once, as which of the
    /// sets it is in is not to be guessed.
    #[inline(always)]
    fn tagged(&self, [first, second]: [usize; 2], tag: u16) -> u64 {
        self.tags[first].alike(tag) | self.tags[second].alike(tag) >> 1
    }

    /// The first of these places; any, if there is none.
    #[inline(always)]
    fn first_tagged(&self, sets: [usize; 2], tagged: u64) -> &Place<D> {
        let at = tagged.trailing_zeros() as usize;
        // The first set has odd bits. Without a branch, as which it is does not repeat.
        let first = 0usize.wrapping_sub(at % 2);
        let set = sets[0] & first | sets[1] & !first;
        &self.places[set][at / 16 % WAYS]
    }

    /// Reads what is needed to find flows with these hashes, before any is looked for: so the CPU waits for all of it
    /// at once, and not each time.
    #[inline]
    pub(crate) fn look_ahead(&self, hashes: impl Iterator<Item = u32>) {
        let read = hashes.fold(0, |read, hash| {
            let (sets, tag) = places_of(hash.into());
            read ^ self.first_tagged(sets, self.tagged(sets, tag)).generation
        });
        std::hint::black_box(read);
    }

    /// Whether a place of this hash is free.
    pub(crate) fn has_room(&self, hash: u64) -> bool {
        let (sets, _) = places_of(hash);
        let places = sets.into_iter().flat_map(|set| &self.places[set]);
        places
            .into_iter()
            .any(|place| place.generation != self.generation)
    }

    /// Notes what was decided about a flow that was not found; whether another one made room for it.
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

    /// No decision is valid any more.
    pub(crate) fn forget(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        if self.generation == 0 {
            // Those of the first generations would be valid again.
            self.places.fill([Place::empty(); WAYS]);
            self.generation = 1;
        }
    }
}

/// As many as there are sets, made where they stay: they are too many for a stack.
fn sets_of<T: Clone>(set: T) -> Box<[T; SETS]> {
    let sets = vec![set; SETS].into_boxed_slice();
    sets.try_into()
        .unwrap_or_else(|_| unreachable!("as many as there are"))
}

/// Both sets and the tag of a hash, of which any bits may be the good ones.
#[inline]
fn places_of(hash: u64) -> ([usize; 2], u16) {
    let mixed = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    // All are parts of it.
    #[allow(clippy::cast_possible_truncation)]
    let (first, second, tag) = (
        (mixed >> 52) as usize,
        (mixed >> 40) as usize,
        (mixed >> 24) as u16,
    );
    ([first % SETS, second % SETS], tag)
}
