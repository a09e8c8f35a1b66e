//! Addresses that a network advertises to other hosts: the entries in the tables of the bridge that its tunnel is a port
//! of, and what other users of these tables do to them.

use crate::common;

use std::net::IpAddr;

use common::{World, refusal, take, wanted};
use rustix::process::Signal;
use steer::Station;
use steward_client::Lease;
use steward_protocol::{AddressChange, Reason, StationChange, Wanted};
use testkit::{VethPair, require, wait};

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
            network: true,
            ..wanted(0, 1)
        };
        let lease = take(&world.socket(), &wanted).expect("allowed");
        let station = StationChange {
            station: station(),
            port: Some(1),
        };
        lease.set_stations(&[station]).expect("allowed");
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

    /// Those with the address of ours.
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
        assert!(
            wait::until(wait::SOON, wanted),
            "{:?} {}",
            self.tables(),
            self.world.steward
        );
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

#[test]
fn lessee_advertises_its_own_addresses_as_the_policy_allows() {
    require!(Root);
    let mut overlay = Overlay::new(World::with(
        1,
        &policy("advertise = true\nips = [\"192.0.2.0/24\"]"),
    ));
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
    assert!(
        refused.text.contains("02:00:00:00:00:bb is no station"),
        "{refused}"
    );
    for ip in ["198.51.100.1", "2001:db8::1"] {
        let refused = refusal(lease.advertise(&[change(Some(ip), true)]));
        assert_eq!(refused.reason, Reason::NotAllowed);
        assert!(
            refused.text.contains(ip) && refused.text.contains("`ips` of rule 1"),
            "{refused}"
        );
    }
    overlay.await_tables(&[], &[]);
    lease
        .advertise(&[change(Some(IP), true), change(None, true)])
        .expect("allowed");
    overlay.await_tables(&[&overlay.ours()], &[OUR_NEIGHBOUR]);
    lease
        .advertise(&[change(None, false), change(None, false)])
        .expect("removed once");
    overlay.await_tables(&[], &[OUR_NEIGHBOUR]);
    lease.advertise(&[change(None, true)]).expect("allowed");
    // Its addresses go with the station.
    let gone = StationChange {
        station: station(),
        port: None,
    };
    lease.set_stations(&[gone]).expect("removed");
    overlay.await_tables(&[], &[]);
    lease
        .set_stations(&[StationChange {
            port: Some(1),
            ..gone
        }])
        .expect("allowed");
    lease
        .advertise(&[change(Some(IP), true), change(None, true)])
        .expect("allowed");
    // They go with the tap.
    common::write_policy(&overlay.world.dir, &policy(""));
    overlay.world.steward.signal(Signal::HUP);
    overlay.await_tables(&[], &[]);
    overlay.tap = overlay
        .lease
        .host(0)
        .map(|(end, tap)| (end.interface, tap))
        .expect("allowed");
    let refused = refusal(overlay.lease.advertise(&[change(None, true)]));
    assert!(refused.text.contains("`advertise = true` to rule 1"), "{refused}");
}

#[test]
fn addresses_are_advertised_by_a_tunnel_at_a_bridge_only() {
    require!(Root);
    let overlay = Overlay::new(World::with(1, &policy("advertise = true")));
    let asked = || refusal(overlay.lease.advertise(&[change(None, true)])).text;
    let remedy = "bridge link set dev vx7 learning o";
    overlay.bridge(&["link", "set", "dev", "vx7", "learning", "on"]);
    assert!(asked().contains(&format!("`{remedy}ff`")), "{}", asked());
    overlay.world.veth.near.ip(&["link", "set", "vx7", "nomaster"]);
    assert!(asked().contains("`ip link set vx7 master BRIDGE`"), "{}", asked());
    overlay.await_tables(&[], &[]);
}

#[test]
fn address_that_another_host_takes_is_set_again_a_few_times() {
    require!(Root);
    let mut overlay = Overlay::new(World::with(1, &policy("advertise = true")));
    let addresses = [change(None, true), change(Some(IP), true)];
    overlay.lease.advertise(&addresses).expect("allowed");
    let (ours, theirs) = (overlay.ours(), format!("{MAC} dev vx7 master br7 static"));
    let take = || overlay.bridge(&["fdb", "replace", MAC, "dev", "vx7", "master", "static"]);
    for _ in 0..3 {
        take();
        overlay.await_tables(&[&ours], &[OUR_NEIGHBOUR]);
    }
    take();
    overlay.world.steward.await_text("advertised by another host");
    overlay.await_tables(&[&theirs], &[OUR_NEIGHBOUR]);
    // The other host does not advertise it any more.
    overlay.bridge(&["fdb", "del", MAC, "dev", "vx7", "master"]);
    overlay.await_tables(&[&ours], &[OUR_NEIGHBOUR]);
    // A neighbour that the routing daemon has replaced is not removed.
    let theirs = [
        "neighbour",
        "replace",
        IP,
        "lladdr",
        MAC,
        "dev",
        "br7",
        "nud",
        "noarp",
        "protocol",
        "zebra",
    ];
    overlay.world.veth.near.ip(&theirs);
    let all = addresses.map(|change| AddressChange {
        is_added: false,
        ..change
    });
    overlay.lease.advertise(&all).expect("removed");
    overlay.await_tables(&[], &["192.0.2.1 lladdr 02:00:00:00:00:aa NOARP proto zebra"]);
}

#[test]
fn advertised_addresses_survive_the_steward_and_end_with_the_lessee() {
    require!(Root);
    let mut overlay = Overlay::new(World::kept_for(&policy("advertise = true"), "60"));
    let addresses = [change(None, true), change(Some(IP), true)];
    overlay.lease.advertise(&addresses).expect("allowed");
    for signal in [Signal::TERM, Signal::KILL] {
        overlay.world.restart_after(signal);
        overlay.await_tables(&[&overlay.ours()], &[OUR_NEIGHBOUR]);
        overlay
            .world
            .await_that(|| overlay.lease.take_changes().is_ok() && !overlay.lease.is_away());
    }
    // The next steward knows them: it removes one, and the other one with the lease.
    let is_removed = |change| {
        overlay
            .lease
            .advertise(&[AddressChange {
                is_added: false,
                ..change
            }])
            .is_ok()
    };
    overlay.world.await_that(|| is_removed(addresses[0]));
    overlay.await_tables(&[], &[OUR_NEIGHBOUR]);
    let Overlay { lease, tap, world } = overlay;
    drop((lease, tap));
    let left = || {
        world
            .veth
            .near
            .output_of("ip", &["neighbour", "show", "dev", "br7", "nud", "all"])
    };
    world.await_that(|| !left().contains(MAC));
}
