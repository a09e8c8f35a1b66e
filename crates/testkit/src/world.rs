//! The usual arrangement with a real VMM: a veth pair, the daemon on its near end, a Linux stack on its far end, a
//! Linux guest under QEMU or User-mode Linux.

use crate::daemon::{Mode, Placement};
use crate::guest::{Backend, Guest};
use crate::{Daemon, NetNs, Running, Serve, VethPair};

/// The guest's address, with its prefix length.
pub const GUEST: &str = "10.77.0.2/24";
/// The far end's address.
pub const HOST: &str = "10.77.0.1";
/// Arguments of `ping` in the guest that has to succeed.
const PING: &str = "ping -c 5 -i 0.2 -W 60";

/// Which side makes the vhost-user socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listener {
    /// The daemon; QEMU connects, and again a second after the daemon went.
    Daemon,
    /// QEMU; the daemon connects.
    Vmm,
}

/// What a [`World`] is like.
#[derive(Clone, Copy, Debug)]
pub struct Setting<'a> {
    /// Where frames lie.
    pub placement: Placement,
    /// How the XDP program is attached.
    pub mode: Mode,
    /// Who listens.
    pub listener: Listener,
    /// Queue pairs, of daemon and guest.
    pub queues: u32,
    /// Further options of `scripts/guest boot`.
    pub options: &'a [&'a str],
}

impl Setting<'_> {
    /// The daemon listens; one queue pair.
    pub fn new(placement: Placement) -> Self {
        Self {
            placement,
            mode: Mode::Native,
            listener: Listener::Daemon,
            queues: 1,
            options: &[],
        }
    }
}

/// All of it. Fields are dropped in this order: the guest goes first, the namespaces last.
#[must_use]
pub struct World {
    /// The guest.
    pub guest: Guest,
    /// The daemon.
    pub daemon: Daemon,
    /// The daemon's options.
    pub serve: Serve,
    /// The interfaces.
    pub veth: VethPair,
}

impl World {
    /// Starts everything, and returns when the guest takes commands.
    ///
    /// # Panics
    /// If something does not start.
    pub fn new(setting: Setting<'_>) -> Self {
        let veth = VethPair::with(setting.queues, 1500);
        give_address(&veth);
        let queues = setting.queues.to_string();
        let mut serve = Serve::interface(VethPair::NIC)
            .placement(setting.placement)
            .mode(setting.mode)
            .with("--queues", &queues);
        let mut options = vec!["--mem", "256", "--queues", &queues];
        options.extend(setting.options);
        let daemon = match setting.listener {
            Listener::Daemon => Daemon::start(&veth.near, &serve),
            Listener::Vmm => {
                serve = serve.flag("--client");
                Daemon::spawn(&veth.near, &serve)
            }
        };
        let socket = daemon.socket();
        let backend = match setting.listener {
            Listener::Daemon => Backend::Daemon(&socket),
            Listener::Vmm => Backend::Qemu(&socket),
        };
        let guest = Guest::boot(backend, GUEST, &options);
        Self {
            guest,
            daemon,
            serve,
            veth,
        }
    }

    /// No ping of the guest may be lost.
    ///
    /// # Panics
    /// If one is.
    #[track_caller]
    pub fn assert_pings(&self) {
        await_placement(&self.daemon);
        let said = self.guest.run(&format!("{PING} {HOST}"));
        assert!(said.contains(" 0% packet loss"), "{said}\n{}", self.daemon.said());
    }

    /// An iperf3 that listens on the far end.
    pub fn iperf_server(&self) -> Running {
        iperf_server(&self.veth.far)
    }
}

/// Waits until the lanes are what they will be: one that copies until the guest's memory is registered gives way to
/// a direct one, and frames to the guest are lost meanwhile.
///
/// # Panics
/// If a lane never becomes direct.
#[track_caller]
pub fn await_placement(daemon: &Daemon) {
    daemon.await_port(0, "the placement", |port| {
        let lanes = port["lanes"].as_array().expect("a list");
        // Nor is one that is just being replaced what it will be: it does not run.
        let stays = |lane: &serde_json::Value| {
            lane["running"] == true && !lane["fallbacks"].to_string().contains("direct yet: ")
        };
        !lanes.is_empty() && lanes.iter().all(stays)
    });
}

/// An iperf3 that listens in a namespace.
pub fn iperf_server(netns: &NetNs) -> Running {
    let mut command = netns.command("iperf3");
    command.args(["-s", "-p", "5201", "--forceflush"]);
    let mut server = Running::start(command);
    server.await_text("listening");
    server
}

/// Makes the far end one that a stack talks on.
pub fn give_address(veth: &VethPair) {
    veth.far.ip(&["link", "set", VethPair::WIRE, "arp", "on"]);
    veth.far
        .ip(&["address", "add", &format!("{HOST}/24"), "dev", VethPair::WIRE]);
}

/// A stream arrives that the guest sends to an iperf3 at this address, or by `-R` one from there. It is of more than the
/// sender's socket holds, for which iperf3 does not wait.
///
/// # Panics
/// If it does not arrive.
#[track_caller]
pub fn assert_stream(guest: &Guest, to: &str, direction: &str) {
    let report = guest.run(&format!("iperf3 -c {to} -n 20M -J {direction}"));
    let received = received_bytes(&report, "sum_received");
    assert!(
        received > 10_000_000,
        "{to}: {received} bytes {direction}: {report}"
    );
}

/// Bytes that arrived, of a report of `iperf3 -J`: one of the sums at its end.
///
/// # Panics
/// If it is none.
pub fn received_bytes(report: &str, sum: &str) -> u64 {
    let json: serde_json::Value =
        serde_json::from_str(report).unwrap_or_else(|_| panic!("no JSON: {report}"));
    json["end"][sum]["bytes"]
        .as_u64()
        .unwrap_or_else(|| panic!("no sum: {report}"))
}

/// The virtio features in what `status` tells of a port.
///
/// # Panics
/// If there are none.
pub fn features(port: &serde_json::Value) -> u64 {
    let digits = port["features"].as_str().and_then(|text| text.strip_prefix("0x"));
    let features = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    features.unwrap_or_else(|| panic!("no features: {port:#}"))
}
