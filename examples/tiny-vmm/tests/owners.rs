//! A guest that kicks without pause, while its queues change hands: no kick is lost, none is served by two.
//!
//! The guest puts a frame into the ring for each kick, and after some kicks waits until the device has them all. A kick
//! that is lost stops it there, and it says so. A frame that is served twice, or by two at once, comes out of turn.
#![cfg(target_arch = "x86_64")]

use crate::common;

use std::sync::{Arc, Mutex};

use common::{LIMIT, Recorder, Seen, finished, run, task};
use notifier::notifiers::{By, DeviceEvent, QueueEvent};
use notifier::probe::Room;
use notifier::state::State;
use testkit::soak;
use testkit::wait::until;
use tiny_vmm::backend::Backend;
use tiny_vmm::layout::DEVICES_AT;
use tiny_vmm::machine::{Machine, MachineConfig, MachineError, Notify};
use tiny_vmm::mailbox::{Task, Work};
use tiny_vmm::mmio;

/// How often queues change hands in a soak.
const SWITCHES: usize = 1_000;
const FRAME_BYTES: u32 = 64;

/// How often queues change hands: over packed rings less often, as the kicks are the same.
fn switches(packed: bool) -> usize {
    soak::count(if packed { 100 } else { 250 }, SWITCHES)
}

/// A guest that kicks, over split rings, and its frames' recorder.
fn kicking(notify: Notify, frames_per_kick: u32) -> (Machine, Arc<Mutex<Seen>>) {
    kicking_over(notify, frames_per_kick, false)
}

fn kicking_over(notify: Notify, frames_per_kick: u32, packed: bool) -> (Machine, Arc<Mutex<Seen>>) {
    let kicks = Task {
        packed,
        frames_per_kick,
        frame_bytes: FRAME_BYTES,
        // Until it is told to stop.
        ..task(Work::Kick, 0)
    };
    let (sink, seen) = Recorder::new(FRAME_BYTES);
    let mut machine = Machine::new(MachineConfig::new(notify), &kicks, sink).expect("a machine");
    machine.run().expect("it runs");
    await_kicks(&machine, 1);
    (machine, seen)
}

/// Until so many more frames went through.
fn await_kicks(machine: &Machine, more: u64) {
    let done = || machine.mailbox().answer().expect("a mailbox").done;
    let wanted = done() + more;
    assert!(
        until(LIMIT, || done() >= wanted),
        "{:?}",
        machine.mailbox().answer()
    );
}

/// Tells the guest to stop; all its frames came, each once and in turn.
fn end(machine: &Machine, seen: &Mutex<Seen>) {
    machine.mailbox().stop().expect("a mailbox");
    let answer = finished(machine, "kicks");
    let seen = seen.lock().expect("no panic");
    assert_eq!((seen.frames, seen.wrong), (answer.done, 0));
    assert!(answer.kicks >= answer.done);
}

/// Both queues of the first pair are in that state.
fn are_both(machine: &Machine, state: State) -> bool {
    [0, 1]
        .iter()
        .all(|&queue| machine.net_notifiers().state(queue) == Some(state))
}

fn backends_come_and_go(notify: Notify, frames_per_kick: u32, packed: bool) {
    testkit::require!(Kvm);
    let (machine, seen) = kicking_over(notify, frames_per_kick, packed);
    for switch in 0..switches(packed) {
        let backend = Backend::start(machine.net(), machine.net_notifiers()).expect("a backend");
        assert!(are_both(&machine, State::OffLimits));
        if switch % 10 == 0 {
            // Others are stopped before they have seen a kick.
            await_kicks(&machine, 2 * u64::from(frames_per_kick));
        }
        backend.stop().expect("it stops");
    }
    await_kicks(&machine, 10);
    end(&machine, &seen);
    assert!(seen.lock().expect("no panic").threads.contains("backend"));
}

#[test]
fn no_kick_is_lost_while_backends_come_and_go() {
    backends_come_and_go(Notify::Eventfd, 1, false);
}

#[test]
fn no_kick_for_many_frames_is_lost_while_backends_come_and_go() {
    backends_come_and_go(Notify::Eventfd, 64, false);
}

#[test]
fn no_exit_is_lost_while_backends_come_and_go() {
    backends_come_and_go(Notify::Exit, 1, false);
}

#[test]
fn no_kick_of_packed_rings_is_lost_while_backends_come_and_go() {
    backends_come_and_go(Notify::Eventfd, 1, true);
    backends_come_and_go(Notify::Eventfd, 64, true);
    backends_come_and_go(Notify::Exit, 1, true);
}

#[test]
fn backend_alone_serves_while_it_has_the_queues() {
    testkit::require!(Kvm);
    for (notify, packed) in common::MODES
        .iter()
        .flat_map(|&notify| [(notify, false), (notify, true)])
    {
        let (machine, seen) = kicking_over(notify, 1, packed);
        let backend = Backend::start(machine.net(), machine.net_notifiers()).expect("a backend");
        await_kicks(&machine, 1);
        seen.lock().expect("no panic").threads.clear();
        await_kicks(&machine, 200);
        let threads: Vec<_> = seen.lock().expect("no panic").threads.iter().cloned().collect();
        assert_eq!(threads, ["backend"], "{notify:?} {packed}");
        backend.stop().expect("it stops");
        end(&machine, &seen);
    }
}

#[test]
fn second_backend_is_refused() {
    testkit::require!(Kvm);
    let (machine, seen) = kicking(Notify::Eventfd, 1);
    let backend = Backend::start(machine.net(), machine.net_notifiers()).expect("a backend");
    assert!(Backend::start(machine.net(), machine.net_notifiers()).is_err());
    await_kicks(&machine, 10);
    backend.stop().expect("it stops");
    end(&machine, &seen);
}

#[test]
fn eventfds_are_taken_away_and_given_back_while_the_guest_kicks() {
    testkit::require!(Kvm);
    for (frames_per_kick, packed) in [(1, false), (1, true), (64, true)] {
        let (machine, seen) = kicking_over(Notify::Eventfd, frames_per_kick, packed);
        let notifiers = machine.net_notifiers();
        for _ in 0..switches(packed) {
            // As if it stopped: the vCPU goes on to kick, now by exits, for nobody.
            notifiers.event(DeviceEvent::VmStop).expect("never refused");
            assert!(are_both(&machine, State::Deassigned));
            notifiers.event(DeviceEvent::VmRun).expect("never refused");
            assert!(are_both(&machine, State::Assigned));
        }
        await_kicks(&machine, 10);
        end(&machine, &seen);
    }
}

#[test]
fn no_kick_is_lost_while_a_queue_is_disabled_and_enabled() {
    testkit::require!(Kvm);
    for (notify, packed, enabled) in [
        (Notify::Eventfd, false, State::Assigned),
        (Notify::Eventfd, true, State::Assigned),
        (Notify::Exit, false, State::Deassigned),
        (Notify::Exit, true, State::Deassigned),
    ] {
        let (machine, seen) = kicking_over(notify, 1, packed);
        let notifiers = machine.net_notifiers();
        for _ in 0..switches(packed) {
            // As a driver does with QueueReady. The rings stay where they are: only whose kicks they are is tested.
            for (event, state) in [
                (QueueEvent::QueueReset, State::Deassigned),
                (QueueEvent::QueueEnable, enabled),
            ] {
                notifiers.queue_event(1, event).expect("never refused");
                assert_eq!(notifiers.state(1), Some(state), "{notify:?} {event:?}");
            }
        }
        await_kicks(&machine, 10);
        end(&machine, &seen);
    }
}

#[test]
fn guest_goes_on_after_each_stop() {
    testkit::require!(Kvm);
    for notify in common::MODES {
        let (mut machine, seen) = kicking(notify, 4);
        for _ in 0..50 {
            machine.stop().expect("it stops");
            let before = machine.mailbox().answer().expect("a mailbox");
            let frames = seen.lock().expect("no panic").frames;
            std::thread::sleep(std::time::Duration::from_millis(2));
            assert_eq!(
                machine.mailbox().answer().expect("a mailbox"),
                before,
                "it stands"
            );
            assert_eq!(seen.lock().expect("no panic").frames, frames, "nobody serves it");
            machine.run().expect("it goes on");
            await_kicks(&machine, 1);
        }
        end(&machine, &seen);
    }
}

#[test]
fn saved_guest_goes_on_in_another_vm() {
    testkit::require!(Kvm);
    for notify in common::MODES {
        for packed in [false, true] {
            let kicks = Task {
                packed,
                frames_per_kick: 16,
                frame_bytes: FRAME_BYTES,
                ..task(Work::Kick, 0)
            };
            let (sink, seen) = Recorder::new(FRAME_BYTES);
            let mut machine = Machine::new(MachineConfig::new(notify), &kicks, sink).expect("a machine");
            machine.run().expect("it runs");
            for _ in 0..10 {
                await_kicks(&machine, 1);
                let saved = machine.save().expect("it can be saved");
                let sink = Recorder::after(&seen, FRAME_BYTES);
                machine = Machine::restored(saved, sink).expect("another machine");
                machine.run().expect("it goes on");
            }
            await_kicks(&machine, 1);
            end(&machine, &seen);
        }
    }
}

#[test]
fn queues_without_an_eventfd_are_served_by_exits() {
    testkit::require!(Kvm);
    for most in 0..3 {
        let config = MachineConfig {
            most_ioeventfds: Some(most),
            ..MachineConfig::new(Notify::Eventfd)
        };
        let sends = Task {
            frames_per_kick: 8,
            frame_bytes: FRAME_BYTES,
            ..task(Work::Send, 2_000)
        };
        let (sink, seen) = Recorder::new(FRAME_BYTES);
        let (machine, _) = run(config, &sends, sink);
        let seen = seen.lock().expect("no panic");
        assert_eq!((seen.frames, seen.wrong), (2_000, 0));
        // The receive queue is bound first, then the transmit queue.
        let status = machine.status();
        let bound: Vec<_> = status
            .iter()
            .take(2)
            .map(|queue| queue.by == By::Eventfd)
            .collect();
        assert_eq!(bound, [most > 0, most > 1]);
        assert_eq!(machine.ioeventfd_room().expect("a probe"), Room::Few(most));
        let said = status[1].unbound.as_ref().map(ToString::to_string);
        assert_eq!(
            said.is_some_and(|said| said.contains("notified by exits")),
            most < 2
        );
        // And it is not forgotten when the guest has reset the device.
        write_status(&machine, 0);
        let unbound: Vec<_> = machine.unbound().iter().map(|error| error.queue).collect();
        let expected: Vec<_> = [0, 1].into_iter().skip(most).collect();
        assert_eq!(unbound, expected);
    }
}

/// DRIVER_OK and what goes before it; 0 resets (VirtIO 1.3, 2.1).
fn write_status(machine: &Machine, status: u32) {
    common::write_register(machine, DEVICES_AT, 0x70, status);
}

/// The device goes on with that guest after a reset of which the guest knows nothing: with its rings, where they stood.
fn set_up_again(machine: &Machine, saved: &mmio::Saved) {
    assert!(machine.devices().net.transport().restore(saved));
    let notifiers = machine.net_notifiers();
    for (at, queue) in (0..).zip(saved.queues()) {
        if queue.ready {
            let enabled = notifiers.queue_event(at, QueueEvent::QueueEnable);
            enabled.expect("never refused");
        }
    }
    notifiers.event(DeviceEvent::DriverOk).expect("never refused");
}

#[test]
fn reset_takes_the_queues_out_of_a_backends_hands() {
    testkit::require!(Kvm);
    let (mut machine, seen) = kicking(Notify::Eventfd, 1);
    for _ in 0..soak::count(20, SWITCHES) {
        let backend = Backend::start(machine.net(), machine.net_notifiers()).expect("a backend");
        await_kicks(&machine, 2);
        let saved = machine.devices().net.transport().save();
        // As the guest would, on another vCPU.
        write_status(&machine, 0);
        assert!(are_both(&machine, State::Deassigned));
        machine.stop().expect("no backend has a queue");
        let before = seen.lock().expect("no panic").frames;
        set_up_again(&machine, &saved);
        machine.run().expect("it goes on");
        assert!(are_both(&machine, State::Assigned));
        await_kicks(&machine, 2);
        assert!(seen.lock().expect("no panic").frames > before);
        // What it gives back is not its own any more: another one's, here.
        let next = Backend::start(machine.net(), machine.net_notifiers()).expect("another backend");
        backend.stop().expect("it has nothing to give back");
        assert!(are_both(&machine, State::OffLimits));
        await_kicks(&machine, 2);
        next.stop().expect("it stops");
    }
    end(&machine, &seen);
}

#[test]
fn reset_of_one_queue_takes_all_of_a_backends_queues() {
    testkit::require!(Kvm);
    let (machine, _seen) = kicking(Notify::Eventfd, 1);
    let backend = Backend::start(machine.net(), machine.net_notifiers()).expect("a backend");
    await_kicks(&machine, 2);
    for (register, value) in [(0x30, 0), (0x44, 0)] {
        // QueueSel, QueueReady
        common::write_register(&machine, DEVICES_AT, register, value);
    }
    let states = [0, 1].map(|queue| machine.net_notifiers().state(queue));
    assert_eq!(states, [Some(State::Deassigned), Some(State::Assigned)]);
    backend.stop().expect("it has nothing to give back");
    let again = Backend::start(machine.net(), machine.net_notifiers());
    assert!(again.is_err(), "a queue is not set up");
    let states = [0, 1].map(|queue| machine.net_notifiers().state(queue));
    assert_eq!(states, [Some(State::Deassigned), Some(State::Assigned)]);
}

#[test]
fn backends_that_start_while_the_guest_resets_have_all_or_nothing() {
    testkit::require!(Kvm);
    let (mut machine, seen) = kicking(Notify::Eventfd, 1);
    let mut started = 0;
    for round in 0..soak::count(60, SWITCHES) {
        let saved = machine.devices().net.transport().save();
        let backend = std::thread::scope(|scope| {
            let starts = scope.spawn(|| Backend::start(machine.net(), machine.net_notifiers()));
            // Before, at and after each step of it.
            std::thread::sleep(std::time::Duration::from_micros(20 * (round as u64 % 30)));
            write_status(&machine, 0);
            starts.join().expect("no panic")
        });
        started += u32::from(backend.is_ok());
        assert!(are_both(&machine, State::Deassigned));
        machine.stop().expect("no backend has a queue");
        set_up_again(&machine, &saved);
        machine.run().expect("it goes on");
        await_kicks(&machine, 1);
    }
    println!("{started} backends were started first");
    end(&machine, &seen);
}

/// A backend that nobody kicks sleeps without end: what wakes it is that somebody wants the port, each time.
#[test]
fn sleeping_backend_lends_the_port_to_all_who_want_it() {
    testkit::require!(Kvm);
    let (machine, seen) = kicking(Notify::Eventfd, 1);
    end(&machine, &seen);
    let backend = Backend::start(machine.net(), machine.net_notifiers()).expect("a backend");
    let has_port = || machine.net().port().lock().is_none();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..soak::count(50, 2_000) {
                    assert!(until(LIMIT, has_port), "the backend has it again");
                    let _ = machine.counts();
                }
            });
        }
    });
    assert!(until(LIMIT, has_port), "the backend has it again");
    backend.stop().expect("it stops");
}

#[test]
fn vm_that_is_stopped_under_a_backend_says_so() {
    testkit::require!(Kvm);
    let (mut machine, seen) = kicking(Notify::Eventfd, 1);
    let backend = Backend::start(machine.net(), machine.net_notifiers()).expect("a backend");
    assert!(matches!(machine.stop(), Err(MachineError::Backend { queue: 0 })));
    // Nor can it be saved; it is not lost by that.
    let refused = machine.save().err().expect("a backend has its queues");
    assert!(matches!(refused.error, MachineError::Backend { queue: 0 }));
    backend.stop().expect("it stops");
    let mut machine = refused.it;
    machine.run().expect("it goes on");
    await_kicks(&machine, 10);
    end(&machine, &seen);
}
