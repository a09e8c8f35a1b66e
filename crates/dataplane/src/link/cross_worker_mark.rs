//! Facts that go with a frame from one worker to another: its destination, the port that sent it, and what the NIC
//! reported about its flow.
//!
//! Theory of operation. The worker that delivers a frame to a link has found all that, and the other end is in the same
//! process. So a mark carries it, and the other worker does not look up any address again. A link has room for a mark
//! for each of its buffers ([`CrossWorkerMarks`]), in memory that no guest maps; a frame's mark belongs to its first
//! buffer. The sending end writes the mark before it publishes the buffer, and the receiving end reads it before it
//! posts the buffer again. Both words are relaxed, because the virtqueue's releases of `used.idx` and `avail.idx`, and
//! the acquires that pair with them, order them as they order the frame's bytes.
//!
//! Workers receive a new FDB one after the other, and a frame may wait in a link until its port is removed and another
//! port has the number. So a mark has the port's number and generation ([`PortMark`]), and is trusted only while the
//! generation matches. Otherwise the FDB decides by the frame's addresses.
//!
//! ```text
//!     63          48 47          32 31          16 15           0
//!     ┌─────────────┬──────────────┬──────────────┬─────────────┐
//!     │ from: generation, number   │ to: generation, number     │  ends
//!     ├────────────────────────────┼────────────────────────────┤
//!     │ mark of the flow           │ the NIC's hash of it       │  flow
//!     └────────────────────────────┴────────────────────────────┘
//! ```
//!
//! No port has the number 65,535: with it, the generation field encodes ends that are no ports.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use acl::FlowHints;
use virtqueue::Buffer;

use crate::fdb::{Destination, Fdb, PortMark, PortNumber};
use crate::link::inner_queue::BUFFER_BYTES;

/// A number that no port has.
const NO_PORT: PortNumber = PortNumber(u16::MAX);
/// This end is not known.
const UNSET: PortMark = PortMark::new(NO_PORT, 0);
/// As sender: no port, but an uplink or the host. As destination: nobody.
const NO_DESTINATION: PortMark = PortMark::new(NO_PORT, 1);
/// As destination: multicast.
const MULTICAST: PortMark = PortMark::new(NO_PORT, 2);
/// As destination: the host.
const HOST: PortMark = PortMark::new(NO_PORT, 3);
/// As destination: the uplink, because no port has the address.
const UNKNOWN: PortMark = PortMark::new(NO_PORT, 4);

/// See the module's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CrossWorkerMark {
    to: PortMark,
    from: PortMark,
    pub(crate) flow: FlowHints,
}

/// The sender of a marked frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MarkedSender {
    /// This port; `None`: no port.
    Is(Option<PortNumber>),
    /// A port with this number; in this worker's FDB the number is free or has another generation.
    Other(PortNumber),
    /// The mark has no sender.
    Unset,
}

impl CrossWorkerMark {
    /// The mark of a frame without known ends.
    pub(crate) const EMPTY: Self = Self {
        to: UNSET,
        from: UNSET,
        flow: FlowHints::NONE,
    };

    /// The mark of a frame. `from`: the port that sent it; `None`: no port. `fdb`: the table of these port numbers.
    pub(crate) fn new(to: Destination, from: Option<PortNumber>, fdb: &Fdb) -> Self {
        let port = |number| fdb.port(number).map_or(UNSET, |port| port.mark(number));
        Self {
            to: match to {
                Destination::Port(number) => port(number),
                Destination::Multicast => MULTICAST,
                Destination::Host => HOST,
                Destination::Unknown => UNKNOWN,
                Destination::Nobody => NO_DESTINATION,
            },
            from: from.map_or(NO_DESTINATION, port),
            flow: FlowHints::NONE,
        }
    }

    /// The mark of a frame that arrived at an uplink, for that port.
    #[inline]
    pub(crate) fn of_arrival(to: PortMark, flow: FlowHints) -> Self {
        Self {
            to,
            from: NO_DESTINATION,
            flow,
        }
    }

    /// The same, with what is known of its flow.
    pub(crate) fn with(self, flow: FlowHints) -> Self {
        Self { flow, ..self }
    }

    /// The destination, if the generation of a port matches that in `fdb`; `None`: look up the frame's addresses.
    #[inline]
    pub(crate) fn destination(self, fdb: &Fdb) -> Option<Destination> {
        match self.to {
            UNSET => None,
            MULTICAST => Some(Destination::Multicast),
            HOST => Some(Destination::Host),
            UNKNOWN => Some(Destination::Unknown),
            NO_DESTINATION => Some(Destination::Nobody),
            port => fdb.marked(port).map(Destination::Port),
        }
    }

    /// Which port sent the frame, and whether its generation matches that in `fdb`.
    #[inline]
    pub(crate) fn sender(self, fdb: &Fdb) -> MarkedSender {
        match self.from {
            UNSET => MarkedSender::Unset,
            NO_DESTINATION => MarkedSender::Is(None),
            port => match fdb.marked(port) {
                Some(port) => MarkedSender::Is(Some(port)),
                None => MarkedSender::Other(port.parts().0),
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
        let (to, from) = (PortMark(ends as u32), PortMark((ends >> 32) as u32));
        Self {
            to,
            from,
            flow: FlowHints::from_bits(flow),
        }
    }
}

/// The marks of a link: a place for each of its buffers.
#[derive(Debug)]
pub(crate) struct CrossWorkerMarks(Box<[[AtomicU64; 2]]>);

impl CrossWorkerMarks {
    /// For buffers in `bytes` of memory.
    pub(crate) fn new(bytes: u64) -> Self {
        let places = bytes.div_ceil(BUFFER_BYTES.into());
        Self((0..places).map(|_| Default::default()).collect())
    }

    /// The place of a buffer: none begins within another one.
    #[inline]
    fn place(&self, buffer: &Buffer) -> Option<&[AtomicU64; 2]> {
        let at = usize::try_from(buffer.offset / u64::from(BUFFER_BYTES)).ok()?;
        self.0.get(at)
    }

    /// Writes the mark of the frame that begins in a buffer, which is not published yet.
    #[inline]
    pub(crate) fn write(&self, buffer: &Buffer, note: CrossWorkerMark) {
        if let Some(place) = self.place(buffer) {
            for (word, value) in place.iter().zip(note.words()) {
                word.store(value, Relaxed);
            }
        }
    }

    /// Reads the mark of the frame that begins in a received buffer, which is not posted again yet.
    #[inline]
    pub(crate) fn read(&self, buffer: Option<&Buffer>) -> CrossWorkerMark {
        let place = buffer.and_then(|buffer| self.place(buffer));
        place.map_or(CrossWorkerMark::EMPTY, |place| {
            CrossWorkerMark::from_words(place.each_ref().map(|word| word.load(Relaxed)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fdb::FdbPort;

    fn fdb(generations: &[Option<u16>]) -> Fdb {
        let port = |(at, generation): (usize, &Option<u16>)| {
            generation.map(|generation| FdbPort {
                mac: [2, 0, 0, 0, 0, at as u8],
                generation,
                ..FdbPort::default()
            })
        };
        Fdb::new(generations.iter().enumerate().map(port).collect())
    }

    #[test]
    fn marks_are_trusted_while_the_generation_matches() {
        let (given, two) = (fdb(&[Some(7), Some(0)]), PortNumber(1));
        let note = CrossWorkerMark::new(Destination::Port(PortNumber(0)), Some(two), &given);
        assert_eq!(note.destination(&given), Some(Destination::Port(PortNumber(0))));
        assert_eq!(note.sender(&given), MarkedSender::Is(Some(two)));
        for other in [fdb(&[Some(8), Some(1)]), fdb(&[None, None]), fdb(&[])] {
            assert_eq!(note.destination(&other), None);
            assert_eq!(note.sender(&other), MarkedSender::Other(two));
        }
    }

    #[test]
    fn ends_that_are_no_ports_differ_from_all_ports() {
        let known = fdb(&[Some(0); 5]);
        for to in [
            Destination::Multicast,
            Destination::Host,
            Destination::Unknown,
            Destination::Nobody,
        ] {
            let note = CrossWorkerMark::new(to, None, &known);
            assert_eq!(note.destination(&known), Some(to));
            assert_eq!(note.sender(&known), MarkedSender::Is(None));
        }
        assert_eq!(CrossWorkerMark::EMPTY.destination(&known), None);
        assert_eq!(CrossWorkerMark::EMPTY.sender(&known), MarkedSender::Unset);
        // A port that the FDB does not know becomes an unknown end.
        let unknown = Destination::Port(PortNumber(5));
        let note = CrossWorkerMark::new(unknown, Some(PortNumber(5)), &known);
        assert_eq!(note, CrossWorkerMark::EMPTY);
    }

    #[test]
    fn mark_is_read_at_its_buffer_only() {
        let notes = CrossWorkerMarks::new(3 * u64::from(BUFFER_BYTES));
        let buffer = |at: u64| Buffer {
            offset: at * u64::from(BUFFER_BYTES) + 64,
            len: BUFFER_BYTES,
            room_before: 0,
        };
        for at in 0..4 {
            notes.write(&buffer(at), CrossWorkerMark::EMPTY);
        }
        let flow = FlowHints::from_bits(0x89ab_cdef_0123_4567);
        let note = CrossWorkerMark::of_arrival(PortMark::new(PortNumber(0x1234), 0x5678), flow);
        notes.write(&buffer(1), note);
        assert_eq!(notes.read(Some(&buffer(1))), note);
        for other in [Some(buffer(0)), Some(buffer(2)), Some(buffer(3)), None] {
            assert_eq!(notes.read(other.as_ref()), CrossWorkerMark::EMPTY);
        }
    }
}
