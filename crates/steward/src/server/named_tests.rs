//! Policies and requests of any kind against a NIC that is played: no rule takes what the policy does not name.

use std::path::Path;

use proptest::prelude::*;
use steer::{Filter, ModeRequest};

use super::journal::file::Journal;
use super::journal::ledger::Ledger;
use super::leases::entries::Entries;
use crate::hardware::Names;
use crate::hardware::test_nic::Played;
use crate::policy::Policy;
use host::nic::Rule;
use program::peer::Credentials;
use steward_protocol::{STEERING_BYTES, Wanted};

/// The first is the host's own.
const MACS: [[u8; 6]; 4] = [
    [2, 0, 0, 0, 0, 0xff],
    [2, 0, 0, 0, 0, 1],
    [2, 0, 0, 0, 0, 2],
    [2, 0, 0, 0, 0, 3],
];
const VLANS: [u16; 5] = [0, 1, 5, 100, 4094];

/// What a rule of the policy names.
#[derive(Debug, Clone)]
struct Named {
    macs: Vec<[u8; 6]>,
    vlans: Vec<u16>,
    queues: u32,
}

fn some<T: Clone + std::fmt::Debug + 'static>(of: &'static [T]) -> impl Strategy<Value = Vec<T>> {
    prop::sample::subsequence(of, 0..=of.len())
}

fn named() -> impl Strategy<Value = Named> {
    (some(&MACS), some(&VLANS), 1u32..4).prop_map(|(macs, vlans, queues)| Named { macs, vlans, queues })
}

fn policy_of(rules: &[Named]) -> Policy {
    let mut text = String::new();
    for rule in rules {
        let macs: Vec<String> = rule.macs.iter().map(|&mac| steer::mac_text(mac)).collect();
        let vlans: Vec<String> = rule.vlans.iter().map(u16::to_string).collect();
        text += &format!(
            "[[allow]]\nuser = 7\ninterface = \"eth1\"\nqueues = \"0-{}\"\n",
            rule.queues
        );
        // An empty list is refused.
        for (key, list) in [("macs", macs), ("vlans", vlans)] {
            if !list.is_empty() {
                text += &format!("{key} = {list:?}\n");
            }
        }
    }
    Policy::parse(Path::new("p.toml"), &text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn is_named(rule: &Rule, by: &Named) -> bool {
    rule.mac.is_some_and(|mac| by.macs.contains(&mac))
        || rule
            .vlan
            .is_some_and(|vlan| vlan != 0 && by.vlans.contains(&vlan))
}

#[test]
fn reason_for_no_nic_rules_is_not_cut() {
    let filter = Filter {
        macs: vec![MACS[3]],
        vlans: vec![VLANS[4]],
    };
    let names = Names {
        macs: vec![MACS[1]],
        ..Names::default()
    };
    let why = Entries::new(0..1, filter, names).note();
    assert!(why.contains("the policy does not name (`macs`"), "{why}");
    assert!(why.len() <= STEERING_BYTES, "{} bytes: {why}", why.len());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nic_rules_take_only_frames_that_the_policy_names(
        rules in prop::collection::vec(named(), 1..4),
        (macs, vlans) in (some(&MACS), some(&VLANS)),
        (start_queue, queues) in (0u32..3, 1u32..3),
        special in any::<bool>(),
    ) {
        let policy = policy_of(&rules);
        let peer = Credentials { pid: 1, uid: 7, gid: 7, groups: Vec::new() };
        let filter = Filter { macs, vlans };
        let wanted = Wanted { interface: "eth1".to_owned(), start_queue, queues, mode: ModeRequest::Xdp, filter, network: false };
        let Ok(by) = policy.find(&peer, &wanted, |_| 0) else {
            return Ok(());
        };
        let dir = tempfile::tempdir().expect("a directory");
        let mut nic = Played::of_size(64, special);
        let mut ledger = Ledger::open(Journal::open(dir.path()).entry("nic-1"));
        let mut entries = Entries::new(wanted.range(), wanted.filter.clone(), policy.rule(by).names.clone());
        entries.apply_to(&mut nic, &mut ledger);
        for rule in nic.rules.values() {
            prop_assert!(is_named(rule, &rules[by]), "{rule} by {:?} for {:?}", rules[by], wanted.filter);
        }
        // And what is named is told: a fence that lets nothing through proves nothing.
        let (macs, vlans) = (&wanted.filter.macs, &wanted.filter.vlans);
        let all_named = !macs.is_empty() && macs.iter().all(|mac| rules[by].macs.contains(mac));
        let tagged = !vlans.is_empty() && !vlans.contains(&0) && !rules[by].vlans.is_empty();
        prop_assert_eq!(!nic.rules.is_empty(), all_named || tagged);
    }
}
