//! `vhost-af-xdp queues`: what it says of real queues, held and free.

use serde_json::Value;
use testkit::{
    Daemon, Driver, DriverConfig, NetNs, Serve, VethPair, assert_has, daemon, frame, require, wait,
};

fn queues(netns: &NetNs, daemon: &Daemon) -> Value {
    queues_of(VethPair::NIC, netns, daemon)
}

pub(crate) fn queues_of(interface: &str, netns: &NetNs, daemon: &Daemon) -> Value {
    let control = daemon.path("control");
    let output = netns
        .command(daemon::binary())
        .args(["queues", interface, "--json", "--control"])
        .arg(control)
        .output()
        .expect("it runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// The same, and what the steward says; asked in a namespace of the caller's choice.
fn queues_and_leases(netns: &NetNs, daemon: &Daemon, args: &[&str]) -> std::process::Output {
    let mut command = netns.command(daemon::binary());
    command.arg("queues").args(args);
    command.arg("--control").arg(daemon.path("control"));
    command.arg("--steward").arg(daemon.path("steward.sock"));
    command.output().expect("it runs")
}

/// The queue is bound all the same, and its holder has no mode.
#[track_caller]
fn assert_no_guest(netns: &NetNs, daemon: &Daemon) {
    let now = queues(netns, daemon);
    let queue = &now[0];
    assert_eq!(
        (&queue["bound"], &queue["holder"]["mode"]),
        (&serde_json::json!(["xsk"]), &Value::Null),
        "{now:#}"
    );
}

#[test]
fn queue_of_a_renamed_interface_is_shown_with_its_holder() {
    require!(Root);
    let veth = VethPair::new();
    let mut daemon = Daemon::start(&veth.near, &Serve::interface(VethPair::NIC));
    veth.near.ip(&["link", "set", VethPair::NIC, "name", "other0"]);
    daemon.await_port(0, "the new name", |port| port["nic"] == "other0");
    let now = queues_of("other0", &veth.near, &daemon);
    assert_eq!(now[0]["holder"]["pid"], daemon.process().pid(), "{now:#}");
}

#[test]
fn queue_of_a_daemon_is_shown_with_its_holder_and_a_free_one_without() {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let mut daemon = Daemon::start(&veth.near, &Serve::interface(VethPair::NIC));
    assert_no_guest(&veth.near, &daemon);
    let mut guest = Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
    guest.pairs[0].send(&frame::plain(100, 1), testkit::Layout::Whole);
    guest.pairs[0].await_sent();
    let now = queues(&veth.near, &daemon);
    assert_eq!(now.as_array().expect("a list").len(), 2, "{now:#}");
    let held = &now[0];
    assert_eq!(
        (&held["interface"], &held["queue"]),
        (&VethPair::NIC.into(), &0.into())
    );
    assert_eq!(held["bound"], serde_json::json!(["xsk"]));
    // The driver of a veth says nothing of buffers.
    for untold in ["rx_buffer_bytes", "data_split"] {
        assert_eq!(held.get(untold), Some(&Value::Null), "{now:#}");
    }
    let holder = &held["holder"];
    assert_eq!(holder["pid"], daemon.process().pid());
    assert_eq!(holder["vmm"], std::process::id());
    assert_eq!(holder["from_guest_frames"], 1);
    assert_has(holder["command"].as_str().expect("text"), &["serve --"]);
    assert_eq!(
        (&now[1]["bound"], &now[1]["holder"]),
        (&serde_json::json!([]), &Value::Null)
    );
    drop(guest);
    daemon.await_port(0, "no VMM", |port| port["connected"] == false);
    assert_no_guest(&veth.near, &daemon);
}

#[test]
fn interface_that_is_not_there_is_said() {
    require!(Root);
    let netns = NetNs::new("queues");
    let (status, said) = daemon::run_to_end(&netns, &["queues", "nope"]);
    assert_eq!(status.code(), Some(1));
    assert_has(&said, &["no interface \"nope\""]);
}

#[test]
fn leases_and_what_brings_frames_to_them_are_shown_here_and_from_elsewhere() {
    require!(Root);
    let veth = VethPair::with(3, 1500);
    veth.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "off"]);
    let serve = Serve::interface(VethPair::NIC)
        .leased()
        .with("--queues", "2")
        .with("--start-queue", "1")
        .with("--mac", "02:00:00:00:be:ef")
        .with("--vlan", "100");
    let mut daemon = Daemon::start(&veth.near, &serve);
    let pid = daemon.process().pid();
    let json = |netns: &NetNs, daemon: &Daemon| -> Value {
        let output = queues_and_leases(netns, daemon, &["--json"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    };
    let here = json(&veth.near, &daemon);
    let of_nic: Vec<&Value> = here
        .as_array()
        .expect("a list")
        .iter()
        .filter(|queue| queue["interface"] == VethPair::NIC)
        .collect();
    assert_eq!(of_nic.len(), 3, "{here:#}");
    assert_eq!(
        (&of_nic[0]["lease"], &of_nic[0]["rules"]),
        (&Value::Null, &serde_json::json!([]))
    );
    for queue in &of_nic[1..] {
        let lease = &queue["lease"];
        assert_eq!(
            (
                &lease["pid"],
                &lease["uid"],
                &lease["start_queue"],
                &lease["queues"]
            ),
            (&pid.into(), &65_534.into(), &1.into(), &2.into()),
            "{lease:#}"
        );
        assert_eq!(
            (&lease["steered"], &lease["impaired"]),
            (&"program".into(), &false.into())
        );
        assert_has(lease["command"].as_str().expect("text"), &["serve"]);
        assert_eq!(queue["elsewhere"], false);
        let rule = &queue["rules"][0];
        assert_eq!(
            (&rule["by"], &rule["location"]),
            (&"program".into(), &Value::Null)
        );
        let what = rule["what"].as_str().expect("text");
        assert_has(what, &["02:00:00:00:be:ef", "VLAN 100"]);
    }
    // Where the interface is not, its lease is known all the same.
    let there = json(&veth.far, &daemon);
    let elsewhere: Vec<_> = there
        .as_array()
        .expect("a list")
        .iter()
        .filter(|queue| queue["elsewhere"] == true)
        .collect();
    assert_eq!(elsewhere.len(), 2, "{there:#}");
    assert_eq!(elsewhere[0]["lease"]["pid"], pid);
    let table = queues_and_leases(&veth.near, &daemon, &[VethPair::NIC]).stdout;
    let table = String::from_utf8(table).expect("text");
    assert_has(
        &table,
        &[
            "\nnic0 queues 1-2:\n",
            ", uid 65534, start_queue 1, queues 2, steered program, impaired false",
            &format!("  lease: pid {pid}, command "),
            "\n    program  to 02:00:00:00:be:ef and multicast of VLAN 100\n",
        ],
    );
    daemon.kill();
    // Of daemons those that are found are asked: one that is named must answer.
    let leases = || {
        let mut command = veth.near.command(daemon::binary());
        command.args(["queues", "--json", "--steward"]);
        let output = command.arg(daemon.path("steward.sock")).output();
        String::from_utf8(output.expect("it runs").stdout).expect("text")
    };
    let gone = || Some(leases()).filter(|said| said.contains(VethPair::NIC) && !said.contains("start_queue"));
    assert!(wait::until_some(wait::SOON, gone).is_some(), "{}", leases());
}

#[test]
fn steward_that_was_named_and_is_not_there_is_said() {
    require!(Root);
    let netns = NetNs::new("queues");
    let (status, said) = daemon::run_to_end(&netns, &["queues", "--steward", "/nowhere/s.sock"]);
    assert_eq!(status.code(), Some(1));
    assert_has(&said, &["no steward at /nowhere/s.sock"]);
}
