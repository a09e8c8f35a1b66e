//! Capability sets of a privileged process (capabilities(7)): what it does not need it does not keep.

use std::io;

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

/// What a steward needs: interfaces and programs, sockets, BPF, and the locked-memory limit of those who lease.
pub const NEEDED: CapabilitySet = CapabilitySet::NET_ADMIN
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::BPF)
    .union(CapabilitySet::SYS_RESOURCE);

/// What it cannot do anything without.
const INDISPENSABLE: [(CapabilitySet, &str); 3] = [
    (CapabilitySet::NET_ADMIN, "CAP_NET_ADMIN"),
    (CapabilitySet::NET_RAW, "CAP_NET_RAW"),
    (CapabilitySet::BPF, "CAP_BPF"),
];

/// Those of them that this thread lacks.
///
/// # Errors
/// The kernel's.
pub fn lacking() -> io::Result<Vec<&'static str>> {
    let effective = capabilities(None)?.effective;
    let lacks = |&(set, name)| (!effective.contains(set)).then_some(name);
    Ok(INDISPENSABLE.iter().filter_map(lacks).collect())
}

/// Whether limits of other processes may be raised.
///
/// # Errors
/// The kernel's.
pub fn may_raise_limits() -> io::Result<bool> {
    Ok(capabilities(None)?
        .effective
        .contains(CapabilitySet::SYS_RESOURCE))
}

/// Keeps at most these capabilities in all sets, for good and for the calling thread; threads that it starts have no
/// others.
///
/// # Errors
/// The kernel's.
pub fn limit_to(wanted: CapabilitySet) -> io::Result<()> {
    empty_bounding_set(wanted);
    keep(capabilities(None)?.permitted & wanted)
}

/// Removes what may be removed from the bounding set, but for these, and all from the ambient one. That needs
/// CAP_SETPCAP; who does not have it has no way to the others either, by no_new_privs.
pub fn empty_bounding_set(stays: CapabilitySet) {
    for capability in CapabilitySet::all().difference(stays).iter() {
        // Fails, too, for capabilities that this kernel does not have.
        let _ = remove_capability_from_bounding_set(capability);
    }
    let _ = clear_ambient_capability_set();
}

/// Keeps these of the permitted capabilities, in effect, and no way to others (no_new_privs).
///
/// # Errors
/// The kernel's.
pub fn keep(stays: CapabilitySet) -> io::Result<()> {
    let sets = CapabilitySets {
        effective: stays,
        permitted: stays,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets)?;
    Ok(set_no_new_privs(true)?)
}
