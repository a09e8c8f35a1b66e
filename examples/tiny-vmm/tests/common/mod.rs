//! Parts of the tests: a sink that checks each frame, machines, registers.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tiny_vmm::layout::{DEVICE_AT, Mailbox, NUMBER_AT, PATTERN_AT};
use tiny_vmm::machine::{Config, Machine, Notify};
use tiny_vmm::mailbox::{self, Work};
use tiny_vmm::sink::Sink;
use virtio_bindings::virtio_mmio::*;
use vm_device::DeviceMmio as _;
use vm_device::bus::MmioAddress;

/// Only ends what hangs.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
/// Below [`LIMIT`], so that the guest can tell where it waited: ticks of a counter of at most 5 GHz.
const PATIENCE_TICKS: u64 = 20 * 5_000_000_000;

pub(crate) const MODES: [Notify; 3] = [Notify::Exit, Notify::Eventfd, Notify::Poll];

/// A task whose guest does not wait forever.
pub(crate) fn task(work: Work, frames: u64) -> Mailbox {
    Mailbox {
        patience_ticks: PATIENCE_TICKS,
        ..mailbox::task(work, frames)
    }
}

/// A machine that does not run yet.
pub(crate) fn machine(notify: Notify, task: &Mailbox, sink: Box<dyn Sink>) -> Machine {
    let config = Config {
        notify,
        vcpu_cpu: None,
        worker_cpu: None,
    };
    Machine::new(config, task, sink).expect("a machine")
}

/// Runs a guest to its end.
pub(crate) fn run(notify: Notify, task: &Mailbox, sink: Box<dyn Sink>) -> (Machine, Mailbox) {
    let mut machine = machine(notify, task, sink);
    machine.run().expect("it runs");
    let answer = finished(&machine);
    (machine, answer)
}

/// Waits for a guest's end.
pub(crate) fn finished(machine: &Machine) -> Mailbox {
    let answer = machine.await_answer(LIMIT);
    answer.unwrap_or_else(|error| panic!("{error:#}: {:?}", mailbox::read(&machine.memory)))
}

/// The number of a frame that the guest has made, if it is whole and has this length.
pub(crate) fn number_of(frame: &[u8], len: usize) -> Option<u64> {
    let (number, pattern) = (NUMBER_AT as usize, PATTERN_AT as usize);
    let is_whole = frame.len() == len
        && frame[..number] == [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1, 0x88, 0xb5]
        && (pattern..len).all(|at| frame[at] == (at * 7 + 1) as u8);
    let number = frame.get(number..pattern)?.try_into().ok()?;
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

/// A sink that checks each frame of the guest.
pub(crate) struct Recorder {
    seen: Arc<Mutex<Seen>>,
    frame_bytes: usize,
}

impl Recorder {
    /// For frames of that length.
    pub(crate) fn new(frame_bytes: u64) -> (Box<Self>, Arc<Mutex<Seen>>) {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let recorder = Self {
            seen: Arc::clone(&seen),
            frame_bytes: frame_bytes as usize,
        };
        (Box::new(recorder), seen)
    }
}

impl Sink for Recorder {
    fn put(&mut self, frame: &[u8]) -> bool {
        let mut seen = self.seen.lock().expect("no panic");
        if number_of(frame, self.frame_bytes) == Some(seen.frames) {
            seen.frames += 1;
        } else {
            seen.wrong += 1;
        }
        let name = std::thread::current().name().unwrap_or("?").to_owned();
        seen.threads.insert(name);
        true
    }
}

/// Writes a register of the device, as the guest does.
pub(crate) fn write(machine: &Machine, register: u32, value: u32) {
    let base = MmioAddress(DEVICE_AT);
    machine
        .mmio
        .mmio_write(base, register.into(), &value.to_le_bytes());
}

/// Reads one.
pub(crate) fn read(machine: &Machine, register: u32) -> u32 {
    let mut word = [0xaa; 4];
    machine
        .mmio
        .mmio_read(MmioAddress(DEVICE_AT), register.into(), &mut word);
    u32::from_le_bytes(word)
}

/// Does what a driver does up to FEATURES_OK.
pub(crate) fn begin(machine: &Machine, features: u64) {
    for status in [0, 1, 3] {
        write(machine, VIRTIO_MMIO_STATUS, status);
    }
    for half in [0, 1] {
        write(machine, VIRTIO_MMIO_DRIVER_FEATURES_SEL, half);
        write(
            machine,
            VIRTIO_MMIO_DRIVER_FEATURES,
            (features >> (32 * half)) as u32,
        );
    }
    write(machine, VIRTIO_MMIO_STATUS, 11);
}

/// Sets a queue up, with its rings from `at` on.
pub(crate) fn set_up(machine: &Machine, queue: u32, entries: u32, at: u64) {
    write(machine, VIRTIO_MMIO_QUEUE_SEL, queue);
    write(machine, VIRTIO_MMIO_QUEUE_NUM, entries);
    for part in 0..3 {
        let address = at.wrapping_add(u64::from(part) * 0x2000);
        write(machine, VIRTIO_MMIO_QUEUE_DESC_LOW + 0x10 * part, address as u32);
        write(
            machine,
            VIRTIO_MMIO_QUEUE_DESC_HIGH + 0x10 * part,
            (address >> 32) as u32,
        );
    }
    write(machine, VIRTIO_MMIO_QUEUE_READY, 1);
}
