//! Addresses that ports have beside their own (`learning`): what workers noted is looked at, and told of.
//!
//! Theory of operation. Workers note sources of frames ([`crate::switch::learned`]). The network's thread looks at the
//! notes when there are new ones, and once in a while to find those that are not used any more ([`AGE`]). A station
//! belongs to the port that used it last ("moves"); one that is a port's by configuration, or the host's, is never
//! noted. The uplink's steward may refuse one: what the port sends from it is lost then, until it is asked again
//! ([`ASK_AGAIN`]). Nothing here is asked for by a worker that waits.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::switch::learned::{Learned, Note};
use crate::switch::table::{PortNumber, Station, Table, TablePort};

/// How long an address is kept that nobody uses; that of Linux's bridge.
const AGE: Duration = Duration::from_secs(300);
/// How long one is not asked for again that was refused.
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// What came of telling the uplink whose a station is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Told {
    Done,
    Refused,
    /// There is nobody to tell now.
    Later,
}

/// Whose a station is.
#[derive(Debug, Clone, Copy)]
struct Owner {
    port: PortNumber,
    used: Instant,
}

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Learning {
    owners: HashMap<Station, Owner>,
    refused: HashMap<(PortNumber, Station), Instant>,
    /// Somebody could not be told of all.
    pub(super) waits: bool,
}

impl Learning {
    /// What is learned.
    pub(super) fn stations(&self) -> impl Iterator<Item = (Station, PortNumber)> {
        self.owners.iter().map(|(&station, owner)| (station, owner.port))
    }

    /// The uplink knows of none any more: all are told again when the notes are looked at, which is asked for by `news`.
    pub(super) fn forget(&mut self, news: &OwnedFd) {
        self.owners.clear();
        // A counter that is full wakes, too.
        let _ = rustix::io::write(news, &1u64.to_ne_bytes());
    }

    /// A port is gone; stations that it had.
    pub(super) fn leave(&mut self, port: PortNumber) -> Vec<Station> {
        self.refused.retain(|&(of, _), _| of != port);
        let gone: Vec<_> = self.stations().filter(|&(_, of)| of == port).collect();
        let gone = gone.into_iter().map(|(station, _)| station);
        gone.inspect(|station| _ = self.owners.remove(station)).collect()
    }

    /// Looks at the notes of all ports; whether something is to be told to workers. `table`: of stations by
    /// configuration. `tell`: has the uplink know whose a station is.
    pub(super) fn look(
        &mut self,
        ports: &[Option<TablePort>],
        table: &Table,
        now: Instant,
        mut tell: impl FnMut(Station, Option<PortNumber>) -> Told,
    ) -> bool {
        let mut changed = false;
        let mut waits = false;
        let mut tell = |station, port| {
            let told = tell(station, port);
            waits |= told == Told::Later;
            told
        };
        for (port, learned) in learners(ports) {
            let mut seen = HashSet::new();
            for note in learned.notes() {
                let station = note.station();
                if note.is_used() {
                    learned.take_use(note);
                }
                if !seen.insert(station) {
                    learned.remove(note);
                } else if !table.is_free(station) {
                    // It became one's by configuration, and was told as that.
                    learned.remove(note);
                    changed |= self.owners.remove(&station).is_some();
                } else if note.is_refused() {
                    let since = *self.refused.entry((port, station)).or_insert(now);
                    if now.duration_since(since) >= ASK_AGAIN {
                        self.refused.remove(&(port, station));
                        learned.remove(note);
                    }
                } else {
                    changed |= self.place((port, learned), note, ports, now, &mut tell);
                }
            }
        }
        self.waits = waits;
        changed
    }

    /// Looks at a note of a port; whether a station has another port now.
    fn place(
        &mut self,
        (port, learned): (PortNumber, &Learned),
        note: Note,
        ports: &[Option<TablePort>],
        now: Instant,
        tell: &mut impl FnMut(Station, Option<PortNumber>) -> Told,
    ) -> bool {
        let station = note.station();
        let before = self.owners.get_mut(&station);
        if let Some(owner) = before.filter(|owner| owner.port == port) {
            if note.is_used() {
                owner.used = now;
            }
            if now.duration_since(owner.used) < AGE || tell(station, None) == Told::Later {
                return false;
            }
            learned.remove(note);
            self.owners.remove(&station);
            return true;
        }
        match tell(station, Some(port)) {
            Told::Later => false,
            Told::Refused => {
                learned.refuse(note);
                false
            }
            Told::Done => {
                let owner = Owner { port, used: now };
                if let Some(before) = self.owners.insert(station, owner) {
                    let its = learners(ports).find(|&(port, _)| port == before.port);
                    if let Some((_, its)) = its {
                        its.notes()
                            .filter(|note| note.station() == station)
                            .for_each(|note| its.remove(note));
                    }
                }
                true
            }
        }
    }
}

/// Ports that learn, with what was noted.
fn learners(ports: &[Option<TablePort>]) -> impl Iterator<Item = (PortNumber, &Learned)> {
    let ports = (0..).map(PortNumber).zip(ports);
    ports.filter_map(|(number, port)| Some((number, &**port.as_ref()?.learned.as_ref()?)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::switch::ethernet::Mac;

    const GUEST: Mac = [2, 0, 0, 0, 9, 1];

    fn station(mac: Mac) -> Station {
        Station::new(0, mac)
    }

    /// Two ports that learn, and one that does not.
    struct World {
        ports: Vec<Option<TablePort>>,
        table: Table,
        learning: Learning,
        now: Instant,
        /// What the uplink was told.
        told: Vec<(Station, Option<PortNumber>)>,
        answer: Told,
    }

    impl World {
        fn new() -> Self {
            let news = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd"));
            let port = |at: u8| TablePort {
                mac: [2, 0, 0, 0, 0, at],
                learned: (at < 2).then(|| Arc::new(Learned::new(Arc::clone(&news)))),
                ..TablePort::default()
            };
            let ports: Vec<_> = (0..3).map(|at| Some(port(at))).collect();
            Self {
                table: Table::new(ports.clone()),
                ports,
                learning: Learning::default(),
                now: Instant::now(),
                told: Vec::new(),
                answer: Told::Done,
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
            let (told, answer) = (&mut self.told, self.answer);
            let tell = |station, port| {
                told.push((station, port));
                answer
            };
            self.learning.look(&self.ports, &self.table, self.now, tell)
        }

        fn stations(&self) -> Vec<(Station, PortNumber)> {
            self.learning.stations().collect()
        }
    }

    #[test]
    fn address_is_told_of_and_forgotten_when_it_is_not_used() {
        let mut world = World::new();
        world.learned(0).note(station(GUEST));
        assert!(world.look() && !world.look());
        assert_eq!(world.stations(), [(station(GUEST), PortNumber(0))]);
        for _ in 0..3 {
            world.now += AGE - Duration::from_secs(1);
            world.learned(0).note(station(GUEST));
            assert!(!world.look());
        }
        world.now += AGE;
        assert!(world.look());
        assert!(world.stations().is_empty() && world.learned(0).notes().next().is_none());
        assert_eq!(
            world.told,
            [(station(GUEST), Some(PortNumber(0))), (station(GUEST), None)]
        );
    }

    #[test]
    fn address_moves_to_the_port_that_uses_it() {
        let mut world = World::new();
        world.learned(0).note(station(GUEST));
        world.look();
        world.learned(1).note(station(GUEST));
        assert!(world.look() && !world.look());
        assert_eq!(world.stations(), [(station(GUEST), PortNumber(1))]);
        assert!(world.learned(0).notes().next().is_none());
        world.learned(0).note(station(GUEST));
        assert!(world.look());
        assert_eq!(world.stations(), [(station(GUEST), PortNumber(0))]);
    }

    #[test]
    fn address_that_is_refused_is_asked_for_again_later() {
        let mut world = World::new();
        world.answer = Told::Refused;
        world.learned(0).note(station(GUEST));
        assert!(!world.look() && !world.look());
        assert!(!world.learned(0).note(station(GUEST)));
        assert_eq!(world.told.len(), 1);
        world.now += ASK_AGAIN;
        world.answer = Told::Done;
        world.look();
        assert!(world.learned(0).note(station(GUEST)) && world.look());
    }

    #[test]
    fn steward_that_is_away_is_told_when_it_is_back() {
        let mut world = World::new();
        world.answer = Told::Later;
        world.learned(0).note(station(GUEST));
        assert!(!world.look());
        assert!(world.learned(0).note(station(GUEST)));
        world.answer = Told::Done;
        assert!(world.look());
    }

    #[test]
    fn what_is_configured_goes_before_what_is_learned() {
        let mut world = World::new();
        world.learned(0).note(station(GUEST));
        world.look();
        world.ports[2].as_mut().expect("a port").mac = GUEST;
        world.table = Table::new(world.ports.clone());
        assert!(world.look());
        assert!(world.stations().is_empty() && world.learned(0).notes().next().is_none());
        assert_eq!(
            world.told.len(),
            1,
            "it is the other port's, as was told when that came"
        );
    }

    #[test]
    fn uplink_that_returns_is_told_of_all_again_at_once() {
        let mut world = World::new();
        world.learned(0).note(station(GUEST));
        world.look();
        let news = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        world.learning.forget(&news);
        assert!(rustix::io::read(&news, &mut [0; 8]).is_ok(), "nobody looks");
        assert!(world.look());
        assert_eq!(world.told, [(station(GUEST), Some(PortNumber(0))); 2]);
    }

    #[test]
    fn port_that_leaves_leaves_its_addresses() {
        let mut world = World::new();
        world.learned(0).note(station(GUEST));
        world.look();
        assert_eq!(world.learning.leave(PortNumber(0)), [station(GUEST)]);
        assert!(world.stations().is_empty());
    }
}
