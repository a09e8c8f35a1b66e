//! The guest's work, and its answer, in the [`Mailbox`] that it shares with the host.
//!
//! The guest may write anything there at any time. The host prints these values, and checks those that it uses.

use anyhow::{Result, bail};
use vm_memory::{Bytes as _, GuestAddress};
use zerocopy::{FromZeros as _, IntoBytes as _};

use crate::layout::{self, MAILBOX_AT, MOST_SAMPLES, Mailbox, SAMPLES_AT};
use crate::memory::Memory;

const MAILBOX: GuestAddress = GuestAddress(MAILBOX_AT);
const SAMPLES: GuestAddress = GuestAddress(SAMPLES_AT);

/// What the guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// Notify a queue without adding a buffer, over and over
    Notify = layout::WORK_NOTIFY as isize,
    /// Send frames
    Send = layout::WORK_SEND as isize,
    /// Send a frame, wait until it comes back, check it, over and over
    RoundTrip = layout::WORK_ROUND_TRIP as isize,
    /// Send commands by the control queue, and check the answers
    Control = layout::WORK_CONTROL as isize,
}

/// A task for the guest: this work, `frames` times, with frames of 64 bytes.
#[must_use]
pub fn task(work: Work, frames: u64) -> Mailbox {
    Mailbox {
        work: work as u64,
        frames,
        frames_per_kick: 1,
        frame_bytes: 64,
        pairs: 1,
        patience_ticks: u64::MAX,
        ..Mailbox::default()
    }
}

/// Writes a task, before the guest runs.
///
/// # Errors
/// None: the mailbox is inside memory.
pub fn post(memory: &Memory, task: &Mailbox) -> Result<()> {
    Ok(memory.ram.write_slice(task.as_bytes(), MAILBOX)?)
}

/// Reads the mailbox.
///
/// # Errors
/// None: the mailbox is inside memory.
pub fn read(memory: &Memory) -> Result<Mailbox> {
    let mut mailbox = Mailbox::new_zeroed();
    memory.ram.read_slice(mailbox.as_mut_bytes(), MAILBOX)?;
    Ok(mailbox)
}

/// Durations of single rounds, ticks of the time stamp counter.
///
/// # Errors
/// None: the samples are inside memory.
pub fn samples(memory: &Memory) -> Result<Vec<u32>> {
    let count = read(memory)?.samples.min(MOST_SAMPLES);
    let mut samples = vec![0_u32; count as usize];
    memory.ram.read_slice(samples.as_mut_bytes(), SAMPLES)?;
    Ok(samples)
}

/// Checks the answer of a guest that has ended.
///
/// # Errors
/// It gave up, or received wrong frames.
pub fn check(memory: &Memory, answer: &Mailbox) -> Result<()> {
    let why = match answer.answer {
        layout::ANSWER_DONE if answer.bad_frames == 0 => return Ok(()),
        layout::ANSWER_DONE => bail!("{} of the received frames were not whole", answer.bad_frames),
        layout::ANSWER_WRONG => "the device did not work as VirtIO defines",
        layout::ANSWER_TIMEOUT => "nothing arrived for as long as the guest waits",
        _ => bail!("the guest ended without an answer, after {} rounds", answer.done),
    };
    let mut name = [0; 16];
    // The guest may write any address here.
    let _ = memory.ram.read_slice(&mut name, GuestAddress(answer.file));
    let file = name
        .split(|&byte| byte == 0)
        .next()
        .unwrap_or_default()
        .escape_ascii();
    let &Mailbox {
        line,
        expected,
        found,
        ..
    } = answer;
    bail!(
        "the guest gave up in line {line} of guest/{file}: {why} (expected {expected:#x}, found {found:#x})"
    )
}
