//! A configuration file as it was read: tables of keys, each value in the words of the command line, with its line.
//!
//! What the words mean is said in one place for file and command line (`cli/`). Two readings of a file are compared by
//! what is written there, so that a port is left alone only if nothing that was said of it changed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Where a port's table is from that no file has, as its mistakes are told.
pub(crate) const ADDED: &str = "added by the API";

/// The key of filter rules.
pub(crate) const RULE: &str = "rule";

/// A value, as the command line would have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Said {
    pub(crate) value: String,
    /// Counted from 1; 0: it is in no file.
    pub(crate) line: usize,
}

/// A table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Table {
    /// Of the port; of `[daemon]` nothing.
    pub(crate) name: String,
    /// Where it begins; 0: in no file.
    pub(crate) line: usize,
    pub(crate) keys: BTreeMap<String, Said>,
}

impl Table {
    /// The same, as it is in no file.
    pub(crate) fn of_no_file(mut self) -> Self {
        self.line = 0;
        self.keys.values_mut().for_each(|said| said.line = 0);
        self
    }

    /// The same, but for a key.
    pub(crate) fn without(&self, key: &str) -> Self {
        let mut table = self.clone();
        table.keys.remove(key);
        table
    }

    /// Says filter rules; no rules are the same as nothing said.
    pub(crate) fn say_rules(&mut self, key: &str, value: String, line: usize) {
        if !value.is_empty() {
            self.keys.insert(key.to_owned(), Said { value, line });
        }
    }

    /// The value of a key.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.keys.get(key).map(|said| said.value.as_str())
    }

    /// The keys that do not say the same in both.
    pub(crate) fn differences(&self, other: &Self) -> Vec<String> {
        let keys: BTreeSet<&String> = self.keys.keys().chain(other.keys.keys()).collect();
        let other_than = |key: &&String| self.get(key) != other.get(key);
        keys.into_iter().filter(other_than).cloned().collect()
    }

    /// The first of its keys that these words name.
    pub(crate) fn named_by(&self, words: &str) -> Option<(&String, &Said)> {
        let is_of_none = |c: char| !(c.is_ascii_alphanumeric() || c == '-');
        let mut keys = words.split(is_of_none).map(|word| word.trim_start_matches('-'));
        keys.find_map(|key| self.keys.get_key_value(key))
    }

    /// The line that a mistake is in: that of the first of its keys that these words name, else the table's.
    pub(crate) fn line_of(&self, words: &str) -> usize {
        self.named_by(words).map_or(self.line, |(_, said)| said.line)
    }
}

/// All of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ConfigFile {
    /// Absolute.
    pub(crate) path: PathBuf,
    /// `[daemon]`.
    pub(crate) daemon: Table,
    /// `[daemon] socket-directories`: where ports that come later may have their sockets, beside those of the ports
    /// that are there.
    pub(crate) directories: Vec<PathBuf>,
    /// `[network.NAME]`, in the order of the file.
    pub(crate) networks: Vec<Table>,
    /// `[port.NAME]`, in the order of the file.
    pub(crate) ports: Vec<Table>,
    /// Ports of no file, which somebody added while the daemon ran.
    pub(crate) added: Vec<Table>,
}

impl ConfigFile {
    /// All ports, first those of the file.
    pub(crate) fn all_ports(&self) -> impl Iterator<Item = &Table> {
        self.ports.iter().chain(&self.added)
    }

    /// Where a port's table has what these words are about.
    pub(crate) fn place_of(&self, port: &Table, words: &str) -> String {
        match port.line_of(words) {
            0 => format!("{ADDED}: port {}", port.name),
            line => format!("{} line {line}: port {}", self.path.display(), port.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(line: usize, keys: &[(&str, &str)]) -> Table {
        let said = |(at, (key, value)): (usize, &(&str, &str))| {
            let (value, line) = ((*value).to_owned(), line + 1 + at);
            ((*key).to_owned(), Said { value, line })
        };
        Table {
            name: "vm1".to_owned(),
            line,
            keys: keys.iter().enumerate().map(said).collect(),
        }
    }

    #[test]
    fn tables_differ_by_what_they_say_and_not_by_where() {
        let one = table(1, &[("queues", "2"), ("null", "true")]);
        assert!(
            one.differences(&table(7, &[("queues", "2"), ("null", "true")]))
                .is_empty()
        );
        let other = table(1, &[("queues", "1"), ("mac", "x"), ("null", "true")]);
        assert_eq!(one.differences(&other), ["mac", "queues"]);
    }

    #[test]
    fn mistake_is_in_the_line_of_the_key_that_it_names() {
        let table = table(3, &[("ifname", "eth0"), ("queues", "0")]);
        assert_eq!(table.line_of("--queues 0: a port has 1 to 128 queue pairs"), 5);
        assert_eq!(table.line_of("no socket-path and no fd: give one"), 3);
    }
}
