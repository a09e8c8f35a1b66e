//! Files that a VMM passes as guest memory: which are accepted.
//!
//! A page of a file on FUSE or NFS comes from a server, which may be the VMM's own and never answer. A thread that
//! touches it then waits for ever: a worker, with all its guests. Even fstat(2) may ask the server. So the check is one
//! that the kernel answers without a server: F_GET_SEALS succeeds for files of tmpfs (memfd are) and hugetlbfs and for
//! no others (`memfd_file_seals_ptr`, mm/memfd.c).
//!
//! Closing a file of FUSE asks its server, too (`fuse_flush`, fs/fuse/file.c). So a file is checked, and closed if it
//! is rejected, by the thread that reads its VMM's connection, for which no other port waits.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use anyhow::bail;

/// Most descriptors of a message, and so most regions of a memory table.
pub(super) const MAX_FILES: usize = 32;

/// Checks that `file` is memory for which no server has to answer.
pub(crate) fn check(file: impl AsFd) -> anyhow::Result<()> {
    if rustix::fs::fcntl_get_seals(&file).is_ok() {
        return Ok(());
    }
    let path = fs::read_link(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()));
    // The VMM chose the name: escaped.
    let name = path.map_or_else(|_| "the memory descriptor".to_owned(), |path| format!("{path:?}"));
    let filesystem = filesystem(file.as_fd()).ok().flatten();
    let on = filesystem.map_or_else(String::new, |filesystem| format!(" on {filesystem}"));
    bail!(
        "{name}{on} is not a shared memory file: memfd and files of tmpfs and hugetlbfs are, others may never answer; let \
         the VMM use one (QEMU: memory-backend-memfd,share=on), or accept any (memory-files=any)"
    )
}

/// Type of the file system, if this process sees it mounted. Asks no server.
fn filesystem(file: BorrowedFd<'_>) -> io::Result<Option<String>> {
    let facts = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
    let Some(mount) = facts.lines().find_map(|line| line.strip_prefix("mnt_id:")) else {
        return Ok(None);
    };
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    Ok(kind_of(&mounts, mount.trim()).map(str::to_owned))
}

/// The file system type of the mount with that ID (proc_pid_mountinfo(5)).
fn kind_of<'a>(mounts: &'a str, number: &str) -> Option<&'a str> {
    let is = |line: &&str| line.split(' ').next() == Some(number);
    let (_, after) = mounts.lines().find(is)?.split_once(" - ")?;
    after.split(' ').next()
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, open};

    use super::*;

    #[test]
    fn memfd_and_files_of_tmpfs_are_memory() {
        assert!(check(memfd_create("m", MemfdFlags::CLOEXEC).expect("memfd")).is_ok());
        let (nameless, mode) = (OFlags::TMPFILE | OFlags::RDWR, Mode::RUSR | Mode::WUSR);
        assert!(check(open("/dev/shm", nameless, mode).expect("tmpfs")).is_ok());
        // Succeeds even if there are no huge pages.
        if let Ok(huge) = memfd_create("h", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB) {
            assert!(check(huge).is_ok());
        }
    }

    #[test]
    fn other_files_are_refused_by_name() {
        let other = fs::File::open("/proc/self/mountinfo").expect("a file");
        let said = check(other).expect_err("not memory").to_string();
        assert!(said.contains("mountinfo\" on proc "), "{said}");
        assert!(said.contains("memory-files=any"), "{said}");
        let (pipe, _) = rustix::pipe::pipe().expect("a pipe");
        let pipe: OwnedFd = pipe;
        assert!(check(pipe).is_err());
    }

    #[test]
    fn kind_of_a_mount_is_found_by_its_number() {
        let mounts = "26 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n7 26 0:5 / /x rw - fuse.sshfs a:b rw\n";
        assert_eq!(kind_of(mounts, "7"), Some("fuse.sshfs"));
        assert_eq!(kind_of(mounts, "26"), Some("ext4"));
        assert_eq!(kind_of(mounts, "2"), None);
    }
}
