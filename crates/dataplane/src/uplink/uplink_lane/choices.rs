//! Caches which inbox of a port with several pairs takes a flow. The NIC's hash identifies the flow, so that a frame's
//! addresses and ports need not be read.
//!
//! A choice is valid until the port's guest sends some flow on another pair, or the inboxes change. Two flows with the
//! same hash share a choice, which may be wrong for one of them: its frames go to another pair than the one on which
//! its guest sends, but in order.

use crate::fdb::PortNumber;

/// A power of two.
const PLACES: usize = 1024;

#[derive(Debug, Clone, Copy, Default)]
struct Choice {
    hash: u32,
    port: PortNumber,
    /// Index of the inbox, plus 1; 0: this entry is free.
    inbox: u16,
    /// [`Flows::changes`](crate::fdb::flows::Flows::changes) before the choice was made.
    changes: u32,
}

/// See the module's head.
#[derive(Debug)]
pub(super) struct Choices(Box<[Choice; PLACES]>);

impl Default for Choices {
    fn default() -> Self {
        Self(Box::new([Choice::default(); PLACES]))
    }
}

impl Choices {
    /// The inbox that was chosen for a flow of a port.
    #[inline]
    pub(super) fn find(&self, (port, hash): (PortNumber, u32), changes: u32) -> Option<usize> {
        let choice = &self.0[place(hash)];
        let is_its = choice.hash == hash && choice.port == port && choice.changes == changes;
        is_its.then(|| usize::from(choice.inbox).checked_sub(1)).flatten()
    }

    /// Stores the inbox that was chosen for a flow of a port.
    pub(super) fn note(&mut self, (port, hash): (PortNumber, u32), changes: u32, inbox: usize) {
        let Ok(inbox) = u16::try_from(inbox + 1) else {
            return;
        };
        self.0[place(hash)] = Choice {
            hash,
            port,
            inbox,
            changes,
        };
    }

    /// Forgets all choices: the inboxes have changed.
    pub(super) fn forget(&mut self) {
        self.0.fill(Choice::default());
    }
}

/// The index of a hash's entry. Any bits of a hash may be the random ones, so all of them are mixed.
#[inline]
fn place(hash: u32) -> usize {
    // The highest 10 of 32 bits.
    (hash.wrapping_mul(0x9e37_79b9) >> 22) as usize % PLACES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choice_is_of_one_flow_of_a_port_until_something_changes() {
        let mut choices = Choices::default();
        assert_eq!(choices.find((PortNumber(0), 0), 0), None, "nothing is noted");
        choices.note((PortNumber(3), 7), 5, 0);
        assert_eq!(choices.find((PortNumber(3), 7), 5), Some(0));
        for (port, hash, changes) in [(3, 8, 5), (4, 7, 5), (3, 7, 6)] {
            assert_eq!(choices.find((PortNumber(port), hash), changes), None);
        }
        choices.forget();
        assert_eq!(choices.find((PortNumber(3), 7), 5), None);
    }
}
