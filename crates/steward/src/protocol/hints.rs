//! Hints of the NIC: what a lessee asks for, and what it is told.
//!
//! A steward of a version without hints ends the connection of who says `Hints`. So a lessee says it before it asks for
//! its lease, or comes back to it, and asks without on another connection if it was refused. A lessee of a version
//! without says nothing of hints, and is told nothing.

use steer::HintSet;
use xsk::metadata::{Layout, MAX_LAYOUTS};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Malformed;
use super::field::{field, text, value};

const WHY_BYTES: usize = 240;

/// Which hints a lessee wants before the frames of its queues.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HintRequest {
    /// These, if they can be had.
    pub asked: HintSet,
    /// The VLAN tag, too, where the driver takes tags off and the lease is for VLANs, if it can be had.
    pub tags: bool,
}

/// [`HintRequest::tags`], beside the bits of a set.
const TAGS: u32 = 0x100;

impl HintRequest {
    /// As a number.
    #[must_use]
    pub fn number(self) -> u32 {
        u32::from(self.asked.bits()) | if self.tags { TAGS } else { 0 }
    }

    /// The same from there.
    pub(crate) fn of_number(number: u32) -> Result<Self, Malformed> {
        let tags = number & TAGS != 0;
        Ok(Self {
            asked: hints(number & !TAGS)?,
            tags,
        })
    }
}

/// What stands before the frames of a lease's queues whose configuration says so
/// ([`QueueConf::hints`](steer::QueueConf::hints)).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hinted {
    /// What kernel and driver have for it.
    pub possible: HintSet,
    /// What the program leaves now: for all leases of the interface together.
    pub on: HintSet,
    /// Why what was asked for is not among that; else empty. Cut to 240 bytes.
    pub why: String,
    /// Layouts of all programs that may be there, while the lease goes on with this steward, or were: the latest first.
    /// At most [`MAX_LAYOUTS`].
    pub layouts: Vec<Layout>,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct HintedBody {
    possible: u32,
    on: u32,
    layout_count: u32,
    layouts: [[u8; Layout::BYTES]; MAX_LAYOUTS],
    why: [u8; WHY_BYTES],
}

const _: () = assert!(size_of::<HintedBody>() == 636);

fn hints(bits: u32) -> Result<HintSet, Malformed> {
    let set = HintSet::of_bits(bits as u8);
    match u32::from(set.bits()) == bits {
        true => Ok(set),
        false => Err(value("set of hints", bits)),
    }
}

impl Hinted {
    pub(super) fn body(&self) -> HintedBody {
        let mut layouts = [[0; Layout::BYTES]; MAX_LAYOUTS];
        let known = layouts.iter_mut().zip(&self.layouts);
        known.for_each(|(to, layout)| *to = layout.to_bytes());
        HintedBody {
            possible: self.possible.bits().into(),
            on: self.on.bits().into(),
            layout_count: self.layouts.len().min(MAX_LAYOUTS) as u32,
            layouts,
            why: field(&self.why),
        }
    }

    pub(super) fn read(body: &HintedBody) -> Result<Self, Malformed> {
        let wrong = || value("number of layouts", body.layout_count);
        let count = usize::try_from(body.layout_count).map_err(|_| wrong())?;
        let (known, rest) = body.layouts.split_at_checked(count).ok_or_else(wrong)?;
        if rest.iter().any(|&layout| layout != [0; Layout::BYTES]) {
            return Err(wrong());
        }
        let layout = |&bytes: &[u8; Layout::BYTES]| {
            let layout = Layout::from_bytes(bytes).ok();
            layout.filter(|layout| layout.to_bytes() == bytes)
        };
        let layouts: Option<Vec<Layout>> = known.iter().map(layout).collect();
        Ok(Self {
            possible: hints(body.possible)?,
            on: hints(body.on)?,
            layouts: layouts.ok_or(Malformed::Text("a layout of hints"))?,
            why: text("why there are no hints", &body.why)?,
        })
    }
}
