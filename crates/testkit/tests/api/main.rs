//! The HTTP API: curl, Prometheus and hostile clients at a daemon with a guest.

mod document;
mod hostile;
mod life;
mod prometheus;

use tempfile::TempDir;
use testkit::api::Api;
use testkit::daemon::private_dir;
use testkit::{Daemon, DriverConfig, NetNs, Rig, Serve, VethPair};

/// A directory in which every user's daemon may make sockets, and everybody look for them.
fn open_dir() -> TempDir {
    use std::os::unix::fs::PermissionsExt;
    let dir = private_dir();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).expect("ours");
    dir
}

fn with_api(serve: Serve, dir: &TempDir) -> (Serve, Api) {
    let socket = dir.path().join("api.sock");
    let serve = serve.with("--api", socket.to_str().expect("ASCII"));
    (serve, Api::at(socket))
}

/// A daemon on a veth, with a guest.
fn rig(dir: &TempDir) -> (Rig, Api) {
    let (serve, api) = with_api(Serve::interface(VethPair::NIC), dir);
    let mut rig = Rig::with(VethPair::new(), &serve, &DriverConfig::default());
    rig.post(64, &[2048]);
    (rig, api)
}

/// A daemon without a NIC.
fn on_null(netns: &NetNs, dir: &TempDir) -> (Daemon, Api) {
    let (serve, api) = with_api(Serve::null(), dir);
    (Daemon::start(netns, &serve), api)
}
