//! The daemon's sandbox: what must fail is tried, from within, and what must work is seen to work.
//!
//! `serve --sandbox-attempt NAME` (hidden) sets everything up as always, and then tries one thing on a thread of its
//! own. How it ended tells which layer stopped it: by SIGSYS (`calls`), or with an error of the kernel's.

use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus};

use rstest::rstest;
use rustix::process::Signal;
use tempfile::TempDir;
use testkit::daemon::{Mode, Placement, binary, private_dir};
use testkit::{Daemon, DriverConfig, Rig, Running, Serve, VethPair, require, wait};

/// SIGSYS, on all machines that Linux runs on but MIPS and Alpha.
const SIGSYS: i32 = 31;
const NOBODY: u32 = 65_534;

/// Started by root, with a steward of its own.
fn by_root() -> Serve {
    Serve::interface(VethPair::NIC).by_root()
}

/// Tries something in the sandbox of a daemon with these layers; how it ended, and what it said.
fn attempt(name: &str, options: &[&str]) -> (ExitStatus, String) {
    let directory = private_dir();
    let mut command = serve_attempting(name, &directory);
    command.args(options);
    let mut running = Running::start(command);
    let status = running.wait(wait::SOON);
    (status, running.said())
}

fn serve_attempting(name: &str, directory: &TempDir) -> Command {
    let mut command = Command::new(binary());
    command.args(["serve", "--null", "--control", "none", "--sandbox-attempt", name]);
    command.arg("--socket-path").arg(directory.path().join("vm.sock"));
    command
}

#[track_caller]
fn assert_killed(name: &str, options: &[&str]) {
    let (status, said) = attempt(name, options);
    assert_eq!(status.signal(), Some(SIGSYS), "{name}: {status}, {said}");
    assert!(
        said.trim_end()
            .lines()
            .last()
            .is_some_and(|line| line.contains("the sandbox ends this process: system call")),
        "{name} has no last line: {said}"
    );
}

#[track_caller]
fn assert_refused(name: &str, options: &[&str], error: &str) {
    let (status, said) = attempt(name, options);
    assert!(
        !status.success() && status.signal().is_none(),
        "{name}: {status}, {said}"
    );
    assert!(said.contains(error), "{name}: no {error:?} in: {said}");
}

#[test]
fn attempt_that_is_allowed_succeeds() {
    require!(Root);
    // Else all the others would prove nothing.
    for (name, options) in [
        ("nothing", [].as_slice()),
        ("read:/proc/self/smaps", &[]),
        ("read:/etc/shadow", &["--sandbox", "off"]),
        ("socket:17", &["--sandbox", "off"]),
        ("netlink", &["--sandbox", "off"]),
        ("kill:1", &["--sandbox", "off"]),
        ("process", &["--sandbox", "off"]),
        ("executable-memory", &["--sandbox", "off"]),
        ("dumpable", &["--sandbox", "off"]),
        ("root", &["--sandbox", "off"]),
        ("namespace", &["--sandbox", "off"]),
    ] {
        let (status, said) = attempt(name, options);
        // A new process does not come back to the attempt's end: its parent does.
        assert!(status.success(), "{name}: {status}, {said}");
    }
}

#[rstest]
fn call_that_is_not_in_the_table_ends_the_process(
    #[values(
        "create:/tmp/vhost-af-xdp-attempt",
        "remove:/tmp/x",
        "chmod:/tmp",
        "chown:/tmp",
        "mkdir:/tmp/x",
        "chroot:/",
        "execute:/bin/true",
        "socket:17",
        "socket:16",
        "socket:2",
        "socket:44",
        "socket:40",
        "tcp",
        "netlink",
        "root",
        "mount",
        "namespace",
        "enter-namespace",
        "bpf",
        "bpf-map",
        "trace:1",
        "memory-of:1",
        "kill:1",
        "signal-thread-of:1",
        "limit:1",
        "process",
        "executable-memory",
        "own-handler",
        "dumpable",
        "ioctl",
        "owner:1",
        "io-uring"
    )]
    name: &str,
) {
    require!(Root);
    assert_killed(name, &[]);
    // By itself, too.
    assert_killed(name, &["--sandbox", "calls"]);
}

#[test]
fn layer_taken_away_leaves_the_others_on() {
    require!(Root);
    for options in [
        ["--sandbox=-files"].as_slice(),
        &["--sandbox", "-files"],
        &["--sandbox", "all,-files"],
    ] {
        for name in ["socket:17", "execute:/bin/true", "root"] {
            assert_killed(name, options);
        }
    }
    let veth = VethPair::new();
    let daemon = Daemon::start(&veth.near, &by_root().flag("--sandbox=-files"));
    let sandbox = daemon.status()["sandbox"].clone();
    assert_eq!(sandbox["files"].as_str(), Some("not confined"));
    assert_eq!(sandbox["user"].as_str(), Some("65534:65534"));
    assert_eq!(sandbox["network"].as_str(), Some("empty"));
    assert!(
        sandbox["calls"]
            .as_str()
            .is_some_and(|calls| calls.ends_with("allowed"))
    );
    assert!(
        daemon.said().contains("sandbox: files off by --sandbox"),
        "{}",
        daemon.said()
    );
}

#[test]
fn panic_and_abort_are_told_as_ever() {
    require!(Root);
    let directory = private_dir();
    let mut command = serve_attempting("panic", &directory);
    command.env("RUST_BACKTRACE", "1");
    let mut running = Running::start(command);
    let (status, said) = (running.wait(wait::SOON), running.said());
    assert_ne!(status.signal(), Some(SIGSYS), "{said}");
    assert!(
        said.contains("panicked at") && said.contains("as was asked for"),
        "{said}"
    );
    assert!(said.contains("attempts::"), "no names in the backtrace: {said}");
    let (status, said) = attempt("abort", &[]);
    assert_eq!(status.signal(), Some(6), "SIGABRT: {said}");
}

#[test]
fn status_comes_by_signal_too() {
    require!(Root);
    let veth = VethPair::new();
    let mut daemon = Daemon::start(&veth.near, &by_root());
    daemon.process().signal(Signal::USR1);
    daemon.process().await_text("waiting for a VMM");
    daemon.process().check();
}

#[test]
fn what_libraries_try_is_answered_with_enosys() {
    require!(Root);
    assert_refused("new-clone", &[], "Function not implemented");
}

#[test]
fn landlock_by_itself_closes_the_file_system() {
    require!(Root);
    // As root with all capabilities, whom nothing else stops.
    let options = ["--sandbox", "files"];
    let directory = private_dir();
    let file = directory.path().join("file");
    std::fs::write(&file, "").expect("written");
    let (read, remove) = (
        format!("read:{}", file.display()),
        format!("remove:{}", file.display()),
    );
    let create = format!("create:{}", directory.path().join("new").display());
    let mkdir = format!("mkdir:{}", directory.path().join("new").display());
    for name in [
        &read,
        &remove,
        &create,
        &mkdir,
        "read:/etc/shadow",
        "read:/etc/passwd",
        "read:/proc/1/environ",
        "execute:/bin/true",
    ] {
        assert_refused(name, &options, "Permission denied");
    }
    // Nobody outside is looked into, or signalled.
    let pid = std::process::id();
    assert_refused(&format!("trace:{pid}"), &options, "not permitted");
    assert_refused(&format!("kill:{pid}"), &options, "not permitted");
    assert_refused(&format!("read:/proc/{pid}/maps"), &options, "Permission denied");
    assert!(file.exists());
}

#[test]
fn landlock_lets_no_file_be_read_that_everybody_may_read() {
    require!(Root);
    assert_refused("read:/etc/passwd", &[], "Permission denied");
}

#[test]
fn without_capabilities_nothing_of_roots_is_possible() {
    require!(Root);
    for options in [["--sandbox", "capabilities,user"], ["--sandbox", "capabilities"]] {
        for name in [
            "socket:17",
            "socket:44",
            "mount",
            "bpf",
            "chroot:/",
            "enter-namespace",
        ] {
            let (status, said) = attempt(name, &options);
            assert!(
                !status.success() && status.signal().is_none(),
                "{name}, {options:?}: {status}, {said}"
            );
        }
        for name in ["socket:17", "chroot:/", "mount"] {
            assert_refused(name, &options, "Operation not permitted");
        }
    }
}

#[test]
fn another_user_cannot_touch_roots_files_or_come_back() {
    require!(Root);
    let options = ["--sandbox", "user"];
    assert_refused("read:/etc/shadow", &options, "Permission denied");
    assert_refused("root", &options, "Operation not permitted");
    assert_refused("chmod:/etc/passwd", &options, "Operation not permitted");
    assert_refused("chown:/etc/passwd", &options, "Operation not permitted");
    assert_refused("create:/etc/vhost-af-xdp-attempt", &options, "Permission denied");
    assert_refused("kill:1", &options, "Operation not permitted");
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
    for entry in std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs") {
        let path = entry.expect("a thread").path().join("status");
        let text = std::fs::read_to_string(path).expect("it runs");
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
    assert_eq!(status["sandbox"]["user"].as_str(), Some("65534:65534"));
    assert_eq!(status["sandbox"]["files"].as_str(), Some("denied"));
}

/// A set of capabilities of a process, all threads having the same.
fn capabilities(pid: u32, set: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = text.lines().find_map(|line| line.strip_prefix(set));
    u64::from_str_radix(line.expect("a line").trim(), 16).expect("hexadecimal")
}

#[test]
fn privileged_processes_keep_only_what_they_need() {
    require!(Root);
    let veth = VethPair::new();
    // linux/capability.h: NET_ADMIN 12, NET_RAW 13, SYS_RESOURCE 24, BPF 39; DAC_OVERRIDE 1, SYS_PTRACE 19.
    let steward = (1 << 12) | (1 << 13) | (1 << 24) | (1 << 39);
    let keeper = steward | (1 << 1) | (1 << 19);
    let leased = Daemon::start(&veth.near, &Serve::interface(VethPair::NIC).leased());
    let lessor = leased.lessor.as_ref().expect("leased").steward.pid();
    assert_keeps_at_most(lessor, steward);
    drop(leased);
    let veth = VethPair::new();
    let mut daemon = Daemon::start(&veth.near, &by_root());
    let pid = daemon.process().pid();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("it runs");
    assert_keeps_at_most(children.trim().parse().expect("one child"), keeper);
}

/// No set has more than these, and what is needed is there.
#[track_caller]
fn assert_keeps_at_most(pid: u32, most: u64) {
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
        assert_eq!(capabilities(pid, set) & !most, 0, "{set}");
    }
    assert_ne!(capabilities(pid, "CapEff:"), 0);
    assert_eq!(capabilities(pid, "NoNewPrivs:"), 1);
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
fn socket_files_go_with_the_daemon_however_it_ends() {
    require!(Root);
    let veth = VethPair::new();
    for signal in [Signal::TERM, Signal::KILL] {
        let mut daemon = Daemon::start(&veth.near, &by_root());
        let (socket, control) = (daemon.socket(), daemon.path("control"));
        // Made before root's rights went, so that a directory of root's will do.
        assert_eq!(std::fs::metadata(&socket).expect("it listens").uid(), 0);
        daemon.process().signal(signal);
        daemon.process().wait(wait::SOON);
        let gone = || !socket.exists() && !control.exists();
        // In order: at once. Killed: as soon as the keeper sees it.
        assert!(gone() || signal == Signal::KILL, "{}", daemon.said());
        assert!(wait::until(wait::SOON, gone));
        let program = || {
            veth.near
                .output_of("ip", &["-j", "link", "show", "dev", VethPair::NIC])
                .contains("\"xdp\"")
        };
        assert!(wait::until(wait::SOON, || !program()), "the program stays");
    }
}

#[test]
fn daemon_ends_with_its_keeper() {
    require!(Root);
    let veth = VethPair::new();
    let mut daemon = Daemon::start(&veth.near, &by_root());
    // Answered once all is set up.
    let pid = daemon.status()["pid"].as_u64().expect("a number");
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("it runs");
    let keeper: i32 = children.trim().parse().expect("one child");
    let keeper = rustix::process::Pid::from_raw(keeper).expect("not zero");
    rustix::process::kill_process(keeper, Signal::KILL).expect("it is our daemon's");
    let status = daemon.process().wait(wait::SOON);
    assert!(
        !status.success() && daemon.said().contains("start the daemon again"),
        "{}",
        daemon.said()
    );
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

/// A daemon that connects to a VMM which listens there.
fn client_of(path: &Path, veth: &VethPair, further: &[&str]) -> Running {
    let mut command = veth.near.command(binary());
    command.args([
        "serve",
        "--control",
        "none",
        "--ifname",
        VethPair::NIC,
        "--client",
    ]);
    command.args(further).arg("--socket-path").arg(path);
    Running::start(command)
}

#[test]
fn vmm_that_nobody_may_connect_to_is_named_with_the_remedy() {
    require!(Root);
    let veth = VethPair::new();
    // A directory of root's: mode 0700.
    let directory = private_dir();
    let path = directory.path().join("vm.sock");
    let _vmm = std::os::unix::net::UnixListener::bind(&path).expect("listens");
    let mut running = client_of(&path, &veth, &[]);
    running.await_text("--user");
    assert!(
        running
            .said()
            .contains("may not be connected to by this user (65534)"),
        "{running}"
    );
}

#[test]
fn root_without_capabilities_reaches_a_vmm_of_roots() {
    require!(Root);
    let veth = VethPair::new();
    let directory = private_dir();
    let path = directory.path().join("vm.sock");
    let vmm = std::os::unix::net::UnixListener::bind(&path).expect("listens");
    vmm.set_nonblocking(true).expect("a socket");
    let running = client_of(&path, &veth, &["--user", "root"]);
    let connected = wait::until_some(wait::SOON, || vmm.accept().ok());
    assert!(connected.is_some(), "{running}");
}
