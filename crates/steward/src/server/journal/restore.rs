//! Continues leases of the previous steward, and leaves its own to the next one.
//!
//! At the start, what is pinned and recorded (see `state`) becomes interfaces and [`Orphan`]s: leases without a
//! connection. Frames continue meanwhile. A lessee that noticed the end of its connection connects again with its
//! token and resumes its lease, if the policy still allows it. No other process gets the queues until the grace
//! period is over, or the lessee's process has ended. Everything else is removed: pins without a record, queues
//! without a lease, leases that no lessee can resume.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::server::connections::connection::Held;
use crate::server::interface::{Interface, remove_pins};
use crate::server::journal::file::may_crash;
use crate::server::journal::ledger::{Ledger, entry_of};
use crate::server::journal::state::{LeaseRecord, Records, Store};
use crate::server::{Answered, Server, no_lease, numbers};

use model::text::hex;
use program::peer::Credentials;
use steward_protocol::{Answer, HintRequest, Reason, Refusal, Request, Token, Wanted};

/// Pause between two checks whether orphans' lessees still run.
pub(crate) const ORPHANS_LOOK: Duration = Duration::from_millis(100);
/// How long a steward that is ending tries to undo everything.
const LAST_TRIES: Duration = Duration::from_secs(2);

/// A lease whose lessee has not come back yet.
#[derive(Debug)]
pub(crate) struct Orphan {
    pub(crate) held: Held,
    pub(crate) peer: Arc<Credentials>,
    token: Token,
    until: Instant,
}

impl Orphan {
    /// Whether it cannot be resumed any more.
    fn is_over(&self, now: Instant) -> bool {
        self.peer.is_gone() || self.until <= now
    }
}

impl Server {
    /// Continues the programs and leases recorded in `store`, and records leases there from now on.
    #[must_use]
    pub fn with_store(mut self, store: Store) -> Self {
        let records = store.records.clone();
        let interfaces = records.interfaces.iter().map(|record| record.number);
        let leases = records.leases.iter().map(|record| record.number);
        self.next = interfaces
            .chain(leases)
            .fold(self.next, |next, last| next.max(last.saturating_add(1)));
        for pins in store.pinned() {
            let known = records
                .interfaces
                .iter()
                .any(|record| store.pins_of(record.number) == pins);
            if !known && let Err(error) = remove_pins(&pins) {
                tracing::error!("cannot remove {}: {error}", pins.display());
            }
        }
        if let Some(netkits) = self.netkits {
            let is_known = |number| records.interfaces.iter().any(|record| record.number == number);
            netkits.remove_strays(store.journal(), &is_known);
        }
        for record in &records.interfaces {
            let places = (store.places_of(record.number), self.netkits);
            self.interfaces
                .insert(record.number, Interface::adopt(record, places));
        }
        let interfaces = self.interfaces.keys();
        let known: Vec<_> = interfaces
            .map(|&number| entry_of(store.journal(), number))
            .collect();
        Ledger::clear_strays(store.journal(), &known);
        self.store = Some(store);
        self.part = None;
        self.load_part();
        may_crash("adopted");
        self.adopt_network_taps(&records);
        for record in &records.leases {
            if let Some(orphan) = self.orphan(record) {
                self.orphans.insert(record.number, orphan);
            }
        }
        self.go_on_by_part();
        self.interfaces.values_mut().for_each(Interface::sweep);
        // The hints that the leases request are known now; the policy may have changed.
        self.interfaces.values_mut().for_each(Interface::decide_hints);
        self.sweep_network_taps();
        // The policy and the host's addresses may have changed.
        self.interfaces.values_mut().for_each(Interface::look_at_host);
        for at in numbers(&self.interfaces, |_| true) {
            self.judge_addresses_on(at);
        }
        self.look_at_tunnels();
        self.record();
        self.forget_idle();
        let leases = self.orphans.len();
        if leases > 0 {
            tracing::info!(leases, "waiting for the lessees of leases that go on");
        }
        self
    }

    /// The lease of a record, if its lessee may resume it.
    fn orphan(&mut self, record: &LeaseRecord) -> Option<Orphan> {
        let (token, peer) = (record.token()?, Arc::clone(&record.peer));
        let hint_request = HintRequest::of_number(record.hints).unwrap_or_default();
        let mut held = Held {
            interface: record.interface,
            wanted: record.wanted()?,
            rule: usize::MAX,
            hint_request,
        };
        let found = self.rule_of(&peer, &held);
        let found = found.inspect_err(|refusal| tracing::warn!(pid = peer.pid, "lease ended: {refusal}"));
        held.rule = found.ok()?;
        let names = self.policy.rule(held.rule).names.clone();
        let hints = self.hints_under(held.rule, hint_request);
        let grace = self.store.as_ref().map_or(Duration::ZERO, |store| store.grace);
        let interface = self.interfaces.get_mut(&record.interface)?;
        if !interface.hold(&held.wanted, record.number, names, hints) {
            return None;
        }
        let first = held.wanted.start_queue;
        if let Some(ring) = interface.ring(first) {
            let of = (held.wanted.interface.clone(), peer.uid, first);
            // If that fails, its user gets another ring next time.
            let _ = self.rings.keep(of, ring);
        }
        Some(Orphan {
            held,
            peer,
            token,
            until: Instant::now() + grace,
        })
    }

    /// The number of the rule that allows a lease, and its netkit if it has one.
    pub(crate) fn rule_of(&self, peer: &Credentials, held: &Held) -> Result<usize, Refusal> {
        let rule = self.policy.find(peer, &held.wanted, |rule| self.leased(rule))?;
        self.check_netkit_of(held, rule).map(|()| rule)
    }

    /// Ends the leases that cannot be resumed any more.
    pub(crate) fn end_orphans(&mut self, now: Instant) {
        self.end_orphans_that(|orphan| orphan.is_over(now));
    }

    fn end_orphans_that(&mut self, are_over: impl Fn(&Orphan) -> bool) {
        let over = numbers(&self.orphans, are_over);
        over.into_iter().for_each(|number| self.end_orphan(number));
    }

    /// Ends orphans of a process that requests the same queues again: it gave that lease up, or never learned of it.
    pub(crate) fn end_given_up(&mut self, peer: &Credentials, wanted: &Wanted) {
        self.end_orphans_that(|orphan| {
            let had = &orphan.held.wanted;
            (orphan.peer.pid, orphan.peer.uid) == (peer.pid, peer.uid)
                && peer.pid > 0
                && had.interface == wanted.interface
                && had.range().any(|queue| wanted.range().contains(&queue))
        });
    }

    pub(crate) fn end_orphan(&mut self, number: u64) {
        if let Some(orphan) = self.orphans.remove(&number) {
            let queues = orphan.held.wanted.range();
            tracing::info!(
                pid = orphan.peer.pid,
                ?queues,
                "lease ended: its lessee has not come back"
            );
            self.release(&orphan.held);
        }
    }

    /// Stores a lessee's token. Only once for each lease: each token is written to a file, and one is enough.
    pub(crate) fn keep(&mut self, number: u64, token: &Token) -> Answered {
        self.lessee(number)?;
        let connection = self.connections.get_mut(&number).ok_or_else(no_lease)?;
        if connection.token.is_some() {
            return Reason::Lease.refuse("this lease has a token already");
        }
        connection.token = Some(*token);
        self.record();
        may_crash("kept");
        Ok(Answer::Done.into())
    }

    /// Handles a request to resume a lease.
    pub(crate) fn resume(&mut self, number: u64, token: &Token) -> Answered {
        let refused = |text: &str| Reason::Lease.refuse(text);
        let peer = self.newcomer(number)?;
        let theirs = |orphan: &Orphan| orphan.peer.uid == peer.uid && is_same(&orphan.token, token);
        let found = self.orphans.iter().find(|(_, orphan)| theirs(orphan));
        let found = found.map(|(&lease, _)| lease);
        let Some((lease, mut orphan)) = found.and_then(|lease| self.orphans.remove_entry(&lease)) else {
            return refused(
                "no lease waits for this lessee: it has been taken back, or was never kept; ask for a new one",
            );
        };
        // A lessee of another version may not know hints.
        let hint_request = self.connections.get(&number).and_then(|asker| asker.hint_request);
        orphan.held.hint_request = hint_request.unwrap_or_default();
        let found = self.rule_of(&peer, &orphan.held);
        // The groups of the process and the rules may have changed.
        orphan.held.rule = found.inspect_err(|_| self.release(&orphan.held))?;
        let at = orphan.held.interface;
        let Some(interface) = self.interfaces.get_mut(&at) else {
            return refused("the interface is gone");
        };
        interface.hand_over(lease, number);
        let facts = self.note_lease(number, orphan.held, "resumed")?;
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.other_hints = true;
            connection.token = Some(*token);
        }
        self.record();
        may_crash("resumed");
        // This steward may have another policy: have stations and taps requested again.
        self.have_asked_again(number);
        if let Ok(held) = self.held_lease(number) {
            self.judge_taps(number, &held);
        }
        self.look_at_tunnels();
        Ok(Answer::Facts(facts).into())
    }

    /// Records what the next steward needs, if it is not recorded yet.
    pub(crate) fn record(&mut self) {
        let Some(store) = &mut self.store else {
            return;
        };
        let record = |number, peer: &Arc<Credentials>, held: &Held, token: &Token| LeaseRecord {
            number,
            interface: held.interface,
            peer: Arc::clone(peer),
            wanted: hex(&Request::Lease(held.wanted.clone()).encode(1)),
            hints: held.hint_request.number(),
            token: hex(token),
        };
        let connected = self.connections.iter().filter_map(|(&number, own)| {
            let (held, token) = own.held.as_ref().zip(own.token.as_ref())?;
            Some(record(number, &own.peer, held, token))
        });
        let orphaned = self
            .orphans
            .iter()
            .map(|(&number, orphan)| record(number, &orphan.peer, &orphan.held, &orphan.token));
        let interfaces = self
            .interfaces
            .iter()
            .map(|(&at, interface)| interface.record(at));
        let records = Records::new(interfaces.collect(), connected.chain(orphaned).collect());
        if let Err(error) = store.record(records)
            && self.refusals.may_log(u32::MAX)
        {
            tracing::error!(
                "leases may not outlive this process: {}: {error}: mend that (room on its file system, permissions), \
                 or name another directory with --state; the next round tries again",
                store.entry()
            );
        }
    }

    /// Ends all leases and detaches all programs, so that nothing is left for a successor.
    pub fn end_all(&mut self) {
        self.linger = Duration::ZERO;
        self.end_orphans_that(|_| true);
        for number in numbers(&self.connections, |_| true) {
            // A lessee that gets no reason would wait for a steward to return.
            let text = "it takes all leases back and ends: start vhost-af-xdp-steward again";
            self.end(number, Some(Reason::Lease.because(text)));
        }
        let deadline = Instant::now() + LAST_TRIES;
        while (!self.interfaces.is_empty() || self.is_part_unfinished()) && Instant::now() < deadline {
            self.look();
            std::thread::sleep(Duration::from_millis(20));
        }
        self.record();
        if !self.interfaces.is_empty() || self.is_part_unfinished() {
            tracing::error!("not all could be taken back; the next steward tries again");
        } else if let Some(store) = &self.store {
            store.remove_empty();
        }
    }
}

/// Compares two tokens in constant time.
fn is_same(one: &Token, other: &Token) -> bool {
    one.iter().zip(other).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_the_same_or_not() {
        let token = [7; 16];
        assert!(is_same(&token, &token));
        for at in 0..16 {
            let mut other = token;
            other[at] ^= 0x80;
            assert!(!is_same(&token, &other), "{at}");
        }
    }
}
