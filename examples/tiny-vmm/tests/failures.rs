//! What goes wrong on the host's side: the sink, and what becomes of a guest then.
#![cfg(target_arch = "x86_64")]

mod common;

use std::os::fd::BorrowedFd;

use common::{LIMIT, MODES, task};
use tiny_vmm::backend::Backend;
use tiny_vmm::layout::DEVICES_AT;
use tiny_vmm::machine::{Machine, MachineConfig, MachineError, Notify};
use tiny_vmm::mailbox::Work;
use tiny_vmm::mmio::F_VERSION_1;
use tiny_vmm::sink::{BATCH, FromGuest, Sink, SinkCounts, SinkError, ToGuest};

/// Its interface goes away after so many frames.
struct Broken {
    left: u32,
}

impl Sink for Broken {
    fn room(&mut self) -> usize {
        BATCH
    }

    fn put(&mut self, _frame: &FromGuest<'_>) {
        self.left = self.left.saturating_sub(1);
    }

    fn flush(&mut self) -> Result<(), SinkError> {
        match self.left {
            0 => Err(xsk::WakeError::InterfaceGone.into()),
            _ => Ok(()),
        }
    }

    fn take(&mut self, _frames: &mut ToGuest) -> Result<(), SinkError> {
        Ok(())
    }

    fn readable(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn counts(&self) -> SinkCounts {
        SinkCounts::default()
    }
}

/// A guest that kicks until the sink has failed, and what the machine says then.
fn failed(notify: Notify, has_backend: bool) -> Machine {
    let sink = Box::new(Broken {
        left: if has_backend { 5_000 } else { 20 },
    });
    let mut machine =
        Machine::new(MachineConfig::new(notify), &task(Work::Kick, 0), sink).expect("a machine");
    machine.run().expect("it runs");
    let backend = has_backend.then(|| {
        testkit::wait::until(LIMIT, || {
            machine.mailbox().answer().is_ok_and(|answer| answer.ready)
        });
        Backend::start(machine.net(), machine.net_notifiers()).expect("a backend")
    });
    let Err(MachineError::Sink(said)) = machine.await_answer(LIMIT) else {
        panic!("{notify:?}: it should say what became of the sink");
    };
    assert!(said.contains("the interface is gone"), "{said}");
    if let Some(backend) = backend {
        backend.stop().expect("it stops");
    }
    machine
}

#[test]
fn sink_that_fails_ends_the_wait_for_the_guest() {
    testkit::require!(Kvm);
    for notify in MODES {
        failed(notify, false);
    }
    failed(Notify::Eventfd, true);
}

/// A register of the network device's.
fn write(machine: &Machine, register: u64, value: u32) {
    machine
        .devices()
        .write(DEVICES_AT + register, &value.to_le_bytes());
}

#[test]
fn device_whose_sink_has_failed_does_not_look_well_after_a_reset() {
    testkit::require!(Kvm);
    let mut machine = failed(Notify::Eventfd, false);
    machine.stop().expect("it stops");
    let status = |machine: &Machine| {
        let mut word = [0; 4];
        machine.devices().read(DEVICES_AT + 0x70, &mut word);
        u32::from_le_bytes(word)
    };
    write(&machine, 0x70, 0);
    assert_eq!(status(&machine), 0);
    write(&machine, 0x70, 3);
    // DriverFeaturesSel, DriverFeatures
    write(&machine, 0x24, 1);
    write(&machine, 0x20, (F_VERSION_1 >> 32) as u32);
    write(&machine, 0x70, 11);
    write(&machine, 0x70, 15);
    assert_eq!(status(&machine), 15 | 64, "it needs a reset at once");
}
