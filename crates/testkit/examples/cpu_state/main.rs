//! What two CPUs are like at the moment: how far they are from each other, and how fast each of them is.
//!
//! `cargo run --release -p testkit --example cpu_state -- CPU CPU`: for each line on standard input measures once, and
//! prints three numbers of nanoseconds: the time in which a cache line goes from one to the other and comes back (`-`
//! if the two were not to be had together within 20 ms), and what a piece of work takes on either. `scripts/bench` asks
//! it between measurements.
//!
//! In a virtual machine both change from one second to the next, unseen from within. A virtqueue between two CPUs costs
//! above all such round trips (of descriptors, of the two indices, and of the frame where the device reads it), and one
//! takes five times as long between cores that share no cache. A core whose other hardware thread is at work for
//! somebody else is slower by up to a half. With a real-time policy (`chrt`) the example gets its CPUs at once, and has
//! given them back a fraction of a millisecond later.

use std::io::BufRead;
use std::process::ExitCode;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};

/// Round trips of a measurement; the first ones, while a thread may still be waking, do not count.
const TRIPS: u64 = 600;
const NOT_COUNTED: u64 = 100;
const WORK_STEPS: u64 = 10_000;
const TRIP_LIMIT: Duration = Duration::from_millis(20);

/// A counter with cache lines of its own (two, as they are fetched in pairs): even values are the first CPU's doing,
/// odd ones the second's.
#[repr(align(128))]
struct Line(AtomicU64);

static LINE: Line = Line(AtomicU64::new(0));

/// Waits until the counter has this value, unless that takes too long.
fn await_value(value: u64, since: Instant) -> bool {
    let mut looks = 0u32;
    while LINE.0.load(Acquire) != value {
        looks = looks.wrapping_add(1);
        if looks.is_multiple_of(1024) && since.elapsed() > TRIP_LIMIT {
            return false;
        }
        std::hint::spin_loop();
    }
    true
}

/// The second CPU's part.
fn answer(since: Instant) {
    for trip in 0..TRIPS {
        if !await_value(2 * trip + 1, since) {
            return;
        }
        LINE.0.store(2 * trip + 2, Release);
    }
}

/// The first CPU's part; nanoseconds a round trip.
fn ask(since: Instant) -> Option<u64> {
    let mut counted_from = Instant::now();
    for trip in 0..TRIPS {
        if trip == NOT_COUNTED {
            counted_from = Instant::now();
        }
        LINE.0.store(2 * trip + 1, Release);
        if !await_value(2 * trip + 2, since) {
            return None;
        }
    }
    u64::try_from(counted_from.elapsed().as_nanos())
        .ok()
        .map(|ns| ns / (TRIPS - NOT_COUNTED))
}

/// Time for a piece of work that keeps all of a core's units busy, in nanoseconds: what else runs on the core shows in
/// it.
fn work_ns() -> u64 {
    let begun = Instant::now();
    let mut words = [1u64, 3, 5, 7, 11, 13];
    for step in 0..WORK_STEPS {
        for word in &mut words {
            *word = (*word ^ step).rotate_left(7).wrapping_add(step);
        }
    }
    std::hint::black_box(words);
    u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

fn pin(cpu: usize) -> rustix::io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set)
}

fn main() -> ExitCode {
    let cpus: Vec<usize> = std::env::args()
        .skip(1)
        .map_while(|word| word.parse().ok())
        .collect();
    let [first, second] = cpus[..] else {
        eprintln!("usage: cpu_state CPU CPU; e.g. echo | cpu_state 0 1");
        return ExitCode::FAILURE;
    };
    if first == second || first.max(second) >= CpuSet::MAX_CPU {
        eprintln!(
            "cpu_state: CPUs {first} and {second}: two different ones below {} are wanted",
            CpuSet::MAX_CPU
        );
        return ExitCode::FAILURE;
    }
    let (begin, begun) = mpsc::channel::<Instant>();
    let (done, finished) = mpsc::channel();
    std::thread::spawn(move || {
        let pinned = pin(second);
        for since in begun {
            if pinned.is_ok() {
                answer(since);
            }
            let _ = done.send(pinned.map(|()| work_ns()));
        }
    });
    let pinned = pin(first);
    for _ in std::io::stdin().lock().lines().map_while(Result::ok) {
        LINE.0.store(0, Release);
        let since = Instant::now();
        let _ = begin.send(since);
        let found = ask(since);
        let ours = work_ns();
        match finished
            .recv()
            .unwrap_or(Ok(0))
            .and_then(|theirs| pinned.map(|()| theirs))
        {
            Err(error) => {
                eprintln!("cpu_state: cannot run on CPUs {first} and {second}: {error}");
                return ExitCode::FAILURE;
            }
            Ok(theirs) => println!(
                "{} {ours} {theirs}",
                found.map_or("-".to_owned(), |ns| ns.to_string())
            ),
        }
    }
    ExitCode::SUCCESS
}
