//! Completes command lines for a shell: the hidden command `complete`.
//!
//! Theory of operation. The shells' scripts (crate `manual`) pass the words up to the cursor, and offer the lines that
//! this prints: `WORD<tab>DESCRIPTION`. What can follow is read from the definition of the command line itself. What
//! an option takes is known by the name of its value: `IFNAME` is an interface of this network namespace, a path is
//! looked up, `KEY=VALUE` is completed by the keys of a table. Names of ports and networks are those of the running
//! daemons.

use std::fs;

use clap::{Arg, ArgAction, Args, Command};

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
pub trait Names {
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
pub fn complete(mut command: Command, words: &[String], names: &dyn Names) -> String {
    let [words @ .., current] = words else {
        return String::new();
    };
    command.build();
    let found = candidates(&command, words, current, names);
    let line = |(word, about): Candidate| format!("{word}\t{about}\n");
    found.into_iter().map(line).collect()
}

fn candidates(command: &Command, words: &[String], current: &str, names: &dyn Names) -> Vec<Candidate> {
    let (mut command, mut option, mut position) = (command, None, 0);
    for word in words {
        if option.take().is_some() {
            continue;
        }
        if word.starts_with('-') {
            let named = command.get_arguments().find(|arg| is_named(arg, word));
            option = named.filter(|arg| needs_value(arg));
        } else if let Some(inner) = command.find_subcommand(word) {
            (command, position) = (inner, 0);
        } else {
            position += 1;
        }
    }
    if let Some(option) = option {
        return values(option, current, names);
    }
    if let Some((name, value)) = current.split_once('=').filter(|_| current.starts_with("--")) {
        let named = command.get_arguments().find(|arg| is_named(arg, name));
        let values = named.map_or_else(Vec::new, |arg| values(arg, value, names));
        return behind(&format!("{name}="), values);
    }
    if current.starts_with('-') {
        return starting_with(current, options(command));
    }
    let inner = command.get_subcommands().filter(|inner| !inner.is_hide_set());
    let inner = inner.map(|inner| (inner.get_name().to_owned(), first_line(inner.get_about())));
    let mut found = starting_with(current, inner);
    let mut places = command.get_positionals();
    if let Some(place) = places.nth(position).or_else(|| command.get_positionals().last()) {
        let is_repeated = matches!(place.get_action(), ArgAction::Append);
        if position < command.get_positionals().count() || is_repeated {
            found.extend(values(place, current, names));
        }
    }
    // Where nothing else can follow, a lone Tab shows the options.
    if found.is_empty() {
        found = starting_with(current, options(command));
    }
    found
}

fn is_named(arg: &Arg, word: &str) -> bool {
    let long = arg
        .get_long()
        .is_some_and(|long| word.strip_prefix("--") == Some(long));
    let short = arg
        .get_short()
        .is_some_and(|short| word.strip_prefix('-') == Some(short.to_string().as_str()));
    long || short
}

fn needs_value(arg: &Arg) -> bool {
    arg.get_num_args().is_some_and(|count| count.min_values() > 0)
}

fn options(command: &Command) -> impl Iterator<Item = Candidate> {
    let shown = command.get_arguments().filter(|arg| !arg.is_hide_set());
    shown.filter_map(|arg| Some((format!("--{}", arg.get_long()?), first_line(arg.get_help()))))
}

/// What an option, a word or a key takes, as far as that is known.
fn values(arg: &Arg, current: &str, names: &dyn Names) -> Vec<Candidate> {
    let possible = arg.get_possible_values();
    if !possible.is_empty() {
        let possible = possible.iter().filter(|value| !value.is_hide_set());
        let possible = possible.map(|value| (value.get_name().to_owned(), first_line(value.get_help())));
        return starting_with(current, possible);
    }
    let kind = arg.get_value_names().and_then(<[_]>::first);
    let plain = |names: Vec<String>| {
        let names = names.into_iter().map(|name| (name, String::new()));
        starting_with(current, names)
    };
    match (kind.map_or("", |kind| kind.as_str()), arg.get_long()) {
        ("IFNAME", _) => plain(names.interfaces()),
        ("PORT" | "NAME", None) => plain(names.ports()),
        ("NETWORK", None) | (_, Some("network")) => plain(names.networks()),
        ("PATH" | "FILE" | "SOCKET", _) => paths(current),
        ("BOOL", _) => plain(vec!["true".to_owned(), "false".to_owned()]),
        (name, _) => {
            let (before, last) = match current.rsplit_once(',') {
                Some((before, last)) if name.contains(',') => (format!("{before},"), last),
                _ => (String::new(), current),
            };
            let keys = names
                .keys(arg.get_id().as_str())
                .map(|table| keys(table, last, names));
            behind(&before, keys.unwrap_or_default())
        }
    }
}

/// Keys of a table, and their values.
fn keys(mut table: Command, current: &str, names: &dyn Names) -> Vec<Candidate> {
    table.build();
    let known = |arg: &&Arg| arg.get_long().is_some_and(|long| long != "help");
    match current.split_once('=') {
        None => {
            let keys = table.get_arguments().filter(known).map(|arg| {
                let equals = if needs_value(arg) { "=" } else { "" };
                let key = arg.get_long().unwrap_or_default();
                (format!("{key}{equals}"), first_line(arg.get_help()))
            });
            starting_with(current, keys)
        }
        Some((key, value)) => {
            let named = table
                .get_arguments()
                .filter(known)
                .find(|arg| arg.get_long() == Some(key));
            let values = named.map_or_else(Vec::new, |arg| values(arg, value, names));
            behind(&format!("{key}="), values)
        }
    }
}

/// Files and directories that begin so; `/` ends a directory. Names with spaces are left out: shells would have to
/// quote them.
fn paths(current: &str) -> Vec<Candidate> {
    let (directory, begun) = current
        .rsplit_once('/')
        .map_or(("", current), |(directory, name)| {
            (&current[..=directory.len()], name)
        });
    let entries = fs::read_dir(if directory.is_empty() { "." } else { directory });
    let entries = entries.into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let is_shown = begun.starts_with('.') || !name.starts_with('.');
        let is_plain = !name.contains(|c: char| c.is_whitespace() || c.is_control());
        let end = if entry.path().is_dir() { "/" } else { "" };
        (is_shown && is_plain).then(|| (format!("{directory}{name}{end}"), String::new()))
    });
    let mut found = starting_with(current, entries);
    found.sort_unstable();
    found
}

fn starting_with(current: &str, all: impl Iterator<Item = Candidate>) -> Vec<Candidate> {
    all.filter(|(word, _)| word.starts_with(current)).collect()
}

fn behind(before: &str, values: Vec<Candidate>) -> Vec<Candidate> {
    let put = |(value, about): Candidate| (format!("{before}{value}"), about);
    values.into_iter().map(put).collect()
}

fn first_line(help: Option<&clap::builder::StyledStr>) -> String {
    let help = help.map(ToString::to_string).unwrap_or_default();
    help.lines().next().unwrap_or_default().to_owned()
}
