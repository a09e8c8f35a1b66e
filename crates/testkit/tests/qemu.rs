//! A real Linux guest under QEMU.

use std::time::Duration;

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::driver::F_RING_PACKED;
use testkit::world::{HOST, Setting, received_bits};
use testkit::{World, require, wait};

#[rstest]
fn guest_pings_and_moves_tcp_both_ways(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
    #[values(&[], &["--packed"])] options: &[&str],
) {
    require!(Root, Qemu);
    let world = World::new(Setting {
        options,
        ..Setting::new(placement)
    });
    world.assert_pings();
    let port = world.daemon.port(0);
    let features = port["features"].as_str().and_then(|text| text.strip_prefix("0x"));
    let features = features.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    let packed = features.expect("a number") & F_RING_PACKED != 0;
    assert_eq!(packed, options.contains(&"--packed"), "{port:#}");
    let _server = world.iperf_server();
    for direction in ["", "-R"] {
        let said = world.guest.run(&format!("iperf3 -c {HOST} -t 2 -J {direction}"));
        let received = received_bits(&said, "sum_received");
        assert!(received > 1e7, "{received} bit/s {direction}");
    }
}

#[rstest]
fn guest_survives_a_restart_of_the_daemon(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
    #[values(&[], &["--packed"])] options: &[&str],
) {
    require!(Root, Qemu);
    let mut world = World::new(Setting {
        options,
        ..Setting::new(placement)
    });
    world.assert_pings();
    for gently in [true, false] {
        if gently {
            world.daemon.terminate();
        } else {
            world.daemon.kill();
        }
        world.daemon.restart(&world.veth.near, &world.serve);
        let back = wait::until(Duration::from_secs(20), || {
            world
                .guest
                .try_run(&format!("ping -c 1 -W 1 {HOST}"))
                .status
                .success()
        });
        assert!(
            back,
            "no ping after a restart (gently: {gently}):\n{}",
            world.daemon.said()
        );
        world.assert_pings();
    }
}
