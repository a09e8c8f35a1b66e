//! Why an interface, or one of its queues, cannot be used.

use anyhow::anyhow;
use common::binding::{L2_BYTES, NoZeroCopy};
use host::links::LinkError;
use steward_client::LeaseError;
use steward_protocol::{Reason, Refusal};
use xsk::{OpenError, UmemError};

use dataplane::nic::endpoint::ChunksError;

/// Why an interface or one of its queues cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InterfaceError {
    #[error("cannot duplicate a descriptor")]
    Duplicate(#[source] std::io::Error),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Lease(LeaseError),
    /// The daemon's own helper refuses a request.
    #[error("{0}")]
    Refused(Refusal),
    #[error("the daemon's helper is gone, and the daemon ends with it")]
    HelperGone,
    /// Any error that no caller distinguishes.
    #[error(transparent)]
    Other(#[from] anyhow::Error),
    #[error(transparent)]
    Chunks(#[from] ChunksError),
    #[error(transparent)]
    Umem(#[from] UmemError),
    /// A lane has the queue.
    #[error("the queue's socket is in use")]
    InUse,
    #[error(
        "this daemon locks {all_bytes} bytes of memory in all, and RLIMIT_MEMLOCK is {limit_bytes}, for all processes \
         of the user together: raise it (`ulimit -l {}`, systemd: LimitMEMLOCK={target_bytes}), or use fewer queues",
        target_bytes.div_ceil(1024)
    )]
    MemoryLock {
        all_bytes: u64,
        limit_bytes: u64,
        target_bytes: u64,
    },
    #[error(
        "{name} has {have} receive queue(s), queue {queue} was asked for: use a lower start-queue or fewer queues, or \
         add channels with `ethtool -L`"
    )]
    NoSuchQueue { name: String, have: u32, queue: u32 },
    #[error("force-zero-copy on {name}: {why}: change that, or leave it out")]
    NoZeroCopy { name: String, why: NoZeroCopy },
    #[error("{name} has MTU {mtu}, frames in guest memory have {limit} bytes at most: lower the MTU to {most} or use \
             memory=copy", most = limit - L2_BYTES)]
    MtuTooLargeForDirect { name: String, mtu: u32, limit: u32 },
}

impl From<LeaseError> for InterfaceError {
    fn from(error: LeaseError) -> Self {
        match error {
            LeaseError::Open(error) => Self::Open(error),
            error => Self::Lease(error),
        }
    }
}

impl InterfaceError {
    /// Converts an error of a lease from the daemon's own helper. The text names the helper: there is no steward.
    pub(crate) fn of_helper(error: LeaseError) -> Self {
        match error {
            LeaseError::Refused(refusal) => Self::Refused(refusal),
            LeaseError::Silent(limit) => Self::Other(anyhow!(
                "the daemon's helper has not answered for {} s: if that goes on, restart the daemon",
                limit.as_secs()
            )),
            LeaseError::Protocol(_) | LeaseError::Mismatch => Self::Other(anyhow!(
                "the daemon's helper answers without the expected descriptors: is LimitNOFILE too low?"
            )),
            LeaseError::Io(source) => {
                Self::Other(anyhow::Error::new(source).context("cannot ask the daemon's helper"))
            }
            LeaseError::Connect { .. }
            | LeaseError::Away { .. }
            | LeaseError::Gone
            | LeaseError::Unanswered
            | LeaseError::Ending => Self::HelperGone,
            error @ (LeaseError::Failed { .. } | LeaseError::Open(_)) => error.into(),
        }
    }

    /// Whether a steward answered, and refused.
    pub(crate) fn is_refusal(&self) -> bool {
        self.refusal().is_some()
    }

    fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::Refused(refusal) | Self::Lease(LeaseError::Refused(refusal)) => Some(refusal),
            _ => None,
        }
    }

    /// Whether a steward refused for another reason than too many requests.
    pub(crate) fn is_lasting_refusal(&self) -> bool {
        self.refusal()
            .is_some_and(|refusal| refusal.reason != Reason::Limit)
    }

    /// Whether the interface or the steward is missing: such an attempt costs nothing, and needs no pause after it.
    pub(crate) fn is_absent(&self) -> bool {
        match self {
            Self::Refused(refusal) | Self::Lease(LeaseError::Refused(refusal)) => {
                refusal.reason == Reason::NoInterface
            }
            Self::Lease(LeaseError::Connect { .. } | LeaseError::Unanswered)
            | Self::HelperGone
            | Self::Link(LinkError::Unknown(_)) => true,
            _ => self.is_away(),
        }
    }

    /// Whether the steward is away at the moment.
    pub(crate) fn is_away(&self) -> bool {
        matches!(self, Self::Lease(LeaseError::Away { .. }))
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::time::Duration;

    use super::*;

    #[test]
    fn errors_of_the_daemons_own_helper_name_no_steward() {
        let broken = || io::Error::from(io::ErrorKind::BrokenPipe);
        let path = std::path::PathBuf::from("/run/helper.sock");
        let errors = [
            LeaseError::Connect {
                path: path.clone(),
                source: broken(),
            },
            LeaseError::Away { path },
            LeaseError::Gone,
            LeaseError::Unanswered,
            LeaseError::Silent(Duration::from_secs(2)),
            LeaseError::Ending,
            LeaseError::Mismatch,
            LeaseError::Io(broken()),
        ];
        for error in errors {
            let said = InterfaceError::of_helper(error).to_string();
            assert!(said.contains("helper") && !said.contains("steward"), "{said}");
        }
    }
}
