//! Learned addresses of ports (`learning`): reads the workers' entries, and updates the FDB and the uplink.
//!
//! Theory of operation. Workers record sources of frames ([`dataplane::fdb::learned`]). The network's thread reads new
//! entries, and removes those that were not used for a time ([`AGE`]). A key belongs to the port that used it last: it
//! moves if another port uses it. A key of a configured port, or of the host, is never learned. The uplink's steward
//! may reject a key: then the port's frames from it are dropped, until it is requested again ([`ASK_AGAIN`]). No worker
//! waits for this thread.
//!
//! A network with an uplink has room for a number of keys. Configured ones always have room: learned ones are evicted
//! for them ([`Learning::make_room`]). The ports that learn share the rest ([`Learning::share`]): a port with fewer
//! learned keys than another one gets room at the other one's cost.
//!
//! Each check makes one list of changes, and each list costs a new FDB for all workers. So a key that ports take from
//! each other again and again moves at intervals only ([`MOVES`]), together with all other keys that wait.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use dataplane::fdb::learned::{Entry, Learned};
use dataplane::fdb::{Fdb, FdbKey, FdbPort, PortNumber};

/// How long an unused address is kept; as in Linux's bridge.
const AGE: Duration = Duration::from_secs(300);
/// How long a rejected address is not requested again.
const ASK_AGAIN: Duration = Duration::from_secs(60);
/// A key that has not moved for this long moves when another port uses it.
const SETTLED: Duration = Duration::from_secs(60);
/// Interval between moves of keys that moved more recently.
const MOVES: Duration = Duration::from_secs(1);

/// Result of a change at the uplink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SetResult {
    Done,
    Refused,
    /// The steward is away.
    Later,
}

/// A key and its new port.
pub(super) type Change = (FdbKey, Option<PortNumber>);

/// The owner of a key.
#[derive(Debug, Clone, Copy)]
struct Owner {
    port: PortNumber,
    used: Instant,
    /// When it moved to this port from another one.
    moved: Option<Instant>,
}

/// An address that was evicted, and the port that had learned it.
pub(super) type Evicted = (FdbKey, PortNumber);

/// A port's entry with a change for the uplink.
struct Found<'a> {
    port: PortNumber,
    learned: &'a Learned,
    entry: Entry,
    change: Change,
}

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Learning {
    owners: HashMap<FdbKey, Owner>,
    refused: HashMap<(PortNumber, FdbKey), Instant>,
    /// The last move of unsettled keys.
    moved: Option<Instant>,
    /// The uplink could not be updated, or a key may not move yet.
    pub(super) waits: bool,
}

impl Learning {
    /// The learned keys, each with its port.
    pub(super) fn keys(&self) -> impl Iterator<Item = (FdbKey, PortNumber)> {
        self.owners.iter().map(|(&key, owner)| (key, owner.port))
    }

    /// The uplink has lost all keys: the next check, which `news` triggers, sends them again.
    pub(super) fn forget(&mut self, news: &OwnedFd) {
        self.owners.clear();
        // Fails only if the eventfd's counter is full, and then it is readable already.
        let _ = rustix::io::write(news, &1u64.to_ne_bytes());
    }

    /// The uplink has lost a key: the next check sends it again.
    pub(super) fn lose(&mut self, key: FdbKey) {
        self.owners.remove(&key);
    }

    /// A port was removed; returns its learned keys.
    pub(super) fn leave(&mut self, port: PortNumber) -> Vec<FdbKey> {
        self.refused.retain(|&(of, _), _| of != port);
        let gone: Vec<_> = self.keys().filter(|&(_, of)| of == port).collect();
        let gone = gone.into_iter().map(|(key, _)| key);
        gone.inspect(|key| _ = self.owners.remove(key)).collect()
    }

    /// Evicts learned keys until there are at most `most`: each time, the least recently used key of the port with the
    /// most keys.
    pub(super) fn make_room(&mut self, most: usize, ports: &[Option<FdbPort>]) -> Vec<Evicted> {
        let surplus = self.owners.len().saturating_sub(most);
        let mut held = self.held();
        (0..surplus)
            .filter_map(|_| self.evict(&mut held, ports))
            .collect()
    }

    /// Divides the room for `most` learned keys among ports with new ones. Without room, a new key evicts one of the
    /// port with the most keys, if that has at least two more than the new key's port; else the new key is refused.
    /// The port with the fewest keys comes first, so no key that is granted here has to be evicted here.
    pub(super) fn share(&mut self, most: usize, ports: &[Option<FdbPort>], fdb: &Fdb) -> Vec<Evicted> {
        let mut evicted = self.make_room(most, ports);
        let mut held = self.held();
        let mut total = self.owners.len();
        let mut noted = HashMap::new();
        let mut next = BinaryHeap::new();
        for (port, learned) in learners(ports) {
            let is_new = |entry: &Entry| {
                let key = entry.key();
                !entry.is_refused() && fdb.is_free(key) && !self.owners.contains_key(&key)
            };
            let new: Vec<_> = learned.entries().filter(is_new).collect();
            noted.insert(port, (learned, new.into_iter()));
            next.push(Reverse((held.get(&port).copied().unwrap_or(0), port.0)));
        }
        let mut granted = HashSet::new();
        while let Some(Reverse((_, number))) = next.pop() {
            let port = PortNumber(number);
            let Some((learned, entries)) = noted.get_mut(&port) else {
                continue;
            };
            let Some(entry) = entries.next() else { continue };
            let its = held.get(&port).copied().unwrap_or(0);
            if !granted.contains(&entry.key()) {
                let is_full = total >= most;
                let largest = held.values().copied().max().unwrap_or(0);
                let one = (is_full && largest >= its + 2)
                    .then(|| self.evict(&mut held, ports))
                    .flatten();
                if is_full && one.is_none() {
                    learned.refuse(entry);
                } else {
                    total += usize::from(!is_full);
                    evicted.extend(one);
                    granted.insert(entry.key());
                    *held.entry(port).or_default() += 1;
                }
            }
            next.push(Reverse((held.get(&port).copied().unwrap_or(0), number)));
        }
        evicted
    }

    /// Number of learned keys of each port.
    fn held(&self) -> HashMap<PortNumber, usize> {
        let mut held = HashMap::new();
        self.owners
            .values()
            .for_each(|owner| *held.entry(owner.port).or_default() += 1);
        held
    }

    /// Evicts the least recently used key of the port that has the most keys by `held`, and updates `held`.
    fn evict(&mut self, held: &mut HashMap<PortNumber, usize>, ports: &[Option<FdbPort>]) -> Option<Evicted> {
        let (&port, count) = held.iter_mut().max_by_key(|(port, count)| (**count, port.0))?;
        let its = self.owners.iter().filter(|(_, owner)| owner.port == port);
        let (&key, _) = its.min_by_key(|(key, owner)| (owner.used, key.bits()))?;
        *count -= 1;
        self.owners.remove(&key);
        let learned = learners(ports).find(|&(number, _)| number == port);
        if let Some((_, learned)) = learned {
            let entries = learned.entries().filter(|entry| entry.key() == key);
            entries.for_each(|entry| learned.remove(entry));
        }
        Some((key, port))
    }

    /// Reads the entries of all ports; returns whether the FDB changes. `fdb`: the configured keys. `tell`: sends
    /// changes to the uplink, and returns the result of each.
    pub(super) fn look(
        &mut self,
        ports: &[Option<FdbPort>],
        fdb: &Fdb,
        now: Instant,
        tell: impl FnOnce(&[Change]) -> Vec<SetResult>,
    ) -> bool {
        let mut changed = false;
        let mut found: Vec<Found<'_>> = Vec::new();
        // A key changes once in a check, even if several ports have used it.
        let mut in_list = HashSet::new();
        self.waits = false;
        for (port, learned) in learners(ports) {
            let mut seen = HashSet::new();
            for entry in learned.entries() {
                let key = entry.key();
                if entry.is_used() {
                    learned.take_use(entry);
                }
                if !seen.insert(key) {
                    learned.remove(entry);
                } else if !fdb.is_free(key) {
                    // It was configured meanwhile, and the uplink has it as a configured one.
                    learned.remove(entry);
                    changed |= self.owners.remove(&key).is_some();
                } else if entry.is_refused() {
                    let since = *self.refused.entry((port, key)).or_insert(now);
                    if now.duration_since(since) >= ASK_AGAIN {
                        self.refused.remove(&(port, key));
                        learned.remove(entry);
                    }
                } else if let Some(whose) = self.whose(port, entry, now) {
                    if in_list.insert(key) {
                        let change = (key, whose);
                        found.push(Found {
                            port,
                            learned,
                            entry,
                            change,
                        });
                    } else {
                        self.waits = true;
                    }
                }
            }
        }
        if found.is_empty() {
            return changed;
        }
        let changes: Vec<_> = found.iter().map(|found| found.change).collect();
        let told = tell(&changes);
        self.settle(found.into_iter().zip(told), ports, now) || changed
    }

    /// Applies the results of changes; returns whether the FDB changes.
    fn settle<'a>(
        &mut self,
        told: impl Iterator<Item = (Found<'a>, SetResult)>,
        ports: &[Option<FdbPort>],
        now: Instant,
    ) -> bool {
        let mut changed = false;
        for (found, told) in told {
            match told {
                SetResult::Later => self.waits = true,
                SetResult::Refused if found.change.1.is_some() => found.learned.refuse(found.entry),
                SetResult::Refused | SetResult::Done => {
                    self.place(&found, ports, now);
                    changed = true;
                }
            }
        }
        changed
    }

    /// The new port of an entry's key, if that changes now; `Some(None)`: the key was not used for too long.
    fn whose(&mut self, port: PortNumber, entry: Entry, now: Instant) -> Option<Option<PortNumber>> {
        let Some(owner) = self.owners.get_mut(&entry.key()) else {
            return Some(Some(port));
        };
        if owner.port != port {
            let is_settled = is_past(owner.moved, SETTLED, now);
            let moves = is_settled || is_past(self.moved, MOVES, now);
            self.waits |= !moves;
            return moves.then_some(Some(port));
        }
        if entry.is_used() {
            owner.used = now;
        }
        (now.duration_since(owner.used) >= AGE).then_some(None)
    }

    /// Applies a change that the uplink has accepted.
    fn place(&mut self, found: &Found<'_>, ports: &[Option<FdbPort>], now: Instant) {
        let &Found {
            port,
            learned,
            entry,
            change: (key, whose),
        } = found;
        if whose.is_none() {
            learned.remove(entry);
            self.owners.remove(&key);
            return;
        }
        let owner = Owner {
            port,
            used: now,
            moved: None,
        };
        let Some(before) = self.owners.insert(key, owner) else {
            return;
        };
        self.owners.entry(key).and_modify(|owner| owner.moved = Some(now));
        if !is_past(before.moved, SETTLED, now) {
            self.moved = Some(now);
        }
        let its = learners(ports).find(|&(port, _)| port == before.port);
        if let Some((_, its)) = its {
            its.entries()
                .filter(|entry| entry.key() == key)
                .for_each(|entry| its.remove(entry));
        }
    }
}

/// Whether this was at least `pause` ago, or never.
fn is_past(at: Option<Instant>, pause: Duration, now: Instant) -> bool {
    at.is_none_or(|at| now.duration_since(at) >= pause)
}

/// Records evicted keys again, because the change that they were evicted for was rejected.
pub(super) fn record_again(evicted: &[Evicted], ports: &[Option<FdbPort>]) {
    for &(key, port) in evicted {
        let learned = learners(ports).find(|&(number, _)| number == port);
        learned
            .into_iter()
            .for_each(|(_, learned)| _ = learned.record(key));
    }
}

/// Sends a list as a whole, or one by one if it is rejected; returns the result of each.
pub(super) fn tell_each(changes: &[Change], mut tell: impl FnMut(&[Change]) -> SetResult) -> Vec<SetResult> {
    match tell(changes) {
        SetResult::Refused if changes.len() > 1 => changes.chunks(1).map(tell).collect(),
        told => vec![told; changes.len()],
    }
}

/// Ports that learn, with their entries.
fn learners(ports: &[Option<FdbPort>]) -> impl Iterator<Item = (PortNumber, &Learned)> {
    let ports = (0..).map(PortNumber).zip(ports);
    ports.filter_map(|(number, port)| Some((number, &**port.as_ref()?.learned.as_ref()?)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use packet::ethernet::Mac;

    const GUEST: Mac = [2, 0, 0, 0, 9, 1];

    fn key(mac: Mac) -> FdbKey {
        FdbKey::new(0, mac)
    }

    /// Two ports that learn, and one that does not.
    struct World {
        ports: Vec<Option<FdbPort>>,
        fdb: Fdb,
        learning: Learning,
        now: Instant,
        /// Changes sent to the uplink.
        told: Vec<Change>,
        /// Number of lists.
        lists: usize,
        answer: SetResult,
    }

    impl World {
        fn new() -> Self {
            let news = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd"));
            let port = |at: u8| FdbPort {
                mac: [2, 0, 0, 0, 0, at],
                learned: (at < 2).then(|| Arc::new(Learned::new(Arc::clone(&news)))),
                ..FdbPort::default()
            };
            let ports: Vec<_> = (0..3).map(|at| Some(port(at))).collect();
            Self {
                fdb: Fdb::new(ports.clone()),
                ports,
                learning: Learning::default(),
                now: Instant::now(),
                told: Vec::new(),
                lists: 0,
                answer: SetResult::Done,
            }
        }

        fn learned(&self, port: usize) -> &Learned {
            self.ports[port]
                .as_ref()
                .expect("a port")
                .learned
                .as_ref()
                .expect("it learns")
        }

        fn look(&mut self) -> bool {
            let (told, lists, answer) = (&mut self.told, &mut self.lists, self.answer);
            let tell = |changes: &[Change]| {
                told.extend(changes);
                *lists += 1;
                vec![answer; changes.len()]
            };
            self.learning.look(&self.ports, &self.fdb, self.now, tell)
        }

        fn keys(&self) -> Vec<(FdbKey, PortNumber)> {
            self.learning.keys().collect()
        }
    }

    #[test]
    fn address_is_sent_to_the_uplink_and_forgotten_when_unused() {
        let mut world = World::new();
        world.learned(0).record(key(GUEST));
        assert!(world.look() && !world.look());
        assert_eq!(world.keys(), [(key(GUEST), PortNumber(0))]);
        for _ in 0..3 {
            world.now += AGE - Duration::from_secs(1);
            world.learned(0).record(key(GUEST));
            assert!(!world.look());
        }
        world.now += AGE;
        assert!(world.look());
        assert!(world.keys().is_empty() && world.learned(0).entries().next().is_none());
        assert_eq!(
            world.told,
            [(key(GUEST), Some(PortNumber(0))), (key(GUEST), None)]
        );
    }

    #[test]
    fn address_moves_to_the_port_that_uses_it() {
        let mut world = World::new();
        world.learned(0).record(key(GUEST));
        world.look();
        world.learned(1).record(key(GUEST));
        assert!(world.look() && !world.look());
        assert_eq!(world.keys(), [(key(GUEST), PortNumber(1))]);
        assert!(world.learned(0).entries().next().is_none());
        world.learned(0).record(key(GUEST));
        assert!(world.look());
        assert_eq!(world.keys(), [(key(GUEST), PortNumber(0))]);
    }

    #[test]
    fn ports_that_take_addresses_from_each_other_move_them_once_in_a_while() {
        let mut world = World::new();
        let all = (0..50).map(|at| key([2, 0, 0, 0, 9, at]));
        // Both use them all the time, and are checked 50 times a second.
        for _ in 0..500 {
            for port in [0, 1] {
                all.clone().for_each(|key| _ = world.learned(port).record(key));
            }
            world.look();
            world.now += Duration::from_millis(20);
        }
        assert!((10..=16).contains(&world.lists), "{} lists", world.lists);
        assert!(world.learning.waits, "some have not moved yet");
        // Another key moves at once.
        let settled = key([2, 0, 0, 0, 8, 1]);
        for port in [0, 1] {
            world.learned(port).record(settled);
            world.look();
            let its = world.keys().into_iter().find(|&(its, _)| its == settled);
            assert_eq!(its, Some((settled, PortNumber(port as u16))));
        }
        // The last user has it in the end.
        world.now += MOVES;
        world.look();
        world.now += MOVES;
        world.look();
        assert!(!world.learning.waits);
    }

    #[test]
    fn address_that_is_refused_keeps_no_other_one_from_being_learned() {
        let [good, bad] = [GUEST, [2, 0, 0, 0, 9, 2]].map(|mac| (key(mac), Some(PortNumber(0))));
        let tell = |changes: &[Change]| match changes.contains(&bad) {
            true => SetResult::Refused,
            false => SetResult::Done,
        };
        let told = tell_each(&[good, bad, good], tell);
        assert_eq!(told, [SetResult::Done, SetResult::Refused, SetResult::Done]);
        assert_eq!(tell_each(&[good; 2], |_| SetResult::Later), [SetResult::Later; 2]);
    }

    #[test]
    fn address_that_is_refused_is_asked_for_again_later() {
        let mut world = World::new();
        world.answer = SetResult::Refused;
        world.learned(0).record(key(GUEST));
        assert!(!world.look() && !world.look());
        assert!(!world.learned(0).record(key(GUEST)));
        assert_eq!(world.told.len(), 1);
        world.now += ASK_AGAIN;
        world.answer = SetResult::Done;
        world.look();
        assert!(world.learned(0).record(key(GUEST)) && world.look());
    }

    #[test]
    fn steward_that_was_away_gets_changes_when_it_is_back() {
        let mut world = World::new();
        world.answer = SetResult::Later;
        world.learned(0).record(key(GUEST));
        assert!(!world.look());
        assert!(world.learned(0).record(key(GUEST)));
        world.answer = SetResult::Done;
        assert!(world.look());
    }

    #[test]
    fn configured_addresses_have_the_room_of_what_was_used_longest_ago() {
        let mut world = World::new();
        for at in 0..4 {
            world.learned(0).record(key([2, 0, 0, 0, 9, at]));
            world.look();
            world.now += Duration::from_secs(1);
        }
        world.learned(1).record(key(GUEST.map(|byte| byte ^ 2)));
        world.look();
        assert!(world.learning.make_room(5, &world.ports).is_empty());
        let oldest = [0, 1].map(|at| (key([2, 0, 0, 0, 9, at]), PortNumber(0)));
        assert_eq!(world.learning.make_room(3, &world.ports), oldest);
        assert_eq!(world.keys().len(), 3);
        assert_eq!(
            world.learned(0).entries().count(),
            2,
            "its entries are free again"
        );
        assert_eq!(world.learning.make_room(0, &world.ports).len(), 3);
    }

    #[test]
    fn ports_share_the_room_for_learned_addresses() {
        let mut world = World::new();
        let learn = |world: &mut World, port, from: u8, count: u8| {
            for at in from..from + count {
                world.learned(port).record(key([2, 0, 0, 0, 9, at]));
            }
            let evicted = world.learning.share(8, &world.ports, &world.fdb);
            world.look();
            evicted.len()
        };
        let held =
            |world: &World| [0, 1].map(|port| world.keys().iter().filter(|(_, of)| of.0 == port).count());
        assert_eq!(learn(&mut world, 0, 0, 10), 0);
        assert_eq!(held(&world), [8, 0]);
        assert_eq!(learn(&mut world, 1, 20, 3), 3);
        assert_eq!(held(&world), [5, 3]);
        assert_eq!(learn(&mut world, 1, 30, 3), 1);
        assert_eq!(held(&world), [4, 4]);
        // A port that uses more all the time gets no more room, and costs others nothing.
        for round in 0..5 {
            assert_eq!(learn(&mut world, 0, 40 + round * 10, 10), 0);
            assert_eq!(held(&world), [4, 4]);
        }
    }

    #[test]
    fn ports_share_the_room_also_among_addresses_that_are_noted_at_once() {
        let mut world = World::new();
        for (port, count) in [(0, 10), (1, 3)] {
            for at in 0..count {
                let mac = [2, 0, 0, 0, 9, port * 20 + at];
                world.learned(port.into()).record(key(mac));
            }
        }
        assert!(world.learning.share(8, &world.ports, &world.fdb).is_empty());
        world.look();
        let of = |port| world.keys().iter().filter(|(_, of)| of.0 == port).count();
        assert_eq!([of(0), of(1)], [5, 3]);
    }

    #[test]
    fn address_that_was_evicted_in_vain_is_learned_again() {
        let mut world = World::new();
        world.learned(0).record(key(GUEST));
        world.look();
        let evicted = world.learning.make_room(0, &world.ports);
        assert!(world.keys().is_empty() && !world.look());
        record_again(&evicted, &world.ports);
        assert!(world.look());
        assert_eq!(world.keys(), [(key(GUEST), PortNumber(0))]);
    }

    #[test]
    fn what_is_configured_goes_before_what_is_learned() {
        let mut world = World::new();
        world.learned(0).record(key(GUEST));
        world.look();
        world.ports[2].as_mut().expect("a port").mac = GUEST;
        world.fdb = Fdb::new(world.ports.clone());
        assert!(world.look());
        assert!(world.keys().is_empty() && world.learned(0).entries().next().is_none());
        assert_eq!(
            world.told.len(),
            1,
            "the uplink already has it as the other port's"
        );
    }

    #[test]
    fn returned_uplink_gets_all_addresses_at_once() {
        let mut world = World::new();
        world.learned(0).record(key(GUEST));
        world.look();
        let news = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        world.learning.forget(&news);
        assert!(rustix::io::read(&news, &mut [0; 8]).is_ok(), "no check follows");
        assert!(world.look());
        assert_eq!(world.told, [(key(GUEST), Some(PortNumber(0))); 2]);
    }

    #[test]
    fn port_that_leaves_leaves_its_addresses() {
        let mut world = World::new();
        world.learned(0).record(key(GUEST));
        world.look();
        assert_eq!(world.learning.leave(PortNumber(0)), [key(GUEST)]);
        assert!(world.keys().is_empty());
    }
}
