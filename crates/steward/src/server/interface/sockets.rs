//! What the sockets of an interface's queues hold: as much as the steward must know of them.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::protocol::{Reason, Refusal};
use crate::server::errand::{Memory, Registered};

#[derive(Debug, Default)]
pub(in crate::server) struct Sockets {
    by_queue: BTreeMap<u32, OfQueue>,
}

#[derive(Debug, Default)]
struct OfQueue {
    /// The one that is to be bound next.
    registered: Option<Registered>,
    /// The one that was bound last, as far as this process bound it. It may be closed by now, see `forget_closed`.
    bound: Option<Bound>,
}

/// A socket that was bound.
#[derive(Debug, Clone, Copy)]
pub(in crate::server) struct Bound {
    pub(in crate::server) memory: Memory,
    /// By what it is told from all others (`SO_COOKIE`).
    pub(in crate::server) cookie: u64,
    /// Its memory was registered for another one.
    pub(in crate::server) shares: bool,
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

    /// A socket is bound; none: it is closed.
    pub(in crate::server) fn note_bound(&mut self, queue: u32, bound: Option<Bound>) {
        self.by_queue.entry(queue).or_default().bound = bound;
    }

    /// The socket that was bound last.
    pub(in crate::server) fn bound(&self, queue: u32) -> Option<Bound> {
        self.by_queue.get(&queue)?.bound
    }

    /// What a queue holds: of its two sockets the one with the larger memory.
    pub(in crate::server) fn holds(&self, queue: u32) -> Option<Bound> {
        let of_queue = self.by_queue.get(&queue)?;
        let registered = of_queue.registered.as_ref().map(|registered| Bound {
            memory: registered.memory,
            cookie: 0,
            shares: false,
        });
        let both = registered.into_iter().chain(of_queue.bound);
        both.max_by_key(|bound| bound.memory.bytes)
    }

    /// Queues are nobody's any more.
    pub(super) fn forget(&mut self, queues: &Range<u32>) {
        self.by_queue.retain(|queue, _| !queues.contains(queue));
    }
}
