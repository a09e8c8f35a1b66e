//! Guests that share a NIC: networks without an uplink, addresses that ports learn, Linux guests. Who reaches whom is
//! tested in crate `dataplane` (`network_tests/reach.rs`).

use rstest::rstest;
use testkit::guest::{Backend, Guest};
use testkit::lan::{Lan, STRANGER, file, frame, guests, mac};
use testkit::world::{HOST, assert_stream, give_address, iperf_server};
use testkit::{Daemon, DriverConfig, Layout, NetNs, Serve, VethPair, require, soak, wait};

#[rstest]
fn network_without_an_uplink_needs_no_privilege() {
    let netns = NetNs::new("network");
    let text = file(None, &["", ""]);
    let daemon = Daemon::start_file(&netns, &Serve::file(), &[], &text);
    let mut guests = guests(&daemon, 2, &DriverConfig::default());
    let sent = frame(mac(1), mac(0), 1514, 1);
    guests[0].pairs[0].send(&frame(STRANGER, mac(0), 60, 1), Layout::Whole);
    guests[0].pairs[0].send(&sent, Layout::Whole);
    assert_eq!(
        guests[1].pairs[0].receive(wait::SOON).expect("it comes").frame,
        sent
    );
    daemon.await_counter("from_guest_no_station", 1);
}

/// Of the first guest, for its VMM.
const MAC_0: &str = "02:00:00:00:00:00";
/// What a guest inside a guest has.
const INNER: [u8; 6] = [0x02, 0, 0, 0, 2, 0];

#[rstest]
fn guest_has_further_addresses_where_its_port_learns() {
    require!(Root);
    let ports = ["learning = true", "learning = true", ""];
    let mut lan = Lan::new(&ports, &DriverConfig::default());
    // It moves to who used it last.
    for guest in [0, 1, 0] {
        let sent = frame(STRANGER, INNER, 60, guest as u8);
        lan.send(guest, &sent);
        assert_eq!(lan.received_by_wire(), sent);
        let back = frame(INNER, STRANGER, 60, guest as u8);
        let came = wait::until(wait::SOON, || {
            // Before the program knows whose it is such frames are the host's, or the other guest's.
            lan.wire.send(&back);
            let mut got = std::iter::from_fn(|| lan.guests[guest].pairs[0].receive(wait::QUIET));
            got.any(|got| got.frame == back)
        });
        assert!(came, "guest {guest}: {:#}", lan.daemon.status());
        // The worker may know it later than the program.
        let near = frame(INNER, mac(2), 60, 9);
        let came = wait::until(wait::SOON, || {
            lan.send(2, &near);
            let mut got = std::iter::from_fn(|| lan.guests[guest].pairs[0].receive(wait::QUIET));
            got.any(|got| got.frame == near)
        });
        assert!(came, "guest {guest}: {:#}", lan.daemon.status());
        for port in [0, 1, 2] {
            let learned = lan.daemon.port(port)["learned"].clone();
            let its = serde_json::json!([{"mac": "02:00:00:00:02:00", "vlan": 0}]);
            let none = serde_json::json!([]);
            assert_eq!(learned, if port == guest { its } else { none }, "port {port}");
        }
    }
    lan.send(0, &frame(STRANGER, mac(2), 60, 1));
    lan.daemon.await_counter("from_guest_source_address", 1);
}

/// Addresses of two guests, in the LAN's network.
const LINUX: [&str; 2] = ["10.77.0.11", "10.77.0.12"];

/// Rings of both forms: virtio_uml takes packed ones, QEMU split ones.
#[rstest]
fn linux_guests_and_the_lan_reach_each_other_by_tcp(
    #[values(false, true)] packed: bool,
    #[values(1, 2)] workers: usize,
) {
    require!(Root, Qemu, Uml);
    if soak::leaves_out(packed == (workers == 1)) {
        return;
    }
    let veth = VethPair::new();
    give_address(&veth);
    let text = file(Some(VethPair::NIC), &["", ""]);
    let text = format!("[daemon]\nworkers = {workers}\n{text}");
    let daemon = Daemon::start_file(&veth.near, &Serve::file(), &[VethPair::NIC], &text);
    let socket = |at: usize| daemon.path(&format!("vm{at}.sock"));
    let address = |at: usize| format!("{}/24", LINUX[at]);
    let first = if packed {
        Guest::boot_uml(&socket(0), &address(0))
    } else {
        let options = ["--mem", "256", "--mac", MAC_0];
        Guest::boot(Backend::Daemon(&socket(0)), &address(0), &options)
    };
    let guests = [first, Guest::boot_uml(&socket(1), &address(1))];
    guests[1].serve_iperf("");
    let _lan = iperf_server(&veth.far);
    for to in [LINUX[1], HOST] {
        let pinged = guests[0].run_until_success(10 * wait::SOON, &format!("ping -c 3 -W 20 {to}"));
        pinged.unwrap_or_else(|said| panic!("no ping of {to}: {said}\n{:#}", daemon.status()));
        for direction in ["", "-R"] {
            assert_stream(&guests[0], to, direction);
        }
    }
    // From one guest to the other GSO packets went as they were.
    let status = daemon.status();
    let spoofed = daemon.counter("from_guest_source_address");
    assert_eq!(spoofed, 0, "{status:#}");
}

/// Two addresses behind one port, each in a namespace of the guest: macvlan's mode is VEPA where none is said. So
/// nothing that one sends reaches the other inside the guest.
const MAKE_VEPA: &str = "set -e
for at in 1 2; do ip link add link eth0 vepa$at address 02:00:00:00:05:0$at type macvlan; done
unshare -n sleep 100000 >/dev/null 2>&1 &
echo $! >/tmp/inner
while [ $(readlink /proc/$!/ns/net) = $(readlink /proc/self/ns/net) ]; do sleep 0.1; done
ip link set vepa2 netns $!
ip addr add 10.77.0.21/24 dev vepa1; ip link set vepa1 up
nsenter -t $! -n sh -ec 'ip addr add 10.77.0.22/24 dev vepa2; ip link set vepa2 up; ip link set lo up'";

#[rstest]
fn linux_guest_with_macvlans_in_vepa_mode_hears_itself_where_its_port_says_so(
    #[values(1, 2)] workers: usize,
) {
    require!(Root, Uml);
    if soak::leaves_out(workers == 2) {
        return;
    }
    let veth = VethPair::new();
    give_address(&veth);
    let text = |keys: &str| {
        let ports = file(Some(VethPair::NIC), &[keys]);
        format!("[daemon]\nworkers = {workers}\n{ports}")
    };
    let daemon = Daemon::start_file(
        &veth.near,
        &Serve::file(),
        &[VethPair::NIC],
        &text("learning = true"),
    );
    let socket = daemon.path("vm0.sock");
    let guest = Guest::boot_uml(&socket, "");
    let _ = guest.run(MAKE_VEPA);
    let inner = |command: &str| format!("nsenter -t $(cat /tmp/inner) -n {command}");
    let ping = |command: &str| {
        let pinged = guest.run_until_success(10 * wait::SOON, command);
        pinged.unwrap_or_else(|said| panic!("{command}: {said}\n{:#}", daemon.status()));
    };
    let to_inner = "ping -c 2 -W 2 10.77.0.22";
    // The LAN knows both.
    ping(&format!("ping -c 2 -W 20 {HOST}"));
    ping(&inner(&format!("ping -c 2 -W 20 {HOST}")));
    assert!(!guest.try_run(to_inner).status.success(), "nothing comes back");
    daemon.reload_with(&text("learning = true\nhairpin = true"));
    ping(to_inner);
    guest.serve_iperf(&inner(""));
    for direction in ["", "-R"] {
        assert_stream(&guest, "10.77.0.22", direction);
    }
    // What comes back of duplicate address detection is known to be its own (RFC 7527).
    let _ = guest.run("ip link set vepa1 down && ip link set vepa1 up");
    let is_whole = "ip -6 addr show dev vepa1 | grep fe80: | grep -v -e tentative -e dadfailed";
    let whole = guest.run_until_success(10 * wait::SOON, is_whole);
    whole.unwrap_or_else(|said| panic!("{said}: {}", guest.run("ip -6 addr")));
    // Packets came back as they were, longer than any frame.
    let [frames, bytes] = ["frames", "bytes"].map(|of| daemon.counter_of("vm0", &format!("to_guest_{of}")));
    assert!(bytes > 1514 * frames, "{bytes} bytes in {frames} frames");
    let lost = daemon.counter("from_guest_source_address");
    assert_eq!(lost, 0, "{:#}", daemon.status());
}
