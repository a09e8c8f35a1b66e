//! Queue pairs that the guest switches off and on, as `ethtool -L` does, while frames come in at all queues of the NIC.

use std::collections::BTreeSet;
use std::time::Duration;

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::{Driver, DriverConfig, Layout, Rig, Serve, VethPair, frame, require, wait};
use vhost::vhost_user::VhostUserFrontend;

const BUFFER: u32 = 2048;
const FLOWS: u16 = 64;

fn rig(placement: Placement, pairs: usize) -> Rig {
    let config = DriverConfig {
        pairs,
        ..DriverConfig::default()
    };
    let serve = Serve::interface(VethPair::NIC)
        .placement(placement)
        .with("--queues", pairs.to_string());
    let queues = u32::try_from(pairs).expect("few");
    Rig::with(VethPair::with(queues, 1500), &serve, &config)
}

fn switch(driver: &mut Driver, pair: usize, on: bool) {
    for index in [2 * pair, 2 * pair + 1] {
        driver.frontend().set_vring_enable(index, on).expect("switched");
    }
}

/// Sends a frame of each flow; what arrives in each pair, by flow.
fn flows(rig: &mut Rig) -> Vec<BTreeSet<u16>> {
    (0..FLOWS).for_each(|flow| rig.wire.send(&frame::udp(flow, 200)));
    let arrived = arrivals(rig, 200, wait::SOON);
    assert!(
        are_all(&arrived),
        "not all flows arrived: {arrived:?}\n{:#}",
        rig.daemon.port(0)
    );
    arrived
}

/// What arrives in each pair of frames with that length, one a flow, until all have.
fn arrivals(rig: &mut Rig, len: usize, limit: Duration) -> Vec<BTreeSet<u16>> {
    let mut arrived = vec![BTreeSet::new(); rig.driver.pairs.len()];
    wait::until(limit, || {
        for (pair, arrived) in rig.driver.pairs.iter_mut().zip(&mut arrived) {
            while let Some(got) = pair.receive(Duration::ZERO) {
                if got.frame.len() == len {
                    let flow = u16::from_be_bytes([got.frame[34], got.frame[35]]);
                    frame::assert_same(&got.frame, &frame::udp(flow, len));
                    assert!(arrived.insert(flow), "flow {flow} arrived twice");
                }
            }
        }
        are_all(&arrived)
    });
    arrived
}

fn are_all(arrived: &[BTreeSet<u16>]) -> bool {
    arrived.iter().map(BTreeSet::len).sum::<usize>() == usize::from(FLOWS)
}

#[rstest]
fn frames_of_all_queues_reach_the_guest_however_many_pairs_it_uses(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(2, 4)] pairs: usize,
) {
    require!(Root);
    let mut rig = rig(placement, pairs);
    for pair in 1..pairs {
        switch(&mut rig.driver, pair, false);
    }
    rig.post(128, &[BUFFER]);
    for pair in 1..pairs {
        rig.driver.pairs[pair].post(128, &[BUFFER]);
    }
    for _ in 0..3 {
        let arrived = flows(&mut rig);
        assert_eq!(arrived[0].len(), usize::from(FLOWS), "one pair is on");
        assert!(
            rig.daemon.counter("spilled_frames") > 0,
            "the NIC used one queue only: no test"
        );

        (1..pairs).for_each(|pair| switch(&mut rig.driver, pair, true));
        await_flows(&mut rig, pairs);
        let arrived = flows(&mut rig);
        assert!(
            arrived.iter().all(|flows| !flows.is_empty()),
            "a pair that is on gets nothing: {arrived:?}"
        );
        for pair in 0..pairs {
            let sent = frame::plain(100, 1);
            rig.driver.pairs[pair].send(&sent, Layout::Whole);
            frame::assert_same(&rig.wire.receive(wait::SOON).expect("each pair sends"), &sent);
        }

        (1..pairs).for_each(|pair| switch(&mut rig.driver, pair, false));
        await_flows(&mut rig, 1);
    }
}

/// Waits until a frame of each flow arrives, and some in each of the first pairs: after the switch sockets may have
/// been opened anew, and what came meanwhile was lost. Each try has a length of its own, by which what is late of an
/// earlier one is known.
fn await_flows(rig: &mut Rig, on: usize) {
    let mut len = 100;
    let arrive = wait::until(wait::SOON, || {
        len += 1;
        for flow in 0..FLOWS {
            let _ = rig.wire.try_send(&frame::udp(flow, len));
        }
        let arrived = arrivals(rig, len, Duration::from_secs(2));
        are_all(&arrived) && arrived[..on].iter().all(|flows| !flows.is_empty())
    });
    assert!(arrive, "not all flows arrive: {:#}", rig.daemon.port(0));
}
