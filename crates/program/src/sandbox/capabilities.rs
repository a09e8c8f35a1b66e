//! Capability sets (capabilities(7)): emptied, all five of them, and no program gains any (no_new_privs).
//!
//! Two may stay where AF_XDP sockets or a map are somebody else's. CAP_NET_RAW where sockets are made here, for a map
//! (`--map-path` and its like): an interface that comes back needs new ones. And CAP_IPC_LOCK. Packet memory is locked
//! memory; a process that was started with CAP_IPC_LOCK had as much of it as it wanted. It gets that by its limit,
//! RLIMIT_MEMLOCK, where it may raise that itself. Where the system does not let even root (no CAP_SYS_RESOURCE in this
//! container), CAP_IPC_LOCK stays: it lets a process pin memory, and nothing else.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities};

use super::SandboxError;

/// What has to stay of CAP_IPC_LOCK: nothing, if a process that has it gets a limit that lets it lock memory without.
pub(super) fn locked_memory() -> CapabilitySet {
    let may = permitted() & CapabilitySet::IPC_LOCK;
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    if may.is_empty()
        || getrlimit(Resource::Memlock).current.is_none()
        || setrlimit(Resource::Memlock, unlimited).is_ok()
    {
        return CapabilitySet::empty();
    }
    may
}

/// What this process may have in effect.
pub(super) fn permitted() -> CapabilitySet {
    capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.permitted)
}

/// Empties the other sets, and closes the way back; says what is left.
pub(super) fn drop_all(stays: CapabilitySet) -> Result<String, SandboxError> {
    crate::capabilities::keep(stays).map_err(SandboxError::at("capabilities"))?;
    let mut left = Vec::new();
    if stays.contains(CapabilitySet::IPC_LOCK) {
        left.push("CAP_IPC_LOCK (RLIMIT_MEMLOCK cannot be raised here: that needs CAP_SYS_RESOURCE)");
    }
    if stays.contains(CapabilitySet::NET_RAW) {
        left.push("CAP_NET_RAW (to open AF_XDP sockets for a map of somebody else's)");
    }
    Ok(match left.as_slice() {
        [] => "none".to_owned(),
        left => left.join(", "),
    })
}
