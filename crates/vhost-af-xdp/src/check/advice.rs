//! What to type, for what was seen.

use common::binding::{L2_BYTES, LONGEST_FRAME};
use serde::Serialize;
use steward::hardware::Tags;
use steward::protocol::DEFAULT_SOCKET;

use super::expected::Expected;
use super::held::named;
use super::loopback;
use super::netkit;
use super::network::NetworkReport;
use super::seen::Seen;
use crate::nic::endpoint::COPY_BYTES;

/// Most pairs that are proposed.
const MOST_PAIRS: usize = 4;

/// A goal and the lines that lead there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Advice {
    pub(super) goal: &'static str,
    /// Commands, and words that begin with `#`.
    pub(super) lines: Vec<String>,
}

/// In the order in which they are to be read; a goal that takes nothing is left out.
pub(super) fn lines(seen: &Seen, placements: &[Expected], network: &NetworkReport) -> Vec<Advice> {
    let all = match (seen.loopback, seen.link.has_leased_only) {
        (true, _) => loopback::lines(&seen.link.name),
        (_, true) => netkit::lines(&seen.link.name, seen.link.rx_queues),
        _ => vec![
            ("first", first(seen)),
            ("many guests by address", seen.network_lines(network)),
            ("one guest on a queue", one_guest(seen)),
            ("direct placement", direct(seen, placements)),
            ("several pairs", several(seen)),
        ],
    };
    let is_said = |(_, lines): &(_, Vec<String>)| !lines.is_empty();
    let advice = |(goal, lines)| Advice { goal, lines };
    all.into_iter().filter(is_said).map(advice).collect()
}

/// What stands in the way of everything.
fn first(seen: &Seen) -> Vec<String> {
    let (name, mut lines) = (&seen.link.name, Vec::new());
    if !seen.link.up {
        lines.push(format!("ip link set dev {name} up"));
    }
    if seen.tags == Tags::Lost {
        lines.push(format!(
            "# {name} is no NIC: use the interface below it (docs/hardware.md)"
        ));
    }
    if !seen.losses.is_empty() {
        lines.push(format!("# {}", seen.losses));
    }
    if let Some(program) = &seen.program {
        lines.push(match seen.program_holder() {
            Some(whose) => format!("# its XDP program is {whose}: what follows goes beside that"),
            None => format!(
            "# an XDP program is there already ({program}): end its holder (`vhost-af-xdp queues {name}` shows ours), \
             share it by vhost-af-xdp-steward, or use it (--inhibit --map-path, docs/cli.md)"
            ),
        });
    }
    if !seen.lacking.is_empty() {
        lines.push(match seen.steward {
            true => format!("# this user lacks {}: a steward has them", seen.lacking.join(", ")),
            false => format!(
                "# this user lacks {}: be root, or start vhost-af-xdp-steward and add --steward {DEFAULT_SOCKET}",
                seen.lacking.join(", ")
            ),
        });
    }
    let short = |limit: &u64| *limit < u64::from(COPY_BYTES);
    if seen.lacking.is_empty() && !seen.locks_any && seen.memlock_bytes.as_ref().is_some_and(short) {
        lines.push(format!("ulimit -l {}", COPY_BYTES / 1024));
    }
    if seen.tags == Tags::TakenOff {
        lines.push(match seen.tells_tags() {
            true => format!(
                "ethtool -K {name} rxvlan off    # only for guests with VLANs in skb mode, or with memory=direct or \
                 send-direct"
            ),
            false => format!("ethtool -K {name} rxvlan off    # if guests use VLANs"),
        });
    }
    lines
}

fn one_guest(seen: &Seen) -> Vec<String> {
    let Some(&queue) = seen.free_queues().first() else {
        let mut lines = vec![format!("# no queue is free: {}", seen.held().join("; "))];
        lines.extend(one_more(seen, 1));
        return lines;
    };
    let name = &seen.link.name;
    let mut lines = vec![seen.guest_line(queue, &[])];
    if seen.link.rx_queues < 2 {
        return lines;
    }
    if let Some((holder, queues)) = seen.network_there() {
        let network = holder.network.as_deref().unwrap_or_default();
        lines.push(format!(
            "# the NIC is to spread over {} of network {network} alone: docs/networks.md, a queue of its own",
            named(&queues)
        ));
        return lines;
    }
    lines.push(match seen.link.partial_checksums {
        true => format!(
            "# frames come to all {} queues: `ethtool -L PEER tx 1` at the far end for one guest",
            seen.link.rx_queues
        ),
        false if takes_rules(seen) => {
            format!("ethtool -N {name} flow-type ether dst GUEST-MAC action {queue}    # its frames to its queue")
        }
        false if seen.most_queues.is_some() => {
            format!("ethtool -L {name} combined 1    # or the guest gets only what the hash brings to queue {queue}")
        }
        false => format!("# the guest gets only what the hash brings to queue {queue}"),
    });
    lines
}

fn direct(seen: &Seen, placements: &[Expected]) -> Vec<String> {
    let mut lines = Vec::new();
    let most = LONGEST_FRAME - L2_BYTES;
    if seen.link.mtu > most {
        lines.push(format!("ip link set dev {} mtu {most}", seen.link.name));
    }
    let Some(&queue) = seen.free_queues().first() else {
        return lines;
    };
    let mode_of = |name: &str| {
        let found = placements.iter().find(|expected| expected.placement == name);
        found.and_then(|expected| expected.mode.as_deref())
    };
    let zero_copy = Some("zero-copy");
    if mode_of("direct") == zero_copy {
        lines.push(
            "# guest memory in huge pages (QEMU: memory-backend-memfd,share=on,hugetlb=on):".to_owned(),
        );
        let is_short = seen.huge_pages.iter().all(|pages| pages.free == 0);
        if is_short {
            lines.push(
                "sysctl vm.nr_hugepages=N    # as many as the guest has memory for; none is free".to_owned(),
            );
        }
    }
    lines.push(seen.guest_line(queue, &[("memory", "direct")]));
    if mode_of("direct") != zero_copy && mode_of("send-direct") == zero_copy {
        let line = seen.guest_line(queue, &[("memory", "send-direct")]);
        lines.push(line + "    # zero-copy for both directions");
    }
    lines
}

fn several(seen: &Seen) -> Vec<String> {
    if let Some((holder, _)) = seen.network_there() {
        let network = holder.network.as_deref().unwrap_or_default();
        return vec![format!(
            "# a port of network {network} has as many as it says (queues = {MOST_PAIRS}), whatever queues there are"
        )];
    }
    let free = seen.free_queues();
    let run = |at: usize| {
        let follows = |&(ahead, queue): &(u32, &u32)| free[at].checked_add(ahead) == Some(*queue);
        (0..).zip(&free[at..]).take_while(follows).count()
    };
    let longest = (0..free.len()).max_by_key(|&at| (run(at), std::cmp::Reverse(at)));
    match longest.map(|at| (free[at], run(at).min(MOST_PAIRS))) {
        Some((queue, pairs)) if pairs > 1 => vec![seen.guest_line(queue, &[("queues", &pairs.to_string())])],
        _ => match one_more(seen, 2 - free.len().min(1)).as_slice() {
            [] => vec!["# it has no further queues: guests of several pairs have the first only".to_owned()],
            lines => lines.to_vec(),
        },
    }
}

/// What gives the interface so many more queues, if it can have them.
fn one_more(seen: &Seen, more: usize) -> Vec<String> {
    let (name, have) = (&seen.link.name, seen.link.rx_queues);
    let want = have.saturating_add(u32::try_from(more).unwrap_or(u32::MAX));
    let Some(most) = seen.most_queues.filter(|&most| most >= want) else {
        return Vec::new();
    };
    let mut lines = vec![match seen.link.partial_checksums {
        true => format!("ethtool -L {name} rx {want} tx {want}    # and at the far end"),
        false => format!("ethtool -L {name} combined {want}    # up to {most}"),
    }];
    if seen.network_there().is_some() {
        lines.push(match seen.link.partial_checksums {
            true => {
                format!("ethtool -L PEER tx {have}    # at the far end: what it chooses is the network's")
            }
            false => format!("ethtool -X {name} equal {have}    # the NIC spreads over the network's alone"),
        });
    }
    lines
}

/// Whether rules by address are known to work.
fn takes_rules(seen: &Seen) -> bool {
    let known = seen.line.is_some_and(|line| line.by_address != "no");
    known && seen.rules.is_ok()
}
