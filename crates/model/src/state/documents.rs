//! Parts of the status as the API returns them: docs/openapi.json is generated from these types.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{
    Configuration, LaneStatus, Named, NetworkStatus, PortStatus, RulesStatus, Sandbox, Source, Status,
    WorkerStatus,
};
use crate::config::{Network, Port};

/// Fields of ports and networks that only `/v1/counters` has.
const COUNTERS: [&str; 3] = ["counters", "groups", "links"];

/// The daemon, without its ports.
#[derive(Debug, Serialize, JsonSchema)]
pub struct DaemonDocument<'a> {
    /// Version of the daemon.
    version: &'a str,
    /// Its process.
    pid: u32,
    /// CPU time of all its threads, microseconds.
    cpu_us: u64,
    /// What confines the process.
    sandbox: &'a Sandbox,
    /// The configuration file; null without --config.
    configuration: Option<Configuration>,
    /// Threads that move frames.
    workers: &'a [WorkerStatus],
    /// Number of its networks.
    networks: usize,
    /// Number of its ports.
    ports: usize,
}

/// All networks.
#[derive(Debug, Serialize, JsonSchema)]
pub struct NetworksDocument<'a> {
    /// Those of the file first.
    networks: Vec<NetworkDocument<'a>>,
}

/// A network, its uplink and its ports.
#[derive(Debug, Serialize, JsonSchema)]
pub struct NetworkDocument<'a> {
    #[serde(flatten)]
    status: &'a NetworkStatus,
    /// Where its configuration is from; null without a file.
    source: Option<Source>,
    /// Its configuration; null without a file.
    #[schemars(with = "Option<Network>")]
    configuration: Option<&'a Map<String, Value>>,
}

/// All ports.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PortsDocument<'a> {
    /// Those of the file first.
    ports: Vec<PortDocument<'a>>,
}

/// A port: the network device of one guest.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PortDocument<'a> {
    #[serde(flatten)]
    status: &'a PortStatus,
    /// Where its configuration is from; null without a file.
    source: Option<Source>,
    /// Its configuration; null without a file.
    #[schemars(with = "Option<Port>")]
    configuration: Option<&'a Map<String, Value>>,
    /// How the last session ended; null before one ended.
    last_closed: Option<Closed<'a>>,
}

/// How a session ended.
#[derive(Debug, Serialize, JsonSchema)]
struct Closed<'a> {
    /// Stable name of the reason.
    reason: &'a str,
    /// A sentence.
    detail: &'a str,
}

/// All counters of all ports, uplinks and taps of the host.
#[derive(Debug, Serialize, JsonSchema)]
pub struct CountersDocument<'a> {
    /// Counters of each port.
    ports: Vec<PortCounters<'a>>,
    /// Counters of each network.
    networks: Vec<NetworkCounters<'a>>,
    /// Counters of each worker.
    workers: &'a [WorkerStatus],
}

/// Counters of a port.
#[derive(Debug, Serialize, JsonSchema)]
struct PortCounters<'a> {
    /// Name of the port.
    name: &'a str,
    /// Counters of each of its queue pairs.
    pairs: Vec<PairCounters<'a>>,
}

/// Counters of a network.
#[derive(Debug, Serialize, JsonSchema)]
struct NetworkCounters<'a> {
    /// Name of the network.
    name: &'a str,
    /// Counters of each queue of its uplink.
    queues: Vec<PairCounters<'a>>,
    /// Counters of the host's tap device, if there is one.
    host: Vec<PairCounters<'a>>,
    /// Counters of multicast and broadcast frames from the uplink.
    groups: &'a [Named],
    /// Counters of frames from worker to worker, all links together; none with one worker.
    links: &'a [Named],
}

/// Counters of a queue pair.
#[derive(Debug, Serialize, JsonSchema)]
struct PairCounters<'a> {
    /// Number of the queue pair.
    pair: usize,
    /// NIC queue.
    queue: Option<u32>,
    /// All counters.
    counters: &'a [Named],
}

/// The daemon, without its ports.
#[must_use]
pub fn daemon(status: &Status) -> Value {
    let mut value = json!(DaemonDocument {
        version: &status.version,
        pid: status.pid,
        cpu_us: status.cpu_us,
        sandbox: &status.sandbox,
        configuration: status.configuration.clone(),
        workers: &status.workers,
        networks: status.networks.len(),
        ports: status.ports.len(),
    });
    let configuration = value["configuration"].as_object_mut();
    if let Some(configuration) = configuration {
        configuration.retain(|key, _| key != "ports" && key != "networks");
    }
    value
}

/// All networks without their counters.
#[must_use]
pub fn networks(status: &Status) -> Value {
    let networks = status.networks.iter();
    let networks = networks
        .map(|network| network_document(status, network))
        .collect();
    without_counters(json!(NetworksDocument { networks }))
}

/// A network without its counters.
#[must_use]
pub fn network(status: &Status, network: &NetworkStatus) -> Value {
    without_counters(json!(network_document(status, network)))
}

fn network_document<'a>(status: &'a Status, network: &'a NetworkStatus) -> NetworkDocument<'a> {
    let configuration = status.configuration.as_ref();
    let known = configuration.and_then(|configuration| configuration.networks.get(&network.name));
    NetworkDocument {
        status: network,
        source: known.map(|known| known.source),
        configuration: known.map(|known| &known.keys),
    }
}

/// All ports without their counters.
#[must_use]
pub fn ports(status: &Status) -> Value {
    let ports = status.ports.iter().map(|port| document(status, port)).collect();
    without_counters(json!(PortsDocument { ports }))
}

/// A port without its counters.
#[must_use]
pub fn port(status: &Status, port: &PortStatus) -> Value {
    without_counters(json!(document(status, port)))
}

fn document<'a>(status: &'a Status, port: &'a PortStatus) -> PortDocument<'a> {
    let configuration = status.configuration.as_ref();
    let known = configuration.and_then(|configuration| configuration.ports.get(&port.name));
    let closed = port.last_closed.as_ref();
    PortDocument {
        status: port,
        source: known.map(|known| known.source),
        configuration: known.map(|known| &known.keys),
        last_closed: closed.map(|(reason, detail)| Closed { reason, detail }),
    }
}

/// Adds the filter rules of a port to its configuration.
pub fn with_rules(port: &mut Value, rules: RulesStatus) {
    let Some(said) = port["configuration"].as_object_mut() else {
        return;
    };
    let mut rules = rules.rules;
    rules.iter_mut().for_each(|rule| _ = rule.remove("frames"));
    if !rules.is_empty() {
        said.insert("rule".to_owned(), json!(rules));
    }
}

fn without_counters(value: Value) -> Value {
    match value {
        Value::Array(list) => list.into_iter().map(without_counters).collect(),
        Value::Object(mut fields) => {
            fields.retain(|key, _| !COUNTERS.contains(&key.as_str()));
            let fields = fields.into_iter();
            fields
                .map(|(key, value)| (key, without_counters(value)))
                .collect()
        }
        other => other,
    }
}

/// All counters of all ports, uplinks and taps of the host.
#[must_use]
pub fn counters(status: &Status) -> Value {
    fn of_lanes(lanes: &[LaneStatus]) -> Vec<PairCounters<'_>> {
        let lanes = lanes.iter();
        lanes
            .map(|lane| PairCounters {
                pair: lane.pair,
                queue: lane.queue,
                counters: &lane.counters,
            })
            .collect()
    }
    let ports = status.ports.iter().map(|port| PortCounters {
        name: &port.name,
        pairs: of_lanes(&port.lanes),
    });
    let networks = status.networks.iter().map(|network| NetworkCounters {
        name: &network.name,
        queues: of_lanes(&network.queues),
        host: network
            .host
            .as_ref()
            .map_or_else(Vec::new, |host| of_lanes(std::slice::from_ref(&host.queue))),
        groups: &network.groups,
        links: &network.links,
    });
    json!(CountersDocument {
        ports: ports.collect(),
        networks: networks.collect(),
        workers: &status.workers,
    })
}
