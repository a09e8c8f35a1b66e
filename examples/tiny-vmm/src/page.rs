//! The mailbox's page as it lies in guest memory. `build.rs` has this file, too: the guest's compiler checks that
//! `struct mailbox` of `guest/mailbox.h` is the same.

use std::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// See the module's head.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct Page {
    /// [`Work`](crate::mailbox::Work) by its number. The host writes this one and those up to
    /// `patience_ticks` before the guest runs.
    pub work: u32,
    /// `FLAG_` of [`crate::layout`].
    pub flags: u32,
    /// How many.
    pub frames: u64,
    /// How many at a time.
    pub frames_per_kick: u32,
    /// How long.
    pub frame_bytes: u32,
    /// How long the guest waits.
    pub patience_ticks: u64,
    /// Not 0: the guest is to end early. The host writes this at any time.
    pub stop: u32,
    /// Nobody does.
    pub unused: u32,
    /// `ANSWER_` of [`crate::layout`]. The guest writes this and those behind it.
    pub answer: u32,
    /// Where in its source the guest gave up: number of a file of [`GUEST_SOURCES`](crate::layout::GUEST_SOURCES),
    /// shifted by `SOURCE_SHIFT`, and line.
    pub place: u32,
    /// What should have been there.
    pub expected: u64,
    /// What was.
    pub found: u64,
    /// Frames, notifications or rounds.
    pub done: u64,
    /// Notifications.
    pub kicks: u64,
    /// What the work took.
    pub ticks: u64,
    /// Frames that were not as they should be.
    pub bad_frames: u64,
    /// How many there are.
    pub samples: u64,
    /// 1 once the driver is ready and the work has begun.
    pub ready: u64,
    /// Commands of the control queue that were answered as they should be, by class and number, both modulo 8.
    pub commands: [[u16; 8]; 8],
    /// Of the entropy device's bytes: bits, ones among them, and rounds that brought what the round before did.
    pub random: [u64; 3],
}

/// How many bytes it has.
pub const PAGE_BYTES: usize = size_of::<Page>();

/// Where each field begins.
pub const OFFSETS: [(&str, usize); 20] = [
    ("work", offset_of!(Page, work)),
    ("flags", offset_of!(Page, flags)),
    ("frames", offset_of!(Page, frames)),
    ("frames_per_kick", offset_of!(Page, frames_per_kick)),
    ("frame_bytes", offset_of!(Page, frame_bytes)),
    ("patience_ticks", offset_of!(Page, patience_ticks)),
    ("stop", offset_of!(Page, stop)),
    ("unused", offset_of!(Page, unused)),
    ("answer", offset_of!(Page, answer)),
    ("place", offset_of!(Page, place)),
    ("expected", offset_of!(Page, expected)),
    ("found", offset_of!(Page, found)),
    ("done", offset_of!(Page, done)),
    ("kicks", offset_of!(Page, kicks)),
    ("ticks", offset_of!(Page, ticks)),
    ("bad_frames", offset_of!(Page, bad_frames)),
    ("samples", offset_of!(Page, samples)),
    ("ready", offset_of!(Page, ready)),
    ("commands", offset_of!(Page, commands)),
    ("random", offset_of!(Page, random)),
];
