//! The configuration file of `serve --config`: TOML, whose tables become the same options that the command line has.
//!
//! ```toml
//! [daemon]
//! workers = 2
//!
//! [port.vm1]
//! socket-path = "/run/vhost-af-xdp/vm1.sock"
//! ifname = "eth1"
//! ```
//!
//! A value is written as TOML has it (numbers, true and false, lists), and turned into the option's words: what they
//! mean, and what is allowed, is said there. Keys that are not known are an error, so that a misspelt one is not taken
//! for none.

use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use steward::text_file::{self, FileError, Kind, cut, line_of, quoted};
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use super::daemon::DaemonArgs;
use super::filter::{WrongRule, rules_in_words};
use super::keys::{Keys, Takes, Written, unknown_key, without_dashes, words_of};
use super::network::NetworkArgs;
use super::port::PortTableArgs;
use crate::config::file::{ADDED, ConfigFile, Said, Table};
use crate::config::{Endpoint, NetworkConfig, PortConfig, ServeConfig, Wrong};
use crate::guard::keeper::Judge;

/// Where a configuration comes from.
const FILE: Kind = Kind {
    what: "configuration",
    reader: "daemon",
    example: "docs/deploy/vhost-af-xdp.toml",
    option: "--config",
};
/// Longest one, bytes: a thousand filter rules for each of 64 ports, as tables, and more.
const LONGEST: u64 = 16 << 20;

/// The one key that is no option.
const DIRECTORIES: &str = "socket-directories";

/// Longest name of a port, bytes.
const LONGEST_NAME: usize = 32;

/// Reads a file.
/// Errors: it cannot be read, others could change it, or it has other keys, or other kinds of values, than are known.
pub(crate) fn read(path: &Path) -> anyhow::Result<ConfigFile> {
    let path = std::path::absolute(path)?;
    Ok(parse(&path, &text_file::read(FILE, &path, LONGEST)?)?)
}

/// For the keeper.
pub(crate) const JUDGE: Judge = Judge { read, judge };

/// The configuration that a file means by itself.
/// Errors: [`FileError`], naming line and key.
fn judge(file: ConfigFile) -> Result<ServeConfig, FileError> {
    configured(file, DaemonArgs::default())
}

/// The configuration that a file means, with what the command line says of the daemon.
/// Errors: [`FileError`], naming line and key.
pub(crate) fn configured(file: ConfigFile, said: DaemonArgs) -> Result<ServeConfig, FileError> {
    let mut file = file;
    // Which the file names now is the file's.
    let of_file = |table: &Table| file.ports.iter().any(|port| port.name == table.name);
    let added = file.added.iter().filter(|table| !of_file(table)).cloned();
    file.added = added.collect();
    let count = file.all_ports().count();
    let mut ports = Vec::new();
    for table in file.ports.iter_mut().chain(&mut file.added) {
        let port = build_port(&file.path, table, count)?;
        with_numbers(table, &port);
        ports.push(port);
    }
    let mut networks = Vec::new();
    for table in &file.networks {
        networks.push(build_network(&file.path, table)?);
    }
    let wrong = |table: &Table, what: &str| wrong_in(&file.path, table, what);
    let daemon = Keys::of::<DaemonArgs>().read(&file.daemon);
    let daemon: DaemonArgs = daemon.map_err(|what| wrong(&file.daemon, &what))?;
    let built = said.or(daemon).build(ports);
    let built = built.map_err(|error| wrong(&file.daemon, &format!("{error:#}")))?;
    let built = ServeConfig { networks, ..built };
    built.check().map_err(|Wrong { port, error }| {
        let table = port
            .and_then(|port| file.all_ports().nth(port))
            .unwrap_or(&file.daemon);
        wrong(table, &error.to_string())
    })?;
    Ok(ServeConfig {
        file: Some(file),
        ..built
    })
}

/// The configuration of a network of a file.
/// Errors: [`FileError`], naming line and key.
pub(crate) fn build_network(path: &Path, table: &Table) -> Result<NetworkConfig, FileError> {
    let args = Keys::of::<NetworkArgs>().read::<NetworkArgs>(table);
    let built = args.and_then(|args| args.build(&table.name).map_err(|error| format!("{error:#}")));
    built.map_err(|what| {
        let wrong = wrong_in(path, table, &what);
        match wrong {
            FileError::Syntax { path, line, what } => FileError::Syntax {
                path,
                line,
                what: what.replacen("port ", "network ", 1),
            },
            other => other,
        }
    })
}

/// The configuration of a port of a file that has so many.
/// Errors: [`FileError`], naming line and key.
pub(crate) fn build_port(path: &Path, table: &Table, ports: usize) -> Result<PortConfig, FileError> {
    let args = PortTableArgs::keys().read::<PortTableArgs>(table);
    let args = args.and_then(|args| check_own_queue(table).map(|()| args));
    let built = args.and_then(|args| args.build(ports).map_err(|error| format!("{error:#}")));
    let built = built.and_then(|port| {
        check_path(&port.endpoint)?;
        Ok(port)
    });
    let port = built.map_err(|what| wrong_in(path, table, &what))?;
    Ok(PortConfig {
        name: table.name.as_str().into(),
        ..port
    })
}

/// What says how a port has queues of its own means nothing where it has those of a network, and who says it expects
/// some.
fn check_own_queue(table: &Table) -> Result<(), String> {
    if table.get("network").is_none() || table.get("ifname").is_some() {
        return Ok(());
    }
    let of_a_queue = ["start-queue", "mode", "force-copy", "force-zero-copy"];
    let is_said = |key: &&str| table.get(key).is_some_and(|value| value != "false");
    match of_a_queue.into_iter().find(is_said) {
        Some(key) => Err(format!(
            "{key}: the queues are the network's: name the uplink by ifname for one of the port's own, or leave it out"
        )),
        None => Ok(()),
    }
}

/// A file is read again from wherever the daemon is, and its sockets are made in directories that were named.
fn check_path(endpoint: &Endpoint) -> Result<(), String> {
    let (Endpoint::Server(path) | Endpoint::Client(path)) = endpoint else {
        return Ok(());
    };
    is_plain(path).then_some(()).ok_or_else(|| {
        format!(
            "socket-path = {:?}: give an absolute path without `..`",
            path.display().to_string()
        )
    })
}

fn is_plain(path: &Path) -> bool {
    path.is_absolute() && !path.components().any(|part| part == Component::ParentDir)
}

/// Writes numbers where names of users and groups were: they are known for sure only outside of the sandbox.
fn with_numbers(table: &mut Table, port: &PortConfig) {
    let numbers = [
        ("socket-owner", port.access.owner),
        ("socket-group", port.access.group),
    ];
    for (key, number) in numbers {
        if let (Some(said), Some(number)) = (table.keys.get_mut(key), number) {
            said.value = number.to_string();
        }
    }
}

/// A mistake of a table, in the line of the key that the words name.
fn wrong_in(path: &Path, table: &Table, what: &str) -> FileError {
    let of = match table.name.as_str() {
        "" => "[daemon]".to_owned(),
        name => format!("port {name}"),
    };
    let line = Some(table.line_of(what)).filter(|&line| line > 0 || table.name.is_empty());
    FileError::Syntax {
        path: line.map_or(Path::new(ADDED), |_| path).to_owned(),
        line,
        what: format!("{of}: {}", without_dashes(what)),
    }
}

/// What a file's text has.
/// Errors: [`FileError`], naming line and key.
pub(crate) fn parse(path: &Path, text: &str) -> Result<ConfigFile, FileError> {
    let reader = Reader { path, text };
    let tables = DeTable::parse(text).map_err(|error| {
        let what = quoted(text, error.span(), error.message());
        reader.wrong(error.span(), what)
    })?;
    let mut file = ConfigFile {
        path: path.to_owned(),
        daemon: Table::default(),
        directories: Vec::new(),
        networks: Vec::new(),
        ports: Vec::new(),
        added: Vec::new(),
    };
    for (key, value) in tables.get_ref() {
        let place = Some(key.span());
        match (key.get_ref().as_ref(), value.get_ref()) {
            ("daemon", DeValue::Table(table)) => {
                let line = line_of(text, key.span().start);
                file.daemon = reader.table(&Keys::of::<DaemonArgs>(), table, "", line)?;
                file.directories = reader.directories(table)?;
            }
            ("port", DeValue::Table(ports)) => {
                file.ports = reader.tables("port", &PortTableArgs::keys(), ports)?;
            }
            ("network", DeValue::Table(networks)) => {
                file.networks = reader.tables("network", &Keys::of::<NetworkArgs>(), networks)?;
            }
            ("daemon", _) => {
                let what = "daemon: give keys and values below a line `[daemon]`".to_owned();
                return Err(reader.wrong(place, what));
            }
            (kind @ ("port" | "network"), _) => {
                let what = format!("{kind}: a {kind} begins with a line `[{kind}.NAME]`");
                return Err(reader.wrong(place, what));
            }
            (other, _) => {
                let what = format!("unknown table {other:?}: one of [daemon], [network.NAME], [port.NAME]");
                return Err(reader.wrong(place, what));
            }
        }
    }
    Ok(file)
}

/// A text that is read.
struct Reader<'a> {
    path: &'a Path,
    text: &'a str,
}

impl Reader<'_> {
    fn wrong(&self, place: Option<Range<usize>>, what: String) -> FileError {
        FileError::Syntax {
            path: self.path.to_owned(),
            line: place.map(|place| line_of(self.text, place.start)),
            what,
        }
    }

    /// Those of a kind.
    fn tables(&self, kind: &str, keys: &Keys, tables: &DeTable<'_>) -> Result<Vec<Table>, FileError> {
        let mut found = Vec::new();
        for (name, value) in tables {
            let (place, called) = (Some(name.span()), name.get_ref().as_ref());
            let DeValue::Table(table) = value.get_ref() else {
                let what = format!("{kind}.{called}: a {kind} begins with a line `[{kind}.NAME]`");
                return Err(self.wrong(place, what));
            };
            if !is_name(called) {
                let what = format!("{kind} {called:?}: {}", name_rule());
                return Err(self.wrong(place, what));
            }
            let line = line_of(self.text, name.span().start);
            found.push(self.table(keys, table, called, line)?);
        }
        found.sort_by_key(|table| table.line);
        Ok(found)
    }

    fn table(&self, keys: &Keys, table: &DeTable<'_>, name: &str, line: usize) -> Result<Table, FileError> {
        let mut read = Table {
            name: name.to_owned(),
            line,
            ..Table::default()
        };
        for (key, value) in table {
            let (place, word) = (key.span(), key.get_ref().as_ref());
            if name.is_empty() && word == DIRECTORIES {
                continue;
            }
            let Some(takes) = keys.takes(word) else {
                return Err(self.wrong(Some(place), unknown(word, keys, name)));
            };
            if takes == Takes::Rules {
                let words = rules_in_words(&Written::from(value.get_ref()));
                let words = words.map_err(|wrong| self.wrong_rule((key, value), name, &wrong))?;
                read.say_rules(word, words, line_of(self.text, place.start));
                continue;
            }
            let Some(words) = words_of(takes, &Written::from(value.get_ref())) else {
                let what = format!("{word} = {}: give {}", self.written(value), takes.meant());
                return Err(self.wrong(Some(place), what));
            };
            let said = Said {
                value: words,
                line: line_of(self.text, place.start),
            };
            read.keys.insert(word.to_owned(), said);
        }
        Ok(read)
    }

    /// What is wrong with a rule of a port, in the line of the rule's key that it begins with.
    fn wrong_rule(
        &self,
        (key, value): (&Spanned<DeString<'_>>, &Spanned<DeValue<'_>>),
        port: &str,
        wrong: &WrongRule,
    ) -> FileError {
        let list = value.get_ref().as_array();
        let rule = list.and_then(|list| list.get(wrong.number.checked_sub(1)?));
        let keys = rule.and_then(|rule| rule.get_ref().as_table());
        let named = |key: &&Spanned<DeString<'_>>| {
            let rest = wrong.what.strip_prefix(key.get_ref().as_ref());
            rest.is_some_and(|rest| rest.starts_with([' ', ':']))
        };
        let its = keys.and_then(|keys| keys.iter().map(|(key, _)| key).find(named));
        let place = its.map_or_else(|| rule.map_or(key.span(), Spanned::span), Spanned::span);
        self.wrong(Some(place), format!("port {port}: {wrong}"))
    }

    fn directories(&self, daemon: &DeTable<'_>) -> Result<Vec<PathBuf>, FileError> {
        let Some((key, value)) = daemon.iter().find(|(key, _)| key.get_ref() == DIRECTORIES) else {
            return Ok(Vec::new());
        };
        let path = |value: &Spanned<DeValue<'_>>| {
            let path = value.get_ref().as_str().map(PathBuf::from);
            path.filter(|path| is_plain(path) && path.parent().is_some())
        };
        let list = value.get_ref().as_array();
        let paths: Option<Vec<_>> = list.and_then(|list| list.iter().map(path).collect());
        paths.ok_or_else(|| {
            let what = format!(
                "{DIRECTORIES} = {}: give a list of absolute paths without `..`, in quotes, such as [\"/run/vms\"]",
                self.written(value)
            );
            self.wrong(Some(key.span()), what)
        })
    }

    /// A value, as it is written there.
    fn written(&self, value: &Spanned<DeValue<'_>>) -> String {
        let first = self.text[value.span()].lines().next().unwrap_or_default();
        cut(first.trim_end())
    }
}

/// What names are possible.
pub(super) fn name_rule() -> String {
    format!(
        "a name has 1 to {LONGEST_NAME} letters, digits, `-`, `_` or `.`, and begins with a letter or a digit"
    )
}

/// What to say of a key that is not known.
pub(super) fn unknown(key: &str, keys: &Keys, port: &str) -> String {
    let (others, place) = match port {
        "" => (PortTableArgs::keys(), "[port.NAME]"),
        _ => (Keys::of::<DaemonArgs>(), "[daemon]"),
    };
    match others.takes(key) {
        Some(_) => format!("{key} belongs below a line `{place}`"),
        None => {
            let further = port.is_empty().then_some(DIRECTORIES);
            unknown_key(key, keys.names().chain(further))
        }
    }
}

/// Whether a port, or a network, can have this name.
pub(super) fn is_name(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=LONGEST_NAME).contains(&name.len())
        && name.chars().all(is_part)
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
