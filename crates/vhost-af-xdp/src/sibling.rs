//! Separate programs that are commands of this one, too: `vhost-af-xdp bench` and `vhost-af-xdp top` run
//! `vhost-af-xdp-bench` and `vhost-af-xdp-top`. So this program need not link their dependencies.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

fn program(command: &str) -> String {
    format!("vhost-af-xdp-{command}")
}

/// Replaces this process by the program of a command: that in the directory of this one, else that in PATH.
/// Errors: there is no such program.
pub(crate) fn run(command: &str, options: Vec<OsString>) -> anyhow::Result<()> {
    let program = program(command);
    let own = std::env::current_exe().unwrap_or_default();
    let neighbour = Some(own.with_file_name(&program)).filter(|path| path.exists());
    let error = Command::new(neighbour.unwrap_or(PathBuf::from(&program)))
        .args(options)
        .exec();
    Err(anyhow::Error::new(error).context(format!(
        "cannot run {program}: install it beside {}",
        own.display()
    )))
}

/// If the command line to complete belongs to the benchmarks, returns the options with which their program completes
/// it. Such a command line starts with the name of that program, or with ours and `bench`.
pub(crate) fn completion_of_bench(words: &[String]) -> Option<Vec<OsString>> {
    let program = program("bench");
    let rest = match words {
        [first, rest @ ..] if first.ends_with(&program) => rest,
        [_, command, rest @ ..] if command == "bench" && !rest.is_empty() => rest,
        _ => return None,
    };
    let options = ["complete", "--", &program]
        .into_iter()
        .chain(rest.iter().map(String::as_str));
    Some(options.map(OsString::from).collect())
}
