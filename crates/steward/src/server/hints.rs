//! Hints that holders ask for.

use std::collections::BTreeSet;
use std::time::Instant;

use super::interface::LeaseHints;
use super::limits::DeviceChange;
use super::{Answered, Server};
use crate::protocol::{Answer, HintWish, Reason, Refusal};

impl Server {
    /// What a lease that is charged to a rule asks for.
    pub(super) fn hints_under(&self, rule: usize, wish: HintWish) -> LeaseHints {
        let allowed = self.policy.hints(rule);
        LeaseHints { wish, allowed }
    }

    /// A holder asks for hints, for its lease, or for that which it is about to ask for.
    pub(super) fn ask_for_hints(&mut self, number: u64, wish: HintWish) -> Answered {
        let gone = || Refusal::new(Reason::Lease, "this connection is over");
        let connection = self.connections.get_mut(&number).ok_or_else(gone)?;
        let Some(held) = &mut connection.held else {
            connection.wish = Some(wish);
            return Ok(Answer::Done.into());
        };
        if held.wish != wish {
            let (uid, interface) = (connection.peer.uid, &held.wanted.interface);
            let changes = &mut self.device_changes;
            changes.take(DeviceChange::Hints, interface, uid, Instant::now())?;
        }
        connection.wish = Some(wish);
        held.wish = wish;
        let held = held.clone();
        self.record(|records| {
            let own = records.leases.iter_mut().find(|record| record.number == number);
            if let Some(record) = own {
                record.set_hints(wish);
            }
        });
        let (queues, hints) = (held.wanted.range(), self.hints_under(held.rule, wish));
        let interface = self.interfaces.get_mut(&held.interface).ok_or_else(gone)?;
        interface.ask_for_hints(queues.start, hints);
        Ok(Answer::Hinted(interface.hinted_for(&queues)).into())
    }

    /// Notes which program is there, where it has other hints, and whose holders are to be told.
    pub(super) fn note_hints(&mut self) {
        let interfaces = self.interfaces.iter_mut();
        let changed = interfaces.filter_map(|(&at, interface)| interface.take_hints_changed().then_some(at));
        let changed: BTreeSet<u64> = changed.collect();
        for &at in &changed {
            self.record_interface(at);
        }
        let holders = self.connections.values_mut();
        holders
            .filter(|other| {
                let held = other.held.as_ref();
                held.is_some_and(|held| changed.contains(&held.interface))
            })
            .for_each(|holder| holder.other_hints = true);
    }
}
