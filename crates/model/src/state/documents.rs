//! Parts of the status as the API returns them: docs/openapi.json is generated from these types.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    Configuration, LaneStatus, Named, NetworkStatus, PortStatus, RulesStatus, Sandbox, Status, WorkerStatus,
};

/// Fields of ports and networks that only `/v1/counters` has.
const COUNTERS: [&str; 2] = ["counters", "groups"];

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
    configuration: Option<&'a Configuration>,
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
    networks: &'a [NetworkStatus],
}

/// All ports.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PortsDocument<'a> {
    /// Those of the file first.
    ports: &'a [PortStatus],
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
    json!(DaemonDocument {
        version: &status.version,
        pid: status.pid,
        cpu_us: status.cpu_us,
        sandbox: &status.sandbox,
        configuration: status.configuration.as_ref(),
        workers: &status.workers,
        networks: status.networks.len(),
        ports: status.ports.len(),
    })
}

/// All networks without their counters.
#[must_use]
pub fn networks(status: &Status) -> Value {
    let networks = &status.networks;
    without_counters(json!(NetworksDocument { networks }))
}

/// All ports without their counters.
#[must_use]
pub fn ports(status: &Status) -> Value {
    without_counters(json!(PortsDocument { ports: &status.ports }))
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

/// A document without the fields that only `/v1/counters` has.
#[must_use]
pub fn without_counters(value: Value) -> Value {
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
    });
    json!(CountersDocument {
        ports: ports.collect(),
        networks: networks.collect(),
        workers: &status.workers,
    })
}
