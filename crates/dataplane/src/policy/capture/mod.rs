//! Frames of a port for a capture: their first bytes, and the decision about each.
//!
//! Theory of operation. Control creates a [`Capture`] for one port and one client. Lanes of the port receive a [`Tap`]
//! for each wanted direction, in the message that carries their filter rules, and pass each frame to it where the rules
//! decide ([`crate::policy::filter::Acl`]): in both directions, on any lane and worker. Without a capture and
//! without rules nothing reads frames, and this costs nothing.
//!
//! Records have one size. All lanes put them into one bounded queue, from which one control thread takes them. A lane
//! never waits: a record that finds no room is counted as lost ([`Capture::lost`]), and the frame is forwarded all the
//! same. Only half of the queue's places are used, so that a lane never meets the place that the reader is just
//! emptying, where it would have to wait for a reader that may have no CPU.
//!
//! A frame is recorded once, when it is done: one that is retried because there was no room for it is recorded the last
//! time. Captured bytes decide nothing.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

use crossbeam_queue::ArrayQueue;

/// Most bytes of a frame that are recorded: its headers.
pub const SHOWN_BYTES: usize = 256;
/// Records that wait for the reader: 20 ms of 200,000 frames a second.
const ROOM: usize = 4096;

/// Which frames are recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// Frames that the guest sends.
    pub from_guest: bool,
    /// Frames to the guest.
    pub to_guest: bool,
}

/// The decision about a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// It was delivered.
    Passed,
    /// Denied by the filter rule at that index in the port's list; `None`: by the default.
    Denied(Option<u16>),
    /// Denied for another reason: its headers are malformed, or the guest may not send them.
    Refused,
}

/// Facts about a frame that are not in its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct About {
    /// Its length; `None`: not known, as it came in several pieces.
    pub len: Option<u32>,
    /// When the NIC received it, nanoseconds of the NIC's clock.
    pub received: Option<u64>,
    /// What the port did with it.
    pub seen: Seen,
}

/// A recorded frame.
#[derive(Debug, Clone, Copy)]
pub struct Record {
    /// When it was recorded, nanoseconds since 1970 of the host's clock.
    pub at_ns: u64,
    /// Its direction; false: from the guest.
    pub to_guest: bool,
    /// Queue pair of the port.
    pub pair: u16,
    /// What is known of it besides its bytes.
    pub about: About,
    /// The frame's first `known` bytes are in `head`.
    pub known: u16,
    /// Its first bytes.
    pub head: [u8; SHOWN_BYTES],
}

impl Record {
    /// The frame's first bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.head[..usize::from(self.known).min(SHOWN_BYTES)]
    }
}

/// See the module's head.
#[derive(Debug)]
pub struct Capture {
    wanted: Wanted,
    records: ArrayQueue<Record>,
    /// Records that found no room. Only a number: nothing is published with it.
    lost: AtomicU64,
}

impl Capture {
    /// Records these frames, from now on.
    pub fn new(wanted: Wanted) -> Self {
        Self::with_room(wanted, ROOM)
    }

    fn with_room(wanted: Wanted, room: usize) -> Self {
        Self {
            wanted,
            records: ArrayQueue::new(room * 2),
            lost: AtomicU64::new(0),
        }
    }

    /// What the lane of a queue pair records frames of one direction with; `None`: such frames are not wanted.
    pub fn tap(self: &Arc<Self>, to_guest: bool, pair: u16) -> Option<Tap> {
        let is_wanted = if to_guest {
            self.wanted.to_guest
        } else {
            self.wanted.from_guest
        };
        is_wanted.then(|| Tap {
            capture: Arc::clone(self),
            to_guest,
            pair,
        })
    }

    /// The next record. There must be only one reader.
    pub fn take(&self) -> Option<Record> {
        self.records.pop()
    }

    /// Frames that were not recorded because there was no room.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }

    fn put(&self, record: Record) {
        let has_room = self.records.len() < self.records.capacity() / 2;
        if !has_room || self.records.push(record).is_err() {
            self.lost.fetch_add(1, Relaxed);
        }
    }
}

/// A lane's access to a capture, for one direction.
#[derive(Debug)]
pub struct Tap {
    capture: Arc<Capture>,
    to_guest: bool,
    pair: u16,
}

impl Tap {
    /// Records a frame. `most`: bytes of it that are available; `read` fills the slice that it gets.
    #[cold]
    #[inline(never)]
    pub fn show(&self, about: About, most: usize, read: impl FnOnce(&mut [u8])) {
        // By the vDSO: no system call where the machine's clock source has one.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let known = most.min(SHOWN_BYTES);
        let mut record = Record {
            at_ns: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
            to_guest: self.to_guest,
            pair: self.pair,
            about,
            // At most SHOWN_BYTES.
            #[allow(clippy::cast_possible_truncation)]
            known: known as u16,
            head: [0; SHOWN_BYTES],
        };
        read(&mut record.head[..known]);
        self.capture.put(record);
    }
}
