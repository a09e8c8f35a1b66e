use std::os::fd::AsFd;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::MemfdFlags;

use super::*;
use crate::driver::GuestRam;
use crate::{Region, TrustedFiles};

fn file(bytes: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    file
}

/// A log in a part of a file.
fn log(file: &OwnedFd, offset: u64, bytes: u64) -> DirtyLog {
    DirtyLog::open(file.as_fd(), FileRange { offset, bytes }, &TrustedFiles).unwrap()
}

/// Pages whose bits are set.
fn pages(file: &OwnedFd, offset: u64, bytes: usize) -> Vec<u64> {
    let mut bitmap = vec![0u8; bytes];
    rustix::io::pread(file, &mut bitmap, offset).unwrap();
    (0..bytes as u64 * 8)
        .filter(|page| bitmap[*page as usize / 8] & 1 << (page % 8) != 0)
        .collect()
}

#[test]
fn every_page_that_a_range_touches_is_noted() {
    let file = file(4096);
    let log = log(&file, 0, 4096);
    log.note(GuestAddr(4095), 1);
    log.note(GuestAddr(2 * 4096 + 4095), 2);
    log.note(GuestAddr(8 * 4096), 4096);
    log.note(GuestAddr(100 * 4096), 0);
    assert_eq!(pages(&file, 0, 4096), [0, 2, 3, 8]);
}

#[test]
fn pages_past_the_log_are_left_out() {
    let file = file(4096);
    let log = log(&file, 100, 2);
    log.note(GuestAddr(15 * 4096), 3 * 4096);
    log.note(GuestAddr(16 * 4096), 1);
    log.note(GuestAddr(u64::MAX), u64::MAX);
    assert_eq!(pages(&file, 100, 2), [15]);
    assert_eq!(pages(&file, 0, 4096), [100 * 8 + 15]);
}

#[test]
fn log_that_does_not_fit_its_file_is_refused() {
    let file = file(4096);
    for (bytes, offset) in [(0, 0), (4097, 0), (1, 4096), (u64::MAX, 1), (4096, u64::MAX)] {
        assert!(matches!(
            DirtyLog::open(file.as_fd(), FileRange { offset, bytes }, &TrustedFiles),
            Err(FileError::Range { .. })
        ));
    }
    let (reader, _writer) = std::io::pipe().unwrap();
    assert!(matches!(
        DirtyLog::open(reader.as_fd(), FileRange { offset: 0, bytes: 1 }, &TrustedFiles),
        Err(FileError::NotAFile)
    ));
}

#[test]
fn map_offsets_are_noted_as_guest_addresses() {
    let region = |guest_addr, len| Region {
        guest_addr: GuestAddr(guest_addr),
        user_addr: 0,
        len,
        file: file(len),
        file_offset: 0,
    };
    let ram = GuestRam::from_regions(vec![region(0x10_0000, 0x4000), region(0x40_0000, 0x4000)]).unwrap();
    let memory = Arc::new(MemoryMap::new(ram.regions().unwrap(), 4096, &TrustedFiles).unwrap());
    let file = file(4096);
    let log = log(&file, 0, 4096);
    memory.log(&log, 0x3fff, 1);
    memory.log(&log, 0x4001, 0x1000);
    memory.log(&log, memory.guest_len(), 4096);
    assert_eq!(pages(&file, 0, 4096), [0x103, 0x400, 0x401]);
}
