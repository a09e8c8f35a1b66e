//! Guest memory: a memfd, which the devices, KVM and, if need be, other processes map.

use std::io;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use virtqueue::{GuestAddr, MapError, MemoryMap, Region, TrustedFiles};

/// Why there is no guest memory, or what is not in it.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// memfd_create, ftruncate or the seal.
    #[error("cannot make {bytes} bytes of guest memory: is there enough, see `free -m`")]
    Create {
        /// How much was asked for.
        bytes: u64,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// It could not be mapped.
    #[error("cannot map guest memory")]
    Map(#[from] MapError),
    /// The VMM's own mistake: a program or a page that is longer than the memory.
    #[error("{bytes} bytes at {at:#x} are not in guest memory")]
    Outside {
        /// Guest address.
        at: u64,
        /// Length.
        bytes: usize,
    },
}

/// Guest memory from address 0 on. The VMM's "user addresses", by which the device crate is told of rings, are guest
/// addresses here.
#[derive(Clone)]
pub struct Memory {
    map: Arc<MemoryMap>,
}

impl Memory {
    /// So many zeroed bytes.
    ///
    /// # Errors
    /// [`MemoryError::Create`], [`MemoryError::Map`].
    pub fn new(bytes: u64) -> Result<Self, MemoryError> {
        let make = || {
            let file = memfd_create("guest-ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            ftruncate(&file, bytes)?;
            // Whoever maps it can rely on its length.
            fcntl_add_seals(&file, SealFlags::SHRINK)?;
            Ok(file)
        };
        let file = make().map_err(|source| MemoryError::Create { bytes, source })?;
        let region = Region {
            guest_addr: GuestAddr(0),
            user_addr: 0,
            len: bytes,
            file,
            file_offset: 0,
        };
        let map = MemoryMap::new(vec![region], 0, &TrustedFiles)?;
        Ok(Self { map: Arc::new(map) })
    }

    /// As the devices have it.
    #[must_use]
    pub fn map(&self) -> &Arc<MemoryMap> {
        &self.map
    }

    /// Writes bytes at a guest address.
    ///
    /// # Errors
    /// [`MemoryError::Outside`].
    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        // The only region begins at guest address 0, and at offset 0 of the map.
        match self.map.copy_to_guest(at, bytes) {
            true => Ok(()),
            false => Err(MemoryError::Outside {
                at,
                bytes: bytes.len(),
            }),
        }
    }

    /// Reads bytes at a guest address.
    ///
    /// # Errors
    /// [`MemoryError::Outside`].
    pub fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        let len = bytes.len();
        match self.map.copy_from_guest(at, bytes) {
            true => Ok(()),
            false => Err(MemoryError::Outside { at, bytes: len }),
        }
    }
}
