//! Taps to the wire, for leases in tap mode: who gets one, of how many queues, and what it carries.

use crate::common;
use crate::policy::reread;

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use common::raw::{Raw, as_user};
use common::{World, bare, change, filtered, lessee, lessee_may, refusal, take, wanted};
use rustix::process::Signal;
use steer::{ModeRequest, mac_bytes};
use steward_client::{Lease, LeaseError};
use steward_protocol::{Answer, Reason, Request, Wanted};
use testkit::foreign::{Side, detach_all};
use testkit::{VethPair, assert_soon, frame, require, wait};

const OURS: [u8; 6] = [2, 0, 0, 0, 0, 0xaa];
/// Flows that are sent, of which each queue is to get some.
const FLOWS: u16 = 64;

/// What root may lease, unless a test says otherwise.
const POLICY: &str = "[[allow]]\nuser = 0\ninterface = \"nic0\"\nqueues = \"all\"\nnetwork = true\n";

/// Lessees and root may have networks.
fn policy() -> String {
    lessee_may(VethPair::NIC, "0") + "network = true\n" + POLICY
}

/// In tap mode, with so many queues.
fn network(queues: u32) -> Wanted {
    common::network(0, queues).in_mode(ModeRequest::Tap)
}

fn to(mac: [u8; 6], mut frame: Vec<u8>) -> Vec<u8> {
    frame[..6].copy_from_slice(&mac);
    frame
}

/// A lease of a network with a station.
fn network_of_ours(world: &World, queues: u32) -> Lease {
    network_at(&world.socket(), queues)
}

fn network_at(steward: &Path, queues: u32) -> Lease {
    let lease = take(steward, &network(queues)).expect("allowed");
    lease.set_stations(&[change(0, OURS, Some(1))]).expect("allowed");
    lease
}

#[track_caller]
fn only(taps: Vec<OwnedFd>) -> File {
    let [tap] = <[OwnedFd; 1]>::try_from(taps).expect("one queue");
    File::from(tap)
}

/// Network with a tap of two queues.
struct TwoQueues {
    lease: Lease,
    name: String,
    index: u32,
    taps: Vec<File>,
}

impl TwoQueues {
    fn new(world: &World) -> Self {
        let lease = network_of_ours(world, 2);
        let (end, taps) = lease.uplink(0, 2).expect("allowed");
        assert_eq!(taps.len(), 2);
        Self {
            lease,
            name: end.interface,
            index: end.index,
            taps: taps.into_iter().map(File::from).collect(),
        }
    }

    /// Sends a frame of each flow from the wire: which flows come by each queue. All come, each once.
    fn flows(&mut self, world: &World) -> Vec<Vec<u16>> {
        for flow in 0..FLOWS {
            world.wire.send(&to(OURS, frame::udp(flow, 100)));
        }
        let mut flows = vec![Vec::new(); self.taps.len()];
        let have_come = wait::until(wait::SOON, || {
            for (tap, flows) in self.taps.iter_mut().zip(&mut flows) {
                let mut buffer = [0; 4096];
                while let Ok(bytes) = tap.read(&mut buffer) {
                    let got = &buffer[12..bytes];
                    let is_flow = |&flow: &u16| got == to(OURS, frame::udp(flow, 100));
                    flows.extend((0..FLOWS).find(is_flow));
                }
            }
            flows.iter().map(Vec::len).sum::<usize>() == usize::from(FLOWS)
        });
        assert!(have_come, "{flows:?}");
        flows.iter_mut().for_each(|flows| flows.sort_unstable());
        let mut all = flows.concat();
        all.sort_unstable();
        assert_eq!(all, (0..FLOWS).collect::<Vec<_>>());
        flows
    }

    #[track_caller]
    fn assert_spreads(&mut self, world: &World) {
        let flows = self.flows(world);
        assert!(flows.iter().all(|flows| !flows.is_empty()), "{flows:?}");
    }

    #[track_caller]
    fn assert_sends_by_each(&self, world: &World) {
        for (seed, mut tap) in (0..).zip(&self.taps) {
            let out = to([2, 0, 0, 0, 9, 9], frame::plain(200, seed));
            tap.write_all(&[&[0; 12], &out[..]].concat()).expect("it is up");
            assert_eq!(world.wire.receive(wait::SOON), Some(out));
        }
    }

    /// Frames come again.
    #[track_caller]
    fn await_frames(&mut self, world: &World) {
        let comes = || {
            world.wire.send(&to(OURS, frame::last()));
            self.taps.iter_mut().any(|tap| tap.read(&mut [0; 4096]).is_ok())
        };
        world.await_that(comes);
        std::thread::sleep(wait::QUIET);
        for tap in &mut self.taps {
            while tap.read(&mut [0; 4096]).is_ok() {}
        }
    }

    fn is_back(&self) -> bool {
        self.lease.take_changes().is_ok() && !self.lease.is_away()
    }
}

fn shown(world: &World, name: &str) -> String {
    world
        .veth
        .near
        .output_of("ip", &["-d", "-o", "link", "show", name])
}

fn links(world: &World) -> String {
    world.veth.near.output_of("ip", &["-o", "link"])
}

#[track_caller]
fn assert_no_tap(world: &World) {
    assert_soon!(!links(world).contains("vaxu"), "{}", links(world));
}

#[test]
fn tap_of_two_queues_spreads_flows_and_sends_by_each() {
    require!(Root);
    let world = World::with(2, &policy());
    let mut network = TwoQueues::new(&world);
    assert!(shown(&world, &network.name).contains(" numqueues 2 "));
    let flows = network.flows(&world);
    assert!(flows.iter().all(|flows| !flows.is_empty()), "{flows:?}");
    assert_eq!(network.flows(&world), flows, "a flow keeps its queue");
    network.assert_sends_by_each(&world);
    let (end, taps) = network.lease.uplink(network.index, 2).expect("the same");
    assert_eq!((end.index, taps.len()), (network.index, 0));
    // In its place comes one of as many queues as are asked for.
    let (end, tap) = network.lease.uplink(0, 1).expect("another");
    let _tap = only(tap);
    assert_ne!(end.index, network.index);
    assert!(!shown(&world, &end.interface).contains(" numqueues 2 "));
    assert!((&network.taps[0]).read(&mut [0; 64]).is_err(), "gone");
}

#[test]
fn tap_has_no_more_queues_than_the_lease() {
    require!(Root);
    let world = World::with(2, &policy());
    let lease = network_of_ours(&world, 1);
    let refused = refusal(lease.uplink(0, 2));
    assert_eq!(refused.reason, Reason::Lease, "{refused}");
    let _tap = only(lease.uplink(0, 1).expect("allowed").1);
}

/// Attaches descriptors of /dev/net/tun to the device of that name, as another user, whenever it can, until the end.
fn intrude(world: &World, name: &str, end: &AtomicBool) {
    world.veth.near.enter(|| {
        let open = || File::options().read(true).write(true).open("/dev/net/tun");
        let tuns: Vec<File> = (0..50).map(|_| open().expect("root may open it")).collect();
        as_user(4321, 4321, || {
            let (mut attached, begun) = (0, Instant::now());
            // A test that fails does not say that it ends.
            while !end.load(Relaxed) && attached < tuns.len() && begun.elapsed() < wait::SOON {
                attached += usize::from(lessee::attach_tun(&tuns[attached], name).is_ok());
            }
        });
    });
}

/// Which queues a device has is the steward's matter: who can open /dev/net/tun gets no frames of it, also if it was
/// there before the device had an owner.
#[test]
fn other_users_attach_no_queue() {
    require!(Root);
    let world = World::with(2, &policy());
    let mut network = TwoQueues::new(&world);
    let attached = world.veth.near.enter(|| {
        let tun = File::options().read(true).write(true).open("/dev/net/tun");
        let tun = tun.expect("root may open it");
        as_user(4321, 4321, || lessee::attach_tun(&tun, &network.name))
    });
    assert_eq!(
        attached.map_err(|error| error.kind()),
        Err(ErrorKind::PermissionDenied)
    );
    network.assert_spreads(&world);
    let (name, end) = (network.name.clone(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| intrude(&world, &name, &end));
        for _ in 0..6 {
            if let Ok((end, taps)) = network.lease.uplink(0, 2) {
                network.index = end.index;
                network.taps = taps.into_iter().map(File::from).collect();
                network.assert_spreads(&world);
            }
        }
        end.store(true, Relaxed);
    });
    assert_soon!(network.lease.uplink(0, 2).is_ok());
}

#[test]
fn lessee_that_detaches_queues_loses_frames_of_its_own_only_and_keeps_nothing() {
    require!(Root);
    let world = World::with(2, &policy());
    let mut network = TwoQueues::new(&world);
    lessee::detach_queue(&network.taps[1], true).expect("its own");
    let flows = network.flows(&world);
    assert_eq!(flows[1], [0; 0], "all come by the other");
    lessee::detach_queue(&network.taps[0], true).expect("its own");
    world.wire.send(&to(OURS, frame::udp(0, 100)));
    world.wire.send(&to([0xff; 6], frame::udp(0, 100)));
    for tap in &network.taps {
        lessee::detach_queue(tap, false).expect("its own");
    }
    network.assert_spreads(&world);
    // TUNSETPERSIST, and an owner who may attach further ones.
    lessee::tun_ioctl(&network.taps[0], 203, 1).expect("its own");
    lessee::tun_ioctl(&network.taps[0], 204, 4321).expect("its own");
    let closed = network.taps.pop();
    drop(closed);
    assert_eq!(network.flows(&world)[0].len(), usize::from(FLOWS));
    lessee::detach_queue(&network.taps[0], true).expect("its own");
    let TwoQueues { lease, taps, .. } = network;
    drop(lease);
    assert_no_tap(&world);
    assert!((&taps[0]).read(&mut [0; 64]).is_err(), "gone");
    assert!(lessee::detach_queue(&taps[0], false).is_err(), "gone");
}

#[test]
fn tap_of_two_queues_goes_on_without_a_steward_and_with_the_next_one() {
    require!(Root);
    let mut world = World::kept_lingering(&policy(), "1");
    let mut network = TwoQueues::new(&world);
    for (signal, mtu) in [(Signal::TERM, "1400"), (Signal::KILL, "1000")] {
        world.end_steward(signal);
        network.assert_spreads(&world);
        world.restart();
        world.await_that(|| network.is_back());
        let (end, taps) = network.lease.uplink(network.index, 2).expect("the same");
        assert_eq!((end.index, taps.len()), (network.index, 0));
        network.assert_spreads(&world);
        world.veth.near.ip(&["link", "set", VethPair::NIC, "mtu", mtu]);
        world.await_that(|| shown(&world, &network.name).contains(&format!("mtu {mtu} ")));
        network.assert_spreads(&world);
    }
    drop(network);
    assert_no_tap(&world);
}

/// Only a network's lease in tap mode gets a tap to the wire, which ends with the lease, even if its descriptor is kept
/// open.
#[test]
fn way_to_the_wire_is_for_leases_in_tap_mode_and_ends_with_them() {
    require!(Root);
    let world = World::with(2, &policy());
    let mut raw = Raw::connect(&world.socket());
    assert!(matches!(
        raw.ask(&Request::Uplink { has: 0, queues: 1 }),
        Answer::Refused(_)
    ));
    let plain = take(&world.socket(), &wanted(0, 1)).expect("allowed");
    assert_eq!(refusal(plain.uplink(0, 1)).reason, Reason::Program);
    drop(plain);
    world.await_nothing();
    let native = take(&world.socket(), &common::network(0, 1)).expect("allowed");
    for has in [0, 1, 2, u32::MAX] {
        assert_eq!(refusal(native.uplink(has, 1)).reason, Reason::Program);
    }
    let links = || world.veth.near.output_of("ip", &["-o", "link"]);
    assert!(!links().contains("vaxu"), "{}", links());
    drop(native);
    world.await_nothing();
    let lease = network_of_ours(&world, 1);
    let (end, tap) = lease.uplink(0, 1).expect("allowed");
    let mut tap = only(tap);
    assert!(lease.uplink(end.index, 1).expect("the same").1.is_empty());
    let out = [&[0; 12][..], &to([2, 0, 0, 0, 9, 9], frame::plain(200, 7))].concat();
    tap.write_all(&out).expect("it is up");
    assert_soon!(world.wire.receive(Duration::from_millis(50)).as_deref() == Some(&out[12..]));
    // Another is asked for again and again: each has a limit.
    let mut refused = 0;
    let mut kept = vec![tap];
    for _ in 0..100 {
        match lease.uplink(0, 1) {
            Ok((_, taps)) => kept.extend(taps.into_iter().map(File::from)),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 0);
    drop(lease);
    assert_soon!(!links().contains("vaxu"), "{}", links());
    while world.wire.receive(Duration::ZERO).is_some() {}
    for tap in &mut kept {
        assert!(tap.write_all(&out).is_err());
        assert!(tap.read(&mut [0; 64]).is_err());
    }
    assert!(world.wire.receive(Duration::from_millis(200)) != Some(out[12..].to_vec()));
}

/// The kernel sends no notification when a link is detached.
#[test]
fn detached_program_is_attached_again_though_nothing_else_changes() {
    require!(Root);
    if testkit::kernel::version() < (6, 6) {
        println!("SKIPPED: no tcx links");
        return;
    }
    let world = World::with(2, &policy());
    let mut network = TwoQueues::new(&world);
    for interface in [VethPair::NIC, &network.name.clone()] {
        let report = |world: &World| {
            world
                .steward
                .said()
                .matches("another program has detached")
                .count()
        };
        let before = report(&world);
        assert!(detach_all(&world.veth.near, interface, Side::Ingress) > 0);
        world.await_that(|| report(&world) > before);
        network.await_frames(&world);
        network.assert_spreads(&world);
        network.assert_sends_by_each(&world);
    }
}

/// Guest without a network that takes frames to [`OURS`], and its tap while it has one.
struct Alone {
    lease: Lease,
    index: u32,
    tap: Option<File>,
}

impl Alone {
    fn take(world: &World, queue: u32, mac: [u8; 6], vlans: &[u16]) -> Self {
        let wanted = filtered(queue, &[mac], vlans).in_mode(ModeRequest::Tap);
        // The queue may not be free yet.
        let lease = wait::until_some(wait::SOON, || take(&world.socket(), &wanted).ok());
        let lease = lease.unwrap_or_else(|| panic!("{}", world.steward));
        let conf = bare(1514);
        lease.activate(queue, conf).expect("ours");
        Self {
            lease,
            index: 0,
            tap: None,
        }
    }

    /// Asks for the tap; whether it has one.
    fn ask(&mut self) -> Result<(), LeaseError> {
        let (end, taps) = self
            .lease
            .uplink(self.index, 1)
            .inspect_err(|_| self.tap = None)?;
        self.index = end.index;
        self.tap = taps.into_iter().next().map(File::from).or(self.tap.take());
        Ok(())
    }

    /// Asks whenever the steward tells of a change, as a daemon does, until it has a tap.
    #[track_caller]
    fn await_tap(&mut self, world: &World) {
        world.await_that(|| self.lease.take_changes().expect("it goes on").is_some() && self.ask().is_ok());
    }

    /// The same, until it is refused one; for these `words`.
    #[track_caller]
    fn await_refusal(&mut self, world: &World, words: &str) {
        let refused = wait::until_some(wait::SOON, || {
            let is_told = self.lease.take_changes().expect("it goes on").is_some();
            is_told.then(|| self.ask().err()).flatten()
        });
        let refused = refusal::<()>(Err(refused.unwrap_or_else(|| panic!("{}", world.steward))));
        assert_eq!(refused.reason, Reason::NotAllowed);
        assert!(refused.text.contains(words), "{refused}");
        assert_no_tap(world);
        while self.lease.take_changes().expect("it goes on").is_some() {}
    }

    /// The frame comes from the wire.
    #[track_caller]
    fn assert_gets(&mut self, world: &World, frame: &[u8]) {
        let mut tap = self.tap.as_ref().expect("it has a tap");
        let mut buffer = [0; 4096];
        while tap.read(&mut buffer).is_ok() {}
        let has_come = wait::until(wait::SOON, || {
            world.wire.send(frame);
            wait::until(Duration::from_millis(100), || {
                tap.read(&mut buffer)
                    .is_ok_and(|bytes| buffer[12..bytes] == *frame)
            })
        });
        assert!(has_come);
    }
}

fn address_of_nic(world: &World) -> String {
    let near = &world.veth.near;
    let told = near.output_of("ip", &["-br", "link", "show", VethPair::NIC]);
    told.split_whitespace().nth(2).expect("its address").to_owned()
}

/// In tap mode a guest without a network has the frames to its addresses from all queues.
#[test]
fn guest_alone_in_tap_mode_takes_no_frames_of_the_host_of_another_or_of_a_network() {
    require!(Root);
    let world = World::with(2, &policy());
    let of_host = mac_bytes(&address_of_nic(&world)).expect("an address");
    let mut first = Alone::take(&world, 0, of_host, &[]);
    assert_eq!(refusal(first.ask()).reason, Reason::NotAllowed);
    drop(first);
    world.await_nothing();
    let mut first = Alone::take(&world, 0, OURS, &[]);
    let mut second = Alone::take(&world, 1, OURS, &[]);
    first.ask().expect("no other process has one");
    assert_eq!(refusal(second.ask()).reason, Reason::NotAllowed);
    first.ask().expect("it keeps it");
    first.assert_gets(&world, &to(OURS, frame::plain(200, 1)));
    while second.lease.take_changes().expect("it goes on").is_some() {}
    drop(first);
    second.await_tap(&world);
    second.assert_gets(&world, &to(OURS, frame::plain(200, 2)));
    let network = take(&world.socket(), &network(1)).expect("allowed");
    assert_eq!(refusal(network.uplink(0, 1)).reason, Reason::NotAllowed);
    assert_eq!(refusal(network.host(0)).reason, Reason::NotAllowed);
    drop(second);
    assert_soon!(network.uplink(0, 1).is_ok());
}

#[test]
fn guests_with_one_address_in_different_vlans_have_a_tap_each() {
    require!(Root);
    let world = World::with(3, &policy());
    let mut guests = [&[5, 0][..], &[6, 7]].map(|vlans| {
        let first = if vlans[0] == 5 { 0 } else { 1 };
        let mut guest = Alone::take(&world, first, OURS, vlans);
        guest.ask().expect("VLANs of its own");
        guest
    });
    for (guest, vlan) in [(0, 5), (1, 6), (1, 7), (0, 5)] {
        guests[guest].assert_gets(&world, &to(OURS, frame::tagged(200, vlan, 1)));
    }
    guests[0].assert_gets(&world, &to(OURS, frame::plain(200, 2)));
    for vlans in [&[7, 8][..], &[0], &[]] {
        let mut third = Alone::take(&world, 2, OURS, vlans);
        assert_eq!(refusal(third.ask()).reason, Reason::NotAllowed, "{vlans:?}");
    }
}

#[test]
fn guest_has_no_tap_while_its_address_is_the_hosts() {
    require!(Root);
    let mut world = World::kept_lingering(&policy(), "1");
    let before = address_of_nic(&world);
    let ours = steer::mac_text(OURS).to_string();
    let frame = to(OURS, frame::plain(200, 1));
    let mut guest = Alone::take(&world, 0, OURS, &[]);
    guest.ask().expect("allowed");
    guest.assert_gets(&world, &frame);
    let set_address = |world: &World, mac: &str| {
        let near = &world.veth.near;
        near.ip(&["link", "set", VethPair::NIC, "address", mac]);
    };
    set_address(&world, &ours);
    guest.await_refusal(&world, "is the host's");
    assert!(world.steward.said().contains("a guest's tap is taken back"));
    set_address(&world, &before);
    guest.await_tap(&world);
    guest.assert_gets(&world, &frame);
    world.veth.near.ip(&[
        "link add link",
        VethPair::NIC,
        "name above0 address",
        &ours,
        "type macvlan",
    ]);
    guest.await_refusal(&world, "is the host's");
    world.veth.near.ip(&["link", "delete", "above0"]);
    guest.await_tap(&world);
    guest.assert_gets(&world, &frame);
    // It may have the host's while the policy's rule names it.
    let naming = format!("{POLICY}macs = [\"{ours}\"]\n");
    reread(&mut world, &naming, "the policy was read again");
    set_address(&world, &ours);
    world.await_that(|| guest.lease.take_changes().is_ok() && guest.lease.facts().mac == OURS);
    guest.ask().expect("it is named");
    guest.assert_gets(&world, &frame);
    reread(&mut world, POLICY, "the policy was read again");
    guest.await_refusal(&world, "is the host's");
    set_address(&world, &before);
    guest.await_tap(&world);
    // It changes while there is no steward.
    world.end_steward(Signal::KILL);
    guest.assert_gets(&world, &frame);
    set_address(&world, &ours);
    world.restart();
    guest.await_refusal(&world, "is the host's");
    set_address(&world, &before);
    guest.await_tap(&world);
    guest.assert_gets(&world, &frame);
}
