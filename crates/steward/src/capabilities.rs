//! Capability sets of a privileged process (capabilities(7)): what it does not need it does not keep.

use rustix::thread::CapabilitySet;

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
