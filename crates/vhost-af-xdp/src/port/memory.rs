//! A session's memory table: what the VMM shared, as a map.
//!
//! The table changes as a whole (SET_MEM_TABLE) or by slots (ADD_MEM_REG, REM_MEM_REG). Either way a new [`MemoryMap`]
//! is made and the old one exists until the last lane on it is gone; the session stops lanes around a change.
//!
//! Memory that is not shared is the commonest mistake in setting up vhost-user: the VMM maps the file privately, the
//! guest writes to its own copies, and the daemon would watch rings that never change. The VMM's /proc/PID/maps shows
//! that, if the daemon or its helper may read it ([`MemoryTable::check_shared`]).

use std::os::fd::AsFd;
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use virtqueue::{ForeignFiles, GuestAddr, LOG_PAGE_BYTES, MapError, MemoryMap, Region};

use crate::supervision::helper;
use crate::supervision::private_memory::{self, MappedFile};
use crate::supervision::sigbus::Watched;

/// Most bytes of guest addresses that are not memory, but that a log covers, too: holes before RAM, as at 1 TiB on AMD
/// machines (`pc_max_used_gpa`, hw/i386/pc.c in QEMU), and addresses of devices.
const HOLES_BYTES: u64 = 16 << 40;

/// How the VMM identifies a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegionKey {
    pub(crate) guest_addr: GuestAddr,
    /// In the VMM's address space.
    pub(crate) user_addr: u64,
    /// Bytes.
    pub(crate) len: u64,
}

impl From<&Region> for RegionKey {
    fn from(region: &Region) -> Self {
        Self {
            guest_addr: region.guest_addr,
            user_addr: region.user_addr,
            len: region.len,
        }
    }
}

pub(crate) struct MemoryTable {
    map: Option<Arc<MemoryMap>>,
    /// Its watch is notified when memory of this table vanishes.
    files: Watched,
    /// Bytes of the daemon's memory behind guest memory.
    private_bytes: usize,
    /// The VMM's process, if known.
    peer: Option<i32>,
}

impl MemoryTable {
    /// No memory yet.
    pub(crate) fn new(files: Watched, private_bytes: usize, peer: Option<i32>) -> Self {
        Self {
            map: None,
            files,
            private_bytes,
            peer,
        }
    }

    /// Refuses a dirty log that is longer than any guest with the allowed memory needs: a bit for each 4 KiB up to its
    /// highest address. The present table does not count: QEMU extends the log before it adds memory (`vhost_commit`,
    /// hw/virtio/vhost.c).
    pub(crate) fn check_log(&self, bytes: u64) -> anyhow::Result<()> {
        let most = (self.files.most_bytes.saturating_add(HOLES_BYTES) / LOG_PAGE_BYTES).div_ceil(8);
        if bytes > most {
            bail!(
                "SET_LOG_BASE: a dirty log of {bytes} bytes, {most} are enough for this port: allow more memory by \
                 max-memory"
            );
        }
        Ok(())
    }

    /// Maps files of the VMM other than guest memory.
    pub(crate) fn files(&self) -> &dyn ForeignFiles {
        &self.files
    }

    /// Whether memory of this table, or of one that it replaced, vanished under us.
    pub(crate) fn is_truncated(&self) -> bool {
        self.files.watch.is_hit()
    }

    /// The map, once there is memory.
    pub(crate) fn map(&self) -> Option<&Arc<MemoryMap>> {
        self.map.as_ref()
    }

    /// SET_MEM_TABLE: replaces everything.
    /// Errors: why not; the old table stays.
    pub(crate) fn replace(&mut self, regions: Vec<Region>) -> anyhow::Result<()> {
        self.check_shared(&regions)?;
        self.rebuild(regions)
    }

    /// Whether adding or removing a region there changes nothing: QEMU 7.2 sends both once for each
    /// queue pair, though all share one table.
    pub(crate) fn is_repeated(&self, key: RegionKey, added: bool) -> bool {
        let mut keys = self
            .map
            .iter()
            .flat_map(|map| map.regions())
            .map(|known| RegionKey {
                guest_addr: known.guest_addr(),
                user_addr: known.user_addr(),
                len: known.len(),
            });
        keys.any(|known| known == key) == added
    }

    /// ADD_MEM_REG.
    /// Errors: why not; the old table stays.
    pub(crate) fn add(&mut self, region: Region) -> anyhow::Result<()> {
        let mut regions = self.regions(|_| true)?;
        regions.push(region);
        self.replace(regions)
    }

    /// REM_MEM_REG.
    /// Errors: why not; the old table stays.
    pub(crate) fn remove(&mut self, key: RegionKey) -> anyhow::Result<()> {
        let regions = self.regions(|addr| addr != key.guest_addr)?;
        if regions.is_empty() {
            self.map = None;
            return Ok(());
        }
        self.rebuild(regions)
    }

    fn regions(&self, keep: impl Fn(GuestAddr) -> bool) -> anyhow::Result<Vec<Region>> {
        let Some(map) = &self.map else {
            return Ok(Vec::new());
        };
        map.regions()
            .iter()
            .filter(|region| keep(region.guest_addr()))
            .map(|region| region.try_clone().context("cannot duplicate a memory descriptor"))
            .collect()
    }

    /// Reads how the VMM itself maps its memory, or asks the helper. Passes if neither process may read it.
    fn check_shared(&self, regions: &[Region]) -> anyhow::Result<()> {
        let Some(pid) = self.peer else { return Ok(()) };
        let files: Vec<_> = regions
            .iter()
            .map(|region| MappedFile {
                address: region.user_addr,
                file: region.file.as_fd(),
            })
            .collect();
        let private = match (private_memory::maps_of(pid), self.files.watch.connection()) {
            (Some(maps), _) => private_memory::first_private(maps, &files),
            (None, Some(connection)) => helper::private_address(connection.as_fd(), &files),
            (None, None) => None,
        };
        match private {
            None => Ok(()),
            Some(user_addr) => bail!(
                "guest memory at {user_addr:#x} of process {pid} is mapped privately, not shared: start the VMM with \
                 shared memory (QEMU: memory-backend-memfd,share=on; libvirt: <access mode='shared'/>)"
            ),
        }
    }

    fn rebuild(&mut self, regions: Vec<Region>) -> anyhow::Result<()> {
        let map = MemoryMap::new(regions, self.private_bytes, self.files()).map_err(|error| match error {
            MapError::TooMuch { bytes, most } => {
                anyhow!("the guest has {bytes} bytes of memory, {most} are allowed: allow more by max-memory")
            }
            error => error.into(),
        })?;
        self.map = Some(Arc::new(map));
        Ok(())
    }
}
