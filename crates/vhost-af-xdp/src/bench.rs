//! The benchmarks, by the name that they had: `vhost-af-xdp bench` runs `vhost-af-xdp-bench`.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

/// The program: the one beside this one, else in PATH.
const PROGRAM: &str = "vhost-af-xdp-bench";

/// Becomes that program, with these options.
/// Errors: it is not there.
pub(crate) fn run(words: Vec<OsString>) -> anyhow::Result<()> {
    let own = std::env::current_exe().unwrap_or_default();
    let beside = Some(own.with_file_name(PROGRAM)).filter(|path| path.exists());
    let error = Command::new(beside.unwrap_or(PathBuf::from(PROGRAM)))
        .args(words)
        .exec();
    Err(anyhow::Error::new(error).context(format!(
        "cannot run {PROGRAM}: install it beside {}",
        own.display()
    )))
}

/// What completes its command lines, instead of this one.
pub(crate) fn complete(words: Vec<OsString>) -> anyhow::Result<()> {
    run(["complete", "--"]
        .map(OsString::from)
        .into_iter()
        .chain(words)
        .collect())
}

/// Of a command line that is to be completed, the words of that program: behind its own name, or behind `bench`.
pub(crate) fn words_of(words: &[String]) -> Option<Vec<OsString>> {
    let behind = match words {
        [program, behind @ ..] if program.ends_with(PROGRAM) => behind,
        [_, command, behind @ ..] if command == "bench" && !behind.is_empty() => behind,
        _ => return None,
    };
    let words = [PROGRAM].into_iter().chain(behind.iter().map(String::as_str));
    Some(words.map(OsString::from).collect())
}
