//! What to type, for what was seen.

use serde::Serialize;
use steward::hardware::Tags;
use steward::protocol::DEFAULT_SOCKET;

use super::expected::Expected;
use super::network::NetworkReport;
use super::seen::Seen;
use crate::nic::binding::{L2_BYTES, LONGEST_FRAME};
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
    let all = [
        ("first", first(seen)),
        ("many guests by address", seen.network_lines(network)),
        ("one guest on a queue", one_guest(seen)),
        ("direct placement", direct(seen, placements)),
        ("several pairs", several(seen)),
    ];
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
    if let Some(program) = &seen.program {
        lines.push(format!(
            "# an XDP program is there already ({program}): end its holder (`vhost-af-xdp queues {name}` shows ours), \
             share it by vhost-af-xdp-steward, or use it (--inhibit --map-path, docs/cli.md)"
        ));
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
        lines.push(format!("ethtool -K {name} rxvlan off    # if guests use VLANs"));
    }
    lines
}

fn one_guest(seen: &Seen) -> Vec<String> {
    let Some(&queue) = seen.free_queues().first() else {
        return vec!["# no queue is free".to_owned()];
    };
    let name = &seen.link.name;
    let mut lines = vec![serve(seen, queue, "")];
    if seen.link.rx_queues < 2 {
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
    lines.push(serve(seen, queue, " --memory direct"));
    if mode_of("direct") != zero_copy && mode_of("send-direct") == zero_copy {
        lines.push(serve(
            seen,
            queue,
            " --memory send-direct    # zero-copy for both directions",
        ));
    }
    lines
}

fn several(seen: &Seen) -> Vec<String> {
    let name = &seen.link.name;
    let free = seen.free_queues();
    let run = |at: usize| {
        let follows = |&(ahead, queue): &(u32, &u32)| free[at].checked_add(ahead) == Some(*queue);
        (0..).zip(&free[at..]).take_while(follows).count()
    };
    let longest = (0..free.len()).max_by_key(|&at| (run(at), std::cmp::Reverse(at)));
    match longest.map(|at| (free[at], run(at).min(MOST_PAIRS))) {
        Some((queue, pairs)) if pairs > 1 => vec![serve(seen, queue, &format!(" --queues {pairs}"))],
        _ => match seen.most_queues.filter(|&most| most > seen.link.rx_queues) {
            Some(_) if seen.link.partial_checksums => {
                vec![format!("ethtool -L {name} rx 2 tx 2    # and at the far end")]
            }
            Some(most) => vec![format!("ethtool -L {name} combined 2    # up to {most}")],
            None => {
                vec!["# it has no further queues: guests of several pairs have the first only".to_owned()]
            }
        },
    }
}

/// Whether rules by address are known to work.
fn takes_rules(seen: &Seen) -> bool {
    let known = seen.line.is_some_and(|line| line.by_address != "no");
    known && seen.rules.is_ok()
}

fn serve(seen: &Seen, queue: u32, more: &str) -> String {
    let start = match queue {
        0 => String::new(),
        queue => format!(" --start-queue {queue}"),
    };
    let steward = match seen.steward && !seen.lacking.is_empty() {
        true => format!(" --steward {DEFAULT_SOCKET}"),
        false => String::new(),
    };
    let name = &seen.link.name;
    format!("vhost-af-xdp serve --socket-path /run/vm1.sock --ifname {name}{start}{steward}{more}")
}
