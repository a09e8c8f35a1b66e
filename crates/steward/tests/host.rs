//! The host as one more receiver of a network: frames go between the host's own interface and who has the network, without
//! a bridge, and whatever ends, nothing is left of it.

mod common;

use std::time::Duration;

use common::{World, holder, holder_may, refusal, take, wanted, wanted_of};
use rustix::process::Signal;
use steer::Station;
use steward::client::Lease;
use steward::protocol::{Reason, StationChange, Wanted};
use testkit::{PacketPort, VethPair, frame, require, wait};

const OURS: [u8; 6] = [2, 0, 0, 0, 0, 0xaa];
const GROUP: [u8; 6] = [0x01, 0, 0x5e, 0, 0, 1];

/// Holders and root may have networks.
fn policy() -> String {
    holder_may(VethPair::NIC, "0")
        + "network = true\n[[allow]]\nuser = 0\ninterface = \"nic0\"\nqueues = \"all\"\nnetwork = true\n"
}

fn network() -> Wanted {
    Wanted {
        network: true,
        ..wanted(0, 1)
    }
}

fn to(mac: [u8; 6], seed: u8) -> Vec<u8> {
    let mut frame = frame::plain(200, seed);
    frame[..6].copy_from_slice(&mac);
    frame
}

/// A lease of a network with a station.
fn network_of_ours(world: &World) -> Lease {
    let lease = take(&world.socket(), &network()).expect("allowed");
    set_ours(&lease);
    lease
}

fn set_ours(lease: &Lease) {
    let station = Station { vlan: 0, mac: OURS };
    let port = Some(1);
    lease
        .set_stations(&[StationChange { station, port }])
        .expect("allowed");
}

/// Who has a network and reaches the host, in this process: what comes from the host goes back.
struct Guest {
    lease: Lease,
    inner: Lease,
    echo: holder::Echo,
}

impl Guest {
    fn new(world: &World) -> Self {
        let lease = network_of_ours(world);
        let host = lease
            .host()
            .unwrap_or_else(|error| panic!("{error} {}", world.steward));
        assert_eq!(host.macs, [lease.facts().mac]);
        let inner = take(&world.socket(), &wanted_of(&host.interface, 0, 1)).expect("who has the network");
        let echo = holder::Echo::open(&inner, 0);
        Self { lease, inner, echo }
    }

    /// Whether what the host sends comes back to its own interface.
    fn answers(&mut self, host: &PacketPort, sent: &[u8], limit: Duration) -> bool {
        while host.receive(Duration::ZERO).is_some() {}
        host.send(sent);
        wait::until(limit, || {
            self.echo.run(Duration::from_millis(5));
            std::iter::from_fn(|| host.receive(Duration::ZERO)).any(|got| got == sent)
        })
    }

    fn is_back(&self) -> bool {
        let back = |lease: &Lease| lease.take_changes().is_ok() && !lease.is_away();
        back(&self.lease) && back(&self.inner)
    }
}

/// The host's own interface.
fn host(world: &World) -> PacketPort {
    PacketPort::open(&world.veth.near, VethPair::NIC)
}

/// Frames to a guest leave by the wire, and there is no pair.
#[track_caller]
fn assert_nothing_left(world: &World) {
    let links = || world.veth.near.output_of("ip", &["-o", "link"]);
    assert!(
        wait::until(wait::SOON, || !links().contains("vaxh")),
        "{} {}",
        links(),
        world.steward
    );
    let sent = to(OURS, 99);
    while world.wire.receive(Duration::ZERO).is_some() {}
    host(world).send(&sent);
    assert_eq!(world.wire.receive(wait::SOON), Some(sent), "{}", world.steward);
}

#[test]
fn host_and_network_reach_each_other_until_the_lease_ends() {
    require!(Root);
    let world = World::with(1, &policy());
    let mut guest = Guest::new(&world);
    let host = host(&world);
    assert!(
        guest.answers(&host, &to(OURS, 1), wait::SOON),
        "{}",
        world.steward
    );
    let (group, stranger) = (to(GROUP, 2), to([2, 0, 0, 0, 0, 9], 3));
    assert!(guest.answers(&host, &group, wait::SOON));
    host.send(&stranger);
    // Groups go both ways, what is for the guest does not leave.
    assert_eq!(world.wire.receive_before(&stranger), [group]);
    let again = guest.lease.host().expect("as before");
    assert_eq!(again.interface, guest.inner.facts().name);
    drop(guest);
    assert_nothing_left(&world);
}

#[test]
fn pair_goes_with_the_network_also_when_its_own_lease_stays() {
    require!(Root);
    let world = World::with(1, &policy());
    let Guest { lease, inner, echo } = Guest::new(&world);
    drop(lease);
    let over = || inner.take_changes().is_err();
    assert!(wait::until(wait::SOON, over), "{}", world.steward);
    drop(echo);
    assert_nothing_left(&world);
    // Nothing that was left is in the way of the next one.
    drop(Guest::new(&world));
    assert_nothing_left(&world);
}

#[test]
fn host_is_reached_without_a_steward_and_with_the_next_one() {
    require!(Root);
    let mut world = World::kept_for(&policy(), "10");
    let mut guest = Guest::new(&world);
    let host = host(&world);
    for (seed, signal) in (1u8..)
        .step_by(10)
        .zip([Signal::TERM, Signal::KILL, Signal::KILL])
    {
        world.end_steward(signal);
        assert!(
            guest.answers(&host, &to(OURS, seed), wait::SOON),
            "without: {}",
            world.steward
        );
        world.restart();
        assert!(wait::until(wait::SOON, || guest.is_back()), "{}", world.steward);
        assert!(
            guest.answers(&host, &to(OURS, seed + 1), wait::SOON),
            "{}",
            world.steward
        );
        assert!(
            guest.answers(&host, &to(GROUP, seed + 2), wait::SOON),
            "{}",
            world.steward
        );
        assert_eq!(
            guest.lease.host().expect("as before").interface,
            guest.inner.facts().name
        );
    }
    drop(guest);
    world.await_nothing();
    assert_nothing_left(&world);
}

#[test]
fn nothing_is_left_when_steward_and_holder_are_killed() {
    require!(Root);
    for kept in [false, true] {
        let mut world = match kept {
            true => World::kept_for(&policy(), "10"),
            false => World::with(1, &policy()),
        };
        let mut running = holder::spawn(&world, "child_reaches_the_host", 0);
        running.await_text("reached");
        assert!(world.veth.near.output_of("ip", &["-o", "link"]).contains("vaxh"));
        world.end_steward(Signal::KILL);
        running.signal(Signal::KILL);
        running.wait(wait::SOON);
        world.restart();
        assert_nothing_left(&world);
    }
}

#[test]
#[ignore = "run in a process of its own"]
fn child_reaches_the_host() {
    holder::give_up_privileges();
    let lease = take(&holder::socket(), &network()).unwrap_or_else(|error| panic!("{error}"));
    set_ours(&lease);
    let host = lease.host().expect("allowed");
    let inner = take(&holder::socket(), &wanted_of(&host.interface, 0, 1)).expect("who has the network");
    let _echo = holder::Echo::open(&inner, 0);
    println!("reached");
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn what_a_killed_steward_left_is_taken_back_by_command() {
    require!(Root);
    let mut world = World::kept_for(&policy(), "60");
    let guest = Guest::new(&world);
    world.end_steward(Signal::KILL);
    let said = world.take_back();
    assert!(!said.contains("ERROR") && !said.contains("WARN"), "{said}");
    assert_nothing_left(&world);
    drop(guest);
}

#[test]
fn steward_that_dies_at_any_step_leaves_what_the_next_one_takes_over_or_removes() {
    require!(Root);
    for point in ["paired", "joined", "parted"] {
        let mut world = World::kept_for(&policy(), "10");
        let lease = network_of_ours(&world);
        world.end_steward(Signal::TERM);
        world.restart_to_crash(point);
        let here = |lease: &Lease| lease.take_changes().is_ok() && !lease.is_away();
        assert!(wait::until(wait::SOON, || here(&lease)), "{}", world.steward);
        // It dies of it, or of the end of the lease.
        let host = lease.host();
        match point {
            "parted" => drop((host.expect("allowed"), lease)),
            _ => {
                world.steward.wait(wait::SOON);
                world.restart();
                assert!(wait::until(wait::SOON, || here(&lease)), "{}", world.steward);
                let again = lease.host().expect("allowed");
                drop(take(&world.socket(), &wanted_of(&again.interface, 0, 1)).expect("it is there"));
                drop(lease);
                world.await_nothing();
                assert_nothing_left(&world);
                continue;
            }
        }
        world.steward.wait(wait::SOON);
        world.restart();
        // This process lives: its lease waits for it, until it asks anew.
        drop(take(&world.socket(), &network()).expect("given up by asking anew"));
        world.await_nothing();
        assert_nothing_left(&world);
    }
}

#[test]
fn host_is_refused_with_the_reason() {
    require!(Root);
    let closed = policy().replace("network = true\n", "network = true\nhost = false\n");
    let mut world = World::with(2, &closed);
    let lease = network_of_ours(&world);
    let refused = refusal(lease.host());
    assert_eq!(refused.reason, Reason::NotAllowed);
    assert!(refused.text.contains("`host = false`"), "{refused}");
    let plain = world.lease(1, 1).expect("allowed");
    assert_eq!(refusal(plain.host()).reason, Reason::Lease);
    drop((lease, plain));
    // A policy that allows it, and then not any more.
    common::write_policy(&world.dir, &policy());
    world.steward.signal(Signal::HUP);
    world.steward.await_text("the policy was read again");
    let Guest { lease, inner, .. } = Guest::new(&world);
    let inner_end = inner.facts().name;
    common::write_policy(&world.dir, &closed);
    world.steward.signal(Signal::HUP);
    assert!(
        wait::until(wait::SOON, || inner.take_changes().is_err()),
        "{}",
        world.steward
    );
    assert_nothing_left(&world);
    lease.take_changes().expect("the network goes on");
    assert!(
        take(&world.socket(), &wanted_of(&inner_end, 0, 1)).is_err(),
        "no such rule"
    );
}

#[test]
fn pair_is_for_who_has_the_network_alone() {
    require!(Root);
    let world = World::with(1, &policy());
    let mut running = holder::spawn(&world, "child_reaches_the_host", 0);
    running.await_text("reached");
    let links = world.veth.near.output_of("ip", &["-o", "link"]);
    let inner = links.split([' ', '@', ':']).find(|word| word.starts_with("vaxg"));
    let refused = refusal(take(&world.socket(), &wanted_of(inner.expect("a pair"), 0, 1)));
    assert_eq!(refused.reason, Reason::NotAllowed, "{refused}");
    assert!(refused.text.contains("only who has that"), "{refused}");
}

#[test]
fn interface_made_anew_is_joined_again_and_its_mtu_is_followed() {
    require!(Root);
    let world = World::with(1, &policy());
    let mut guest = Guest::new(&world);
    let generation = guest.lease.facts().generation;
    world.veth.near.ip(&["link", "delete", VethPair::NIC]);
    world.veth.join(1, 1400);
    let anew = || {
        let _ = guest.lease.take_changes().expect("it goes on");
        guest.lease.facts().generation != generation && guest.lease.facts().mode.is_some()
    };
    assert!(wait::until(wait::SOON, anew), "{}", world.steward);
    let host = host(&world);
    let mut seed = 0;
    let again = wait::until(wait::SOON, || {
        seed += 1;
        guest.answers(&host, &to(OURS, seed), Duration::from_millis(100))
    });
    assert!(again, "{}", world.steward);
    let said = world.veth.near.output_of("ip", &["-o", "link"]);
    let ends = said.lines().filter(|line| line.contains("vaxh"));
    assert_eq!(ends.filter(|line| line.contains("mtu 1400")).count(), 2, "{said}");
}

#[test]
fn addresses_of_the_host_are_told_as_they_change() {
    require!(Root);
    let world = World::with(1, &policy());
    let guest = Guest::new(&world);
    while guest.lease.take_changes().expect("it goes on").is_some() {}
    let above = [
        "link",
        "add",
        "link",
        VethPair::NIC,
        "name",
        "above0",
        "address",
        "02:00:00:00:00:cc",
        "type",
        "macvlan",
    ];
    world.veth.near.ip(&above);
    let told = || guest.lease.take_changes().expect("it goes on").is_some();
    assert!(wait::until(wait::SOON, told), "{}", world.steward);
    let macs = guest.lease.host().expect("as before").macs;
    assert_eq!(macs, [guest.lease.facts().mac, [2, 0, 0, 0, 0, 0xcc]]);
}
