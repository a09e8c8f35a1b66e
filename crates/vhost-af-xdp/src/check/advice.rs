//! Commands and configuration lines to type, for an interface as it is.

use common::binding::{L2_BYTES, LONGEST_FRAME};
use serde::Serialize;

use super::facts::Facts;
use super::loopback;
use super::netkit;
use super::placements::PlacementReport;
use crate::api::queues::named;

/// Most queue pairs that are proposed.
const MOST_PAIRS: usize = 4;

/// A goal and the lines that lead there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Advice {
    pub(super) goal: &'static str,
    /// Commands, and comments that begin with `#`.
    pub(super) lines: Vec<String>,
}

/// All advice, in reading order; a goal without lines is left out.
pub(super) fn lines(facts: &Facts, placements: &[PlacementReport]) -> Vec<Advice> {
    let all = match (facts.loopback, facts.link.has_leased_only) {
        (true, _) => loopback::lines(),
        (_, true) if facts.link.rx_queues < 2 => Vec::new(),
        (_, true) => netkit::lines(&facts.link.name),
        _ => vec![
            ("many guests by address", facts.network_lines(&placements[0])),
            ("one guest on a queue", one_guest(facts)),
            ("direct placement", direct(facts, placements)),
            ("several pairs", several(facts)),
        ],
    };
    let has_lines = |(_, lines): &(_, Vec<String>)| !lines.is_empty();
    let advice = |(goal, lines)| Advice { goal, lines };
    all.into_iter().filter(has_lines).map(advice).collect()
}

fn one_guest(facts: &Facts) -> Vec<String> {
    let Some(&queue) = facts.free_queues().first() else {
        let mut lines = vec![format!("# no queue is free: {}", facts.holders().join("; "))];
        lines.extend(one_more(facts, 1));
        return lines;
    };
    let name = &facts.link.name;
    let mut lines = vec![facts.guest_line(queue, &[])];
    if facts.link.rx_queues < 2 {
        return lines;
    }
    if let Some((holder, queues)) = facts.network_there() {
        let network = holder.network.as_deref().unwrap_or_default();
        lines.push(format!(
            "# let the NIC's RSS use only {} of network {network}: docs/networks.md, a queue of its own",
            named(&queues)
        ));
        return lines;
    }
    lines.push(match facts.link.partial_checksums {
        true => format!(
            "# frames come to all {} queues: `ethtool -L PEER tx 1` at the far end for one guest",
            facts.link.rx_queues
        ),
        false if takes_rules(facts) => {
            format!("ethtool -N {name} flow-type ether dst GUEST-MAC action {queue}    # its frames to its queue")
        }
        false if facts.most_queues.is_some() => {
            format!("ethtool -L {name} combined 1    # or the guest receives only what RSS puts into queue {queue}")
        }
        false => format!("# the guest receives only frames that RSS puts into queue {queue}"),
    });
    lines
}

fn direct(facts: &Facts, placements: &[PlacementReport]) -> Vec<String> {
    let mut lines = Vec::new();
    let most = LONGEST_FRAME - L2_BYTES;
    if facts.link.mtu > most {
        lines.push(format!("ip link set dev {} mtu {most}", facts.link.name));
    }
    let Some(&queue) = facts.free_queues().first() else {
        return lines;
    };
    let mode_of = |name: &str| {
        let found = placements.iter().find(|placement| placement.placement == name);
        found.and_then(|placement| placement.mode.as_deref())
    };
    let zero_copy = Some("zero-copy");
    if mode_of("direct") == zero_copy {
        lines.push(
            "# guest memory in huge pages (QEMU: memory-backend-memfd,share=on,hugetlb=on):".to_owned(),
        );
        if facts.lacks_huge_pages() {
            lines.push(
                "sysctl vm.nr_hugepages=N    # as many as the guest has memory for; none is free".to_owned(),
            );
        }
    }
    lines.push(facts.guest_line(queue, &[("memory", "direct")]));
    if mode_of("direct") != zero_copy && mode_of("send-direct") == zero_copy {
        let line = facts.guest_line(queue, &[("memory", "send-direct")]);
        lines.push(line + "    # zero-copy for both directions");
    }
    lines
}

fn several(facts: &Facts) -> Vec<String> {
    if let Some((holder, _)) = facts.network_there() {
        let network = holder.network.as_deref().unwrap_or_default();
        return vec![format!(
            "# a port of network {network} may have several (queues = {MOST_PAIRS}), whatever queues the NIC has"
        )];
    }
    let free = facts.free_queues();
    let run = |at: usize| {
        let follows = |&(ahead, queue): &(u32, &u32)| free[at].checked_add(ahead) == Some(*queue);
        (0..).zip(&free[at..]).take_while(follows).count()
    };
    let longest = (0..free.len()).max_by_key(|&at| (run(at), std::cmp::Reverse(at)));
    match longest.map(|at| (free[at], run(at).min(MOST_PAIRS))) {
        Some((queue, pairs)) if pairs > 1 => vec![facts.guest_line(queue, &[("queues", &pairs.to_string())])],
        _ => match one_more(facts, 2 - free.len().min(1)).as_slice() {
            [] => vec!["# it has no more queues: guests with several pairs use the first only".to_owned()],
            lines => lines.to_vec(),
        },
    }
}

/// The command that adds so many queues to the interface, if it can have them.
fn one_more(facts: &Facts, more: usize) -> Vec<String> {
    let (name, have) = (&facts.link.name, facts.link.rx_queues);
    let want = have.saturating_add(u32::try_from(more).unwrap_or(u32::MAX));
    let Some(most) = facts.most_queues.filter(|&most| most >= want) else {
        return Vec::new();
    };
    let mut lines = vec![match facts.link.partial_checksums {
        true => format!("ethtool -L {name} rx {want} tx {want}    # and at the far end"),
        false => format!("ethtool -L {name} combined {want}    # up to {most}"),
    }];
    if facts.network_there().is_some() {
        lines.push(match facts.link.partial_checksums {
            true => {
                format!("ethtool -L PEER tx {have}    # at the far end: it then sends to the network's queues only")
            }
            false => format!("ethtool -X {name} equal {have}    # RSS then uses the network's queues only"),
        });
    }
    lines
}

/// Whether steering rules by address are known to work.
fn takes_rules(facts: &Facts) -> bool {
    let known = facts.line.is_some_and(|line| line.by_address != "no");
    known && facts.rules.is_ok()
}
