//! What a round of a worker costs that moves frames of 60 bytes between two guests, of which each sends so many a
//! round, without filter rules (`plain`) or with ten (`rules`): cycles a frame of the CPU's time stamp counter, as
//! JSON.
//!
//!     cargo run --release -p vhost-af-xdp --features fuzzing --example round_cost plain 64
//!     cargo run --release -p vhost-af-xdp --features fuzzing,no-statistics --example round_cost plain 64
//!
//! `scripts/bench --only statistics/` runs both in turn, and says what the statistics of workers cost.

use dataplane::fuzzing::{Checks, Path, Rounds, Way};

/// Rounds of which the cycles are added up: as many looks at the clock, and rounds that are timed, are in each.
const ROUNDS: usize = 61 * 3;
/// So often; the median counts, as the machine does other things, too.
const SUMS: usize = 61;
/// Before that, rounds in which memory comes into the caches.
const WARM: usize = 500;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let checks = match arguments.next().as_deref() {
        Some("plain") => Some(Checks::None),
        Some("rules") => Some(Checks::Rules(10)),
        _ => None,
    };
    let frames = arguments.next().and_then(|frames| frames.parse::<usize>().ok());
    let frames = frames.filter(|frames| (1..=64).contains(frames));
    let (Some(checks), Some(frames)) = (checks, frames) else {
        eprintln!("round_cost plain|rules FRAMES: how many frames each guest sends a round, 1 to 64");
        std::process::exit(2);
    };
    println!("{}", serde_json::json!({ "cycles": cost(checks, frames) }));
}

/// Cycles a frame, in the median.
fn cost(checks: Checks, frames: usize) -> f64 {
    let mut rounds = Rounds::new(Path {
        way: Way::GuestToGuest,
        frame_bytes: 60,
        at_once: frames,
        checks,
        ..Path::default()
    });
    // A flow that no rules have judged yet takes room of many frames from the round.
    rounds.play(1);
    rounds.round();
    rounds.play(0);
    let mut taken = 0;
    let mut sum_of = |count: usize| {
        let each = (0..count).map(|_| {
            taken += rounds.play(frames);
            rounds.round().expect("a counter of cycles")
        });
        each.sum::<u64>()
    };
    sum_of(WARM);
    let mut sums: Vec<u64> = (0..SUMS).map(|_| sum_of(ROUNDS)).collect();
    sums.sort_unstable();
    let sent = (WARM + SUMS * ROUNDS - 1) * 2 * frames;
    assert_eq!(taken, sent, "frames were lost");
    sums[SUMS / 2] as f64 / (ROUNDS * 2 * frames) as f64
}
