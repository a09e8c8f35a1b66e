//! Hints of the NIC: asked for, shown, switched while frames go, and why not. A veth tells of hash, tag and time.

use std::time::Duration;

use rstest::rstest;
use serde_json::{Value, json};
use testkit::daemon::{self};
use testkit::kernel::has_hints;
use testkit::lan::{Lan, STRANGER, file, frame, guests, mac};
use testkit::{Daemon, Driver, DriverConfig, PacketPort, Serve, VethPair, assert_soon, require, wait};

/// A file whose network asks for hints.
fn with_hints(hints: &str, file: &str) -> String {
    let network = format!("[network.lan]\nhints = \"{hints}\"\n");
    file.replacen("[network.lan]\n", &network, 1)
}

fn serve(leased: bool) -> Serve {
    Serve::interface(VethPair::NIC).leased_if(leased)
}

/// A guest with buffers, whose lane runs.
fn guest(daemon: &Daemon) -> Driver {
    daemon.connect(0, &daemon.socket(), &DriverConfig::default(), 16)
}

fn hints_of(daemon: &Daemon) -> Value {
    daemon.port(0)["lanes"][0]["hints"].clone()
}

#[rstest]
fn hints_that_are_asked_for_are_on_and_shown(#[values(false, true)] leased: bool) {
    require!(Root);
    if !has_hints() {
        return;
    }
    let veth = VethPair::new();
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let daemon = Daemon::start(&veth.near, &serve(leased).with("--hints", "hash,mark"));
    let mut guest = guest(&daemon);
    let sent = testkit::frame::plain(100, 1);
    wire.send(&sent);
    assert_eq!(guest.pairs[0].receive(wait::SOON).expect("it comes").frame, sent);
    let hints = hints_of(&daemon);
    assert_eq!(hints["asked"], "hash,mark");
    assert_eq!(hints["possible"], json!(["hash", "vlan", "timestamp", "mark"]));
    assert_eq!(
        (&hints["on"], &hints["why"]),
        (&json!(["hash", "mark"]), &Value::Null)
    );
    let control = daemon.path("control");
    let mut command = veth.near.command(daemon::binary());
    let command = command.args(["queues", VethPair::NIC, "--control"]).arg(&control);
    let said = String::from_utf8(command.output().expect("it runs").stdout).expect("text");
    assert!(
        said.contains("\n  driver_hints: hash, vlan, timestamp\n")
            && said.contains("\n      on: hash, mark\n"),
        "{said}"
    );
    let said = command.arg("--json").output().expect("it runs").stdout;
    let queues: Value = serde_json::from_slice(&said).expect("JSON");
    assert_eq!(queues[0]["driver_hints"], json!(["hash", "vlan", "timestamp"]));
    assert_eq!(queues[0]["holder"]["hints"]["on"], json!(["hash", "mark"]));
}

#[rstest]
fn hints_that_cannot_be_had_are_named_and_frames_go_on(#[values(false, true)] leased: bool) {
    require!(Root);
    let veth = VethPair::new();
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let none = Daemon::start(&veth.near, &serve(leased).with("--hints", "none"));
    assert_eq!(hints_of(&none)["on"], json!([]));
    drop(none);
    let skb = serve(leased).with("--mode", "skb").with("--hints", "auto");
    let daemon = Daemon::start(&veth.near, &skb);
    let mut guest = guest(&daemon);
    let hints = hints_of(&daemon);
    assert_eq!(
        (&hints["asked"], &hints["possible"]),
        (&json!("auto"), &json!([]))
    );
    let sent = testkit::frame::plain(100, 1);
    wire.send(&sent);
    assert_eq!(guest.pairs[0].receive(wait::SOON).expect("it comes").frame, sent);
}

/// What the kernel calls the instructions of the program on the NIC: the same for the same ones.
fn program_tag(veth: &VethPair) -> String {
    let text = veth
        .near
        .output_of("ip", &["-j", "-d", "link", "show", "dev", VethPair::NIC]);
    let links: Value = serde_json::from_str(&text).expect("ip prints JSON");
    let tag = links[0]["xdp"]["prog"]["tag"].as_str();
    tag.unwrap_or_else(|| panic!("no tag: {text}")).to_owned()
}

#[rstest]
#[case(true, &[])]
#[case(false, &["--mode", "skb"])]
#[case(true, &["--memory", "direct"])]
#[case(false, &["--memory", "send-direct"])]
fn where_nobody_needs_tags_it_is_the_plain_program_by_itself_and_nothing_is_said(
    #[case] leased: bool,
    #[case] options: &[&str],
) {
    require!(Root);
    if !has_hints() {
        return;
    }
    let veth = VethPair::new();
    veth.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "on"]);
    let tag_with = |hints: Option<&str>, options: &[&str]| {
        let words = options.chunks(2).map(|pair| (pair[0], pair[1]));
        let words = words.chain(hints.map(|hints| ("--hints", hints)));
        let serve = words.fold(serve(leased), |serve, (option, value)| serve.with(option, value));
        let daemon = Daemon::start(&veth.near, &serve);
        let tag = program_tag(&veth);
        (tag, daemon.said(), daemon.port(0)["lanes"][0]["hints"].clone())
    };
    let (plain, ..) = tag_with(Some("none"), options);
    let (by_itself, said, hints) = tag_with(None, options);
    assert_eq!(by_itself, plain);
    assert!(!said.contains("hint") && !said.contains("WARN"), "{said}");
    assert_eq!((&hints["on"], &hints["why"]), (&json!([]), &Value::Null));
    // Else the tags say nothing.
    let (asked, ..) = tag_with(Some("vlan"), &[]);
    assert_ne!(asked, plain);
}

#[test]
fn what_excludes_hints_is_said_with_the_remedy() {
    let run = |words: &[&str]| {
        let mut args = vec![
            "serve",
            "--socket-path",
            "/tmp/none.sock",
            "--ifname",
            "eth1",
            "--hints",
        ];
        args.extend(words);
        let output = std::process::Command::new(daemon::binary()).args(args).output();
        String::from_utf8(output.expect("it runs").stderr).expect("text")
    };
    for (words, remedy) in [
        (&["hash", "--memory", "direct"][..], "memory=copy"),
        (&["hash", "--memory", "send-direct"], "memory=copy"),
        (&["vlan", "--mode", "skb"], "leave one out"),
        (&["time"], "choose some of hash,vlan,timestamp,mark"),
        (&["hash,auto"], "auto excludes"),
        (&["none,hash"], "none excludes"),
    ] {
        let said = run(words);
        assert!(said.contains(remedy), "{words:?}: {said}");
    }
}

#[rstest]
fn ports_with_vlans_are_taken_where_tags_are_taken_off_and_told(#[values(false, true)] leased: bool) {
    require!(Root);
    if !has_hints() {
        return;
    }
    let veth = VethPair::new();
    veth.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "on"]);
    let serve = Serve::file().leased_if(leased);
    let auto = |ports: &[&str]| with_hints("auto", &file(Some(VethPair::NIC), ports));
    let daemon = Daemon::start_file(&veth.near, &serve, &[VethPair::NIC], &auto(&[""]));
    let on = || daemon.status()["networks"][0]["queues"][0]["hints"]["on"].clone();
    assert_eq!(on(), json!([]), "nobody needs tags");
    let mut first = guests(&daemon, 1, &DriverConfig::default());
    daemon.reload_with(&auto(&["", "vlan = 100"]));
    assert_soon!(on() == json!(["vlan"]), "{}", daemon.status());
    // The first one's frames come as before.
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let plain = frame(mac(0), STRANGER, 60, 1);
    let comes = wait::until(wait::SOON, || {
        wire.send(&plain);
        let got = first[0].pairs[0].receive(Duration::from_millis(200));
        got.is_some_and(|got| got.frame == plain)
    });
    assert!(comes, "{}", daemon.status());
}

#[test]
fn frames_go_on_while_hints_are_switched_by_the_file() {
    require!(Root);
    if !has_hints() {
        return;
    }
    let with = |hints: &str| with_hints(hints, &file(Some(VethPair::NIC), &["", ""]));
    let veth = VethPair::new();
    let serve = Serve::file();
    let mut lan = Lan::on(veth, &serve, &with("none"), 2, &DriverConfig::default());
    for (number, hints) in [
        (1, "hash"),
        (2, "none"),
        (3, "hash,vlan,timestamp,mark"),
        (4, "auto"),
    ] {
        lan.daemon.reload_with(&with(hints));
        let on = || lan.daemon.status()["networks"][0]["queues"][0]["hints"].clone();
        let expected: Vec<&str> = match hints {
            "none" | "auto" => Vec::new(),
            names => names.split(',').collect(),
        };
        assert_soon!(on()["on"] == json!(expected), "{:#}", on());
        let plain = frame(mac(1), STRANGER, 60, number);
        lan.wire.send(&plain);
        assert_eq!(lan.received(1), plain, "{hints}");
    }
}
