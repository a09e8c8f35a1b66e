//! The processes that answer, killed and confined; who may ask.

use std::os::unix::net::UnixStream;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use testkit::api::{Api, Processes};
use testkit::{Daemon, Driver, DriverConfig, NetNs, Serve, assert_soon, holdings, procfs, require, wait};

fn kill(pid: u32) {
    let pid = Pid::from_raw(i32::try_from(pid).expect("a number")).expect("not 0");
    kill_process(pid, Signal::KILL).expect("it runs");
}

#[test]
fn process_that_answers_is_killed_and_another_one_answers() {
    require!(Root);
    let dir = super::open_dir();
    let (mut rig, api) = super::rig(&dir);
    let first = Processes::of(&mut rig.daemon);
    let before = api.get("/v1/events");
    assert_eq!(before["events"][0]["event"], "connected");
    kill(first.child);
    rig.assert_passes_both_ways();
    let second = wait::until_some(wait::SOON, || {
        Some(Processes::of(&mut rig.daemon)).filter(|now| now.child != first.child)
    });
    assert_eq!(second.expect("another one").parent, first.parent);
    // Nothing is forgotten, and who asks while none is there waits.
    assert_eq!(api.get("/v1/events"), before);
    rig.assert_passes_both_ways();
    rig.daemon.process().await_text("was ended by signal 9");
}

#[test]
fn daemon_goes_on_without_them() {
    require!(Root);
    let dir = super::open_dir();
    let (mut rig, api) = super::rig(&dir);
    let processes = Processes::of(&mut rig.daemon);
    kill(processes.parent);
    processes.await_end();
    rig.daemon.process().await_text("the gateway has ended");
    rig.assert_passes_both_ways();
    assert_eq!(rig.daemon.port(0)["connected"], true);
    // Its end is an end, too.
    assert!(rig.daemon.terminate().success());
    assert!(!api.socket().exists(), "the socket stayed behind");
}

/// As often as its parent starts another one within a few seconds.
const KILLS: usize = 5;

#[test]
fn deaths_of_the_gateway_and_a_thousand_clients_cost_the_daemon_nothing() {
    require!(Root);
    let dir = super::open_dir();
    let (mut rig, api) = super::rig(&dir);
    let _ = api.get("/v1/status");
    let pid = rig.daemon.process().pid();
    let before = holdings::steady(pid, wait::QUIET);
    let mut last = None;
    for _ in 0..KILLS {
        let child = wait::until_some(wait::SOON, || {
            Some(Processes::of(&mut rig.daemon).child).filter(|&child| Some(child) != last)
        });
        let child = child.expect("another one");
        let _held: Vec<_> = (0..200)
            .filter_map(|_| UnixStream::connect(api.socket()).ok())
            .collect();
        kill(child);
        rig.assert_passes_both_ways();
        assert_eq!(
            rig.daemon.port(0)["connected"],
            true,
            "the control socket answers"
        );
        last = Some(child);
    }
    // All of those that the queue of the socket takes, and as many as are let in and closed again.
    let clients = api.clone();
    let held = std::thread::spawn(move || {
        let connect = |_| UnixStream::connect(clients.socket()).ok();
        (0..1000).filter_map(connect).collect::<Vec<_>>()
    });
    rig.assert_passes_both_ways();
    let held = held.join().expect("no panic");
    assert_eq!(held.len(), 1000);
    for _ in 0..20 {
        assert_eq!(rig.daemon.port(0)["connected"], true);
    }
    assert_eq!(api.ask("/v1/status", &[]).status, 200);
    rig.assert_passes_both_ways();
    assert_soon!(
        holdings::of(pid).is_within(&before),
        "before {before:?}, after {:?}",
        holdings::of(pid)
    );
}

#[test]
fn they_end_with_the_daemon_however_that_ends() {
    require!(Root);
    for gently in [true, false] {
        let (netns, dir) = (NetNs::new("api"), super::open_dir());
        let (mut daemon, api) = super::on_null(&netns, &dir);
        let processes = Processes::of(&mut daemon);
        let _held = UnixStream::connect(api.socket()).expect("it listens");
        match gently {
            true => assert!(daemon.terminate().success()),
            false => daemon.kill(),
        }
        processes.await_end();
        assert_soon!(!api.socket().exists(), "the socket stayed behind");
        let said = daemon.said();
        let alarms = ["the gateway has", "another process answers"];
        assert!(!alarms.iter().any(|alarm| said.contains(alarm)), "{said}");
    }
}

#[test]
fn requests_and_lives_leave_nothing_behind() {
    require!(Root);
    let (netns, dir) = (NetNs::new("api"), super::open_dir());
    let (mut daemon, api) = super::on_null(&netns, &dir);
    let pid = daemon.process().pid();
    let all = [
        "/v1/status",
        "/v1/ports",
        "/v1/counters",
        "/v1/events",
        "/metrics",
        "/nothing",
    ];
    let ask_all = || all.iter().for_each(|path| drop(api.ask(path, &[])));
    let ask_often = || {
        for _ in 0..20 {
            ask_all();
            let stream = ["--header", "Accept: text/event-stream", "--max-time", "0.2"];
            let _ = api.try_ask("/v1/events", &stream);
        }
    };
    // What is made once is there then, also what the allocator keeps.
    ask_often();
    let processes = Processes::of(&mut daemon);
    let (ours, theirs) = (
        holdings::steady(pid, wait::QUIET),
        holdings::steady(processes.child, wait::QUIET),
    );
    ask_often();
    assert_soon!(
        holdings::of(processes.child).is_within(&theirs),
        "before {theirs:?}, after {:?}",
        holdings::of(processes.child)
    );
    for _ in 0..3 {
        let child = Processes::of(&mut daemon).child;
        kill(child);
        assert_soon!(Processes::of(&mut daemon).child != child, "none came");
        ask_all();
    }
    assert_soon!(
        holdings::of(pid).is_within(&ours),
        "before {ours:?}, after {:?}",
        holdings::of(pid)
    );
}

#[test]
fn process_that_talks_to_clients_has_nothing_else() {
    require!(Root);
    let (netns, dir) = (NetNs::new("api"), super::open_dir());
    let (serve, api) = super::with_api(Serve::null().by_root(), &dir);
    let mut daemon = Daemon::start(&netns, &serve);
    let _ = api.get("/v1/status");
    let Processes { parent, child } = Processes::of(&mut daemon);
    for pid in [parent, child] {
        let field = |line: &str| procfs::status(pid, line).expect("it runs");
        assert_eq!(field("Uid"), "65534\t65534\t65534\t65534");
        assert_eq!(field("Groups"), "");
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(procfs::capabilities(pid, set), Some(0), "{set}");
        }
        assert_eq!(field("NoNewPrivs"), "1");
        assert_eq!(field("Threads"), "1");
        if pid == child {
            assert_eq!(field("Seccomp"), "2");
        }
        let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net")).expect("it runs");
        assert_ne!(namespace(&pid.to_string()), namespace("self"));
        let mine = format!("/proc/{}/ns/net", daemon.process().pid());
        assert_ne!(
            namespace(&pid.to_string()),
            std::fs::read_link(mine).expect("it runs")
        );
        let root = std::fs::read_dir(format!("/proc/{pid}/root")).expect("it runs");
        let names: Vec<_> = root.flatten().map(|entry| entry.file_name()).collect();
        assert!(
            !names.iter().any(|name| name == "etc" || name == "run"),
            "{names:?}"
        );
    }
}

/// Whether this user and group get an answer.
fn is_answered(api: &Api, user: u32, group: u32) -> bool {
    let output = Command::new("setpriv")
        .args([
            "--reuid",
            &user.to_string(),
            "--regid",
            &group.to_string(),
            "--clear-groups",
        ])
        .args(["curl", "--silent", "--max-time", "20", "--unix-socket"])
        .arg(api.socket())
        .arg("http://localhost/v1/status")
        .output()
        .expect("setpriv runs");
    output.status.success() && String::from_utf8_lossy(&output.stdout).contains("\"version\"")
}

#[test]
fn who_may_ask_is_who_may_write_to_the_socket() {
    require!(Root);
    let (netns, dir) = (NetNs::new("api"), super::open_dir());
    let path = |name: &str| dir.path().join(name).to_str().expect("ASCII").to_owned();
    let (user, admins, monitors) = (2_000_000_001, 2_000_000_002, 2_000_000_003);
    let serve = Serve::null()
        .by_root()
        .with("--api", path("api.sock"))
        .with("--api-group", admins.to_string())
        .with("--api-read-only", path("read-only.sock"))
        .with("--api-read-only-group", monitors.to_string());
    let _daemon = Daemon::start(&netns, &serve);
    let (all, read_only) = (Api::at(path("api.sock")), Api::at(path("read-only.sock")));
    assert!(is_answered(&all, user, admins));
    assert!(!is_answered(&all, user, monitors));
    assert!(is_answered(&read_only, user, monitors));
    assert!(!is_answered(&read_only, user, user));
}

#[test]
fn options_that_cannot_be_are_refused_with_the_remedy() {
    require!(Root);
    let netns = NetNs::new("api");
    for (option, value, words) in [
        ("--api", "/nowhere/api.sock", ["--api /nowhere", "mkdir -p"]),
        (
            "--metrics",
            "192.0.2.1:9419",
            ["--metrics 192.0.2.1:9419", "choose"],
        ),
        ("--api-group", "root", ["--api-group", "name that, too"]),
    ] {
        Daemon::spawn(&netns, &Serve::null().with(option, value)).assert_complains(&words);
    }
}

#[test]
fn guests_of_a_daemon_without_sandbox_are_told_of_all_the_same() {
    require!(Root);
    let (netns, dir) = (NetNs::new("api"), super::open_dir());
    let (serve, api) = super::with_api(Serve::null().with("--sandbox", "off"), &dir);
    let daemon = Daemon::start(&netns, &serve);
    let _guest = Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
    assert_eq!(api.get("/v1/ports")["ports"][0]["connected"], json!(true));
}
