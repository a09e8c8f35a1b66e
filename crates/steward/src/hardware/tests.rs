//! Making and undoing rules and contexts.

use std::cell::Cell;
use std::panic::AssertUnwindSafe;

use super::test_nic::{MACS, Played, theirs};
use super::*;

fn filter(macs: usize, vlans: &[u16]) -> Filter {
    Filter {
        macs: MACS[..macs].to_vec(),
        vlans: vlans.to_vec(),
    }
}

/// A policy that names whatever these tests ask for.
fn all_names() -> Names {
    Names {
        macs: MACS.to_vec(),
        vlans: (0..4095).collect(),
    }
}

/// Where frames are sent.
#[derive(Debug, PartialEq, Eq)]
enum Made {
    /// By rules to the first queue.
    Rules,
    /// By rules to a context of all.
    Context,
}

/// Makes it, saving everything; the plan as it was saved last.
fn run(nic: &mut Played, filter: &Filter, queues: &[u32]) -> (Plan, Result<Made, String>) {
    let (mut plan, mut saved) = (Plan::default(), Plan::default());
    let order = Order {
        filter,
        queues,
        names: &all_names(),
    };
    let made = make(nic, &order, &mut plan, &mut |plan| {
        saved = plan.clone();
        Ok(())
    });
    let made = made.map(|_| match plan.context {
        Some(_) => Made::Context,
        None => Made::Rules,
    });
    (saved, made.map_err(|error| error.to_string()))
}

fn undo_all(nic: &mut Played, plan: &Plan) {
    for part in plan.parts(nic) {
        undo(nic, &part).expect("it refuses nothing");
    }
}

#[test]
fn one_queue_gets_a_rule_for_each_address_in_each_vlan() {
    let mut nic = Played::new();
    nic.rules.insert(
        7,
        Rule {
            mac: Some([9; 6]),
            vlan: None,
            flow: None,
            target: Target::Queue(0),
        },
    );
    let before = nic.rules.clone();
    let (plan, made) = run(&mut nic, &filter(2, &[100, 200]), &[3]);
    assert_eq!(made, Ok(Made::Rules));
    assert_eq!(
        nic.changes,
        [
            "insert MAC 02:00:00:00:00:01 VLAN 100 to queue 3 at 6",
            "insert MAC 02:00:00:00:00:01 VLAN 200 to queue 3 at 5",
            "insert MAC 02:00:00:00:00:02 VLAN 100 to queue 3 at 4",
            "insert MAC 02:00:00:00:00:02 VLAN 200 to queue 3 at 3",
        ]
    );
    undo_all(&mut nic, &plan);
    assert_eq!(nic.rules, before);
    // Again is nothing.
    let calls = nic.calls;
    undo_all(&mut nic, &plan);
    assert_eq!(nic.calls, calls);
}

#[test]
fn several_queues_get_a_context_first_and_lose_it_last() {
    let mut nic = Played::new();
    nic.special = true;
    let (plan, made) = run(&mut nic, &filter(1, &[]), &[4, 5]);
    assert_eq!(made, Ok(Made::Context));
    undo_all(&mut nic, &plan);
    assert_eq!(
        nic.changes,
        [
            "context of [4, 5]",
            "insert MAC 02:00:00:00:00:01 to RSS context 2 at 1000",
            "delete 1000",
            "delete context 2",
        ]
    );
    assert_eq!((nic.contexts, nic.rules.len()), (theirs(), 0));
}

#[test]
fn several_queues_without_contexts_get_rules_to_the_first() {
    let mut nic = Played::new();
    nic.has_contexts = false;
    let (_, made) = run(&mut nic, &filter(0, &[7]), &[4, 5]);
    assert_eq!(made, Ok(Made::Rules));
    assert_eq!(nic.changes, ["insert VLAN 7 to queue 4 at 7"]);
}

#[test]
fn nic_that_cannot_is_left_alone() {
    let refused = |nic: &mut Played, filter: &Filter, words: &str| {
        let (rules, contexts) = (nic.rules.clone(), nic.contexts.clone());
        let (plan, made) = run(nic, filter, &[2]);
        let error = made.expect_err("it cannot");
        assert!(error.contains(words), "{error}");
        undo_all(nic, &plan);
        assert_eq!((&nic.rules, &nic.contexts), (&rules, &contexts));
    };
    refused(&mut Played::default(), &filter(1, &[]), "no n-tuple rules");
    refused(&mut Played::new(), &filter(0, &[0]), "without a tag");
    let mut small = Played::new();
    small.size = 1;
    refused(&mut small, &filter(2, &[]), "no room for 2");
    let mut taken = Played::new();
    let theirs = Rule {
        mac: Some(MACS[0]),
        vlan: None,
        flow: None,
        target: Target::Queue(6),
    };
    taken.rules.insert(2, theirs);
    refused(
        &mut taken,
        &filter(2, &[]),
        "rule 2 is for MAC 02:00:00:00:00:01 already",
    );
    let mut widens = Played::new();
    widens.widens = true;
    refused(&mut widens, &filter(1, &[5]), "reads back differently");
}

#[test]
fn table_of_rules_is_read_once_before_and_once_after_however_many_are_made() {
    for vlans in [&[5][..], &[5, 6, 7]] {
        let mut nic = Played::new();
        let (_, made) = run(&mut nic, &filter(2, vlans), &[3]);
        assert_eq!((made, nic.rules.len()), (Ok(Made::Rules), 2 * vlans.len()));
        assert_eq!(nic.reads.get(), 2);
    }
}

#[test]
fn no_rule_stays_that_reads_back_differently_also_if_a_later_one_is_refused() {
    for fails_at in [None, Some(3)] {
        let mut nic = Played::new();
        (nic.widens, nic.fails_at) = (true, fails_at);
        let (plan, made) = run(&mut nic, &filter(2, &[5, 6]), &[2]);
        assert!(made.is_err(), "{made:?}");
        undo_all(&mut nic, &plan);
        assert_eq!(nic.rules.len(), 0, "{fails_at:?}");
    }
}

#[test]
fn untagged_among_vlans_means_a_rule_for_the_address_alone() {
    let mut nic = Played::new();
    let (_, made) = run(&mut nic, &filter(1, &[0, 5]), &[2]);
    assert_eq!((made, nic.changes.len()), (Ok(Made::Rules), 1));
}

#[test]
fn driver_that_refuses_any_step_is_left_as_it_was() {
    for fails_at in 1..=5 {
        let mut nic = Played::new();
        nic.fails_at = Some(fails_at);
        let (plan, made) = run(&mut nic, &filter(2, &[5, 6]), &[0, 1]);
        // Without a context rules do; without one of the rules there are none.
        assert_eq!(made == Ok(Made::Rules), fails_at == 1, "{made:?}");
        nic.fails_at = None;
        undo_all(&mut nic, &plan);
        assert_eq!((nic.contexts, nic.rules.len()), (theirs(), 0), "{fails_at}");
    }
}

#[test]
fn steward_that_dies_at_any_step_leaves_nothing_that_its_ledger_does_not_find() {
    let (filter, queues) = (filter(2, &[5, 6]), [0, 1]);
    let mut ended = false;
    for dies_at in 0..40 {
        let mut nic = Played::new();
        let others = Rule {
            mac: Some([9; 6]),
            vlan: None,
            flow: None,
            target: Target::Context(1),
        };
        nic.rules.insert(0, others);
        let before = (nic.rules.clone(), nic.contexts.clone());
        let crash = CrashAt::new(dies_at);
        let mut saved = Plan::default();
        let died = {
            let mut dying = Dying {
                nic: &mut nic,
                crash: &crash,
            };
            let order = Order {
                filter: &filter,
                queues: &queues,
                names: &all_names(),
            };
            let mut plan = Plan::default();
            let mut save = |plan: &Plan| {
                crash.step();
                saved = plan.clone();
                crash.step();
                Ok(())
            };
            let making = AssertUnwindSafe(|| make(&mut dying, &order, &mut plan, &mut save).is_ok());
            std::panic::catch_unwind(making).is_err()
        };
        ended |= !died;
        for part in saved.parts(&nic) {
            undo(&mut nic, &part).expect("it refuses nothing");
        }
        assert_eq!((nic.rules, nic.contexts), before, "dies at {dies_at}");
    }
    assert!(ended, "it was never tried to the end");
}

/// So many steps, and then death: nothing of what would come after happens.
struct CrashAt(Cell<u32>);

impl CrashAt {
    fn new(steps: u32) -> Self {
        Self(Cell::new(steps))
    }

    fn step(&self) {
        match self.0.get() {
            0 => std::panic::resume_unwind(Box::new("dead")),
            left => self.0.set(left - 1),
        }
    }
}

/// A NIC whose user may die before and after each call.
struct Dying<'a> {
    nic: &'a mut Played,
    crash: &'a CrashAt,
}

impl Dying<'_> {
    fn change<T>(&mut self, act: impl FnOnce(&mut Played) -> T) -> T {
        self.crash.step();
        let done = act(self.nic);
        self.crash.step();
        done
    }
}

impl Steering for Dying<'_> {
    fn table(&self) -> io::Result<Table> {
        self.nic.table()
    }
    fn contexts(&self) -> io::Result<Vec<u32>> {
        self.nic.contexts()
    }
    fn spread(&self, context: u32) -> io::Result<Vec<u32>> {
        self.nic.spread(context)
    }
    fn indirection(&self, context: u32) -> io::Result<Vec<u32>> {
        self.nic.indirection(context)
    }
}

impl Nic for Dying<'_> {
    fn insert(&mut self, rule: &Rule, location: Option<u32>) -> io::Result<u32> {
        self.change(|nic| nic.insert(rule, location))
    }
    fn delete(&mut self, location: u32) -> io::Result<()> {
        self.change(|nic| nic.delete(location))
    }
    fn set_indirection(&mut self, table: &[u32]) -> io::Result<()> {
        self.change(|nic| nic.set_indirection(table))
    }
    fn create_context(&mut self, queues: &[u32]) -> io::Result<u32> {
        self.change(|nic| nic.create_context(queues))
    }
    fn delete_context(&mut self, context: u32) -> io::Result<()> {
        self.change(|nic| nic.delete_context(context))
    }
}

#[test]
fn nothing_is_made_that_cannot_be_saved() {
    let mut nic = Played::new();
    let order = Order {
        filter: &filter(1, &[]),
        queues: &[0],
        names: &all_names(),
    };
    let full = &mut |_: &Plan| Err(io::ErrorKind::StorageFull.into());
    let made = make(&mut nic, &order, &mut Plan::default(), full);
    assert!(matches!(made, Err(NotMade::Note(_))), "{made:?}");
    assert_eq!((nic.calls, nic.rules.len()), (0, 0));
}

#[test]
fn driver_that_reports_success_and_keeps_the_rule_is_asked_again() {
    let mut nic = Played::new();
    let (plan, _) = run(&mut nic, &filter(1, &[]), &[0]);
    nic.lies = true;
    let part = plan.parts(&nic)[0];
    assert!(undo(&mut nic, &part).is_err());
    nic.lies = false;
    undo(&mut nic, &part).expect("removed now");
    assert!(nic.rules.is_empty());
}

#[test]
fn contexts_that_cannot_be_distinguished_stay() {
    let mut nic = Played::new();
    let plan = Plan {
        spread: vec![0, 1],
        before: vec![1],
        ..Plan::default()
    };
    assert_eq!(plan.parts(&nic), []);
    nic.contexts.insert(2, vec![0, 1]);
    nic.contexts.insert(3, vec![0, 1, 2]);
    assert_eq!(plan.parts(&nic), [Part::Context(2)]);
    nic.contexts.insert(4, vec![0, 1]);
    assert_eq!(plan.parts(&nic), []);
}

#[test]
fn only_named_addresses_and_tagged_vlans_cover_a_rule() {
    let names = |macs: usize, vlans: &[u32]| Names {
        macs: MACS[..macs].to_vec(),
        vlans: vlans.iter().copied().collect(),
    };
    let made = |names: &Names, filter: &Filter| {
        let mut nic = Played::new();
        let order = Order {
            filter,
            queues: &[1],
            names,
        };
        let made = make(&mut nic, &order, &mut Plan::default(), &mut |_| Ok(()));
        assert_eq!(made.is_ok(), !nic.rules.is_empty());
        !matches!(made, Err(NotMade::NotNamed(_)))
    };
    // The address is named: in any VLAN.
    for vlans in [&[][..], &[0], &[7], &[0, 7]] {
        assert!(made(&names(1, &[]), &filter(1, vlans)), "{vlans:?}");
        assert!(!made(&names(1, &[]), &filter(2, vlans)), "{vlans:?}");
    }
    // A VLAN is named: any address in it, and no frames of others.
    assert!(made(&names(0, &[7]), &filter(1, &[7])));
    assert!(made(&names(0, &[7]), &filter(0, &[7])));
    assert!(!made(&names(0, &[7]), &filter(1, &[8])));
    // VLAN 0 is everybody's: "this address, any VLAN" would be the host's.
    assert!(!made(&names(0, &[0]), &filter(1, &[0])));
    assert!(!made(&names(0, &[0, 7]), &filter(1, &[0, 7])));
    assert!(!made(&names(0, &[]), &filter(1, &[])));
}
