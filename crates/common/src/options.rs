//! Options of `serve` and of the benchmarks, converted to the types of sockets and of the steward.

use anyhow::bail;
use model::config::{Mode, Polling};
use steer::ModeRequest;
use xsk::{BindRequest, BusyPoll};

/// Longest time of one busy poll, microseconds.
const MOST_BUSY_POLL_US: u32 = 1_000_000;

/// The mode that is asked for.
#[must_use]
pub fn mode_request(mode: Option<Mode>) -> ModeRequest {
    match mode.unwrap_or_default() {
        Mode::Auto => ModeRequest::Auto,
        Mode::Xdp => ModeRequest::Xdp,
        Mode::Native => ModeRequest::Native,
        Mode::Skb => ModeRequest::Skb,
        Mode::Tap => ModeRequest::Tap,
    }
}

/// How sockets are bound.
///
/// # Errors
/// Both are forced.
pub fn bind_request(force_copy: bool, force_zero_copy: bool) -> anyhow::Result<BindRequest> {
    match (force_copy, force_zero_copy) {
        (true, true) => bail!("force-zero-copy excludes force-copy: leave one out"),
        (true, false) => Ok(BindRequest::ForceCopy),
        (false, true) => Ok(BindRequest::ForceZeroCopy),
        (false, false) => Ok(BindRequest::Auto),
    }
}

/// How system calls on sockets poll; `None`: they do not.
///
/// # Errors
/// A value is out of its range.
pub fn busy_poll(polling: &Polling) -> anyhow::Result<Option<BusyPoll>> {
    let (usecs, budget) = (
        polling.busy_poll_us.unwrap_or(0),
        polling.busy_poll_budget.unwrap_or(64),
    );
    if usecs > MOST_BUSY_POLL_US {
        bail!("busy-poll-us {usecs}: give 0 to {MOST_BUSY_POLL_US}");
    }
    if budget == 0 {
        bail!("busy-poll-budget 0: give 1 to 65535");
    }
    Ok((usecs > 0).then(|| BusyPoll {
        usecs,
        budget: budget.into(),
        prefer: true,
    }))
}
