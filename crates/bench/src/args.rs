//! The command line of `bench`, checked.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::{Args, value_parser};
use common::binding::{Binding, L2_BYTES, LARGE_CHUNK, QueueFacts, SMALL_CHUNK};
use common::drivers;
use common::options::bind_request;
use host::links::{DriverSends, Link};
use model::config::{MOST_RULES, Mode as ModeArg, Polling};
use steer::{HintSet, Mode, NoSuchHint, mac_bytes};

use super::choice::{Benchmark, MatrixArgs, What};
use super::frame::Mac;

/// Entries of the rx and the tx ring.
pub(super) const RING: u32 = 2048;
/// Shortest Ethernet frame, without its checksum.
const SHORTEST_FRAME: u32 = 60;
/// Longest frame that `txonly` makes: one chunk, and the largest chunk is a page.
const LONGEST_FRAME: u32 = 4096;

/// The value of `--hints`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HintsArg {
    /// All hints that the driver reports.
    Auto,
    These(HintSet),
}

impl HintsArg {
    fn parse(text: &str) -> Result<Self, NoSuchHint> {
        match text {
            "auto" => Ok(Self::Auto),
            text => text.parse().map(Self::These),
        }
    }
}

/// What measures raw sockets
#[derive(Debug, Clone, Args)]
pub(crate) struct RawArgs {
    /// What to measure
    #[arg(value_enum)]
    what: What,
    /// Network interface
    #[arg(long, value_name = "IFNAME")]
    ifname: String,
    /// Its queue, counted from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) queue: u32,
    /// How the XDP program is attached [default: native, skb where the driver refuses]
    #[arg(long, value_enum)]
    pub(super) mode: Option<ModeArg>,
    /// Do not use zero-copy, even where the device can
    #[arg(long)]
    force_copy: bool,
    /// Use zero-copy even if the driver is known bad, or fail
    #[arg(long, conflicts_with = "force_copy")]
    force_zero_copy: bool,
    /// Length of the frames that txonly sends, in bytes without the frame checksum
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    pub(super) size: u32,
    /// How long to run; 0: until a signal, not for matrix [default: 10; matrix: 3 for each figure]
    #[arg(long, value_name = "SECS", allow_negative_numbers = true, value_parser = seconds)]
    duration: Option<Duration>,
    /// Frames handled at a time
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = value_parser!(u32).range(1..=RING.into()))]
    pub(super) batch: u32,
    /// Sleep this long after each batch: paces txonly, frees the CPU for others, and batches frames where they are
    /// received
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0)]
    pub(super) pause_us: u32,
    /// Pin the measuring thread to this CPU
    #[arg(long, value_name = "N")]
    pub(super) cpu: Option<usize>,
    /// Print one JSON object instead of a table, and no progress unless on a terminal
    #[arg(long)]
    pub(super) json: bool,
    /// Destination of the frames that txonly sends [default: 02:00:00:00:00:01]
    #[arg(long, value_name = "MAC", value_parser = mac)]
    dst_mac: Option<Mac>,
    /// Spread frames of txonly over this many destinations, counted up from --dst-mac: ports of a network
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=1024))]
    pub(super) dst_macs: u32,
    /// Source of the frames that txonly sends [default: the interface's own]
    #[arg(long, value_name = "MAC", value_parser = mac)]
    src_mac: Option<Mac>,
    /// Frames that one system call may send in copy mode (XDP_MAX_TX_SKB_BUDGET, Linux 6.18); by default the whole
    /// ring
    #[arg(long, value_name = "N", default_value_t = RING, value_parser = value_parser!(u32).range(32..=RING.into()))]
    pub(super) tx_budget: u32,
    /// Put frames at any offset (unaligned chunks) instead of one a chunk
    #[arg(long)]
    pub(super) unaligned: bool,
    /// UDP flows that txonly sends frames of, one after the other: as many source ports, from 1024
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=60_000))]
    pub(super) flows: u32,
    /// rxdrop, l2fwd: classify each frame by a port's filter and its flow cache, by the NIC's hash where --hints has it
    #[arg(long)]
    pub(super) classify: bool,
    /// Rules of that filter; the last one matches the frames of txonly
    #[arg(long, value_name = "N", default_value_t = 10, requires = "classify", value_parser = value_parser!(u32).range(1..=MOST_RULES as i64))]
    pub(super) rules: u32,
    /// rxdrop: request the NIC's hints before frames, and read them: a list of hash, vlan and timestamp, none, or auto,
    /// all that the driver reports; in native mode only
    #[arg(long, value_name = "LIST", value_parser = HintsArg::parse)]
    pub(super) hints: Option<HintsArg>,
    #[command(flatten)]
    pub(super) busy_poll: Polling,
    #[command(flatten)]
    pub(super) matrix: MatrixArgs,
}

/// A checked command line, and the interface that it names.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) args: RawArgs,
    pub(super) benchmark: Benchmark,
    pub(super) link: Link,
    /// `None`: until a signal.
    pub(super) duration: Option<Duration>,
    pub(super) to: Mac,
    pub(super) from: Mac,
}

impl RawArgs {
    /// Which benchmark is to be run; `None`: the matrix of all.
    pub(super) fn benchmark(&self) -> Option<Benchmark> {
        match self.what {
            What::Rxdrop => Some(Benchmark::Rxdrop),
            What::Txonly => Some(Benchmark::Txonly),
            What::L2fwd => Some(Benchmark::L2fwd),
            What::Matrix => None,
        }
    }

    /// Errors: options that do not go together.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        use What::{L2fwd, Matrix, Rxdrop, Txonly};
        let has_mode = self.mode.is_some() || self.force_copy || self.force_zero_copy;
        for (is_used, by, complaint) in [
            (
                self.dst_mac.is_some() || self.src_mac.is_some(),
                &[Txonly, Matrix][..],
                "--dst-mac and --src-mac are for txonly and matrix: no other benchmark makes frames",
            ),
            (self.dst_macs > 1, &[Txonly], "--dst-macs is for txonly"),
            (self.flows > 1, &[Txonly], "--flows is for txonly"),
            (
                self.classify,
                &[Rxdrop, L2fwd],
                "--classify is for rxdrop and l2fwd: they receive frames",
            ),
            (
                self.hints.is_some() && !self.classify,
                &[Rxdrop],
                "--hints is for rxdrop, and for --classify: nothing else reads them",
            ),
            (
                self.matrix.is_used(),
                &[Matrix],
                "--sender, --benchmarks, --paths and --reps are for matrix",
            ),
            (
                has_mode,
                &[Rxdrop, Txonly, L2fwd],
                "--mode, --force-copy and --force-zero-copy: matrix measures every mode; choose some by --paths",
            ),
            (
                self.duration == Some(Duration::ZERO),
                &[Rxdrop, Txonly, L2fwd],
                "--duration 0: each figure of a matrix takes some time",
            ),
        ] {
            ensure!(!is_used || by.contains(&self.what), complaint);
        }
        ensure!(
            self.mode != Some(ModeArg::Tap),
            "--mode tap: AF_XDP sockets are measured, leave it out"
        );
        ensure!(
            !(self.force_zero_copy && self.mode == Some(ModeArg::Skb)),
            "--force-zero-copy and --mode skb exclude each other: zero-copy takes a native program, leave one out"
        );
        Ok(())
    }
}

impl TryFrom<RawArgs> for Plan {
    type Error = anyhow::Error;

    fn try_from(args: RawArgs) -> anyhow::Result<Self> {
        let usual = Duration::from_secs(args.benchmark().map_or(3, |_| 10));
        let duration = Some(args.duration.unwrap_or(usual)).filter(|duration| !duration.is_zero());
        let link = Link::by_name(&args.ifname)?;
        let Link { name, mtu, .. } = &link;
        ensure!(link.up, "{name} is down: `ip link set dev {name} up`");
        ensure!(
            args.queue < link.rx_queues,
            "--queue {}: {name} has {} receive queue(s), counted from 0",
            args.queue,
            link.rx_queues
        );
        let longest = LONGEST_FRAME.min(mtu.saturating_add(L2_BYTES));
        ensure!(
            (SHORTEST_FRAME..=longest).contains(&args.size),
            "--size {}: choose {SHORTEST_FRAME} to {longest} bytes (MTU of {name}: {mtu})",
            args.size
        );
        Ok(Self {
            to: args.dst_mac.unwrap_or([2, 0, 0, 0, 0, 1]),
            from: args.src_mac.unwrap_or(link.mac),
            benchmark: args.benchmark().unwrap_or(Benchmark::Rxdrop),
            duration,
            link,
            args,
        })
    }
}

impl Plan {
    /// A copy of this plan for another benchmark, over AF_XDP in one mode.
    pub(super) fn over_xdp(&self, benchmark: Benchmark, mode: Mode, zero_copy: bool) -> Self {
        let mut plan = self.clone();
        plan.benchmark = benchmark;
        plan.args.mode = Some(match mode {
            Mode::Native => ModeArg::Native,
            Mode::Skb | Mode::Tap => ModeArg::Skb,
        });
        plan.args.force_copy = !zero_copy;
        plan.args.force_zero_copy = zero_copy;
        plan
    }

    /// Hints that the program writes before frames, in this mode.
    pub(super) fn hints(&self, mode: Mode) -> HintSet {
        match self.args.hints {
            None => HintSet::NONE,
            Some(HintsArg::These(hints)) => hints,
            Some(HintsArg::Auto) if mode == Mode::Skb => HintSet::NONE,
            // If the kernel does not report the driver's hints, none are used.
            Some(HintsArg::Auto) => HintSet::of_driver(self.link.index)
                .unwrap_or(HintSet::NONE)
                .among(HintSet::of_kernel()),
        }
    }

    /// Sleeps after a batch, if that was asked for.
    #[inline]
    pub(super) fn pause(&self) {
        if self.args.pause_us > 0 {
            std::thread::sleep(Duration::from_micros(self.args.pause_us.into()));
        }
    }

    /// Longest frame that the interface can receive, in bytes.
    pub(super) fn longest_received(&self) -> u32 {
        self.link.mtu.saturating_add(L2_BYTES)
    }

    /// How the socket is bound if the program is attached in this mode, and the size of its chunks.
    /// Errors: zero-copy is forced, and not possible.
    pub(super) fn binding(&self, mode: Mode) -> anyhow::Result<Binding> {
        let receives = self.benchmark.receives();
        let facts = QueueFacts {
            asked: bind_request(self.args.force_copy, self.args.force_zero_copy)?,
            into_guest: None,
            native: mode == Mode::Native,
            driver: DriverSends::by_index(self.link.index),
            line: drivers::line(&self.link.driver),
            shares: false,
            frame_limit: if receives { self.longest_received() } else { 0 },
        };
        let binding = facts
            .binding()
            .with_context(|| format!("--force-zero-copy on {}", self.link.name))?;
        if receives {
            return Ok(binding);
        }
        // Nothing is received into the chunks, so they need no headroom.
        let chunk_bytes = match self.args.size <= SMALL_CHUNK {
            true => SMALL_CHUNK,
            false => LARGE_CHUNK,
        };
        Ok(Binding {
            chunk_bytes,
            ..binding
        })
    }
}

/// Seconds on the command line; 0: without end.
pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "give a number such as 4 or 0.5")?;
    Duration::try_from_secs_f64(seconds).map_err(|_| "choose seconds, or 0 to run until a signal".to_owned())
}

fn mac(text: &str) -> Result<Mac, &'static str> {
    mac_bytes(text).ok_or("choose an address such as 02:00:00:00:00:01")
}
