//! Leases: a privileged process registers a queue with rings and memory of this process.
//!
//! # Theory of operation
//!
//! ```text
//!   Prepared::new           a ring that is not enabled, for each thread that will receive
//!   Offer::new              memory to receive into
//!        │ file, ring descriptors' numbers
//!        ▼
//!   a process with CAP_NET_ADMIN registers the queue with the first ring, and imports it into the others
//!        │ Registered
//!        ▼
//!   Offer::registered       maps the refill ring of the first ring, which is the kernel's memory
//!   Receiver::start_leased  in each thread, with its ring
//! ```
//!
//! So nothing but numbers is returned, and no descriptor of an instance is left: the queue is released when the last
//! of the rings is closed. The mapping of the refill ring keeps the first ring open, so the queue stays until the last
//! [`Leased`] is gone, too, and all receivers that have one. That is how it differs from an
//! [`Instance`](crate::Instance), whose refill ring is a file.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::fcntl_dupfd_cloexec;

use crate::abi::Offsets;
use crate::area::{Area, FileMemory};
use crate::config::Config;
use crate::error::OpenError;
use crate::instance::{self, Facts, Prepared, Shared};

/// Memory for the registration of a queue.
pub struct Offer {
    area: Area,
    file: OwnedFd,
    file_offset: u64,
}

/// What the process that registered the queue reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registered {
    /// Entries of the refill ring.
    pub refill_entries: u32,
    /// How large a buffer is, bytes.
    pub buffer_bytes: u32,
    /// Where in the refill ring's mapping its head, its tail and its entries are, bytes.
    pub offsets: [u32; 3],
    /// Where the first ring's descriptor has that mapping, bytes.
    pub map_offset: u64,
    /// Length of the mapping, bytes.
    pub map_bytes: u64,
    /// Whether there is no device behind it, as with a lease of the loopback.
    pub no_device: bool,
}

/// A queue that is registered with rings of this process. Clones share it, for the threads that receive by it.
#[derive(Clone)]
pub struct Leased(pub(crate) Arc<Shared>);

impl Offer {
    /// Memory and buffers as the configuration has them. The memory must be a file, as own memory is.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn new(config: &Config) -> Result<Self, OpenError> {
        let area = instance::zcrx_area(config)?;
        let (file, memory_offset) = instance::only_file(area.memory())?;
        let file_offset = memory_offset + area.skipped() as u64;
        Ok(Self {
            area,
            file,
            file_offset,
        })
    }

    /// The memory's file.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Where in it the memory begins, bytes.
    pub fn file_offset(&self) -> u64 {
        self.file_offset
    }

    /// How long it is, bytes.
    pub fn bytes(&self) -> u64 {
        self.area.len()
    }

    /// How large a buffer is, bytes; 0: a page, the only value that kernels before 7.0 accept.
    pub fn buffer_bytes(&self) -> u32 {
        let bytes = self.area.buffer_bytes();
        if bytes as usize == rustix::param::page_size() {
            0
        } else {
            bytes
        }
    }

    /// How many entries the refill ring should have.
    pub fn refill_entries(&self) -> u32 {
        instance::refill_entries(&self.area)
    }

    /// Completes the lease: the queue was registered with this memory, and with rings of which `first` is the first.
    ///
    /// # Errors
    /// [`OpenError::Size`] if the buffers are not those of the offer, [`OpenError::Setup`] if the refill ring cannot be
    /// mapped, [`OpenError::Layout`] if its parts are not inside the mapping.
    ///
    /// # Safety
    /// `said` must be what the registering process reported, and the queue must be registered with memory and buffers
    /// of this offer as the only area: these numbers decide which memory the kernel fills.
    pub unsafe fn registered(self, first: &Prepared, said: Registered) -> Result<Leased, OpenError> {
        if said.buffer_bytes != self.area.buffer_bytes() {
            let (what, bytes) = ("buffers of a lease", said.buffer_bytes);
            let must = "as large as was offered: choose that size in the configuration";
            return Err(OpenError::Size { what, bytes, must });
        }
        let what = "mapping the refill ring of a lease";
        let failed = |source| OpenError::Setup { what, source };
        let ring = fcntl_dupfd_cloexec(first, 0).map_err(|errno| failed(errno.into()))?;
        let bytes = usize::try_from(said.map_bytes).map_err(|_| failed(io::ErrorKind::OutOfMemory.into()))?;
        let refill = FileMemory::map(ring, said.map_offset, bytes).map_err(failed)?;
        let [head, tail, entries] = said.offsets;
        let facts = Facts {
            offsets: Offsets {
                head,
                tail,
                entries,
                ..Offsets::default()
            },
            entries: said.refill_entries,
            // The token of the first area of an instance, its only one.
            token: 0,
            counters: false,
            no_device: said.no_device,
        };
        Ok(Leased(instance::share(self.area, Arc::new(refill), facts)?))
    }
}
