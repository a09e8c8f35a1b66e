//! The list of leases, which a steward sends to any user, one lease an answer.
//!
//! Root gets all leases, other users get their own. Requests for the list change nothing.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::connection::Connection;
use crate::{LeaseError, Waiting};
use steward_protocol::{Answer, Request};

pub use steward_protocol::Listed;

/// Time limit for an answer of a steward.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// Most leases that are asked for: more than there can be.
const LEASES_MAX: usize = 4096;

/// Asks the steward at `path` for all leases that this user may know of.
///
/// # Errors
/// [`LeaseError`].
pub fn leases(path: &Path) -> Result<Vec<Listed>, LeaseError> {
    let waiting = Waiting {
        answer: ANSWER_LIMIT,
        end: None,
    };
    let mut connection = Connection::to(path, ANSWER_LIMIT)?;
    let mut all: Vec<Listed> = Vec::new();
    while all.len() < LEASES_MAX {
        let after = all.last().map_or(0, |lease| lease.number);
        let deadline = Instant::now() + ANSWER_LIMIT;
        let answered = connection.ask(&Request::Leases { after }, &[], &waiting, deadline)?;
        match answered.ok_or(LeaseError::Gone)?.answer {
            Answer::Lease(lease) if lease.number > after => all.push(lease),
            Answer::Done => break,
            _ => return Err(LeaseError::Mismatch),
        }
    }
    Ok(all)
}
