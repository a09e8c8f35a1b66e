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

/// The work of a child process of the steward, which decides which capabilities it keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChildWork {
    /// Maps a lessee's files and registers the memory with a socket.
    Register,
    /// Binds a socket, and waits until its queue is free: it tests that with a socket of its own.
    Bind,
    /// Receives files of a lessee and closes them, or connections; takes a lessee's socket.
    Files,
    /// Changes or removes an interface.
    Interface,
    /// Takes rings of a lessee, and registers the lessee's memory with them.
    Rings,
}

impl ChildWork {
    /// The capabilities that the child keeps, if the steward has them.
    #[must_use]
    pub const fn keeps(self) -> CapabilitySet {
        match self {
            // To have the memory counted for its user, after which no capability is left; or, without a limit for
            // that user, to lock it (`count_for` in `sys::child`).
            Self::Register => CapabilitySet::SETUID.union(CapabilitySet::IPC_LOCK),
            // For that socket, and the page that it locks.
            Self::Bind => CapabilitySet::NET_RAW.union(CapabilitySet::IPC_LOCK),
            Self::Files => CapabilitySet::empty(),
            Self::Interface => CapabilitySet::NET_ADMIN,
            // The first until it has the rings.
            Self::Rings => TO_TAKE_RINGS.union(CapabilitySet::NET_ADMIN),
        }
    }
}

/// Further capability for io_uring zero-copy receive: a child takes the lessee's rings with it. It is in effect only in
/// that child, for that one call.
pub const TO_TAKE_RINGS: CapabilitySet = CapabilitySet::SYS_PTRACE;
