//! Memory for packets that does not do: said at the start, with the sum that does, or borne while a guest is there.
//!
//! Daemons of a user of this test's own, to whom the policy gives little; the limit of their processes is next to
//! nothing, which is of no matter: the steward pins their memory.

use std::os::unix::fs::{PermissionsExt, chown};
use std::process::Command;

use rustix::process::Signal;
use testkit::daemon::{Placement, private_dir};
use testkit::driver::region_info;
use testkit::{
    Daemon, Driver, DriverConfig, Layout, Lessor, PacketPort, Serve, VethPair, frame, require, wait,
};
use vhost::vhost_user::VhostUserFrontend;
use virtqueue::GuestAddr;
use virtqueue::driver::GuestRam;

/// Nobody else's, and no other test's that runs beside this one.
fn user() -> u32 {
    1_000_000 + std::process::id()
}

/// What processes of the user may lock themselves, bytes.
const LIMIT: u64 = 4096;

/// A steward that gives this user queues and little memory, and the directory of its socket.
fn lease_with_little_memory(veth: &VethPair) -> (Lessor, tempfile::TempDir) {
    let dir = private_dir();
    let mut lessor = Lessor::start(&veth.near, &dir, &[VethPair::NIC]);
    let policy = format!(
        "[limits]\nunbound-sockets = true\n[[allow]]\nuser = {}\ninterface = \"{}\"\nqueues = \"all\"\nmemlock = \"8 MiB\"\n",
        user(),
        VethPair::NIC
    );
    lessor.change_policy(&policy);
    lessor.steward.signal(Signal::INT);
    lessor.steward.wait(wait::SOON);
    lessor.restart(&veth.near, &dir);
    (lessor, dir)
}

/// A daemon of that user.
fn daemon(veth: &VethPair, steward: &tempfile::TempDir, serve: Serve) -> Daemon {
    let dir = private_dir();
    chown(dir.path(), Some(user()), Some(user())).expect("we are root");
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).expect("we are root");
    let program = testkit::program::daemon_in(dir.path());
    let mut command: Command = veth.near.command("prlimit");
    let user = user().to_string();
    command
        .arg(format!("--memlock={LIMIT}:{LIMIT}"))
        .args(["setpriv", "--reuid", &user, "--regid", &user, "--clear-groups"])
        .args([
            "--inh-caps",
            "-all",
            "--ambient-caps",
            "-all",
            "--bounding-set",
            "-all",
        ])
        .args(["--no-new-privs", "--pdeathsig", "KILL"])
        .arg(program);
    let path = Lessor::socket(steward);
    Daemon::spawn_by(
        command,
        dir,
        &serve.with("--steward", path.to_str().expect("ASCII")),
    )
}

/// Two queues need 12 MiB together, and each alone less than 8.
#[test]
fn limit_that_does_for_one_queue_and_not_for_all_is_said_at_the_start() {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let (_lessor, steward) = lease_with_little_memory(&veth);
    let serve = Serve::interface(VethPair::NIC).with("--queues", "2");
    daemon(&veth, &steward, serve).assert_complains(&["12288 KiB", "`memlock`"]);
    let daemon = daemon(&veth, &steward, Serve::interface(VethPair::NIC));
    let mut daemon = daemon;
    daemon.await_listening();
    daemon.await_ready();
}

/// A daemon that will lock a guest's memory, and, started after it, one that has 6 MiB of the 8 as long as it runs.
fn direct_and_other(veth: &VethPair, steward: &tempfile::TempDir) -> (Daemon, Daemon) {
    let serve = |queue: &str| Serve::interface(VethPair::NIC).with("--start-queue", queue);
    let start = |serve| {
        let mut daemon = daemon(veth, steward, serve);
        daemon.await_listening();
        daemon.await_ready();
        daemon
    };
    let direct = start(serve("0").placement(Placement::Direct));
    let other = start(serve("1"));
    (direct, other)
}

#[test]
fn vmm_stays_while_another_daemon_has_the_memory_and_is_served_when_that_is_gone() {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let (lessor, steward) = lease_with_little_memory(&veth);
    let (two, one) = direct_and_other(&veth, &steward);
    // QEMU would come back at once, and its guest stand still meanwhile.
    let mut second = Driver::connect(&two.socket(), &DriverConfig::small())
        .expect("accepted, although there is no memory for it");
    two.await_impaired(0, "`memlock`");
    assert_eq!(two.port(0)["connected"], true);
    // It is retried, with longer and longer pauses (`program::backoff`).
    let refused = || {
        let said = lessor.steward.said();
        said.lines().filter(|line| line.contains("memlock")).count()
    };
    assert!(wait::until(wait::SOON, || refused() >= 3), "{}", refused());
    drop(one);
    assert_serves(&veth, &two, &mut second);
}

/// Its first port runs, and a frame of the guest's goes out, in the session that it has had all the while.
#[track_caller]
fn assert_serves(veth: &VethPair, daemon: &Daemon, guest: &mut Driver) {
    daemon.await_port(0, "runs", |port| {
        port["lanes"][0]["running"] == true && port["impaired"].is_null()
    });
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let sent = frame::plain(100, 1);
    guest.pairs[0].send(&sent, Layout::Whole);
    frame::assert_same(&wire.receive(wait::SOON).expect("it arrives"), &sent);
    assert_eq!(daemon.port(0)["sessions"], 1);
}

/// Its memory can be locked no more, nor what copying takes: the pair waits.
#[test]
fn guest_that_is_given_memory_stays_while_another_daemon_has_what_may_be_locked() {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let (_lessor, steward) = lease_with_little_memory(&veth);
    let (direct, other) = direct_and_other(&veth, &steward);
    // With what is behind it 1.75 MiB, beside the other's 6.
    let small = DriverConfig {
        regions: vec![(GuestAddr(0), 1 << 20)],
        ..DriverConfig::small()
    };
    let mut guest = Driver::connect(&direct.socket(), &small).expect("accepted");
    direct.await_port(0, "runs", |port| port["lanes"][0]["running"] == true);
    let more = GuestRam::new(&[(GuestAddr(1 << 30), 4 << 20)]).expect("memory");
    let regions = more.regions().expect("regions");
    let added = guest.frontend().add_mem_region(&region_info(&regions[0]));
    added.expect("that there is no memory to lock is not the VMM's fault");
    direct.await_impaired(0, "`memlock`");
    assert_eq!(direct.port(0)["connected"], true);
    drop(other);
    assert_serves(&veth, &direct, &mut guest);
}
