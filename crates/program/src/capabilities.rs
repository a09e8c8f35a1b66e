//! Sets of capabilities of the calling thread (capabilities(7)).

use std::io;

use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs,
};

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
