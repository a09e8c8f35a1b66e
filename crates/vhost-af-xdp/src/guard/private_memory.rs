//! Whether a VMM maps its guest's memory privately, as /proc/PID/maps tells (proc_pid_maps(5)).

use std::os::fd::AsFd;

use rustix::fs::{fstat, major, minor};

/// How a process maps its memory, where that may be read.
pub(crate) fn maps_of(pid: i32) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).ok()
}

/// A file, and where the VMM has it in its memory.
pub(crate) struct MappedFile<F> {
    /// Of a byte of it.
    pub(crate) address: u64,
    pub(crate) file: F,
}

/// The first of these addresses that is in a private mapping of its file.
pub(crate) fn first_private<F: AsFd>(maps: &str, files: &[MappedFile<F>]) -> Option<u64> {
    let is_private = |mapped: &&MappedFile<F>| {
        let identity = fstat(&mapped.file).map(|stat| FileId {
            major: major(stat.st_dev),
            minor: minor(stat.st_dev),
            inode: stat.st_ino,
        });
        identity.is_ok_and(|file| is_private(maps, mapped.address, &file))
    };
    files.iter().find(is_private).map(|mapped| mapped.address)
}

/// A file, as maps name it.
struct FileId {
    major: u32,
    minor: u32,
    inode: u64,
}

/// Whether the mapping that holds `address` is a private one of that file.
fn is_private(maps: &str, address: u64, file: &FileId) -> bool {
    maps.lines().any(|line| {
        let mut fields = line.split_ascii_whitespace();
        let Some((start, end)) = fields.next().and_then(|range| range.split_once('-')) else {
            return false;
        };
        let (Ok(start), Ok(end)) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16)) else {
            return false;
        };
        let Some((of_major, of_minor)) = fields.clone().nth(2).and_then(|device| device.split_once(':'))
        else {
            return false;
        };
        let device = (
            u32::from_str_radix(of_major, 16),
            u32::from_str_radix(of_minor, 16),
        );
        (start..end).contains(&address)
            && fields.clone().next().is_some_and(|modes| modes.ends_with('p'))
            && device == (Ok(file.major), Ok(file.minor))
            && fields.nth(3).is_some_and(|text| text.parse() == Ok(file.inode))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "7f0000000000-7f0000200000 rw-s 00000000 00:01 12 /memfd:ram (deleted)\n\
                        7f0000200000-7f0000400000 rw-p 00000000 00:01 13 /memfd:ram (deleted)\n\
                        7f0000600000-7f0000800000 rw-p 00000000 00:00 0 \n";

    fn file(major: u32, minor: u32, inode: u64) -> FileId {
        FileId { major, minor, inode }
    }

    #[test]
    fn private_mapping_is_told_from_shared_one() {
        assert!(!is_private(MAPS, 0x7f00_0000_0000, &file(0, 1, 12)));
        assert!(is_private(MAPS, 0x7f00_0020_0000, &file(0, 1, 13)));
        assert!(
            !is_private(MAPS, 0x7f00_0040_0000, &file(0, 1, 13)),
            "an address of no mapping is not judged"
        );
    }

    #[test]
    fn private_mapping_of_another_file_is_not_judged() {
        for (major, minor, inode) in [(0, 1, 12), (1, 1, 13), (0, 2, 13)] {
            let other = file(major, minor, inode);
            assert!(
                !is_private(MAPS, 0x7f00_0020_0000, &other),
                "{major}:{minor} {inode}"
            );
        }
        assert!(!is_private(MAPS, 0x7f00_0060_0000, &file(0, 1, 13)), "the heap");
    }
}
