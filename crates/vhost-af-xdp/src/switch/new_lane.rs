//! What control hands a worker for a lane.

use xsk::NumaNode;

use super::lane::Lane;
use super::role::Role;
use device::pair::Fault;

/// Called once, on the worker's thread, when a guest broke the rules.
pub(crate) type OnFault = Box<dyn FnOnce(Fault) + Send>;

/// A lane on its way to a worker.
pub(crate) struct NewLane {
    pub(crate) lane: Box<dyn Lane>,
    pub(crate) role: Role,
    /// NUMA node of its NIC, where there are several.
    pub(crate) node: Option<NumaNode>,
    pub(crate) on_fault: OnFault,
}
