//! Programs that drop every frame or send it back count what they see, and go with their owner.

use crate::common;

use std::time::Duration;

use steer::{ModeRequest, Verdict, VerdictProgram};
use testkit::daemon::Mode;
use testkit::foreign::Foreign;
use testkit::{VethPair, frame, wait};

use common::{Pair, gone_within, program_on};

#[test]
fn dropped_frames_are_counted_and_reach_nobody() {
    let Some(pair) = Pair::new(1500) else { return };
    for mode in [ModeRequest::Native, ModeRequest::Skb] {
        for frags in [false, true] {
            let program = VerdictProgram::attach(pair.ifindex(), mode, frags, Verdict::Drop);
            let program = program.expect("it attaches");
            for seed in 0..50 {
                pair.far_socket.send(&frame::plain(60 + usize::from(seed), seed));
            }
            assert!(wait::until(wait::SOON, || program.frames().expect("counted") == 50));
            assert!(pair.near_socket.receive(Duration::ZERO).is_none());
            drop(program);
            assert!(gone_within(pair.ifindex(), wait::SOON));
        }
    }
}

#[test]
fn frames_sent_back_have_their_addresses_swapped() {
    let Some(pair) = Pair::new(1500) else { return };
    // A veth accepts frames of XDP_TX only if its peer end has NAPI (veth_xdp_xmit, drivers/net/veth.c).
    let _polls = Foreign::attach(&pair.veth.far, VethPair::WIRE, Mode::Native, 0);
    for frags in [false, true] {
        let program = VerdictProgram::attach(pair.ifindex(), ModeRequest::Native, frags, Verdict::SendBack);
        let program = program.expect("it attaches");
        assert!(program_on(pair.ifindex()).is_some());
        for (seed, size) in [60, 64, 1513, 1514].into_iter().enumerate() {
            let sent = frame::plain(size, seed as u8);
            pair.far_socket.send(&sent);
            let got = pair.far_socket.receive(wait::SOON).expect("it comes back");
            let mut expected = sent;
            expected[..12].rotate_left(6);
            frame::assert_same(&got, &expected);
        }
        assert_eq!(program.frames().expect("counted"), 4);
    }
}
