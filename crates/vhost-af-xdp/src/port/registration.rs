//! Guest RAM registered with a socket: the part of building a direct lane that takes long, and that can be done while
//! another lane has the queue.
//!
//! The kernel pins each page: 40 ms for every GiB of 4 KiB pages, and as long again to enter them into the daemon's
//! page table before that. So that no guest waits for it, for example when the daemon was restarted, a lane that copies
//! serves it in the meantime ([`Registration::takes_long`]; session/pairs.rs).

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use common::binding::GuestBuffers;
use virtqueue::{MappedRegion, MemoryMap};
use xsk::Umem;

use crate::nic::error::InterfaceError;
use crate::nic::interface_queue::{InterfaceQueue, RegisteredSocket};
use dataplane::direct::CHUNK_BYTES;
use dataplane::frame::bytes::GuestRam;

/// Pages beyond which registering takes more than some 10 ms.
const MANY_PAGES: u64 = 16_384;

/// The memory to register.
pub(crate) struct Registration {
    pub(crate) map: Arc<MemoryMap>,
    /// The queue whose socket it is registered with; `None`: it is not registered (null NIC).
    pub(crate) queue: Option<InterfaceQueue>,
    pub(crate) guest: GuestBuffers,
    /// Enter its pages into the daemon's page table first.
    pub(crate) populate: bool,
}

/// Guest RAM, registered with a socket that has no queue yet (none for a null NIC).
pub(crate) struct Registered {
    pub(crate) umem: Umem,
    pub(crate) socket: Option<RegisteredSocket>,
}

/// A registration on a thread of its own.
pub(crate) struct UnderWay(Receiver<Result<Registered, InterfaceError>>);

impl Registration {
    /// Whether a guest would notice how long it takes.
    pub(crate) fn takes_long(&self) -> bool {
        let pages = |region: &MappedRegion| region.len() / region.page_size().max(1);
        let pages: u64 = self.map.regions().iter().map(pages).sum();
        self.queue.is_some() && pages > MANY_PAGES
    }

    /// Registers; the queue is not touched.
    pub(crate) fn run(&self) -> Result<Registered, InterfaceError> {
        if self.populate && self.queue.is_some() {
            // One pair's registration enters the pages for all pairs. A null NIC pins none.
            self.map.populate();
        }
        let memory = Arc::new(GuestRam(Arc::clone(&self.map)));
        let Some(queue) = &self.queue else {
            let umem = Umem::unaligned(memory, CHUNK_BYTES, 0)?;
            return Ok(Registered { umem, socket: None });
        };
        let umem = Umem::unaligned(memory, CHUNK_BYTES, queue.headroom(self.guest)?)?;
        let socket = queue.register(&umem, self.guest)?;
        Ok(Registered {
            umem: socket.umem().clone(),
            socket: Some(socket),
        })
    }

    /// Registers on a thread of its own, which calls `then` at the end.
    pub(crate) fn begin(self, then: impl FnOnce() + Send + 'static) -> io::Result<UnderWay> {
        let (sender, receiver) = sync_channel(1);
        let body = move || {
            // Fails when the receiver is gone.
            let _ = sender.send(self.run());
            drop(sender);
            then();
        };
        std::thread::Builder::new()
            .name("register".to_owned())
            .spawn(body)?;
        Ok(UnderWay(receiver))
    }
}

impl UnderWay {
    /// The result, once it is done.
    pub(crate) fn result(&self) -> Option<Result<Registered, InterfaceError>> {
        self.0.try_recv().ok()
    }

    /// Waits for its end, and drops the result.
    pub(crate) fn wait(self) {
        drop(self.0.recv());
    }
}
