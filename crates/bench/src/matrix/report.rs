//! The matrix: a table to read, or one JSON object.

use clap::ValueEnum as _;
use comfy_table::CellAlignment;
use serde::Serialize;

use super::figure::Figure;
use crate::args::Plan;
use crate::choice::{Benchmark, Path, name_of};
use crate::report::{print, table_of};

/// All figures. The field names are the names in the JSON object.
#[derive(Debug, Serialize)]
pub(super) struct Matrix {
    interface: String,
    queue: u32,
    /// Release of the kernel.
    kernel: String,
    /// Bytes of the frames that txonly and the sender make.
    size: u32,
    batch: u32,
    seconds: f64,
    repetitions: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    sender: Option<String>,
    figures: Vec<Row>,
}

/// A benchmark by a path.
#[derive(Debug, Serialize)]
struct Row {
    benchmark: Benchmark,
    path: Path,
    /// Medians, and the extremes.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    result: Option<Summary>,
    /// The figures of all repetitions.
    #[serde(skip)]
    measured: Vec<Figure>,
    /// Why there is no figure.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

/// Medians and extremes of all repetitions.
#[derive(Debug, Clone, Copy, Serialize)]
struct Summary {
    frames_per_second: f64,
    lowest: f64,
    highest: f64,
    cpu_ns_per_frame: f64,
    /// In all, also before and after what was measured.
    frames: u64,
}

impl Summary {
    fn of(figures: &[Figure]) -> Option<Self> {
        let sorted = |value: fn(&Figure) -> f64| {
            let mut values: Vec<f64> = figures.iter().map(value).collect();
            values.sort_by(f64::total_cmp);
            values
        };
        let (rates, costs) = (sorted(|it| it.rate), sorted(|it| it.cpu_ns));
        Some(Self {
            frames_per_second: *rates.get(rates.len() / 2)?,
            lowest: *rates.first()?,
            highest: *rates.last()?,
            cpu_ns_per_frame: *costs.get(costs.len() / 2)?,
            frames: figures.iter().map(|it| it.frames).sum(),
        })
    }
}

impl Matrix {
    pub(super) fn new(plan: &Plan, repetitions: u32, benchmarks: &[Benchmark], paths: &[Path]) -> Self {
        let row = |benchmark: Benchmark, path: Path| Row {
            benchmark,
            path,
            result: None,
            measured: Vec::new(),
            reason: Some("not measured: ended by a signal".to_owned()),
            note: None,
        };
        let rows = benchmarks
            .iter()
            .flat_map(|&benchmark| paths.iter().map(move |&path| row(benchmark, path)));
        Self {
            interface: plan.link.name.clone(),
            queue: plan.args.queue,
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            size: plan.args.size,
            batch: plan.args.batch,
            seconds: plan.duration.unwrap_or_default().as_secs_f64(),
            repetitions,
            sender: plan.args.matrix.sender.clone(),
            figures: rows.collect(),
        }
    }

    /// Adds one repetition's figure, or why there is none.
    pub(super) fn add(&mut self, benchmark: Benchmark, path: Path, figure: Result<Figure, String>) {
        let mut rows = self.figures.iter_mut();
        let Some(row) = rows.find(|row| (row.benchmark, row.path) == (benchmark, path)) else {
            return;
        };
        match figure {
            Ok(figure) => {
                row.reason = None;
                if figure.note.is_some() {
                    row.note.clone_from(&figure.note);
                }
                row.measured.push(figure);
                row.result = Summary::of(&row.measured);
            }
            Err(reason) if row.measured.is_empty() => row.reason = Some(reason),
            Err(reason) => row.note = Some(format!("not in every repetition: {reason}")),
        }
    }

    /// Writes it to stdout.
    pub(super) fn print(&self, json: bool) -> anyhow::Result<()> {
        print(self, json, || self.table())
    }

    fn table(&self) -> String {
        let is_row = |benchmark: Benchmark| self.figures.iter().any(|row| row.benchmark == benchmark);
        let benchmarks = Benchmark::value_variants()
            .iter()
            .copied()
            .filter(|&it| is_row(it));
        let title = format!(
            "{} queue {}, {} bytes: Mpps, CPU ns a frame",
            self.interface, self.queue, self.size
        );
        let head = std::iter::once(title).chain(benchmarks.map(name_of));
        let (mut table, mut notes) = (Vec::new(), Vec::new());
        for &path in Path::value_variants() {
            let rows = || self.figures.iter().filter(|row| row.path == path);
            if rows().next().is_none() {
                continue;
            }
            let cell = |row: &Row| {
                row.result.map_or("-".to_owned(), |it| {
                    format!("{:.3} {:.0}", it.frames_per_second / 1e6, it.cpu_ns_per_frame)
                })
            };
            let row = std::iter::once(path.title().to_owned()).chain(rows().map(cell));
            table.push(row.collect::<Vec<_>>());
            for row in rows() {
                let said = row.reason.iter().chain(&row.note);
                notes.extend(said.map(|said| (path, row.benchmark, said)));
            }
        }
        format!(
            "{}{}",
            table_of(head, table, CellAlignment::Right),
            notes_text(&notes)
        )
    }
}

/// A line for each reason, naming the benchmarks of a path that share it.
fn notes_text(notes: &[(Path, Benchmark, &String)]) -> String {
    let mut lines: Vec<(Path, Vec<String>, &String)> = Vec::new();
    for &(path, benchmark, said) in notes {
        match lines.iter_mut().find(|line| line.0 == path && line.2 == said) {
            Some(line) => line.1.push(name_of(benchmark)),
            None => lines.push((path, vec![name_of(benchmark)], said)),
        }
    }
    let line = |(path, benchmarks, said): &(Path, Vec<String>, &String)| {
        format!("\n{}, {}: {said}", path.title(), benchmarks.join(", "))
    };
    lines.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_is_of_medians_and_extremes() {
        let figure = |rate, cpu_ns| Figure {
            rate,
            cpu_ns,
            frames: 10,
            note: None,
        };
        assert!(Summary::of(&[]).is_none());
        let summary = Summary::of(&[figure(3.0, 1.0), figure(1.0, 9.0), figure(2.0, 5.0)]).expect("three");
        assert_eq!(
            (
                summary.frames_per_second,
                summary.lowest,
                summary.highest,
                summary.cpu_ns_per_frame
            ),
            (2.0, 1.0, 3.0, 5.0)
        );
        assert_eq!(summary.frames, 30);
    }

    #[test]
    fn reason_that_several_benchmarks_share_is_one_line() {
        let (no, other) = ("the driver has no zero-copy".to_owned(), "no link".to_owned());
        let notes = [
            (Path::ZeroCopy, Benchmark::Rxdrop, &no),
            (Path::ZeroCopy, Benchmark::Txonly, &no),
            (Path::Xdp, Benchmark::L2fwd, &other),
        ];
        assert_eq!(
            notes_text(&notes),
            "\nAF_XDP zero-copy, rxdrop, txonly: the driver has no zero-copy\nXDP program alone, l2fwd: no link"
        );
    }
}
