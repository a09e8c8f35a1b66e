//! The gateway: answers HTTP and metrics for a vhost-af-xdp daemon, and asks the daemon by its control protocol
//! ([`model::control`]).
//!
//! `vhost-af-xdp serve` starts it for `--api`, `--api-read-only` and `--metrics`, and passes it the listening sockets.
//! [`supervise`] starts and restarts its processes, [`server`] is HTTP.
//!
//! It is a library only so that crate `manual` can generate docs/openapi.json. The program is `main.rs`, one line.

mod answers;
mod body;
mod changes;
mod connection_limits;
mod daemon;
mod events;
mod idle_timeout;
mod link;
mod metrics;
pub mod problem;
mod requests;
pub mod routes;
mod server;
mod supervise;

use std::process::ExitCode;

use clap::Parser as _;

/// The program.
#[must_use]
pub fn main() -> ExitCode {
    let args = supervise::Args::parse();
    args.log.start("info");
    program::log::exit("vhost-af-xdp-gateway", supervise::run(&args))
}
