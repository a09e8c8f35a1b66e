//! Admission of connections, and the time limit for connections without a lease.
//!
//! A connection counts for its user, and for a rule of the policy: each rule has a place for each queue that can be
//! leased under it and some more for requests, so that a group whose members have many numbers (subordinate ones, for
//! example) gets no more. A lessee whose steward was restarted resumes its lease: for each such lease
//! (`Orphan`) a place is kept for the process that held it, regardless of the limits and of the number of other
//! connections. Connections that request no lease are closed soon.

use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use crate::policy::CONNECTIONS_MAX;
use crate::server::connections::connection::Connection;
use crate::server::{Server, numbers};
use program::peer::Credentials;
use steward_protocol::{Reason, Refusal};

/// Time limit for a connection without a lease: a process that wants one requests it at once.
const WITHOUT_LEASE: Duration = Duration::from_secs(10);
/// Most connections that are accepted in a round.
const ACCEPTED_MAX: usize = 32;

impl Server {
    pub(crate) fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTED_MAX {
            match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => {
                    self.accepting.reset();
                    if let Ok(connection) = Connection::new(socket) {
                        self.take_in(connection);
                    }
                }
                // The client closed it before it was accepted.
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return,
                Err(errno) => {
                    self.accepting.failed(now);
                    if self.refusals.may_log(u32::MAX) {
                        tracing::warn!("cannot accept a connection: {errno}: raise LimitNOFILE");
                    }
                    return;
                }
            }
        }
    }

    fn take_in(&mut self, mut connection: Connection) {
        match self.admit(&connection.peer) {
            Ok(rule) => {
                connection.rule = rule;
                self.connections.insert(self.next, connection);
                self.next += 1;
            }
            Err(refusal) => {
                let line = format!("connection refused: {refusal}");
                self.refusals.log_refusal(&connection.peer, &line);
                connection.refuse(refusal);
                self.close(connection);
            }
        }
    }

    /// The rule that a new connection counts for.
    fn admit(&self, peer: &Credentials) -> Result<Option<usize>, Refusal> {
        let uid = peer.uid;
        let rules: Vec<usize> = self.policy.rules_for(peer).map(|(index, _)| index).collect();
        // Root may at least list leases.
        if uid != 0 && rules.is_empty() {
            return Reason::NotAllowed.refuse(format!(
                "user {uid} may not lease anything: no rule of the policy is for it: add one with `user = {uid}`, \
                 `interface` and `queues`, or start the daemon as a user that has one (--user)"
            ));
        }
        if self.may_come_back(peer) {
            return Ok(rules.first().copied());
        }
        let limit = |text: String| Reason::Limit.refuse(text);
        let open = self
            .connections
            .values()
            .map(|other| (other.peer.uid, other.rule));
        let all = open.chain(self.unclosed.iter().map(|over| (over.uid, over.rule)));
        let has = all.clone().filter(|&(other, _)| other == uid).count();
        // Places of lessees that may resume are kept for them.
        let taken = all.clone().count() + self.orphans.len();
        // One place is reserved for root.
        let most = CONNECTIONS_MAX as usize - usize::from(uid != 0);
        if has >= self.policy.connections as usize || taken >= most {
            return limit(format!(
                "user {uid} has {has} connections, of {taken} in all: close some, or raise `connections` under \
                 [limits] ({CONNECTIONS_MAX} at most)",
            ));
        }
        let room = |rule: &usize| {
            let of_rule = all.clone().filter(|&(_, of)| of == Some(*rule));
            of_rule.count() < self.policy.places(*rule)
        };
        match rules.iter().find(|rule| room(rule)) {
            Some(&rule) => Ok(Some(rule)),
            None if rules.is_empty() => Ok(None),
            None => limit(format!(
                "no room for user {uid}: each rule of the policy for it has as many connections as queues, and some \
                 more: close some"
            )),
        }
    }

    /// Whether this process has a lease to resume, and no other connection that could be for that.
    fn may_come_back(&self, peer: &Credentials) -> bool {
        let is_theirs = |other: &Credentials| (other.uid, other.pid) == (peer.uid, peer.pid);
        let leases = self.orphans.values().filter(|orphan| is_theirs(&orphan.peer));
        let without = self.connections.values().filter(|other| !other.has_lease());
        leases.count() > without.filter(|other| is_theirs(&other.peer)).count()
    }

    /// When the next connection has been without a lease for too long.
    pub(crate) fn next_idle(&self) -> Option<Instant> {
        let without = self.connections.values().filter(|other| !other.has_lease());
        without.map(|other| other.since + WITHOUT_LEASE).min()
    }

    /// Ends connections that have been without a lease for too long.
    pub(crate) fn end_idle(&mut self, now: Instant) {
        let is_idle = |other: &Connection| !other.has_lease() && other.since + WITHOUT_LEASE <= now;
        for number in numbers(&self.connections, is_idle) {
            let text = format!(
                "no lease was asked for in {} s: connect again when you need one",
                WITHOUT_LEASE.as_secs()
            );
            self.end(number, Some(Reason::Limit.because(text)));
        }
    }
}
