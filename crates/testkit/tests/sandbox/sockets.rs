//! The daemon's sockets, and those of VMMs that it connects to: who has them, and who reaches them.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use testkit::daemon::{binary, private_dir};
use testkit::{Running, VethPair, assert_has, require, wait};

#[test]
fn daemon_that_connects_to_vmms_keeps_its_paths_and_says_so() {
    require!(Root);
    let veth = VethPair::new();
    let directory = private_dir();
    let path = directory.path().join("vm.sock");
    let mut running = client_of(&path, &veth, &[]);
    running.await_text("mounts not confined (a port connects to the socket of its VMM (client)");
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
    let program = testkit::program::daemon_in(other.path());
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
    let _vmm = UnixListener::bind(&path).expect("listens");
    let mut running = client_of(&path, &veth, &[]);
    running.await_text("--user");
    assert_has(&running.said(), &["may not be connected to by this user (65534)"]);
}

#[test]
fn vmm_that_comes_later_and_may_not_be_connected_to_is_named() {
    require!(Root);
    let veth = VethPair::new();
    let directory = private_dir();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o711)).expect("ours");
    let path = directory.path().join("vm.sock");
    let mut running = client_of(&path, &veth, &[]);
    running.await_text("no VMM there yet");
    let _vmm = UnixListener::bind(&path).expect("listens");
    running.await_text("may not be connected to by this user (65534)");
}

#[test]
fn root_without_capabilities_reaches_a_vmm_of_roots() {
    require!(Root);
    let veth = VethPair::new();
    let directory = private_dir();
    let path = directory.path().join("vm.sock");
    let vmm = UnixListener::bind(&path).expect("listens");
    vmm.set_nonblocking(true).expect("a socket");
    let running = client_of(&path, &veth, &["--user", "root"]);
    let connected = wait::until_some(wait::SOON, || vmm.accept().ok());
    assert!(connected.is_some(), "{running}");
}
