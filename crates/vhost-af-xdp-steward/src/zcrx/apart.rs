//! A queue that gets the TCP flows of one lease, and no other frames.
//!
//! # Theory of operation
//!
//! With io_uring zero-copy receive the NIC writes the payload of all frames of a queue into its lessee's memory,
//! whatever their destination. So the queue must get the flows of its lease only: neither the main RSS table, nor
//! another RSS context, nor a rule of another program may name it. Entries of the main table that name it are moved
//! to the other queues, and moved back when no memory is bound to the queue any more, and not before. Rules for flows
//! are made when the queue is registered, and are removed first.
//!
//! Entries that were moved to a queue, and have to leave that one, too, when it is leased, still belong to the first
//! lease: its plan follows them ([`ApartPlan::hand_on`]). So all entries return, whichever lease ends first.
//!
//! As with other leases each change is saved before it is made, so that it can be found again. An entry of the table,
//! or a rule, that another program has changed meanwhile stays as it is.

use std::io;
use std::net::SocketAddr;

use host::nic::{Rule, Table, Target};
use steward::hardware::{Nic, NotMade, insert_all, places, remove};

/// The configuration of a NIC for one queue, saved before it is set.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct ApartPlan {
    pub(super) queue: u32,
    /// Entries of the main RSS table that named the queue.
    pub(super) moved: Vec<Moved>,
    /// Flows that rules are made for.
    pub(super) flows: Vec<SocketAddr>,
}

/// An entry of the main RSS table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Moved {
    pub(super) entry: u32,
    /// The queue that it names now.
    pub(super) to: u32,
}

/// Why a queue cannot be isolated; the interface is not known here, so remedies say NAME.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotApart {
    #[error("the NIC takes no n-tuple rules (`ethtool -K NAME ntuple on`, where the driver has them): {0}")]
    NoRules(#[source] io::Error),
    #[error("the NIC does not report its RSS table, so that frames of others might come to the queue: {0}")]
    NoTable(#[source] io::Error),
    #[error(
        "the main RSS table names queue {0}, so that frames of others would come to it: leave it out with `ethtool -X \
         NAME equal {0}` if it is the last, or let the steward do so by `zcrx-setup = true` in the rule"
    )]
    InTable(u32),
    #[error(
        "the main RSS table names queue {0} only: let it name others, with `ethtool -L` and `ethtool -X`"
    )]
    OnlyOne(u32),
    #[error(
        "RSS context {context} names queue {queue}, so that frames of others would come to it: leave it out with \
         `ethtool -X NAME context {context} ...`, or lease another queue"
    )]
    InContext { context: u32, queue: u32 },
    #[error(
        "n-tuple rule {location} ({what}) leads to queue {queue}: remove it with `ethtool -N NAME delete {location}`, \
         or lease another queue"
    )]
    Led { location: u32, what: String, queue: u32 },
    #[error(transparent)]
    Rule(#[from] NotMade),
    #[error("the NIC refuses another RSS table: {0}")]
    RefusedTable(#[source] io::Error),
    #[error("another RSS table reads back differently")]
    OtherTable,
    #[error("it cannot be saved: {0}")]
    Save(#[source] io::Error),
}

type Save<'a> = &'a mut dyn FnMut(&ApartPlan) -> io::Result<()>;

impl ApartPlan {
    /// An empty plan for a queue.
    pub(super) fn of(queue: u32) -> Self {
        Self {
            queue,
            ..Self::default()
        }
    }

    /// Entries that were moved to this queue for another one are restored by the plan of that one. It follows them to
    /// where this plan moves them, and keeps both places, as they may not be moved yet. Returns whether there are any.
    pub(super) fn hand_on(&mut self, other: &mut Self) -> bool {
        let here = |again: &Moved| Moved {
            to: self.queue,
            ..*again
        };
        let is_theirs = |again: &Moved| other.moved.contains(&here(again));
        let (theirs, own): (Vec<Moved>, Vec<Moved>) = self.moved.iter().partition(|again| is_theirs(again));
        self.moved = own;
        let further: Vec<Moved> = theirs
            .iter()
            .copied()
            .filter(|it| !other.moved.contains(it))
            .collect();
        other.moved.extend(further);
        !theirs.is_empty()
    }
}

/// Checks whether a queue can be isolated.
/// Errors: why not; [`NotApart::InTable`], if only the main table is in the way, which [`move_table`] changes.
pub(super) fn check(nic: &impl Nic, queue: u32, flows: &[SocketAddr]) -> Result<(), NotApart> {
    let table = nic.table().map_err(NotApart::NoRules)?;
    check_rules(&table, queue, flows)?;
    let main = nic.indirection(0).map_err(NotApart::NoTable)?;
    for context in nic.contexts().map_err(NotApart::NoTable)? {
        let named = nic.spread(context).map_err(NotApart::NoTable)?;
        if named.contains(&queue) {
            return Err(NotApart::InContext { context, queue });
        }
    }
    match (main.contains(&queue), main.iter().any(|&other| other != queue)) {
        (_, false) => Err(NotApart::OnlyOne(queue)),
        (true, true) => Err(NotApart::InTable(queue)),
        (false, true) => Ok(()),
    }
}

fn rules_for(queue: u32, flows: &[SocketAddr]) -> Vec<Rule> {
    flows.iter().map(|&flow| Rule::of_flow(flow, queue)).collect()
}

/// Locations for the rules of a queue, if no other rule steers to it.
fn check_rules(table: &Table, queue: u32, flows: &[SocketAddr]) -> Result<Vec<Option<u32>>, NotApart> {
    let places = places(table, &rules_for(queue, flows))?;
    let mut rules = table.rules.iter();
    match rules.find(|known| known.target == Some(Target::Queue(queue))) {
        None => Ok(places),
        Some(known) => Err(NotApart::Led {
            location: known.location,
            what: known.text.clone(),
            queue,
        }),
    }
}

/// Moves the main table's entries again if another program has made it name the queue. Returns whether it had.
///
/// # Errors
/// As [`move_table`].
pub(super) fn keep(nic: &mut impl Nic, plan: &mut ApartPlan, save: Save<'_>) -> Result<bool, NotApart> {
    let table = nic.indirection(0).map_err(NotApart::NoTable)?;
    match table.contains(&plan.queue) {
        true => move_table(nic, plan, save).map(|()| true),
        false => Ok(false),
    }
}

/// Moves the main table's entries to the other queues that it names.
pub(super) fn move_table(nic: &mut impl Nic, plan: &mut ApartPlan, save: Save<'_>) -> Result<(), NotApart> {
    let queue = plan.queue;
    let mut table = nic.indirection(0).map_err(NotApart::NoTable)?;
    let mut others: Vec<u32> = table.iter().copied().filter(|&other| other != queue).collect();
    others.sort_unstable();
    others.dedup();
    if others.is_empty() {
        return Err(NotApart::OnlyOne(queue));
    }
    let entries = (0..).zip(&table).filter(|&(_, &named)| named == queue);
    let moved = entries
        .zip(others.iter().cycle())
        .map(|((entry, _), &to)| Moved { entry, to });
    let moved: Vec<Moved> = moved.collect();
    // Entries that were moved before and are unchanged have to be restored, too.
    plan.moved
        .retain(|before| moved.iter().all(|again| again.entry != before.entry));
    plan.moved.extend(&moved);
    save(plan).map_err(NotApart::Save)?;
    for &Moved { entry, to } in &moved {
        if let Some(named) = table.get_mut(entry as usize) {
            *named = to;
        }
    }
    nic.set_indirection(&table).map_err(NotApart::RefusedTable)?;
    match nic.indirection(0).is_ok_and(|read| read == table) {
        true => Ok(()),
        false => Err(NotApart::OtherTable),
    }
}

/// Steers the flows to the queue.
pub(super) fn bring(
    nic: &mut impl Nic,
    plan: &mut ApartPlan,
    flows: &[SocketAddr],
    save: Save<'_>,
) -> Result<(), NotApart> {
    let table = nic.table().map_err(NotApart::NoRules)?;
    let places = check_rules(&table, plan.queue, flows)?;
    plan.flows = flows.to_vec();
    save(plan).map_err(NotApart::Save)?;
    Ok(insert_all(nic, &rules_for(plan.queue, flows), places)?)
}

/// Removes the rules for the flows, and checks that they are gone.
/// Errors: the driver's.
pub(super) fn stop(nic: &mut impl Nic, plan: &ApartPlan) -> io::Result<()> {
    match plan.flows.is_empty() {
        true => Ok(()),
        false => remove(nic, &rules_for(plan.queue, &plan.flows)),
    }
}

/// Restores the main table's moved entries, except those that were changed since.
/// Errors: the driver's.
pub(super) fn give_back(nic: &mut impl Nic, plan: &ApartPlan) -> io::Result<()> {
    if plan.moved.is_empty() {
        return Ok(());
    }
    let mut table = nic.indirection(0)?;
    let before = table.clone();
    for moved in &plan.moved {
        if let Some(named) = table.get_mut(moved.entry as usize)
            && *named == moved.to
        {
            *named = plan.queue;
        }
    }
    match table == before {
        true => Ok(()),
        false => nic.set_indirection(&table),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use steward::hardware::test_nic::Played;

    fn flows() -> Vec<SocketAddr> {
        ["192.0.2.1:443", "[2001:db8::1]:443"]
            .map(|flow| flow.parse().expect("an address and a port"))
            .to_vec()
    }

    fn plan() -> ApartPlan {
        ApartPlan {
            queue: 3,
            ..ApartPlan::default()
        }
    }

    fn nic() -> Played {
        Played::new().with_main_table(&[0, 1, 2, 3, 0, 1, 2, 3])
    }

    #[test]
    fn queue_is_taken_out_of_the_table_gets_its_flows_and_all_is_as_before() {
        let mut nic = nic();
        let (mut plan, mut saved) = (plan(), Vec::new());
        assert!(matches!(check(&nic, 3, &flows()), Err(NotApart::InTable(3))));
        let mut save = |plan: &ApartPlan| {
            saved.push(plan.clone());
            Ok(())
        };
        move_table(&mut nic, &mut plan, &mut save).expect("it refuses nothing");
        assert_eq!(nic.main_table(), [0, 1, 2, 0, 0, 1, 2, 1]);
        check(&nic, 3, &flows()).expect("it is apart");
        bring(&mut nic, &mut plan, &flows(), &mut save).expect("it refuses nothing");
        assert_eq!(nic.rules.len(), 2);
        assert!(nic.rules.values().all(|rule| rule.target == Target::Queue(3)));
        // Each was saved before it was done.
        assert_eq!((saved[0].moved.len(), saved[0].flows.len()), (2, 0));
        assert_eq!(saved[1], plan);
        stop(&mut nic, &plan).expect("it refuses nothing");
        assert!(nic.rules.is_empty());
        assert_eq!(
            nic.main_table(),
            [0, 1, 2, 0, 0, 1, 2, 1],
            "while memory is bound"
        );
        for _ in 0..2 {
            give_back(&mut nic, &plan).expect("it refuses nothing");
            assert_eq!(nic.main_table(), [0, 1, 2, 3, 0, 1, 2, 3]);
        }
    }

    #[test]
    fn changes_of_other_programs_stay() {
        let mut nic = nic();
        let mut plan = plan();
        move_table(&mut nic, &mut plan, &mut |_| Ok(())).expect("it refuses nothing");
        nic.set_indirection(&[0, 1, 2, 2, 0, 1, 2, 1]).expect("ours");
        give_back(&mut nic, &plan).expect("it refuses nothing");
        assert_eq!(nic.main_table(), [0, 1, 2, 2, 0, 1, 2, 3]);
        let shorter = ApartPlan {
            moved: vec![Moved { entry: 99, to: 0 }],
            ..plan
        };
        give_back(&mut nic, &shorter).expect("an entry that is not there");
        assert_eq!(nic.main_table(), [0, 1, 2, 2, 0, 1, 2, 3]);
    }

    #[test]
    fn table_that_names_the_queue_again_is_changed_again_and_given_back_once() {
        let mut nic = nic();
        let mut plan = plan();
        move_table(&mut nic, &mut plan, &mut |_| Ok(())).expect("it refuses nothing");
        assert!(!keep(&mut nic, &mut plan, &mut |_| Ok(())).expect("it refuses nothing"));
        // `ethtool -X eth1 default`
        nic.set_indirection(&[0, 1, 2, 3, 0, 1, 2, 3]).expect("ours");
        assert!(keep(&mut nic, &mut plan, &mut |_| Ok(())).expect("it refuses nothing"));
        assert!(!nic.main_table().contains(&3) && plan.moved.len() == 2);
        give_back(&mut nic, &plan).expect("it refuses nothing");
        assert_eq!(nic.main_table(), [0, 1, 2, 3, 0, 1, 2, 3]);
    }

    #[test]
    fn two_queues_are_back_in_the_table_whichever_is_given_back_first() {
        for first in [0, 1] {
            let mut nic = nic();
            let mut plans = [3, 2].map(|queue| ApartPlan {
                queue,
                ..ApartPlan::default()
            });
            let [three, two] = &mut plans;
            move_table(&mut nic, three, &mut |_| Ok(())).expect("it refuses nothing");
            // To queue 2, among others.
            nic.set_indirection(&[0, 1, 2, 2, 0, 1, 2, 1])
                .expect("as it may choose");
            three.moved[0].to = 2;
            let mut saved = two.clone();
            let mut save = |plan: &ApartPlan| {
                saved.clone_from(plan);
                assert!(saved.hand_on(three));
                Ok(())
            };
            move_table(&mut nic, two, &mut save).expect("it refuses nothing");
            assert!(!nic.main_table().contains(&2) && !nic.main_table().contains(&3));
            let plans = [three.clone(), saved];
            for plan in [&plans[first], &plans[1 - first]] {
                give_back(&mut nic, plan).expect("it refuses nothing");
            }
            assert_eq!(nic.main_table(), [0, 1, 2, 3, 0, 1, 2, 3]);
        }
    }

    #[test]
    fn queue_that_frames_of_others_come_to_is_refused() {
        let apart = || Played::new().with_main_table(&[0, 1]);
        check(&apart(), 3, &flows()).expect("it is apart");
        let only = Played::new().with_main_table(&[3, 3]);
        assert!(matches!(check(&only, 3, &flows()), Err(NotApart::OnlyOne(3))));
        let mut context = apart();
        context.contexts.insert(2, vec![2, 3]);
        assert!(matches!(
            check(&context, 3, &flows()),
            Err(NotApart::InContext { context: 2, queue: 3 })
        ));
        let rule = |flow: &str, queue| Rule::of_flow(flow.parse().expect("an address and a port"), queue);
        let mut led = apart();
        led.rules.insert(5, rule("192.0.2.9:80", 3));
        assert!(matches!(
            check(&led, 3, &flows()),
            Err(NotApart::Led { location: 5, .. })
        ));
        let mut taken = apart();
        taken.rules.insert(6, rule("192.0.2.1:443", 0));
        assert!(matches!(
            check(&taken, 3, &flows()),
            Err(NotApart::Rule(NotMade::Taken { location: 6, .. }))
        ));
        let full = Played::of_size(1, false).with_main_table(&[0, 1]);
        assert!(matches!(
            check(&full, 3, &flows()),
            Err(NotApart::Rule(NotMade::Full(2)))
        ));
        let without = Played::of_size(0, false).with_main_table(&[0, 1]);
        assert!(matches!(check(&without, 3, &flows()), Err(NotApart::NoRules(_))));
        assert!(matches!(
            check(&Played::new(), 3, &flows()),
            Err(NotApart::NoTable(_))
        ));
    }

    #[test]
    fn saved_plan_undoes_everything_whatever_a_nic_rejects() {
        for fails_at in 1..=4 {
            let mut nic = nic();
            let (mut plan, mut saved) = (plan(), plan());
            nic.fails_at = Some(fails_at);
            let mut save = |plan: &ApartPlan| {
                saved.clone_from(plan);
                Ok(())
            };
            let made = move_table(&mut nic, &mut plan, &mut save)
                .and_then(|()| bring(&mut nic, &mut plan, &flows(), &mut save));
            assert_eq!(made.is_err(), fails_at < 4, "{fails_at}");
            nic.fails_at = None;
            stop(&mut nic, &saved).expect("it refuses nothing");
            give_back(&mut nic, &saved).expect("it refuses nothing");
            assert!(nic.rules.is_empty());
            assert_eq!(nic.main_table(), [0, 1, 2, 3, 0, 1, 2, 3]);
        }
    }
}
