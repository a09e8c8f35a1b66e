//! The tables of ports, queues and workers that `status` and `top` show, with the rates between two readings.

use std::cmp::Ordering;
use std::fmt;
use std::time::Duration;

use derive_more::Display;
use model::state::{LaneStatus, PortStatus, Status, Traffic, WorkerDocument, WorkersDocument};

use super::{or_dash, table};

/// A daemon's state now, and at an earlier time.
#[derive(Clone, Copy)]
pub struct Readings<'a> {
    /// The later one.
    pub now: &'a Status,
    /// The earlier one; none: there are no rates.
    pub before: Option<&'a Status>,
}

/// A cell of a table.
#[derive(Debug, Clone, PartialEq, Display)]
pub enum Cell {
    /// Text.
    Text(String),
    /// A number, shown with three digits and a unit prefix.
    #[display("{}", short(*_0))]
    Number(f64),
    /// A count, shown in full.
    Count(u64),
    /// Nothing is known.
    #[display("-")]
    Unknown,
}

impl Cell {
    /// The order of rows: text by letters, numbers by size, unknown ones first.
    #[must_use]
    pub fn order(&self, other: &Self) -> Ordering {
        let number = |cell: &Self| match cell {
            Self::Number(number) => *number,
            // Exact up to 2^53, which is enough for an order.
            Self::Count(count) => *count as f64,
            Self::Text(_) | Self::Unknown => -1.0,
        };
        match (self, other) {
            (Self::Text(one), Self::Text(other)) => one.cmp(other),
            (one, other) => number(one).total_cmp(&number(other)),
        }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::Text(text.into())
    }
}

/// A table.
#[derive(Debug, Clone, Default)]
pub struct View {
    /// Names of the columns.
    pub header: Vec<&'static str>,
    /// Its rows, each with a cell for each column.
    pub rows: Vec<Vec<Cell>>,
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows = self.rows.iter();
        let is_number = |at: usize| !rows.clone().any(|row| matches!(row[at], Cell::Text(_)));
        let mut table = table(self.header.clone(), is_number);
        rows.by_ref().for_each(|row| _ = table.add_row(row));
        writeln!(f, "{}", table.trim_fmt())
    }
}

/// Bits and packets a second from and to guests, and dropped frames.
const TRAFFIC: [&str; 6] = ["from bit/s", "from pps", "to bit/s", "to pps", "drops/s", "drops"];

fn header(first: &[&'static str]) -> Vec<&'static str> {
    [first, &TRAFFIC].concat()
}

/// The cells of the columns [`TRAFFIC`].
fn traffic(now: Traffic, before: Option<(Traffic, Duration)>) -> [Cell; 6] {
    let drops = Cell::Count(now.drops);
    let Some((before, elapsed)) = before else {
        let [a, b, c, d, e] = [const { Cell::Unknown }; 5];
        return [a, b, c, d, e, drops];
    };
    let rates = now.rates(before, elapsed);
    [
        Cell::Number(8.0 * rates.from_guest_bytes),
        Cell::Number(rates.from_guest_frames),
        Cell::Number(8.0 * rates.to_guest_bytes),
        Cell::Number(rates.to_guest_frames),
        Cell::Number(rates.drops),
        drops,
    ]
}

impl Readings<'_> {
    fn elapsed(&self) -> Duration {
        let before = self.before.map_or(Duration::ZERO, Status::age);
        self.now.age().saturating_sub(before)
    }

    /// Traffic of a part of the state, at the earlier time.
    fn earlier(&self, part: impl Fn(&Status) -> Option<Traffic>) -> Option<(Traffic, Duration)> {
        // A part that was not there yet began with 0.
        let before = self.before.map(|before| part(before).unwrap_or_default());
        before.map(|before| (before, self.elapsed()))
    }
}

/// A name with the daemon's process, if there are several.
fn named(daemons: &[Readings<'_>], one: &Readings<'_>, name: &str) -> Cell {
    match daemons {
        [_] => name.into(),
        _ => format!("{}:{name}", one.now.pid).into(),
    }
}

/// Ports, one a row.
#[must_use]
pub fn ports(daemons: &[Readings<'_>]) -> View {
    let mut rows = Vec::new();
    for daemon in daemons {
        for port in &daemon.now.ports {
            let before = daemon.earlier(|before| Some(same(before, port)?.traffic()));
            let mut row = vec![
                named(daemons, daemon, &port.name),
                attachment(port).into(),
                guest(port).into(),
                mode(port).into(),
            ];
            row.extend(traffic(port.traffic(), before));
            rows.push(row);
        }
    }
    View {
        header: header(&["port", "network/NIC", "guest", "mode"]),
        rows,
    }
}

fn same<'a>(status: &'a Status, port: &PortStatus) -> Option<&'a PortStatus> {
    status.ports.iter().find(|other| other.name == port.name)
}

/// The network, the NIC or both.
#[must_use]
pub fn attachment(port: &PortStatus) -> String {
    match port
        .network
        .as_ref()
        .filter(|_| !port.nic.starts_with("network "))
    {
        Some(network) => format!("network {network}, {}", port.nic),
        None => port.nic.clone(),
    }
}

/// The VMM of a port, or that there is none.
#[must_use]
pub fn guest(port: &PortStatus) -> String {
    match (port.connected, port.peer) {
        (true, Some(peer)) => format!("process {peer}"),
        (true, None) => "connected".to_owned(),
        (false, _) => "waiting for a VMM".to_owned(),
    }
}

/// The data paths of its queue pairs.
fn mode(port: &PortStatus) -> String {
    let running = port.lanes.iter().filter(|lane| lane.running);
    let mut modes: Vec<&str> = running.filter_map(|lane| lane.mode.as_deref()).collect();
    modes.dedup();
    match (port.impaired.is_some(), modes.as_slice()) {
        (true, _) => "impaired".to_owned(),
        (false, []) => "-".to_owned(),
        (false, modes) => modes.join(", "),
    }
}

/// Queue pairs of ports, queues of uplinks, underlays and of the host, one a row.
#[must_use]
pub fn queues(daemons: &[Readings<'_>]) -> View {
    let mut rows = Vec::new();
    for daemon in daemons {
        let before = daemon.before.map(lanes).unwrap_or_default();
        for (name, lane) in lanes(daemon.now) {
            let same = before
                .iter()
                .find(|(other, before)| *other == name && before.pair == lane.pair);
            let earlier = daemon.earlier(|_| Some(same?.1.traffic()));
            let mut row = vec![
                named(daemons, daemon, &name),
                Cell::Count(lane.pair as u64),
                lane.queue
                    .map_or(Cell::Unknown, |queue| Cell::Count(queue.into())),
                or_dash(lane.mode.as_ref().filter(|_| lane.running)).into(),
            ];
            row.extend(traffic(lane.traffic(), earlier));
            rows.push(row);
        }
    }
    View {
        header: header(&["port or network", "pair", "NIC queue", "mode"]),
        rows,
    }
}

fn lanes(status: &Status) -> Vec<(String, &LaneStatus)> {
    let of_ports =
        (status.ports.iter()).flat_map(|port| port.lanes.iter().map(|lane| (port.name.clone(), lane)));
    let of_networks = status.networks.iter().flat_map(|network| {
        let lanes = network.lanes().filter(|(of, lane)| *of != "host" || lane.running);
        lanes.map(|(of, lane)| (format!("{} {of}", network.name), lane))
    });
    of_ports.chain(of_networks).collect()
}

/// Workers, one a row.
#[must_use]
pub fn workers(daemons: &[Readings<'_>]) -> View {
    let mut rows = Vec::new();
    for daemon in daemons {
        let document = match daemon.before {
            Some(before) => WorkersDocument::between(before, daemon.now),
            None => WorkersDocument::of(daemon.now),
        };
        for worker in &document.workers {
            rows.push(worker_row(
                named(daemons, daemon, &worker.worker.to_string()),
                worker,
            ));
        }
    }
    let header = [
        "worker", "state", "busy %", "idle %", "asleep %", "pps in", "pps out", "ns/frame", "ports",
    ];
    View {
        header: header.to_vec(),
        rows,
    }
}

fn worker_row(name: Cell, worker: &WorkerDocument) -> Vec<Cell> {
    let seconds = (worker.interval_ns as f64 / 1e9).max(1e-9);
    let mut ports: Vec<_> = worker
        .lanes
        .iter()
        .filter_map(|lane| lane.lane.port.as_ref())
        .collect();
    ports.sort_unstable();
    ports.dedup();
    vec![
        name,
        worker
            .hangs
            .clone()
            .unwrap_or_else(|| "running".to_owned())
            .into(),
        Cell::Number(worker.time.busy.percent),
        Cell::Number(worker.time.idle.percent),
        Cell::Number(worker.time.asleep.percent),
        Cell::Number(worker.frames.taken as f64 / seconds),
        Cell::Number(worker.frames.out as f64 / seconds),
        worker.frames.ns_each.map_or(Cell::Unknown, Cell::Number),
        Cell::Count(ports.len() as u64),
    ]
}

/// A number with three digits and a decimal prefix: `0`, `12.5`, `1.25k`, `104M`.
#[must_use]
pub fn short(number: f64) -> String {
    let mut rest = number;
    for prefix in ["", "k", "M", "G", "T"] {
        let decimals = match rest {
            rest if rest < 9.995 => 2,
            rest if rest < 99.95 => 1,
            _ => 0,
        };
        if rest < 999.5 {
            let digits = format!("{rest:.decimals$}");
            let digits = match decimals {
                0 => digits.as_str(),
                _ => digits.trim_end_matches('0').trim_end_matches('.'),
            };
            return format!("{digits}{prefix}");
        }
        rest /= 1000.0;
    }
    format!("{number:.2e}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_a_prefix() {
        for (number, text) in [
            (0.0, "0"),
            (0.5, "0.5"),
            (9.994, "9.99"),
            (12.34, "12.3"),
            (999.4, "999"),
            (999.6, "1k"),
            (1_254.0, "1.25k"),
            (104_400_000.0, "104M"),
            (25e9, "25G"),
            (1e18, "1.00e18"),
        ] {
            assert_eq!(short(number), text, "{number}");
        }
    }

    #[test]
    fn rows_are_ordered_by_number_and_unknown_ones_come_first() {
        let mut cells = [
            Cell::Number(2e3),
            Cell::Unknown,
            Cell::Count(30),
            Cell::Number(0.0),
        ];
        cells.sort_by(Cell::order);
        let texts: Vec<String> = cells.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["-", "0", "30", "2k"]);
    }
}
