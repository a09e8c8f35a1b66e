//! A guest that kicks without pause while its queues change owners: no kick is lost, no frame is served twice.
//!
//! The guest adds frames for each kick, and waits until the device has them all: a lost kick stops it there. A frame
//! that is served twice, or by two threads at once, is out of order.

use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use notifier::notifiers::{DeviceEvent, QueueEvent};
use notifier::state::State;
use testkit::soak;
use testkit::wait::until;
use tiny_vmm::layout::{MAILBOX_AT, Mailbox};
use tiny_vmm::machine::{Machine, Notify};
use tiny_vmm::mailbox::{self, Work};
use vm_memory::{Bytes as _, GuestAddress};

use crate::common::{LIMIT, MODES, Recorder, Seen, finished, machine, task};

/// The transmit queue of the first pair.
const QUEUE: u16 = 1;

fn switches() -> usize {
    soak::count(250, 1_000)
}

/// A guest that kicks, and its frames' recorder.
fn kicking(notify: Notify, frames_per_kick: u64) -> (Machine, Arc<Mutex<Seen>>) {
    let kicks = Mailbox {
        frames_per_kick,
        always: 1,
        // Until it is stopped.
        ..task(Work::Send, 0)
    };
    let (sink, seen) = Recorder::new(kicks.frame_bytes);
    let mut machine = machine(notify, &kicks, sink);
    machine.run().expect("it runs");
    await_frames(&machine, 1);
    (machine, seen)
}

/// Waits for this many further frames.
fn await_frames(machine: &Machine, more: u64) {
    let done = || mailbox::read(&machine.memory).expect("a mailbox").done;
    let wanted = done() + more;
    let have_come = until(LIMIT, || done() >= wanted);
    assert!(have_come, "{:?}", mailbox::read(&machine.memory));
}

/// Stops the guest; all its frames came, once and in order.
fn end(machine: &Machine, seen: &Mutex<Seen>) {
    await_frames(machine, 10);
    let stop = MAILBOX_AT + offset_of!(Mailbox, stop) as u64;
    machine
        .memory
        .ram
        .write_obj(1_u64, GuestAddress(stop))
        .expect("a mailbox");
    let answer = finished(machine);
    let seen = seen.lock().expect("no panic");
    assert_eq!((seen.frames, seen.wrong), (answer.done, 0));
}

#[test]
fn no_kick_is_lost_while_the_vm_stops_and_runs() {
    testkit::require!(Kvm);
    for (notify, running) in [
        (Notify::Eventfd, State::Assigned),
        (Notify::Exit, State::Deassigned),
    ] {
        let (machine, seen) = kicking(notify, 1);
        let notifiers = &machine.mmio.notifiers;
        for _ in 0..switches() {
            // As if it stopped: the vCPU goes on to kick, by exits.
            notifiers.event(DeviceEvent::VmStop).expect("never refused");
            assert_eq!(notifiers.state(QUEUE), Some(State::Deassigned));
            notifiers.event(DeviceEvent::VmRun).expect("never refused");
            assert_eq!(notifiers.state(QUEUE), Some(running));
        }
        end(&machine, &seen);
    }
}

#[test]
fn no_kick_is_lost_while_a_queue_is_disabled_and_enabled() {
    testkit::require!(Kvm);
    for notify in [Notify::Eventfd, Notify::Exit] {
        let (machine, seen) = kicking(notify, 1);
        for _ in 0..switches() {
            // Without the registers: the rings stay.
            for event in [QueueEvent::QueueReset, QueueEvent::QueueEnable] {
                let done = machine.mmio.notifiers.queue_event(QUEUE, event);
                done.expect("never refused");
            }
        }
        end(&machine, &seen);
    }
}

/// Serves the transmit queue alone, as a backend in another process would, while `meanwhile` runs.
fn with_backend(machine: &Machine, meanwhile: impl FnOnce()) {
    let notifiers = &machine.mmio.notifiers;
    let kick = notifiers.eventfd(QUEUE).expect("an eventfd");
    notifiers
        .queue_event(QUEUE, QueueEvent::BackendStart)
        .expect("it is ready");
    assert_eq!(notifiers.state(QUEUE), Some(State::OffLimits));
    let (net, stop) = (&machine.net, AtomicBool::new(false));
    std::thread::scope(|scope| {
        let serve = || {
            while !stop.load(Ordering::Relaxed) {
                if kick.read().is_ok() {
                    net.lock().serve();
                }
            }
        };
        let builder = std::thread::Builder::new().name("backend".into());
        builder.spawn_scoped(scope, serve).expect("a thread");
        meanwhile();
        stop.store(true, Ordering::Relaxed);
    });
    notifiers
        .queue_event(QUEUE, QueueEvent::BackendStop)
        .expect("it had the queue");
}

#[test]
fn no_kick_is_lost_while_backends_come_and_go() {
    testkit::require!(Kvm);
    for (notify, frames_per_kick) in [(Notify::Eventfd, 1), (Notify::Eventfd, 64), (Notify::Exit, 1)] {
        let (machine, seen) = kicking(notify, frames_per_kick);
        for switch in 0..switches() {
            // Some are stopped before they have seen a kick.
            let more = if switch % 10 == 0 { 2 * frames_per_kick } else { 0 };
            with_backend(&machine, || await_frames(&machine, more));
        }
        end(&machine, &seen);
    }
}

#[test]
fn backend_alone_serves_while_it_has_the_queue() {
    testkit::require!(Kvm);
    for notify in [Notify::Eventfd, Notify::Exit] {
        let (machine, seen) = kicking(notify, 1);
        with_backend(&machine, || {
            await_frames(&machine, 1);
            seen.lock().expect("no panic").threads.clear();
            await_frames(&machine, 200);
            let threads: Vec<_> = seen.lock().expect("no panic").threads.iter().cloned().collect();
            assert_eq!(threads, ["backend"], "{notify:?}");
        });
        end(&machine, &seen);
    }
}

#[test]
fn no_frame_moves_after_the_stop() {
    testkit::require!(Kvm);
    for notify in MODES {
        let (mut machine, seen) = kicking(notify, 4);
        machine.stop();
        let state = || {
            let kicks = mailbox::read(&machine.memory).expect("a mailbox").kicks;
            (kicks, seen.lock().expect("no panic").frames)
        };
        let before = state();
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(state(), before, "{notify:?}");
    }
}
