//! A lane that control passes to a worker.

use xsk::NumaNode;

use crate::switch::lane::Lane;
use crate::switch::lane::role::Role;
use device::pair::Fault;

/// Called once, on the worker's thread, after a guest's fault.
pub(crate) type OnFault = Box<dyn FnOnce(Fault) + Send>;

/// A lane for a worker, with what the worker needs to know of it.
pub(crate) struct NewLane {
    pub(crate) lane: Box<dyn Lane>,
    pub(crate) role: Role,
    /// NUMA node of its NIC, where there are several.
    pub(crate) node: Option<NumaNode>,
    pub(crate) on_fault: OnFault,
}
