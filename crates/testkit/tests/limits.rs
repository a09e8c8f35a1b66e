//! Limits of ports: that they are kept, also by queues of a guest's own. How much passes is tested in crate `dataplane`
//! (`policy/bucket.rs`, `rate_limit_tests.rs`, by placement in `policy_tests.rs`).

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::frame::{number_of, numbered};
use testkit::lan::{file, frame, guests, mac};
use testkit::{Daemon, DriverConfig, Layout, NetNs, Rig, Serve, VethPair, assert_has, require, wait};

#[test]
fn limits_are_changed_by_a_reload_and_the_guest_stays() {
    let text = |keys| file(None, &[keys, ""]);
    let netns = NetNs::new("limits");
    let limited = text("from-guest-packets = 1\nfrom-guest-packets-burst = 2");
    let daemon = Daemon::start_file(&netns, &Serve::file(), &[], &limited);
    let mut guests = guests(&daemon, 2, &DriverConfig::default());
    for number in 0..10 {
        guests[0].pairs[0].send(&frame(mac(1), mac(0), 1250, number), Layout::Whole);
    }
    daemon.await_counter("from_guest_limit_waits", 1);
    let said = daemon.reload_with(&text("from-guest-packets = \"1M\""));
    assert_has(&said, &["port vm0 has changed (from-guest-packets"]);
    for _ in 0..10 {
        let got = guests[1].pairs[0].receive(wait::SOON);
        got.unwrap_or_else(|| panic!("all frames come: {:#}", daemon.status()));
    }
    let port = daemon.port_named("vm0").expect("it is there");
    assert_eq!(port["sessions"], 1);
    assert_eq!(port["limits"]["from_guest"]["packets"]["per_second"], 1_000_000);
    let said = daemon.reload_with(&text(""));
    assert_has(&said, &["port vm0 has changed (from-guest-packets), and goes on"]);
    // Nothing but the limits was changed: it is not changed again.
    assert!(daemon.reload_with(&text("")).contains("nothing changed"));
}

/// So low a limit that nothing flows in for hours. Five frames pass at once.
#[rstest]
fn limits_apply_to_a_guest_outside_of_networks(
    #[values(Placement::Copy, Placement::Tap)] placement: Placement,
) {
    require!(Root);
    let mut serve = Serve::interface(VethPair::NIC).placement(placement);
    let burst = (5 * numbered(0).len() * 8).to_string();
    for direction in ["from-guest", "to-guest"] {
        serve = serve
            .with(&format!("--{direction}-bits"), "1")
            .with(&format!("--{direction}-bits-burst"), &burst);
    }
    let mut rig = Rig::with(VethPair::new(), &serve, &DriverConfig::default());
    rig.pair().post(64, &[2048]);
    for number in 0..20 {
        rig.pair().send(&numbered(number), Layout::Whole);
        rig.wire.send(&numbered(number));
    }
    rig.daemon.await_counter("from_guest_limit_waits", 1);
    let arrived = std::iter::from_fn(|| rig.wire.receive(wait::SOON)).filter_map(|frame| number_of(&frame));
    assert!(arrived.take(5).eq(0..5));
    rig.daemon.await_counter("to_guest_limit", 15);
    assert_eq!(rig.daemon.counter("from_guest_frames"), 5);
    assert_eq!(rig.daemon.counter("to_guest_frames"), 5);
}
