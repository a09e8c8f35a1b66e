//! A second thread during a measurement: it shows the rates, and ends the measuring loop when time is up.
//!
//! On a terminal there is a bar that is drawn over; elsewhere a plain line a second; with `--json` nothing but on a
//! terminal. All of it goes to stderr: stdout is for the result.

use std::io::{self, IsTerminal as _};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use rustix::thread::CpuSet;
use xsk::WakeError;

use super::args::Plan;
use super::choice::name_of;
use super::meter::Meter;

const EVERY: Duration = Duration::from_secs(1);

/// Runs `measure` on this thread, with the progress thread beside it on any of `cpus`.
pub(super) fn beside(
    plan: &Plan,
    meter: &Meter,
    cpus: &CpuSet,
    measure: impl FnOnce() -> Result<(), WakeError>,
) -> Result<(), WakeError> {
    thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            // Best effort: on the CPU of the measuring thread it would delay that one for some µs a second.
            let _ = rustix::thread::sched_setaffinity(None, cpus);
            watch(plan, meter);
        });
        let end = measure();
        meter.stop();
        watcher.thread().unpark();
        end
    })
}

fn watch(plan: &Plan, meter: &Meter) {
    let start = Instant::now();
    let deadline = plan.duration.map(|duration| start + duration);
    let label = format!(
        "{} {} queue {}",
        name_of(plan.benchmark),
        plan.link.name,
        plan.args.queue
    );
    let show = Show::new(label, plan.duration, plan.args.json);
    let mut next = start + EVERY;
    let mut last = (start, 0, 0);
    while !meter.is_stopped() {
        let now = Instant::now();
        if deadline.is_some_and(|deadline| now >= deadline) {
            meter.stop();
            break;
        }
        if now >= next {
            let (frames, bytes) = meter.shown();
            let seconds = now.duration_since(last.0).as_secs_f64();
            let mpps = (frames - last.1) as f64 / seconds / 1e6;
            let gbps = (bytes - last.2) as f64 / seconds * 8e-9;
            show.rate(now - start, &format!("{mpps:.3} Mpps  {gbps:.3} Gb/s"));
            last = (now, frames, bytes);
            next += EVERY;
        }
        let until = deadline.map_or(next, |deadline| deadline.min(next));
        thread::park_timeout(until.saturating_duration_since(Instant::now()));
    }
    show.end();
}

/// How progress is shown.
pub(super) enum Show {
    Nothing,
    Lines(String),
    Bar(ProgressBar),
}

impl Show {
    /// `label` stands before each line; `duration`: how long it takes, if that is known.
    pub(super) fn new(label: String, duration: Option<Duration>, json: bool) -> Self {
        if !io::stderr().is_terminal() {
            return if json { Self::Nothing } else { Self::Lines(label) };
        }
        let (bar, template) = match duration {
            Some(duration) => (
                ProgressBar::new(duration.as_millis() as u64),
                "{prefix} [{bar:20}] {msg}",
            ),
            None => (ProgressBar::new_spinner(), "{prefix} {spinner} {msg}"),
        };
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        Self::Bar(bar.with_style(style.progress_chars("━╸ ")).with_prefix(label))
    }

    /// Shows the rates after this time.
    pub(super) fn rate(&self, elapsed: Duration, rates: &str) {
        let seconds = elapsed.as_secs_f64();
        match self {
            Self::Nothing => {}
            Self::Lines(label) => eprintln!("{label}: {seconds:.0} s  {rates}"),
            Self::Bar(bar) => {
                bar.set_position(elapsed.as_millis() as u64);
                bar.set_message(format!("{seconds:.0} s  {rates}"));
            }
        }
    }

    pub(super) fn end(&self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}
