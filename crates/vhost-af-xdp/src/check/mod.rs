//! `vhost-af-xdp check IFACE`: says before anything is started what an interface, its driver, this kernel and this
//! process will give, why not more, and what to type.
//!
//! # Theory of operation
//! [`seen`] reads what is there; nothing is attached, bound or set. [`expected`] asks the same conditions that `serve`
//! goes by ([`common::binding`]), with what was seen and with the best that a guest and its VMM can be, and takes its
//! words from the same places as `status`. [`advice`] says what to type, [`view`] puts all of it into tables. What
//! needs a try to be known is said by [`trial`], and only if it was asked for.

mod advice;
mod expected;
mod held;
mod host;
mod kernels;
mod loopback;
mod netkit;
mod network;
mod seen;
mod trial;
mod view;

use std::path::PathBuf;

use clap::Args;
use common::drivers;
use serde::Serialize;
use steer::{HintSet, mac_text};
use steward::hardware::Tags;

use self::advice::Advice;
use self::expected::Expected;
use self::network::NetworkReport;
use self::seen::{HugePages, Seen};
use self::trial::Tried;
use crate::api::queues::Queue;
use crate::config::Placement;
use crate::nic::endpoint::COPY_BYTES;
use crate::nic::hints;

pub(crate) const CHECK_EXAMPLES: &str = "\
Examples:
  What eth1 will give:
    vhost-af-xdp check eth1
  The same, tried on a queue that is free (a NIC may lose its link for a moment):
    vhost-af-xdp check eth1 --try
  The mode that copy placement will be in:
    vhost-af-xdp check eth1 --json | jq -r '.placements[] | select(.placement == \"copy\") | .mode'";

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// The interface
    #[arg(value_name = "IFNAME")]
    interface: String,
    /// Attach a program and bind a free queue for a moment, and say what came of it; all of it is taken back
    #[arg(long = "try")]
    attempt: bool,
    /// Control socket of the one daemon to ask for its queues [default: all that are found]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// Socket of the steward to ask for leases [default: /run/vhost-af-xdp/steward.sock, if one is there]
    #[arg(long, value_name = "PATH")]
    steward: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// All that is said.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    interface: InterfaceReport,
    driver: DriverReport,
    kernel: KernelReport,
    /// The XDP program that is on the interface.
    program: Option<String>,
    placements: Vec<Expected>,
    /// What a network gives that has all of it as its uplink.
    network: NetworkReport,
    /// What the host's own traffic will cost.
    host: Option<String>,
    queues: Vec<Queue>,
    /// Queues that nobody is seen to have.
    free_queues: Vec<u32>,
    /// Who has the others, in words.
    held_queues: Vec<String>,
    steering: SteeringReport,
    hints: HintsReport,
    memory: MemoryReport,
    /// Capabilities that a daemon needs without a steward, and that this process lacks.
    lacking_capabilities: Vec<&'static str>,
    /// A steward's socket is where one is by default.
    steward: bool,
    #[serde(rename = "type")]
    advice: Vec<Advice>,
    /// What could not be seen, and why.
    not_seen: Vec<String>,
    /// With `--try`.
    tried: Option<Tried>,
}

#[derive(Debug, Clone, Serialize)]
struct InterfaceReport {
    name: String,
    index: u32,
    mtu: u32,
    mac: String,
    up: bool,
    /// None: the kernel does not say.
    carrier: Option<bool>,
    receive_queues: u32,
    /// What `ethtool -L` can make of them; none: the driver does not say.
    most_receive_queues: Option<u32>,
    iommu_translates: bool,
}

#[derive(Debug, Clone, Serialize)]
struct DriverReport {
    /// Empty: the kernel does not name it.
    name: String,
    /// What it says of itself; none: nothing.
    native: Option<bool>,
    zero_copy: Option<bool>,
    pieces: Option<bool>,
    checksums: Option<bool>,
    /// What the table of drivers says.
    known: String,
}

#[derive(Debug, Clone, Serialize)]
struct KernelReport {
    release: String,
    lacks: Vec<Lack>,
}

#[derive(Debug, Clone, Serialize)]
struct Lack {
    /// The first version that has it.
    from: String,
    what: &'static str,
}

#[derive(Debug, Clone, Serialize)]
struct SteeringReport {
    /// N-tuple rules that there are; none: there can be none.
    rules: Option<usize>,
    /// Why not.
    rules_why: Option<String>,
    /// RSS contexts beside the main one; none: there can be none.
    contexts: Option<usize>,
    contexts_why: Option<String>,
    /// Whether `--vlan` works, and why not.
    vlans: String,
}

#[derive(Debug, Clone, Serialize)]
struct HintsReport {
    /// What the driver says it can tell of frames, in native mode; none: the kernel does not say.
    driver: Option<Vec<String>>,
    /// What this kernel has functions for.
    kernel: Vec<String>,
    /// What `--hints` gives.
    line: String,
}

#[derive(Debug, Clone, Serialize)]
struct MemoryReport {
    /// RLIMIT_MEMLOCK; none: no limit.
    memlock_bytes: Option<u64>,
    /// CAP_IPC_LOCK: the limit does not count.
    locks_any: bool,
    /// What copy placement locks for each queue pair.
    copy_bytes: u32,
    /// How many pairs fit; none: any number.
    copy_pairs: Option<u64>,
    huge_pages: Vec<HugePages>,
}

/// Looks, and tries if that was asked for.
/// Errors: no such interface, or the kernel does not answer.
pub(crate) fn run(args: &CheckArgs) -> anyhow::Result<Report> {
    let seen = Seen::of(&args.interface, args.control.as_deref(), args.steward.as_deref())?;
    let tried = args.attempt.then(|| trial::run(&seen));
    Ok(Report::new(seen, tried))
}

impl Report {
    fn new(seen: Seen, tried: Option<Tried>) -> Self {
        let placements = [Placement::Copy, Placement::SendDirect, Placement::Direct];
        let placements = placements.map(|placement| seen.expected(placement));
        let network = seen.network(&placements[0]);
        let lacks = seen.kernel.into_iter().flat_map(kernels::lacks);
        let lacks = lacks.map(|((major, minor), what)| Lack {
            from: format!("{major}.{minor}"),
            what,
        });
        let said = |what: fn(&steward::links::DriverXdp) -> bool| seen.driver.as_ref().map(what);
        Self {
            interface: InterfaceReport {
                name: seen.link.name.clone(),
                index: seen.link.index,
                mtu: seen.link.mtu,
                mac: mac_text(seen.link.mac),
                up: seen.link.up,
                carrier: seen.carrier,
                receive_queues: seen.link.rx_queues,
                most_receive_queues: seen.most_queues,
                iommu_translates: seen.link.translated,
            },
            driver: DriverReport {
                native: said(|driver| driver.native),
                zero_copy: said(|driver| driver.sends.zero_copy),
                pieces: said(|driver| driver.pieces),
                checksums: said(|driver| driver.sends.checksum),
                known: drivers::said_of(&seen.link.driver),
                name: seen.link.driver.clone(),
            },
            kernel: KernelReport {
                lacks: lacks.collect(),
                release: seen.release.clone(),
            },
            program: seen.program.as_ref().map(ToString::to_string),
            advice: advice::lines(&seen, &placements, &network),
            placements: placements.into(),
            network,
            host: seen.host(),
            free_queues: seen.free_queues(),
            held_queues: seen.held(),
            steering: SteeringReport {
                rules: seen.rules.as_ref().ok().copied(),
                rules_why: seen.rules.as_ref().err().cloned(),
                contexts: seen.contexts.as_ref().ok().copied(),
                contexts_why: seen.contexts.as_ref().err().cloned(),
                vlans: vlans(&seen),
            },
            hints: hints_of(&seen),
            memory: memory(&seen),
            lacking_capabilities: seen.lacking,
            steward: seen.steward,
            queues: seen.queues,
            not_seen: seen.not_seen,
            tried,
        }
    }
}

fn memory(seen: &Seen) -> MemoryReport {
    let limit = seen.memlock_bytes.filter(|_| !seen.locks_any);
    MemoryReport {
        memlock_bytes: seen.memlock_bytes,
        locks_any: seen.locks_any,
        copy_bytes: COPY_BYTES,
        copy_pairs: limit.map(|bytes| bytes / u64::from(COPY_BYTES)),
        huge_pages: seen.huge_pages.clone(),
    }
}

fn hints_of(seen: &Seen) -> HintsReport {
    let (kernel, native) = (
        HintSet::of_kernel(),
        seen.driver.as_ref().map(|driver| driver.native),
    );
    let line = match (seen.hints, native) {
        (None, _) => "none: the kernel does not say which (Linux 6.3 does)".to_owned(),
        (_, Some(false)) => "none: they take native mode, which the driver has not".to_owned(),
        (Some(driver), _) => {
            let both = driver.among(kernel);
            let lost = driver.without(kernel);
            let lost = match lost.is_empty() {
                true => String::new(),
                false => format!("; not {lost}, which this kernel gives no program"),
            };
            match both.is_empty() {
                true => format!("mark only: the driver tells nothing{lost}"),
                false => format!("{both} of the driver, and mark, in native mode (--hints){lost}"),
            }
        }
    };
    HintsReport {
        driver: seen.hints.map(hints::names),
        kernel: hints::names(kernel),
        line,
    }
}

fn vlans(seen: &Seen) -> String {
    let interface = &seen.link.name;
    match seen.tags {
        Tags::There => "tags are in the frame: --vlan works".to_owned(),
        Tags::AsSent => {
            "tags are where the far end puts them: `txvlan off` there, or --vlan does not see them".to_owned()
        }
        Tags::TakenOff if seen.tells_tags() => {
            "the driver takes tags off, and tells of them: --vlan works in native mode with memory=copy"
                .to_owned()
        }
        Tags::TakenOff => {
            format!("the driver takes tags off, and --vlan is refused: `ethtool -K {interface} rxvlan off`")
        }
        Tags::Lost => {
            "the kernel takes tags off before XDP, and --vlan is refused: use the interface below".to_owned()
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
