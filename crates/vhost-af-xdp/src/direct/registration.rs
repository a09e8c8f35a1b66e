//! Guest RAM registered with a socket: the part of building a direct lane that takes long, and that can be done while another lane has the
//! queue.
//!
//! The kernel pins each page, 40 ms for every GiB of 4 KiB pages once they are in our page table, which takes as long
//! again. So that no guest waits for that when its daemon is back, a lane that copies serves it in the meantime
//! ([`Registration::takes_long`]; session/pairs.rs).

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use virtqueue::{MappedRegion, MemoryMap};
use xsk::{OpenError, Probe, Umem, Unbound};

use crate::direct::CHUNK_BYTES;
use crate::nic::interface::{Interface, InterfaceError, QueueRequest};
use crate::port::lanes::{FarSide, LaneError};
use crate::switch::bytes::GuestRam;
use crate::switch::gso::TX_METADATA_BYTES;
use device::features::Negotiated;

/// Pages beyond which registering takes more than some 10 ms.
const MANY_PAGES: u64 = 16_384;

/// What is to be registered.
pub(crate) struct Registration {
    pub(crate) pair: u16,
    pub(crate) map: Arc<MemoryMap>,
    pub(crate) far: FarSide,
    pub(crate) negotiated: Negotiated,
}

/// Guest RAM, registered with a socket that has no queue yet (none for a null NIC).
pub(crate) struct Registered {
    pub(crate) umem: Umem,
    pub(crate) queue: Option<(Unbound, QueueRequest)>,
    /// For a large guest: tells when the queue can be bound.
    pub(crate) probe: Option<Probe>,
}

/// A registration on a thread of its own.
pub(crate) struct UnderWay(Receiver<Result<Registered, LaneError>>);

impl Registration {
    /// Whether a guest would notice how long it takes.
    pub(crate) fn takes_long(&self) -> bool {
        let pages = |region: &MappedRegion| region.len() / region.page_size().max(1);
        let pages: u64 = self.map.regions().iter().map(pages).sum();
        matches!(self.far, FarSide::Queue { .. }) && pages > MANY_PAGES
    }

    /// Registers; the queue is not touched.
    ///
    /// # Errors
    /// [`LaneError`].
    pub(crate) fn run(&self) -> Result<Registered, LaneError> {
        if self.pair == 0 && matches!(self.far, FarSide::Queue { .. }) {
            // Pages that one pair's registration entered are there for the others'. A null NIC pins none.
            self.map.populate();
        }
        let umem = Umem::unaligned(Arc::new(GuestRam(Arc::clone(&self.map))), CHUNK_BYTES, 0)?;
        let FarSide::Queue { interface, queue, .. } = &self.far else {
            return Ok(Registered {
                umem,
                queue: None,
                probe: None,
            });
        };
        let request = QueueRequest {
            queue: *queue,
            // In zero-copy the NIC would write into guest memory before the program judges the frame.
            force_copy: true,
            header_bytes: self.negotiated.header_bytes,
            multi_buffer: true,
        };
        // First, because frames go to the socket that was made last.
        let probe = self.takes_long().then(|| interface.probe(&request)).flatten();
        let csum = self.negotiated.offloads.csum;
        let (umem, socket) = prepare(interface, umem, (&request, csum))?;
        Ok(Registered {
            umem,
            queue: Some((socket, request)),
            probe,
        })
    }

    /// Registers on a thread of its own, which calls `then` when the result is there.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub(crate) fn begin(self, then: impl FnOnce() + Send + 'static) -> io::Result<UnderWay> {
        let (sender, receiver) = sync_channel(1);
        let body = move || {
            // Fails when nobody wants it any more.
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
    /// What came of it, once it is done.
    pub(crate) fn result(&self) -> Option<Result<Registered, LaneError>> {
        self.0.try_recv().ok()
    }

    /// Waits for its end, and undoes it.
    pub(crate) fn wait(self) {
        drop(self.0.recv());
    }
}

/// Registers memory with a socket, with room for TX metadata if the guest leaves checksums to us (`csum`) and the kernel knows
/// metadata (Linux 6.8, or 6.11 and what the flag was ported back to).
pub(crate) fn prepare(
    interface: &Arc<Interface>,
    umem: Umem,
    (request, csum): (&QueueRequest, bool),
) -> Result<(Umem, Unbound), LaneError> {
    if csum {
        let roomy = umem.clone().with_tx_metadata(TX_METADATA_BYTES)?;
        match interface.prepare(&roomy, request) {
            Ok(socket) => return Ok((roomy, socket)),
            Err(InterfaceError::Open(OpenError::Umem { .. })) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let socket = interface.prepare(&umem, request)?;
    Ok((umem, socket))
}
