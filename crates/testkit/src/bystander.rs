//! An honest guest on the worker that also has hostile ports: it must not notice, and the daemon must be afterwards
//! what it was.

use crate::assert_soon;
use std::collections::HashSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use virtqueue::GuestAddr;

use crate::daemon::Placement;
use crate::holdings::{self, Holdings};
use crate::{Daemon, Driver, DriverConfig, PacketPort, Serve, Traffic, VethPair, frame, wait};

/// A frame each way.
const PACE: Duration = Duration::from_millis(2);
/// Receive buffers of the honest guest, which is one thread of a busy machine: there is always one for a frame.
const BUFFERS: usize = 250;
const WINDOW: usize = 128;
/// The hostile ports' NIC, and its other end, where nobody listens.
const HOSTILE_NIC: &str = "nic1";
const HOSTILE_WIRE: &str = "wire1";

/// A daemon of one worker with an honest guest on one interface, whose numbered frames pass all the time, and ports on
/// another.
#[must_use]
pub struct Bystander {
    traffic: Traffic,
    /// The daemon.
    pub daemon: Daemon,
    before: Holdings,
    /// The interfaces.
    pub veth: VethPair,
}

impl Bystander {
    /// With so many further ports, which nobody uses.
    ///
    /// # Panics
    /// If something does not start.
    pub fn new(placement: Placement, hostile: u32) -> Self {
        Self::with(placement, hostile, |serve| serve)
    }

    /// With further options.
    ///
    /// # Panics
    /// If something does not start.
    pub fn with(placement: Placement, hostile: u32, options: impl FnOnce(Serve) -> Serve) -> Self {
        let veth = VethPair::new();
        veth.join_as(HOSTILE_NIC, HOSTILE_WIRE, hostile, 1500);
        let mut serve = options(Serve::interface(VethPair::NIC).placement(placement));
        if !serve.args().iter().any(|arg| arg == "--workers") {
            serve = serve.with("--workers", "1");
        }
        let hostile: Vec<_> = (0..hostile)
            .map(|queue| format!("ifname={HOSTILE_NIC},start-queue={queue}"))
            .collect();
        let ports: Vec<_> = ["start-queue=0"]
            .into_iter()
            .chain(hostile.iter().map(String::as_str))
            .collect();
        let mut daemon = Daemon::start_ports(&veth.near, &serve, &ports);
        let wire = PacketPort::open(&veth.far, VethPair::WIRE);
        let guest = Driver::connect(&daemon.path("port0.sock"), &DriverConfig::default()).expect("accepted");
        // What is made once and kept: arenas of the allocator, the log's buffers.
        for port in 1..ports.len() {
            drop(Driver::connect(
                &daemon.path(&format!("port{port}.sock")),
                &DriverConfig::default(),
            ));
        }
        await_unused(&daemon);
        let before = holdings::steady(daemon.process().pid(), wait::QUIET);
        Self {
            traffic: traffic(guest, wire),
            daemon,
            before,
            veth,
        }
    }

    /// Where VMMs of a hostile port connect, the first of which is 1.
    pub fn socket(&self, port: u32) -> PathBuf {
        self.daemon.path(&format!("port{port}.sock"))
    }

    /// How many frames of the honest guest, and how many for it, were sent so far.
    pub fn sent(&self) -> [usize; 2] {
        self.traffic.flows().map(|flow| flow.sent.len())
    }

    /// Waits until so many more frames were sent each way.
    ///
    /// # Panics
    /// If they are not.
    pub fn await_frames(&self, count: usize) {
        let begun = self.sent();
        let passed = || {
            self.sent()
                .iter()
                .zip(begun)
                .all(|(now, then)| now - then >= count)
        };
        assert!(wait::until(6 * wait::SOON, passed), "the traffic has stopped");
    }

    /// The other end of the hostile ports' interface.
    pub fn hostile_wire(&self) -> PacketPort {
        PacketPort::open(&self.veth.far, HOSTILE_WIRE)
    }

    /// All frames of the honest guest and for it have arrived, once; its connection is the first one. The daemon lives,
    /// tells its status, and once nobody uses the other ports, which an honest guest can do then, it holds what it held
    /// before.
    ///
    /// # Panics
    /// If any of that is not so.
    #[track_caller]
    pub fn assert_unharmed(self) {
        self.assert_others_unharmed(&[]);
    }

    /// As [`assert_unharmed`](Self::assert_unharmed), where these ports have lost the right to be used.
    ///
    /// # Panics
    /// If that is not so.
    #[track_caller]
    pub fn assert_others_unharmed(mut self, barred: &[usize]) {
        self.daemon.process().check();
        let ports = self.daemon.status()["ports"].as_array().expect("ports").len();
        for port in (1..ports).filter(|port| !barred.contains(port)) {
            let socket = self.daemon.path(&format!("port{port}.sock"));
            Driver::connect(&socket, &DriverConfig::default()).expect("an honest guest is served afterwards");
        }
        self.await_frames(50);
        self.assert_all_arrive();
        let port = self.daemon.port(0);
        assert_eq!(
            (&port["sessions"], &port["last_closed"]),
            (&1.into(), &serde_json::Value::Null)
        );
        await_unused(&self.daemon);
        let (pid, before) = (self.daemon.process().pid(), self.before);
        assert_soon!(
            holdings::of(pid).is_within(&before),
            "before {before:?}, after {:?}",
            holdings::of(pid)
        );
    }

    /// Whatever was sent until now arrives, and once.
    #[track_caller]
    fn assert_all_arrive(&self) {
        let stopped = self.sent();
        let missing = || {
            let flows = self.traffic.flows();
            [0, 1].map(|at| {
                let arrived: HashSet<_> = flows[at]
                    .arrived
                    .iter()
                    .map(|&(number, _)| number as usize)
                    .collect();
                (0..stopped[at])
                    .filter(|number| !arrived.contains(number))
                    .collect::<Vec<_>>()
            })
        };
        assert_soon!(
            missing().iter().all(Vec::is_empty),
            "of {stopped:?} frames to and from the honest guest these are lost: {:?}; the daemon said:\n{}",
            missing(),
            self.daemon.said()
        );
        let repeated = self.traffic.flows().map(|flow| flow.repeated());
        assert!(
            repeated.iter().all(Vec::is_empty),
            "frames came twice: {repeated:?}"
        );
    }
}

/// Waits until no port but the first has a VMM.
fn await_unused(daemon: &Daemon) {
    let unused = || {
        let ports = daemon.status()["ports"].clone();
        let connected = |port: &serde_json::Value| port["connected"] == true;
        !ports.as_array().expect("ports").iter().skip(1).any(connected)
    };
    assert_soon!(unused(), "a VMM is still connected: {:#}", daemon.status());
}

/// Frames under way, begun when they pass: a NIC drops what comes before it has buffers.
fn traffic(mut guest: Driver, wire: PacketPort) -> Traffic {
    let pair = &mut guest.pairs[0];
    pair.post(BUFFERS, &[2048]);
    let begun = Instant::now();
    loop {
        let _ = wire.try_send(&frame::plain(60, 1));
        if pair.receive(wait::QUIET).is_some() {
            break;
        }
        assert!(
            begun.elapsed() < wait::SOON,
            "nothing arrives in the honest guest"
        );
    }
    // Behind those that came after the first.
    let last = frame::last();
    wire.send(&last);
    pair.receive_before(&last);
    Traffic::start_within(guest, wire, PACE, WINDOW)
}

/// Is served as an honest guest, and leaves: the next VMM is served without a pause, which comes after many VMMs whose
/// queues never ran.
///
/// # Panics
/// If the daemon does not serve it.
pub fn come_in_peace(socket: &std::path::Path) {
    let config = DriverConfig {
        regions: vec![(GuestAddr(0), 4 << 20)],
        queue_size: 64,
        ..DriverConfig::default()
    };
    drop(Driver::connect(socket, &config).expect("an honest guest is served"));
}
