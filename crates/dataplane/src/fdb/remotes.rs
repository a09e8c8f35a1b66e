//! Addresses behind the VTEPs of a tunnel (VXLAN, Geneve), and the headers that frames to each VTEP get.
//!
//! A control thread follows the kernel's tables and changes [`Remotes`] in place, since addresses come and go one by one,
//! and there may be many. Workers read it without a lock. [`Vteps`] change seldom: they are part of an FDB, which each
//! worker gets by message.
//!
//! The table has a fixed number of places, a power of two and at least twice the number of addresses. An address is at a
//! hash of it with a secret factor, or behind that place, with no free place in between. When an address is removed,
//! others move up into its place, so that look-ups stay short whatever was removed before. A worker may miss an address
//! that moves at that moment: then one frame takes the way of frames to unknown addresses, which the kernel knows.

use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use packet::ethernet::Mac;
use packet::tunnel::Outer;

use crate::fdb::{Destination, FdbKey, FdbKeyHash};

/// A place without an address. (No station has the address 0.)
const FREE: u64 = 0;
/// Where a word has the VTEP's number; the address is below.
const NUMBER: u32 = 48;

/// Names a VTEP within its network. A number is used again as late as possible: a worker with an older FDB would send to
/// the VTEP that had it before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VtepNumber(pub u16);

/// A VTEP whose next hop is known.
#[derive(Debug)]
pub struct Vtep {
    /// The headers of frames to it.
    pub outer: Outer,
    /// The kernel has to confirm that the next hop is there: it gets the next frame. Set by control.
    pub confirm: AtomicBool,
}

impl Vtep {
    /// Whether the kernel gets the next frame; true once each time that `confirm` was set.
    #[inline]
    pub(crate) fn take_confirm(&self) -> bool {
        self.confirm.load(Relaxed) && self.confirm.swap(false, Relaxed)
    }
}

/// VTEPs by number; `None`: the next hop is not known, so the kernel gets its frames.
#[derive(Debug, Default)]
pub struct Vteps(pub Vec<Option<Arc<Vtep>>>);

impl Vteps {
    /// The VTEP of a number.
    #[inline]
    pub(crate) fn find(&self, number: VtepNumber) -> Option<&Arc<Vtep>> {
        self.0.get(usize::from(number.0))?.as_ref()
    }
}

/// See the module's head. A place has address and number in one word, and nothing is published through it, so relaxed
/// accesses suffice.
#[derive(Debug)]
pub struct Remotes {
    places: Box<[AtomicU64]>,
    /// How many addresses there may be, and are. Only control reads these.
    most: usize,
    count: AtomicU64,
    /// The VTEP of all other addresses.
    other_addresses: Option<VtepNumber>,
    hash: FdbKeyHash,
}

impl Remotes {
    /// A table with room for `most` addresses.
    pub fn new(most: usize) -> Self {
        let places = (most * 2).next_power_of_two();
        Self {
            places: (0..places).map(|_| AtomicU64::new(FREE)).collect(),
            most,
            count: AtomicU64::new(0),
            other_addresses: None,
            hash: FdbKeyHash::default(),
        }
    }

    /// A table for a tunnel with a single VTEP: all unicast addresses are behind it.
    pub fn behind(number: VtepNumber) -> Self {
        Self {
            other_addresses: Some(number),
            ..Self::new(0)
        }
    }

    /// The VTEP that an address is behind.
    #[inline]
    pub fn find(&self, mac: Mac) -> Option<VtepNumber> {
        let key = key_of(mac);
        let (_, word) = self.search(key)?;
        if word == FREE {
            return self.other_addresses.filter(|_| mac[0] & 1 == 0);
        }
        // The upper 16 bits.
        #[allow(clippy::cast_possible_truncation)]
        Some(VtepNumber((word >> NUMBER) as u16))
    }

    /// The destination of frames to an address.
    // Not inlined, so that networks without remote stations do not pay for its code.
    #[inline(never)]
    pub(crate) fn find_resolved(&self, mac: Mac, vteps: &Vteps) -> Destination {
        let found = self.find(mac).filter(|&number| vteps.find(number).is_some());
        found.map_or(Destination::Unknown, Destination::Remote)
    }

    /// Sets the VTEP that an address is behind. One thread at a time may change the table. Returns false if the table is
    /// full, or if no station can have the address.
    pub fn set(&self, mac: Mac, number: VtepNumber) -> bool {
        let key = key_of(mac);
        let Some((at, before)) = self.search(key).filter(|_| mac[0] & 1 == 0 && key != FREE) else {
            return false;
        };
        if before == FREE {
            let count = self.count.load(Relaxed);
            if count >= self.most as u64 {
                return false;
            }
            self.count.store(count + 1, Relaxed);
        }
        self.places[at].store(key | u64::from(number.0) << NUMBER, Relaxed);
        true
    }

    /// Removes an address.
    pub fn remove(&self, mac: Mac) {
        let Some((mut hole, 1..)) = self.search(key_of(mac)) else {
            return;
        };
        let mask = self.places.len() - 1;
        let mut at = (hole + 1) & mask;
        loop {
            let word = self.places[at].load(Relaxed);
            if word == FREE {
                break;
            }
            // It may move up unless its first place is behind the hole.
            let from_first = at.wrapping_sub(self.first(key_in(word))) & mask;
            if from_first >= at.wrapping_sub(hole) & mask {
                self.places[hole].store(word, Relaxed);
                hole = at;
            }
            at = (at + 1) & mask;
        }
        self.places[hole].store(FREE, Relaxed);
        self.count.store(self.count.load(Relaxed) - 1, Relaxed);
    }

    /// The place of an address with its word, or else the free place where it would be. `None` only if addresses move
    /// while this searches.
    #[inline]
    fn search(&self, key: u64) -> Option<(usize, u64)> {
        let (first, mask) = (self.first(key), self.places.len() - 1);
        (first..first + self.places.len()).find_map(|at| {
            let word = self.places[at & mask].load(Relaxed);
            (word == FREE || key_in(word) == key).then_some((at & mask, word))
        })
    }

    /// The first place to search for an address.
    #[inline]
    fn first(&self, key: u64) -> usize {
        // The hash's low bits.
        #[allow(clippy::cast_possible_truncation)]
        let hash = self.hash.hash_one(key) as usize;
        hash & (self.places.len() - 1)
    }
}

/// An address as a number.
#[inline]
fn key_of(mac: Mac) -> u64 {
    FdbKey::new(0, mac).bits()
}

/// The address in a word.
#[inline]
fn key_in(word: u64) -> u64 {
    word & ((1 << NUMBER) - 1)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::thread;

    use super::*;

    fn mac(number: u16) -> Mac {
        let [high, low] = number.to_be_bytes();
        [2, 0, 0, 7, high, low]
    }

    #[test]
    fn address_is_found_until_it_is_removed() {
        let remotes = Remotes::new(4);
        assert_eq!(remotes.find(mac(1)), None);
        assert!(remotes.set(mac(1), VtepNumber(0)) && remotes.set(mac(2), VtepNumber(u16::MAX)));
        assert_eq!(remotes.find(mac(1)), Some(VtepNumber(0)));
        assert_eq!(remotes.find(mac(2)), Some(VtepNumber(u16::MAX)));
        assert!(remotes.set(mac(1), VtepNumber(5)), "it has moved");
        assert_eq!(remotes.find(mac(1)), Some(VtepNumber(5)));
        remotes.remove(mac(1));
        remotes.remove(mac(1));
        assert_eq!((remotes.find(mac(1)), remotes.find(mac(3))), (None, None));
        assert_eq!(remotes.find(mac(2)), Some(VtepNumber(u16::MAX)));
    }

    #[test]
    fn there_is_room_for_that_many_stations() {
        for most in [0, 1, 2, 3, 5, 100] {
            let remotes = Remotes::new(most.into());
            for number in 0..most {
                assert!(remotes.set(mac(number), VtepNumber(number)), "{most}");
            }
            assert!(!remotes.set(mac(1000), VtepNumber(1)), "{most}");
            assert_eq!(remotes.find(mac(1000)), None);
            if most > 0 {
                assert!(remotes.set(mac(0), VtepNumber(9)), "it is there already");
                remotes.remove(mac(0));
                assert!(remotes.set(mac(1000), VtepNumber(1)), "{most}");
            }
        }
    }

    #[test]
    fn addresses_that_no_station_has_are_not_taken() {
        let remotes = Remotes::new(8);
        for mac in [[0; 6], [0xff; 6], [1, 0, 0x5e, 0, 0, 1]] {
            assert!(!remotes.set(mac, VtepNumber(1)), "{mac:x?}");
            assert_eq!(remotes.find(mac), None);
            remotes.remove(mac);
        }
    }

    #[test]
    fn all_stations_may_be_behind_one_vtep() {
        let remotes = Remotes::behind(VtepNumber(3));
        for number in [1, 2, 900] {
            assert_eq!(remotes.find(mac(number)), Some(VtepNumber(3)));
            remotes.remove(mac(number));
        }
        assert_eq!(remotes.find([1, 0, 0x5e, 0, 0, 1]), None);
        assert!(!remotes.set(mac(1), VtepNumber(1)), "there is no room for others");
    }

    /// Compared with a map, while addresses come and go for a long time; a full table has the longest searches.
    #[test]
    fn table_is_a_map_whatever_came_and_went() {
        let remotes = Remotes::new(64);
        let mut map = HashMap::new();
        let mut random = 1u64;
        for _ in 0..20_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (number, vtep) = ((random >> 33) as u16 % 96, (random >> 49) as u16);
            if random >> 63 == 0 {
                remotes.remove(mac(number));
                map.remove(&number);
            } else if remotes.set(mac(number), VtepNumber(vtep)) {
                map.insert(number, VtepNumber(vtep));
            } else {
                assert_eq!(map.len(), 64);
            }
        }
        for number in 0..96 {
            assert_eq!(remotes.find(mac(number)), map.get(&number).copied(), "{number}");
        }
        let is_used = |place: &&AtomicU64| place.load(Relaxed) != FREE;
        assert_eq!(remotes.places.iter().filter(is_used).count(), map.len());
    }

    /// A reader never gets the number of another address.
    #[test]
    fn readers_get_the_number_of_the_address_or_none_meanwhile() {
        let remotes = Remotes::new(16);
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            let readers = [(); 2].map(|()| {
                scope.spawn(|| {
                    while !is_done.load(Relaxed) {
                        for number in 0..16 {
                            let vtep = remotes.find(mac(number));
                            assert!(vtep.is_none_or(|vtep| vtep.0 % 16 == number), "{vtep:?}");
                        }
                    }
                })
            });
            let mut is_full = false;
            for round in 0..20_000u16 {
                let number = round % 4093 * 7 % 16;
                match round % 3 {
                    0 => remotes.remove(mac(number)),
                    _ => is_full |= !remotes.set(mac(number), VtepNumber(round % 4096 * 16 + number)),
                }
            }
            is_done.store(true, Relaxed);
            assert!(!is_full);
            for reader in readers {
                reader.join().expect("no panic");
            }
        });
    }
}
