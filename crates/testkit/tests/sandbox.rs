//! The daemon's sandbox: what must fail is tried, from within, and what must work is seen to work.
//!
//! `sandbox_attempt` (crates/vhost-af-xdp/examples) is the daemon up to its sandbox, by the same code; there it tries
//! one thing on a thread of its own. How it ended tells which layer stopped it: by SIGSYS (`calls`), or with an error
//! of the kernel's.

mod attempts;
mod helper;
mod running;
mod sockets;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::process::{Command, ExitStatus};

use tempfile::TempDir;
use testkit::daemon::{private_dir, sandbox_attempt};
use testkit::{Running, Serve, VethPair, wait};

/// Started by root, with a steward of its own.
fn by_root() -> Serve {
    Serve::interface(VethPair::NIC).by_root()
}

/// Tries something in the sandbox of a daemon with these layers; how it ended, and what it said.
fn attempt(name: &str, options: &[&str]) -> (ExitStatus, String) {
    let directory = private_dir();
    let mut command = attempting(name, &directory);
    command.args(options);
    let mut running = Running::start(command);
    let status = running.wait(wait::SOON);
    (status, running.said())
}

fn attempting(name: &str, directory: &TempDir) -> Command {
    let mut command = Command::new(sandbox_attempt());
    command.args([name, "--null", "--control", "none"]);
    command.arg("--socket-path").arg(directory.path().join("vm.sock"));
    command
}

/// A socket that everybody may connect to, at a path that everybody may look at.
fn open_to_everybody() -> (TempDir, UnixListener, String) {
    let directory = private_dir();
    let path = directory.path().join("everybody.sock");
    let listener = UnixListener::bind(&path).expect("listens");
    for (path, mode) in [(directory.path(), 0o755), (&*path, 0o777)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("ours");
    }
    let path = path.to_str().expect("UTF-8").to_owned();
    (directory, listener, path)
}
