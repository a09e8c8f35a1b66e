//! The control queue, the second device, and interrupts.
#![cfg(target_arch = "x86_64")]

use crate::common;

use common::{LIMIT, MODES, finished, run, task};
use testkit::wait::until;
use tiny_vmm::interrupts;
use tiny_vmm::layout::DEVICES_AT;
use tiny_vmm::machine::{Machine, MachineConfig, MachineError, Notify};
use tiny_vmm::mailbox::{Task, Work};
use tiny_vmm::sink::null::{Echo, Null};

fn no_frames() -> Box<Null> {
    Box::new(Null::new(0, 64))
}

#[test]
fn each_command_of_the_control_queue_is_answered_as_it_should_be() {
    testkit::require!(Kvm);
    for notify in MODES {
        for (pairs, packed) in [(1, false), (4, false), (4, true)] {
            let config = MachineConfig {
                pairs,
                ..MachineConfig::new(notify)
            };
            let commands = Task {
                packed,
                multiqueue: pairs > 1,
                hash_report: pairs == 1,
                echoed: true,
                ..task(Work::Control, 5)
            };
            let (machine, answer) = run(config, &commands, Box::new(Echo::default()));
            let mut each = [[0; 8]; 8];
            // Receive modes on and off, MAC table and address, VLANs, hash report, and one of an unknown class.
            each[0][..6].fill(2);
            each[1][..2].copy_from_slice(&[2, 1]);
            each[2][..2].copy_from_slice(&[2, 1]);
            each[4][2] = 1;
            each[7][0] = 1;
            if pairs > 1 {
                each[4][..2].copy_from_slice(&[4, 2]);
            }
            let all = each.map(|class| class.map(|number| 5 * number));
            assert_eq!(answer.commands, all, "{config:?} {packed}");
            // One after another by each pair, and back.
            let counts = machine.counts();
            assert_eq!(
                (counts.from_guest_frames, counts.to_guest_frames),
                (8, 8),
                "{config:?} {packed}"
            );
        }
    }
}

#[test]
fn what_the_driver_said_by_the_control_queue_goes_with_a_vm_that_moves() {
    testkit::require!(Kvm);
    let said = |machine: &Machine| {
        machine
            .devices()
            .net
            .transport()
            .device()
            .device
            .control_commands()
    };
    for pairs in [1, 4] {
        let config = MachineConfig {
            pairs,
            ..MachineConfig::new(Notify::Exit)
        };
        let commands = Task {
            multiqueue: pairs > 1,
            hash_report: pairs == 1,
            ..task(Work::Control, 1)
        };
        let untouched = Machine::new(config, &commands, no_frames()).expect("a machine");
        let (machine, _) = run(config, &commands, no_frames());
        let before = said(&machine);
        assert_ne!(before, said(&untouched));
        let saved = machine.save().expect("it can be saved");
        let machine = Machine::restored(saved, no_frames()).expect("another machine");
        assert_eq!(said(&machine), before);
    }
}

/// A driver's writes, without a guest that runs.
fn write(machine: &Machine, register: u64, value: u32) {
    common::write_register(machine, DEVICES_AT, register, value);
}

fn read<const BYTES: usize>(machine: &Machine, register: u64) -> [u8; BYTES] {
    common::read_register(machine, DEVICES_AT, register)
}

#[test]
fn guest_that_moved_is_asked_to_announce_itself() {
    testkit::require!(Kvm);
    for can in [false, true] {
        let config = MachineConfig::new(Notify::Exit);
        let machine = Machine::new(config, &task(Work::Kick, 1), no_frames()).expect("a machine");
        // VIRTIO_F_VERSION_1, and VIRTIO_NET_F_STATUS, _CTRL_VQ and _GUEST_ANNOUNCE.
        let low = if can { 1 << 16 | 1 << 17 | 1 << 21 } else { 0 };
        for (status, half, features) in [(3, 0, low), (3, 1, 1), (11, 0, 0), (15, 0, 0)] {
            write(&machine, 0x70, status);
            write(&machine, 0x24, half);
            write(&machine, 0x20, features);
        }
        assert_eq!(read(&machine, 0x70), [15, 0, 0, 0]);
        let saved = machine.save().expect("it can be saved");
        let machine = Machine::restored(saved, no_frames()).expect("another machine");
        // VIRTIO_NET_S_ANNOUNCE beside _LINK_UP, and the configuration change in InterruptStatus.
        assert_eq!(read(&machine, 0x106), [if can { 3 } else { 1 }, 0]);
        assert_eq!(read::<4>(&machine, 0x60)[0] & 2 != 0, can);
    }
}

#[test]
fn frames_that_do_not_fit_the_guests_buffers_are_refused() {
    testkit::require!(Kvm);
    for (frame_bytes, is_refused) in [(21, true), (22, false), (2028, false), (2029, true)] {
        let sends = Task {
            frame_bytes,
            ..task(Work::Send, 1)
        };
        let made = Machine::new(MachineConfig::new(Notify::Exit), &sends, no_frames());
        assert_eq!(
            matches!(made, Err(MachineError::Task(_))),
            is_refused,
            "{frame_bytes}"
        );
    }
}

#[test]
fn entropy_device_gives_random_bytes() {
    testkit::require!(Kvm);
    for notify in MODES {
        for packed in [false, true] {
            let rounds = Task {
                packed,
                ..task(Work::Entropy, 200)
            };
            let (machine, answer) = run(MachineConfig::new(notify), &rounds, no_frames());
            assert_eq!(answer.done, 200);
            // Of 102,400 bits half are ones, and more or less than that by 0.16 % of all: twelve times that is never.
            let [bits, ones, repeated] = answer.random;
            assert_eq!((bits, repeated), (200 * 64 * 8, 0), "{notify:?} {packed}");
            assert!(ones.abs_diff(bits / 2) < bits / 50, "{ones} ones of {bits} bits");
            let status = machine.status();
            let entropy = status.last().expect("its queue is the last");
            let expected = match notify {
                Notify::Exit => (200, 0),
                Notify::Eventfd | Notify::Poll => (0, 200),
            };
            assert_eq!(entropy.from_exits, expected.0);
            // Two may come as one, where a thread is slow to wake.
            assert!(entropy.from_eventfd <= expected.1, "{entropy:?}");
        }
    }
}

#[test]
fn guest_that_takes_random_bytes_goes_on_in_another_vm() {
    testkit::require!(Kvm);
    let times = testkit::soak::count(5_000, 20_000);
    for notify in MODES {
        for packed in [false, true] {
            let rounds = Task {
                packed,
                ..task(Work::Entropy, times as u64)
            };
            let config = MachineConfig::new(notify);
            let mut machine = Machine::new(config, &rounds, no_frames()).expect("a machine");
            machine.run().expect("it runs");
            let begun = || machine.mailbox().answer().expect("a mailbox").ready;
            assert!(until(LIMIT, begun));
            for _ in 0..5 {
                let saved = machine.save().expect("it can be saved");
                machine = Machine::restored(saved, no_frames()).expect("another machine");
                machine.run().expect("it goes on");
            }
            let answer = finished(&machine, &format!("{config:?} {packed}"));
            assert_eq!(answer.done, times as u64);
        }
    }
}

#[test]
fn interrupts_are_seen_each_once() {
    testkit::require!(Kvm);
    for cost in interrupts::measure(500, LIMIT).expect("a guest that takes them") {
        assert_eq!((cost.made, cost.seen), (500, 500), "{cost:?}");
    }
}
