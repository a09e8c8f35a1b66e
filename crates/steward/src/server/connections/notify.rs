//! Notifications of lessees.

use std::mem::take;

use crate::server::Server;
use crate::server::connections::connection::Connection;
use crate::server::interface::Interface;
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
            while !connection.has_unsent()
                && let Some(news) = next(connection, interface)
            {
                if !connection.answer(0, news.into()) {
                    over.push(number);
                    break;
                }
            }
        }
        over.into_iter().for_each(|number| self.end(number, None));
    }
}

/// What a lessee has to be told next.
fn next(connection: &mut Connection, interface: &Interface) -> Option<Answer> {
    let queues = connection.held.as_ref()?.wanted.range();
    // First, how frames are to be read.
    if take(&mut connection.other_hints) && connection.hint_request.is_some() {
        return Some(Answer::Hinted(interface.hinted_for(&queues)));
    }
    if take(&mut connection.dirty) {
        return Some(Answer::Changed(interface.facts_for(&queues)));
    }
    // It asks for them.
    take(&mut connection.other_behind).then(|| Answer::Behind(Vec::new()))
}
