//! The thread that watches server and client: it shows progress, takes the measurements, and ends the run.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use super::args::{Engine, Plan, Role};
use super::counts::Counts;
use super::usage::{Reading, Usage};
use crate::choice::name_of;
use crate::meter::Meter;
use crate::progress::Show;

/// Interval between two checks.
const PAUSE: Duration = Duration::from_millis(50);
const SECOND: Duration = Duration::from_secs(1);
/// How long connections are used before measuring begins: TCP's windows have grown by then.
const WARMING_UP: Duration = Duration::from_millis(500);

/// What the thread watches.
#[derive(Debug, Clone, Copy)]
pub(super) struct Watched<'a> {
    pub(super) plan: &'a Plan,
    pub(super) engine: Option<Engine>,
    pub(super) server: SocketAddr,
    pub(super) counts: &'a Counts,
    pub(super) meter: &'a Meter,
}

impl Watched<'_> {
    /// Watches until the time is up, a signal arrives or a thread fails, and then ends all threads.
    /// Returns the measurement; `None`: the run ended before measuring began.
    pub(super) fn until_stopped(&self) -> Option<Usage> {
        let begin = Instant::now();
        let show = Show::new(self.label(), self.plan.duration, self.plan.args.json);
        let measuring = match self.plan.role {
            Role::Server => self.listens(),
            Role::Both | Role::Client => self.warm_up(begin),
        };
        let usage = measuring.then(|| {
            self.counts.measure();
            self.measure(begin, &show)
        });
        self.meter.stop();
        show.end();
        usage
    }

    fn label(&self) -> String {
        let server = self.server;
        match (self.plan.role, self.engine.map_or_else(String::new, name_of)) {
            (Role::Client, _) => format!("echo to {server}"),
            (_, engine) => format!("echo by {engine} at {server}"),
        }
    }

    /// Prints that a server without a local client listens, as soon as it does; false if the run ended before.
    fn listens(&self) -> bool {
        while self.counts.server().is_none() {
            if self.meter.is_stopped() {
                return false;
            }
            thread::sleep(PAUSE / 10);
        }
        eprintln!("{}: listens", self.label());
        true
    }

    /// Waits until all connections are established and TCP has warmed up; false if the run ended before.
    fn warm_up(&self, begin: Instant) -> bool {
        let moment = self
            .plan
            .duration
            .map_or(WARMING_UP, |all| WARMING_UP.min(all / 10));
        let mut since = None;
        while since.is_none_or(|since: Instant| since.elapsed() < moment) {
            if self.meter.is_stopped() {
                return false;
            }
            if since.is_none() && self.counts.connected() == self.plan.args.connections {
                since = Some(Instant::now());
            }
            self.counts.set_seconds(begin.elapsed().as_secs());
            thread::sleep(PAUSE.min(moment));
        }
        true
    }

    fn measure(&self, begin: Instant, show: &Show) -> Usage {
        let start = Instant::now();
        let take = || Reading::take(self.counts, self.plan.cpu);
        let (mut usage, mut last, mut next) = (Usage::NONE, take(), start + SECOND);
        // Seconds in which a server without a local client had no messages are not part of the measurement.
        let mut add = |earlier: &Reading, now: &Reading| {
            if self.plan.role != Role::Server || now.moved_since(earlier) {
                usage.add(earlier, now);
            }
        };
        let deadline = self.plan.duration.map(|duration| start + duration);
        while !self.meter.is_stopped() {
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                break;
            }
            if now >= next {
                let reading = take();
                let (messages, bytes) = reading.rate_since(&last);
                let (kqps, gbps) = (messages / 1e3, bytes * 8e-9);
                show.rate(now - start, &format!("{kqps:.2} Kqps  {gbps:.2} Gb/s"));
                add(&last, &reading);
                last = reading;
                next += SECOND;
            }
            self.counts.set_seconds(begin.elapsed().as_secs());
            let until = deadline.map_or(next, |deadline| deadline.min(next));
            thread::sleep(until.saturating_duration_since(Instant::now()).min(PAUSE));
        }
        add(&last, &take());
        usage
    }
}
