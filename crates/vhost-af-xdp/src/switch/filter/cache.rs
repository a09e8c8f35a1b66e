//! Decisions about flows that were seen.
//!
//! A fixed number of places, four to a set; its hash says which two sets a flow may be in, so that places are used up
//! before flows displace each other. The hash is a hint only: a decision is found if its whole key is the flow's. Tags,
//! a part of the hash for each place of a set, lie apart, so that a look at a set touches one line of the CPU's cache,
//! and one more for the place that is it.
//!
//! Who sends can have flows that fall into one set, and none of them found: then each is looked up in the rules, which
//! is bounded.

use super::key::FlowKey;
use super::rules::{RuleSlot, Verdict};
use crate::switch::table::{Destination, PortNumber};

/// Sets; a power of two.
const SETS: usize = 4096;
const WAYS: usize = 4;

/// A decision; 64 bytes, as a line of the CPU's cache has.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Place {
    key: FlowKey,
    station: u64,
    /// It is valid in this one only; 0: in none.
    generation: u32,
    slot: RuleSlot,
    port: PortNumber,
    to: To,
    allows: bool,
}

const _: () = assert!(size_of::<Place>() == 64);

/// A [`Destination`] without its port.
#[derive(Debug, Clone, Copy)]
enum To {
    Port,
    Group,
    Host,
    Unknown,
    Nobody,
}

impl Place {
    const EMPTY: Self = Self {
        key: FlowKey::NONE,
        station: 0,
        generation: 0,
        slot: RuleSlot(0),
        port: PortNumber(0),
        to: To::Nobody,
        allows: false,
    };

    fn new(
        key: &FlowKey,
        station: u64,
        generation: u32,
        (verdict, destination): (Verdict, Destination),
    ) -> Self {
        let (to, port) = match destination {
            Destination::Port(port) => (To::Port, port),
            Destination::Group => (To::Group, PortNumber(0)),
            Destination::Host => (To::Host, PortNumber(0)),
            Destination::Unknown => (To::Unknown, PortNumber(0)),
            Destination::Nobody => (To::Nobody, PortNumber(0)),
        };
        Self {
            key: *key,
            station,
            generation,
            slot: verdict.slot,
            port,
            to,
            allows: verdict.allows,
        }
    }

    #[inline]
    fn decision(&self) -> (Verdict, Destination) {
        let verdict = Verdict {
            allows: self.allows,
            slot: self.slot,
        };
        let destination = match self.to {
            To::Port => Destination::Port(self.port),
            To::Group => Destination::Group,
            To::Host => Destination::Host,
            To::Unknown => Destination::Unknown,
            To::Nobody => Destination::Nobody,
        };
        (verdict, destination)
    }
}

/// See the module's head.
#[derive(Debug)]
pub(super) struct FlowCache {
    tags: Box<[[u32; WAYS]]>,
    places: Box<[[Place; WAYS]]>,
    generation: u32,
    /// Which place of two full sets makes room next.
    next: usize,
}

impl FlowCache {
    pub(super) fn new() -> Self {
        Self {
            tags: vec![[0; WAYS]; SETS].into(),
            places: vec![[Place::EMPTY; WAYS]; SETS].into(),
            generation: 1,
            next: 0,
        }
    }

    /// What was decided about a flow; `None`: that is not known.
    #[inline]
    pub(super) fn find(&self, key: &FlowKey, station: u64, hash: u64) -> Option<(Verdict, Destination)> {
        let ([first, second], tag) = places_of(hash);
        let found = self.find_in(first, tag, key, station);
        let found = found.or_else(|| self.find_in(second, tag, key, station));
        found.map(Place::decision)
    }

    #[inline]
    fn find_in(&self, set: usize, tag: u32, key: &FlowKey, station: u64) -> Option<&Place> {
        let ways = self.tags[set].iter().zip(&self.places[set]);
        let mut tagged = ways.filter(|(its, _)| **its == tag).map(|(_, place)| place);
        tagged.find(|place| {
            place.generation == self.generation && place.station == station && place.key == *key
        })
    }

    /// Notes what was decided about a flow that was not found; whether another one made room for it.
    pub(super) fn note(
        &mut self,
        key: &FlowKey,
        station: u64,
        hash: u64,
        decision: (Verdict, Destination),
    ) -> bool {
        let (sets, tag) = places_of(hash);
        let is_free = |place: &Place| place.generation != self.generation;
        let free = sets
            .into_iter()
            .find_map(|set| Some((set, self.places[set].iter().position(is_free)?)));
        let (set, way) = free.unwrap_or((sets[self.next % 2], self.next / 2));
        if free.is_none() {
            self.next = (self.next + 1) % (2 * WAYS);
        }
        self.places[set][way] = Place::new(key, station, self.generation, decision);
        self.tags[set][way] = tag;
        free.is_none()
    }

    /// No decision is valid any more.
    pub(super) fn forget(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        if self.generation == 0 {
            // Those of the first generations would be valid again.
            self.places.fill([Place::EMPTY; WAYS]);
            self.generation = 1;
        }
    }
}

/// Both sets and the tag of a hash, of which any bits may be the good ones.
#[inline]
fn places_of(hash: u64) -> ([usize; 2], u32) {
    let mixed = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    // All are parts of it.
    #[allow(clippy::cast_possible_truncation)]
    let (first, second, tag) = (
        (mixed >> 52) as usize,
        (mixed >> 40) as usize,
        (mixed >> 24) as u32,
    );
    ([first % SETS, second % SETS], tag)
}
