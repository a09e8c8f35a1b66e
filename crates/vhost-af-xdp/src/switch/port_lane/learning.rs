//! Whether a guest may send from an address that is not its port's.

use device::counters::{Counter, PairCounters};

use crate::switch::fdb::{Fdb, FdbKey, FdbPort};
use crate::switch::learned::Learned;

/// Where a frame is counted that may not be sent.
pub(super) type Refusal = fn(&PairCounters) -> &Counter;

/// Where to record a source that is not configured: its port learns, and no other port has it.
/// Errors: where the frame is counted that it does not send.
#[cold]
pub(super) fn may_learn<'a>(fdb: &Fdb, port: &'a FdbPort, source: FdbKey) -> Result<&'a Learned, Refusal> {
    let learned = port.learned.as_deref().filter(|_| fdb.is_free(source));
    learned.ok_or(|counters| &counters.from_guest_source_address)
}

/// Notes the source of a frame that may be sent; one that is refused for another reason takes no address from anybody.
/// Errors: where the frame is counted that it does not send.
#[cold]
pub(super) fn record(learned: &Learned, source: FdbKey) -> Result<(), Refusal> {
    match learned.record(source) {
        true => Ok(()),
        false => Err(|counters| &counters.from_guest_not_learned),
    }
}
