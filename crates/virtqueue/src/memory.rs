//! The guest memory map: all regions of the guest in one contiguous range of our address space.
//!
//! Theory of operation: one reservation covers all regions and a private area, aligned to the largest page
//! size among them; each region is then mapped over its part of it (MAP_FIXED). The result has no hole:
//!
//! ```text
//!   base                                              base + guest_len        base + len
//!    | region A | region B | … | region N             | private               |
//!    '-- shared with guest and VMM, hostile ----------'-- ours, zeroed -------'
//! ```
//!
//! An address becomes an offset by one subtraction once its region is known. Regions are few, so the lookup
//! is a scan, and the region of the last hit is tried first ([`RegionHint`]). An offset that this file
//! returns is inside the guest's part, with its whole range in one region. It is a plain number and may be
//! stored; the copy functions check it again, against the length of the map.
//!
//! Invariants: `[base, base + len)` is mapped readable and writable until drop. Regions neither overlap nor
//! wrap (`region.rs`). No guest address leads to the private area. Nothing here or elsewhere makes a `&[u8]`
//! or `&mut [u8]` of this memory: the guest and the VMM may write to it at any time.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::mapping::{ForeignFiles, Guard};
use crate::region::{self, Layout, Placement};
use crate::{GuestAddr, MapError, MappedRegion, Region};

/// Minimum alignment of a reservation: what transparent huge pages need on most machines.
const MIN_ALIGN: u64 = 2 << 20;

/// All memory of one guest, mapped. See the file's head for the picture.
pub struct MemoryMap {
    /// Declared before the reservation, so that it is dropped first.
    _guard: Guard,
    reservation: Reservation,
    guest_len: u64,
    /// The file behind the private area, if there is one.
    private: Option<OwnedFd>,
    regions: Vec<MappedRegion>,
    by_guest: Vec<Lookup>,
    by_user: Vec<Lookup>,
}

/// A piece of a map and its file. It is mapped shared, in whole pages.
#[derive(Clone, Copy, Debug)]
pub struct MappedFile<'a> {
    /// The file.
    pub file: BorrowedFd<'a>,
    /// Offset of the piece in the file, bytes.
    pub file_offset: u64,
    /// Length of the piece, bytes.
    pub len: u64,
}

/// The minimum size of a page that counts as huge, bytes.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// The region of the last successful translation. Each queue keeps one, and most lookups end there.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RegionHint(Lookup);

/// One region, for translation. Zero length matches nothing.
#[derive(Clone, Copy, Debug, Default)]
struct Lookup {
    start: u64,
    len: u64,
    map_offset: u64,
}

/// Where a range starts in the map. In bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MapStart {
    pub(crate) offset: u64,
    /// Bytes of the same region before it.
    pub(crate) room_before: u64,
}

impl Lookup {
    /// Translates all of `[addr, addr + len)` or returns `None`, as it does if `len` is 0. `start + self.len`
    /// does not wrap (region.rs), so an `addr` below `start` gives an `into` of at least `self.len`: one
    /// comparison covers both ends, and no sum can overflow.
    #[inline(always)]
    fn find(&self, addr: u64, len: u64) -> Option<MapStart> {
        let into = addr.wrapping_sub(self.start);
        (into < self.len && len.wrapping_sub(1) < self.len - into).then(|| MapStart {
            offset: self.map_offset + into,
            room_before: into,
        })
    }
}

impl RegionHint {
    /// As [`MemoryMap::find`], in the region of the last hit only.
    #[inline(always)]
    pub(crate) fn find(&self, addr: u64, len: u64) -> Option<MapStart> {
        self.0.find(addr, len)
    }
}

impl MemoryMap {
    /// Maps `regions` back to back, and `private_bytes` (rounded up to pages) of zeroed memory after them,
    /// which no guest address reaches. Touches no page. `files` guards the guest's part.
    ///
    /// # Errors
    /// There are no or too many regions; one is empty, wraps or overlaps another; a file is too short, not
    /// regular, or cannot be mapped shared and writable; regions share pages of a file; `files` does not allow
    /// so much memory, or cannot guard it; the address space is used up.
    pub fn new(
        regions: Vec<Region>,
        private_bytes: usize,
        files: &dyn ForeignFiles,
    ) -> Result<Self, MapError> {
        region::check(&regions)?;
        let system_page = rustix::param::page_size() as u64;
        let facts = regions
            .iter()
            .map(|region| region::examine(region, system_page))
            .collect::<Result<Vec<_>, _>>()?;
        region::refuse_aliases(&regions, &facts)?;
        let shapes: Vec<_> = regions
            .iter()
            .zip(&facts)
            .map(|(region, facts)| region::Shape::of(region, facts))
            .collect();
        let Layout {
            placements,
            len: guest_len,
        } = region::place(&shapes)?;
        let most = files.most_guest_bytes();
        if guest_len > most {
            return Err(MapError::TooMuch {
                bytes: guest_len,
                most,
            });
        }
        let private_len = (private_bytes as u64)
            .checked_next_multiple_of(system_page)
            .ok_or(MapError::TooLarge)?;
        let len = guest_len.checked_add(private_len).ok_or(MapError::TooLarge)?;
        let page_sizes = facts.iter().map(|facts| facts.page_size);
        let align = page_sizes.max().unwrap_or(0).max(MIN_ALIGN);

        let reservation = Reservation::new(len, align)?;
        for (region, place) in regions.iter().zip(&placements) {
            reservation.map_region(region, place)?;
        }
        let private = match private_len {
            0 => None,
            len => Some(reservation.map_private(guest_len, len)?),
        };
        // Before anything can access the bytes.
        let guard = files
            .guard(reservation.base, guest_len as usize)
            .map_err(MapError::Guard)?;
        let regions = regions
            .into_iter()
            .zip(facts.into_iter().zip(placements))
            .map(|(region, (facts, place))| MappedRegion { region, facts, place })
            .collect();
        Ok(Self {
            private,
            ..Self::assemble(guard, reservation, guest_len, regions)
        })
    }

    fn assemble(guard: Guard, reservation: Reservation, guest_len: u64, regions: Vec<MappedRegion>) -> Self {
        let lookups = |start: fn(&MappedRegion) -> u64| {
            let lookup = |region: &MappedRegion| Lookup {
                start: start(region),
                len: region.len(),
                map_offset: region.map_offset(),
            };
            regions.iter().map(lookup).collect::<Vec<_>>()
        };
        let by_guest = lookups(|region| region.guest_addr().get());
        let by_user = lookups(MappedRegion::user_addr);
        Self {
            _guard: guard,
            reservation,
            guest_len,
            private: None,
            regions,
            by_guest,
            by_user,
        }
    }

    /// Lets the kernel enter all pages of guest memory into our page table by read faults. Those enter 16
    /// existing pages each (`do_fault_around`, mm/memory.c), while pinning the memory for a UMEM takes a
    /// fault per page. Uses several CPUs. For 256 MiB of touched 4 KiB pages, registration takes 48 ms alone
    /// and 30 ms after this on one CPU (Linux 6.18).
    ///
    /// Pages that do not exist yet are allocated, and charged to this process's cgroup, as pinning would.
    ///
    /// Best effort: on a kernel before 5.14, or for a truncated file, nothing is entered. If no thread can be
    /// created, this one does all the work.
    pub fn populate(&self) {
        const SHARE_BYTES: u64 = 64 << 20;
        let page = self
            .regions
            .iter()
            .map(MappedRegion::page_size)
            .max()
            .unwrap_or(1);
        let most = std::thread::available_parallelism().map_or(1, usize::from).min(4) as u64;
        let threads = (self.guest_len / SHARE_BYTES).clamp(1, most);
        let share = self.guest_len.div_ceil(threads).next_multiple_of(page);
        std::thread::scope(|scope| {
            let populate = move |start| {
                self.reservation
                    .populate(start, share.min(self.guest_len - start));
            };
            // The first share is this thread's: small guests need no other.
            for start in (share..self.guest_len).step_by(share as usize).chain([0]) {
                let body = move || populate(start);
                if start == 0 || std::thread::Builder::new().spawn_scoped(scope, body).is_err() {
                    populate(start);
                }
            }
        });
    }

    /// First byte of the map, on a boundary of the largest page size in it.
    #[inline]
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.reservation.base
    }

    /// Length of the whole map in bytes, private area included.
    #[allow(clippy::len_without_is_empty)] // never empty
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.reservation.len
    }

    /// Length of the guest's part in bytes: offsets below it are shared with the guest; the private area
    /// starts there.
    #[must_use]
    pub fn guest_len(&self) -> u64 {
        self.guest_len
    }

    /// The pieces of the whole map from its base on, private area included, so that another process can map
    /// the same memory in the same order. Pieces with the largest pages come first.
    #[must_use]
    pub fn files(&self) -> Vec<MappedFile<'_>> {
        let mut regions: Vec<&MappedRegion> = self.regions.iter().collect();
        regions.sort_by_key(|region| region.place.mapping_offset);
        let pieces = regions.into_iter().map(|region| MappedFile {
            file: region.region.file.as_fd(),
            file_offset: region.region.file_offset - region.place.lead,
            len: region.place.mapping_len,
        });
        let private = self.private.iter().map(|file| MappedFile {
            file: file.as_fd(),
            file_offset: 0,
            len: self.reservation.len as u64 - self.guest_len,
        });
        pieces.chain(private).collect()
    }

    /// Number of bytes from the start of the map in pages of at least [`HUGE_PAGE_BYTES`]: regions with the
    /// largest pages come first.
    #[must_use]
    pub fn huge_bytes(&self) -> u64 {
        let huge = self
            .regions
            .iter()
            .filter(|region| region.page_size() >= HUGE_PAGE_BYTES);
        huge.map(|region| region.map_offset() + region.len())
            .max()
            .unwrap_or(0)
    }

    /// The regions, in the order passed to [`new`](Self::new).
    #[must_use]
    pub fn regions(&self) -> &[MappedRegion] {
        &self.regions
    }

    /// Offset in the map of `len` bytes at guest address `addr`; `None` unless all of them are inside one
    /// region, and `None` for no bytes at all.
    #[inline]
    #[must_use]
    pub fn translate(&self, addr: GuestAddr, len: u64) -> Option<u64> {
        find_in(&self.by_guest, addr.get(), len).map(|found| found.start.offset)
    }

    /// As [`translate`](Self::translate), for an address in the VMM's address space, as ring addresses are
    /// (VHOST_USER_SET_VRING_ADDR).
    #[must_use]
    pub fn translate_user(&self, user_addr: u64, len: u64) -> Option<u64> {
        find_in(&self.by_user, user_addr, len).map(|found| found.start.offset)
    }

    /// The guest address of the byte at `offset`; `None` outside the regions.
    #[inline]
    #[must_use]
    pub fn guest_addr(&self, offset: u64) -> Option<GuestAddr> {
        self.by_guest
            .iter()
            .map(|lookup| (offset.wrapping_sub(lookup.map_offset), lookup))
            .find_map(|(into, lookup)| (into < lookup.len).then(|| GuestAddr(lookup.start + into)))
    }

    #[inline(always)]
    pub(crate) fn find(&self, hint: &mut RegionHint, addr: u64, len: u64) -> Option<MapStart> {
        match hint.find(addr, len) {
            None => self.find_elsewhere(hint, addr, len),
            found => found,
        }
    }

    #[inline(never)]
    fn find_elsewhere(&self, hint: &mut RegionHint, addr: u64, len: u64) -> Option<MapStart> {
        let found = find_in(&self.by_guest, addr, len)?;
        hint.0 = *found.lookup;
        Some(found.start)
    }
}

struct Found<'a> {
    start: MapStart,
    /// The region that it is in.
    lookup: &'a Lookup,
}

fn find_in(lookups: &[Lookup], addr: u64, len: u64) -> Option<Found<'_>> {
    lookups.iter().find_map(|lookup| {
        let start = lookup.find(addr, len)?;
        Some(Found { start, lookup })
    })
}

impl fmt::Debug for MemoryMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryMap")
            .field("len", &self.len())
            .field("guest_len", &self.guest_len)
            .field("regions", &self.regions)
            .finish_non_exhaustive()
    }
}

/// A range of our address space, unmapped on drop with everything that was mapped over it.
struct Reservation {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: only this value owns the reservation's address range, and no thread is tied to it. All access to
// the bytes is by raw copies and atomics (bytes.rs, split.rs), which tolerate concurrent writers, since the
// guest is one.
unsafe impl Send for Reservation {}
// SAFETY: as above.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Reserves `len` bytes of inaccessible address space, starting on a multiple of `align`.
    fn new(len: u64, align: u64) -> Result<Self, MapError> {
        let padded = len
            .checked_add(align)
            .filter(|bytes| *bytes <= isize::MAX as u64)
            .ok_or(MapError::TooLarge)?;
        let (len, align, padded) = (len as usize, align as usize, padded as usize);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: no address is asked for, so no existing mapping is touched.
        let start = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), padded, ProtFlags::empty(), flags) }
            .map_err(|errno| MapError::Reserve {
                bytes: padded as u64,
                source: errno.into(),
            })?
            .cast::<u8>();
        let skip = start.align_offset(align);
        // SAFETY: skip < align, so [start + skip, + len) is inside the padded mapping, and so is the rest
        // after it. Both ends were mapped just now and nothing points there; they are whole pages, as align
        // and len are.
        unsafe {
            let base = start.add(skip);
            unmap(start, skip);
            unmap(base.add(len), padded - skip - len);
            Ok(Self {
                base: NonNull::new_unchecked(base),
                len,
            })
        }
    }

    fn map_region(&self, region: &Region, place: &Placement) -> Result<(), MapError> {
        let Region { guest_addr, len, .. } = *region;
        let at = self.at(place.mapping_offset);
        let file_start = region.file_offset - place.lead;
        // SAFETY: region::place put [mapping_offset, + mapping_len) inside the reservation, page-aligned and
        // apart from the others'; it is ours to map over, and nobody points into it yet.
        unsafe {
            rustix::mm::mmap(
                at.as_ptr().cast(),
                place.mapping_len as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
                &region.file,
                file_start,
            )
        }
        .map_err(|errno| MapError::Map {
            guest_addr,
            len,
            source: errno.into(),
        })?;
        // Keeps guest memory out of our core dumps. Best effort: nothing depends on it. SAFETY: the range was
        // mapped just now; the advice changes no content.
        let _ = unsafe {
            rustix::mm::madvise(
                at.as_ptr().cast(),
                place.mapping_len as usize,
                Advice::LinuxDontDump,
            )
        };
        Ok(())
    }

    /// Maps an unnamed file of our own over the private area.
    fn map_private(&self, offset: u64, len: u64) -> Result<OwnedFd, MapError> {
        let at = self.at(offset).as_ptr().cast();
        let map = || {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = memfd_create(c"private", flags)?;
            ftruncate(&file, len)?;
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            let (protection, flags) = (
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
            );
            // SAFETY: [offset, offset + len) is the end of the reservation, behind all regions: ours to map over.
            unsafe { rustix::mm::mmap(at, len as usize, protection, flags, &file, 0) }?;
            Ok(file)
        };
        map().map_err(|errno: Errno| MapError::Reserve {
            bytes: len,
            source: io::Error::from(errno),
        })
    }

    fn populate(&self, offset: u64, len: u64) {
        // SAFETY: the caller's range lies inside the reservation and is mapped; the advice changes no content.
        let _ = unsafe {
            rustix::mm::madvise(
                self.at(offset).as_ptr().cast(),
                len as usize,
                Advice::LinuxPopulateRead,
            )
        };
    }

    fn at(&self, offset: u64) -> NonNull<u8> {
        assert!(offset < self.len as u64, "placement outside the reservation");
        // SAFETY: inside the reservation, by the line above.
        unsafe { self.base.add(offset as usize) }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: the whole range is ours (new), and every holder of a pointer into it also holds the map.
        unsafe { unmap(self.base.as_ptr(), self.len) };
    }
}

/// # Safety
/// `[start, start + len)` is mapped by us, in whole pages, and nobody uses it any more.
unsafe fn unmap(start: *mut u8, len: usize) {
    if len > 0 {
        // SAFETY: the caller guarantees it. munmap fails only for a bad range, or if splitting a mapping
        // exceeds the limit on their number; then only address space leaks.
        let _ = unsafe { rustix::mm::munmap(start.cast(), len) };
    }
}

#[cfg(all(test, not(loom)))]
#[path = "memory_tests.rs"]
mod tests;
