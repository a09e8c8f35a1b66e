//! The command line of `bench`, checked.

use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::{Args, ValueEnum};
use steer::{Mode, mac_bytes};
use steward::links::{DriverSends, Link};

use super::frame::Mac;
use crate::cli::values::{ModeArg, bind_request};
use crate::nic::binding::{Binding, L2_BYTES, LARGE_CHUNK, SMALL_CHUNK, Wish};
use crate::nic::drivers;

/// Entries of the rx and the tx ring.
pub(super) const RING: u32 = 2048;
/// Shortest Ethernet frame, without its checksum.
const SHORTEST_FRAME: u32 = 60;
/// Longest frame that `txonly` makes: one chunk, and the largest chunk is a page.
const LONGEST_FRAME: u32 = 4096;

/// What to do with the frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Benchmark {
    /// Receive frames and drop them
    Rxdrop,
    /// Send frames
    Txonly,
    /// Receive frames and send them back with their MAC addresses swapped
    L2fwd,
}

impl Benchmark {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Rxdrop => "rxdrop",
            Self::Txonly => "txonly",
            Self::L2fwd => "l2fwd",
        }
    }

    pub(super) fn receives(self) -> bool {
        self != Self::Txonly
    }

    pub(super) fn sends(self) -> bool {
        self != Self::Rxdrop
    }
}

/// Measure a raw AF_XDP socket, without a guest
#[derive(Debug, Clone, Args)]
pub(crate) struct BenchArgs {
    /// What to do with the frames
    #[arg(value_enum)]
    pub(super) benchmark: Benchmark,
    /// Network interface
    #[arg(long, value_name = "NAME")]
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
    /// Use zero-copy, whatever is known of the driver, or fail
    #[arg(long, conflicts_with = "force_copy")]
    force_zero_copy: bool,
    /// Length of the frames that txonly sends, in bytes without the frame checksum
    #[arg(long, value_name = "BYTES", default_value_t = 64)]
    pub(super) size: u32,
    /// How long to run; 0: until a signal
    #[arg(
        long,
        value_name = "SECS",
        default_value_t = 10.0,
        allow_negative_numbers = true
    )]
    duration: f64,
    /// Frames handled at a time
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(super) batch: u32,
    /// Sleep this long after each batch that txonly sends: paces it, and lets others on its CPU run
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0)]
    pub(super) pause_us: u32,
    /// Pin the measuring thread to this CPU
    #[arg(long, value_name = "N")]
    pub(super) cpu: Option<usize>,
    /// Print one JSON object instead of a table, and no progress unless on a terminal
    #[arg(long)]
    pub(super) json: bool,
    /// Destination of the frames that txonly sends [default: 02:00:00:00:00:01]
    #[arg(long, value_name = "MAC")]
    dst_mac: Option<String>,
    /// Source of the frames that txonly sends [default: the interface's own]
    #[arg(long, value_name = "MAC")]
    src_mac: Option<String>,
    /// Frames that one system call may send in copy mode (XDP_MAX_TX_SKB_BUDGET, Linux 6.18); by default the whole
    /// ring
    #[arg(long, value_name = "N", default_value_t = RING)]
    pub(super) tx_budget: u32,
    /// Put frames at any offset (unaligned chunks) instead of one a chunk
    #[arg(long)]
    pub(super) unaligned: bool,
}

/// A checked command line, and the interface that it names.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) args: BenchArgs,
    pub(super) link: Link,
    /// `None`: until a signal.
    pub(super) duration: Option<Duration>,
    pub(super) to: Mac,
    pub(super) from: Mac,
}

impl TryFrom<BenchArgs> for Plan {
    type Error = anyhow::Error;

    fn try_from(args: BenchArgs) -> anyhow::Result<Self> {
        let (batch, budget) = (args.batch, args.tx_budget);
        ensure!((1..=RING).contains(&batch), "--batch {batch}: choose 1 to {RING}");
        ensure!(
            (32..=RING).contains(&budget),
            "--tx-budget {budget}: choose 32 to {RING}"
        );
        ensure!(
            args.benchmark == Benchmark::Txonly || (args.dst_mac.is_none() && args.src_mac.is_none()),
            "--dst-mac and --src-mac are for txonly: {} makes no frames",
            args.benchmark.name()
        );
        ensure!(
            !(args.force_zero_copy && args.mode == Some(ModeArg::Skb)),
            "--force-zero-copy and --mode skb exclude each other: zero-copy takes a native program, leave one out"
        );
        let duration = duration_of(args.duration)?;
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
            to: mac_of("--dst-mac", args.dst_mac.as_deref(), [2, 0, 0, 0, 0, 1])?,
            from: mac_of("--src-mac", args.src_mac.as_deref(), link.mac)?,
            duration,
            link,
            args,
        })
    }
}

impl Plan {
    /// Longest frame that the interface can receive, in bytes.
    pub(super) fn longest_received(&self) -> u32 {
        self.link.mtu.saturating_add(L2_BYTES)
    }

    /// How the socket is bound beside a program that is attached like that, and the size of its chunks.
    /// Errors: zero-copy is forced, and cannot be.
    pub(super) fn binding(&self, mode: Mode) -> anyhow::Result<Binding> {
        let receives = self.args.benchmark.receives();
        let wish = Wish {
            asked: bind_request(self.args.force_copy, self.args.force_zero_copy),
            direct: false,
            native: mode == Mode::Native,
            driver: DriverSends::by_index(self.link.index),
            line: drivers::line(&self.link.driver),
            frame_limit: if receives { self.longest_received() } else { 0 },
        };
        let binding = wish
            .binding()
            .with_context(|| format!("--force-zero-copy on {}", self.link.name))?;
        if receives {
            return Ok(binding);
        }
        // Nothing is received into them, and no headroom is left.
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

fn duration_of(seconds: f64) -> anyhow::Result<Option<Duration>> {
    if seconds == 0.0 {
        return Ok(None);
    }
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) => Ok(Some(duration)),
        Err(_) => bail!("--duration {seconds}: choose seconds, or 0 to run until a signal"),
    }
}

fn mac_of(option: &str, text: Option<&str>, default: Mac) -> anyhow::Result<Mac> {
    let mac = text.map_or(Some(default), mac_bytes);
    mac.with_context(|| {
        let text = text.unwrap_or_default();
        format!("{option} {text}: choose an address such as 02:00:00:00:00:01")
    })
}
