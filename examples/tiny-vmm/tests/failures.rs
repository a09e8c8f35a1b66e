//! What goes wrong on the host's side: the sink, and what becomes of a guest then.
#![cfg(target_arch = "x86_64")]

use crate::common;

use std::time::Duration;

use common::{LIMIT, MODES, task};
use tiny_vmm::backend::{Backend, BackendError};
use tiny_vmm::interrupts;
use tiny_vmm::layout::DEVICES_AT;
use tiny_vmm::machine::{MOST_PAIRS, Machine, MachineConfig, MachineError, Notify};
use tiny_vmm::mailbox::Work;
use tiny_vmm::mmio::F_VERSION_1;
use tiny_vmm::sink::null::Null;
use tiny_vmm::sink::{FromGuest, Sink, SinkError};

/// Its interface goes away after so many frames.
struct Broken {
    left: u32,
}

impl Sink for Broken {
    fn put(&mut self, _frame: &FromGuest<'_>) {
        self.left = self.left.saturating_sub(1);
    }

    fn flush(&mut self) -> Result<(), SinkError> {
        match self.left {
            0 => Err(xsk::WakeError::InterfaceGone.into()),
            _ => Ok(()),
        }
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
        let is_ready = || machine.mailbox().answer().is_ok_and(|answer| answer.ready);
        assert!(testkit::wait::until(LIMIT, is_ready));
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
    common::write_register(machine, DEVICES_AT, register, value);
}

#[test]
fn device_whose_sink_has_failed_does_not_look_well_after_a_reset() {
    testkit::require!(Kvm);
    let mut machine = failed(Notify::Eventfd, false);
    machine.stop().expect("it stops");
    let status = |machine: &Machine| u32::from_le_bytes(common::read_register(machine, DEVICES_AT, 0x70));
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

/// A sink with a bug that shows in a backend's thread.
struct Buggy;

impl Sink for Buggy {
    fn put(&mut self, _frame: &FromGuest<'_>) {
        assert_ne!(std::thread::current().name(), Some("backend"), "the bug");
    }
}

#[test]
fn backend_that_panics_gives_the_port_back_and_says_so() {
    testkit::require!(Kvm);
    for is_reset in [false, true] {
        let mut machine = Machine::new(
            MachineConfig::new(Notify::Eventfd),
            &task(Work::Kick, 0),
            Box::new(Buggy),
        )
        .expect("a machine");
        machine.run().expect("it runs");
        let is_ready = || machine.mailbox().answer().is_ok_and(|answer| answer.ready);
        assert!(testkit::wait::until(LIMIT, is_ready));
        let backend = Backend::start(machine.net(), machine.net_notifiers()).expect("a backend");
        let Err(MachineError::Sink(said)) = machine.await_answer(LIMIT) else {
            panic!("it should say what became of the port");
        };
        assert!(said.contains("panicked"), "{said}");
        if is_reset {
            // The guest takes the queues away, and waits for the port.
            write(&machine, 0x70, 0);
            backend.stop().expect("it has nothing to give back");
        } else {
            assert!(matches!(backend.stop(), Err(BackendError::Panicked)));
        }
        assert!(machine.port_error().is_some());
        machine.stop().expect("it stops");
    }
}

#[test]
fn longest_time_limit_is_none() {
    testkit::require!(Kvm);
    let (machine, _) = common::run(
        MachineConfig::new(Notify::Eventfd),
        &task(Work::Send, 5),
        Box::new(Null::new(0, 64)),
    );
    let answer = machine.await_answer(Duration::MAX).expect("it has ended");
    assert_eq!(answer.outcome, Some(Ok(())));
    let costs = interrupts::measure(5, Duration::MAX).expect("it ends");
    assert!(
        costs.iter().all(|cost| (cost.made, cost.seen) == (5, 5)),
        "{costs:?}"
    );
}

#[test]
fn number_of_pairs_that_no_device_has_is_refused() {
    testkit::require!(Kvm);
    let make = |pairs| {
        let config = MachineConfig {
            pairs,
            ..MachineConfig::new(Notify::Exit)
        };
        Machine::new(config, &task(Work::Send, 5), Box::new(Null::new(0, 64)))
    };
    for pairs in [0, MOST_PAIRS + 1, 0x8000, u16::MAX] {
        let refused = make(pairs).err().expect("it is out of range").to_string();
        assert!(refused.contains(&pairs.to_string()), "{refused}");
    }
}
