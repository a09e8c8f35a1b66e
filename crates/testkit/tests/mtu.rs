//! An MTU that changes under a daemon with several queues: those that do for it carry frames on as if nothing had
//! happened, and the others are set up anew one by one.
//!
//! A socket stays open as long as anybody has a descriptor of it, and with it its queue is taken. So a test that has a
//! copy of the daemon's holds up the one queue, and sees what becomes of the others meanwhile.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rstest::rstest;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use serde_json::Value;
use testkit::daemon::{Placement, binary, private_dir};
use testkit::holdings::{copies_of_sockets, xdp_sockets};
use testkit::{
    Daemon, DriverConfig, Layout, NetNs, PacketPort, Pair, Rig, Serve, VethPair, frame, require, wait,
};

const PAIRS: usize = 2;
/// Receive buffers of each pair.
const BUFFERS: usize = 64;
/// The longest frames of an MTU of 3000 fit one.
const BUFFER: u32 = 4096;
/// Frames that the guest has no buffers for, and that the daemon does not take from the queue all together.
const MANY: usize = BUFFERS + 256;

fn set_mtu(near: &NetNs, mtu: u64) {
    near.ip(&["link", "set", VethPair::NIC, "mtu", &mtu.to_string()]);
}

fn await_mtu(daemon: &Daemon, mtu: u64) {
    daemon.await_port(0, "the MTU", |port| port["mtu"].as_u64() == Some(mtu));
}

fn is_running(port: &Value, pair: usize) -> bool {
    port["lanes"][pair]["running"] == true
}

/// A guest with two pairs, and a flow of the wire for each.
struct Pairs {
    rig: Rig,
    flows: [u16; PAIRS],
}

impl Pairs {
    /// Its queues are leased, or opened by root, with lanes in the log.
    fn new(placement: Placement, leased: bool) -> Self {
        let veth = VethPair::with(PAIRS as u32, 1500);
        veth.far.ip(&["link", "set", VethPair::WIRE, "mtu", "3000"]);
        let config = DriverConfig::with_pairs(PAIRS);
        let serve = Serve::interface(VethPair::NIC)
            .placement(placement)
            .with("--queues", PAIRS.to_string());
        let mut rig = match leased {
            true => Rig::with(veth, &serve.leased().with("--steward-timeout", "3600"), &config),
            false => {
                let mut command = veth.near.command(binary());
                command.env("RUST_LOG", "debug");
                let mut daemon = Daemon::spawn_by(command, private_dir(), &serve);
                daemon.await_listening();
                Rig::around(veth, daemon, &config)
            }
        };
        for pair in &mut rig.driver.pairs {
            pair.post(BUFFERS, &[BUFFER]);
        }
        let flows = find_flows(&mut rig);
        Self { rig, flows }
    }

    /// A frame passes each way, from and to that pair.
    #[track_caller]
    fn assert_passes(&mut self, pair: usize, len: usize) {
        let Rig { driver, wire, .. } = &mut self.rig;
        assert_passes(&mut driver.pairs[pair], wire, self.flows[pair], len);
    }

    /// The same of all pairs.
    #[track_caller]
    fn assert_all_pass(&mut self, len: usize) {
        (0..PAIRS).for_each(|pair| self.assert_passes(pair, len));
    }

    /// The same of a pair where frames may be lost until then; none is under way afterwards.
    #[track_caller]
    fn await_passes(&mut self, pair: usize, len: usize) {
        let limit = Duration::from_millis(200);
        let Rig { driver, wire, .. } = &mut self.rig;
        let (guest, flow) = (&mut driver.pairs[pair], self.flows[pair]);
        let leaves = wait::until(wait::SOON, || {
            let sent = frame::udp_once(flow, len);
            guest.send(&sent, Layout::Whole);
            std::iter::from_fn(|| wire.receive(limit)).any(|got| got == sent)
        });
        let comes = wait::until(wait::SOON, || {
            let sent = frame::udp_once(flow, len);
            wire.send(&sent);
            std::iter::from_fn(|| guest.receive(limit)).any(|got| got.frame == sent)
        });
        assert!(leaves && comes, "pair {pair}: {:#}", self.rig.daemon.port(0));
        self.assert_passes(pair, len);
    }

    /// The same of all pairs.
    #[track_caller]
    fn await_all_pass(&mut self, len: usize) {
        (0..PAIRS).for_each(|pair| self.await_passes(pair, len));
    }

    fn sockets(&mut self) -> BTreeSet<String> {
        xdp_sockets(self.rig.daemon.process().pid())
    }

    /// How many lanes have been started so far.
    fn started(&self) -> usize {
        self.rig.daemon.said().matches("lane runs").count()
    }

    /// The first pair has no lane any more.
    fn await_stopped(&self) {
        self.rig
            .daemon
            .await_port(0, "the first pair is stopped", |port| !is_running(port, 0));
    }

    /// Keeps the socket of a pair's queue open: the one that frames wait in for which the guest has no buffers.
    fn hold(&mut self, pair: usize) -> OwnedFd {
        let ours = self.sockets();
        let mut copies = copies_of_sockets(self.rig.daemon.process().pid());
        copies.retain(|inode, _| ours.contains(inode));
        let flow = frame::udp(self.flows[pair], 60);
        // The queue of a veth takes 256 that nobody has fetched yet (VETH_RING_SIZE, drivers/net/veth.c).
        let before = self.rig.veth.received_by_nic();
        for sent in 1..=MANY {
            self.rig.wire.send(&flow);
            let are_fetched = || self.rig.veth.received_by_nic() >= before + sent as u64;
            assert!(
                sent % 64 != 0 || wait::until(wait::SOON, are_fetched),
                "{sent} frames"
            );
        }
        let has_frames = |copy: &OwnedFd| {
            let at_once = Timespec::default();
            poll(&mut [PollFd::new(copy, PollFlags::IN)], Some(&at_once)).is_ok_and(|ready| ready > 0)
        };
        let is_one = || copies.values().filter(|copy| has_frames(copy)).count() == 1;
        assert!(wait::until(wait::SOON, is_one), "frames wait in one queue");
        copies.retain(|_, copy| has_frames(copy));
        for _ in 0..MANY {
            let got = self.rig.driver.pairs[pair]
                .receive(wait::SOON)
                .expect("it waited");
            frame::assert_same(&got.frame, &flow);
        }
        copies.into_values().next().expect("one")
    }
}

/// A frame passes each way: from and to a pair, by that flow.
#[track_caller]
fn assert_passes(guest: &mut Pair, wire: &PacketPort, flow: u16, len: usize) {
    let sent = frame::udp_once(flow, len);
    guest.send(&sent, Layout::Whole);
    frame::assert_same(&wire.receive(wait::SOON).expect("it leaves"), &sent);
    let sent = frame::udp_once(flow, len);
    wire.send(&sent);
    frame::assert_same(&guest.receive(wait::SOON).expect("it comes").frame, &sent);
}

/// A flow for each pair. What comes before the daemon has seen the guest's buffers may be lost.
fn find_flows(rig: &mut Rig) -> [u16; PAIRS] {
    let limit = Duration::from_millis(100);
    let mut flows = [None; PAIRS];
    let mut number = 0;
    let found = wait::until_some(wait::SOON, || {
        number += 1;
        let sent = frame::udp(number, 60);
        rig.wire.send(&sent);
        for (pair, flow) in rig.driver.pairs.iter_mut().zip(&mut flows) {
            if pair.receive(limit).is_some_and(|got| got.frame == sent) {
                flow.get_or_insert(number);
            }
        }
        flows[0].zip(flows[1]).map(<[u16; PAIRS]>::from)
    });
    let found = found.expect("frames arrive in both");
    // Those that came late.
    for (pair, flow) in rig.driver.pairs.iter_mut().zip(found) {
        let last = frame::udp_once(flow, 60);
        rig.wire.send(&last);
        let _ = pair.receive_before(&last);
    }
    found
}

/// Neither a lane nor a socket is touched, and no frame is lost.
#[rstest]
fn queues_that_do_for_another_mtu_carry_frames_on(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Tap)] placement: Placement,
) {
    require!(Root);
    let mut world = Pairs::new(placement, false);
    let (sockets, started) = (world.sockets(), world.started());
    assert!(started >= PAIRS);
    for mtu in [1400, 1700, 1500] {
        let (
            Rig {
                driver,
                wire,
                veth,
                daemon,
            },
            flows,
        ) = (&mut world.rig, world.flows);
        let change = || {
            set_mtu(&veth.near, mtu);
            await_mtu(daemon, mtu);
        };
        wait::rounds_during(change, |_| {
            let pairs = driver.pairs.iter_mut().zip(flows);
            pairs.for_each(|(pair, flow)| assert_passes(pair, wire, flow, 600));
        });
        world.assert_all_pass(mtu as usize + frame::HEADER);
        for pair in &mut world.rig.driver.pairs {
            pair.send(&frame::plain(mtu as usize + 19, 1), Layout::Whole);
            pair.await_sent();
        }
    }
    assert_eq!(world.rig.daemon.counter("from_guest_too_long"), 3 * PAIRS as u64);
    assert_eq!(world.sockets(), sockets);
    assert_eq!(world.started(), started);
}

/// Larger chunks are needed, or fewer of the guest's buffers will do.
#[rstest]
fn every_pair_follows_an_mtu_that_grows_and_shrinks(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(false, true)] leased: bool,
) {
    require!(Root);
    let mut world = Pairs::new(placement, leased);
    for mtu in [3000, 1500, 2000, 1500] {
        set_mtu(&world.rig.veth.near, mtu);
        await_mtu(&world.rig.daemon, mtu);
        world.await_all_pass(mtu as usize + frame::HEADER);
    }
    let daemon = &world.rig.daemon;
    daemon.await_port(0, "well", |port| port["impaired"].is_null());
    assert_eq!(daemon.port(0)["sessions"].as_u64(), Some(1));
}

#[test]
fn changes_that_come_one_upon_the_other_end_with_the_last() {
    require!(Root);
    let mut world = Pairs::new(Placement::Copy, false);
    for last in [3000, 1500, 2900, 1400] {
        for mtu in [3000, 1400, 2000, 1774, 2900, 1500, last] {
            set_mtu(&world.rig.veth.near, mtu);
        }
        await_mtu(&world.rig.daemon, last);
        world.await_all_pass(last as usize + frame::HEADER);
    }
}

/// The others carry frames as if nothing were while it waits, and after that with the new MTU.
#[test]
fn queue_that_is_held_up_holds_up_no_other() {
    require!(Root);
    let (mut world, held) = held_up();
    (0..4 * BUFFERS).for_each(|_| world.assert_passes(1, 1514));
    world.rig.daemon.signal_steward(Signal::CONT);
    world.rig.daemon.await_impaired(0, "queue 0");
    world.await_passes(1, 3014);
    let port = world.rig.daemon.port(0);
    assert!(!is_running(&port, 0) && is_running(&port, 1), "{port:#}");
    drop(held);
    world.rig.daemon.await_recovered(0);
    world.await_all_pass(3014);
    // The way back stops nothing.
    let sockets = world.sockets();
    set_mtu(&world.rig.veth.near, 1500);
    await_mtu(&world.rig.daemon, 1500);
    world.assert_all_pass(1514);
    assert_eq!(world.sockets(), sockets);
}

/// The daemon waits for the first queue, whose socket is held, after the MTU became 3000: for the answer of a steward
/// that is stopped, and so for as long as is liked. Before that the steward waits for the queue some seconds; if the
/// test does not get hold of it in that time, it begins again.
fn held_up() -> (Pairs, OwnedFd) {
    let found = wait::until_some(wait::SOON, || {
        let mut world = Pairs::new(Placement::Copy, true);
        let held = world.hold(0);
        set_mtu(&world.rig.veth.near, 3000);
        world.await_stopped();
        world.rig.daemon.signal_steward(Signal::STOP);
        let port = world.rig.daemon.port(0);
        let waits = port["impaired"].is_null() && !is_running(&port, 0) && is_running(&port, 1);
        if !waits {
            world.rig.daemon.signal_steward(Signal::CONT);
        }
        waits.then_some((world, held))
    });
    found.expect("the daemon waits")
}

/// What comes in the middle.
#[derive(Clone, Copy)]
enum Event {
    /// The guest's driver starts its device over.
    Reset,
    /// The MTU is the old one again.
    Back,
    /// The interface is deleted, and there again.
    Gone,
}

#[rstest]
fn what_comes_while_queues_are_set_up_anew_is_done(
    #[values(Event::Reset, Event::Back, Event::Gone)] event: Event,
    #[values(false, true)] leased: bool,
) {
    require!(Root);
    let mut world = Pairs::new(Placement::Copy, leased);
    let held = world.hold(0);
    set_mtu(&world.rig.veth.near, 3000);
    world.await_stopped();
    let longest = match event {
        Event::Reset => {
            let config = DriverConfig::with_pairs(PAIRS);
            world.rig.driver.start_over(&config).expect("it is answered");
            for pair in &mut world.rig.driver.pairs {
                pair.post(BUFFERS, &[BUFFER]);
            }
            3014
        }
        Event::Back => {
            set_mtu(&world.rig.veth.near, 1500);
            1514
        }
        Event::Gone => {
            world.rig.veth.near.ip(&["link", "delete", VethPair::NIC]);
            world.rig.daemon.await_impaired(0, "gone");
            world.rig.veth.join(PAIRS as u32, 1500);
            world.rig.wire = PacketPort::open(&world.rig.veth.far, VethPair::WIRE);
            1514
        }
    };
    drop(held);
    world.rig.daemon.await_port(0, "all run", |port| {
        port["impaired"].is_null() && (0..PAIRS).all(|pair| is_running(port, pair))
    });
    world.await_all_pass(longest);
}

#[test]
fn daemon_ends_while_queues_are_set_up_anew() {
    require!(Root);
    let mut world = Pairs::new(Placement::Copy, false);
    let held = world.hold(0);
    set_mtu(&world.rig.veth.near, 3000);
    world.await_stopped();
    let status = world.rig.daemon.terminate();
    assert!(status.success(), "{status}");
    drop(held);
}
