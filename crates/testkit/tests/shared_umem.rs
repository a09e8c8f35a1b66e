//! One UMEM for all queues that copy (`--shared-umem`): it is registered once, each pair has its slice, and sockets
//! come and go while the others carry frames.

use std::collections::BTreeSet;
use std::ops::Range;
use std::process::Command;
use std::time::Duration;

use rstest::rstest;
use rustix::process::Signal;
use testkit::daemon::{Mode, Placement, private_dir};
use testkit::driver::F_RING_PACKED;
use testkit::holdings::xdp_sockets;
use testkit::{
    Bystander, Daemon, Driver, DriverConfig, Layout, Lessor, PacketPort, Rig, Serve, Traffic, VethPair,
    assert_soon, frame, require, skip_half, wait,
};

/// The other interface, and its far end.
const NIC1: &str = "nic1";
const WIRE1: &str = "wire1";
/// Bytes for each of two pairs.
const SLICE: u64 = 512 << 10;
/// Flows, whose hashes bring some to each pair.
const FLOWS: u16 = 64;
/// Frames that the NIC gets at a time. A queue has 77 of its slice's 128 chunks to receive into, and a frame of 9,014
/// bytes takes 3: all fit, also if they come to one queue, and the worker does not run meanwhile.
const AT_ONCE: u16 = 16;

fn serve(bytes: &str) -> Serve {
    Serve::interface(VethPair::NIC)
        .flag("--shared-umem")
        .with("--packet-memory", bytes)
}

fn pairs(pairs: usize, ring: u64) -> DriverConfig {
    DriverConfig {
        pairs,
        ..DriverConfig::with(ring)
    }
}

/// A frame of each length arrives from each pair, and frames of many flows in all of them, as they were sent.
fn assert_byte_exact(rig: &mut Rig, longest: usize) {
    for len in [60, 1024, 1025, 1514, longest] {
        for pair in 0..rig.driver.pairs.len() {
            let sent = frame::plain(len, pair as u8);
            rig.driver.pairs[pair].send(&sent, Layout::Whole);
            frame::assert_same(&rig.wire.receive(wait::SOON).expect("it arrives"), &sent);
        }
        for first in (0..FLOWS).step_by(usize::from(AT_ONCE)) {
            assert_flows_arrive(rig, len, first..first + AT_ONCE);
        }
    }
}

/// Frames of these flows arrive, whichever pairs their hashes bring them to.
fn assert_flows_arrive(rig: &mut Rig, len: usize, flows: Range<u16>) {
    let flow = |number: u16| frame::udp(number, len);
    flows.clone().for_each(|number| rig.wire.send(&flow(number)));
    let mut arrived = BTreeSet::new();
    let all = wait::until(wait::SOON, || {
        for pair in &mut rig.driver.pairs {
            while let Some(got) = pair.receive(Duration::ZERO) {
                // The kernel's own frames are ignored.
                let number = u16::from_be_bytes([got.frame[34], got.frame[35]]);
                if got.frame.len() == len && flows.contains(&number) {
                    frame::assert_same(&got.frame, &flow(number));
                    assert!(arrived.insert(number), "flow {number} came twice");
                }
            }
        }
        arrived.len() == flows.len()
    });
    assert!(all, "{len} bytes: {arrived:?}\n{:#}", rig.daemon.port(0));
}

#[rstest]
fn pairs_of_a_port_share_and_every_frame_is_byte_exact(
    #[values(1500, 9000)] mtu: u32,
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
    #[values(0, F_RING_PACKED)] ring: u64,
) {
    skip_half!(mtu == 9000, mode, ring);
    require!(Root);
    const PAIRS: usize = 4;
    let veth = VethPair::with(PAIRS as u32, mtu);
    let serve = serve("2MiB").mode(mode).with("--queues", PAIRS.to_string());
    let mut rig = Rig::with(veth, &serve, &pairs(PAIRS, ring));
    for pair in &mut rig.driver.pairs {
        pair.post(128, &[12_000]);
    }
    rig.daemon.await_port(0, "all run", |port| {
        let lanes = port["lanes"].as_array().expect("lanes");
        lanes.iter().all(|lane| lane["running"] == true)
    });
    assert_byte_exact(&mut rig, mtu as usize + 14);
    let port = rig.daemon.port(0);
    for lane in port["lanes"].as_array().expect("lanes") {
        assert_eq!(lane["umem_sockets"], PAIRS, "{port:#}");
        assert_eq!(lane["packet_bytes"], SLICE);
        // Of all chunks of all, for each.
        assert_eq!(lane["kernel_bytes"], 136 * PAIRS as u64 * SLICE / 4096);
        let counters = lane["counters"].as_array().expect("counters");
        let strays = counters.iter().filter(|counter| {
            [
                "to_guest_stray",
                "from_guest_strays",
                "rx_invalid_descs",
                "tx_invalid_descs",
            ]
            .contains(&counter["name"].as_str().expect("a name"))
        });
        assert!(strays.clone().all(|counter| counter["value"] == 0), "{port:#}");
    }
    let mut shown = Command::new(testkit::daemon::binary());
    shown
        .args(["status", "--all", "--control"])
        .arg(rig.daemon.path("control"));
    let shown = String::from_utf8(shown.output().expect("it runs").stdout).expect("text");
    assert!(shown.contains("umem_sockets: 4\n"), "{shown}");
}

/// What four queues may have together is what they share, and what the kernel has for each, and not four times that.
#[test]
fn memory_is_locked_once() {
    require!(Root);
    let veth = VethPair::with(4, 1500);
    let dir = private_dir();
    let mut lessor = Lessor::start(&veth.near, &dir, &[VethPair::NIC]);
    // The kernel counts up to twice as much (docs/privileges.md).
    let policy = format!(
        "[limits]\nunbound-sockets = true\n[[allow]]\nuser = 65534\ninterface = \"{}\"\nqueues = \"all\"\n\
         memlock = \"8 MiB\"\n",
        VethPair::NIC
    );
    lessor.change_policy(&policy);
    lessor.steward.signal(Signal::INT);
    lessor.steward.wait(wait::SOON);
    lessor.restart(&veth.near, &dir);
    let serve = serve("6MiB").leased().with("--queues", "4");
    let mut daemon = Daemon::spawn_with(&veth.near, dir, Some(lessor), &serve);
    daemon.await_sockets(&[daemon.socket()]);
    let mut rig = Rig::around(veth, daemon, &pairs(4, 0));
    for pair in 0..4 {
        let sent = frame::plain(1514, pair);
        rig.driver.pairs[usize::from(pair)].send(&sent, Layout::Whole);
        frame::assert_same(&rig.wire.receive(wait::SOON).expect("it arrives"), &sent);
    }
    assert_eq!(rig.daemon.port(0)["lanes"][0]["umem_sockets"], 4);
}

/// Two guests on two interfaces; frames of the one on nic0 pass all the time.
struct TwoInterfaces {
    traffic: Traffic,
    other: Driver,
    other_port: usize,
    daemon: Daemon,
    veth: VethPair,
}

/// Of its two queues all frames come to the first.
fn join_other(veth: &VethPair) {
    veth.join_as(NIC1, WIRE1, 2, 1500);
    veth.far.run("ethtool", &["-L", WIRE1, "tx", "1"]);
}

impl TwoInterfaces {
    /// `first`: the other one's socket registers the memory.
    fn new(first: bool) -> Self {
        let veth = VethPair::new();
        join_other(&veth);
        let other = format!("ifname={NIC1}");
        let ports = match first {
            true => [&other, "start-queue=0"],
            false => ["start-queue=0", &other],
        };
        let (other_port, port) = if first { (0, 1) } else { (1, 0) };
        let daemon = Daemon::start_ports(&veth.near, &serve("1MiB").with("--workers", "1"), &ports);
        let guest = |port: usize| {
            let socket = daemon.path(&format!("port{port}.sock"));
            Driver::connect(&socket, &DriverConfig::default()).expect("accepted")
        };
        let (mut honest, other) = (guest(port), guest(other_port));
        honest.pairs[0].post(250, &[2048]);
        let wire = PacketPort::open(&veth.far, VethPair::WIRE);
        let pace = Duration::from_millis(2);
        let traffic = Traffic::start_within(honest, wire, pace, 128);
        let two = Self {
            traffic,
            other,
            other_port,
            daemon,
            veth,
        };
        two.await_frames(20);
        two
    }

    fn await_frames(&self, count: usize) {
        let arrived = || self.traffic.flows().map(|flow| flow.arrived.len());
        let begun = arrived();
        let passed = || arrived().iter().zip(begun).all(|(now, then)| now - then >= count);
        assert!(wait::until(6 * wait::SOON, passed), "{:#}", self.daemon.status());
    }

    /// Frames of the other guest pass both ways, perhaps after a while.
    #[track_caller]
    fn await_other(&mut self, seed: u8) {
        let wire = PacketPort::open(&self.veth.far, WIRE1);
        self.other.pairs[0].post(16, &[2048]);
        let (out, back) = (frame::plain(1500, seed), frame::plain(1400, seed));
        let limit = Duration::from_millis(200);
        let passes = wait::until(wait::SOON, || {
            self.other.pairs[0].send(&out, Layout::Whole);
            wire.receive(limit).is_some_and(|got| got == out)
        });
        assert!(passes, "from the guest: {:#}", self.daemon.status());
        let passes = wait::until(wait::SOON, || {
            let _ = wire.try_send(&back);
            let pair = &mut self.other.pairs[0];
            std::iter::from_fn(|| pair.receive(limit)).any(|got| got.frame == back)
        });
        assert!(passes, "to the guest: {:#}", self.daemon.status());
    }

    #[track_caller]
    fn assert_shared_by_two(&self) {
        for port in [0, 1] {
            self.daemon.await_port(port, "both share", |port| {
                port["lanes"][0]["umem_sockets"] == 2 && port["impaired"].is_null()
            });
        }
    }
}

#[rstest]
fn interface_of_one_pair_goes_and_comes_while_the_other_carries_traffic_without_loss(
    #[values(false, true)] registered_first: bool,
) {
    require!(Root);
    let mut two = TwoInterfaces::new(registered_first);
    two.assert_shared_by_two();
    two.await_other(1);
    let ip = |two: &TwoInterfaces, args: &[&str]| two.veth.near.ip(args);
    for round in 0..3 {
        ip(&two, &["link", "set", NIC1, "down"]);
        two.await_frames(20);
        ip(&two, &["link", "set", NIC1, "up"]);
        two.await_other(10 + round);
        // Longer frames than a chunk holds: the sockets stay.
        ip(
            &two,
            &[
                "link",
                "set",
                NIC1,
                "mtu",
                if round == 1 { "9000" } else { "1500" },
            ],
        );
        two.await_other(20 + round);
        two.assert_shared_by_two();
        two.veth.near.run("ethtool", &["-L", NIC1, "rx", "1", "tx", "1"]);
        two.await_other(30 + round);
        two.veth.near.run("ethtool", &["-L", NIC1, "rx", "2", "tx", "2"]);
        // The socket is gone for good, and another one takes the slice.
        ip(&two, &["link", "delete", NIC1]);
        two.daemon
            .await_impaired(two.other_port, "interface nic1 is gone, trying nic1 again");
        two.await_frames(20);
        join_other(&two.veth);
        two.daemon.await_recovered(two.other_port);
        two.await_other(40 + round);
        two.assert_shared_by_two();
    }
    let TwoInterfaces { traffic, .. } = two;
    let stopped = traffic.flows().map(|flow| flow.sent.len());
    let lost = || {
        let flows = traffic.flows();
        [0, 1].map(|at| {
            let arrived: BTreeSet<_> = flows[at]
                .arrived
                .iter()
                .map(|&(number, _)| number as usize)
                .collect();
            (0..stopped[at])
                .filter(|number| !arrived.contains(number))
                .count()
        })
    };
    assert_soon!(lost() == [0, 0], "{:?} of {stopped:?}", lost());
    assert!(traffic.flows().iter().all(|flow| flow.repeated().is_empty()));
}

/// A guest's burst fills its own slice, and takes nothing from its neighbour's.
#[test]
fn guest_that_comes_and_goes_takes_no_memory_from_its_neighbour() {
    require!(Root);
    let bystander = Bystander::with(Placement::Copy, 1, |serve| {
        serve.flag("--shared-umem").with("--packet-memory", "1MiB")
    });
    let wire = bystander.hostile_wire();
    for _ in 0..5 {
        let mut guest = Driver::connect(&bystander.socket(1), &DriverConfig::default()).expect("accepted");
        for number in 0..400 {
            let _ = wire.try_send(&frame::numbered(number));
        }
        let last = frame::last();
        guest.pairs[0].send(&last, Layout::Whole);
        let _ = wire.receive_before(&last);
        bystander.await_frames(20);
    }
    drop(wire);
    bystander.assert_unharmed();
}

/// The next steward knows none of the sockets: a queue that is opened again registers the memory once more, beside
/// those that go on, and is not refused.
#[test]
fn queue_is_opened_again_after_a_restart_of_the_steward_while_the_other_goes_on() {
    require!(Root);
    let mut two = TwoInterfaces::new(true);
    for round in 0..2 {
        let before = xdp_sockets(two.daemon.process().pid());
        assert_eq!(before.len(), 2);
        if let Some(lessor) = &mut two.daemon.lessor {
            lessor.steward.signal(Signal::KILL);
            lessor.steward.wait(wait::SOON);
        }
        two.daemon.restart_lessor(&two.veth.near);
        for port in [0, 1] {
            // Another note may stay: nic1 has a queue that no pair is on.
            two.daemon.await_port(port, "back", |port| {
                !port["steering_note"]
                    .as_str()
                    .is_some_and(|note| note.contains("away"))
            });
        }
        assert_eq!(xdp_sockets(two.daemon.process().pid()), before, "they go on");
        two.veth.near.ip(&["link", "delete", NIC1]);
        two.daemon.await_impaired(two.other_port, "is gone");
        join_other(&two.veth);
        two.daemon.await_recovered(two.other_port);
        two.await_other(round);
        let sockets = xdp_sockets(two.daemon.process().pid());
        assert_eq!(sockets.intersection(&before).count(), 1, "one of them");
    }
    // What comes next shares again.
    two.veth.near.ip(&["link", "delete", VethPair::NIC]);
    two.daemon.await_impaired(1 - two.other_port, "is gone");
    two.veth.join(1, 1500);
    two.daemon.await_recovered(1 - two.other_port);
    two.assert_shared_by_two();
}

/// The daemon's own steward, too, and other placements beside it: those have memory of their own.
#[test]
fn ports_of_other_placements_keep_memory_of_their_own() {
    require!(Root);
    let veth = VethPair::with(3, 1500);
    let ports = ["start-queue=0", "start-queue=1", "start-queue=2,memory=direct"];
    let daemon = Daemon::start_ports(&veth.near, &serve("1MiB").by_root(), &ports);
    let mut guests: Vec<_> = (0..3)
        .map(|port| {
            let socket = daemon.path(&format!("port{port}.sock"));
            Driver::connect(&socket, &DriverConfig::default()).expect("accepted")
        })
        .collect();
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    for (port, guest) in guests.iter_mut().enumerate() {
        let sent = frame::plain(200, 7);
        guest.pairs[0].send(&sent, Layout::Whole);
        frame::assert_same(&wire.receive(wait::SOON).expect("it arrives"), &sent);
        let shared = daemon.port(port)["lanes"][0]["umem_sockets"].clone();
        match port {
            2 => assert!(shared.is_null(), "{shared}"),
            _ => assert_eq!(shared, 2),
        }
    }
}
