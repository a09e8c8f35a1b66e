//! Files on a file system of the VMM's own (FUSE), which answers as long as it likes.

use rstest::rstest;
use testkit::bystander::come_in_peace;
use testkit::daemon::Placement;
use testkit::stalled::Role;
use testkit::{
    Bystander, Daemon, Driver, DriverConfig, Layout, NetNs, Serve, Stalled, assert_soon, frame, require, wait,
};

/// The hostile VMM, and its file system.
const PROGRAM: &str = env!("CARGO_BIN_EXE_stalled");
const ROLES: [Role; 3] = [Role::Ram, Role::Log, Role::Inflight];

#[rstest]
fn file_whose_pages_never_come_is_refused_unasked(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root, Fuse);
    let scene = Bystander::new(placement, 1);
    for role in ROLES {
        let mut stalled = Stalled::new(PROGRAM, role, &scene.socket(1));
        assert_eq!(stalled.go(wait::SOON), "refused", "{role:?}");
        // The port notes the end after it has answered.
        let why = || scene.daemon.port(1)["last_closed"]["detail"].to_string();
        assert_soon!(why().contains("memory-files=any"), "{role:?}: {}", why());
        // Closing it is all that the back end may do, which it cannot help; nothing of the file was looked at.
        let asked = stalled.asked_by_others();
        assert!(asked.iter().all(|name| name == "FLUSH"), "{role:?}: {asked:?}");
        drop(stalled);
        come_in_peace(&scene.socket(1));
    }
    scene.assert_unharmed();
}

/// The port whose VMM does that may wait in the kernel, which asks the VMM; no other may, nor what they have in common.
#[rstest]
fn file_system_that_answers_nothing_holds_up_nobody_else(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root, Fuse);
    let mut scene = Bystander::new(placement, 4);
    // Dropped before the daemon, which cannot end while one of them is there.
    let mut held = Vec::new();
    for (port, role) in (1..).zip(ROLES) {
        let mut stalled = Stalled::new(PROGRAM, role, &scene.socket(port));
        stalled.mute();
        let outcome = stalled.go(wait::QUIET);
        assert_ne!(outcome, "accepted", "{role:?}");
        assert_soon!(!stalled.asked_by_others().is_empty(), "{role:?}");
        held.push(stalled);
        // Another guest comes, frames pass, the status is told.
        drop(Driver::connect(&scene.socket(4), &DriverConfig::default()).expect("accepted meanwhile"));
        scene.await_frames(50);
        assert_eq!(scene.daemon.port(0)["connected"], true);
        scene.daemon.process().check();
    }
    for stalled in &held {
        let asked = stalled.asked_by_others();
        assert!(asked.iter().all(|name| name == "FLUSH"), "{asked:?}");
    }
    drop(held);
    scene.assert_unharmed();
}

fn assert_frames_pass(guest: &mut Driver) {
    let pair = &mut guest.pairs[0];
    for _ in 0..50 {
        pair.send(&frame::plain(80, 0x11), Layout::Whole);
        pair.await_sent();
    }
}

/// What `memory-files=any` risks: a worker, if a lane touches the page, else the thread of that port. The other
/// worker's guests go on. Of a log either may be first: the worker with the next frames, or the thread of the port, if
/// that stops the lane before.
#[rstest]
#[case::with_frames_of_a_copy(Role::Buffers, Placement::Copy, true)]
#[case::with_frames_in_place(Role::Buffers, Placement::Direct, true)]
#[case::with_rings(Role::Ram, Placement::Copy, false)]
#[case::as_log(Role::Log, Placement::Copy, false)]
#[case::as_inflight_region(Role::Inflight, Placement::Copy, false)]
fn file_that_is_accepted_and_never_answers_holds_up_one_worker_at_most(
    #[case] role: Role,
    #[case] placement: Placement,
    #[case] always_worker: bool,
) {
    require!(Root, Fuse);
    let netns = NetNs::new("stalled");
    let serve = Serve::null()
        .placement(placement)
        .with("--memory-files", "any")
        .with("--workers", "2");
    let mut daemon = Daemon::start_ports(&netns, &serve, &["queues=1"; 3]);
    let socket = |daemon: &Daemon, port: u32| daemon.path(&format!("port{port}.sock"));
    // The worker with the fewest lanes gets the next one.
    let mut first = Driver::connect(&socket(&daemon, 0), &DriverConfig::default()).expect("accepted");
    let mut stalled = Stalled::new(PROGRAM, role, &socket(&daemon, 1));
    assert_eq!(stalled.go(wait::QUIET), "no answer");
    if always_worker {
        let is_named = || {
            let hangs = daemon.status()["workers"][1]["hangs"].clone();
            hangs.as_str().is_some_and(|hangs| hangs.contains("port1.sock"))
        };
        assert_soon!(is_named(), "{:#}", daemon.status()["workers"]);
        let said = daemon.said();
        assert_eq!(
            said.matches("worker-1 has not finished a round").count(),
            1,
            "{said}"
        );
    }
    daemon.await_port(1, "busy with the VMM", |port| port["busy"].is_string());
    assert_frames_pass(&mut first);
    let mut other =
        Driver::connect(&socket(&daemon, 2), &DriverConfig::default()).expect("accepted meanwhile");
    assert_frames_pass(&mut other);
    assert!(daemon.status()["workers"][0]["hangs"].is_null());
    // The wait has an end with the server; what never came is as if it had been cut off.
    drop(stalled);
    daemon.await_port(1, "over", |port| port["connected"] == false);
    assert_soon!(daemon.status()["workers"][1]["hangs"].is_null());
    assert_eq!(daemon.port(1)["last_closed"]["reason"], "memory-truncated");
    daemon.process().check();
    drop(other);
    come_in_peace(&socket(&daemon, 1));
    come_in_peace(&socket(&daemon, 2));
    assert_frames_pass(&mut first);
}
