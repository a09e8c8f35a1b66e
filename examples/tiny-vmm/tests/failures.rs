//! Faults of the host: what the guest and the user are told.

use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tiny_vmm::layout::{DEVICE_AT, Mailbox};
use tiny_vmm::machine::Notify;
use tiny_vmm::mailbox::Work;
use tiny_vmm::sink::Sink;
use tiny_vmm::sink::null::Null;
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_STATUS;

use crate::common::{self, LIMIT, MODES, begin, machine, read, task, write};

/// A sink whose interface is deleted after some frames.
struct Broken {
    left: u32,
}

impl Sink for Broken {
    fn put(&mut self, _frame: &[u8]) -> bool {
        self.left = self.left.saturating_sub(1);
        true
    }

    fn flush(&mut self) -> anyhow::Result<bool> {
        match self.left {
            0 => Err(xsk::WakeError::InterfaceGone.into()),
            _ => Ok(true),
        }
    }
}

#[test]
fn sink_that_fails_ends_the_wait_for_the_guest() {
    testkit::require!(Kvm);
    for notify in MODES {
        let mut machine = machine(notify, &task(Work::Send, 0), Box::new(Broken { left: 20 }));
        machine.run().expect("it runs");
        let error = machine.await_answer(LIMIT).expect_err("its sink has failed");
        let text = format!("{error:#}");
        assert_eq!(
            text, "no frames move any more: the interface is gone",
            "{notify:?}"
        );
        machine.stop();
        assert_eq!(read(&machine, VIRTIO_MMIO_STATUS), 15 | 64, "{notify:?}");
    }
}

#[test]
fn guest_that_does_not_end_is_stopped() {
    testkit::require!(Kvm);
    let mut machine = machine(Notify::Eventfd, &task(Work::Send, 0), Box::new(Null));
    machine.run().expect("it runs");
    let error = machine.await_answer(Duration::from_millis(50));
    let text = format!("{:#}", error.expect_err("it sends on"));
    assert!(text.contains("did not end within 50ms"), "{text}");
    machine.stop();
}

#[test]
fn guest_names_the_line_in_which_it_gave_up() {
    testkit::require!(Kvm);
    // With this patience it gives up at once.
    let waits = Mailbox {
        patience_ticks: 0,
        ..task(Work::RoundTrip, 1)
    };
    let mut machine = machine(Notify::Eventfd, &waits, Box::new(Null));
    machine.run().expect("it runs");
    let error = machine.await_answer(LIMIT).expect_err("no frame comes back");
    let text = error.to_string();
    assert!(text.contains(" of guest/main.c: nothing arrived"), "{text}");
}

/// The limit is the process's: nextest runs each test in its own.
#[test]
fn shortage_of_descriptors_when_a_driver_starts_is_the_hosts_fault() {
    testkit::require!(Kvm);
    let machine = machine(Notify::Exit, &task(Work::Send, 5), Box::new(Null));
    let start = || {
        begin(&machine, 1 << 32);
        common::set_up(&machine, 0, 16, 0x10_0000);
        write(&machine, VIRTIO_MMIO_STATUS, 15);
        read(&machine, VIRTIO_MMIO_STATUS)
    };
    let before = getrlimit(Resource::Nofile);
    let none = Rlimit {
        // Those that are open already are more.
        current: Some(4),
        ..before
    };
    setrlimit(Resource::Nofile, none).expect("lower is allowed");
    let status = start();
    setrlimit(Resource::Nofile, before).expect("as it was");
    assert_eq!(status, 15 | 64, "registers at {DEVICE_AT:#x}");
    let error = machine.await_answer(LIMIT).expect_err("the host is told");
    assert!(error.to_string().contains("Too many open files"), "{error:#}");
    // A reset ends it.
    assert_eq!(start(), 15);
}
