//! What it costs a worker to count what `workers` tells: nanoseconds a frame, for batches of some sizes, beside the
//! same loop without counting.
//!
//!     cargo run --release -p device --example meter_cost
//!
//! A batch that is forwarded is counted once as taken and once as given, with one call of the kernel; each frame of it
//! once as looked up, where there are filter rules. That the worker reads a clock each round is not in it: see
//! docs/benchmarks.md.

use std::hint::black_box;
use std::time::{Duration, Instant};

use device::meter::{self, KernelCall};

const FRAMES: usize = 1_000_000;
/// Tries, of which the best counts: the machine may do other things, too.
const TRIES: usize = 30;

/// Nanoseconds a frame.
fn best(batch: usize, mut round: impl FnMut(usize)) -> f64 {
    let tries = (0..TRIES).map(|_| {
        let begun = Instant::now();
        for _ in 0..FRAMES / batch {
            round(black_box(batch));
        }
        begun.elapsed()
    });
    let best = tries.min().unwrap_or(Duration::MAX);
    best.as_secs_f64() * 1e9 / (FRAMES / batch * batch) as f64
}

fn main() {
    println!("{:>6} {:>9} {:>9}", "batch", "forward", "filtered");
    for batch in [1, 4, 16, 64] {
        let nothing = best(batch, |frames| {
            black_box(frames);
        });
        let forward = |frames: usize| {
            meter::took(frames);
            meter::gave(frames as u64);
            meter::call(KernelCall::Kick, || black_box(frames));
        };
        let forwarded = best(batch, forward) - nothing;
        let each = best(batch, |frames| {
            for frame in 0..frames {
                black_box(frame);
            }
        });
        let filtered = best(batch, |frames| {
            for frame in 0..frames {
                meter::looked_up(black_box(frame as u64) & 1, 0);
            }
        });
        println!("{batch:>6} {forwarded:>9.2} {:>9.2}", forwarded + filtered - each);
    }
}
