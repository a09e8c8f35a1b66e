//! Over an AF_XDP socket, on one end of a veth pair in a namespace of its own.
#![cfg(target_arch = "x86_64")]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{MODES, number_of, run, task};
use testkit::{PacketPort, VethPair};
use tiny_vmm::machine::MachineConfig;
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
