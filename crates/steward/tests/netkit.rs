//! Netkits for leases where there can be none: on kernels that lease no queues, and of drivers that cannot. Where there
//! can, see tests/nic.rs.

mod common;

use common::{POLICY, World, refusal};
use steward::protocol::{NetkitWanted, Reason};
use testkit::require;

fn netkit() -> NetkitWanted {
    NetkitWanted {
        queue: 0,
        name: "pod0".to_owned(),
    }
}

fn policy() -> String {
    POLICY.replace("queues = \"all\"", "queues = \"all\"\nnetkit = true")
}

#[test]
fn kernel_or_driver_that_cannot_lease_queues_is_named_and_nothing_stays() {
    require!(Root);
    let world = World::kept_for(&policy(), "10");
    let interfaces = || world.veth.near.output_of("ip", &["-o", "link"]).lines().count();
    let (before, lease) = (interfaces(), world.lease(0, 1).expect("free"));
    for _ in 0..2 {
        let refused = refusal(lease.netkit(netkit(), None));
        // A veth has no queue management, and before Linux 7.1 there is nothing to ask it for.
        let is_named = match refused.reason {
            Reason::Kernel => refused.text.contains("Linux 7.1"),
            Reason::Nic => refused.text.contains("queue management"),
            _ => false,
        };
        assert!(is_named, "{refused}");
        assert_eq!(interfaces(), before, "{}", world.steward);
        assert_eq!(
            world.steward.said().matches("not deleted").count(),
            0,
            "{}",
            world.steward
        );
    }
    // The lease is as good as before.
    assert!(!lease.facts().impaired && lease.take_changes().is_ok());
    drop(lease);
    world.await_nothing();
}

#[test]
fn netkit_is_not_made_without_a_rule_a_note_and_a_lease_of_one_queue() {
    require!(Root);
    let world = World::with(2, &policy());
    let two = world.lease(0, 2).expect("free");
    let refused = refusal(two.netkit(netkit(), None));
    assert!(
        refused.reason == Reason::Lease && refused.text.contains("one queue"),
        "{refused}"
    );
    drop(two);
    let one = world.lease(0, 1).expect("free");
    let refused = refusal(one.netkit(netkit(), None));
    assert!(
        refused.reason == Reason::Kernel && refused.text.contains("--state"),
        "{refused}"
    );
    let other = NetkitWanted { queue: 1, ..netkit() };
    assert_eq!(refusal(one.netkit(other, None)).reason, Reason::Lease);
    drop((one, world));
    let world = World::kept_for(POLICY, "10");
    let lease = world.lease(0, 1).expect("free");
    let refused = refusal(lease.netkit(netkit(), None));
    assert!(
        refused.reason == Reason::NotAllowed && refused.text.contains("netkit = true"),
        "{refused}"
    );
}
