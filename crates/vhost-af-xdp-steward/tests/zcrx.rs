//! Leases of a queue for io_uring zero-copy receive, on a kernel and interfaces that have none: each refusal by its
//! name. Where there is one, the kernel rig looks (scripts/kernels). And what is refused on an interface of the same
//! kernels that has nothing but leased queues.

mod common;
#[path = "zcrx/hostile.rs"]
mod hostile;

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use common::{POLICY, World, lessee, netkit, raw::Raw, receiving, ring, take, wanted, wanted_of};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::process::Signal;
use steward_client::listing;
use steward_client::{Area, LeaseError, QueueLease, Refill, Waiting};
use steward_protocol::{Answer, Part, Reason, Refusal, Request, ZcrxRegistered, ZcrxRings, ZcrxWanted};
use testkit::foreign::{self, Foreign};
use testkit::{NetNs, Running, VethPair, require, wait};
use zcrx::{Config, Memory, Mode, Offer, Prepared, Receiver, Source};

const FLOW: &str = "192.0.2.1:443";
/// Where the benchmark's server listens.
const SERVER: &str = "127.0.0.1:7443";
const AREA_BYTES: u64 = 1 << 20;
/// Memory of a child: three buffers.
const AREA_OF_A_CHILD: usize = 12 << 10;

/// Rules for lessees and root, on the loopback and on the NIC.
fn rules() -> String {
    let rule = |user: &str, interface: &str| {
        format!(
            "[[allow]]\nuser = {user}\ninterface = \"{interface}\"\nqueues = \"0-1\"\nmemlock = \"2 MiB\"\n\
             zcrx = [\"{FLOW}\"]\n"
        )
    };
    ["HOLDER", "0"]
        .iter()
        .flat_map(|user| ["lo", "nic0"].map(|interface| rule(user, interface)))
        .collect()
}

fn queue_of(interface: &str, queue: u32) -> ZcrxWanted {
    ZcrxWanted {
        interface: interface.to_owned(),
        queue,
        flows: vec![FLOW.parse().expect("an address and a port")],
    }
}

fn take_queue(world: &World, wanted: &ZcrxWanted) -> Result<QueueLease, LeaseError> {
    QueueLease::take(&world.socket(), wanted, Waiting::default())
}

#[track_caller]
fn refused<T>(result: Result<T, LeaseError>) -> Refusal {
    match result {
        Err(LeaseError::Refused(refusal)) => refusal,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it should have been refused"),
    }
}

/// Memory whose pages are there.
fn memory(bytes: u64) -> OwnedFd {
    let file = memfd_create("area", MemfdFlags::CLOEXEC).expect("memory");
    ftruncate(&file, bytes).expect("memory");
    let zeros = vec![0u8; bytes as usize];
    assert_eq!(rustix::io::pwrite(&file, &zeros, 0), Ok(zeros.len()));
    file
}

fn register(
    lease: &mut QueueLease,
    rings: &[BorrowedFd<'_>],
    file: &OwnedFd,
) -> Result<ZcrxRegistered, LeaseError> {
    let len = rustix::fs::fstat(file).expect("a file").st_size.cast_unsigned();
    let area = Area {
        file: file.as_fd(),
        part: Part { file_offset: 0, len },
    };
    let refill = Refill {
        entries: 256,
        buffer_bytes: 0,
    };
    lease.register(rings, area, refill)
}

#[test]
fn queue_that_cannot_be_leased_is_rejected_with_the_reason() {
    require!(Root);
    let world = World::with(2, &(rules() + POLICY));
    let asked = |wanted: &ZcrxWanted| refused(take_queue(&world, wanted));
    let elsewhere = ZcrxWanted {
        flows: vec!["192.0.2.1:22".parse().expect("an address and a port")],
        ..queue_of("nic0", 0)
    };
    for (wanted, reason, words) in [
        (elsewhere, Reason::NotAllowed, "flows to 192.0.2.1:22"),
        (queue_of("nic0", 7), Reason::NotAllowed, "widen `queues`"),
        (queue_of("nic1", 0), Reason::NotAllowed, "has no rule for that"),
        (queue_of("nic0", 0), Reason::Nic, "tcp-data-split"),
    ] {
        let refusal = asked(&wanted);
        assert_eq!(refusal.reason, reason, "{refusal}");
        assert!(refusal.text.contains(words), "{refusal}");
    }
    // With the program for AF_XDP, and with somebody's.
    let lease = take(&world.socket(), &wanted(1, 1)).expect("allowed");
    let refusal = asked(&queue_of("nic0", 0));
    assert_eq!(refusal.reason, Reason::Program, "{refusal}");
    assert!(refusal.text.contains("leased for AF_XDP"), "{refusal}");
    drop(lease);
    world.await_no_program();
    let refusal = wait::until_some(wait::SOON, || {
        let refusal = asked(&queue_of("nic0", 0));
        (refusal.reason == Reason::Nic).then_some(refusal)
    });
    assert!(refusal.is_some());
}

#[test]
fn user_without_a_rule_for_it_gets_no_queue() {
    require!(Root);
    let world = World::new();
    let refusal = refused(take_queue(&world, &queue_of("nic0", 0)));
    assert_eq!(refusal.reason, Reason::NotAllowed);
    assert!(refusal.text.contains("`zcrx = [\"ADDRESS:PORT\"]`"), "{refusal}");
}

/// It keeps no capability that its policy had no use for when it started.
#[test]
fn steward_whose_policy_got_zcrx_after_its_start_asks_for_a_restart() {
    require!(Root);
    let mut world = World::new();
    world.set_policy(&rules());
    world
        .steward
        .await_text("`zcrx`) are refused until the steward is restarted");
    for interface in ["lo", "nic0"] {
        let refusal = refused(take_queue(&world, &queue_of(interface, 0)));
        assert_eq!(refusal.reason, Reason::Kernel, "{refusal}");
        assert!(refusal.text.contains("restart it"), "{refusal}");
    }
    world.restart_after(Signal::TERM);
    drop(take_queue(&world, &queue_of("lo", 0)).expect("allowed"));
}

#[test]
fn ring_that_cannot_be_registered_is_refused_and_the_lease_goes_on() {
    require!(Root);
    let world = World::with(1, &rules());
    let mut lease = take_queue(&world, &queue_of("lo", 0)).expect("allowed");
    let file = memory(AREA_BYTES);
    let (used, ready) = (ring::new(0), ring::new(ring::DISABLED));
    let mut asked = |ring: BorrowedFd<'_>, file| refused(register(&mut lease, &[ring], file));
    let refusal = asked(file.as_fd(), &file);
    assert_eq!(refusal.reason, Reason::Lease, "{refusal}");
    assert!(refusal.text.contains("no ring of io_uring"), "{refusal}");
    let refusal = asked(used.as_fd(), &file);
    assert!(refusal.text.contains("IORING_SETUP_R_DISABLED"), "{refusal}");
    // All rings are looked at before one has the memory.
    let further = refused(register(&mut lease, &[ready.as_fd(), file.as_fd()], &file));
    assert!(further.text.contains("no ring of io_uring"), "{further}");
    // Memory that could hold somebody up, or that is not there.
    let (reader, _writer) = rustix::pipe::pipe().expect("a pipe");
    let refusal = refused(lease.register(
        &[ready.as_fd()],
        Area {
            file: reader.as_fd(),
            part: Part {
                file_offset: 0,
                len: 4096,
            },
        },
        Refill {
            entries: 1,
            buffer_bytes: 0,
        },
    ));
    assert!(refusal.text.contains("memfd_create"), "{refusal}");
    lease.check().expect("it goes on");
    // A kernel that has zero-copy receive without a device, or not.
    match register(&mut lease, &[ready.as_fd()], &file) {
        Ok(_) => {
            let refusal = refused(register(&mut lease, &[ready.as_fd()], &file));
            assert!(refusal.text.contains("before"), "{refusal}");
        }
        Err(LeaseError::Refused(refusal)) => {
            assert_eq!(refusal.reason, Reason::Kernel, "{refusal}");
            assert!(refusal.text.contains("takes Linux 7.1"), "{refusal}");
            lease.check().expect("it goes on");
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn memory_beyond_the_policy_is_rejected_with_the_remedy_and_the_lease_continues() {
    require!(Root);
    let world = World::with(1, &rules());
    let mut lease = take_queue(&world, &queue_of("lo", 0)).expect("allowed");
    let (file, ring) = (memory(4 * AREA_BYTES), ring::new(ring::DISABLED));
    let refusal = refused(register(&mut lease, &[ring.as_fd()], &file));
    assert_eq!(refusal.reason, Reason::Memlock, "{refusal}");
    assert!(refusal.text.contains("raise its `memlock`"), "{refusal}");
    lease.check().expect("it goes on");
}

#[test]
fn queues_are_listed_and_counted_and_end_with_the_policy() {
    require!(Root);
    let mut world = World::with(1, &rules());
    let mut lease = take_queue(&world, &queue_of("lo", 0)).expect("allowed");
    let all = listing::leases(&world.socket()).expect("it answers");
    assert_eq!(all.len(), 1, "{all:?}");
    assert!(all[0].zcrx && all[0].interface == "lo" && all[0].pid == std::process::id());
    // A lease is of one kind.
    common::write_policy(&world.dir, &(rules() + POLICY));
    let mut both = Raw::connect(&world.socket());
    assert_eq!(both.ask(&Request::Zcrx(queue_of("lo", 1))), Answer::Done);
    for second in [Request::Zcrx(queue_of("lo", 1)), Request::Lease(wanted(0, 1))] {
        let answer = both.ask(&second);
        assert!(
            matches!(&answer, Answer::Refused(refusal) if refusal.reason == Reason::Lease),
            "{answer:?}"
        );
    }
    world.set_policy("");
    let ended = wait::until_some(wait::SOON, || lease.check().err());
    let Some(LeaseError::Refused(refusal)) = ended else {
        panic!("the lessee should have received the reason: {}", world.steward)
    };
    assert_eq!(refusal.reason, Reason::NotAllowed, "{refusal}");
    drop(both);
    world.steward.await_text("zcrx");
}

#[test]
fn files_without_a_lease_and_rings_without_memory_end_the_connection() {
    require!(Root);
    let world = World::with(1, &rules());
    let rings = || {
        Request::ZcrxRegister(ZcrxRings {
            rings: vec![0],
            area: Part {
                file_offset: 0,
                len: 4096,
            },
            entries: 1,
            buffer_bytes: 0,
        })
    };
    // Nobody may send files before there is a lease.
    let mut without = Raw::connect(&world.socket());
    let answer = without.ask(&rings());
    assert!(
        matches!(&answer, Answer::Refused(refusal) if refusal.reason == Reason::Lease),
        "{answer:?}"
    );
    let mut lease = Raw::connect(&world.socket());
    assert_eq!(lease.ask(&Request::Zcrx(queue_of("lo", 0))), Answer::Done);
    let answer = lease.ask(&rings());
    assert!(
        matches!(&answer, Answer::Refused(_)),
        "no memory came: {answer:?}"
    );
    assert_eq!(
        listing::leases(&world.socket()).expect("it answers").len(),
        1,
        "it goes on"
    );
}

/// So often a lessee and the steward are killed, where the kernel is known to have zero-copy receive without a device.
const KILLS: &str = "STEWARD_ZCRX";
/// Where it may lack it.
const FEW_KILLS: usize = 20;

#[test]
fn unprivileged_lessee_receives_all_bytes_and_kills_leave_nothing() {
    require!(Root);
    let mut world = World::kept_for(&rules(), "10");
    let known = std::env::var(KILLS).ok();
    let kills = known
        .as_ref()
        .map_or(FEW_KILLS, |kills| kills.parse().expect("a number"));
    for kill in 0..kills {
        let mut running = lessee::spawn(&world, "child_receives", 0);
        running.await_text("asked");
        let report = running.said();
        assert!(
            (known.is_none() && report.contains("Linux 7.1")) || report.contains("all bytes are there"),
            "{running}"
        );
        // The steward first, or the lessee.
        if kill % 2 == 0 {
            world.restart_after(Signal::KILL);
        }
        running.signal(Signal::KILL);
        running.wait(wait::SOON);
        world.await_that(|| listing::leases(&world.socket()).is_ok_and(|all| all.is_empty()));
    }
    println!("killed {kills} times");
    world.await_nothing();
}

/// The benchmark's server, started as a user without privileges, has its queue by a lease; its client compares each
/// byte.
#[test]
fn server_of_the_benchmark_receives_by_a_lease() {
    require!(Root);
    let rule = format!(
        "[[allow]]\nuser = HOLDER\ninterface = \"lo\"\nqueues = \"0\"\nmemlock = \"4 MiB\"\nzcrx = [\"{SERVER}\"]\n"
    );
    let world = World::with(1, &rule);
    // It may lie where that user may not look.
    let program = std::fs::File::open(testkit::program::bench()).expect("it is built");
    let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
    command.uid(common::lessee_uid()).arg("echo");
    command.args(["--engine", "zcrx", "--ifname", "lo", "--address", SERVER]);
    command.args(["--connections", "8", "--threads", "2", "--duration", "0.5"]);
    command
        .args(["--verify", "--json", "--steward"])
        .arg(world.socket());
    let mut running = Running::start(command);
    let is_had = running.wait(wait::SOON).success();
    let report = running.said();
    match std::env::var_os(KILLS).is_some() || is_had {
        true => assert!(
            is_had && report.contains("\"zcrx without a device\""),
            "{running}"
        ),
        false => assert!(report.contains("Linux 7.1"), "{running}"),
    }
    world.await_nothing();
}

/// Whether there is a netkit `nk0` without a peer in a namespace now. The kernel rig says that there must be.
fn has_netkit(netns: &NetNs) -> bool {
    let made = netns.enter(|| netkit::make("nk0"));
    assert!(made.is_ok() || std::env::var_os(KILLS).is_none(), "{made:?}");
    if let Err(why) = &made {
        println!("SKIPPED: no netkit without a peer (Linux 7.1): {why}");
        return false;
    }
    netns.ip(&["link", "set", "nk0", "up"]);
    true
}

#[test]
fn program_on_a_netkit_without_a_peer_is_refused_as_it_would_see_nothing() {
    require!(Root);
    let world = World::with(1, &POLICY.replace("nic0", "nk0"));
    if !has_netkit(&world.veth.near) {
        return;
    }
    let on_netkit = wanted_of("nk0", 0, 1);
    let refusal = refused(take(&world.socket(), &on_netkit));
    assert_eq!(refusal.reason, Reason::Program, "{refusal}");
    assert!(refusal.text.contains("map-path"), "{refusal}");
    let link = world.veth.near.output_of("ip", &["link", "show", "dev", "nk0"]);
    assert!(!link.contains("xdp"), "a program stayed behind: {link}");
}

/// A socket in copy mode could be had there, and each frame that it sends would be lost.
#[test]
fn netkit_queue_without_a_lease_is_not_served_by_copy() {
    require!(Root);
    let veth = VethPair::new();
    if !has_netkit(&veth.near) {
        return;
    }
    let program = Foreign::attach(&veth.near, VethPair::NIC, testkit::daemon::Mode::Native, 0);
    for (option, words) in [
        ("--queues=1", "cannot do zero-copy"),
        ("--force-copy", "leave force-copy out"),
    ] {
        let mut command = veth.near.command(testkit::program::bench());
        let dir = testkit::daemon::private_dir();
        command.args([
            "serve",
            "--ifname",
            "nk0",
            "--inhibit",
            "--memory",
            "copy",
            option,
        ]);
        command.arg("--map-fd").arg(foreign::list(&[&program.map]));
        command.arg("--socket-path").arg(dir.path().join("socket"));
        let mut running = foreign::inherited(&[&program.map], || Running::start(command));
        assert!(!running.wait(wait::SOON).success(), "{running}");
        assert!(running.said().contains(words), "{running}");
    }
}

/// Receives over a queue of the loopback as a user without privileges, in two threads, and says what came of it.
#[test]
#[ignore = "run by another test"]
fn child_receives() {
    let streams: Vec<_> = (0..2).map(|_| connected()).collect();
    lessee::give_up_privileges();
    let wanted = queue_of("lo", 0);
    let mut lease = QueueLease::take(&lessee::socket(), &wanted, Waiting::default()).expect("allowed");
    let config = config_of_a_child();
    let prepared: Vec<_> = streams.iter().map(|_| prepared(&config)).collect();
    let offer = Offer::new(&config).expect("memory");
    let registered = match receiving::register(&mut lease, &prepared, &offer) {
        Ok(registered) => registered,
        Err(error) => {
            println!("{error}, asked");
            std::thread::sleep(Duration::from_secs(3600));
            return;
        }
    };
    assert_eq!(registered.numbers.len(), prepared.len());
    let leased = receiving::taken_up(offer, &prepared[0], &registered, true);
    std::thread::scope(|scope| {
        let rings = prepared.into_iter().zip(registered.numbers);
        for (seed, ((ring, number), (mut sender, socket))) in rings.zip(streams).enumerate() {
            let (config, leased) = (&config, &leased);
            scope.spawn(move || sender.write_all(&receiving::bytes_of(seed)).expect("sent"));
            scope.spawn(move || {
                let mut receiver = Receiver::start_leased(ring, leased, number, config).expect("a ring");
                assert_eq!(receiver.mode(), Mode::ZcrxNoDevice);
                let received = receiving::all_of(&mut receiver, socket);
                assert!(
                    received == receiving::bytes_of(seed),
                    "{} bytes came",
                    received.len()
                );
            });
        }
    });
    println!("all bytes are there, asked");
    std::thread::sleep(Duration::from_secs(3600));
}

/// Of the loopback: who sends, and who receives.
fn connected() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("the loopback is up");
    let sender = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
    (sender, listener.accept().expect("it has connected").0)
}

/// What a user may lock who may lock little.
fn config_of_a_child() -> Config {
    Config {
        memory: Memory::Own {
            bytes: AREA_OF_A_CHILD,
        },
        requests: 8,
        completions: 64,
        ..Config::new(Source::NoDevice)
    }
}

/// The locked memory of a process that was killed counts for its user a moment longer.
fn prepared(config: &Config) -> Prepared {
    wait::until_some(wait::SOON, || Prepared::new(config).ok()).expect("memory for a ring")
}
