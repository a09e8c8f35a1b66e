//! What the hash of a frame costs, in nanoseconds a frame.
//!
//! `cargo run --release -p device --example hash_cost`
//!
//! Frames are TCP over IPv4, TCP over IPv6, and the latter with extension headers. Measured are the Toeplitz hash alone,
//! then parsing its input, and all of [`Hashing::report`], with a computed hash and with the NIC's. "cold": between two
//! frames as much other memory is read as a level-1 cache holds, to evict it as frames do. Each figure is the lowest of
//! [`ROUNDS`] rounds over [`FLOWS`] flows.

use std::hint::black_box;
use std::time::Instant;

use device::hash::fields::Input;
use device::hash::nic::{NicHash, NicKey};
use device::hash::toeplitz::{KEY_BYTES, Toeplitz};
use device::hash::{HashConfig, HashTypes, Hashing};

const ROUNDS: usize = 101;
const FLOWS: usize = 512;
/// Number of 64-byte lines that are read between two frames for a cold cache.
const COLD_LINES: usize = 32 * 1024 / 64;

#[derive(Clone, Copy)]
enum Kind {
    V4,
    V6,
    V6Extended,
}

/// A frame of that kind; `flow` makes addresses and ports.
fn frame(kind: Kind, flow: usize) -> Vec<u8> {
    let mut noise = flow as u64 * 2 + 1;
    let mut next = || {
        // xorshift64 (Marsaglia, 2003).
        noise ^= noise << 13;
        noise ^= noise >> 7;
        noise ^= noise << 17;
        (noise >> 24) as u8
    };
    let mut frame = vec![2; 12];
    let addresses = match kind {
        Kind::V4 => {
            frame.extend([8, 0, 0x45, 0, 0, 46, 0, 0, 0, 0, 64, 6, 0, 0]);
            8
        }
        Kind::V6 => {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 20, 6, 64]);
            32
        }
        Kind::V6Extended => {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 44, 60, 64]);
            32
        }
    };
    frame.extend((0..addresses).map(|_| next()));
    if let Kind::V6Extended = kind {
        frame.extend([6, 2, 1, 2, 0, 0, 0xc9, 16]);
        frame.extend((0..16).map(|_| next()));
    }
    frame.extend((0..4).map(|_| next()));
    frame.extend([0; 16]);
    frame
}

/// Nanoseconds of `work` for each of `items`. With `cold`, that memory is read in between, and its time subtracted.
fn time<T>(items: &[T], cold: Option<&[[u64; 8]]>, mut work: impl FnMut(&T) -> u32) -> f64 {
    let lines = cold.unwrap_or_default();
    let mut round = |works: bool| {
        let start = Instant::now();
        for item in items {
            black_box(black_box(lines).iter().fold(0, |sum, line| sum ^ line[0]));
            if works {
                black_box(work(black_box(item)));
            }
        }
        start.elapsed().as_nanos() as f64 / items.len() as f64
    };
    let mut least = |works| (0..ROUNDS).map(|_| round(works)).fold(f64::MAX, f64::min);
    least(true) - least(false)
}

fn fields(frame: &[u8]) -> u32 {
    let input = Input::of(frame, HashTypes::ALL);
    input.map_or(0, |input| {
        u32::from(input.kind().number()) + u32::from(input.parts()[0][0])
    })
}

fn main() {
    let mut key = [0; KEY_BYTES];
    for (at, byte) in key.iter_mut().enumerate() {
        *byte = (at as u8).wrapping_mul(157).wrapping_add(0x6d);
    }
    let toeplitz = Toeplitz::new(&key);
    let config = HashConfig {
        types: HashTypes::ALL,
        key,
    };
    let computed = Hashing::new(&config, None);
    let of_nic = Hashing::new(&config, Some(&NicKey::toeplitz(&key)));
    let lines = vec![[1; 8]; COLD_LINES];
    let kinds = [
        (Kind::V4, "IPv4"),
        (Kind::V6, "IPv6"),
        (Kind::V6Extended, "IPv6, home address"),
    ];
    println!("{:40} {:>8} {:>8}", "ns a frame", "warm", "cold");
    for (kind, name) in kinds {
        let frames: Vec<_> = (0..FLOWS).map(|flow| frame(kind, flow)).collect();
        let inputs = frames.iter().map(|frame| Input::of(frame, HashTypes::ALL));
        let inputs: Vec<_> = inputs
            .map(|input| input.expect("a hash").parts().concat())
            .collect();
        let print = |what: &str, [warm, cold]: [f64; 2]| {
            println!("{:40} {warm:8.1} {cold:8.1}", format!("{name}: {what}"));
        };
        let both = [None, Some(&lines[..])];
        let hash = |input: &Vec<u8>| toeplitz.hash(&[input]);
        print("hash", both.map(|cold| time(&inputs, cold, hash)));
        print(
            "fields",
            both.map(|cold| time(&frames, cold, |frame| fields(frame))),
        );
        print(
            "report, computed",
            both.map(|cold| time(&frames, cold, |frame| computed.report(frame, None).0.value)),
        );
        let hash = NicHash {
            value: 7,
            rss_type: 0x19,
        };
        if let Kind::V4 = kind {
            let report = |frame: &Vec<u8>| of_nic.report(frame, Some(hash)).0.value;
            print("report, of the NIC", both.map(|cold| time(&frames, cold, report)));
        }
    }
}
