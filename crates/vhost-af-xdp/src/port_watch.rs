//! Records an event when a port exceeds one of its rate limits: once, until it has kept the limit for a while. Also
//! logs lost frames ([`Port::log_losses`], [`OtherLosses`]), and ends a daemon that is not used (`idle-timeout`).
//!
//! A thread of its own reads the counters of all ports and networks now and then. No worker takes part.

use std::collections::{HashMap, HashSet};
use std::io;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use signal_hook::iterator::Handle;

use crate::journal::{JOURNAL, Subject};
use crate::other_losses::OtherLosses;
use crate::port::Port;
use crate::ports::Ports;
use crate::thread;
use model::events::What;

/// Interval of checks.
const PAUSE: Duration = Duration::from_secs(2);
/// Checks without a frame beyond the limit after which exceeding it is a new event.
const QUIET: u32 = 5;

/// The rate limit of one direction of a port.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    /// The counter of waits, or of dropped frames, because of the limit.
    count: u64,
    /// Checks until exceeding the limit is a new event.
    told: u32,
}

impl Seen {
    /// Whether the limit was exceeded, and that is a new event.
    fn look(&mut self, count: u64) -> bool {
        // A smaller count is that of another port, which has the name now.
        let is_beyond = std::mem::replace(&mut self.count, count) < count;
        let is_news = is_beyond && self.told == 0;
        self.told = if is_beyond {
            QUIET
        } else {
            self.told.saturating_sub(1)
        };
        is_news
    }
}

/// Watches these ports, and ends the daemon when no VMM has been connected for `idle_timeout` seconds.
/// Errors: no thread can be started.
pub(crate) fn start(ports: Arc<Ports>, idle_timeout: Option<NonZeroU32>, signals: Handle) -> io::Result<()> {
    let body = move || {
        let mut seen: HashMap<String, [Seen; 2]> = HashMap::new();
        let mut losses = OtherLosses::default();
        let (mut used, mut sessions) = (Instant::now(), 0);
        loop {
            let networks = ports.networks();
            let ports = ports.all();
            let shown: Vec<_> = ports
                .iter()
                .filter_map(|port| port.published.snapshot())
                .collect();
            let now = shown.iter().map(|shown| shown.sessions).sum();
            // A VMM may have connected and disconnected between two checks.
            if std::mem::replace(&mut sessions, now) != now
                || shown.iter().any(|shown| shown.session.is_some())
            {
                used = Instant::now();
            }
            if let Some(seconds) = idle_timeout
                && used.elapsed() >= Duration::from_secs(seconds.get().into())
            {
                tracing::info!("no VMM has been connected for {seconds} s: the daemon ends (idle-timeout)");
                return signals.close();
            }
            losses.look(&ports, &networks);
            let named: HashSet<_> = ports.iter().map(|port| port.name()).collect();
            seen.retain(|name, _| named.contains(name.as_str()));
            for port in &ports {
                port.log_losses();
                let [from_guest, to_guest] = seen.entry(port.name().to_owned()).or_default();
                for (seen, count, words) in [
                    (from_guest, waits(port), "from the guest: its frames wait"),
                    (
                        to_guest,
                        drops(port),
                        "to the guest: frames beyond it are dropped",
                    ),
                ] {
                    if seen.look(count) {
                        JOURNAL.record(
                            Subject::Port(port.name()),
                            What::LimitReached,
                            Some(words.to_owned()),
                        );
                    }
                }
            }
            std::thread::sleep(PAUSE);
        }
    };
    thread::start("port-watch", body).map(drop)
}

fn waits(port: &Port) -> u64 {
    port.counters
        .iter()
        .map(|pair| pair.from_guest_limit_waits.get())
        .sum()
}

fn drops(port: &Port) -> u64 {
    port.counters.iter().map(|pair| pair.to_guest_limit.get()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_is_told_once_until_it_was_kept_for_a_while() {
        let mut seen = Seen::default();
        assert!(!seen.look(0));
        assert!(seen.look(3));
        assert!(!seen.look(5), "it goes on");
        for _ in 1..QUIET {
            assert!(!seen.look(5));
        }
        assert!(!seen.look(6), "not long enough");
        for _ in 0..QUIET {
            assert!(!seen.look(6));
        }
        assert!(seen.look(7));
    }

    #[test]
    fn counters_that_begin_anew_are_no_limit_reached() {
        let mut seen = Seen::default();
        assert!(seen.look(7));
        for _ in 0..QUIET {
            assert!(!seen.look(7));
        }
        assert!(!seen.look(0), "another port has the name");
        assert!(seen.look(1));
    }
}
