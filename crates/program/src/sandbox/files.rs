//! The file system, closed by landlock (landlock(7)).
//!
//! All access is denied but reading two things: this process's directory in /proc (which pages the kernel gave us,
//! and where a panic happened) and its own program (for the names in a panic's backtrace). A worker has
//! everything else open already, such as its listening sockets; connecting to a socket by its path is no access that
//! this ABI restricts. Removing socket files is left to the [helper](helper).
//!
//! Also denied, if the kernel supports it: TCP, connecting to abstract sockets, signals to processes outside. Landlock
//! always denies access to other processes (ptrace(2), /proc/PID/maps).

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, LandlockStatus, PathBeneath, PathFd, RestrictionStatus,
    Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};

/// The requested ABI; an older kernel enforces what it supports.
const ABI_WANTED: ABI = ABI::V6;

/// Confines the calling thread and those that it starts; returns how far, or why not.
pub(super) fn confine() -> String {
    let status = match restrict() {
        Ok(status) => status,
        // Forbidden from outside, for example by a system call filter that does not know landlock.
        Err(error) => {
            let why =
                std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            tracing::warn!("no landlock: {error}: files stay reachable as far as the user may");
            return format!("not confined (landlock: {why})");
        }
    };
    match (status.ruleset, status.landlock) {
        (RulesetStatus::NotEnforced, LandlockStatus::NotEnabled) => {
            "not confined (landlock is not enabled: add it to the kernel's lsm= parameter)".to_owned()
        }
        (RulesetStatus::NotEnforced, _) => {
            "not confined (this kernel has no landlock, or it may not be used here)".to_owned()
        }
        (RulesetStatus::FullyEnforced, _) => "denied".to_owned(),
        (RulesetStatus::PartiallyEnforced, _) => {
            "denied (an older landlock: no limit to truncation, TCP or signals)".to_owned()
        }
    }
}

fn restrict() -> Result<RestrictionStatus, RulesetError> {
    let mut rules = Ruleset::default()
        .handle_access(AccessFs::from_all(ABI_WANTED))?
        .handle_access(AccessNet::from_all(ABI_WANTED))?
        .scope(Scope::from_all(ABI_WANTED))?
        .create()?;
    for path in ["/proc/self", "/proc/self/exe"] {
        // Without them a few words are missing in status and backtraces.
        let Ok(place) = PathFd::new(path) else { continue };
        let read: BitFlags<AccessFs> = AccessFs::ReadFile.into();
        rules = rules.add_rule(PathBeneath::new(&place, read))?;
        if path == "/proc/self" {
            // A rule belongs to an inode, and /proc can free an unused one: the open descriptor keeps this inode.
            std::mem::forget(place);
        }
    }
    rules.restrict_self()
}
