//! `serve --config`: ports of a file, which come and go while the daemon runs, and disturb no other.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use rstest::rstest;
use rustix::process::Signal;
use testkit::daemon::DIR;
use testkit::holdings;
use testkit::{
    Daemon, Driver, DriverConfig, Layout, NetNs, PacketPort, Rig, Serve, Traffic, VethPair, assert_has,
    assert_soon, frame, require, soak, wait,
};

const PACE: Duration = Duration::from_millis(1);
/// Frames to the guest that may be under way: fewer than it has buffers, so that none has to be lost.
const WINDOW: usize = 64;

/// A port of the null NIC.
fn null(name: &str, further: &str) -> String {
    format!("[port.{name}]\nsocket-path = \"{DIR}/{name}.sock\"\nnull = true\n{further}\n")
}

/// A port on a queue of an interface.
fn queue(name: &str, interface: &str, queue: u32) -> String {
    format!(
        "[port.{name}]\nsocket-path = \"{DIR}/{name}.sock\"\nifname = \"{interface}\"\nstart-queue = {queue}\n"
    )
}

/// Names of the sockets beside a daemon's.
fn sockets(daemon: &Daemon) -> Vec<String> {
    let entries = std::fs::read_dir(daemon.path("")).expect("its directory");
    let entries = entries.map(|entry| entry.expect("an entry"));
    let named = entries.filter(|entry| entry.file_type().expect("a kind").is_socket());
    let mut names: Vec<_> = named
        .map(|entry| entry.file_name().into_string().expect("UTF-8"))
        .filter(|name| name != "steward.sock")
        .collect();
    names.sort();
    names
}

/// Whether a guest of the null NIC is served there.
fn is_served(path: &Path) -> bool {
    let mut guest = Driver::connect(path, &DriverConfig::default()).expect("accepted");
    guest.pairs[0].post(8, &[2048]);
    guest.pairs[0].receive(wait::SOON).is_some()
}

#[rstest]
fn ports_come_and_go_while_anothers_frames_pass(#[values(false, true)] leased: bool) {
    require!(Root);
    let veth = VethPair::new();
    veth.join_as("nic1", "wire1", 2, 1500);
    let stays = queue("stays", VethPair::NIC, 0);
    let daemon = Daemon::start_file(
        &veth.near,
        &Serve::file().leased_if(leased),
        &[VethPair::NIC, "nic1"],
        &stays,
    );
    let driver = Driver::connect(&daemon.path("stays.sock"), &DriverConfig::default()).expect("accepted");
    let mut rig = Rig::of(veth, daemon, driver);
    rig.post(128, &[2048]);
    let (driver, daemon, wire, veth) = rig.into_parts();
    let traffic = Traffic::start_within(driver, wire, PACE, WINDOW);
    let begun = Instant::now();
    for round in 0..5 {
        let both = format!("{stays}{}{}", queue("b", "nic1", 0), queue("c", "nic1", 1));
        let said = daemon.reload_with(&both);
        assert_has(&said, &["port b began", "port c began"]);
        assert_eq!(sockets(&daemon), ["b.sock", "c.sock", "control", "stays.sock"]);
        // What comes works.
        let mut guest = Driver::connect(&daemon.path("b.sock"), &DriverConfig::default()).expect("accepted");
        let far = PacketPort::open(&veth.far, "wire1");
        let sent = frame::plain(100, round);
        guest.pairs[0].send(&sent, Layout::Whole);
        frame::assert_same(&far.receive(wait::SOON).expect("it arrives"), &sent);
        // Another queue, by the same name, and without the other one.
        let said = daemon.reload_with(&format!("{stays}{}", queue("b", "nic1", 1)));
        assert_has(&said, &["port b has changed (start-queue): ended"]);
        assert_has(&said, &["port c is not in the file any more: ended"]);
        assert_has(&said, &["port b began"]);
        assert!(guest.await_close(wait::SOON), "its VMM is disconnected");
        assert_eq!(sockets(&daemon), ["b.sock", "control", "stays.sock"]);
        daemon.reload_with(&stays);
        assert_eq!(sockets(&daemon), ["control", "stays.sock"]);
    }
    let ended = Instant::now();
    assert!(!daemon.said().contains("port stays"));
    let arrived = |at: usize| traffic.flows()[at].lost_of(begun, ended) == 0;
    for at in [0, 1] {
        assert_soon!(
            arrived(at),
            "{} of {} frames are lost",
            traffic.flows()[at].lost_of(begun, ended),
            traffic.flows()[at].sent.len()
        );
        assert_eq!(traffic.flows()[at].repeated(), [0; 0]);
        assert!(traffic.flows()[at].sent.len() > 100, "there was traffic");
    }
}

#[test]
fn signal_reads_the_file_again_and_tells_what_changed() {
    require!(Root);
    let netns = NetNs::new("file");
    let mut daemon = Daemon::start_file(&netns, &Serve::file().by_root(), &[], &null("a", ""));
    assert!(is_served(&daemon.path("a.sock")));
    daemon.write_file(&null("b", ""));
    daemon.process().signal(Signal::HUP);
    daemon.process().await_text("configuration: port b began");
    assert!(daemon.said().contains("port a is not in the file any more"));
    assert!(is_served(&daemon.path("b.sock")));
    assert_eq!(sockets(&daemon), ["b.sock", "control"]);
    let said = daemon.reload_with(&null("b", ""));
    assert_has(&said, &["nothing changed"]);
    let said = daemon.reload_with(&null("b", "frame-size = 100\nclient = false"));
    assert_has(&said, &["port b has changed (frame-size): ended"]);
    assert!(is_served(&daemon.path("b.sock")));
}

#[test]
fn cable_is_plugged_in_and_out() {
    require!(Root);
    let netns = NetNs::new("file");
    let end = |name: &str, cable: &str| {
        format!("[port.{name}]\nsocket-path = \"{DIR}/{name}.sock\"\ncable = \"{cable}\"\n")
    };
    let none = format!("[daemon]\nsocket-directories = [\"{DIR}\"]\n");
    let daemon = Daemon::start_file(&netns, &Serve::file().by_root(), &[], &none);
    for ends in [["a", "b"], ["a", "c"], ["c", "b"]] {
        daemon.reload_with(&format!("{none}{}", ends.map(|name| end(name, "x")).concat()));
        let mut guests = ends.map(|name| {
            let path = daemon.path(&format!("{name}.sock"));
            Driver::connect(&path, &DriverConfig::default()).expect("accepted")
        });
        guests[1].pairs[0].post(8, &[2048]);
        let sent = frame::plain(100, 1);
        let arrives = wait::until(wait::SOON, || {
            guests[0].pairs[0].reap_sent();
            guests[0].pairs[0].send(&sent, Layout::Whole);
            guests[1].pairs[0]
                .receive(wait::QUIET)
                .is_some_and(|got| got.frame == sent)
        });
        assert!(arrives, "{ends:?}");
    }
}

#[test]
fn file_with_a_mistake_changes_nothing_and_is_told() {
    require!(Root);
    let netns = NetNs::new("file");
    let good = null("a", "");
    let mut daemon = Daemon::start_file(&netns, &Serve::file().by_root(), &[], &good);
    let guest = Driver::connect(&daemon.path("a.sock"), &DriverConfig::default()).expect("accepted");
    daemon.await_port(0, "a guest", |port| port["connected"] == true);
    let elsewhere = "[port.b]\nsocket-path = \"/run/elsewhere.sock\"\nnull = true\n";
    for (text, words) in [
        (null("b", "queus = 1"), "line 4: port b: unknown key \"queus\""),
        (
            null("b", "queues = 0"),
            "line 4: port b: queues 0: a port has 1 to 128",
        ),
        (null("b", "ifname"), "line 4"),
        (format!("{good}{elsewhere}"), "socket-directories"),
        (
            format!("{good}[port.b]\nfd = 7\nnull = true\n"),
            "fd 7: descriptors are inherited",
        ),
        (
            null("b", "client = true"),
            "line 4: port b: client: the daemon's sandbox",
        ),
        (
            format!("{}inhibit = true\nmap-path = \"/x\"\n", queue("b", "nic0", 0)),
            "line 5: port b: inhibit: sockets and maps of others",
        ),
    ] {
        daemon.write_file(&text);
        let (done, said) = daemon.reload();
        assert!(
            !done && said.contains(words) && said.contains("nothing was changed"),
            "{said}"
        );
        let told = daemon.status()["configuration"]["failed"].to_string();
        let word = words.split('"').next().expect("words");
        assert_has(&told, &[word]);
        daemon.process().await_text(word);
        assert_eq!(sockets(&daemon), ["a.sock", "control"]);
        assert_eq!(daemon.port(0)["connected"], true);
    }
    // Of one port alone; the others are as the file says.
    let _taken = UnixListener::bind(daemon.path("b.sock")).expect("free");
    daemon.write_file(
        &[&good, &null("b", ""), &null("c", "")]
            .map(String::as_str)
            .concat(),
    );
    let (done, said) = daemon.reload();
    assert!(!done && said.contains("port b: cannot listen at"), "{said}");
    assert_has(&said, &["another process listens there"]);
    assert!(daemon.port_named("c").is_some() && daemon.port_named("b").is_none());
    std::fs::remove_file(daemon.path("b.sock")).expect("ours");
    let (done, said) = daemon.reload();
    assert!(
        done && said.contains("port b began") && !said.contains("port c"),
        "{said}"
    );
    assert_eq!(daemon.status()["configuration"]["failed"], serde_json::json!([]));
    drop(guest);
}

/// The claim: what [daemon] says otherwise than at the start is reported by each reading, until the file says it again.
#[test]
fn change_of_the_daemons_keys_is_reported_until_it_is_undone() {
    require!(Root);
    let netns = NetNs::new("file");
    let good = format!("[daemon]\nspin-us = 60\n{}", null("a", ""));
    let daemon = Daemon::start_file(&netns, &Serve::file().by_root(), &[], &good);
    for further in ["", "queues = 2"] {
        daemon.write_file(&format!("[daemon]\nspin-us = 70\n{}", null("a", further)));
        let (done, said) = daemon.reload();
        assert!(!done && said.contains("spin-us of [daemon] changed"), "{said}");
    }
    let (done, said) = daemon.reload();
    assert!(!done && said.contains("spin-us of [daemon] changed"), "{said}");
    daemon.write_file(&good);
    let (done, said) = daemon.reload();
    assert!(done && !said.contains("[daemon]"), "{said}");
}

#[test]
fn socket_that_comes_later_has_its_owner_group_and_mode() {
    require!(Root);
    let netns = NetNs::new("file");
    let daemon = Daemon::start_file(&netns, &Serve::file().by_root(), &[], &null("a", ""));
    daemon.reload_with(
        &[
            null("own", ""),
            null(
                "all",
                "socket-owner = 1234\nsocket-group = 5678\nsocket-mode = \"620\"",
            ),
            null("root", "socket-group = \"root\""),
        ]
        .concat(),
    );
    for (name, is) in [
        ("own", (0, 0, 0o600)),
        ("all", (1234, 5678, 0o620)),
        ("root", (0, 0, 0o660)),
    ] {
        let socket = std::fs::metadata(daemon.path(&format!("{name}.sock"))).expect("it listens");
        assert_eq!((socket.uid(), socket.gid(), socket.mode() & 0o7777), is, "{name}");
    }
}

/// The claim: after many ports came and went, there is what was there before.
#[rstest]
fn ports_that_came_and_went_leave_nothing_behind(#[values(false, true)] leased: bool) {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let stays = queue("stays", VethPair::NIC, 0);
    let mut daemon = Daemon::start_file(
        &veth.near,
        &Serve::file().leased_if(leased),
        &[VethPair::NIC],
        &stays,
    );
    let with = format!("{stays}{}{}", queue("b", VethPair::NIC, 1), null("n", ""));
    let round = |daemon: &Daemon, guest: bool| {
        daemon.reload_with(&with);
        let came = guest.then(|| {
            let b = Driver::connect(&daemon.path("b.sock"), &DriverConfig::default()).expect("accepted");
            (b, is_served(&daemon.path("n.sock")))
        });
        daemon.reload_with(&stays);
        drop(came);
    };
    // What is made once and kept: arenas of the allocator, the log's buffers.
    (0..5).for_each(|_| round(&daemon, true));
    let (pid, helper) = (daemon.process().pid(), daemon.helper());
    let before = [pid, helper].map(|pid| holdings::steady(pid, wait::QUIET));
    let kib = holdings::resident_kib(pid);
    // Two ports each.
    for number in 0..soak::count(40, 1000) {
        round(&daemon, number % 10 == 0);
    }
    holdings::await_within(&[pid, helper], &before);
    println!(
        "before {before:?}, {kib} KiB; after {} KiB",
        holdings::resident_kib(pid)
    );
    let grown = holdings::resident_kib(pid).saturating_sub(kib);
    assert!(grown < 4096, "resident memory has grown by {grown} KiB");
    assert_eq!(sockets(&daemon), ["control", "stays.sock"]);
    // And it still does what it is for.
    let mut guest = Driver::connect(&daemon.path("stays.sock"), &DriverConfig::default()).expect("accepted");
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let sent = frame::plain(100, 7);
    guest.pairs[0].send(&sent, Layout::Whole);
    frame::assert_same(&wire.receive(wait::SOON).expect("it arrives"), &sent);
}

#[rstest]
fn sockets_go_with_the_daemon_however_it_ends(#[values(Signal::TERM, Signal::KILL)] signal: Signal) {
    require!(Root);
    let netns = NetNs::new("file");
    let mut daemon = Daemon::start_file(&netns, &Serve::file().by_root(), &[], &null("a", ""));
    daemon.reload_with(&[null("a", ""), null("b", ""), null("c", "")].concat());
    daemon.reload_with(&[null("a", ""), null("d", "")].concat());
    assert_eq!(sockets(&daemon), ["a.sock", "control", "d.sock"]);
    // Made before root's rights went, so that a directory of root's will do.
    assert_eq!(
        std::fs::metadata(daemon.path("a.sock"))
            .expect("it listens")
            .uid(),
        0
    );
    daemon.process().signal(signal);
    daemon.process().wait(wait::SOON);
    // In order: at once. Killed: as soon as the helper sees it.
    assert!(sockets(&daemon).is_empty() || signal == Signal::KILL);
    assert_soon!(sockets(&daemon).is_empty(), "{:?}", sockets(&daemon));
}
