//! The page by which host and guest speak: what the guest is to do, and what came of it.
//!
//! The guest may write anything here at any time. Its answers are numbers that are shown; none is an index or a length.

use std::mem::offset_of;

use zerocopy::{FromZeros, IntoBytes};

use crate::layout as numbers;
use crate::layout::{
    BUFFER_BYTES, GUEST_SOURCES, MAILBOX_AT, MOST_HEADER_BYTES, MOST_SAMPLES, PATTERN_AT, SAMPLES_AT,
    SOURCE_SHIFT,
};
use crate::memory::{Memory, MemoryError};
use crate::page::Page;

/// What the guest is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// Notify a queue with nothing in it, over and over
    Notify,
    /// Send frames
    Send,
    /// Receive frames, and look whether each is whole and the next one
    Receive,
    /// Send a frame, wait until it comes back, over and over
    RoundTrip,
    /// Send back all that comes
    Echo,
    /// Say all commands of the control queue, and look at the answers
    Control,
    /// Ask the entropy device for bytes
    Entropy,
    /// Kick without pause, each time with a frame if there is room
    Kick,
    /// Take interrupts
    Interrupts,
}

impl Work {
    /// The number that the guest knows it by. 0: it is another program's.
    fn number(self) -> u32 {
        match self {
            Self::Notify => numbers::WORK_NOTIFY,
            Self::Send => numbers::WORK_SEND,
            Self::Receive => numbers::WORK_RECEIVE,
            Self::RoundTrip => numbers::WORK_ROUND_TRIP,
            Self::Echo => numbers::WORK_ECHO,
            Self::Control => numbers::WORK_CONTROL,
            Self::Entropy => numbers::WORK_ENTROPY,
            Self::Kick => numbers::WORK_KICK,
            Self::Interrupts => 0,
        }
    }
}

/// How the work is to be done.
#[derive(Clone, Copy, Debug)]
pub struct Task {
    /// What is to be done.
    pub work: Work,
    /// How many frames, notifications or rounds.
    pub frames: u64,
    /// Frames that are put into the ring for each kick.
    pub frames_per_kick: u32,
    /// Length of a frame, bytes: from [`PATTERN_AT`] to [`MOST_FRAME_BYTES`].
    pub frame_bytes: u32,
    /// With packed rings.
    pub packed: bool,
    /// [`Work::Notify`]: also while the device says that it needs no notification.
    pub always: bool,
    /// With multiqueue, RSS and the hash report.
    pub multiqueue: bool,
    /// With the hash report, without multiqueue and RSS.
    pub hash_report: bool,
    /// The guest wants interrupts for what the device is done with. It takes none: it polls.
    pub interrupts: bool,
    /// With VIRTIO_F_EVENT_IDX; the guest then wants an interrupt for each
    /// [`INTERRUPT_STRIDE`](crate::layout::INTERRUPT_STRIDE) chains.
    pub event_idx: bool,
    /// [`Work::Control`]: the sink gives frames back, and the guest looks where they come and with which hash.
    pub echoed: bool,
    /// How long the guest waits for anything, ticks of its time stamp counter.
    pub patience_ticks: u64,
}

impl Task {
    /// So many frames of 64 bytes, one a kick, in split rings.
    #[must_use]
    pub fn new(work: Work, frames: u64) -> Self {
        Self {
            work,
            frames,
            frames_per_kick: 1,
            frame_bytes: 64,
            packed: false,
            always: false,
            multiqueue: false,
            hash_report: false,
            interrupts: false,
            event_idx: false,
            echoed: false,
            patience_ticks: u64::MAX,
        }
    }
}

/// Longest frame that fits the guest's buffers, bytes.
pub const MOST_FRAME_BYTES: u32 = BUFFER_BYTES - MOST_HEADER_BYTES;

/// Why a task cannot be posted.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The guest would write beside its buffers.
    #[error("frames of {bytes} bytes are none of the guest's: {PATTERN_AT} to {MOST_FRAME_BYTES}")]
    FrameBytes {
        /// How many were asked for.
        bytes: u32,
    },
}

/// What the guest says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Whether all went well; `None` while it works.
    pub outcome: Option<Result<(), Complaint>>,
    /// The driver is ready, and the work has begun.
    pub ready: bool,
    /// Frames, notifications or rounds that are done.
    pub done: u64,
    /// Notifications.
    pub kicks: u64,
    /// What the work took, ticks of the time stamp counter.
    pub ticks: u64,
    /// Frames that were not as they should be.
    pub bad_frames: u64,
    /// How many samples there are: [`Mailbox::samples`].
    pub samples: u64,
    /// [`Work::Control`]: commands that were answered as they should be, by class and number, both modulo 8.
    pub commands: [[u16; 8]; 8],
    /// [`Work::Entropy`]: bits that came, ones among them, and rounds that brought the same bytes as the one before.
    pub random: [u64; 3],
}

/// Why the guest gave up: where in its source, and what it saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the guest gave up at line {line} of guest/{file}: {what}{}", show(*.seen))]
pub struct Complaint {
    what: &'static str,
    file: &'static str,
    line: u32,
    /// Expected and found; `None`: it waited, and saw nothing.
    seen: Option<(u64, u64)>,
}

fn show(seen: Option<(u64, u64)>) -> String {
    seen.map_or_else(String::new, |(expected, found)| {
        format!(" (expected {expected:#x}, found {found:#x})")
    })
}

/// The mailbox of a guest.
#[derive(Clone)]
pub struct Mailbox {
    memory: Memory,
}

impl Mailbox {
    /// Of the guest with that memory.
    #[must_use]
    pub fn new(memory: &Memory) -> Self {
        Self {
            memory: memory.clone(),
        }
    }

    /// Says what is to be done. Before the guest runs.
    ///
    /// # Errors
    /// [`TaskError::FrameBytes`]. [`TaskError::Memory`], if the memory is too short for a mailbox.
    pub fn post(&self, task: &Task) -> Result<(), TaskError> {
        let bytes = task.frame_bytes;
        if !(PATTERN_AT as u32..=MOST_FRAME_BYTES).contains(&bytes) {
            return Err(TaskError::FrameBytes { bytes });
        }
        let flag = |on, flag| if on { flag } else { 0 };
        let page = Page {
            work: task.work.number(),
            flags: flag(task.packed, numbers::FLAG_PACKED)
                | flag(task.always, numbers::FLAG_ALWAYS)
                | flag(task.multiqueue, numbers::FLAG_MULTIQUEUE)
                | flag(task.hash_report, numbers::FLAG_HASH_REPORT)
                | flag(task.interrupts || task.event_idx, numbers::FLAG_INTERRUPTS)
                | flag(task.event_idx, numbers::FLAG_EVENT_IDX)
                | flag(task.echoed, numbers::FLAG_ECHOED),
            frames: task.frames,
            frames_per_kick: task.frames_per_kick.max(1),
            frame_bytes: task.frame_bytes,
            patience_ticks: task.patience_ticks,
            ..Page::new_zeroed()
        };
        Ok(self.memory.write(MAILBOX_AT, page.as_bytes())?)
    }

    /// Asks the guest to end its work early.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn stop(&self) -> Result<(), MemoryError> {
        let at = MAILBOX_AT + offset_of!(Page, stop) as u64;
        self.memory.write(at, &1_u32.to_le_bytes())
    }

    /// What the guest says now.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn answer(&self) -> Result<Answer, MemoryError> {
        let mut page = Page::new_zeroed();
        self.memory.read(MAILBOX_AT, page.as_mut_bytes())?;
        Ok(Answer {
            outcome: outcome(&page),
            ready: page.ready != 0,
            done: page.done,
            kicks: page.kicks,
            ticks: page.ticks,
            bad_frames: page.bad_frames,
            samples: page.samples,
            commands: page.commands,
            random: page.random,
        })
    }

    /// What each of the first rounds took, ticks of the time stamp counter.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn samples(&self) -> Result<Vec<u32>, MemoryError> {
        let count = usize::try_from(self.answer()?.samples).unwrap_or(usize::MAX);
        let mut samples = vec![0_u32; count.min(MOST_SAMPLES)];
        self.memory.read(SAMPLES_AT, samples.as_mut_bytes())?;
        Ok(samples)
    }
}

fn outcome(page: &Page) -> Option<Result<(), Complaint>> {
    let what = match page.answer {
        numbers::ANSWER_WORKING => return None,
        numbers::ANSWER_DONE => return Some(Ok(())),
        numbers::ANSWER_NO_DEVICE => "there is no device of that type",
        numbers::ANSWER_WRONG => "a device did not do as VirtIO says",
        numbers::ANSWER_TIMEOUT => "nothing came for as long as it waits",
        numbers::ANSWER_REFUSED => "a control command was answered otherwise than it should be",
        numbers::ANSWER_MEMORY => "it has no memory left",
        _ => "for a reason that it should not know of",
    };
    Some(Err(Complaint {
        what,
        // The guest may name a file that there is not.
        file: (GUEST_SOURCES.get((page.place >> SOURCE_SHIFT) as usize)).map_or("?", |&file| file),
        line: page.place & ((1 << SOURCE_SHIFT) - 1),
        seen: (page.answer != numbers::ANSWER_TIMEOUT).then_some((page.expected, page.found)),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(page: &Page) -> String {
        let complaint = outcome(page).and_then(Result::err);
        complaint.expect("it gave up").to_string()
    }

    #[test]
    fn complaint_names_file_and_line_and_what_was_seen() {
        let page = Page {
            answer: numbers::ANSWER_WRONG,
            place: 3 << SOURCE_SHIFT | 77,
            expected: 1,
            found: 0x1f,
            ..Page::new_zeroed()
        };
        assert_eq!(
            said(&page),
            "the guest gave up at line 77 of guest/net.c: a device did not do as VirtIO says (expected 0x1, found 0x1f)"
        );
        let timeout = Page {
            answer: numbers::ANSWER_TIMEOUT,
            ..page
        };
        assert_eq!(
            said(&timeout),
            "the guest gave up at line 77 of guest/net.c: nothing came for as long as it waits"
        );
    }

    #[test]
    fn complaint_may_name_a_file_that_there_is_not() {
        let page = Page {
            answer: u32::MAX,
            place: u32::MAX,
            ..Page::new_zeroed()
        };
        assert!(said(&page).contains("line 65535 of guest/?"), "{}", said(&page));
    }
}
