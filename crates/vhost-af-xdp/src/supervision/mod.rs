//! What stands between the daemon and what a VMM can do to its threads: memory that vanishes, waits without end, and
//! what the sandboxed process cannot do any more.

pub(crate) mod alarm;
pub(crate) mod helper;
pub(crate) mod interrupt;
pub(crate) mod private_memory;
pub(crate) mod service_manager;
pub(crate) mod sigbus;
pub(crate) mod watchdog;
