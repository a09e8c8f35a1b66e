//! Workers that fall asleep while something happens: nothing may be left lying.

use std::time::{Duration, Instant};

use rstest::rstest;
use testkit::daemon::{Mode, Placement};
use testkit::late_nic::{self, LATE};
use testkit::{DriverConfig, Layout, Rig, Serve, VethPair, frame, require, soak, wait};

/// A rig whose worker sleeps as soon as it finds nothing to do.
fn sleepy(placement: Placement) -> Rig {
    let serve = Serve::interface(VethPair::NIC)
        .placement(placement)
        .mode(Mode::Native)
        .with("--spin-us", "0");
    Rig::with(VethPair::new(), &serve, &DriverConfig::default())
}

/// Waits so many nanoseconds without giving up the CPU: sleeping would always be longer.
fn pause(nanoseconds: u64) {
    let start = Instant::now();
    while start.elapsed() < Duration::from_nanos(nanoseconds) {
        std::hint::spin_loop();
    }
}

#[rstest]
fn frame_that_arrives_while_the_worker_falls_asleep_is_delivered(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut rig = sleepy(placement);
    rig.post(128, &[2048]);
    let sent = frame::plain(60, 0x77);
    for round in 0..soak::count(4_000, 80_000) as u64 {
        // Two frames: the second comes at every moment of the worker's going to sleep after the first.
        rig.wire.send(&sent);
        pause(round % 400 * 100);
        rig.wire.send(&sent);
        for _ in 0..2 {
            let got = rig.pair().receive(wait::SOON);
            assert!(got.is_some(), "round {round}: a frame stays in the NIC");
        }
    }
}

/// How often the rig's worker has fallen asleep.
fn sleeps(rig: &Rig) -> u64 {
    let count = &rig.daemon.status()["workers"][0]["sleeps"];
    count.as_u64().expect("a number")
}

/// How often at most a worker falls asleep from now on that wakes by a timer of a millisecond, and some times for other
/// reasons: a slow machine wakes it later, and never earlier.
fn most_sleeps_since(begun: Instant) -> u64 {
    u64::try_from(begun.elapsed().as_millis()).expect("short") * 2 + 100
}

/// Nothing tells the worker that the NIC has completed frames, whose buffers are the guest's again then. It looks less
/// and less often, once a millisecond in the end.
#[rstest]
fn buffers_are_back_when_a_nic_that_is_late_has_completed_their_frames(
    #[values(Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let veth = VethPair::new();
    late_nic::make(&veth.near);
    let serve = Serve::interface(LATE).placement(placement).mode(Mode::Skb);
    let mut rig = Rig::with(veth, &serve.with("--spin-us", "0"), &DriverConfig::default());
    let (sent, mut back) = (frame::plain(1514, 0x79), 0);
    (0..64).for_each(|_| rig.pair().send(&sent, Layout::Whole));
    // All that it takes now it has sent at once.
    wait::a_moment();
    let (before, begun) = (sleeps(&rig), Instant::now());
    std::thread::sleep(wait::QUIET);
    let woken = sleeps(&rig) - before;
    assert!(
        woken < most_sleeps_since(begun),
        "it woke {woken} times for nothing"
    );
    while rig.pair().from_guest.await_used(Duration::ZERO).is_some() {
        back += 1;
    }
    assert!(back < 8, "the NIC has completed {back} frames");
    late_nic::complete(&rig.veth.near);
    while back < 64 {
        let used = rig.pair().from_guest.await_used(wait::SOON);
        assert!(used.is_some(), "{back} buffers are back");
        back += 1;
    }
}
