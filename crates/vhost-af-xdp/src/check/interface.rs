//! Findings about an interface that do not depend on its users.

use host::nic::Tags;

use super::configuration::{lacks_privileges, memory_finding};
use super::facts::Facts;
use super::finding::{Finding, Kind};
use super::placements::PlacementReport;
use super::{loopback, netkit};
use dataplane::nic::endpoint::COPY_BYTES;

impl Facts {
    /// Findings of `check IFNAME`, including what would stop a daemon that is started with as few options as possible.
    pub(super) fn findings(&self, copy: &PlacementReport) -> Vec<Finding> {
        let name = &self.link.name;
        let unusable = match (self.loopback, self.link.has_leased_only) {
            (true, _) => Some(loopback::unusable(name)),
            (_, true) if self.link.rx_queues < 2 => Some(netkit::not_leased(name)),
            _ => None,
        };
        if let Some(why) = unusable {
            return vec![Finding::error(Kind::Unusable, name, &why)];
        }
        let mut findings = self.link_findings(name);
        if self.link.has_leased_only {
            return findings;
        }
        let refused = copy.mode.is_none().then(|| copy.why_not_more.join("; "));
        findings.extend(refused.map(|why| Finding::error(Kind::ModeRefused, name, &why)));
        if self.program_holder().is_none() {
            findings.extend(self.program_finding(name, false));
        }
        if self.loses_tags(true) {
            findings.push(Finding::note(Kind::VlanTags, name, &self.vlans()));
        }
        if !self.losses.is_empty() {
            findings.push(Finding::warning(Kind::PacketsLost, name, &self.losses));
        }
        if self.free_queues().is_empty() && self.network_there().is_none() {
            let holders = self.holders().join("; ");
            let why = format!("no queue is free ({holders}): add one (`ethtool -L`), or stop one of these");
            findings.push(Finding::warning(Kind::QueueTaken, name, &why));
        }
        findings.extend(self.process_findings());
        findings
    }

    /// Whether the interface can receive frames.
    pub(super) fn link_findings(&self, subject: &str) -> Vec<Finding> {
        let name = &self.link.name;
        let found = match (self.link.up, self.carrier) {
            (false, _) => {
                let why = format!("{name} is down: `ip link set dev {name} up`");
                Some(Finding::error(Kind::LinkDown, subject, &why))
            }
            (true, Some(false)) => {
                let why = format!("{name} has no link: plug the cable in, or set its other end up");
                Some(Finding::warning(Kind::LinkDown, subject, &why))
            }
            (true, _) => None,
        };
        found.into_iter().collect()
    }

    /// An XDP program that prevents a daemon, which uses a steward or attaches its own program.
    pub(super) fn program_finding(&self, subject: &str, has_steward: bool) -> Option<Finding> {
        let (program, name) = (self.program.as_ref()?, &self.link.name);
        // The program stays for a while after the last lease.
        let is_ours = program
            .name
            .as_ref()
            .is_some_and(|name| name.starts_with("steer"));
        if has_steward && (is_ours || self.queues.iter().any(|queue| queue.lease.is_some())) {
            return None;
        }
        let why = match self.program_holder() {
            Some(whose) => format!(
                "the XDP program on {name} is {whose}: share {name} by vhost-af-xdp-steward, or add guests to that daemon"
            ),
            None => format!(
                "{name} already has an XDP program ({program}): end its holder (`vhost-af-xdp queues {name}` shows ours), \
                 share {name} by vhost-af-xdp-steward, use the program (--inhibit --map-path, docs/cli.md), or use tap \
                 mode"
            ),
        };
        Some(Finding::error(Kind::ProgramAttached, subject, &why))
    }

    /// Direct placement in zero-copy needs huge pages.
    pub(super) fn huge_pages_finding(&self, subject: &str) -> Option<Finding> {
        let why = "no huge page is free for the guest's memory: `sysctl vm.nr_hugepages=N`, as many as the guest has \
                   memory for";
        self.lacks_huge_pages()
            .then(|| Finding::warning(Kind::NoHugePages, subject, why))
    }

    pub(super) fn lacks_huge_pages(&self) -> bool {
        self.huge_pages.iter().all(|pages| pages.free == 0)
    }

    /// Whether VLAN tags do not reach a daemon whose XDP program is attached in this mode.
    pub(super) fn loses_tags(&self, is_native: bool) -> bool {
        match self.tags {
            Tags::There | Tags::AsSent => false,
            Tags::TakenOff => !(is_native && self.reports_tags()),
            Tags::Lost => true,
        }
    }

    /// What this process lacks to start a daemon of its own.
    fn process_findings(&self) -> Option<Finding> {
        if !self.lacking.is_empty() {
            let why = lacks_privileges(&self.lacking);
            return (!self.steward).then(|| Finding::error(Kind::Privileges, "daemon", &why));
        }
        let limit = self.memlock_bytes.filter(|_| !self.locks_any)?;
        memory_finding(limit, COPY_BYTES.into())
    }

    /// What happens to VLAN tags, with the remedy if they do not reach the daemon.
    pub(super) fn vlans(&self) -> String {
        let off = format!("`ethtool -K {} rxvlan off`", self.link.name);
        match self.tags {
            Tags::There => "tags are in the frame".to_owned(),
            Tags::AsSent => "tags are in the frame if the far end puts them there: `txvlan off` there".to_owned(),
            Tags::TakenOff if self.reports_tags() => {
                format!("the driver takes tags off and reports them, in native mode with memory=copy; else: {off}")
            }
            Tags::TakenOff => {
                format!("the driver takes tags off, and ports with VLANs are refused: if guests use VLANs, {off}")
            }
            Tags::Lost => "the kernel takes tags off before XDP, and ports with VLANs are refused: use the interface below \
                           (docs/hardware.md)"
                .to_owned(),
        }
    }
}
