//! Sets of capabilities of the calling thread (capabilities(7)).

use std::io;

use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs,
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
