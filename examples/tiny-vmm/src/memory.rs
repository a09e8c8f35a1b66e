//! Guest memory: a memfd, mapped by vm-memory for KVM and the loader, and by `virtqueue` for the devices.

use std::fs::File;
use std::sync::Arc;

use anyhow::Context as _;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use virtqueue::{GuestAddr, MemoryMap, Region, TrustedFiles};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

/// Guest memory from address 0 on.
#[derive(Clone)]
pub struct Memory {
    /// The VMM's view.
    pub ram: GuestMemoryMmap,
    /// The device's view. The "user address" of each byte, by which `device` finds rings, is its guest address.
    pub map: Arc<MemoryMap>,
}

impl Memory {
    /// Zeroed memory of this size.
    ///
    /// # Errors
    /// The host has no memory, address space or descriptor for it.
    pub fn new(bytes: u64) -> anyhow::Result<Self> {
        let file = memfd_create("guest-ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes).context("no guest memory: see `free -m`")?;
        // A file that shrinks would raise SIGBUS.
        fcntl_add_seals(&file, SealFlags::SHRINK)?;
        let region = Region {
            guest_addr: GuestAddr(0),
            user_addr: 0,
            len: bytes,
            file: file.try_clone()?,
            file_offset: 0,
        };
        let file = Some(FileOffset::new(File::from(file), 0));
        Ok(Self {
            ram: GuestMemoryMmap::from_ranges_with_files([(GuestAddress(0), bytes as usize, file)])?,
            map: Arc::new(MemoryMap::new(vec![region], 0, &TrustedFiles)?),
        })
    }
}
