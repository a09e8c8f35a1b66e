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
//! | [`handed`] | descriptors that a program passes to one that it starts |
//! | [`choice`] | lists that choose among names |
//! | [`signal_handler`] | handlers that inspect the cause of a signal |

pub mod capabilities;
pub mod choice;
pub mod descriptors;
pub mod handed;
pub mod log;
pub mod peer;
pub mod sandbox;
pub mod signal_handler;
pub mod users;

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

/// Cryptographically secure random bytes.
///
/// # Errors
/// The kernel's.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    // getrandom(2) returns up to 256 bytes at once.
    if getrandom(&mut bytes, GetRandomFlags::empty())? == N {
        Ok(bytes)
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}
