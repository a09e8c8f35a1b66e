//! A daemon that runs: what it has left, and that it works.

use rstest::rstest;
use rustix::process::Signal;
use testkit::daemon::{DIR, Mode, Placement, binary, private_dir, sandbox_attempt};
use testkit::{Daemon, DriverConfig, Lessor, Rig, Running, Serve, VethPair, procfs, require, wait};

use super::{attempt, by_root, open_to_everybody};

const NOBODY: u32 = 65_534;

#[test]
fn status_comes_by_signal_too() {
    require!(Root);
    let veth = VethPair::new();
    let mut daemon = Daemon::start(&veth.near, &by_root());
    daemon.process().signal(Signal::USR1);
    daemon.process().await_text("connected: false");
    daemon.process().check();
}

#[test]
fn mounts_of_the_host_are_let_go_of() {
    require!(Root);
    let veth = VethPair::new();
    let daemon = Daemon::start(&veth.near, &by_root());
    let status = daemon.status();
    assert_eq!(status["sandbox"]["mounts"].as_str(), Some("empty"));
    let pid = status["pid"].as_u64().expect("a number");
    let mounts = std::fs::read_to_string(format!("/proc/{pid}/mounts")).expect("it runs");
    let mut places: Vec<&str> = mounts.lines().filter_map(|line| line.split(' ').nth(1)).collect();
    places.sort_unstable();
    let program = binary().canonicalize().expect("built");
    let own = format!("/proc/{pid}");
    let mut left = ["/", &own, program.to_str().expect("UTF-8")];
    left.sort_unstable();
    assert_eq!(places, left, "{mounts}");
    let is_read_only = |line: &str| {
        line.split(' ')
            .nth(3)
            .is_some_and(|flags| flags.starts_with("ro,nosuid,nodev,noexec"))
    };
    assert!(mounts.lines().all(is_read_only), "{mounts}");
}

#[test]
fn steward_that_is_started_again_is_found_among_the_mounts_that_are_left() {
    require!(Root);
    let veth = VethPair::new();
    let dir = private_dir();
    let lessor = Lessor::start(&veth.near, &dir, &[VethPair::NIC]);
    let steward = Lessor::socket(&dir);
    let (_other, _listener, path) = open_to_everybody();
    let serve = by_root().with("--steward", steward.to_str().expect("UTF-8"));
    let mut daemon = Daemon::spawn_by(veth.far.command(binary()), dir, &serve);
    daemon.lessor = Some(lessor);
    daemon.await_listening();
    daemon.await_ready();
    let directory = steward.parent().expect("a directory").display().to_string();
    assert_eq!(
        daemon.status()["sandbox"]["mounts"].as_str(),
        Some(format!("only {directory}").as_str())
    );
    let away = |port: &serde_json::Value| {
        port["steering_note"]
            .as_str()
            .is_some_and(|note| note.contains("the steward is away"))
    };
    daemon.end_steward(Signal::TERM);
    daemon.await_port(0, "without a steward", away);
    daemon.restart_lessor(&veth.near);
    daemon.await_port(0, "with a steward", |port| !away(port));

    let mut command = veth.far.command(sandbox_attempt());
    command
        .arg(format!("connect:{path}"))
        .args(["--null", "--control", "none", "--steward"])
        .arg(&steward);
    command.arg("--socket-path").arg(daemon.path("other.sock"));
    let mut running = Running::start(command);
    assert!(
        !running.wait(wait::SOON).success() && running.said().contains("o such file"),
        "{running}"
    );
}

#[test]
fn empty_network_has_no_interface_to_send_from() {
    require!(Root);
    let veth = VethPair::new();
    let daemon = Daemon::start(&veth.near, &by_root());
    let pid = daemon.status()["pid"].as_u64().expect("a number");
    let text = std::fs::read_to_string(format!("/proc/{pid}/net/dev")).expect("it runs");
    assert!(!text.contains(VethPair::NIC), "{text}");
    assert_eq!(daemon.status()["sandbox"]["network"].as_str(), Some("empty"));
}

#[test]
fn daemon_of_root_ends_up_as_nobody_with_nothing() {
    require!(Root);
    let veth = VethPair::new();
    let daemon = Daemon::start(&veth.near, &by_root());
    let status = daemon.status();
    let pid = status["pid"].as_u64().expect("a number");
    let mut threads = 0;
    for entry in std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs") {
        let path = entry.expect("a thread").path().join("status");
        // The thread that answered the request for the status may have ended.
        let Ok(text) = std::fs::read_to_string(path) else {
            continue;
        };
        threads += 1;
        let line = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.expect("a line").trim().to_owned()
        };
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            let left = u64::from_str_radix(&line(set), 16).expect("hexadecimal");
            // Where root may not raise RLIMIT_MEMLOCK, this one stays (CAP_IPC_LOCK, 14), and it is said.
            let said = status["sandbox"]["capabilities"].as_str().expect("words");
            let may_stay = if said.contains("CAP_IPC_LOCK") { 1 << 14 } else { 0 };
            assert_eq!(left & !may_stay, 0, "{set} {text}");
        }
        assert_eq!(line("NoNewPrivs:"), "1");
        assert_eq!(line("Seccomp:"), "2");
        assert_eq!(line("Uid:"), format!("{NOBODY}\t{NOBODY}\t{NOBODY}\t{NOBODY}"));
        assert_eq!(line("Gid:"), format!("{NOBODY}\t{NOBODY}\t{NOBODY}\t{NOBODY}"));
        assert_eq!(line("Groups:"), "");
    }
    assert!(threads > 2, "{threads} threads only");
    assert_eq!(status["sandbox"]["user"].as_str(), Some("65534:65534"));
    assert_eq!(status["sandbox"]["files"].as_str(), Some("denied"));
}

#[test]
fn privileged_processes_keep_only_what_they_need() {
    require!(Root);
    let veth = VethPair::new();
    // linux/capability.h: NET_ADMIN 12, NET_RAW 13, IPC_LOCK 14, SETUID 7, BPF 39; DAC_OVERRIDE 1, SYS_PTRACE 19.
    let steward = (1 << 12) | (1 << 13) | (1 << 14) | (1 << 7) | (1 << 39);
    let helper = steward | (1 << 1) | (1 << 19);
    let leased = Daemon::start(&veth.near, &Serve::interface(VethPair::NIC).leased());
    let lessor = leased.lessor.as_ref().expect("leased").steward.pid();
    assert_keeps_at_most(lessor, steward);
    drop(leased);
    let veth = VethPair::new();
    let mut daemon = Daemon::start(&veth.near, &by_root());
    assert_keeps_at_most(daemon.helper(), helper);
    drop(daemon);
    // CHOWN 0: to give away sockets of ports that come later.
    let file = format!(
        "[port.a]\nsocket-path = \"{DIR}/a.sock\"\nifname = \"{}\"\n",
        VethPair::NIC
    );
    let mut daemon = Daemon::start_file(&veth.near, &Serve::file().by_root(), &[], &file);
    assert_keeps_at_most(daemon.helper(), helper | 1);
}

/// No set has more than these, and what is needed is there.
#[track_caller]
fn assert_keeps_at_most(pid: u32, most: u64) {
    let its = |set| procfs::capabilities(pid, set).expect("it runs");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(its(set) & !most, 0, "{set}");
    }
    assert_ne!(its("CapEff"), 0);
    assert_eq!(procfs::number(pid, "NoNewPrivs"), 1);
}

#[test]
fn user_of_choice_is_taken_with_its_groups() {
    require!(Root);
    let veth = VethPair::new();
    for (user, uid, gid) in [("1234:5678", 1234, 5678), ("root", 0, 0), ("daemon", 1, 1)] {
        let serve = by_root().with("--user", user);
        let daemon = Daemon::start(&veth.near, &serve);
        assert_eq!(
            daemon.status()["sandbox"]["user"].as_str(),
            Some(format!("{uid}:{gid}").as_str())
        );
    }
    let (status, said) = attempt("nothing", &["--user", "no such user"]);
    assert!(!status.success() && said.contains("no such user"), "{said}");
}

#[test]
fn daemon_ends_with_its_helper() {
    require!(Root);
    let veth = VethPair::new();
    let mut daemon = Daemon::start(&veth.near, &by_root());
    // Answered once all is set up.
    let _ = daemon.status();
    let helper = rustix::process::Pid::from_raw(daemon.helper().cast_signed()).expect("not zero");
    rustix::process::kill_process(helper, Signal::KILL).expect("it is our daemon's");
    let status = daemon.process().wait(wait::SOON);
    assert!(!status.success() && daemon.said().contains("start the daemon again"));
}

#[rstest]
fn frames_pass_without_a_steward_of_the_hosts(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
) {
    require!(Root);
    let serve = by_root().placement(placement).mode(mode);
    let mut rig = Rig::with(VethPair::new(), &serve, &DriverConfig::default());
    rig.post(64, &[2048]);
    rig.assert_passes_both_ways();
    assert_eq!(
        rig.daemon.status()["sandbox"]["user"].as_str(),
        Some("65534:65534")
    );
}
