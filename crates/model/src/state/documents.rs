//! Parts of the status as the API has them (docs/openapi.json).

use serde_json::{Value, json};

use super::{LaneStatus, NetworkStatus, PortStatus, RulesStatus, Status};

/// The daemon, without its ports.
#[must_use]
pub fn daemon(status: &Status) -> Value {
    let mut configuration = json!(status.configuration);
    configuration.as_object_mut().map(|fields| fields.remove("ports"));
    json!({
        "version": status.version,
        "pid": status.pid,
        "cpu_us": status.cpu_us,
        "sandbox": status.sandbox,
        "configuration": configuration,
        "workers": status.workers,
        "networks": status.networks.len(),
        "ports": status.ports.len(),
    })
}

/// All networks without their counters.
#[must_use]
pub fn networks(status: &Status) -> Value {
    let networks: Vec<Value> = status.networks.iter().map(network).collect();
    json!({ "networks": networks })
}

/// A network without its counters.
#[must_use]
pub fn network(network: &NetworkStatus) -> Value {
    let mut value = json!(network);
    without_counters(&mut value["queues"]);
    if let Some(queue) = value.pointer_mut("/host/queue").and_then(Value::as_object_mut) {
        queue.remove("counters");
    }
    if let Some(fields) = value.as_object_mut() {
        fields.retain(|key, _| !matches!(key.as_str(), "groups" | "links"));
    }
    value
}

/// All ports without their counters.
#[must_use]
pub fn ports(status: &Status) -> Value {
    let ports: Vec<Value> = status.ports.iter().map(|it| port(status, it)).collect();
    json!({ "ports": ports })
}

/// A port without its counters.
#[must_use]
pub fn port(status: &Status, port: &PortStatus) -> Value {
    let mut value = json!(port);
    let readings = status.configuration.as_ref();
    let said = readings.and_then(|readings| readings.ports.get(&port.name));
    value["source"] = json!(said.map(|said| said.source));
    value["configuration"] = json!(said.map(|said| &said.keys));
    value["last_closed"] = match &port.last_closed {
        Some((reason, detail)) => json!({ "reason": reason, "detail": detail }),
        None => Value::Null,
    };
    without_counters(&mut value["lanes"]);
    value
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

fn without_counters(lanes: &mut Value) {
    let lanes = lanes.as_array_mut().into_iter().flatten();
    for lane in lanes.filter_map(Value::as_object_mut) {
        lane.remove("counters");
    }
}

/// All counters of all ports, uplinks and taps of the host.
#[must_use]
pub fn counters(status: &Status) -> Value {
    let of_lanes = |lanes: &[LaneStatus]| -> Vec<Value> {
        let lanes = lanes.iter();
        lanes
            .map(|lane| json!({ "pair": lane.pair, "queue": lane.queue, "counters": lane.counters }))
            .collect()
    };
    let ports = status.ports.iter();
    let ports: Vec<Value> = ports
        .map(|port| json!({ "name": port.name, "pairs": of_lanes(&port.lanes) }))
        .collect();
    let networks = status.networks.iter();
    let networks: Vec<Value> = networks
        .map(|network| {
            let host = network
                .host
                .as_ref()
                .map(|host| std::slice::from_ref(&host.queue));
            json!({
                "name": network.name,
                "queues": of_lanes(&network.queues),
                "host": of_lanes(host.unwrap_or_default()),
                "groups": network.groups,
                "links": network.links,
            })
        })
        .collect();
    json!({ "ports": ports, "networks": networks, "workers": status.workers })
}
