//! The result: a table to read, or one JSON object. Both have the same values by the same names.

use std::io::{self, Write as _};

use anyhow::Context as _;
use comfy_table::{CellAlignment, Table, presets};
use indicatif::HumanCount;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use common::drivers;

use super::args::Plan;
use super::choice::name_of;
use super::meter::{Spent, Tally};
use super::setup::{Counted, Inspection, Rig};

#[derive(Debug)]
pub(super) struct Measured {
    pub(super) tally: Tally,
    pub(super) spent: Spent,
    pub(super) counted: Counted,
    /// `duration`, `signal` or `error`.
    pub(super) ended: &'static str,
}

/// One run: names and values, in the order in which they are shown.
#[derive(Debug)]
pub(super) struct Report {
    title: [String; 2],
    values: Vec<(&'static str, Value)>,
}

impl Serialize for Report {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.values.iter().map(|(name, value)| (name, value)))
    }
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
        let (user, system) = (spent.cpu.user.as_secs_f64(), spent.cpu.system.as_secs_f64());
        let a_frame = |seconds: f64| (tally.frames > 0).then(|| seconds * 1e9 / tally.frames as f64);
        let umem = &rig.umem;
        let mut values = vec![
            ("benchmark", json!(plan.benchmark)),
            ("interface", json!(plan.link.name)),
            ("queue", json!(plan.args.queue)),
            // The data path in use, as the kernel reports it.
            ("mode", json!(rig.socket.mode().to_string())),
            ("fallbacks", json!(fallbacks(rig))),
            ("driver", json!(drivers::said_of(&plan.link.driver))),
            ("batch", json!(plan.args.batch)),
            (
                "umem",
                json!({
                    "backing": rig.backing.to_string(),
                    "bytes": umem.len(),
                    "chunk_bytes": umem.chunk_size(),
                    "unaligned": umem.is_unaligned(),
                }),
            ),
            ("seconds", json!(seconds)),
            ("ended", json!(ended)),
            ("frames", json!(tally.frames)),
            ("bytes", json!(tally.bytes)),
            ("frames_per_second", json!(tally.frames as f64 / seconds)),
            ("bits_per_second", json!(tally.bytes as f64 * 8.0 / seconds)),
            ("ns_per_frame", json!(a_frame(seconds))),
            ("cpu_user_seconds", json!(user)),
            ("cpu_system_seconds", json!(system)),
            ("cpu_ns_per_frame", json!(a_frame(user + system))),
            ("tx_kicks", json!(tally.kicks)),
            ("tx_refused", json!(tally.refused)),
            // `struct xdp_statistics`, since the socket was opened.
            ("xdp_statistics", object(&counted.socket.named())),
            // What the XDP program counted on the queue.
            ("xdp_program", object(&counted.program.named())),
        ];
        if !plan.benchmark.receives() {
            values.push(("size", json!(plan.args.size)));
        }
        values.extend(rig.inspection.as_ref().map(|inspection| match inspection {
            Inspection::Hints(hints) => ("hints", hints.report()),
            Inspection::Flows(flows) => ("classify", flows.report()),
        }));
        let title = [
            name_of(plan.benchmark),
            format!("{} queue {}", plan.link.name, plan.args.queue),
        ];
        Self { title, values }
    }

    /// Writes it to stdout.
    pub(super) fn print(&self, json: bool) -> anyhow::Result<()> {
        print(self, json, || {
            let rows = self
                .values
                .iter()
                .skip(3)
                .flat_map(|(name, value)| rows(name, value));
            table_of(self.title.clone(), rows, CellAlignment::Left).to_string()
        })
    }
}

fn object(counters: &[(&str, u64)]) -> Value {
    let values = counters
        .iter()
        .map(|&(name, count)| (name.to_owned(), json!(count)));
    Value::Object(values.collect::<Map<_, _>>())
}

/// Why no better data path is in use.
fn fallbacks(rig: &Rig) -> Vec<String> {
    let attach = rig.program.fallback().map(str::to_owned);
    let note = rig.note.map(|note| format!("zero-copy not used: {note}"));
    let socket = rig.socket.fallbacks().iter().map(ToString::to_string);
    let polls = !rig.socket.busy_polls() || drivers::is_polled(rig.socket.mode(), drivers::kernel());
    let unpolled = (!polls).then(|| drivers::NOT_POLLED.to_owned());
    attach
        .into_iter()
        .chain(note)
        .chain(socket)
        .chain(unpolled)
        .collect()
}

/// A row for a value, or for each value in it. Unknown values, and inner counters that are 0, have none.
fn rows(name: &str, value: &Value) -> Vec<[String; 2]> {
    let text = match value {
        Value::Null => return Vec::new(),
        Value::Object(inner) => {
            let counted = inner.iter().filter(|(_, value)| **value != json!(0));
            return counted
                .flat_map(|(inner, value)| rows(&format!("{name} {inner}"), value))
                .collect();
        }
        Value::Array(values) => return values.iter().flat_map(|value| rows(name, value)).collect(),
        Value::String(text) => text.clone(),
        Value::Bool(is) => if *is { "yes" } else { "no" }.to_owned(),
        Value::Number(number) => match number.as_u64() {
            Some(number) => HumanCount(number).to_string(),
            None => {
                let text = format!("{:.3}", number.as_f64().unwrap_or_default());
                let (whole, rest) = text.split_at(text.len() - 4);
                let grouped = |whole| format!("{}{rest}", HumanCount(whole));
                whole.parse().map_or(text.clone(), grouped)
            }
        },
    };
    vec![[name.replace('_', " "), text]]
}

/// A table; `alignment` is that of all columns but the first.
pub(super) fn table_of<R>(
    head: impl IntoIterator<Item = String>,
    rows: impl IntoIterator<Item = R>,
    alignment: CellAlignment,
) -> Table
where
    R: IntoIterator<Item = String>,
{
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header(head.into_iter().collect::<Vec<_>>());
    for row in rows {
        table.add_row(row.into_iter().collect::<Vec<_>>());
    }
    table.column_iter_mut().skip(1).for_each(|column| {
        column.set_cell_alignment(alignment);
    });
    table
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_each_value_that_is_known_and_counters_that_count() {
        let value = json!({"clock": null, "p50_ns": 1234.5678, "lost": 0, "seen": 12, "why": ["a", "b"]});
        let rows = rows("hints_latency", &value);
        let wanted = [
            ("p50 ns", "1,234.568"),
            ("seen", "12"),
            ("why", "a"),
            ("why", "b"),
        ];
        assert_eq!(
            rows,
            wanted.map(|(name, text)| [format!("hints latency {name}"), text.to_owned()])
        );
    }
}
