//! Directories for the sockets of claims: one for each claim, in a directory that only driver and daemon can enter.
//!
//! A container gets its claim's directory by a mount that is read-only. It can connect to the sockets and sees those of no
//! other claim. Users of the host cannot enter the directory above, so sockets may be open to all users. A privileged
//! container that changes its directory all the same harms itself: owner, mode and label are set through descriptors of
//! directories that are no links, and what it left there is removed without following links
//! ([`std::fs::remove_dir_all`] opens each directory relative to its parent).

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Gid, Mode, OFlags, XattrFlags, fchmod, fchown, fsetxattr, mkdirat, openat};
use rustix::io::Errno;

use crate::checkpoint::{absent_is_fine, lock};
use crate::names;

/// Owner, permissions and label of claims' directories.
#[derive(Debug, Clone)]
pub(crate) struct Access {
    pub(crate) group: Option<u32>,
    pub(crate) mode: u32,
    pub(crate) label: Option<String>,
}

/// The directory of all claims' directories.
#[derive(Debug)]
pub(crate) struct Sockets {
    path: PathBuf,
    access: Access,
    /// The directory, locked: two drivers would each remove directories of the other.
    _lock: File,
}

impl Sockets {
    /// Creates the directory, or takes the one that is there.
    ///
    /// # Errors
    /// It cannot be created, or belongs to another user.
    pub(crate) fn open(path: PathBuf, access: Access) -> io::Result<Self> {
        made_or_there(mkdirat(CWD, &path, Mode::RWXU))?;
        let lock = lock(&path)?;
        let directory = open(CWD.as_fd(), &path)?;
        let entered_by_group = if access.group.is_some() {
            Mode::RGRP | Mode::XGRP
        } else {
            Mode::empty()
        };
        set_group(&directory, access.group)?;
        fchmod(&directory, Mode::RWXU | entered_by_group)?;
        Ok(Self {
            path,
            access,
            _lock: lock,
        })
    }

    /// The path of a claim's directory.
    pub(crate) fn of(&self, claim: &str) -> PathBuf {
        self.path.join(claim)
    }

    /// Creates a claim's directory, or takes the one that is there.
    ///
    /// # Errors
    /// An error of the kernel.
    pub(crate) fn create(&self, claim: &str) -> io::Result<()> {
        let above = open(CWD.as_fd(), &self.path)?;
        made_or_there(mkdirat(&above, claim, Mode::RWXU))?;
        let directory = open(above.as_fd(), Path::new(claim))?;
        set_group(&directory, self.access.group)?;
        fchmod(&directory, Mode::from_raw_mode(self.access.mode))?;
        if let Some(label) = &self.access.label {
            let value = [label.as_bytes(), &[0]].concat();
            fsetxattr(&directory, c"security.selinux", &value, XattrFlags::empty())?;
        }
        Ok(())
    }

    /// Removes a claim's directory with all that is in it.
    ///
    /// # Errors
    /// An error of the kernel.
    pub(crate) fn remove(&self, claim: &str) -> io::Result<()> {
        absent_is_fine(fs::remove_dir_all(self.of(claim)))
    }

    /// Names of all claims that have a directory.
    ///
    /// # Errors
    /// An error of the kernel.
    pub(crate) fn all(&self) -> io::Result<Vec<String>> {
        let entries = fs::read_dir(&self.path)?;
        let name = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().into_string().ok();
        let claims = entries.filter_map(name).filter(|name| names::is_claim(name));
        Ok(claims.collect())
    }
}

fn open(at: impl AsFd, path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(at, path, flags, Mode::empty())?)
}

fn made_or_there(made: Result<(), Errno>) -> io::Result<()> {
    match made {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

fn set_group(directory: &OwnedFd, group: Option<u32>) -> io::Result<()> {
    match group {
        Some(group) => Ok(fchown(directory, None, Some(Gid::from_raw(group)))?),
        None => Ok(()),
    }
}
