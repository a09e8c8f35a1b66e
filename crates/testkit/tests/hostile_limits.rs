//! A daemon that runs out of what the system lets it have: who asks for more is refused, and nobody else notices.

use std::path::Path;

use rstest::rstest;
use testkit::bystander::come_in_peace;
use testkit::daemon::Placement;
use testkit::vmm::{Shared, Vmm};
use testkit::{Bystander, holdings, lessor, process, require};

/// More descriptors than a session needs.
const ENOUGH: usize = 14;

/// Sets a soft limit of a daemon, as its own user.
fn limit(pid: u32, resource: &str, most: usize) {
    let id = lessor::ID.to_string();
    let of = [
        "--reuid",
        &id,
        "--regid",
        &id,
        "--clear-groups",
        "prlimit",
        "--pid",
    ];
    let what = format!("--{resource}={most}:");
    process::run("setpriv", &[&of[..], &[&pid.to_string(), &what]].concat());
}

/// A whole session, as far as it is let; whether that was to its end.
fn whole_session(socket: &Path, packed: bool) -> bool {
    let shared = Shared::new(packed);
    let acts = shared.session();
    let done = Vmm::connect(socket).perform(&shared, &acts);
    done.expect("answered or refused") == acts.len()
}

#[rstest]
fn session_without_descriptors_is_refused_at_each_step_and_harms_nobody_else(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut scene = Bystander::new(placement, 1);
    let (pid, socket) = (scene.daemon.process().pid(), scene.socket(1));
    let held = holdings::of(pid).descriptors;
    // With one more the connection is accepted, and with none it waits.
    let whole: Vec<_> = (1..=ENOUGH)
        .map(|more| {
            limit(pid, "nofile", held + more);
            let whole = whole_session(&socket, more % 2 == 0);
            limit(pid, "nofile", held + 100);
            come_in_peace(&socket);
            whole
        })
        .collect();
    assert!(!whole[0] && whole[ENOUGH - 1], "{whole:?}");
    scene.await_frames(20);
    scene.assert_unharmed();
}

#[rstest]
fn daemon_that_may_start_no_thread_serves_as_ever(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut scene = Bystander::new(placement, 2);
    limit(scene.daemon.process().pid(), "nproc", 1);
    assert!([1, 2].map(|port| whole_session(&scene.socket(port), port == 1)) == [true; 2]);
    scene.await_frames(20);
    scene.assert_unharmed();
}
