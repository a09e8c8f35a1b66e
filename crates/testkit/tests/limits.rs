//! Limits of ports, kept by the daemon's clock: a guest that sends as fast as it can, or gets as much, for some
//! seconds.
//!
//! How much passes at least, this machine decides; the bucket's own tests do that with a clock of theirs
//! (`policy/bucket.rs` of crate `dataplane`). How much passes at most is asserted here.

use std::time::{Duration, Instant};

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::frame::{number_of, numbered};
use testkit::two_ports::{TwoPorts, file, frame};
use testkit::{DriverConfig, Layout, Rig, Serve, VethPair, require, wait};

/// How long each guest tries.
const LASTS: Duration = Duration::from_secs(2);

#[rstest]
#[case::bits_sent("from-guest-bits = \"20M\"\nfrom-guest-bits-burst = \"200k\"", 0, 2000, 20)]
#[case::packets_got("to-guest-packets = \"3k\"\nto-guest-packets-burst = 50", 1, 3000, 50)]
fn no_more_passes_than_the_limit_and_a_burst(
    #[case] keys: &str,
    #[case] from: usize,
    #[case] frames_a_second: u64,
    #[case] burst: u64,
) {
    let mut pair = TwoPorts::new(keys);
    let (arrived, took) = pair.flood(from, LASTS, 2 * burst);
    let most = (took.as_secs_f64() * frames_a_second as f64) * 1.05 + burst as f64;
    assert!(
        (arrived as f64) <= most,
        "{arrived} frames in {took:?}, {most:.0} may"
    );
    // It is a limit and no wall: far less would be another mistake, whatever the machine does meanwhile.
    assert!(
        arrived > 2 * burst,
        "{arrived} frames in {took:?}: {}",
        pair.daemon.said()
    );
    let counter = if from == 0 {
        "from_guest_limit_waits"
    } else {
        "to_guest_limit"
    };
    assert!(pair.daemon.counter(counter) > 0, "{:#}", pair.daemon.status());
    println!(
        "{:.1} % of the limit",
        (arrived.saturating_sub(burst)) as f64 / took.as_secs_f64() / frames_a_second as f64 * 100.0
    );
}

#[test]
fn limits_are_changed_by_a_reload_and_the_guest_stays() {
    let mut pair = TwoPorts::new("from-guest-packets = 1\nfrom-guest-packets-burst = 2");
    for _ in 0..10 {
        pair.guests[0].pairs[0].send(&frame(1, 0), Layout::Whole);
    }
    pair.daemon.await_counter("from_guest_limit_waits", 1);
    let said = pair.daemon.reload_with(&file("from-guest-packets = \"1M\""));
    assert!(
        said.contains("port vm0 has changed (from-guest-packets"),
        "{said}"
    );
    for _ in 0..10 {
        let got = pair.guests[1].pairs[0].receive(wait::SOON);
        got.unwrap_or_else(|| panic!("all frames come: {:#}", pair.daemon.status()));
    }
    let port = pair.daemon.port_named("vm0").expect("it is there");
    assert_eq!(port["sessions"], 1);
    assert_eq!(port["limits"]["from_guest"]["packets"]["per_second"], 1_000_000);
    let said = pair.daemon.reload_with(&file(""));
    assert!(
        said.contains("port vm0 has changed (from-guest-packets), and goes on"),
        "{said}"
    );
    // Nothing but the limits was changed: it is not changed again.
    assert!(pair.daemon.reload_with(&file("")).contains("nothing changed"));
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
