//! The result: a row for each engine in a table to read, or one JSON object.

use comfy_table::{CellAlignment, Table, presets};
use hdrhistogram::Histogram;
use serde::Serialize;

use super::args::{Engine, Plan, Role};
use super::server::{Received, Served};
use super::usage::Usage;
use crate::report::print;

/// All runs. The field names are the names in the JSON object.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    benchmark: &'static str,
    /// `both`, `server` or `client`.
    role: &'static str,
    /// Release of the kernel.
    kernel: String,
    address: String,
    /// Bytes of a message; a server alone does not know.
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<u32>,
    connections: u32,
    /// Of the client.
    #[serde(skip_serializing_if = "Option::is_none")]
    threads: Option<u32>,
    /// The server's.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<usize>,
    verify: bool,
    runs: Vec<Run>,
}

/// What one run gave.
#[derive(Debug, Default)]
pub(super) struct Measured {
    pub(super) usage: Option<Usage>,
    pub(super) served: Option<Served>,
    pub(super) latencies: Option<Histogram<u64>>,
    /// `duration`, `signal` or `error`.
    pub(super) ended: &'static str,
}

/// How a cell of the table is made of a run.
type Cell = fn(&Run) -> String;

/// One engine.
#[derive(Debug, Serialize)]
struct Run {
    #[serde(skip_serializing_if = "Option::is_none")]
    engine: Option<&'static str>,
    /// Why there are no figures.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    figures: Option<Figures>,
}

#[derive(Debug, Serialize)]
struct Figures {
    ended: &'static str,
    /// That were measured; of a server alone only those in which messages came.
    seconds: f64,
    messages: u64,
    messages_per_second: f64,
    /// Of messages in one direction.
    bits_per_second: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    server: Option<ServerFigures>,
    /// Time in softirqs of all CPUs, in percent of one.
    softirq_percent: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    latency_us: Option<Latency>,
}

#[derive(Debug, Serialize)]
struct ServerFigures {
    /// Of its thread.
    cpu_percent: f64,
    cpu_user_percent: f64,
    cpu_system_percent: f64,
    cpu_us_per_message: Option<f64>,
    /// Time of its CPU in softirqs, some of which its thread is charged for as well.
    softirq_percent: f64,
    /// Of io_uring. Since it began, warming up included, as what follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    received: Option<Received>,
    connections: Served,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Latency {
    p50: f64,
    p90: f64,
    p99: f64,
    p99_9: f64,
    most: f64,
}

impl Latency {
    fn of(histogram: &Histogram<u64>) -> Option<Self> {
        let at = |quantile| histogram.value_at_quantile(quantile) as f64 / 1e3;
        (!histogram.is_empty()).then(|| Self {
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p99_9: at(0.999),
            most: histogram.max() as f64 / 1e3,
        })
    }
}

impl Figures {
    fn of(measured: &Measured) -> Self {
        let usage = measured.usage.unwrap_or(Usage::NONE);
        let seconds = usage.elapsed.as_secs_f64();
        let a_second = |amount: f64| if seconds > 0.0 { amount / seconds } else { 0.0 };
        let (user, system) = (usage.cpu.user.as_secs_f64(), usage.cpu.system.as_secs_f64());
        let server = measured.served.clone().map(|connections| ServerFigures {
            cpu_percent: a_second(100.0 * (user + system)),
            cpu_user_percent: a_second(100.0 * user),
            cpu_system_percent: a_second(100.0 * system),
            cpu_us_per_message: (usage.messages > 0).then(|| (user + system) * 1e6 / usage.messages as f64),
            softirq_percent: a_second(100.0 * usage.softirq_server.as_secs_f64()),
            received: connections.received.clone(),
            connections,
        });
        Self {
            ended: measured.ended,
            seconds,
            messages: usage.messages,
            messages_per_second: a_second(usage.messages as f64),
            bits_per_second: a_second(usage.bytes as f64 * 8.0),
            server,
            softirq_percent: a_second(100.0 * usage.softirq_all.as_secs_f64()),
            latency_us: measured.latencies.as_ref().and_then(Latency::of),
        }
    }
}

impl Report {
    pub(super) fn new(plan: &Plan) -> Self {
        let args = &plan.args;
        let has_client = plan.role != Role::Server;
        Self {
            benchmark: "echo",
            role: plan.role.name(),
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

    /// Takes note of a run. `engine`: the server's, if that is here.
    pub(super) fn add(&mut self, engine: Option<Engine>, measured: &Measured) {
        self.runs.push(Run {
            engine: engine.map(Engine::name),
            reason: None,
            figures: Some(Figures::of(measured)),
        });
    }

    /// Takes note of an engine that cannot be had here.
    pub(super) fn add_unavailable(&mut self, engine: Option<Engine>, reason: String) {
        self.runs.push(Run {
            engine: engine.map(Engine::name),
            reason: Some(reason),
            figures: None,
        });
    }

    /// Whether anything was measured.
    pub(super) fn has_figures(&self) -> bool {
        let mut figures = self.runs.iter().filter_map(|run| run.figures.as_ref());
        figures.any(|figures| figures.messages > 0)
    }

    /// Writes it to stdout.
    pub(super) fn print(&self, json: bool) -> anyhow::Result<()> {
        print(self, json, || self.table())
    }

    fn table(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY);
        let heads = self.heads();
        table.set_header(heads.iter().map(|head| head.0));
        let mut notes = Vec::new();
        for run in &self.runs {
            let cells = heads.iter().map(|(_, cell)| cell(run));
            table.add_row(cells);
            notes.extend(run.note());
        }
        for at in 1..heads.len() {
            if let Some(column) = table.column_mut(at) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        let lines: String = notes.iter().map(|note| format!("\n{note}")).collect();
        format!("{table}\n{}{lines}", self.conditions())
    }

    /// Columns, each with how its cell is made of a run.
    fn heads(&self) -> Vec<(&'static str, Cell)> {
        let mut heads: Vec<(&'static str, Cell)> = vec![
            ("engine", |run| run.engine.unwrap_or("the server's").to_owned()),
            ("Kqps", |run| run.cell(|it| Some(it.messages_per_second / 1e3), 2)),
            ("Gb/s", |run| run.cell(|it| Some(it.bits_per_second / 1e9), 2)),
        ];
        let of_server: [(&'static str, Cell); 5] = [
            ("server CPU %", |run| {
                run.cell_of_server(|it| Some(it.cpu_percent), 0)
            }),
            ("softirq %", |run| {
                run.cell_of_server(|it| Some(it.softirq_percent), 0)
            }),
            ("CPU µs each", |run| {
                run.cell_of_server(|it| it.cpu_us_per_message, 1)
            }),
            ("zero-copy %", |run| {
                run.cell_of_server(
                    |it| it.received.as_ref()?.zero_copy_share.map(|share| 100.0 * share),
                    0,
                )
            }),
            ("copies", |run| {
                run.cell_of_server(|it| Some(it.received.as_ref()?.kernel_copies? as f64), 0)
            }),
        ];
        let of_client: [(&'static str, Cell); 5] = [
            ("p50 µs", |run| run.cell_of_latency(|it| it.p50)),
            ("p90", |run| run.cell_of_latency(|it| it.p90)),
            ("p99", |run| run.cell_of_latency(|it| it.p99)),
            ("p99.9", |run| run.cell_of_latency(|it| it.p99_9)),
            ("most", |run| run.cell_of_latency(|it| it.most)),
        ];
        heads.extend(of_server.into_iter().filter(|_| self.cpu.is_some()));
        heads.extend(of_client.into_iter().filter(|_| self.threads.is_some()));
        heads
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

impl Run {
    fn cell(&self, of: impl Fn(&Figures) -> Option<f64>, digits: usize) -> String {
        let value = self.figures.as_ref().and_then(of);
        value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
    }

    fn cell_of_server(&self, of: impl Fn(&ServerFigures) -> Option<f64>, digits: usize) -> String {
        self.cell(|it| it.server.as_ref().and_then(&of), digits)
    }

    fn cell_of_latency(&self, of: impl Fn(&Latency) -> f64) -> String {
        self.cell(|it| it.latency_us.as_ref().map(&of), 0)
    }

    /// What the table cannot say.
    fn note(&self) -> Option<String> {
        let engine = self.engine.unwrap_or("client");
        if let Some(reason) = &self.reason {
            return Some(format!("{engine}: {reason}"));
        }
        let figures = self.figures.as_ref()?;
        let (seconds, ended, messages) = (figures.seconds, figures.ended, figures.messages);
        let of = figures.server.as_ref().map_or(String::new(), ServerFigures::note);
        Some(format!(
            "{engine}: {messages} messages in {seconds:.2} s, ended by {ended}{of}"
        ))
    }
}

impl ServerFigures {
    fn note(&self) -> String {
        let Served {
            accepted,
            refused,
            malformed,
            stalled,
            cut,
            ..
        } = &self.connections;
        let received = self.received.as_ref().map_or(String::new(), |it| {
            let (mode, pieces, gathered, ran_out) = (&it.mode, it.pieces, it.gathered_bytes, it.ran_out);
            format!(
                "; received by {mode} in {pieces} pieces, {gathered} bytes gathered, {ran_out} times without a buffer"
            )
        });
        format!(
            "; connections: {accepted} accepted, {refused} refused, {malformed} malformed, {stalled} stalled, {cut} \
             cut{received}"
        )
    }
}
