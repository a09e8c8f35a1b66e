use std::fs;

use proptest::prelude::*;

use rustix::fs::MemfdFlags;

use super::*;
use crate::TrustedFiles;

fn memfd(len: u64, flags: MemfdFlags) -> io::Result<std::os::fd::OwnedFd> {
    let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | flags)?;
    rustix::fs::ftruncate(&file, len)?;
    Ok(file)
}

fn region(guest: u64, user: u64, len: u64) -> Region {
    let file = memfd(len, MemfdFlags::empty()).unwrap();
    Region {
        guest_addr: GuestAddr(guest),
        user_addr: user,
        len,
        file,
        file_offset: 0,
    }
}

/// Two regions with a gap between them in guest space, and 5000 bytes that are ours.
fn two_regions() -> MemoryMap {
    let regions = vec![
        region(0x10_0000, 0x7f00_0000, 0x4000),
        region(0x1_0000_0000, 0x7e00_0000, 0x2000),
    ];
    MemoryMap::new(regions, 5000, &TrustedFiles).unwrap()
}

fn hinted(map: &MemoryMap, hint: &mut RegionHint, addr: u64, len: u64) -> Option<u64> {
    map.find(hint, addr, len).map(|place| place.offset)
}

#[test]
fn regions_lie_back_to_back_and_private_memory_follows() {
    let map = two_regions();
    let offsets: Vec<_> = map.regions().iter().map(MappedRegion::map_offset).collect();
    assert_eq!(offsets, [0, 0x4000]);
    assert_eq!((map.guest_len(), map.len()), (0x6000, 0x8000));
    assert_eq!(map.base().addr().get() % MIN_ALIGN as usize, 0);
    assert!(
        map.copy_to_guest(0, &vec![1; map.len()]),
        "every byte can be written"
    );
    // Another process maps the same pieces.
    let pieces = map.files();
    let lens: Vec<_> = pieces
        .iter()
        .map(|piece| (piece.file_offset, piece.len))
        .collect();
    assert_eq!(lens, [(0, 0x4000), (0, 0x2000), (0, 0x2000)]);
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    assert_eq!(rustix::fs::fcntl_get_seals(pieces[2].file), Ok(seals));
    assert_eq!(map.huge_bytes(), 0);
}

#[test]
fn populate_enters_every_page() {
    let map = MemoryMap::new(vec![region(0, 0, 0x10_0000)], 0, &TrustedFiles).unwrap();
    let entered = || {
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("\n{:x}-", map.base().addr());
        let (_, own) = smaps.split_once(&start).unwrap();
        let rss = own.lines().find_map(|line| line.strip_prefix("Rss:")).unwrap();
        rss.trim().to_owned()
    };
    assert_eq!(entered(), "0 kB");
    map.populate();
    assert_eq!(entered(), "1024 kB");
}

#[test]
fn piece_begins_where_its_region_does_in_the_file() {
    let second = Region {
        file_offset: 0x1000,
        len: 0x1000,
        ..region(0x10_0000, 0, 0x2000)
    };
    let map = MemoryMap::new(vec![second], 0, &TrustedFiles).unwrap();
    let piece = &map.files()[0];
    assert_eq!(
        (piece.file_offset, piece.len, map.regions()[0].file_offset()),
        (0x1000, 0x1000, 0x1000)
    );
}

#[test]
fn translation_takes_whole_ranges_in_one_region_only() {
    let map = two_regions();
    let at = |addr, len| map.translate(GuestAddr(addr), len);
    assert_eq!(at(0x10_0000, 0x4000), Some(0));
    assert_eq!(at(0x10_3fff, 1), Some(0x3fff));
    assert_eq!(at(0x1_0000_0010, 0x1ff0), Some(0x4010));
    for (addr, len) in [
        (0x10_0000, 0x4001), // past the end, into the next region of the map
        (0x0f_ffff, 1),
        (0x0f_ffff, 2),
        (0x10_4000, 1),
        (0x1_0000_2000, 1),
        (0, u64::MAX),
        (0x10_0000, u64::MAX),
        (u64::MAX, 1),
        (u64::MAX, u64::MAX),
        (u64::MAX - 0xfff, 0x1001), // addr + len wraps into low memory
    ] {
        assert_eq!(at(addr, len), None, "{addr:#x}+{len:#x}");
    }
}

/// CVE-2020-10725: an address that is nowhere, with length 0, passed a check.
#[test]
fn zero_length_never_translates() {
    let map = two_regions();
    let mut hint = RegionHint::default();
    for addr in [0x10_0000, 0x10_4000, 0, u64::MAX] {
        assert_eq!(map.translate(GuestAddr(addr), 0), None);
        assert_eq!(hinted(&map, &mut hint, addr, 0), None);
        assert_eq!(hinted(&map, &mut hint, 0x10_0000, 1), Some(0));
    }
}

#[test]
fn user_addresses_have_a_space_of_their_own() {
    let map = two_regions();
    assert_eq!(map.translate_user(0x7f00_0004, 4), Some(4));
    assert_eq!(map.translate_user(0x7e00_0000, 0x2000), Some(0x4000));
    assert_eq!(map.translate_user(0x10_0000, 1), None);
    assert_eq!(map.translate_user(0x7e00_1fff, 2), None);
}

#[test]
fn hint_follows_the_region_that_was_hit() {
    let map = two_regions();
    let mut hint = RegionHint::default();
    for _ in 0..3 {
        assert_eq!(hinted(&map, &mut hint, 0x10_0100, 8), Some(0x100));
        assert_eq!(hinted(&map, &mut hint, 0x1_0000_0100, 8), Some(0x4100));
        assert_eq!(hinted(&map, &mut hint, 0x50_0000, 8), None);
    }
}

#[test]
fn room_before_counts_from_the_start_of_the_region() {
    let map = two_regions();
    let room_before = |addr| {
        let place = map.find(&mut RegionHint::default(), addr, 1);
        place.map(|place| place.room_before)
    };
    for (offset, before) in [(0x3fff, 0x3fff), (0x4000, 0), (0x4100, 0x100)] {
        let addr = map.guest_addr(offset).expect("the guest's").get();
        assert_eq!(room_before(addr), Some(before));
    }
}

#[test]
fn file_offset_inside_a_page_leaves_exact_addresses() {
    let file = memfd(0x3000, MemfdFlags::empty()).unwrap();
    rustix::io::pwrite(&file, b"mark", 0x1234).unwrap();
    let odd = Region {
        guest_addr: GuestAddr(0x8000),
        user_addr: 0,
        len: 0x1000,
        file,
        file_offset: 0x1234,
    };
    let map = MemoryMap::new(vec![odd], 0, &TrustedFiles).unwrap();
    let offset = map.translate(GuestAddr(0x8000), 4).unwrap();
    let mut mark = [0; 4];
    assert!(map.copy_from_guest(offset, &mut mark));
    assert_eq!(&mark, b"mark");
    assert_eq!(
        map.translate(GuestAddr(0x7fff), 2),
        None,
        "the page's head is no guest memory"
    );
    assert_eq!(map.translate(GuestAddr(0x8fff), 2), None, "nor its tail");
    assert_eq!((map.guest_len(), map.files()[0].file_offset), (0x2000, 0x1000));
}

#[test]
fn memory_is_shared_with_the_file() {
    let file = memfd(0x1000, MemfdFlags::empty()).unwrap();
    let twin = file.try_clone().unwrap();
    let map = MemoryMap::new(
        vec![Region {
            guest_addr: GuestAddr(0),
            user_addr: 0,
            len: 0x1000,
            file,
            file_offset: 0,
        }],
        0,
        &TrustedFiles,
    )
    .unwrap();
    assert!(map.copy_to_guest(100, b"out"));
    let mut seen = [0; 3];
    rustix::io::pread(&twin, &mut seen, 100).unwrap();
    assert_eq!(&seen, b"out");
}

/// CVE-2019-14818, CVE-2020-10726: maps and descriptors leaked with each new table.
#[test]
fn dropping_a_map_leaves_neither_mappings_nor_descriptors() {
    let mappings = || {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains("leak-check")).count()
    };
    let descriptors = || {
        let fds = fs::read_dir("/proc/self/fd").unwrap();
        fds.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
            .filter(|target| target.to_string_lossy().contains("leak-check"))
            .count()
    };
    let leaky = |guest, len| {
        let file = rustix::fs::memfd_create("leak-check", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 0x1000).unwrap();
        Region {
            guest_addr: GuestAddr(guest),
            user_addr: guest,
            len,
            file,
            file_offset: 0,
        }
    };
    let map = MemoryMap::new(
        vec![leaky(0, 0x1000), leaky(0x1000, 0x1000)],
        0x1000,
        &TrustedFiles,
    )
    .unwrap();
    let whole = crate::FileRange {
        offset: 0,
        bytes: 0x1000,
    };
    let log = crate::DirtyLog::open(leaky(0, 0).file.as_fd(), whole, &TrustedFiles).unwrap();
    assert_eq!((mappings(), descriptors()), (3, 2));
    drop((map, log));
    assert!(MemoryMap::new(vec![leaky(0, 0x1000), leaky(0x1000, 0x2000)], 0, &TrustedFiles).is_err());
    assert_eq!(
        (mappings(), descriptors()),
        (0, 0),
        "refused maps leave nothing, either"
    );
}

/// Says that the machine lacks something; where all must be there, that is a failure.
fn skip(reason: &str) {
    let required = std::env::var_os("REQUIRE_PRIV").is_some_and(|value| value == "1");
    assert!(!required, "{reason}");
    println!("SKIPPED: {reason}");
}

#[test]
fn huge_pages_are_mapped_whole() {
    let huge = match memfd(2 << 20, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB) {
        Ok(file) => Region {
            guest_addr: GuestAddr(1 << 30),
            user_addr: 1 << 30,
            len: 2 << 20,
            file,
            file_offset: 0,
        },
        Err(error) => return skip(&format!("no huge page memfd: {error}")),
    };
    let map = match MemoryMap::new(vec![region(0, 0, 0x1000), huge], 0x1000, &TrustedFiles) {
        Ok(map) => map,
        Err(error) => return skip(&format!("no huge pages (sysctl vm.nr_hugepages): {error}")),
    };
    let found = &map.regions()[1];
    assert_eq!((found.page_size(), found.map_offset()), (2 << 20, 0));
    assert_eq!(map.regions()[0].map_offset(), 2 << 20);
    assert_eq!((map.guest_len(), map.huge_bytes()), ((2 << 20) + 0x1000, 2 << 20));
}

proptest! {
    /// Whatever the address and length: a translation is inside its region, and its reverse is the address.
    #[test]
    fn translation_is_exact(addr in addresses(), len in prop_oneof![0u64..0x9000, any::<u64>()]) {
        let map = two_regions();
        let mut hint = RegionHint::default();
        let found = map.translate(GuestAddr(addr), len);
        prop_assert_eq!(hinted(&map, &mut hint, addr, len), found);
        prop_assert_eq!(hinted(&map, &mut hint, addr, len), found);
        let expected = map.regions().iter().find_map(|region| {
            let start = u128::from(region.guest_addr().get());
            let inside = u128::from(addr) >= start
                && u128::from(addr) + u128::from(len) <= start + u128::from(region.len());
            (inside && len > 0).then(|| region.map_offset() + (addr - region.guest_addr().get()))
        });
        prop_assert_eq!(found, expected);
    }
}

fn addresses() -> impl Strategy<Value = u64> {
    prop_oneof![
        0xf_f000u64..0x10_5000,
        0xffff_f000u64..0x1_0000_3000,
        any::<u64>()
    ]
}
