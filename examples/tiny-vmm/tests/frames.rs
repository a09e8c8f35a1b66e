//! Frames from a guest and to it, in each way of being notified, with both kinds of ring.
#![cfg(target_arch = "x86_64")]

mod common;

use common::{MODES, Recorder, run, task};
use tiny_vmm::machine::{MachineConfig, Notify};
use tiny_vmm::mailbox::{Task, Work};
use tiny_vmm::sink::null::{Echo, Null};

const FRAMES: u64 = 2_000;

/// Every mode with every ring.
fn in_all_ways(mut test: impl FnMut(MachineConfig, bool)) {
    testkit::require!(Kvm);
    for notify in MODES {
        for packed in [false, true] {
            test(MachineConfig::new(notify), packed);
        }
    }
}

#[test]
fn frames_sent_arrive_whole_and_once() {
    in_all_ways(|config, packed| {
        for (frames_per_kick, frame_bytes) in [(1, 60), (8, 1514), (64, 64), (200, 22)] {
            let task = Task {
                packed,
                frames_per_kick,
                frame_bytes,
                ..task(Work::Send, FRAMES)
            };
            let (sink, seen) = Recorder::new(frame_bytes);
            let (_machine, answer) = run(config, &task, sink);
            let seen = seen.lock().expect("no panic");
            assert_eq!(
                (seen.frames, seen.wrong, answer.done),
                (FRAMES, 0, FRAMES),
                "{config:?} {task:?}"
            );
        }
    });
}

#[test]
fn frames_received_are_whole_and_the_next_ones() {
    in_all_ways(|config, packed| {
        let task = Task {
            packed,
            frames_per_kick: 16,
            frame_bytes: 1000,
            ..task(Work::Receive, FRAMES)
        };
        let (machine, answer) = run(config, &task, Box::new(Null::new(FRAMES, 1000)));
        assert_eq!(answer.done, FRAMES);
        assert_eq!(machine.counts().to_guest_frames, FRAMES);
    });
}

#[test]
fn each_frame_comes_back_before_the_next_one_goes() {
    in_all_ways(|config, packed| {
        let task = Task {
            packed,
            ..task(Work::RoundTrip, FRAMES)
        };
        let (_machine, answer) = run(config, &task, Box::new(Echo::default()));
        assert_eq!((answer.done, answer.samples), (FRAMES, FRAMES));
    });
}

#[test]
fn guest_sends_back_all_that_comes() {
    in_all_ways(|config, packed| {
        let task = Task {
            packed,
            frames_per_kick: 32,
            ..task(Work::Echo, FRAMES)
        };
        let (machine, answer) = run(config, &task, Box::new(Null::new(FRAMES, 64)));
        assert_eq!(answer.done, FRAMES);
        assert_eq!(machine.counts().from_guest_frames, FRAMES);
    });
}

#[test]
fn queues_are_served_by_whom_the_mode_says() {
    testkit::require!(Kvm);
    for (notify, thread) in [
        (Notify::Exit, "vcpu"),
        (Notify::Eventfd, "notify"),
        (Notify::Poll, "worker"),
    ] {
        let (sink, seen) = Recorder::new(64);
        run(MachineConfig::new(notify), &task(Work::Send, 500), sink);
        let threads = &seen.lock().expect("no panic").threads;
        assert!(threads.contains(thread), "{notify:?}: {threads:?}");
        assert_eq!(threads.contains("vcpu"), notify == Notify::Exit, "{threads:?}");
    }
}

#[test]
fn guest_of_a_worker_that_polls_kicks_nobody() {
    testkit::require!(Kvm);
    let (machine, answer) = run(
        MachineConfig::new(Notify::Poll),
        &task(Work::Send, FRAMES),
        Box::new(Null::new(0, 64)),
    );
    assert_eq!(answer.kicks, 0);
    let status = machine.status();
    assert!(
        status
            .iter()
            .all(|queue| queue.from_exits + queue.from_eventfd == 0),
        "{status:?}"
    );
}

#[test]
fn guest_whose_notifications_are_eventfds_does_not_exit_for_them() {
    testkit::require!(Kvm);
    let notifications = Task {
        always: true,
        ..task(Work::Notify, 5_000)
    };
    for (notify, by_exits) in [(Notify::Exit, 5_000), (Notify::Eventfd, 0)] {
        let sink = Box::new(Null::new(0, 64));
        let (machine, _) = run(MachineConfig::new(notify), &notifications, sink);
        let exits: u64 = machine.status().iter().map(|queue| queue.from_exits).sum();
        assert_eq!(exits, by_exits, "{notify:?}");
    }
}
