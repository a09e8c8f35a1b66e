//! Logs which kinds of frames sockets, steering programs and networks lose: the first of each kind in a session of a
//! port, or since a network exists. What the queue pairs of a port count is logged by `port/losses.rs`.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use model::state::Named;
use program::log_limit::LogLimit;

use crate::api::{network_status, status};
use crate::network::Network;
use crate::port::Port;

/// A counter: its source and name.
type Counter = (String, String);

/// The counters of a port or network.
#[derive(Debug, Default)]
struct Owner {
    /// Number of the port's session; 0 for a network.
    session: u64,
    /// Values at the last check; `None`: a loss of this kind was logged in this session.
    before: HashMap<Counter, Option<u64>>,
}

/// See the module's head.
#[derive(Debug, Default)]
pub(crate) struct OtherLosses {
    ports: HashMap<String, Owner>,
    networks: HashMap<String, Owner>,
    lines: LogLimit,
}

impl OtherLosses {
    /// Logs what was lost since the last check. `ports` and `networks` are all of the daemon.
    pub(crate) fn look(&mut self, ports: &[Arc<Port>], networks: &[Arc<Network>]) {
        // Only ports with queues of their own have counters of a socket or a program; there may be many others.
        let with_queues = || ports.iter().filter(|port| port.config.nic.queues().is_some());
        let named: HashSet<_> = with_queues().map(|port| port.name()).collect();
        self.ports.retain(|name, _| named.contains(name.as_str()));
        self.networks
            .retain(|name, _| networks.iter().any(|network| network.name == *name));
        for port in with_queues() {
            let status = status::read_port(port);
            let counters = status.lanes.into_iter().flat_map(|lane| lane.counters);
            let elsewhere = sums(counters.filter(|counter| counter.source != "lane"));
            let owner = self.ports.entry(port.name().to_owned()).or_default();
            for (counter, frames) in owner.first(status.sessions, elsewhere, &mut self.lines) {
                tracing::info!(port = port.name(), counter, frames, "{LOST}");
            }
        }
        for network in networks {
            let status = network_status::read(network, ports);
            let queues = status
                .queues
                .into_iter()
                .chain(status.host.map(|host| host.queue));
            let counters = queues.flat_map(|queue| queue.counters);
            let all = sums(counters.chain(status.groups));
            let owner = self.networks.entry(network.name.clone()).or_default();
            for (counter, frames) in owner.first(0, all, &mut self.lines) {
                tracing::info!(network = network.name, counter, frames, "{LOST}");
            }
        }
    }
}

const LOST: &str =
    "frames are lost: see docs/troubleshooting.md, \"Some frames are missing\", for causes and remedies";

impl Owner {
    /// Counters whose first loss is to be logged now, each with its number of frames.
    fn first(
        &mut self,
        session: u64,
        now: HashMap<Counter, u64>,
        lines: &mut LogLimit,
    ) -> Vec<(String, u64)> {
        let is_new = std::mem::replace(&mut self.session, session) != session;
        let mut first = Vec::new();
        for (counter, value) in now {
            // The program may be older than the daemon: its first value is no loss.
            let begins_at = if counter.0 == "program" { value } else { 0 };
            let before = self.before.entry(counter.clone()).or_insert(Some(begins_at));
            match before {
                Some(last) => {
                    // A lower value is that of another socket.
                    let frames = value.checked_sub(*last).unwrap_or(value);
                    if frames > 0 && lines.would_allow() {
                        lines.allow();
                        first.push((counter.1, frames));
                        *before = None;
                    } else if frames == 0 {
                        *before = Some(value);
                    }
                }
                None if is_new => *before = Some(value),
                None => {}
            }
        }
        first.sort_unstable();
        first
    }
}

/// The loss counters among these, summed by source and name.
fn sums(counters: impl Iterator<Item = Named>) -> HashMap<Counter, u64> {
    let mut sums = HashMap::new();
    for Named {
        name, source, value, ..
    } in counters.filter(|counter| counter.drop)
    {
        let sum: &mut u64 = sums.entry((source, name)).or_default();
        *sum = sum.wrapping_add(value);
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(owner: &mut Owner, session: u64, socket: u64, program: u64) -> Vec<(String, u64)> {
        let of = |source: &str, value| ((source.to_owned(), format!("of_{source}")), value);
        let now = HashMap::from([of("socket", socket), of("program", program)]);
        owner.first(session, now, &mut LogLimit::default())
    }

    #[test]
    fn first_loss_of_a_kind_is_logged_once_in_a_session() {
        let mut owner = Owner::default();
        assert_eq!(first(&mut owner, 1, 3, 7), [("of_socket".to_owned(), 3)]);
        assert_eq!(first(&mut owner, 1, 5, 9), [("of_program".to_owned(), 2)]);
        assert_eq!(first(&mut owner, 1, 9, 99), []);
        assert_eq!(first(&mut owner, 2, 0, 99), [], "another socket");
        assert_eq!(first(&mut owner, 2, 1, 99), [("of_socket".to_owned(), 1)]);
        assert_eq!(first(&mut owner, 2, 2, 100), [("of_program".to_owned(), 1)]);
    }

    #[test]
    fn loss_that_the_limit_holds_back_is_logged_later() {
        let (mut owner, mut lines) = (Owner::default(), LogLimit::default());
        while lines.allow().is_some() {}
        let now = |value| HashMap::from([(("socket".to_owned(), "lost".to_owned()), value)]);
        assert_eq!(owner.first(1, now(2), &mut lines), []);
        assert_eq!(
            owner.first(1, now(3), &mut LogLimit::default()),
            [("lost".to_owned(), 3)]
        );
    }
}
