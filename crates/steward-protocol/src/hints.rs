//! Hints of the NIC: requests for them, and the answers.
//!
//! A lessee sends `Hints` before it requests or resumes its lease. One that never sends it gets no answers about hints.

use super::Malformed;
use super::wire::{Body, List, Text, Wire, value, wire};
use steer::HintSet;
use xsk::metadata::{Layout, MAX_LAYOUTS};

/// The hints that a lessee requests before the frames of its queues.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HintRequest {
    /// These hints, as far as they are possible.
    pub asked: HintSet,
    /// Also the VLAN tag, if possible, where the driver strips tags and the lease is for VLANs.
    pub tags: bool,
}

/// The bit of [`HintRequest::tags`], above the bits of the set.
const TAGS: u32 = 0x100;

impl HintRequest {
    /// As a number.
    #[must_use]
    pub fn number(self) -> u32 {
        u32::from(self.asked.bits()) | if self.tags { TAGS } else { 0 }
    }

    /// The request from its number.
    ///
    /// # Errors
    /// No request has this number.
    pub fn of_number(number: u32) -> Result<Self, Malformed> {
        let tags = number & TAGS != 0;
        Ok(Self {
            asked: hints(number & !TAGS)?,
            tags,
        })
    }
}

/// Hints before frames of queues whose configuration has them
/// ([`QueueConf::hints`](steer::QueueConf::hints)).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hinted {
    /// Hints that kernel and driver offer.
    pub possible: HintSet,
    /// Hints that the program writes now, for all leases of the interface together.
    pub on: HintSet,
    /// Why requested hints are missing; else empty. Cut to 240 bytes.
    pub why: String,
    /// Layouts of all programs that this steward may attach during the lease, or has attached, the latest first.
    /// At most [`MAX_LAYOUTS`].
    pub layouts: Vec<Layout>,
}

wire!(Hinted {
    possible,
    on,
    layouts: List::new(MAX_LAYOUTS, Layout::BYTES, "layouts of hints"),
    why: Text(240, "why there are no hints"),
});

impl Wire for HintSet {
    fn write(&self, to: &mut Vec<u8>) {
        u32::from(self.bits()).write(to);
    }

    fn read(from: &mut Body<'_>) -> Result<Self, Malformed> {
        hints(from.next()?)
    }
}

impl Wire for Layout {
    fn write(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(&self.to_bytes());
    }

    fn read(from: &mut Body<'_>) -> Result<Self, Malformed> {
        let bytes = from.next()?;
        let layout = Self::from_bytes(bytes).ok();
        let layout = layout.filter(|layout| layout.to_bytes() == bytes);
        layout.ok_or(Malformed::Text("a layout of hints"))
    }
}

impl Wire for HintRequest {
    fn write(&self, to: &mut Vec<u8>) {
        self.number().write(to);
    }

    fn read(from: &mut Body<'_>) -> Result<Self, Malformed> {
        Self::of_number(from.next()?)
    }
}

fn hints(bits: u32) -> Result<HintSet, Malformed> {
    let set = HintSet::of_bits(bits as u8);
    match u32::from(set.bits()) == bits {
        true => Ok(set),
        false => Err(value("set of hints", bits)),
    }
}
