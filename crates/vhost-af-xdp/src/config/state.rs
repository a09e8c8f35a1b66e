//! The state file (`state`): networks and ports that were added at run time, kept for the next start. It has the format
//! of a configuration file that contains nothing else.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use model::config::{ConfigFile, Entry, NamedTable, Table, Tables, WrongLine};
use program::text_file::{self, FileError, Kind};
use serde_json::json;

const FILE: Kind = Kind {
    what: "file of added networks and ports",
    reader: "daemon",
    example: "docs/config.md",
    option: "--state",
};
/// Most added ports, and most added networks.
pub(crate) const MOST_ADDED: usize = 1024;
/// Longest file, bytes: as for a configuration file.
pub(crate) const LONGEST: u64 = 16 << 20;

/// Reads the state file at `path` of a daemon with the configuration file `file`.
/// Errors: both are the same file, or those of [`read`].
pub(super) fn read_beside(path: &Path, file: &Path) -> anyhow::Result<Tables> {
    if path == file {
        anyhow::bail!("state {}: this is the configuration file", path.display());
    }
    Ok(read(path)?)
}

/// Reads the state file; returns no tables if there is none.
/// Errors: it cannot be read, others could change it, or it is not a state file.
fn read(path: &Path) -> Result<Tables, FileError> {
    if !path.try_exists().unwrap_or(true) {
        return Ok(Tables::default());
    }
    let text = text_file::read(FILE, path, LONGEST)?;
    parse(path, &text).map_err(|WrongLine { line, what }| FileError::mistake(path, line, &what))
}

/// Parses the networks and ports of a state file.
/// Errors: the text contains something else, or too many.
pub(crate) fn parse(path: &Path, text: &str) -> Result<Tables, WrongLine> {
    let ConfigFile { daemon, tables, .. } = ConfigFile::parse(path, text)?;
    let Tables { networks, ports } = tables;
    if daemon != Entry::default() || networks.len().max(ports.len()) > MOST_ADDED {
        return Err(WrongLine {
            line: None,
            what: format!(
                "it has something else than up to {MOST_ADDED} networks and {MOST_ADDED} ports, which are all that is kept \
                 here: remove it"
            ),
        });
    }
    Ok(Tables {
        networks: of_no_file(networks),
        ports: of_no_file(ports),
    })
}

fn of_no_file<T: Table>(tables: Vec<Entry<T>>) -> Vec<Entry<T>> {
    let tables = tables.into_iter();
    tables
        .map(|table| Entry::of_no_file(&table.name, table.value))
        .collect()
}

/// The text of a state file with these tables.
/// Errors: as of [`table_text`].
pub(crate) fn text(tables: &[&Tables]) -> Result<String, String> {
    let mut text =
        "# Networks and ports that were added while vhost-af-xdp ran. It replaces this file with each change.\n"
            .to_owned();
    for Tables { networks, ports } in tables {
        for network in networks {
            text += &table_text(network)?;
        }
        for port in ports {
            text += &table_text(port)?;
        }
    }
    Ok(text)
}

/// The text of a table in it.
/// Errors: the next start would reject it.
pub(crate) fn table_text<T: NamedTable>(table: &Entry<T>) -> Result<String, String> {
    let tables = json!({ T::KIND.to_string(): { &table.name: table.value.keys() } });
    let text = toml::to_string(&tables).map_err(|error| error.to_string())?;
    parse(Path::new(""), &text).map_err(|wrong| wrong.what)?;
    Ok(format!("\n{text}"))
}

/// Replaces the file by one with this text.
/// Errors: it cannot be written.
pub(crate) fn write(path: &Path, text: &str) -> io::Result<()> {
    if text.len() as u64 > LONGEST {
        return Err(io::Error::other(format!(
            "it would be longer than {} KiB",
            LONGEST >> 10
        )));
    }
    let new = next_path(path);
    // May be left over from a daemon that was killed.
    let _ = fs::remove_file(&new);
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    match path.parent() {
        Some(directory) => fs::File::open(directory)?.sync_all(),
        None => Ok(()),
    }
}

/// The path of the new file while it is written; then it replaces the state file.
pub(crate) fn next_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use model::config::{Network, Port};
    use serde_json::{Map, Value};

    use super::*;

    /// A port for each name.
    fn ports(names: &[&str], keys: &Map<String, Value>) -> Tables {
        let port = |name: &&str| Port::named(name, keys).expect("a port");
        Tables {
            networks: Vec::new(),
            ports: names.iter().map(port).collect(),
        }
    }

    #[test]
    fn networks_and_ports_are_read_as_they_were_written() {
        let keys = json!({
            "network": "lan", "socket-path": "/run/vms/a.sock", "vlan": "100", "isolated": true, "to-guest-bits": "5M",
            "rule": [{"direction": "to-guest", "action": "allow", "protocol": "tcp", "destination-ports": "22"}],
        });
        let keys = keys.as_object().expect("an object").clone();
        let mut tables = ports(&["a", "b.c"], &keys);
        let uplink = json!({"uplink": "eth1", "queues": 2});
        let uplink = uplink.as_object().expect("an object");
        tables.networks = vec![Network::named("lan", uplink).expect("a network")];
        for tables in [tables, Tables::default()] {
            let text = text(&[&tables]).expect("TOML");
            assert_eq!(parse(Path::new("state"), &text), Ok(tables), "{text}");
        }
    }

    #[test]
    fn nothing_else_is_accepted() {
        for text in ["[daemon]\nuser = 0\n", "[daemon]\n", "x"] {
            assert!(parse(Path::new("state"), text).is_err(), "{text}");
        }
    }

    #[test]
    fn file_is_replaced_as_a_whole() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("ports.toml");
        assert_eq!(read(&path).expect("none yet"), Tables::default());
        let port = ports(&["a"], &Map::new());
        write(&path, &text(&[&Tables::default()]).expect("TOML")).expect("ours");
        write(&path, &text(&[&port]).expect("TOML")).expect("ours");
        assert_eq!(fs::read_dir(directory.path()).expect("ours").count(), 1);
        assert_eq!(read(&path).expect("as before"), port);
    }
}
