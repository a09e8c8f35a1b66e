//! The host on a network: guests and the host reach each other over the uplink's own interface and addresses, while
//! both reach the LAN.

mod gso;

use rstest::rstest;
use testkit::guest::Guest;
use testkit::lan::{self, BROADCAST, Ear, HOST, HOST_TEXT, frame, mac, once, with_host};
use testkit::world::{HOST as LAN_IP, assert_stream, give_address, iperf_server};
use testkit::{Daemon, Driver, DriverConfig, Layout, NetNs, Running, Serve, VethPair, require, soak, wait};

const OTHER: [u8; 6] = [0x02, 0, 0, 0, 2, 1];

/// A network with these keys, and a port for each of these.
fn file(keys: &str, ports: &[&str]) -> String {
    lan::file(Some(VethPair::NIC), ports).replacen("[port.vm0]", &format!("{keys}\n[port.vm0]"), 1)
}

/// A daemon, its guests, the host's stack, and the LAN.
struct Lan {
    guests: Vec<Driver>,
    daemon: Daemon,
    host: Ear,
    wire: Ear,
    veth: VethPair,
}

impl Lan {
    fn new(serve: &Serve, keys: &str, ports: &[&str]) -> Self {
        Self::with(serve, &file(keys, ports), &vec![0; ports.len()])
    }

    /// Guests with these features beside the usual ones.
    fn with(serve: &Serve, file: &str, features: &[u64]) -> Self {
        let veth = with_host(VethPair::new());
        let daemon = Daemon::start_file(&veth.near, serve, &[VethPair::NIC], file);
        let guest = |(at, &features): (usize, &u64)| {
            let socket = daemon.path(&format!("vm{at}.sock"));
            daemon.connect(at, &socket, &DriverConfig::with(features), 64)
        };
        let guests = features.iter().enumerate().map(guest).collect();
        Self {
            guests,
            host: Ear::on(&veth.near, VethPair::NIC),
            wire: Ear::on(&veth.far, VethPair::WIRE),
            daemon,
            veth,
        }
    }

    fn send(&mut self, guest: usize, frame: &[u8]) {
        self.guests[guest].pairs[0].send(frame, Layout::Whole);
    }

    /// What a guest gets next of our frames.
    #[track_caller]
    fn received(&mut self, guest: usize) -> Vec<u8> {
        loop {
            let got = self.guests[guest].pairs[0].receive(wait::SOON);
            let frame = got
                .unwrap_or_else(|| panic!("nothing comes to guest {guest}: {}", self.daemon.said()))
                .frame;
            if frame[12..].starts_with(&[0x88, 0xb5]) || frame[12..].starts_with(&[0x81, 0]) {
                return frame;
            }
        }
    }

    /// Nothing is under way to anybody: each hears one more frame of its own next.
    #[track_caller]
    fn assert_quiet(&mut self) {
        for guest in 0..self.guests.len() {
            let last = frame(mac(guest), HOST, 60, 0xee);
            self.host.0.send(&last);
            assert_eq!(self.received(guest), last, "guest {guest}");
        }
        let last = frame(OTHER, mac(0), 60, 0xef);
        self.send(0, &last);
        self.wire.hears(&last);
        let last = frame(HOST, mac(0), 60, 0xf0);
        self.send(0, &last);
        self.host.hears(&last);
    }

    /// Guest 0 sends frames to an address until one arrives there: `status` may show a way before the worker has it.
    #[track_caller]
    fn await_way(&mut self, to: [u8; 6], arrives_at: fn(&Self) -> &Ear) {
        let arrives = wait::until(wait::SOON, || {
            let sent = once(to, mac(0), 100);
            self.send(0, &sent);
            std::iter::from_fn(|| arrives_at(self).next(wait::QUIET)).any(|got| got == sent)
        });
        assert!(arrives);
    }

    fn host_status(&self) -> serde_json::Value {
        self.daemon.status()["networks"][0]["host"].clone()
    }

    /// Frames to groups that came back, and were not given to the ports again.
    fn returned(&self) -> u64 {
        let status = self.daemon.status();
        let counters = status["networks"][0]["groups"].as_array().expect("a list");
        let counter = counters
            .iter()
            .find(|counter| counter["name"] == "returned_frames");
        counter
            .and_then(|counter| counter["value"].as_u64())
            .expect("it is told")
    }
}

fn counter_of(host: &serde_json::Value, name: &str) -> u64 {
    let counters = host["queue"]["counters"].as_array().expect("a list");
    let counter = counters.iter().find(|counter| counter["name"] == name);
    counter
        .and_then(|counter| counter["value"].as_u64())
        .expect("counted")
}

/// Whether there is a device or a filter of a steward's in a namespace.
fn is_left(netns: &NetNs) -> bool {
    netns.output_of("ip", &["-o", "link"]).contains("vaxh")
        || netns
            .output_of("tc", &["filter", "show", "dev", VethPair::NIC, "egress"])
            .contains("bpf")
}

#[rstest]
fn host_and_guests_reach_each_other_and_the_lan_hears_nothing_of_it(
    #[values(Serve::file().leased(), Serve::file().by_root())] serve: Serve,
    #[values("", "mode = \"skb\"", "mode = \"tap\"")] mode: &str,
) {
    require!(Root);
    let mut lan = Lan::new(&serve, mode, &["", ""]);
    for len in [60, 64, 65, 590, 1514] {
        for guest in 0..2 {
            let sent = frame(HOST, mac(guest), len, 1);
            lan.send(guest, &sent);
            lan.host.hears(&sent);
            let back = frame(mac(guest), HOST, len, 2);
            lan.host.0.send(&back);
            assert_eq!(lan.received(guest), back);
        }
        // Everybody hears a group once.
        let sent = frame(BROADCAST, mac(0), len, 3);
        lan.send(0, &sent);
        lan.host.hears(&sent);
        lan.wire.hears(&sent);
        assert_eq!(lan.received(1), sent);
        let sent = frame(BROADCAST, HOST, len, 4);
        lan.host.0.send(&sent);
        lan.wire.hears(&sent);
        assert_eq!([lan.received(0), lan.received(1)], [sent.clone(), sent]);
        // And the LAN goes on as ever.
        let sent = frame(BROADCAST, OTHER, len, 5);
        lan.wire.0.send(&sent);
        lan.host.hears(&sent);
        assert_eq!([lan.received(0), lan.received(1)], [sent.clone(), sent]);
        let sent = frame(HOST, OTHER, len, 6);
        lan.wire.0.send(&sent);
        lan.host.hears(&sent);
        let sent = frame(OTHER, HOST, len, 7);
        lan.host.0.send(&sent);
        lan.wire.hears(&sent);
    }
    lan.assert_quiet();
    // In skb mode the program sees what a guest sends to a group once more.
    assert_eq!(lan.returned(), if mode.contains("skb") { 5 } else { 0 });
    let host = lan.host_status();
    assert_eq!(host["macs"], serde_json::json!([HOST_TEXT]), "{host:#}");
    lan.daemon.terminate();
    drop(lan.guests);
    let left = || is_left(&lan.veth.near);
    lan.daemon.await_that(|| !left());
}

#[rstest]
fn network_without_the_host_is_as_before(
    #[values(false, true)] by_policy: bool,
    #[values("", "mode = \"tap\"")] mode: &str,
) {
    require!(Root);
    let keys = if by_policy { "" } else { "\nhost = false" };
    let mut lan = Lan::new(&Serve::file().leased(), &format!("{mode}{keys}"), &["", ""]);
    if by_policy {
        lan = forbidden(lan);
    }
    let sent = frame(HOST, mac(0), 100, 1);
    lan.send(0, &sent);
    lan.wire.hears(&sent);
    let sent = frame(mac(1), mac(0), 100, 2);
    lan.send(0, &sent);
    assert_eq!(lan.received(1), sent);
    let sent = frame(mac(0), HOST, 100, 3);
    lan.host.0.send(&sent);
    lan.wire.hears(&sent);
    lan.daemon.await_that(|| !is_left(&lan.veth.near));
    match by_policy {
        true => {
            let said = lan.daemon.said();
            assert!(said.contains("guests do not reach the host"), "{said}");
            let why = lan.host_status()["impaired"].to_string();
            assert!(why.contains("`host = false` out of rule"), "{why}");
        }
        false => assert!(lan.host_status().is_null()),
    }
}

/// The policy lets the network not reach the host any more.
fn forbidden(mut lan: Lan) -> Lan {
    let policy = format!(
        "[limits]\nunbound-sockets = true\n[[allow]]\nuser = {}\ninterface = \"{}\"\nqueues = \"all\"\n\
         memlock = \"unlimited\"\nnetwork = true\nhost = false\n",
        testkit::lessor::ID,
        VethPair::NIC
    );
    let steward = lan.daemon.lessor.as_mut().expect("leased");
    steward.change_policy(&policy);
    steward.steward.signal(rustix::process::Signal::HUP);
    let refused = || lan.host_status()["impaired"].is_string();
    assert!(wait::until(wait::SOON, refused), "{:#}", lan.host_status());
    lan.await_way(HOST, |lan| &lan.wire);
    lan
}

#[rstest]
fn linux_guest_reaches_the_host_and_the_lan_by_tcp(#[values(1, 2)] workers: usize) {
    require!(Root, Uml);
    if soak::leaves_out(workers == 2) {
        return;
    }
    const HOST_IP: &str = "10.77.0.3";
    let veth = with_host(VethPair::new());
    give_address(&veth);
    veth.near.ip(&["link", "set", VethPair::NIC, "arp", "on"]);
    veth.near
        .ip(&["address", "add", &format!("{HOST_IP}/24"), "dev", VethPair::NIC]);
    let text = format!("[daemon]\nworkers = {workers}\n{}", file("", &[""]));
    let daemon = Daemon::start_file(&veth.near, &Serve::file(), &[VethPair::NIC], &text);
    let socket = daemon.path("vm0.sock");
    let guest = Guest::boot_uml(&socket, "10.77.0.2/24");
    let _lan = iperf_server(&veth.far);
    let mut server = veth.near.command("iperf3");
    server.args(["-s", "--forceflush"]);
    let mut server = Running::start(server);
    server.await_text("Server listening");
    let ping = |to: &str| guest.run_until_success(10 * wait::SOON, &format!("ping -c 3 -W 20 {to}"));
    for to in [HOST_IP, LAN_IP] {
        ping(to).unwrap_or_else(|said| panic!("no ping of {to}: {said}\n{:#}", daemon.status()));
        for (direction, counted) in [("", "to_guest"), ("-R", "from_guest")] {
            let counts = || {
                let host = daemon.status()["networks"][0]["host"].clone();
                ["frames", "bytes"].map(|what| counter_of(&host, &format!("{counted}_{what}")))
            };
            let before = counts();
            assert_stream(&guest, to, direction);
            let [frames, bytes] = [0, 1].map(|at| counts()[at] - before[at]);
            // Between host and guest in packets longer than a wire takes: two segments at least, however slow it is.
            assert!(
                to != HOST_IP || bytes > 1514 * frames,
                "{direction}: {bytes} bytes in {frames} frames"
            );
        }
    }
    // From the host's side, too, over its own interface.
    let pinged = veth
        .near
        .command("ping")
        .args(["-c", "3", "-W", "20", "10.77.0.2"])
        .output();
    assert!(pinged.expect("ping(8)").status.success());
    let neighbours = veth
        .near
        .output_of("ip", &["neighbour", "show", "dev", VethPair::NIC]);
    assert!(neighbours.contains("02:00:00:00:00:00"), "{neighbours}");
}
