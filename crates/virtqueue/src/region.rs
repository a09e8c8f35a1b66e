//! Regions of guest memory: what the VMM sends, what is refused, and where in the map each is placed.
//!
//! Theory of operation: placement is decided here as arithmetic, before anything is mapped, so that it can be
//! tested without memory. Three rules:
//!
//!  - A mapping starts and ends on a page of its file (huge pages for hugetlbfs), so the mapping may include
//!    some bytes of the file before and after the region. No guest address leads to them.
//!  - Mappings lie back to back. With the largest pages first, each starts on a multiple of its page size
//!    without a hole for alignment (AF_XDP refuses a UMEM with a hole).
//!  - Regions overlap neither in guest addresses nor in VMM addresses nor in the pages of a file: one address
//!    means one byte, and one byte has one address. So mapping a file several times cannot make a guest's
//!    memory larger.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, SealFlags};

use crate::GuestAddr;

/// Maximum number of regions. One vhost-user message has at most 8; one by one, a VMM sends as many as we allow.
pub const MAX_REGIONS: usize = 64;

/// `f_type` of hugetlbfs, memfd with MFD_HUGETLB included (`include/uapi/linux/magic.h`, HUGETLBFS_MAGIC).
const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;

/// A piece of guest memory as the VMM describes it (vhost-user, "Memory region description").
#[derive(Debug)]
pub struct Region {
    /// Where the guest sees it.
    pub guest_addr: GuestAddr,
    /// Address in the VMM's address space, which ring addresses use. Never dereferenced here.
    pub user_addr: u64,
    /// Its length in bytes.
    pub len: u64,
    /// The shared file behind it.
    pub file: OwnedFd,
    /// Where it starts in the file, in bytes.
    pub file_offset: u64,
}

/// A [`Region`] that was mapped.
#[derive(Debug)]
pub struct MappedRegion {
    pub(crate) region: Region,
    pub(crate) facts: FileFacts,
    pub(crate) place: Placement,
}

/// Identity of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FileIdentity {
    device: u64,
    inode: u64,
}

/// Properties of a region's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileFacts {
    pub(crate) page_size: u64,
    pub(crate) sealed: bool,
    pub(crate) identity: FileIdentity,
}

/// Where a region is placed in the map. All in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Placement {
    /// Start of the mapping in the map, page-aligned.
    pub(crate) mapping_offset: u64,
    /// Length of the mapping, whole pages.
    pub(crate) mapping_len: u64,
    /// Bytes of the file that come before the region in its mapping.
    pub(crate) lead: u64,
}

/// Why guest memory could not be mapped: the VMM's fault, except [`Reserve`](Self::Reserve) and [`Guard`](Self::Guard).
///
/// `guest_addr`, `first` and `second` are guest addresses of regions, `start` is where one starts in `space`;
/// `count` is the number of regions. `len` is a region's length, `size` its file's; `bytes` and `most` are
/// for all regions together. Lengths are in bytes. `source` is the system's error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "fields are described above")]
pub enum MapError {
    /// No region at all.
    #[error("the guest has no memory regions")]
    NoRegions,
    /// More than [`MAX_REGIONS`].
    #[error("{count} memory regions, at most {MAX_REGIONS} are possible")]
    TooManyRegions { count: usize },
    /// A region of no bytes.
    #[error("memory region at {guest_addr} is empty")]
    EmptyRegion { guest_addr: GuestAddr },
    /// A start plus the length exceeds 64 bits, or the end in the file exceeds the maximum file size.
    #[error("memory region at {guest_addr}: {space} {start:#x} plus {len:#x} bytes wraps")]
    Wraps {
        guest_addr: GuestAddr,
        /// Which of the three starts: "guest address", "user address" or "file offset".
        space: &'static str,
        start: u64,
        len: u64,
    },
    /// Two regions claim the same addresses.
    #[error("memory regions at {first} and {second} overlap in {space} space")]
    Overlap {
        first: GuestAddr,
        second: GuestAddr,
        /// Which space: "guest" or "user".
        space: &'static str,
    },
    /// Two regions share bytes or pages of one file.
    #[error("memory regions at {first} and {second} overlap in their file")]
    Aliased { first: GuestAddr, second: GuestAddr },
    /// All regions together, rounded up to pages, exceed the limit
    /// ([`ForeignFiles::most_guest_bytes`](crate::ForeignFiles::most_guest_bytes)).
    #[error("{bytes} bytes of guest memory, at most {most} are allowed")]
    TooMuch { bytes: u64, most: u64 },
    /// The descriptor is not a regular file (memfd and hugetlbfs files are).
    #[error("memory region at {guest_addr}: its descriptor is not a shared memory file")]
    NotAFile { guest_addr: GuestAddr },
    /// The file ends before the region does: touching the rest would be SIGBUS.
    #[error("memory region at {guest_addr} needs {needed} bytes of its file, which has {size}")]
    FileTooShort {
        guest_addr: GuestAddr,
        /// Bytes that the file must have.
        needed: u64,
        size: u64,
    },
    /// All regions together are more than this process can address.
    #[error("the memory regions are too large for this process's address space")]
    TooLarge,
    /// The file could not be examined.
    #[error("memory region at {guest_addr}: cannot examine its file")]
    Examine {
        guest_addr: GuestAddr,
        #[source]
        source: io::Error,
    },
    /// No address space, or no private memory: the host's fault.
    #[error("cannot reserve {bytes} bytes of address space for guest memory")]
    Reserve {
        bytes: u64,
        #[source]
        source: io::Error,
    },
    /// A region could not be mapped shared and writable.
    #[error("memory region at {guest_addr}: cannot map {len} bytes of its file shared and writable")]
    Map {
        guest_addr: GuestAddr,
        len: u64,
        #[source]
        source: io::Error,
    },
    /// See [`ForeignFiles::guard`](crate::ForeignFiles::guard).
    #[error("cannot guard guest memory against truncation")]
    Guard(#[source] io::Error),
}

impl MappedRegion {
    /// Where the guest sees it.
    pub fn guest_addr(&self) -> GuestAddr {
        self.region.guest_addr
    }

    /// Where the VMM sees it.
    pub fn user_addr(&self) -> u64 {
        self.region.user_addr
    }

    /// Its length in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> u64 {
        self.region.len
    }

    /// Where it starts in the map, in bytes.
    pub fn map_offset(&self) -> u64 {
        self.place.mapping_offset + self.place.lead
    }

    /// The file behind it. Kept open, so that a new map can be created when regions are added or removed.
    pub fn file(&self) -> &OwnedFd {
        &self.region.file
    }

    /// Where it starts in the file, in bytes.
    pub fn file_offset(&self) -> u64 {
        self.region.file_offset
    }

    /// Page size of its file: larger than the system's only for hugetlbfs.
    pub fn page_size(&self) -> u64 {
        self.facts.page_size
    }

    /// Whether the file is sealed against shrinking. If not, its owner can truncate it, and our next access
    /// is SIGBUS.
    pub fn sealed(&self) -> bool {
        self.facts.sealed
    }

    /// The region again, with a duplicate of its descriptor: for building the next map.
    ///
    /// # Errors
    /// No descriptor left (EMFILE).
    pub fn try_clone(&self) -> io::Result<Region> {
        Ok(Region {
            guest_addr: self.region.guest_addr,
            user_addr: self.region.user_addr,
            len: self.region.len,
            file: self.region.file.try_clone()?,
            file_offset: self.region.file_offset,
        })
    }
}

/// Refuses regions that cannot be mapped, from their numbers alone.
pub(crate) fn check(regions: &[Region]) -> Result<(), MapError> {
    if regions.is_empty() {
        return Err(MapError::NoRegions);
    }
    if regions.len() > MAX_REGIONS {
        return Err(MapError::TooManyRegions { count: regions.len() });
    }
    for region in regions {
        check_numbers(region)?;
    }
    refuse_overlaps(regions, "guest", |region| region.guest_addr.get())?;
    refuse_overlaps(regions, "user", |region| region.user_addr)
}

fn check_numbers(region: &Region) -> Result<(), MapError> {
    let Region {
        guest_addr,
        user_addr,
        len,
        file_offset,
        ..
    } = *region;
    if len == 0 {
        return Err(MapError::EmptyRegion { guest_addr });
    }
    let wraps = |space, start| MapError::Wraps {
        guest_addr,
        space,
        start,
        len,
    };
    guest_addr
        .get()
        .checked_add(len)
        .ok_or_else(|| wraps("guest address", guest_addr.get()))?;
    user_addr
        .checked_add(len)
        .ok_or_else(|| wraps("user address", user_addr))?;
    file_offset
        .checked_add(len)
        .filter(|end| i64::try_from(*end).is_ok())
        .ok_or_else(|| wraps("file offset", file_offset))?;
    Ok(())
}

/// `check_numbers` has passed: no end wraps.
fn refuse_overlaps(
    regions: &[Region],
    space: &'static str,
    start: impl Fn(&Region) -> u64,
) -> Result<(), MapError> {
    let mut sorted: Vec<&Region> = regions.iter().collect();
    sorted.sort_by_key(|region| start(region));
    for pair in sorted.windows(2) {
        if start(pair[0]) + pair[0].len > start(pair[1]) {
            return Err(MapError::Overlap {
                first: pair[0].guest_addr,
                second: pair[1].guest_addr,
                space,
            });
        }
    }
    Ok(())
}

/// Refuses regions that share a page of a file.
pub(crate) fn refuse_aliases(regions: &[Region], facts: &[FileFacts]) -> Result<(), MapError> {
    let mut ranges: Vec<_> = regions
        .iter()
        .zip(facts)
        .map(|(region, facts)| {
            // No overflow: check_numbers.
            let last = (region.file_offset + region.len - 1) / facts.page_size;
            let first = region.file_offset / facts.page_size;
            (facts.identity, first, last, region.guest_addr)
        })
        .collect();
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        let ((file, _, last, one), (other_file, first, _, other)) = (pair[0], pair[1]);
        if file == other_file && first <= last {
            return Err(MapError::Aliased {
                first: one.min(other),
                second: one.max(other),
            });
        }
    }
    Ok(())
}

/// Page size of a mapping of the file: larger than the system's only for hugetlbfs.
pub(crate) fn page_size(file: BorrowedFd<'_>, system_page: u64) -> io::Result<u64> {
    let filesystem = rustix::fs::fstatfs(file)?;
    if filesystem.f_type as u32 != HUGETLBFS_MAGIC {
        return Ok(system_page);
    }
    let huge_page = u64::try_from(filesystem.f_bsize)
        .ok()
        .filter(|size| size.is_power_of_two());
    Ok(huge_page.unwrap_or(system_page).max(system_page))
}

/// Checks the file: kind, size, page size, seals.
pub(crate) fn examine(region: &Region, system_page: u64) -> Result<FileFacts, MapError> {
    let guest_addr = region.guest_addr;
    let failed = |errno: rustix::io::Errno| MapError::Examine {
        guest_addr,
        source: errno.into(),
    };
    let stat = rustix::fs::fstat(&region.file).map_err(failed)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(MapError::NotAFile { guest_addr });
    }
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let needed = region.file_offset + region.len; // no overflow: check_numbers
    if size < needed {
        return Err(MapError::FileTooShort {
            guest_addr,
            needed,
            size,
        });
    }
    let page_size = page_size(region.file.as_fd(), system_page)
        .map_err(|source| MapError::Examine { guest_addr, source })?;
    // For files without support for seals this fails with EINVAL: not sealed.
    let sealed =
        rustix::fs::fcntl_get_seals(region.file.as_fd()).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    #[allow(clippy::unnecessary_cast)] // other types on other machines
    let identity = FileIdentity {
        device: stat.st_dev as u64,
        inode: stat.st_ino as u64,
    };
    Ok(FileFacts {
        page_size,
        sealed,
        identity,
    })
}

/// The properties of a region that decide its placement, bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) file_offset: u64,
    pub(crate) len: u64,
    pub(crate) page_size: u64,
}

impl Shape {
    pub(crate) fn of(region: &Region, facts: &FileFacts) -> Self {
        Self {
            file_offset: region.file_offset,
            len: region.len,
            page_size: facts.page_size,
        }
    }
}

/// The placements of all regions.
pub(crate) struct Layout {
    /// In the order of the regions.
    pub(crate) placements: Vec<Placement>,
    /// Length of the whole in bytes.
    pub(crate) len: u64,
}

/// Places regions one after the other, largest pages first.
pub(crate) fn place(shapes: &[Shape]) -> Result<Layout, MapError> {
    let mut order: Vec<usize> = (0..shapes.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(shapes[index].page_size));
    let mut placements = vec![Placement::default(); shapes.len()];
    let mut len = 0u64;
    for index in order {
        let Shape {
            file_offset,
            len: region_len,
            page_size: page,
        } = shapes[index];
        let lead = file_offset & (page - 1);
        let mapping_len = lead
            .checked_add(region_len)
            .and_then(|bytes| bytes.checked_next_multiple_of(page))
            .ok_or(MapError::TooLarge)?;
        placements[index] = Placement {
            mapping_offset: len,
            mapping_len,
            lead,
        };
        len = len.checked_add(mapping_len).ok_or(MapError::TooLarge)?;
    }
    Ok(Layout { placements, len })
}

#[cfg(all(test, not(loom)))]
#[path = "region_tests.rs"]
mod tests;
