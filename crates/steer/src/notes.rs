//! The loader's records about successive programs on a link: the metadata that each writes before frames.
//! They are in a map that no program reads, so that they can be pinned with the others, and show the next
//! owner of the link which layouts frames in flight may have.

use std::sync::{Mutex, MutexGuard, PoisonError};

use libbpf_rs::{MapHandle, MapType, libbpf_sys};
use xsk::metadata::Layout;

use crate::capture::messages_of;
use crate::hints::HintSet;
use crate::map;
use crate::shape::Shape;

/// How many programs are recorded: at most this many may have replaced each other while a frame was in flight.
const PROGRAMS: u32 = 8;

/// Sequence number of a program on its link, below 2^15; the next program's is one higher, with wrap-around.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Turn(u16);

impl Turn {
    const BITS: u16 = 0x7fff;

    pub(crate) fn next(self) -> Self {
        Self(self.0.wrapping_add(1) & Self::BITS)
    }
}

/// The record of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Note {
    /// Its kernel id.
    pub(crate) program: u32,
    pub(crate) turn: Turn,
    /// It supports frames in several buffers.
    pub(crate) frags: bool,
    pub(crate) hints: HintSet,
    /// The layout of its metadata, if it writes any.
    pub(crate) layout: Option<Layout>,
}

impl Note {
    const BYTES: usize = 32;
    /// Set in an entry that was written.
    const WRITTEN: u8 = 0x80;

    fn value(&self) -> [u8; Self::BYTES] {
        let mut value = [0; Self::BYTES];
        value[..4].copy_from_slice(&self.program.to_ne_bytes());
        value[4..6].copy_from_slice(&self.turn.0.to_ne_bytes());
        value[6] = u8::from(self.frags);
        value[7] = self.hints.bits() | Self::WRITTEN;
        if let Some(layout) = &self.layout {
            value[8..24].copy_from_slice(&layout.to_bytes());
        }
        value
    }

    fn of_value(value: &[u8]) -> Option<Self> {
        let &[a, b, c, d, t0, t1, frags, hints, ref rest @ ..] = value else {
            return None;
        };
        let layout = *rest.first_chunk()?;
        (hints & Self::WRITTEN != 0).then(|| Self {
            program: u32::from_ne_bytes([a, b, c, d]),
            turn: Turn(u16::from_ne_bytes([t0, t1]) & Turn::BITS),
            frags: frags != 0,
            hints: HintSet::of_bits(hints),
            layout: Layout::from_bytes(layout).ok(),
        })
    }
}

/// The map of records: the latest [`PROGRAMS`].
#[derive(Debug)]
pub(crate) struct Notes(pub(crate) MapHandle);

impl Notes {
    pub(crate) const SHAPE: Shape = Shape {
        name: "layouts",
        kind: MapType::Array,
        key_bytes: 4,
        value_bytes: Note::BYTES as u32,
        entries: PROGRAMS,
    };

    pub(crate) fn new() -> libbpf_rs::Result<Self> {
        Self::SHAPE.create(0).map(Self)
    }

    /// Stores a record; replaces the oldest.
    pub(crate) fn add(&self, note: &Note) -> libbpf_rs::Result<()> {
        let key = u32::from(note.turn.0) % Self::SHAPE.entries;
        map::set(&self.0, &key, &note.value())
    }

    /// The record of this program.
    pub(crate) fn of_program(&self, program: u32) -> Option<Note> {
        self.all().find(|note| note.program == program)
    }

    /// The layouts of the programs up to this one, the latest first, each once.
    pub(crate) fn layouts(&self, upto: Turn) -> Vec<Layout> {
        let age = |note: &Note| upto.0.wrapping_sub(note.turn.0) & Turn::BITS;
        let mut notes: Vec<Note> = self
            .all()
            .filter(|note| u32::from(age(note)) < PROGRAMS)
            .collect();
        notes.sort_by_key(age);
        each_once(notes.into_iter().filter_map(|note| note.layout))
    }

    fn all(&self) -> impl Iterator<Item = Note> {
        let note = |key| Note::of_value(&map::get::<[u8; Note::BYTES]>(&self.0, &key).ok()??);
        (0..Self::SHAPE.entries).filter_map(note)
    }
}

/// Removes repetitions; keeps the order.
pub(crate) fn each_once(layouts: impl IntoIterator<Item = Layout>) -> Vec<Layout> {
    let mut once = Vec::new();
    for layout in layouts {
        if !once.contains(&layout) {
            once.push(layout);
        }
    }
    once
}

impl Shape {
    /// Creates a map of this shape, outside any program.
    pub(crate) fn create(self, flags: u32) -> libbpf_rs::Result<MapHandle> {
        let options = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
            map_flags: flags,
            ..Default::default()
        };
        let (made, _) = messages_of(|| {
            MapHandle::create(
                self.kind,
                Some(self.name_of_map()),
                self.key_bytes,
                self.value_bytes,
                self.entries,
                &options,
            )
        });
        made
    }
}

/// Which program is on the link.
#[derive(Debug)]
pub(crate) struct Now {
    pub(crate) ifindex: u32,
    note: Mutex<Note>,
}

impl Now {
    pub(crate) fn new(ifindex: u32, note: Note) -> Self {
        Self {
            ifindex,
            note: Mutex::new(note),
        }
    }

    pub(crate) fn get(&self) -> Note {
        *self.lock()
    }

    /// A poisoned lock is harmless: the values are plain, and always consistent.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Note> {
        self.note.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use xsk::metadata::Field;

    use super::*;

    #[test]
    fn notes_come_back_from_their_bytes() {
        let layout = Layout::new(0x8005_0011, 16, &[(Field::Hash, 0)]).expect("inside");
        for (hints, layout) in [(HintSet::NONE, None), (HintSet::HASH, Some(layout))] {
            let note = Note {
                program: 77,
                turn: Turn(5),
                frags: true,
                hints,
                layout,
            };
            assert_eq!(Note::of_value(&note.value()), Some(note));
        }
        assert_eq!(Note::of_value(&[0; Note::BYTES]), None, "never written");
        assert_eq!(Note::of_value(&[]), None);
    }

    #[test]
    fn turns_go_round() {
        assert_eq!(Turn::default().next(), Turn(1));
        assert_eq!(Turn(0x7fff).next(), Turn(0));
    }
}
