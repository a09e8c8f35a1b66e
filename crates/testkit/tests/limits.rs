//! Limits of ports: that they are kept, also by queues of a guest's own. How much passes is tested in crate `dataplane`
//! with a clock of its own (`policy/bucket.rs`, `rate_limit_tests.rs`).

use std::time::Instant;

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::frame::{number_of, numbered};
use testkit::lan::{file, frame, guests, mac};
use testkit::{Daemon, DriverConfig, Layout, NetNs, Rig, Serve, VethPair, require, wait};

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
    assert!(
        said.contains("port vm0 has changed (from-guest-packets"),
        "{said}"
    );
    for _ in 0..10 {
        let got = guests[1].pairs[0].receive(wait::SOON);
        got.unwrap_or_else(|| panic!("all frames come: {:#}", daemon.status()));
    }
    let port = daemon.port_named("vm0").expect("it is there");
    assert_eq!(port["sessions"], 1);
    assert_eq!(port["limits"]["from_guest"]["packets"]["per_second"], 1_000_000);
    let said = daemon.reload_with(&text(""));
    assert!(
        said.contains("port vm0 has changed (from-guest-packets), and goes on"),
        "{said}"
    );
    // Nothing but the limits was changed: it is not changed again.
    assert!(daemon.reload_with(&text("")).contains("nothing changed"));
}

/// Frames that may have passed a limit of one a second since then, with that burst.
fn most(burst: u64, since: Instant) -> u64 {
    burst + since.elapsed().as_secs() + 1
}

fn limited(placement: Placement, direction: &str) -> (Rig, Instant) {
    let serve = Serve::interface(VethPair::NIC)
        .placement(placement)
        .with(&format!("--{direction}-packets"), "1")
        .with(&format!("--{direction}-packets-burst"), "5");
    let since = Instant::now();
    let rig = Rig::with(VethPair::new(), &serve, &DriverConfig::default());
    (rig, since)
}

#[rstest]
fn guest_with_a_queue_of_its_own_is_held_back(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct, Placement::Tap)] placement: Placement,
) {
    require!(Root);
    let (mut rig, since) = limited(placement, "from-guest");
    for number in 0..20 {
        rig.pair().send(&numbered(number), Layout::Whole);
    }
    rig.daemon.await_counter("from_guest_limit_waits", 1);
    let wire = &rig.wire;
    let numbers =
        |limit| std::iter::from_fn(move || wire.receive(limit)).filter_map(|frame| number_of(&frame));
    let mut arrived: Vec<_> = numbers(wait::SOON).take(5).collect();
    arrived.extend(numbers(wait::QUIET).take(15));
    let count = arrived.len() as u64;
    assert!((5..=most(5, since)).contains(&count), "{arrived:?}");
    assert!(
        (0..).zip(&arrived).all(|(at, number)| at == *number),
        "{arrived:?}"
    );
}

#[rstest]
fn guest_with_a_queue_of_its_own_gets_no_more(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Tap)] placement: Placement,
) {
    require!(Root);
    let (mut rig, since) = limited(placement, "to-guest");
    rig.pair().post(64, &[2048]);
    for number in 0..20 {
        rig.wire.send(&numbered(number));
    }
    let counter = |name: &str| rig.daemon.counter(name);
    let all = wait::until(wait::SOON, || {
        counter("to_guest_frames") + counter("to_guest_limit") >= 20
    });
    assert!(all, "{:#}", rig.daemon.status());
    let got = counter("to_guest_frames");
    assert!((5..=most(5, since)).contains(&got), "{got} frames");
}
