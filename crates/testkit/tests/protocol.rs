//! The vhost-user messages beyond the ones that start and stop a ring.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rstest::rstest;
use testkit::daemon::{Mode, Placement};
use testkit::{Driver, DriverConfig, Layout, Rig, Serve, VethPair, frame, require, wait};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures as Protocol};

const BUFFER: u32 = 2048;

fn config() -> DriverConfig {
    DriverConfig {
        protocol: Protocol::all(),
        ..DriverConfig::default()
    }
}

fn rig(placement: Placement) -> Rig {
    let serve = Serve::interface(VethPair::NIC).placement(placement);
    Rig::with(VethPair::new(), &serve, &config())
}

/// The announcement of 02:00:00:00:00:07 as it must be on the wire.
fn announcement() -> Vec<u8> {
    let mac = [2, 0, 0, 0, 0, 7];
    let fixed = [0x80, 0x35, 0, 1, 0x08, 0x00, 6, 4, 0, 3];
    let mut bytes = [&[0xff; 6][..], &mac, &fixed, &mac, &[0; 4], &mac, &[0; 4]].concat();
    bytes.resize(60, 0);
    bytes
}

#[rstest]
fn send_rarp_announces_the_guest(#[values(Placement::Copy, Placement::Direct)] placement: Placement) {
    require!(Root);
    let mut rig = rig(placement);
    let payload = [2, 0, 0, 0, 0, 7, 0, 0];
    // More often than there are chunks to send from: each comes back.
    for _ in 0..300 {
        assert_eq!(rig.driver.say(FrontendReq::SEND_RARP, &payload, None), 0);
        let seen = rig.wire.receive(wait::SOON).expect("an announcement");
        assert_eq!(seen, announcement());
    }
    rig.post(64, &[BUFFER]);
    rig.await_passes_both_ways();
}

#[test]
fn mtu_that_the_interface_does_not_carry_is_told_and_ends_nothing() {
    require!(Root);
    let mut rig = rig(Placement::Copy);
    for (mtu, answer) in [(1500u64, 0), (68, 0), (67, 1), (1501, 1), (u64::MAX, 1)] {
        let said = rig.driver.say(FrontendReq::NET_SET_MTU, &mtu.to_ne_bytes(), None);
        assert_eq!(said, answer, "MTU {mtu}");
    }
    rig.post(64, &[BUFFER]);
    rig.await_passes_both_ways();
    let log = rig.daemon.said();
    assert!(
        log.contains("1501") && log.contains("ip link set mtu"),
        "no remedy in: {log}"
    );
}

#[rstest]
fn status_is_kept_and_zero_resets_the_device(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut rig = rig(placement);
    rig.post(64, &[BUFFER]);
    rig.await_passes_both_ways();
    let driver_ok = 0x0f_u64.to_ne_bytes();
    assert_eq!(rig.driver.say(FrontendReq::SET_STATUS, &driver_ok, None), 0);
    assert_eq!(rig.driver.say(FrontendReq::GET_STATUS, &[], None), 0x0f);
    assert_eq!(rig.driver.say(FrontendReq::SET_STATUS, &[0; 8], None), 0);
    assert_eq!(rig.driver.say(FrontendReq::GET_STATUS, &[], None), 0);
    assert_starts_anew(rig);
}

#[rstest]
fn reset_device_stops_everything_and_it_starts_anew(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut rig = rig(placement);
    rig.post(64, &[BUFFER]);
    rig.await_passes_both_ways();
    rig.driver.frontend().reset_device().expect("reset");
    assert_starts_anew(rig);
}

/// After a reset nothing moves until the driver sets up everything again, with rings of its own.
fn assert_starts_anew(mut rig: Rig) {
    rig.pair().send(&frame::plain(100, 1), Layout::Whole);
    assert!(
        rig.wire.receive(wait::QUIET).is_none(),
        "a reset device sent a frame"
    );
    rig.driver.start_over(&config()).expect("set up again");
    rig.post(64, &[BUFFER]);
    rig.await_passes_both_ways();
}

#[test]
fn status_beyond_eight_bits_is_refused() {
    require!(Root);
    let mut rig = rig(Placement::Copy);
    assert_eq!(
        rig.driver
            .say(FrontendReq::SET_STATUS, &0x100_u64.to_ne_bytes(), None),
        1
    );
    assert!(rig.driver.await_close(wait::SOON), "the session goes on");
}

#[test]
fn message_of_a_feature_that_was_not_negotiated_is_refused() {
    require!(Root);
    let mut rig = Rig::new(Placement::Copy, Mode::Native);
    assert_eq!(rig.driver.say(FrontendReq::SEND_RARP, &[0; 8], None), 1);
    assert!(rig.driver.await_close(wait::SOON), "the session goes on");
    assert!(rig.daemon.said().contains("SEND_RARP"), "{}", rig.daemon.said());
    Driver::connect(&rig.daemon.socket(), &config()).expect("the port goes on");
}

#[test]
fn link_changes_are_told_to_a_vmm_that_wants_to_know() {
    require!(Root);
    let mut rig = rig(Placement::Copy);
    let (mut ours, theirs) = UnixStream::pair().expect("sockets");
    ours.set_read_timeout(Some(wait::SOON)).expect("not zero");
    let given = rig
        .driver
        .say(FrontendReq::SET_BACKEND_REQ_FD, &[], Some(theirs.as_fd()));
    assert_eq!(given, 0);
    for (state, up) in [("down", 0), ("up", 1), ("down", 0)] {
        rig.veth.near.ip(&["link", "set", VethPair::NIC, state]);
        let mut message = [0; 12];
        ours.read_exact(&mut message)
            .expect("a message about the config space");
        // VHOST_USER_BACKEND_CONFIG_CHANGE_MSG is 2, the version 1, no payload.
        assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(
            rig.driver.config(6, 2).expect("status")[0] & 1,
            up,
            "link {state}"
        );
    }
}

#[test]
fn channel_that_is_no_socket_is_refused() {
    require!(Root);
    let mut rig = rig(Placement::Copy);
    let file = tempfile::tempfile().expect("a file");
    let said = rig
        .driver
        .say(FrontendReq::SET_BACKEND_REQ_FD, &[], Some(file.as_fd()));
    assert_eq!(said, 1);
    assert!(rig.driver.await_close(wait::SOON), "the session goes on");
}
