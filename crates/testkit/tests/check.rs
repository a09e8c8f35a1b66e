//! `vhost-af-xdp check`: what it says of real interfaces, and that it is what then comes.

use std::process::{Command, Output};

use serde_json::{Value, json};
use testkit::daemon::{DIR, Mode};
use testkit::driver::F_CSUM;
use testkit::overlay::{Overlay, Underlay, VXLAN};
use testkit::{Daemon, Driver, DriverConfig, NetNs, Serve, VethPair, assert_has, daemon, require};

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

fn found(report: &Value) -> String {
    report["findings"].to_string()
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
    assert_has(
        &not_seen,
        &["no daemon answers at /nonexistent", "without --control"],
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
    assert_has(
        &said,
        &["interface tun7 carries IP or other packets, not Ethernet frames"],
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

    // While the daemon runs, one queue is free, and the program on the interface is the daemon's.
    let in_use = report(&veth.near, &[VethPair::NIC, "--try"]);
    assert_has(in_use["program"].as_str().expect("one"), &["native mode"]);
    assert_eq!(in_use["free_queues"], json!([1]), "{in_use:#}");
    let refused = in_use["tried"]["refused"].as_str().expect("a reason");
    assert_has(refused, &["already has an XDP program"]);
    assert_has(&found(&in_use), &["already has an XDP program"]);
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
        seen["placements"][0]["why_not_more"], network["queues"][0]["fallbacks"],
        "{status:#}"
    );

    // Of a daemon that is not asked only its sockets are seen.
    let beside = report(&veth.near, &[VethPair::NIC]);
    assert_eq!(beside["network"]["taken_queues"], json!([0, 1]), "{beside:#}");
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
    assert_has(&why, &["fewer receive queues than its peer"]);
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
    assert_has(&found(&bridge), &["use the interface below"]);
    assert_has(&found(&bridge), &["ip link set dev bridge0 up"]);
    let lo = report(netns, &["lo", "--try"]);
    assert_eq!(lo["tried"]["mode"], "copy (skb)", "{lo:#}");
    assert_eq!(modes(&lo), [&tap, &Value::Null, &Value::Null], "{lo:#}");
    assert_has(&found(&lo), &["lo is this host with itself"]);
    assert!(!typed(&lo).contains("ifname lo"), "{lo:#}");
    // What is said to serve instead does: a pair of which a network has one end.
    for line in [
        "ip link add vms type veth peer name vms-host",
        "ip link set dev vms up",
    ] {
        assert_has(&typed(&lo), &[line]);
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
    assert_has(&lacking, &["CAP_NET_ADMIN", "CAP_BPF"]);
    assert_has(
        report["tried"]["refused"].as_str().expect("a reason"),
        &["os error 1"],
    );
    assert_has(
        &found(&report),
        &["start it as root or with these, or lease queues from a steward"],
    );
    assert_has(&report["not_seen"].to_string(), &["other users"]);
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

#[test]
fn strict_check_fails_if_there_is_something_to_act_on() {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let status = |args: &[&str]| {
        check(&veth.near, &[&[VethPair::NIC], args].concat())
            .status
            .code()
    };
    assert_eq!(status(&["--strict"]), Some(0));
    veth.near.ip(&["link", "set", "dev", VethPair::NIC, "down"]);
    assert_eq!((status(&[]), status(&["--strict"])), (Some(0), Some(1)));
    let finding = &report(&veth.near, &[VethPair::NIC])["findings"][0];
    for (field, value) in [
        ("severity", "error"),
        ("name", "link-down"),
        ("subject", VethPair::NIC),
        ("remedy", &format!("`ip link set dev {} up`", VethPair::NIC)),
    ] {
        assert_eq!(finding[field], value, "{finding:#}");
    }
}

/// A file in a directory of its own, which is that of its sockets, too.
struct File {
    dir: tempfile::TempDir,
}

impl File {
    fn new(text: &str) -> Self {
        let dir = testkit::directory::private_dir();
        let text = text.replace(DIR, dir.path().to_str().expect("UTF-8"));
        std::fs::write(dir.path().join("c.toml"), text).expect("writable");
        Self { dir }
    }

    fn check(&self, netns: &NetNs, args: &[&str]) -> Output {
        let mut command = netns.command(daemon::binary());
        command.args(["serve", "--check", "--config"]);
        command.arg(self.dir.path().join("c.toml")).args(args);
        command.output().expect("it runs")
    }

    /// What was found, and that errors and warnings have a remedy.
    #[track_caller]
    fn report(&self, netns: &NetNs, args: &[&str]) -> Value {
        let output = self.check(netns, &[args, &["--json"]].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        let report: Value = serde_json::from_slice(&output.stdout).expect(&said);
        let code = if report["works"] == true { 0 } else { 1 };
        assert_eq!(output.status.code(), Some(code), "{said}: {report:#}");
        for finding in report["findings"].as_array().expect("a list") {
            let has_remedy = finding["remedy"].is_string();
            assert_eq!(has_remedy, finding["severity"] != "note", "{finding:#}");
        }
        report
    }

    /// That the one error is of this name, with these words.
    #[track_caller]
    fn assert_finds(&self, netns: &NetNs, args: &[&str], name: &str, words: &str) {
        let report = self.report(netns, args);
        let findings = report["findings"].as_array().expect("a list");
        let errors: Vec<_> = findings
            .iter()
            .filter(|finding| finding["severity"] == "error")
            .collect();
        assert_eq!(errors.len(), 1, "{report:#}");
        assert_eq!(errors[0]["name"], name, "{report:#}");
        assert!(errors[0].to_string().contains(words), "{words}: {report:#}");
        let verdict = report["verdict"].as_str().expect("text");
        assert!(verdict.starts_with("1 problem") && verdict.ends_with("does not work on this host"));
    }
}

#[test]
fn underlay_of_a_network_is_checked() {
    require!(Root);
    let overlay = Overlay::new(Underlay::BY_XDP, 1);
    let host = &overlay.hosts[0];
    let file = File::new(&host.file(&[(0, "")]));
    let findings = || file.report(&host.netns, &[])["findings"].clone();
    let found = findings();
    let is_of_underlay = |finding: &Value| finding["text"].to_string().contains("u0 queue 0: copy");
    assert!(is_of_underlay(&found[1]), "{found:#}");
    assert_eq!(found[2], Value::Null);
    host.netns.ip(&["link set dev", VXLAN, "type vxlan learning"]);
    let found = &findings()[2];
    assert_eq!(
        found["text"],
        "the underlay is not used: vx100 learns addresses from packets"
    );
    assert_eq!(found["remedy"], "`ip link set dev vx100 type vxlan nolearning`");
}

fn lan(queues: u32) -> String {
    format!(
        "[network.lan]\nuplink = \"{}\"\nqueues = {queues}\n[port.vm1]\nnetwork = \"lan\"\n\
         socket-path = \"{DIR}/vm1.sock\"\nmac = \"02:00:00:00:00:01\"\n",
        VethPair::NIC
    )
}

#[test]
fn configuration_that_works_is_said_to_and_nothing_is_changed() {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let before = state(&veth.near, VethPair::NIC);
    let file = File::new(&lan(2));
    let report = file.report(&veth.near, &[]);
    assert_eq!(
        (&report["works"], &report["errors"], &report["warnings"]),
        (&json!(true), &json!(0), &json!(0)),
        "{report:#}"
    );
    let mode = &report["findings"][0];
    assert_eq!(
        (&mode["name"], &mode["subject"]),
        (&json!("mode"), &json!("network lan"))
    );
    assert_has(mode["text"].as_str().expect("text"), &["queues 0-1: tap"]);
    let output = file.check(&veth.near, &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.starts_with("daemon\n") && text.contains("\nnetwork lan\n"),
        "{text}"
    );
    assert!(
        text.ends_with("\nthis configuration works on this host\n"),
        "{text}"
    );
    assert_eq!(state(&veth.near, VethPair::NIC), before);
    let files = std::fs::read_dir(file.dir.path()).expect("its directory").count();
    assert_eq!(files, 1, "no socket is left");

    let mut command = veth.near.command(daemon::binary());
    command.args(["serve", "--check", "--ifname", VethPair::NIC, "--socket-path"]);
    let output = command
        .arg(file.dir.path().join("a.sock"))
        .output()
        .expect("it runs");
    assert!(output.status.success(), "options do, too");
}

#[test]
fn what_a_configuration_lacks_on_this_host_is_named_with_a_remedy() {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let netns = &veth.near;
    let finds = |text: &str, name, words| File::new(text).assert_finds(netns, &[], name, words);
    finds(&lan(2).replace(VethPair::NIC, "eth9"), "no-interface", "ip link");
    finds(&lan(3), "no-such-queue", "ethtool -L");
    let elsewhere = lan(2).replace(&format!("{DIR}/vm1"), "/nonexistent/vm1");
    finds(&elsewhere, "cannot-listen", "mkdir -p /nonexistent");
    let later = format!("[daemon]\nsocket-directories = [\"{DIR}/later\"]\n{}", lan(2));
    finds(&later, "cannot-listen", "mkdir -p");
    finds(
        &lan(2).replace(&format!("{DIR}/vm1.sock"), "/etc/passwd"),
        "cannot-listen",
        "not a socket",
    );
    finds(
        &lan(2).replace("queues = 2", "queues = 2\nforce-zero-copy = true"),
        "mode-refused",
        "force-zero-copy",
    );
    finds(
        &lan(2)
            .replace("queues = 2", "queues = 2\nmode = \"skb\"")
            .replace("mac =", "vlan = 5\nmac ="),
        "vlan-tags",
        "rxvlan off",
    );
    let file = File::new(&lan(2));
    file.assert_finds(netns, &["--steward", "/nonexistent"], "steward", "--steward");
    let warned = File::new(&lan(1)).report(netns, &[]);
    assert_eq!(
        (&warned["works"], &warned["warnings"]),
        (&json!(true), &json!(1)),
        "{warned:#}"
    );
    assert_eq!(warned["findings"][1]["name"], "queues-left-out", "{warned:#}");

    let _program = testkit::foreign::Foreign::attach(netns, VethPair::NIC, Mode::Native, 0);
    finds(
        &lan(2).replace("queues = 2", "queues = 2\nmode = \"xdp\""),
        "program-attached",
        "--inhibit",
    );
    netns.ip(&["link", "set", "dev", VethPair::NIC, "down"]);
    finds(&lan(2), "link-down", "ip link set dev");
}

/// A daemon of the same file is no obstacle, one of another file is.
#[test]
fn queues_and_sockets_of_a_running_daemon_are_taken_unless_it_has_the_file() {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let daemon = Daemon::start_file(&veth.near, &Serve::file().by_root(), &[], &lan(2));
    let control = daemon.path("control");
    let mut command = veth.near.command(daemon::binary());
    command.args(["serve", "--check", "--json", "--config"]);
    command
        .arg(daemon.path("config.toml"))
        .arg("--control")
        .arg(&control);
    let report: Value = serde_json::from_slice(&command.output().expect("it runs").stdout).expect("JSON");
    assert_eq!(report["works"], true, "{report:#}");
    assert_eq!(report["findings"][0]["name"], "running", "{report:#}");
    let other = File::new(&lan(2));
    other.assert_finds(&veth.near, &[], "queue-taken", "choose other queues");
    let same_socket = lan(2).replace(
        DIR,
        daemon.path("").to_str().expect("UTF-8").trim_end_matches('/'),
    );
    let report = File::new(&same_socket).report(&veth.near, &[]);
    assert_has(&found(&report), &["another process listens there"]);
}

#[test]
fn steward_is_asked_as_the_user_that_the_daemon_becomes() {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let daemon = Daemon::start_file(&veth.near, &Serve::file().leased(), &[VethPair::NIC], "");
    let steward = daemon.path("steward.sock");
    let args = ["--steward", steward.to_str().expect("UTF-8")];
    let file = File::new(&lan(2));
    let report = file.report(&veth.near, &args);
    assert_eq!(report["works"], true, "{report:#}");
    let other = lan(2).replace(VethPair::NIC, "lo");
    let report = File::new(&other).report(&veth.near, &args);
    assert_has(&found(&report), &["may not lease queues of lo"]);
    let report = file.report(&veth.near, &[args.as_slice(), &["--user", "1234:1234"]].concat());
    assert_has(&found(&report), &["user 1234 may not lease anything"]);
}
