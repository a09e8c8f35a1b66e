//! Files that a VMM gives as guest memory, dirty log or inflight region, and that a daemon must not be hurt by: each
//! closes or refuses its own port, and a neighbour in the same process goes on.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use rstest::rstest;
use rustix::fs::ftruncate;
use testkit::driver::{self, F_PROTOCOL_FEATURES};
use testkit::{Daemon, Driver, DriverConfig, Layout, NetNs, Serve, frame, procfs, require, wait};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserInflight, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo};
use virtqueue::GuestAddr;
use virtqueue::driver::GuestRam;

const MIB: u64 = 1 << 20;

/// A guest that is served, and a port beside it in the same process for one that does wrong.
struct Neighbours {
    daemon: Daemon,
    honest: Driver,
    _netns: NetNs,
}

impl Neighbours {
    fn new() -> Self {
        Self::with(&Serve::null())
    }

    fn with(serve: &Serve) -> Self {
        let netns = NetNs::new("memory");
        let daemon = Daemon::start_ports(&netns, serve, &["queues=1", "queues=1"]);
        let honest = Driver::connect(&daemon.path("port1.sock"), &DriverConfig::default());
        Self {
            honest: honest.expect("accepted"),
            daemon,
            _netns: netns,
        }
    }

    /// One that speaks for itself from here on: features are acknowledged, nothing else was said.
    fn hostile(&self) -> Driver {
        let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), MIB)]).expect("memory"));
        let socket = driver::connect(&self.daemon.path("port0.sock"));
        let mut driver = Driver::greet(socket, &hostile_config(), ram).expect("greeted");
        let features = driver::F_VERSION_1 | F_PROTOCOL_FEATURES;
        driver.frontend().set_features(features).expect("offered");
        driver
    }

    /// The hostile port is closed for that reason, the neighbour goes on, and an ordinary guest may come.
    fn assert_only_one_is_closed(&mut self, hostile: &Driver, reason: &str, words: &[&str]) {
        assert!(hostile.await_close(wait::SOON), "the port was not closed");
        self.daemon.process().check();
        self.daemon.await_port(0, reason, |port| {
            let [why, detail] =
                ["reason", "detail"].map(|at| port["last_closed"][at].as_str().unwrap_or_default());
            why == reason && words.iter().all(|word| detail.contains(word))
        });
        self.honest.pairs[0].send(&frame::plain(80, 0x11), Layout::Whole);
        self.honest.pairs[0].await_sent();
        assert!(
            !self.honest.await_close(wait::QUIET),
            "the neighbour was closed, too"
        );
        Driver::connect(&self.daemon.path("port0.sock"), &DriverConfig::default()).expect("it may come back");
    }
}

fn hostile_config() -> DriverConfig {
    DriverConfig {
        protocol: DriverConfig::default().protocol
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD,
        ..DriverConfig::default()
    }
}

/// SET_INFLIGHT_FD for two queues of 256 entries.
fn set_inflight(driver: &mut Driver, file: &OwnedFd, bytes: u64) {
    let region = VhostUserInflight::new(bytes, 0, 2, 256);
    // What comes of it is looked at elsewhere.
    let _ = driver.frontend().set_inflight_fd(&region, file.as_raw_fd());
}

/// SET_LOG_BASE.
fn set_log(driver: &mut Driver, file: &OwnedFd, bytes: u64) -> bool {
    let region = VhostUserDirtyLogRegion {
        mmap_size: bytes,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    driver.frontend().set_log_base(0, Some(region)).is_ok()
}

fn region(file: &OwnedFd, (guest, user, bytes, offset): (u64, u64, u64, u64)) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: guest,
        memory_size: bytes,
        userspace_addr: user,
        mmap_offset: offset,
        mmap_handle: file.as_raw_fd(),
    }
}

// ---- files that may never answer -------------------------------------------------------------------------------

/// A file on whatever the programs were built on, which is no memory; `None` where that is one.
fn file_on_disk(bytes: u64) -> Option<OwnedFd> {
    let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let file: OwnedFd = tempfile::tempfile_in(directory).expect("a file").into();
    ftruncate(&file, bytes).expect("any length");
    let is_memory = rustix::fs::fcntl_get_seals(&file).is_ok();
    if is_memory {
        println!("SKIPPED: the sources are on a tmpfs");
    }
    (!is_memory).then_some(file)
}

/// What is given as memory in each of its three ways.
type Give = fn(&mut Driver, &OwnedFd);

fn as_ram(driver: &mut Driver, file: &OwnedFd) {
    let table = [region(file, (0, 0x7000_0000_0000, MIB, 0))];
    let _ = driver.frontend().set_mem_table(&table);
}

fn as_slot(driver: &mut Driver, file: &OwnedFd) {
    let _ = driver
        .frontend()
        .add_mem_region(&region(file, (0, 0x7000_0000_0000, MIB, 0)));
}

fn as_log(driver: &mut Driver, file: &OwnedFd) {
    set_log(driver, file, 4096);
}

fn as_inflight(driver: &mut Driver, file: &OwnedFd) {
    set_inflight(driver, file, MIB);
}

#[rstest]
#[case::guest_memory(as_ram)]
#[case::memory_slot(as_slot)]
#[case::dirty_log(as_log)]
#[case::inflight_region(as_inflight)]
fn file_of_a_disk_is_refused_by_name_with_the_remedy(#[case] give: Give) {
    require!(Root);
    let Some(file) = file_on_disk(MIB) else { return };
    let mut neighbours = Neighbours::new();
    let mut hostile = neighbours.hostile();
    give(&mut hostile, &file);
    let words = [
        "not a shared memory file",
        "memory-files=any",
        "crates/testkit/",
        "(deleted)",
    ];
    neighbours.assert_only_one_is_closed(&hostile, "refused", &words);
}

#[rstest]
#[case::guest_memory(as_ram)]
#[case::dirty_log(as_log)]
#[case::inflight_region(as_inflight)]
fn file_of_a_disk_is_accepted_where_any_is(#[case] give: Give) {
    require!(Root);
    let Some(file) = file_on_disk(MIB) else { return };
    let neighbours = Neighbours::with(&Serve::null().with("--memory-files", "any"));
    let mut hostile = neighbours.hostile();
    give(&mut hostile, &file);
    assert!(!hostile.await_close(wait::QUIET));
    hostile.frontend().get_features().expect("the port answers");
}

// ---- more than there is ----------------------------------------------------------------------------------------

/// A file of any length, which costs nothing.
fn sparse(bytes: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("sparse", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
    ftruncate(&file, bytes).expect("any length");
    file
}

const TIB: u64 = 1 << 40;

#[test]
fn guest_of_86_tib_is_refused_beside_one_of_32_gib() {
    require!(Root);
    let mut neighbours = Neighbours::with(&Serve::null().with("--max-memory", "32G"));
    // In as many regions as a message has.
    let file = sparse(86 * TIB);
    let piece = 86 * TIB / 8;
    let table: Vec<_> = (0..8)
        .map(|at| region(&file, (at * piece, at * piece, piece, at * piece)))
        .collect();
    let mut hostile = neighbours.hostile();
    let _ = hostile.frontend().set_mem_table(&table);
    neighbours.assert_only_one_is_closed(&hostile, "refused", &["94557999988736", "max-memory"]);
    let large = DriverConfig::with_memory(vec![(GuestAddr(0), 2 << 30), (GuestAddr(4 << 30), 30 << 30)]);
    let large = Driver::connect(&neighbours.daemon.path("port0.sock"), &large);
    large.expect("as much as is allowed");
}

#[test]
fn memory_of_the_machine_is_the_limit_where_none_is_said() {
    require!(Root);
    let mut neighbours = Neighbours::new();
    let mut hostile = neighbours.hostile();
    let file = sparse(86 * TIB);
    let _ = hostile
        .frontend()
        .set_mem_table(&[region(&file, (0, 0, 86 * TIB, 0))]);
    neighbours.assert_only_one_is_closed(&hostile, "refused", &["94557999988736", "max-memory"]);
}

#[test]
fn slots_count_together() {
    require!(Root);
    let mut neighbours = Neighbours::with(&Serve::null().with("--max-memory", "128M"));
    let mut hostile = neighbours.hostile();
    for at in 0..3u64 {
        let file = sparse(64 * MIB);
        let slot = region(&file, (at * 64 * MIB, at * 64 * MIB, 64 * MIB, 0));
        let added = hostile.frontend().add_mem_region(&slot);
        assert_eq!(added.is_ok(), at < 2, "slot {at}");
    }
    neighbours.assert_only_one_is_closed(&hostile, "refused", &["201326592", "134217728", "max-memory"]);
}

#[test]
fn dirty_log_of_42_tib_is_refused_and_that_of_a_large_guest_is_not() {
    require!(Root);
    let mut neighbours = Neighbours::with(&Serve::null().with("--max-memory", "4G"));
    let mut hostile = neighbours.hostile();
    // RAM from 1 TiB on, as on AMD machines.
    let long = (TIB + (4 << 30)) / 4096 / 8;
    assert!(set_log(&mut hostile, &sparse(long), long));
    assert!(!set_log(&mut hostile, &sparse(42 * TIB), 42 * TIB));
    neighbours.assert_only_one_is_closed(&hostile, "refused", &["46179488366592", "max-memory"]);
}

#[test]
fn inflight_region_is_mapped_as_far_as_it_is_needed() {
    require!(Root);
    let mut neighbours = Neighbours::new();
    let mut hostile = neighbours.hostile();
    set_inflight(&mut hostile, &sparse(42 * TIB), 42 * TIB);
    hostile.frontend().get_features().expect("the port answers");
    let kib = procfs::number(neighbours.daemon.process().pid(), "VmSize");
    assert!(kib < TIB >> 10, "{kib} KiB of address space");
}
