//! Networks of a configuration file that is read again: they come, go and have other uplinks, and guests that are not
//! concerned lose no frame.

use rstest::rstest;
use rustix::process::Signal;
use testkit::daemon::DIR;
use testkit::lan::{self, assert_reaches, guest, mac, none_is_lost, telling};
use testkit::{Daemon, Layout, PacketPort, Serve, VethPair, assert_has, require};

fn network(name: &str, keys: &str) -> String {
    format!("[network.{name}]\n{keys}\n")
}

fn port(guest: u8, network: &str) -> String {
    lan::port(guest.into(), "").replace("\"lan\"", &format!("\"{network}\""))
}

#[rstest]
fn uplink_changes_while_guests_reach_each_other(#[values(false, true)] leased: bool) {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let ports = [port(0, "lan"), port(1, "lan")].concat();
    let file = |keys: &str| network("lan", keys) + &ports;
    let daemon = Daemon::start_file(
        &veth.near,
        &Serve::file().leased_if(leased),
        &[VethPair::NIC],
        &file(""),
    );
    let mut guests = [0, 1].map(|number| guest(&daemon, number));
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let nic = VethPair::NIC;
    for (keys, said) in [
        (
            format!("uplink = \"{nic}\""),
            "network lan has changed (mode, uplink)",
        ),
        (
            format!("uplink = \"{nic}\"\nqueues = 2\npacket-memory = \"1M\""),
            "network lan has changed (packet-memory, queues)",
        ),
        (
            format!("uplink = \"{nic}\"\nstart-queue = 1"),
            "network lan has changed (packet-memory, queues, start-queue)",
        ),
        (
            format!("uplink = \"{nic}\"\nqueues = 2"),
            "network lan has changed (queues, start-queue)",
        ),
    ] {
        let frames = none_is_lost(&mut guests, [0, 1], None, || {
            let told = daemon.reload_with(&file(&keys));
            assert!(told.contains(said) && !told.contains("port "), "{told}");
        });
        assert!(frames > 0);
        let queues = daemon.status()["networks"][0]["queues"].as_array().map(Vec::len);
        assert_eq!(queues, Some(if keys.contains("queues = 2") { 2 } else { 1 }));
        if queues == Some(2) {
            for (number, guest) in (0..).zip(&mut guests) {
                assert_reaches(guest, number, &wire);
            }
        }
    }
    // None any more: its queues are others' to have.
    none_is_lost(&mut guests, [0, 1], None, || {
        let nobody = file("");
        daemon.reload_with(&nobody);
        let other =
            format!("{nobody}[port.own]\nsocket-path = \"{DIR}/own.sock\"\nifname = \"{nic}\"\nqueues = 2\n");
        let told = daemon.reload_with(&other);
        assert_has(&told, &["port own began"]);
    });
}

#[rstest]
fn networks_come_and_go_with_their_ports(#[values(false, true)] leased: bool) {
    require!(Root);
    let veth = VethPair::new();
    let nic = VethPair::NIC;
    let stays = [network("lan", ""), port(0, "lan"), port(1, "lan")].concat();
    let daemon = Daemon::start_file(&veth.near, &Serve::file().leased_if(leased), &[nic], &stays);
    let mut guests = [0, 1].map(|number| guest(&daemon, number));
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let other = [&*network("b", &format!("uplink = \"{nic}\"")), &port(2, "b")].concat();
    for _ in 0..3 {
        none_is_lost(&mut guests, [0, 1], None, || {
            let told = daemon.reload_with(&[&*stays, &other].concat());
            assert_has(&told, &["network b began", "port vm2 began"]);
            assert_reaches(&mut guest(&daemon, 2), 2, &wire);
            // To the other network, which has no uplink.
            let told = daemon.reload_with(&[&*stays, &port(2, "lan")].concat());
            assert_has(&told, &["port vm2 has changed (network): ended"]);
            assert_has(&told, &["network b is not in the file any more: ended"]);
            let mut moved = guest(&daemon, 2);
            let sent = telling(mac(9), mac(2), 0, 1);
            moved.pairs[0].send(&sent, Layout::Whole);
            daemon.reload_with(&stays);
        });
    }
    let names: Vec<_> = daemon.status()["networks"].as_array().expect("some").clone();
    assert_eq!(names.len(), 1, "{names:?}");
}

/// Two networks of an interface, each with a queue, and what else is said.
fn two_networks(ports: &str) -> String {
    let nic = VethPair::NIC;
    let of = |name, queue| network(name, &format!("uplink = \"{nic}\"\nstart-queue = {queue}"));
    [&*of("a", 0), &of("b", 1), ports].concat()
}

/// Whose VLANs the program sees.
fn two_queues() -> VethPair {
    let veth = VethPair::with(2, 1500);
    veth.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "off"]);
    veth
}

/// Reads a file in which something cannot be.
#[track_caller]
fn refused(daemon: &Daemon, text: &str, words: &str) {
    daemon.write_file(text);
    let (done, said) = daemon.reload();
    assert!(!done && said.contains(words), "{said}");
}

#[rstest]
fn port_that_cannot_begin_leaves_nothing_in_its_network(#[values(false, true)] leased: bool) {
    require!(Root);
    let veth = two_queues();
    // All to the network's queue.
    veth.far.run("ethtool", &["-L", VethPair::WIRE, "tx", "1"]);
    let nic = VethPair::NIC;
    let stays = network("lan", &format!("uplink = \"{nic}\"")) + &port(0, "lan");
    let daemon = Daemon::start_file(&veth.near, &Serve::file().leased_if(leased), &[nic], &stays);
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    // A driver without zero-copy mode.
    let own = format!("ifname = \"{nic}\"\nstart-queue = 1\nforce-zero-copy = true\n");
    for _ in 0..2 {
        refused(&daemon, &[&*stays, &port(1, "lan"), &own].concat(), "zero-copy");
        // Another with its address.
        let other = port(1, "lan").replace("port.vm1", "port.vm2");
        daemon.reload_with(&[&*stays, &other.replace("vm1.sock", "vm2.sock")].concat());
        let mut second = guest(&daemon, 2);
        assert_reaches(&mut second, 1, &wire);
        daemon.reload_with(&stays);
    }
}

#[rstest]
fn what_is_refused_half_way_leaves_no_address_with_the_uplink(#[values(false, true)] changes: bool) {
    require!(Root);
    let veth = two_queues();
    let with = |vm: u8, network: &str, keys: &str| {
        // All have one address.
        let port = port(vm, network).replace(&format!("00:{vm:02x}\""), "00:09\"");
        format!("{port}{keys}\n")
    };
    let mut stays = with(0, "b", "vlan = 200");
    if changes {
        stays += &with(1, "a", "vlan = 5");
    }
    let serve = Serve::file().leased();
    let daemon = Daemon::start_file(&veth.near, &serve, &[VethPair::NIC], &two_networks(&stays));
    // More than one message to the steward has; the last is the other network's.
    let wide = with(0, "b", "vlan = 200") + &with(1, "a", "trunk = \"1-200\"");
    refused(&daemon, &two_networks(&wide), "another lease");
    daemon.reload_with(&two_networks(&(stays.clone() + &with(2, "b", "vlan = 10"))));
    // What it had before is its own still.
    if changes {
        let fifth = two_networks(&(stays + &with(3, "b", "vlan = 5")));
        refused(&daemon, &fifth, "another lease");
    }
}

#[test]
fn port_that_ends_without_a_steward_leaves_its_address_when_there_is_one_again() {
    require!(Root);
    let veth = two_queues();
    let serve = Serve::file().leased();
    let stays = port(0, "a");
    let first = two_networks(&(stays.clone() + &port(1, "a")));
    let mut daemon = Daemon::start_file(&veth.near, &serve, &[VethPair::NIC], &first);
    daemon.end_steward(Signal::KILL);
    daemon.reload_with(&two_networks(&stays));
    daemon.restart_lessor(&veth.near);
    daemon.write_file(&two_networks(&(stays + &port(1, "b"))));
    daemon.await_that(|| daemon.reload().0);
}
