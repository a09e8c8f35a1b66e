//! Guest memory as a VMM creates it.

use std::io;
use std::sync::Mutex;

use crate::mapping::sealed_file;
use crate::{GuestAddr, MapError, MappedRegion, MemoryMap, Region, TrustedFiles};

/// Shared memory of a guest that exists only in this process. Initially zero.
#[derive(Debug)]
pub struct GuestRam {
    map: MemoryMap,
    /// Bytes allocated by `alloc`, per region.
    used: Mutex<Vec<u64>>,
}

/// Guest memory could not be created.
#[derive(Debug, thiserror::Error)]
pub enum RamError {
    /// memfd_create, ftruncate or sealing failed.
    #[error("cannot create {len} bytes of guest memory")]
    Create {
        /// Bytes of the region.
        len: u64,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// It could not be mapped.
    #[error("cannot map guest memory")]
    Map(#[from] MapError),
    /// No region has that much left.
    #[error("no {len} bytes of guest memory left")]
    Full {
        /// Bytes asked for.
        len: u64,
    },
}

impl GuestRam {
    /// Creates a memfd, sealed against resizing, for each (guest address, length in bytes).
    ///
    /// # Errors
    /// No memory, or regions that a [`MemoryMap`] refuses.
    pub fn new(regions: &[(GuestAddr, u64)]) -> Result<Self, RamError> {
        let make = |&(guest_addr, len): &(GuestAddr, u64)| {
            let file = sealed_file("guest-ram", len).map_err(|source| RamError::Create { len, source })?;
            Ok(Region {
                guest_addr,
                user_addr: guest_addr.get(),
                len,
                file,
                file_offset: 0,
            })
        };
        Self::from_regions(regions.iter().map(make).collect::<Result<_, RamError>>()?)
    }

    /// Memory in files of the caller, e.g. with huge pages, an offset or no seals. `user_addr` is ignored.
    ///
    /// # Errors
    /// Regions that a [`MemoryMap`] refuses.
    pub fn from_regions(mut regions: Vec<Region>) -> Result<Self, RamError> {
        for region in &mut regions {
            region.user_addr = region.guest_addr.get(); // unique, if the guest addresses are
        }
        let used = Mutex::new(vec![0; regions.len()]);
        Ok(Self {
            map: MemoryMap::new(regions, 0, &TrustedFiles)?,
            used,
        })
    }

    /// The regions as the VMM would send them: descriptors duplicated, `user_addr` where they are mapped
    /// here.
    ///
    /// # Errors
    /// No descriptor left.
    pub fn regions(&self) -> io::Result<Vec<Region>> {
        let region = |mapped: &MappedRegion| {
            Ok(Region {
                user_addr: self.user_base(mapped),
                ..mapped.try_clone()?
            })
        };
        self.map.regions().iter().map(region).collect()
    }

    fn user_base(&self, region: &MappedRegion) -> u64 {
        self.map.base().addr().get() as u64 + region.map_offset()
    }

    /// The driver's own map of the memory.
    pub fn map(&self) -> &MemoryMap {
        &self.map
    }

    /// Where guest address `addr` is mapped in this process.
    ///
    /// # Panics
    /// If it is not in memory.
    #[must_use]
    pub fn user_addr(&self, addr: GuestAddr) -> u64 {
        self.map.base().addr().get() as u64 + self.offset(addr, 1)
    }

    /// Allocates `len` bytes that were not allocated before, at a multiple of `align` (a power of two) in
    /// guest addresses. They are never freed.
    ///
    /// # Errors
    /// [`RamError::Full`].
    ///
    /// # Panics
    /// If `align` is not a power of two.
    pub fn alloc(&self, len: u64, align: u64) -> Result<GuestAddr, RamError> {
        (0..self.map.regions().len())
            .find_map(|region| self.alloc_in(region, len, align).ok())
            .ok_or(RamError::Full { len })
    }

    /// As [`alloc`](Self::alloc), in one region.
    ///
    /// # Errors
    /// [`RamError::Full`].
    ///
    /// # Panics
    /// If there is no such region, or `align` is not a power of two.
    pub fn alloc_in(&self, region: usize, len: u64, align: u64) -> Result<GuestAddr, RamError> {
        let mut used = self.used.lock().expect("no panic while it is held");
        let start = self.map.regions()[region].guest_addr().get();
        let addr = (start + used[region]).next_multiple_of(align);
        let end = addr - start + len;
        if end > self.map.regions()[region].len() {
            return Err(RamError::Full { len });
        }
        used[region] = end;
        Ok(GuestAddr(addr))
    }

    /// Writes `bytes` at `addr`.
    ///
    /// # Panics
    /// If they are not in memory.
    pub fn write(&self, addr: GuestAddr, bytes: &[u8]) {
        if !bytes.is_empty() {
            assert!(self.map.copy_to_guest(self.offset(addr, bytes.len()), bytes));
        }
    }

    /// Reads `bytes.len()` bytes at `addr`.
    ///
    /// # Panics
    /// If they are not in memory.
    pub fn read(&self, addr: GuestAddr, bytes: &mut [u8]) {
        if !bytes.is_empty() {
            assert!(self.map.copy_from_guest(self.offset(addr, bytes.len()), bytes));
        }
    }

    /// Reads `len` bytes at `addr`.
    ///
    /// # Panics
    /// If they are not in memory.
    #[must_use]
    pub fn read_vec(&self, addr: GuestAddr, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read(addr, &mut bytes);
        bytes
    }

    pub(super) fn offset(&self, addr: GuestAddr, len: usize) -> u64 {
        self.map
            .translate(addr, len as u64)
            .unwrap_or_else(|| panic!("{len} bytes at {addr} are not guest memory"))
    }
}
