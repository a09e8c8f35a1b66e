//! The status as a person reads it.

use std::fmt::Write as _;

use comfy_table::{CellAlignment, Row, Table, presets};
use model::rates::PortRates;
use model::state::{
    BridgeStatus, Configuration, HintsStatus, HostStatus, LaneStatus, NetworkStatus, PortStatus, Status,
};
use steer::ranges_text;
use steward::protocol::BEHIND_MAX;

use crate::reload;

/// Renders the whole status, ending with a newline.
pub(crate) fn render(status: &Status) -> String {
    let mut text = format!(
        "vhost-af-xdp {}, process {}, {} port(s), {} worker(s), {:.1} s of CPU time\n",
        status.version,
        status.pid,
        status.ports.len(),
        status.workers.len(),
        // Microseconds fit a double's mantissa for 285 years of CPU time.
        status.cpu_us as f64 / 1e6,
    );
    // Writing to a String cannot fail.
    let _ = writeln!(text, "sandbox: {}", status.sandbox);
    if let Some(readings) = &status.configuration {
        render_readings(&mut text, readings);
    }
    for (index, worker) in status.workers.iter().enumerate() {
        if let Some(hangs) = &worker.hangs {
            let _ = writeln!(text, "worker-{index} {hangs}");
        }
    }
    let nodes: Vec<_> = status.workers.iter().map(|worker| worker.node).collect();
    if nodes.iter().any(Option::is_some) {
        let _ = writeln!(text, "workers on NUMA node {}", listed(nodes));
    }
    for network in &status.networks {
        render_network(&mut text, network);
        render_lanes(&mut text, &network.queues);
        if let Some(host) = network.host.as_ref().filter(|host| host.queue.running) {
            text.push_str("\n  host:\n");
            render_lanes(&mut text, std::slice::from_ref(&host.queue));
        }
    }
    for port in &status.ports {
        render_port(&mut text, port);
    }
    text
}

fn render_readings(text: &mut String, readings: &Configuration) {
    let ago = reload::now().saturating_sub(readings.read_at);
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "configuration {}, read {ago} s ago",
        readings.path.display()
    );
    for failed in &readings.failed {
        let _ = writeln!(text, "  {failed}");
    }
}

fn bridge(bridge: &BridgeStatus) -> String {
    let BridgeStatus { name, behind, .. } = bridge;
    let left_out = match bridge.left_out {
        0 => String::new(),
        more => format!(", {more} are not, beyond {BEHIND_MAX} (`bridge fdb show br {name}`)"),
    };
    format!("uplink is a port of bridge {name}: {behind} addresses at its other ports are reached{left_out}")
}

fn host(host: &HostStatus) -> String {
    match (&host.impaired, &host.interface) {
        (Some(why), _) => format!("host not reached: {why}"),
        (None, Some(interface)) => {
            format!("host reached at {}, by {interface}", host.macs.join(", "))
        }
        (None, None) => "host not reached yet".to_owned(),
    }
}

/// A network without its queues.
fn render_network(text: &mut String, network: &NetworkStatus) {
    let state = match (&network.impaired, network.up) {
        (Some(why), _) => format!("impaired: {why}"),
        (None, true) => "up".to_owned(),
        (None, false) => "its uplink is down".to_owned(),
    };
    let uplink = match (&network.uplink, &network.attached) {
        (None, _) => "no uplink".to_owned(),
        (Some(uplink), Some(mode)) => format!("uplink {uplink} (program attached {mode})"),
        (Some(uplink), None) => format!("uplink {uplink} (no program attached)"),
    };
    // Writing to a String cannot fail.
    let _ = writeln!(text, "\nnetwork {}: {state}", network.name);
    let _ = writeln!(
        text,
        "  {uplink}, mtu {}, ports: {}",
        network.mtu,
        network.ports.join(", ")
    );
    if let Some(driver) = &network.driver {
        let _ = writeln!(text, "  driver {driver}");
    }
    if let Some(note) = &network.steering_note {
        let _ = writeln!(text, "  {note}");
    }
    if network.learned_evicted > 0 {
        let _ = writeln!(
            text,
            "  {} learned addresses were evicted",
            network.learned_evicted
        );
    }
    if let Some(of) = &network.host {
        let _ = writeln!(text, "  {}", host(of));
        if let Some(its) = &of.bridge {
            let _ = writeln!(text, "  {}", bridge(its));
        }
    }
}

fn render_port(text: &mut String, port: &PortStatus) {
    let state = match (&port.impaired, port.connected) {
        (Some(reason), _) => format!("impaired: {reason}"),
        (None, true) => port
            .peer
            .map_or("connected".to_owned(), |pid| format!("connected, process {pid}")),
        (None, false) => "waiting for a VMM".to_owned(),
    };
    // Writing to a String cannot fail.
    let place = match port.name == port.endpoint {
        true => String::new(),
        false => format!(" ({})", port.endpoint),
    };
    let _ = writeln!(text, "\nport {}{place}: {state}", port.name);
    if let Some(busy) = &port.busy {
        let _ = writeln!(
            text,
            "  busy: {busy}; but for the counters, this is as it was before"
        );
    }
    let attached = match (&port.attached, &port.steered) {
        (Some(mode), _) => format!(" (program attached {mode})"),
        (None, Some(_)) => " (no program attached)".to_owned(),
        (None, None) => String::new(),
    };
    // One with a queue of its own is there by both.
    let of_network = port.network.as_ref();
    let network = of_network.filter(|_| !port.nic.starts_with("network "));
    let network = network.map_or_else(String::new, |network| format!("network {network}, "));
    let _ = writeln!(
        text,
        "  {network}{}{attached}, memory={}, mac {}, mtu {}, features {}, session {}",
        port.nic, port.memory, port.mac, port.mtu, port.features, port.sessions
    );
    let _ = writeln!(
        text,
        "  offloads: {}; offered: {}",
        list(&port.offload),
        list(&port.offload_offered)
    );
    if !port.learned.is_empty() {
        let learned: Vec<_> = port.learned.iter().map(ToString::to_string).collect();
        let _ = writeln!(text, "  learned: {}", learned.join(", "));
    }
    render_notes(text, port);
    render_lanes(text, &port.lanes);
}

/// Lines on hints, each once; of those who have none and asked for none by name nothing is said.
fn render_hints(text: &mut String, lanes: &[LaneStatus]) {
    let is_said = |hints: &&HintsStatus| !hints.on.is_empty() || hints.why.is_some();
    let hints = lanes
        .iter()
        .filter_map(|lane| lane.hints.as_ref())
        .filter(is_said);
    let mut said: Vec<String> = hints.map(ToString::to_string).collect();
    said.dedup();
    for line in said {
        let _ = writeln!(text, "  {line}");
    }
}

fn render_lanes(text: &mut String, all: &[LaneStatus]) {
    if all.is_empty() {
        return;
    }
    render_hints(text, all);
    let _ = writeln!(text, "{}", lanes(all));
    if let Some(table) = counters(all) {
        let _ = writeln!(text, "{table}");
    }
}

/// A line for each thing that is not always to be said.
fn render_notes(text: &mut String, port: &PortStatus) {
    if let Some(steered) = &port.steered {
        let takes = takes(&port.macs, &port.vlans);
        let _ = writeln!(text, "  frames {takes}, steered by {steered}");
    }
    if let Some(driver) = &port.driver {
        let _ = writeln!(text, "  driver {driver}");
    }
    if let Some(node) = port.node {
        let memory = port.lanes.iter().filter(|lane| lane.running);
        let memory = listed(memory.map(|lane| lane.node).collect());
        let _ = writeln!(
            text,
            "  NUMA: interface on node {node}, packet memory on node {memory}"
        );
    }
    if let Some(note) = &port.steering_note {
        let _ = writeln!(text, "  {note}");
    }
    if let Some(rules) = port.rules.line(port.network.is_some()) {
        let _ = writeln!(text, "  {rules}");
    }
    if port.limits != PortRates::UNLIMITED {
        let _ = writeln!(text, "  limits: {}", port.limits);
    }
    if let Some(reason) = &port.turned_away {
        let _ = writeln!(text, "  {reason}");
    }
    if let Some((reason, detail)) = &port.last_closed {
        let _ = writeln!(text, "  last session ended: {reason}: {detail}");
    }
    let mut checksums: Vec<&str> = port
        .lanes
        .iter()
        .filter_map(|lane| lane.checksums.as_deref())
        .collect();
    checksums.dedup();
    if !checksums.is_empty() {
        let _ = writeln!(
            text,
            "  checksums of frames from the guest by: {}",
            checksums.join(", ")
        );
    }
    let mut fallbacks: Vec<&String> = port.lanes.iter().flat_map(|lane| &lane.fallbacks).collect();
    fallbacks.dedup();
    for fallback in fallbacks {
        let _ = writeln!(text, "  {fallback}");
    }
}

/// Different nodes, in order; a dash for one that is not known, or if there is none.
fn listed(mut nodes: Vec<Option<u16>>) -> String {
    nodes.sort_unstable();
    nodes.dedup();
    let words: Vec<_> = nodes.into_iter().map(or_dash).collect();
    match words.as_slice() {
        [] => or_dash(None::<u16>),
        words => words.join(", "),
    }
}

/// Which frames, in words.
pub(crate) fn takes(macs: &[String], vlans: &[u16]) -> String {
    let vlans = words_of_vlans(vlans);
    match (macs, vlans) {
        ([], None) => "of all stations and VLANs".to_owned(),
        (macs, None) => format!("to {} and to groups", macs.join(", ")),
        ([], Some(vlans)) => vlans,
        (macs, Some(vlans)) => format!("to {} and to groups {vlans}", macs.join(", ")),
    }
}

/// Frames of these VLANs, if not of all: number 0 is none.
fn words_of_vlans(vlans: &[u16]) -> Option<String> {
    let tagged: Vec<u16> = vlans.iter().copied().filter(|&vlan| vlan > 0).collect();
    let numbers = ranges_text(tagged.iter().copied());
    match (vlans, tagged.as_slice()) {
        ([], _) => None,
        (_, []) => Some("without a VLAN".to_owned()),
        (all, tagged) if all.len() > tagged.len() => Some(format!("of VLAN {numbers} and without one")),
        _ => Some(format!("of VLAN {numbers}")),
    }
}

fn list(names: &[String]) -> String {
    match names {
        [] => "none".to_owned(),
        names => names.join(" "),
    }
}

fn lanes(lanes: &[LaneStatus]) -> Table {
    let header = [
        "pair",
        "queue",
        "mode",
        "from guest",
        "to guest",
        "drops",
        "packet memory",
        "kernel",
    ];
    let mut table = table(header, |column| column >= 3);
    for lane in lanes {
        table.add_row([
            lane.pair.to_string(),
            or_dash(lane.queue),
            lane.mode.clone().unwrap_or_else(|| "stopped".to_owned()),
            lane.counter("from_guest_frames").to_string(),
            lane.counter("to_guest_frames").to_string(),
            lane.drops().to_string(),
            packet_memory(lane),
            format!("{} KiB", lane.kernel_bytes / 1024),
        ]);
    }
    table
}

fn packet_memory(lane: &LaneStatus) -> String {
    let backing = lane.backing.as_deref().unwrap_or("");
    let shared = lane
        .umem_sockets
        .map_or_else(String::new, |sockets| format!(", of a UMEM for {sockets}"));
    format!("{} KiB {backing}{shared}", lane.packet_bytes / 1024)
}

/// Everything counted that is not zero, a column a pair; `None` if nothing is.
fn counters(lanes: &[LaneStatus]) -> Option<Table> {
    let mut header = vec!["counter".to_owned(), "of".to_owned(), String::new()];
    header.extend(lanes.iter().map(|lane| format!("pair {}", lane.pair)));
    let mut table = table(header, |column| column >= 3);
    let mut names: Vec<(&str, &str, bool)> = Vec::new();
    for counter in lanes.iter().flat_map(|lane| &lane.counters) {
        let name = (counter.name.as_str(), counter.source.as_str(), counter.drop);
        if counter.value > 0 && !names.contains(&name) {
            names.push(name);
        }
    }
    for (name, source, drop) in names {
        let mut row = vec![
            name.to_owned(),
            source.to_owned(),
            if drop { "drop" } else { "" }.to_owned(),
        ];
        row.extend(lanes.iter().map(|lane| lane.counter(name).to_string()));
        table.add_row(row);
    }
    (!table.is_empty()).then_some(table)
}

/// A table without rows; the columns with numbers are aligned to the right.
pub(crate) fn table<T: Into<Row>>(header: T, has_numbers: impl Fn(usize) -> bool) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY).set_header(header);
    for (_, column) in table
        .column_iter_mut()
        .enumerate()
        .filter(|(at, _)| has_numbers(*at))
    {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// What is not there is a dash.
pub(crate) fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}
