//! The uplink of a network is a port of a bridge: guests of the network and stations at the bridge's other ports reach
//! each other, and both reach the LAN.

use rstest::rstest;
use testkit::lan::{BROADCAST, Lan, STRANGER, file, frame, is_ours, mac, once, tagged};
use testkit::{DriverConfig, PacketPort, Serve, VethPair, assert_has, assert_soon, require, wait};

/// A guest on a tap of the bridge.
const NEIGHBOUR: [u8; 6] = [0x02, 0, 0, 0, 7, 1];
const NEIGHBOUR_TEXT: &str = "02:00:00:00:07:01";

/// Bytes of the frames that look for a way: some of them may come late, by a way that was one before.
const PROBE: usize = 200;

/// A network on a bridge's port, and what plays a tap at another port of the bridge.
struct Bridged {
    lan: Lan,
    /// The far end of `tap0`.
    tap: PacketPort,
}

impl Bridged {
    fn new(serve: &Serve, keys: &str, ports: &[&str]) -> Self {
        let veth = VethPair::new();
        veth.near.ip(&["link", "add", "br0", "type", "bridge"]);
        veth.near.ip(&["link", "set", "br0", "up"]);
        veth.join_as("tap0", "vm0", 1, 1500);
        for port in [VethPair::NIC, "tap0"] {
            veth.near.ip(&["link", "set", port, "master", "br0"]);
        }
        for port in [VethPair::NIC, "tap0"] {
            await_forwarding(&veth, port);
        }
        let text = file(Some(VethPair::NIC), ports).replacen("[port.vm0]", &format!("{keys}\n[port.vm0]"), 1);
        let lan = Lan::on(veth, serve, &text, ports.len(), &DriverConfig::default());
        let tap = PacketPort::open(&lan.veth.far, "vm0");
        Self { lan, tap }
    }

    /// What a guest receives next of our frames.
    #[track_caller]
    fn received(&mut self, guest: usize) -> Vec<u8> {
        loop {
            let frame = self.lan.received(guest);
            if is_ours(&frame) {
                return frame;
            }
        }
    }

    fn status_text(&self) -> String {
        let daemon = &self.lan.daemon;
        let output = std::process::Command::new(testkit::daemon::binary())
            .args(["status", "--control"])
            .arg(daemon.path("control"))
            .output();
        String::from_utf8(output.expect("status runs").stdout).expect("text")
    }

    fn bridge(&self) -> serde_json::Value {
        self.lan.daemon.status()["networks"][0]["host"]["bridge"].clone()
    }

    /// Guest 0 sends frames to a station until one comes by that port.
    #[track_caller]
    fn await_way(&mut self, to: [u8; 6], port: impl Fn(&Self) -> &PacketPort) {
        let comes = wait::until(wait::SOON, || {
            let sent = once(to, mac(0), PROBE);
            self.lan.send(0, &sent);
            std::iter::from_fn(|| port(self).receive(wait::QUIET)).any(|got| got == sent)
        });
        assert!(comes, "{:#}", self.bridge());
    }
}

/// The bridge drops what a port is to send or has received before it forwards, which is when the kernel has seen that
/// its peer is there.
#[track_caller]
fn await_forwarding(veth: &VethPair, port: &str) {
    let state = || veth.near.output_of("bridge", &["link", "show", "dev", port]);
    assert_soon!(state().contains("state forwarding"), "{}", state());
}

/// Asserts that the next frame of the test that a port receives is this one.
#[track_caller]
fn hears(port: &PacketPort, frame: &[u8]) {
    let is_awaited = |frame: &Vec<u8>| is_ours(frame) && frame.len() != PROBE;
    let next = std::iter::from_fn(|| port.receive(wait::SOON)).find(is_awaited);
    assert_eq!(next.as_deref(), Some(frame));
}

#[rstest]
fn guests_of_the_network_and_stations_of_the_bridge_reach_each_other(
    #[values(Serve::file().leased(), Serve::file().by_root())] serve: Serve,
    #[values("", "mode = \"skb\"", "mode = \"tap\"")] mode: &str,
) {
    require!(Root);
    let mut world = Bridged::new(&serve, mode, &["", "", "vlan = 100"]);
    assert_soon!(world.bridge()["name"] == "br0", "{:#}", world.bridge());
    let hello = frame(BROADCAST, NEIGHBOUR, 60, 1);
    world.tap.send(&hello);
    assert_eq!(
        [world.received(0), world.received(1)],
        [hello.clone(), hello.clone()]
    );
    hears(&world.lan.wire, &hello);
    world.await_way(NEIGHBOUR, |world| &world.tap);
    for len in [60, 64, 65, 590, 1514] {
        let sent = frame(NEIGHBOUR, mac(1), len, 2);
        world.lan.send(1, &sent);
        hears(&world.tap, &sent);
        let back = frame(mac(1), NEIGHBOUR, len, 3);
        world.tap.send(&back);
        assert_eq!(world.received(1), back);
        // A bridge that does not tell VLANs apart has one table for all.
        let sent = frame(NEIGHBOUR, mac(2), len, 4);
        world.lan.send(2, &sent);
        hears(&world.tap, &tagged(&sent, 100));
        world.tap.send(&tagged(&frame(mac(2), NEIGHBOUR, len, 5), 100));
        assert_eq!(world.received(2), frame(mac(2), NEIGHBOUR, len, 5));
        // Everybody receives a broadcast once.
        let sent = frame(BROADCAST, mac(0), len, 6);
        world.lan.send(0, &sent);
        hears(&world.tap, &sent);
        hears(&world.lan.wire, &sent);
        assert_eq!(world.received(1), sent);
        let sent = frame(BROADCAST, NEIGHBOUR, len, 7);
        world.tap.send(&sent);
        hears(&world.lan.wire, &sent);
        assert_eq!([world.received(0), world.received(1)], [sent.clone(), sent]);
        // The LAN has heard nothing else, and goes on as ever.
        let sent = frame(STRANGER, mac(0), len, 8);
        world.lan.send(0, &sent);
        hears(&world.lan.wire, &sent);
        let sent = frame(NEIGHBOUR, STRANGER, len, 9);
        world.lan.wire.send(&sent);
        hears(&world.tap, &sent);
    }
    assert_eq!(world.bridge()["name"], "br0");
    world.lan.daemon.terminate();
}

#[rstest]
fn station_is_followed_from_the_bridge_to_the_lan_and_back() {
    require!(Root);
    let mut world = Bridged::new(&Serve::file(), "", &[""]);
    // Configured, it has never sent anything.
    let near = &world.lan.veth.near;
    near.run(
        "bridge",
        &["fdb", "add", NEIGHBOUR_TEXT, "dev", "tap0", "master", "static"],
    );
    world.await_way(NEIGHBOUR, |world| &world.tap);
    let near = &world.lan.veth.near;
    near.run("bridge", &["fdb", "del", NEIGHBOUR_TEXT, "dev", "tap0", "master"]);
    world.await_way(NEIGHBOUR, |world| &world.lan.wire);
    // Learned, and then forgotten: the bridge sends frames for it to all of its ports.
    world.tap.send(&frame(BROADCAST, NEIGHBOUR, 60, 1));
    world.await_way(NEIGHBOUR, |world| &world.tap);
    let behind = world.bridge()["behind"].clone();
    let near = &world.lan.veth.near;
    near.run("bridge", &["fdb", "del", NEIGHBOUR_TEXT, "dev", "tap0", "master"]);
    // What is told after that shows that it was seen.
    near.run(
        "bridge",
        &[
            "fdb",
            "add",
            "02:00:00:00:07:02",
            "dev",
            "tap0",
            "master",
            "static",
        ],
    );
    assert_soon!(
        world.bridge()["behind"].as_u64() == behind.as_u64().map(|behind| behind + 1),
        "{:#}",
        world.bridge()
    );
    let sent = frame(NEIGHBOUR, mac(0), 100, 2);
    world.lan.send(0, &sent);
    hears(&world.tap, &sent);
    // It moves.
    world.lan.wire.send(&frame(BROADCAST, NEIGHBOUR, 60, 3));
    world.await_way(NEIGHBOUR, |world| &world.lan.wire);
    world.tap.send(&frame(BROADCAST, NEIGHBOUR, 60, 4));
    world.await_way(NEIGHBOUR, |world| &world.tap);
    // The uplink leaves the bridge, and comes back.
    let near = &world.lan.veth.near;
    near.ip(&["link", "set", VethPair::NIC, "nomaster"]);
    world.await_way(NEIGHBOUR, |world| &world.lan.wire);
    assert!(world.bridge().is_null());
    let near = &world.lan.veth.near;
    near.ip(&["link", "set", VethPair::NIC, "master", "br0"]);
    world.tap.send(&frame(BROADCAST, NEIGHBOUR, 60, 5));
    world.await_way(NEIGHBOUR, |world| &world.tap);
    // The port goes, with what was behind it.
    world.lan.veth.near.ip(&["link", "set", "tap0", "nomaster"]);
    world.await_way(NEIGHBOUR, |world| &world.lan.wire);
}

#[rstest]
fn flood_of_addresses_at_one_port_of_the_bridge_leaves_those_of_another_reached() {
    require!(Root);
    let mut world = Bridged::new(&Serve::file(), "", &[""]);
    let veth = &world.lan.veth;
    veth.join_as("tap1", "vm1", 1, 1500);
    veth.near.ip(&["link", "set", "tap1", "master", "br0"]);
    let attacker = PacketPort::open(&veth.far, "vm1");
    // The kernel takes up a thousand frames for each CPU, and drops what comes while that is late.
    let is_full = || {
        for number in 0..3000u16 {
            let [high, low] = number.to_be_bytes();
            attacker.send(&frame(STRANGER, [0x02, 0, 0, 1, high, low], 60, 0));
        }
        world.bridge()["left_out"].as_u64() > Some(1900)
    };
    assert_soon!(is_full(), "{:#}", world.bridge());
    assert_eq!(world.bridge()["behind"], 1024);
    world.tap.send(&frame(BROADCAST, NEIGHBOUR, 60, 1));
    world.await_way(NEIGHBOUR, |world| &world.tap);
    let text = world.status_text();
    assert_has(&text, &["addresses behind bridge br0 are not reached"]);
}
