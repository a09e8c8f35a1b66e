//! Eventfds of a VMM that does with them what no VMM does.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rstest::rstest;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_setfl};
use testkit::daemon::Placement;
use testkit::vmm::{Shared, Vmm, event};
use testkit::{Bystander, require};

/// The value at which nothing more fits.
const FULL: u64 = u64::MAX - 1;

fn fill(event: &OwnedFd) {
    let _ = rustix::io::write(event, &FULL.to_ne_bytes());
}

fn whole_session(scene: &Bystander, port: u32, shared: &Shared) {
    let acts = shared.session();
    let done = Vmm::connect(&scene.socket(port))
        .perform(shared, &acts)
        .expect("answered");
    assert_eq!(done, acts.len(), "{}", scene.daemon.said());
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
            .await_port(1, "closed", |port| port["last_closed"][0] == "call-blocks");
        scene.await_frames(100);
        stop.store(true, Ordering::Relaxed);
    });
    // The next one is met, and not taken.
    let again = Vmm::connect(&scene.socket(1));
    assert_eq!(again.perform(&shared, &shared.session()).expect("closed"), 0);
    scene.assert_others_unharmed(&[1]);
}
