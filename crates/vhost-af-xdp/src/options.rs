//! Options that `serve` and `bench` have alike: the mode, how sockets are bound, busy polling.

use clap::{Args, ValueEnum, value_parser};
use steer::ModeRequest;
use xsk::{BindRequest, BusyPoll};

/// How frames come from an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModeArg {
    /// By AF_XDP where the driver has zero-copy, else by a tap, unless an option needs AF_XDP; the default
    Auto,
    /// By an XDP program and AF_XDP sockets: native, or skb where the driver refuses native
    Xdp,
    /// In the driver
    Native,
    /// In the stack, after the driver; works with every driver
    Skb,
    /// No XDP program: frames pass by a tap device, GSO packets whole
    Tap,
}

pub(crate) fn mode_request(mode: Option<ModeArg>) -> ModeRequest {
    match mode {
        None | Some(ModeArg::Auto) => ModeRequest::Auto,
        Some(ModeArg::Xdp) => ModeRequest::Xdp,
        Some(ModeArg::Native) => ModeRequest::Native,
        Some(ModeArg::Skb) => ModeRequest::Skb,
        Some(ModeArg::Tap) => ModeRequest::Tap,
    }
}

/// What `--force-copy` and `--force-zero-copy` say; they exclude each other.
pub(crate) fn bind_request(force_copy: bool, force_zero_copy: bool) -> BindRequest {
    match (force_copy, force_zero_copy) {
        (true, _) => BindRequest::ForceCopy,
        (false, true) => BindRequest::ForceZeroCopy,
        (false, false) => BindRequest::Auto,
    }
}

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
