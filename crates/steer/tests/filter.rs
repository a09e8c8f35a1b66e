//! Queues with a filter by address and VLAN: matching frames go to the socket, all others to the host, unchanged.

use crate::common;

use std::os::fd::AsFd;

use common::{Pair, bare, frame_to};
use steer::{Filter, ModeRequest, Program};
use testkit::wait;

const OURS: [u8; 6] = [2, 0, 0, 0, 0, 0x11];
const THEIRS: [u8; 6] = [2, 0, 0, 0, 0, 0x12];
const EVERYBODY: [u8; 6] = [0xff; 6];
const GROUP: [u8; 6] = [0x01, 0, 0x5e, 0, 0, 1];

fn enabled(pair: &Pair, request: ModeRequest, filter: &Filter) -> (Program, std::os::fd::OwnedFd) {
    let program = Program::attach(pair.ifindex(), request, false).expect("veth takes XDP");
    let xsk = pair.unbound_xsk();
    program.set_filter(0, filter).expect("room");
    let conf = bare(1514);
    program.enable_queue(0, xsk.as_fd(), conf).expect("queue 0");
    (program, xsk)
}

/// Sends a frame; returns whether the queue got it. Otherwise the host must get it unchanged.
fn takes(pair: &Pair, program: &Program, frame: &[u8]) -> bool {
    let before = program.counters(0).expect("counters");
    pair.far_socket.send(frame);
    let changed = || Some(program.counters(0).expect("counters")).filter(|now| *now != before);
    let after = wait::until_some(wait::SOON, changed).expect("the frame is counted");
    let taken = after.redirected - before.redirected;
    assert_eq!(taken + after.not_ours - before.not_ours, 1, "{after:?}");
    if taken == 0 {
        assert_eq!(pair.near_socket.receive(wait::SOON).as_deref(), Some(frame));
    }
    taken == 1
}

#[test]
fn queue_takes_its_addresses_and_groups_and_the_host_gets_the_rest() {
    let Some(pair) = Pair::new(1500) else { return };
    let filter = Filter {
        macs: vec![OURS],
        vlans: Vec::new(),
    };
    for request in [ModeRequest::Native, ModeRequest::Skb] {
        let (program, _xsk) = enabled(&pair, request, &filter);
        assert_eq!(program.filter(0).expect("queue 0"), filter);
        assert_eq!(program.filter(1).expect("queue 1"), Filter::default());
        for (to, expected) in [(OURS, true), (THEIRS, false), (EVERYBODY, true), (GROUP, true)] {
            assert_eq!(
                takes(&pair, &program, &frame_to(to, &[])),
                expected,
                "{request:?} {to:x?}"
            );
        }
        assert!(
            takes(&pair, &program, &frame_to(OURS, &[(0x8100, 5)])),
            "any VLAN"
        );
    }
}

#[test]
fn queue_takes_its_vlans_by_the_outermost_tag() {
    let Some(pair) = Pair::new(1500) else { return };
    let filter = Filter {
        macs: vec![OURS],
        vlans: vec![100, 4094],
    };
    let (program, _xsk) = enabled(&pair, ModeRequest::Native, &filter);
    let cases: [(&[(u16, u16)], bool); 8] = [
        (&[], false),
        (&[(0x8100, 100)], true),
        (&[(0x8100, 0xe000 | 100)], true),
        (&[(0x8100, 4094), (0x8100, 7)], true),
        // A service tag's number is no VLAN's.
        (&[(0x88a8, 4094), (0x8100, 100)], false),
        (&[(0x8100, 7), (0x8100, 100)], false),
        (&[(0x8100, 101)], false),
        (&[(0x8100, 0)], false),
    ];
    for (tags, expected) in cases {
        assert_eq!(
            takes(&pair, &program, &frame_to(OURS, tags)),
            expected,
            "{tags:?}"
        );
    }
    assert!(!takes(&pair, &program, &frame_to(THEIRS, &[(0x8100, 100)])));
    assert!(takes(&pair, &program, &frame_to(EVERYBODY, &[(0x8100, 100)])));
    assert!(!takes(&pair, &program, &frame_to(EVERYBODY, &[(0x8100, 101)])));
}

#[test]
fn vlan_0_is_untagged_priority_tagged_and_service_tagged() {
    let Some(pair) = Pair::new(1500) else { return };
    let filter = Filter {
        macs: Vec::new(),
        vlans: vec![0],
    };
    let (program, _xsk) = enabled(&pair, ModeRequest::Native, &filter);
    assert!(takes(&pair, &program, &frame_to(THEIRS, &[])));
    assert!(takes(&pair, &program, &frame_to(THEIRS, &[(0x8100, 0x6000)])));
    assert!(takes(
        &pair,
        &program,
        &frame_to(THEIRS, &[(0x88a8, 1), (0x8100, 1)])
    ));
    assert!(!takes(&pair, &program, &frame_to(THEIRS, &[(0x8100, 1)])));
}

#[test]
fn filter_is_changed_and_taken_away_while_frames_flow() {
    let Some(pair) = Pair::new(1500) else { return };
    let only = |mac| Filter {
        macs: vec![mac],
        vlans: Vec::new(),
    };
    let (program, xsk) = enabled(&pair, ModeRequest::Native, &only(OURS));
    program.set_filter(0, &only(THEIRS)).expect("room");
    assert!(takes(&pair, &program, &frame_to(THEIRS, &[])));
    assert!(!takes(&pair, &program, &frame_to(OURS, &[])));
    // The filter outlives the socket, so that a successor has the same one.
    program.disable_queue(0).expect("there");
    assert_eq!(program.filter(0).expect("queue 0"), only(THEIRS));
    let conf = bare(1514);
    program.enable_queue(0, xsk.as_fd(), conf).expect("queue 0");
    assert!(!takes(&pair, &program, &frame_to(OURS, &[])));
    program.set_filter(0, &Filter::default()).expect("less");
    assert_eq!(program.filter(0).expect("queue 0"), Filter::default());
    assert!(takes(&pair, &program, &frame_to(OURS, &[])));
}

#[test]
fn impossible_vlan_and_queue_are_refused_and_change_nothing() {
    let Some(pair) = Pair::new(1500) else { return };
    let (program, _xsk) = enabled(&pair, ModeRequest::Native, &Filter::default());
    let filter = Filter {
        macs: vec![OURS],
        vlans: vec![4095],
    };
    let refused = program.set_filter(0, &filter);
    let refused = refused.expect_err("no such VLAN").to_string();
    assert!(refused.contains("VLAN 4095 is invalid"), "{refused}");
    assert_eq!(program.filter(0).expect("queue 0"), Filter::default());
    let refused = program.set_filter(256, &Filter::default());
    let refused = refused.expect_err("no such queue").to_string();
    assert!(refused.contains("queue 256 is beyond"), "{refused}");
}
