//! DPDK's testpmd over virtio-user, as a guest that sends every frame back.
//!
//! It needs memory that it can share, which is huge pages in a hugetlbfs: the pages are added to those of the machine
//! and taken away again, the file system is mounted in a directory of its own. Both its cores share CPU 0; the main one
//! only waits (`--lcores (0,1)@0`). It runs until a newline comes on its standard input.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::process::run;
use crate::{HugePages, Running, wait};

/// 64 MiB of memory for the guest, in pages of 2 MiB.
const NEEDED: u64 = 32;
/// More than that: until it has taken its pages, daemons of tests that run beside it may take some for their packet
/// memory.
const FOR_OTHERS: u64 = 64;

/// Huge pages and a file system with them. Given back on drop.
struct Memory {
    dir: TempDir,
    /// Dropped when nothing is mounted any more.
    _pages: HugePages,
}

impl Memory {
    fn new() -> Self {
        let pages = HugePages::more(NEEDED + FOR_OTHERS).or_else(|| HugePages::more(NEEDED));
        let pages = pages.unwrap_or_else(|| panic!("this machine cannot have {NEEDED} huge pages more"));
        let dir = crate::directory::private_dir();
        let path = dir.path().to_str().expect("made of ASCII");
        run(
            "mount",
            &["-t", "hugetlbfs", "-o", "pagesize=2M", "vax-test", path],
        );
        Self { dir, _pages: pages }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.dir.path()).output();
    }
}

/// A running testpmd. Asked to end on drop, and killed if it does not.
#[must_use]
pub struct Testpmd {
    running: Running,
    runtime: PathBuf,
    _memory: Memory,
}

impl Testpmd {
    /// Starts one that sends every frame back, as its forwarding mode says: `io` as it is, `macswap` with its addresses
    /// swapped. Waits until it forwards. `options` are virtio-user's, such as `packed_vq=0,mrg_rxbuf=1`.
    ///
    /// # Panics
    /// If it does not come up.
    pub fn start(socket: &Path, options: &str, mode: &str) -> Self {
        let memory = Memory::new();
        let prefix = format!("vax-test-{}", std::process::id());
        // Its output is a pipe, and so in blocks unless told otherwise.
        let mut command = Command::new("stdbuf");
        command.args([
            "-oL",
            "dpdk-testpmd",
            "--lcores",
            "(0,1)@0",
            "--no-pci",
            "-m",
            &(2 * NEEDED).to_string(),
        ]);
        command
            .args(["--single-file-segments", "--file-prefix", &prefix, "--huge-dir"])
            .arg(memory.dir.path());
        command.arg("--vdev").arg(format!(
            "net_virtio_user0,path={},queues=1,{options}",
            socket.display()
        ));
        command.args([
            "--",
            &format!("--forward-mode={mode}"),
            "--total-num-mbufs=8192",
            "--auto-start",
        ]);
        let mut testpmd = Self {
            running: Running::start(command),
            runtime: Path::new("/var/run/dpdk").join(&prefix),
            _memory: memory,
        };
        testpmd.running.await_text("Press enter to exit");
        testpmd
    }

    /// The process.
    pub fn process(&mut self) -> &mut Running {
        &mut self.running
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        if self.running.ended().is_none() {
            self.running.type_in("\n");
            wait::until(wait::SOON, || self.running.ended().is_some());
        }
        let _ = std::fs::remove_dir_all(&self.runtime);
    }
}
