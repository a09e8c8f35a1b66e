//! Which frames a queue receives, and by which rule: leases of a steward, rules in the NIC, entries of the steering
//! program.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use host::nic::{Ethtool, Steering, Target};
use program::steward::DEFAULT_SOCKET;
use serde::Serialize;
use steer::mac_text;
use steward_client::listing::{self, Listed};

use super::{Queue, command_of};
use model::text::received_frames;

/// The lease that a queue belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Leased {
    /// PID of the lessee; 0: the steward cannot see it.
    pub(crate) pid: u32,
    /// Its command line, as far as this process may read it.
    pub(crate) command: String,
    /// Its user.
    pub(crate) uid: u32,
    /// Its first queue.
    pub(crate) start_queue: u32,
    /// Number of queues.
    pub(crate) queues: u32,
    /// How frames are steered to it, as in `status`.
    pub(crate) steered: &'static str,
    /// Frames are not steered to it, although they should be.
    pub(crate) impaired: bool,
    /// The steward has restarted, and the lessee has not reconnected.
    pub(crate) orphaned: bool,
    /// It is for io_uring zero-copy receive, not for AF_XDP.
    pub(crate) zcrx: bool,
}

/// What steers frames to a queue, or lets them pass to its socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Rule {
    /// `n-tuple` (in the NIC) or `program` (for frames that the NIC puts into the queue).
    pub(crate) by: &'static str,
    /// Location of an n-tuple rule.
    pub(crate) location: Option<u32>,
    /// Which frames, in words.
    pub(crate) what: String,
    /// Target of an n-tuple rule: the queue, or an RSS context that contains it.
    pub(crate) to: Option<String>,
}

/// Answers of the steward and the drivers.
pub(super) struct Answers {
    leases: Vec<Listed>,
    /// By interface, then by queue.
    rules: BTreeMap<String, BTreeMap<u32, Vec<Rule>>>,
    namespace: u64,
}

impl Answers {
    /// Asks the steward at `path`, or at the default path, and the drivers of these interfaces.
    /// Errors: the steward at `path` does not answer.
    pub(super) fn ask<'a>(
        steward: Option<&Path>,
        interfaces: impl Iterator<Item = &'a String>,
    ) -> anyhow::Result<Self> {
        let leases = match steward {
            Some(path) => listing::leases(path).map_err(anyhow::Error::from)?,
            // There may be none, or its policy does not know this user.
            None => listing::leases(Path::new(DEFAULT_SOCKET)).unwrap_or_default(),
        };
        Ok(Self {
            leases,
            rules: interfaces.map(|name| (name.clone(), rules_in(name))).collect(),
            namespace: host::links::namespace(),
        })
    }

    /// The lease of a queue in this namespace.
    pub(super) fn lease_of(&self, interface: &str, queue: u32) -> Option<&Listed> {
        self.leases.iter().find(|lease| {
            (lease.namespace, lease.interface.as_str()) == (self.namespace, interface)
                && queues_of(lease).contains(&queue)
        })
    }

    /// The NIC's rules that steer frames to a queue.
    pub(super) fn rules_of(&self, interface: &str, queue: u32) -> Vec<Rule> {
        let rules = self.rules.get(interface).and_then(|rules| rules.get(&queue));
        rules.cloned().unwrap_or_default()
    }

    /// Queues of leases in other namespaces, or of interfaces that are gone.
    pub(super) fn elsewhere(&self, is_known: impl Fn(&str, u32) -> bool) -> Vec<Queue> {
        let mut all = Vec::new();
        for lease in &self.leases {
            let here = lease.namespace == self.namespace;
            let unknown = queues_of(lease).filter(|&queue| !(here && is_known(&lease.interface, queue)));
            all.extend(unknown.map(|queue| Queue {
                interface: lease.interface.clone(),
                queue,
                elsewhere: true,
                lease: Some(Leased::from(lease)),
                rules: entries(lease).into_iter().collect(),
                ..Queue::default()
            }));
        }
        all
    }
}

fn queues_of(lease: &Listed) -> Range<u32> {
    lease.start_queue..lease.start_queue.saturating_add(lease.queues)
}

/// What the program lets pass to a leased queue, if not all frames.
pub(super) fn entries(lease: &Listed) -> Option<Rule> {
    let macs: Vec<String> = lease.filter.macs.iter().map(|&mac| mac_text(mac)).collect();
    program_rule(&macs, &lease.filter.vlans)
}

/// What a program lets pass, if not all frames.
pub(super) fn program_rule(macs: &[String], vlans: &[u16]) -> Option<Rule> {
    let is_some = !macs.is_empty() || !vlans.is_empty();
    is_some.then(|| Rule {
        by: "program",
        location: None,
        what: received_frames(macs, vlans),
        to: None,
    })
}

/// What a program lets pass to a network's queue.
pub(super) fn network_rule(network: &str) -> Rule {
    Rule {
        by: "program",
        location: None,
        what: format!("for the ports of network {network}"),
        to: None,
    }
}

/// The NIC's rules by target queue; empty if it has none or does not report them.
fn rules_in(interface: &str) -> BTreeMap<u32, Vec<Rule>> {
    let mut by_queue: BTreeMap<u32, Vec<Rule>> = BTreeMap::new();
    let Ok(driver) = Ethtool::open(interface) else {
        return by_queue;
    };
    for known in driver.table().map(|table| table.rules).unwrap_or_default() {
        let queues = match known.target {
            Some(Target::Queue(queue)) => vec![queue],
            Some(Target::Context(context)) => driver.spread(context).unwrap_or_default(),
            None => Vec::new(),
        };
        for queue in queues {
            by_queue.entry(queue).or_default().push(Rule {
                by: "n-tuple",
                location: Some(known.location),
                what: known.text.clone(),
                to: known.target.map(|target| target.to_string()),
            });
        }
    }
    by_queue
}

impl From<&Listed> for Leased {
    fn from(lease: &Listed) -> Self {
        Self {
            pid: lease.pid,
            command: command_of(lease.pid),
            uid: lease.uid,
            start_queue: lease.start_queue,
            queues: lease.queues,
            steered: lease.steered.name(),
            impaired: lease.impaired,
            orphaned: lease.orphaned,
            zcrx: lease.zcrx,
        }
    }
}

#[cfg(test)]
mod tests {
    use steer::Filter;
    use steward_protocol::Steered;
    use testkit::assert_has;

    use super::*;

    fn answers() -> Answers {
        let lease = |namespace, interface: &str, start_queue| Listed {
            number: 1,
            namespace,
            pid: 0,
            uid: 7,
            interface: interface.to_owned(),
            start_queue,
            queues: 2,
            filter: Filter {
                macs: vec![[2, 0, 0, 0, 0, 1]],
                vlans: vec![5],
            },
            steered: Steered::ByRules,
            impaired: false,
            orphaned: false,
            zcrx: false,
        };
        let rule = Rule {
            by: "n-tuple",
            location: Some(3),
            what: "MAC 02:00:00:00:00:01 VLAN 5".to_owned(),
            to: Some("queue 4".to_owned()),
        };
        Answers {
            leases: vec![lease(1, "eth1", 4), lease(2, "eth1", 0), lease(1, "gone", 0)],
            rules: [("eth1".to_owned(), [(4, vec![rule])].into())].into(),
            namespace: 1,
        }
    }

    #[test]
    fn queue_has_its_lease_and_all_that_brings_frames_to_it() {
        let of_queue = |interface: &str, number| {
            let queue = Queue {
                interface: interface.to_owned(),
                queue: number,
                ..Queue::default()
            };
            queue.with(&answers())
        };
        let queue = of_queue("eth1", 4);
        assert_eq!(queue.lease.map(|lease| lease.start_queue), Some(4));
        let by: Vec<_> = queue.rules.iter().map(|rule| rule.by).collect();
        assert_eq!(by, ["n-tuple", "program"]);
        assert_has(&queue.rules[1].what, &["02:00:00:00:00:01"]);
        let queue = of_queue("eth1", 5);
        assert!(queue.lease.is_some() && queue.rules.len() == 1);
        let queue = of_queue("eth1", 0);
        assert!(
            queue.lease.is_none() && queue.rules.is_empty(),
            "that one is of another namespace"
        );
    }

    #[test]
    fn leases_of_what_is_not_here_are_told_of_too() {
        let all = answers().elsewhere(|interface, _| interface == "eth1");
        let places: Vec<_> = all
            .iter()
            .map(|queue| (queue.interface.as_str(), queue.queue))
            .collect();
        assert_eq!(places, [("eth1", 0), ("eth1", 1), ("gone", 0), ("gone", 1)]);
    }
}
