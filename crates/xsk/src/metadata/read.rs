//! Reads the metadata before frames.

use std::num::NonZeroU64;

use super::layout::{Field, Layout, MAX_LEN_BYTES};
use crate::{Umem, UmemOffset};

/// Maximum number of known layouts: all of a program, those of earlier programs with frames in flight, and
/// the one without hints.
pub const MAX_LAYOUTS: usize = 24;

/// Bytes read before each frame: the longest metadata that kernels before 6.8 allow.
const USUAL_BYTES: usize = 32;

/// The NIC's hash of a frame's flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hash {
    /// The hash.
    pub value: u32,
    /// Its input: `enum xdp_rss_hash_type` of `include/net/xdp.h`; 0: unknown.
    pub kind: u16,
}

/// `XDP_RSS_L4` of `enum xdp_rss_hash_type`.
const OF_PORTS: u16 = 1 << 3;

impl Hash {
    /// Whether it includes the ports, so that flows between the same two addresses differ. Many NICs exclude
    /// the ports for UDP.
    #[inline]
    #[must_use]
    pub fn is_of_ports(self) -> bool {
        self.kind & OF_PORTS != 0
    }
}

/// A VLAN tag that the NIC stripped from the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tag {
    /// 0x8100 or 0x88a8.
    pub proto: u16,
    /// Priority (3 bits), drop eligibility (1 bit), VLAN ID (12 bits).
    pub tci: u16,
}

/// Facts about one frame that are not in its bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hints {
    /// The NIC's hash.
    pub hash: Option<Hash>,
    /// The VLAN tag that the NIC stripped.
    pub tag: Option<Tag>,
    /// When the NIC received it, ns of the NIC's clock.
    pub timestamp: Option<NonZeroU64>,
    /// The mark of its flow.
    pub mark: Option<u32>,
    /// Its destination.
    pub port: Option<u32>,
}

impl Hints {
    /// The hints that are present, except the destination, by [`Field::absent_bit`].
    #[inline]
    #[must_use]
    pub fn fields(&self) -> u8 {
        let bit = |is_there: bool, bit: u8| if is_there { bit } else { 0 };
        bit(self.hash.is_some(), HASH)
            | bit(self.tag.is_some(), TAG)
            | bit(self.timestamp.is_some(), TIMESTAMP)
            | bit(self.mark.is_some(), MARK)
    }
}

/// The metadata of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// A structure of a known layout.
    Hints(Hints),
    /// No metadata: no program has written any.
    Nothing,
    /// Metadata of an unknown layout, with this id: count it; the frame has no hints.
    Unknown(u32),
}

impl Found {
    /// The hints; none for an unknown layout.
    #[must_use]
    pub fn hints(self) -> Hints {
        match self {
            Self::Hints(hints) => hints,
            Self::Nothing | Self::Unknown(_) => Hints::default(),
        }
    }
}

/// Erases the id before `frame`, so that [`Found::Nothing`] is read for a frame received there without
/// metadata. Call it before the chunk goes to the fill ring.
#[inline]
pub fn forget(umem: &Umem, frame: UmemOffset) {
    if let Some(at) = frame.get().checked_sub(4) {
        // Outside the UMEM nothing is read, so nothing has to be erased.
        let _ = umem.write(UmemOffset::new(at), &[0; 4]);
    }
}

/// The bytes directly before a frame.
#[inline]
fn before(umem: &Umem, frame: UmemOffset) -> Option<[u8; USUAL_BYTES]> {
    let start = frame.get().checked_sub(USUAL_BYTES as u64)?;
    let mut bytes = [0; USUAL_BYTES];
    umem.read(UmemOffset::new(start), &mut bytes)?;
    Some(bytes)
}

/// A layout prepared for reading: offsets of the fields in the bytes that end at the frame.
#[derive(Debug, Clone, Copy)]
struct Places {
    layout: Layout,
    /// Which of HASH, TAG, TIMESTAMP, MARK, PORT, ABSENT the layout has.
    shape: u8,
    /// Offset by [`Field`]: in the last [`USUAL_BYTES`] bytes before the frame, or in the structure if it is longer.
    at: [u8; Field::ALL.len()],
}

/// Bits of `absent`, and of a shape.
const HASH: u8 = Field::Hash.absent_bit();
const TAG: u8 = Field::VlanProto.absent_bit();
const TIMESTAMP: u8 = Field::Timestamp.absent_bit();
const MARK: u8 = Field::Mark.absent_bit();
const PORT: u8 = Field::Port.absent_bit();
/// Only in a shape: the layout has the field `absent`.
const ABSENT: u8 = 1 << 5;

impl Places {
    fn new(layout: Layout) -> Self {
        // A structure shorter than the usual length is at the end of the bytes read.
        let skipped = (USUAL_BYTES as u8).saturating_sub(layout.len_bytes());
        let absent = if layout.has(Field::Absent) { ABSENT } else { 0 };
        Self {
            layout,
            shape: layout.fields() | absent,
            // Sums are at most MAX_LEN_BYTES, so they fit in a byte.
            at: Field::ALL.map(|field| layout.offset(field).map_or(0, |offset| offset + skipped)),
        }
    }

    fn is_long(&self) -> bool {
        usize::from(self.layout.len_bytes()) > USUAL_BYTES
    }

    /// Reads a field of the structure. It is inside `bytes`, because the layout was checked; otherwise this returns 0.
    #[inline(always)]
    fn read<const N: usize>(&self, field: Field, bytes: &[u8]) -> [u8; N] {
        let at = usize::from(self.at[field as usize]);
        match bytes.get(at..).and_then(<[u8]>::first_chunk) {
            Some(field) => *field,
            None => [0; N],
        }
    }

    /// The hints in `bytes`.
    #[inline(always)]
    fn hints(&self, bytes: &[u8]) -> Hints {
        let absent = match self.shape & ABSENT {
            0 => 0,
            _ => u16::from_ne_bytes(self.read(Field::Absent, bytes)),
        };
        let there = self.shape & !(absent as u8);
        Hints {
            hash: (there & HASH != 0).then(|| Hash {
                value: u32::from_ne_bytes(self.read(Field::Hash, bytes)),
                kind: match self.layout.has(Field::HashType) {
                    true => u16::from_ne_bytes(self.read(Field::HashType, bytes)),
                    false => 0,
                },
            }),
            tag: (there & TAG != 0)
                .then(|| Tag {
                    proto: u16::from_be_bytes(self.read(Field::VlanProto, bytes)),
                    tci: u16::from_ne_bytes(self.read(Field::VlanTci, bytes)),
                })
                .filter(|tag| tag.proto != 0),
            timestamp: match there & TIMESTAMP {
                0 => None,
                _ => NonZeroU64::new(u64::from_ne_bytes(self.read(Field::Timestamp, bytes))),
            },
            mark: (there & MARK != 0).then(|| u32::from_ne_bytes(self.read(Field::Mark, bytes))),
            port: (there & PORT != 0).then(|| u32::from_ne_bytes(self.read(Field::Port, bytes))),
        }
    }

    /// The hints of a structure that is longer than usual.
    #[cold]
    fn long(&self, umem: &Umem, frame: UmemOffset) -> Found {
        let mut bytes = [0; MAX_LEN_BYTES as usize];
        let bytes = &mut bytes[..usize::from(self.layout.len_bytes())];
        let start = frame.get().checked_sub(bytes.len() as u64);
        match start.and_then(|start| umem.read(UmemOffset::new(start), bytes)) {
            Some(()) => Found::Hints(self.hints(bytes)),
            None => Found::Nothing,
        }
    }
}

/// The layouts that a receiver knows, the latest first.
#[derive(Debug, Clone, Default)]
pub struct Layouts {
    known: [Option<Places>; MAX_LAYOUTS],
}

impl Layouts {
    /// Layouts, the latest first; only the first [`MAX_LAYOUTS`] are kept. Of two with the same id the first is used.
    #[must_use]
    pub fn new(latest_first: &[Layout]) -> Self {
        let mut layouts = Self::default();
        for (known, &layout) in layouts.known.iter_mut().zip(latest_first) {
            *known = Some(Places::new(layout));
        }
        layouts
    }

    /// Whether none is known.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.known[0].is_none()
    }

    /// The known layouts, the latest first.
    pub fn iter(&self) -> impl Iterator<Item = Layout> {
        self.known.iter().flatten().map(|known| known.layout)
    }

    /// The destination of a frame that begins at `frame`, if its metadata is of the latest layout, and that has no other
    /// field.
    #[inline]
    #[must_use]
    pub fn port_only(&self, umem: &Umem, frame: UmemOffset) -> Option<u32> {
        let latest = self.known[0].as_ref().filter(|latest| latest.shape == PORT)?;
        let bytes = before(umem, frame).filter(|_| !latest.is_long())?;
        let [.., a, b, c, d] = bytes;
        (u32::from_ne_bytes([a, b, c, d]) == latest.layout.id())
            .then(|| u32::from_ne_bytes(latest.read(Field::Port, &bytes)))
    }

    /// The metadata of a frame that begins at `frame`.
    #[inline]
    #[must_use]
    pub fn read(&self, umem: &Umem, frame: UmemOffset) -> Found {
        let Some(bytes) = before(umem, frame) else {
            return Found::Nothing;
        };
        let [.., a, b, c, d] = bytes;
        let id = u32::from_ne_bytes([a, b, c, d]);
        if id == 0 {
            // No layout has this id: the search is skipped.
            return Found::Nothing;
        }
        let known = self.known.iter().map_while(Option::as_ref);
        for places in known {
            if places.layout.id() == id {
                return match places.is_long() {
                    false => Found::Hints(places.hints(&bytes)),
                    true => places.long(umem, frame),
                };
            }
        }
        Found::Unknown(id)
    }
}
