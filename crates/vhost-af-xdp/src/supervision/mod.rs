//! Protection of the daemon's threads from VMMs: memory that vanishes, waits without end; and the helper process for
//! work that the sandbox forbids.

pub(crate) mod alarm;
pub(crate) mod helper;
pub(crate) mod interrupt;
pub(crate) mod private_memory;
pub(crate) mod service_manager;
pub(crate) mod sigbus;
pub(crate) mod watchdog;
