//! Where a policy comes from: a file that nobody else can change, replace, or keep us waiting with.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::Policy;

/// Longest file that is read, bytes: thousands of rules.
const LONGEST: u64 = 1 << 20;

/// Why there is no policy.
///
/// `path` is the policy's, as given. `owner` is the number of the user who owns what others can change, and `mode` its
/// permission bits. `line` is counted from 1, `what` is the mistake in words.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum PolicyError {
    /// Not readable.
    #[error("cannot read the policy {}{}", .path.display(), read_remedy(.source))]
    Read {
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Others could change it.
    #[error(
        "the policy {} can be changed by others (owner {owner}, mode {mode:04o}): it must be owned by root or by the \
         steward's user and be writable by its owner only (`chown root PATH; chmod go-w PATH`)", .path.display()
    )]
    Unsafe { path: PathBuf, owner: u32, mode: u32 },
    /// Others could put another one in its place.
    #[error(
        "the policy {} could be replaced by others, who may write to {} (owner {owner}, mode {mode:04o}): move it, or \
         `chown root PATH; chmod go-w PATH` for that directory", .path.display(), .dir.display()
    )]
    UnsafePlace {
        path: PathBuf,
        /// The directory.
        dir: PathBuf,
        owner: u32,
        mode: u32,
    },
    /// Not TOML, not of this form, or a rule that cannot be.
    #[error("{}{}: {what}", .path.display(), .line.map_or_else(String::new, |line| format!(" line {line}")))]
    Syntax {
        path: PathBuf,
        line: Option<usize>,
        what: String,
    },
}

/// What to do about a policy that cannot be read.
fn read_remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => {
            " (write one, `vhost-af-xdp-steward --help` shows how, or name another with --policy)"
        }
        io::ErrorKind::PermissionDenied => {
            " (start the steward as root or as its owner, or name another with --policy)"
        }
        io::ErrorKind::InvalidData => " (TOML in UTF-8 is meant)",
        _ => " (name another with --policy)",
    }
}

impl Policy {
    /// Reads and checks the file.
    ///
    /// # Errors
    /// [`PolicyError`], naming the place.
    pub fn read(path: &Path) -> Result<Self, PolicyError> {
        let read = |source| PolicyError::Read {
            path: path.to_owned(),
            source,
        };
        // A FIFO would keep us waiting for somebody who writes to it, and with us all holders.
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let opened = fs::OpenOptions::new().read(true).custom_flags(flags).open(path);
        let file = opened.map_err(read)?;
        let metadata = file.metadata().map_err(read)?;
        if !metadata.is_file() {
            return Err(read(io::Error::other("it is not a regular file")));
        }
        let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
        if !is_trusted(owner) || mode & 0o022 != 0 {
            return Err(PolicyError::Unsafe {
                path: path.to_owned(),
                owner,
                mode,
            });
        }
        check_place(path)?;
        let mut text = String::new();
        file.take(LONGEST + 1).read_to_string(&mut text).map_err(read)?;
        if text.len() as u64 > LONGEST {
            return Err(read(io::Error::other(format!(
                "it is longer than {} KiB",
                LONGEST / 1024
            ))));
        }
        Self::parse(path, &text)
    }
}

/// Whether files of this user may say what a steward does.
fn is_trusted(owner: u32) -> bool {
    owner == 0 || owner == rustix::process::geteuid().as_raw()
}

/// Whether nobody else can put another file in the place of this one: its directory must be writable for its owner
/// only, those above at least sticky.
fn check_place(path: &Path) -> Result<(), PolicyError> {
    let read = |source| PolicyError::Read {
        path: path.to_owned(),
        source,
    };
    // Both the name that was given and what it leads to.
    let given = std::path::absolute(path).map_err(read)?;
    let real = fs::canonicalize(path).map_err(read)?;
    let above = |path: &Path| {
        let dirs = path.ancestors().skip(1).map(Path::to_owned);
        dirs.collect::<Vec<_>>().into_iter().enumerate()
    };
    for (steps, dir) in above(&given).chain(above(&real)) {
        let metadata = fs::metadata(&dir).map_err(read)?;
        let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
        let sticky = steps > 0 && mode & 0o1000 != 0;
        if !is_trusted(owner) || (mode & 0o022 != 0 && !sticky) {
            return Err(PolicyError::UnsafePlace {
                path: path.to_owned(),
                dir,
                owner,
                mode,
            });
        }
    }
    Ok(())
}
