//! A lane that control passes to a worker.

use xsk::NumaNode;

use crate::lane::Lane;
use crate::lane::role::Role;
use device::pair::Fault;

/// Called once, on the worker's thread, after a guest's fault.
pub(crate) type OnFault = Box<dyn FnOnce(Fault) + Send>;

/// A lane for a worker, with what the worker needs to know of it.
pub struct NewLane {
    /// The lane.
    pub lane: Box<dyn Lane>,
    /// What it serves.
    pub role: Role,
    /// NUMA node of its NIC, where there are several.
    pub node: Option<NumaNode>,
    /// Called at a fault of its guest.
    pub on_fault: OnFault,
}
