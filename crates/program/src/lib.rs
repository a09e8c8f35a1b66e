//! Process-level code that the programs of this tree share.
//!
//! | module | what |
//! |---|---|
//! | [`log`] | the log on standard error, and its options |
//! | [`sandbox`] | drops privileges before a process reads data of others |
//! | [`capabilities`] | sets of capabilities |
//! | [`users`] | users and groups by name |
//! | [`descriptors`] | messages that carry descriptors |
//! | [`peer`] | the peer of a Unix socket |
//! | [`fd_store`] | descriptors that the service manager keeps open |
//! | [`steward`], [`dra`], [`kubevirt`] | command lines of the steward, the DRA driver and the hook of KubeVirt |
//! | [`handed`] | descriptors that a program passes to one that it starts |
//! | [`choice`] | lists that choose among names |
//! | [`text_file`] | files that configure a privileged process |
//! | [`backoff`] | pauses between attempts |
//! | [`rate`] | rate limits for work that others cause |
//! | [`log_limit`] | limits of log lines that others can cause |
//! | [`signal_handler`] | handlers that inspect the cause of a signal |

pub mod backoff;
pub mod capabilities;
pub mod choice;
pub mod descriptors;
pub mod dra;
pub mod fd_store;
pub mod handed;
pub mod kubevirt;
pub mod log;
pub mod log_limit;
pub mod peer;
pub mod rate;
pub mod sandbox;
pub mod signal_handler;
pub mod steward;
pub mod text_file;
pub mod users;

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::rand::{GetRandomFlags, getrandom};

/// Cryptographically secure random bytes.
///
/// # Errors
/// An error of the kernel.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    // getrandom(2) returns up to 256 bytes at once.
    if getrandom(&mut bytes, GetRandomFlags::empty())? == N {
        Ok(bytes)
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

/// Raises the soft limit of descriptors to the hard limit: each lease takes a few, and the program has others.
pub fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    let _ = setrlimit(Resource::Nofile, raised);
}
