//! Frames from a guest and to it, and its control queue, in each way of being notified.

use crate::common::{LIMIT, MODES, Recorder, machine, run, task};
use testkit::wait::until;
use tiny_vmm::layout::Mailbox;
use tiny_vmm::machine::{Machine, Notify};
use tiny_vmm::mailbox::{self, Work, samples};
use tiny_vmm::port::Counts;
use tiny_vmm::sink::null::{Echo, Null};

const FRAMES: u64 = 2_000;

#[test]
fn frames_sent_arrive_whole_and_once() {
    testkit::require!(Kvm);
    for notify in MODES {
        for (frames_per_kick, frame_bytes) in [(1, 60), (8, 1514), (64, 64), (256, 22)] {
            let task = Mailbox {
                frames_per_kick,
                frame_bytes,
                ..task(Work::Send, FRAMES)
            };
            let (sink, seen) = Recorder::new(frame_bytes);
            let (_machine, answer) = run(notify, &task, sink);
            let seen = seen.lock().expect("no panic");
            let counts = (seen.frames, seen.wrong, answer.done);
            assert_eq!(counts, (FRAMES, 0, FRAMES), "{notify:?} {task:?}");
        }
    }
}

#[test]
fn each_frame_comes_back_before_the_next_one_goes() {
    testkit::require!(Kvm);
    for notify in MODES {
        let (machine, answer) = run(notify, &task(Work::RoundTrip, FRAMES), Box::new(Echo::default()));
        assert_eq!((answer.done, answer.samples), (FRAMES, FRAMES));
        assert_eq!(samples(&machine.memory).expect("samples").len() as u64, FRAMES);
        let expected = Counts {
            from_guest: FRAMES,
            to_guest: FRAMES,
            dropped: 0,
        };
        assert_eq!(machine.net.lock().port.counts, expected);
    }
}

#[test]
fn queues_are_served_by_the_thread_of_the_mode() {
    testkit::require!(Kvm);
    for (notify, thread) in [
        (Notify::Exit, "vcpu"),
        (Notify::Eventfd, "notify"),
        (Notify::Poll, "worker"),
    ] {
        let (sink, seen) = Recorder::new(64);
        let (machine, answer) = run(notify, &task(Work::Send, 500), sink);
        let threads: Vec<_> = seen.lock().expect("no panic").threads.iter().cloned().collect();
        assert_eq!(threads, [thread], "{notify:?}");
        let status = machine.mmio.notifiers.status();
        let exits: u64 = status.iter().map(|queue| queue.from_exits).sum();
        let eventfds: u64 = status.iter().map(|queue| queue.from_eventfd).sum();
        match notify {
            Notify::Exit => assert_eq!((exits, eventfds), (answer.kicks, 0)),
            // Several kicks may come as one.
            Notify::Eventfd => assert!(exits == 0 && (1..=answer.kicks).contains(&eventfds), "{status:?}"),
            Notify::Poll => assert_eq!((exits, eventfds, answer.kicks), (0, 0, 0)),
        }
    }
}

#[test]
fn each_command_of_the_control_queue_is_answered() {
    testkit::require!(Kvm);
    for notify in MODES {
        for pairs in [1, 4] {
            let commands = Mailbox {
                pairs,
                ..task(Work::Control, 5)
            };
            let (machine, answer) = run(notify, &commands, Box::new(Null));
            // The guest checks each answer.
            assert_eq!(answer.done, 5 * if pairs == 1 { 11 } else { 14 });
            let net = machine.net.lock();
            assert_eq!(net.config()[..6], [2, 3, 4, 5, 6, 7]);
            // At the end one by each pair.
            assert_eq!(net.port.counts.from_guest, pairs, "{notify:?}");
        }
    }
}

#[test]
fn no_frame_moves_after_the_stop() {
    testkit::require!(Kvm);
    for notify in MODES {
        let kicks = Mailbox {
            frames_per_kick: 4,
            always: 1,
            // Until it is stopped.
            ..task(Work::Send, 0)
        };
        let (sink, seen) = Recorder::new(kicks.frame_bytes);
        let mut machine = machine(notify, &kicks, sink);
        machine.run().expect("it runs");
        let done = |machine: &Machine| mailbox::read(&machine.memory).expect("a mailbox").done;
        assert!(until(LIMIT, || done(&machine) > 0), "no frame comes");
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
