//! What stands between the daemon and what a VMM can do to its threads: memory that vanishes, waits without end, and
//! what the sandboxed process cannot do any more.

pub(crate) mod alarm;
pub(crate) mod handler;
pub(crate) mod interrupt;
pub(crate) mod keeper;
pub(crate) mod private_memory;
pub(crate) mod sigbus;
pub(crate) mod watchdog;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// As many descriptors as this process may have: a guest's memory and rings have some tens, a lease has a few.
pub(crate) fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    let _ = setrlimit(Resource::Nofile, raised);
}
