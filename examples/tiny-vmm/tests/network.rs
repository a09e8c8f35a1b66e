//! Over an AF_XDP socket, on one end of a veth pair in a namespace of its own.
#![cfg(target_arch = "x86_64")]

use crate::common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{LIMIT, MODES, number_of, run, start_driver, task};
use testkit::wait::until;
use testkit::{PacketPort, VethPair};
use tiny_vmm::layout::DEVICES_AT;
use tiny_vmm::machine::{Machine, MachineConfig, Notify};
use tiny_vmm::mailbox::{Task, Work};
use tiny_vmm::sink::xdp::Xdp;

const FRAMES: u64 = 500;

fn open(veth: &VethPair) -> Box<Xdp> {
    let opened = veth.near.enter(|| Xdp::open(VethPair::NIC));
    Box::new(opened.unwrap_or_else(|error| panic!("{}", steer::with_sources(&error))))
}

#[test]
fn frames_sent_leave_the_interface_whole_and_once() {
    testkit::require!(Kvm, Root);
    for notify in MODES {
        for frame_bytes in [64, 1514] {
            let veth = VethPair::new();
            let far = PacketPort::open(&veth.far, VethPair::WIRE);
            let sends = Task {
                frames_per_kick: 64,
                frame_bytes,
                ..task(Work::Send, FRAMES)
            };
            let (_machine, _) = run(MachineConfig::new(notify), &sends, open(&veth));
            let len = frame_bytes as usize;
            let mut next = 0;
            while next < FRAMES {
                let frame = far.receive(testkit::wait::SOON).expect("a frame");
                // Others' (neighbour discovery) are none of ours.
                if let Some(number) = number_of(&frame, len) {
                    assert_eq!(number, next, "{notify:?}");
                    next += 1;
                }
            }
        }
    }
}

#[test]
fn frames_come_back_from_the_far_end() {
    testkit::require!(Kvm, Root);
    for notify in MODES {
        let veth = VethPair::new();
        let far = PacketPort::open(&veth.far, VethPair::WIRE);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    if let Some(frame) = far.receive(Duration::from_millis(50))
                        && number_of(&frame, 64).is_some()
                    {
                        far.send(&frame);
                    }
                }
            });
            let stopping = testkit::wait::Raised(&stop);
            let (_machine, answer) = run(
                MachineConfig::new(notify),
                &task(Work::RoundTrip, FRAMES),
                open(&veth),
            );
            drop(stopping);
            assert_eq!(answer.done, FRAMES, "{notify:?}");
        });
    }
}

#[test]
fn interface_that_is_down_is_refused_with_the_remedy() {
    testkit::require!(Root);
    let veth = VethPair::new();
    veth.near.ip(&["link", "set", VethPair::NIC, "down"]);
    let refused = veth.near.enter(|| Xdp::open(VethPair::NIC)).err();
    let said = refused.expect("it is down").to_string();
    let remedy = format!("{0} is down: `ip link set {0} up`", VethPair::NIC);
    assert_eq!(said, remedy);
    veth.near.ip(&["link", "set", VethPair::NIC, "up"]);
    open(&veth);
}

#[test]
fn interface_that_has_a_program_is_refused_for_that_alone() {
    testkit::require!(Root);
    let veth = VethPair::new();
    let _first = open(&veth);
    let refused = veth.near.enter(|| Xdp::open(VethPair::NIC)).err();
    let said = steer::with_sources(&refused.expect("it has one"));
    assert!(
        said.contains("already has an XDP program") && !said.contains("CAP_"),
        "{said}"
    );
}

#[test]
fn interface_that_was_down_carries_frames_again() {
    testkit::require!(Kvm, Root);
    for notify in MODES {
        let veth = VethPair::new();
        let far = PacketPort::open(&veth.far, VethPair::WIRE);
        let kicks = Task {
            frames_per_kick: 4,
            ..task(Work::Kick, 0)
        };
        let mut machine = Machine::new(MachineConfig::new(notify), &kicks, open(&veth)).expect("a machine");
        machine.run().expect("it runs");
        let done = || machine.mailbox().answer().expect("a mailbox").done;
        assert!(until(LIMIT, || done() > 100), "{notify:?}");
        veth.near.ip(&["link", "set", VethPair::NIC, "down"]);
        assert!(until(LIMIT, || machine.counts().dropped > 0), "{notify:?}");
        let before = done();
        assert!(until(LIMIT, || done() > before + 100), "{notify:?}: it waits");
        veth.near.ip(&["link", "set", VethPair::NIC, "up"]);
        let after = done();
        // All that it sent before the interface was down waits in front, and the guest goes on.
        let deadline = Instant::now() + LIMIT;
        let has_come = std::iter::from_fn(|| far.receive(LIMIT))
            .take_while(|_| Instant::now() < deadline)
            .any(|frame| number_of(&frame, 64).is_some_and(|number| number > after));
        assert!(has_come, "{notify:?}: {:?}", machine.counts());
        assert_eq!(machine.port_error(), None, "{notify:?}");
    }
}

#[test]
fn frames_that_came_before_the_driver_are_not_for_it() {
    testkit::require!(Kvm, Root);
    let veth = VethPair::new();
    let far = PacketPort::open(&veth.far, VethPair::WIRE);
    let machine = Machine::new(
        MachineConfig::new(Notify::Exit),
        &task(Work::Receive, 3),
        open(&veth),
    );
    let machine = machine.expect("a machine");
    for _ in 0..3 {
        far.send(&[0xff; 64]);
    }
    let all_are_gone = || {
        assert_eq!(start_driver(&machine, DEVICES_AT), 15);
        machine.discarded() >= 3
    };
    assert!(until(LIMIT, all_are_gone), "{}", machine.discarded());
}
