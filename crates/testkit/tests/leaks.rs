//! Guests come and go, ten thousand in a soak, and the daemon is what it was: as many descriptors,
//! mappings and threads, and as much memory.
//!
//! Half of them come as a good VMM does and leave at any point of the set-up; the ways are taken in turn.
//! CVE-2019-14818 and CVE-2020-10726 (descriptors and memory lost by messages that come twice) are among the ways.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use testkit::daemon::Placement;
use testkit::holdings::{self, resident_kib};
use testkit::{
    Daemon, Driver, DriverConfig, Layout, NetNs, Serve, VethPair, driver, frame, message, require, soak, wait,
};
use vhost::VhostBackend;
use vhost::vhost_user::message::FrontendReq;
use virtqueue::GuestAddr;
use virtqueue::driver::GuestRam;

const MIB: u64 = 1 << 20;
const PORTS: usize = 4;

fn config() -> DriverConfig {
    DriverConfig {
        regions: vec![(GuestAddr(0), MIB), (GuestAddr(1 << 32), MIB)],
        queue_size: 64,
        ..DriverConfig::default()
    }
}

/// One guest, from its coming to its end.
fn cycle(socket: &Path, ram: &Arc<GuestRam>, way: usize) {
    let config = config();
    let stream = driver::connect(socket);
    let ram = Arc::clone(ram);
    match way % 6 {
        // It connects, and that is all.
        0 => drop(stream),
        // It greets, shares memory twice, and goes.
        1 => {
            let mut guest = Driver::greet(stream, &config, ram).expect("greeted");
            let features = guest.features();
            guest.frontend().set_features(features).expect("offered");
            guest.set_memory().expect("accepted");
            guest.set_memory().expect("accepted");
        }
        // Messages with descriptors that no one asked for.
        2 => stray_descriptors(&stream, &ram),
        // All of it, stopped before the end, or not.
        _ => {
            let mut guest = Driver::start_with(stream, &config, ram).expect("accepted");
            if way % 6 == 3 {
                guest.stop_pair(0).expect("stopped");
            }
            if way % 6 == 4 {
                guest.stop_pair(0).expect("stopped");
                guest.start_pair(0).expect("started");
                repeat_eventfds(&mut guest);
            }
        }
    }
}

/// Kick, call and error descriptors of a vring, again and again.
fn repeat_eventfds(guest: &mut Driver) {
    let event = vmm_sys_util::eventfd::EventFd::new(0).expect("a descriptor");
    for _ in 0..4 {
        guest.frontend().set_vring_call(0, &event).expect("accepted");
        guest.frontend().set_vring_kick(0, &event).expect("accepted");
        guest.frontend().set_vring_err(0, &event).expect("accepted");
    }
}

/// A descriptor with a message that has none: the daemon must close what it did not ask for.
fn stray_descriptors(stream: &UnixStream, ram: &GuestRam) {
    let file = ram.regions().expect("descriptors").remove(0).file;
    message::send(stream, FrontendReq::SET_OWNER, &[], Some(file.as_fd()));
    // The answer is the end, or a word; either is fine.
    let _ = stream.set_read_timeout(Some(wait::SOON));
    let _ = rustix::io::read(stream, &mut [0; 64]);
}

/// `count` guests on each of the ports, at the same time.
fn many(daemon: &Daemon, ports: usize, count: usize, ways: &(dyn Fn(usize) -> usize + Sync)) {
    std::thread::scope(|scope| {
        for port in 0..ports {
            let socket = daemon.path(&format!("port{port}.sock"));
            scope.spawn(move || {
                let ram = Arc::new(GuestRam::new(&config().regions).expect("memory"));
                for number in 0..count {
                    // Each third round on fresh memory, else the rings run out of it.
                    let fresh = || Arc::new(GuestRam::new(&config().regions).expect("memory"));
                    let ram = if ways(number) % 6 > 2 {
                        fresh()
                    } else {
                        Arc::clone(&ram)
                    };
                    cycle(&socket, &ram, ways(number));
                }
            });
        }
    });
}

/// The claim: after `rounds` there is what was there after a first round.
fn assert_nothing_is_left(daemon: &mut Daemon, rounds: impl Fn(&Daemon)) {
    let pid = daemon.process().pid();
    let idle = |daemon: &Daemon| {
        let connected = |port: &serde_json::Value| port["connected"] == true;
        !daemon.status()["ports"]
            .as_array()
            .expect("ports")
            .iter()
            .any(connected)
    };
    assert!(wait::until(wait::SOON, || idle(daemon)));
    // The thread of the status socket may still be closing ours.
    let (before, kib_before) = (holdings::steady(pid, wait::QUIET), resident_kib(pid));
    let begun = Instant::now();
    rounds(daemon);
    assert!(wait::until(wait::SOON, || idle(daemon)));
    daemon.process().check();
    let is_within = wait::until(wait::SOON, || holdings::of(pid).is_within(&before));
    println!(
        "{:.1} s; before {before:?}, {kib_before} KiB; after {:?}, {} KiB",
        begun.elapsed().as_secs_f64(),
        holdings::of(pid),
        resident_kib(pid)
    );
    assert!(is_within, "before {before:?}, after {:?}", holdings::of(pid));
    let grown = resident_kib(pid).saturating_sub(kib_before);
    assert!(grown < 4096, "resident memory has grown by {grown} KiB");
}

#[test]
fn guests_on_the_null_nic_leave_nothing_behind() {
    require!(Root);
    let netns = NetNs::new("leaks");
    // In copy placement each that starts costs the kernel 6 MiB of fresh memory.
    for (placement, count) in [
        (Placement::Copy, soak::count(200, 2000)),
        (Placement::Direct, soak::count(400, 8000)),
    ] {
        let serve = Serve::null().placement(placement);
        let mut daemon = Daemon::start_ports(&netns, &serve, &["queues=1"; PORTS]);
        // What is made once and kept: arenas of the allocator, the log's buffers.
        many(&daemon, PORTS, 24, &|number| number);
        assert_nothing_is_left(&mut daemon, |daemon| {
            many(daemon, PORTS, count / PORTS, &|number| number);
        });
    }
}

#[test]
fn guests_on_an_interface_leave_nothing_behind() {
    require!(Root);
    for placement in [Placement::Copy, Placement::SendDirect, Placement::Direct] {
        let veth = VethPair::with(2, 1500);
        let serve = Serve::interface(VethPair::NIC).placement(placement);
        let mut daemon = Daemon::start_ports(&veth.near, &serve, &["start-queue=0", "start-queue=1"]);
        // Of those that get as far as a socket.
        let ways = |number: usize| 3 + number % 3;
        many(&daemon, 2, 6, &ways);
        assert_nothing_is_left(&mut daemon, |daemon| many(daemon, 2, soak::count(15, 75), &ways));
        // And it still does what it is for.
        let wire = testkit::PacketPort::open(&veth.far, VethPair::WIRE);
        let mut guest = Driver::connect(&daemon.path("port0.sock"), &config()).expect("accepted");
        let sent = frame::plain(100, 7);
        guest.pairs[0].send(&sent, Layout::Whole);
        frame::assert_same(&wire.receive(wait::SOON).expect("it arrives"), &sent);
    }
}
