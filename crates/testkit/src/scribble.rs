//! A VMM whose session goes by the book while what it shares changes all the time: rings, descriptors, headers, the
//! inflight region, the log.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use virtqueue::driver::GuestRam;
use virtqueue::{GuestAddr, Region};

use crate::Noise;
use crate::driver::{F_EVENT_IDX, F_INDIRECT};
use crate::vmm::{LOG, RAM, Shared, Vmm, inflight_bytes};

/// Where the scribbler has the files.
const FILES: [GuestAddr; 3] = [GuestAddr(0), GuestAddr(1 << 40), GuestAddr(2 << 40)];
/// States of the first ring in a split inflight region that say that a chain is under way, and bytes of each
/// (vhost-user, "Inflight I/O tracking": `struct DescStateSplit` behind 16 bytes of header).
const MARKED: u64 = 32;
const STATE: u64 = 16;

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

/// Kinds of sessions: one for each of these, and one for all of them.
pub const KINDS: usize = WHAT.len() + 1;
/// The rings with their indices, the descriptors alone, frames with their headers, the inflight region, the numbers in
/// it by which chains are put into their order, the log.
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

/// The session of that number while the bytes change, each with other ones; `offloads` are features that some of them
/// acknowledge, `frame` is what it sends. Whether the back end went along with all of it.
///
/// # Panics
/// If the back end does not answer, or refuses what does not depend on those bytes.
pub fn session(socket: &Path, (offloads, packed): (u64, bool), frame: &[u8], number: usize) -> bool {
    let mut shared = Shared::new(packed);
    shared.set_frame(frame);
    let further = [0, F_EVENT_IDX, F_INDIRECT | F_EVENT_IDX, offloads];
    shared.features |= further[number % further.len()];
    // Each alone, and all together.
    let what = match number % KINDS {
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
