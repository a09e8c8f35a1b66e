//! A real Linux guest under User-mode Linux, whose virtio_uml is the VMM: no QEMU, no KVM.

use rstest::rstest;
use testkit::daemon::{Mode, Placement};
use testkit::guest::{Guest, UML};
use testkit::process::{output_of, run};
use testkit::world::{GUEST, HOST, Setting, assert_stream};
use testkit::{VethPair, World, assert_soon, require, wait};

fn world(placement: Placement, mode: Mode) -> World {
    World::new(Setting {
        mode,
        options: &UML,
        ..Setting::new(placement)
    })
}

/// Ping and TCP; segments that the guest leaves to the daemon, and segments that the daemon joins for the guest.
#[rstest]
#[case::copy(Placement::Copy, Mode::Native)]
#[case::copy_skb(Placement::Copy, Mode::Skb)]
#[case::tap(Placement::Copy, Mode::Tap)]
#[case::send_direct(Placement::SendDirect, Mode::Native)]
#[case::direct(Placement::Direct, Mode::Native)]
#[case::direct_skb(Placement::Direct, Mode::Skb)]
fn guest_pings_and_moves_tcp_with_offloads(#[case] placement: Placement, #[case] mode: Mode) {
    require!(Root, Uml);
    let world = world(placement, mode);
    if mode == Mode::Tap {
        // Nobody here joins frames.
        let on = ["-K", VethPair::WIRE, "tx", "on", "gso", "on", "tso", "on"];
        world.veth.far.run("ethtool", &on);
    }
    world.assert_pings();
    let address = GUEST.split_once('/').expect("a prefix length").0;
    let said = world
        .veth
        .far
        .output_of("ping", &["-c", "3", "-W", "20", address]);
    assert!(said.contains(" 0% packet loss"), "{said}");

    let offloads = world.guest.run("ethtool -k eth0");
    for offload in ["tx-checksumming", "tx-tcp-segmentation", "rx-checksumming"] {
        assert!(
            offloads.contains(&format!("{offload}: on")),
            "{offload}: {offloads}"
        );
    }
    let _server = world.iperf_server();
    for direction in ["", "-R"] {
        assert_stream(&world.guest, HOST, direction);
    }
    let port = world.daemon.port(0);
    assert!(world.daemon.counter("from_guest_super_frames") > 0, "{port:#}");
    if placement == Placement::Copy {
        assert!(world.daemon.counter("to_guest_super_frames") > 0, "{port:#}");
    }
    // In each of the two lines that begin with Tcp: InCsumErrors stands last.
    let errors = world
        .guest
        .run("awk '/^Tcp:/ { last = $NF } END { print last }' /proc/net/snmp");
    assert_eq!(errors.trim(), "0", "TCP segments with a wrong checksum");
}

/// virtio_uml does not connect again: its guest loses the device, and lives.
#[rstest]
fn guest_loses_its_device_when_the_daemon_ends_and_another_guest_has_one() {
    require!(Root, Uml);
    let mut world = world(Placement::Copy, Mode::Native);
    world.assert_pings();
    world.daemon.terminate();
    world.daemon.restart(&world.veth.near, &world.serve);
    let gone = world
        .guest
        .run_until_success(wait::SOON, "test ! -e /sys/class/net/eth0");
    gone.unwrap_or_else(|said| panic!("eth0 is still there: {said}"));
    world.guest = Guest::boot_uml(&world.daemon.socket(), GUEST);
    world.assert_pings();
}

/// How a guest ends.
#[derive(Clone, Copy)]
enum End {
    Stopped,
    Killed,
    /// With the process group that started it.
    Abandoned,
}

/// UML runs each program of its guest in a process of the host's.
#[rstest]
fn no_process_of_a_guest_outlives_it(#[values(End::Stopped, End::Killed, End::Abandoned)] end: End) {
    require!(Root, Uml);
    let world = world(Placement::Copy, Mode::Native);
    world.guest.start("programs", "sleep 1000 & sleep 1000");
    let uml_dir = format!("uml_dir={}/", world.guest.state().display());
    let processes = || {
        let list = output_of("ps", &["-eo", "pid,args"]);
        let of_this = list.lines().filter(|line| line.contains(&uml_dir));
        of_this.map(|line| line.trim().to_owned()).collect::<Vec<_>>()
    };
    let all = processes();
    assert!(all.len() > 4, "{all:#?}");
    match end {
        End::Stopped => drop(world.guest),
        End::Killed => world.guest.kill(),
        End::Abandoned => {
            let starter = all.iter().find(|line| line.contains("uml-starter"));
            let pid = starter
                .and_then(|line| line.split(' ').next())
                .expect("its starter");
            run("kill", &["-KILL", pid]);
        }
    }
    assert_soon!(processes().is_empty(), "{:#?}", processes());
}
