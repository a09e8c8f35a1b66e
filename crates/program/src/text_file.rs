//! Files with which an operator configures a privileged process. They are read only if no other user can change or
//! replace them, or make the reader wait. Errors name the line.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Descriptions of a file for error messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// Its kind, as in "the policy".
    pub what: &'static str,
    /// Its reader, as in "the steward".
    pub reader: &'static str,
    /// The place that shows an example.
    pub example: &'static str,
    /// The option that names it.
    pub option: &'static str,
}

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct FileError {
    text: String,
    /// The kernel's answer.
    source: Option<io::Error>,
}

impl FileError {
    /// A mistake in a file, in words; `line`: counted from 1.
    #[must_use]
    pub fn mistake(path: &Path, line: Option<usize>, what: &str) -> Self {
        let line = line.map_or_else(String::new, |line| format!(" line {line}"));
        Self::new(format!("{}{line}: {what}", path.display()))
    }

    fn new(text: String) -> Self {
        Self { text, source: None }
    }

    fn unreadable(kind: Kind, path: &Path, source: io::Error) -> Self {
        let remedy = read_remedy(&kind, &source);
        Self {
            text: format!("cannot read the {} {}{remedy}", kind.what, path.display()),
            source: Some(source),
        }
    }
}

/// The remedy for a directory that others may write to. The mode of a shared one (sticky, as /tmp) must not change.
fn place_remedy(mode: u32) -> &'static str {
    match mode & 0o1000 {
        0 => "move it, or `chown root PATH; chmod go-w PATH` for that directory",
        _ => "move it, for example to /etc/vhost-af-xdp",
    }
}

/// The remedy for a file that cannot be read.
fn read_remedy(kind: &Kind, error: &io::Error) -> String {
    let Kind {
        reader,
        example,
        option,
        ..
    } = kind;
    match error.kind() {
        io::ErrorKind::NotFound => {
            format!(" (write one, {example} shows how, or name another with {option})")
        }
        io::ErrorKind::PermissionDenied => {
            format!(" (start the {reader} as root or as its owner, or name another with {option})")
        }
        io::ErrorKind::InvalidData => " (TOML in UTF-8 is meant)".to_owned(),
        _ => format!(" (name another with {option})"),
    }
}

/// The text of a file of at most so many bytes.
///
/// # Errors
/// [`FileError`]: it cannot be read, or others could change it.
pub fn read(kind: Kind, path: &Path, most_bytes: u64) -> Result<String, FileError> {
    let wrong = |source| FileError::unreadable(kind, path, source);
    // Without NONBLOCK, opening a FIFO would wait for a writer, and all clients of this process would wait, too.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let opened = fs::OpenOptions::new().read(true).custom_flags(flags).open(path);
    let file = opened.map_err(wrong)?;
    let metadata = file.metadata().map_err(wrong)?;
    if !metadata.is_file() {
        return Err(wrong(io::Error::other("it is not a regular file")));
    }
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    if !is_trusted(owner) || mode & 0o022 != 0 {
        return Err(FileError::new(format!(
            "the {} {} can be changed by others (owner {owner}, mode {mode:04o}): it must be owned by root or by the \
             {}'s user and be writable by its owner only (`chown root PATH; chmod go-w PATH`)",
            kind.what,
            path.display(),
            kind.reader
        )));
    }
    check_place(kind, path)?;
    let mut text = String::new();
    let limited = &mut file.take(most_bytes + 1);
    limited.read_to_string(&mut text).map_err(wrong)?;
    if text.len() as u64 > most_bytes {
        return Err(wrong(io::Error::other(format!(
            "it is longer than {} KiB",
            most_bytes / 1024
        ))));
    }
    Ok(text)
}

/// Whether files of this user may configure this process.
fn is_trusted(owner: u32) -> bool {
    owner == 0 || owner == rustix::process::geteuid().as_raw()
}

/// Whether no other user can put another file in the place of this one: its directory must be writable for its owner
/// only, those above at least sticky.
fn check_place(kind: Kind, path: &Path) -> Result<(), FileError> {
    let read = |source| FileError::unreadable(kind, path, source);
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
            return Err(FileError::new(format!(
                "the {} {} could be replaced by other users, who may write to {} (owner {owner}, mode {mode:04o}): {}",
                kind.what,
                path.display(),
                dir.display(),
                place_remedy(mode)
            )));
        }
    }
    Ok(())
}
