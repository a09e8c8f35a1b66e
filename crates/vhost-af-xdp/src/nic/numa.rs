//! The NUMA nodes of this machine, and which of them workers run on.
//!
//! Packet memory and workers should be on the node of their NIC, because each frame crosses the link between two nodes
//! otherwise, twice in copy modes. The [`Link`](host::links::Link) has the node of the NIC. `Interface::near` places
//! memory there, and [`Nodes::places`] workers, unless the user chose their CPUs. On a machine with one node none of
//! this happens.

use std::fs;
use std::path::Path;

use dataplane::worker::place::WorkerPlace;
use rustix::thread::{CpuSet, sched_getaffinity};
use steer::ranges;
use xsk::NumaNode;

/// The nodes of a machine.
const NODES: &str = "/sys/devices/system/node";

/// Nodes, if there are several.
#[derive(Debug, Clone, Default)]
pub(crate) struct Nodes(Vec<Node>);

#[derive(Debug, Clone)]
struct Node {
    number: NumaNode,
    /// Its CPUs that this process may use.
    cpus: CpuSet,
}

impl Nodes {
    /// Reads the nodes of this machine, with the CPUs that this process may use.
    pub(crate) fn read() -> Self {
        let allowed = sched_getaffinity(None).unwrap_or_default();
        let read = |file: &str| fs::read_to_string(Path::new(NODES).join(file)).ok();
        Self::of(read, &allowed).unwrap_or_default()
    }

    /// The nodes in the files of such a directory (Documentation/ABI/stable/sysfs-devices-node).
    fn of(read: impl Fn(&str) -> Option<String>, allowed: &CpuSet) -> Option<Self> {
        let online = read("online")?;
        let numbers = ranges(online.trim(), i32::from(NumaNode::MOST) - 1)?;
        if numbers.len() < 2 {
            return None;
        }
        let node = |number| {
            let list = read(&format!("node{number}/cpulist"))?;
            // A node may have memory only.
            let list = ranges(list.trim(), u32::from(u16::MAX)).unwrap_or_default();
            let mut cpus = CpuSet::new();
            for cpu in list.into_iter().filter_map(|cpu| usize::try_from(cpu).ok()) {
                if cpu < CpuSet::MAX_CPU && allowed.is_set(cpu) {
                    cpus.set(cpu);
                }
            }
            Some(Node {
                number: NumaNode::new(number)?,
                cpus,
            })
        };
        Some(Self(numbers.into_iter().filter_map(node).collect()))
    }

    /// The same node, if it is one of several here.
    pub(crate) fn known(&self, node: Option<NumaNode>) -> Option<NumaNode> {
        node.filter(|&node| self.node(node).is_some())
    }

    /// CPUs of a node that this process may use; `None` if there are none.
    pub(crate) fn cpus(&self, node: NumaNode) -> Option<CpuSet> {
        let cpus = self.node(node)?.cpus;
        (cpus.count() > 0).then_some(cpus)
    }

    /// The place of each worker: on the CPUs that the user chose, round robin; if there are none, on the nodes of the
    /// NICs, in proportion to their queue pairs. `pairs`: the node of each queue pair.
    pub(crate) fn places(
        &self,
        count: usize,
        given: &[usize],
        pairs: &[Option<NumaNode>],
    ) -> Vec<WorkerPlace> {
        let place = |worker: usize| match given {
            [] => {
                let node = self.known(pairs.get(worker * pairs.len() / count.max(1)).copied().flatten());
                let cpus = node.and_then(|node| self.cpus(node));
                WorkerPlace {
                    cpus,
                    node: node.filter(|_| cpus.is_some()),
                }
            }
            given => WorkerPlace {
                cpus: None,
                node: self.node_of(given[worker % given.len()]),
            },
        };
        (0..count).map(place).collect()
    }

    fn node_of(&self, cpu: usize) -> Option<NumaNode> {
        let of = |node: &&Node| cpu < CpuSet::MAX_CPU && node.cpus.is_set(cpu);
        self.0.iter().find(of).map(|node| node.number)
    }

    fn node(&self, number: NumaNode) -> Option<&Node> {
        self.0.iter().find(|node| node.number == number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpus(numbers: &[usize]) -> CpuSet {
        let mut set = CpuSet::new();
        numbers.iter().for_each(|&cpu| set.set(cpu));
        set
    }

    /// The nodes in such files, for a process that may use CPUs 0 to 5.
    fn nodes(files: &[(&str, &str)]) -> Option<Nodes> {
        let read = |name: &str| {
            let file = files.iter().find(|(known, _)| *known == name);
            file.map(|(_, text)| (*text).to_owned())
        };
        Nodes::of(read, &cpus(&[0, 1, 2, 3, 4, 5]))
    }

    /// Two with CPUs, one with memory only, one with CPUs that this process may not use.
    fn four() -> Nodes {
        let files = [
            ("online", "0-2,7\n"),
            ("node0/cpulist", "0,2\n"),
            ("node1/cpulist", "1,3-6\n"),
            ("node2/cpulist", "\n"),
            ("node7/cpulist", "6-7,5000\n"),
        ];
        nodes(&files).expect("several nodes")
    }

    fn node(number: i32) -> Option<NumaNode> {
        NumaNode::new(number)
    }

    #[test]
    fn one_node_is_as_none() {
        assert!(nodes(&[("online", "0\n"), ("node0/cpulist", "0-5\n")]).is_none());
        assert!(nodes(&[]).is_none());
        assert!(nodes(&[("online", "0-9999\n")]).is_none());
        let none = Nodes::default();
        assert_eq!(none.known(node(0)), None);
        assert_eq!(none.places(2, &[], &[node(0)]), [WorkerPlace::default(); 2]);
        assert_eq!(none.places(1, &[1], &[node(0)]), [WorkerPlace::default()]);
    }

    #[test]
    fn node_that_is_not_there_is_not_known() {
        let nodes = four();
        assert_eq!(
            [1, 2, 3, 7].map(|number| nodes.known(node(number))),
            [node(1), node(2), None, node(7)]
        );
        assert_eq!(nodes.known(None), None);
    }

    #[test]
    fn workers_are_on_the_nodes_of_the_queue_pairs_and_on_cpus_that_may_be_used() {
        let nodes = four();
        let on = |number, list: &[usize]| WorkerPlace {
            cpus: Some(cpus(list)),
            node: node(number),
        };
        let (first, second) = (on(0, &[0, 2]), on(1, &[1, 3, 4, 5]));
        let pairs = [node(1), node(1), node(0)];
        assert_eq!(nodes.places(3, &[], &pairs), [second, second, first]);
        assert_eq!(
            nodes.places(6, &[], &pairs),
            [second, second, second, second, first, first]
        );
        assert_eq!(nodes.places(1, &[], &pairs), [second]);
        // A node without CPUs, one with CPUs of other processes only, an interface without a node, no interface.
        for pairs in [&[node(2)][..], &[node(7)], &[None], &[]] {
            assert_eq!(nodes.places(1, &[], pairs), [WorkerPlace::default()]);
        }
    }

    #[test]
    fn cpus_that_the_user_gave_are_where_they_are() {
        let at = |number| WorkerPlace {
            cpus: None,
            node: node(number),
        };
        assert_eq!(four().places(3, &[2, 3], &[node(0)]), [at(0), at(1), at(0)]);
        assert_eq!(four().places(1, &[9], &[node(0)]), [WorkerPlace::default()]);
    }
}
