//! A real Linux guest under QEMU.

use std::io::Write;
use std::net::TcpListener;

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::driver::F_RING_PACKED;
use testkit::world::{HOST, Setting, assert_stream, features, received_bytes};
use testkit::{World, require, soak, wait};

/// Port where a greeting is said to each who connects.
const GREETER: u16 = 7000;
/// Short connections after each change.
const CONNECTIONS: usize = 12;

#[rstest]
fn guest_pings_moves_tcp_both_ways_and_survives_restarts_of_the_daemon(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(&[], &["--packed"])] options: &[&str],
) {
    require!(Root, Qemu);
    // With one that copies `reconnect` does the same, and `uml` moves TCP.
    let is_packed = placement == Placement::SendDirect;
    if soak::leaves_out(placement != Placement::Copy && options.is_empty() != is_packed) {
        return;
    }
    let mut world = World::new(Setting {
        options,
        ..Setting::new(placement)
    });
    world.assert_pings();
    let port = world.daemon.port(0);
    let packed = features(&port) & F_RING_PACKED != 0;
    assert_eq!(packed, options.contains(&"--packed"), "{port:#}");
    let _server = world.iperf_server();
    for direction in ["", "-R"] {
        assert_stream(&world.guest, HOST, direction);
    }

    for gently in [true, false] {
        if gently {
            world.daemon.terminate();
        } else {
            world.daemon.kill();
        }
        world.daemon.restart(&world.veth.near, &world.serve);
        world
            .guest
            .run_until_success(10 * wait::SOON, &format!("ping -c 1 -W 20 {HOST}"))
            .unwrap_or_else(|said| {
                let (log, status) = (world.daemon.said(), world.daemon.status());
                panic!("no ping after a restart (gently: {gently}): {said}\n{log}\n{status:#}");
            });
        world.assert_pings();
    }
}

/// `ethtool -L` in the guest. Whatever queue of the NIC a frame comes by, and whatever pairs the guest uses, it
/// arrives: each of the short connections is steered by its ports.
#[rstest]
fn queue_pairs_come_and_go_while_tcp_runs_both_ways(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root, Qemu);
    if soak::leaves_out(placement == Placement::Direct) {
        return;
    }
    let world = World::new(Setting {
        queues: 2,
        ..Setting::new(placement)
    });
    world.assert_pings();
    let _server = world.iperf_server();
    let greeter = world
        .veth
        .far
        .enter(|| TcpListener::bind((HOST, GREETER)).expect("a free port"));
    std::thread::spawn(move || {
        for stream in greeter.incoming() {
            let _ = stream.and_then(|mut stream| stream.write_all(b"hello\n"));
        }
    });
    world
        .guest
        .start("iperf", &format!("iperf3 -c {HOST} -P 4 -b 5M -t 8 --bidir -J"));
    for pairs in [1, 2, 1, 2] {
        let _ = world.guest.run(&format!("ethtool -L eth0 combined {pairs}"));
        let said = world.guest.run("ethtool -l eth0 | grep Combined | tail -n 1");
        assert!(said.trim().ends_with(&pairs.to_string()), "{said}");
        let connect = format!("for i in $(seq {CONNECTIONS}); do nc -w 10 {HOST} {GREETER} </dev/null; done");
        let greeted = world.guest.run(&connect).matches("hello").count();
        assert_eq!(greeted, CONNECTIONS, "connections with {pairs} pairs");
        world.assert_pings();
    }
    let report = world.guest.finish("iperf", 6 * wait::SOON);
    for sum in ["sum_received", "sum_received_bidir_reverse"] {
        let received = received_bytes(&report, sum);
        assert!(received > 100_000, "{sum}: {received} bytes");
    }
}
