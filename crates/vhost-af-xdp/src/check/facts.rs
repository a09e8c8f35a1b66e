//! Reads what is known of an interface, and changes nothing. `not_seen` lists what could not be read, and why.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::Context as _;
use common::drivers::{self, Line};
use host::links::below::losses_above;
use host::links::bridge::bridge_of;
use host::links::{DriverXdp, Link};
use host::nic::{Ethtool, Steering, Tags};
use program::steward::DEFAULT_SOCKET;
use rustix::process::{Resource, getrlimit};
use rustix::thread::CapabilitySet;
use serde::Serialize;
use steer::{ForeignProgram, HintSet, program_on, unnamed_program_on};
use steward::capabilities;

use crate::api::queues::{self, Queue};
use client::{connection, directories};

const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages";

/// Huge pages of one size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct HugePages {
    pub(super) page_bytes: u64,
    pub(super) total: u64,
    pub(super) free: u64,
}

/// What is known of an interface, its driver, this kernel and this process.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub(super) link: Link,
    /// None: the kernel does not say.
    pub(super) carrier: Option<bool>,
    /// It is the loopback interface.
    pub(super) loopback: bool,
    /// The bridge that it is a port of.
    pub(super) bridge: Option<String>,
    /// Packets that are lost because it is on top of other interfaces; may be empty.
    pub(super) losses: String,
    pub(super) kernel: Option<(u32, u32)>,
    pub(super) release: String,
    /// What the driver reports; none before Linux 6.3.
    pub(super) driver: Option<DriverXdp>,
    /// The driver's line in the table of drivers.
    pub(super) line: Option<&'static Line>,
    /// The XDP program that is attached.
    pub(super) program: Option<ForeignProgram>,
    /// Most receive queues that the driver allows.
    pub(super) most_queues: Option<u32>,
    /// Number of n-tuple rules, or why there cannot be any.
    pub(super) rules: Result<usize, String>,
    /// Number of RSS contexts besides the main one, or why there cannot be any.
    pub(super) contexts: Result<usize, String>,
    pub(super) tags: Tags,
    /// Hints that the driver can report; none before Linux 6.3.
    pub(super) hints: Option<HintSet>,
    /// Its queues and who uses them.
    pub(super) queues: Vec<Queue>,
    /// Capabilities that this process lacks to start a daemon without a steward.
    pub(super) lacking: Vec<&'static str>,
    /// RLIMIT_MEMLOCK, bytes; none: no limit.
    pub(super) memlock_bytes: Option<u64>,
    /// CAP_IPC_LOCK: the limit does not count.
    pub(super) locks_any: bool,
    pub(super) huge_pages: Vec<HugePages>,
    /// There is a steward's socket at `steward_at`.
    pub(super) steward: bool,
    /// The path of the steward's socket: as given, or the default.
    pub(super) steward_at: String,
    /// What could not be seen, and why.
    pub(super) not_seen: Vec<String>,
}

impl Facts {
    /// Reads an interface of this network namespace. Asks the daemon at `control`, or all that are found, and the
    /// steward at `steward` or at the default path.
    /// Errors: there is no such interface, or the kernel does not answer.
    pub(super) fn of(
        interface: &str,
        control: Option<&Path>,
        steward: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let link = Link::by_name(interface)?;
        let mut not_seen = Vec::new();
        let driver = DriverXdp::by_index(link.index);
        if driver.is_none() {
            not_seen.push(
                "what the driver does natively and in zero-copy: the kernel does not say (Linux 6.3 does); use --try"
                    .to_owned(),
            );
        }
        let program = program_of(link.index, &mut not_seen);
        let queues = queues_of(interface, control, steward, &mut not_seen);
        let ethtool = Ethtool::open(interface).context("cannot ask the driver")?;
        let lacking =
            |set| program::capabilities::lacking(set).context("cannot see the capabilities of this process");
        if !rustix::process::geteuid().is_root() {
            not_seen.push("daemons and leases of other users: root sees them".to_owned());
        }
        let uname = rustix::system::uname();
        let steward_at = steward.unwrap_or(Path::new(DEFAULT_SOCKET));
        Ok(Self {
            carrier: Link::has_carrier(link.index).ok(),
            loopback: Link::is_loopback(link.index).unwrap_or(false),
            bridge: bridge_of(link.index).unwrap_or_default(),
            losses: losses_above(&link).unwrap_or_default(),
            kernel: drivers::kernel(),
            release: uname.release().to_string_lossy().into_owned(),
            driver,
            line: drivers::line(&link.driver),
            program,
            most_queues: ethtool.most_receive_queues().ok(),
            rules: count(ethtool.table().map(|table| table.rules)),
            contexts: count(ethtool.contexts()),
            tags: ethtool.tags(),
            hints: HintSet::of_driver(link.index).ok(),
            queues,
            lacking: lacking(capabilities::NEEDED_BY_ONE)?,
            memlock_bytes: getrlimit(Resource::Memlock).current,
            locks_any: lacking(CapabilitySet::IPC_LOCK)?.is_empty(),
            huge_pages: huge_pages(Path::new(HUGE_PAGES)),
            steward: steward_at.exists(),
            steward_at: steward_at.display().to_string(),
            not_seen,
            link,
        })
    }

    /// Queues that nobody is known to use.
    pub(super) fn free_queues(&self) -> Vec<u32> {
        let taken = |number: u32| {
            let mut held = self.queues.iter().filter(|queue| !queue.is_free());
            held.any(|queue| queue.queue == number)
        };
        (0..self.link.rx_queues).filter(|&queue| !taken(queue)).collect()
    }
}

/// Its queues and who uses them, as far as that can be read.
fn queues_of(
    interface: &str,
    control: Option<&Path>,
    steward: Option<&Path>,
    not_seen: &mut Vec<String>,
) -> Vec<Queue> {
    if let Some(path) = control
        && let Err(error) = connection::status(path)
    {
        not_seen.push(format!(
            "which daemon has which queue: {}",
            connection::no_answer(path, &error)
        ));
    }
    let controls = control.map_or_else(directories::find_all, |path| vec![path.to_owned()]);
    let queues = queues::read(Some(interface), &controls, steward).unwrap_or_else(|error| {
        not_seen.push(format!("who has which queue: {error:#}"));
        Vec::new()
    });
    if queues.is_empty() {
        not_seen.push("what is bound to the queues: Linux 6.8 shows it while the interface is up".to_owned());
    }
    queues
}

fn program_of(ifindex: u32, not_seen: &mut Vec<String>) -> Option<ForeignProgram> {
    match unnamed_program_on(ifindex) {
        Ok(None) => None,
        // With its name, if this process may read it.
        Ok(unnamed) => program_on(ifindex).or(unnamed),
        Err(error) => {
            not_seen.push(format!("whether there is an XDP program already: {error}"));
            None
        }
    }
}

fn count<T>(found: io::Result<Vec<T>>) -> Result<usize, String> {
    match found {
        Ok(found) => Ok(found.len()),
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Err("the driver has none".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Reads the directories `hugepages-NkB` (Documentation/admin-guide/mm/hugetlbpage.rst).
fn huge_pages(directory: &Path) -> Vec<HugePages> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let of = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let kib: u64 = name
            .strip_prefix("hugepages-")?
            .strip_suffix("kB")?
            .parse()
            .ok()?;
        let read = |file| {
            let text = fs::read_to_string(entry.path().join(file)).ok()?;
            text.trim().parse().ok()
        };
        Some(HugePages {
            page_bytes: kib.checked_mul(1024)?,
            total: read("nr_hugepages")?,
            free: read("free_hugepages")?,
        })
    };
    let mut found: Vec<_> = entries.filter_map(of).collect();
    found.sort_unstable_by_key(|pages| pages.page_bytes);
    found
}
