//! A configuration file as it was read: tables of keys, each value in the words of the command line, with its line.
//!
//! What the words mean is said in one place for file and command line (`cli/`). Two readings of a file are compared by
//! what is written there, so that a port is left alone only if nothing that was said of it changed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A value, as the command line would have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Said {
    pub(crate) value: String,
    /// Counted from 1.
    pub(crate) line: usize,
}

/// A table.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Table {
    /// Of the port; of `[daemon]` nothing.
    pub(crate) name: String,
    /// Where it begins.
    pub(crate) line: usize,
    pub(crate) keys: BTreeMap<String, Said>,
}

impl Table {
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

    /// The line that a mistake is in: that of the first of its keys that these words name, else the table's.
    pub(crate) fn line_of(&self, words: &str) -> usize {
        let is_of_none = |c: char| !(c.is_ascii_alphanumeric() || c == '-');
        let mut keys = words.split(is_of_none).map(|word| word.trim_start_matches('-'));
        keys.find_map(|key| self.keys.get(key))
            .map_or(self.line, |said| said.line)
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
