//! Whether a guest may send from an address that is not its port's.

use super::CounterOf;
use crate::fdb::learned::Learned;
use crate::fdb::{Fdb, FdbKey, FdbPort};

/// Where to record a source that is not configured, if the port learns and no other port has that address.
/// Errors: the counter of the frame, which may not be sent.
#[cold]
pub(super) fn may_learn<'a>(fdb: &Fdb, port: &'a FdbPort, source: FdbKey) -> Result<&'a Learned, CounterOf> {
    let learned = port.learned.as_deref().filter(|_| fdb.is_free(source));
    learned.ok_or(|counters| &counters.from_guest_source_address)
}

/// Records the source of a frame that all other checks allow: a denied frame must not claim an address.
/// Errors: the counter of the frame, which may not be sent.
#[cold]
pub(super) fn record(learned: &Learned, source: FdbKey) -> Result<(), CounterOf> {
    match learned.record(source) {
        true => Ok(()),
        false => Err(|counters| &counters.from_guest_not_learned),
    }
}
