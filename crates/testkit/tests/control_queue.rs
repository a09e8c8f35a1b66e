//! The control queue where the VMM passes it on (User-mode Linux, crosvm, QEMU's generic vhost-user device).

use std::os::fd::AsFd;

use rstest::rstest;
use testkit::bystander::come_in_peace;
use testkit::control_queue::{ControlQueue, ERR, OK, guest_offloads, pairs};
use testkit::daemon::Placement;
use testkit::driver::{F_CTRL_GUEST_OFFLOADS, F_CTRL_VQ, F_GUEST_ALL, F_MQ, F_RING_PACKED};
use testkit::vmm::{LOG, longs, memory, words};
use testkit::{Daemon, Driver, DriverConfig, NetNs, Rig, Serve, VethPair, assert_soon, require, wait};
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures as Protocol};
use virtqueue::GuestAddr;

const BUFFER: u32 = 2048;
/// VHOST_F_LOG_ALL.
const F_LOG_ALL: u64 = 1 << 26;

fn config(features: u64) -> DriverConfig {
    let mut config = DriverConfig::with(F_CTRL_VQ | F_CTRL_GUEST_OFFLOADS | F_GUEST_ALL | features);
    config.protocol |= Protocol::RESET_DEVICE | Protocol::LOG_SHMFD | Protocol::INFLIGHT_SHMFD;
    config
}

fn guest(ring: u64) -> (NetNs, Daemon, Driver, ControlQueue) {
    let netns = NetNs::new("control");
    let daemon = Daemon::start(&netns, &Serve::null().offload("all"));
    let guest = Driver::connect(&daemon.socket(), &config(ring)).expect("accepted");
    let control = ControlQueue::new(&guest, 2);
    (netns, daemon, guest, control)
}

fn assert_closed(daemon: &mut Daemon, reason: &str) {
    daemon.await_port(0, reason, |port| port["last_closed"]["reason"] == reason);
}

#[rstest]
fn commands_are_answered_and_go_on_from_the_base_after_a_stop(#[values(0, F_RING_PACKED)] ring: u64) {
    require!(Root);
    let (_netns, _daemon, mut guest, mut control) = guest(ring);
    assert_eq!(control.start(&mut guest), [0; 6]);
    // More than the ring has entries. After each the daemon pauses, ten times as long as that took.
    for round in 0..20 {
        let offloads = if round % 2 == 0 { 0 } else { F_GUEST_ALL };
        assert_eq!(control.ask(&guest_offloads(offloads)), OK, "{round}");
    }
    let base = control.stop(&guest);
    assert_eq!(base, control.ring.base());
    // Shown while it is stopped, and not kicked for afterwards.
    control.send(&guest_offloads(0), true, false);
    assert_eq!(guest.say(FrontendReq::SET_VRING_BASE, &words([2, base]), None), 0);
    let kick = control.events[0].try_clone().expect("a descriptor is left");
    assert_eq!(
        guest.say(FrontendReq::SET_VRING_KICK, &longs([2]), Some(kick.as_fd())),
        0
    );
    assert_eq!(control.answer(), OK);
    // The guest's memory is said again while it runs.
    guest.set_memory().expect("accepted");
    assert_eq!(control.ask(&guest_offloads(F_GUEST_ALL)), OK);
}

#[test]
fn control_vring_that_is_started_first_is_served_once_all_is_there() {
    require!(Root);
    let netns = NetNs::new("control");
    let daemon = Daemon::start(&netns, &Serve::null().offload("all"));
    let ram =
        std::sync::Arc::new(virtqueue::driver::GuestRam::new(&[(GuestAddr(0), 4 << 20)]).expect("memory"));
    let mut guest =
        Driver::greet(testkit::driver::connect(&daemon.socket()), &config(0), ram).expect("greeted");
    let features = guest.features();
    // Not negotiated: there is none.
    let mut control = ControlQueue::new(&guest, 2);
    guest.say(FrontendReq::SET_FEATURES, &longs([features]), None);
    assert_eq!(control.start(&mut guest), [0; 6]);
    control.send(&guest_offloads(0), true, true);
    guest.set_memory().expect("accepted");
    assert_eq!(control.answer(), OK);
}

#[test]
fn garbage_is_answered_with_an_error_and_changes_nothing() {
    require!(Root);
    let (_netns, mut daemon, mut guest, mut control) = guest(0);
    assert_eq!(control.start(&mut guest), [0; 6]);
    // All that is wrong with commands is in the unit tests of crate `device`.
    for command in [&[][..], &guest_offloads(u64::MAX), &pairs(1), &[0xff; 4096]] {
        assert_eq!(control.ask(command), ERR, "{command:?}");
    }
    assert_eq!(control.ask(&guest_offloads(0)), OK);
    // A kick without a command, again and again.
    for _ in 0..100 {
        let _ = rustix::io::write(&control.events[0], &1u64.to_ne_bytes());
    }
    assert_eq!(control.ask(&guest_offloads(0)), OK);
    control.send(&guest_offloads(0), false, false);
    assert_closed(&mut daemon, "control-without-ack");
    drop(guest);
    come_in_peace(&daemon.socket());
}

#[rstest]
#[case::reset_device(FrontendReq::RESET_DEVICE, vec![])]
#[case::status(FrontendReq::SET_STATUS, longs([0]))]
fn reset_ends_it_and_its_base_may_be_asked_for(#[case] request: FrontendReq, #[case] payload: Vec<u8>) {
    require!(Root);
    let netns = NetNs::new("control");
    let daemon = Daemon::start(&netns, &Serve::null().offload("all"));
    let mut config = config(0);
    config.protocol |= Protocol::STATUS;
    let mut guest = Driver::connect(&daemon.socket(), &config).expect("accepted");
    let mut control = ControlQueue::new(&guest, 2);
    assert_eq!(control.start(&mut guest), [0; 6]);
    assert_eq!(control.ask(&guest_offloads(0)), OK);
    assert_eq!(guest.say(request, &payload, None), 0);
    let base = control.stop(&guest);
    assert_eq!(base, if request == FrontendReq::SET_STATUS { 1 } else { 0 });
    // Without CTRL_VQ there is none any more.
    let kick = control.events[0].as_fd();
    assert_eq!(guest.say(FrontendReq::SET_VRING_KICK, &longs([2]), Some(kick)), 1);
    assert!(guest.await_close(wait::SOON));
}

#[test]
fn control_queue_that_is_to_be_polled_is_refused_by_name() {
    require!(Root);
    let (_netns, daemon, mut guest, control) = guest(0);
    assert_eq!(control.start(&mut guest), [0; 6]);
    assert_eq!(
        guest.say(FrontendReq::SET_VRING_KICK, &longs([2 | 1 << 8]), None),
        1
    );
    assert!(guest.await_close(wait::SOON));
    assert_soon!(daemon.said().contains("a control queue is not polled"));
}

#[test]
fn answer_is_logged_while_the_guest_migrates() {
    require!(Root);
    let netns = NetNs::new("control");
    let daemon = Daemon::start(&netns, &Serve::null().offload("all"));
    let config = DriverConfig {
        regions: vec![(GuestAddr(0), 16 << 20)],
        ..config(0)
    };
    let mut guest = Driver::connect(&daemon.socket(), &config).expect("accepted");
    let mut control = ControlQueue::new(&guest, 2);
    assert_eq!(control.start(&mut guest), [0; 6]);
    let log = memory(LOG);
    testkit::message::send(
        guest.socket(),
        FrontendReq::SET_LOG_BASE,
        &longs([LOG, 0]),
        Some(log.as_fd()),
    );
    testkit::message::try_receive(guest.socket()).expect("the log is taken");
    let features = guest.features();
    guest.say(FrontendReq::SET_FEATURES, &longs([features | F_LOG_ALL]), None);
    assert_eq!(control.ask(&guest_offloads(0)), OK);
    let page = control.ack_page();
    let mut byte = [0];
    rustix::io::pread(&log, &mut byte, page / 8).expect("it is there");
    assert_ne!(byte[0] & 1 << (page % 8), 0, "page {page}");
}

#[rstest]
fn guest_sets_how_many_of_its_pairs_are_on(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let serve = Serve::interface(VethPair::NIC)
        .placement(placement)
        .with("--queues", "2");
    let config = DriverConfig {
        pairs: 2,
        ..config(F_MQ)
    };
    let mut rig = Rig::with(veth, &serve, &config);
    let mut control = ControlQueue::new(&rig.driver, 4);
    assert_eq!(control.start(&mut rig.driver), [0; 6]);
    // Frames of either queue come on the first pair; the second one never has a buffer.
    assert_eq!(control.ask(&pairs(1)), OK);
    rig.post(64, &[BUFFER]);
    assert_eq!(control.ask(&pairs(3)), ERR);
    assert_eq!(control.ask(&pairs(0)), ERR);
    rig.await_passes_both_ways();
    assert_eq!(control.ask(&pairs(2)), OK);
    assert_eq!(control.ask(&pairs(1)), OK);
    rig.await_passes_both_ways();
}
