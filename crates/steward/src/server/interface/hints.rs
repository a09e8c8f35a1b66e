//! Hints of an interface: those that its leases request together, as far as possible.
//!
//! One program serves all leases, so it writes the hints that any of them asks for and may have. The frames of a lease
//! without hints have none; if the driver strips tags, it sees no VLANs, even if other leases do. When
//! the set of hints changes, another program replaces the program; lessees know all possible layouts from the
//! beginning (`Program::all_layouts`).
//!
//! Hints are added at once. Hints that no lease asks for any more are removed a while later ([`STAYS`]). Loading a
//! program takes some milliseconds, in which the steward serves no lessee, and other lessees may set up their queues
//! again for other hints. A user that repeatedly takes and ends leases causes both no more often than that.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use steer::{HintSet, Mode, Program, with_sources};

use super::Interface;
use super::network::Network;
use crate::server::leases::entries::{self, Entries};
use program::backoff::Backoff;
use steward_protocol::{HintRequest, Hinted};

/// How long the program writes hints that no lease asks for any more.
const STAYS: Duration = Duration::from_secs(5);

/// The hints that a lease asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LeaseHints {
    pub(crate) hint_request: HintRequest,
    /// The hints that the policy allows.
    pub(crate) allowed: HintSet,
}

impl LeaseHints {
    /// Whether its frames may have hints: each frame has all that the program writes.
    fn has_any(&self) -> bool {
        !self.allowed.is_empty()
    }

    /// Whether its frames have the stripped tags, if the driver reports these to the program.
    fn has_tags(&self) -> bool {
        let wants_tags = self.hint_request.tags || self.hint_request.asked.has(HintSet::VLAN);
        wants_tags && self.allowed.has(HintSet::VLAN)
    }
}

/// The hints of an interface; the module documentation describes them.
#[derive(Debug, Default)]
pub(super) struct Hints {
    /// Requests of leases, by first queue.
    leases: BTreeMap<u32, LeaseHints>,
    /// The hints that the driver offers to programs; the mark needs no driver.
    driver: HintSet,
    /// Why the program does not write all possible hints.
    why: String,
    /// The set for which replacing the program failed, with the program's number; and when to try again.
    failed: Option<(HintSet, u32)>,
    retry: Backoff,
    /// Since when the program writes more hints than requested.
    surplus_since: Option<Instant>,
    /// The hints changed since lessees were last notified.
    pub(super) changed: bool,
}

impl Hints {
    /// Those hints of a surplus that the program still writes for now.
    fn staying(&mut self, surplus: HintSet, now: Instant) -> HintSet {
        if surplus.is_empty() {
            self.surplus_since = None;
            return surplus;
        }
        let since = *self.surplus_since.get_or_insert(now);
        if now < since + STAYS {
            return surplus;
        }
        self.surplus_since = None;
        HintSet::NONE
    }

    /// Has the program write these hints, if possible. Failed attempts pause, as each delays other lessees.
    fn set(&mut self, program: &Program, wanted: HintSet, now: Instant) {
        let attempt = Some((wanted, program.number()));
        if self.failed == attempt && !self.retry.is_due(now) {
            return;
        }
        if self.failed != attempt {
            self.retry.reset();
        }
        let mut set = program.set_hints(wanted);
        self.why.clear();
        let possible = wanted.among(HintSet::of_kernel());
        if let (Err(error), true) = (&set, possible != wanted) {
            self.why = error.to_string();
            set = program.set_hints(possible);
        }
        if let Err(error) = set {
            self.why = with_sources(error);
        }
        self.failed = attempt.filter(|_| !self.why.is_empty());
        if self.failed.is_some() {
            self.retry.failed(now);
        }
    }

    /// Whether hints have to be removed soon.
    pub(super) fn has_surplus(&self) -> bool {
        self.surplus_since.is_some()
    }
}

impl Interface {
    /// Sets the hints that a lease requests.
    pub(crate) fn ask_for_hints(&mut self, first: u32, asked: LeaseHints) {
        let before = self.hints.leases.insert(first, asked);
        if before.is_some_and(|before| before.has_any() != asked.has_any()) {
            self.judge_queues(first, asked);
            self.hints.changed = true;
        }
        if before != Some(asked) {
            self.decide_hints();
        }
    }

    /// Enables or disables hints for the queues of a lease.
    fn judge_queues(&self, first: u32, asked: LeaseHints) {
        let (Some(program), Some(entries)) = (&self.program, self.entries.get(&first)) else {
            return;
        };
        for queue in entries.queues.clone() {
            // A store to a mapped array, which cannot fail.
            let _ = program.allow_hints(queue, asked.has_any());
        }
    }

    /// Whether frames of a leased queue may have hints.
    pub(super) fn may_have_hints(&self, queue: u32) -> bool {
        let its = self.hints.leases.range(..=queue).next_back();
        its.is_some_and(|(_, asked)| asked.has_any())
    }

    /// The same for a lease of a previous steward, before all such leases are known.
    pub(super) fn adopt_hints(&mut self, first: u32, asked: LeaseHints) {
        self.hints.leases.insert(first, asked);
        self.judge_queues(first, asked);
    }

    pub(super) fn forget_hints(&mut self, first: u32) {
        // Without any lease the program is detached soon, and no socket receives its frames.
        if self.hints.leases.remove(&first).is_some() && !self.hints.leases.is_empty() {
            self.decide_hints();
        }
    }

    /// Whether lessees have to be notified of their hints; resets that.
    pub(crate) fn take_hints_changed(&mut self) -> bool {
        std::mem::take(&mut self.hints.changed)
    }

    /// Whether a lease would get the tags that the driver strips, as far as that is known beforehand.
    pub(crate) fn may_restore_tags(ifindex: u32, asked: LeaseHints) -> bool {
        asked.has_tags() && HintSet::of_driver(ifindex).unwrap_or_default().has(HintSet::VLAN)
    }

    /// Resets hints after a program was attached: it writes none yet, and its driver may be another one.
    pub(super) fn hints_of_new_program(&mut self) {
        self.hints.driver = HintSet::NONE;
        self.hints.surplus_since = None;
        self.hints.changed = true;
        self.decide_hints();
    }

    /// Has the program write the hints that leases request, if it does not yet.
    pub(crate) fn decide_hints(&mut self) {
        let Some(program) = &self.program else { return };
        let wants_tags = self.hints.leases.iter();
        let wanted = wants_tags.fold(HintSet::NONE, |all, (&first, asked)| {
            all.with(self.effective(first, asked))
        });
        let before = (program.hints(), self.hints.why.clone());
        if !wanted.is_empty() {
            self.hints.driver = HintSet::of_driver(self.link.index).unwrap_or_default();
        }
        let possible = possible(program.mode(), self.hints.driver);
        let wanted = wanted.among(possible);
        let surplus = program.hints().among(possible).without(wanted);
        let now = Instant::now();
        let wanted = wanted.with(self.hints.staying(surplus, now));
        self.hints.set(program, wanted, now);
        let on = program.hints();
        if before != (on, self.hints.why.clone()) {
            let why = &self.hints.why;
            tracing::info!(interface = self.link.name, hints = %on, why, "hints");
            self.hints.changed = true;
        }
        for (first, entries) in &mut self.entries {
            let asked = self.hints.leases.get(first);
            entries.restored = on.has(HintSet::VLAN) && asked.is_some_and(LeaseHints::has_tags);
        }
    }

    /// The hints for a lease if all are possible.
    fn effective(&self, first: u32, asked: &LeaseHints) -> HintSet {
        let LeaseHints {
            hint_request,
            allowed,
        } = asked;
        let by_need = match hint_request.tags && self.lacks_tags(first) {
            true => HintSet::VLAN,
            false => HintSet::NONE,
        };
        hint_request.asked.with(by_need).among(*allowed)
    }

    /// Whether a lease is for VLANs whose tags the driver strips.
    fn lacks_tags(&self, first: u32) -> bool {
        let of_entries = self.entries.get(&first).is_some_and(Entries::lacks_tags);
        let of_network = self.networks.get(&first).is_some_and(Network::lacks_tags);
        of_entries || of_network
    }

    /// Whether the lease of this first queue gets the tags that are stripped.
    pub(super) fn restores_tags(&self, first: u32) -> bool {
        if self.is_by_tap() {
            return true;
        }
        let asked = self.hints.leases.get(&first);
        asked.is_some_and(|asked| self.restores_for(asked))
    }

    /// The same for a lease that requests these hints.
    pub(super) fn restores_for(&self, asked: &LeaseHints) -> bool {
        let hints = self.program.as_ref().map(steer::Program::hints);
        asked.has_tags() && hints.is_some_and(|hints| hints.has(HintSet::VLAN))
    }

    /// The answer for the lessee of these queues.
    pub(crate) fn hinted_for(&self, queues: &Range<u32>) -> Hinted {
        let asked = self.hints.leases.get(&queues.start).copied().unwrap_or_default();
        let Some(program) = &self.program else {
            return Hinted::default();
        };
        let driver = match self.hints.driver.is_empty() {
            true => HintSet::of_driver(self.link.index).unwrap_or_default(),
            false => self.hints.driver,
        };
        let possible = possible(program.mode(), driver);
        let on = match asked.has_any() {
            true => program.hints(),
            false => HintSet::NONE,
        };
        Hinted {
            possible,
            on,
            why: self.why_not(&asked, program.mode(), possible, on),
            layouts: program.all_layouts(),
        }
    }

    fn why_not(&self, asked: &LeaseHints, program_mode: Mode, possible: HintSet, on: HintSet) -> String {
        let missing = asked.hint_request.asked.without(on);
        if missing.is_empty() {
            return String::new();
        }
        if program_mode != Mode::Native {
            return format!(
                "no {missing}: hints take native mode, and the program is in {program_mode} mode"
            );
        }
        let note = |lacking: HintSet, why: &str| match lacking.is_empty() {
            true => String::new(),
            false => format!("no {lacking}: {why}"),
        };
        let by_policy = "the policy does not allow it, see `hints` of the rule";
        let by_driver = format!("the driver of {} ({}) has none", self.link.name, self.link.driver);
        let refused = note(missing.without(asked.allowed), by_policy);
        let lacking = note(missing.among(asked.allowed).without(possible), &by_driver);
        entries::joined([&refused, &lacking, &self.hints.why])
    }
}

/// The hints that a program in a mode can write, with a driver that offers these.
fn possible(mode: Mode, driver: HintSet) -> HintSet {
    match mode {
        Mode::Native => driver.with(HintSet::MARK),
        Mode::Skb | Mode::Tap => HintSet::NONE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_that_no_lease_asks_for_stay_for_a_while() {
        let (mut hints, start) = (Hints::default(), Instant::now());
        let mut after = |surplus, ms| {
            let stays = hints.staying(surplus, start + Duration::from_millis(ms));
            (stays, hints.has_surplus())
        };
        let surplus = HintSet::HASH;
        assert_eq!(after(HintSet::NONE, 0), (HintSet::NONE, false));
        assert_eq!(after(surplus, 0), (surplus, true));
        assert_eq!(after(surplus, 4999), (surplus, true));
        assert_eq!(
            after(HintSet::NONE, 4999),
            (HintSet::NONE, false),
            "asked for again"
        );
        assert_eq!(after(surplus, 5000), (surplus, true));
        assert_eq!(after(surplus, 10_000), (HintSet::NONE, false));
    }
}
