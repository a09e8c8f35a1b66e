//! Workers that poll the driver themselves (`--busy-poll-us`).

use rstest::rstest;
use testkit::daemon::{Mode, Placement};
use testkit::{Daemon, DriverConfig, NetNs, Rig, Serve, VethPair, frame, kernel, require, skip_half};

const BUFFER: u32 = 2048;

/// Lets interrupts wait for whoever polls.
fn defer_interrupts(near: &NetNs) {
    for (file, value) in [("napi_defer_hard_irqs", 2), ("gro_flush_timeout", 200_000)] {
        let _ = near.with_sysfs(&format!("echo {value} > /sys/class/net/{}/{file}", VethPair::NIC));
    }
}

#[rstest]
fn frames_pass_whoever_polls(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
    #[values(false, true)] leased: bool,
) {
    skip_half!(placement == Placement::Direct, mode, leased);
    require!(Root);
    let serve = Serve::interface(VethPair::NIC)
        .placement(placement)
        .mode(mode)
        .with("--busy-poll-us", "20");
    let serve = serve.leased_if(leased);
    let veth = VethPair::new();
    defer_interrupts(&veth.near);
    let mut rig = Rig::with(veth, &serve, &DriverConfig::default());
    rig.post(64, &[BUFFER]);
    // That polls bring frames is seen where the kernel polls for sockets: scripts/kernels.
    let polled = mode == Mode::Native && kernel::version() < (6, 13);
    let said = rig.daemon.port(0)["lanes"][0]["fallbacks"].to_string();
    assert_eq!(said.contains("no busy polling"), !polled, "{said}");
    rig.assert_passes_both_ways();
    for seed in 0..200 {
        rig.assert_to_guest(&frame::plain(60 + usize::from(seed), seed));
    }
    rig.assert_passes_both_ways();
}

#[test]
fn budget_beyond_what_the_policy_allows_is_refused_with_the_remedy() {
    require!(Root);
    let veth = VethPair::new();
    // Stewards of tests allow 64.
    let serve = Serve::interface(VethPair::NIC)
        .leased()
        .with("--busy-poll-us", "20")
        .with("--busy-poll-budget", "65");
    Daemon::spawn(&veth.near, &serve)
        .assert_complains(&["SO_BUSY_POLL_BUDGET=65 refused", "`busy-poll` in its policy"]);
}
