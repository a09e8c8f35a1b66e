//! What the daemon is doing, as data: the one source for `status`, its JSON and SIGUSR1.
//!
//! Reading it waits for no port's turn ([`crate::port::shown`]) and no other process. What XDP programs counted is asked
//! for on threads of their own, and waited for no longer than [`SAMPLES`].

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use steer::{Filter, mac_text};
use xsk::NumaNode;

pub(crate) use super::lane_status::LaneStatus;
use super::network_status::NetworkStatus;
use crate::config::PortRules;
use crate::guard::watchdog::{Hang, Watchdog};
use crate::network::Network;
use crate::port::Port;
use crate::rates::PortRates;
use crate::reload::Readings;
use crate::sandbox::InForce;
use crate::switch::readings::WorkerReading;
use crate::switch::table::Station;
use crate::switch::workers::Workers;
use device::features::Negotiated;
use device::offloads::Offloads;

/// How long fresh counters of XDP programs are waited for, all together; the last ones are shown then.
const SAMPLES: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct PortStatus {
    /// What the file calls it; without a file its socket.
    pub(crate) name: String,
    /// Socket.
    pub(crate) endpoint: String,
    /// Network that it is part of.
    pub(crate) network: Option<String>,
    /// Interface, `cable NAME`, `network NAME` or `null`.
    pub(crate) nic: String,
    /// How the steering program is attached: `native` or `skb`; none without an interface, or a program on it.
    pub(crate) attached: Option<String>,
    /// How frames come to its queues: `queue` (whatever the NIC puts there), `program` (of that, the frames of `macs`
    /// and `vlans`), `n-tuple rules`, `n-tuple rules, RSS context` (the NIC brings these, too); none without an
    /// interface.
    pub(crate) steered: Option<String>,
    /// Why not in a better way, or why impaired; as the steward says.
    pub(crate) steering_note: Option<String>,
    /// What is known of the interface's driver; none without an interface.
    pub(crate) driver: Option<String>,
    /// NUMA node of the interface; none where there is one only, or that is not known.
    pub(crate) node: Option<u16>,
    /// Of what comes to its own queues: addresses of stations whose frames the guest gets; empty: all.
    pub(crate) macs: Vec<String>,
    /// The same of VLANs; empty: all.
    pub(crate) vlans: Vec<u16>,
    /// Which frames its guest may send and gets beside, as it was asked for.
    #[serde(flatten)]
    pub(crate) rules: PortRules,
    /// `copy`, `send-direct` or `direct`.
    pub(crate) memory: String,
    /// Address told to the guest.
    pub(crate) mac: String,
    /// Addresses that it has beside that one, which were learned.
    #[serde(default)]
    pub(crate) learned: Vec<LearnedStation>,
    /// MTU told to the guest, bytes.
    pub(crate) mtu: u16,
    /// A VMM is connected.
    pub(crate) connected: bool,
    /// Its process.
    pub(crate) peer: Option<i32>,
    /// Virtio features that it acknowledged.
    pub(crate) features: String,
    /// Offloads that are offered, by name.
    pub(crate) offload_offered: Vec<String>,
    /// Those of them that the guest accepted.
    pub(crate) offload: Vec<String>,
    /// Connections so far.
    pub(crate) sessions: u64,
    /// Why no frames move although they should.
    pub(crate) impaired: Option<String>,
    /// What is being done for it, and for how long, if that is long; all but the counters is as it was before.
    pub(crate) busy: Option<String>,
    /// A VMM that came while another was there, and was refused.
    pub(crate) turned_away: Option<String>,
    /// How much its guest may send and get.
    pub(crate) limits: PortRates,
    /// How the last session ended: reason and sentence.
    pub(crate) last_closed: Option<(String, String)>,
    /// Its queue pairs.
    pub(crate) lanes: Vec<LaneStatus>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct WorkerStatus {
    /// Rounds that moved frames.
    pub(crate) busy_rounds: u64,
    /// Rounds that did not.
    pub(crate) idle_rounds: u64,
    /// Times it slept.
    pub(crate) sleeps: u64,
    /// Nanoseconds in rounds that moved frames.
    pub(crate) busy_ns: u64,
    /// In those that did not, and falling asleep.
    pub(crate) idle_ns: u64,
    /// Asleep, as of now.
    pub(crate) asleep_ns: u64,
    /// That it hangs, for how long, and in which port: on a cable it may be either of two.
    pub(crate) hangs: Option<String>,
    /// NUMA node that it runs on, see [`PortStatus::node`].
    pub(crate) node: Option<u16>,
}

/// An address in a VLAN that a port has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LearnedStation {
    pub(crate) mac: String,
    /// 0: none.
    pub(crate) vlan: u16,
}

impl From<Station> for LearnedStation {
    fn from(station: Station) -> Self {
        Self {
            mac: mac_text(station.mac()),
            vlan: station.vlan(),
        }
    }
}

impl fmt::Display for LearnedStation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.vlan {
            0 => f.write_str(&self.mac),
            vlan => write!(f, "{} (VLAN {vlan})", self.mac),
        }
    }
}

/// The whole daemon.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Status {
    /// Process.
    pub(crate) pid: u32,
    /// Version of the daemon.
    pub(crate) version: String,
    /// CPU time used so far, all threads, microseconds.
    pub(crate) cpu_us: u64,
    /// What confines the process.
    pub(crate) sandbox: InForce,
    /// The file that its ports are of; none without one.
    pub(crate) configuration: Option<Readings>,
    /// Where its API is asked, if it has one.
    #[serde(default)]
    pub(crate) api: Option<PathBuf>,
    pub(crate) workers: Vec<WorkerStatus>,
    /// What they did, in detail.
    #[serde(default)]
    pub(crate) work: Vec<WorkerReading>,
    /// Cycles of a microsecond; none where the CPU does not tell.
    #[serde(default)]
    pub(crate) cycles_per_us: Option<f64>,
    pub(crate) networks: Vec<NetworkStatus>,
    pub(crate) ports: Vec<PortStatus>,
}

impl Status {
    /// Takes a look.
    pub(crate) fn read(
        ports: &[Arc<Port>],
        networks: &[Arc<Network>],
        workers: &Workers,
        watchdog: &Watchdog,
        sandbox: &InForce,
        configuration: Option<Readings>,
    ) -> Self {
        await_samples(ports, networks);
        let now = Instant::now();
        let hangs: Vec<_> = watchdog
            .hangs()
            .iter()
            .map(|hang| hang.as_ref().map(Hang::words))
            .collect();
        Self {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            cpu_us: cpu_us(),
            sandbox: sandbox.clone(),
            configuration,
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
            work: read_work(ports, workers),
            cycles_per_us: workers.cycles_per_us(),
            networks: networks
                .iter()
                .map(|network| NetworkStatus::read(network, ports))
                .collect(),
            ports: ports.iter().map(|port| PortStatus::read(port)).collect(),
        }
    }
}

/// What workers did, with the NIC queues of ports that have some for themselves.
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

/// Waits until it is known what the programs of ports and networks counted and how they are attached, all at a time:
/// each is asked by a thread of its own, as somebody may be waiting for an answer of its steward.
fn await_samples(ports: &[Arc<Port>], networks: &[Arc<Network>]) {
    let deadline = Instant::now() + SAMPLES;
    let (asked, known) = mpsc::channel::<()>();
    let ask = |sample: Box<dyn FnOnce() + Send>| {
        let asked = asked.clone();
        let body = move || {
            sample();
            drop(asked);
        };
        // Without it, what was known before is shown.
        let _ = std::thread::Builder::new().name("sample".to_owned()).spawn(body);
    };
    for port in ports.iter().filter(|port| port.config.wanted().is_some()) {
        let port = Arc::clone(port);
        ask(Box::new(move || port.sample(deadline)));
    }
    for network in networks.iter().filter(|network| network.shown().uplink.is_some()) {
        let network = Arc::clone(network);
        ask(Box::new(move || network.sample(deadline)));
    }
    drop(asked);
    // Nothing is ever sent: all senders are dropped.
    let _ = known.recv_timeout(deadline.saturating_duration_since(Instant::now()));
}

fn cpu_us() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0) / 1_000
}

impl PortStatus {
    /// Of what the port shows, and of its counters.
    pub(crate) fn read(port: &Port) -> Self {
        // First: what is shown may be newer than that, and not older.
        let busy = port.window.busy();
        let shown = port.window.shown().unwrap_or_default();
        let (session, interface) = (shown.session.as_ref(), shown.interface.as_ref());
        let steering = interface.map(|interface| &interface.steering);
        let counted = interface.and_then(|interface| interface.itself.upgrade());
        let features = session.map_or(0, |session| session.features);
        let wanted = port.config.wanted();
        let filter = wanted.map_or_else(Filter::default, |wanted| wanted.filter);
        let lane = |pair: usize| {
            let facts = session.and_then(|session| session.lanes.get(pair)?.upgrade());
            let queue = port.queue_of(pair);
            let counters = &port.counters[pair];
            LaneStatus::read(pair, queue, counters, facts.as_deref(), counted.as_deref())
        };
        Self {
            name: port.name().to_owned(),
            endpoint: port.config.endpoint.to_string(),
            network: port.config.nic.network().map(str::to_owned),
            nic: interface.map_or_else(|| port.config.nic.to_string(), |interface| interface.name.clone()),
            attached: match &counted {
                Some(interface) => interface.steering.attached(),
                None => interface.and_then(|interface| interface.attached),
            }
            .map(|mode| mode.to_string()),
            steered: steering.map(|steering| steering.by.name().to_owned()),
            steering_note: steering
                .map(|steering| steering.note.clone())
                .filter(|note| !note.is_empty()),
            driver: interface.map(|interface| interface.driver.clone()),
            node: interface
                .and_then(|interface| interface.node)
                .map(NumaNode::number),
            macs: filter.macs.into_iter().map(mac_text).collect(),
            vlans: filter.vlans,
            rules: port.rules(),
            memory: port.config.placement.to_string(),
            mac: mac_text(port.mac()),
            learned: port.learned().into_iter().map(LearnedStation::from).collect(),
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
            turned_away: port.window.turned_away().map(|turned| turned.to_string()),
            last_closed: (shown.last_closed.as_ref())
                .map(|closed| (closed.name().to_owned(), closed.to_string())),
            lanes: (0..port.counters.len()).map(lane).collect(),
        }
    }
}

fn names(offloads: Offloads) -> Vec<String> {
    offloads.names().into_iter().map(str::to_owned).collect()
}
