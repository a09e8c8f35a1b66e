//! Shared bytes that change all the time: rings, descriptors, headers, the inflight region, the log.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rstest::rstest;
use testkit::bystander::come_in_peace;
use testkit::daemon::Placement;
use testkit::driver::{F_EVENT_IDX, F_GUEST_ALL, F_GUEST_CSUM, F_HOST_ALL, F_INDIRECT};
use testkit::vmm::{LOG, RAM, Shared, Vmm, inflight_bytes};
use testkit::{Bystander, Noise, driver, frame, require, soak};
use virtqueue::driver::GuestRam;
use virtqueue::{GuestAddr, Region};

/// Where the scribbler has the files.
const FILES: [GuestAddr; 3] = [GuestAddr(0), GuestAddr(1 << 40), GuestAddr(2 << 40)];
/// States of the first ring in a split inflight region that say that a chain is under way, and bytes of each (vhost-user, "Inflight I/O
/// tracking": `struct DescStateSplit` behind 16 bytes of header).
const MARKED: u64 = 32;
const STATE: u64 = 16;

/// Hostile VMMs at a time, every second one with packed rings, and sessions of each outside a soak. A session mostly waits: for the grace period of the
/// kernel between a socket and the next one on its queue, and for the pause after one that did wrong.
const PORTS: u32 = 4;
const SESSIONS: usize = 14;
/// After so many sessions an honest guest is served in the place of the hostile ones.
const PEACE: usize = 8;

/// A range of a file that is scribbled over: anywhere, or only at every so many bytes.
struct Range {
    file: usize,
    start: u64,
    end: u64,
    stride: u64,
}

const fn anywhere(file: usize, start: u64, end: u64) -> Range {
    Range {
        file,
        start,
        end,
        stride: 1,
    }
}

/// The rings with their indices, the descriptors alone, frames with their headers, the inflight region, the numbers in it by which
/// chains are put into their order, the log.
const WHAT: [Range; 6] = [
    anywhere(0, 0, 0x8000),
    anywhere(0, 0x4000, 0x4400),
    anywhere(0, 1 << 18, 3 << 18),
    anywhere(2, 0, 2048),
    Range {
        file: 2,
        start: STATE + 8,
        end: STATE * (MARKED + 1),
        stride: STATE,
    },
    anywhere(1, 0, LOG),
];

fn mapped(shared: &Shared, packed: bool) -> GuestRam {
    let lens = [RAM, LOG, inflight_bytes(packed)];
    let region = |at: usize| Region {
        guest_addr: FILES[at],
        user_addr: 0,
        len: lens[at],
        file: shared.files()[at].try_clone().expect("a descriptor is left"),
        file_offset: 0,
    };
    GuestRam::from_regions((0..3).map(region).collect()).expect("mapped")
}

/// One session while the bytes change; whether the back end went along with all of it.
fn session(socket: &Path, (placement, packed): (Placement, bool), number: usize) -> bool {
    let mut shared = Shared::new(packed);
    let offloads = match placement {
        Placement::Copy | Placement::SendDirect => F_HOST_ALL | F_GUEST_ALL,
        Placement::Direct => F_HOST_ALL | F_GUEST_CSUM,
    };
    let further = [0, F_EVENT_IDX, F_INDIRECT | F_EVENT_IDX, offloads];
    shared.features |= further[number % further.len()];
    // Each alone, and all together.
    let what = match number % (WHAT.len() + 1) {
        0 => &WHAT[..],
        at => &WHAT[at - 1..at],
    };
    let ram = mapped(&shared, packed);
    for state in 0..MARKED {
        ram.write(GuestAddr(FILES[2].get() + STATE * (state + 1)), &[1]);
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut noise = Noise::new(number as u64 + 1);
            while !stop.load(Ordering::Relaxed) {
                for _ in 0..256 {
                    let range = &what[noise.index(what.len())];
                    let steps = (range.end - range.start - 8) / range.stride;
                    let at = FILES[range.file].get() + range.start + range.stride * noise.below(steps + 1);
                    // Small numbers, too: those that are nearly right come farthest.
                    let value = noise.number() >> noise.below(64);
                    ram.write(GuestAddr(at), &value.to_le_bytes()[..1 + noise.index(8)]);
                }
                // The worker must come to read: there may be few CPUs.
                std::thread::sleep(Duration::from_micros(10));
            }
        });
        let acts = shared.session();
        let done = Vmm::connect(socket).perform(&shared, &acts);
        stop.store(true, Ordering::Relaxed);
        let done = done.expect("answered or closed");
        // What comes before does not depend on what is scribbled over.
        assert!(done >= shared.greeting().len(), "refused in the greeting");
        done == acts.len()
    })
}

#[rstest]
fn scribbling_over_every_shared_byte_harms_nobody_else(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let scene = Bystander::with(placement, PORTS, |serve| match placement {
        Placement::Copy | Placement::SendDirect => serve.offload("all"),
        Placement::Direct => serve,
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
                let socket = scene.socket(1 + port);
                scope.spawn(move || {
                    let sessions = 0..soak::count(SESSIONS, 1000);
                    let whole = sessions.filter(|&number| {
                        let whole = session(&socket, (placement, port % 2 == 1), number);
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
        assert!(done.iter().all(Result::is_ok), "{}", scene.daemon.said());
    });
    scene.assert_unharmed();
}
