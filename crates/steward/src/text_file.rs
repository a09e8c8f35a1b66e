//! Files by which an operator says what a privileged process does: read only where nobody else can change them, replace
//! them, or keep the reader waiting with them; and how their mistakes are told, by line.

use std::fs;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// What a file is for, in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// What it is, as in "the policy".
    pub what: &'static str,
    /// Who reads it, as in "the steward".
    pub reader: &'static str,
    /// What shows how one is written.
    pub example: &'static str,
    /// The option that names it.
    pub option: &'static str,
}

/// Why a file cannot be used.
///
/// `path` is the file's, as given. `owner` is the number of the user who owns what others can change, and `mode` its
/// permission bits. `line` is counted from 1, `what` is the mistake in words.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum FileError {
    /// Not readable.
    #[error("cannot read the {} {}{}", .kind.what, .path.display(), read_remedy(.kind, .source))]
    Read {
        kind: Kind,
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Others could change it.
    #[error(
        "the {} {} can be changed by others (owner {owner}, mode {mode:04o}): it must be owned by root or by the \
         {}'s user and be writable by its owner only (`chown root PATH; chmod go-w PATH`)",
        .kind.what, .path.display(), .kind.reader
    )]
    Unsafe {
        kind: Kind,
        path: PathBuf,
        owner: u32,
        mode: u32,
    },
    /// Others could put another one in its place.
    #[error(
        "the {} {} could be replaced by others, who may write to {} (owner {owner}, mode {mode:04o}): {}",
        .kind.what, .path.display(), .dir.display(), place_remedy(*mode)
    )]
    UnsafePlace {
        kind: Kind,
        path: PathBuf,
        /// The directory.
        dir: PathBuf,
        owner: u32,
        mode: u32,
    },
    /// Not TOML, not of this form, or something that cannot be.
    #[error("{}{}: {what}", .path.display(), .line.map_or_else(String::new, |line| format!(" line {line}")))]
    Syntax {
        path: PathBuf,
        line: Option<usize>,
        what: String,
    },
}

/// What to do about a directory that others may write to. The mode of a shared one (sticky, as /tmp) must not change.
fn place_remedy(mode: u32) -> &'static str {
    match mode & 0o1000 {
        0 => "move it, or `chown root PATH; chmod go-w PATH` for that directory",
        _ => "move it, for example to /etc/vhost-af-xdp",
    }
}

/// What to do about a file that cannot be read.
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
    let wrong = |source| FileError::Read {
        kind,
        path: path.to_owned(),
        source,
    };
    // A FIFO would keep us waiting for somebody who writes to it, and with us all who wait for us.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let opened = fs::OpenOptions::new().read(true).custom_flags(flags).open(path);
    let file = opened.map_err(wrong)?;
    let metadata = file.metadata().map_err(wrong)?;
    if !metadata.is_file() {
        return Err(wrong(io::Error::other("it is not a regular file")));
    }
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    if !is_trusted(owner) || mode & 0o022 != 0 {
        return Err(FileError::Unsafe {
            kind,
            path: path.to_owned(),
            owner,
            mode,
        });
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

/// Whether files of this user may say what we do.
fn is_trusted(owner: u32) -> bool {
    owner == 0 || owner == rustix::process::geteuid().as_raw()
}

/// Whether nobody else can put another file in the place of this one: its directory must be writable for its owner
/// only, those above at least sticky.
fn check_place(kind: Kind, path: &Path) -> Result<(), FileError> {
    let read = |source| FileError::Read {
        kind,
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
            return Err(FileError::UnsafePlace {
                kind,
                path: path.to_owned(),
                dir,
                owner,
                mode,
            });
        }
    }
    Ok(())
}

/// In which line of a text a place is, counted from 1.
#[must_use]
pub fn line_of(text: &str, at: usize) -> usize {
    1 + text[..at].matches('\n').count()
}

/// What the parser said of a place, after the line that is written there.
#[must_use]
pub fn quoted(text: &str, place: Option<Range<usize>>, said: &str) -> String {
    let said = did_you_mean(said).unwrap_or_else(|| said.replace('\n', " "));
    let Some(place) = place else {
        return said;
    };
    let from = text[..place.start].rfind('\n').map_or(0, |at| at + 1);
    match text[from..].lines().next().map(str::trim) {
        Some(line) if !line.is_empty() => {
            let said = unquoted(line).unwrap_or(said);
            format!("`{}`: {said}", cut(line))
        }
        _ => said,
    }
}

/// What to do about a line whose value is text without quotes: a MAC address, a range, a size, a path, a name.
fn unquoted(line: &str) -> Option<String> {
    let (key, value) = line.split_once('=')?;
    let (key, value) = (key.trim(), value.split('#').next().unwrap_or_default().trim());
    let is_text = value.starts_with(|c: char| c.is_alphanumeric() || "/-_.+".contains(c))
        && !value.contains(['"', '\'', '[', ']', '{', '}', ',']);
    let is_value = toml::from_str::<toml::Table>(&format!("value = {}", value.to_lowercase())).is_ok();
    (is_text && !is_value && !key.contains(' ')).then(|| format!("put text in quotes: {key} = \"{value}\""))
}

/// The name that was meant, in the place of all that serde lists.
fn did_you_mean(said: &str) -> Option<String> {
    let (word, names) = said
        .strip_prefix("unknown field `")?
        .split_once("`, expected one of ")?;
    let names = names.split(", ").map(|name| name.trim_matches(['`', '\n']));
    Some(format!(
        "unknown key {word:?}: did you mean {:?}?",
        nearest(word, names)?
    ))
}

/// The name that somebody may have meant who gave `word`: one that has it as a part, or else one that differs in a few
/// letters.
pub fn nearest<'a>(word: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_lowercase().replace('_', "-");
    let far = |name: &str| {
        let is_part = name.starts_with(&format!("{word}-")) || name.ends_with(&format!("-{word}"));
        match is_part {
            true => 0,
            false => strsim::osa_distance(&word, name),
        }
    };
    let near = names
        .map(|name| (far(name), name))
        .filter(|(far, _)| *far <= word.len() / 3);
    near.min_by_key(|(far, _)| *far).map(|(_, name)| name)
}

/// The beginning of what is too long to be repeated.
#[must_use]
pub fn cut(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_without_quotes_is_quoted_for_the_user() {
        for (line, wanted) in [
            ("mac = 52:54:00:00:00:01", "mac = \"52:54:00:00:00:01\""),
            ("vlan=100,200", "TOML's"),
            ("vlan = 100-102 # two", "vlan = \"100-102\""),
            ("socket-path = /run/vm1.sock", "socket-path = \"/run/vm1.sock\""),
            ("max-memory = 2GiB", "max-memory = \"2GiB\""),
            ("isolated = True", "TOML's"),
            ("queues = 2", "TOML's"),
            ("mac = \"52:54", "TOML's"),
        ] {
            let said = quoted(line, Some(0..1), "TOML's");
            assert!(said.contains(wanted), "{line}: {said}");
        }
    }

    #[test]
    fn key_that_was_meant_is_named() {
        let names = [
            "socket-path",
            "socket-owner",
            "force-copy",
            "force-zero-copy",
            "queues",
            "vlan",
        ];
        let nearest = |word| nearest(word, names.into_iter());
        assert_eq!(nearest("zero-copy"), Some("force-zero-copy"));
        assert_eq!(nearest("socket"), Some("socket-path"));
        assert_eq!(nearest("socket_path"), Some("socket-path"));
        assert_eq!(nearest("qeues"), Some("queues"));
        assert_eq!(nearest("vlans"), Some("vlan"));
        assert_eq!(nearest("bridge"), None);
        let said = "unknown field `quees`, expected one of `user`, `queues`\n";
        assert_eq!(
            quoted("", None, said),
            "unknown key \"quees\": did you mean \"queues\"?"
        );
    }
}
