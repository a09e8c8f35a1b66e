//! Eventfds of a VMM that does with them what no VMM does.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rstest::rstest;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::Signal;
use testkit::bystander::come_in_peace;
use testkit::daemon::Placement;
use testkit::vmm::{POSTED, Shared, Vmm, event, longs, words};
use testkit::{Bystander, Serve, frame, message, require, wait};
use vhost::vhost_user::message::FrontendReq;

/// The value at which nothing more fits.
const FULL: u64 = u64::MAX - 1;

fn fill(event: &OwnedFd) {
    // What was counted so far; nothing, if it does not block.
    let _ = rustix::io::read(event, &mut [0; 8]);
    let _ = rustix::io::write(event, &FULL.to_ne_bytes());
}

fn whole_session(scene: &Bystander, port: u32, shared: &Shared) {
    let acts = shared.session();
    let done = Vmm::connect(&scene.socket(port))
        .perform(shared, &acts)
        .expect("answered");
    assert_eq!(done, acts.len());
}

#[rstest]
fn shared_crossed_counting_and_exhausted_eventfds_harm_nobody_else(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let scene = Bystander::new(placement, 2);
    let again = |event: &OwnedFd| event.try_clone().expect("a descriptor is left");
    // Call is kick: of the same vring, of the other one.
    for events in [[0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]] {
        let mut shared = Shared::new(false);
        let own = [0, 1, 2, 3].map(|_| event());
        shared.events = events.map(|at: usize| again(&own[at]));
        whole_session(&scene, 1, &shared);
    }
    // Of two ports at the same time.
    let (first, mut second) = (Shared::new(false), Shared::new(false));
    second.events = [0, 1, 2, 3].map(|at: usize| again(&first.events[at]));
    std::thread::scope(|scope| {
        scope.spawn(|| whole_session(&scene, 1, &first));
        scope.spawn(|| whole_session(&scene, 2, &second));
    });
    // Semaphores; counters that are full before they are passed, and that stay so.
    let mut semaphores = Shared::new(false);
    semaphores.events = [0; 4].map(|initial| {
        let flags = EventfdFlags::SEMAPHORE | EventfdFlags::CLOEXEC;
        eventfd(initial, flags).expect("a descriptor is left")
    });
    whole_session(&scene, 1, &semaphores);
    let full = Shared::new(false);
    full.events.iter().for_each(fill);
    whole_session(&scene, 2, &full);
    scene.assert_unharmed();
}

/// As User-mode Linux has its calls: read, never read and full, or closed at the other end.
#[test]
fn calls_go_to_a_socket_and_a_full_or_closed_one_holds_up_nobody() {
    require!(Root);
    let scene = Bystander::new(Placement::Copy, 1);
    for (full, closed) in [(false, false), (true, false), (false, true)] {
        let (mut theirs, ours) = UnixStream::pair().expect("a descriptor is left");
        ours.set_nonblocking(true).expect("it is ours");
        while full && rustix::io::write(&ours, &0u64.to_ne_bytes()).is_ok() {}
        ours.set_nonblocking(false).expect("it is ours");
        let ours = OwnedFd::from(ours);
        let mut shared = Shared::new(false);
        for call in 2..4 {
            shared.events[call] = ours.try_clone().expect("a descriptor is left");
        }
        if closed {
            theirs = UnixStream::pair().expect("a descriptor is left").0;
        }
        whole_session(&scene, 1, &shared);
        if !full && !closed {
            theirs.set_read_timeout(Some(wait::SOON)).expect("not zero");
            let mut call = [0; 8];
            theirs.read_exact(&mut call).expect("a call");
            assert_eq!(u64::from_ne_bytes(call), 1);
        }
        scene.await_frames(100);
    }
    scene.assert_unharmed();
}

/// A pipe's reader copies under the lock that its writer takes (fs/pipe.c).
#[test]
fn pipe_for_calls_is_taken_from_a_trusted_vmm_alone() {
    require!(Root);
    for files in ["shared", "any"] {
        let scene = Bystander::with(Placement::Copy, 1, |serve| serve.with("--memory-files", files));
        let (_reader, writer) = std::io::pipe().expect("a descriptor is left");
        let writer = OwnedFd::from(writer);
        let mut shared = Shared::new(false);
        for call in 2..4 {
            shared.events[call] = writer.try_clone().expect("a descriptor is left");
        }
        fcntl_setfl(&writer, OFlags::NONBLOCK).expect("it is ours");
        // Nobody reads it.
        while rustix::io::write(&writer, &[0; 512]).is_ok() {}
        if files == "any" {
            whole_session(&scene, 1, &shared);
        } else {
            let vmm = Vmm::connect(&scene.socket(1));
            let acts = shared.session();
            assert!(vmm.perform(&shared, &acts).expect("answered") < acts.len());
            drop(vmm);
            scene
                .daemon
                .await_that(|| scene.daemon.said().contains("call descriptor is a pipe"));
        }
        come_in_peace(&scene.socket(1));
        scene.assert_unharmed();
    }
}

/// The flag belongs to the open file, which the VMM has, too.
#[rstest]
fn call_eventfd_that_is_made_to_block_costs_its_port_and_nobody_else(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let scene = Bystander::new(placement, 2);
    let shared = Shared::new(false);
    let stop = AtomicBool::new(false);
    let calls = &shared.events[2..];
    calls.iter().for_each(fill);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for call in calls {
                    // Set by the daemon when it gets them.
                    fcntl_setfl(call.as_fd(), OFlags::RDWR).expect("it is ours");
                }
                std::thread::sleep(Duration::from_micros(50));
            }
        });
        let vmm = Vmm::connect(&scene.socket(1));
        let mut acts = shared.session();
        // It stays, and its guest goes on to send.
        acts.truncate(acts.len() - 2);
        let _ = vmm.perform(&shared, &acts);
        scene
            .daemon
            .await_port(1, "closed", |port| port["last_closed"]["reason"] == "call-blocks");
        scene.await_frames(100);
        stop.store(true, Ordering::Relaxed);
    });
    // The next one is met, and not taken.
    let again = Vmm::connect(&scene.socket(1));
    assert_eq!(again.perform(&shared, &shared.session()).expect("closed"), 0);
    scene.assert_others_unharmed(&[1]);
}

/// 90,000 waiters for this eventfd, all of whom the kernel goes through at each write; there as long as the result is.
fn wait_for(event: &OwnedFd) -> [Vec<OwnedFd>; 2] {
    let waiter = || epoll::create(epoll::CreateFlags::CLOEXEC).expect("a descriptor is left");
    // What an epoll tells apart is descriptors.
    let again = || event.try_clone().expect("a descriptor is left");
    let waiters: Vec<_> = (0..300).map(|_| waiter()).collect();
    let events: Vec<_> = (0..300).map(|_| again()).collect();
    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
    for waiter in &waiters {
        for event in &events {
            let added = epoll::add(waiter, event, epoll::EventData::new_u64(0), flags);
            added.expect("fewer than fs.epoll.max_user_watches");
        }
    }
    [waiters, events]
}

/// They take some 10 ms a call; more take more.
#[test]
fn call_eventfd_with_many_waiters_costs_its_port_and_nobody_else() {
    require!(Root);
    let scene = Bystander::new(Placement::Copy, 1);
    let shared = Shared::new(false);
    let vmm = Vmm::connect(&scene.socket(1));
    let mut acts = shared.session();
    acts.truncate(acts.len() - 2);
    assert_eq!(vmm.perform(&shared, &acts).expect("answered"), acts.len());
    let _waiters = wait_for(&shared.events[2]);
    let wire = scene.hostile_wire();
    shared.repost();
    for seed in 0..2 * POSTED {
        wire.send(&frame::plain(60, seed as u8));
        // A call for each, until there is nobody to make it.
        let is_closed = || !scene.daemon.port(1)["last_closed"].is_null();
        assert!(wait::until(wait::SOON, || shared.received() > seed || is_closed()));
    }
    scene
        .daemon
        .await_port(1, "closed", |port| port["last_closed"]["reason"] == "call-blocks");
    scene.assert_others_unharmed(&[1]);
}

/// A write to it waits from now on.
fn block(event: &OwnedFd) {
    fill(event);
    fcntl_setfl(event.as_fd(), OFlags::RDWR).expect("it is ours");
}

/// A session with frames for which it has no buffers until just before its lane is stopped: those are delivered by the
/// thread that stops it, and the call for them blocks.
fn session_that_ends_badly(scene: &Bystander, shared: &Shared) -> Vmm {
    let vmm = Vmm::connect(&scene.socket(1));
    let mut acts = shared.session();
    acts.truncate(acts.len() - 2);
    let done = vmm.perform(shared, &acts).expect("answered");
    assert_eq!(done, acts.len());
    let wire = scene.hostile_wire();
    for seed in 0..2 * POSTED {
        wire.send(&frame::plain(60, seed as u8));
    }
    assert!(wait::until(wait::SOON, || shared.received() == POSTED));
    // The lane waits for buffers, and is not told that they come; it has a worker of its own, who sleeps.
    wait::a_moment();
    shared.events[2..].iter().for_each(block);
    shared.repost();
    vmm
}

/// How a lane is stopped.
#[derive(Clone, Copy, Debug)]
enum End {
    Base,
    Features,
    Size,
    Disconnect,
}

/// With a worker for each of the two, so that nobody comes by.
fn two_workers(serve: Serve) -> Serve {
    serve.with("--workers", "2")
}

/// It is written to by the port's own thread, which has the port's lock then.
#[rstest]
fn call_eventfd_that_blocks_when_its_lane_is_stopped_costs_its_port_and_nobody_else(
    #[values(End::Base, End::Features, End::Size, End::Disconnect)] end: End,
) {
    require!(Root);
    let scene = Bystander::with(Placement::Copy, 1, two_workers);
    let shared = Shared::new(false);
    let vmm = session_that_ends_badly(&scene, &shared);
    let say = |request, payload| message::try_send(vmm.socket(), request, payload, &[]).expect("it listens");
    match end {
        End::Base => say(FrontendReq::GET_VRING_BASE, &words([1, 0])),
        End::Features => say(FrontendReq::SET_FEATURES, &longs([1 << 32])),
        End::Size => say(FrontendReq::SET_VRING_NUM, &words([1, 32])),
        End::Disconnect => drop(vmm),
    }
    scene
        .daemon
        .await_port(1, "closed", |port| port["last_closed"]["reason"] == "call-blocks");
    assert_eq!(shared.received(), 2 * POSTED);
    scene.assert_others_unharmed(&[1]);
}

#[test]
fn daemon_ends_in_time_although_a_call_eventfd_blocks() {
    require!(Root);
    let mut scene = Bystander::with(Placement::Copy, 1, two_workers);
    let shared = Shared::new(false);
    let _vmm = session_that_ends_badly(&scene, &shared);
    scene.daemon.process().signal(Signal::TERM);
    scene.daemon.process().wait(wait::SOON);
    let said = scene.daemon.said();
    assert!(!said.contains("does not stop"), "{said}");
}

/// Written to when the guest has done wrong; the port is there for another then.
#[test]
fn error_eventfd_that_blocks_holds_up_nobody() {
    require!(Root);
    let scene = Bystander::new(Placement::Copy, 1);
    let (shared, error) = (Shared::new(false), event());
    let vmm = Vmm::connect(&scene.socket(1));
    let mut acts = shared.session();
    acts.truncate(acts.len() - 2);
    assert_eq!(vmm.perform(&shared, &acts).expect("answered"), acts.len());
    assert!(vmm.says(FrontendReq::SET_VRING_ERR, &longs([1]), &[error.as_fd()]));
    block(&error);
    shared.jump();
    scene.daemon.await_port(1, "closed", |port| {
        port["last_closed"]["reason"] == "avail-index-jump"
    });
    come_in_peace(&scene.socket(1));
    scene.assert_unharmed();
}
