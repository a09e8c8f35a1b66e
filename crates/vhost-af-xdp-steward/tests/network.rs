//! Leases of networks: stations that come and go at run time, groups by a ring, what the policy says to each, and what
//! is left when stewards and lessees are gone.
#![allow(unsafe_code)]

use crate::common;

use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use common::raw::Raw;
use common::{World, change, lessee, lessee_may, network, refusal, take, to};
use rustix::process::Signal;
use steer::MulticastReader;
use steward_client::Lease;
use steward_protocol::{Reason, Request, STATIONS_MAX, StationChange, Steered};
use testkit::{VethPair, assert_soon, require, wait};

const OURS: [u8; 6] = [2, 0, 0, 0, 0, 0xaa];
const MORE: [u8; 6] = [2, 0, 0, 0, 0, 0xab];
const THEIRS: [u8; 6] = [2, 0, 0, 0, 0, 0xbb];
const GROUP: [u8; 6] = [0x01, 0, 0x5e, 0, 0, 1];

/// Root may have networks of any stations, lessees of two addresses.
fn policy() -> String {
    let lessees = lessee_may(VethPair::NIC, "0")
        + "network = true\nmacs = [\"02:00:00:00:00:aa\", \"02:00:00:00:00:ab\"]\n";
    lessees + "[[allow]]\nuser = 0\ninterface = \"nic0\"\nqueues = \"all\"\nnetwork = true\n"
}

fn on(vlan: u16, mac: [u8; 6], port: u32) -> StationChange {
    change(vlan, mac, Some(port))
}

fn off(vlan: u16, mac: [u8; 6]) -> StationChange {
    change(vlan, mac, None)
}

fn comes(groups: &mut MulticastReader, sent: &[u8]) -> bool {
    let mut frame = Vec::new();
    wait::until(wait::SOON, || groups.read(&mut frame).is_some() && frame == sent)
}

/// The lessee's end in this process: what comes goes back.
struct Guest {
    lease: Lease,
    echo: lessee::Echo,
}

impl Guest {
    fn new(world: &World) -> Self {
        let lease = take(&world.socket(), &network(0, 1)).expect("allowed");
        let echo = lessee::Echo::open(&lease, 0);
        Self { lease, echo }
    }

    /// Whether a frame to this address comes back.
    fn answers(&mut self, world: &World, mac: [u8; 6], seed: u8) -> bool {
        world.wire.send(&to(mac, seed));
        // The last one always does: a station of its own says that all before it were looked at.
        let last = to(MORE, seed);
        world.wire.send(&last);
        let mut came = false;
        let seen_last = wait::until(wait::SOON, || {
            self.echo.run(Duration::from_millis(5));
            while let Some(got) = world.wire.receive(Duration::ZERO) {
                if got == last {
                    return true;
                }
                came |= got == to(mac, seed);
            }
            false
        });
        assert!(seen_last);
        came
    }
}

#[test]
fn stations_change_at_run_time_and_everything_else_is_the_hosts() {
    require!(Root);
    let world = World::with(1, &policy());
    let mut guest = Guest::new(&world);
    assert_eq!(guest.lease.facts().steered, Steered::ByNetwork);
    guest.lease.set_stations(&[on(0, MORE, 2)]).expect("allowed");
    assert!(!guest.answers(&world, OURS, 1));
    guest.lease.set_stations(&[on(0, OURS, 1)]).expect("allowed");
    assert!(guest.answers(&world, OURS, 2));
    assert!(!guest.answers(&world, THEIRS, 3));
    assert!(!guest.answers(&world, GROUP, 4));
    let accepted = || world.accepts("02:00:00:00:00:aa");
    assert!(accepted(), "the NIC knows");
    // By one socket: to close another for each change would take the kernel long, and the steward with it.
    let near = &world.veth.near;
    let sockets = || near.output_of("awk", &["{ print $NF }", "/proc/net/packet"]);
    let before = sockets();
    let station = |at| [0x02, 0, 0, 0, 1, at];
    let many: Vec<_> = (0..8).map(|at| on(0, station(at), 3)).collect();
    guest.lease.set_stations(&many).expect("allowed");
    let some: Vec<_> = (0..4).map(|at| off(0, station(at))).collect();
    guest.lease.set_stations(&some).expect("ours");
    assert_eq!(sockets(), before);
    guest
        .lease
        .set_stations(&[off(0, OURS), off(7, THEIRS)])
        .expect("of ours, or of nobody");
    assert!(!guest.answers(&world, OURS, 5));
    assert!(!accepted(), "and forgets");
    let counters = guest.lease.counters(0, common::soon()).expect("ours");
    assert!(counters.group_copied >= 1, "{counters:?}");
}

#[test]
fn lessee_without_privileges_sets_stations_and_reads_its_groups() {
    require!(Root);
    let world = World::with(1, &policy());
    let mut running = lessee::spawn(&world, "network::child_serves_a_network", 0);
    running.await_text("serving");
    let echoes = |mac| {
        let sent = to(mac, 9);
        wait::until(wait::SOON, || world.echo(&sent, Duration::from_millis(200)))
    };
    assert!(echoes(OURS), "{running}");
    world.wire.send(&to(GROUP, 77));
    running.await_text("group of 200 bytes");
    running.await_text("not THEIRS: NotAllowed");
    // Its end takes all of it back.
    running.signal(Signal::KILL);
    running.wait(wait::SOON);
    world.await_no_program();
}

#[test]
#[ignore = "run in a process of its own"]
fn child_serves_a_network() {
    lessee::give_up_privileges();
    let lease = take(&lessee::socket(), &network(0, 1)).unwrap_or_else(|error| panic!("{error}"));
    let mut echo = lessee::Echo::open(&lease, 0);
    lease.set_stations(&[on(0, OURS, 1)]).expect("allowed");
    let mut groups = lease.groups().expect("a ring");
    println!("serving");
    println!(
        "not THEIRS: {:?}",
        refusal(lease.set_stations(&[on(0, THEIRS, 1)])).reason
    );
    let mut frame = Vec::new();
    loop {
        echo.run(Duration::from_millis(10));
        // Others send groups, too, when an interface comes up.
        while groups.read(&mut frame).is_some() {
            if frame == to(GROUP, 77) {
                println!("group of {} bytes", frame.len());
            }
        }
    }
}

#[test]
fn station_is_refused_with_the_reason_and_nothing_of_the_message_is_done() {
    require!(Root);
    let world = World::with(4, &policy());
    let first = take(&world.socket(), &network(0, 2)).expect("allowed");
    let second = take(&world.socket(), &network(2, 2)).expect("allowed");
    first.set_stations(&[on(0, OURS, 1)]).expect("allowed");
    let taken = refusal(second.set_stations(&[on(0, MORE, 1), on(0, OURS, 1)]));
    assert_eq!(taken.reason, Reason::Taken, "{taken}");
    first
        .set_stations(&[on(0, MORE, 3)])
        .expect("the second did not get it");
    // What the other one gave up can be had.
    first.set_stations(&[off(0, OURS)]).expect("ours");
    second.set_stations(&[on(0, OURS, 1)]).expect("free");
    let own = first.facts().mac;
    common::assert_refused(
        first.set_stations(&[on(0, own, 1)]),
        Reason::NotAllowed,
        "the host's",
    );
    common::assert_refused_with(first.set_stations(&[on(5, THEIRS, 1)]), "rxvlan off");
    assert!(first.facts().strips_tags);
    world
        .veth
        .near
        .run("ethtool", &["-K", VethPair::NIC, "rxvlan", "off"]);
    first.set_stations(&[on(5, THEIRS, 1)]).expect("tags are seen");
}

#[test]
fn lease_without_a_network_has_neither_stations_nor_groups() {
    require!(Root);
    let world = World::with(2, &policy());
    let lease = world.lease(0, 1).expect("allowed");
    assert_eq!(
        refusal(lease.set_stations(&[on(0, OURS, 1)])).reason,
        Reason::Lease
    );
    assert_eq!(refusal(lease.groups()).reason, Reason::Lease);
    drop(lease);
    let closed = World::with(2, common::POLICY);
    common::assert_refused_with(take(&closed.socket(), &network(0, 1)), "network = true");
}

#[test]
fn network_has_so_many_stations_and_no_more() {
    require!(Root);
    let world = World::with(1, &policy());
    let lease = take(&world.socket(), &network(0, 1)).expect("allowed");
    let station = |number: usize| {
        let [high, low] = (number as u16).to_be_bytes();
        on(0, [2, 0, 0, 1, high, low], number as u32)
    };
    let all: Vec<_> = (0..STATIONS_MAX).map(station).collect();
    lease.set_stations(&all).expect("as many as there may be");
    lease.set_stations(&all).expect("the same again");
    let refused = refusal(lease.set_stations(&[station(STATIONS_MAX)]));
    assert_eq!(refused.reason, Reason::Limit, "{refused}");
    lease.set_stations(&[off(0, all[7].station.mac)]).expect("ours");
    lease.set_stations(&[station(STATIONS_MAX)]).expect("room");
}

#[test]
fn network_goes_on_without_a_steward_and_with_the_next_one() {
    require!(Root);
    let mut world = World::kept_for(&policy(), "60");
    let mut guest = Guest::new(&world);
    guest
        .lease
        .set_stations(&[on(0, OURS, 1), on(0, MORE, 2)])
        .expect("allowed");
    let mut groups = guest.lease.groups().expect("a ring");
    for (seed, signal) in (0u8..).step_by(20).zip([Signal::TERM, Signal::KILL]) {
        world.end_steward(signal);
        assert!(guest.answers(&world, OURS, seed + 1));
        world.wire.send(&to(GROUP, seed + 2));
        assert!(comes(&mut groups, &to(GROUP, seed + 2)), "without");
        world.restart();
        world.await_that(|| guest.lease.take_changes().is_ok() && !guest.lease.is_away());
        assert!(guest.answers(&world, OURS, seed + 3));
        guest
            .lease
            .set_stations(&[off(0, OURS), on(0, THEIRS, 3)])
            .expect("allowed");
        assert!(!guest.answers(&world, OURS, seed + 4));
        assert!(guest.answers(&world, THEIRS, seed + 5));
        guest
            .lease
            .set_stations(&[on(0, OURS, 1), off(0, THEIRS)])
            .expect("allowed");
        // The ring is the same one.
        drop(groups);
        groups = guest.lease.groups().expect("a ring");
        world.wire.send(&to(GROUP, seed + 6));
        assert!(comes(&mut groups, &to(GROUP, seed + 6)), "with the next");
    }
    drop((guest, groups));
    world.await_nothing();
}

#[test]
fn lease_that_is_not_resumed_leaves_no_station() {
    require!(Root);
    let mut world = World::kept_lingering(&policy(), "60");
    let lease = take(&world.socket(), &network(0, 2)).expect("allowed");
    lease.set_stations(&[on(0, OURS, 1)]).expect("allowed");
    world.end_steward(Signal::KILL);
    drop(lease);
    // This process lives, so its lease is not over for the steward before its grace period is; another asks for it
    // again.
    world.restart();
    let again = take(&world.socket(), &network(0, 2)).expect("given up by asking again");
    again.set_stations(&[on(0, MORE, 1)]).expect("allowed");
    let program = world.program();
    drop(again);
    let other = wait::until_some(wait::SOON, || take(&world.socket(), &network(1, 1)).ok());
    let other = other.expect("free");
    assert_eq!(world.program(), program, "the program is the same");
    other
        .set_stations(&[on(0, OURS, 1), on(0, MORE, 1)])
        .expect("nobody has them any more");
}

#[test]
fn interface_made_again_gets_the_stations_again() {
    require!(Root);
    let world = World::with(1, &policy());
    let lease = take(&world.socket(), &network(0, 1)).expect("allowed");
    lease.set_stations(&[on(0, OURS, 1)]).expect("allowed");
    let generation = lease.facts().generation;
    world.veth.near.ip(&["link", "delete", VethPair::NIC]);
    world.veth.join(1, 1500);
    let again = || {
        lease.take_changes().expect("it goes on");
        lease.facts().generation != generation && lease.facts().mode.is_some()
    };
    world.await_that(again);
    let mut echo = lessee::Echo::open(&lease, 0);
    let wire = testkit::PacketPort::open(&world.veth.far, VethPair::WIRE);
    let sent = to(OURS, 1);
    let comes_back = || {
        wire.send(&sent);
        echo.run(Duration::from_millis(20));
        wire.receive(Duration::from_millis(20))
            .is_some_and(|got| got == sent)
    };
    world.await_that(comes_back);
}

#[test]
fn station_that_a_new_policy_does_not_allow_is_taken_back() {
    require!(Root);
    let mut world = World::with(1, &policy());
    let mut guest = Guest::new(&world);
    guest
        .lease
        .set_stations(&[on(0, OURS, 1), on(0, MORE, 1)])
        .expect("allowed");
    assert!(guest.answers(&world, OURS, 1));
    let narrower = policy().replace(
        "queues = \"all\"\nnetwork = true\n",
        "queues = \"all\"\nnetwork = true\nmacs = [\"02:00:00:00:00:ab\"]\n",
    );
    world.set_policy(&narrower);
    let mut seed = 2;
    let gone = wait::until(wait::SOON, || {
        seed = u8::wrapping_add(seed, 1);
        !guest.answers(&world, OURS, seed)
    });
    assert!(gone);
    world.set_policy(common::POLICY);
    assert_soon!(guest.lease.take_changes().is_err(), "a lease of a network");
}

#[test]
fn addresses_of_interfaces_above_are_the_hosts_and_no_stations() {
    require!(Root);
    let world = World::with(1, &policy());
    let near = &world.veth.near;
    let nic = VethPair::NIC;
    let add = |name: &str, of: &str, mac: &str, kind: &[&str]| {
        let report = ["link", "add", "link", of, "name", name, "address", mac, "type"];
        near.ip(&[&report, kind].concat());
    };
    add("mv0", nic, "02:00:00:00:00:c1", &["macvlan", "mode", "bridge"]);
    let mut guest = Guest::new(&world);
    let of_host = |last| [2, 0, 0, 0, 0, last];
    let theirs = [on(0, MORE, 2), on(0, of_host(0xc1), 1)];
    common::assert_refused(
        guest.lease.set_stations(&theirs),
        Reason::NotAllowed,
        "the host's",
    );
    // What the host gets later is taken away from who has it.
    let stations = [on(0, MORE, 2), on(0, OURS, 1), on(0, of_host(0xc4), 3)];
    guest.lease.set_stations(&stations).expect("nobody's");
    assert!(guest.answers(&world, of_host(0xc4), 1) && guest.answers(&world, OURS, 2));
    add("mv2", nic, "02:00:00:00:00:c4", &["macvlan", "mode", "bridge"]);
    let mut seed = 3;
    let gone = wait::until(wait::SOON, || {
        seed = u8::wrapping_add(seed, 1);
        !guest.answers(&world, of_host(0xc4), seed)
    });
    assert!(gone);
    assert!(guest.answers(&world, OURS, 2), "the others go on");
    // And can be had when the host has it no more.
    near.ip(&["link", "delete", "mv2"]);
    world.await_that(|| guest.lease.set_stations(&[on(0, of_host(0xc4), 3)]).is_ok());
}

#[test]
fn addresses_of_the_bridge_that_an_interface_is_part_of_are_the_hosts() {
    require!(Root);
    let world = World::with(1, &policy());
    let near = &world.veth.near;
    near.ip(&["link add br0 address 02:00:00:00:00:d1 type bridge"]);
    near.ip(&["link", "set", VethPair::NIC, "master", "br0"]);
    let above = ["link", "add", "link", "br0", "name", "mv0", "address"];
    near.ip(&[&above as &[&str], &["02:00:00:00:00:d2", "type", "macvlan"]].concat());
    let lease = take(&world.socket(), &network(0, 1)).expect("allowed");
    for last in [0xd1, 0xd2] {
        common::assert_refused_with(
            lease.set_stations(&[on(0, [2, 0, 0, 0, 0, last], 1)]),
            "the host's",
        );
    }
    lease.set_stations(&[on(0, OURS, 1)]).expect("nobody's");
}

#[test]
fn steward_that_comes_with_another_policy_takes_its_stations_from_a_lease_that_waits() {
    require!(Root);
    let mut world = World::kept_for(&policy(), "60");
    let mut guest = Guest::new(&world);
    guest
        .lease
        .set_stations(&[on(0, OURS, 1), on(0, MORE, 2)])
        .expect("allowed");
    assert!(guest.answers(&world, OURS, 1));
    world.end_steward(Signal::KILL);
    common::write_policy(
        &world.dir,
        &policy().replace(
            "queues = \"all\"\nnetwork = true\n",
            "queues = \"all\"\nnetwork = true\nmacs = [\"02:00:00:00:00:ab\"]\n",
        ),
    );
    // The lessee does not come back, and is there: its queues are kept for it.
    world.restart();
    assert!(!guest.answers(&world, OURS, 2));
}

/// A connection with a lease of queue 0 as a network, of that user, and its ring.
fn ring_of(world: &World, uid: u32) -> (Raw, OwnedFd) {
    let mut lessee = Raw::leased_as(&world.socket(), uid, uid, &network(0, 1));
    let ring = lessee.ask_for_descriptor(&Request::Groups);
    (lessee, ring)
}

/// The kernel's number of a ring.
fn number_of(ring: &impl AsFd) -> u32 {
    let path = format!("/proc/self/fdinfo/{}", ring.as_fd().as_raw_fd());
    let report = std::fs::read_to_string(path).expect("open");
    let number = report.lines().find_map(|line| line.strip_prefix("map_id:"));
    number.expect("a map").trim().parse().expect("a number")
}

#[test]
fn user_that_keeps_the_rings_of_all_its_leases_has_one() {
    require!(Root);
    let world = World::lingering(&policy(), "60");
    let kept: Vec<_> = (0..20).map(|_| ring_of(&world, common::lessee_uid()).1).collect();
    let numbers: BTreeSet<u32> = kept.iter().map(number_of).collect();
    assert_eq!(numbers.len(), 1, "{numbers:?}");
    let others = number_of(&ring_of(&world, 0).1);
    assert!(!numbers.contains(&others), "another user's");
}

#[test]
fn ring_that_a_user_has_again_is_empty_and_can_be_mapped() {
    require!(Root);
    let world = World::with(1, &policy());
    let (lessee, ring) = ring_of(&world, 0);
    assert_eq!(freeze(&ring), Err(libc::EBUSY));
    drop(lessee);
    let again = || take(&world.socket(), &network(0, 1)).ok();
    let serve = || {
        let lease = wait::until_some(wait::SOON, again).expect("free");
        let groups = lease.groups().expect("mapped");
        assert_eq!(number_of(&groups), number_of(&ring));
        let echo = lessee::Echo::open(&lease, 0);
        (Guest { lease, echo }, groups)
    };
    let (guest, mut kept) = serve();
    world.wire.send(&to(GROUP, 1));
    assert!(comes(&mut kept, &to(GROUP, 1)));
    world.wire.send(&to(GROUP, 2));
    let counted = || {
        guest
            .lease
            .counters(0, common::soon())
            .expect("ours")
            .group_copied
    };
    let before = counted();
    assert!(before >= 1 && wait::until(wait::SOON, || counted() >= 2));
    drop(guest);
    let (_guest, mut groups) = serve();
    world.wire.send(&to(GROUP, 3));
    let (mut came, mut frame) = (Vec::new(), Vec::new());
    let last = wait::until(wait::SOON, || {
        while groups.read(&mut frame).is_some() {
            came.push(frame.clone());
        }
        came.contains(&to(GROUP, 3))
    });
    assert!(last && !came.contains(&to(GROUP, 2)), "of the last lease");
}

/// BPF_MAP_FREEZE: nobody maps it for writing, or writes to it, any more.
fn freeze(map: &OwnedFd) -> Result<(), i32> {
    const BPF_MAP_FREEZE: libc::c_long = 22;
    let attributes = [map.as_raw_fd(), 0];
    let size = size_of_val(&attributes);
    // SAFETY: the kernel reads attributes that live.
    match unsafe { libc::syscall(libc::SYS_bpf, BPF_MAP_FREEZE, attributes.as_ptr(), size) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error().raw_os_error().unwrap_or_default()),
    }
}
