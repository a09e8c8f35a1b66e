//! `vhost-af-xdp check`: what it says of real interfaces, and that it is what then comes.

use std::process::{Command, Output};

use rstest::rstest;
use serde_json::{Value, json};
use testkit::daemon::{DIR, Mode};
use testkit::driver::F_CSUM;
use testkit::{Daemon, Driver, DriverConfig, NetNs, Serve, VethPair, daemon, require};

fn check(netns: &NetNs, args: &[&str]) -> Output {
    let mut command = netns.command(daemon::binary());
    command.arg("check").args(args).output().expect("it runs")
}

#[track_caller]
fn report_of(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[track_caller]
fn report(netns: &NetNs, args: &[&str]) -> Value {
    report_of(&check(netns, &[args, &["--json"]].concat()))
}

/// By placement: copy, send-direct, direct.
fn modes(report: &Value) -> [&Value; 3] {
    [0, 1, 2].map(|at| &report["placements"][at]["mode"])
}

fn typed(report: &Value) -> String {
    report["type"].to_string()
}

/// What `ip` and the kernel say of an interface and its programs.
fn state(netns: &NetNs, interface: &str) -> String {
    let mut command = netns.command("ip");
    let shown = command.args(["-details", "link", "show", interface]).output();
    String::from_utf8(shown.expect("ip is installed").stdout).expect("text")
}

#[test]
fn daemon_that_is_named_and_does_not_answer_is_among_what_is_not_seen() {
    require!(Root);
    let veth = VethPair::with(1, 1500);
    let seen = report(&veth.near, &[VethPair::NIC, "--control", "/nonexistent"]);
    let not_seen = seen["not_seen"].to_string();
    assert!(
        not_seen.contains("no daemon answers at /nonexistent") && not_seen.contains("without --control"),
        "{not_seen}"
    );
}

#[test]
fn interface_without_ethernet_is_refused_by_what_it_carries() {
    require!(Root);
    let netns = NetNs::new("check");
    netns.ip(&["tuntap", "add", "tun7", "mode", "tun"]);
    let output = check(&netns, &["tun7"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(
        said.contains("interface tun7 carries IP or other packets, not Ethernet frames"),
        "{said}"
    );
}

#[test]
fn veth_is_what_serve_then_makes_of_it() {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let before = state(&veth.near, VethPair::NIC);
    let seen = report(&veth.near, &[VethPair::NIC]);
    assert_eq!(seen["tried"], Value::Null);
    assert_eq!(seen["free_queues"], json!([0, 1]));
    let tried = report(&veth.near, &[VethPair::NIC, "--try"]);
    assert_eq!(state(&veth.near, VethPair::NIC), before, "nothing of it stays");
    assert_eq!(
        (&tried["tried"]["program"], &tried["tried"]["queue"]),
        (&"native".into(), &0.into()),
        "{tried:#}"
    );

    let serve = Serve::interface(VethPair::NIC).by_root();
    let lane_of = |daemon: &Daemon| {
        let _guest = Driver::connect(&daemon.socket(), &DriverConfig::with(F_CSUM)).expect("accepted");
        daemon.port(0)["lanes"][0].clone()
    };
    let mut daemon = Daemon::start(&veth.near, &serve.clone().mode(Mode::Auto));
    let lane = lane_of(&daemon);
    assert_eq!(modes(&seen)[0], &lane["mode"], "{seen:#}");
    assert_eq!(
        seen["placements"][0]["why_not_more"], lane["fallbacks"],
        "{lane:#}"
    );
    assert_eq!(seen["placements"][0]["checksums"], lane["checksums"], "{lane:#}");
    daemon.terminate();
    let daemon = Daemon::start(&veth.near, &serve);
    let lane = lane_of(&daemon);
    assert_eq!(modes(&seen)[1..], [&lane["mode"]; 2], "{seen:#}");
    assert_eq!(tried["tried"]["mode"], lane["mode"], "{tried:#}");

    // And once it is there, another queue is free, and the program is another's.
    let beside = report(&veth.near, &[VethPair::NIC, "--try"]);
    assert!(
        beside["program"].as_str().expect("one").contains("native mode"),
        "{beside:#}"
    );
    assert_eq!(beside["free_queues"], json!([1]), "{beside:#}");
    let refused = beside["tried"]["refused"].as_str().expect("a reason");
    assert!(refused.contains("already has an XDP program"), "{refused}");
    assert!(
        typed(&beside).contains("an XDP program is there already"),
        "{beside:#}"
    );
}

#[test]
fn network_is_what_serve_then_makes_of_it() {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let seen = report(&veth.near, &[VethPair::NIC]);
    let advice = seen["type"].as_array().expect("a list");
    let of_networks = |advice: &&Value| advice["goal"] == "many guests by address";
    let lines = advice.iter().find(of_networks).expect("it is said")["lines"].clone();
    // What is no comment is a file but for the last line, which is a command.
    let lines: Vec<_> = lines
        .as_array()
        .expect("a list")
        .iter()
        .map(|line| line.as_str().expect("text"))
        .collect();
    let (command, file) = lines.split_last().expect("some");
    assert_eq!(*command, "vhost-af-xdp serve --config /etc/vhost-af-xdp/lan.toml");
    let port = format!(
        "[port.vm1]\nnetwork = \"lan\"\nsocket-path = \"{DIR}/vm1.sock\"\nmac = \"02:00:00:00:00:01\"\n"
    );
    let text = format!("{}\nmode = \"auto\"\n{port}", file.join("\n"));
    let daemon = Daemon::start_file(&veth.near, &Serve::file().by_root(), &[], &text);
    let status = daemon.status();
    let network = &status["networks"][0];
    let modes: Vec<_> = network["queues"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|queue| &queue["mode"])
        .collect();
    let mode = &seen["network"]["mode"];
    // Two queues, and the two of the tap.
    assert_eq!(modes, [mode; 4], "{status:#}");
    assert_eq!(
        seen["network"]["why_not_more"], network["queues"][0]["fallbacks"],
        "{status:#}"
    );

    // Of a daemon that is not asked only its sockets are seen.
    let beside = report(&veth.near, &[VethPair::NIC]);
    assert_eq!(beside["network"]["taken_queues"], json!([0, 1]), "{beside:#}");
}

/// While a network has the interface, what is said goes beside it: nothing of ours has to go.
#[rstest]
fn network_that_runs_is_named_with_how_a_guest_more_is_had(#[values(false, true)] leased: bool) {
    require!(Root);
    let (veth, nic) = (VethPair::with(3, 1500), VethPair::NIC);
    veth.near.run("ethtool", &["-K", nic, "rxvlan", "off"]);
    let network = format!(
        "[network.lan]\nuplink = \"{nic}\"\nqueues = 2\n[port.vm1]\nnetwork = \"lan\"\nsocket-path = \"{DIR}/vm1.sock\"\n"
    );
    let serve = match leased {
        true => Serve::file().leased(),
        false => Serve::file().by_root(),
    };
    let mut daemon = Daemon::start_file(&veth.near, &serve, &[nic], &network);
    let pid = daemon.process().pid();
    let (control, steward) = (daemon.path("control"), daemon.path("steward.sock"));
    let mut words = vec![nic, "--try", "--control", control.to_str().expect("UTF-8")];
    if leased {
        words.extend(["--steward", steward.to_str().expect("UTF-8")]);
    }
    let before = state(&veth.near, nic);
    let seen = report(&veth.near, &words);
    assert_eq!(
        seen["held_queues"],
        json!([format!("queues 0-1: network lan, process {pid}")]),
        "{seen:#}"
    );
    assert_eq!(seen["free_queues"], json!([2]));
    let lines = typed(&seen);
    let file = daemon.path("config.toml").display().to_string();
    let alone = match leased {
        true => format!(
            "vhost-af-xdp serve --socket-path /run/vm1.sock --ifname {nic} --start-queue 2 --steward {}",
            steward.display()
        ),
        false => format!(
            "# in {file}, then `vhost-af-xdp reload`: [port.NAME] with socket-path = \\\"PATH\\\", ifname = \\\"{nic}\\\", \
             start-queue = 2"
        ),
    };
    for said in [
        format!("network lan of process {pid} has queues 0-1: a further guest is a port of it"),
        format!(
            "# in {file}, then `vhost-af-xdp reload`: [port.NAME] with socket-path = \\\"PATH\\\", network = \\\"lan\\\""
        ),
        "its XDP program is".to_owned(),
        "queue 2 is not its own".to_owned(),
        "a port of network lan has as many as it says".to_owned(),
        alone,
    ] {
        assert!(lines.contains(&said), "{said}: {lines}");
    }
    for wrong in ["end its holder", "another's", "[network.lan]"] {
        assert!(!lines.contains(wrong), "{wrong}: {lines}");
    }
    let tried = seen["tried"]["refused"].as_str().expect("a reason");
    assert!(
        tried.contains("the XDP program there is") && tried.contains("`vhost-af-xdp status`"),
        "{tried}"
    );
    assert_eq!(state(&veth.near, nic), before);
}

#[test]
fn native_mode_is_not_promised_where_a_veth_refuses_it() {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    veth.near.run("ethtool", &["-L", VethPair::NIC, "rx", "1"]);
    let report = report(&veth.near, &[VethPair::NIC, "--try"]);
    let [tap, skb] = ["tap", "copy (skb)"].map(Value::from);
    assert_eq!(modes(&report), [&tap, &skb, &skb], "{report:#}");
    assert_eq!(report["tried"]["mode"], "copy (skb)", "{report:#}");
    let why = report["placements"][1]["why_not_more"].to_string();
    assert!(why.contains("fewer receive queues than its peer"), "{why}");
    let answer = report["tried"]["why_not_more"].to_string();
    assert!(answer.contains("os error"), "the kernel's own: {answer}");
}

#[test]
fn interfaces_that_are_no_nics_are_told_apart() {
    require!(Root);
    let veth = VethPair::new();
    let netns = &veth.near;
    netns.ip(&["link", "add", "bridge0", "type", "bridge"]);
    netns.ip(&["link", "set", "dev", "lo", "up"]);
    let bridge = report(netns, &["bridge0"]);
    let [tap, skb] = ["tap", "copy (skb)"].map(Value::from);
    assert_eq!(modes(&bridge), [&tap, &skb, &skb], "{bridge:#}");
    assert!(typed(&bridge).contains("bridge0 is no NIC"), "{bridge:#}");
    assert!(
        typed(&bridge).contains("ip link set dev bridge0 up"),
        "{bridge:#}"
    );
    let lo = report(netns, &["lo", "--try"]);
    assert_eq!(lo["tried"]["mode"], "copy (skb)", "{lo:#}");
    assert_eq!(modes(&lo), [&tap, &Value::Null, &Value::Null], "{lo:#}");
    assert!(typed(&lo).contains("lo is this host with itself"), "{lo:#}");
    assert!(!typed(&lo).contains("ifname lo"), "{lo:#}");
    // What is said to serve instead does: a pair of which a network has one end.
    for line in [
        "ip link add vms type veth peer name vms-host",
        "ip link set dev vms up",
    ] {
        assert!(typed(&lo).contains(line), "{lo:#}");
        netns.run("ip", &line.split(' ').skip(1).collect::<Vec<_>>());
    }
    let native = Value::from("copy (native)");
    assert_eq!(modes(&report(netns, &["vms"])), [&tap, &native, &native]);
    // Not every kernel has these.
    for (name, kind) in [
        ("dummy0", &["type", "dummy"][..]),
        ("vlan0", &["link", VethPair::NIC, "type", "vlan", "id", "5"]),
        ("bond0", &["type", "bond"]),
    ] {
        let words = match kind {
            ["link", link, rest @ ..] => [&["link", "add", "link", link, "name", name], rest].concat(),
            kind => [&["link", "add", name], kind].concat(),
        };
        let made = netns.command("ip").args(words).output().expect("ip is installed");
        if !made.status.success() {
            println!("{name} is not made by this kernel");
            continue;
        }
        netns.ip(&["link", "set", "dev", name, "up"]);
        let report = report(netns, &[name, "--try"]);
        let (said, came) = (&report["placements"][0]["mode"], &report["tried"]["mode"]);
        assert!(said == came || came.is_null(), "{report:#}");
    }
}

#[test]
fn missing_interface_is_named() {
    require!(Root);
    let netns = NetNs::new("check");
    let output = check(&netns, &["nope"]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("no interface \"nope\""), "{said}");
}

/// Without privileges it sees the same of the NIC, says what it cannot do, and tries in vain.
#[test]
fn without_privileges_it_goes_as_far_as_it_can() {
    require!(Root);
    let veth = VethPair::new();
    let as_root = report(&veth.near, &[VethPair::NIC]);
    let mut command: Command = veth.near.command("setpriv");
    command.args(["--reuid=nobody", "--clear-groups"]);
    let output = command
        .arg(daemon::binary())
        .args(["check", VethPair::NIC, "--json", "--try"])
        .output()
        .expect("setpriv is installed");
    let report = report_of(&output);
    for field in [
        "interface",
        "driver",
        "kernel",
        "placements",
        "free_queues",
        "steering",
    ] {
        assert_eq!(report[field], as_root[field], "{field}");
    }
    let lacking = report["lacking_capabilities"].to_string();
    assert!(
        lacking.contains("CAP_NET_ADMIN") && lacking.contains("CAP_BPF"),
        "{lacking}"
    );
    assert!(
        report["tried"]["refused"]
            .as_str()
            .expect("a reason")
            .contains("os error 1"),
        "{report:#}"
    );
    assert!(
        typed(&report).contains("be root, or start vhost-af-xdp-steward"),
        "{report:#}"
    );
    assert!(
        report["not_seen"].to_string().contains("other users"),
        "{report:#}"
    );
    assert_eq!(as_root["lacking_capabilities"], json!([]));
}

#[test]
fn people_get_lines_that_can_be_typed() {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let output = check(&veth.near, &[VethPair::NIC]);
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text
        .lines()
        .find_map(|line| {
            line.trim()
                .strip_prefix("vhost-af-xdp serve --socket-path /run/vm1.sock ")
        })
        .expect("a command");
    assert_eq!(line, format!("--ifname {}", VethPair::NIC));
    // Each of them is a command line that `serve` understands.
    for line in text
        .lines()
        .filter(|line| line.contains("vhost-af-xdp serve --socket-path"))
    {
        let words = line
            .split(" #")
            .next()
            .expect("a command")
            .split_whitespace()
            .skip(2);
        let socket = "/nonexistent/vm1.sock";
        let words = words.map(|word| if word.starts_with("/run/") { socket } else { word });
        let mut command = veth.near.command(daemon::binary());
        let output = command.arg("serve").args(words).output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{line}: {said}");
        assert!(said.contains(socket), "{line}: {said}");
    }
}
