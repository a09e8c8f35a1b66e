//! Queue pairs that the guest switches off and on, as `ethtool -L` does, or does not set up, as firmware does, while
//! frames come in at all queues of the NIC.

use std::collections::BTreeSet;
use std::time::Duration;

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::{Daemon, Driver, DriverConfig, Layout, Rig, Serve, VethPair, frame, require, soak, wait};
use vhost::vhost_user::VhostUserFrontend;

const BUFFER: u32 = 2048;
const FLOWS: u16 = 64;

fn switch(driver: &mut Driver, pair: usize, on: bool) {
    for index in [2 * pair, 2 * pair + 1] {
        driver.frontend().set_vring_enable(index, on).expect("switched");
    }
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

/// Of the port, and of its interface where it has one for itself.
const PAIRS: usize = 4;

/// What a driver does with its queue pairs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Use {
    AllSetUp,
    /// A driver without MQ: firmware, iPXE.
    OnlyTheFirst,
    SomeLater,
    /// As a Linux guest that was told to use fewer.
    NotEnabled,
    EnabledButNotSetUp,
    /// Of each but the first, one of its two vrings.
    Halves,
    EnabledThenDisabled,
    Stopped,
    /// The guest boots, and has another driver.
    ResetAndFewer,
    /// The last pair first, the transmit vring before the receive vring, enabled before it is there.
    OddOrder,
    FirstStoppedAndStarted,
}

impl Use {
    /// Lets the driver do it; which pairs are on then.
    fn drive(self, rig: &mut Rig, config: &DriverConfig) -> BTreeSet<usize> {
        let others = 1..PAIRS;
        let driver = &mut rig.driver;
        match self {
            Self::AllSetUp => start(driver, 0..PAIRS),
            Self::OddOrder => {
                for pair in [3, 1, 2, 0] {
                    switch(driver, pair, true);
                    set_up(driver, pair, &[1, 0]);
                }
            }
            Self::EnabledThenDisabled => {
                start(driver, 0..PAIRS);
                others.clone().for_each(|pair| switch(driver, pair, false));
            }
            Self::Stopped => {
                start(driver, 0..PAIRS);
                for pair in [1, 2] {
                    driver.stop_pair(pair).expect("stopped");
                }
            }
            Self::ResetAndFewer => {
                start(driver, 0..PAIRS);
                for pair in 0..PAIRS {
                    driver.stop_pair(pair).expect("stopped");
                }
                let config = DriverConfig {
                    pairs: 1,
                    ..config.clone()
                };
                driver.start_over(&config).expect("started");
            }
            _ => start(driver, 0..1),
        }
        match self {
            Self::SomeLater => {
                rig.driver.pairs[0].post(128, &[BUFFER]);
                await_flows_in(rig, &BTreeSet::from([0]));
                start(&mut rig.driver, [1, 3].into_iter());
            }
            Self::NotEnabled => others.clone().for_each(|pair| set_up(driver, pair, &[0, 1])),
            Self::EnabledButNotSetUp => others.clone().for_each(|pair| switch(driver, pair, true)),
            Self::Halves => {
                for pair in others.clone() {
                    set_up(driver, pair, &[pair % 2]);
                    switch(driver, pair, true);
                }
            }
            Self::FirstStoppedAndStarted => {
                driver.stop_pair(0).expect("stopped");
                (0..2).for_each(|index| _ = driver.pairs[0].renew(index));
                driver.start_pair(0).expect("started");
            }
            _ => {}
        }
        match self {
            Self::AllSetUp | Self::OddOrder => (0..PAIRS).collect(),
            Self::SomeLater => BTreeSet::from([0, 1, 3]),
            Self::Stopped => BTreeSet::from([0, 3]),
            _ => BTreeSet::from([0]),
        }
    }
}

fn start(driver: &mut Driver, pairs: impl Iterator<Item = usize>) {
    for pair in pairs {
        driver.start_pair(pair).expect("started");
    }
}

/// Starts vrings of a pair, and enables none.
fn set_up(driver: &mut Driver, pair: usize, vrings: &[usize]) {
    driver.replace_calls(pair).expect("told");
    for vring in vrings {
        driver.start_vring(2 * pair + vring).expect("started");
    }
}

/// Waits until a frame of each flow arrives, and some in each of these pairs, and none in others.
fn await_flows_in(rig: &mut Rig, on: &BTreeSet<usize>) {
    let mut len = 300;
    let mut arrived = Vec::new();
    let arrive = wait::until(wait::SOON, || {
        len += 1;
        for flow in 0..FLOWS {
            let _ = rig.wire.try_send(&frame::udp(flow, len));
        }
        arrived = arrivals(rig, len, Duration::from_secs(2));
        let used = (0..arrived.len()).filter(|&pair| !arrived[pair].is_empty());
        are_all(&arrived) && used.eq(on.iter().copied())
    });
    assert!(arrive, "{on:?}: {arrived:?}\n{:#}", rig.daemon.port(0));
}

#[rstest]
fn frames_of_all_queues_reach_the_guest_whatever_its_driver_does_with_its_pairs(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(
        Use::AllSetUp,
        Use::OnlyTheFirst,
        Use::SomeLater,
        Use::NotEnabled,
        Use::EnabledButNotSetUp,
        Use::Halves,
        Use::EnabledThenDisabled,
        Use::Stopped,
        Use::ResetAndFewer,
        Use::OddOrder,
        Use::FirstStoppedAndStarted
    )]
    what: Use,
) {
    // By placement, either the kernel or the guest has the receive buffers of a disabled pair.
    let few = [Use::OnlyTheFirst, Use::Halves, Use::Stopped, Use::ResetAndFewer];
    if soak::leaves_out(placement == Placement::Copy || few.contains(&what)) {
        return;
    }
    require!(Root);
    assert_all_arrive(placement, what);
}

/// Frames of all flows arrive, in the pairs that are on, and each of these sends.
fn assert_all_arrive(placement: Placement, what: Use) {
    let config = DriverConfig::with_pairs(PAIRS);
    let veth = VethPair::with(PAIRS as u32, 1500);
    let serve = Serve::interface(VethPair::NIC)
        .placement(placement)
        .with("--queues", PAIRS.to_string());
    let daemon = Daemon::start(&veth.near, &serve);
    let driver = Driver::connect_idle(&daemon.socket(), &config).expect("accepted");
    let mut rig = Rig::of(veth, daemon, driver);
    let on = what.drive(&mut rig, &config);
    for pair in &mut rig.driver.pairs {
        let missing = 128 - pair.posted().count();
        pair.post(missing, &[BUFFER]);
    }
    await_flows_in(&mut rig, &on);
    // Also when the lanes have slept, and all that comes to a queue wakes the first guest's.
    rig.daemon.await_rest_after(|| rig.wire.send(&frame::udp(1, 299)));
    await_flows_in(&mut rig, &on);
    for &pair in &on {
        let sent = [&frame::FROM[..], &frame::TO, &frame::plain(100, 1)[12..]].concat();
        rig.driver.pairs[pair].send(&sent, Layout::Whole);
        frame::assert_same(&rig.wire.receive(wait::SOON).expect("each pair sends"), &sent);
    }
    let shown = rig.daemon.port(0);
    let spilled = rig.daemon.counter("spilled_frames");
    assert_eq!(spilled > 0, on.len() < PAIRS, "{shown:#}");
    let fallbacks = shown["lanes"][0]["fallbacks"].to_string();
    let copies = fallbacks.contains("does not use all queue pairs");
    assert_eq!(
        copies,
        on.len() < PAIRS && placement != Placement::Copy,
        "{shown:#}"
    );
    if what == Use::OnlyTheFirst {
        let other = &shown["lanes"][2];
        assert_eq!(other["running"], false, "{shown:#}");
        assert!(
            other["fallbacks"].to_string().contains("not set up all"),
            "{shown:#}"
        );
        // The guest goes: nothing is left running.
        rig.driver.stop_pair(0).expect("stopped");
        let shown = rig.daemon.port(0);
        let modes: Vec<_> = (0..PAIRS).map(|pair| &shown["lanes"][pair]["mode"]).collect();
        assert!(modes.iter().all(|mode| mode.is_null()), "{shown:#}");
    }
}
