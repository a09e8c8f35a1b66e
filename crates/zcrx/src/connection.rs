//! Connections and listeners of a receiver, by slot.

use std::os::fd::OwnedFd;

use crate::outbox::Outbox;

/// A connection of one receiver, not valid for another one. The ID of a closed connection never matches a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

/// A listener of one receiver, not valid for another one. The ID of a stopped listener never matches a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ListenerId {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
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
    generation: u32,
}

/// Listeners by slot.
#[derive(Default)]
pub(crate) struct Listeners {
    slots: Vec<Option<Listener>>,
    /// Number of listeners so far.
    generation: u32,
}

impl Listeners {
    pub(crate) fn add(&mut self, socket: OwnedFd) -> ListenerId {
        let generation = self.generation;
        self.generation = generation.wrapping_add(1);
        let listener = Some(Listener {
            socket,
            accepts: 0,
            failed: false,
            stopping: false,
            cancels: false,
            generation,
        });
        let slot = match self.slots.iter().position(Option::is_none) {
            Some(free) => {
                self.slots[free] = listener;
                free
            }
            None => {
                self.slots.push(listener);
                self.slots.len() - 1
            }
        } as u32;
        ListenerId { slot, generation }
    }

    pub(crate) fn get(&mut self, id: ListenerId) -> Option<&mut Listener> {
        let listener = self.slots.get_mut(id.slot as usize)?.as_mut();
        listener.filter(|it| it.generation == id.generation)
    }

    pub(crate) fn at(&mut self, slot: u32) -> Option<(ListenerId, &mut Listener)> {
        let listener = self.slots.get_mut(slot as usize)?.as_mut()?;
        let generation = listener.generation;
        Some((ListenerId { slot, generation }, listener))
    }

    /// Takes one out that is to be stopped and has no request under way any more.
    pub(crate) fn take_stopped(&mut self, slot: u32) -> Option<(ListenerId, OwnedFd)> {
        let place = self.slots.get_mut(slot as usize)?;
        let listener = place.take_if(|it| it.stopping && it.accepts == 0 && !it.cancels)?;
        let generation = listener.generation;
        Some((ListenerId { slot, generation }, listener.socket))
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
    fn new(socket: OwnedFd) -> Self {
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

/// Connections by slot.
#[derive(Default)]
pub(crate) struct Connections {
    slots: Vec<(u32, Option<Connection>)>,
    free: Vec<u32>,
}

impl Connections {
    pub(crate) fn add(&mut self, socket: OwnedFd) -> ConnectionId {
        let connection = Connection::new(socket);
        let slot = self.free.pop().unwrap_or(self.slots.len() as u32);
        if let Some((generation, place)) = self.slots.get_mut(slot as usize) {
            *place = Some(connection);
            return ConnectionId {
                slot,
                generation: *generation,
            };
        }
        self.slots.push((0, Some(connection)));
        ConnectionId { slot, generation: 0 }
    }

    /// Frees the slot. Only when no request of it is under way.
    pub(crate) fn remove(&mut self, slot: u32) {
        if let Some((generation, place)) = self.slots.get_mut(slot as usize)
            && place.take().is_some()
        {
            *generation = generation.wrapping_add(1);
            self.free.push(slot);
        }
    }

    pub(crate) fn get(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        let (generation, connection) = self.slots.get_mut(id.slot as usize)?;
        connection.as_mut().filter(|_| *generation == id.generation)
    }

    pub(crate) fn at(&mut self, slot: u32) -> Option<(ConnectionId, &mut Connection)> {
        let (generation, connection) = self.slots.get_mut(slot as usize)?;
        let generation = *generation;
        Some((ConnectionId { slot, generation }, connection.as_mut()?))
    }

    /// How many payloads one has to send.
    pub(crate) fn queued(&self, id: ConnectionId) -> usize {
        match self.slots.get(id.slot as usize) {
            Some((generation, Some(it))) if *generation == id.generation => it.outbox.len(),
            _ => 0,
        }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_that_is_used_again_is_another_connection() {
        let socket = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let mut connections = Connections::default();
        let first = connections.add(socket());
        assert!(connections.get(first).is_some());
        connections.remove(first.slot);
        connections.remove(first.slot);
        assert_eq!(connections.len(), 0);
        let second = connections.add(socket());
        assert_eq!(second.slot, first.slot);
        assert!(connections.get(first).is_none() && connections.get(second).is_some());
        assert_eq!(connections.at(second.slot).unwrap().0, second);
        assert!(connections.at(1).is_none());
    }
}
