//! Tap mode that nobody asked for by name, and somebody who wants an XDP program on the interface.

use crate::common;

use std::fs::File;
use std::io::Read;
use std::time::Duration;

use common::{World, bare, refusal, take};
use rustix::process::Signal;
use steer::ModeRequest;
use steward_client::{Lease, LeaseError};
use steward_protocol::Reason;
use steward_protocol::Wanted;
use testkit::daemon::Mode;
use testkit::foreign::Foreign;
use testkit::{PacketPort, VethPair, assert_soon, frame, require, wait};

const POLICY: &str = "[[allow]]\nuser = 0\ninterface = \"nic0\"\nqueues = \"all\"\nnetwork = true\n";
const OURS: [u8; 6] = [2, 0, 0, 0, 0, 0xaa];

fn wanted_in(mode: ModeRequest, queue: u32) -> Wanted {
    common::filtered(queue, &[[2, 0, 0, 0, 0, 0xaa + queue as u8]], &[]).in_mode(mode)
}

fn lease(world: &World, mode: ModeRequest, queue: u32) -> Result<Lease, LeaseError> {
    take(&world.socket(), &wanted_in(mode, queue))
}

/// A guest without a network, of queue 0.
struct Guest {
    lease: Lease,
    index: u32,
    tap: Option<File>,
}

impl Guest {
    fn new(world: &World, mode: ModeRequest) -> Self {
        let lease = lease(world, mode, 0).expect("allowed");
        let mut guest = Self {
            lease,
            index: 0,
            tap: None,
        };
        guest.set_up().expect("it may have a tap");
        guest
    }

    /// What a daemon does when the lease's generation is another.
    fn set_up(&mut self) -> Result<(), LeaseError> {
        let conf = bare(1514);
        self.lease.activate(0, conf)?;
        let (end, taps) = self.lease.uplink(self.index, 1)?;
        self.index = end.index;
        self.tap = taps.into_iter().next().map(File::from).or(self.tap.take());
        Ok(())
    }

    fn gets(&mut self, world: &World, number: u8) -> bool {
        let mut sent = frame::plain(200, number);
        sent[..6].copy_from_slice(&OURS);
        let Some(tap) = &mut self.tap else { return false };
        let mut buffer = [0; 4096];
        wait::until(wait::SOON, || {
            world.wire.send(&sent);
            wait::until(Duration::from_millis(100), || {
                tap.read(&mut buffer).is_ok_and(|bytes| buffer[12..bytes] == sent)
            })
        })
    }
}

/// Natively nothing can be attached, as somebody else's program is there.
#[test]
fn leases_in_tap_mode_go_on_undisturbed_while_it_cannot_be_left() {
    require!(Root);
    let world = World::with(2, POLICY);
    let mut guest = Guest::new(&world, ModeRequest::Auto);
    let _foreign = Foreign::attach(&world.veth.near, VethPair::NIC, Mode::Native, 0);
    assert!(guest.gets(&world, 1));
    for _ in 0..20 {
        let refused = refusal(lease(&world, ModeRequest::Native, 1));
        assert_eq!(refused.reason, Reason::Program, "{refused}");
    }
    assert!(guest.gets(&world, 2));
    let report = world.steward.said();
    assert!(!report.contains("program detached"), "{report}");
}

#[test]
fn mode_that_was_asked_for_by_name_is_known_to_the_next_steward() {
    require!(Root);
    let mut world = World::kept_lingering(POLICY, "1");
    let first = lease(&world, ModeRequest::Auto, 1).expect("allowed");
    let mut guest = Guest::new(&world, ModeRequest::Tap);
    drop(first);
    world.restart_after(Signal::KILL);
    assert_soon!(guest.lease.take_changes().is_ok() && !guest.lease.is_away());
    assert_eq!(
        refusal(lease(&world, ModeRequest::Native, 1)).reason,
        Reason::Program
    );
    assert!(guest.gets(&world, 3));
}

#[test]
fn mode_that_was_asked_for_by_name_in_vain_can_be_left() {
    require!(Root);
    let world = World::with(2, POLICY);
    let _guest = Guest::new(&world, ModeRequest::Auto);
    assert_eq!(refusal(lease(&world, ModeRequest::Tap, 0)).reason, Reason::Taken);
    lease(&world, ModeRequest::Native, 1).expect("nobody has a lease of tap mode by name");
}

/// The steward dies while it leaves tap mode: the tap has frames as long as there is no XDP program, and not beside one.
#[test]
fn tap_ends_when_an_xdp_program_is_attached_even_if_the_steward_dies() {
    require!(Root);
    for point in ["attached", "detached", "unpinned", "pinned"] {
        let mut world = World::kept_lingering(POLICY, "1");
        let mut guest = Guest::new(&world, ModeRequest::Auto);
        world.end_steward(Signal::KILL);
        world.restart_to_crash(point);
        world.steward.await_text("ready");
        let is_back = |guest: &Guest| guest.lease.take_changes().is_ok() && !guest.lease.is_away();
        world.await_that(|| is_back(&guest));
        assert!(guest.gets(&world, 1));
        assert!(lease(&world, ModeRequest::Native, 1).is_err(), "{point}");
        world.steward.wait(wait::SOON);
        world.restart();
        world.await_that(|| is_back(&guest) && guest.lease.facts().mode.is_some());
        let is_native = |guest: &Guest| guest.lease.facts().mode == Some(steer::Mode::Native);
        assert_eq!(is_native(&guest), point == "pinned", "{point}");
        // What the kernel lost with the program comes back with another.
        let set_up = wait::until(wait::SOON, || {
            let _ = guest.lease.take_changes();
            guest.set_up().is_ok() || is_native(&guest)
        });
        assert!(set_up, "{point}");
        match is_native(&guest) {
            true => {
                let links = || world.veth.near.output_of("ip", &["-o", "link"]);
                assert_soon!(!links().contains("vaxu"), "{}", links());
            }
            false => assert!(guest.gets(&world, 2), "{point}"),
        }
    }
}

/// Where the interface is then, another device may have the number of the tap.
#[test]
fn interface_that_is_moved_away_takes_no_program_of_ours_along() {
    require!(Root);
    let world = World::with(2, POLICY);
    // Numbers that are free there.
    for name in ["more0", "more1", "more2", "more3"] {
        world.veth.near.ip(&["link", "add", name, "type", "veth"]);
    }
    let mut guest = Guest::new(&world, ModeRequest::Tap);
    assert!(guest.gets(&world, 1));
    let (near, far) = (&world.veth.near, &world.veth.far);
    let index = guest.index.to_string();
    far.ip(&["link add other0 index", &index, "type veth peer other1"]);
    far.ip(&["link", "set", "other0", "up"]);
    far.ip(&["link", "set", "other1", "up"]);

    near.ip(&["link", "set", VethPair::NIC, "netns", far.name()]);
    far.ip(&["link", "set", VethPair::NIC, "up"]);
    world.await_that(|| guest.lease.take_changes().is_ok() && guest.lease.facts().ifindex == 0);
    let ear = PacketPort::open(far, VethPair::NIC);
    let sent_by_other = || far.output_of("sh", &["-c", "ip -s link show other0 | tail -1"]);
    let before = sent_by_other();
    let mut sent = frame::plain(200, 9);
    sent[..6].copy_from_slice(&OURS);
    for _ in 0..100 {
        world.wire.send(&sent);
    }
    // Behind the others.
    let last = frame::last();
    world.wire.send(&last);
    ear.receive_before(&last);
    assert_eq!(before, sent_by_other());
    far.ip(&["link", "set", VethPair::NIC, "netns", near.name()]);
    near.ip(&["link", "set", VethPair::NIC, "up"]);
    let is_back = || {
        let _ = guest.lease.take_changes();
        guest.lease.facts().mode.is_some() && guest.set_up().is_ok()
    };
    world.await_that(is_back);
    assert!(guest.gets(&world, 2));
}
