//! Leases end to end: a lessee without privileges moves frames with what the steward gave it, and nothing else works.

use crate::common;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use common::lessee::{self, Echo};
use common::{World, refusal, soon, take, wanted, wanted_of};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::net::xdp::{SocketAddrXdp, SocketAddrXdpFlags, SocketAddrXdpWithSharedUmem};
use steer::{Mode, ModeRequest};
use steward_client::LeaseError;
use steward_protocol::{Reason, Wanted};
use testkit::{VethPair, assert_has, assert_soon, require, wait};
use xsk::{OwnMemory, Umem};

#[test]
fn lessee_without_privileges_in_an_empty_namespace_moves_frames() {
    require!(Root);
    let world = World::of_one_queue();
    assert_eq!(world.program(), None);
    let mut running = lessee::start(&world, "lease::child_echoes", 0);
    assert!(world.program().is_some());
    for seed in 0..50 {
        world.assert_echo(seed);
    }
    running.signal(rustix::process::Signal::KILL);
    running.wait(wait::SOON);
    world.await_no_program();
}

#[test]
#[ignore = "run in a process of its own"]
fn child_echoes() {
    lessee::give_up_privileges();
    let lease = lessee::lease();
    let facts = lease.facts();
    assert_eq!(
        (facts.name.as_str(), facts.mtu, facts.rx_queues, facts.up),
        (VethPair::NIC, 1500, 1, true)
    );
    assert_eq!((facts.mode, facts.note.as_str()), (Some(Mode::Native), ""));
    assert!(facts.ifindex > 0 && facts.program > 0);
    let mut echo = Echo::open(&lease, lessee::queue());
    println!("echoing");
    loop {
        echo.run(Duration::from_millis(100));
        if let Ok(Some(facts)) = lease.take_changes() {
            println!("changed: {facts:?}");
        }
    }
}

/// Whatever its lessee does with it: it has one queue, its memory and its rings.
#[test]
fn socket_that_is_handed_out_can_be_bound_to_nothing_else() {
    require!(Root);
    let world = World::new();
    let mut running = lessee::spawn(&world, "lease::child_tries_to_bind_elsewhere", 0);
    assert!(running.wait(wait::SOON).success(), "{running}");
    assert_has(&running.said(), &["bound for good"]);
}

#[test]
#[ignore = "run in a process of its own"]
fn child_tries_to_bind_elsewhere() {
    lessee::give_up_privileges();
    let lease = take(&lessee::socket(), &wanted(0, 1)).expect("allowed");
    let (umem, config) = (lessee::umem(), lessee::config(&lease.facts(), 0));
    let prepared = lease.register(&umem, &config).expect("allowed");
    let socket = lease.bind(prepared).expect("ours");
    for queue in [0, 1] {
        let address = SocketAddrXdp::new(SocketAddrXdpFlags::XDP_COPY, config.ifindex, queue);
        assert_eq!(rustix::net::bind(&socket, &address), Err(Errno::BUSY));
        let shared = SocketAddrXdpWithSharedUmem {
            addr: SocketAddrXdp::new(SocketAddrXdpFlags::XDP_SHARED_UMEM, config.ifindex, queue),
            shared_umem_fd: socket.as_fd(),
        };
        assert_eq!(rustix::net::bind(&socket, &shared), Err(Errno::BUSY));
    }
    let ring = sockopt::set_xdp_rx_ring_size(&socket, 1 << 20);
    assert!(ring.is_err(), "no longer rings than the steward made");
    println!("bound for good");
}

#[test]
fn memory_beyond_the_policy_is_rejected() {
    require!(Root);
    let policy =
        |memlock: &str| format!("[[allow]]\nuser = 0\ninterface = \"nic0\"\nqueues = \"all\"\n{memlock}");
    // One socket of the two takes 2 MiB.
    let world = World::with(2, &policy("memlock = \"3 MiB\"\n"));
    let lease = world.lease(0, 2).expect("allowed");
    let first = lessee::Echo::open(&lease, 0);
    // A successor takes the place of the one in use.
    lessee::register(&lease, 0).expect("allowed");
    let refusal = refusal(lessee::register(&lease, 1));
    assert_eq!(refusal.reason, Reason::Memlock);
    assert_has(&refusal.text, &["2048 KiB", "4096 KiB", "3072 KiB", "`memlock`"]);
    drop((lease, first));
    // Of another interface's or lease's queues, too.
    let (one, two) = (world.lease(0, 1).expect("free"), world.lease(1, 1).expect("free"));
    // The kernel gives memory back after the sockets' end.
    assert_soon!(lessee::register(&one, 0).is_ok());
    assert_eq!(common::refusal(lessee::register(&two, 1)).reason, Reason::Memlock);
    drop(one);
    assert_soon!(lessee::register(&two, 1).is_ok());
    drop((two, world));
    // Where it does not say, a queue may have what its own chunks take.
    let world = World::with(2, &policy(""));
    let lease = world.lease(0, 1).expect("allowed");
    lessee::register(&lease, 0).expect("2 MiB");
    let memory = OwnMemory::new(17 << 20).expect("memory");
    let umem = Umem::aligned(Arc::new(memory), 2048, 0).expect("a UMEM");
    let large = lease.register(&umem, &lessee::config(&lease.facts(), 0));
    assert_eq!(common::refusal(large).reason, Reason::Memlock);
}

#[test]
fn program_comes_with_the_first_lease_and_goes_with_the_last() {
    require!(Root);
    let world = World::new();
    let descriptors = world.descriptors();
    let one = world.lease(0, 1).expect("allowed");
    let program = world.program();
    assert_eq!(program, Some(one.facts().program));
    let two = world.lease(1, 1).expect("allowed");
    assert_eq!(two.facts().program, one.facts().program);
    drop(one);
    // The queue is free again when the steward has seen that.
    let one_again = wait::until_some(wait::SOON, || world.lease(0, 1).ok()).expect("free");
    assert_eq!(
        (world.program(), world.attached(1)),
        (program, 1),
        "the second lease needs it"
    );
    drop((two, one_again));
    world.await_no_program();
    world.await_descriptors(descriptors);
}

#[test]
fn refusals_name_value_and_remedy() {
    require!(Root);
    let of_none = "[[allow]]\nuser = 0\ninterface = \"nic7\"\nqueues = \"all\"\n";
    let world = World::with(2, &format!("{}{of_none}", common::POLICY));
    let lease = world.lease(0, 1).expect("allowed");
    let check = |refusal: steward_protocol::Refusal, reason, words: &[&str]| {
        assert_eq!(refusal.reason, reason, "{refusal}");
        words
            .iter()
            .for_each(|word| assert!(refusal.text.contains(word), "{word} in: {refusal}"));
    };
    check(refusal(world.lease(0, 1)), Reason::Taken, &["queue 0 of nic0"]);
    check(
        refusal(world.lease(1, 2)),
        Reason::NoInterface,
        &["2 receive queue(s), queue 2", "ethtool -L"],
    );
    check(
        refusal(world.lease(255, 2)),
        Reason::NotAllowed,
        &["queue 256 of nic0", "0-255"],
    );
    for (interface, reason, words) in [
        ("nic9", Reason::NotAllowed, &["nic9", "no rule"][..]),
        ("nic7", Reason::NoInterface, &["nic7"]),
    ] {
        let elsewhere = wanted_of(interface, 0, 1);
        check(refusal(take(&world.socket(), &elsewhere)), reason, words);
    }
    let skb = Wanted {
        mode: ModeRequest::Skb,
        ..wanted(1, 1)
    };
    check(
        refusal(take(&world.socket(), &skb)),
        Reason::Program,
        &["native mode for other leases: ask for that mode", "(mode)"],
    );
    check(
        refusal(lessee::register(&lease, 1)),
        Reason::Lease,
        &["queue 1", "0 to 0"],
    );
    check(refusal(lease.deactivate(7)), Reason::Lease, &["queue 7"]);
    // None of it has harmed the lease.
    assert_eq!(lease.counters(0, soon()).expect("ours").redirected, 0);
    let nobody = take(&world.dir.path().join("none.sock"), &wanted(0, 1));
    assert!(matches!(nobody, Err(LeaseError::Connect { .. })));
}

#[test]
fn foreign_program_is_not_touched() {
    require!(Root);
    let world = World::new();
    let index = world
        .veth
        .near
        .enter(|| host::links::Link::by_name(VethPair::NIC).expect("there").index);
    let theirs = world
        .veth
        .near
        .enter(|| steer::Program::attach(index, ModeRequest::Skb, false).expect("free"));
    common::assert_refused(world.lease(0, 1), Reason::Program, &format!("id {}", theirs.id()));
    assert_eq!(world.program(), Some(theirs.id()));
    drop(theirs);
    world.lease(0, 1).expect("free now");
}

#[test]
fn leased_queue_without_a_socket_takes_no_frames_from_the_host() {
    require!(Root);
    let world = World::new();
    let lease = world.lease(0, 2).expect("allowed");
    for seed in 0..10 {
        world.wire.send(&testkit::frame::plain(100, seed));
    }
    let passed = |queue| lease.counters(queue, soon()).expect("ours").passed;
    assert_soon!(passed(0) + passed(1) >= 10);
}
