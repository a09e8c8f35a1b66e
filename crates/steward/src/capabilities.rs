//! Capability sets of a privileged process (capabilities(7)): what it does not need it does not keep.

use std::io;

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

/// What any steward needs: interfaces and programs, sockets, BPF. That of a single daemon may do with the locked memory
/// that its user may have.
pub const NEEDED_BY_ONE: CapabilitySet = CapabilitySet::NET_ADMIN
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::BPF);

/// What one for many needs: to pin the memory of those who lease, too, counted for them.
pub const NEEDED: CapabilitySet = NEEDED_BY_ONE
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::SETUID);

/// What one needs in addition that leases queues for io_uring zero-copy receive: its children take the rings of those
/// who lease. It is not in effect but in a child, for that one call.
pub const TO_TAKE_RINGS: CapabilitySet = CapabilitySet::SYS_PTRACE;

/// What a daemon's keeper has at most: to pin any memory, files in directories of others, and a look at a VMM's memory
/// map.
pub const OF_A_KEEPER: CapabilitySet = NEEDED_BY_ONE
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::SYS_PTRACE);

/// What the keeper of a daemon that reads a file has beside that: to give sockets that it makes to their owners.
pub const TO_MAKE_SOCKETS: CapabilitySet = CapabilitySet::CHOWN;

const NAMES: [(CapabilitySet, &str); 6] = [
    (CapabilitySet::NET_ADMIN, "CAP_NET_ADMIN"),
    (CapabilitySet::NET_RAW, "CAP_NET_RAW"),
    (CapabilitySet::BPF, "CAP_BPF"),
    (CapabilitySet::IPC_LOCK, "CAP_IPC_LOCK"),
    (CapabilitySet::SETUID, "CAP_SETUID"),
    (CapabilitySet::SYS_PTRACE, "CAP_SYS_PTRACE"),
];

/// Those of them that this thread lacks.
///
/// # Errors
/// The kernel's.
pub fn lacking(needed: CapabilitySet) -> io::Result<Vec<&'static str>> {
    let lacking = needed.difference(capabilities(None)?.effective);
    let names = NAMES.iter().filter(|(set, _)| lacking.contains(*set));
    Ok(names.map(|&(_, name)| name).collect())
}

/// Whether this thread has these capabilities, in effect or not.
pub(crate) fn are_at_hand(these: CapabilitySet) -> bool {
    capabilities(None).is_ok_and(|own| own.permitted.contains(these))
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

/// The same with further ones that are not in effect.
///
/// # Errors
/// The kernel's.
pub fn limit_to_with(wanted: CapabilitySet, at_hand: CapabilitySet) -> io::Result<()> {
    limit_to(wanted | at_hand)?;
    let own = capabilities(None)?;
    let effective = own.effective - (at_hand - wanted);
    Ok(set_capabilities(None, CapabilitySets { effective, ..own })?)
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
