//! What is told of an interface: to the holders of its queues, and to who asks for leases.

use std::ops::Range;

use steer::Program;

use super::Interface;
use crate::listing::Listed;
use crate::peer::Credentials;
use crate::protocol::{Facts, Steered};
use crate::server::entries;

impl Interface {
    /// What the holder of the lease of these queues is told.
    pub(in crate::server) fn facts_for(&self, queues: &Range<u32>) -> Facts {
        let mut facts = self.facts();
        let Some(entries) = self.entries.get(&queues.start) else {
            return facts;
        };
        facts.generation = facts.generation.wrapping_add(entries.renewed);
        facts.steered = entries.steered;
        let impaired = self.impairment(queues);
        facts.impaired = impaired.is_some();
        facts.steering = entries.note();
        let notes = impaired.filter(|note| !note.is_empty()).into_iter();
        let notes = notes.chain(Some(facts.note).filter(|note| !note.is_empty()));
        facts.note = notes.collect::<Vec<_>>().join("; ");
        facts
    }

    /// The lease of these queues, for whoever asks.
    pub(in crate::server) fn listed(&self, queues: &Range<u32>, peer: &Credentials) -> Listed {
        let facts = self.facts_for(queues);
        let entries = self.entries.get(&queues.start);
        Listed {
            number: 0,
            namespace: 0,
            pid: peer.pid.try_into().unwrap_or(0),
            uid: peer.uid,
            interface: facts.name,
            start_queue: queues.start,
            queues: queues.end - queues.start,
            filter: entries.map(|entries| entries.filter.clone()).unwrap_or_default(),
            steered: facts.steered,
            impaired: facts.impaired,
            orphaned: false,
        }
    }

    /// Why no frames come to these queues, apart from what the interface's own note says.
    fn impairment(&self, queues: &Range<u32>) -> Option<String> {
        let (name, have) = (&self.link.name, self.link.rx_queues);
        if self.program.is_none() {
            return Some(String::new());
        }
        if queues.end > have {
            return Some(format!(
                "{name} has {have} receive queue(s) now, queue {} of the lease is not there: add channels with `ethtool -L`",
                queues.end - 1
            ));
        }
        if self.is_blind(queues.start) {
            return Some(entries::blind(name));
        }
        (!self.link.up).then(|| format!("{name} is down"))
    }

    /// What all holders are told.
    pub(in crate::server) fn facts(&self) -> Facts {
        Facts {
            ifindex: self.link.index,
            name: self.link.name.clone(),
            mtu: self.link.mtu,
            mac: self.link.mac,
            rx_queues: self.link.rx_queues,
            up: self.link.up,
            partial_checksums: self.link.partial_checksums,
            mode: self.program.as_ref().map(Program::mode),
            program: self.program.as_ref().map_or(0, Program::id),
            sends: self.sends,
            generation: self.generation,
            steered: Steered::ByQueue,
            impaired: self.program.is_none(),
            note: self.note.clone(),
            steering: String::new(),
        }
    }
}
