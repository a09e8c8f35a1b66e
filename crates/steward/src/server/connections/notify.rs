//! Notifications of lessees.

use crate::server::Server;
use steward_protocol::Answer;

impl Server {
    /// Tells lessees what changed, those who read.
    pub(crate) fn notify_lessees(&mut self) {
        let mut over = Vec::new();
        for (&number, connection) in &mut self.connections {
            let Some(held) = &connection.held else { continue };
            let Some(interface) = self.interfaces.get(&held.interface) else {
                continue;
            };
            let queues = held.wanted.range();
            let mut is_there = true;
            // First, how frames are to be read.
            if connection.other_hints && !connection.has_unsent() {
                connection.other_hints = false;
                if connection.hint_request.is_some() {
                    let hinted = Answer::Hinted(interface.hinted_for(&queues));
                    is_there = connection.answer(0, hinted.into());
                }
            }
            if is_there && connection.dirty && !connection.has_unsent() {
                connection.dirty = false;
                let changed = Answer::Changed(interface.facts_for(&queues));
                is_there = connection.answer(0, changed.into());
            }
            // It asks for them.
            if is_there && connection.other_behind && !connection.has_unsent() {
                connection.other_behind = false;
                is_there = connection.answer(0, Answer::Behind(Vec::new()).into());
            }
            if !is_there {
                over.push(number);
            }
        }
        over.into_iter().for_each(|number| self.end(number, None));
    }
}
