//! DPDK's testpmd over virtio-user, as a guest that sends every frame back.
//!
//! It needs memory that it can share, which is huge pages in a hugetlbfs: the pages are added to those of the machine and taken
//! away again, the file system is mounted in a directory of its own. Both its cores share CPU 0; the main one
//! only waits (`--lcores (0,1)@0`). It runs until a newline comes on its standard input.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::process::run;
use crate::{Running, wait};

const HUGEPAGES: &str = "/proc/sys/vm/nr_hugepages";
/// 128 MiB of memory for the guest, in pages of 2 MiB.
const NEEDED: u64 = 64;

/// Huge pages and a file system with them. Given back on drop.
struct Hugepages {
    dir: TempDir,
    /// (found, set): the number to go back to, if it is still the one that was set.
    raised: Option<(u64, u64)>,
}

impl Hugepages {
    fn new() -> Self {
        let free: u64 = meminfo("HugePages_Free").unwrap_or(0);
        let raised = (free < NEEDED).then(|| {
            let found = pages();
            std::fs::write(HUGEPAGES, (found + NEEDED - free).to_string()).expect("we are root");
            (found, pages())
        });
        let dir = crate::daemon::private_dir();
        let path = dir.path().to_str().expect("made of ASCII");
        run(
            "mount",
            &["-t", "hugetlbfs", "-o", "pagesize=2M", "vax-test", path],
        );
        Self { dir, raised }
    }
}

impl Drop for Hugepages {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.dir.path()).output();
        if let Some((found, set)) = self.raised
            && pages() == set
        {
            let _ = std::fs::write(HUGEPAGES, found.to_string());
        }
    }
}

fn pages() -> u64 {
    std::fs::read_to_string(HUGEPAGES)
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0)
}

fn meminfo(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    line.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// A running testpmd. Asked to end on drop, and killed if it does not.
pub struct Testpmd {
    running: Running,
    runtime: PathBuf,
    _memory: Hugepages,
}

impl Testpmd {
    /// Starts one that sends every frame back as it is, and waits until it forwards. `options` are virtio-user's, such
    /// as `packed_vq=0,mrg_rxbuf=1`.
    ///
    /// # Panics
    /// If it does not come up.
    #[must_use]
    pub fn echo(socket: &Path, options: &str) -> Self {
        let memory = Hugepages::new();
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
            "128",
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
            "--forward-mode=io",
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
