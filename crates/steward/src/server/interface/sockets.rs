//! What the sockets of an interface's queues hold: as much as the steward must know of them.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::protocol::{Reason, Refusal};
use crate::server::errand::Registered;

#[derive(Debug, Default)]
pub(in crate::server) struct Sockets {
    by_queue: BTreeMap<u32, OfQueue>,
}

#[derive(Debug, Default)]
struct OfQueue {
    /// The one that is to be bound next.
    registered: Option<Registered>,
    /// Memory of the one that was bound last, as far as this process bound it. It may be closed by now, see
    /// `forget_closed`.
    bound_bytes: u64,
}

impl Sockets {
    /// The socket that was registered last, to be bound.
    pub(in crate::server) fn take_registered(&mut self, queue: u32) -> Result<Registered, Refusal> {
        let of_queue = self.by_queue.get_mut(&queue);
        of_queue
            .and_then(|of_queue| of_queue.registered.take())
            .ok_or_else(|| {
                let text = format!(
                    "no memory was registered for queue {queue}, or with another steward: do that first"
                );
                Refusal::new(Reason::Unregistered, text)
            })
    }

    /// A socket has memory now; one that waited before it goes.
    pub(in crate::server) fn put_registered(&mut self, queue: u32, registered: Registered) {
        self.by_queue.entry(queue).or_default().registered = Some(registered);
    }

    /// A socket with so much memory is bound.
    pub(in crate::server) fn note_bound(&mut self, queue: u32, bytes: u64) {
        self.by_queue.entry(queue).or_default().bound_bytes = bytes;
    }

    /// Memory of a queue's larger socket.
    pub(in crate::server) fn bytes(&self, queue: u32) -> u64 {
        self.by_queue.get(&queue).map_or(0, |of_queue| {
            let registered = of_queue
                .registered
                .as_ref()
                .map_or(0, |registered| registered.bytes);
            registered.max(of_queue.bound_bytes)
        })
    }

    /// Queues are nobody's any more.
    pub(super) fn forget(&mut self, queues: &Range<u32>) {
        self.by_queue.retain(|queue, _| !queues.contains(queue));
    }
}
