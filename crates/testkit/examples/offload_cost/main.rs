//! What segmentation, coalescing and checksums cost, without a guest and beside the kernel's own: scripts/bench runs
//! it, a contender at a time.
//!
//! `cargo run --release -p testkit --example offload_cost -- CASE CONTENDER [SIZE [SECONDS]]`
//!
//! | case | contender | what is measured |
//! |---|---|---|
//! | segment | copy | [`Plan`], headers, payload copied into chunks, checksums: copy placement without a NIC's help |
//! | | reference | [`Plan`] and headers: payload by reference, checksum by the NIC |
//! | | kernel-copy | software GSO towards an interface that has neither checksums nor scatter-gather |
//! | | kernel-reference | software GSO towards one that has both |
//! | coalesce | verify | [`Batch`]: checksums verified, headers rewritten |
//! | | partial | the same, checksums known to be partial: headers only |
//! | | kernel-verify | software GRO behind a veth pair, checksums verified |
//! | | kernel-partial | the same, checksums known to be partial |
//! | | kernel-hop | the veth pair alone, without GRO, each segment dropped by the IP layer |
//! | checksum | simd, portable | [`Sum`] of SIZE bytes |
//!
//! SIZE is the payload of a segment (default 1448); TCP over IPv4 with timestamps, GSO packets of 65,160 bytes or
//! the next less that SIZE divides. Prints JSON: `ns` a segment (or a sum), `gbytes_per_second` of payload, and what
//! was done.
//!
//! # The kernel's share
//! A GSO packet is sent by a packet socket with its virtio-net header, out of an interface that drops everything
//! (ifb). Out of one that takes GSO packets this costs the system call and the copy; out of one that does not, the
//! segmentation too. Both are done by turns and the difference counts: segmentation, and the way of each segment from
//! there to the driver. For GRO the segments go through a veth pair whose receiving end gathers them again and whose
//! IP layer then drops them (the address is nobody's); the same cut and dropped without the veth pair is taken off.
//! So what a veth pair costs is in it, which `kernel-hop` gives an idea of.
//!
//! Times are CPU time of the one thread, so that others on the machine count less. The kernel does its part in this
//! thread, too: the veth pair's NAPI runs when the system call ends. Each figure is the median of rounds of a few
//! milliseconds.

mod kernel;
mod ours;

use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use testkit::gso_packet::{GsoPacket, Ip};

/// Length of a round.
const ROUND: Duration = Duration::from_millis(5);
/// Most payload of a GSO packet.
const PAYLOAD_MAX: usize = 65_160;

/// One contender: something to be done again and again.
pub(crate) struct Work {
    /// What is measured.
    pub(crate) measured: Box<dyn FnMut()>,
    /// What is done by turns with it and taken off, if anything.
    pub(crate) taken_off: Option<Box<dyn FnMut()>>,
    /// Segments, or sums, each time.
    pub(crate) units: usize,
    /// Bytes of payload each time.
    pub(crate) bytes: usize,
    /// In words.
    pub(crate) what: String,
}

/// The GSO packet of all cases, cut into segments of `size` bytes.
pub(crate) fn gso_packet(size: usize) -> GsoPacket {
    GsoPacket::tcp(Ip::V4(0), PAYLOAD_MAX / size * size)
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (case, contender) = (
        arguments.next().unwrap_or_default(),
        arguments.next().unwrap_or_default(),
    );
    let mut number = |default: f64| {
        arguments
            .next()
            .map_or(default, |text| text.parse().expect("a number"))
    };
    let (size, seconds) = (number(1448.0) as usize, number(1.0));
    assert!(
        (1..=PAYLOAD_MAX).contains(&size),
        "SIZE is from 1 to {PAYLOAD_MAX}"
    );
    keep_to_one_cpu();
    let (mut work, _guards) = match (case.as_str(), contender.as_str()) {
        ("segment", "copy" | "reference") => (ours::segment(size, contender == "copy"), None),
        ("segment", "kernel-copy" | "kernel-reference") => kernel::segment(size, contender == "kernel-copy"),
        ("coalesce", "verify" | "partial") => (ours::coalesce(size, contender == "verify"), None),
        ("coalesce", "kernel-verify" | "kernel-partial" | "kernel-hop") => kernel::coalesce(size, &contender),
        ("checksum", "simd" | "portable") => (ours::checksum(size, contender == "simd"), None),
        _ => {
            eprintln!("usage: offload_cost CASE CONTENDER [SIZE [SECONDS]]; see the head of its source");
            std::process::exit(2);
        }
    };
    let ns = measure(&mut work, Duration::from_secs_f64(seconds)) / work.units as f64;
    let rate = work.bytes as f64 / work.units as f64 / ns;
    println!(
        "{{\"ns\": {ns:.2}, \"gbytes_per_second\": {rate:.3}, \"what\": {:?}}}",
        work.what
    );
}

/// Nanoseconds of one doing.
fn measure(work: &mut Work, time: Duration) -> f64 {
    let mut difference =
        || round(&mut work.measured) - work.taken_off.as_mut().map_or(0.0, |work| round(work));
    // One that does not count: caches, branch predictors, clocks.
    difference();
    let end = Instant::now() + time;
    let mut differences = vec![difference()];
    while Instant::now() < end {
        differences.push(difference());
    }
    differences.sort_by(f64::total_cmp);
    differences[differences.len() / 2]
}

/// Nanoseconds of one doing, over a round.
fn round(work: &mut dyn FnMut()) -> f64 {
    let (start, cpu) = (Instant::now(), cpu_ns());
    let mut times = 0u32;
    while start.elapsed() < ROUND {
        for _ in 0..8 {
            work();
        }
        times += 8;
    }
    (cpu_ns() - cpu) as f64 / f64::from(times)
}

/// CPU time of this thread so far.
fn cpu_ns() -> i64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

/// The last of those that are allowed: the first serves interrupts.
fn keep_to_one_cpu() {
    let allowed = sched_getaffinity(None).expect("always told");
    let cpu = (0..CpuSet::MAX_CPU)
        .rev()
        .find(|&cpu| allowed.is_set(cpu))
        .expect("we run somewhere");
    let mut one = CpuSet::new();
    one.set(cpu);
    sched_setaffinity(None, &one).expect("it is one of ours");
}
