//! The HTTP API: curl, Prometheus and hostile clients at a daemon with a guest.

mod changes;
mod commands;
mod document;
mod hostile;
mod kept;
mod life;
mod networks;
mod prometheus;

use rustix::process::{Gid, Uid};
use tempfile::TempDir;
use testkit::api::{Api, open_dir, with_api};
use testkit::daemon::DIR;
use testkit::{Daemon, Driver, DriverConfig, NetNs, Rig, Serve, VethPair};

/// Nobody else.
const STRANGER: u32 = 2_000_000_011;

/// The interface of a network.
const UPLINK: &str = "nic1";

/// A daemon on a veth, with a guest.
fn rig(dir: &TempDir) -> (Rig, Api) {
    let (serve, api) = with_api(Serve::interface(VethPair::NIC), dir);
    let mut rig = Rig::with(VethPair::new(), &serve, &DriverConfig::default());
    rig.post(64, &[2048]);
    (rig, api)
}

/// A port with a queue of its own, `vm1`, and a network with an uplink and a port, `vm2`.
fn file() -> String {
    let (nic, uplink) = (VethPair::NIC, UPLINK);
    format!(
        "[network.lan]\nuplink = \"{uplink}\"\n\
         [port.vm1]\nsocket-path = \"{DIR}/vm1.sock\"\nifname = \"{nic}\"\n\
         [port.vm2]\nsocket-path = \"{DIR}/vm2.sock\"\nnetwork = \"lan\"\nmac = \"02:00:00:00:00:02\"\n"
    )
}

/// A daemon with that, whose guest `vm1` is there.
fn rig_with_network(serve: &Serve) -> Rig {
    let veth = VethPair::new();
    veth.join_as(UPLINK, "wire1", 1, 1500);
    let daemon = Daemon::start_file(&veth.near, serve, &[VethPair::NIC, UPLINK], &file());
    let guest = Driver::connect(&daemon.path("vm1.sock"), &DriverConfig::default()).expect("accepted");
    let mut rig = Rig::of(veth, daemon, guest);
    rig.post(64, &[2048]);
    rig
}

/// Does that as another user, on a thread of its own.
fn as_stranger<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    as_user(STRANGER, work)
}

fn as_user<T: Send + 'static>(user: u32, work: impl FnOnce() -> T + Send + 'static) -> T {
    let body = move || {
        let uid = Uid::from_raw(user);
        let gid = Gid::from_raw(user);
        rustix::thread::set_thread_res_gid(gid, gid, gid).expect("we are root");
        rustix::thread::set_thread_res_uid(uid, uid, uid).expect("we are root");
        work()
    };
    std::thread::spawn(body).join().expect("it does not panic")
}

/// A daemon without a NIC.
fn on_null(netns: &NetNs, dir: &TempDir) -> (Daemon, Api) {
    let (serve, api) = with_api(Serve::null(), dir);
    (Daemon::start(netns, &serve), api)
}
