//! What the sandbox stops, layer by layer.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;

use testkit::daemon::private_dir;
use testkit::{Daemon, Running, VethPair, assert_has, require, wait};

use super::{attempt, attempting, by_root, open_to_everybody};

/// SIGSYS, on all machines that Linux runs on but MIPS and Alpha.
const SIGSYS: i32 = 31;

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

/// What the sandbox ends a process for, a line a kind.
const ENDED_FOR: [&str; 7] = [
    "create:/tmp/vhost-af-xdp-attempt remove:/tmp/x chmod:/tmp chown:/tmp mkdir:/tmp/x chroot:/ execute:/bin/true",
    "socket:17 socket:16 socket:2 socket:44 socket:40 tcp netlink root mount namespace enter-namespace bpf bpf-map",
    "trace:1 memory-of:1 kill:1 signal-thread-of:1 limit:1 process executable-memory own-handler dumpable ioctl \
     owner:1 io-uring",
    // Bind, interleave, local, many preferred, weights (MPOL_…, include/uapi/linux/mempolicy.h); preferred with flags.
    "memory-policy:2 memory-policy:3 memory-policy:4 memory-policy:5 memory-policy:6 memory-policy:8193 \
     memory-policy:16385 memory-policy:32769",
    // MPOL_F_NODE, MPOL_F_ADDR, MPOL_F_MEMS_ALLOWED.
    "policy-question:1 policy-question:2 policy-question:4 pages-of:1 move-pages",
    // SO_ATTACH_FILTER, SO_ATTACH_BPF, SO_ATTACH_REUSEPORT_EBPF, SO_BINDTODEVICE, SO_MARK; SO_PEERPIDFD.
    "set-option:26 set-option:50 set-option:52 set-option:25 set-option:36 get-option:77",
    // XDP_RX_RING, XDP_UMEM_REG, XDP_UMEM_FILL_RING: what the steward does.
    "set-xdp-option:2 set-xdp-option:4 set-xdp-option:5",
];

#[test]
fn call_that_is_not_in_the_table_ends_the_process() {
    require!(Root);
    for name in ENDED_FOR.iter().flat_map(|kind| kind.split(' ')) {
        assert_killed(name, &[]);
        // By itself, too.
        assert_killed(name, &["--sandbox", "calls"]);
    }
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
    assert!(daemon.said().contains("sandbox: files off by --sandbox"));
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
    assert_has(&said, &["panicked at", "as was asked for"]);
    assert!(
        said.contains("sandbox_attempt::attempt"),
        "no names in the backtrace: {said}"
    );
    let (status, said) = attempt("abort", &[]);
    assert_eq!(status.signal(), Some(6), "SIGABRT: {said}");
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
