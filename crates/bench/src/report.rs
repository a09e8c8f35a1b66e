//! The result: a table to read, or one JSON object.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write as _};

use anyhow::Context as _;
use comfy_table::{CellAlignment, Table, presets};
use common::drivers;
use serde::Serialize;

use super::args::Plan;
use super::classify::ClassifyReport;
use super::hints::HintsReport;
use super::meter::{Spent, Tally};
use super::setup::{Counted, Looks, Rig};

#[derive(Debug)]
pub(super) struct Measured {
    pub(super) tally: Tally,
    pub(super) spent: Spent,
    pub(super) counted: Counted,
    /// `duration`, `signal` or `error`.
    pub(super) ended: &'static str,
}

/// One run. The field names are the names in the JSON object.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    benchmark: &'static str,
    interface: String,
    queue: u32,
    /// The data path in use, as the kernel tells.
    mode: String,
    /// What was tried first and refused.
    fallbacks: Vec<String>,
    /// What is known of the driver.
    driver: String,
    /// Bytes of the frames sent; only txonly knows.
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<u32>,
    batch: u32,
    umem: Memory,
    seconds: f64,
    ended: &'static str,
    frames: u64,
    bytes: u64,
    frames_per_second: f64,
    bits_per_second: f64,
    ns_per_frame: Option<f64>,
    cpu_user_seconds: f64,
    cpu_system_seconds: f64,
    cpu_ns_per_frame: Option<f64>,
    tx_kicks: u64,
    tx_refused: u64,
    /// `struct xdp_statistics`, since the socket was opened.
    xdp_statistics: BTreeMap<&'static str, u64>,
    /// What the XDP program counted on the queue.
    xdp_program: BTreeMap<&'static str, u64>,
    /// What stood before frames, where `--hints` asked for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    hints: Option<HintsReport>,
    /// What judging frames took, where `--classify` asked for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    classify: Option<ClassifyReport>,
}

#[derive(Debug, Serialize)]
struct Memory {
    backing: String,
    bytes: u64,
    chunk_bytes: u32,
    unaligned: bool,
}

impl Report {
    pub(super) fn new(plan: &Plan, rig: &Rig, measured: &Measured) -> Self {
        let Measured {
            tally,
            spent,
            counted,
            ended,
        } = *measured;
        let seconds = spent.elapsed.as_secs_f64();
        let cpu = spent.cpu.user.as_secs_f64() + spent.cpu.system.as_secs_f64();
        let a_frame = |seconds: f64| (tally.frames > 0).then(|| seconds * 1e9 / tally.frames as f64);
        let attach = rig.program.fallback().map(str::to_owned);
        let note = rig.note.map(|note| format!("zero-copy not used: {note}"));
        let socket = rig.socket.fallbacks().iter().map(ToString::to_string);
        let polls = !rig.socket.busy_polls() || drivers::is_polled(rig.socket.mode(), drivers::kernel());
        let unpolled = (!polls).then(|| drivers::NOT_POLLED.to_owned());
        let (hints, classify) = match &rig.looks {
            None => (None, None),
            Some(Looks::Hints(hints)) => (Some(hints.report()), None),
            Some(Looks::Flows(judge)) => (None, Some(judge.report())),
        };
        Self {
            benchmark: plan.benchmark.name(),
            interface: plan.link.name.clone(),
            queue: plan.args.queue,
            mode: rig.socket.mode().to_string(),
            fallbacks: attach
                .into_iter()
                .chain(note)
                .chain(socket)
                .chain(unpolled)
                .collect(),
            driver: drivers::said_of(&plan.link.driver),
            size: (!plan.benchmark.receives()).then_some(plan.args.size),
            batch: plan.args.batch,
            umem: Memory {
                backing: rig.backing.to_string(),
                bytes: rig.umem.len(),
                chunk_bytes: rig.umem.chunk_size(),
                unaligned: rig.umem.is_unaligned(),
            },
            seconds,
            ended,
            frames: tally.frames,
            bytes: tally.bytes,
            frames_per_second: tally.frames as f64 / seconds,
            bits_per_second: tally.bytes as f64 * 8.0 / seconds,
            ns_per_frame: a_frame(seconds),
            cpu_user_seconds: spent.cpu.user.as_secs_f64(),
            cpu_system_seconds: spent.cpu.system.as_secs_f64(),
            cpu_ns_per_frame: a_frame(cpu),
            tx_kicks: tally.kicks,
            tx_refused: tally.refused,
            xdp_statistics: counted.socket.named().into(),
            xdp_program: counted.program.named().into(),
            hints,
            classify,
        }
    }

    /// Writes it to stdout.
    pub(super) fn print(&self, json: bool) -> anyhow::Result<()> {
        print(self, json, || self.table())
    }

    fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY);
        table.set_header([
            self.benchmark.to_owned(),
            format!("{} queue {}", self.interface, self.queue),
        ]);
        for (name, value) in self.rows() {
            table.add_row([name.to_owned(), value]);
        }
        if let Some(column) = table.column_mut(1) {
            column.set_cell_alignment(CellAlignment::Left);
        }
        table.to_string()
    }

    fn rows(&self) -> Vec<(&'static str, String)> {
        let mut rows = vec![("mode in use", self.mode.clone())];
        rows.extend(self.fallbacks.iter().map(|reason| ("fallback", reason.clone())));
        rows.push(("driver", self.driver.clone()));
        rows.push(("memory", self.umem.to_string()));
        rows.extend(self.size.map(|size| ("frame size", format!("{size} bytes"))));
        let Self {
            seconds,
            ended,
            batch,
            ..
        } = self;
        rows.push(("ran", format!("{seconds:.2} s, ended by {ended}, batch {batch}")));
        rows.push(("frames", grouped(self.frames)));
        let (mpps, gbps) = (self.frames_per_second / 1e6, self.bits_per_second / 1e9);
        rows.push(("rate", format!("{mpps:.3} Mpps, {gbps:.3} Gb/s")));
        rows.extend(
            self.ns_per_frame
                .map(|ns| ("time a frame", format!("{ns:.1} ns"))),
        );
        let (user, system) = (self.cpu_user_seconds, self.cpu_system_seconds);
        let a_frame = self
            .cpu_ns_per_frame
            .map_or(String::new(), |ns| format!(", {ns:.1} ns a frame"));
        rows.push((
            "CPU time",
            format!("{user:.2} s user, {system:.2} s system{a_frame}"),
        ));
        if self.tx_kicks > 0 {
            rows.push(("tx system calls", grouped(self.tx_kicks)));
            rows.push(("tx refused", grouped(self.tx_refused)));
        }
        rows.extend(self.hints.iter().flat_map(HintsReport::rows));
        rows.extend(self.classify.iter().flat_map(ClassifyReport::rows));
        rows.extend(self.rows_of_kernel());
        rows
    }

    fn rows_of_kernel(&self) -> [(&'static str, String); 4] {
        let of_socket = |name| grouped(self.xdp_statistics[name]);
        let of_program = |name| grouped(self.xdp_program[name]);
        [
            (
                "socket dropped",
                format!(
                    "{} rx ring full, {} fill ring empty, {} otherwise",
                    of_socket("rx_ring_full"),
                    of_socket("rx_fill_ring_empty_descs"),
                    of_socket("rx_dropped")
                ),
            ),
            (
                "socket invalid",
                format!(
                    "{} in fill ring, {} in tx ring",
                    of_socket("rx_invalid_descs"),
                    of_socket("tx_invalid_descs")
                ),
            ),
            (
                "program gave",
                format!(
                    "{} to the socket, {} to the host, {} to the host for want of a socket",
                    of_program("redirected"),
                    of_program("passed"),
                    of_program("no_socket")
                ),
            ),
            (
                "program dropped",
                format!(
                    "{} too long, {} without header room",
                    of_program("too_long"),
                    of_program("no_header_room")
                ),
            ),
        ]
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let alignment = if self.unaligned { "unaligned" } else { "aligned" };
        let (kib, chunk) = (self.bytes / 1024, self.chunk_bytes);
        write!(f, "{kib} KiB, {}, {alignment} chunks of {chunk}", self.backing)
    }
}

/// Writes a benchmark's result to stdout.
pub(super) fn print(
    result: &impl Serialize,
    json: bool,
    table: impl FnOnce() -> String,
) -> anyhow::Result<()> {
    let text = match json {
        true => serde_json::to_string(result)?,
        false => table(),
    };
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}")
        .and_then(|()| stdout.flush())
        .context("cannot write the result to stdout")
}

/// A number with its thousands apart.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3 + 1);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::grouped;

    #[test]
    fn thousands_are_apart() {
        let cases = [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (1_234_567, "1,234,567"),
            (100_000, "100,000"),
        ];
        for (number, text) in cases {
            assert_eq!(grouped(number), text);
        }
    }
}
