//! Frames from a guest and to it, in each way of being notified, with both kinds of ring.
#![cfg(target_arch = "x86_64")]

use crate::common;

use common::{MODES, Recorder, run, task};
use tiny_vmm::layout::INTERRUPT_STRIDE;
use tiny_vmm::machine::{MachineConfig, Notify};
use tiny_vmm::mailbox::{Task, Work};
use tiny_vmm::sink::null::{Echo, Null};

const FRAMES: u64 = 2_000;
/// Each costs exits: the guest looks at InterruptStatus. A whole number of strides.
const INTERRUPTED_FRAMES: u64 = 320;

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

/// How a guest wants to be interrupted.
fn interrupted(work: Work, packed: bool, interrupts: bool, event_idx: bool) -> Task {
    Task {
        packed,
        interrupts,
        event_idx,
        ..task(work, INTERRUPTED_FRAMES)
    }
}

#[test]
fn guest_is_interrupted_as_often_as_it_wants() {
    in_all_ways(|config, packed| {
        let interrupts = |interrupts, event_idx| {
            let rounds = interrupted(Work::RoundTrip, packed, interrupts, event_idx);
            let (machine, answer) = run(config, &rounds, Box::new(Echo::default()));
            assert_eq!(answer.done, INTERRUPTED_FRAMES);
            machine.net_interrupts()
        };
        // Of each of the two queues the first publication interrupts in any case: the device does not know what
        // one before it has left undone.
        assert_eq!(interrupts(false, false), 2, "{config:?} {packed}");
        assert_eq!(
            interrupts(true, false),
            2 * INTERRUPTED_FRAMES,
            "{config:?} {packed}"
        );
        let wanted = 2 + 2 * INTERRUPTED_FRAMES / u64::from(INTERRUPT_STRIDE);
        let by_index = interrupts(true, true);
        if config.notify == Notify::Exit {
            // The guest stands while it is served.
            assert_eq!(by_index, wanted, "{config:?} {packed}");
        } else {
            // One that has the frame already, and says that it wants the next interrupt later, does not get this one.
            assert!((2..=wanted).contains(&by_index), "{by_index} {config:?} {packed}");
        }
    });
}

#[test]
fn frames_go_both_ways_where_kicks_and_interrupts_go_by_indices() {
    in_all_ways(|config, packed| {
        for frames_per_kick in [1, 8, 200] {
            let sends = Task {
                frames_per_kick,
                ..interrupted(Work::Send, packed, true, true)
            };
            let (sink, seen) = Recorder::new(64);
            run(config, &sends, sink);
            let seen = seen.lock().expect("no panic");
            assert_eq!(
                (seen.frames, seen.wrong),
                (INTERRUPTED_FRAMES, 0),
                "{config:?} {sends:?}"
            );
            let receives = Task {
                work: Work::Receive,
                ..sends
            };
            let (machine, _) = run(config, &receives, Box::new(Null::new(INTERRUPTED_FRAMES, 64)));
            assert_eq!(
                machine.counts().to_guest_frames,
                INTERRUPTED_FRAMES,
                "{config:?} {receives:?}"
            );
        }
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
