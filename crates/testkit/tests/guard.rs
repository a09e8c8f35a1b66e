//! The source guard through the whole chain: from the file and the command line on, by real frames. What it rejects is
//! tested in crate `dataplane`: `policy/guard/tests.rs`; by ports of networks in `network_tests/service_tags.rs` and
//! `network_attacks_tests.rs`, by queues of a guest's own in `policy_tests.rs`.

use std::net::Ipv4Addr;

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::filter_rules::udp;
use testkit::lan::{STRANGER, file, frame, guests, mac, tagged};
use testkit::{Daemon, DriverConfig, Layout, NetNs, PacketPort, Rig, Serve, VethPair, require, wait};

const OWN: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 10);
const OTHER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 11);
const IPS: &str = "ips = [\"192.0.2.10\", \"2001:db8::10\", \"2001:db8:1::/64\"]";

#[rstest]
fn addresses_change_while_the_guest_stays() {
    let netns = NetNs::new("guard");
    let text = |keys: &str| file(None, &[keys, ""]);
    let daemon = Daemon::start_file(&netns, &Serve::file(), &[], &text(""));
    let mut both = guests(&daemon, 2, &DriverConfig::default());
    let [own, other] = [OWN, OTHER].map(|source| udp(mac(1), mac(0), source, 2));
    let mut arrives = |frame: &[u8]| {
        let (from, to) = both.split_at_mut(1);
        from[0].pairs[0].send(frame, Layout::Whole);
        let got = to[0].pairs[0].receive(wait::SOON);
        assert_eq!(got.expect("it comes").frame, frame);
    };
    arrives(&own);
    arrives(&other);
    let said = daemon.reload_with(&text(IPS));
    assert!(said.contains("port vm0 has changed (ips), and goes on"), "{said}");
    daemon.await_port(0, "the guest stays", |port| port["connected"] == true);
    arrives(&own);
    // What was told a moment ago holds soon.
    let refused = || daemon.counter_of("vm0", "from_guest_ip_source") > 0;
    let soon = wait::until(wait::SOON, || {
        both[0].pairs[0].send(&other, Layout::Whole);
        refused()
    });
    assert!(soon, "{:#}", daemon.status());
    let said = daemon.reload_with(&text("ips = \"192.0.2.11\"\nrouter = true"));
    assert!(said.contains("has changed (ips, router), and goes on"), "{said}");
}

/// By a queue of its own, and by a tap. A rule, too.
#[rstest]
fn guest_outside_of_networks_is_guarded(#[values(Placement::Copy, Placement::Tap)] placement: Placement) {
    require!(Root);
    let serve = Serve::interface(VethPair::NIC)
        .placement(placement)
        .with("--mac", "02:00:00:00:00:00")
        .with("--ips", OWN.to_string())
        .with("--vlan", "0,100")
        .with(
            "--rule",
            "direction=from-guest action=allow protocol=udp destination-ports=53",
        );
    let veth = VethPair::new();
    veth.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "off"]);
    let mut rig = Rig::with(veth, &serve, &DriverConfig::default());
    let own = udp(STRANGER, mac(0), OWN, 53);
    let rejected = [
        ("ip_source", udp(STRANGER, mac(0), OTHER, 53)),
        ("source_address", udp(STRANGER, mac(1), OWN, 53)),
        ("vlan", tagged(&own, 101)),
        ("filter", udp(STRANGER, mac(0), OWN, 54)),
    ];
    for (_, frame) in &rejected {
        rig.pair().send(frame, Layout::Whole);
    }
    for frame in [own.clone(), tagged(&own, 100)] {
        rig.pair().send(&frame, Layout::Whole);
        let is_ours = |got: &Vec<u8>| got[..6] == STRANGER;
        let got = std::iter::from_fn(|| rig.wire.receive(wait::SOON)).find(is_ours);
        assert_eq!(got, Some(frame));
    }
    for (counter, _) in rejected {
        rig.daemon.await_counter(&format!("from_guest_{counter}"), 1);
    }
}

#[rstest]
fn port_with_vlans_is_refused_where_tags_are_taken_off(
    #[values("vlan = 100", "trunk = \"100-101\"")] keys: &str,
) {
    require!(Root);
    let veth = VethPair::new();
    let take_tags_off = |how| veth.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", how]);
    take_tags_off("on");
    let (one, both) = ([""], ["", keys]);
    // Without hints: a veth tells of tags.
    let without = |ports: &[&str]| {
        let text = file(Some(VethPair::NIC), ports);
        text.replacen("[network.lan]\n", "[network.lan]\nhints = \"none\"\n", 1)
    };
    let [one, both] = [&one[..], &both].map(without);
    let daemon = Daemon::start_file(&veth.near, &Serve::file(), &[VethPair::NIC], &one);
    let mut first = guests(&daemon, 1, &DriverConfig::default());
    daemon.write_file(&both);
    let (done, said) = daemon.reload();
    assert!(!done && said.contains("`ethtool -K nic0 rxvlan off`"), "{said}");
    assert!(daemon.port_named("vm1").is_none());
    // The others go on.
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let plain = frame(mac(0), STRANGER, 60, 1);
    wire.send(&plain);
    assert_eq!(
        first[0].pairs[0].receive(wait::SOON).expect("it goes on").frame,
        plain
    );
    // With what the remedy says it is there.
    take_tags_off("off");
    daemon.reload_with(&both);
    assert!(daemon.port_named("vm1").is_some());
}
