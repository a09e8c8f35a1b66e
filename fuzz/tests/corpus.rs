//! The committed inputs, and those that once broke something, once each and without a fuzzer.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use vhost_af_xdp_fuzz::{coalesce, config_space, net_header, packed_ring, segment, session, split_ring};

/// `session` counts the descriptors of the process, so nothing else may run beside it.
static ALONE: Mutex<()> = Mutex::new(());

/// With FUZZ_INPUT=FILE that one instead, to look into what a fuzzer found (and FUZZ_SHOW=1 to see what it means).
fn run_all(target: &str, run: fn(&[u8])) {
    if let Some(path) = std::env::var_os("FUZZ_INPUT") {
        return run(&std::fs::read(path).expect("readable"));
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let mut count = 0;
    for entry in std::fs::read_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display())) {
        let path = entry.expect("readable").path();
        let input = std::fs::read(&path).expect("readable");
        if std::panic::catch_unwind(|| run(&input)).is_err() {
            panic!("{} breaks it", path.display());
        }
        count += 1;
    }
    assert!(count > 0, "no inputs in {}", dir.display());
}

#[test]
fn session_stands_its_corpus() {
    run_all("session", session::run);
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
fn segment_stands_its_corpus() {
    run_all("segment", segment::run);
}

#[test]
fn coalesce_stands_its_corpus() {
    run_all("coalesce", coalesce::run);
}
