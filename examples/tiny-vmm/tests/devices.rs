//! The control queue, the second device, and interrupts.
#![cfg(target_arch = "x86_64")]

mod common;

use common::{LIMIT, MODES, finished, run, task};
use testkit::wait::until;
use tiny_vmm::interrupts;
use tiny_vmm::machine::{Machine, MachineConfig, Notify};
use tiny_vmm::mailbox::{Task, Work};
use tiny_vmm::sink::null::Null;

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
                ..task(Work::Control, 5)
            };
            // 14 of receive modes, 3 of VLANs, 1 each of address, hash report, and one that nobody knows; 6 of pairs.
            let each = if pairs > 1 { 26 } else { 20 };
            let (_machine, answer) = run(config, &commands, no_frames());
            assert_eq!(answer.done, 5 * each, "{config:?} {packed}");
        }
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
    for notify in MODES {
        for packed in [false, true] {
            let rounds = Task {
                packed,
                ..task(Work::Entropy, 20_000)
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
            assert_eq!(answer.done, 20_000);
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
