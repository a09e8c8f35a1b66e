//! NUMA: selects the node from which the kernel allocates pages.
//!
//! The node is set by a policy of the thread (set_mempolicy(2)), not of a mapping: it applies to all memory that the
//! kernel allocates for the thread, and so also to a socket's rings and the tables of its UMEM, which have no address
//! in this process before they are allocated (`vmalloc_user`, mm/vmalloc.c; `alloc_pages`, mm/mempolicy.c).

use std::marker::PhantomData;

use crate::sys;
use derive_more::Display;

/// Number of a NUMA node, as in /sys/devices/system/node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Display)]
pub struct NumaNode(u16);

impl NumaNode {
    /// Maximum number of nodes of a kernel.
    pub const MOST: u16 = sys::MAX_NODES;

    /// The node `number`; `None` if no node can have it, such as -1, by which sysfs means no node (`NUMA_NO_NODE`).
    #[must_use]
    pub fn new(number: i32) -> Option<Self> {
        let number = u16::try_from(number).ok()?;
        (number < Self::MOST).then_some(Self(number))
    }

    /// Its number.
    #[must_use]
    pub fn number(self) -> u16 {
        self.0
    }
}

/// While it exists, pages for this thread are allocated from a node, as long as that has free ones
/// (`MPOL_PREFERRED`, set_mempolicy(2)); existing pages stay where they are.
#[derive(Debug)]
pub struct PreferNode {
    /// Not Send: the policy is that of the thread.
    _thread: PhantomData<*const ()>,
}

impl PreferNode {
    /// Sets the policy. `None`, without a change: the thread has a memory policy already (numactl(8), or
    /// another `PreferNode`); the node does not exist, has no memory, or none that this process may use; or a
    /// system call filter denies it.
    #[must_use]
    pub fn begin(node: NumaNode) -> Option<Self> {
        let told = sys::memory_policy().ok()? != libc::MPOL_DEFAULT;
        if told || sys::prefer_node(Some(node.0)).is_err() {
            return None;
        }
        Some(Self { _thread: PhantomData })
    }
}

impl Drop for PreferNode {
    fn drop(&mut self) {
        // Allowed wherever the first call was.
        let _ = sys::prefer_node(None);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{OwnMemory, Umem};

    const LEN: usize = 64 * 4096;

    /// The first node of this machine with memory; `None`, with a message, if the kernel has no NUMA, or denies it.
    fn node() -> Option<NumaNode> {
        let known = std::fs::read_to_string("/sys/devices/system/node/has_memory");
        let Some(known) = known.ok().filter(|_| sys::memory_policy().is_ok()) else {
            println!("SKIPPED: no NUMA in this kernel, or denied to this process");
            return None;
        };
        let first = known.trim().split(['-', ',']).next()?.parse().ok()?;
        NumaNode::new(first)
    }

    fn policy() -> i32 {
        sys::memory_policy().expect("it is told")
    }

    #[test]
    fn only_what_can_be_a_node_is_one() {
        assert_eq!(NumaNode::new(-1), None);
        assert_eq!(NumaNode::new(1024), None);
        assert_eq!(NumaNode::new(1023).map(NumaNode::number), Some(1023));
    }

    #[test]
    fn memory_comes_from_the_preferred_node_as_long_as_it_is_preferred() {
        let Some(node) = node() else { return };
        assert_eq!(policy(), libc::MPOL_DEFAULT);
        let preferred = PreferNode::begin(node).expect("a node with memory");
        assert_eq!(policy(), libc::MPOL_PREFERRED);
        let memory = OwnMemory::new(LEN).expect("memory");
        drop(preferred);
        assert_eq!(policy(), libc::MPOL_DEFAULT);
        let umem = Umem::aligned(Arc::new(memory), 4096, 0).expect("good");
        assert_eq!(umem.node(), Some(node));
    }

    #[test]
    fn thread_that_was_told_where_its_memory_is_to_be_keeps_to_it() {
        let Some(node) = node() else { return };
        let _told = PreferNode::begin(node).expect("a node with memory");
        assert!(PreferNode::begin(node).is_none());
        assert_eq!(policy(), libc::MPOL_PREFERRED);
    }

    #[test]
    fn node_that_is_not_there_is_refused_and_changes_nothing() {
        if node().is_none() {
            return;
        }
        let last = NumaNode::new(1023).expect("it could be");
        assert!(PreferNode::begin(last).is_none(), "no machine has so many");
        assert_eq!(policy(), libc::MPOL_DEFAULT);
    }
}
