//! Ports that were added at run time, kept in a file for the next start (`state`): a configuration file that has nothing
//! but ports.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use model::config::{ConfigFile, Entry, Port, Table, WrongLine};
use serde_json::{Map, Value, json};
use steward::text_file::{self, FileError, Kind};

const FILE: Kind = Kind {
    what: "file of added ports",
    reader: "daemon",
    example: "docs/config.md",
    option: "--state",
};
/// Most ports beside those of the file.
pub(crate) const MOST_ADDED: usize = 1024;
/// Longest file, bytes: as of a configuration.
pub(crate) const LONGEST: u64 = 16 << 20;

/// The ports that are kept; none, if there is no file yet.
/// Errors: it cannot be read, others could change it, or it is no such file.
pub(super) fn read(path: &Path) -> Result<Vec<Entry<Port>>, FileError> {
    if !path.try_exists().unwrap_or(true) {
        return Ok(Vec::new());
    }
    let text = text_file::read(FILE, path, LONGEST)?;
    parse(path, &text).map_err(|WrongLine { line, what }| FileError::Syntax {
        path: path.to_owned(),
        line,
        what,
    })
}

/// The ports of such a text.
/// Errors: it has something else, or too many.
pub(crate) fn parse(path: &Path, text: &str) -> Result<Vec<Entry<Port>>, WrongLine> {
    let file = ConfigFile::parse(path, text)?;
    let ports = file.ports.iter();
    let ports: Vec<_> = ports
        .map(|port| Entry::of_no_file(&port.name, port.value.clone()))
        .collect();
    let others = ConfigFile {
        path: file.path.clone(),
        ports: file.ports,
        ..ConfigFile::default()
    };
    match (&file.daemon, file.networks.is_empty()) {
        (daemon, true) if *daemon == others.daemon && ports.len() <= MOST_ADDED => Ok(ports),
        _ => Err(WrongLine {
            line: None,
            what: format!(
                "it has something else than up to {MOST_ADDED} ports, which are all that is kept here: remove it"
            ),
        }),
    }
}

/// The text of the file that has these ports.
/// Errors: a value that TOML has no form for.
pub(crate) fn text(ports: &[Entry<Port>]) -> Result<String, toml::ser::Error> {
    let ports: Map<String, Value> = ports
        .iter()
        .map(|port| (port.name.clone(), port.value.keys().into()))
        .collect();
    let tables = toml::to_string(&json!({ "port": ports }))?;
    Ok(format!(
        "# Ports that were added while vhost-af-xdp ran. It replaces this file with each change.\n\n{tables}"
    ))
}

/// Replaces the file.
/// Errors: it cannot be written.
pub(crate) fn write(path: &Path, ports: &[Entry<Port>]) -> io::Result<()> {
    let text = text(ports).map_err(io::Error::other)?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    // One that is left over from a daemon that was killed.
    let _ = fs::remove_file(&new);
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read_as_they_were_written() {
        let keys = json!({
            "network": "lan", "socket-path": "/run/vms/a.sock", "vlan": "100", "isolated": true, "to-guest-bits": "5M",
            "rule": [{"direction": "to-guest", "action": "allow", "protocol": "tcp", "destination-ports": "22"}],
        });
        let keys = keys.as_object().expect("an object").clone();
        let ports = ["a", "b.c"]
            .map(|name| Entry::of_no_file(name, Port::read(keys.clone().into()).expect("a port")));
        let text = text(&ports).expect("TOML");
        assert_eq!(parse(Path::new("state"), &text).expect("the same"), ports);
        assert_eq!(
            parse(Path::new("state"), &super::text(&[]).expect("TOML")),
            Ok(Vec::new())
        );
    }

    #[test]
    fn nothing_but_ports_is_accepted() {
        for text in ["[daemon]\nuser = 0\n", "[network.lan]\nuplink = \"e\"\n", "x"] {
            assert!(parse(Path::new("state"), text).is_err(), "{text}");
        }
    }

    #[test]
    fn file_is_replaced_as_a_whole() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("ports.toml");
        assert_eq!(read(&path).expect("none yet"), Vec::new());
        let port = Entry::of_no_file("a", Port::default());
        write(&path, &[]).expect("ours");
        write(&path, std::slice::from_ref(&port)).expect("ours");
        assert_eq!(fs::read_dir(directory.path()).expect("ours").count(), 1);
        let text = fs::read_to_string(&path).expect("there");
        assert_eq!(parse(&path, &text).expect("as before"), [port]);
    }
}
