//! The daemon's sandbox: what must fail is tried, from within, and what must work is seen to work.
//!
//! `sandbox_attempt` (crates/vhost-af-xdp/examples) is the daemon up to its sandbox, by the same code; there it tries one
//! thing on a thread of its own. How it ended tells which layer stopped it: by SIGSYS (`calls`), or with an error of the
//! kernel's.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus};

use rstest::rstest;
use rustix::process::Signal;
use tempfile::TempDir;
use testkit::daemon::{Mode, Placement, binary, private_dir, sandbox_attempt};
use testkit::{Daemon, DriverConfig, Lessor, Rig, Running, Serve, VethPair, require, wait};

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
    let mut command = attempting(name, &directory);
    command.args(options);
    let mut running = Running::start(command);
    let status = running.wait(wait::SOON);
    (status, running.said())
}

fn attempting(name: &str, directory: &TempDir) -> Command {
    let mut command = Command::new(sandbox_attempt());
    command.args([name, "--null", "--control", "none"]);
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

#[test]
fn memory_may_be_preferred_from_a_node_and_asked_about() {
    require!(Root);
    if !Path::new("/sys/devices/system/node").exists() {
        println!("SKIPPED: no NUMA in this kernel");
        return;
    }
    // No policy, and a preferred node.
    for name in [
        "memory-policy:0",
        "memory-policy:1",
        "policy-question:0",
        "pages-of:0",
    ] {
        let (status, said) = attempt(name, &[]);
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
        "io-uring",
        // Bind, interleave, local, many preferred, weights (MPOL_…, include/uapi/linux/mempolicy.h); preferred with flags.
        "memory-policy:2",
        "memory-policy:3",
        "memory-policy:4",
        "memory-policy:5",
        "memory-policy:6",
        "memory-policy:8193",
        "memory-policy:16385",
        "memory-policy:32769",
        // MPOL_F_NODE, MPOL_F_ADDR, MPOL_F_MEMS_ALLOWED.
        "policy-question:1",
        "policy-question:2",
        "policy-question:4",
        "pages-of:1",
        "move-pages",
        // SO_ATTACH_FILTER, SO_ATTACH_BPF, SO_ATTACH_REUSEPORT_EBPF, SO_BINDTODEVICE, SO_MARK; SO_PEERPIDFD.
        "set-option:26",
        "set-option:50",
        "set-option:52",
        "set-option:25",
        "set-option:36",
        "get-option:77",
        // XDP_RX_RING, XDP_UMEM_REG, XDP_UMEM_FILL_RING: what the steward does.
        "set-xdp-option:2",
        "set-xdp-option:4",
        "set-xdp-option:5"
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
    let mut command = attempting("panic", &directory);
    command.env("RUST_BACKTRACE", "1");
    let mut running = Running::start(command);
    let (status, said) = (running.wait(wait::SOON), running.said());
    assert_ne!(status.signal(), Some(SIGSYS), "{said}");
    assert!(
        said.contains("panicked at") && said.contains("as was asked for"),
        "{said}"
    );
    assert!(
        said.contains("sandbox_attempt::attempt"),
        "no names in the backtrace: {said}"
    );
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
    assert_refused("read:/etc/passwd", &["--sandbox=-mounts"], "Permission denied");
    // And where it stays out, the empty root is another reason.
    assert_refused("read:/etc/passwd", &["--sandbox=-files"], "No such file");
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

/// A socket that everybody may connect to, at a path that everybody may look at.
fn open_to_everybody() -> (TempDir, std::os::unix::net::UnixListener, String) {
    let directory = private_dir();
    let path = directory.path().join("everybody.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).expect("listens");
    for (path, mode) in [(directory.path(), 0o755), (&*path, 0o777)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("ours");
    }
    let path = path.to_str().expect("UTF-8").to_owned();
    (directory, listener, path)
}

#[test]
fn no_socket_outside_can_be_connected_to_by_its_path() {
    require!(Root);
    let (_directory, _listener, path) = open_to_everybody();
    for way in ["connect", "connect-from-descriptors"] {
        let (status, said) = attempt(&format!("{way}:{path}"), &["--sandbox=-mounts"]);
        assert!(status.success(), "else the rest proves nothing: {way}, {said}");
    }
    for options in [[].as_slice(), &["--sandbox", "mounts"]] {
        for way in [
            format!("connect:{path}"),
            format!("connect-from-descriptors:{path}"),
            format!("connect:/proc/self/root{path}"),
            format!("connect:/proc/self/cwd{path}"),
            format!("connect:/proc/{}/root{path}", std::process::id()),
            format!("connect:/proc/1/root{path}"),
        ] {
            assert_refused(&way, options, "o such file or directory");
        }
    }
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
    let lessor = daemon.lessor.as_mut().expect("leased");
    lessor.steward.signal(Signal::TERM);
    lessor.steward.wait(wait::SOON);
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
fn daemon_that_connects_to_vmms_keeps_its_paths_and_says_so() {
    require!(Root);
    let veth = VethPair::new();
    let directory = private_dir();
    let path = directory.path().join("vm.sock");
    let mut running = client_of(&path, &veth, &[]);
    running.await_text("mounts not confined (--client connects");
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
    // linux/capability.h: NET_ADMIN 12, NET_RAW 13, IPC_LOCK 14, SETUID 7, BPF 39; DAC_OVERRIDE 1, SYS_PTRACE 19.
    let steward = (1 << 12) | (1 << 13) | (1 << 14) | (1 << 7) | (1 << 39);
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

#[test]
fn each_port_has_a_socket_of_its_own_owner_group_and_mode() {
    require!(Root);
    let directory = private_dir();
    let path = |name: &str| directory.path().join(name);
    let mut command = Command::new(binary());
    command.args(["serve", "--null", "--control", "none"]);
    let port = |name: &str, access: &str| format!("--port=socket-path={}{access}", path(name).display());
    command.arg(port("own", ""));
    command.arg(port("group", ",socket-group=5678"));
    command.arg(port(
        "all",
        ",socket-owner=1234,socket-group=5678,socket-mode=620",
    ));
    let mut running = Running::start(command);
    running.await_text("ready");
    for (name, is) in [
        ("own", (0, 0, 0o600)),
        ("group", (0, 5678, 0o660)),
        ("all", (1234, 5678, 0o620)),
    ] {
        let socket = std::fs::metadata(path(name)).expect("it listens");
        assert_eq!((socket.uid(), socket.gid(), socket.mode() & 0o7777), is, "{name}");
    }
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o777)).expect("ours");
    for (name, gid, connects) in [
        ("own", "5678", false),
        ("group", "5678", true),
        ("group", "9999", false),
        ("all", "5678", true),
    ] {
        // What connect(2) asks for.
        let mut client = Command::new("setpriv");
        client
            .args(["--reuid", "4321", "--regid", gid, "--clear-groups", "test", "-w"])
            .arg(path(name));
        let output = client.output().expect("it runs");
        assert_eq!(
            output.status.success(),
            connects,
            "{name} by group {gid}: {output:?}"
        );
    }
    // Who is not root gives a socket to nobody, and leaves none behind.
    let other = private_dir();
    std::fs::set_permissions(other.path(), std::fs::Permissions::from_mode(0o777)).expect("ours");
    let program = other.path().join("vhost-af-xdp");
    std::fs::copy(binary(), &program).expect("a program");
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid", "4321", "--regid", "4321", "--clear-groups"])
        .arg(program);
    command.args([
        "serve",
        "--null",
        "--control",
        "none",
        "--socket-group",
        "5678",
        "--socket-path",
    ]);
    command.arg(other.path().join("vm.sock"));
    let mut running = Running::start(command);
    let status = running.wait(wait::SOON);
    assert!(
        !status.success() && running.said().contains("may not be given to group 5678"),
        "{running}"
    );
    assert!(!other.path().join("vm.sock").exists());
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
