//! Finds out from /proc/PID/maps (proc_pid_maps(5)) whether a VMM maps its guest's memory privately.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;

use rustix::fs::{fstat, major, minor};

/// The memory map of a process, if it may be read.
pub(crate) fn maps_of(pid: i32) -> Option<BufReader<File>> {
    File::open(format!("/proc/{pid}/maps")).ok().map(BufReader::new)
}

/// A file, and an address at which the VMM maps it.
pub(crate) struct MappedFile<F> {
    /// Address of a byte of the file.
    pub(crate) address: u64,
    pub(crate) file: F,
}

/// The lowest of these addresses that is in a private mapping of its file. Maps are in the order of their addresses, and
/// a VMM may have very many: they are read once, and no further than the last address.
pub(crate) fn first_private<F: AsFd>(maps: impl BufRead, files: &[MappedFile<F>]) -> Option<u64> {
    let identity = |mapped: &MappedFile<F>| {
        let stat = fstat(&mapped.file).ok()?;
        let file = FileId {
            major: major(stat.st_dev),
            minor: minor(stat.st_dev),
            inode: stat.st_ino,
        };
        Some((mapped.address, file))
    };
    first_private_of(maps, files.iter().filter_map(identity).collect())
}

/// Identity of a file in a memory map.
#[derive(PartialEq, Eq)]
struct FileId {
    major: u32,
    minor: u32,
    inode: u64,
}

fn first_private_of(mut maps: impl BufRead, mut files: Vec<(u64, FileId)>) -> Option<u64> {
    files.sort_unstable_by_key(|&(address, _)| address);
    let mut files = files.into_iter().peekable();
    let mut line = Vec::new();
    while files.peek().is_some() {
        line.clear();
        if maps.read_until(b'\n', &mut line).ok()? == 0 {
            return None;
        }
        let Some((start, end)) = range_of(&line) else {
            continue;
        };
        while let Some((address, file)) = files.next_if(|&(address, _)| address < end) {
            // Addresses before `start` are in no mapping.
            if address >= start && is_private_of(&line, &file) {
                return Some(address);
            }
        }
    }
    None
}

/// The address range of a mapping.
fn range_of(line: &[u8]) -> Option<(u64, u64)> {
    let range = line.split(|&byte| byte == b' ').next()?;
    let (start, end) = std::str::from_utf8(range).ok()?.split_once('-')?;
    let address = |text| u64::from_str_radix(text, 16).ok();
    Some((address(start)?, address(end)?))
}

/// Whether a line describes a private mapping of that file.
fn is_private_of(line: &[u8], file: &FileId) -> bool {
    // A file name may have any bytes.
    let line = String::from_utf8_lossy(line);
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (Some(modes), Some(device), Some(inode)) = (fields.next(), fields.nth(1), fields.next()) else {
        return false;
    };
    let number = |text| u32::from_str_radix(text, 16).ok();
    let identity = device.split_once(':').and_then(|(major, minor)| {
        Some(FileId {
            major: number(major)?,
            minor: number(minor)?,
            inode: inode.parse().ok()?,
        })
    });
    modes.ends_with('p') && identity.is_some_and(|its| its == *file)
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read};

    use super::*;

    const MAPS: &str = "7f0000000000-7f0000200000 rw-s 00000000 00:01 12 /memfd:ram (deleted)\n\
                        7f0000200000-7f0000400000 rw-p 00000000 00:01 13 /memfd:ram (deleted)\n\
                        7f0000600000-7f0000800000 rw-p 00000000 00:00 0 \n";

    fn file(major: u32, minor: u32, inode: u64) -> FileId {
        FileId { major, minor, inode }
    }

    fn is_private(maps: &str, address: u64, file: FileId) -> bool {
        first_private_of(maps.as_bytes(), vec![(address, file)]) == Some(address)
    }

    #[test]
    fn private_mapping_is_distinguished_from_a_shared_one() {
        assert!(!is_private(MAPS, 0x7f00_0000_0000, file(0, 1, 12)));
        assert!(is_private(MAPS, 0x7f00_0020_0000, file(0, 1, 13)));
        assert!(
            !is_private(MAPS, 0x7f00_0040_0000, file(0, 1, 13)),
            "an address of no mapping is not judged"
        );
    }

    #[test]
    fn private_mapping_of_another_file_is_ignored() {
        for (major, minor, inode) in [(0, 1, 12), (1, 1, 13), (0, 2, 13)] {
            let other = file(major, minor, inode);
            assert!(
                !is_private(MAPS, 0x7f00_0020_0000, other),
                "{major}:{minor} {inode}"
            );
        }
        assert!(!is_private(MAPS, 0x7f00_0060_0000, file(0, 1, 13)), "the heap");
    }

    /// Counts the bytes that are read.
    struct Counted<'a>(&'a [u8], usize);

    impl Read for Counted<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let read = self.0.read(into)?;
            self.1 += read;
            Ok(read)
        }
    }

    impl BufRead for Counted<'_> {
        fn fill_buf(&mut self) -> io::Result<&[u8]> {
            Ok(self.0)
        }

        fn consume(&mut self, bytes: usize) {
            self.0 = &self.0[bytes..];
            self.1 += bytes;
        }
    }

    #[test]
    fn maps_are_read_once_for_all_regions_and_no_further_than_the_last() {
        let line = |at: u64, modes: &str| {
            let start = 0x7f00_0000_0000 + (at << 12);
            let name = if at.is_multiple_of(2) {
                "/memfd:ram"
            } else {
                "/tmp/\u{fffd}"
            };
            format!(
                "{start:x}-{:x} {modes} 00000000 00:01 {at} {name}\n",
                start + 4096
            )
        };
        let shared: Vec<String> = (0..65_000).map(|at| line(at, "rw-s")).collect();
        let text = shared.concat();
        let regions = || (0..64).map(|at| (0x7f00_0000_0000 + ((at * 1000) << 12), file(0, 1, at * 1000)));
        let mut maps = Counted(text.as_bytes(), 0);
        assert_eq!(first_private_of(&mut maps, regions().rev().collect()), None);
        assert_eq!(maps.1, shared[..=63_000].concat().len());
        // The lowest of several is reported.
        let mut private = shared;
        for at in [62_000, 7_000, 30_000] {
            private[at as usize] = line(at, "rw-p");
        }
        let text = private.concat();
        let mut maps = Counted(text.as_bytes(), 0);
        let found = first_private_of(&mut maps, regions().collect());
        assert_eq!(found, Some(0x7f00_0000_0000 + (7_000 << 12)));
        assert_eq!(maps.1, private[..=7_000].concat().len());
    }

    #[test]
    fn name_that_is_no_text_hides_nothing() {
        let maps = b"1000-2000 rw-s 00000000 00:01 7 /tmp/\xff\n2000-3000 rw-p 00000000 00:01 8 /tmp/\xfe\n";
        assert_eq!(
            first_private_of(&maps[..], vec![(0x2000, file(0, 1, 8))]),
            Some(0x2000)
        );
    }
}
