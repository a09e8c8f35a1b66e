//! Hints that lessees ask for.

use std::collections::BTreeSet;
use std::time::Instant;

use crate::server::connections::connection::lessees;
use crate::server::connections::limits::DeviceChange;
use crate::server::interface::LeaseHints;
use crate::server::{Answered, Server};
use steward_protocol::{Answer, HintRequest, Reason};

impl Server {
    /// The hints that a lease under a rule asks for and may have.
    pub(crate) fn hints_under(&self, rule: usize, hint_request: HintRequest) -> LeaseHints {
        let allowed = self.policy.rule(rule).hints;
        LeaseHints {
            hint_request,
            allowed,
        }
    }

    /// A lessee asks for hints, for its lease, or for that which it is about to ask for.
    pub(crate) fn ask_for_hints(&mut self, number: u64, hint_request: HintRequest) -> Answered {
        let gone = || Reason::Lease.because("this connection is over");
        let connection = self.connections.get_mut(&number).ok_or_else(gone)?;
        let Some(held) = &mut connection.held else {
            connection.hint_request = Some(hint_request);
            return Ok(Answer::Done.into());
        };
        if held.hint_request != hint_request {
            let (uid, interface) = (connection.peer.uid, &held.wanted.interface);
            let changes = &mut self.device_changes;
            changes.take(DeviceChange::Hints, (interface, uid), Instant::now())?;
        }
        connection.hint_request = Some(hint_request);
        held.hint_request = hint_request;
        let held = held.clone();
        let (queues, hints) = (held.wanted.range(), self.hints_under(held.rule, hint_request));
        let interface = self.interfaces.get_mut(&held.interface).ok_or_else(gone)?;
        interface.ask_for_hints(queues.start, hints);
        Ok(Answer::Hinted(interface.hinted_for(&queues)).into())
    }

    /// Notes whose lessees are to be told that the program has other hints.
    pub(crate) fn note_hints(&mut self) {
        let interfaces = self.interfaces.iter_mut();
        let changed = interfaces.filter_map(|(&at, interface)| interface.take_hints_changed().then_some(at));
        let changed: BTreeSet<u64> = changed.collect();
        let theirs = lessees(&mut self.connections, |held| changed.contains(&held.interface));
        theirs.for_each(|lessee| lessee.other_hints = true);
    }
}
