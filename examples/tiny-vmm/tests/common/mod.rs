//! What the tests of the machine stand on: a sink that looks at each frame, and a machine with it.
#![allow(dead_code, reason = "each test file uses a part")]

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tiny_vmm::layout::{NUMBER_AT, PATTERN_AT};
use tiny_vmm::machine::{Machine, MachineConfig, Notify};
use tiny_vmm::mailbox::{Answer, Task, Work};
use tiny_vmm::mmio::F_VERSION_1;
use tiny_vmm::sink::{FromGuest, LONGEST_FRAME, Sink};

/// Only ends what hangs.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
/// The guest's patience, below [`LIMIT`], so that it can say where it waited: ticks of a counter of at most 5 GHz.
const PATIENCE_TICKS: u64 = 20 * 5_000_000_000;

pub(crate) const MODES: [Notify; 3] = [Notify::Exit, Notify::Eventfd, Notify::Poll];

/// A task whose guest does not wait for ever.
pub(crate) fn task(work: Work, frames: u64) -> Task {
    Task {
        patience_ticks: PATIENCE_TICKS,
        ..Task::new(work, frames)
    }
}

/// The number of a frame that the guest has made, if it is whole and so long.
pub(crate) fn number_of(frame: &[u8], len: usize) -> Option<u64> {
    let is_whole = frame.len() == len
        && frame[..6] == [0xff; 6]
        && frame[6..12] == [2, 0, 0, 0, 0, 1]
        && frame[12..14] == [0x88, 0xb5]
        && (PATTERN_AT..len).all(|at| frame[at] == (at * 7 + 1) as u8);
    let number = frame.get(NUMBER_AT..PATTERN_AT)?.try_into().ok()?;
    is_whole.then(|| u64::from_le_bytes(number))
}

/// What a [`Recorder`] saw.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Frames, each whole and the one after that before it.
    pub(crate) frames: u64,
    /// Others.
    pub(crate) wrong: u64,
    /// Names of the threads that brought them.
    pub(crate) threads: BTreeSet<String>,
}

/// A sink that looks at each frame of the guest's.
pub(crate) struct Recorder {
    seen: Arc<Mutex<Seen>>,
    frame_bytes: usize,
}

impl Recorder {
    /// For frames of that length.
    pub(crate) fn new(frame_bytes: u32) -> (Box<Self>, Arc<Mutex<Seen>>) {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let recorder = Self {
            seen: Arc::clone(&seen),
            frame_bytes: frame_bytes as usize,
        };
        (Box::new(recorder), seen)
    }

    /// Goes on where another one was.
    pub(crate) fn after(seen: &Arc<Mutex<Seen>>, frame_bytes: u32) -> Box<Self> {
        Box::new(Self {
            seen: Arc::clone(seen),
            frame_bytes: frame_bytes as usize,
        })
    }
}

impl Sink for Recorder {
    fn put(&mut self, frame: &FromGuest<'_>) {
        let mut bytes = [0; LONGEST_FRAME];
        let len = frame.copy_into(&mut bytes);
        let mut seen = self.seen.lock().expect("nobody panicked with it");
        if number_of(&bytes[..len], self.frame_bytes) == Some(seen.frames) {
            seen.frames += 1;
        } else {
            seen.wrong += 1;
        }
        let name = std::thread::current().name().unwrap_or("?").to_owned();
        seen.threads.insert(name);
    }
}

/// Runs a guest to its end; what it says, which is that all went well.
pub(crate) fn run(config: MachineConfig, task: &Task, sink: Box<dyn Sink>) -> (Machine, Answer) {
    let mut machine = Machine::new(config, task, sink).expect("a machine");
    machine.run().expect("it runs");
    let answer = finished(&machine, &format!("{config:?} {task:?}"));
    (machine, answer)
}

/// Waits for a guest's end.
pub(crate) fn finished(machine: &Machine, what: &str) -> Answer {
    let answer = machine.await_answer(LIMIT);
    let answer = answer.unwrap_or_else(|error| panic!("{what}: {error}, {:?}", machine.mailbox().answer()));
    assert_eq!(answer.outcome, Some(Ok(())), "{what}");
    assert_eq!(answer.bad_frames, 0, "{what}");
    answer
}

/// Writes a register of the device there.
pub(crate) fn write_register(machine: &Machine, base: u64, register: u64, value: u32) {
    machine.devices().write(base + register, &value.to_le_bytes());
}

/// Reads one.
pub(crate) fn read_register<const BYTES: usize>(machine: &Machine, base: u64, register: u64) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    machine.devices().read(base + register, &mut bytes);
    bytes
}

/// Does at the registers of the device there what a driver does, up to DRIVER_OK with one queue; its status then.
pub(crate) fn start_driver(machine: &Machine, base: u64) -> u32 {
    // Status up to FEATURES_OK; QueueSel, QueueNum, rings, QueueReady; DRIVER_OK (VirtIO 1.3, 4.2.2).
    for (register, value) in [
        (0x70, 0),
        (0x70, 3),
        (0x24, 1),
        (0x20, (F_VERSION_1 >> 32) as u32),
        (0x70, 11),
        (0x30, 0),
        (0x38, 16),
        (0x80, 0x10_0000),
        (0x90, 0x10_2000),
        (0xa0, 0x10_4000),
        (0x44, 1),
        (0x70, 15),
    ] {
        write_register(machine, base, register, value);
    }
    u32::from_le_bytes(read_register(machine, base, 0x70))
}
