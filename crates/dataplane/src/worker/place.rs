//! Where a worker runs: which CPUs, which NUMA node.

use rustix::thread::CpuSet;
use xsk::NumaNode;

/// Where a worker runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WorkerPlace {
    /// `None`: any CPU, or the user chose them.
    pub cpus: Option<CpuSet>,
    /// The node of its CPUs; `None`: it is unknown, or the machine has one node.
    pub node: Option<NumaNode>,
}
