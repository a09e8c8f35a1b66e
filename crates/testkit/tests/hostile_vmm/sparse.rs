//! Files with no page behind them, and none to be had: touching one is SIGBUS.

use std::os::fd::OwnedFd;

use rstest::rstest;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;
use testkit::bystander::come_in_peace;
use testkit::daemon::{Placement, private_dir};
use testkit::vmm::{LOG, RAM, Shared, Vmm, inflight_bytes, memory};
use testkit::{Bystander, HugePages, require};

/// A tmpfs with no page left. Unmounted on drop.
struct FullTmpfs(TempDir);

impl FullTmpfs {
    fn new() -> Self {
        let dir = private_dir();
        mount("tmpfs", dir.path(), "tmpfs", MountFlags::empty(), c"size=16k").expect("we are root");
        let full = Self(dir);
        std::fs::write(full.0.path().join("fill"), [1; 16 << 10]).expect("room for so much");
        full
    }

    fn sparse_file(&self, bytes: u64) -> OwnedFd {
        let file = tempfile::tempfile_in(&self.0).expect("an inode is left");
        file.set_len(bytes).expect("it needs no page");
        file.into()
    }
}

impl Drop for FullTmpfs {
    fn drop(&mut self) {
        let _ = unmount(self.0.path(), UnmountFlags::DETACH);
    }
}

/// Guest memory, log, inflight: the given one of them sparse.
fn files(packed: bool, sparse: usize, make: impl Fn(u64) -> OwnedFd) -> [OwnedFd; 3] {
    let bytes = [RAM, LOG, inflight_bytes(packed)];
    [0, 1, 2].map(|at| {
        if at == sparse {
            make(bytes[at])
        } else {
            memory(bytes[at])
        }
    })
}

#[rstest]
fn sparse_file_on_a_full_tmpfs_harms_nobody_else(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let full = FullTmpfs::new();
    let scene = Bystander::new(placement, 1);
    let socket = scene.socket(1);
    for (file, packed) in [
        (0, false),
        (1, false),
        (2, false),
        (0, true),
        (1, true),
        (2, true),
    ] {
        let shared = Shared::of(files(packed, file, |bytes| full.sparse_file(bytes)), packed);
        let acts = shared.session();
        let done = Vmm::connect(&socket)
            .perform(&shared, &acts)
            .expect("answered or closed");
        // A worker may not have looked before the session was over; what the control thread reads itself it must
        // refuse.
        assert!(
            file != 2 || done < acts.len(),
            "an inflight region that cannot be read was accepted"
        );
        come_in_peace(&socket);
    }
    scene.assert_unharmed();
}

/// A file of 2 MiB pages, sparse.
fn huge(bytes: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let file = memfd_create("huge", flags).expect("a kernel with huge pages");
    ftruncate(&file, bytes.next_multiple_of(2 << 20)).expect("it needs no page");
    file
}

#[test]
fn huge_pages_that_there_are_none_of_or_that_are_cut_off_harm_nobody_else() {
    require!(Root);
    let scene = Bystander::new(Placement::Copy, 1);
    let socket = scene.socket(1);
    let shared = |file| Shared::as_they_are(files(false, file, huge), false);
    for file in 0..3 {
        let shared = shared(file);
        let done = Vmm::connect(&socket).perform(&shared, &shared.session());
        done.expect("answered or closed");
        come_in_peace(&socket);
    }
    if let Some(_pool) = HugePages::more(4) {
        for file in 0..3 {
            let whole = shared(file).session().len();
            for at in (5..=whole).step_by(3) {
                let shared = shared(file);
                let (acts, vmm) = (shared.session(), Vmm::connect(&socket));
                let (before, after) = acts.split_at(at);
                if vmm.perform(&shared, before).expect("answered or closed") == at {
                    ftruncate(shared.files()[file], 0).expect("not sealed");
                    vmm.perform(&shared, after).expect("answered or closed");
                }
                come_in_peace(&socket);
            }
        }
    }
    scene.assert_unharmed();
}
