//! Shared bytes that change all the time: rings, descriptors, headers, the inflight region, the log.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rstest::rstest;
use testkit::bystander::come_in_peace;
use testkit::daemon::Placement;
use testkit::driver::{F_GUEST_ALL, F_GUEST_CSUM, F_HOST_ALL};
use testkit::{Bystander, driver, frame, require, scribble, soak};

/// Hostile VMMs at a time, every second one with packed rings, and sessions of each outside a soak. A session mostly
/// waits: for the grace period of the kernel between a socket and the next one on its queue, and for the pause after
/// one that did wrong.
const PORTS: u32 = 4;
const SESSIONS: usize = scribble::KINDS;
/// After so many sessions an honest guest is served in the place of the hostile ones.
const PEACE: usize = SESSIONS - 1;

#[rstest]
fn scribbling_over_every_shared_byte_harms_nobody_else(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct, Placement::Tap)] placement: Placement,
) {
    require!(Root);
    let offloads = match placement {
        Placement::Direct => F_HOST_ALL | F_GUEST_CSUM,
        _ => F_HOST_ALL | F_GUEST_ALL,
    };
    let scene = Bystander::with(placement, PORTS, |serve| match placement {
        Placement::Direct => serve,
        _ => serve.offload("all"),
    });
    let wire = scene.hostile_wire();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Frames for the hostile guests, so that their receive rings are used.
        scope.spawn(|| {
            let mut flow = 0;
            while !stop.load(Ordering::Relaxed) {
                flow = (flow + 1) % 64;
                let _ = wire.try_send(&frame::udp(flow, 100));
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        let sessions: Vec<_> = (0..PORTS)
            .map(|port| {
                let (socket, frame) = (scene.socket(1 + port), frame::plain(frame::NUMBERED, 0x77));
                scope.spawn(move || {
                    let sessions = 0..soak::count(SESSIONS, 1000);
                    let whole = sessions.filter(|&number| {
                        let whole = scribble::session(&socket, (offloads, port % 2 == 1), &frame, number);
                        match number % PEACE {
                            0 => come_in_peace(&socket),
                            // Who came once and did no wrong is met without a pause the next time.
                            _ => drop(driver::connect(&socket)),
                        }
                        whole
                    });
                    assert!(whole.count() > 0, "no session comes to its end: they show little");
                })
            })
            .collect();
        let done: Vec<_> = sessions
            .into_iter()
            .map(std::thread::ScopedJoinHandle::join)
            .collect();
        stop.store(true, Ordering::Relaxed);
        assert!(done.iter().all(Result::is_ok));
    });
    scene.assert_unharmed();
}
