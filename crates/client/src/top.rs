//! The options of `vhost-af-xdp-top`, which is a program of its own and the command `vhost-af-xdp top`.

use std::path::PathBuf;

use clap::{Args, Parser};

/// Options of `top`.
#[derive(Debug, Clone, Args)]
pub struct TopArgs {
    /// Control socket of one daemon [default: all that are found]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// Seconds between two readings
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub interval: u64,
}

/// Keys, for `--help`.
pub const TOP_KEYS: &str = "\
Keys:
  1 2 3, Tab   ports, queues, workers
  < >          sort by the column to the left, to the right
  r            reverse the order
  Up Down      scroll; also PageUp, PageDown, Home
  Space        pause
  q, Esc       quit";

/// Shows ports, queues and workers of running daemons live in the terminal: bits, frames and drops a second.
#[derive(Debug, Parser)]
#[command(name = "vhost-af-xdp-top", version, max_term_width = 100, after_help = TOP_KEYS)]
pub struct Top {
    /// Its options.
    #[command(flatten)]
    pub args: TopArgs,
}
