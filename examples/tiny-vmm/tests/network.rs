//! Over an AF_XDP socket, on one end of a veth pair in a namespace of its own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use testkit::{PacketPort, VethPair, assert_has};
use tiny_vmm::layout::Mailbox;
use tiny_vmm::mailbox::Work;
use tiny_vmm::sink::xdp::Xdp;

use crate::common::{MODES, number_of, run, task};

const FRAMES: u64 = 500;

fn open(veth: &VethPair) -> Box<Xdp> {
    let opened = veth.near.enter(|| Xdp::open(VethPair::NIC));
    Box::new(opened.unwrap_or_else(|error| panic!("{error:#}")))
}

#[test]
fn frames_sent_leave_the_interface_whole_and_once() {
    testkit::require!(Kvm, Root);
    for notify in MODES {
        for frame_bytes in [64, 1514] {
            let veth = VethPair::new();
            let far = PacketPort::open(&veth.far, VethPair::WIRE);
            let sends = Mailbox {
                frames_per_kick: 64,
                frame_bytes,
                ..task(Work::Send, FRAMES)
            };
            let (_machine, _) = run(notify, &sends, open(&veth));
            let mut next = 0;
            while next < FRAMES {
                let frame = far.receive(testkit::wait::SOON).expect("a frame");
                // Other frames are of the host, such as neighbour discovery.
                if let Some(number) = number_of(&frame, frame_bytes as usize) {
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
            let (_machine, answer) = run(notify, &task(Work::RoundTrip, FRAMES), open(&veth));
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
    let text = format!("{:#}", refused.expect("it is down"));
    assert_has(&text, &[&format!("`ip link set {} up`", VethPair::NIC)]);
    veth.near.ip(&["link", "set", VethPair::NIC, "up"]);
    open(&veth);
}
