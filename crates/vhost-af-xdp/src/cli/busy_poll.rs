//! Options of busy polling, of `serve` and `bench`.

use clap::{Args, value_parser};
use xsk::BusyPoll;

#[derive(Debug, Clone, Args)]
pub(crate) struct BusyPollArgs {
    /// Let system calls on AF_XDP sockets run the driver's poll function on our CPU (SO_BUSY_POLL,
    /// SO_PREFER_BUSY_POLL); 0: do not
    #[arg(
        long,
        value_name = "MICROSECONDS",
        default_value_t = 0,
        value_parser = value_parser!(u32).range(..=1_000_000)
    )]
    busy_poll_us: u32,
    /// Frames that one such poll may handle (SO_BUSY_POLL_BUDGET)
    #[arg(long, value_name = "FRAMES", default_value_t = 64, value_parser = value_parser!(u16).range(1..))]
    busy_poll_budget: u16,
}

impl BusyPollArgs {
    /// What sockets are asked for.
    pub(crate) fn build(&self) -> Option<BusyPoll> {
        (self.busy_poll_us > 0).then(|| BusyPoll {
            usecs: self.busy_poll_us,
            budget: self.busy_poll_budget.into(),
            prefer: true,
        })
    }
}
