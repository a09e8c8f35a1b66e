//! Netkits while the NIC, its steward, or their namespace changes: down, with tags taken off, gone.

use std::os::fd::AsFd;

use rustix::process::Signal;
use steward_client::listing;
use steward_protocol::Reason;
use testkit::{NetNs, PacketPort, VethPair, require, wait};

use super::{NAME, file_of, frame, netkit, rig, wanted, while_echoing};
use crate::common;
use crate::{NIC, QUEUE, Rig, WIRE};

#[test]
fn netkit_goes_on_with_a_steward_that_comes_while_the_nic_is_down() {
    require!(Root);
    let Some(mut rig) = rig() else { return };
    let pod = NetNs::new("pod");
    let wire = PacketPort::open(&rig.world.veth.far, WIRE);
    let lease = rig.lease_of_a_netkit();
    let made = rig.netkit_in(&lease, &pod);
    let end = made.0.clone();
    // No socket is there yet: the NIC goes down without one.
    drop(made);
    rig.world.end_steward(Signal::KILL);
    rig.world.veth.near.ip(&["link", "set", NIC, "down"]);
    rig.world.restart();
    rig.await_steward(&lease);
    rig.world.veth.near.ip(&["link", "set", NIC, "up"]);
    let again = rig.netkit_in(&lease, &pod);
    assert_eq!(again.0, end);
    while_echoing(&pod, again, || rig.assert_echo(&wire, 2));
    drop(lease);
    rig.assert_no_netkit(&pod);
    rig.world.await_nothing();
}

#[test]
fn netkit_of_a_lease_for_vlans_gets_frames_only_while_tags_are_seen() {
    require!(Root);
    let Some(rig) = rig() else { return };
    let pod = NetNs::new("pod");
    let wire = PacketPort::open(&rig.world.veth.far, WIRE);
    let has_tags_taken_off = |is_on| {
        rig.ethtool(&["-K", NIC, "rxvlan", if is_on { "on" } else { "off" }]);
    };
    has_tags_taken_off(false);
    let mut untagged = wanted();
    untagged.filter.vlans = vec![0];
    let lease = common::take(&rig.world.socket(), &untagged).unwrap_or_else(|it| panic!("{it}"));
    let await_facts = |is_impaired| rig.await_facts(&lease, |facts| facts.impaired == is_impaired);
    has_tags_taken_off(true);
    await_facts(true);
    common::assert_refused(
        lease.netkit(netkit(NAME), Some(file_of(&pod).as_fd())),
        Reason::Impaired,
        "rxvlan off",
    );
    has_tags_taken_off(false);
    await_facts(false);
    let made = rig.netkit_in(&lease, &pod);
    while_echoing(&pod, made, || {
        rig.assert_echo(&wire, 1);
        has_tags_taken_off(true);
        await_facts(true);
        let redirected = || {
            lease
                .counters(QUEUE, common::soon())
                .expect("counters")
                .redirected
        };
        let before = redirected();
        let host = PacketPort::open(&rig.world.veth.near, NIC);
        (0..20).for_each(|seed| wire.send(&frame(seed)));
        host.receive_before(&frame(19));
        assert_eq!(redirected(), before);
        has_tags_taken_off(false);
        // The lessee does nothing for it.
        rig.assert_echo(&wire, 2);
    });
    drop(lease);
    has_tags_taken_off(true);
    rig.assert_no_netkit(&pod);
    rig.world.await_nothing();
}

#[test]
fn lease_whose_interface_is_gone_does_not_go_on_with_a_netkit_of_its_name() {
    require!(Root);
    let Some(rig) = Rig::with(common::POLICY) else {
        return;
    };
    let (world, near) = (&rig.world, &rig.world.veth.near);
    let lease = world.lease(0, 1).expect("allowed");
    near.ip(&["link", "del", VethPair::NIC]);
    near.enter(|| common::netkit::make(VethPair::NIC))
        .expect("one without a peer");
    near.ip(&["link", "set", VethPair::NIC, "up"]);
    rig.await_facts(&lease, |facts| facts.impaired && facts.ifindex == 0);
    // The steward looks at what has changed after it has accepted a connection, and before it answers there.
    listing::leases(&world.socket()).expect("it answers");
    let facts = lease
        .take_changes()
        .expect("it goes on")
        .unwrap_or_else(|| lease.facts());
    assert!(facts.impaired && facts.ifindex == 0, "{}", facts.note);
    let link = near.output_of("ip", &["link", "show", "dev", VethPair::NIC]);
    assert!(!link.contains("xdp"), "{link}");
    near.ip(&["link", "del", VethPair::NIC]);
    world.veth.join(1, 1500);
    rig.await_facts(&lease, |facts| facts.ifindex != 0);
}

#[test]
fn netkit_of_a_nic_that_is_down_is_known_by_its_alias_and_without_that_goes_when_the_nic_is_up() {
    require!(Root);
    let Some(mut rig) = rig() else { return };
    let pod = NetNs::new("pod");
    for (changed, goes_at_once) in [(["name", "pod9"], true), (["alias", "other"], false)] {
        let lease = rig.lease_of_a_netkit();
        drop(rig.netkit_in(&lease, &pod));
        let prefix = format!("{}: ", pod.index_of(NAME));
        let is_gone = || {
            let report = pod.output_of("ip", &["-o", "link"]);
            !report.lines().any(|line| line.starts_with(&prefix))
        };
        pod.ip(&["link", "set", NAME, "down"]);
        pod.ip(&["link", "set", NAME, changed[0], changed[1]]);
        rig.world.veth.near.ip(&["link", "set", NIC, "down"]);
        drop(lease);
        match goes_at_once {
            true => assert!(wait::until(wait::SOON, is_gone)),
            false => rig.world.steward.await_text("the NIC is down"),
        }
        assert_eq!(is_gone(), goes_at_once);
        rig.world.veth.near.ip(&["link", "set", NIC, "up"]);
        rig.world.await_that(is_gone);
        rig.assert_no_netkit(&pod);
    }
    rig.world.await_nothing();
}

#[test]
fn netkit_ends_with_its_namespace_and_the_lessee_is_notified() {
    require!(Root);
    let Some(rig) = rig() else { return };
    let pod = NetNs::new("pod");
    let lease = rig.lease_of_a_netkit();
    drop(rig.netkit_in(&lease, &pod));
    drop(pod);
    assert!(wait::until(wait::SOON, || rig.bound().is_none()), "it stays");
    // Nobody tells of it: something else happens.
    rig.world.veth.near.ip(&["link", "set", NIC, "txqueuelen", "999"]);
    rig.await_facts(&lease, |facts| facts.note.contains("is gone"));
    // Asked for again, another one is made; it has the name that it has.
    let next = NetNs::new("next");
    let made = rig.netkit_in(&lease, &next);
    assert_eq!(
        (next.index_of(NAME), made.0.name.as_str()),
        (made.0.ifindex, NAME)
    );
    common::assert_refused(
        lease.netkit(netkit("pod1"), Some(file_of(&next).as_fd())),
        Reason::Taken,
        NAME,
    );
    rig.await_facts(&lease, |facts| !facts.impaired);
    drop(lease);
    rig.assert_no_netkit(&next);
    rig.world.await_nothing();
}
