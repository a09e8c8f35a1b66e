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

fn parse(path: &Path, text: &str) -> Result<Vec<Entry<Port>>, WrongLine> {
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
        (daemon, true) if *daemon == others.daemon => Ok(ports),
        _ => Err(WrongLine {
            line: None,
            what: "it has more than ports, which are all that is kept here: remove it".to_owned(),
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
/// Errors: the text is of no such file, or the file cannot be written.
pub(crate) fn write(path: &Path, text: &str) -> io::Result<()> {
    parse(path, text).map_err(|wrong| io::Error::new(io::ErrorKind::InvalidData, wrong.what))?;
    let new = path.with_extension("new");
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
        write(&path, &text(std::slice::from_ref(&port)).expect("TOML")).expect("ours");
        assert!(write(&path, "[daemon]\nuser = 0\n").is_err());
        assert_eq!(fs::read_dir(directory.path()).expect("ours").count(), 1);
        let text = fs::read_to_string(&path).expect("there");
        assert_eq!(parse(&path, &text).expect("as before"), [port]);
    }
}
