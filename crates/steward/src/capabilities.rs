//! Capability sets of a privileged process (capabilities(7)): what it does not need it does not keep.

use std::io;

use program::capabilities::{empty_bounding_set, keep};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

/// Capabilities that any steward needs: interfaces and programs, sockets, BPF. That of a single daemon may do with
/// the locked memory that its user may have.
pub const NEEDED_BY_ONE: CapabilitySet = CapabilitySet::NET_ADMIN
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::BPF);

/// Capabilities of a steward of several daemons: to pin lessees' memory, too, counted for their users.
pub const NEEDED: CapabilitySet = NEEDED_BY_ONE
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::SETUID);

/// Capabilities for io_uring zero-copy receive in addition: children take the rings of those
/// who lease. It is not in effect but in a child, for that one call.
pub const TO_TAKE_RINGS: CapabilitySet = CapabilitySet::SYS_PTRACE;

/// Most capabilities of a daemon's helper: to pin any memory, files in directories of others, and a look at a VMM's
/// memory map.
pub const OF_A_KEEPER: CapabilitySet = NEEDED_BY_ONE
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::SYS_PTRACE);

/// Capabilities of the helper of a daemon with a configuration file in addition: to give sockets to their owners.
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
#[must_use]
pub fn are_at_hand(these: CapabilitySet) -> bool {
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
