//! One UMEM for all queues that copy both ways (`--shared-umem`).
//!
//! # Theory of operation
//!
//! The memory is one mapping, divided into slices of the same size, one for each queue pair of the ports that use it,
//! for as long as the daemon runs. So, as with separate UMEMs, frames for one guest use up no chunks of another one,
//! and no chunk has frames of two guests.
//!
//! The first socket registers it, further ones are bound over it (XDP_SHARED_UMEM), each with four rings of its own.
//! For that, the kernel needs a bound socket of this memory, any that is open: a [`Lender`] is kept of each, which does
//! not keep it open. If none of them is suitable, the memory is registered again. Sockets are opened one after the
//! other, so that the first is bound before a second one needs it.
//!
//! All sockets have the mode and multi-buffer setting of the first (`xp_assign_dev_shared`, net/xdp/xsk_buff_pool.c).
//! So all are bound in copy mode, for frames of any length, in large chunks, whatever the interface and its MTU are.
//!
//! The kernel takes any address of the memory from any of the rings. A queue uses only chunks of its own slice, and
//! its tracker ignores others ([`dataplane::nic::chunk_tracker`]): a driver's report about one queue never affects another's
//! chunks. A slice has one socket at most: it counts as busy until its last socket is closed.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::binding::LARGE_CHUNK;
use steward_client::LeaseError;
use steward_protocol::Reason;
use xsk::{First, Lender, OpenError, OwnMemory, QueueId, Socket, Umem, UmemOffset};

use super::error::InterfaceError;
use common::lock::Locked;
use dataplane::nic::endpoint::{Chunks, ChunksError};

/// See the module's head.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    slices: u32,
    /// Whole chunks.
    slice_bytes: u32,
    /// Locked while a socket is opened, which may take seconds. Mapped for the first socket, on the NUMA node of its
    /// interface.
    mapped: Mutex<Option<Mapped>>,
    /// Never locked during a wait: threads that close a socket, or read the status, are not delayed.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Of sockets that were bound over it, the latest last.
    lenders: Vec<Lender>,
    /// Slices with a socket.
    used: HashSet<u32>,
}

#[derive(Debug, Clone)]
struct Mapped {
    umem: Umem,
    backing: String,
}

/// A queue's slice.
#[derive(Debug, Clone)]
pub(crate) struct Slice {
    memory: Arc<SharedMemory>,
    number: u32,
}

/// Kept with the socket of a slice, and dropped after it.
pub(crate) struct SliceUse(Slice);

/// A socket over a slice, with its chunks, none of which is with the kernel.
pub(crate) struct OpenedSlice {
    pub(crate) socket: Socket,
    pub(crate) chunks: Chunks,
    pub(crate) in_use: SliceUse,
}

impl SharedMemory {
    /// Memory of `slices` slices of `slice_bytes` each; it is mapped later.
    pub(crate) fn new(slices: u32, slice_bytes: u32) -> Arc<Self> {
        Arc::new(Self {
            slices,
            slice_bytes,
            mapped: Mutex::default(),
            state: Mutex::default(),
        })
    }

    /// The slice of that number.
    pub(crate) fn slice(self: &Arc<Self>, number: u32) -> Slice {
        Slice {
            memory: Arc::clone(self),
            number,
        }
    }

    /// How many sockets share it now.
    pub(crate) fn sockets(&self) -> usize {
        let state = self.state.locked();
        state.lenders.iter().filter(|lender| lender.is_open()).count()
    }

    /// Binds a socket over the memory of an open one; `None`: there is no suitable one. Unsuitable ones are not tried
    /// again. The caller holds the lock of `mapped`.
    fn share(
        &self,
        share: impl Fn(&First) -> Result<Socket, InterfaceError>,
    ) -> Result<Option<Socket>, InterfaceError> {
        loop {
            let Some(lender) = self.last_lender() else {
                return Ok(None);
            };
            // Closed just now.
            let Some(first) = lender.first() else { continue };
            match share(&first) {
                Err(error) if is_no_lender(&error) => drop(self.state.locked().lenders.pop()),
                shared => return shared.map(Some),
            }
        }
    }

    /// The open socket that was bound last: the one that a restarted steward is most likely to know.
    fn last_lender(&self) -> Option<Lender> {
        let mut state = self.state.locked();
        state.lenders.retain(Lender::is_open);
        state.lenders.last().cloned()
    }

    fn map(&self) -> Result<Mapped, ChunksError> {
        let bytes = u64::from(self.slices) * u64::from(self.slice_bytes);
        let memory = OwnMemory::new(usize::try_from(bytes).unwrap_or(usize::MAX))?;
        let backing = memory.backing().to_string();
        let umem = Umem::aligned(Arc::new(memory), LARGE_CHUNK, 0)?;
        Ok(Mapped { umem, backing })
    }
}

impl Slice {
    /// The memory that it is a slice of.
    pub(crate) fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Opens the slice's socket for a queue: by `share`, over the memory of one that is open, or else by `register`.
    /// Errors: theirs; [`OpenError::Busy`] while the last socket of the slice is not closed.
    pub(crate) fn open(
        &self,
        (ifindex, queue): (u32, u32),
        share: impl Fn(&First) -> Result<Socket, InterfaceError>,
        register: impl FnOnce(&Umem) -> Result<Socket, InterfaceError>,
    ) -> Result<OpenedSlice, InterfaceError> {
        let mut mapped = self.memory.mapped.locked();
        if self.memory.state.locked().used.contains(&self.number) {
            let (queue, waited) = (QueueId(queue), Duration::ZERO);
            return Err(OpenError::Busy {
                ifindex,
                queue,
                waited,
            }
            .into());
        }
        let mapped = match &mut *mapped {
            Some(mapped) => mapped,
            none => none.insert(self.memory.map()?),
        };
        let socket = match self.memory.share(share)? {
            Some(socket) => socket,
            None => register(&mapped.umem)?,
        };
        let in_use = self.take(&socket);
        let chunks = self.chunks(socket.umem(), mapped.backing.clone())?;
        Ok(OpenedSlice {
            socket,
            chunks,
            in_use,
        })
    }

    /// Records that the socket uses the slice, and that others can be bound over its memory.
    fn take(&self, socket: &Socket) -> SliceUse {
        let mut state = self.memory.state.locked();
        state.lenders.push(socket.lender());
        state.used.insert(self.number);
        SliceUse(self.clone())
    }

    /// The chunks of the slice. Its earlier user is gone, with its socket.
    fn chunks(&self, umem: &Umem, backing: String) -> Result<Chunks, ChunksError> {
        let first = u64::from(self.number) * u64::from(self.memory.slice_bytes);
        Chunks::of_slice(umem, UmemOffset::new(first), self.memory.slice_bytes, backing)
    }
}

/// Whether that socket's memory cannot be shared: its interface is gone, or the present steward did not bind it.
fn is_no_lender(error: &InterfaceError) -> bool {
    match error {
        InterfaceError::Open(OpenError::SharedGone) => true,
        InterfaceError::Lease(LeaseError::Refused(refusal)) | InterfaceError::Refused(refusal) => {
            refusal.reason == Reason::Unregistered
        }
        _ => false,
    }
}

impl Drop for SliceUse {
    fn drop(&mut self) {
        let Self(slice) = self;
        slice.memory.state.locked().used.remove(&slice.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLICE: u64 = 8 * LARGE_CHUNK as u64;

    #[test]
    fn slices_lie_side_by_side_and_have_nothing_in_common() {
        let memory = SharedMemory::new(3, SLICE as u32);
        let umem = memory.map().expect("memory").umem;
        assert_eq!(umem.len(), 3 * SLICE);
        let mut all = Vec::new();
        for number in 0..3 {
            let chunks = memory.slice(number).chunks(&umem, String::new()).expect("inside");
            assert_eq!((chunks.pool.len(), chunks.to_receive), (8, 5));
            let mut pool = chunks.pool;
            let offsets = std::iter::from_fn(|| pool.take()).map(|frame| frame.offset().get());
            all.extend(offsets);
        }
        all.sort_unstable();
        let chunks = (0..3 * SLICE).step_by(LARGE_CHUNK as usize);
        assert_eq!(all, chunks.collect::<Vec<_>>());
        let beyond = memory.slice(3).chunks(&umem, String::new());
        assert!(beyond.is_err(), "there is no fourth one");
    }
}
