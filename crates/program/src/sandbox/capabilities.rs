//! Capability sets (capabilities(7)): emptied, all five of them, and no program gains any (no_new_privs).
//!
//! Two may stay if AF_XDP sockets or a map are another program's. CAP_NET_RAW stays if this process opens sockets for a
//! map (such as `--map-path`): an interface that reappears needs new ones. CAP_IPC_LOCK may be
//! needed for packet memory, which is locked. If the process may raise RLIMIT_MEMLOCK, it does that and drops
//! the capability. If even root may not raise it (no CAP_SYS_RESOURCE in a container), CAP_IPC_LOCK stays: it allows a
//! process to pin memory, and nothing else.

use anyhow::Context as _;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities};

use super::failed;

/// CAP_IPC_LOCK if it must stay; empty if the process does not have it, or RLIMIT_MEMLOCK is or becomes unlimited.
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

/// The permitted capabilities of this process.
pub(super) fn permitted() -> CapabilitySet {
    capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.permitted)
}

/// Drops all capabilities but `stays`, and sets no_new_privs; returns what is left, in words.
pub(super) fn drop_all(stays: CapabilitySet) -> anyhow::Result<String> {
    crate::capabilities::keep(stays).with_context(|| failed("capabilities"))?;
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
