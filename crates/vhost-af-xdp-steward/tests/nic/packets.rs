//! Queues of that NIC for packets: AF_XDP sockets in zero-copy, in turn with streams, and frames that the NIC's rules
//! bring to them.
//!
//! Their lessee is this process, which is root's, and sends back what comes to it.

use std::time::Duration;

use steer::Filter;
use steward_protocol::{Reason, Steered, Wanted};
use testkit::foreign::{Verdict, judge_all};
use testkit::{PacketPort, assert_soon, frame, require, wait};

use super::common::{self, lessee};
use super::{Bound, NIC, QUEUE, Rig, WIRE, kills};

/// Where testkit's frames go, and as ethtool(8) says it.
const STATION: [u8; 6] = [2, 0, 0, 0, 0, 0xb];
const STATION_TEXT: &str = "02:00:00:00:00:0b";
/// Flows that a NIC spreads.
const FLOWS: std::ops::Range<u16> = 5000..5032;

#[test]
fn queue_is_had_for_packets_in_zero_copy_and_for_streams_in_turn_and_nothing_stays() {
    require!(Root);
    let Some(rig) = Rig::new() else { return };
    let pools = rig.pools();
    for round in 0..kills() {
        packets_in_zero_copy(&rig, round as u8);
        // The program goes when the lease has, and only then headers can be split off.
        let lease = wait::until_some(wait::SOON, || rig.take().ok());
        drop(lease.unwrap_or_else(|| panic!("{}", rig.world.steward)));
        rig.await_no_split();
        rig.set_split(true);
        rig.world.veth.near.enter(|| drop(rig.receiver()));
        rig.assert_untouched();
        rig.set_split(false);
    }
    assert_soon!(
        rig.pools() == pools,
        "{} pools of pages, {pools} at first",
        rig.pools()
    );
    rig.world.await_nothing();
}

/// Leases the queue for packets, and sends back those that a rule brings to it: none of them by copying.
fn packets_in_zero_copy(rig: &Rig, seed: u8) {
    let lease = common::take(&rig.world.socket(), &common::wanted_of(NIC, QUEUE, 1)).expect("it is free");
    let mut echo = lessee::Echo::open(&lease, QUEUE);
    assert_eq!(rig.bound(), Some(Bound::Xsk));
    rig.assert_refused(Reason::Program, "queues of rig1 are leased for AF_XDP");
    rig.add_rule(&format!("ether dst {STATION_TEXT} action {QUEUE} loc 1"));
    let before = ["lent_frames", "lent_sent"].map(|name| rig.counted(name));
    let port = PacketPort::open(&rig.world.veth.far, WIRE);
    for length in [60, 1024, 1514] {
        comes_back(&port, &mut [&mut echo], &frame::plain(length, seed));
    }
    let now = ["lent_frames", "lent_sent"].map(|name| rig.counted(name));
    rig.ethtool(&["-N", NIC, "delete", "1"]);
    // What the host's stack sends may have come there, too.
    let are_more = now.iter().zip(before).all(|(now, before)| *now >= before + 3);
    assert!(are_more, "frames in the socket's memory: {before:?}, now {now:?}");
}

#[test]
fn frames_take_the_path_of_the_programs_verdict() {
    require!(Root);
    let Some(rig) = Rig::new() else { return };
    let (near, pools) = (&rig.world.veth.near, rig.pools());
    let (host, wire) = (
        PacketPort::open(near, NIC),
        PacketPort::open(&rig.world.veth.far, WIRE),
    );
    let verdicts = [
        (Verdict::Pass, "passed", Some(&host)),
        (Verdict::SendBack, "sent_back", Some(&wire)),
        (Verdict::SendBy(near.index_of(NIC)), "redirected", Some(&wire)),
        (Verdict::Drop, "dropped", None),
        (Verdict::Aborted, "aborted", None),
    ];
    for (seed, (verdict, counter, gets)) in (0..).zip(verdicts) {
        let program = judge_all(near, NIC, verdict);
        // No hash is of these frames: the first queue gets them.
        let (before, mut sent) = (rig.counted_of(0, counter), 0);
        for length in [60, 1024, 1514].repeat(30) {
            let frame = frame::plain(length, seed);
            wire.send(&frame);
            sent += 1;
            if let Some(port) = gets {
                let ours = || port.receive(wait::SOON).filter(|got| got.starts_with(&STATION));
                frame::assert_same(&wait::until_some(wait::SOON, ours).expect("it arrives"), &frame);
            }
        }
        assert_soon!(rig.counted_of(0, counter) >= before + sent, "{verdict:?}");
        drop(program);
    }
    assert_eq!(rig.pools(), pools);
}

/// By which of the leased queues, the NIC's table of hashes says, which knows theirs only.
#[test]
fn rules_of_the_nic_bring_the_frames_of_an_address_to_leased_queues_and_go_with_the_lease() {
    require!(Root);
    let root = format!(
        "[[allow]]\nuser = 0\ninterface = \"{NIC}\"\nqueues = \"all\"\nmacs = [\"{STATION_TEXT}\"]\n"
    );
    let Some(rig) = Rig::with(&root) else { return };
    rig.ethtool(&["-K", NIC, "rxvlan", "off"]);
    for (queues, steered) in [(1, Steered::ByRules), (2, Steered::ByContext)] {
        let start_queue = QUEUE + 1 - queues;
        let wanted = Wanted {
            filter: Filter {
                macs: vec![STATION],
                vlans: Vec::new(),
            },
            ..common::wanted_of(NIC, start_queue, queues)
        };
        let lease = common::take(&rig.world.socket(), &wanted).expect("allowed");
        let facts = lease.facts();
        assert_eq!((facts.steered, rig.rules()), (steered, 1), "{}", facts.steering);
        let mut echoes: Vec<_> = (start_queue..=QUEUE)
            .map(|queue| lessee::Echo::open(&lease, queue))
            .collect();
        let came = |rig: &Rig| [0, 1, 2, 3].map(|queue| rig.counted_of(queue, "lent_frames"));
        let before = came(&rig);
        let port = PacketPort::open(&rig.world.veth.far, WIRE);
        for flow in FLOWS {
            comes_back(
                &port,
                &mut echoes.iter_mut().collect::<Vec<_>>(),
                &frame::udp_from_afar(flow, 64),
            );
        }
        // Each came back, so none came by a queue without a socket.
        let now = came(&rig);
        let used = now.iter().zip(before).filter(|(now, before)| *now > before);
        assert_eq!(
            used.count(),
            queues as usize,
            "frames that came to queues: {now:?}"
        );
        drop(echoes);
        drop(lease);
        rig.assert_untouched();
    }
    rig.world.await_nothing();
    rig.ethtool(&["-K", NIC, "rxvlan", "on"]);
}

/// Sends a frame, and awaits it from one of these.
fn comes_back(port: &PacketPort, echoes: &mut [&mut lessee::Echo], sent: &[u8]) {
    port.send(sent);
    let got = wait::until_some(wait::SOON, || {
        for echo in &mut *echoes {
            echo.run(Duration::from_millis(1));
        }
        let got = port.receive(Duration::from_millis(1));
        // The host's stack sends, too.
        got.filter(|got| got.starts_with(&STATION))
    });
    frame::assert_same(&got.expect("it comes back"), sent);
}
