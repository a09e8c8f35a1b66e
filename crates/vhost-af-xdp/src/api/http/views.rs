//! The status as the API's documents have it (docs/openapi.json).

use serde_json::{Value, json};

use crate::api::status::{PortStatus, Status};

/// What clients, and metrics, call a port.
pub(super) fn name(port: &PortStatus) -> &str {
    &port.name
}

/// The daemon, without its ports.
pub(super) fn daemon(status: &Status) -> Value {
    json!({
        "version": status.version,
        "pid": status.pid,
        "cpu_us": status.cpu_us,
        "sandbox": status.sandbox,
        "workers": status.workers,
        "ports": status.ports.len(),
    })
}

pub(super) fn ports(status: &Status) -> Value {
    let ports: Vec<Value> = status.ports.iter().map(port).collect();
    json!({ "ports": ports })
}

/// A port without its counters.
pub(super) fn port(port: &PortStatus) -> Value {
    let mut value = json!(port);
    value["last_closed"] = match &port.last_closed {
        Some((reason, detail)) => json!({ "reason": reason, "detail": detail }),
        None => Value::Null,
    };
    let lanes = value["lanes"].as_array_mut().into_iter().flatten();
    for lane in lanes.filter_map(Value::as_object_mut) {
        lane.remove("counters");
    }
    value
}

/// All counters of all ports.
pub(super) fn counters(status: &Status) -> Value {
    let of_port = |port: &PortStatus| {
        let pairs = port.lanes.iter();
        let pairs: Vec<Value> = pairs
            .map(|lane| json!({ "pair": lane.pair, "queue": lane.queue, "counters": lane.counters }))
            .collect();
        json!({ "name": name(port), "pairs": pairs })
    };
    let ports: Vec<Value> = status.ports.iter().map(of_port).collect();
    json!({ "ports": ports, "workers": status.workers })
}
