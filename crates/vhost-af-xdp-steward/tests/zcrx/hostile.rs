//! Lessees of queues for zero-copy receive that do harm, or try: each is refused by name, nothing stays charged, and
//! others notice nothing.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};
use rustix::net::{SocketAddrUnix, connect};
use steward_client::listing;
use steward_protocol::{
    Answer, MESSAGE_MAX, Part, Reason, Refusal, Request, ZCRX_RINGS_MAX, ZcrxRings, ZcrxWanted,
};
use testkit::{Running, foreign, require, wait};

use crate::common::hostile::{assert_serves, memfd};
use crate::common::raw::{self, Raw, as_user};
use crate::common::{self, POLICY, World, lessee, ring};

/// What the rule allows a user in all.
const MEMLOCK: u64 = 2 << 20;

/// Rules for the lessees' user and root, on the loopback.
fn rules() -> String {
    let rule = |user: &str| {
        format!(
            "[[allow]]\nuser = {user}\ninterface = \"lo\"\nqueues = \"0\"\nmemlock = \"{} KiB\"\n\
             zcrx = [\"192.0.2.1:443\"]\n",
            MEMLOCK >> 10
        )
    };
    rule("HOLDER") + &rule("0") + POLICY
}

fn queue() -> Request {
    Request::Zcrx(ZcrxWanted {
        interface: "lo".to_owned(),
        queue: 0,
        flows: vec!["192.0.2.1:443".parse().expect("an address and a port")],
    })
}

fn registration(rings: Vec<i32>, file_offset: u64, len: u64) -> Request {
    Request::ZcrxRegister(ZcrxRings {
        rings,
        area: Part { file_offset, len },
        entries: 64,
        buffer_bytes: 0,
    })
}

/// A connection with a lease.
fn leased(world: &World) -> Raw {
    let mut connection = Raw::connect(&world.socket());
    assert_eq!(connection.ask(&queue()), Answer::Done);
    connection
}

/// What the steward says to a request that comes with these files.
fn ask_with(connection: &Raw, request: &Request, files: &[BorrowedFd<'_>]) -> Answer {
    connection
        .try_send_all(&request.encode(1), files)
        .expect("the connection is open");
    connection.receive(wait::SOON).expect("an answer").1
}

#[track_caller]
fn refusal(answer: Answer) -> Refusal {
    match answer {
        Answer::Refused(refusal) => refusal,
        other => panic!("it should have been refused: {other:?}"),
    }
}

/// All memory that the rule allows is asked for once more, so that what stayed charged is seen. The kernel may have
/// zero-copy receive without a device, or not.
#[track_caller]
fn assert_nothing_charged(connection: &Raw, ring: &OwnedFd) {
    let file = memfd(MEMLOCK);
    let request = registration(vec![ring.as_raw_fd()], 0, MEMLOCK);
    match ask_with(connection, &request, &[file.as_fd()]) {
        Answer::ZcrxRegistered(_) => {}
        answer => {
            let refusal = refusal(answer);
            assert_eq!(refusal.reason, Reason::Kernel, "{refusal}");
            assert!(refusal.text.contains("takes Linux 7.1"), "{refusal}");
        }
    }
}

/// Memory of so many bytes without a page.
fn empty(bytes: u64, flags: MemfdFlags) -> OwnedFd {
    let file = memfd_create("area", MemfdFlags::CLOEXEC | flags).expect("memory");
    ftruncate(&file, bytes).expect("room");
    file
}

#[test]
fn memory_of_a_wrong_kind_is_rejected_by_name_and_not_counted() {
    require!(Root);
    let world = World::with(2, &rules());
    let before = world.descriptors();
    let connection = leased(&world);
    let ring = ring::new(ring::DISABLED);
    let punched = memfd(1 << 20);
    let holes = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&punched, holes, 512 << 10, 4096).expect("a hole");
    let sealed = empty(1 << 20, MemfdFlags::ALLOW_SEALING);
    rustix::io::pwrite(&sealed, &vec![1; 1 << 20], 0).expect("room");
    fcntl_add_seals(&sealed, SealFlags::WRITE).expect("nobody maps it");
    let whole = memfd(1 << 20);
    let path = format!("/proc/self/fd/{}", whole.as_raw_fd());
    let read_only = File::open(path).expect("ours");
    let (reader, _writer) = rustix::pipe::pipe().expect("a pipe");
    let null = File::open("/dev/null").expect("it is there");
    let dir = File::open("/").expect("it is there");
    let (one, _other) = std::os::unix::net::UnixStream::pair().expect("sockets");
    let missing = "pages that do not exist";
    let (kind, written) = ("memfd_create", "cannot be written to");
    let (short, nothing) = (memfd(64 << 10), empty(1 << 20, MemfdFlags::empty()));
    let wrong: [(&str, BorrowedFd<'_>, &str); 9] = [
        ("punched", punched.as_fd(), missing),
        ("without a page", nothing.as_fd(), missing),
        ("short", short.as_fd(), missing),
        ("sealed", sealed.as_fd(), written),
        ("read only", read_only.as_fd(), written),
        ("a pipe", reader.as_fd(), kind),
        ("a device", null.as_fd(), kind),
        ("a directory", dir.as_fd(), kind),
        ("a socket", one.as_fd(), kind),
    ];
    let rings = || vec![ring.as_raw_fd()];
    for (what, file, words) in wrong {
        let refusal = refusal(ask_with(&connection, &registration(rings(), 0, 1 << 20), &[file]));
        assert!(refusal.text.contains(words), "{what}: {refusal}");
    }
    // Behind the end of the file, several files, none.
    let file = memfd(1 << 20);
    for (offset, files, words) in [
        (1 << 40, vec![file.as_fd()], missing),
        (0, vec![file.as_fd(), file.as_fd()], "send one"),
        (0, vec![], "send one"),
    ] {
        let request = registration(rings(), offset, 1 << 20);
        let answer = match files[..] {
            [] => {
                connection.send(&request.encode(1)).expect("it is open");
                connection.receive(wait::SOON).expect("an answer").1
            }
            _ => ask_with(&connection, &request, &files),
        };
        let refusal = refusal(answer);
        // A kernel without zero-copy receive does not look at what is mapped.
        let is_unseen = offset > 0 && refusal.text.contains("takes Linux 7.1");
        assert!(is_unseen || refusal.text.contains(words), "{refusal}");
    }
    // More than all that there may be.
    let request = registration(rings(), 0, MEMLOCK + 4096);
    let refusal = refusal(ask_with(&connection, &request, &[file.as_fd()]));
    assert_eq!(refusal.reason, Reason::Memlock, "{refusal}");
    assert_nothing_charged(&connection, &ring);
    drop(connection);
    world.await_descriptors(before);
    assert_serves(&world);
}

#[test]
fn descriptors_that_are_no_rings_are_refused_by_name_and_not_used() {
    require!(Root);
    let world = World::with(2, &rules());
    let connection = leased(&world);
    let (ready, used) = (ring::new(ring::DISABLED), ring::new(0));
    let file = memfd(1 << 20);
    let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
    let no_ring = "no ring of io_uring";
    for (rings, words) in [
        (vec![i32::MAX], no_ring),
        (vec![file.as_raw_fd()], no_ring),
        (vec![writer.as_raw_fd()], no_ring),
        (vec![connection.socket.as_raw_fd()], no_ring),
        (vec![used.as_raw_fd()], "IORING_SETUP_R_DISABLED"),
        (vec![ready.as_raw_fd(), reader.as_raw_fd()], no_ring),
        // As many as there may be, of which the last one is none.
        ((1_000_000..).take(ZCRX_RINGS_MAX).collect::<Vec<i32>>(), no_ring),
    ] {
        let request = registration(rings, 0, 1 << 20);
        let refusal = refusal(ask_with(&connection, &request, &[file.as_fd()]));
        assert!(refusal.text.contains(words), "{refusal}");
    }
    drop(writer);
    let ended = rustix::io::read(&reader, &mut [0u8; 1]);
    assert_eq!(ended, Ok(0), "somebody has the pipe yet");
    assert_nothing_charged(&connection, &ready);
}

/// A process that runs a setuid program has the number that it had, and descriptors of another user's. Threads of this
/// one do as if: the process is root's, and a thread of it connects as somebody else.
#[test]
fn descriptors_of_a_process_that_runs_for_another_user_by_now_are_not_looked_at() {
    require!(Root);
    let world = World::with(2, &rules());
    let uid = common::lessee_uid();
    let mut connection = Raw::connect_as(&world.socket(), uid, uid);
    assert_eq!(connection.ask(&queue()), Answer::Done);
    let (ring, file) = (ring::new(ring::DISABLED), memfd(1 << 20));
    for number in [ring.as_raw_fd(), file.as_raw_fd(), i32::MAX] {
        let request = registration(vec![number], 0, 1 << 20);
        let refusal = refusal(ask_with(&connection, &request, &[file.as_fd()]));
        if refusal.text.contains("takes Linux 7.1") || refusal.text.contains("no ring") {
            assert!(!can_read_users_of_processes(), "{refusal}");
            println!("SKIPPED: whom a process runs for is told from Linux 6.13 on");
            return;
        }
        assert_eq!(refusal.reason, Reason::Lease, "{refusal}");
        assert!(
            refusal.text.contains("runs for another user"),
            "{number}: {refusal}"
        );
    }
    let listed = as_user(uid, uid, || listing::leases(&world.socket()));
    assert_eq!(listed.expect("it answers").len(), 1, "it goes on");
}

fn can_read_users_of_processes() -> bool {
    let release = rustix::system::uname();
    let release = release.release().to_str().expect("text");
    let mut numbers = release.split('.').map(|number| number.parse().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(13))
}

/// The rings are of the process that connected, whoever has the connection by now.
#[test]
fn connection_that_is_passed_on_by_a_process_that_ends_gets_no_ring_of_anybody_elses() {
    require!(Root);
    let world = World::with(2, &rules());
    let socket = raw::unconnected();
    let mut command = Command::new(std::env::current_exe().expect("a test is a program"));
    command.args([
        "--ignored",
        "--exact",
        "hostile::child_connects",
        "--nocapture",
        "--test-threads=1",
    ]);
    command
        .env("STEWARD_SOCKET", world.socket())
        .env("STEWARD_QUEUE", socket.as_raw_fd().to_string());
    let mut running = foreign::inherited(&[&socket], || Running::start(command));
    assert!(running.wait(wait::SOON).success(), "{running}");
    let (mut connection, _) = Raw::pair();
    connection.socket = socket;
    assert_eq!(connection.ask(&queue()), Answer::Done);
    let (ring, file) = (ring::new(ring::DISABLED), memfd(1 << 20));
    for _ in 0..3 {
        let request = registration(vec![ring.as_raw_fd()], 0, 1 << 20);
        let refusal = refusal(ask_with(&connection, &request, &[file.as_fd()]));
        assert_eq!(refusal.reason, Reason::Lease, "{refusal}");
        assert!(refusal.text.contains("has ended"), "{refusal}");
    }
    drop(connection);
    world.await_that(|| listing::leases(&world.socket()).is_ok_and(|all| all.is_empty()));
}

/// Connects by a socket that it was given, and ends.
#[test]
#[ignore = "run by another test"]
#[allow(unsafe_code)]
fn child_connects() {
    let number = i32::try_from(lessee::queue()).expect("a descriptor");
    // SAFETY: this process was started with it, and no other process here knows of it.
    let socket = unsafe { OwnedFd::from_raw_fd(number) };
    let address = SocketAddrUnix::new(lessee::socket()).expect("short");
    connect(&socket, &address).expect("the steward listens");
}

#[test]
fn memory_that_is_cut_while_it_is_registered_harms_no_other_lessee() {
    require!(Root);
    let world = World::with(2, &rules());
    let connection = leased(&world);
    let (ring, file) = (ring::new(ring::DISABLED), memfd(1 << 20));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _over = wait::Raised(&is_over);
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                ftruncate(&file, 0).expect("ours");
                ftruncate(&file, 1 << 20).expect("ours");
                let zeros = [0u8; 1 << 16];
                for at in (0..1 << 20).step_by(zeros.len()) {
                    rustix::io::pwrite(&file, &zeros, at).expect("room");
                }
            }
        });
        for _ in 0..100 {
            let request = registration(vec![ring.as_raw_fd()], 0, 1 << 20);
            match ask_with(&connection, &request, &[file.as_fd()]) {
                Answer::ZcrxRegistered(_) => break,
                answer => {
                    let text = refusal(answer).text;
                    let is_known = ["pages that do not exist", "takes Linux 7.1", "registered before"]
                        .iter()
                        .any(|words| text.contains(words));
                    assert!(is_known, "{text}");
                }
            }
        }
    });
    assert_serves(&world);
    drop(connection);
    world.await_that(|| world.children() == 0);
}

#[test]
fn half_registrations_end_their_connection_and_its_lease() {
    require!(Root);
    let world = World::with(2, &rules());
    let before = world.descriptors();
    let file = memfd(4096);
    let whole = registration(vec![0], 0, 4096).encode(1);
    let longer = [&whole[..], &[0]].concat();
    let unknown = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] = 0xff;
        bytes
    };
    let cut = (1..whole.len()).step_by(7).map(|len| whole[..len].to_vec());
    // The length of the memory, the number of rings, the entries.
    let wrong = [
        longer,
        unknown(16),
        unknown(24),
        unknown(28),
        vec![0; MESSAGE_MAX + 1],
    ];
    for bytes in cut.chain(wrong) {
        let connection = leased(&world);
        // It may be over before the file is sent.
        let _ = connection.try_send_all(&bytes, &[file.as_fd()]);
        assert!(connection.is_over(wait::SOON), "{bytes:?}");
    }
    world.await_that(|| listing::leases(&world.socket()).is_ok_and(|all| all.is_empty()));
    world.await_descriptors(before);
    assert_serves(&world);
}

#[test]
fn flood_of_registrations_without_reading_answers_delays_no_other_lessee() {
    require!(Root);
    let world = World::with(2, &rules());
    let uid = common::lessee_uid();
    let request = registration(vec![0], 0, 1 << 20).encode(1);
    let flooding: Vec<Raw> = (0..16)
        .map(|_| {
            let mut connection = Raw::connect_as(&world.socket(), uid, uid);
            assert_eq!(connection.ask(&queue()), Answer::Done);
            connection
        })
        .collect();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _over = wait::Raised(&is_over);
        for connection in &flooding {
            let (request, is_over) = (&request, &is_over);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    // Full, or over.
                    if connection.send(request).is_err() {
                        std::thread::yield_now();
                    }
                }
            });
        }
        for _ in 0..10 {
            assert_serves(&world);
        }
    });
    drop(flooding);
    world.await_that(|| listing::leases(&world.socket()).is_ok_and(|all| all.is_empty()));
    assert!(wait::until(wait::SOON, || world.children() == 0));
}
