//! The programs under test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

use crate::process::output_of;

/// The daemon: `$VHOST_AF_XDP_BIN`, or what `cargo build` makes of this tree, once a test process.
///
/// # Panics
/// If it does not build.
#[must_use]
pub fn daemon() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../vhost-af-xdp/Cargo.toml");
    PROGRAM.get_or_init(|| named_or_built("VHOST_AF_XDP_BIN", manifest, &[]))
}

/// The steward: `$VHOST_AF_XDP_STEWARD_BIN`, or what `cargo build` makes of this tree, once a test process.
///
/// # Panics
/// If it does not build.
#[must_use]
pub fn steward() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../steward/Cargo.toml");
    PROGRAM.get_or_init(|| named_or_built("VHOST_AF_XDP_STEWARD_BIN", manifest, &[]))
}

/// What makes the manual pages: `$MANUAL_BIN`, or what `cargo build` makes of this tree, once a test process.
///
/// # Panics
/// If it does not build.
#[must_use]
pub fn manual() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../manual/Cargo.toml");
    PROGRAM.get_or_init(|| named_or_built("MANUAL_BIN", manifest, &[]))
}

/// What tries things from within the daemon's sandbox: `$SANDBOX_ATTEMPT_BIN`, or what `cargo build` makes of this
/// tree, once a test process.
///
/// # Panics
/// If it does not build.
#[must_use]
pub fn sandbox_attempt() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../vhost-af-xdp/Cargo.toml");
    let example = ["--example", "sandbox_attempt"];
    PROGRAM.get_or_init(|| named_or_built("SANDBOX_ATTEMPT_BIN", manifest, &example))
}

/// The server of files that never answer (`src/bin/stalled`), once a test process.
pub(crate) fn stalled() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    PROGRAM.get_or_init(|| named_or_built("STALLED_BIN", manifest, &["--bin", "stalled"]))
}

/// The script that boots guests and ends them.
pub(crate) const GUEST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/guest");

/// A command to that script for the guest that has its state in this directory.
pub(crate) fn guest(verb: &str, state: &Path) -> Command {
    let mut command = Command::new(GUEST);
    command.arg(verb).arg("--dir").arg(state);
    command
}

fn named_or_built(variable: &str, manifest: &str, target: &[&str]) -> PathBuf {
    std::env::var_os(variable).map_or_else(|| build(manifest, target), PathBuf::from)
}

/// Builds the program of a crate, or another target of it; where it is.
fn build(manifest: &str, target: &[&str]) -> PathBuf {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let arguments = [
        "build",
        "--quiet",
        "--message-format=json",
        "--manifest-path",
        manifest,
    ];
    let messages = output_of(&cargo, &[&arguments, target].concat());
    let executable = |line: &str| {
        serde_json::from_str::<Value>(line).ok()?["executable"]
            .as_str()
            .map(PathBuf::from)
    };
    messages
        .lines()
        .filter_map(executable)
        .next_back()
        .expect("the crate has a binary")
}
