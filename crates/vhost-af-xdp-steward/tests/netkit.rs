//! Netkits for leases where there can be none: on kernels that lease no queues, and of drivers that cannot. Where there
//! can, see tests/nic/.

use crate::common;

use common::{POLICY, World, refusal};
use steer::ModeRequest;
use steward_protocol::{NetkitWanted, Reason, Wanted};
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
        // A veth has no zero-copy, which is told from Linux 6.3 on, and no queue management; and before Linux 7.1
        // there is nothing to ask it for.
        let is_named = match refused.reason {
            Reason::Kernel => refused.text.contains("Linux 7.1"),
            Reason::Nic => ["no zero-copy", "queue management"]
                .iter()
                .any(|words| refused.text.contains(words)),
            _ => false,
        };
        assert!(is_named, "{refused}");
        assert_eq!(interfaces(), before);
        assert_eq!(world.steward.said().matches("not deleted").count(), 0);
    }
    // The lease is as good as before.
    assert!(!lease.facts().impaired && lease.take_changes().is_ok());
    drop(lease);
    world.await_nothing();
}

#[test]
fn netkit_whose_name_address_or_mode_cannot_be_is_refused_by_name() {
    require!(Root);
    let world = World::kept_for(&policy(), "10");
    let refused = |wanted: &Wanted, name: &str, reason, words: &str| {
        let lease = common::take(&world.socket(), wanted).expect("free");
        let name = name.to_owned();
        let refused = refusal(lease.netkit(NetkitWanted { queue: 0, name }, None));
        assert!(
            refused.reason == reason && refused.text.contains(words),
            "{refused}"
        );
        drop(lease);
        world.await_nothing();
    };
    let wanted = common::wanted(0, 1);
    // The kernel would call it pod0.
    refused(&wanted, "pod%d", Reason::NotAllowed, "pod%d");
    let in_skb_mode = Wanted {
        mode: ModeRequest::Skb,
        ..wanted.clone()
    };
    refused(&in_skb_mode, "pod0", Reason::Program, "skb mode");
    let of_nobody = common::filtered(0, &[[0; 6]], &[]);
    refused(&of_nobody, "pod0", Reason::NotAllowed, "is no address");
}

#[test]
fn netkit_is_not_made_without_a_rule_a_note_and_a_lease_of_one_queue() {
    require!(Root);
    let world = World::with(2, &policy());
    let two = world.lease(0, 2).expect("free");
    common::assert_refused(two.netkit(netkit(), None), Reason::Lease, "one queue");
    drop(two);
    let one = world.lease(0, 1).expect("free");
    common::assert_refused(one.netkit(netkit(), None), Reason::Kernel, "--state");
    let other = NetkitWanted { queue: 1, ..netkit() };
    assert_eq!(refusal(one.netkit(other, None)).reason, Reason::Lease);
    drop((one, world));
    let world = World::kept_for(POLICY, "10");
    let lease = world.lease(0, 1).expect("free");
    common::assert_refused(lease.netkit(netkit(), None), Reason::NotAllowed, "netkit = true");
}
