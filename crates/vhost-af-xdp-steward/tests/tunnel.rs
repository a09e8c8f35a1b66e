//! Tunnels of networks: whose frames a lessee gets, what becomes of them when devices, rules and stewards change, and what
//! a lessee can do with the rtnetlink sockets.

use crate::common;

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use common::{World, await_lease, change, lessee, network, refusal, take, to, wanted};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{RecvFlags, SendFlags, bind, recv, send};
use rustix::process::Signal;
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use steer::ModeRequest;
use steward_client::Lease;
use steward_protocol::{Reason, StationChange, VtepChange, Wanted};
use testkit::{VethPair, frame, require, wait};

const OURS: [u8; 6] = [2, 0, 0, 0, 0, 0xaa];
const LOCAL: &str = "10.9.0.1";
const MAKE: &str = "link add vx7 type vxlan id 7 local 10.9.0.1 dstport 4789 nolearning";
const UP: &str = "link set vx7 up";

fn rule(interface: &str) -> String {
    format!("[[allow]]\nuser = 0\ninterface = \"{interface}\"\nqueues = \"all\"\nnetwork = true\n")
}

fn policy() -> String {
    rule(VethPair::NIC) + &rule("vx7")
}

fn ip(world: &World, words: &str) {
    world.veth.near.ip(&words.split(' ').collect::<Vec<_>>());
}

/// Sets the tunnel, and the sender of [`frame::vxlan`] as one of its hosts.
fn set_tunnel(lease: &Lease) {
    lease.tunnel(0, "vx7").expect("allowed");
    change_vtep(lease, true);
}

fn change_vtep(lease: &Lease, is_added: bool) {
    let vtep = [10, 9, 0, 2].into();
    lease
        .change_vteps(0, &[VtepChange { vtep, is_added }])
        .expect("there is room");
}

/// A network in a tunnel, whose lessee sends back what it receives.
struct Tunnelled {
    lease: Lease,
    /// The user's network on the vxlan device, with the same station.
    on_device: Lease,
    echo: lessee::Echo,
    world: World,
}

fn station(port: Option<u32>) -> StationChange {
    change(0, OURS, port)
}

fn on_device() -> Wanted {
    Wanted {
        interface: "vx7".to_owned(),
        mode: ModeRequest::Tap,
        ..network(0, 1)
    }
}

impl Tunnelled {
    fn new(world: World) -> Self {
        ip(&world, "address add 10.9.0.1/24 dev nic0");
        ip(&world, MAKE);
        ip(&world, UP);
        let lease = take(&world.socket(), &network(0, 1)).expect("allowed");
        set_tunnel(&lease);
        let echo = lessee::Echo::open(&lease, 0);
        common::assert_refused_with(lease.set_stations(&[station(Some(1))]), "set it there before");
        let on_device = take(&world.socket(), &on_device()).expect("allowed");
        on_device.set_stations(&[station(Some(1))]).expect("allowed");
        lease.set_stations(&[station(Some(1))]).expect("allowed");
        Self {
            lease,
            on_device,
            echo,
            world,
        }
    }

    /// Whether a frame in the tunnel with this VNI comes back.
    fn answers(&mut self, vni: u32) -> bool {
        let inner = to(OURS, 1);
        let local: IpAddr = LOCAL.parse().expect("an address");
        self.world.wire.send(&frame::vxlan(local, vni, &inner));
        let counted = |lease: &Lease| {
            let counters = lease.counters(0, common::soon()).expect("ours");
            counters.redirected + counters.not_ours
        };
        let mut is_there = false;
        let before = counted(&self.lease);
        // Looked at, and back.
        wait::until(Duration::from_secs(1), || {
            self.echo.run(Duration::from_millis(5));
            is_there |= self
                .world
                .wire
                .receive(Duration::ZERO)
                .is_some_and(|got| got == inner);
            is_there || counted(&self.lease) > before
        });
        self.echo.run(Duration::from_millis(5));
        is_there
            || self
                .world
                .wire
                .receive(Duration::ZERO)
                .is_some_and(|got| got == inner)
    }

    /// Waits until the network in the tunnel may have the station, as that on the device has it.
    #[track_caller]
    fn set_station(&self) {
        let set = || self.lease.set_stations(&[station(Some(1))]).is_ok();
        assert!(wait::until(wait::SOON, set), "{}", self.world.steward);
    }

    #[track_caller]
    fn await_answers(&mut self, wanted: bool) {
        assert!(
            wait::until(wait::SOON, || self.answers(7) == wanted),
            "{}",
            self.world.steward
        );
    }

    /// Waits until the steward reports a change.
    #[track_caller]
    fn await_change(&self) {
        let changed = || matches!(self.lease.take_changes(), Ok(Some(_)));
        assert!(wait::until(wait::SOON, changed), "{}", self.world.steward);
    }
}

#[test]
fn lessee_gets_frames_of_the_tunnel_of_a_suitable_device_as_the_policy_allows() {
    require!(Root);
    let world = World::with(2, &(policy() + &rule("other")));
    world.veth.far.run("ethtool", &["-L", VethPair::WIRE, "tx", "1"]);
    let mut tunnelled = Tunnelled::new(world);
    tunnelled.await_answers(true);
    assert!(!tunnelled.answers(8));
    for is_added in [false, true] {
        change_vtep(&tunnelled.lease, is_added);
        tunnelled.await_answers(is_added);
    }
    tunnelled
        .on_device
        .set_stations(&[station(None)])
        .expect("allowed");
    tunnelled.await_answers(false);
    tunnelled.await_change();
    tunnelled
        .on_device
        .set_stations(&[station(Some(1))])
        .expect("allowed");
    tunnelled
        .lease
        .set_stations(&[station(Some(1))])
        .expect("allowed");
    tunnelled.await_answers(true);
    assert_eq!(tunnelled.lease.facts().steering, "", "no frames are lost");
    let world = &tunnelled.world;
    let second = take(&world.socket(), &network(1, 1)).expect("allowed");
    let refused = |lease: &Lease, device: &str, reason, why: &str| {
        let refused = refusal(lease.tunnel(0, device));
        assert!(
            refused.reason == reason && refused.text.contains(why),
            "{device}: {refused}"
        );
    };
    refused(
        &second,
        "vx7",
        Reason::Taken,
        "another network of nic0 has VNI 7 on UDP port",
    );
    refused(&second, "vx9", Reason::Nic, "vx9 cannot be found");
    refused(
        &second,
        "nic0",
        Reason::Nic,
        "nic0 is no device of VXLAN or Geneve: name one",
    );
    ip(
        world,
        "link add vx8 type vxlan id 8 local 10.9.0.1 dstport 4789 nolearning",
    );
    ip(world, "link set vx8 up");
    refused(
        &second,
        "vx8",
        Reason::NotAllowed,
        "add a rule with `interface = \"vx8\"` and `network = true`",
    );
    let of_ipv6 = "id 9 local 2001:db8::1 dstport 4789 nolearning";
    for (kind, up, why) in [
        ("external dstport 4790", true, "make it without `external`"),
        (
            "id 9 dstport 4789 nolearning",
            true,
            "`ip link set dev other type vxlan local ADDRESS`",
        ),
        (
            "id 9 local 10.9.0.1 dstport 4789",
            true,
            "`ip link set dev other type vxlan nolearning`",
        ),
        (
            "id 9 local 10.9.0.1 dstport 4789 nolearning",
            false,
            "`ip link set other up`",
        ),
        (
            of_ipv6,
            true,
            "make it again with `udp6zerocsumtx udp6zerocsumrx`",
        ),
        (
            &format!("{of_ipv6} udp6zerocsumtx"),
            true,
            "`udp6zerocsumtx udp6zerocsumrx`",
        ),
    ] {
        ip(world, &format!("link add other type vxlan {kind}"));
        if up {
            ip(world, "link set other up");
        }
        refused(&second, "other", Reason::Nic, why);
        ip(world, "link del other");
    }
    ip(
        world,
        &format!("link add other type vxlan {of_ipv6} udp6zerocsumtx udp6zerocsumrx"),
    );
    ip(world, "link set other up");
    second.tunnel(0, "other").expect("of IPv6");
    drop(second);
    let guest = common::take(&world.socket(), &wanted(1, 1)).expect("allowed");
    refused(&guest, "other", Reason::Lease, "not one of a network");
}

#[test]
fn network_in_tap_mode_has_no_tunnel() {
    require!(Root);
    let world = World::with(1, &policy());
    ip(&world, "address add 10.9.0.1/24 dev nic0");
    ip(&world, MAKE);
    ip(&world, UP);
    let lease = take(&world.socket(), &network(0, 1).in_mode(ModeRequest::Tap)).expect("allowed");
    common::assert_refused_with(lease.tunnel(0, "vx7"), "lease it with another mode");
}

#[test]
fn tunnel_follows_its_device_and_the_policy() {
    require!(Root);
    let mut tunnelled = Tunnelled::new(World::with(1, &policy()));
    for (wrong, right) in [
        ("link set vx7 down", UP),
        (
            "link set dev vx7 type vxlan learning",
            "link set dev vx7 type vxlan nolearning",
        ),
        (
            "link set dev vx7 type vxlan local 10.9.0.3",
            "link set dev vx7 type vxlan local 10.9.0.1",
        ),
    ] {
        tunnelled.await_answers(true);
        ip(&tunnelled.world, wrong);
        tunnelled.await_answers(false);
        tunnelled.await_change();
        ip(&tunnelled.world, right);
        tunnelled.await_change();
        // The steward has set the tunnel again, with no VTEPs.
        change_vtep(&tunnelled.lease, true);
        tunnelled.await_answers(true);
    }
    // Another device, which only its lessee can name.
    ip(&tunnelled.world, "link del vx7");
    tunnelled.await_change();
    assert!(!tunnelled.answers(7));
    ip(&tunnelled.world, MAKE);
    ip(&tunnelled.world, UP);
    assert!(!tunnelled.answers(7));
    set_tunnel(&tunnelled.lease);
    tunnelled.set_station();
    tunnelled.await_answers(true);
    tunnelled.world.set_policy(&rule(VethPair::NIC));
    tunnelled.await_answers(false);
    tunnelled.world.set_policy(&policy());
    // The other rule has ended that lease.
    let again = || take(&tunnelled.world.socket(), &on_device()).ok();
    let lease = wait::until_some(wait::SOON, again).expect("allowed again");
    lease.set_stations(&[station(Some(1))]).expect("allowed");
    tunnelled.on_device = lease;
    tunnelled.set_station();
    change_vtep(&tunnelled.lease, true);
    tunnelled.await_answers(true);
}

/// Both have the same station.
#[test]
fn networks_share_the_queues_of_a_lease_each_with_its_own_tunnel() {
    require!(Root);
    let world = World::kept_for(&(policy() + &rule("vx8")), "60");
    ip(
        &world,
        "link add vx8 type vxlan id 8 local 10.9.0.1 dstport 4789 nolearning",
    );
    ip(&world, "link set vx8 up");
    let lease = take(&world.socket(), &network(0, 1)).expect("allowed");
    common::assert_refused_with(lease.tunnel(1, "vx8"), "ask for that first");
    drop(lease);
    let mut tunnelled = Tunnelled::new(world);
    let on_device = Wanted {
        interface: "vx8".to_owned(),
        ..on_device()
    };
    let on_device = take(&tunnelled.world.socket(), &on_device).expect("allowed");
    let set_station = |tunnelled: &Tunnelled| tunnelled.lease.set_tunnel_stations(1, &[station(Some(2))]);
    let refused = refusal(set_station(&tunnelled));
    assert_eq!(refused.reason, Reason::Lease, "{refused}");
    tunnelled.lease.tunnel(1, "vx8").expect("allowed");
    common::assert_refused_with(set_station(&tunnelled), "set it there before");
    on_device.set_stations(&[station(Some(1))]).expect("allowed");
    set_station(&tunnelled).expect("allowed");
    assert!(!tunnelled.answers(8), "its packets come from nobody");
    let vtep = VtepChange {
        vtep: [10, 9, 0, 2].into(),
        is_added: true,
    };
    tunnelled.lease.change_vteps(1, &[vtep]).expect("there is room");
    assert!(tunnelled.answers(8) && tunnelled.answers(7));
    tunnelled.world.end_steward(Signal::KILL);
    tunnelled.world.restart();
    await_lease(&tunnelled.lease, "the steward is back", |lease| !lease.is_away());
    assert!(tunnelled.answers(8) && tunnelled.answers(7));
    // The user's network on the other device loses it.
    await_lease(&on_device, "the steward is back", |lease| !lease.is_away());
    on_device.set_stations(&[station(None)]).expect("allowed");
    // The steward answers before it looks at other networks.
    assert!(wait::until(wait::SOON, || !tunnelled.answers(8)));
    tunnelled.await_answers(true);
    ip(&tunnelled.world, "link set vx7 down");
    assert!(wait::until(wait::SOON, || !tunnelled.answers(7)));
}

/// Its stations are those that were checked on the vxlan device, whatever it requests, and in which order.
#[test]
fn network_in_a_tunnel_cannot_lose_it_and_keep_stations() {
    require!(Root);
    let world = World::with(1, &(policy() + &rule("vx8")));
    ip(&world, "address add 10.9.0.1/24 dev nic0");
    for device in [
        MAKE,
        "link add vx8 type vxlan id 8 local 10.9.0.1 dstport 4789 nolearning",
    ] {
        ip(&world, device);
    }
    ip(&world, UP);
    ip(&world, "link set vx8 up");
    let lease = take(&world.socket(), &network(0, 1)).expect("allowed");
    assert_eq!(refusal(lease.drop_unknown(0)).reason, Reason::Lease);
    set_tunnel(&lease);
    assert_eq!(refusal(lease.tunnel(1, "vx7")).reason, Reason::Taken);
    lease.tunnel(1, "vx8").expect("allowed");
    // The first one of the device has left.
    lease.tunnel(2, "vx8").expect("allowed");
    assert_eq!(refusal(lease.drop_unknown(1)).reason, Reason::Lease);
    for share in [0, 2] {
        lease.drop_unknown(share).expect("it has a tunnel");
        common::assert_refused_with(
            lease.set_tunnel_stations(share, &[station(Some(1))]),
            "set it there before",
        );
    }
    let refused = refusal(lease.set_tunnel_stations(1, &[station(Some(1))]));
    assert_eq!(refused.reason, Reason::Lease, "{refused}");
}

#[test]
fn tunnel_survives_the_steward_if_its_device_does() {
    require!(Root);
    let mut tunnelled = Tunnelled::new(World::kept_for(&policy(), "60"));
    let back = |lease: &Lease| !lease.is_away();
    tunnelled.lease.drop_unknown(0).expect("it has a tunnel");
    let mut unknown = frame::vxlan(LOCAL.parse().expect("an address"), 7, &frame::plain(200, 1));
    unknown[29] ^= 0x40;
    frame::sum_ipv4(&mut unknown);
    for (signal, drops) in [(Signal::TERM, 1), (Signal::KILL, 2)] {
        tunnelled.world.end_steward(signal);
        tunnelled.world.restart();
        await_lease(&tunnelled.lease, "the steward is back", back);
        tunnelled.await_answers(true);
        tunnelled.world.wire.send(&unknown);
        let counters = || tunnelled.lease.counters(0, common::soon()).expect("ours");
        let dropped = || counters().unknown_sender == drops;
        assert!(wait::until(wait::SOON, dropped), "{:?}", counters());
    }
    tunnelled.world.end_steward(Signal::KILL);
    ip(&tunnelled.world, "link set vx7 down");
    tunnelled.world.restart();
    await_lease(&tunnelled.lease, "the steward is back", back);
    tunnelled.await_answers(false);
}

/// A request of rtnetlink about an interface or a neighbour: its kind, flags, and body.
fn request(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(16 + body.len()).expect("short");
    let head = [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), &flags.to_ne_bytes()].concat();
    [&head[..], &1u32.to_ne_bytes(), &[0; 4], body].concat()
}

/// Kind of the next message of a socket, and its error number if it is NLMSG_ERROR.
fn next(socket: &OwnedFd) -> (u16, i32) {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    let soon = wait::SOON.try_into().expect("short");
    assert_eq!(poll(&mut fds, Some(&soon)), Ok(1), "no message");
    let mut bytes = [0; 16384];
    let (_, len) = recv(socket, &mut bytes[..], RecvFlags::empty()).expect("a message");
    assert!(len >= 20);
    let kind = u16::from_ne_bytes([bytes[4], bytes[5]]);
    (kind, i32::from_ne_bytes(bytes[16..20].try_into().expect("four")))
}

#[test]
fn lessee_reads_tables_by_the_sockets_and_changes_nothing() {
    require!(Root);
    let world = World::with(1, &policy());
    ip(&world, "address add 10.9.0.1/24 dev nic0");
    ip(&world, MAKE);
    ip(&world, UP);
    let lease = take(&world.socket(), &network(0, 1)).expect("allowed");
    let [asking, told] = lease.tunnel(0, "vx7").expect("allowed");
    let index = world.veth.near.index_of("vx7").to_ne_bytes();
    // This thread is in another network namespace, and has no capability.
    let before = capabilities(None).expect("own");
    let mut none = before;
    none.effective = CapabilitySet::empty();
    set_capabilities(None, none).expect("fewer");
    // RTNLGRP_NEIGH
    bind(&told, &SocketAddrNetlink::new(0, 1 << 2)).expect("everybody may");
    let link = [&[0; 4][..], &index, &[0; 8]].concat();
    // (RTM_GETLINK, RTM_DELLINK, and RTM_NEWLINK which sets it down), NLM_F_REQUEST and NLM_F_ACK
    let mut down = link.clone();
    down[12] = 1;
    send(&asking, &request(18, 1, &link), SendFlags::empty()).expect("sent");
    assert_eq!(next(&asking).0, 16, "RTM_NEWLINK");
    for (kind, body) in [(17, &link), (16, &down)] {
        send(&asking, &request(kind, 5, body), SendFlags::empty()).expect("sent");
        assert_eq!(next(&asking), (2, -libc::EPERM), "{kind}");
    }
    set_capabilities(None, before).expect("permitted");
    let entry = [
        "fdb",
        "append",
        "02:00:00:00:00:bb",
        "dev",
        "vx7",
        "dst",
        "10.9.0.2",
    ];
    world.veth.near.run("bridge", &entry);
    assert_eq!(next(&told).0, 28, "RTM_NEWNEIGH");
    let fdb = world
        .veth
        .near
        .output_of("bridge", &["fdb", "show", "dev", "vx7"]);
    assert!(fdb.contains("02:00:00:00:00:bb"), "{fdb}");
}
