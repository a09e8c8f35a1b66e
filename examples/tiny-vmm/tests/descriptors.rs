//! A VMM that has no descriptors left. A test of its own: the limit is the process's.
#![cfg(target_arch = "x86_64")]

mod common;

use common::{LIMIT, task};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tiny_vmm::layout::{DEVICE_BYTES, DEVICES_AT};
use tiny_vmm::machine::{Machine, MachineConfig, MachineError, Notify};
use tiny_vmm::mailbox::Work;
use tiny_vmm::mmio::F_VERSION_1;
use tiny_vmm::sink::null::Null;

#[test]
fn shortage_when_a_driver_starts_is_told_as_the_hosts() {
    testkit::require!(Kvm);
    let sink = Box::new(Null::new(0, 64));
    let machine = Machine::new(MachineConfig::new(Notify::Exit), &task(Work::Send, 5), sink);
    let machine = machine.expect("a machine");
    for base in [DEVICES_AT, DEVICES_AT + DEVICE_BYTES] {
        let write =
            |register: u64, value: u32| machine.devices().write(base + register, &value.to_le_bytes());
        let start = || {
            // Status up to DRIVER_OK; features; queue 0 with its rings.
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
                write(register, value);
            }
            let mut status = [0; 4];
            machine.devices().read(base + 0x70, &mut status);
            u32::from_le_bytes(status)
        };
        let before = getrlimit(Resource::Nofile);
        let none = Rlimit {
            current: Some(0),
            ..before.clone()
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
