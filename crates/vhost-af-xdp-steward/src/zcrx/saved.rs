//! NIC configuration for queues for zero-copy receive: saving it in the journal, and undoing it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use steer::with_sources;

use super::apart::{self, ApartPlan};
use host::links::Link;
use host::nic::{Ethtool, bound};
use program::backoff::{Backoff, RETRY};
use steward::server::file::may_crash;
use steward::server::part::QueueKey;
use steward::server::{Entry, Journal};

/// Names of the entries begin so.
const PREFIX: &str = "zcrx-";
/// A predecessor's child may be within the kernel yet when its successor begins.
const OF_A_PREDECESSOR: Duration = Duration::from_secs(1);
/// First and longest pause before it is looked again whether a queue's lessee has closed its ring: a process that has
/// ended does so in a moment.
const LOOKS_AT_RING: [Duration; 2] = [Duration::from_millis(20), RETRY];
/// Tries before it is said that a NIC does not take something back.
pub(super) const QUIET_TRIES: u32 = 3;

/// The configuration of the NIC for a queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SavedPlan {
    /// As it was called when it was saved.
    interface: String,
    ifindex: u32,
    pub(super) plan: ApartPlan,
}

impl SavedPlan {
    fn new(interface: &str, key: QueueKey, plan: ApartPlan) -> Self {
        Self {
            interface: interface.to_owned(),
            ifindex: key.0,
            plan,
        }
    }
}

/// Whom a queue counts for whose lease is over, as long as it is not anybody's again: its lessee may have kept it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Charge {
    pub(super) uid: u32,
    /// Of the policy, as long as that is the same.
    pub(super) rule: Option<usize>,
    pub(super) bytes: u64,
}

/// A queue whose lease is over.
#[derive(Debug)]
struct Leaving {
    saved: SavedPlan,
    /// None: of a predecessor's lessee.
    charge: Option<Charge>,
    has_rules: bool,
    /// Its rules go at once, the rest not before.
    from: Option<Instant>,
    /// When it is gone on with; none: at once.
    due: Option<Instant>,
    /// How often the NIC refused; when it is asked again, and when it is looked again whether the queue is in use.
    tries: u32,
    asking: Backoff,
    looking: Backoff,
}

/// All such queues.
#[derive(Debug, Default)]
pub(super) struct ZcrxQueues {
    /// Where it is saved what NICs were told.
    journal: Journal,
    saved: BTreeMap<QueueKey, SavedPlan>,
    leaving: BTreeMap<QueueKey, Leaving>,
}

impl ZcrxQueues {
    /// With what a predecessor saved, all of which is to be taken back.
    pub(super) fn open(journal: &Journal) -> Self {
        let from = Some(Instant::now() + OF_A_PREDECESSOR);
        let left = journal.contents::<SavedPlan>(PREFIX).into_iter();
        let leaving = left.map(|saved| {
            let key = (saved.ifindex, saved.plan.queue);
            (key, Leaving::new(saved, None, from))
        });
        let leaving = leaving.collect();
        Self {
            journal: journal.clone(),
            leaving,
            ..Self::default()
        }
    }

    /// Whether a previous steward left something.
    pub(super) fn are_left(journal: &Journal) -> bool {
        !journal.entries(PREFIX).is_empty()
    }

    /// Whether something is to be taken back yet.
    pub(super) fn is_unfinished(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// When that is gone on with next.
    pub(super) fn next_due(&self, now: Instant) -> Option<Instant> {
        let leaving = self.leaving.values();
        leaving.map(|leaving| leaving.due.unwrap_or(now)).min()
    }

    /// The plan that was saved for a leased queue.
    pub(super) fn plan_of(&self, key: QueueKey) -> ApartPlan {
        let saved = self.saved.get(&key).map(|saved| saved.plan.clone());
        saved.unwrap_or_else(|| ApartPlan::of(key.1))
    }

    /// Queues that are being taken back.
    pub(super) fn leaving(&self) -> impl Iterator<Item = QueueKey> {
        self.leaving.keys().copied()
    }

    /// Their users and rules.
    pub(super) fn charges(&mut self) -> impl Iterator<Item = &mut Charge> {
        self.leaving
            .values_mut()
            .filter_map(|leaving| leaving.charge.as_mut())
    }

    /// The number of them that count for a rule.
    pub(super) fn charged(&self, rule: usize) -> u32 {
        let charges = self.leaving.values().filter_map(|leaving| leaving.charge);
        let of_rule = charges.filter(|charge| charge.rule == Some(rule));
        u32::try_from(of_rule.count()).unwrap_or(u32::MAX)
    }

    /// Number and bytes of those that count for a user.
    pub(super) fn charged_to(&self, uid: u32) -> (u64, u64) {
        let charges = self.leaving.values().filter_map(|leaving| leaving.charge);
        charges
            .filter(|charge| charge.uid == uid)
            .fold((0, 0), |(count, bytes): (u64, u64), charge| {
                (count + 1, bytes.saturating_add(charge.bytes))
            })
    }

    pub(super) fn entry(&self, key: QueueKey) -> Entry {
        entry_in(&self.journal, key)
    }

    /// Saves the plan for a queue of this interface, before it is carried out.
    pub(super) fn save(&mut self, interface: &str, key: QueueKey, plan: &ApartPlan) -> io::Result<()> {
        let mut plan = plan.clone();
        self.hand_on(key, &mut plan)?;
        let saved = SavedPlan::new(interface, key, plan);
        self.entry(key).write(&saved)?;
        self.saved.insert(key, saved);
        Ok(())
    }

    /// Entries that were moved to this queue for another queue are saved in the plan of that queue.
    fn hand_on(&mut self, key: QueueKey, plan: &mut ApartPlan) -> io::Result<()> {
        let leaving = self
            .leaving
            .iter_mut()
            .map(|(other, leaving)| (other, &mut leaving.saved));
        let all = self.saved.iter_mut().chain(leaving);
        for (&other, saved) in all.filter(|&(&other, _)| other.0 == key.0 && other != key) {
            if plan.hand_on(&mut saved.plan) {
                entry_in(&self.journal, other).write(saved)?;
            }
        }
        Ok(())
    }

    fn forget(&mut self, key: QueueKey) {
        self.saved.remove(&key);
        let _ = self.entry(key).remove();
    }

    /// A queue is not leased after all: what was done for it until then is taken back.
    pub(super) fn abandon(&mut self, key: QueueKey) {
        if let Some(saved) = self.saved.remove(&key) {
            self.leaving.insert(key, Leaving::new(saved, None, None));
        }
    }

    /// The lease of a queue is over.
    pub(super) fn end(&mut self, key: QueueKey, interface: &str, charge: Option<Charge>) {
        let nothing = || SavedPlan::new(interface, key, ApartPlan::of(key.1));
        let saved = self.saved.remove(&key).unwrap_or_else(nothing);
        self.leaving.insert(key, Leaving::new(saved, charge, None));
    }

    /// Goes on with taking back what is due: the end of one lease asks nothing about other queues. `busy`: queues that
    /// a child may be registering yet.
    pub(super) fn go_on(&mut self, busy: &BTreeSet<QueueKey>, now: Instant) {
        let mut done = Vec::new();
        let due = self.leaving.iter_mut();
        for (key, leaving) in due.filter(|(_, leaving)| leaving.is_due(now)) {
            let is_idle = !busy.contains(key) && leaving.from.is_none_or(|from| from <= now);
            match leaving.go_on(is_idle, &entry_in(&self.journal, *key)) {
                Ok(true) => done.push(*key),
                Ok(false) => {
                    leaving.due = Some(now + leaving.looking.failed(now));
                }
                Err(why) => {
                    leaving.tries = leaving.tries.saturating_add(1);
                    leaving.due = Some(now + leaving.asking.failed(now));
                    if leaving.tries == QUIET_TRIES {
                        let interface = &leaving.saved.interface;
                        tracing::warn!(
                            interface,
                            queue = key.1,
                            "cannot undo the configuration of the NIC: {why}"
                        );
                    }
                }
            }
        }
        for key in done {
            self.leaving.remove(&key);
            self.forget(key);
            may_crash("zcrx-forgotten");
        }
    }
}

fn entry_in(journal: &Journal, key: QueueKey) -> Entry {
    journal.entry(&format!("{PREFIX}{}-{}", key.0, key.1))
}

impl Leaving {
    fn new(saved: SavedPlan, charge: Option<Charge>, from: Option<Instant>) -> Self {
        Self {
            saved,
            charge,
            has_rules: true,
            from,
            due: None,
            tries: 0,
            asking: Backoff::default(),
            looking: Backoff::new(LOOKS_AT_RING[0], LOOKS_AT_RING[1]),
        }
    }

    fn is_due(&self, now: Instant) -> bool {
        self.due.is_none_or(|due| due <= now)
    }

    /// Whether all is taken back. What is gone with its interface is.
    fn go_on(&mut self, is_idle: bool, entry: &Entry) -> io::Result<bool> {
        let SavedPlan { ifindex, plan, .. } = &self.saved;
        let link = match Link::find(*ifindex) {
            Ok(Some(link)) => link,
            Ok(None) => return Ok(true),
            Err(error) => return Err(io::Error::other(with_sources(&error))),
        };
        let mut nic = Ethtool::open(&link.name)?;
        if self.has_rules {
            apart::stop(&mut nic, plan)?;
            self.has_rules = false;
            may_crash("zcrx-stopped");
        }
        if bound::may_be_to_io_uring(*ifindex, plan.queue)? || !is_idle {
            self.keep_apart(&mut nic, entry)?;
            return Ok(false);
        }
        apart::give_back(&mut nic, plan)?;
        Ok(true)
    }

    /// Its lessee may have the memory yet: frames of others must not come there.
    fn keep_apart(&mut self, nic: &mut Ethtool, entry: &Entry) -> io::Result<()> {
        if entry.path().is_err() || self.saved.plan.moved.is_empty() {
            return Ok(());
        }
        let (mut plan, mut saved) = (self.saved.plan.clone(), self.saved.clone());
        let kept = apart::keep(nic, &mut plan, &mut |plan| {
            saved.plan = plan.clone();
            entry.write(&saved)
        });
        self.saved.plan = plan;
        kept.map(drop).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::apart::Moved;
    use super::*;
    use program::backoff::LONGEST_RETRY;

    #[test]
    fn saved_plans_of_a_predecessor_are_undone_and_unreadable_ones_are_logged() {
        let dir = tempfile::tempdir().expect("a directory");
        let journal = Journal::open(dir.path());
        let mut queues = ZcrxQueues::open(&journal);
        let key = (0x7fff_fff0, 3);
        let plan = ApartPlan {
            flows: vec!["192.0.2.1:443".parse().expect("an address and a port")],
            ..ApartPlan::of(3)
        };
        queues.save("nowhere9", key, &plan).expect("writable");
        fs::write(dir.path().join("zcrx-1-1.toml"), "flows = 7").expect("writable");
        assert_eq!(journal.entries(PREFIX).len(), 2);
        let mut next = ZcrxQueues::open(&journal);
        assert!(next.is_unfinished() && journal.entries(PREFIX).len() == 1);
        // Its interface is gone.
        next.go_on(&BTreeSet::new(), Instant::now());
        assert!(!next.is_unfinished() && journal.entries(PREFIX).is_empty());
    }

    #[test]
    fn entry_that_is_moved_on_stays_with_the_queue_that_it_was_taken_from() {
        let dir = tempfile::tempdir().expect("a directory");
        let journal = Journal::open(dir.path());
        let mut queues = ZcrxQueues::open(&journal);
        let plan_of = |queue: u32, moved: Vec<Moved>| ApartPlan {
            moved,
            ..ApartPlan::of(queue)
        };
        let [three, two] = [3, 2].map(|queue| (0x7fff_fff0, queue));
        let moved = |entry, to| Moved { entry, to };
        queues
            .save("nowhere9", three, &plan_of(3, vec![moved(3, 0), moved(7, 2)]))
            .expect("writable");
        queues
            .save("nowhere9", two, &plan_of(2, vec![moved(2, 0), moved(7, 1)]))
            .expect("writable");
        assert_eq!(queues.plan_of(two).moved, [moved(2, 0)]);
        assert_eq!(
            queues.plan_of(three).moved,
            [moved(3, 0), moved(7, 2), moved(7, 1)]
        );
        // So a successor finds it, too.
        let next = ZcrxQueues::open(&journal);
        assert_eq!(next.leaving[&three].saved.plan, queues.plan_of(three));
        assert_eq!(next.leaving[&two].saved.plan, queues.plan_of(two));
    }

    #[test]
    fn queue_whose_lease_is_over_counts_until_it_is_taken_back() {
        let (key, mut queues) = ((0x7fff_fff0, 3), ZcrxQueues::default());
        let charge = Charge {
            uid: 7,
            rule: Some(1),
            bytes: 4096,
        };
        queues.end(key, "nowhere9", Some(charge));
        assert_eq!((queues.charged(1), queues.charged(0)), (1, 0));
        assert_eq!((queues.charged_to(7), queues.charged_to(8)), ((1, 4096), (0, 0)));
        // With another policy.
        queues.charges().for_each(|charge| charge.rule = None);
        assert_eq!((queues.charged(1), queues.charged_to(7)), (0, (1, 4096)));
        queues.go_on(&BTreeSet::new(), Instant::now());
        assert_eq!(queues.charged_to(7), (0, 0));
    }

    /// Of the loopback, which takes no rules, so that there is nothing to ask it for.
    fn that_cannot_be_taken_back(queues: &mut ZcrxQueues, queue: u32) -> QueueKey {
        let key = (1, queue);
        let saved = SavedPlan::new(
            "lo",
            key,
            ApartPlan {
                flows: vec!["192.0.2.1:443".parse().expect("an address and a port")],
                ..ApartPlan::of(queue)
            },
        );
        queues.saved.insert(key, saved);
        queues.end(key, "lo", None);
        key
    }

    #[test]
    fn end_of_one_lease_asks_the_nic_nothing_about_other_queues() {
        let (mut queues, now) = (ZcrxQueues::default(), Instant::now());
        for queue in 0..20 {
            that_cannot_be_taken_back(&mut queues, queue);
            queues.go_on(&BTreeSet::new(), now);
        }
        let tries: Vec<u32> = queues.leaving.values().map(|leaving| leaving.tries).collect();
        assert_eq!(tries, [1; 20]);
    }

    #[test]
    fn queue_that_is_not_leased_after_all_is_taken_back_with_the_next_round() {
        let (mut queues, now) = (ZcrxQueues::default(), Instant::now());
        let key = (0x7fff_fff0, 3);
        queues
            .saved
            .insert(key, SavedPlan::new("nowhere9", key, ApartPlan::of(key.1)));
        assert_eq!(queues.next_due(now), None);
        queues.abandon(key);
        assert_eq!(queues.next_due(now), Some(now));
        queues.go_on(&BTreeSet::new(), now);
        assert_eq!(queues.next_due(now), None);
    }

    #[test]
    fn nic_that_takes_nothing_back_is_asked_again_after_a_pause_that_grows_up_to_its_bound() {
        let (mut queues, mut now) = (ZcrxQueues::default(), Instant::now());
        let key = that_cannot_be_taken_back(&mut queues, 0);
        let mut pause = RETRY;
        for tries in 1..10 {
            (0..3).for_each(|_| queues.go_on(&BTreeSet::new(), now));
            assert_eq!(queues.leaving[&key].tries, tries);
            assert_eq!(queues.next_due(now), Some(now + pause));
            now += pause;
            pause = (pause * 2).min(LONGEST_RETRY);
        }
    }

    #[test]
    fn nothing_is_saved_without_a_journal() {
        let mut queues = ZcrxQueues::default();
        let saved = queues.save("eth1", (7, 0), &ApartPlan::of(0));
        let error = saved.expect_err("no place");
        assert!(error.to_string().contains("--state"), "{error}");
    }
}
