//! Files that a VMM gives as guest memory, dirty log or inflight region, and that a daemon must not be hurt by: each closes or
//! refuses its own port, and a neighbour in the same process goes on.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, ftruncate, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
};
use testkit::driver::{self, F_PROTOCOL_FEATURES};
use testkit::{Daemon, Driver, DriverConfig, Layout, NetNs, Serve, frame, message, require, wait};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{FrontendReq, VhostUserInflight, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtqueue::GuestAddr;
use virtqueue::driver::GuestRam;

const MIB: u64 = 1 << 20;

/// `VHOST_F_LOG_ALL`.
const F_LOG_ALL: u64 = 1 << 26;

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

    /// One whose queues run.
    fn running(&self) -> Driver {
        Driver::connect(&self.daemon.path("port0.sock"), &hostile_config()).expect("accepted")
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
        assert!(
            hostile.await_close(wait::SOON),
            "the port was not closed; the daemon said:\n{}",
            self.daemon.said()
        );
        self.daemon.process().check();
        self.daemon.await_port(0, reason, |port| {
            let [why, detail] = [0, 1].map(|at| port["last_closed"][at].as_str().unwrap_or_default());
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

/// A tmpfs that nobody has mounted anywhere, full to the last page; and a file on it that has none.
fn file_without_memory(bytes: u64) -> OwnedFd {
    let tmpfs = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).expect("tmpfs");
    fsconfig_set_string(tmpfs.as_fd(), "size", "64k").expect("a size");
    fsconfig_create(tmpfs.as_fd()).expect("made");
    let root = fsmount(
        tmpfs.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::empty(),
    )
    .expect("a mount");
    let open = |name| {
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
        openat(&root, name, flags, Mode::RUSR | Mode::WUSR).expect("a file")
    };
    let (filler, page) = (open("filler"), [1; 4096]);
    let filled = (0..)
        .take_while(|_| rustix::io::write(&filler, &page).is_ok())
        .count();
    assert!((1..=16).contains(&filled), "{filled} pages of 16");
    let file = open("sparse");
    ftruncate(&file, bytes).expect("any length");
    file
}

fn longs<const N: usize>(longs: [u64; N]) -> Vec<u8> {
    longs.into_iter().flat_map(u64::to_ne_bytes).collect()
}

/// SET_INFLIGHT_FD for two queues of 256 entries.
fn set_inflight(driver: &mut Driver, file: &OwnedFd, bytes: u64) {
    let region = VhostUserInflight::new(bytes, 0, 2, 256);
    // What comes of it is looked at elsewhere.
    let _ = driver.frontend().set_inflight_fd(&region, file.as_raw_fd());
}

/// SET_LOG_BASE.
fn set_log(driver: &Driver, file: BorrowedFd<'_>, bytes: u64) {
    message::send(
        driver.socket(),
        FrontendReq::SET_LOG_BASE,
        &longs([bytes, 0]),
        Some(file),
    );
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

/// Starts both vrings in memory at `user`, of which this process knows nothing.
fn start_vrings(driver: &mut Driver, user: u64) {
    let event = vmm_sys_util::eventfd::EventFd::new(0).expect("an eventfd");
    for index in 0..2 {
        let at = user + index as u64 * 0x8000;
        let config = VringConfigData {
            queue_max_size: 256,
            queue_size: 256,
            flags: 0,
            desc_table_addr: at,
            used_ring_addr: at + 0x2000,
            avail_ring_addr: at + 0x1000,
            log_addr: None,
        };
        let frontend = driver.frontend();
        let said = (frontend.set_vring_num(index, 256))
            .and_then(|()| frontend.set_vring_addr(index, &config))
            .and_then(|()| frontend.set_vring_base(index, 0))
            .and_then(|()| frontend.set_vring_call(index, &event))
            .and_then(|()| frontend.set_vring_kick(index, &event));
        // The port may be closed by now.
        if said.is_err() {
            return;
        }
    }
}

// ---- no memory behind it ---------------------------------------------------------------------------------------

#[test]
fn inflight_region_on_a_full_tmpfs_closes_only_its_port() {
    require!(Root);
    let mut neighbours = Neighbours::new();
    let mut hostile = neighbours.hostile();
    set_inflight(&mut hostile, &file_without_memory(MIB), MIB);
    neighbours.assert_only_one_is_closed(&hostile, "memory-truncated", &[]);
}

#[test]
fn dirty_log_on_a_full_tmpfs_closes_only_its_port() {
    require!(Root);
    let mut neighbours = Neighbours::new();
    let mut hostile = neighbours.running();
    set_log(&hostile, file_without_memory(4096).as_fd(), 4096);
    let _ = message::receive(hostile.socket());
    let features = hostile.features() | F_LOG_ALL;
    // What the lane writes is noted in the log at once: the connection may be over before the answer.
    let _ = hostile.frontend().set_features(features);
    hostile.pairs[0].send(&frame::plain(80, 0x22), Layout::Whole);
    neighbours.assert_only_one_is_closed(&hostile, "memory-truncated", &[]);
}

#[test]
fn guest_memory_on_a_full_tmpfs_closes_only_its_port() {
    require!(Root);
    let mut neighbours = Neighbours::new();
    let mut hostile = neighbours.hostile();
    let file = file_without_memory(MIB);
    let user = 0x7000_0000_0000;
    let table = [region(&file, (0, user, MIB, 0))];
    hostile
        .frontend()
        .set_mem_table(&table)
        .expect("a table like others");
    start_vrings(&mut hostile, user);
    neighbours.assert_only_one_is_closed(&hostile, "memory-truncated", &[]);
}
