//! The host as one more receiver of a network: frames go between the host's own interface and who has the network,
//! without a bridge, and whatever ends, nothing is left of it.

use crate::common;

use std::fs::File;
use std::io::{Read, Write};
use std::time::Duration;

use common::hostile::assert_serves;
use common::raw::Raw;
use common::{World, change, lessee, lessee_may, network, refusal, take, to, wanted_of};
use rustix::io::Errno;
use rustix::process::Signal;
use steward_client::Lease;
use steward_protocol::{HostEnd, Reason};
use testkit::stalled::StuckWrite;
use testkit::{PacketPort, VethPair, assert_has, assert_soon, require, wait};

const OURS: [u8; 6] = [2, 0, 0, 0, 0, 0xaa];
const GROUP: [u8; 6] = [0x01, 0, 0x5e, 0, 0, 1];

/// Lessees and root may have networks.
fn policy() -> String {
    lessee_may(VethPair::NIC, "0")
        + "network = true\n[[allow]]\nuser = 0\ninterface = \"nic0\"\nqueues = \"all\"\nnetwork = true\n"
}

/// A lease of a network with a station.
fn network_of_ours(world: &World) -> Lease {
    let lease = take(&world.socket(), &network(0, 1)).expect("allowed");
    set_ours(&lease);
    lease
}

fn set_ours(lease: &Lease) {
    lease.set_stations(&[change(0, OURS, Some(1))]).expect("allowed");
}

/// Who has a network and reaches the host, in this process: what comes from the host goes back.
struct Guest {
    lease: Lease,
    end: HostEnd,
    tap: File,
}

impl Guest {
    fn new(world: &World) -> Self {
        let lease = network_of_ours(world);
        let (end, tap) = lease
            .host(0)
            .unwrap_or_else(|error| panic!("{error} {}", world.steward));
        assert_eq!(end.macs, [lease.facts().mac]);
        let tap = File::from(tap.expect("a new one's descriptor"));
        Self { lease, end, tap }
    }

    /// Whether what the host sends comes back to its own interface.
    fn answers(&mut self, host: &PacketPort, sent: &[u8], limit: Duration) -> bool {
        while host.receive(Duration::ZERO).is_some() {}
        host.send(sent);
        wait::until(limit, || {
            self.echo();
            std::iter::from_fn(|| host.receive(Duration::ZERO)).any(|got| got == sent)
        })
    }

    #[track_caller]
    fn assert_answers(&mut self, host: &PacketPort, sent: &[u8]) {
        assert!(self.answers(host, sent, wait::SOON), "no answer to {sent:?}");
    }

    /// Gives the host back what it sent.
    fn echo(&mut self) {
        let mut frame = [0; 4096];
        while let Ok(bytes) = self.tap.read(&mut frame) {
            self.tap.write_all(&frame[..bytes]).expect("the device is up");
        }
    }

    fn is_back(&self) -> bool {
        self.lease.take_changes().is_ok() && !self.lease.is_away()
    }

    /// The device is as it was.
    #[track_caller]
    fn assert_same(&self) {
        let (end, tap) = self.lease.host(self.end.index).expect("as before");
        assert_eq!(
            (end.interface, end.index),
            (self.end.interface.clone(), self.end.index)
        );
        assert!(tap.is_none(), "there is one descriptor");
    }

    /// Nothing can be read or written any more.
    fn is_gone(&mut self) -> bool {
        let failed = self.tap.read(&mut [0; 64]).map_err(|error| error.raw_os_error());
        failed == Err(Some(Errno::BADFD.raw_os_error()))
    }
}

/// The host's own interface.
fn host(world: &World) -> PacketPort {
    PacketPort::open(&world.veth.near, VethPair::NIC)
}

/// Frames to a guest leave by the wire, and there is no device.
#[track_caller]
fn assert_nothing_left(world: &World) {
    let links = || world.veth.near.output_of("ip", &["-o", "link"]);
    assert_soon!(!links().contains("vaxh"), "{}", links());
    // The kernel removes a device whose lessee has closed its descriptor before the steward takes the programs off that
    // send to it.
    let (sent, host) = (to(OURS, 99), host(world));
    let leaves = || {
        host.send(&sent);
        world.wire.receive(Duration::from_millis(50)) == Some(sent.clone())
    };
    world.await_that(leaves);
}

#[test]
fn host_and_network_reach_each_other_until_the_lease_ends() {
    require!(Root);
    let world = World::with(1, &policy());
    let mut guest = Guest::new(&world);
    let host = host(&world);
    guest.assert_answers(&host, &to(OURS, 1));
    let (group, stranger) = (to(GROUP, 2), to([2, 0, 0, 0, 0, 9], 3));
    guest.assert_answers(&host, &group);
    host.send(&stranger);
    // Groups go both ways, what is for the guest does not leave.
    assert_eq!(world.wire.receive_before(&stranger), [group]);
    guest.assert_same();
    drop(guest);
    assert_nothing_left(&world);
}

#[test]
fn device_goes_with_the_network_also_when_its_descriptor_stays() {
    require!(Root);
    let world = World::with(1, &policy());
    let Guest { lease, end, tap } = Guest::new(&world);
    drop(lease);
    assert_nothing_left(&world);
    // Nothing that was left is in the way of the next one.
    let mut next = Guest::new(&world);
    let host = host(&world);
    next.assert_answers(&host, &to(OURS, 1));
    assert_ne!(next.end.index, end.index);
    drop((next, tap));
    assert_nothing_left(&world);
}

#[test]
fn device_whose_descriptor_is_lost_is_made_again() {
    require!(Root);
    let world = World::with(1, &policy());
    let mut guest = Guest::new(&world);
    // Somebody deletes it: the lessee is told, and asks.
    while guest.lease.take_changes().expect("it goes on").is_some() {}
    world.veth.near.ip(&["link", "delete", &guest.end.interface]);
    world.await_that(|| guest.lease.take_changes().expect("it goes on").is_some());
    assert!(guest.is_gone());
    // By itself it goes with its descriptor, and whoever says that he has none gets another.
    for has in [guest.end.index, 0] {
        let (end, tap) = guest.lease.host(has).expect("allowed");
        assert_ne!(end.index, guest.end.index);
        let before = std::mem::replace(&mut guest.tap, File::from(tap.expect("another")));
        guest.end = end;
        guest.assert_answers(&host(&world), &to(OURS, 1));
        drop(before);
    }
}

/// A lessee that says again and again that it has no descriptor.
#[test]
fn lessee_cannot_have_devices_made_without_end() {
    require!(Root);
    let policy = policy() + "[[allow]]\nuser = 1235\ninterface = \"other0\"\nqueues = \"all\"\n";
    let world = World::with(1, &policy);
    world.veth.join_as("other0", "other1", 1, 1500);
    let mut guest = Guest::new(&world);
    let mut made = 1;
    let refused = loop {
        match guest.lease.host(0) {
            Ok((end, tap)) => (guest.end, guest.tap) = (end, File::from(tap.expect("a new one's"))),
            Err(error) => break refusal::<()>(Err(error)),
        }
        made += 1;
        assert!(made < 100, "no end");
    };
    assert_eq!(refused.reason, Reason::Limit);
    assert_has(
        &refused.text,
        &["user 0 had taps made for networks of nic0 too often"],
    );
    // What there is stays, and is asked for as often as one likes.
    for _ in 0..100 {
        guest.assert_same();
    }
    guest.assert_answers(&host(&world), &to(OURS, 1));
    // Others have what they ask for.
    let other = wanted_of("other0", 0, 1);
    let mut honest = Raw::connect_as(&world.socket(), 1235, 1235);
    honest.lease(other);
    let lines = world.steward.said().matches("joined with the host").count();
    assert!(lines <= made, "{lines} lines, {made} devices");
    drop(guest);
    assert_nothing_left(&world);
}

/// What a lessee that was taken over can do with the descriptor: none of it outlives its lease, or reaches others.
#[test]
fn lessee_that_turns_hostile_has_no_more_than_its_own_device() {
    require!(Root);
    const CALLS: [(u32, u64); 9] = [
        (203, 1),    // TUNSETPERSIST: it stays without its descriptor
        (204, 1234), // TUNSETOWNER
        (206, 1234), // TUNSETGROUP
        (205, 24),   // TUNSETLINK: refused, as it is up
        (208, 0),    // TUNSETOFFLOAD
        (201, 1),    // TUNSETDEBUG
        (200, 1),    // TUNSETNOCSUM
        (226, 0),    // TUNSETCARRIER takes a pointer: refused
        (217, 0),    // TUNSETQUEUE takes one, too
    ];
    let world = World::with(1, &policy());
    let mut guest = Guest::new(&world);
    for (number, value) in CALLS {
        let refused = lessee::tun_ioctl(&guest.tap, number, value);
        println!("{number}: {refused:?}");
        assert!(number != 205 || refused.is_err(), "another kind of interface");
    }
    // What it writes is the kernel's to refuse: headers that contradict themselves or the frame.
    for header in [[0xff; 12], [1, 1, 0xff, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0]] {
        let frame = [&header[..], &to(OURS, 1)].concat();
        assert!(guest.tap.write(&frame).is_err(), "{header:?}");
    }
    assert!(guest.tap.write(&[0; 13]).is_err(), "no frame");
    // It is not the interface that the host's address is on, whatever address it has.
    guest.assert_answers(&host(&world), &to(OURS, 2));
    drop(guest.lease);
    assert_nothing_left(&world);
}

/// The kernel is not done with removing a device before that, and others notice nothing of it.
#[test]
fn write_to_the_device_that_never_ends_holds_up_neither_others_nor_the_end_of_the_steward() {
    require!(Root, Fuse);
    let mut world = World::with(2, &policy());
    let mut guest = Guest::new(&world);
    let mut stuck = vec![StuckWrite::begin(&guest.tap)];
    // Another is made in its place, and is its lessee's in the same way.
    let (end, tap) = guest.lease.host(0).expect("allowed");
    assert_ne!(end.index, guest.end.index);
    (guest.end, guest.tap) = (end, File::from(tap.expect("another")));
    guest.assert_answers(&host(&world), &to(OURS, 1));
    stuck.push(StuckWrite::begin(&guest.tap));
    assert_serves(&world);
    drop(guest.lease);
    assert_serves(&world);
    assert_nothing_left(&world);
    // The next one has it, and goes first.
    let mut next = Guest::new(&world);
    next.assert_answers(&host(&world), &to(OURS, 2));
    stuck.push(StuckWrite::begin(&next.tap));
    world.end_steward(Signal::TERM);
    assert_nothing_left(&world);
}

#[test]
fn host_is_reached_without_a_steward_and_with_the_next_one() {
    require!(Root);
    let mut world = World::kept_for(&policy(), "60");
    let mut guest = Guest::new(&world);
    let host = host(&world);
    for (seed, signal) in (1u8..)
        .step_by(10)
        .zip([Signal::TERM, Signal::KILL, Signal::KILL])
    {
        world.end_steward(signal);
        assert!(guest.answers(&host, &to(OURS, seed), wait::SOON), "without");
        world.restart();
        world.await_that(|| guest.is_back());
        guest.assert_answers(&host, &to(OURS, seed + 1));
        guest.assert_answers(&host, &to(GROUP, seed + 2));
        guest.assert_same();
    }
    drop(guest);
    world.await_nothing();
    assert_nothing_left(&world);
}

#[test]
fn nothing_is_left_when_steward_and_lessee_are_killed() {
    require!(Root);
    for kept in [false, true] {
        let mut world = match kept {
            true => World::kept_for(&policy(), "60"),
            false => World::with(1, &policy()),
        };
        let mut running = lessee::spawn(&world, "host::child_reaches_the_host", 0);
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
    lessee::give_up_privileges();
    let lease = take(&lessee::socket(), &network(0, 1)).unwrap_or_else(|error| panic!("{error}"));
    set_ours(&lease);
    let _tap = lease.host(0).expect("allowed").1.expect("a new one's descriptor");
    println!("reached");
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn leftovers_of_a_killed_steward_are_removed_by_command() {
    require!(Root);
    let mut world = World::kept_for(&policy(), "60");
    let guest = Guest::new(&world);
    world.end_steward(Signal::KILL);
    let report = world.take_back();
    assert!(!report.contains("ERROR") && !report.contains("WARN"), "{report}");
    assert_nothing_left(&world);
    drop(guest);
}

#[test]
fn next_steward_takes_over_or_removes_everything_whatever_step_the_last_one_died_at() {
    require!(Root);
    for point in ["made", "joined", "parted"] {
        let mut world = World::kept_for(&policy(), "60");
        let lease = network_of_ours(&world);
        world.end_steward(Signal::TERM);
        world.restart_to_crash(point);
        let here = |lease: &Lease| lease.take_changes().is_ok() && !lease.is_away();
        world.await_that(|| here(&lease));
        // It dies of it, or of the end of the lease.
        let host = lease.host(0);
        match point {
            "parted" => drop((host.expect("allowed"), lease)),
            _ => {
                world.steward.wait(wait::SOON);
                world.restart();
                world.await_that(|| here(&lease));
                let again = lease.host(0).expect("allowed");
                assert!(again.1.is_some());
                drop((again, lease));
                world.await_nothing();
                assert_nothing_left(&world);
                continue;
            }
        }
        world.steward.wait(wait::SOON);
        world.restart();
        // This process lives: its lease waits for it, until it asks again.
        drop(take(&world.socket(), &network(0, 1)).expect("given up by asking again"));
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
    common::assert_refused(lease.host(0), Reason::NotAllowed, "`host = false`");
    let plain = world.lease(1, 1).expect("allowed");
    assert_eq!(refusal(plain.host(0)).reason, Reason::Lease);
    drop((lease, plain));
    // A policy that allows it, and then not any more.
    world.set_policy(&policy());
    world.steward.await_text("the policy was read again");
    let mut guest = Guest::new(&world);
    while guest.lease.take_changes().expect("it goes on").is_some() {}
    world.set_policy(&closed);
    // Who has it is told, and asks.
    world.await_that(|| guest.lease.take_changes().expect("the network goes on").is_some());
    assert_eq!(
        refusal(guest.lease.host(guest.end.index)).reason,
        Reason::NotAllowed
    );
    world.await_that(|| guest.is_gone());
    assert_nothing_left(&world);
}

#[test]
fn interface_made_again_is_joined_again_and_its_mtu_is_followed() {
    require!(Root);
    let world = World::with(1, &policy());
    let mut guest = Guest::new(&world);
    let generation = guest.lease.facts().generation;
    world.veth.near.ip(&["link", "delete", VethPair::NIC]);
    world.veth.join(1, 1400);
    let again = || {
        let _ = guest.lease.take_changes().expect("it goes on");
        guest.lease.facts().generation != generation && guest.lease.facts().mode.is_some()
    };
    world.await_that(again);
    let host = host(&world);
    let mut seed = 0;
    let again = wait::until(wait::SOON, || {
        seed = u8::wrapping_add(seed, 1);
        guest.answers(&host, &to(OURS, seed), Duration::from_millis(100))
    });
    assert!(again);
    guest.assert_same();
    let small = || {
        let report = world.veth.near.output_of("ip", &["-o", "link"]);
        let device = report.lines().find(|line| line.contains("vaxh"));
        device.is_some_and(|line| line.contains("mtu 1400"))
    };
    world.await_that(small);
}

#[test]
fn lessee_is_notified_of_changed_addresses_of_the_host() {
    require!(Root);
    let world = World::with(1, &policy());
    let guest = Guest::new(&world);
    while guest.lease.take_changes().expect("it goes on").is_some() {}
    world.veth.near.ip(&[
        "link add link",
        VethPair::NIC,
        "name above0 address 02:00:00:00:00:cc type macvlan",
    ]);
    world.await_that(|| guest.lease.take_changes().expect("it goes on").is_some());
    let macs = guest.lease.host(guest.end.index).expect("as before").0.macs;
    assert_eq!(macs, [guest.lease.facts().mac, [2, 0, 0, 0, 0, 0xcc]]);
}

/// An interface has no IPv6 below 1280 bytes, as none has on a host that is booted without: where the kernel is asked
/// about addresses of IPv6 it then says the same.
#[test]
fn host_is_reached_where_there_is_no_ipv6_and_has_no_address_of_it_where_there_is() {
    require!(Root);
    let world = World::with(1, &policy());
    let near = &world.veth.near;
    near.run(
        "sysctl",
        &[
            "-qw",
            "net.ipv6.conf.default.disable_ipv6=0",
            "net.ipv6.conf.all.disable_ipv6=0",
        ],
    );
    near.ip(&["link", "set", VethPair::NIC, "mtu", "1000"]);
    let mut guest = Guest::new(&world);
    let host = host(&world);
    guest.assert_answers(&host, &to(OURS, 1));
    for (seed, mtu) in [(2, "1500"), (3, "1000"), (4, "1400")] {
        near.ip(&["link", "set", VethPair::NIC, "mtu", mtu]);
        let is_followed = || {
            let device = near.output_of("ip", &["-o", "link", "show", &guest.end.interface]);
            device.contains(&format!("mtu {mtu} ")) && device.contains(",UP")
        };
        assert_soon!(is_followed(), "{mtu}");
        assert!(guest.answers(&host, &to(OURS, seed), wait::SOON), "{mtu}");
        let addresses = near.output_of("ip", &["-o", "-6", "address", "show", &guest.end.interface]);
        assert_eq!(addresses, "", "{mtu}");
    }
    guest.assert_same();
    drop(guest);
    assert_nothing_left(&world);
}
