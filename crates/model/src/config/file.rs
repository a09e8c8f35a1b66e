//! The configuration file: TOML with `[daemon]`, `[network.NAME]` and `[port.NAME]`.
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
//! An entry stores the line of each of its keys, so that an error that is found later is reported with its line, too.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Number, Value};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::table::{Mistake, Table};
use super::{Daemon, Network, Port};
use crate::mistakes::{cut, line_of, quoted};

/// In error messages: the source of an entry that is in no file.
pub const ADDED: &str = "added by the API";

/// Longest name of a port or network, bytes.
const LONGEST_NAME: usize = 32;

/// A table of a file, or one that a client added at run time.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Entry<T> {
    /// Name of the port or network; empty for `[daemon]`.
    pub name: String,
    /// Its keys with their values.
    pub value: T,
    /// The line in which it begins, counted from 1; 0: it is in no file.
    pub line: usize,
    /// The line of each key.
    key_lines: BTreeMap<String, usize>,
}

impl<T: Table> Entry<T> {
    /// An entry that is in no file.
    pub fn of_no_file(name: &str, value: T) -> Self {
        Self {
            name: name.to_owned(),
            value,
            line: 0,
            key_lines: BTreeMap::new(),
        }
    }

    /// Names of keys whose values differ.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Vec<String> {
        self.value.differences(&other.value)
    }

    /// The first key of the table that this text (an error message) names.
    #[must_use]
    pub fn named_by(&self, text: &str) -> Option<String> {
        let keys = self.value.keys();
        let is_of_none = |c: char| !(c.is_ascii_alphanumeric() || c == '-');
        let mut words = text.split(is_of_none).map(|word| word.trim_start_matches('-'));
        words.find(|word| keys.contains_key(*word)).map(str::to_owned)
    }

    /// The line of the first of its keys that this text names, else of the table.
    #[must_use]
    pub fn line_of(&self, text: &str) -> usize {
        let line = self
            .named_by(text)
            .and_then(|key| self.key_lines.get(&key).copied());
        line.unwrap_or(self.line)
    }
}

/// Networks and ports.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Tables {
    /// `[network.NAME]`.
    pub networks: Vec<Entry<Network>>,
    /// `[port.NAME]`.
    pub ports: Vec<Entry<Port>>,
}

impl Tables {
    /// This table alone, if there is one.
    pub fn of<T: NamedTable>(table: Option<Entry<T>>) -> Self {
        let mut tables = Self::default();
        T::of_mut(&mut tables).extend(table);
        tables
    }
}

/// Kinds of tables that have names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TableKind {
    /// `[port.NAME]`.
    #[default]
    Port,
    /// `[network.NAME]`.
    Network,
}

impl fmt::Display for TableKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Port => "port",
            Self::Network => "network",
        })
    }
}

/// A table that has a name.
pub trait NamedTable: Table + 'static {
    /// Its kind.
    const KIND: TableKind;

    /// The tables of this kind.
    fn of(tables: &Tables) -> &Vec<Entry<Self>>;

    /// The tables of this kind, mutable.
    fn of_mut(tables: &mut Tables) -> &mut Vec<Entry<Self>>;

    /// Makes an entry that is in no file; a key whose value is null is not set.
    ///
    /// # Errors
    /// A name is not possible, a key is unknown, or its value is not possible.
    fn named(name: &str, keys: &Map<String, Value>) -> Result<Entry<Self>, Mistake> {
        if !is_name(name) {
            let what = format!("{} {name:?}: {}", Self::KIND, name_rule());
            return Err(Mistake::of_no_key(what));
        }
        Ok(Entry::of_no_file(name, Self::read(keys.clone())?))
    }
}

impl NamedTable for Port {
    const KIND: TableKind = TableKind::Port;

    fn of(tables: &Tables) -> &Vec<Entry<Self>> {
        &tables.ports
    }

    fn of_mut(tables: &mut Tables) -> &mut Vec<Entry<Self>> {
        &mut tables.ports
    }
}

impl NamedTable for Network {
    const KIND: TableKind = TableKind::Network;

    fn of(tables: &Tables) -> &Vec<Entry<Self>> {
        &tables.networks
    }

    fn of_mut(tables: &mut Tables) -> &mut Vec<Entry<Self>> {
        &mut tables.networks
    }
}

/// A configuration file, and the tables that clients added at run time.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ConfigFile {
    /// Absolute path of the file.
    pub path: PathBuf,
    /// `[daemon]`.
    pub daemon: Entry<Daemon>,
    /// Tables of the file, in its order.
    pub tables: Tables,
    /// Tables that clients added at run time.
    pub added: Tables,
    /// Those that were added and are not possible together with the others: a later file may allow them.
    pub left_out: Tables,
}

/// What is wrong with a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongLine {
    /// Counted from 1.
    pub line: Option<usize>,
    /// In one sentence.
    pub what: String,
}

impl ConfigFile {
    /// All entries of a kind: first those of the file, then those added at run time.
    pub fn all<T: NamedTable>(&self) -> impl Iterator<Item = &Entry<T>> {
        T::of(&self.tables).iter().chain(T::of(&self.added))
    }

    /// Adds a table that is in no file, or replaces the added one of its name.
    pub fn put<T: NamedTable>(&mut self, table: Entry<T>) {
        T::of_mut(&mut self.left_out).retain(|other| other.name != table.name);
        let added = T::of_mut(&mut self.added);
        match added.iter_mut().find(|other| other.name == table.name) {
            Some(known) => *known = table,
            None => added.push(table),
        }
    }

    /// Removes the added table of that name.
    pub fn remove<T: NamedTable>(&mut self, name: &str) {
        for tables in [&mut self.added, &mut self.left_out] {
            T::of_mut(tables).retain(|table| table.name != name);
        }
    }

    /// Keeps a table for the next start only, instead of the added one of its name.
    pub fn leave_out<T: NamedTable>(&mut self, table: Entry<T>) {
        self.remove::<T>(&table.name);
        T::of_mut(&mut self.left_out).push(table);
    }

    /// The start of an error message about this table: file, line of the key that `text` names, kind and name.
    #[must_use]
    pub fn place_of<T: NamedTable>(&self, table: &Entry<T>, text: &str) -> String {
        let (kind, name) = (T::KIND, &table.name);
        match table.line_of(text) {
            0 => format!("{ADDED}: {kind} {name}"),
            line => format!("{} line {line}: {kind} {name}", self.path.display()),
        }
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// [`WrongLine`]: the text is not TOML, a key is unknown, or its value is not possible.
    pub fn parse(path: &Path, text: &str) -> Result<Self, WrongLine> {
        let tables = tables(text)?;
        let mut file = Self {
            path: path.to_owned(),
            ..Self::default()
        };
        for (key, value) in tables.get_ref() {
            let wrong = |what: String| wrong_at(text, &key.span(), what);
            match (key.get_ref().as_ref(), value.get_ref()) {
                ("daemon", DeValue::Table(table)) => file.daemon = entry(text, "", key.span(), table)?,
                ("port", DeValue::Table(tables)) => file.tables.ports = entries(text, tables)?,
                ("network", DeValue::Table(tables)) => file.tables.networks = entries(text, tables)?,
                ("daemon", _) => {
                    return Err(wrong(
                        "daemon: give keys and values below a line `[daemon]`".to_owned(),
                    ));
                }
                (kind @ ("port" | "network"), _) => {
                    return Err(wrong(format!(
                        "{kind}: a {kind} begins with a line `[{kind}.NAME]`"
                    )));
                }
                (other, _) => {
                    let tables = "[daemon], [network.NAME], [port.NAME]";
                    return Err(wrong(format!("unknown table {other:?}: one of {tables}")));
                }
            }
        }
        Ok(file)
    }
}

/// Parses a text as TOML.
pub(crate) fn tables(text: &str) -> Result<Spanned<DeTable<'_>>, WrongLine> {
    DeTable::parse(text).map_err(|error| WrongLine {
        line: error.span().map(|place| line_of(text, place.start)),
        what: quoted(text, error.span(), error.message()),
    })
}

pub(crate) fn wrong_at(text: &str, place: &Range<usize>, what: String) -> WrongLine {
    let line = Some(line_of(text, place.start));
    WrongLine { line, what }
}

/// The entries of a kind, in the order of the file.
fn entries<T: NamedTable>(text: &str, tables: &DeTable<'_>) -> Result<Vec<Entry<T>>, WrongLine> {
    let (kind, mut found) = (T::KIND, Vec::new());
    for (name, value) in tables {
        let called = name.get_ref().as_ref();
        let wrong = |what: String| wrong_at(text, &name.span(), what);
        let DeValue::Table(table) = value.get_ref() else {
            return Err(wrong(format!(
                "{kind}.{called}: a {kind} begins with a line `[{kind}.NAME]`"
            )));
        };
        if !is_name(called) {
            return Err(wrong(format!("{kind} {called:?}: {}", name_rule())));
        }
        found.push(
            entry(text, called, name.span(), table).map_err(|error: WrongLine| WrongLine {
                what: format!("{kind} {called}: {}", error.what),
                ..error
            })?,
        );
    }
    found.sort_by_key(|entry: &Entry<T>| entry.line);
    Ok(found)
}

pub(crate) fn entry<T: Table>(
    text: &str,
    name: &str,
    place: Range<usize>,
    table: &DeTable<'_>,
) -> Result<Entry<T>, WrongLine> {
    let keys: Map<String, Value> = table
        .iter()
        .map(|(key, value)| (key.get_ref().as_ref().to_owned(), json(value.get_ref())))
        .collect();
    let value = T::read(keys).map_err(|mistake| WrongLine {
        line: Some(line_of(
            text,
            place_of(table, &mistake).unwrap_or(place.clone()).start,
        )),
        what: as_written(text, table, mistake),
    })?;
    let lines = table.iter().map(|(key, _)| {
        let line = line_of(text, key.span().start);
        (key.get_ref().as_ref().to_owned(), line)
    });
    Ok(Entry {
        name: name.to_owned(),
        value,
        line: line_of(text, place.start),
        key_lines: lines.collect(),
    })
}

/// The message of a mistake, with the value as the file writes it, which can differ from its JSON.
fn as_written(text: &str, table: &DeTable<'_>, mistake: Mistake) -> String {
    let Some(key) = &mistake.key else {
        return mistake.what;
    };
    let value = table
        .iter()
        .find(|(known, _)| known.get_ref() == key.as_str())
        .map(|(_, value)| value);
    let (Some(value), Some((_, reason))) = (value, mistake.what.split_once(": ")) else {
        return mistake.what;
    };
    let first = text[value.span()].lines().next().unwrap_or_default();
    match mistake.number.is_none() && mistake.what.starts_with(&format!("{key} = ")) {
        true => format!("{key} = {}: {reason}", cut(first.trim_end())),
        false => mistake.what,
    }
}

/// Position in the file of the value that a mistake is about.
fn place_of(table: &DeTable<'_>, mistake: &Mistake) -> Option<Range<usize>> {
    let (key, value) = find(table, mistake.key.as_deref()?)?;
    let list = value.get_ref().as_array();
    let element = list.and_then(|list| list.get(mistake.number?.checked_sub(1)?));
    let Some(element) = element else { return Some(key) };
    let inner = element.get_ref().as_table();
    // `Rule::check` reports no inner key: its message begins with the key's name.
    let named = mistake.inner_key.as_deref().or_else(|| {
        let what = mistake.what.split_once(": ")?.1;
        Some(what.split([':', ' ']).next().unwrap_or_default())
    });
    let inner = inner.and_then(|keys| find(keys, named?));
    Some(inner.map_or_else(|| element.span(), |(key, _)| key))
}

fn find<'a>(table: &'a DeTable<'_>, name: &str) -> Option<(Range<usize>, &'a Spanned<DeValue<'a>>)> {
    let (key, value) = table.iter().find(|(key, _)| key.get_ref() == name)?;
    Some((key.span(), value))
}

/// Converts a TOML value to JSON.
fn json(value: &DeValue<'_>) -> Value {
    match value {
        DeValue::Boolean(on) => Value::Bool(*on),
        DeValue::Integer(number) => {
            let number = i64::from_str_radix(number.as_str(), number.radix());
            number.map_or_else(
                |_| Value::String("a number that is too large".to_owned()),
                Value::from,
            )
        }
        DeValue::String(text) => Value::String(text.to_string()),
        // JSON has no `nan` and `inf`: as text they are rejected where a number is expected.
        DeValue::Float(number) => {
            let finite = number.as_str().parse().ok().and_then(Number::from_f64);
            finite.map_or_else(|| Value::String(number.as_str().to_owned()), Value::Number)
        }
        DeValue::Datetime(time) => Value::String(time.to_string()),
        DeValue::Array(list) => list.iter().map(|value| json(value.get_ref())).collect(),
        DeValue::Table(table) => {
            let entries = table.iter();
            let entries =
                entries.map(|(key, value)| (key.get_ref().as_ref().to_owned(), json(value.get_ref())));
            Value::Object(entries.collect())
        }
    }
}

/// The rule for names, for error messages.
#[must_use]
pub fn name_rule() -> String {
    format!(
        "a name has 1 to {LONGEST_NAME} letters, digits, `-`, `_` or `.`, and begins with a letter or a digit"
    )
}

/// Whether a port or network can have this name.
#[must_use]
pub fn is_name(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=LONGEST_NAME).contains(&name.len())
        && name.chars().all(is_part)
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
}
