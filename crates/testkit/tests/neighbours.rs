//! Two guests in one process, on one worker, one of them hostile: the other loses no frame, and gets its turn however long that goes on.
//!
//! The hostile guest goes on until a number of frames of the other one have arrived each way; so many are under way at most that
//! none is lost because somebody was not scheduled.
//! What it loses of its throughput is measured by the test at the end, which is left out unless asked for, because a
//! shared machine makes times of it that mean nothing. It compares, interleaved, with the guest alone, and with the
//! guest beside a thread that only burns CPU time: the hostile guest is a thread of this process and takes time of
//! the honest one's where there are few CPUs, which is not the daemon's doing. With a release build of the daemon:
//!
//! ```sh
//! VHOST_AF_XDP_BIN=target/release/vhost-af-xdp cargo test --release -p testkit --test neighbours -- --ignored --nocapture
//! ```

use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::pair::Ring;
use testkit::traffic::Flow;
use testkit::{
    Daemon, Driver, DriverConfig, Layout, PacketPort, Serve, Traffic, VethPair, driver, frame, require, wait,
};
use virtqueue::GuestAddr;
use virtqueue::layout::Descriptor;

const MIB: u64 = 1 << 20;
/// A frame each way.
const PACE: Duration = Duration::from_millis(1);
/// Frames that arrive each way while the other guest is hostile.
const FRAMES: usize = 1000;
/// Frames to the guest that may be under way: fewer than it has buffers.
const WINDOW: usize = 64;

/// Does wrong until it is told to stop.
type Hostility = fn(&Path, &AtomicBool);

fn config() -> DriverConfig {
    DriverConfig {
        regions: vec![(GuestAddr(0), 4 * MIB)],
        queue_size: 64,
        ..DriverConfig::default()
    }
}

fn until(stop: &AtomicBool, mut act: impl FnMut()) {
    while !stop.load(Ordering::Relaxed) {
        act();
    }
}

fn bad(ring: &Ring, desc: Descriptor) {
    let split = ring.driver.split();
    split.write_descriptor(0, desc);
    split.set_avail_entry(split.avail_idx(), 0);
    split.set_avail_idx(split.avail_idx().wrapping_add(1));
    ring.kick();
}

fn lies_and_comes_back(socket: &Path, stop: &AtomicBool) {
    until(stop, || {
        let guest = Driver::connect(socket, &config()).expect("it may come back");
        let desc = |addr, len, flags| Descriptor {
            addr,
            len,
            flags,
            next: 0,
        };
        bad(&guest.pairs[0].from_guest, desc(1 << 40, 100, 0));
        assert!(guest.await_close(wait::SOON), "the lie was believed");
        // Who came once without a lie is met without a pause the next time.
        drop(driver::connect(socket));
    });
}

fn comes_and_goes(socket: &Path, stop: &AtomicBool) {
    until(stop, || {
        drop(Driver::connect(socket, &config()).expect("accepted"));
    });
}

fn kicks_for_nothing(socket: &Path, stop: &AtomicBool) {
    let guest = Driver::connect(socket, &config()).expect("accepted");
    until(stop, || {
        guest.pairs[0].from_guest.kick();
        guest.pairs[0].to_guest.kick();
    });
}

fn fills_rings_with_garbage(socket: &Path, stop: &AtomicBool) {
    let mut noise = 0x9e37_79b9_7f4a_7c15u64;
    until(stop, || {
        let guest = Driver::connect(socket, &config()).expect("accepted");
        let ring = &guest.pairs[0].from_guest;
        while !stop.load(Ordering::Relaxed) && !guest.await_close(Duration::ZERO) {
            noise ^= noise << 13;
            noise ^= noise >> 7;
            noise ^= noise << 17;
            // Rings are at the beginning of memory.
            let at = GuestAddr(noise % (64 << 10));
            guest.ram().write(at, &noise.to_le_bytes());
            ring.kick();
        }
    });
}

fn takes_no_calls(socket: &Path, stop: &AtomicBool) {
    let mut guest = Driver::connect(socket, &config()).expect("accepted");
    let pair = &mut guest.pairs[0];
    pair.from_guest.fill_call();
    until(stop, || {
        pair.send(&frame::plain(60, 1), Layout::Whole);
        while pair.from_guest.driver.in_flight() > 0 && !stop.load(Ordering::Relaxed) {
            pair.reap_sent();
            pair.from_guest.driver.enable_calls();
        }
        std::thread::sleep(PACE);
    });
}

fn changes_its_memory(socket: &Path, stop: &AtomicBool) {
    let mut guest = Driver::connect(socket, &config()).expect("accepted");
    until(stop, || guest.set_memory().expect("accepted"));
}

/// The honest guest on port 0 and queue 0, the other's socket on port 1, one worker for both.
struct Scene {
    honest: Driver,
    wire: PacketPort,
    daemon: Daemon,
    _veth: VethPair,
}

fn scene(placement: Placement) -> Scene {
    let veth = VethPair::with(2, 1500);
    // All that the far end sends goes to queue 0.
    veth.far.run("ethtool", &["-L", VethPair::WIRE, "tx", "1"]);
    let serve = Serve::interface(VethPair::NIC)
        .placement(placement)
        .with("--workers", "1");
    let daemon = Daemon::start_ports(&veth.near, &serve, &["start-queue=0", "start-queue=1"]);
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let honest = Driver::connect(&daemon.path("port0.sock"), &DriverConfig::default()).expect("accepted");
    Scene {
        honest,
        wire,
        daemon,
        _veth: veth,
    }
}

#[rstest]
#[case::that_lies_and_comes_back(lies_and_comes_back)]
#[case::that_comes_and_goes(comes_and_goes)]
#[case::that_kicks_for_nothing(kicks_for_nothing)]
#[case::that_fills_rings_with_garbage(fills_rings_with_garbage)]
#[case::that_takes_no_calls(takes_no_calls)]
#[case::that_changes_its_memory(changes_its_memory)]
fn guest_loses_no_frame_beside_one(
    #[case] hostility: Hostility,
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut scene = scene(placement);
    await_to_guest(&mut scene);
    let traffic = Traffic::start_within(scene.honest, scene.wire, PACE, WINDOW);
    let arrived = || traffic.flows().map(|flow| flow.arrived.len());
    let stop = AtomicBool::new(false);
    let socket = scene.daemon.path("port1.sock");
    let gets_its_turn = std::thread::scope(|scope| {
        let hostile = scope.spawn(|| hostility(&socket, &stop));
        let patience = 4 * wait::SOON;
        let gets_its_turn = wait::until(patience, || arrived().iter().all(|&count| count >= FRAMES));
        stop.store(true, Ordering::Relaxed);
        hostile.join().expect("the hostile guest did what it was to do");
        gets_its_turn
    });
    assert!(
        gets_its_turn,
        "only {:?} frames arrived beside it: {:#}",
        arrived(),
        scene.daemon.status()
    );
    scene.daemon.process().check();
    // What was under way arrives.
    let stopped = traffic.flows().map(|flow| flow.sent.len());
    let lost = || {
        let missing = |(flow, stopped): (&Flow, usize)| -> Vec<usize> {
            let arrived: HashSet<_> = flow.arrived.iter().map(|&(number, _)| number as usize).collect();
            (0..stopped).filter(|number| !arrived.contains(number)).collect()
        };
        traffic
            .flows()
            .iter()
            .zip(stopped)
            .map(missing)
            .collect::<Vec<_>>()
    };
    let none_lost = wait::until(wait::SOON, || lost().iter().all(Vec::is_empty));
    assert!(none_lost, "of {stopped:?} frames these are lost: {:?}", lost());
    for flow in traffic.flows() {
        assert_eq!(flow.repeated(), [0; 0], "frames came twice");
    }
    let port = scene.daemon.port(0);
    assert_eq!(
        (&port["sessions"], &port["last_closed"]),
        (&1.into(), &serde_json::Value::Null)
    );
}

/// Gives the honest guest buffers, and returns when frames arrive in them.
fn await_to_guest(scene: &mut Scene) {
    let pair = &mut scene.honest.pairs[0];
    pair.post(128, &[2048]);
    let arrives = wait::until(wait::SOON, || {
        let _ = scene.wire.try_send(&frame::plain(60, 1));
        pair.receive(wait::QUIET).is_some()
    });
    assert!(arrives, "{:#}", scene.daemon.status());
}

/// Frames a second that the guest gets out within `time`.
fn rate(scene: &mut Scene, time: Duration) -> f64 {
    let sent = frame::plain(64, 1);
    let batch = vec![&sent[..]; 64];
    let counted = |scene: &Scene| {
        let lanes = scene.daemon.port(0)["lanes"][0]["counters"].clone();
        let counters = lanes.as_array().expect("counters").iter();
        let value = counters
            .filter(|counter| counter["name"] == "from_guest_frames")
            .map(|counter| counter["value"].as_u64());
        value.flatten().sum::<u64>()
    };
    let (before, begun) = (counted(scene), Instant::now());
    while begun.elapsed() < time {
        scene.honest.pairs[0].send_batch(&batch, Layout::Whole);
    }
    (counted(scene) - before) as f64 / begun.elapsed().as_secs_f64()
}

#[rstest]
#[ignore = "a measurement: see the file's head"]
fn throughput_beside_a_hostile_guest(#[values(Placement::Copy, Placement::Direct)] placement: Placement) {
    require!(Root);
    const ROUNDS: usize = 7;
    let time = Duration::from_millis(500);
    let kinds: [(&str, Hostility); 6] = [
        ("lies and comes back", lies_and_comes_back),
        ("comes and goes", comes_and_goes),
        ("kicks for nothing", kicks_for_nothing),
        ("fills rings with garbage", fills_rings_with_garbage),
        ("takes no calls", takes_no_calls),
        ("changes its memory", changes_its_memory),
    ];
    for (name, hostility) in kinds {
        let mut scene = scene(placement);
        let socket = scene.daemon.path("port1.sock");
        let mut ratios = [Vec::new(), Vec::new()];
        rate(&mut scene, time);
        for _ in 0..ROUNDS {
            let alone = rate(&mut scene, time);
            let busy = rate_beside(&mut scene, time, |stop| until(stop, std::hint::spin_loop));
            let beside = rate_beside(&mut scene, time, |stop| hostility(&socket, stop));
            ratios[0].push(beside / alone);
            ratios[1].push(beside / busy);
        }
        let [alone, busy] = ratios.map(|mut ratios| {
            ratios.sort_by(f64::total_cmp);
            ratios[ROUNDS / 2]
        });
        println!(
            "{placement:?}, a neighbour that {name}: {alone:.2} of the throughput alone, {busy:.2} of that beside a busy thread"
        );
    }
}

/// As [`rate`], while something else runs.
fn rate_beside(scene: &mut Scene, time: Duration, other: impl FnOnce(&AtomicBool) + Send) -> f64 {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| other(&stop));
        let rate = rate(scene, time);
        stop.store(true, Ordering::Relaxed);
        rate
    })
}
