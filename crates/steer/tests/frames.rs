//! What the program does with frames: passes them unchanged, drops and counts them, or redirects them to the socket.

use crate::common;

use std::os::fd::AsFd;

use common::{Pair, bare, frame, no_socket, test_run};
use steer::{MAX_QUEUES, ModeRequest, Program, QueueConf, QueueCounters, VirtioHeader};
use testkit::wait;

const REQUESTS: [ModeRequest; 2] = [ModeRequest::Native, ModeRequest::Skb];
const XDP_DROP: u32 = 1;
const XDP_PASS: u32 = 2;

fn attach(pair: &Pair, request: ModeRequest) -> Program {
    Program::attach(pair.ifindex(), request, false).expect("veth takes XDP")
}

/// Reads the counters until they are as expected: the frame was sent, but on a loaded machine it may take a moment.
fn counted(program: &Program, queue: u32, expected: impl Fn(&QueueCounters) -> bool) -> QueueCounters {
    let mut counters = QueueCounters::default();
    wait::until(wait::SOON, || {
        counters = program.counters(queue).expect("counters");
        expected(&counters)
    });
    counters
}

#[test]
fn frames_of_a_queue_not_enabled_reach_the_host_unchanged() {
    let Some(pair) = Pair::new(1500) else { return };
    for request in REQUESTS {
        let program = attach(&pair, request);
        for len in [60, 64, 1513, 1514] {
            pair.far_socket.send(&frame(len));
            assert_eq!(
                pair.near_socket.receive(wait::SOON),
                Some(frame(len)),
                "{request:?}"
            );
        }
        let counters = counted(&program, 0, |c| c.passed == 4);
        assert_eq!(
            counters.named(),
            [
                ("redirected", 0),
                ("passed", 4),
                ("too_long", 0),
                ("no_header_room", 0),
                ("no_socket", 0),
                ("not_ours", 0),
                ("group_copied", 0),
                ("group_limited", 0),
                ("group_lost", 0),
                ("unknown_sender", 0),
                ("malformed", 0)
            ]
        );
    }
}

#[test]
fn frame_longer_than_the_limit_is_dropped_and_counted() {
    let Some(pair) = Pair::new(1500) else { return };
    let xsk = pair.unbound_xsk();
    for request in REQUESTS {
        let program = attach(&pair, request);
        program
            .enable_queue(0, xsk.as_fd(), bare(1000))
            .expect("queue 0 is there");
        pair.far_socket.send(&frame(1000));
        pair.far_socket.send(&frame(1001));
        let counters = counted(&program, 0, |c| c.redirected == 1 && c.too_long == 1);
        assert_eq!(
            (counters.redirected, counters.too_long, counters.dropped()),
            (1, 1, 1),
            "{request:?}"
        );

        program.activate_queue(0, bare(1001)).expect("queue 0 is there");
        pair.far_socket.send(&frame(1001));
        let counters = counted(&program, 0, |c| c.redirected == 2);
        assert_eq!((counters.redirected, counters.too_long), (2, 1), "{request:?}");
        program.disable_queue(0).expect("was enabled");
        pair.far_socket.send(&frame(900));
        assert_eq!(
            pair.near_socket.receive(wait::SOON),
            Some(frame(900)),
            "the host got none of the others"
        );
    }
}

#[test]
fn limit_measures_a_frame_in_several_buffers_whole() {
    let Some(pair) = Pair::new(9000) else { return };
    let xsk = pair.unbound_xsk();
    for request in REQUESTS {
        let program = Program::attach(pair.ifindex(), request, true).expect("frags takes this MTU");
        program
            .enable_queue(0, xsk.as_fd(), bare(8899))
            .expect("queue 0 is there");
        pair.far_socket.send(&frame(8900));
        assert_eq!(
            counted(&program, 0, |c| c.too_long == 1).too_long,
            1,
            "{request:?}"
        );
        pair.far_socket.send(&frame(8899));
        assert_eq!(
            counted(&program, 0, |c| c.redirected == 1).redirected,
            1,
            "{request:?}"
        );
    }
}

#[test]
fn closed_socket_gives_its_frames_back_to_the_host_unchanged() {
    let Some(pair) = Pair::new(1500) else { return };
    for request in REQUESTS {
        let program = attach(&pair, request);
        for virtio_header in [None, Some(VirtioHeader::Basic), Some(VirtioHeader::HashReport)] {
            let before = program.counters(0).expect("counters").no_socket;
            let xsk = pair.unbound_xsk();
            let conf = QueueConf {
                virtio_header,
                frame_limit: 1514,
                hints: false,
            };
            program
                .enable_queue(0, xsk.as_fd(), conf)
                .expect("queue 0 is there");
            drop(xsk);
            pair.await_closed(&program);
            pair.far_socket.send(&frame(333));
            assert_eq!(
                pair.near_socket.receive(wait::SOON),
                Some(frame(333)),
                "{request:?} {virtio_header:?}"
            );
            let after = counted(&program, 0, |c| c.no_socket == before + 1).no_socket;
            assert_eq!(after, before + 1);
        }
    }
}

#[test]
fn disabled_queue_passes_again() {
    let Some(pair) = Pair::new(1500) else { return };
    let xsk = pair.unbound_xsk();
    let program = attach(&pair, ModeRequest::Native);
    program
        .enable_queue(0, xsk.as_fd(), bare(1514))
        .expect("queue 0 is there");
    pair.far_socket.send(&frame(60));
    assert_eq!(counted(&program, 0, |c| c.redirected == 1).redirected, 1);
    program.disable_queue(0).expect("was enabled");
    program.disable_queue(0).expect("twice is no error");
    pair.far_socket.send(&frame(61));
    assert_eq!(pair.near_socket.receive(wait::SOON), Some(frame(61)));
}

#[test]
fn no_room_for_the_header_drops_and_counts() {
    let Some(pair) = Pair::new(1500) else { return };
    let xsk = pair.unbound_xsk();
    let program = attach(&pair, ModeRequest::Native);
    let conf = QueueConf {
        virtio_header: Some(VirtioHeader::Basic),
        frame_limit: 1514,
        hints: false,
    };
    program
        .enable_queue(0, xsk.as_fd(), conf)
        .expect("queue 0 is there");
    // Of the 256 bytes before a frame the kernel keeps 40 (struct xdp_frame): 216 are left, and 212 are taken.
    assert_eq!(test_run(program.id(), 212, &frame(100)), XDP_DROP);
    let counters = program.counters(0).expect("counters");
    assert_eq!(
        (counters.no_header_room, counters.redirected, counters.dropped()),
        (1, 0, 1)
    );
    program.disable_queue(0).expect("was enabled");
    assert_eq!(test_run(program.id(), 212, &frame(100)), XDP_PASS);
}

#[test]
fn queue_beyond_the_map_is_refused_by_number() {
    let Some(pair) = Pair::new(1500) else { return };
    let xsk = pair.unbound_xsk();
    let program = attach(&pair, ModeRequest::Native);
    program
        .enable_queue(MAX_QUEUES - 1, xsk.as_fd(), bare(1514))
        .expect("the last one is there");
    for queue in [MAX_QUEUES, u32::MAX] {
        let errors = [
            program
                .enable_queue(queue, xsk.as_fd(), bare(1514))
                .expect_err("beyond"),
            program.disable_queue(queue).expect_err("beyond"),
            program.activate_queue(queue, bare(60)).expect_err("beyond"),
            program.counters(queue).expect_err("beyond"),
        ];
        for error in errors {
            let beyond = format!("queue {queue} is beyond");
            assert!(error.to_string().contains(&beyond), "{error}");
        }
    }
}

#[test]
fn what_is_no_xdp_socket_is_refused_and_the_queue_passes() {
    let Some(pair) = Pair::new(1500) else { return };
    let program = attach(&pair, ModeRequest::Native);
    let error = program
        .enable_queue(0, no_socket().as_fd(), bare(1514))
        .expect_err("/dev/null");
    assert!(error.to_string().contains("queue 0 its AF_XDP socket"), "{error}");
    pair.far_socket.send(&frame(99));
    assert_eq!(pair.near_socket.receive(wait::SOON), Some(frame(99)));
}
