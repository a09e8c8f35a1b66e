//! One figure: a benchmark by one path, from set-up to clean-up.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use rustix::thread::CpuSet;
use steer::{Mode, ModeRequest, Verdict, VerdictProgram, with_sources};

use super::sender::Sender;
use super::traffic;
use crate::args::Plan;
use crate::choice::{Benchmark, Path, name_of};
use crate::meter::{Meter, Stopwatch, Tally};
use crate::over_xdp;
use crate::packet::{self, PacketSocket, Version};
use crate::setup::{self, LONGEST_IN_ONE_BUFFER, Rig};

/// How long the first frame may take to arrive.
const BEGIN_LIMIT: Duration = Duration::from_secs(10);
/// Interval at which counters and flags are read.
const LOOK: Duration = Duration::from_millis(20);
/// Least share of the frames given to the interface that must have left it; below 1, as its counters may lag behind.
const LEFT_SHARE: f64 = 0.9;

/// A benchmark to run, and its arguments.
#[derive(Clone, Copy)]
pub(super) struct Setting<'a> {
    pub(super) plan: &'a Plan,
    pub(super) benchmark: Benchmark,
    pub(super) path: Path,
    pub(super) meter: &'a Meter,
    /// Where this process may run.
    pub(super) all_cpus: &'a CpuSet,
}

/// What was measured.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Figure {
    /// Frames a second, while it was measured.
    pub(super) rate: f64,
    /// CPU time of this process, ns a frame.
    pub(super) cpu_ns: f64,
    /// Frames in all, also before and after.
    pub(super) frames: u64,
    /// A remark for the table.
    pub(super) note: Option<String>,
}

/// Differences between the first reading and the last.
struct Window {
    seconds: f64,
    cpu_seconds: f64,
    frames: u64,
    /// Frames that the interface sent meanwhile, if the kernel says.
    left: Option<u64>,
}

impl Setting<'_> {
    /// Errors: why there is no figure, in one line.
    pub(super) fn measured(&self) -> Result<Figure, String> {
        let figure = match self.path {
            Path::ZeroCopy => self.over_xdp(Mode::Native, true),
            Path::NativeCopy => self.over_xdp(Mode::Native, false),
            Path::SkbCopy => self.over_xdp(Mode::Skb, false),
            Path::PacketV3 => self.over_packet(Version::V3),
            Path::PacketV2 => self.over_packet(Version::V2),
            Path::Xdp => self.by_program(),
        };
        let _ = rustix::thread::sched_setaffinity(None, self.all_cpus);
        figure.map_err(with_sources)
    }

    fn over_xdp(&self, mode: Mode, zero_copy: bool) -> anyhow::Result<Figure> {
        let plan = self.plan.over_xdp(self.benchmark, mode, zero_copy);
        let mut rig = Rig::set_up(&plan)?;
        self.watched(|tally| Ok(over_xdp::run(&mut rig, &plan, self.meter, tally)?))
    }

    fn over_packet(&self, version: Version) -> anyhow::Result<Figure> {
        let mut plan = self.plan.clone();
        plan.benchmark = self.benchmark;
        let mut socket = PacketSocket::open(&plan, version)?;
        self.watched(|tally| Ok(packet::run(&mut socket, &plan, self.meter, tally)?))
    }

    fn by_program(&self) -> anyhow::Result<Figure> {
        let verdict = match self.benchmark {
            Benchmark::Rxdrop => Verdict::Drop,
            Benchmark::L2fwd => Verdict::SendBack,
            Benchmark::Txonly => bail!("an XDP program answers frames, it makes none"),
        };
        let plan = self.plan;
        let frags = plan.longest_received() > LONGEST_IN_ONE_BUFFER;
        let program = VerdictProgram::attach(plan.link.index, ModeRequest::Xdp, frags, verdict)?;
        let mut figure = self.watched(|tally| {
            loop {
                let is_last = self.meter.is_stopped();
                tally.frames = program.frames()?;
                self.meter.show(tally);
                if is_last {
                    return Ok(());
                }
                thread::sleep(LOOK);
            }
        })?;
        if let Some(reason) = program.fallback() {
            figure.note.get_or_insert(format!("in skb mode: {reason}"));
        }
        Ok(figure)
    }

    /// Runs a measuring loop, with a sender if it receives, and with a thread that watches it.
    fn watched(&self, work: impl FnOnce(&mut Tally) -> anyhow::Result<()>) -> anyhow::Result<Figure> {
        setup::await_link(self.plan)?;
        let mut sender = self.sender()?;
        if self.plan.args.cpu.is_some() {
            setup::pin(self.plan.args.cpu)?;
        }
        self.meter.begin_again();
        eprintln!(
            "{} {} by {}",
            name_of(self.benchmark),
            self.plan.link.name,
            name_of(self.path)
        );
        let mut tally = Tally::default();
        let (end, window) = thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                let _ = rustix::thread::sched_setaffinity(None, self.all_cpus);
                let window = self.window();
                self.meter.stop();
                window
            });
            let end = work(&mut tally);
            self.meter.stop();
            (end, watcher.join())
        });
        end?;
        let window = window.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        match window {
            Some(window) => self.figure(&window, tally.frames),
            None if self.meter.signalled() => Err(anyhow!("ended by a signal")),
            None => Err(anyhow!(
                sender
                    .as_mut()
                    .and_then(Sender::complaint)
                    .unwrap_or_else(|| self.silence())
            )),
        }
    }

    /// Starts a sender, if the benchmark receives and the user wants that; not on the CPU of the measuring loop.
    fn sender(&self) -> anyhow::Result<Option<Sender>> {
        let Some(interface) = self
            .plan
            .args
            .matrix
            .sender
            .as_ref()
            .filter(|_| self.benchmark.receives())
        else {
            return Ok(None);
        };
        let mut cpus = *self.all_cpus;
        if let Some(cpu) = self.plan.args.cpu.filter(|_| cpus.count() > 1) {
            cpus.unset(cpu);
        }
        // The sender inherits the CPUs of this thread.
        rustix::thread::sched_setaffinity(None, &cpus).context("cannot choose the sender's CPUs")?;
        let longest = self.plan.duration.unwrap_or_default() + 2 * BEGIN_LIMIT;
        let sender = Sender::start(interface, self.plan, longest);
        let _ = rustix::thread::sched_setaffinity(None, self.all_cpus);
        sender.map(Some)
    }

    /// Measures from the first frame on; `None` if no frame arrived, or a signal did.
    fn window(&self) -> anyhow::Result<Option<Window>> {
        let begun = Instant::now();
        while self.meter.shown().0 == 0 {
            if self.meter.is_stopped() || begun.elapsed() > BEGIN_LIMIT {
                return Ok(None);
            }
            thread::sleep(Duration::from_millis(1));
        }
        let name = &self.plan.link.name;
        let before = traffic::sent(name);
        let stopwatch = Stopwatch::start()?;
        let (first, _) = self.meter.shown();
        let begun = Instant::now();
        let duration = self.plan.duration.unwrap_or_default();
        while begun.elapsed() < duration && !self.meter.is_stopped() {
            thread::sleep(LOOK.min(duration.saturating_sub(begun.elapsed())));
        }
        let (last, _) = self.meter.shown();
        let spent = stopwatch.stop()?;
        let after = traffic::sent(name);
        Ok(Some(Window {
            seconds: spent.elapsed.as_secs_f64(),
            cpu_seconds: (spent.cpu.user + spent.cpu.system).as_secs_f64(),
            frames: last - first,
            left: before
                .zip(after)
                .map(|(before, after)| after.saturating_sub(before)),
        }))
    }

    /// The figure of a window. Frames that were given to the interface and did not leave it do not count. In zero-copy
    /// the NIC itself has completed the frames, and not every driver counts them in the interface's statistics
    /// (virtio_net does not, Linux 7.2).
    fn figure(&self, window: &Window, frames: u64) -> anyhow::Result<Figure> {
        let mut counted = window.frames;
        let mut note = None;
        if self.benchmark.sends()
            && self.path != Path::ZeroCopy
            && let Some(left) = window.left
            && (left as f64) < LEFT_SHARE * counted as f64
        {
            let why = self.why_few_left();
            if left == 0 {
                bail!("of {counted} frames none left the interface{why}");
            }
            note = Some(format!("only {left} of {counted} frames left the interface{why}"));
            counted = left;
        }
        Ok(Figure {
            rate: counted as f64 / window.seconds,
            cpu_ns: window.cpu_seconds * 1e9 / (counted.max(1)) as f64,
            frames,
            note,
        })
    }

    fn why_few_left(&self) -> &'static str {
        // veth_xdp_xmit, drivers/net/veth.c
        match self.path == Path::Xdp && self.plan.link.partial_checksums {
            true => ": a veth takes frames of XDP_TX only if it polls, as with a native XDP program there",
            false => "",
        }
    }

    fn silence(&self) -> String {
        let limit = BEGIN_LIMIT.as_secs();
        match (self.benchmark.receives(), &self.plan.args.matrix.sender) {
            (false, _) => format!("no frame was sent within {limit} s"),
            (true, Some(sender)) => format!("no frame came within {limit} s, although {sender} sends some"),
            (true, None) => format!("no frame came within {limit} s: let the other end send, see --sender"),
        }
    }
}
