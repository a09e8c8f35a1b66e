//! Completes command lines for a shell: the hidden command `complete`.
//!
//! Theory of operation. The shells' scripts (crate `manual`) pass the words up to the cursor, and offer the lines that
//! this prints: `WORD<tab>DESCRIPTION`. What can follow is read from the definition of the command line itself, by
//! clap_complete. What an option takes is known by the name of its value: `IFNAME` is an interface of this network
//! namespace, a path is looked up, `KEY=VALUE` is completed by the keys of a table. Names of ports and networks are
//! those of the running daemons.

use std::ffi::{OsStr, OsString};
use std::{env, fs};

use clap::{Arg, Args, Command, ValueHint};
use clap_complete::engine::{self, ArgValueCandidates, ArgValueCompleter, CompletionCandidate};

/// Options of the hidden command.
#[derive(Debug, Args)]
pub struct CompleteArgs {
    /// The command line up to the cursor, from the program's name on
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub words: Vec<String>,
}

/// A word that can stand at the cursor, and its description.
type Candidate = (String, String);

/// Names that only this host knows.
pub trait Names: Sync {
    /// Of the network interfaces.
    fn interfaces(&self) -> Vec<String> {
        // /proc/self/net is of this network namespace, even if /sys was mounted in another one.
        let list = fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
        let name = |line: &str| Some(line.rsplit_once(':')?.0.trim().to_owned());
        list.lines().filter_map(name).collect()
    }

    /// Of the ports of running daemons.
    fn ports(&self) -> Vec<String> {
        Vec::new()
    }

    /// Of the networks of running daemons.
    fn networks(&self) -> Vec<String> {
        Vec::new()
    }

    /// The keys that values of the argument with this ID have, as options of a command.
    fn keys(&self, _id: &str) -> Option<Command> {
        None
    }
}

/// The candidates at the cursor, one a line. `words`: those after the program's name; the last ends at the cursor.
#[must_use]
pub fn complete(command: Command, words: &[String], names: &'static dyn Names) -> String {
    let found = candidates(&mut with_names(command, names), words);
    // Options only where nothing else can follow, unless they are asked for.
    let is_option = |(word, _): &Candidate| word.starts_with('-');
    let shows_options = found.iter().all(is_option) || words.last().is_some_and(|word| word.starts_with('-'));
    let shown = found
        .into_iter()
        .filter(|found| shows_options || !is_option(found));
    shown.map(|(word, about)| format!("{word}\t{about}\n")).collect()
}

/// The candidates at the end of the last word. Names with spaces are left out: shells would have to quote them.
fn candidates(command: &mut Command, words: &[String]) -> Vec<Candidate> {
    let line = std::iter::once(OsString::from("program")).chain(words.iter().map(OsString::from));
    let directory = env::current_dir().ok();
    let found = engine::complete(command, line.collect(), words.len(), directory.as_deref());
    let candidate = |found: CompletionCandidate| {
        let help = found.get_help().map(ToString::to_string).unwrap_or_default();
        let about = help.lines().next().unwrap_or_default().to_owned();
        let word = found.get_value().to_str()?.to_owned();
        let is_plain = !word.contains(|c: char| c.is_whitespace() || c.is_control());
        is_plain.then_some((word, about))
    };
    found.into_iter().flatten().filter_map(candidate).collect()
}

/// The command, with the values that its options and words take where they are known.
fn with_names(command: Command, names: &'static dyn Names) -> Command {
    let command = command.mut_args(|arg| with_values(arg, names));
    command.mut_subcommands(|inner| with_names(inner, names))
}

fn with_values(arg: Arg, names: &'static dyn Names) -> Arg {
    let kind = arg.get_value_names().and_then(<[_]>::first);
    let kind = kind.map_or_else(String::new, ToString::to_string);
    let any_of = |list: fn(&dyn Names) -> Vec<String>| {
        let candidates = move || list(names).into_iter().map(CompletionCandidate::new).collect();
        ArgValueCandidates::new(candidates)
    };
    match (kind.as_str(), arg.get_long()) {
        ("IFNAME", _) => arg.add(any_of(|names| names.interfaces())),
        ("PORT" | "NAME", None) => arg.add(any_of(|names| names.ports())),
        ("NETWORK", None) | (_, Some("network")) => arg.add(any_of(|names| names.networks())),
        ("PATH" | "FILE" | "SOCKET", _) => arg.value_hint(ValueHint::AnyPath),
        (kind, _) => match names.keys(arg.get_id().as_str()) {
            Some(table) => {
                let table = with_names(table.disable_help_flag(true), names).mut_args(|arg| arg.hide(false));
                let is_list = kind.contains(',');
                let keys = move |current: &OsStr| keys(&table, &current.to_string_lossy(), is_list);
                arg.add(ArgValueCompleter::new(keys))
            }
            None => arg,
        },
    }
}

/// Completes a key of a table, or its value, as an option of a command. `is_list`: `current` may begin with other keys.
fn keys(table: &Command, current: &str, is_list: bool) -> Vec<CompletionCandidate> {
    let at = current
        .rfind(',')
        .filter(|_| is_list)
        .map_or(0, |comma| comma + 1);
    let (before, last) = current.split_at(at);
    let takes_value = |key: &str| {
        let mut options = table.get_arguments();
        options.any(|option| option.get_long() == Some(key) && option.get_action().takes_values())
    };
    let found = candidates(&mut table.clone(), &[format!("--{last}")]);
    let found = found.into_iter().filter_map(|(option, about)| {
        let key = option.strip_prefix("--")?;
        let equals = if takes_value(key) { "=" } else { "" };
        Some(CompletionCandidate::new(format!("{before}{key}{equals}")).help(Some(about.into())))
    });
    found.collect()
}
