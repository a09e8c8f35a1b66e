use std::io;
use std::path::PathBuf;
use std::time::Duration;

use xsk::OpenError;

use crate::protocol::{Malformed, Refusal, Step};

/// Why there is no lease, or no answer.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// Nobody listens.
    #[error("no steward at {}: start vhost-af-xdp-steward, or name its socket with --steward", .path.display())]
    Connect {
        /// As given.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The steward said no, and why.
    #[error("the steward refuses: {0}")]
    Refused(Refusal),
    /// The kernel did not do what the steward asked of it for a socket.
    #[error("the kernel refuses: {}", .step.what())]
    Failed {
        /// Which step of it.
        step: Step,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The socket did not open.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The steward is away; sockets continue.
    #[error("no steward at {} at the moment: queues in use go on, changes wait until vhost-af-xdp-steward is started \
             again", .path.display())]
    Away {
        /// Where it was.
        path: PathBuf,
    },
    /// The steward is gone, and the lease with it.
    #[error("the steward has ended the connection; the lease is over: its log says why")]
    Gone,
    /// The steward closed the connection before it granted a lease, as one does that is shutting down.
    #[error("the steward has ended the connection unanswered: its log says why")]
    Unanswered,
    /// The steward does not answer.
    #[error("the steward runs, but has not answered for {} s: if that goes on, restart it", .0.as_secs())]
    Silent(Duration),
    /// Nothing is waited for any more; see [`Waiting::end`](super::Waiting::end).
    #[error("the steward has not answered, and this process ends")]
    Ending,
    /// The steward does not keep to the protocol.
    #[error("the steward does not keep to the protocol: {0}")]
    Protocol(#[from] Malformed),
    /// An answer to something else, or without its descriptors.
    #[error(
        "the steward's answer is not one to the request, or lacks its descriptors (is LimitNOFILE too low?)"
    )]
    Mismatch,
    /// Another failure of the socket.
    #[error("talking to the steward")]
    Io(#[from] io::Error),
}
