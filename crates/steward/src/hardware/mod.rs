//! Steering by the NIC: n-tuple rules that bring the frames of a lease's addresses and VLANs to its queues, and an RSS
//! context that spreads them over several.
//!
//! # Theory of operation
//!
//! The kernel closes a socket when its lessee dies; a NIC keeps its rules. So each change is saved before it is made
//! (`Plan`), so that it can be found again: a rule by its content, a context by the contexts that existed before it.
//! The next steward after a crash removes the saved rules and contexts that it finds, and nothing else. It never
//! changes other rules: where one is for the same frames, the steward makes no rules.
//!
//! The order is: save, context, save, rules, save; undone the other way round (`Part`). A driver that refuses any of
//! it leaves the lease with the program alone, which checks each frame in any case; the changes until then are
//! undone.
//!
//! This module changes a NIC by the trait [`Nic`], which tests implement, too; `ethtool` has the driver's commands.

mod ethtool;

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use host::nic::{Known, Rule, Steering, Table, Target};
use steer::Filter;

/// A NIC whose rules and contexts can be changed.
pub trait Nic: Steering {
    /// Adds a rule at a location, or at one that the driver chooses. Returns the location.
    fn insert(&mut self, rule: &Rule, location: Option<u32>) -> io::Result<u32>;
    /// Removes the rule at a location.
    fn delete(&mut self, location: u32) -> io::Result<()>;
    /// Writes all entries of the main table.
    fn set_indirection(&mut self, table: &[u32]) -> io::Result<()>;
    /// Makes a context that spreads over these queues. Returns its number.
    fn create_context(&mut self, queues: &[u32]) -> io::Result<u32>;
    /// Removes a context.
    fn delete_context(&mut self, context: u32) -> io::Result<()>;
}

/// The rules and context of one lease, saved before they are made.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Plan {
    /// Queues for the context; empty: no context.
    pub(crate) spread: Vec<u32>,
    /// Contexts that existed before it.
    pub(crate) before: Vec<u32>,
    /// Its number, once it is known.
    pub(crate) context: Option<u32>,
    /// Rules that are made.
    pub(crate) rules: Vec<Rule>,
}

/// One thing to undo, in the order in which it has to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    Rule(Rule),
    /// An RSS context.
    Context(u32),
}

/// Why the NIC has no rules.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe them")]
pub enum NotMade {
    #[error("no n-tuple rules: {0}")]
    Rules(#[source] io::Error),
    #[error(
        "n-tuple rule {location} is for {rule} already, and stays: remove it with `ethtool -N NAME delete {location}`"
    )]
    Taken { location: u32, rule: Rule },
    #[error("no room for {0} more n-tuple rule(s)")]
    Full(usize),
    #[error("no n-tuple rule says \"without a tag\"")]
    Untagged,
    #[error(
        "a rule for {0} would take frames that the policy does not name (`macs`, `vlans`; VLAN 0 names none)"
    )]
    NotNamed(Rule),
    #[error("n-tuple rule for {rule} refused: {source}")]
    Refused {
        rule: Rule,
        #[source]
        source: io::Error,
    },
    #[error("n-tuple rule for {0} reads back differently, and was removed")]
    Other(Rule),
    #[error("it cannot be saved: {0}")]
    Note(#[source] io::Error),
}

/// The addresses and VLANs that the policy names for a lease. Only what they cover may be taken away from others'
/// queues.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Names {
    pub(crate) macs: Vec<[u8; 6]>,
    pub(crate) vlans: BTreeSet<u32>,
}

impl Names {
    /// Whether all frames of a rule are of a named address, or all of a named VLAN. VLAN 0 is none: no rule says
    /// "without a tag", so that one for it would be for all VLANs.
    pub(crate) fn cover(&self, rule: &Rule) -> bool {
        rule.mac.is_some_and(|mac| self.macs.contains(&mac))
            || rule
                .vlan
                .is_some_and(|vlan| vlan != 0 && self.vlans.contains(&vlan.into()))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.macs.is_empty() && self.vlans.is_empty()
    }

    /// Whether a lease may have an address: one of these, if there are any.
    pub(crate) fn allow_mac(&self, mac: [u8; 6]) -> bool {
        self.macs.is_empty() || self.macs.contains(&mac)
    }

    /// The same for a VLAN.
    pub(crate) fn allow_vlan(&self, vlan: u16) -> bool {
        self.vlans.is_empty() || self.vlans.contains(&vlan.into())
    }
}

/// The steering that a lease wants from a NIC.
pub(crate) struct Order<'a> {
    pub(crate) filter: &'a Filter,
    pub(crate) queues: &'a [u32],
    pub(crate) names: &'a Names,
}

impl Order<'_> {
    /// Rules for all addresses in all VLANs, all to one target; each is checked against the policy's names.
    pub(crate) fn rules(&self, target: Target) -> Result<Vec<Rule>, NotMade> {
        let Filter { macs, vlans } = self.filter;
        let untagged = vlans.contains(&0);
        if macs.is_empty() && untagged {
            return Err(NotMade::Untagged);
        }
        // A rule cannot ask for frames without a tag; one that does not ask for a tag brings them along, and the
        // program sorts them out.
        let vlans: Vec<Option<u16>> = match vlans.is_empty() || untagged {
            true => vec![None],
            false => vlans.iter().copied().map(Some).collect(),
        };
        let macs: Vec<Option<[u8; 6]>> = match macs.is_empty() {
            true => vec![None],
            false => macs.iter().copied().map(Some).collect(),
        };
        let both = macs.iter().flat_map(|&mac| {
            vlans.iter().map(move |&vlan| Rule {
                mac,
                vlan,
                flow: None,
                target,
            })
        });
        both.map(|rule| match self.names.cover(&rule) {
            true => Ok(rule),
            false => Err(NotMade::NotNamed(rule)),
        })
        .collect()
    }
}

/// Configures the NIC. `save` gets the plan each time before more is made, and must save it. A returned error in `Ok`
/// says why there is no context for several queues; then rules steer to the first of them.
/// Errors: why not. What [`Plan::parts`] of the save says may be left in the NIC if that also refused to take it back.
pub(crate) fn make(
    nic: &mut impl Nic,
    order: &Order<'_>,
    plan: &mut Plan,
    save: &mut dyn FnMut(&Plan) -> io::Result<()>,
) -> Result<Option<io::Error>, NotMade> {
    let table = nic.table().map_err(NotMade::Rules)?;
    let Some(&first) = order.queues.first() else {
        return Err(NotMade::Full(0));
    };
    let wanted = order.rules(Target::Queue(first))?;
    let locations = places(&table, &wanted)?;
    let mut why_no_context = None;
    if order.queues.len() > 1 {
        why_no_context = make_context(nic, order.queues, plan, save)?.err();
    }
    let target = plan.context.map_or(Target::Queue(first), Target::Context);
    plan.rules = order.rules(target)?;
    save(plan).map_err(NotMade::Note)?;
    insert_all(nic, &plan.rules, locations)?;
    Ok(why_no_context)
}

/// Adds rules, and checks that the NIC reports them unchanged.
///
/// # Errors
/// [`NotMade`].
pub fn insert_all(nic: &mut impl Nic, rules: &[Rule], locations: Vec<Option<u32>>) -> Result<(), NotMade> {
    let mut made = Vec::with_capacity(rules.len());
    for (&rule, location) in rules.iter().zip(locations) {
        let refused = |source| NotMade::Refused { rule, source };
        match nic.insert(&rule, location) {
            Ok(location) => made.push((rule, location)),
            // Those before are undone by what they say: one that says something else would stay.
            Err(source) => return find_again(nic, &made).and(Err(refused(source))),
        }
    }
    find_again(nic, &made)
}

/// Looks whether rules are as they were made; what could not be found again must not stay. Once for all: to read the
/// table takes as long as it is, and others wait meanwhile.
fn find_again(nic: &mut impl Nic, made: &[(Rule, u32)]) -> Result<(), NotMade> {
    if made.is_empty() {
        return Ok(());
    }
    let read = nic.table().map_err(NotMade::Rules)?;
    let known: BTreeMap<u32, Option<Rule>> = read
        .rules
        .iter()
        .map(|known| (known.location, known.rule))
        .collect();
    let is_there = |&(rule, location): &(Rule, u32)| known.get(&location) == Some(&Some(rule));
    let mut lost = None;
    for &(rule, location) in made.iter().filter(|made| !is_there(made)) {
        let deleted = nic.delete(location);
        deleted.map_err(|source| NotMade::Refused { rule, source })?;
        lost.get_or_insert(rule);
    }
    lost.map_or(Ok(()), |rule| Err(NotMade::Other(rule)))
}

/// Locations for rules, if the NIC has no other rules for the same frames.
///
/// # Errors
/// [`NotMade`].
pub fn places(table: &Table, wanted: &[Rule]) -> Result<Vec<Option<u32>>, NotMade> {
    let is_wanted = |rule: &Rule| {
        let mut wanted = wanted.iter();
        wanted.any(|wanted| (wanted.mac, wanted.vlan, wanted.flow) == (rule.mac, rule.vlan, rule.flow))
    };
    for known in &table.rules {
        if let Some(rule) = known.rule.filter(is_wanted) {
            let location = known.location;
            return Err(NotMade::Taken { location, rule });
        }
    }
    if table.special {
        return Ok(vec![None; wanted.len()]);
    }
    // From the end, where rules have the lowest precedence, so that existing rules come first.
    let is_free = |location: &u32| table.rules.iter().all(|known| known.location != *location);
    let places: Vec<u32> = (0..table.size).rev().filter(is_free).take(wanted.len()).collect();
    match places.len() == wanted.len() {
        true => Ok(places.into_iter().map(Some).collect()),
        false => Err(NotMade::Full(wanted.len())),
    }
}

/// The inner error: why there is no context; rules are made even so.
fn make_context(
    nic: &mut impl Nic,
    queues: &[u32],
    plan: &mut Plan,
    save: &mut dyn FnMut(&Plan) -> io::Result<()>,
) -> Result<io::Result<()>, NotMade> {
    let before = match nic.contexts() {
        Ok(before) => before,
        Err(error) => return Ok(Err(error)),
    };
    (plan.spread, plan.before) = (queues.to_vec(), before);
    save(plan).map_err(NotMade::Note)?;
    match nic.create_context(queues) {
        Ok(context) => {
            plan.context = Some(context);
            save(plan).map_err(NotMade::Note)?;
            Ok(Ok(()))
        }
        Err(error) => {
            (plan.spread, plan.before) = (Vec::new(), Vec::new());
            Ok(Err(error))
        }
    }
}

impl Plan {
    /// The parts to remove, also of a plan whose steward died. A context whose number was not saved
    /// any more is one that was not there before and spreads over these queues, if it is the only one: of several
    /// nobody knows which are whose, and they stay.
    pub(crate) fn parts(&self, nic: &impl Nic) -> Vec<Part> {
        let mut parts = self.known_parts();
        if self.spread.is_empty() || self.context.is_some() {
            return parts;
        }
        let is_ours =
            |id: &u32| !self.before.contains(id) && nic.spread(*id).is_ok_and(|spread| spread == self.spread);
        let there = nic.contexts().unwrap_or_default();
        let ours: Vec<u32> = there.into_iter().filter(is_ours).collect();
        if let [one] = ours[..] {
            parts.push(Part::Context(one));
        }
        parts
    }

    /// The same without querying the NIC, hence without a context whose number was not saved.
    pub(crate) fn known_parts(&self) -> Vec<Part> {
        let rules = self.rules.iter().copied().map(Part::Rule);
        rules.chain(self.context.map(Part::Context)).collect()
    }
}

fn stays() -> io::Error {
    io::Error::other("the driver reports that it is removed, but it is there")
}

/// Undoes one part, and checks that it is undone. A part that does not exist counts as undone.
/// Errors: the driver's; or that it said it was done and it is not.
pub(crate) fn undo(nic: &mut impl Nic, part: &Part) -> io::Result<()> {
    match *part {
        Part::Rule(rule) => remove(nic, &[rule]),
        Part::Context(context) => {
            if !nic.contexts()?.contains(&context) {
                return Ok(());
            }
            nic.delete_context(context)?;
            match nic.contexts()?.contains(&context) {
                true => Err(stays()),
                false => Ok(()),
            }
        }
    }
}

/// Removes rules, and checks that they are gone.
///
/// # Errors
/// The driver's error; or that it reported success without a change.
pub fn remove(nic: &mut impl Nic, rules: &[Rule]) -> io::Result<()> {
    let is_one = |known: &Known| known.rule.is_some_and(|rule| rules.contains(&rule));
    for known in nic.table()?.rules.iter().filter(|known| is_one(known)) {
        nic.delete(known.location)?;
    }
    match nic.table()?.rules.iter().any(is_one) {
        true => Err(stays()),
        false => Ok(()),
    }
}

#[cfg(any(test, feature = "test-nic"))]
pub mod test_nic;
#[cfg(test)]
#[path = "tests.rs"]
mod tests;
