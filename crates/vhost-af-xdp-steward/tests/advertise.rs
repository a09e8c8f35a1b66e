//! Addresses that a network advertises to other hosts: the entries in the tables of the bridge that its tunnel is a port
//! of, and what other users of these tables do to them.

use crate::common;

use std::io::Read;
use std::net::IpAddr;

use common::{World, await_facts, network, refusal, take, to};
use rustix::process::Signal;
use steer::Station;
use steward_client::Lease;
use steward_protocol::{AddressChange, Facts, Reason, Wanted};
use testkit::{PacketPort, VethPair, assert_has, assert_soon, require};

const OURS: [u8; 6] = [2, 0, 0, 0, 0, 0xaa];
const MAC: &str = "02:00:00:00:00:aa";
const IP: &str = "192.0.2.1";

fn policy(keys: &str) -> String {
    format!("[[allow]]\nuser = 0\ninterface = \"vx7\"\nqueues = \"all\"\nnetwork = true\n{keys}\n")
}

/// A tunnel that is a port of a bridge, and a network on it that reaches the host.
struct Overlay {
    lease: Lease,
    tap: (String, Option<std::os::fd::OwnedFd>),
    world: World,
}

impl Overlay {
    fn new(world: World) -> Self {
        let near = &world.veth.near;
        near.ip(&["address", "add", "10.9.0.1/24", "dev", VethPair::NIC]);
        near.ip(&["link", "add", "br7", "type", "bridge"]);
        let vxlan = [
            "type",
            "vxlan",
            "id",
            "7",
            "local",
            "10.9.0.1",
            "dstport",
            "4789",
            "nolearning",
        ];
        near.ip(&[&["link", "add", "vx7", "master", "br7"], &vxlan[..]].concat());
        near.run("bridge", &["link", "set", "dev", "vx7", "learning", "off"]);
        near.ip(&["link", "set", "vx7", "up"]);
        near.ip(&["link", "set", "br7", "up"]);
        let wanted = Wanted {
            interface: "vx7".to_owned(),
            ..network(0, 1)
        };
        let lease = take(&world.socket(), &wanted).expect("allowed");
        lease
            .set_stations(&[common::change(0, OURS, Some(1))])
            .expect("allowed");
        let (end, tap) = lease.host(0).expect("allowed");
        Self {
            lease,
            tap: (end.interface, tap),
            world,
        }
    }

    /// Entries of the tables that are not the kernel's own.
    fn tables(&self) -> (Vec<String>, Vec<String>) {
        let lines = |text: String| {
            text.lines()
                .map(|line| line.trim().to_owned())
                .collect::<Vec<_>>()
        };
        let near = &self.world.veth.near;
        let mut fdb = lines(near.output_of("bridge", &["fdb", "show", "br", "br7"]));
        fdb.retain(|line| !line.contains("permanent"));
        (fdb, self.neighbours())
    }

    /// Neighbours with the test's MAC address.
    fn neighbours(&self) -> Vec<String> {
        let args = ["neighbour", "show", "dev", "br7", "nud", "all"];
        let text = self.world.veth.near.output_of("ip", &args);
        let ours = text.lines().filter(|line| line.contains(MAC));
        ours.map(|line| line.trim().to_owned()).collect()
    }

    #[track_caller]
    fn await_tables(&self, fdb: &[&str], neighbours: &[&str]) {
        let wanted = || {
            let (is, are) = self.tables();
            is == fdb && are == neighbours
        };
        assert_soon!(wanted(), "{:?} {}", self.tables(), self.world.steward);
    }

    /// The entry of the tap.
    fn ours(&self) -> String {
        format!("{MAC} dev {} master br7 static", self.tap.0)
    }

    fn bridge(&self, args: &[&str]) {
        self.world.veth.near.run("bridge", args);
    }
}

fn station() -> Station {
    Station { vlan: 0, mac: OURS }
}

fn change(ip: Option<&str>, is_added: bool) -> AddressChange {
    AddressChange {
        station: station(),
        ip: ip.map(|ip| ip.parse::<IpAddr>().expect("an address")),
        is_added,
    }
}

const OUR_NEIGHBOUR: &str = "192.0.2.1 lladdr 02:00:00:00:00:aa PERMANENT proto 118";
/// The policy of most tests.
const ALL: &str = "advertise = true\nips = [\"192.0.2.0/24\"]";

/// The MAC address, and the IP address.
fn both(is_added: bool) -> [AddressChange; 2] {
    [change(None, is_added), change(Some(IP), is_added)]
}

#[test]
fn lessee_advertises_its_own_addresses_as_the_policy_allows() {
    require!(Root);
    let mut overlay = Overlay::new(World::with(1, &policy(ALL)));
    let lease = &overlay.lease;
    let other = Station {
        vlan: 0,
        mac: [2, 0, 0, 0, 0, 0xbb],
    };
    let not_ours = AddressChange {
        station: other,
        ..change(None, true)
    };
    let refused = refusal(lease.advertise(&[change(None, true), not_ours]));
    let text = "02:00:00:00:00:bb is no station";
    assert_has(&refused.text, &[text]);
    for ip in ["198.51.100.1", "2001:db8::1"] {
        let refused = refusal(lease.advertise(&[change(Some(ip), true)]));
        assert_eq!(refused.reason, Reason::NotAllowed);
        let text = format!("{ip} to other hosts: add it, or a network with it, to `ips` of rule 1");
        assert_has(&refused.text, &[&text]);
    }
    overlay.await_tables(&[], &[]);
    // An IP address has its MAC address advertised, too.
    lease.advertise(&[change(Some(IP), true)]).expect("allowed");
    overlay.await_tables(&[&overlay.ours()], &[OUR_NEIGHBOUR]);
    lease
        .advertise(&[change(Some(IP), false); 2])
        .expect("removed once");
    overlay.await_tables(&[&overlay.ours()], &[]);
    lease.advertise(&both(true)).expect("allowed");
    lease
        .advertise(&[change(None, false)])
        .expect("removed with its IP address");
    overlay.await_tables(&[], &[]);
    // Its addresses go with the station.
    lease.advertise(&both(true)).expect("allowed");
    let station = |port| common::change(0, OURS, port);
    lease.set_stations(&[station(None)]).expect("removed");
    overlay.await_tables(&[], &[]);
    lease.set_stations(&[station(Some(1))]).expect("allowed");
    // They go with the tap.
    lease.advertise(&both(true)).expect("allowed");
    overlay.world.set_policy(&policy(""));
    overlay.await_tables(&[], &[]);
    let (end, tap) = overlay.lease.host(0).expect("allowed");
    overlay.tap = (end.interface, tap);
    let refused = refusal(overlay.lease.advertise(&[change(None, true)]));
    assert_has(&refused.text, &["add `advertise = true` to the keys of rule 1"]);
}

#[test]
fn addresses_are_advertised_by_a_tunnel_at_a_suitable_bridge_only() {
    require!(Root);
    let mut overlay = Overlay::new(World::with(1, &policy(ALL)));
    let set = |overlay: &Overlay, words: &str| {
        let words: Vec<_> = words.split(' ').collect();
        let (program, args) = words.split_first().expect("a program");
        overlay.world.veth.near.run(program, args);
    };
    for (wrong, right, remedy) in [
        (
            "bridge link set dev vx7 learning on",
            "bridge link set dev vx7 learning off",
            "`bridge link set dev vx7 learning off`",
        ),
        (
            "ip link set br7 type bridge stp_state 1",
            "ip link set br7 type bridge stp_state 0",
            "`ip link set br7 type bridge stp_state 0`",
        ),
        (
            "ip link set vx7 nomaster",
            "ip link set vx7 master br7",
            "`ip link set vx7 master BRIDGE`",
        ),
    ] {
        let advertised = || overlay.lease.advertise(&both(true)).is_ok();
        overlay.world.await_that(advertised);
        overlay.await_tables(&[&overlay.ours()], &[OUR_NEIGHBOUR]);
        set(&overlay, wrong);
        // They go with the tap, as the lessee learns.
        overlay.await_tables(&[], &[]);
        overlay.lease.advertise(&both(false)).ok();
        let (end, tap) = overlay.lease.host(0).expect("allowed");
        overlay.tap = (end.interface, tap);
        common::assert_refused_with(overlay.lease.advertise(&both(true)), remedy);
        set(&overlay, right);
        set(&overlay, "bridge link set dev vx7 learning off");
    }
}

#[test]
fn addresses_of_the_host_and_of_others_are_not_taken() {
    require!(Root);
    let overlay = Overlay::new(World::with(1, &policy(ALL)));
    let near = &overlay.world.veth.near;
    near.ip(&["address", "add", "192.0.2.9/28", "dev", "br7"]);
    let theirs = ["192.0.2.2", "lladdr", "02:00:00:00:00:cc", "dev", "br7"];
    near.ip(&[&["neighbour", "add"], &theirs[..], &["nud", "permanent"]].concat());
    for (ip, why) in [
        ("192.0.2.9", "the bridge's own address"),
        ("192.0.2.15", "a broadcast address"),
        ("192.0.2.2", "`ip neighbour show 192.0.2.2`"),
    ] {
        common::assert_refused_with(overlay.lease.advertise(&[change(Some(ip), true)]), why);
    }
    overlay.lease.advertise(&[change(None, false)]).expect("removed");
    near.ip(&[
        "link", "add", "p0", "master", "br7", "type", "veth", "peer", "name", "p1",
    ]);
    overlay.bridge(&["fdb", "add", MAC, "dev", "p0", "master", "static"]);
    common::assert_refused_with(
        overlay.lease.advertise(&[change(None, true)]),
        "`bridge fdb show dev p0`",
    );
}

#[test]
fn address_that_another_host_takes_is_set_again_a_few_times() {
    require!(Root);
    let mut overlay = Overlay::new(World::with(1, &policy(ALL)));
    overlay.lease.advertise(&both(true)).expect("allowed");
    let (ours, theirs) = (overlay.ours(), format!("{MAC} dev vx7 master br7 static"));
    let take = || overlay.bridge(&["fdb", "replace", MAC, "dev", "vx7", "master", "static"]);
    for _ in 0..3 {
        take();
        overlay.await_tables(&[&ours], &[OUR_NEIGHBOUR]);
    }
    take();
    overlay
        .world
        .steward
        .await_text("which advertises its address, too");
    let is_noted = |facts: &Facts| facts.loses && facts.steering.contains(MAC);
    await_facts(&overlay.lease, "the note", is_noted);
    overlay.await_tables(&[&theirs], &[OUR_NEIGHBOUR]);
    // The other host does not advertise it any more.
    overlay.bridge(&["fdb", "del", MAC, "dev", "vx7", "master"]);
    overlay.await_tables(&[&ours], &[OUR_NEIGHBOUR]);
    await_facts(&overlay.lease, "no note", |facts| !is_noted(facts));
    // The kernel drops neighbours of a bridge that is down.
    let near = &overlay.world.veth.near;
    near.ip(&["link", "set", "br7", "down"]);
    near.ip(&["link", "set", "br7", "up"]);
    overlay.await_tables(&[&ours], &[OUR_NEIGHBOUR]);
    near.ip(&["neighbour", "del", IP, "dev", "br7"]);
    overlay.await_tables(&[&ours], &[OUR_NEIGHBOUR]);
    // A neighbour that the routing daemon has replaced is not removed.
    let theirs = ["lladdr", MAC, "dev", "br7", "nud", "noarp", "protocol", "zebra"];
    near.ip(&[&["neighbour", "replace", IP], &theirs[..]].concat());
    overlay.lease.advertise(&both(false)).expect("removed");
    overlay.await_tables(&[], &["192.0.2.1 lladdr 02:00:00:00:00:aa NOARP proto zebra"]);
}

#[test]
fn advertised_addresses_survive_the_steward_and_end_with_the_lessee() {
    require!(Root);
    let mut overlay = Overlay::new(World::kept_for(&policy(ALL), "60"));
    overlay.lease.advertise(&both(true)).expect("allowed");
    let left = [
        "192.0.2.5",
        "lladdr",
        "02:00:00:00:00:dd",
        "dev",
        "br7",
        "protocol",
        "118",
    ];
    for signal in [Signal::TERM, Signal::KILL] {
        // As if of a lessee that was killed with the steward.
        let near = &overlay.world.veth.near;
        near.ip(&[&["neighbour", "add"], &left[..], &["nud", "permanent"]].concat());
        overlay.world.restart_after(signal);
        overlay.await_tables(&[&overlay.ours()], &[OUR_NEIGHBOUR]);
        let near = &overlay.world.veth.near;
        let all = || near.output_of("ip", &["neighbour", "show", "dev", "br7", "nud", "all"]);
        overlay.world.await_that(|| !all().contains("192.0.2.5"));
        let is_back = || overlay.lease.take_changes().is_ok() && !overlay.lease.is_away();
        overlay.world.await_that(is_back);
    }
    // The next steward knows them: it removes one, and the other ones with the lease.
    let removed = || overlay.lease.advertise(&[change(Some(IP), false)]).is_ok();
    overlay.world.await_that(removed);
    overlay.await_tables(&[&overlay.ours()], &[]);
    overlay.lease.advertise(&both(true)).expect("allowed");
    // Another policy meanwhile.
    overlay.world.end_steward(Signal::KILL);
    common::write_policy(&overlay.world.dir, &policy("advertise = true"));
    overlay.world.restart();
    overlay
        .world
        .await_that(|| overlay.lease.take_changes().is_ok() && !overlay.lease.is_away());
    overlay.await_tables(&[], &[]);
    let (end, tap) = overlay.lease.host(0).expect("allowed");
    overlay.tap = (end.interface, tap);
    overlay.lease.advertise(&[change(None, true)]).expect("allowed");
    overlay.await_tables(&[&overlay.ours()], &[]);
}

/// The bridge sends them to all of its ports, whatever flags these have.
#[test]
fn broadcasts_of_the_host_arrive_once() {
    require!(Root);
    let overlay = Overlay::new(World::with(1, &policy(ALL)));
    overlay.lease.advertise(&both(true)).expect("allowed");
    let (_, Some(tap)) = &overlay.tap else {
        panic!("a new one");
    };
    let mut tap = std::fs::File::from(tap.try_clone().expect("a descriptor"));
    let [first, last] = [1, 2].map(|number| to([0xff; 6], number));
    let host = PacketPort::open(&overlay.world.veth.near, "br7");
    let mut received = Vec::new();
    host.send(&first);
    host.send(&last);
    overlay.world.await_that(|| {
        let mut frame = [0; 2048];
        while let Ok(bytes) = tap.read(&mut frame) {
            received.push(frame[12..bytes].to_vec());
        }
        received.contains(&last)
    });
    received.retain(|frame| *frame == first);
    assert_eq!(received.len(), 1);
}
