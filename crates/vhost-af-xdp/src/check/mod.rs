//! `vhost-af-xdp check IFNAME` and `serve --check`: what an interface, its driver, this kernel and this process offer,
//! why not more, what to type, and whether a configuration works on this host. Nothing is started.
//!
//! Theory of operation. [`facts`] only reads; it attaches, binds and sets nothing. [`placements`] checks the same
//! conditions as `serve` ([`common::binding`]), assumes the best guest and VMM, and uses the same messages as `status`.
//! [`interface`] and [`configuration`] list what an operator should act on ([`finding`]), [`advice`] lists what to
//! type. Text and `--json` show the same document. [`try_bind`] attaches and binds for a moment, only if requested.

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

pub(crate) use configuration::{check_privileges, look as check_configuration, user_of};

use std::fmt;
use std::path::PathBuf;

use clap::Args;
use client::text::tree::tree;
use common::drivers;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use steer::{HintSet, mac_text};

use self::advice::Advice;
use self::facts::Facts;
use self::finding::{Finding, Severity};
use self::network::NetworkReport;
use self::placements::{PlacementReport, Request};
use self::try_bind::TryReport;
use crate::config::Placement;
use crate::nic::metadata;
use dataplane::nic::endpoint::COPY_BYTES;

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

/// The whole report.
#[derive(Debug, Clone)]
pub(crate) struct Report {
    facts: Facts,
    placements: [PlacementReport; 3],
    /// What a network with all queues of the interface as its uplink gets.
    network: Option<NetworkReport>,
    /// What an operator should act on.
    pub(crate) findings: Vec<Finding>,
    advice: Vec<Advice>,
    /// With `--try`.
    tried: Option<TryReport>,
}

/// Reads what is known of the interface, and tries it if requested.
/// Errors: no such interface, or the kernel does not answer.
pub(crate) fn run(args: &CheckArgs) -> anyhow::Result<Report> {
    let facts = Facts::of(&args.interface, args.control.as_deref(), args.steward.as_deref())?;
    let tried = args.attempt.then(|| try_bind::run(&facts));
    Ok(Report::new(facts, tried))
}

impl Report {
    /// There is an error or a warning.
    pub(crate) fn is_faulty(&self) -> bool {
        self.findings
            .iter()
            .any(|finding| finding.severity != Severity::Note)
    }

    fn new(facts: Facts, tried: Option<TryReport>) -> Self {
        let placements = [Placement::Copy, Placement::SendDirect, Placement::Direct];
        let placements = placements.map(|placement| facts.placement(&Request::of(placement)));
        Self {
            network: facts.network(&placements[0]),
            findings: facts.findings(&placements[0]),
            advice: advice::lines(&facts, &placements),
            placements,
            tried,
            facts,
        }
    }

    /// The fields of the text and of `--json`. Null: the kernel or the driver does not say, or there is none.
    fn document(&self) -> Value {
        let (facts, link) = (&self.facts, &self.facts.link);
        let driver = facts.driver.as_ref();
        json!({
            "interface": {
                "name": link.name,
                "index": link.index,
                "mtu": link.mtu,
                "mac": mac_text(link.mac),
                "up": link.up,
                "carrier": facts.carrier,
                "receive_queues": link.rx_queues,
                "most_receive_queues": facts.most_queues,
                "iommu_translates": link.translated,
            },
            "driver": {
                "name": link.driver,
                "native": driver.map(|driver| driver.native),
                "zero_copy": driver.map(|driver| driver.sends.zero_copy),
                "pieces": driver.map(|driver| driver.pieces),
                "checksums": driver.map(|driver| driver.sends.checksum),
                "known": drivers::said_of(&link.driver),
            },
            "kernel": {
                "release": facts.release,
                "lacks": facts.lacks().map(|(from, what)| json!({ "from": from, "what": what })).collect::<Vec<_>>(),
            },
            "program": facts.program_text(),
            "placements": self.placements,
            "network": self.network,
            "host": facts.host(),
            "queues": facts.queues,
            "free_queues": facts.free_queues(),
            "held_queues": facts.holders(),
            "steering": {
                "rules": facts.rules.as_ref().ok(),
                "rules_why": facts.rules.as_ref().err(),
                "contexts": facts.contexts.as_ref().ok(),
                "contexts_why": facts.contexts.as_ref().err(),
                "vlans": facts.vlans(),
            },
            "hints": {
                "driver": facts.hints.map(metadata::names),
                "kernel": metadata::names(HintSet::of_kernel()),
                "line": facts.hints_line(),
            },
            "memory": {
                "memlock_bytes": facts.memlock_bytes,
                "locks_any": facts.locks_any,
                "copy_bytes": COPY_BYTES,
                "copy_pairs": facts.copy_pairs(),
                "huge_pages": facts.huge_pages,
            },
            "lacking_capabilities": facts.lacking,
            "steward": facts.steward,
            "findings": self.findings,
            "not_seen": facts.not_seen,
            "tried": self.tried,
            "type": self.advice,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut document = self.document();
        let fields = document.as_object_mut().ok_or(fmt::Error)?;
        // The command `queues` shows the queues. The findings are printed last, one on each line.
        fields.retain(|name, _| name != "queues" && name != "findings");
        f.write_str(&tree(&document).map_err(|_| fmt::Error)?)?;
        let mut findings = self.findings.iter();
        findings.try_for_each(|finding| writeln!(f, "{finding}"))
    }
}

impl Serialize for Report {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.document().serialize(serializer)
    }
}

impl Facts {
    /// What this kernel lacks, with the first version that has it.
    fn lacks(&self) -> impl Iterator<Item = (String, &'static str)> {
        let lacks = self.kernel.into_iter().flat_map(kernels::lacks);
        lacks.map(|((major, minor), what)| (format!("{major}.{minor}"), *what))
    }

    /// The XDP program on the interface, and its owner.
    fn program_text(&self) -> Option<String> {
        let program = self.program.as_ref()?;
        Some(match self.program_holder() {
            Some(whose) => format!("{program}, {whose}"),
            None => program.to_string(),
        })
    }

    /// How many queue pairs in copy placement RLIMIT_MEMLOCK allows; none: any number.
    fn copy_pairs(&self) -> Option<u64> {
        let limit = self.memlock_bytes.filter(|_| !self.locks_any)?;
        Some(limit / u64::from(COPY_BYTES))
    }

    /// What `--hints` makes available.
    fn hints_line(&self) -> String {
        let Some(driver) = self.hints else {
            return "none: the kernel does not say which (Linux 6.3 does)".to_owned();
        };
        if self.driver.as_ref().is_some_and(|driver| !driver.native) {
            return "none: they need native mode, which the driver lacks".to_owned();
        }
        let kernel = HintSet::of_kernel();
        let (both, lost) = (driver.among(kernel), driver.without(kernel));
        let lost = match lost.is_empty() {
            true => String::new(),
            false => format!("; not {lost}: this kernel lacks them"),
        };
        match both.is_empty() {
            true => format!("mark only: the driver reports none{lost}"),
            false => format!("{both} of the driver, and mark, in native mode (--hints){lost}"),
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
