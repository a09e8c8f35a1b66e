//! Faults that others had, in vhost back ends and with AF_XDP. Each is a test here, named after it, or one elsewhere:
//!
//! | class | test |
//! |---|---|
//! | CVE-2018-1059, a range that is not wholly mapped | `virtqueue`: buffer_outside_memory_is_a_fault, |
//! | | translation_takes_whole_ranges_in_one_region_only, ring_parts_must_be_wholly_inside_memory |
//! | CVE-2019-14818, CVE-2020-10726, messages that come twice, stray descriptors | here; `leaks.rs` |
//! | CVE-2020-10722, overflow of offset plus size | here |
//! | CVE-2020-10723, a vring index that is cut off | here |
//! | CVE-2020-10725, no bytes at a bad address | `virtqueue`: zero_length_is_a_fault |
//! | CVE-2021-3839, CVE-2022-0669, inflight regions that lie | here |
//! | CVE-2022-2132, header across descriptors, | `frames.rs`: frames_of_all_sizes_arrive_byte_exact_both_ways |
//! | chain shorter than it | `hostile.rs`: shorter_than_the_header |
//! | CVE-2024-11614, csum_start past the end, header read twice | here |
//! | | `offload_tx/hostile.rs`: offloads_that_were_not_accepted_are_dropped_and_counted |
//! | descriptor loops, next out of range, address wraps | `hostile.rs` |
//! | ring index wraps | `virtqueue`: event_idx_suppression_outlives_the_wrap, the property tests |
//! | | fuzz target split_ring |
//! | truncated messages with descriptors | here |
//! | use after free at shutdown | here; `interface.rs`: sigterm_ends_it_at_once_and_leaves_nothing |
//! | a ring of no entries | here |
//! | base index out of range | here |
//! | lost kicks | `sleep.rs`; loom models of `virtqueue` |
//! | memory truncated by the VMM | `hostile_vmm/truncated.rs` |
//! | memlock limit | `xsk`: memlock_too_small_says_how_much_is_needed |
//! | a starved fill ring that never recovers | here |
//! | sending stops unless kicked again; ring full | here |
//! | queue id beyond the channels | `xsk`: queue_beyond_the_channels_is_named_with_their_number |
//! | interface down, renamed, deleted | `interface.rs` |
//! | MTU or number of channels changed under load | `mtu.rs`, `network_mtu.rs`; here |
//! | a second program | `steer`: program_of_another_is_named_and_stays |
//! | a second daemon | `interface.rs`: second_daemon_on_the_same_interface_is_refused_and_the_first_goes_on |
//! | partial checksums and VLAN tags of veth, native and skb | `offload_rx/local_stack.rs`; `frames.rs`: frames_of_all_sizes_arrive_byte_exact_both_ways |
//! | UMEM overrun by one | here; `xsk`: adopt_checks_bounds_in_both_modes, |
//! | | frames_outside_or_misaligned_are_refused_and_not_recorded |
//! | a driver names a buffer twice (mlx5) | `dataplane`: buffers_that_a_nic_does_not_have_are_counted_and_nothing_else |
//! | program left attached after a crash | `interface.rs`: kill_leaves_no_program_and_no_queue_behind |

mod af_xdp;

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rstest::rstest;
use testkit::daemon::{Mode, Placement};
use testkit::driver::{self, HEADER};
use testkit::vmm::{inflight, longs, words};
use testkit::{
    Daemon, Driver, DriverConfig, Layout, NetNs, Rig, Serve, VethPair, frame, message, procfs, require, wait,
};
use vhost::VhostBackend;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures};
use virtqueue::GuestAddr;
use virtqueue::driver::{Buffer, GuestRam};

const MIB: u64 = 1 << 20;
const BUFFER: u32 = 2048;

fn daemon_on_null() -> (NetNs, Daemon) {
    let netns = NetNs::new("null");
    let daemon = Daemon::start(&netns, &Serve::null());
    (netns, daemon)
}

/// Sends one message as it is; whether the daemon refuses it, by an answer or by closing.
fn is_refused(driver: &Driver, request: FrontendReq, payload: &[u8], file: Option<BorrowedFd<'_>>) -> bool {
    let socket = driver.socket();
    message::send(socket, request, payload, file);
    let mut answer = [0; 20];
    let mut socket: &UnixStream = socket;
    socket.read_exact(&mut answer).is_err() || answer[12..] != [0; 8]
}

/// A good guest is served: for after something happened.
fn assert_serves(daemon: &mut Daemon) {
    daemon.process().check();
    Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("a good guest is accepted afterwards");
}

/// The daemon has no more descriptors than before when these guests have gone.
fn assert_leaks_no_descriptor(guests: impl Fn(&Daemon)) {
    let (_netns, mut daemon) = daemon_on_null();
    assert_serves(&mut daemon);
    let descriptors_when_idle = |daemon: &mut Daemon| {
        daemon.await_port(0, "idle", |port| port["connected"] == false);
        procfs::descriptors(daemon.process().pid())
    };
    let before = descriptors_when_idle(&mut daemon);
    guests(&daemon);
    assert!(
        wait::until(wait::SOON, || descriptors_when_idle(&mut daemon) <= before),
        "{before} descriptors before, {} after",
        procfs::descriptors(daemon.process().pid())
    );
    assert_serves(&mut daemon);
}

// ---- vhost -----------------------------------------------------------------------------------------------------

#[test]
fn cve_2019_14818_repeated_messages_leak_no_descriptors() {
    require!(Root);
    let (_netns, mut daemon) = daemon_on_null();
    let mut guest = Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
    let event = vmm_sys_util::eventfd::EventFd::new(0).expect("an eventfd");
    let mut counts = Vec::new();
    for _ in 0..3 {
        for _ in 0..30 {
            guest.set_memory().expect("accepted");
            let frontend = guest.frontend();
            frontend.set_vring_call(0, &event).expect("accepted");
            frontend.set_vring_kick(0, &event).expect("accepted");
            frontend.set_vring_err(0, &event).expect("accepted");
        }
        counts.push(procfs::descriptors(daemon.process().pid()));
    }
    // It may be dealing with the last messages still, and holds what came with one for a moment.
    let as_at_first = || procfs::descriptors(daemon.process().pid()) <= counts[0];
    assert!(wait::until(wait::SOON, as_at_first), "{counts:?}");
}

#[rstest]
#[case::with_a_message_that_has_none(FrontendReq::SET_OWNER, &[], 0)]
#[case::of_which_half_is_missing(FrontendReq::SET_MEM_TABLE, &[1, 0, 0, 0], 200)]
#[case::that_does_not_say_how_many(FrontendReq::ADD_MEM_REG, &[0; 12], -4)]
fn cve_2019_14818_truncated_message_with_descriptors_leaks_none(
    #[case] request: FrontendReq,
    #[case] payload: &[u8],
    #[case] lacks: i32,
) {
    require!(Root);
    assert_leaks_no_descriptor(|daemon| {
        for _ in 0..6 {
            let config = DriverConfig::default();
            let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), MIB)]).expect("memory"));
            let guest = Driver::greet(driver::connect(&daemon.socket()), &config, ram).expect("greeted");
            let file = guest.ram().regions().expect("descriptors").remove(0).file;
            message::send_saying(guest.socket(), request, payload, lacks, Some(file.as_fd()));
        }
    });
}

/// A guest that says this is refused, and the next one is served.
#[rstest]
#[case::cve_2020_10722_log_whose_offset_plus_size_wraps(FrontendReq::SET_LOG_BASE, longs([4096, u64::MAX - 100]))]
#[case::cve_2020_10722_log_of_all_there_is(FrontendReq::SET_LOG_BASE, longs([u64::MAX, 0]))]
#[case::cve_2020_10722_log_longer_than_its_file(FrontendReq::SET_LOG_BASE, longs([MIB + 1, 0]))]
#[case::cve_2020_10722_region_that_wraps(FrontendReq::ADD_MEM_REG, longs([0, u64::MAX - 4095, 8192, 1 << 40, 0]))]
#[case::cve_2020_10722_region_whose_offset_wraps(FrontendReq::ADD_MEM_REG, longs([0, 1 << 40, 8192, 1 << 40, u64::MAX - 4095]))]
#[case::cve_2020_10722_region_of_all_there_is(FrontendReq::ADD_MEM_REG, longs([0, 1 << 40, u64::MAX, 1 << 40, 0]))]
#[case::cve_2020_10723_size_of_vring_65536(FrontendReq::SET_VRING_NUM, words([0x1_0000, 64]))]
#[case::cve_2020_10723_base_of_vring_256(FrontendReq::SET_VRING_BASE, words([0x100, 0]))]
#[case::cve_2020_10723_enabling_vring_2_of_2(FrontendReq::SET_VRING_ENABLE, words([2, 1]))]
#[case::cve_2020_10723_address_of_vring_65536(FrontendReq::SET_VRING_ADDR, [words([0x1_0000, 0]), longs([0; 4])].concat())]
#[case::cve_2020_10723_stopping_vring_of_the_highest_index(FrontendReq::GET_VRING_BASE, words([u32::MAX, 0]))]
#[case::cve_2020_10723_kick_of_vring_255(FrontendReq::SET_VRING_KICK, longs([0x1ff]))]
#[case::ring_of_no_entries(FrontendReq::SET_VRING_NUM, words([0, 0]))]
#[case::ring_of_no_power_of_two(FrontendReq::SET_VRING_NUM, words([0, 100]))]
#[case::ring_of_more_than_32768(FrontendReq::SET_VRING_NUM, words([0, 65536]))]
#[case::base_out_of_range(FrontendReq::SET_VRING_BASE, words([0, 0x1_0000]))]
#[case::cve_2021_3839_longer_than_its_file(FrontendReq::SET_INFLIGHT_FD, inflight(MIB + 1, 0, 2, 256))]
#[case::cve_2021_3839_offset_plus_size_wraps(FrontendReq::SET_INFLIGHT_FD, inflight(8192, u64::MAX - 4095, 2, 256))]
#[case::cve_2021_3839_too_short_for_its_queues(FrontendReq::SET_INFLIGHT_FD, inflight(64, 0, 2, 256))]
#[case::cve_2021_3839_no_queues(FrontendReq::SET_INFLIGHT_FD, inflight(8192, 0, 0, 256))]
#[case::cve_2021_3839_queues_of_no_entries(FrontendReq::SET_INFLIGHT_FD, inflight(8192, 0, 2, 0))]
#[case::cve_2021_3839_as_many_as_can_be_said(
    FrontendReq::SET_INFLIGHT_FD,
    inflight(MIB, 0, u16::MAX, u16::MAX)
)]
fn what_cannot_be_is_refused(#[case] request: FrontendReq, #[case] payload: Vec<u8>) {
    require!(Root);
    let (_netns, mut daemon) = daemon_on_null();
    let guest = guest_with_all_messages(&daemon);
    let file = guest.ram().regions().expect("descriptors").remove(0).file;
    let takes_a_file = [
        FrontendReq::SET_LOG_BASE,
        FrontendReq::ADD_MEM_REG,
        FrontendReq::SET_INFLIGHT_FD,
    ];
    let file = takes_a_file.contains(&request).then(|| file.as_fd());
    assert!(is_refused(&guest, request, &payload, file));
    drop(guest);
    assert_serves(&mut daemon);
}

fn guest_with_all_messages(daemon: &Daemon) -> Driver {
    let further = VhostUserProtocolFeatures::INFLIGHT_SHMFD | VhostUserProtocolFeatures::LOG_SHMFD;
    let config = DriverConfig {
        protocol: DriverConfig::default().protocol | further,
        regions: vec![(GuestAddr(0), MIB)],
        ..DriverConfig::default()
    };
    Driver::connect(&daemon.socket(), &config).expect("accepted")
}

#[test]
fn cve_2021_3839_inflight_region_for_queues_that_are_not_there_is_not_made() {
    require!(Root);
    let (_netns, mut daemon) = daemon_on_null();
    let guest = guest_with_all_messages(&daemon);
    // 32 GiB, if it were. The only answer is the end of the connection.
    let payload = inflight(0, 0, u16::MAX, 32768);
    message::send(guest.socket(), FrontendReq::GET_INFLIGHT_FD, &payload, None);
    assert!(guest.await_close(wait::SOON), "it was made");
    drop(guest);
    assert_serves(&mut daemon);
}

#[test]
fn cve_2022_0669_stray_descriptors_with_inflight_messages_leak_none() {
    require!(Root);
    assert_leaks_no_descriptor(|daemon| {
        for request in [FrontendReq::GET_INFLIGHT_FD, FrontendReq::SET_INFLIGHT_FD] {
            // Few: after each fault the daemon waits longer before it accepts the VMM again.
            for _ in 0..3 {
                let guest = guest_with_all_messages(daemon);
                let file = guest.ram().regions().expect("descriptors").remove(0).file;
                // Three descriptors where one or none belongs.
                let region = inflight(8192, 0, 2, 256);
                message::send_files(guest.socket(), request, &region, &[file.as_fd(); 3]);
            }
        }
    });
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[rstest]
fn cve_2024_11614_header_that_changes_meanwhile_is_read_once(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut rig = Rig::new(placement, Mode::Native);
    let ram = Arc::clone(rig.driver.ram());
    let place = ram.alloc(4096, 64).expect("room");
    let sent = frame::plain(200, 3);
    ram.write(place, &[&[0; HEADER][..], &sent].concat());
    // NEEDS_CSUM with csum_start and csum_offset far behind the frame, or nothing.
    let over = AtomicBool::new(false);
    let mut arrived = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                ram.write(place, &[1, 1, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
                ram.write(place, &[0; 10]);
            }
        });
        // Also when something below panics, or the scope would wait for the thread above.
        let _stop = StopOnDrop(&over);
        for _ in 0..500 {
            let buffer = Buffer::readable(place, (HEADER + sent.len()) as u32);
            rig.driver.pairs[0].send_buffers(&[buffer], false);
            while let Some(got) = rig.wire.receive(Duration::ZERO) {
                frame::assert_same(&got, &sent);
                arrived += 1;
            }
        }
        rig.pair().await_sent();
    });
    for got in rig.flush_from_guest() {
        frame::assert_same(&got, &sent);
        arrived += 1;
    }
    let dropped = rig.daemon.counter("from_guest_offload_not_negotiated");
    assert_eq!(
        arrived + dropped,
        500,
        "{arrived} arrived, {dropped} were dropped"
    );
}

#[rstest]
fn use_after_free_at_shutdown_guest_that_vanishes_under_load(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let serve = Serve::interface(VethPair::NIC).placement(placement);
    let veth = VethPair::new();
    let mut daemon = Daemon::start(&veth.near, &serve);
    let sent = frame::plain(1000, 1);
    for round in 0..25 {
        let mut guest = Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
        guest.pairs[0].post(64, &[BUFFER]);
        let frames = vec![&sent[..]; 200];
        guest.pairs[0].send_batch(&frames, Layout::Whole);
        // At another moment each time; its memory goes with it.
        std::thread::sleep(Duration::from_micros(round * 40));
        drop(guest);
        daemon.process().check();
    }
    assert_serves(&mut daemon);
}
