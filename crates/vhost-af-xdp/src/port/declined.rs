//! VMMs that disconnect because too few features are offered, and VMMs that connect while another one is served.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::reasons::{Impaired, TurnedAway};
use super::session::Reached;
use super::{Port, PortState, features};
use program::log_limit::LogLimit;
use program::peer;

/// A VMM that reads the offered features, acknowledges none and disconnects within this time has declined.
const SHORT_SESSION: Duration = Duration::from_secs(5);
/// Reported after this many in a row.
const DECLINES_TOLD: u32 = 3;

impl Port {
    /// Counts VMMs that decline, and logs the likely reason. A guest keeps its features when the back end is replaced:
    /// its VMM disconnects if some are not offered (QEMU: hw/net/vhost_net.c, "vhost lacks feature mask"), and retries.
    pub(super) fn note_declined(&self, state: &mut PortState, reached: Reached, wrong: bool) {
        if reached.took || wrong {
            (state.declines, state.declined) = (0, None);
        }
        let short = state.began.is_some_and(|began| began.elapsed() < SHORT_SESSION);
        if reached.took || wrong || !reached.asked || !short {
            return;
        }
        state.declines += 1;
        if state.declines < DECLINES_TOLD || state.declined.is_some() {
            return;
        }
        let reason = match reached.counted {
            true => Impaired::FewPairs(self.config.queues),
            false => Impaired::Declined(features::offered(&self.config)),
        };
        if let Some(left_out) = self.log_allowed() {
            tracing::warn!(port = %self.config.name, "{reason}{left_out}");
        }
        state.declined = Some(reason);
    }

    /// Logs what a VMM did, if the limit allows it.
    pub(crate) fn warn(&self, what: &str) {
        if let Some(left_out) = self.log_allowed() {
            tracing::warn!(port = %self.config.name, "{what}{left_out}");
        }
    }

    /// Logs and publishes that a second VMM is refused, because the first one is still connected.
    pub(crate) fn turn_away(&self, second: &UnixStream, waited: Duration, lines: &mut LogLimit) {
        let reason = TurnedAway {
            second: peer::process(second.as_fd()),
            first: Some(self.vmm_pid.load(Relaxed)).filter(|&pid| pid > 0),
            waited,
        };
        if let Some(left_out) = lines.allow() {
            tracing::warn!(port = %self.config.name, "{reason}{left_out}");
        }
        self.published.set_turned_away(Some(reason));
    }
}
