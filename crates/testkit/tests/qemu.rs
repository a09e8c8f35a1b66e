//! A real Linux guest under QEMU.

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::guest::Guest;
use testkit::{Daemon, Running, Serve, VethPair, require, wait};

const GUEST: &str = "10.77.0.2/24";
const HOST: &str = "10.77.0.1";

struct World {
    guest: Guest,
    daemon: Daemon,
    serve: Serve,
    veth: VethPair,
}

impl World {
    fn new(placement: Placement) -> Self {
        let veth = VethPair::new();
        veth.far.ip(&["link", "set", VethPair::WIRE, "arp", "on"]);
        veth.far
            .ip(&["address", "add", &format!("{HOST}/24"), "dev", VethPair::WIRE]);
        let serve = Serve::interface(VethPair::NIC).placement(placement);
        let daemon = Daemon::start(&veth.near, &serve);
        let guest = Guest::boot(("--socket", &daemon.socket()), GUEST, &["--mem", "256"]);
        Self {
            guest,
            daemon,
            serve,
            veth,
        }
    }

    fn assert_pings(&self) {
        let said = self.guest.run(&format!("ping -c 5 -i 0.2 -W 2 {HOST}"));
        assert!(said.contains(" 0% packet loss"), "{said}");
    }
}

#[rstest]
fn guest_pings_and_moves_tcp_both_ways(#[values(Placement::Copy, Placement::Direct)] placement: Placement) {
    require!(Root, Qemu);
    let world = World::new(placement);
    world.assert_pings();
    let mut command = world.veth.far.command("iperf3");
    command.args(["-s", "-p", "5201", "--forceflush"]);
    let mut server = Running::start(command);
    server.await_text("listening");
    for direction in ["", "-R"] {
        let said = world.guest.run(&format!("iperf3 -c {HOST} -t 2 -J {direction}"));
        let report: serde_json::Value =
            serde_json::from_str(&said).unwrap_or_else(|_| panic!("no JSON: {said}"));
        let received = report["end"]["sum_received"]["bits_per_second"]
            .as_f64()
            .expect("a rate");
        assert!(received > 1e7, "{received} bit/s {direction}");
    }
}

#[rstest]
fn guest_survives_a_restart_of_the_daemon(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root, Qemu);
    let mut world = World::new(placement);
    world.assert_pings();
    for gently in [true, false] {
        if gently {
            world.daemon.terminate();
        } else {
            world.daemon.kill();
        }
        world.daemon.restart(&world.veth.near, &world.serve);
        let back = wait::until(std::time::Duration::from_secs(20), || {
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
