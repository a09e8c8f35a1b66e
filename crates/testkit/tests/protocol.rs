//! The vhost-user messages beyond the ones that start and stop a ring.

use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rstest::rstest;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::pread;
use testkit::daemon::Placement;
use testkit::driver::{self, F_PROTOCOL_FEATURES, F_VERSION_1};
use testkit::{Daemon, Driver, DriverConfig, Layout, Rig, Serve, VethPair, frame, message, require, wait};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures as Protocol};
use vhost::{VhostBackend, VhostUserDirtyLogRegion};
use virtqueue::GuestAddr;
use virtqueue::driver::GuestRam;

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

/// The daemon logs all of `words`, soon: what it says may come after the end of the connection.
fn assert_says(daemon: &Daemon, words: &[&str]) {
    let says = wait::until(wait::SOON, || {
        let said = daemon.said();
        words.iter().all(|word| said.contains(word))
    });
    assert!(says, "{words:?} is not in");
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
fn send_rarp_announces_the_guest(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
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
    // Without end: it is logged twenty times at most.
    for mtu in 2000..2200u64 {
        let said = rig.driver.say(FrontendReq::NET_SET_MTU, &mtu.to_ne_bytes(), None);
        assert_eq!(said, 1, "MTU {mtu}");
    }
    // It logs after it answers; by now it has.
    rig.post(64, &[BUFFER]);
    rig.await_passes_both_ways();
    assert_says(&rig.daemon, &["1501", "ip link set mtu"]);
    assert!(rig.daemon.said().matches("ip link set mtu").count() <= 20);
}

#[rstest]
fn status_is_kept_and_zero_resets_the_device(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
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
    // QEMU before 8.1 resets the device and then asks where its rings stopped.
    let sent = rig.pair().from_guest.driver.split().avail_idx();
    let [_, base] = rig.driver.stop_pair(0).expect("bases");
    assert_eq!(base, u32::from(sent), "the base is gone");
    assert_starts_anew(rig);
}

#[rstest]
fn reset_device_stops_everything_and_it_starts_anew(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
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
    let sent = frame::last();
    rig.pair().send(&sent, Layout::Whole);
    wait::a_moment();
    rig.driver.start_over(&config()).expect("set up again");
    assert!(
        !rig.flush_from_guest().contains(&sent),
        "a reset device sent a frame"
    );
    rig.post(64, &[BUFFER]);
    rig.await_passes_both_ways();
}

/// What ends a session, and the port goes on.
#[rstest]
#[case::status_beyond_eight_bits(Protocol::all(), FrontendReq::SET_STATUS, &0x100_u64.to_ne_bytes(), "")]
#[case::feature_that_was_not_negotiated(DriverConfig::default().protocol, FrontendReq::SEND_RARP, &[0; 8], "SEND_RARP")]
#[case::channel_that_is_no_socket(Protocol::all(), FrontendReq::SET_BACKEND_REQ_FD, &[], "SET_BACKEND_REQ_FD")]
fn message_is_refused_by_name(
    #[case] protocol: Protocol,
    #[case] request: FrontendReq,
    #[case] payload: &[u8],
    #[case] named: &str,
) {
    require!(Root);
    let serve = Serve::interface(VethPair::NIC);
    let with = DriverConfig { protocol, ..config() };
    let mut rig = Rig::with(VethPair::new(), &serve, &with);
    let file = tempfile::tempfile().expect("a file");
    let file = (request == FrontendReq::SET_BACKEND_REQ_FD).then(|| file.as_fd());
    assert_eq!(rig.driver.say(request, payload, file), 1);
    assert!(rig.driver.await_close(wait::SOON), "the session goes on");
    assert_says(&rig.daemon, &[named]);
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

/// As far as the features, and then a memory table of one region that is said to have so many bytes.
fn memory_table(bytes: usize, files: usize) -> (VethPair, Daemon, Driver) {
    let veth = VethPair::new();
    let daemon = Daemon::start(&veth.near, &Serve::interface(VethPair::NIC));
    let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), MIB)]).expect("memory"));
    let mut guest = Driver::greet(driver::connect(&daemon.socket()), &config(), ram).expect("greeted");
    let features = F_VERSION_1 | F_PROTOCOL_FEATURES;
    guest.frontend().set_features(features).expect("offered");
    let region = guest.ram().regions().expect("descriptors").remove(0);
    let mut table = testkit::vmm::table(&[(0, MIB, 0)]);
    table.resize(bytes, 0x5a);
    let files = vec![region.file.as_fd(); files];
    message::send_files(guest.socket(), FrontendReq::SET_MEM_TABLE, &table, &files);
    (veth, daemon, guest)
}

/// User-mode Linux sends room for two regions, whatever there are.
#[test]
fn what_follows_the_last_region_is_ignored() {
    require!(Root);
    for bytes in [40, 41, 72, 4000] {
        let (_veth, _daemon, mut guest) = memory_table(bytes, 1);
        assert_eq!(message::receive(guest.socket()), 0, "{bytes} bytes");
        // It was answered once, and nothing of it is left to be read.
        assert_eq!(guest.frontend().get_max_mem_slots().expect("answered"), 64);
    }
}

#[rstest]
#[case::too_short(39, 1, "SET_MEM_TABLE: 39 bytes for 1 region, at least 40 needed")]
#[case::no_number(7, 1, "SET_MEM_TABLE: 7 bytes, at least 8 needed")]
#[case::nothing(0, 1, "SET_MEM_TABLE: 0 bytes, at least 8 needed")]
#[case::descriptors_for_what_follows(72, 2, "SET_MEM_TABLE: 2 descriptors for 1 regions")]
#[case::no_descriptor(72, 0, "SET_MEM_TABLE: 0 descriptors for 1 regions")]
fn memory_table_that_cannot_be_is_refused_with_its_numbers(
    #[case] bytes: usize,
    #[case] files: usize,
    #[case] words: &str,
) {
    require!(Root);
    let (_veth, daemon, guest) = memory_table(bytes, files);
    assert!(guest.await_close(wait::SOON), "the session goes on");
    assert_says(&daemon, &[words]);
}

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// VHOST_F_LOG_ALL.
const F_LOG_ALL: u64 = 1 << 26;

/// A bitmap for the pages of the first MiBs.
fn dirty_log() -> (OwnedFd, VhostUserDirtyLogRegion) {
    let file = memfd_create("log", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&file, PAGE).expect("its length");
    let region = VhostUserDirtyLogRegion {
        mmap_size: PAGE,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    (file, region)
}

fn logged(file: &OwnedFd) -> Vec<u64> {
    let mut bits = vec![0; PAGE as usize];
    pread(file, &mut bits, 0).expect("the log");
    let set = |page: &u64| bits[(page / 8) as usize] & (1 << (page % 8)) != 0;
    (0..PAGE * 8).filter(set).collect()
}

/// Pages of guest memory, by page number, that differ from `before`.
fn changed(rig: &Rig, before: &[Vec<u8>]) -> Vec<u64> {
    let now = pages(rig);
    let differs = |page: &u64| now[*page as usize] != before[*page as usize];
    (0..now.len() as u64).filter(differs).collect()
}

fn pages(rig: &Rig) -> Vec<Vec<u8>> {
    let page = |number: u64| rig.driver.ram().read_vec(GuestAddr(number * PAGE), PAGE as usize);
    (0..4 * MIB / PAGE).map(page).collect()
}

#[rstest]
fn every_page_that_is_written_is_logged_while_the_vmm_wants_it(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let config = DriverConfig {
        regions: vec![(GuestAddr(0), 4 * MIB)],
        queue_size: 64,
        ..config()
    };
    let serve = Serve::interface(VethPair::NIC).placement(placement);
    let mut rig = Rig::with(VethPair::new(), &serve, &config);
    rig.post(32, &[BUFFER]);
    let (file, region) = dirty_log();
    let features = rig.driver.features();
    let frontend = rig.driver.frontend();
    frontend.set_log_base(0, Some(region)).expect("the log is taken");
    rig.assert_to_guest(&frame::plain(1000, 1));
    assert_eq!(logged(&file), [0; 0], "nothing is logged before LOG_ALL");
    rig.driver
        .frontend()
        .set_features(features | F_LOG_ALL)
        .expect("LOG_ALL");
    let before = pages(&rig);
    for round in 0..40 {
        rig.assert_to_guest(&frame::plain(1500, round));
    }
    // The driver writes only to its rings, which are on one page with what the device writes there.
    let (dirty, log) = (changed(&rig, &before), logged(&file));
    assert!(
        dirty.len() > 16,
        "32 buffers were filled, only {} pages changed",
        dirty.len()
    );
    for page in dirty {
        assert!(
            log.contains(&page),
            "page {page} was written and is not in the log: {log:?}"
        );
    }
    rig.driver.frontend().set_features(features).expect("no LOG_ALL");
    let log = logged(&file);
    rig.assert_to_guest(&frame::plain(1500, 99));
    assert_eq!(logged(&file), log, "logged after LOG_ALL was taken back");
}

#[test]
fn log_that_is_too_short_is_refused() {
    require!(Root);
    let mut rig = rig(Placement::Copy);
    let (_file, region) = dirty_log();
    let beyond = VhostUserDirtyLogRegion {
        mmap_size: 2 * PAGE,
        ..region
    };
    assert!(rig.driver.frontend().set_log_base(0, Some(beyond)).is_err());
    assert!(rig.driver.await_close(wait::SOON), "the session goes on");
    assert_says(&rig.daemon, &["SET_LOG_BASE"]);
}
