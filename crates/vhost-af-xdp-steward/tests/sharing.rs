//! Several sockets over one memory: it is registered and counted once, lives as long as one of them does, and whose it
//! is cannot be lied about.

use crate::common;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use common::hostile::{BIND, memfd, registration};
use common::raw::{self, Raw};
use common::{World, lessee, refusal, take, wanted};
use rustix::io::Errno;
use rustix::net::sockopt::socket_cookie;
use steward_client::Lease;
use steward_protocol::{Answer, Reason, Request, Rings, Step};
use testkit::{NetNs, VethPair, assert_soon, frame, require, wait};
use xsk::{First, FramePool, Socket, SocketConfig, Umem};

use lessee::{Echo, UMEM_BYTES};

/// The first or the second half of the memory's chunks.
fn half(umem: &Umem, number: u64) -> FramePool {
    let begin = number * UMEM_BYTES / 2;
    umem.frames(begin..begin + UMEM_BYTES / 2)
        .expect("nobody's yet")
        .collect()
}

fn open_first(lease: &Lease, umem: &Umem, queue: u32) -> Echo {
    let config = lessee::config(&lease.facts(), queue);
    let prepared = lease.register(umem, &config).expect("allowed");
    let socket = lease.bind(prepared).expect("ours");
    Echo::of_bound(lease, socket, half(umem, queue.into()), queue).expect("ours")
}

fn open_sharing(lease: &Lease, first: &First, pool: FramePool, queue: u32) -> Echo {
    let socket = lease.share(first, &lessee::config(&lease.facts(), queue));
    let socket = socket.unwrap_or_else(|error| panic!("{error}"));
    Echo::of_bound(lease, socket, pool, queue).expect("ours")
}

/// Frames of many flows come back, whichever queue they come to.
#[track_caller]
fn assert_echoes(world: &World, echoes: &mut [&mut Echo], flows: std::ops::Range<u16>) {
    for flow in flows {
        let sent = frame::udp(flow, 64 + usize::from(flow));
        world.wire.send(&sent);
        let back = wait::until_some(wait::SOON, || {
            for echo in echoes.iter_mut() {
                assert!(echo.run(Duration::from_millis(2)));
            }
            world.wire.receive(Duration::from_millis(1))
        });
        assert_eq!(back.as_deref(), Some(&sent[..]), "flow {flow}");
    }
}

#[test]
fn memory_of_one_socket_serves_two_queues_and_counts_once() {
    require!(Root);
    // For one socket's memory and what the kernel has for a second one, and not for that of two.
    let uid = 40_000_000 + common::lessee_uid();
    let world = world_for(uid, 2, "3 MiB");
    let lease = lease_of(&world, uid);
    let umem = lessee::umem();
    let mut first = open_first(&lease, &umem, 0);
    assert_eq!(refusal(lessee::register(&lease, 1)).reason, Reason::Memlock);
    let lender = first.lender();
    let mut second = open_sharing(&lease, &lender.first().expect("open"), half(&umem, 1), 1);
    assert_echoes(&world, &mut [&mut first, &mut second], 0..64);
    // The memory stays when the first one goes, and it is not registered again when that comes back.
    let from_second = second.lender();
    drop(first);
    assert!(!lender.is_open() && lender.first().is_none());
    lease.deactivate(0).expect("ours");
    assert_eq!(refusal(lessee::register(&lease, 0)).reason, Reason::Memlock);
    let again = (0..UMEM_BYTES / 2).step_by(2048);
    let again: FramePool = again
        .map(|at| umem.adopt(xsk::UmemOffset::new(at)).expect("inside"))
        .collect();
    let mut first = open_sharing(&lease, &from_second.first().expect("open"), again, 0);
    assert_echoes(&world, &mut [&mut first, &mut second], 64..128);
    // When both are gone, another memory may be registered.
    drop((first, second));
    assert_soon!(lessee::register(&lease, 1).is_ok());
}

/// What the kernel has for each chunk it has for each socket: so sharing is no way around what the policy allows.
#[test]
fn kernel_memory_of_each_sharer_counts_for_each() {
    require!(Root);
    let uid = 50_000_000 + common::lessee_uid();
    let world = world_for(uid, 2, "2100 KiB");
    let lease = lease_of(&world, uid);
    let first = open_first(&lease, &lessee::umem(), 0);
    let shared = lease.share(
        &first.lender().first().expect("open"),
        &lessee::config(&lease.facts(), 1),
    );
    common::assert_refused(shared, Reason::Memlock, "`memlock`");
}

/// A steward of so many queues for a user of its own, for whom the kernel counts nothing else.
fn world_for(uid: u32, queues: u32, memlock: &str) -> World {
    let rule = "interface = \"nic0\"\nqueues = \"all\"";
    World::with(
        queues,
        &format!("[[allow]]\nuser = {uid}\n{rule}\nmemlock = \"{memlock}\"\n"),
    )
}

/// That user's lease of two queues. Root's memory would count that of others who run as root as well.
fn lease_of(world: &World, uid: u32) -> Lease {
    let socket = world.socket();
    raw::as_user(uid, uid, || take(&socket, &wanted(0, 2))).expect("allowed")
}

fn leased(world: &World, uid: u32, start_queue: u32, queues: u32) -> Raw {
    Raw::leased_as(&world.socket(), uid, uid, &wanted(start_queue, queues))
}

/// Registers 2 MiB for a queue.
fn register(connection: &mut Raw, queue: u32) -> Answer {
    let memory = memfd(UMEM_BYTES);
    ask_with(connection, &registration(queue, 1), &[memory.as_fd()])
}

/// A socket on queue 0 with 2 MiB of its own, and its cookie.
fn bind_first(connection: &mut Raw) -> (OwnedFd, u64) {
    assert_eq!(register(connection, 0), Answer::Done);
    let bound = connection.ask_for_descriptor(&BIND);
    let cookie = socket_cookie(&bound).expect("it has one");
    (bound, cookie)
}

/// What waits to be bound to a queue is pinned beside what that shares with others, which stays when it is closed.
#[test]
fn waiting_memory_counts_in_addition_to_shared_memory() {
    require!(Root);
    let uid = 10_000_000 + common::lessee_uid();
    let world = world_for(uid, 3, "5 MiB");
    let mut connection = leased(&world, uid, 0, 3);
    let (first, cookie) = bind_first(&mut connection);
    assert_eq!(register(&mut connection, 1), Answer::Done, "4 MiB");
    connection
        .try_send_all(&share(1, cookie).encode(77), &[first.as_fd()])
        .expect("room");
    let _second = connection.receive_descriptor();
    let answer = register(&mut connection, 2);
    assert!(is_refused(&answer, Reason::Memlock), "6 MiB: {answer:?}");
    assert_eq!(register(&mut connection, 1), Answer::Done, "in the other's place");
}

/// Of the two memories of a queue that shares none the larger counts. Both do once one of them is shared.
#[test]
fn memory_is_shared_while_other_memory_waits_only_if_both_are_allowed() {
    require!(Root);
    let uid = 20_000_000 + common::lessee_uid();
    let world = world_for(uid, 3, "3 MiB");
    let mut connection = leased(&world, uid, 0, 3);
    let (first, cookie) = bind_first(&mut connection);
    assert_eq!(register(&mut connection, 0), Answer::Done, "in its own place");
    let answer = ask_with(&mut connection, &share(1, cookie), &[first.as_fd()]);
    assert!(is_refused(&answer, Reason::Memlock), "4 MiB: {answer:?}");
}

/// The lease of the first may end before the second is bound.
#[test]
fn memory_counts_while_a_socket_is_being_bound_over_it() {
    require!(Root);
    let uid = 30_000_000 + common::lessee_uid();
    let world = world_for(uid, 3, "3 MiB");
    let mut one = leased(&world, uid, 0, 1);
    let (first, cookie) = bind_first(&mut one);
    let two = leased(&world, uid, 1, 1);
    let busy = own_socket(&world.veth.near, VethPair::NIC, 1);
    two.try_send_all(&share_within(10_000, 1, cookie).encode(77), &[first.as_fd()])
        .expect("room");
    assert_soon!(world.children() == 1);
    drop((one, first));
    let mut third = leased(&world, uid, 0, 1);
    let answer = register(&mut third, 0);
    assert!(is_refused(&answer, Reason::Memlock), "4 MiB: {answer:?}");
    drop(busy);
    assert_eq!(two.receive(wait::SOON), Some((77, Answer::Done)));
}

#[test]
fn leases_of_one_user_share_and_another_user_gets_nothing_of_it() {
    require!(Root);
    let world = World::new();
    let (one, two) = (world.lease(0, 1).expect("free"), world.lease(1, 1).expect("free"));
    let umem = lessee::umem();
    let first = open_first(&one, &umem, 0);
    let second = open_sharing(&two, &first.lender().first().expect("open"), half(&umem, 1), 1);
    drop((second, two));
    // As a user whom somebody passed the descriptor.
    let uid = common::lessee_uid();
    let mut other = leased(&world, uid, 1, 1);
    let first = first.lender().first().expect("open");
    let answer = ask_with(
        &mut other,
        &share(1, first.cookie().expect("it has one")),
        &[first.as_fd()],
    );
    assert!(is_refused(&answer, Reason::Unregistered), "{answer:?}");
}

fn share(queue: u32, cookie: u64) -> Request {
    share_within(100, queue, cookie)
}

fn share_within(wait_ms: u32, queue: u32, cookie: u64) -> Request {
    Request::Share {
        queue,
        wait_ms,
        cookie,
        rings: Rings {
            fill: 64,
            completion: 64,
            rx: 64,
            tx: 64,
        },
    }
}

fn ask_with(connection: &mut Raw, request: &Request, descriptors: &[BorrowedFd<'_>]) -> Answer {
    match descriptors {
        [] => connection.send(&request.encode(77)),
        _ => connection.try_send_all(&request.encode(77), descriptors),
    }
    .expect("the connection is open");
    let (serial, answer) = connection.receive(wait::SOON).expect("an answer");
    assert_eq!(serial, 77);
    answer
}

fn is_refused(answer: &Answer, reason: Reason) -> bool {
    matches!(answer, Answer::Refused(refusal) if refusal.reason == reason)
}

fn failed(step: Step, errno: Errno) -> Answer {
    let errno = errno.raw_os_error().cast_unsigned();
    Answer::Failed { step, errno }
}

/// A socket that the steward did not make.
fn own_socket(namespace: &NetNs, interface: &str, queue: u32) -> Socket {
    let config = SocketConfig::new(namespace.index_of(interface), xsk::QueueId(queue));
    namespace.enter(|| Socket::open(&lessee::umem(), &config).expect("it opens"))
}

#[test]
fn descriptor_of_another_socket_than_named_is_rejected() {
    require!(Root);
    let world = World::new();
    let before = world.descriptors();
    let mut connection = Raw::connect(&world.socket());
    connection.lease(wanted(0, 2));
    let memory = memfd(UMEM_BYTES);
    let answer = ask_with(&mut connection, &registration(0, 1), &[memory.as_fd()]);
    assert_eq!(answer, Answer::Done);
    let bound = connection.ask_for_descriptor(&BIND);
    let cookie = socket_cookie(&bound).expect("it has one");
    // The name of the right one, and something else, nothing, or too much.
    let unix = UnixDatagram::unbound().expect("a socket");
    let unbound = rustix::net::socket(
        rustix::net::AddressFamily::XDP,
        rustix::net::SocketType::RAW,
        None,
    )
    .expect("a socket");
    let foreign = own_socket(&world.veth.far, VethPair::WIRE, 0);
    for other in [memory.as_fd(), unix.as_fd(), unbound.as_fd(), foreign.as_fd()] {
        let answer = ask_with(&mut connection, &share(1, cookie), &[other]);
        assert_eq!(answer, failed(Step::Share, Errno::PERM));
    }
    for descriptors in [vec![], vec![bound.as_fd(); 2]] {
        let answer = ask_with(&mut connection, &share(1, cookie), &descriptors);
        assert_eq!(answer, failed(Step::Share, Errno::BADMSG));
    }
    // Sockets that the steward did not bind, under their own names.
    for other in [unbound.as_fd(), foreign.as_fd(), unix.as_fd()] {
        let cookie = socket_cookie(other).expect("it has one");
        let answer = ask_with(&mut connection, &share(1, cookie), &[other]);
        assert!(is_refused(&answer, Reason::Unregistered), "{answer:?}");
    }
    let answer = ask_with(&mut connection, &share(1, 0), &[bound.as_fd()]);
    assert!(is_refused(&answer, Reason::Unregistered), "{answer:?}");
    // A queue that is not of the lease, and one that is taken.
    let answer = ask_with(&mut connection, &share(2, cookie), &[bound.as_fd()]);
    assert!(is_refused(&answer, Reason::Lease), "{answer:?}");
    let answer = ask_with(&mut connection, &share(0, cookie), &[bound.as_fd()]);
    assert!(
        matches!(answer, Answer::Failed { step: Step::Bind, .. }),
        "{answer:?}"
    );
    // None of it was in the way of the right one.
    let answer = ask_with(&mut connection, &share(1, cookie), &[bound.as_fd()]);
    assert_eq!(answer, Answer::Done);
    drop((connection, bound, foreign));
    world.await_no_program();
    world.await_descriptors(before);
}

/// The child that waits for the queue is gone, with all that it had, and the queue is the next one's when it is free.
#[track_caller]
fn assert_bind_ends_with_the_lease(end: impl FnOnce(&mut World, Raw)) {
    require!(Root);
    let uid = common::lessee_uid();
    let mut world = World::with(3, &common::lessee_may(VethPair::NIC, "all"));
    let before = world.descriptors();
    let mut one = leased(&world, uid, 0, 1);
    let (first, cookie) = bind_first(&mut one);
    let two = leased(&world, uid, 1, 1);
    let busy = own_socket(&world.veth.near, VethPair::NIC, 1);
    let request = share_within(10_000, 1, cookie).encode(77);
    two.try_send_all(&request, &[first.as_fd()]).expect("room");
    assert_soon!(world.children() == 1);
    end(&mut world, two);
    world.await_that(|| world.children() == 0);
    drop(busy);
    let mut next = leased(&world, uid, 1, 1);
    let mut bound = || ask_with(&mut next, &share(1, cookie), &[first.as_fd()]) == Answer::Done;
    world.await_that(&mut bound);
    drop((one, next, first));
    world.await_no_program();
    world.await_descriptors(before);
}

#[test]
fn bind_over_shared_memory_ends_with_its_lessee() {
    assert_bind_ends_with_the_lease(|_, lessee| drop(lessee));
}

#[test]
fn bind_over_shared_memory_ends_when_the_policy_does_not_allow_the_lease_any_more() {
    assert_bind_ends_with_the_lease(|world, lessee| {
        world.set_policy(&common::lessee_may(VethPair::NIC, "0"));
        let (_, report) = lessee.receive(wait::SOON).expect("it is told");
        assert!(is_refused(&report, Reason::NotAllowed), "{report:?}");
        world.set_policy(&common::lessee_may(VethPair::NIC, "all"));
    });
}

/// The successor knows nothing of the socket, and says so.
#[test]
fn socket_of_a_lease_that_ended_is_no_reason() {
    require!(Root);
    let world = World::new();
    let (one, two) = (world.lease(0, 1).expect("free"), world.lease(1, 1).expect("free"));
    let umem = lessee::umem();
    let first = open_first(&one, &umem, 0);
    drop(one);
    assert_soon!(take(&world.socket(), &wanted(0, 1)).is_ok());
    let held = first.lender().first().expect("open");
    let refusal = refusal(two.share(&held, &lessee::config(&two.facts(), 1)));
    assert_eq!(refusal.reason, Reason::Unregistered);
}
