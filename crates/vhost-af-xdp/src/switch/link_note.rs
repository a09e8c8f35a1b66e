//! What goes with a frame from one worker to another beside its bytes: where it goes, which port sent it, and what the
//! NIC told of its flow.
//!
//! Theory of operation. Who gives a frame to a link has found all that, and the other end is in the same process. So it
//! is told, and no address is read or looked up again there. A link has a place for a note for each of its buffers
//! ([`LinkNotes`]), in memory that no guest has; a frame's note is at its first buffer. The giving end writes it before
//! it publishes the buffer, and the taking end reads it before it posts the buffer again: both words are relaxed, since
//! the virtqueue's release of `used.idx` and `avail.idx`, and the acquires that pair with them, order them as they
//! order the frame's bytes.
//!
//! Workers learn of another table one after the other, and a frame may wait in a link until a port is gone and another
//! has its number. So a port is named with its life ([`PortNote`]), and believed as long as it lives as it did then.
//! Else the table tells by the frame's addresses.
//!
//! ```text
//!     63          48 47          32 31          16 15           0
//!     ┌─────────────┬──────────────┬──────────────┬─────────────┐
//!     │ sender's life, number      │ destination's life, number │  ends
//!     ├────────────────────────────┼────────────────────────────┤
//!     │ mark of the flow           │ the NIC's hash of it       │  flow
//!     └────────────────────────────┴────────────────────────────┘
//! ```
//!
//! No port has the number 65,535: with it, the life says what else an end is.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use acl::FlowHints;
use virtqueue::Buffer;

use super::inner_queue::BUFFER_BYTES;
use super::table::{Destination, PortNote, PortNumber, Table};

/// A number that no port has.
const NO_PORT: PortNumber = PortNumber(u16::MAX);
/// Nothing is said of that end.
const UNSAID: PortNote = PortNote::new(NO_PORT, 0);
/// No port sent it: it came by an uplink, or from the host. Or it is for nobody.
const NOBODY: PortNote = PortNote::new(NO_PORT, 1);
/// It is for a group.
const GROUP: PortNote = PortNote::new(NO_PORT, 2);
/// For the host.
const HOST: PortNote = PortNote::new(NO_PORT, 3);
/// For the uplink: nobody has its address.
const UNKNOWN: PortNote = PortNote::new(NO_PORT, 4);

/// See the module's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LinkNote {
    to: PortNote,
    from: PortNote,
    pub(crate) flow: FlowHints,
}

/// What a note says of the port that sent a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotedSender {
    /// This one; `None`: none did.
    Is(Option<PortNumber>),
    /// That of this number, which is not what it was, or is not known here yet as what it is.
    Other(PortNumber),
    /// Nothing.
    Unsaid,
}

impl LinkNote {
    /// Of a frame of which nothing is said.
    pub(crate) const NOTHING: Self = Self {
        to: UNSAID,
        from: UNSAID,
        flow: FlowHints::NONE,
    };

    /// Of a frame that a port sent; `from`: `None`: none did. Ports are those of that table.
    pub(crate) fn new(to: Destination, from: Option<PortNumber>, table: &Table) -> Self {
        let port = |number| table.port(number).map_or(UNSAID, |port| port.note(number));
        Self {
            to: match to {
                Destination::Port(number) => port(number),
                Destination::Group => GROUP,
                Destination::Host => HOST,
                Destination::Unknown => UNKNOWN,
                Destination::Nobody => NOBODY,
            },
            from: from.map_or(NOBODY, port),
            flow: FlowHints::NONE,
        }
    }

    /// Of a frame that came by an uplink for that port.
    #[inline]
    pub(crate) fn of_arrival(to: PortNote, flow: FlowHints) -> Self {
        Self {
            to,
            from: NOBODY,
            flow,
        }
    }

    /// The same, with what is known of its flow.
    pub(crate) fn with(self, flow: FlowHints) -> Self {
        Self { flow, ..self }
    }

    /// Where the frame goes, by a table that knows the port that it goes to as it was; `None`: by its addresses.
    #[inline]
    pub(crate) fn destination(self, table: &Table) -> Option<Destination> {
        match self.to {
            UNSAID => None,
            GROUP => Some(Destination::Group),
            HOST => Some(Destination::Host),
            UNKNOWN => Some(Destination::Unknown),
            NOBODY => Some(Destination::Nobody),
            port => table.noted(port).map(Destination::Port),
        }
    }

    /// Which port sent the frame, by a table that knows it as it was.
    #[inline]
    pub(crate) fn sender(self, table: &Table) -> NotedSender {
        match self.from {
            UNSAID => NotedSender::Unsaid,
            NOBODY => NotedSender::Is(None),
            port => match table.noted(port) {
                Some(port) => NotedSender::Is(Some(port)),
                None => NotedSender::Other(port.parts().0),
            },
        }
    }

    fn words(self) -> [u64; 2] {
        let ends = u64::from(self.from.0) << 32 | u64::from(self.to.0);
        [ends, self.flow.bits()]
    }

    fn from_words([ends, flow]: [u64; 2]) -> Self {
        // The halves.
        #[allow(clippy::cast_possible_truncation)]
        let (to, from) = (PortNote(ends as u32), PortNote((ends >> 32) as u32));
        Self {
            to,
            from,
            flow: FlowHints::from_bits(flow),
        }
    }
}

/// Those of a link: a place for each of its buffers.
#[derive(Debug)]
pub(crate) struct LinkNotes(Box<[[AtomicU64; 2]]>);

impl LinkNotes {
    /// For buffers in a memory of so many bytes.
    pub(super) fn new(bytes: u64) -> Self {
        let places = bytes.div_ceil(BUFFER_BYTES.into());
        Self((0..places).map(|_| Default::default()).collect())
    }

    /// The place of a buffer: none begins within another one.
    #[inline]
    fn place(&self, buffer: &Buffer) -> Option<&[AtomicU64; 2]> {
        let at = usize::try_from(buffer.offset / u64::from(BUFFER_BYTES)).ok()?;
        self.0.get(at)
    }

    /// Notes that of the frame that begins in a buffer, which is not published yet.
    #[inline]
    pub(super) fn write(&self, buffer: &Buffer, note: LinkNote) {
        if let Some(place) = self.place(buffer) {
            for (word, value) in place.iter().zip(note.words()) {
                word.store(value, Relaxed);
            }
        }
    }

    /// What is noted of the frame that begins in a buffer, which came and was not posted again.
    #[inline]
    pub(super) fn read(&self, buffer: Option<&Buffer>) -> LinkNote {
        let place = buffer.and_then(|buffer| self.place(buffer));
        place.map_or(LinkNote::NOTHING, |place| {
            LinkNote::from_words(place.each_ref().map(|word| word.load(Relaxed)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::switch::table::TablePort;

    fn table(lives: &[Option<u16>]) -> Table {
        let port = |(at, life): (usize, &Option<u16>)| {
            life.map(|life| TablePort {
                mac: [2, 0, 0, 0, 0, at as u8],
                life,
                ..TablePort::default()
            })
        };
        Table::new(lives.iter().enumerate().map(port).collect())
    }

    #[test]
    fn ports_are_believed_while_they_live_as_they_did() {
        let (given, two) = (table(&[Some(7), Some(0)]), PortNumber(1));
        let note = LinkNote::new(Destination::Port(PortNumber(0)), Some(two), &given);
        assert_eq!(note.destination(&given), Some(Destination::Port(PortNumber(0))));
        assert_eq!(note.sender(&given), NotedSender::Is(Some(two)));
        for other in [table(&[Some(8), Some(1)]), table(&[None, None]), table(&[])] {
            assert_eq!(note.destination(&other), None);
            assert_eq!(note.sender(&other), NotedSender::Other(two));
        }
    }

    #[test]
    fn what_is_no_port_is_told_from_all_ports() {
        let known = table(&[Some(0); 5]);
        for to in [
            Destination::Group,
            Destination::Host,
            Destination::Unknown,
            Destination::Nobody,
        ] {
            let note = LinkNote::new(to, None, &known);
            assert_eq!(note.destination(&known), Some(to));
            assert_eq!(note.sender(&known), NotedSender::Is(None));
        }
        assert_eq!(LinkNote::NOTHING.destination(&known), None);
        assert_eq!(LinkNote::NOTHING.sender(&known), NotedSender::Unsaid);
        // A port that the table does not know is not named.
        let unknown = Destination::Port(PortNumber(5));
        let note = LinkNote::new(unknown, Some(PortNumber(5)), &known);
        assert_eq!(note, LinkNote::NOTHING);
    }

    #[test]
    fn note_is_read_as_it_was_written_at_its_buffer_and_nowhere_else() {
        let notes = LinkNotes::new(3 * u64::from(BUFFER_BYTES));
        let buffer = |at: u64| Buffer {
            offset: at * u64::from(BUFFER_BYTES) + 64,
            len: BUFFER_BYTES,
            room_before: 0,
        };
        for at in 0..4 {
            notes.write(&buffer(at), LinkNote::NOTHING);
        }
        let flow = FlowHints::from_bits(0x89ab_cdef_0123_4567);
        let note = LinkNote::of_arrival(PortNote::new(PortNumber(0x1234), 0x5678), flow);
        notes.write(&buffer(1), note);
        assert_eq!(notes.read(Some(&buffer(1))), note);
        for other in [Some(buffer(0)), Some(buffer(2)), Some(buffer(3)), None] {
            assert_eq!(notes.read(other.as_ref()), LinkNote::NOTHING);
        }
    }
}
