//! The configuration of a NIC for its leases: one entry of the journal.
//!
//! Rules and contexts outlive the process that made them. So the plan is written before they are made, and removed
//! after they are removed: a steward that dies in between leaves a plan by which the next one finds them (see
//! [`crate::hardware`]). Without a journal the NIC is not configured.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use serde::{Deserialize, Serialize};
use steer::Filter;

use crate::hardware::{Names, Nic, NotMade, Order, Part, Plan, make, undo};
use crate::server::journal::file::{Entry, Journal};
use crate::sys;
use host::nic::Ethtool;
use program::fd_store::{self, STATIONS};
use steward_protocol::Steered;

/// The names of the entries begin so.
const PREFIX: &str = "nic-";

/// The entry of an interface, by its number.
pub(crate) fn entry_of(journal: &Journal, interface: u64) -> Entry {
    journal.entry(&format!("{PREFIX}{interface}"))
}

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    entry: Entry,
    saved: Saved,
    /// Stations that the NIC accepts frames to, by the lease's first queue.
    accepted: BTreeMap<u32, Accepted>,
}

/// Stations that a NIC accepts frames to: the kernel forgets them when the socket is closed, so they are not saved.
///
/// One socket has the list of all of them. Closing a socket takes an RCU grace period (`packet_release`,
/// net/packet/af_packet.c), tens of milliseconds at best, in which the steward serves no client.
#[derive(Debug)]
struct Accepted {
    socket: OwnedFd,
    /// The name under which the service manager keeps the socket while no steward runs.
    name: String,
    ifindex: u32,
    macs: BTreeSet<[u8; 6]>,
}

impl Accepted {
    /// Replaces the accepted stations by these.
    fn change(&mut self, macs: &[[u8; 6]]) -> io::Result<()> {
        let wanted: BTreeSet<_> = macs.iter().copied().collect();
        let gone = self.macs.difference(&wanted).map(|&mac| (mac, false));
        let new = wanted.difference(&self.macs).map(|&mac| (mac, true));
        // Add before removing, so that the NIC's list is never empty in between.
        let changes: Vec<_> = new.chain(gone).collect();
        for (mac, accepts) in changes {
            sys::accept_station(self.socket.as_fd(), self.ifindex, mac, accepts)?;
            match accepts {
                true => self.macs.insert(mac),
                false => self.macs.remove(&mac),
            };
        }
        Ok(())
    }
}

/// The content of the entry.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Saved {
    /// Name of the interface when the entry was last written.
    #[serde(default)]
    interface: String,
    #[serde(default, rename = "lease")]
    leases: Vec<SavedLease>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedLease {
    first_queue: u32,
    plan: Plan,
}

/// The result of configuring a NIC: how frames are steered, and why not in a better way.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SteeringOutcome {
    pub(crate) steered: Steered,
    pub(crate) note: String,
}

impl SteeringOutcome {
    pub(crate) fn by_program(why: &impl std::fmt::Display) -> Self {
        Self {
            steered: Steered::ByProgram,
            note: format!("the NIC does not bring the frames: {why}"),
        }
    }
}

/// How frames are steered by the configuration of this plan.
fn steered_by(plan: &Plan) -> Steered {
    match plan.context {
        Some(_) => Steered::ByContext,
        None => Steered::ByRules,
    }
}

impl Ledger {
    /// With what a predecessor saved.
    pub(crate) fn open(entry: Entry) -> Self {
        let saved = entry.read().unwrap_or_else(|error| {
            tracing::error!("rules of the NIC may be left over: {entry}: {error}");
            None
        });
        Self {
            saved: saved.unwrap_or_default(),
            entry,
            accepted: BTreeMap::new(),
        }
    }

    /// Sets the current name of the interface.
    pub(crate) fn set_interface(&mut self, name: &str) {
        name.clone_into(&mut self.saved.interface);
    }

    /// Lets the NIC accept frames to a lease's stations, until [`forget`](Self::forget).
    pub(crate) fn accept(&mut self, ifindex: u32, first: u32, macs: &[[u8; 6]]) -> io::Result<()> {
        let known = self.accepted.get_mut(&first);
        if let Some(known) = known.filter(|known| known.ifindex == ifindex) {
            return known.change(macs);
        }
        let family = AddressFamily::PACKET;
        let mut accepted = Accepted {
            // It receives nothing.
            socket: socket_with(family, SocketType::RAW, SocketFlags::CLOEXEC, None)?,
            name: format!("{STATIONS}{}-{ifindex}-{first}", std::process::id()),
            ifindex,
            macs: BTreeSet::new(),
        };
        accepted.change(macs)?;
        self.refuse(first);
        if self.is_kept() {
            fd_store::keep(accepted.socket.as_fd(), &accepted.name);
        }
        self.accepted.insert(first, accepted);
        Ok(())
    }

    /// The NIC need not accept frames to a lease's stations any more.
    pub(crate) fn refuse(&mut self, first: u32) {
        if let Some(accepted) = self.accepted.remove(&first)
            && self.is_kept()
        {
            fd_store::forget(&accepted.name);
        }
    }

    /// Undoes, as far as possible, the configuration in entries that are not known.
    pub(crate) fn clear_strays(journal: &Journal, known: &[Entry]) {
        for entry in journal.entries(PREFIX) {
            if known.contains(&entry) {
                continue;
            }
            let mut ledger = Self::open(entry.clone());
            let undone = Ethtool::open(&ledger.saved.interface).and_then(|mut nic| {
                let firsts = ledger.saved_queues();
                firsts
                    .into_iter()
                    .try_for_each(|first| ledger.undo_all(&mut nic, first))
            });
            if let Err(error) = undone {
                tracing::warn!("rules that {entry} names may be left over: {error}");
            }
            let _ = entry.remove();
        }
    }

    /// Whether there is a journal.
    pub(crate) fn is_kept(&self) -> bool {
        self.entry.path().is_ok()
    }

    /// First queues of leases for which the NIC may have rules or contexts.
    pub(crate) fn saved_queues(&self) -> BTreeSet<u32> {
        let leases = self.saved.leases.iter();
        leases.map(|saved| saved.first_queue).collect()
    }

    fn plan(&self, first: u32) -> Option<&Plan> {
        let saved = self.saved.leases.iter().find(|saved| saved.first_queue == first);
        saved.map(|saved| &saved.plan)
    }

    /// Configures the NIC for a lease, after undoing an earlier configuration for it.
    pub(crate) fn apply(
        &mut self,
        nic: &mut impl Nic,
        queues: &Range<u32>,
        filter: &Filter,
        names: &Names,
    ) -> SteeringOutcome {
        let first = queues.start;
        if let Err(error) = self.undo_all(nic, first) {
            return SteeringOutcome::by_program(&format!("cannot undo the configuration before: {error}"));
        }
        let queues: Vec<u32> = queues.clone().collect();
        let order = Order {
            filter,
            queues: &queues,
            names,
        };
        let mut plan = Plan::default();
        let made = make(nic, &order, &mut plan, &mut |plan| self.save(first, plan));
        match made {
            Ok(no_context) => SteeringOutcome {
                steered: steered_by(&plan),
                note: no_context.map_or_else(String::new, |why| {
                    format!("the NIC brings all frames to queue {first}: no RSS context: {why}")
                }),
            },
            Err(error) => self.take_back(nic, first, &plan, &error),
        }
    }

    /// Undoes a partly made configuration after an error. What cannot be undone now stays saved, and is undone when the
    /// lease ends.
    fn take_back(&mut self, nic: &mut impl Nic, first: u32, plan: &Plan, error: &NotMade) -> SteeringOutcome {
        let undone = plan.parts(nic).iter().try_for_each(|part| undo(nic, part));
        match undone {
            Ok(()) => self.forget_plan(first),
            Err(why) => tracing::warn!("the configuration of the NIC is not undone yet: {why}"),
        }
        SteeringOutcome::by_program(error)
    }

    /// Undoes the NIC's configuration for a lease.
    /// Errors: the driver's; it stays saved then.
    pub(crate) fn undo_all(&mut self, nic: &mut impl Nic, first: u32) -> io::Result<()> {
        for part in self.parts(Some(&*nic), first) {
            undo(nic, &part)?;
        }
        self.forget_plan(first);
        Ok(())
    }

    /// The parts to undo for a lease. If the NIC cannot be queried (`None`), only those in the saved plan.
    pub(crate) fn parts(&self, nic: Option<&impl Nic>, first: u32) -> Vec<Part> {
        let parts = |plan: &Plan| nic.map_or_else(|| plan.known_parts(), |nic| plan.parts(nic));
        self.plan(first).map_or_else(Vec::new, parts)
    }

    /// How frames of a lease are steered, if all of its saved rules are in the NIC.
    pub(crate) fn in_force(&self, nic: &impl Nic, first: u32) -> Option<Steered> {
        let plan = self.plan(first)?;
        (has_rules(nic, plan) == Some(true)).then(|| steered_by(plan))
    }

    /// Whether the NIC reports that a saved rule of a lease is not there.
    pub(crate) fn is_lost(&self, nic: &impl Nic, first: u32) -> bool {
        self.plan(first)
            .is_some_and(|plan| has_rules(nic, plan) == Some(false))
    }

    /// Removes all records of a lease, whose configuration is undone.
    pub(crate) fn forget(&mut self, first: u32) {
        self.refuse(first);
        self.forget_plan(first);
    }

    fn forget_plan(&mut self, first: u32) {
        if self.plan(first).is_some() {
            self.saved.leases.retain(|saved| saved.first_queue != first);
            if let Err(error) = self.write() {
                // The next steward does not find it in the NIC either, and removes it then.
                tracing::warn!("cannot remove what is undone from the journal: {error}");
            }
        }
    }

    fn save(&mut self, first: u32, plan: &Plan) -> io::Result<()> {
        let is_other = |saved: &SavedLease| saved.first_queue != first;
        self.saved.leases.retain(is_other);
        self.saved.leases.push(SavedLease {
            first_queue: first,
            plan: plan.clone(),
        });
        self.write().inspect_err(|_| self.saved.leases.retain(is_other))
    }

    fn write(&self) -> io::Result<()> {
        match self.is_kept() && self.saved.leases.is_empty() {
            true => self.entry.remove(),
            false => self.entry.write(&self.saved),
        }
    }
}

/// Whether all rules of a plan are in the NIC; `None`: the plan has no rules, or the NIC cannot be queried.
fn has_rules(nic: &impl Nic, plan: &Plan) -> Option<bool> {
    let table = nic.table().ok().filter(|_| !plan.rules.is_empty())?;
    let is_there = |rule| table.rules.iter().any(|known| known.rule == Some(rule));
    Some(plan.rules.iter().all(|&rule| is_there(rule)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::hardware::test_nic::{MACS, Played, theirs};

    fn filter() -> Filter {
        Filter {
            macs: vec![MACS[0]],
            vlans: vec![7],
        }
    }

    fn entry(dir: &tempfile::TempDir) -> Entry {
        entry_of(&Journal::open(dir.path()), 1)
    }

    fn names() -> Names {
        Names {
            macs: vec![MACS[0]],
            ..Names::default()
        }
    }

    #[test]
    fn successor_finds_the_configuration_and_undoes_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let (entry, path) = (entry(&dir), dir.path().join("nic-1.toml"));
        let mut nic = Played::new();
        let mut ledger = Ledger::open(entry.clone());
        let outcome = ledger.apply(&mut nic, &(2..4), &filter(), &names());
        assert_eq!((outcome.steered, outcome.note.as_str()), (Steered::ByContext, ""));
        drop(ledger);
        let mut successor = Ledger::open(entry.clone());
        assert_eq!(successor.saved_queues(), [2].into());
        assert_eq!(successor.in_force(&nic, 2), Some(Steered::ByContext));
        assert_eq!(
            successor.in_force(&Played::new(), 2),
            None,
            "another NIC, or it was reset"
        );
        successor.undo_all(&mut nic, 2).expect("it refuses nothing");
        assert_eq!((nic.rules.len(), nic.contexts), (0, theirs()));
        assert!(!path.exists() && Ledger::open(entry).saved_queues().is_empty());
    }

    #[test]
    fn lease_that_is_configured_again_leaves_nothing_of_the_first_time() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut nic = Played::new();
        let mut ledger = Ledger::open(entry(&dir));
        for _ in 0..3 {
            assert_eq!(
                ledger.apply(&mut nic, &(2..3), &filter(), &names()).steered,
                Steered::ByRules
            );
            assert_eq!(nic.rules.len(), 1);
        }
        // A NIC that was reset meanwhile, or does not answer.
        assert!(!ledger.is_lost(&nic, 2) && !ledger.is_lost(&Played::default(), 2));
        nic = Played::new();
        assert!(ledger.is_lost(&nic, 2));
        assert_eq!(
            ledger.apply(&mut nic, &(2..3), &filter(), &names()).steered,
            Steered::ByRules
        );
        assert_eq!(nic.rules.len(), 1);
    }

    #[test]
    fn nic_is_not_configured_without_a_file() {
        let mut nic = Played::new();
        let outcome = Ledger::open(Entry::default()).apply(&mut nic, &(0..1), &filter(), &names());
        assert_eq!((outcome.steered, nic.rules.len()), (Steered::ByProgram, 0));
        assert!(outcome.note.contains("keeps no state"), "{}", outcome.note);
        assert!(!Ledger::open(Entry::default()).is_kept());
    }

    #[test]
    fn refusal_leaves_nothing_and_no_note_unless_undoing_is_refused_too() {
        let dir = tempfile::tempdir().expect("a directory");
        let (entry, path) = (entry(&dir), dir.path().join("nic-1.toml"));
        let mut nic = Played::new();
        nic.fails_at = Some(2);
        let mut ledger = Ledger::open(entry.clone());
        let outcome = ledger.apply(&mut nic, &(0..2), &filter(), &names());
        assert_eq!(outcome.steered, Steered::ByProgram);
        assert!(outcome.note.contains("n-tuple rule for MAC"), "{}", outcome.note);
        assert_eq!((nic.contexts.clone(), path.exists()), (theirs(), false));
        // Now the context cannot be taken back either.
        let mut nic = Played::new();
        (nic.fails_at, nic.fails_from_then_on) = (Some(2), true);
        ledger.apply(&mut nic, &(0..2), &filter(), &names());
        assert_eq!((nic.contexts.len(), path.exists()), (2, true));
        (nic.fails_at, nic.fails_from_then_on) = (None, false);
        let parts = ledger.parts(Some(&nic), 0);
        assert!(parts.contains(&Part::Context(2)), "{parts:?}");
        parts
            .iter()
            .for_each(|part| undo(&mut nic, part).expect("it refuses nothing"));
        ledger.forget(0);
        assert_eq!((nic.contexts, path.exists()), (theirs(), false));
    }

    #[test]
    fn notes_of_no_interface_are_cleared_and_others_stay() {
        let dir = tempfile::tempdir().expect("a directory");
        for name in ["nic-1.toml", "nic-2.toml", "state.toml"] {
            fs::write(dir.path().join(name), "interface = \"nowhere9\"\n").expect("writable");
        }
        let journal = Journal::open(dir.path());
        let known = entry_of(&journal, 2);
        Ledger::clear_strays(&journal, std::slice::from_ref(&known));
        assert_eq!(journal.entries("nic-"), [known]);
        assert_eq!(journal.entries("state").len(), 1);
    }

    #[test]
    fn entry_of_the_version_before_is_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let text = "interface = \"eth1\"\n\n[[lease]]\nfirst_queue = 2\n\n[lease.plan]\nspread = [2, 3]\nbefore = [1]\n\
                    context = 2\nrules = []\n";
        fs::write(dir.path().join("nic-1.toml"), text).expect("writable");
        let ledger = Ledger::open(entry(&dir));
        assert_eq!(ledger.parts(None::<&Played>, 2), [Part::Context(2)]);
    }

    #[test]
    fn unreadable_file_is_logged_and_the_nic_is_not_changed() {
        let dir = tempfile::tempdir().expect("a directory");
        let entry = entry(&dir);
        fs::write(dir.path().join("nic-1.toml"), "lease = 7").expect("writable");
        assert!(Ledger::open(entry).saved_queues().is_empty());
    }
}
