use std::io;
use std::path::PathBuf;
use std::time::Duration;

use xsk::OpenError;

use steward_protocol::{Malformed, Refusal, Step};

/// Why there is no lease, or no answer.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// No process listens on the socket.
    #[error("no steward at {}: start vhost-af-xdp-steward, or name its socket with --steward", .path.display())]
    Connect {
        /// Path of the socket.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The steward refused the request, with the reason.
    #[error("the steward refuses: {0}")]
    Refused(Refusal),
    /// A system call of the steward for a socket or netkit failed.
    #[error("the kernel refuses: {}", .step.what())]
    Failed {
        /// The step that failed.
        step: Step,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The socket could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The steward is away; sockets continue.
    #[error("no steward at {} at the moment: queues in use go on, changes wait until vhost-af-xdp-steward is started \
             again", .path.display())]
    Away {
        /// Path of its socket.
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
    /// Waiting was ended by [`Waiting::end`](super::Waiting::end).
    #[error("the steward has not answered, and this process ends")]
    Ending,
    /// The steward sent a malformed message.
    #[error("the steward does not keep to the protocol: {0}")]
    Protocol(#[from] Malformed),
    /// An answer to another request, or without its descriptors.
    #[error(
        "the steward's answer is not one to the request, or lacks its descriptors (is LimitNOFILE too low?)"
    )]
    Mismatch,
    /// Another failure of the socket.
    #[error("talking to the steward")]
    Io(#[from] io::Error),
}
