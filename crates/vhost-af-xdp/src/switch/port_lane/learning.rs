//! Whether a guest may send from an address that is not its port's.

use device::counters::{Counter, PairCounters};

use crate::switch::table::{Station, Table, TablePort};

/// Where a frame is counted that may not be sent.
pub(super) type Refusal = fn(&PairCounters) -> &Counter;

/// Whether a guest may send from a station that is not its port's by configuration.
/// Errors: where the frame is counted that it does not send.
#[cold]
pub(super) fn may_be_source(table: &Table, port: &TablePort, source: Station) -> Result<(), Refusal> {
    let Some(learned) = port.learned.as_ref().filter(|_| table.is_free(source)) else {
        return Err(|counters| &counters.from_guest_source_address);
    };
    match learned.note(source) {
        true => Ok(()),
        false => Err(|counters| &counters.from_guest_not_learned),
    }
}
