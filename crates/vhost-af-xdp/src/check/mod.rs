//! `vhost-af-xdp check IFNAME` and `serve --check`: what an interface, its driver, this kernel and this process offer, why
//! not more, what to type, and whether a configuration works on this host. Nothing is started.
//!
//! # Theory of operation
//! [`facts`] reads; nothing is attached, bound or set. [`placements`] asks the conditions that `serve` goes by
//! ([`common::binding`]), assumes the best guest and VMM, and takes its words from the same places as `status`. [`interface`]
//! and [`configuration`] list what an operator should act on ([`finding`]), [`advice`] says what to type, [`view`] makes
//! text of the document that is the JSON. [`try_bind`] attaches and binds for a moment, only if that was asked for.

mod advice;
mod configuration;
mod facts;
mod finding;
mod holders;
mod host;
mod interface;
mod kernels;
mod loopback;
mod netkit;
mod network;
mod placements;
mod try_bind;
mod view;

pub(crate) use configuration::{check_privileges, look as check_configuration, user_of};

use std::path::PathBuf;

use clap::Args;
use common::drivers;
use serde::Serialize;
use steer::{HintSet, mac_text};

use self::advice::Advice;
use self::facts::{Facts, HugePages};
use self::finding::{Finding, Severity};
use self::network::NetworkReport;
use self::placements::{PlacementReport, Request};
use self::try_bind::TryReport;
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
  Whether there is something to act on:
    vhost-af-xdp check eth1 --strict >/dev/null || echo 'see vhost-af-xdp check eth1'
  The mode that copy placement will be in:
    vhost-af-xdp check eth1 --json | jq -r '.placements[] | select(.placement == \"copy\") | .mode'";

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// The interface
    #[arg(value_name = "IFNAME")]
    interface: String,
    /// Attach a program and bind a free queue for a moment, report the result, and undo both
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
    /// End with 1 if there is an error (a guest would get no frames) or a warning (guests lose some frames, or are slower
    /// than they could be)
    #[arg(long)]
    pub(crate) strict: bool,
}

/// All that is said.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    interface: InterfaceReport,
    driver: DriverReport,
    kernel: KernelReport,
    /// The XDP program that is on the interface.
    program: Option<String>,
    placements: Vec<PlacementReport>,
    /// What a network gives that has all of it as its uplink.
    network: Option<NetworkReport>,
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
    /// What an operator should act on.
    pub(crate) findings: Vec<Finding>,
    #[serde(rename = "type")]
    advice: Vec<Advice>,
    /// What could not be seen, and why.
    not_seen: Vec<String>,
    /// With `--try`.
    tried: Option<TryReport>,
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
    let facts = Facts::of(&args.interface, args.control.as_deref(), args.steward.as_deref())?;
    let tried = args.attempt.then(|| try_bind::run(&facts));
    Ok(Report::new(facts, tried))
}

impl Report {
    /// There is something that an operator should act on.
    pub(crate) fn is_faulty(&self) -> bool {
        self.findings
            .iter()
            .any(|finding| finding.severity != Severity::Note)
    }

    fn new(facts: Facts, tried: Option<TryReport>) -> Self {
        let placements = [Placement::Copy, Placement::SendDirect, Placement::Direct];
        let placements = placements.map(|placement| facts.placement(&Request::of(placement)));
        let network = facts.network(&placements[0]);
        let lacks = facts.kernel.into_iter().flat_map(kernels::lacks);
        let lacks = lacks.map(|((major, minor), what)| Lack {
            from: format!("{major}.{minor}"),
            what,
        });
        let said = |what: fn(&steward::links::DriverXdp) -> bool| facts.driver.as_ref().map(what);
        Self {
            interface: InterfaceReport {
                name: facts.link.name.clone(),
                index: facts.link.index,
                mtu: facts.link.mtu,
                mac: mac_text(facts.link.mac),
                up: facts.link.up,
                carrier: facts.carrier,
                receive_queues: facts.link.rx_queues,
                most_receive_queues: facts.most_queues,
                iommu_translates: facts.link.translated,
            },
            driver: DriverReport {
                native: said(|driver| driver.native),
                zero_copy: said(|driver| driver.sends.zero_copy),
                pieces: said(|driver| driver.pieces),
                checksums: said(|driver| driver.sends.checksum),
                known: drivers::said_of(&facts.link.driver),
                name: facts.link.driver.clone(),
            },
            kernel: KernelReport {
                lacks: lacks.collect(),
                release: facts.release.clone(),
            },
            program: facts
                .program
                .as_ref()
                .map(|program| match facts.program_holder() {
                    Some(whose) => format!("{program}, {whose}"),
                    None => program.to_string(),
                }),
            findings: facts.findings(&placements[0]),
            advice: advice::lines(&facts, &placements),
            placements: placements.into(),
            network,
            host: facts.host(),
            free_queues: facts.free_queues(),
            held_queues: facts.holders(),
            steering: SteeringReport {
                rules: facts.rules.as_ref().ok().copied(),
                rules_why: facts.rules.as_ref().err().cloned(),
                contexts: facts.contexts.as_ref().ok().copied(),
                contexts_why: facts.contexts.as_ref().err().cloned(),
                vlans: facts.vlans(),
            },
            hints: hints_of(&facts),
            memory: memory(&facts),
            lacking_capabilities: facts.lacking,
            steward: facts.steward,
            queues: facts.queues,
            not_seen: facts.not_seen,
            tried,
        }
    }
}

fn memory(facts: &Facts) -> MemoryReport {
    let limit = facts.memlock_bytes.filter(|_| !facts.locks_any);
    MemoryReport {
        memlock_bytes: facts.memlock_bytes,
        locks_any: facts.locks_any,
        copy_bytes: COPY_BYTES,
        copy_pairs: limit.map(|bytes| bytes / u64::from(COPY_BYTES)),
        huge_pages: facts.huge_pages.clone(),
    }
}

fn hints_of(facts: &Facts) -> HintsReport {
    let (kernel, native) = (
        HintSet::of_kernel(),
        facts.driver.as_ref().map(|driver| driver.native),
    );
    let line = match (facts.hints, native) {
        (None, _) => "none: the kernel does not say which (Linux 6.3 does)".to_owned(),
        (_, Some(false)) => "none: they need native mode, which the driver lacks".to_owned(),
        (Some(driver), _) => {
            let both = driver.among(kernel);
            let lost = driver.without(kernel);
            let lost = match lost.is_empty() {
                true => String::new(),
                false => format!("; not {lost}: this kernel lacks them"),
            };
            match both.is_empty() {
                true => format!("mark only: the driver reports none{lost}"),
                false => format!("{both} of the driver, and mark, in native mode (--hints){lost}"),
            }
        }
    };
    HintsReport {
        driver: facts.hints.map(hints::names),
        kernel: hints::names(kernel),
        line,
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
