//! A mount namespace with nothing in it, so that no path leads to a socket of others.
//!
//! Landlock cannot restrict connecting to a Unix socket by its path before Linux 7.1, and seccomp does not see paths.
//! So the paths are removed: the root directory becomes a small, read-only file system with this process's
//! directory in /proc, its program (for the names in a backtrace), and the directories of those sockets that it
//! connects to later on. They are mounted one by one, so that `..` leads from them into the new root. Every other mount
//! is detached, so that this process does not keep the host from unmounting it.
//!
//! A directory that is removed and created again under the same name is a new one, which this process does not see.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, StatVfsMountFlags, mkdirat, openat, statvfs, symlinkat};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, UnmountFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen, mount_change,
    mount_remount, move_mount, open_tree, unmount,
};
use rustix::process::{chdir, fchdir, pivot_root};

/// Where the new root is assembled: an existing directory. Its old contents are not needed meanwhile.
const SITE: &str = "/proc";

/// Which paths of others this process needs later on.
#[derive(Debug)]
pub enum Reach {
    /// Only those beneath these directories, which are absolute, and no links.
    Only(Vec<PathBuf>),
    /// Any; and why.
    Any(&'static str),
}

/// A mount that stays visible in the new root.
struct Stays {
    path: PathBuf,
    mount: OwnedFd,
    is_directory: bool,
}

/// Removes all paths but those of `reach`; returns what is left, or why all are.
pub(super) fn leave(reach: &Reach) -> String {
    let directories = match reach {
        Reach::Any(why) => return format!("{} ({why})", super::OFF),
        Reach::Only(directories) => directories,
    };
    if directories.iter().any(|path| path.parent().is_none()) {
        return format!("{} (the steward's socket is in /: put it elsewhere)", super::OFF);
    }
    match enter(directories) {
        Ok(()) if directories.is_empty() => "empty".to_owned(),
        Ok(()) => {
            let names: Vec<_> = directories
                .iter()
                .map(|path| path.display().to_string())
                .collect();
            format!("only {}", names.join(", "))
        }
        Err(Errno::PERM) => {
            let root = statvfs("/");
            let is_read_only = root.is_ok_and(|root| root.f_flag.contains(StatVfsMountFlags::RDONLY));
            of_service(super::is_service(), is_read_only)
        }
        Err(errno) => format!("{} ({errno})", super::OFF),
    }
}

/// The mounts that a process without CAP_SYS_ADMIN keeps.
pub(super) fn of_service(is_service: bool, is_read_only: bool) -> String {
    let (off, needs) = (super::OFF, super::NEEDS);
    match (is_service, is_read_only) {
        (true, true) => "read-only, confined by systemd (ProtectSystem=)".to_owned(),
        (true, false) => format!("{off} ({needs}, or ProtectSystem=strict in the unit)"),
        (false, _) => format!("{off} ({needs})"),
    }
}

fn enter(directories: &[PathBuf]) -> Result<(), Errno> {
    #[allow(deprecated)] // its replacement is unsafe for the sake of CLONE_FILES, which is not asked for
    rustix::thread::unshare(rustix::thread::UnshareFlags::NEWNS)?;
    // Unmounts by the host take effect here, too; mounts of this process do not affect the host.
    mount_change(
        "/",
        MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC,
    )?;
    let stays = what_stays(directories)?;
    let root = new_root()?;
    let into =
        |mount: &OwnedFd, to: &Path| move_mount(mount, "", CWD, to, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH);
    into(&root, Path::new(SITE))?;
    let furnished = furnish(&root, &stays, into).and_then(|()| {
        fchdir(&root)?;
        // The old root is then mounted on top of the new one (pivot_root(2), "pivot_root(".", ".")").
        pivot_root(".", ".")
    });
    if let Err(errno) = furnished {
        let _ = chdir("/");
        let _ = unmount(SITE, UnmountFlags::DETACH);
        return Err(errno);
    }
    unmount(".", UnmountFlags::DETACH)?;
    chdir("/")
}

/// Copies of the mounts that stay, not attached yet.
fn what_stays(directories: &[PathBuf]) -> Result<Vec<Stays>, Errno> {
    let copy = |path: &Path| {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let mount = open_tree(CWD, path, flags)?;
        Ok::<_, Errno>(Stays {
            path: path.to_owned(),
            mount,
            is_directory: path.is_dir(),
        })
    };
    let own = PathBuf::from(format!("/proc/{}", std::process::id()));
    let mut stays = vec![copy(&own)?];
    for directory in directories {
        stays.push(copy(directory)?);
    }
    // Without it a backtrace has no names.
    stays.extend(
        std::env::current_exe()
            .ok()
            .and_then(|program| copy(&program).ok()),
    );
    Ok(stays)
}

fn new_root() -> Result<OwnedFd, Errno> {
    let made = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&made, "size", "64k")?;
    fsconfig_set_string(&made, "mode", "0755")?;
    fsconfig_create(&made)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    fsmount(
        &made,
        FsMountFlags::FSMOUNT_CLOEXEC,
        attributes | MountAttrFlags::MOUNT_ATTR_NOEXEC,
    )
}

/// Attaches the mounts that stay in the new root, all read-only.
fn furnish(
    root: &OwnedFd,
    stays: &[Stays],
    into: impl Fn(&OwnedFd, &Path) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let inside = |path: &Path| Path::new(SITE).join(path.strip_prefix("/").unwrap_or(path));
    for it in stays {
        make_place(root, &it.path, it.is_directory)?;
    }
    symlinkat(std::process::id().to_string(), root, "proc/self")?;
    for it in stays {
        into(&it.mount, &inside(&it.path))?;
    }
    let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
    for it in stays {
        mount_remount(inside(&it.path), flags | MountFlags::NOEXEC, "")?;
    }
    mount_remount(SITE, flags | MountFlags::NOEXEC, "")
}

/// Creates a mount point: a directory or an empty file.
fn make_place(root: &OwnedFd, path: &Path, is_directory: bool) -> Result<(), Errno> {
    let relative = path.strip_prefix("/").map_err(|_| Errno::INVAL)?;
    let mut ancestors: Vec<&Path> = relative.ancestors().skip(1).collect();
    ancestors.reverse();
    let made = |result: rustix::io::Result<()>| match result {
        Err(Errno::EXIST) => Ok(()),
        result => result,
    };
    for ancestor in ancestors.into_iter().filter(|path| !path.as_os_str().is_empty()) {
        made(mkdirat(root, ancestor, Mode::from_raw_mode(0o755)))?;
    }
    if !is_directory {
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
        return openat(root, relative, flags, Mode::from_raw_mode(0o444)).map(drop);
    }
    made(mkdirat(root, relative, Mode::from_raw_mode(0o755)))
}

/// The path of a socket without links.
/// Errors: its directory is not there.
pub fn without_links(socket: &Path) -> io::Result<PathBuf> {
    socket.canonicalize().or_else(|error| {
        // The socket may not exist yet.
        let parent = socket.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = parent.unwrap_or(Path::new(".")).canonicalize()?;
        Ok(directory.join(socket.file_name().ok_or(error)?))
    })
}
