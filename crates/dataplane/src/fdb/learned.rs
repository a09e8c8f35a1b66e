//! Source addresses that a guest uses besides its own, if its port learns (`learning`): those of nested guests, or
//! behind a bridge.
//!
//! A worker records an address when it first sees it, and forwards the frame without waiting. The daemon's control
//! threads read the entries, put the addresses into the FDB and send them to the XDP program. Only they remove entries:
//! those of addresses that were not used for some time.
//!
//! The number of entries is fixed, so that no guest fills the tables of switches with invented addresses: its frames
//! from further ones are dropped. An entry is found at a hash of the address, or behind that position. After an entry
//! before it was removed, an address may be recorded twice, which control threads correct.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::fdb::fdb_key::FdbKey;

/// Addresses that a port can learn.
pub(crate) const LEARNED_MAX: usize = 64;

/// Flag of an entry: it has a key.
const PRESENT: u64 = 1 << 61;
/// A frame came from the address since control checked.
const USED: u64 = 1 << 62;
/// The port may not have the address.
const REFUSED: u64 = 1 << 63;
const FLAGS: u64 = PRESENT | USED | REFUSED;

/// See the module's head. Nothing but the entries is shared, and nothing is published through them, so relaxed accesses
/// suffice.
#[derive(Debug)]
pub struct Learned {
    /// 0: free.
    entries: [AtomicU64; LEARNED_MAX],
    /// An eventfd, written when an address was recorded.
    news: Arc<OwnedFd>,
}

/// An entry, as control reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    at: usize,
    word: u64,
}

impl Entry {
    /// The address and its VLAN.
    pub fn key(self) -> FdbKey {
        FdbKey::from_bits(self.word & !FLAGS)
    }

    /// A frame came from the address since control checked.
    pub fn is_used(self) -> bool {
        self.word & USED != 0
    }

    /// Whether the port may not have the address.
    pub fn is_refused(self) -> bool {
        self.word & REFUSED != 0
    }
}

impl Learned {
    /// Without entries; control waits for `news`.
    pub fn new(news: Arc<OwnedFd>) -> Self {
        Self {
            entries: [const { AtomicU64::new(0) }; LEARNED_MAX],
            news,
        }
    }

    /// A frame has this source, which no configured port has. Returns whether the guest may send it.
    #[cold]
    pub fn record(&self, key: FdbKey) -> bool {
        let first = place(key);
        for at in 0..LEARNED_MAX {
            let entry = &self.entries[(first + at) % LEARNED_MAX];
            let mut word = entry.load(Relaxed);
            if word == 0 {
                let new = key.bits() | PRESENT | USED;
                match entry.compare_exchange(0, new, Relaxed, Relaxed) {
                    Ok(_) => {
                        // Once per entry; only control frees entries. A full counter wakes control, too.
                        let _ = rustix::io::write(&*self.news, &1u64.to_ne_bytes());
                        return true;
                    }
                    Err(other) => word = other,
                }
            }
            if word & !FLAGS == key.bits() {
                if word & USED == 0 {
                    // Fails if control has just removed it: then the next frame records it again.
                    let _ = entry.compare_exchange(word, word | USED, Relaxed, Relaxed);
                }
                return word & REFUSED == 0;
            }
        }
        false
    }

    /// All entries.
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        let all = self.entries.iter().enumerate();
        all.filter_map(|(at, entry)| {
            let word = entry.load(Relaxed);
            (word != 0).then_some(Entry { at, word })
        })
    }

    /// Clears an entry's use, so that the next use shows.
    pub fn take_use(&self, entry: Entry) {
        self.entries[entry.at].fetch_and(!USED, Relaxed);
    }

    /// Marks an entry as refused: frames from the address are dropped until the entry is removed.
    pub fn refuse(&self, entry: Entry) {
        self.entries[entry.at].fetch_or(REFUSED, Relaxed);
    }

    /// Removes an entry.
    pub fn remove(&self, entry: Entry) {
        self.entries[entry.at].store(0, Relaxed);
    }
}

/// The first position to search for a key.
fn place(key: FdbKey) -> usize {
    // The highest bits of a product with an odd number (Fibonacci hashing).
    (key.bits().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize % LEARNED_MAX
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn key(number: u8) -> FdbKey {
        FdbKey::new(7, [2, 0, 0, 0, 1, number])
    }

    fn learned() -> Learned {
        let news = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        Learned::new(Arc::new(news))
    }

    fn news(learned: &Learned) -> u64 {
        let mut count = [0; 8];
        let read = rustix::io::read(&*learned.news, &mut count);
        read.map_or(0, |_| u64::from_ne_bytes(count))
    }

    #[test]
    fn address_is_recorded_once_and_found_again() {
        let learned = learned();
        for _ in 0..3 {
            assert!(learned.record(key(1)) && learned.record(key(2)));
        }
        assert_eq!(news(&learned), 2);
        let mut keys: Vec<_> = learned.entries().map(|entry| entry.key().bits()).collect();
        keys.sort_unstable();
        assert_eq!(keys, [key(1).bits(), key(2).bits()]);
    }

    #[test]
    fn there_is_room_for_a_fixed_number_and_again_when_one_is_removed() {
        let learned = learned();
        for number in 0..LEARNED_MAX as u8 {
            assert!(learned.record(key(number)));
        }
        assert!(!learned.record(key(200)));
        assert!(learned.record(key(5)));
        let one = learned.entries().find(|entry| entry.key() == key(9));
        learned.remove(one.expect("noted"));
        assert!(learned.record(key(200)));
    }

    #[test]
    fn use_shows_until_it_is_taken_and_refused_ones_may_not_send() {
        let learned = learned();
        learned.record(key(1));
        let entry = || learned.entries().next().expect("noted");
        assert!(entry().is_used());
        learned.take_use(entry());
        assert!(!entry().is_used());
        learned.record(key(1));
        assert!(entry().is_used() && !entry().is_refused());
        learned.refuse(entry());
        assert!(!learned.record(key(1)));
        assert!(entry().is_refused());
    }
}
