//! Eventfds of a VMM that does with them what no VMM does.

use std::os::fd::OwnedFd;

use rstest::rstest;
use rustix::event::{EventfdFlags, eventfd};
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
