//! The facts about an interface that its lessees get.

use std::ops::Range;

use steer::Program;

use super::Interface;
use crate::server::leases::entries;
use steward_protocol::{Facts, Steered};

impl Interface {
    /// The answer for the lessee of these queues.
    pub(crate) fn facts_for(&self, queues: &Range<u32>) -> Facts {
        let mut facts = self.facts();
        let Some(entries) = self.entries.get(&queues.start) else {
            return facts;
        };
        facts.generation = facts.generation.wrapping_add(entries.renewed);
        facts.steered = entries.outcome.steered;
        let network = self.networks.get(&queues.start);
        if let Some(network) = network {
            facts.steered = Steered::ByNetwork;
            facts.strips_tags = network.strips_tags && !self.restores_tags(queues.start);
        }
        let beyond = match network {
            // In tap mode frames to a network, or to the filter's addresses, arrive from all queues.
            _ if self.is_by_tap() && (network.is_some() || !entries.filter.macs.is_empty()) => String::new(),
            Some(network) => network.note(&self.link.name),
            None if self.networks.is_empty() => entries.unserved.note(&self.link.name, queues, false),
            // The queues of another lease's network also receive frames for the guest.
            None => String::new(),
        };
        let lost_addresses = self.lost_addresses.get(&queues.start).map_or("", String::as_str);
        let losses = entries::joined([&self.losses, &beyond, lost_addresses]);
        facts.loses = !losses.is_empty();
        facts.steering = entries::joined([&losses, &entries.note()]);
        let impaired = self.impairment(queues);
        facts.impaired = impaired.is_some();
        facts.note = entries::joined([impaired.as_deref().unwrap_or(""), &facts.note]);
        facts
    }

    /// Why these queues receive no frames, in addition to the interface's own note.
    fn impairment(&self, queues: &Range<u32>) -> Option<String> {
        let (name, have) = (&self.link.name, self.link.rx_queues);
        if self.program.is_none() {
            return Some(String::new());
        }
        if queues.end > have {
            return Some(format!(
                "{name} has {have} receive queue(s) now, queue {} of the lease is not there: add channels with \
                 `ethtool -L`",
                queues.end - 1
            ));
        }
        if self.is_blind(queues.start) {
            return Some(host::nic::tags::blind(name));
        }
        if let Some(netkits) = self.netkits.filter(|_| self.lost_netkits.contains(&queues.start)) {
            return Some(netkits.lost(self, queues.start));
        }
        (!self.link.up).then(|| format!("{name} is down"))
    }

    /// The answers for all lessees.
    pub(super) fn facts_for_all(&self) -> Vec<Facts> {
        let leases = self.entries.values();
        leases.map(|entries| self.facts_for(&entries.queues)).collect()
    }

    /// The facts that are the same for all lessees.
    pub(crate) fn facts(&self) -> Facts {
        Facts {
            mode: self.program.as_ref().map(Program::mode),
            program: self.program.as_ref().map_or(0, Program::id),
            sends: self.sends,
            generation: self.generation,
            impaired: self.program.is_none(),
            note: self.note.clone(),
            steering: self.losses.clone(),
            loses: !self.losses.is_empty(),
            ..Facts::of(&self.link)
        }
    }
}
