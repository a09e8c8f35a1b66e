use std::io;

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags};

use super::*;
use crate::{ForeignFiles, MemoryMap, TrustedFiles};

fn memfd(len: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, len).unwrap();
    file
}

fn region(guest: u64, user: u64, len: u64) -> Region {
    Region {
        guest_addr: GuestAddr(guest),
        user_addr: user,
        len,
        file: memfd(4096),
        file_offset: 0,
    }
}

fn refused(regions: Vec<Region>) -> MapError {
    MemoryMap::new(regions, 0, &TrustedFiles).expect_err("must be refused")
}

fn shape(file_offset: u64, len: u64, page_size: u64) -> Shape {
    Shape {
        file_offset,
        len,
        page_size,
    }
}

#[test]
fn no_region_and_too_many_are_refused() {
    assert!(matches!(refused(vec![]), MapError::NoRegions));
    let many = |count| (0..count).map(|i| region(i << 12, i << 12, 4096)).collect();
    assert!(matches!(
        refused(many(65)),
        MapError::TooManyRegions { count: 65 }
    ));
    assert!(MemoryMap::new(many(64), 0, &TrustedFiles).is_ok());
}

#[test]
fn empty_region_is_refused() {
    assert!(matches!(
        refused(vec![region(0, 0, 0)]),
        MapError::EmptyRegion { .. }
    ));
}

#[test]
fn wrapping_region_is_refused_in_each_space() {
    let space = |error| match error {
        MapError::Wraps { space, .. } => space,
        other => panic!("{other}"),
    };
    assert_eq!(
        space(refused(vec![region(u64::MAX - 4095, 0, 4096)])),
        "guest address"
    );
    assert_eq!(
        space(refused(vec![region(0, u64::MAX - 4095, 4096)])),
        "user address"
    );
    let mut bad = region(0, 0, 4096);
    bad.file_offset = u64::MAX - 100;
    assert_eq!(space(refused(vec![bad])), "file offset");
    let mut bad = region(0, 0, 4096);
    bad.file_offset = i64::MAX as u64; // no file is that long
    assert_eq!(space(refused(vec![bad])), "file offset");
}

/// Regions of one file of 16 pages, back to back in the guest: file offset and length of each.
fn of_one_file(pieces: &[(u64, u64)]) -> Vec<Region> {
    let file = memfd(16 << 12);
    let piece = |(at, &(file_offset, len)): (u64, &(u64, u64))| Region {
        file: file.try_clone().unwrap(),
        file_offset,
        ..region(at << 20, at << 20, len)
    };
    (0..).zip(pieces).map(piece).collect()
}

#[test]
fn aliasing_regions_are_refused() {
    for pieces in [
        &[(0, 0x1000), (0, 0x1000)][..],
        &[(0x1000, 0x2000), (0, 0x1001)],
        &[(0, 0x8000), (0x2000, 0x1000), (0x9000, 0x1000)],
        // Bytes of their own, in one page.
        &[(0, 1), (1, 1)],
    ] {
        let error = refused(of_one_file(pieces));
        assert!(matches!(error, MapError::Aliased { .. }), "{pieces:?}: {error}");
    }
    let beside = of_one_file(&[(0x8000, 0x8000), (0, 0x1000), (0x1000, 0x7000)]);
    assert!(MemoryMap::new(beside, 0, &TrustedFiles).is_ok());
}

/// Allows so many bytes.
struct AtMost(u64);

impl ForeignFiles for AtMost {
    fn guard(&self, start: std::ptr::NonNull<u8>, bytes: usize) -> io::Result<crate::Guard> {
        TrustedFiles.guard(start, bytes)
    }

    fn most_guest_bytes(&self) -> u64 {
        self.0
    }
}

#[test]
fn more_memory_than_is_allowed_is_refused_in_whole_pages() {
    // A byte of a page costs the page.
    let regions = || of_one_file(&[(0, 1), (0x3fff, 2)]);
    let error = MemoryMap::new(regions(), 0x1000, &AtMost(0x2fff)).unwrap_err();
    assert!(
        matches!(
            error,
            MapError::TooMuch {
                bytes: 0x3000,
                most: 0x2fff
            }
        ),
        "{error}"
    );
    assert!(MemoryMap::new(regions(), 0x1000, &AtMost(0x3000)).is_ok());
}

#[test]
fn overlapping_regions_are_refused() {
    let error = refused(vec![region(0x1000, 0, 4096), region(0, 0x10000, 4097)]);
    assert!(matches!(
        error,
        MapError::Overlap {
            space: "guest",
            first: GuestAddr(0),
            second: GuestAddr(0x1000)
        }
    ));
    let error = refused(vec![region(0, 0x1fff, 4096), region(0x10000, 0x1000, 4096)]);
    assert!(matches!(error, MapError::Overlap { space: "user", .. }));
}

#[test]
fn touching_regions_are_accepted() {
    assert!(
        MemoryMap::new(
            vec![region(0x1000, 0x1000, 4096), region(0, 0, 4096)],
            0,
            &TrustedFiles
        )
        .is_ok()
    );
}

#[test]
fn short_file_is_refused() {
    let error = refused(vec![region(0, 0, 4097)]);
    assert!(matches!(
        error,
        MapError::FileTooShort {
            needed: 4097,
            size: 4096,
            ..
        }
    ));
    let mut late = region(0, 0, 4096);
    late.file_offset = 1;
    assert!(matches!(
        refused(vec![late]),
        MapError::FileTooShort { needed: 4097, .. }
    ));
}

#[test]
fn pipes_and_devices_are_refused() {
    let (pipe, _other) = io::pipe().unwrap();
    let zero = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/zero")
        .unwrap();
    for file in [OwnedFd::from(pipe), OwnedFd::from(zero)] {
        let bad = Region {
            file,
            ..region(0, 0, 4096)
        };
        assert!(matches!(refused(vec![bad]), MapError::NotAFile { .. }));
    }
}

#[test]
fn file_that_cannot_be_written_is_refused() {
    let mut bad = region(0, 0, 4096);
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&bad.file));
    bad.file = std::fs::File::open(path).unwrap().into();
    assert!(matches!(refused(vec![bad]), MapError::Map { .. }));
}

#[test]
fn seal_against_shrinking_is_reported() {
    let open = region(0, 0, 4096);
    let sealed = region(0x10000, 0x10000, 4096);
    rustix::fs::fcntl_add_seals(&sealed.file, SealFlags::SHRINK).unwrap();
    let map = MemoryMap::new(vec![open, sealed], 0, &TrustedFiles).unwrap();
    let seals: Vec<_> = map.regions().iter().map(MappedRegion::sealed).collect();
    assert_eq!(seals, [false, true]);
    assert!(map.regions().iter().all(|region| region.page_size() == 4096));
}

#[test]
fn wrapping_total_is_refused() {
    let huge = shape(0, u64::MAX / 2, 4096);
    assert!(matches!(place(&[huge, huge, huge]), Err(MapError::TooLarge)));
    assert!(matches!(
        place(&[shape(4095, u64::MAX - 4095, 4096)]),
        Err(MapError::TooLarge)
    ));
}

#[test]
fn huge_pages_come_first_and_are_aligned() {
    let Layout {
        placements: places,
        len,
    } = place(&[
        shape(0x3000, 0x1000, 4096),
        shape(1 << 21, 1 << 21, 1 << 21),
        shape(5, 10, 4096),
    ])
    .unwrap();
    assert_eq!(
        places[1],
        Placement {
            mapping_offset: 0,
            mapping_len: 1 << 21,
            lead: 0
        }
    );
    assert_eq!(
        places[0],
        Placement {
            mapping_offset: 1 << 21,
            mapping_len: 4096,
            lead: 0
        }
    );
    assert_eq!(
        places[2],
        Placement {
            mapping_offset: (1 << 21) + 4096,
            mapping_len: 4096,
            lead: 5
        }
    );
    assert_eq!(len, (1 << 21) + 8192);
}

proptest! {
    #[test]
    fn placements_are_aligned_and_leave_no_hole(
        shapes in prop::collection::vec(
            (0u64..1 << 40, 1u64..1 << 36, prop::sample::select(vec![4096u64, 1 << 21, 1 << 30])), 1..20)
    ) {
        let shapes: Vec<_> = shapes
            .into_iter()
            .map(|(file_offset, len, page_size)| shape(file_offset, len, page_size))
            .collect();
        let Layout { placements, len } = place(&shapes).unwrap();
        let mut spans: Vec<_> = placements.iter().map(|p| (p.mapping_offset, p.mapping_len)).collect();
        spans.sort_unstable();
        let mut end = 0;
        for (offset, length) in spans {
            prop_assert_eq!(offset, end);
            end = offset + length;
        }
        prop_assert_eq!(end, len);
        for (place, shape) in placements.iter().zip(shapes) {
            prop_assert_eq!(place.mapping_offset % shape.page_size, 0);
            prop_assert_eq!(place.mapping_len % shape.page_size, 0);
            prop_assert_eq!((shape.file_offset - place.lead) % shape.page_size, 0);
            prop_assert!(place.lead + shape.len <= place.mapping_len);
        }
    }
}
