//! Queues outside a lease that may receive frames for the lessee, which loses them.

use std::ops::Range;

use crate::links::Link;
use crate::links::below::queues_from_below;
use crate::nic::{Ethtool, Steering, Target};

/// Longest note, bytes.
pub const NOTE_MAX: usize = 252;

/// The note for the lessee of such queues, with the remedy; empty: no frame is lost. For a network or for one guest.
#[must_use]
pub fn unserved_queues(link: &Link, queues: &Range<u32>, is_network: bool) -> String {
    let unserved = match is_network {
        true => UnservedQueues::network(link, queues),
        false => UnservedQueues::guest(link, queues),
    };
    unserved.note(&link.name, queues, is_network)
}

/// See the module's head.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnservedQueues {
    queues: Vec<u32>,
    /// The NIC says which queues it spreads over; else it may be any of those in use.
    is_told: bool,
    is_veth: bool,
    /// Its frames come from interfaces below, by the queues that they have there.
    is_above: bool,
    /// Queues in use.
    all: u32,
}

impl UnservedQueues {
    /// Of a network, which takes frames for its guests from all of its queues.
    pub fn network(link: &Link, queues: &Range<u32>) -> Self {
        let driver = Ethtool::open(&link.name);
        let spread = driver.and_then(|driver| driver.spread(0));
        let is_told = spread.is_ok();
        let from_below = queues_from_below(link);
        let all = from_below.unwrap_or(link.rx_queues);
        let spread = spread.unwrap_or_else(|_| (0..all).collect());
        Self {
            queues: spread
                .into_iter()
                .filter(|queue| !queues.contains(queue))
                .collect(),
            is_told,
            is_veth: link.driver == "veth",
            is_above: from_below.is_some(),
            all,
        }
    }

    /// Of one guest. A steering rule that points at its queues means that no other queue is meant to get its frames.
    pub fn guest(link: &Link, queues: &Range<u32>) -> Self {
        let rules = Ethtool::open(&link.name).and_then(|driver| driver.table());
        let is_ours = |target: Option<Target>| match target {
            Some(Target::Queue(queue)) => queues.contains(&queue),
            Some(Target::Context(_)) => true,
            None => false,
        };
        match rules.is_ok_and(|table| table.rules.iter().any(|rule| is_ours(rule.target))) {
            true => Self::default(),
            false => Self::network(link, queues),
        }
    }

    /// The note for the lessee of these queues, with the remedy; empty: no frame is lost.
    pub fn note(&self, interface: &str, queues: &Range<u32>, is_network: bool) -> String {
        let others = match *self.queues {
            [] => return String::new(),
            [one] => format!("queue {one}"),
            [first, ..] => format!("{} further queues from {first} on", self.queues.len()),
        };
        let (first, count) = (queues.start, queues.len());
        let whose = if is_network {
            "for guests is lost to them"
        } else {
            "for the guest is lost to it"
        };
        let what = match self.is_told {
            true => format!("the NIC spreads over {others}: what comes there {whose}"),
            false => format!("frames may come to {others} of {interface}: what comes there {whose}"),
        };
        let rule = format!("`ethtool -N {interface} flow-type ether dst MAC action {first}`");
        let peer = format!("`ethtool -L PEER tx {count}` at its other end");
        let below = format!("`ethtool -L LOWER combined {count}` for each interface below");
        let remedy = match (self.is_told, is_network, self.is_veth) {
            (true, true, _) if first == 0 => format!("`ethtool -X {interface} equal {count}`"),
            (true, true, _) => format!("`ethtool -X {interface} start {first} equal {count}`"),
            (true, false, _) => rule,
            (false, true, true) => format!("`queues = {}`, or {peer}", self.all),
            (false, true, false) if self.is_above => format!("`queues = {}`, or {below}", self.all),
            (false, false, false) if self.is_above => format!("{below} and start-queue 0"),
            (false, true, false) => format!("`queues = {}`", self.all),
            (false, false, true) if first == 0 => peer,
            (false, false, _) => {
                format!("{rule}, or `ethtool -L {interface} combined {count}` and start-queue 0")
            }
        };
        format!("{what}: {remedy}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beyond(queues: &[u32], is_told: bool, is_veth: bool) -> UnservedQueues {
        UnservedQueues {
            queues: queues.to_vec(),
            is_told,
            is_veth,
            is_above: false,
            all: 4,
        }
    }

    #[test]
    fn queues_that_a_lease_lacks_are_named_with_the_remedy() {
        let note = |queues, of: UnservedQueues, is_network| of.note("eth0", &queues, is_network);
        assert_eq!(note(0..4, beyond(&[], true, false), true), "");
        let one = note(0..4, beyond(&[4], true, false), true);
        assert!(
            one.contains("over queue 4:") && one.ends_with("`ethtool -X eth0 equal 4`"),
            "{one}"
        );
        let several = note(2..4, beyond(&[0, 1, 4], true, false), true);
        assert!(several.contains("3 further queues from 0 on"), "{several}");
        assert!(
            several.ends_with("`ethtool -X eth0 start 2 equal 2`"),
            "{several}"
        );
        let guest = note(1..2, beyond(&[0], true, false), false);
        assert!(
            guest.ends_with("`ethtool -N eth0 flow-type ether dst MAC action 1`"),
            "{guest}"
        );
        let veth = note(0..1, beyond(&[1, 2, 3], false, true), true);
        assert!(
            veth.contains("`queues = 4`") && veth.contains("`ethtool -L PEER tx 1`"),
            "{veth}"
        );
        let above = UnservedQueues {
            is_above: true,
            ..beyond(&[1], false, false)
        };
        let bond = note(0..1, above, false);
        assert!(bond.contains("`ethtool -L LOWER combined 1`"), "{bond}");
        let guest = note(0..1, beyond(&[1, 2, 3], false, true), false);
        assert!(
            guest.ends_with("guest is lost to it: `ethtool -L PEER tx 1` at its other end"),
            "{guest}"
        );
        let unknown = note(0..1, beyond(&[1], false, false), false);
        assert!(unknown.contains("`ethtool -L eth0 combined 1`"), "{unknown}");
    }

    #[test]
    fn longest_note_is_not_cut() {
        let all: Vec<u32> = (0..100).collect();
        for (is_told, is_veth, is_network) in
            [(true, false, true), (false, true, true), (false, false, false)]
        {
            let note = beyond(&all, is_told, is_veth).note("enp129s0f0np0v1", &(100..228), is_network);
            assert!(note.len() <= NOTE_MAX, "{} bytes: {note}", note.len());
        }
    }
}
