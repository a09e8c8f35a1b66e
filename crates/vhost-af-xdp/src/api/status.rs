//! Reads the [state](model::state) of the daemon.
//!
//! It waits neither for a port's lock ([`crate::port::snapshot`]) nor for another process. Separate threads request
//! the counters of XDP programs; the status waits [`SAMPLES`] for them at most.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use common::drivers;
use model::state::{Closed, LearnedStation, PortStatus, Sandbox, Status, WorkerReading, WorkerStatus};
use steer::{Filter, mac_text};
use xsk::NumaNode;

use super::{lane_status, network_status};
use crate::network::Network;
use crate::nic::interface::Interface;
use crate::port::Port;
use crate::supervision::watchdog::{Hang, Watchdog};
use crate::thread;
use dataplane::fdb::FdbKey;
use dataplane::worker::workers::Workers;
use device::features::Negotiated;
use device::offloads::Offloads;

/// How long to wait for the counters of all XDP programs; then the last known ones are shown.
const SAMPLES: Duration = Duration::from_millis(500);

fn learned(key: FdbKey) -> LearnedStation {
    LearnedStation {
        mac: mac_text(key.mac()),
        vlan: key.vlan(),
    }
}

/// Reads the state of the daemon, without its configuration. `path`: the part that the client requests; empty: all.
/// Lists outside of that part stay empty, because reading all counters of many ports takes milliseconds.
pub(crate) fn read(
    path: &[String],
    (ports, networks): (&[Arc<Port>], &[Arc<Network>]),
    workers: &Workers,
    watchdog: &Watchdog,
    sandbox: &Sandbox,
) -> Status {
    let is_wanted = |list: &str| path.first().is_none_or(|first| first == list);
    let networks = if is_wanted("networks") { networks } else { &[] };
    let shown = if is_wanted("ports") { ports } else { &[] };
    let work = is_wanted("work").then(|| read_work(ports, workers));
    await_samples(shown, networks);
    let now = Instant::now();
    let hangs: Vec<_> = watchdog
        .hangs()
        .iter()
        .map(|hang| hang.as_ref().map(Hang::words))
        .collect();
    Status {
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        cpu_us: cpu_us(),
        sandbox: sandbox.clone(),
        configuration: None,
        api: None,
        workers: workers
            .counters()
            .zip(hangs)
            .zip(workers.nodes())
            .map(|((counters, hangs), node)| WorkerStatus {
                busy_rounds: counters.busy_rounds.get(),
                idle_rounds: counters.idle_rounds.get(),
                sleeps: counters.sleeps.get(),
                busy_ns: counters.time.busy.get(),
                idle_ns: counters.time.idle.get(),
                asleep_ns: counters.time.asleep(now),
                hangs,
                node: node.map(NumaNode::number),
            })
            .collect(),
        work: work.unwrap_or_default(),
        cycles_per_us: workers.cycles_per_us(),
        networks: networks
            .iter()
            .map(|network| network_status::read(network, ports))
            .collect(),
        ports: shown.iter().map(|port| read_port(port)).collect(),
    }
}

/// What the workers did, with the NIC queue of each pair whose port has queues of its own.
fn read_work(ports: &[Arc<Port>], workers: &Workers) -> Vec<WorkerReading> {
    let mut readings = workers.readings();
    let lanes = readings.iter_mut().flat_map(|reading| &mut reading.lanes);
    for lane in lanes.map(|reading| &mut reading.lane) {
        let port = ports
            .iter()
            .find(|port| Some(port.name()) == lane.port.as_deref());
        if let (Some(port), Some(pair)) = (port, lane.pair) {
            lane.queue = port.queue_of(usize::from(pair));
        }
    }
    readings
}

/// Updates the counters of the programs of ports and networks, and how they are attached. Each is asked in a thread of
/// its own, all at the same time, as one may have to wait for its steward.
fn await_samples(ports: &[Arc<Port>], networks: &[Arc<Network>]) {
    let deadline = Instant::now() + SAMPLES;
    let (asked, known) = mpsc::channel::<()>();
    let ask = |sample: Box<dyn FnOnce() + Send>| {
        let asked = asked.clone();
        let body = move || {
            sample();
            drop(asked);
        };
        // Without a thread, the last known values are shown.
        let _ = thread::start("sample", body);
    };
    for port in ports.iter().filter(|port| port.config.wanted().is_some()) {
        let port = Arc::clone(port);
        ask(Box::new(move || port.sample(deadline)));
    }
    for network in networks
        .iter()
        .filter(|network| network.shown().status.uplink.is_some())
    {
        let network = Arc::clone(network);
        ask(Box::new(move || network.sample(deadline)));
    }
    drop(asked);
    // Nothing is ever sent: this ends when all senders are dropped.
    let _ = known.recv_timeout(deadline.saturating_duration_since(Instant::now()));
}

fn cpu_us() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0) / 1_000
}

/// Reads the state of one port.
pub(crate) fn read_port(port: &Port) -> PortStatus {
    // Read first: the snapshot may be newer than this, but not older.
    let busy = port.published.busy();
    let shown = port.published.snapshot().unwrap_or_default();
    let session = shown.session.as_ref();
    // Held for a moment only: a socket in there keeps its queue bound.
    let interface = shown.interface.upgrade();
    let interface = interface.as_deref();
    let steering = interface.map(|interface| interface.steering.report());
    let features = session.map_or(0, |session| session.features);
    let wanted = port.config.wanted();
    let filter = wanted.map_or_else(Filter::default, |wanted| wanted.filter);
    let lane = |pair: usize| {
        let facts = session.and_then(|session| session.lanes.get(pair)?.upgrade());
        let queue = port.queue_of(pair);
        let counters = &port.counters[pair];
        lane_status::read(pair, queue, counters, facts.as_deref(), interface)
    };
    PortStatus {
        name: port.name().to_owned(),
        endpoint: port.config.endpoint.to_string(),
        network: port.config.nic.network().map(str::to_owned),
        nic: interface.map_or_else(|| port.config.nic.to_string(), Interface::name),
        attached: interface
            .and_then(|interface| interface.steering.attached())
            .map(|mode| mode.to_string()),
        steered: steering.as_ref().map(|steering| steering.by.name().to_owned()),
        steering_note: steering
            .map(|steering| steering.note)
            .filter(|note| !note.is_empty()),
        driver: interface.map(|interface| drivers::said_of(&interface.link.driver)),
        node: interface
            .and_then(|interface| interface.link.node)
            .map(NumaNode::number),
        macs: filter.macs.into_iter().map(mac_text).collect(),
        vlans: filter.vlans,
        rules: port.rules(),
        memory: port.config.options.placement.to_string(),
        mac: mac_text(port.mac()),
        learned: port.learned().into_iter().map(learned).collect(),
        mtu: u16::try_from(shown.mtu).unwrap_or(u16::MAX),
        connected: session.is_some(),
        peer: session.and_then(|session| session.peer),
        features: format!("{features:#x}"),
        offload_offered: names(port.config.offload),
        offload: names(Negotiated::from(features).offloads),
        sessions: shown.sessions,
        impaired: shown.impaired.as_ref().map(ToString::to_string),
        busy: busy.map(|busy| busy.to_string()),
        limits: port.rates(),
        turned_away: port.published.turned_away().map(|turned| turned.to_string()),
        last_closed: shown.last_closed.as_ref().map(|closed| Closed {
            reason: closed.name().to_owned(),
            detail: closed.to_string(),
        }),
        source: None,
        configuration: None,
        lanes: (0..port.counters.len()).map(lane).collect(),
    }
}

fn names(offloads: Offloads) -> Vec<String> {
    offloads.names().into_iter().map(str::to_owned).collect()
}
