//! Leases end to end: a holder without privileges moves frames with what the steward gave it, and nothing else works.

mod common;

use std::os::fd::AsFd;
use std::time::Duration;

use common::holder::{self, Echo};
use common::raw::Raw;
use common::{World, refusal, soon, take, wanted};
use rustix::process::{Resource, getrlimit};
use steer::{Mode, ModeRequest};
use steward::client::LeaseError;
use steward::protocol::{Answer, RECEIVE_RING, Reason, Request, Wanted};
use testkit::{VethPair, require, wait};
use xsk::{OpenError, Socket};

#[test]
fn holder_without_privileges_in_an_empty_namespace_moves_frames() {
    require!(Root);
    let world = World::of_one_queue();
    assert_eq!(world.program(), None);
    let mut running = holder::start(&world, "child_echoes", 0);
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
    holder::give_up_privileges();
    let (lease, mut sockets) = holder::lease();
    let facts = lease.facts();
    assert_eq!(
        (facts.name.as_str(), facts.mtu, facts.rx_queues, facts.up),
        (VethPair::NIC, 1500, 1, true)
    );
    assert_eq!((facts.mode, facts.note.as_str()), (Some(Mode::Native), ""));
    assert!(facts.ifindex > 0 && facts.program > 0);
    let mut echo = Echo::open(&lease, sockets.pop().expect("one"), holder::queue());
    println!("echoing");
    loop {
        echo.run(Duration::from_millis(100));
        if let Ok(Some(facts)) = lease.take_changes() {
            println!("changed: {facts:?}");
        }
    }
}

#[test]
fn holder_that_restarts_its_queue_gets_a_new_socket_for_it() {
    require!(Root);
    let world = World::new();
    let _running = holder::start(&world, "child_reopens", 1);
    world.await_echo();
}

#[test]
#[ignore = "run in a process of its own"]
fn child_reopens() {
    holder::give_up_privileges();
    let (lease, sockets) = take(&holder::socket(), &wanted(0, 2)).expect("allowed");
    lease.raise_memlock(3 * holder::UMEM_BYTES).expect("allowed");
    let open = |sockets: Vec<_>| -> Vec<Echo> {
        (0..)
            .zip(sockets)
            .map(|(queue, socket)| Echo::open(&lease, socket, queue))
            .collect()
    };
    let mut echoes = open(sockets);
    for _ in 0..5 {
        drop(echoes);
        (0..2).for_each(|queue| lease.deactivate(queue).expect("ours"));
        echoes = open((0..2).map(|queue| lease.socket(queue).expect("ours")).collect());
    }
    println!("echoing");
    loop {
        for echo in &mut echoes {
            echo.run(Duration::from_millis(5));
        }
    }
}

#[test]
fn socket_is_confined_to_its_interface() {
    require!(Root);
    let world = World::new();
    world.veth.join_as("nic1", "wire1", 1, 1500);
    let other = world
        .veth
        .near
        .enter(|| steward::links::Link::by_name("nic1").expect("just made").index);
    let mut running = holder::spawn(&world, "child_binds_elsewhere", other);
    assert!(running.wait(wait::SOON).success(), "{running}");
    assert!(running.said().contains("confined"), "{running}");
}

#[test]
#[ignore = "run in a process of its own"]
fn child_binds_elsewhere() {
    holder::give_up_privileges();
    let other = holder::queue();
    let (lease, mut sockets) = take(&holder::socket(), &wanted(0, 1)).expect("allowed");
    lease.raise_memlock(3 * holder::UMEM_BYTES).expect("allowed");
    let socket = sockets.pop().expect("one");
    let unbind = socket_option_bind_to(&socket, 0);
    assert_eq!(unbind.raw_os_error(), Some(libc::EPERM), "{unbind}");
    let mut config = holder::config(&lease.facts(), 0);
    config.ifindex = other;
    let error = Socket::from_fd(socket, &holder::umem(), &config).expect_err("another interface");
    assert!(matches!(error, OpenError::Bind { .. }), "{error}");
    // As it came it binds.
    let socket = lease.socket(0).expect("ours");
    let _socket =
        Socket::from_fd(socket, &holder::umem(), &holder::config(&lease.facts(), 0)).expect("the leased one");
    println!("confined");
}

/// An XSKMAP takes no other from Linux 7.1 on (ENOBUFS).
#[test]
fn sockets_have_their_rx_rings_before_they_are_placed() {
    require!(Root);
    let world = World::new();
    let mut running = holder::spawn(&world, "child_looks_for_rx_rings", 0);
    assert!(running.wait(wait::SOON).success(), "{running}");
    assert!(running.said().contains("all have rings"), "{running}");
}

#[test]
#[ignore = "run in a process of its own"]
fn child_looks_for_rx_rings() {
    holder::give_up_privileges();
    let (lease, mut sockets) = take(&holder::socket(), &wanted(0, 1)).expect("allowed");
    sockets.push(lease.socket(0).expect("ours"));
    for socket in sockets {
        let ring = xsk::made_rx_ring(socket.as_fd()).expect("an AF_XDP socket");
        assert_eq!(ring.map(xsk::RingSize::get), Some(RECEIVE_RING));
        let second = rustix::net::sockopt::set_xdp_rx_ring_size(&socket, 64);
        assert_eq!(second, Err(rustix::io::Errno::INVAL));
    }
    println!("all have rings");
}

/// The error of SO_BINDTOIFINDEX.
#[allow(unsafe_code)]
fn socket_option_bind_to(socket: &impl AsFd, ifindex: i32) -> std::io::Error {
    use std::os::fd::AsRawFd;
    let len = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of a live i32.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            62,
            (&raw const ifindex).cast(),
            len,
        )
    };
    assert_ne!(result, 0, "it should have been refused");
    std::io::Error::last_os_error()
}

#[test]
fn memory_limit_is_not_raised_beyond_what_the_policy_allows() {
    require!(Root);
    let world = World::new();
    let mut running = holder::spawn(&world, "child_asks_for_too_much_memory", 0);
    assert!(running.wait(wait::SOON).success(), "{running}");
    assert!(running.said().contains("limit is as it was"), "{running}");
}

#[test]
#[ignore = "run in a process of its own"]
fn child_asks_for_too_much_memory() {
    holder::give_up_privileges();
    let (lease, mut sockets) = take(&holder::socket(), &wanted(0, 1)).expect("allowed");
    let opened = Socket::from_fd(
        sockets.pop().expect("one"),
        &holder::umem(),
        &holder::config(&lease.facts(), 0),
    );
    assert!(matches!(opened, Err(OpenError::MemoryLock { .. })));
    let before = getrlimit(Resource::Memlock);
    let refusal = refusal(lease.raise_memlock(65 << 20));
    assert_eq!(refusal.reason, Reason::Memlock);
    for words in ["66560 KiB", "65536 KiB", "`memlock`"] {
        assert!(refusal.text.contains(words), "{refusal}");
    }
    assert_eq!(getrlimit(Resource::Memlock), before);
    println!("limit is as it was");
}

#[test]
fn memory_limit_is_raised_for_the_process_that_connected() {
    require!(Root);
    let world = World::with(
        1,
        "[[allow]]\nuser = 0\ninterface = \"nic0\"\nqueues = \"all\"\nmemlock = \"64 MiB\"\n",
    );
    let mut running = holder::spawn(&world, "child_has_its_limit_raised", 0);
    assert!(running.wait(wait::SOON).success(), "{running}");
    assert!(running.said().contains("limit was raised"), "{running}");
}

#[test]
#[ignore = "run in a process of its own"]
fn child_has_its_limit_raised() {
    holder::give_up_capabilities();
    let mut connection = Raw::connect(&holder::socket());
    connection.ask(&Request::Lease(wanted(0, 1)));
    // By the message, because the client would do itself what it may.
    let answer = connection.ask(&Request::Memlock {
        bytes: 3 * holder::UMEM_BYTES,
    });
    assert_eq!(answer, Answer::Done);
    assert_eq!(getrlimit(Resource::Memlock).current, Some(3 * holder::UMEM_BYTES));
    let answer = connection.ask(&Request::Memlock { bytes: 1 << 20 });
    assert_eq!(
        (answer, getrlimit(Resource::Memlock).current),
        (Answer::Done, Some(3 * holder::UMEM_BYTES))
    );
    println!("limit was raised");
}

#[test]
fn program_comes_with_the_first_lease_and_goes_with_the_last() {
    require!(Root);
    let world = World::new();
    let descriptors = world.descriptors();
    let (one, _sockets) = world.lease(0, 1).expect("allowed");
    let program = world.program();
    assert_eq!(program, Some(one.facts().program));
    let (two, _more_sockets) = world.lease(1, 1).expect("allowed");
    assert_eq!(two.facts().program, one.facts().program);
    drop(one);
    wait::a_moment();
    assert_eq!(world.program(), program, "the second lease needs it");
    // The queue is free again.
    let (_one_again, _) = world.lease(0, 1).expect("free");
    drop((two, _one_again));
    world.await_no_program();
    world.await_descriptors(descriptors);
}

#[test]
fn refusals_name_value_and_remedy() {
    require!(Root);
    let world = World::new();
    let (lease, _sockets) = world.lease(0, 1).expect("allowed");
    let check = |refusal: steward::protocol::Refusal, reason, words: &[&str]| {
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
    let elsewhere = Wanted {
        interface: "nic9".to_owned(),
        ..wanted(0, 1)
    };
    check(
        refusal(take(&world.socket(), &elsewhere)),
        Reason::NotAllowed,
        &["nic9", "no rule"],
    );
    let skb = Wanted {
        mode: ModeRequest::Skb,
        ..wanted(1, 1)
    };
    check(
        refusal(take(&world.socket(), &skb)),
        Reason::Program,
        &["native mode for other leases: ask for that mode", "(--mode)"],
    );
    check(refusal(lease.socket(1)), Reason::Lease, &["queue 1", "0 to 0"]);
    check(refusal(lease.deactivate(7)), Reason::Lease, &["queue 7"]);
    // None of it has harmed the lease.
    assert_eq!(lease.counters(0, soon()).expect("ours").redirected, 0);
    let nobody = take(&world.dir.path().join("none.sock"), &wanted(0, 1));
    assert!(matches!(nobody, Err(LeaseError::Connect { .. })));
}

#[test]
fn interface_that_policy_names_and_that_is_not_there_is_refused_by_name() {
    require!(Root);
    let world = World::with(1, "[[allow]]\nuser = 0\ninterface = \"nic7\"\nqueues = \"all\"\n");
    let wanted = Wanted {
        interface: "nic7".to_owned(),
        ..wanted(0, 1)
    };
    let refusal = refusal(take(&world.socket(), &wanted));
    assert_eq!(refusal.reason, Reason::NoInterface);
    assert!(refusal.text.contains("nic7"), "{refusal}");
}

#[test]
fn program_of_somebody_else_is_not_touched() {
    require!(Root);
    let world = World::new();
    let index = world
        .veth
        .near
        .enter(|| steward::links::Link::by_name(VethPair::NIC).expect("there").index);
    let theirs = world
        .veth
        .near
        .enter(|| steer::Program::attach(index, ModeRequest::Skb, false).expect("free"));
    let refusal = refusal(world.lease(0, 1));
    assert_eq!(refusal.reason, Reason::Program);
    assert!(refusal.text.contains(&format!("id {}", theirs.id())), "{refusal}");
    assert_eq!(world.program(), Some(theirs.id()));
    drop(theirs);
    world.lease(0, 1).expect("free now");
}

#[test]
fn unbound_socket_of_a_leased_queue_takes_no_frames_from_the_host() {
    require!(Root);
    let world = World::new();
    let (lease, _sockets) = world.lease(0, 2).expect("allowed");
    for seed in 0..10 {
        world.wire.send(&testkit::frame::plain(100, seed));
    }
    let passed = || {
        (0..2)
            .map(|queue| lease.counters(queue, soon()).expect("ours").passed)
            .sum::<u64>()
    };
    assert!(wait::until(wait::SOON, || passed() >= 10), "{}", passed());
}
