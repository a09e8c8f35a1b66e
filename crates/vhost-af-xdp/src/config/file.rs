//! Reads the configuration file of `serve --config`, and what it means ([`build`]).

use std::collections::HashSet;
use std::path::Path;

use model::config::{
    ADDED, ConfigFile, Daemon, Entry, Mistake, Network, Port, Table, WrongLine, is_name, name_rule,
};
use serde_json::{Map, Value};
use steward::text_file::{self, FileError, Kind};

use super::{
    Endpoint, NetworkConfig, PortConfig, ServeConfig, UplinkConfig, Wrong, build, socket_directories, state,
};

/// Where a configuration comes from.
const FILE: Kind = Kind {
    what: "configuration",
    reader: "daemon",
    example: "docs/deploy/vhost-af-xdp.toml",
    option: "--config",
};
/// Longest file, bytes: a thousand filter rules for each of 64 ports, as tables, and more.
const LONGEST: u64 = 16 << 20;

/// Reads a file.
/// Errors: it cannot be read, others could change it, or it has other keys, or other kinds of values, than are known.
pub(crate) fn read(path: &Path) -> anyhow::Result<ConfigFile> {
    let path = std::path::absolute(path)?;
    Ok(parse(&path, &text_file::read(FILE, &path, LONGEST)?)?)
}

pub(crate) fn parse(path: &Path, text: &str) -> Result<ConfigFile, FileError> {
    ConfigFile::parse(path, text).map_err(|WrongLine { line, what }| FileError::Syntax {
        path: path.to_owned(),
        line,
        what,
    })
}

/// What a daemon starts with: a file, and the ports that an earlier one kept; and what is wrong with those of them that
/// are left out. `is_steward`: it leases queues to itself, of the interfaces that the file names only.
/// Errors: what is wrong with either file.
pub(crate) fn at_start(
    path: &Path,
    options: &Daemon,
    is_steward: impl Fn(&ServeConfig) -> bool,
) -> anyhow::Result<(ServeConfig, Vec<String>)> {
    let file = read(path)?;
    let daemon = configured(file.clone(), options)?;
    let kept = match &daemon.state {
        Some(state) if *state == file.path => {
            anyhow::bail!("state {}: this is the configuration file", state.display())
        }
        Some(state) if daemon.can_change() => state::read(state)?,
        _ => Vec::new(),
    };
    let with = |added: Vec<Entry<Port>>| {
        let file = ConfigFile {
            added,
            ..file.clone()
        };
        let config = configured(file, options).map_err(|error| steer::with_sources(&error))?;
        check_added(&config)?;
        check_sockets_of_added(&config)?;
        match is_steward(&config) {
            true => check_interfaces_of_added(&config).map(|()| config),
            false => Ok(config),
        }
    };
    if let Ok(config) = with(kept.clone()) {
        return Ok((config, Vec::new()));
    }
    let (mut config, mut added, mut left_out) = (daemon, Vec::new(), Vec::new());
    for entry in kept {
        added.push(entry);
        match with(added.clone()) {
            Ok(with_it) => config = with_it,
            Err(wrong) => {
                added.pop();
                left_out.push(wrong);
            }
        }
    }
    Ok((config, left_out))
}

/// Ports that were added get nothing that a start gives but later changes do not: descriptors, maps and sockets of other
/// programs, and paths to VMMs that listen.
pub(crate) fn check_added(config: &ServeConfig) -> Result<(), String> {
    let Some(file) = &config.file else { return Ok(()) };
    let (of_file, added) = config.ports.split_at(file.ports.len());
    let is_client = |port: &PortConfig| matches!(port.endpoint, Endpoint::Client(_));
    let connects = of_file.iter().any(is_client);
    for (port, entry) in added.iter().zip(&file.added) {
        let key = match &port.endpoint {
            _ if port.has_external_program() => "inhibit",
            Endpoint::Fd(_) => "fd",
            Endpoint::Client(_) if !connects => "client",
            _ => continue,
        };
        return Err(format!(
            "{}: {key}: a port that is added cannot have it: put the port into the file",
            file.place_of(entry, key)
        ));
    }
    Ok(())
}

/// Ports that were added have their sockets where those of the file have, or where it says.
fn check_sockets_of_added(config: &ServeConfig) -> Result<(), String> {
    let Some(file) = &config.file else { return Ok(()) };
    let (of_file, added) = config.ports.split_at(file.ports.len());
    let allowed = socket_directories(of_file, Some(file));
    for (port, entry) in added.iter().zip(&file.added) {
        if let Endpoint::Server(path) | Endpoint::Client(path) = &port.endpoint
            && !path.parent().is_some_and(|parent| allowed.contains(parent))
        {
            return Err(format!(
                "{}: socket-path = {path:?}: add its directory to `socket-directories` below [daemon]",
                file.place_of(entry, "socket-path")
            ));
        }
    }
    Ok(())
}

/// Ports that were added get no interface that the file does not name: the daemon could have been taken over by others.
pub(crate) fn check_interfaces_of_added(config: &ServeConfig) -> Result<(), String> {
    let Some(file) = &config.file else { return Ok(()) };
    let (of_file, added) = config.ports.split_at(file.ports.len().min(config.ports.len()));
    let uplinks = config
        .networks
        .iter()
        .filter_map(|network| network.uplink.as_ref());
    let named: HashSet<String> = of_file
        .iter()
        .filter_map(PortConfig::wanted)
        .chain(uplinks.map(UplinkConfig::wanted))
        .map(|wanted| wanted.interface)
        .collect();
    let other = added.iter().zip(&file.added).find_map(|(port, entry)| {
        let wanted = port.wanted()?;
        (!named.contains(&wanted.interface)).then_some((entry, wanted.interface))
    });
    other.map_or(Ok(()), |(entry, interface)| {
        Err(format!(
            "{}: ifname = {interface:?}: an added port may use interfaces that ports or networks of the file have: name it \
             there, or start the daemon with --steward, whose policy limits what it may use",
            file.place_of(entry, "ifname")
        ))
    })
}

/// The configuration of a file by itself.
/// Errors: [`FileError`], naming line and key.
pub(crate) fn judge(file: ConfigFile) -> Result<ServeConfig, FileError> {
    configured(file, &Daemon::default())
}

/// The configuration of a file, with these options of the daemon before its own.
/// Errors: [`FileError`], naming line and key.
pub(crate) fn configured(file: ConfigFile, options: &Daemon) -> Result<ServeConfig, FileError> {
    let mut file = file;
    // A port that the file has now is the file's.
    let of_file = |entry: &Entry<Port>| file.ports.iter().any(|port| port.name == entry.name);
    let added = file.added.iter().filter(|entry| !of_file(entry)).cloned();
    file.added = added.collect();
    let count = file.all_ports().count();
    let mut ports = Vec::new();
    for entry in file.ports.iter_mut().chain(&mut file.added) {
        let port = build_port(&file.path, entry, count)?;
        with_numbers(entry, &port);
        ports.push(port);
    }
    let networks = file.networks.iter().map(|entry| build_network(&file.path, entry));
    let networks = networks.collect::<Result<_, _>>()?;
    let daemon = |what: &str| wrong_in(&file.path, "[daemon]", &file.daemon, what);
    let built = build::daemon(&options.or(&file.daemon.value), ports);
    let built = built.map_err(|error| daemon(&format!("{error:#}")))?;
    let built = ServeConfig { networks, ..built };
    built.check().map_err(|Wrong { port, error }| {
        match port.and_then(|port| file.all_ports().nth(port)) {
            Some(entry) => wrong_in(
                &file.path,
                &format!("port {}", entry.name),
                entry,
                &error.to_string(),
            ),
            None => daemon(&error.to_string()),
        }
    })?;
    Ok(ServeConfig {
        file: Some(file),
        ..built
    })
}

/// The configuration of a network of a file.
/// Errors: [`FileError`], naming line and key.
pub(crate) fn build_network(path: &Path, entry: &Entry<Network>) -> Result<NetworkConfig, FileError> {
    let of = format!("network {}", entry.name);
    build::network(&entry.name, &entry.value)
        .map_err(|error| wrong_in(path, &of, entry, &format!("{error:#}")))
}

/// The configuration of a port of a file that has so many.
/// Errors: [`FileError`], naming line and key.
pub(crate) fn build_port(path: &Path, entry: &Entry<Port>, ports: usize) -> Result<PortConfig, FileError> {
    let built = build::port(&entry.value, ports).and_then(|port| check_path(&port.endpoint).map(|()| port));
    let of = format!("port {}", entry.name);
    let port = built.map_err(|error| wrong_in(path, &of, entry, &format!("{error:#}")))?;
    Ok(PortConfig {
        name: entry.name.as_str().into(),
        ..port
    })
}

/// A file is read again from wherever the daemon is, and its sockets are made in directories that were named.
fn check_path(endpoint: &Endpoint) -> anyhow::Result<()> {
    match endpoint {
        Endpoint::Server(path) | Endpoint::Client(path) if !build::is_plain(path) => anyhow::bail!(
            "socket-path = {:?}: give an absolute path without `..`",
            path.display().to_string()
        ),
        _ => Ok(()),
    }
}

/// Writes numbers where names of users and groups were: the sandbox has no names to look up.
fn with_numbers(entry: &mut Entry<Port>, port: &PortConfig) {
    use model::config::Account;
    let socket = &mut entry.value.socket;
    for (account, number) in [
        (&mut socket.socket_owner, port.access.owner),
        (&mut socket.socket_group, port.access.group),
    ] {
        if let (Some(account), Some(number)) = (account, number) {
            *account = Account(number.to_string());
        }
    }
}

/// A mistake in an entry, with the line of the key that its text names.
fn wrong_in<T: Table>(path: &Path, of: &str, entry: &Entry<T>, what: &str) -> FileError {
    let line = Some(entry.line_of(what)).filter(|&line| line > 0 || entry.name.is_empty());
    FileError::Syntax {
        path: line.map_or(Path::new(ADDED), |_| path).to_owned(),
        line: line.filter(|&line| line > 0),
        what: format!("{of}: {}", without_dashes(what)),
    }
}

/// Options as keys.
fn without_dashes(text: &str) -> String {
    let text = text.strip_prefix("--").unwrap_or(text);
    text.replace(" --", " ").replace("'--", "'").replace("(--", "(")
}

/// The port of that name with these keys; one that is null is not set.
/// Errors: [`Mistake`]: a name that cannot be, a key that is unknown, a value of another kind.
pub(crate) fn port_of(name: &str, keys: &Map<String, Value>) -> Result<Entry<Port>, Mistake> {
    if !is_name(name) {
        return Err(Mistake::of_no_key(format!("port {name:?}: {}", name_rule())));
    }
    Ok(Entry::of_no_file(name, Port::read(keys.clone().into())?))
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
