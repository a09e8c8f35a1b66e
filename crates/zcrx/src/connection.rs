//! Connections and listeners of a receiver, by slot.

use std::os::fd::OwnedFd;

use crate::outbox::Outbox;

/// A slot and its generation, which is another one for each use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) slot: u32,
    generation: u32,
}

/// A connection of one receiver, not valid for another one. The ID of a closed connection never matches a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub(crate) Place);

/// A listener of one receiver, not valid for another one. The ID of a stopped listener never matches a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ListenerId(pub(crate) Place);

/// Connections or listeners by slot.
pub(crate) struct Slots<T> {
    /// Each with its generation: how often it was freed.
    slots: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Slots<T> {
    pub(crate) fn add(&mut self, value: T) -> Place {
        let slot = self.free.pop().unwrap_or(self.slots.len() as u32);
        if slot as usize == self.slots.len() {
            self.slots.push((0, None));
        }
        let (generation, content) = &mut self.slots[slot as usize];
        *content = Some(value);
        let generation = *generation;
        Place { slot, generation }
    }

    /// Frees the slot. Only when no request of it is under way.
    pub(crate) fn remove(&mut self, slot: u32) -> Option<T> {
        let (generation, content) = self.slots.get_mut(slot as usize)?;
        let value = content.take()?;
        *generation = generation.wrapping_add(1);
        self.free.push(slot);
        Some(value)
    }

    pub(crate) fn get(&self, place: Place) -> Option<&T> {
        let (generation, value) = self.slots.get(place.slot as usize)?;
        value.as_ref().filter(|_| *generation == place.generation)
    }

    pub(crate) fn get_mut(&mut self, place: Place) -> Option<&mut T> {
        let (generation, value) = self.slots.get_mut(place.slot as usize)?;
        value.as_mut().filter(|_| *generation == place.generation)
    }

    /// What is in a slot now.
    pub(crate) fn at(&mut self, slot: u32) -> Option<(Place, &mut T)> {
        let (generation, value) = self.slots.get_mut(slot as usize)?;
        let generation = *generation;
        Some((Place { slot, generation }, value.as_mut()?))
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

pub(crate) struct Listener {
    pub(crate) socket: OwnedFd,
    /// Requests to accept that are under way.
    pub(crate) accepts: u32,
    /// An accept failed, and the caller has not asked for more since.
    pub(crate) failed: bool,
    /// To be returned when no request to accept is under way any more.
    pub(crate) stopping: bool,
    /// A cancellation is under way.
    pub(crate) cancels: bool,
}

impl Listener {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            accepts: 0,
            failed: false,
            stopping: false,
            cancels: false,
        }
    }
}

/// The state of receiving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receiving {
    /// Nothing is armed.
    Idle,
    /// A receive is under way; the buffer that it fills, if that is known.
    Armed(Option<u32>),
    /// Waits for buffers, in the receiver's list.
    Starved,
    /// The peer has finished sending, or an error ended it.
    Over,
}

pub(crate) struct Connection {
    pub(crate) socket: OwnedFd,
    pub(crate) receiving: Receiving,
    pub(crate) paused: bool,
    /// To be closed when all is sent.
    pub(crate) closing: bool,
    /// To be closed at once.
    pub(crate) aborted: bool,
    /// In the receiver's list of those that have something to send.
    pub(crate) listed: bool,
    /// Number of pieces returned to the kernel when a receive was last armed.
    pub(crate) armed_at: u64,
    /// Receives in a row that ended for lack of buffers although no piece was out.
    pub(crate) barren: u32,
    pub(crate) outbox: Outbox,
}

impl Connection {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            receiving: Receiving::Idle,
            paused: false,
            closing: false,
            aborted: false,
            listed: false,
            armed_at: 0,
            barren: 0,
            outbox: Outbox::default(),
        }
    }

    /// Whether no request of it is under way, and none is to come.
    pub(crate) fn is_over(&self) -> bool {
        let all_sent = self.aborted || self.outbox.is_empty();
        let receives = matches!(self.receiving, Receiving::Armed(_) | Receiving::Starved);
        self.closing && all_sent && !receives && !self.outbox.is_under_way()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_that_is_used_again_is_another_connection() {
        let mut connections = Slots::default();
        let first = connections.add("first");
        assert!(connections.get(first).is_some());
        assert_eq!(connections.remove(first.slot), Some("first"));
        assert_eq!(connections.remove(first.slot), None);
        assert_eq!(connections.len(), 0);
        let second = connections.add("second");
        assert_eq!(second.slot, first.slot);
        assert!(connections.get(first).is_none() && connections.get(second).is_some());
        assert_eq!(connections.at(second.slot).unwrap().0, second);
        assert!(connections.at(1).is_none());
    }
}
