//! Sets of capabilities of the calling thread (capabilities(7)).

use std::io;

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

/// Removes all capabilities but `stays` from the bounding set, which needs CAP_SETPCAP, and all from the ambient set.
/// Without CAP_SETPCAP, no_new_privs still prevents that an executed program gains capabilities.
pub fn empty_bounding_set(stays: CapabilitySet) {
    for capability in CapabilitySet::all().difference(stays).iter() {
        // Fails, too, for capabilities that this kernel does not have.
        let _ = remove_capability_from_bounding_set(capability);
    }
    let _ = clear_ambient_capability_set();
}

/// Makes `stays` the permitted and effective capabilities, and sets no_new_privs, so that none is gained.
///
/// # Errors
/// An error of the kernel.
pub fn keep(stays: CapabilitySet) -> io::Result<()> {
    let sets = CapabilitySets {
        effective: stays,
        permitted: stays,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets)?;
    Ok(set_no_new_privs(true)?)
}

/// Names for error messages.
const NAMES: [(CapabilitySet, &str); 6] = [
    (CapabilitySet::NET_ADMIN, "CAP_NET_ADMIN"),
    (CapabilitySet::NET_RAW, "CAP_NET_RAW"),
    (CapabilitySet::BPF, "CAP_BPF"),
    (CapabilitySet::IPC_LOCK, "CAP_IPC_LOCK"),
    (CapabilitySet::SETUID, "CAP_SETUID"),
    (CapabilitySet::SYS_PTRACE, "CAP_SYS_PTRACE"),
];

/// Names of those capabilities that this thread lacks.
///
/// # Errors
/// An error of the kernel.
pub fn lacking(needed: CapabilitySet) -> io::Result<Vec<&'static str>> {
    let lacking = needed.difference(capabilities(None)?.effective);
    let names = NAMES.iter().filter(|(set, _)| lacking.contains(*set));
    Ok(names.map(|&(_, name)| name).collect())
}

/// Whether this thread has these capabilities, in effect or not.
#[must_use]
pub fn are_at_hand(these: CapabilitySet) -> bool {
    capabilities(None).is_ok_and(|own| own.permitted.contains(these))
}

/// Keeps at most these capabilities in all sets, for good and for the calling thread; threads that it starts have no
/// others.
///
/// # Errors
/// An error of the kernel.
pub fn limit_to(wanted: CapabilitySet) -> io::Result<()> {
    empty_bounding_set(wanted);
    keep(capabilities(None)?.permitted & wanted)
}

/// The same with further ones that are not in effect.
///
/// # Errors
/// An error of the kernel.
pub fn limit_to_with(wanted: CapabilitySet, at_hand: CapabilitySet) -> io::Result<()> {
    limit_to(wanted | at_hand)?;
    let own = capabilities(None)?;
    let effective = own.effective - (at_hand - wanted);
    Ok(set_capabilities(None, CapabilitySets { effective, ..own })?)
}
