//! A daemon that runs out of what the system lets it have: who asks for more is refused, and nobody else notices.

use std::path::Path;

use rstest::rstest;
use testkit::bystander::come_in_peace;
use testkit::daemon::Placement;
use testkit::vmm::{Shared, Vmm};
use testkit::{Bystander, Driver, DriverConfig, Serve, holdings, lessor, process, require, wait};

/// As many descriptors as a session needs, unless some that it replaced are still being closed on another thread.
const FEW: usize = 15;
/// More than it can ever need.
const ENOUGH: usize = 90;

/// Sets a soft limit of a process, as its own user.
fn limit((pid, user): (u32, u32), resource: &str, most: usize) {
    let id = user.to_string();
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

/// The limit of a process's descriptors that lets it open so many more. The limit bounds their numbers, not how many
/// there are: some may be high, of what the process inherited, and some between others free.
fn limit_for(pid: u32, more: usize) -> usize {
    let is_free = |number: &usize| !Path::new(&format!("/proc/{pid}/fd/{number}")).exists();
    let last = (0..).filter(is_free).nth(more);
    last.expect("numbers do not end")
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
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut scene = Bystander::new(placement, 1);
    let (pid, socket) = (scene.daemon.process().pid(), scene.socket(1));
    let held = holdings::steady(pid, wait::QUIET).descriptors;
    // One number that looks free is taken: a thread that waits in accept(2) for who asks for the status has it already
    // (net/socket.c, `__sys_accept4_file`). With one more the connection is accepted, and with none it waits.
    let whole: Vec<_> = (2..=FEW)
        .chain([ENOUGH])
        .map(|more| {
            limit((pid, lessor::ID), "nofile", limit_for(pid, more));
            let whole = whole_session(&socket, more % 2 == 0);
            limit((pid, lessor::ID), "nofile", 1000);
            come_in_peace(&socket);
            let ended = || holdings::of(pid).descriptors <= held;
            assert!(wait::until(wait::SOON, ended), "its session has not ended");
            whole
        })
        .collect();
    assert!(!whole[0] && whole[FEW - 1], "{whole:?}");
    scene.await_frames(20);
    scene.assert_unharmed();
}

#[rstest]
fn daemon_that_may_start_no_thread_serves_as_ever(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut scene = Bystander::new(placement, 2);
    limit((scene.daemon.process().pid(), lessor::ID), "nproc", 1);
    assert!([1, 2].map(|port| whole_session(&scene.socket(port), port == 1)) == [true; 2]);
    scene.await_frames(20);
    scene.assert_unharmed();
}

#[rstest]
fn steward_without_descriptors_refuses_who_asks_and_harms_nobody_else(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let scene = Bystander::with(placement, 1, Serve::leased);
    let steward = scene.daemon.lessor.as_ref().expect("leased").steward.pid();
    let limits = [0, 1, 2].map(|more| limit_for(steward, more));
    for (more, most) in limits.into_iter().enumerate() {
        limit((steward, 0), "nofile", most);
        let vmm = Driver::connect(&scene.socket(1), &DriverConfig::default()).expect("accepted");
        let impaired = &scene.daemon.port(1)["impaired"];
        match placement {
            // Its queue has been open from the start on: nobody is asked for a socket.
            Placement::Copy => assert!(impaired.is_null(), "{impaired}"),
            _ if more == 0 => {
                let why = impaired.as_str().expect("impaired");
                assert!(why.contains("Too many open files"), "{why}");
            }
            _ => {}
        }
        limit((steward, 0), "nofile", 1000);
        scene.daemon.await_recovered(1);
        drop(vmm);
    }
    scene.await_frames(20);
    scene.assert_unharmed();
}
