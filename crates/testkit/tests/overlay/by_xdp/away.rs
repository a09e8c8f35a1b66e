//! The underlay goes, or may not be used: guests go on by the kernel.

use super::*;
use testkit::assert_soon;

#[test]
fn guests_go_on_by_the_kernel_while_the_underlay_is_away() {
    require!(Root);
    let overlay = Overlay::with_two_links(Underlay::BY_XDP, 3);
    (0..3).for_each(|host| overlay.use_link(host, 0));
    let mut world = World::with_entries(overlay, &Serve::file(), &DriverConfig::default());
    let ip = |world: &World, words: &str| world.ends()[0].netns.ip(&[words]);
    for (ends, begins) in [
        ("", ""),
        ("link set u0 down", "link set u0 up"),
        ("link del u0", ""),
    ] {
        if !ends.is_empty() {
            ip(&world, ends);
        }
        world.overlay.use_link(0, 1);
        world.await_ways(false);
        if ends == "link del u0" {
            world.await_impaired(NIC);
            world.overlay.restore_first_link(0);
        } else if !begins.is_empty() {
            ip(&world, begins);
        }
        world.overlay.use_link(0, 0);
        world.await_ways(true);
        assert_eq!(world.underlay()["impaired"], Value::Null);
    }
}

#[test]
fn guests_go_on_by_the_kernel_while_the_vxlan_device_is_unsuitable() {
    require!(Root);
    let mut world = World::by_xdp(&Serve::file());
    let set = |world: &World, what: &str| world.ends()[0].netns.ip(&["link set dev vx100 type vxlan", what]);
    let assert_shows = |world: &World, words: &str| {
        let text = status_text(&world.daemons[0], &[]);
        assert!(text.contains(words), "{text}");
    };
    assert_shows(
        &world,
        "uplink vx100 (tap) over u0 (native: 2 address(es) on 2 other host(s))",
    );
    let queues = queues_of(NIC, &world.ends()[0].netns, &world.daemons[0]);
    assert_eq!(queues[0]["holder"]["network"], "lan", "{queues:#}");
    set(&world, "learning");
    world.await_impaired("learns addresses from packets: `ip link set dev vx100 type vxlan nolearning`");
    assert_shows(
        &world,
        "network lan: the underlay is not used, the kernel encapsulates: ",
    );
    world.await_ways(false);
    set(&world, "nolearning");
    world.await_ways(true);
    assert_eq!(world.underlay()["impaired"], Value::Null);
    let [host, others @ ..] = &world.overlay.hosts[..] else {
        panic!("three hosts");
    };
    host.netns.ip(&["link del", VXLAN]);
    host.add_vxlan();
    others.iter().for_each(|other| host.add_copies_to(other));
    for guest in [1, 2] {
        host.add_remote(mac(guest), &world.overlay.hosts[HOSTS[guest]]);
    }
    // Until then frames may be lost.
    world.daemons[0].await_that(|| world.daemons[0].said().contains("uplink is back"));
    world.await_ways(true);
    world.assert_delivers_to_all(0, 60);
}

/// Whatever the policies are for; by the kernel, frames pass only those that match.
#[rstest]
#[case(Serve::file().leased())]
#[case(Serve::file().by_root())]
fn no_frame_bypasses_ipsec_policies_of_the_host(#[case] serve: Serve) {
    require!(Root);
    let mut world = World::by_xdp(&serve);
    let set = |world: &World, what: &str, [from, to]: [&str; 2], action: &str| {
        let policy = format!("xfrm policy {what} src {from} dst {to} dir out {action}");
        world.ends()[0]
            .netns
            .ip(&policy.split_whitespace().collect::<Vec<_>>());
    };
    // The daemon may set it up twice, and between a frame may pass by the kernel.
    let await_underlay = |world: &mut World| {
        world.by_xdp[0] = true;
        world.await_way(0, 2, 60);
        world.await_way(2, 0, 60);
    };
    let others = ["192.0.2.1", "192.0.2.2"];
    set(&world, "add", others, "tmpl proto esp mode transport");
    world.await_impaired("the host has IPsec policies (`ip xfrm policy`)");
    world.await_ways(false);
    set(&world, "delete", others, "");
    await_underlay(&mut world);
    assert_eq!(world.underlay()["impaired"], Value::Null);
    let [from, to] = world.ends().map(Host::address);
    set(&world, "add", [&from, &to], "action block");
    world.await_impaired("IPsec");
    world.stations[0].send(&frame(mac(2), mac(0), 100, 1));
    // To the others nothing changes.
    world.by_xdp[0] = false;
    world.assert_passes(0, 1, 100);
    assert_eq!(world.stations[2].receive(wait::QUIET), None);
    set(&world, "delete", [&from, &to], "");
    world.await_ways(true);
}

#[rstest]
#[case(Serve::file().leased())]
#[case(Serve::file().by_root())]
fn guests_go_on_when_programs_are_killed_and_nothing_stays(#[case] serve: Serve) {
    require!(Root);
    let mut world = World::by_xdp(&serve);
    if world.daemons[0].lessor.is_some() {
        world.daemons[0].end_steward(Signal::KILL);
        world.await_followed(0);
        world.assert_leaves(true);
        // Its counters are the steward's.
        world.pass(&frame(mac(0), mac(2), 100, 1), 2, 0);
        world.daemons[0].restart_lessor(&world.overlay.hosts[0].netns);
        world.await_ways(true);
    }
    for kills in [true, false] {
        let daemon = &mut world.daemons[0];
        match kills {
            true => daemon.kill(),
            false => _ = daemon.terminate(),
        }
        daemon.restart_file(&world.overlay.hosts[0].netns, &serve);
        let guest = world.stations.remove(0).resume(&daemon.path("vm0.sock"));
        world.stations.insert(0, guest);
        world.await_ways(true);
    }
    world.daemons[0].kill();
    let [host, _] = world.ends();
    let links = || host.netns.output_of("ip", &["-d", "link", "show"]);
    let pinned = || {
        world.daemons[0]
            .lessor
            .as_ref()
            .map_or_else(Vec::new, |lessor| lessor.bpffs.pinned())
    };
    let is_left = || links().contains("xdp") || links().contains(": vax") || !pinned().is_empty();
    assert_soon!(!is_left(), "{} {:?}", links(), pinned());
}

/// Keys of rules that allow all.
const ALL: &str = "network = true\nadvertise = true\nmemlock = \"unlimited\"";

/// The first daemon's steward has another policy.
fn change_policy(world: &mut World, vxlan: &str, nic: &str) {
    let daemon = &mut world.daemons[0];
    let lessor = daemon.lessor.as_ref().expect("leased");
    lessor.change_policy(&policy(&[(VXLAN, vxlan), (NIC, nic)]));
    read_policy(daemon);
}

#[test]
fn guests_go_on_by_the_kernel_without_a_rule_for_the_underlay() {
    require!(Root);
    let mut world = World::by_xdp(&Serve::file().leased());
    for _ in 0..2 {
        change_policy(&mut world, ALL, "memlock = \"unlimited\"");
        world.await_impaired("network = true");
        world.await_ways(false);
        change_policy(&mut world, ALL, ALL);
        world.await_ways(true);
        assert_eq!(world.underlay()["impaired"], Value::Null);
    }
    // And without one for the vxlan device there is no network.
    change_policy(&mut world, "memlock = \"unlimited\"", ALL);
    let why = || world.daemons[0].status()["networks"][0]["impaired"].to_string();
    let is_why = || {
        ["on vx100", "`network = true`"]
            .iter()
            .all(|word| why().contains(word))
    };
    assert_soon!(is_why(), "{}", why());
    change_policy(&mut world, ALL, ALL);
    world.await_ways(true);
}

#[test]
fn address_that_the_policy_refuses_for_the_underlay_is_reached_by_the_kernel() {
    require!(Root);
    let mut world = World::by_xdp(&Serve::file().leased());
    let macs = format!("{ALL}\nmacs = {:?}", [0, MOVER].map(|guest| text(mac(guest))));
    change_policy(&mut world, ALL, &macs);
    let text = world.overlay.hosts[0].file(&[(0, "learning = true"), (MOVER, "")]);
    world.daemons[0].reload_with(&text);
    // That port is the last one now.
    world.stations[0] = connect(&world.daemons[0], 1, 0, &DriverConfig::default());
    world.overlay.add_entries(mac(FURTHER), 0);
    world.stations[0].send(&frame(mac(2), mac(FURTHER), 60, 0));
    let _ = world.stations[2].received();
    world.await_ways(true);
    let learned = || world.daemons[0].port(1)["learned"].to_string();
    assert_soon!(learned().contains("05"), "{}", learned());
    world.by_xdp[0] = false;
    world.assert_frame_passes(&frame(mac(FURTHER), mac(2), 100, 1), 2, 0);
    world.await_ways(true);
    assert_eq!(world.underlay()["impaired"], Value::Null);
}
