//! The programs under test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

use crate::process::{output_of, run};

/// The daemon: `$VHOST_AF_XDP_BIN`, or what `cargo build` makes of this tree, once a test process. The gateway, which it
/// starts, is beside it.
///
/// # Panics
/// If it does not build.
pub fn daemon() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| match std::env::var_os("VHOST_AF_XDP_BIN") {
        Some(daemon) => daemon.into(),
        None => {
            let _ = build("gateway", &[]);
            build("vhost-af-xdp", &[])
        }
    })
}

/// The gateway, which is beside the daemon.
///
/// # Panics
/// As [`daemon`].
pub fn gateway() -> PathBuf {
    daemon().with_file_name(GATEWAY)
}

const GATEWAY: &str = "vhost-af-xdp-gateway";

/// The daemon, and the gateway if there is one, in a directory, for a user who may not look where they were built; where
/// the daemon is then. Hard links, as they have 80 MB. Where it has to be a copy, another process writes that: a file that
/// this one has open for writing is inherited by what another thread starts meanwhile, and cannot be run until that has
/// let go of it (ETXTBSY).
///
/// # Panics
/// If it cannot be placed there.
pub fn daemon_in(dir: &Path) -> PathBuf {
    let place = |original: &Path| {
        let placed = dir.join(original.file_name().expect("a file"));
        if !placed.exists() && std::fs::hard_link(original, &placed).is_err() {
            run(
                "cp",
                &[original, &placed].map(|path| path.to_str().expect("UTF-8")),
            );
        }
        placed
    };
    let gateway = gateway();
    if gateway.exists() {
        place(&gateway);
    }
    place(daemon())
}

/// The steward: `$VHOST_AF_XDP_STEWARD_BIN`, or what `cargo build` makes of this tree, once a test process.
///
/// # Panics
/// If it does not build.
pub fn steward() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| named_or_built("VHOST_AF_XDP_STEWARD_BIN", "vhost-af-xdp-steward", &[]))
}

/// The benchmarks: beside `$VHOST_AF_XDP_BIN`, or built by `cargo build` of this tree, once a test process.
///
/// # Panics
/// If it does not build.
pub fn bench() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| sibling_or_built("vhost-af-xdp-bench", "bench"))
}

/// The JSON object that a program printed on a line of its own.
///
/// # Panics
/// If there is none.
pub fn json_of(said: &str) -> Value {
    let line = said.lines().find(|line| line.starts_with('{'));
    let line = line.unwrap_or_else(|| panic!("no JSON in {said}"));
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

/// The value of a row of its table.
///
/// # Panics
/// If there is no such row.
pub fn row(said: &str, name: &str) -> String {
    let blank = ['│', ' '];
    let mut lines = said.lines().map(|line| line.trim_matches(blank));
    let value = lines.find_map(|line| line.strip_prefix(name));
    let value = value.unwrap_or_else(|| panic!("no row {name:?} in:\n{said}"));
    value.trim_matches(blank).to_owned()
}

/// The live view: beside `$VHOST_AF_XDP_BIN`, or built by `cargo build` of this tree, once a test process.
///
/// # Panics
/// If it does not build.
pub fn top() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| sibling_or_built("vhost-af-xdp-top", "top"))
}

/// Programs of Kubernetes: the DRA driver, and the hook of KubeVirt. Beside `$VHOST_AF_XDP_BIN`, or built by `cargo build`
/// of this tree.
///
/// # Panics
/// If they do not build.
pub fn of_kubernetes() -> [PathBuf; 2] {
    [
        sibling_or_built("vhost-af-xdp-dra", "dra-driver"),
        sibling_or_built("vhost-af-xdp-kubevirt", "kubevirt-hook"),
    ]
}

fn sibling_or_built(name: &str, package: &str) -> PathBuf {
    match std::env::var_os("VHOST_AF_XDP_BIN") {
        Some(daemon) => Path::new(&daemon).with_file_name(name),
        None => build(package, &[]),
    }
}

/// What makes the manual pages: `$MANUAL_BIN`, or what `cargo build` makes of this tree, once a test process.
///
/// # Panics
/// If it does not build.
pub fn manual() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| named_or_built("MANUAL_BIN", "manual", &[]))
}

/// What tries things from within the daemon's sandbox: `$SANDBOX_ATTEMPT_BIN`, or what `cargo build` makes of this
/// tree, once a test process.
///
/// # Panics
/// If it does not build.
pub fn sandbox_attempt() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    let example = ["--example", "sandbox_attempt"];
    PROGRAM.get_or_init(|| named_or_built("SANDBOX_ATTEMPT_BIN", "vhost-af-xdp", &example))
}

/// The server of files that never answer (`src/bin/stalled`), once a test process.
pub(crate) fn stalled() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| named_or_built("STALLED_BIN", "testkit", &["--bin", "stalled"]))
}

/// The script that boots guests and ends them.
pub(crate) const GUEST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/guest");

/// A command to that script for the guest that has its state in this directory.
pub(crate) fn guest(verb: &str, state: &Path) -> Command {
    let mut command = Command::new(GUEST);
    command.arg(verb).arg("--dir").arg(state);
    command
}

fn named_or_built(variable: &str, package: &str, target: &[&str]) -> PathBuf {
    std::env::var_os(variable).map_or_else(|| build(package, target), PathBuf::from)
}

/// Builds the program of a crate, or another target of it; where it is.
fn build(package: &str, target: &[&str]) -> PathBuf {
    let manifest = format!("{}/../{package}/Cargo.toml", env!("CARGO_MANIFEST_DIR"));
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let arguments = [
        "build",
        "--quiet",
        "--message-format=json",
        "--manifest-path",
        &manifest,
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
