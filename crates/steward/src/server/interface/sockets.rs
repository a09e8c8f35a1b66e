//! Memory that the sockets of an interface's queues hold.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;

use steward_protocol::{Reason, Refusal};

/// A socket with registered memory, not bound yet.
#[derive(Debug)]
pub(crate) struct Registered {
    pub(crate) socket: OwnedFd,
    pub(crate) memory: Memory,
}

/// Memory that is registered once, for one socket or for several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Unique number of the registration.
    pub(crate) number: u64,
    pub(crate) bytes: u64,
}

impl Memory {
    /// Most that the kernel allocates for a socket in addition to its memory, bytes: for a chunk of 2048 up to 144
    /// (`struct xdp_buff_xsk`, Linux 6.6 to 6.12) and 8 in unaligned mode, and for all chunks, whoever uses them
    /// (`xp_create_and_assign_umem`, net/xdp/xsk_buff_pool.c); in zero-copy 8 for a page (`xp_init_dma_info`, same
    /// file).
    pub(crate) fn kernel_bytes(self) -> u64 {
        self.bytes.div_ceil(13)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Sockets {
    by_queue: BTreeMap<u32, OfQueue>,
}

#[derive(Debug, Default)]
struct OfQueue {
    /// The socket to be bound next.
    registered: Option<Registered>,
    /// The socket that this process bound last. It may be closed by now, see `forget_closed`.
    bound: Option<Bound>,
}

/// A socket that was bound.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bound {
    pub(crate) memory: Memory,
    /// Its unique `SO_COOKIE`.
    pub(crate) cookie: u64,
    /// Its memory was registered for another socket.
    pub(crate) shares: bool,
}

/// Memory of the two sockets of a queue, the one in use and the next one.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Holds {
    /// Registered, and not bound yet.
    pub(crate) waiting: Option<Memory>,
    /// Bound, and whether the memory was registered for another socket.
    pub(crate) bound: Option<(Memory, bool)>,
}

/// Memory that queues hold together, bytes.
///
/// Of a queue's two sockets only the larger counts: at most one of them is bound. Memory that several sockets share
/// counts once, in addition to registered memory of their queues, since it stays when one of them is closed. For each
/// of these sockets the kernel's own memory counts, too.
pub(crate) fn bytes_held(queues: &[Holds]) -> u64 {
    let mut sockets: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
    for (memory, _) in queues.iter().filter_map(|holds| holds.bound) {
        sockets.entry(memory.number).or_insert((memory.bytes, 0)).1 += 1;
    }
    sockets.retain(|_, (_, sockets)| *sockets > 1);
    let of_queue = |holds: &Holds| {
        let bound = holds.bound.map_or(0, |(memory, shares)| {
            let is_shared = sockets.contains_key(&memory.number);
            let own = if is_shared { 0 } else { memory.bytes };
            own.saturating_add(if shares { memory.kernel_bytes() } else { 0 })
        });
        bound.max(holds.waiting.map_or(0, |memory| memory.bytes))
    };
    let once = sockets.values().map(|&(bytes, _)| bytes);
    queues
        .iter()
        .map(of_queue)
        .chain(once)
        .fold(0, u64::saturating_add)
}

impl Holds {
    /// One socket with this memory, registered for it and not bound yet, or shared.
    pub(crate) fn one(memory: Memory, shares: bool) -> Self {
        Self {
            waiting: (!shares).then_some(memory),
            bound: shares.then_some((memory, true)),
        }
    }
}

impl Sockets {
    /// The socket that was registered last, to be bound.
    pub(crate) fn take_registered(&mut self, queue: u32) -> Result<Registered, Refusal> {
        let of_queue = self.by_queue.get_mut(&queue);
        of_queue
            .and_then(|of_queue| of_queue.registered.take())
            .ok_or_else(|| {
                Reason::Unregistered.because(format!(
                    "no memory was registered for queue {queue}, or with another steward: do that first"
                ))
            })
    }

    /// Stores a socket with registered memory; an earlier one that is not bound is closed.
    pub(crate) fn put_registered(&mut self, queue: u32, registered: Registered) {
        self.by_queue.entry(queue).or_default().registered = Some(registered);
    }

    /// Stores the bound socket; `None`: it is closed.
    pub(crate) fn note_bound(&mut self, queue: u32, bound: Option<Bound>) {
        self.by_queue.entry(queue).or_default().bound = bound;
    }

    /// The socket that was bound last.
    pub(crate) fn bound(&self, queue: u32) -> Option<Bound> {
        self.by_queue.get(&queue)?.bound
    }

    /// Memory that a queue's sockets hold.
    pub(crate) fn holds(&self, queue: u32) -> Holds {
        let Some(of_queue) = self.by_queue.get(&queue) else {
            return Holds::default();
        };
        Holds {
            waiting: of_queue.registered.as_ref().map(|registered| registered.memory),
            bound: of_queue.bound.map(|bound| (bound.memory, bound.shares)),
        }
    }

    /// Forgets the sockets of queues that no lease has any more.
    pub(super) fn forget(&mut self, queues: &Range<u32>) {
        self.by_queue.retain(|queue, _| !queues.contains(queue));
    }
}
