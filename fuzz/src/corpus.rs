//! The committed inputs, those that once broke something among them, once each and without a fuzzer. Then variations of
//! them, for a second or so: they reach less than a fuzzer does, which sees what each input reaches. A test of
//! crates/vhost-af-xdp, whose build it shares: `cargo test -p vhost-af-xdp --test fuzz`.

use std::panic::catch_unwind;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::{
    addresses, coalesce, config_space, control, filter, headers, message, net_header, packed_ring, segment,
    session, split_ring,
};

/// `session` and `message` count the descriptors of the process, so nothing else may run beside it.
static ALONE: Mutex<()> = Mutex::new(());

/// How long variations are made.
const TIME: Duration = Duration::from_secs(2);
/// As scripts/fuzz has it.
const LONGEST: usize = 2048;

/// Numbers that look like chance, and are the same in each run (xorshift64; Marsaglia, 2003).
struct Noise(u64);

impl Noise {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % limit.max(1)
    }
}

/// The beginning of one input and the end of another, and a few bytes changed.
fn variation(inputs: &[Vec<u8>], noise: &mut Noise) -> Vec<u8> {
    let [one, other] = [(); 2].map(|()| &inputs[noise.below(inputs.len())]);
    let mut bytes = one[..noise.below(one.len() + 1)].to_vec();
    bytes.extend(&other[noise.below(other.len() + 1)..]);
    bytes.truncate(LONGEST);
    for _ in 0..noise.below(5) {
        let at = noise.below(bytes.len());
        if let Some(byte) = bytes.get_mut(at) {
            *byte = noise.below(256) as u8;
        }
    }
    bytes
}

/// With FUZZ_INPUT=FILE that one instead, to look into what a fuzzer found (and FUZZ_SHOW=1 to see what it means).
fn run_all(target: &str, run: fn(&[u8])) {
    if let Some(path) = std::env::var_os("FUZZ_INPUT") {
        return run(&std::fs::read(path).expect("readable"));
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(target);
    let mut inputs = Vec::new();
    let mut entries: Vec<_> = std::fs::read_dir(&dir)
        .unwrap_or_else(|error| panic!("{}: {error}", dir.display()))
        .map(|entry| entry.expect("readable").path())
        .collect();
    entries.sort();
    for path in entries {
        let input = std::fs::read(&path).expect("readable");
        assert!(
            catch_unwind(|| run(&input)).is_ok(),
            "{} breaks it",
            path.display()
        );
        inputs.push(input);
    }
    assert!(!inputs.is_empty(), "no inputs in {}", dir.display());
    let (mut noise, mut count, begun) = (Noise(0x5eed_cafe), 0u64, Instant::now());
    while begun.elapsed() < TIME {
        let input = variation(&inputs, &mut noise);
        if catch_unwind(|| run(&input)).is_err() {
            let path = std::env::temp_dir().join(format!("fuzz-{target}-{count}"));
            std::fs::write(&path, &input).expect("written");
            panic!("{} breaks it", path.display());
        }
        count += 1;
    }
    println!("{target}: {} inputs, {count} variations", inputs.len());
}

#[test]
fn session_stands_its_corpus() {
    run_all("session", session::run);
}

#[test]
fn message_stands_its_corpus() {
    run_all("message", message::run);
}

#[test]
fn split_ring_stands_its_corpus() {
    run_all("split_ring", split_ring::run);
}

#[test]
fn packed_ring_stands_its_corpus() {
    run_all("packed_ring", packed_ring::run);
}

#[test]
fn net_header_stands_its_corpus() {
    run_all("net_header", net_header::run);
}

#[test]
fn config_space_stands_its_corpus() {
    run_all("config_space", config_space::run);
}

#[test]
fn control_stands_its_corpus() {
    run_all("control", control::run);
}

#[test]
fn segment_stands_its_corpus() {
    run_all("segment", segment::run);
}

#[test]
fn coalesce_stands_its_corpus() {
    run_all("coalesce", coalesce::run);
}

#[test]
fn addresses_stands_its_corpus() {
    run_all("addresses", addresses::run);
}

#[test]
fn filter_stands_its_corpus() {
    run_all("filter", filter::run);
}

#[test]
fn headers_stands_its_corpus() {
    run_all("headers", headers::run);
}
