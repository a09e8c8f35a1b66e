//! Frames that guests lose by how their interface is set up: it is said at the start, by `status` and by `check`, with
//! what to do.

use std::process::Command;

use rstest::rstest;
use serde_json::Value;
use testkit::daemon::{DIR, binary};
use testkit::gso_packet::{GsoPacket, Ip};
use testkit::lan::{file, guests};
use testkit::{Daemon, DriverConfig, PacketPort, Serve, VethPair, require, wait};

/// One guest with all of an interface's queue 0.
fn lone(interface: &str) -> String {
    format!("[port.vm0]\nifname = \"{interface}\"\nsocket-path = \"{DIR}/vm0.sock\"\n")
}

#[track_caller]
fn note(of: &Value) -> String {
    of["steering_note"].as_str().unwrap_or_default().to_owned()
}

fn checked(veth: &VethPair, interface: &str) -> String {
    let mut command: Command = veth.near.command(binary());
    let output = command.args(["check", interface]).output().expect("it runs");
    String::from_utf8(output.stdout).expect("text")
}

#[rstest]
fn queues_that_nobody_serves_are_told_with_the_remedy(
    #[values(Serve::file().leased(), Serve::file().by_root())] serve: Serve,
) {
    require!(Root);
    let veth = VethPair::with(4, 1500);
    let network = |queues: u32| {
        let text = file(Some(VethPair::NIC), &[""]);
        text.replacen("uplink", &format!("queues = {queues}\nuplink"), 1)
    };
    let remedy = "`queues = 4`, or `ethtool -L PEER tx 1` at its other end";
    let mut daemon = Daemon::start_file(&veth.near, &serve, &[VethPair::NIC], &network(1));
    let told = note(&daemon.status()["networks"][0]);
    assert!(
        told.contains("3 further queues from 1 on") && told.ends_with(remedy),
        "{told}"
    );
    assert!(daemon.said().contains(remedy));
    daemon.terminate();
    drop(daemon);
    let mut daemon = Daemon::start_file(&veth.near, &serve, &[VethPair::NIC], &network(4));
    assert_eq!(note(&daemon.status()["networks"][0]), "");
    assert!(!daemon.said().contains("is lost"));
    daemon.terminate();
    drop(daemon);
    let daemon = Daemon::start_file(&veth.near, &serve, &[VethPair::NIC], &lone(VethPair::NIC));
    let told = note(&daemon.port(0));
    assert!(
        told.ends_with("is lost to it: `ethtool -L PEER tx 1` at its other end"),
        "{told}"
    );
    assert!(daemon.said().contains(&told));
    // When the interface uses one queue only there is nothing to be told.
    veth.far.run("ethtool", &["-L", VethPair::WIRE, "tx", "1"]);
    veth.near.run("ethtool", &["-L", VethPair::NIC, "rx", "1"]);
    daemon.await_port(0, "nothing is lost", |port| port["steering_note"].is_null());
}

#[test]
fn whole_packets_that_come_from_below_a_macvlan_are_told_with_the_remedy() {
    require!(Root);
    let veth = VethPair::new();
    let packet = GsoPacket::tcp(Ip::V4(0), 8000);
    let [a, b, c, d, e, f] = *packet.bytes().first_chunk().expect("an address");
    let address = format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}");
    let link = [
        "link",
        "add",
        "link",
        VethPair::NIC,
        "name",
        "mv0",
        "address",
        &address,
    ];
    veth.near
        .ip(&[&link[..], &["type", "macvlan", "mode", "bridge"]].concat());
    veth.near.ip(&["link", "set", "mv0", "arp", "off", "up"]);
    let remedy = format!("`ethtool -K {} gro off`", VethPair::NIC);
    let daemon = Daemon::start_file(&veth.near, &Serve::file(), &["mv0"], &lone("mv0"));
    let mut guest = guests(&daemon, 1, &DriverConfig::default()).remove(0);
    let told = note(&daemon.port(0));
    assert!(told.contains("64 KiB") && told.contains(&remedy), "{told}");
    assert!(daemon.said().contains(&remedy));
    assert!(checked(&veth, "mv0").contains(&remedy));
    // It is so.
    veth.far.run(
        "ethtool",
        &["-K", VethPair::WIRE, "tx", "on", "tso", "on", "sg", "on"],
    );
    let wire = PacketPort::open_with_header(&veth.far, VethPair::WIRE);
    wire.send(&[&packet.request(1448)[..], &packet.bytes()].concat());
    daemon.await_counter("too_long", 1);
    // And its other half of the remedy helps.
    veth.far.run("ethtool", &["-K", VethPair::WIRE, "tx", "off"]);
    wire.send(&[&packet.request(1448)[..], &packet.bytes()].concat());
    let first = guest.pairs[0].receive(wait::SOON).expect("a segment");
    assert!(first.frame.len() <= 1514, "{} bytes", first.frame.len());
}

#[test]
fn bridge_as_an_uplink_is_told_to_be_none() {
    require!(Root);
    let veth = VethPair::new();
    veth.near.ip(&["link", "add", "br0", "type", "bridge"]);
    veth.near.ip(&["link", "set", VethPair::NIC, "master", "br0"]);
    veth.near.ip(&["link", "set", "br0", "up"]);
    let daemon = Daemon::start_file(&veth.near, &Serve::file(), &["br0"], &lone("br0"));
    let remedy = "use a port of it (nic0)";
    let told = note(&daemon.port(0));
    assert!(told.contains(remedy) && daemon.said().contains(remedy), "{told}");
    assert!(checked(&veth, "br0").contains(remedy));
}
