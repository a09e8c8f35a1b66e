//! The result: a row for each engine in a table to read, or one JSON object.

use comfy_table::CellAlignment;
use hdrhistogram::Histogram;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::args::{Engine, Plan, Role};
use super::server::Served;
use super::usage::Usage;
use crate::report::{print, table_of};

/// A column of the table: its title, the JSON pointer to its value, a factor for it, and the number of decimals.
type Column = (&'static str, &'static str, f64, usize);
const OF_ANY: [Column; 2] = [
    ("Kqps", "/messages_per_second", 1e-3, 2),
    ("Gb/s", "/bits_per_second", 1e-9, 2),
];
const OF_SERVER: [Column; 5] = [
    ("server CPU %", "/server/cpu_percent", 1.0, 0),
    ("softirq %", "/server/softirq_percent", 1.0, 0),
    ("CPU µs each", "/server/cpu_us_per_message", 1.0, 1),
    ("zero-copy %", "/server/received/zero_copy_share", 100.0, 0),
    ("copies", "/server/received/kernel_copies", 1.0, 0),
];
const OF_CLIENT: [Column; 5] = [
    ("p50 µs", "/latency_us/p50", 1.0, 0),
    ("p90", "/latency_us/p90", 1.0, 0),
    ("p99", "/latency_us/p99", 1.0, 0),
    ("p99.9", "/latency_us/p99_9", 1.0, 0),
    ("most", "/latency_us/most", 1.0, 0),
];

/// The results of one run.
#[derive(Debug, Default)]
pub(super) struct Measured {
    pub(super) usage: Option<Usage>,
    pub(super) served: Option<Served>,
    pub(super) latencies: Option<Histogram<u64>>,
    /// `duration`, `signal` or `error`.
    pub(super) ended: &'static str,
}

/// All runs. The field names are the names in the JSON object.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    benchmark: &'static str,
    role: Role,
    /// Release of the kernel.
    kernel: String,
    address: String,
    /// Bytes of a message; a server alone does not know.
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<u32>,
    connections: u32,
    /// Threads of the client.
    #[serde(skip_serializing_if = "Option::is_none")]
    threads: Option<u32>,
    /// CPU of the server.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<usize>,
    verify: bool,
    /// One for each engine: figures, or the reason why there are none.
    runs: Vec<Map<String, Value>>,
}

impl Report {
    pub(super) fn new(plan: &Plan) -> Self {
        let args = &plan.args;
        let has_client = plan.role != Role::Server;
        Self {
            benchmark: "echo",
            role: plan.role,
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            address: plan.address.to_string(),
            size: has_client.then_some(args.size),
            connections: args.connections,
            threads: has_client.then(|| args.threads()),
            cpu: plan.role.serves().then_some(plan.cpu),
            verify: args.verify,
            runs: Vec::new(),
        }
    }

    /// Adds a run. `engine`: the server's, if it runs in this process.
    pub(super) fn add(&mut self, engine: Option<Engine>, measured: &Measured) {
        let usage = measured.usage.unwrap_or(Usage::NONE);
        let seconds = usage.elapsed.as_secs_f64();
        let a_second = |amount: f64| if seconds > 0.0 { amount / seconds } else { 0.0 };
        let run = json!({
            "engine": engine,
            "ended": measured.ended,
            // The measured seconds; of a server alone only those with messages.
            "seconds": seconds,
            "messages": usage.messages,
            "messages_per_second": a_second(usage.messages as f64),
            // Of messages in one direction.
            "bits_per_second": a_second(usage.bytes as f64 * 8.0),
            "server": measured.served.as_ref().map(|served| server(&usage, served)),
            // Time in softirqs of all CPUs, in percent of one.
            "softirq_percent": a_second(100.0 * usage.softirq_all.as_secs_f64()),
            "latency_us": measured.latencies.as_ref().and_then(latency),
        });
        self.push(run);
    }

    /// Adds an engine that is not available here.
    pub(super) fn add_unavailable(&mut self, engine: Option<Engine>, reason: &str) {
        self.push(json!({ "engine": engine, "reason": reason }));
    }

    fn push(&mut self, run: Value) {
        if let Value::Object(mut run) = run {
            run.retain(|_, value| !value.is_null());
            self.runs.push(run);
        }
    }

    /// Whether anything was measured.
    pub(super) fn has_figures(&self) -> bool {
        let mut messages = self.runs.iter().filter_map(|run| run.get("messages")?.as_u64());
        messages.any(|messages| messages > 0)
    }

    /// Writes it to stdout.
    pub(super) fn print(&self, json: bool) -> anyhow::Result<()> {
        print(self, json, || self.table())
    }

    fn table(&self) -> String {
        let server = OF_SERVER.iter().filter(|_| self.cpu.is_some());
        let client = OF_CLIENT.iter().filter(|_| self.threads.is_some());
        let columns: Vec<_> = OF_ANY.iter().chain(server).chain(client).collect();
        let titles = columns.iter().map(|(title, ..)| (*title).to_owned());
        let head = std::iter::once("engine".to_owned()).chain(titles);
        let runs: Vec<_> = self.runs.iter().cloned().map(Value::Object).collect();
        let rows = runs.iter().map(|run| {
            let engine = run["engine"].as_str().unwrap_or("the server's").to_owned();
            std::iter::once(engine).chain(columns.iter().map(|column| cell(run, column)))
        });
        let table = table_of(head, rows, CellAlignment::Right);
        let notes: String = runs.iter().map(|run| format!("\n{}", note(run))).collect();
        format!("{table}\n{}{notes}", self.conditions())
    }

    fn conditions(&self) -> String {
        let size = self
            .size
            .map_or(String::new(), |size| format!("messages of {size} bytes, "));
        let threads = self
            .threads
            .map_or(String::new(), |threads| format!(" from {threads} threads"));
        let cpu = self
            .cpu
            .map_or(String::new(), |cpu| format!(", server on CPU {cpu}"));
        let verify = if self.verify { ", each byte compared" } else { "" };
        let (address, connections, kernel) = (&self.address, self.connections, &self.kernel);
        format!("{address}: {size}{connections} connections{threads}{cpu}{verify}, Linux {kernel}")
    }
}

/// Percent are those of one CPU.
fn server(usage: &Usage, served: &Served) -> Value {
    let seconds = usage.elapsed.as_secs_f64();
    let percent = |time: f64| {
        if seconds > 0.0 {
            100.0 * time / seconds
        } else {
            0.0
        }
    };
    let (user, system) = (usage.cpu.user.as_secs_f64(), usage.cpu.system.as_secs_f64());
    json!({
        // CPU time of its thread.
        "cpu_percent": percent(user + system),
        "cpu_user_percent": percent(user),
        "cpu_system_percent": percent(system),
        "cpu_us_per_message": (usage.messages > 0).then(|| (user + system) * 1e6 / usage.messages as f64),
        // Time of its CPU in softirqs, some of which its thread is charged for as well.
        "softirq_percent": percent(usage.softirq_server.as_secs_f64()),
        // With io_uring. Like `connections`, since the start, warming up included.
        "received": served.received,
        "connections": served,
    })
}

fn latency(histogram: &Histogram<u64>) -> Option<Value> {
    let at = |quantile| histogram.value_at_quantile(quantile) as f64 / 1e3;
    (!histogram.is_empty()).then(|| {
        json!({
            "p50": at(0.5),
            "p90": at(0.9),
            "p99": at(0.99),
            "p99_9": at(0.999),
            "most": histogram.max() as f64 / 1e3,
        })
    })
}

fn cell(run: &Value, (_, place, factor, digits): &Column) -> String {
    let value = run.pointer(place).and_then(Value::as_f64);
    value.map_or("-".to_owned(), |value| format!("{:.digits$}", value * factor))
}

/// What the table does not show.
fn note(run: &Value) -> String {
    let engine = run["engine"].as_str().unwrap_or("client");
    if let Some(reason) = run["reason"].as_str() {
        return format!("{engine}: {reason}");
    }
    let text = |place| run.pointer(place).and_then(Value::as_str).unwrap_or_default();
    let (seconds, ended, messages) = (
        cell(run, &("", "/seconds", 1.0, 2)),
        text("/ended"),
        &run["messages"],
    );
    let mut note = format!("{engine}: {messages} messages in {seconds} s, ended by {ended}");
    if let Some(connections) = run.pointer("/server/connections").and_then(Value::as_object) {
        let counts = connections.iter().map(|(name, count)| format!("{count} {name}"));
        note += &format!("; connections: {}", counts.collect::<Vec<_>>().join(", "));
    }
    if let Some(received) = run.pointer("/server/received").filter(|it| it.is_object()) {
        let (pieces, gathered, ran_out) = (
            &received["pieces"],
            &received["gathered_bytes"],
            &received["ran_out"],
        );
        note += &format!(
            "; received by {} in {pieces} pieces, {gathered} bytes gathered, {ran_out} times without a buffer",
            text("/server/received/mode")
        );
    }
    note
}
