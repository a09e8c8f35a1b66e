//! Peers that do not keep to the protocol, or use it to do harm: each loses its own connection, and others notice
//! nothing.

use crate::common;

use std::cell::Cell;
use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use common::hostile::{
    BIND, FLOW, assert_serves, failed, leased, limit_descriptors, memfd, registration, requests,
};
use common::raw::Raw;
use common::{POLICY, World, lessee, wanted};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use steward::server::{OPERATIONS, Operation};
use steward_protocol::{Answer, MESSAGE_MAX, Part, Reason, Request, Step, VERSION};
use testkit::{require, wait};

/// Bytes that take a while to pin.
const LARGE: u64 = 256 << 20;

/// How often others must get their answers in a flood.
const FLOODS: usize = 30;

/// The connection is closed with a word about it.
#[track_caller]
fn assert_closed(connection: &Raw) {
    let refusal = connection.refusal(wait::SOON);
    assert_eq!(refusal.reason, Reason::Malformed, "{refusal}");
    assert!(connection.is_over(wait::SOON));
}

#[test]
fn messages_that_are_cut_too_long_or_unknown_close_their_connection() {
    require!(Root);
    let world = World::new();
    let descriptors = world.descriptors();
    let valid = Request::Lease(wanted(0, 1)).encode(1);
    let changed = |at: usize, value: u8| {
        let mut bytes = valid.clone();
        bytes[at] = value;
        bytes
    };
    let messages = [
        valid[..7].to_vec(),
        valid[..20].to_vec(),
        [&valid[..], &[0]].concat(),
        vec![0; MESSAGE_MAX],
        vec![0xff; MESSAGE_MAX + 1],
        vec![1; 60_000],
        // Another version.
        changed(0, valid[0] + 1),
        changed(2, 99),
        changed(4, 0),
        changed(8, b'/'),
    ];
    for bytes in messages {
        let connection = Raw::connect(&world.socket());
        connection.send(&bytes).expect("room");
        assert_closed(&connection);
    }
    // An empty message is indistinguishable from the end of the connection.
    let connection = Raw::connect(&world.socket());
    connection.send(&[]).expect("room");
    assert!(connection.is_over(wait::SOON));
    assert_serves(&world);
    world.await_descriptors(descriptors);
}

#[test]
fn unexpected_descriptors_close_the_connection_and_are_closed() {
    require!(Root);
    let world = World::new();
    let before = world.descriptors();
    let file = std::fs::File::open("/dev/null").expect("there");
    for count in [1, 253] {
        let connection = Raw::connect(&world.socket());
        // Not even that from Linux 6.16 on.
        match connection.try_send_with(&Request::Facts.encode(1), &file, count) {
            Err(errno) => assert_eq!(errno, rustix::io::Errno::PERM),
            Ok(_) => assert!(connection.is_over(wait::SOON)),
        }
        // With a connection that has a lease, too.
        let mut connection = Raw::connect(&world.socket());
        connection.lease(wanted(0, 1));
        connection.send_with(&Request::Facts.encode(9), &file, count);
        assert!(connection.is_over(wait::SOON));
    }
    world.await_no_program();
    world.await_descriptors(before);
    assert_serves(&world);
}

#[test]
fn requests_out_of_turn_are_refused_and_do_no_harm() {
    require!(Root);
    let world = World::new();
    let mut connection = Raw::connect(&world.socket());
    let reason = |answer: Answer| match answer {
        Answer::Refused(refusal) => Some(refusal.reason),
        _ => None,
    };
    for request in [
        Request::Facts,
        registration(0, 1),
        BIND,
        Request::Counters { queue: 0 },
    ] {
        assert_eq!(
            reason(connection.ask(&request)),
            Some(Reason::Lease),
            "{request:?}"
        );
    }
    assert_eq!(reason(connection.ask(&Request::Lease(wanted(0, 1)))), None);
    assert_eq!(
        reason(connection.ask(&Request::Lease(wanted(1, 1)))),
        Some(Reason::Lease)
    );
    assert_eq!(
        reason(connection.ask(&Request::Deactivate { queue: u32::MAX })),
        Some(Reason::Lease)
    );
    assert_eq!(reason(connection.ask(&Request::Facts)), None);
}

#[test]
fn flood_of_requests_does_not_keep_others_from_their_answers() {
    require!(Root);
    let world = World::new();
    let before = world.descriptors();
    let mut floods: Vec<Raw> = (0..8).map(|_| Raw::connect(&world.socket())).collect();
    floods[0].lease(wanted(0, 1));
    assert_serves(&world);
    let quiet = world.descriptors();
    let (registration, bind) = (registration(0, 1).encode(5), BIND.encode(6));
    // Nobody reads what they are answered: that there is no memory, or no lease.
    for _ in 0..FLOODS {
        for flood in &floods {
            while flood.send(&registration).and_then(|_| flood.send(&bind)).is_ok() {}
        }
        assert_serves(&world);
    }
    // What waits for the one that does not read is little, and nothing of it stays with the steward.
    // The last lease of those that were served may be under way to its end.
    let few = wait::until(wait::SOON, || world.descriptors() <= quiet + 2);
    assert!(few, "{quiet} descriptors became {}", world.descriptors());
    drop(floods);
    world.await_descriptors(before);
    world.await_no_program();
}

#[test]
fn slow_reader_gets_all_its_answers_in_order_and_the_last_state() {
    require!(Root);
    let world = World::new();
    let mut connection = Raw::connect(&world.socket());
    connection.lease(wanted(0, 1));
    let mut asked = 1;
    while connection
        .send(&Request::Counters { queue: 0 }.encode(asked + 1))
        .is_ok()
    {
        asked += 1;
    }
    assert!(asked > 20);
    for mtu in ["1400", "1300", "1200"] {
        world.veth.near.ip(&["link", "set", "nic0", "mtu", mtu]);
    }
    wait::a_moment();
    assert_serves(&world);
    let (mut next, mut mtu) = (2, 1500);
    while next <= asked || mtu != 1200 {
        match connection.receive(wait::SOON) {
            Some((0, Answer::Changed(facts))) => mtu = facts.mtu,
            Some((serial, Answer::Counters(_))) => {
                assert_eq!(serial, next);
                next += 1;
            }
            other => panic!("{other:?} after {next} of {asked}, MTU {mtu}"),
        }
    }
}

#[test]
fn connections_are_limited_for_each_user_and_free_again_when_closed() {
    require!(Root);
    let world = World::with(2, &format!("[limits]\nconnections = 5\n{POLICY}"));
    let before = world.descriptors();
    for _ in 0..3 {
        let connections: Vec<Raw> = (0..5).map(|_| Raw::connect(&world.socket())).collect();
        let sixth = Raw::connect(&world.socket());
        let refusal = sixth.refusal(wait::SOON);
        assert_eq!(refusal.reason, Reason::Limit);
        assert!(refusal.text.contains("`connections`"), "{refusal}");
        assert!(sixth.is_over(wait::SOON));
        drop(connections);
        world.await_descriptors(before);
    }
    assert_serves(&world);
}

#[test]
fn steward_without_descriptors_serves_on_and_accepts_again_when_it_has_some() {
    require!(Root);
    let world = World::new();
    let lease = world.lease(0, 1).expect("allowed");
    limit_descriptors(&world, None);
    let waiting = Raw::connect(&world.socket());
    wait::a_moment();
    // No socket can be made, and it says so; what needs none works.
    let refusal = common::refusal(lessee::register(&lease, 0));
    assert_eq!(refusal.reason, Reason::Kernel, "{refusal}");
    lease.deactivate(0).expect("ours");
    limit_descriptors(&world, Some(1024));
    lessee::register(&lease, 0).expect("ours");
    drop(waiting);
    assert_serves(&world);
}

/// Descriptors that a process has sent and nobody has taken count for its user, and no process of that user may send
/// more while they are more than it may have open.
#[test]
fn descriptors_on_their_way_between_others_cost_a_request_and_not_the_lease() {
    require!(Root);
    let world = World::new();
    let lease = world.lease(0, 1).expect("allowed");
    let prepared = lessee::register(&lease, 0).expect("ours");
    let (sender, receiver) = Raw::pair();
    let file = std::fs::File::open("/dev/null").expect("there");
    (0..3).for_each(|_| sender.send_with(&[0], &file, 253));
    limit_descriptors(&world, Some(500));
    // The bound socket is what the steward sends.
    common::assert_refused(lease.bind(prepared), Reason::Kernel, "on their way");
    drop((sender, receiver));
    let again = || {
        let prepared = lessee::register(&lease, 0)?;
        lease.bind(prepared)
    };
    world.await_that(|| again().is_ok());
    assert_serves(&world);
}

/// A file of a size, in the test's own file system.
fn file_on_disk(world: &World) -> File {
    let file = tempfile::tempfile_in(&world.dir).expect("ours");
    file.set_len(2 << 20).expect("room");
    file
}

/// Asks on a connection that has a lease, with this file for each of so many descriptors.
fn register(connection: &Raw, file: &impl AsFd, descriptors: usize, parts: usize) -> Answer {
    connection.send_with(&registration(0, parts).encode(77), file, descriptors);
    let (serial, answer) = connection.receive(wait::SOON).expect("an answer");
    assert_eq!(serial, 77);
    answer
}

#[test]
fn memory_that_is_none_costs_a_request_and_leaves_nothing_behind() {
    require!(Root);
    let world = World::new();
    let before = world.descriptors();
    let mut connection = leased(&world);
    let quiet = world.descriptors();
    let null = File::open("/dev/null").expect("there");
    let memory = memfd(2 << 20);
    assert_eq!(
        failed(register(&connection, &null, 1, 1)),
        (Step::Map, libc::EINVAL)
    );
    let disk = file_on_disk(&world);
    assert_eq!(
        failed(register(&connection, &disk, 1, 1)),
        (Step::Map, libc::EINVAL)
    );
    let (socket, _other) = std::os::unix::net::UnixStream::pair().expect("sockets");
    assert_eq!(
        failed(register(&connection, &socket, 1, 1)),
        (Step::Map, libc::EINVAL)
    );
    // Fewer than parts, more, more than there can be.
    for descriptors in [2, 66, 253] {
        assert_eq!(
            failed(register(&connection, &memory, descriptors, 1)),
            (Step::Map, libc::EBADMSG)
        );
    }
    assert_eq!(
        failed(register(&connection, &memory, 1, 2)),
        (Step::Map, libc::EBADMSG)
    );
    assert_eq!(
        failed(connection.ask(&registration(0, 1))),
        (Step::Map, libc::EBADMSG)
    );
    // Shorter than it should be, as any that has pages which nobody has made.
    let (step, errno) = failed(register(&connection, &memfd(4096), 1, 1));
    assert_eq!((step, errno), (Step::Map, libc::ENODATA));
    // None of it was bound, and what is right works.
    let refused = connection.ask(&BIND);
    assert!(
        matches!(&refused, Answer::Refused(refusal) if refusal.reason == Reason::Unregistered),
        "{refused:?}"
    );
    assert_eq!(register(&connection, &memory, 1, 1), Answer::Done);
    assert_eq!(connection.ask(&BIND), Answer::Done);
    assert_serves(&world);
    let few = wait::until(wait::SOON, || world.descriptors() <= quiet + 1);
    assert!(few, "{quiet} descriptors became {}", world.descriptors());
    drop(connection);
    world.await_descriptors(before);
}

/// The memory of a socket counts for its lessee's user as long as anybody has it, whatever became of the lease.
#[test]
fn memory_that_a_lessee_keeps_counts() {
    require!(Root);
    let uid = 1_300_000 + std::process::id();
    // The kernel counts up to twice as much, for queues that change their memory.
    let rule =
        format!("[[allow]]\nuser = {uid}\ninterface = \"nic0\"\nqueues = \"all\"\nmemlock = \"2 MiB\"\n");
    let world = World::with(3, &format!("{rule}{POLICY}").replace("HOLDER", "1"));
    let mut kept = Vec::new();
    for queue in 0..3 {
        let mut connection = Raw::connect_as(&world.socket(), uid, uid);
        connection.lease(wanted(queue, 1));
        connection.send_with(&registration(queue, 1).encode(77), &memfd(2 << 20), 1);
        let (_, answer) = connection.receive(wait::SOON).expect("an answer");
        if queue == 2 {
            assert!(
                matches!(&answer, Answer::Refused(refusal) if refusal.reason == Reason::Memlock),
                "{answer:?}"
            );
            break;
        }
        assert_eq!(answer, Answer::Done);
        let bind = Request::Bind {
            queue,
            flags: 2,
            wait_ms: 0,
        };
        kept.push(connection.ask_for_descriptor(&bind));
    }
}

/// Of hugetlbfs a whole page is mapped, also for less of it. What may lie behind the last part is reserved
/// (`map_parts`, src/sys/child.rs), which this cannot show.
#[test]
fn parts_that_end_within_a_page_are_refused() {
    require!(Root);
    let _pages = testkit::HugePages::more(2);
    let world = World::new();
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::HUGETLB;
    let huge = rustix::fs::memfd_create(c"huge", flags).expect("memory");
    let huge = File::from(huge);
    huge.set_len(4 << 20).expect("room");
    let small = memfd(2 << 20);
    let connection = leased(&world);
    for (offset, len, behind) in [
        (0, 4096, &huge),
        (0, 4096, &small),
        (4096, 2 << 20, &huge),
        (4096, 2 << 20, &small),
    ] {
        let Request::Register { mut umem, rings, .. } = registration(0, 2) else {
            unreachable!("it is one")
        };
        umem.parts[0] = Part {
            file_offset: offset,
            len,
        };
        let request = Request::Register {
            queue: 0,
            umem,
            rings,
        };
        let files = [huge.as_fd(), behind.as_fd()];
        connection
            .try_send_all(&request.encode(77), &files)
            .expect("room");
        let (_, answer) = connection.receive(wait::SOON).expect("an answer");
        assert_eq!(
            failed(answer),
            (Step::Map, libc::EINVAL),
            "offset {offset}, {len} bytes"
        );
    }
    assert_serves(&world);
}

/// Pages that the steward's child made would be its own to pay for. Of hugetlbfs it cannot see which are there; nor
/// could it of those that go while it pins the others.
#[test]
fn missing_pages_are_not_made_for_a_lessee() {
    require!(Root);
    let _pages = testkit::HugePages::more(2);
    let world = World::new();
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::HUGETLB;
    let huge = File::from(rustix::fs::memfd_create(c"huge", flags).expect("memory"));
    huge.set_len(2 << 20).expect("room");
    let connection = leased(&world);
    let answer = register(&connection, &huge, 1, 1);
    assert_eq!(failed(answer), (Step::Register, libc::EFAULT));
    rustix::fs::fallocate(&huge, rustix::fs::FallocateFlags::empty(), 0, 2 << 20).expect("room");
    assert_eq!(register(&connection, &huge, 1, 1), Answer::Done);
}

#[test]
fn lessee_that_dies_while_its_memory_is_pinned_leaves_its_queues_free() {
    require!(Root);
    let rule = "[[allow]]\nuser = 0\ninterface = \"nic0\"\nqueues = \"all\"\nmemlock = \"unlimited\"\n";
    let world = World::with(2, rule);
    let before = world.descriptors();
    let memory = memfd(LARGE);
    for _ in 0..5 {
        let connection = leased(&world);
        let Request::Register {
            queue,
            mut umem,
            rings,
        } = registration(0, 1)
        else {
            unreachable!("it is one")
        };
        umem.parts[0].len = LARGE;
        let request = Request::Register { queue, umem, rings };
        connection.send_with(&request.encode(1), &memory, 1);
        // A child pins it, unless that is done already.
        world.await_that(|| world.children() > 0 || connection.receive(Duration::ZERO).is_some());
        drop(connection);
        assert_serves(&world);
    }
    drop(leased(&world));
    world.await_descriptors(before);
}

/// Of the request that ends a sequence of messages.
const LAST_SERIAL: u32 = 99;

/// How many answers of these kinds came.
#[derive(Debug, Default)]
struct AnswerCounts {
    facts: Cell<usize>,
    done: Cell<usize>,
    refused: Cell<usize>,
}

impl AnswerCounts {
    fn count(&self, answer: &Answer) {
        let of_kind = match answer {
            Answer::Facts(_) => &self.facts,
            Answer::Done => &self.done,
            Answer::Refused(_) => &self.refused,
            _ => return,
        };
        of_kind.set(of_kind.get() + 1);
    }
}

#[test]
fn hostile_peers_send_requests_of_all_kinds() {
    let sent: Vec<String> = requests().iter().map(|request| format!("{request:?}")).collect();
    for Operation { name, .. } in OPERATIONS {
        let is_sent = |text: &String| text.split([' ', '(']).next() == Some(name);
        assert!(sent.iter().any(is_sent), "{name}");
    }
}

/// Mostly requests as they should be, in no sensible order; some that are none. With or without a file.
fn any_message() -> impl Strategy<Value = (Vec<u8>, bool)> {
    let known = prop::sample::select(requests());
    let known = (known, 1u32..4).prop_map(|(request, serial)| (request.encode(serial), false));
    let registered =
        (0u32..2, any::<bool>()).prop_map(|(queue, has_file)| (registration(queue, 1).encode(1), has_file));
    let kind = prop_oneof![8 => 1u16..=24, 1 => any::<u16>()];
    let body = prop::collection::vec(any::<u8>(), 0..64);
    let strange = (kind, 0u32..4, body).prop_map(|(kind, serial, body)| {
        let head = [VERSION.to_ne_bytes(), kind.to_ne_bytes()].concat();
        ([head, serial.to_ne_bytes().to_vec(), body].concat(), false)
    });
    prop_oneof![16 => known, 4 => registered, 1 => strange]
}

#[test]
fn any_messages_in_any_order_leave_the_steward_serving() {
    require!(Root);
    let networks = POLICY.replace("memlock", "network = true\nnetkit = true\nmemlock");
    let zcrx = format!("[[allow]]\nuser = 0\ninterface = \"lo\"\nqueues = \"0\"\nzcrx = [\"{FLOW}\"]\n");
    let world = World::with(2, &[networks, zcrx].concat());
    let before = world.descriptors();
    let memory = memfd(2 << 20);
    let counts = AnswerCounts::default();
    let mut runner = TestRunner::new(Config {
        cases: 150,
        failure_persistence: None,
        ..Config::default()
    });
    let outcome = runner.run(&prop::collection::vec(any_message(), 1..20), |messages| {
        let connection = Raw::connect(&world.socket());
        for (bytes, has_file) in messages {
            let sent = match has_file {
                true => connection.try_send_with(&bytes, &memory, 1).is_ok(),
                false => connection.send(&bytes).is_ok(),
            };
            if !sent {
                break;
            }
        }
        // Until all is answered, or the connection is over.
        let _ = connection.send(&Request::Leases { after: u64::MAX }.encode(LAST_SERIAL));
        while let Some((serial, answer)) = connection.receive(wait::SOON) {
            counts.count(&answer);
            if serial == LAST_SERIAL {
                break;
            }
        }
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}: {}", world.steward));
    println!("{counts:?}");
    // Not all of them end at their first message.
    let AnswerCounts { facts, done, refused } = counts;
    let counts = [facts, done, refused].map(Cell::into_inner);
    assert!(counts.iter().all(|&count| count > 10), "{counts:?}");
    assert_serves(&world);
    world.await_descriptors(before);
    world.await_no_program();
}
