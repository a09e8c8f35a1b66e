//! A VMM that has no descriptors left. A test of its own: the limit is the process's.
#![cfg(target_arch = "x86_64")]

use crate::common;

use common::{LIMIT, task};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tiny_vmm::layout::{DEVICE_BYTES, DEVICES_AT};
use tiny_vmm::machine::{Machine, MachineConfig, MachineError, Notify};
use tiny_vmm::mailbox::Work;
use tiny_vmm::sink::null::Null;

#[test]
fn shortage_when_a_driver_starts_is_told_as_the_hosts() {
    testkit::require!(Kvm);
    let sink = Box::new(Null::new(0, 64));
    let machine = Machine::new(MachineConfig::new(Notify::Exit), &task(Work::Send, 5), sink);
    let machine = machine.expect("a machine");
    for base in [DEVICES_AT, DEVICES_AT + DEVICE_BYTES] {
        let start = || common::start_driver(&machine, base);
        let before = getrlimit(Resource::Nofile);
        let none = Rlimit {
            current: Some(0),
            ..before
        };
        setrlimit(Resource::Nofile, none).expect("lower is allowed");
        let status = start();
        setrlimit(Resource::Nofile, before).expect("as it was");
        assert_eq!(status, 15 | 64, "the driver learns of it");
        let Err(MachineError::Device(said)) = machine.await_answer(LIMIT) else {
            panic!("the host should learn of it");
        };
        assert!(said.contains("ulimit -n"), "{said}");
        // It is over with a reset.
        assert_eq!(start(), 15);
    }
}
