//! Reads the configuration file of `serve --config`, and builds the configuration ([`build`]).

use std::collections::HashSet;
use std::path::Path;

use model::config::{ADDED, ConfigFile, Daemon, Entry, NamedTable, Network, Port, Table, Tables, WrongLine};
use program::text_file::{self, FileError, Kind};

use super::{
    Endpoint, NetworkConfig, Owner, PortConfig, ServeConfig, allows, build, socket_directories, state,
};

/// What error messages call the file.
const FILE: Kind = Kind {
    what: "configuration",
    reader: "daemon",
    example: "docs/deploy/vhost-af-xdp.toml",
    option: "--config",
};
/// Longest file, bytes: a thousand filter rules for each of 64 ports, as tables, and more.
const LONGEST: u64 = 16 << 20;

/// Reads the configuration file.
/// Errors: it cannot be read, others could change it, or a key or the type of a value is not known.
pub(crate) fn read(path: &Path) -> anyhow::Result<ConfigFile> {
    let path = std::path::absolute(path)?;
    Ok(parse(&path, &text_file::read(FILE, &path, LONGEST)?)?)
}

pub(crate) fn parse(path: &Path, text: &str) -> Result<ConfigFile, FileError> {
    let parsed = ConfigFile::parse(path, text);
    parsed.map_err(|WrongLine { line, what }| FileError::mistake(path, line, &what))
}

/// The configuration that a daemon starts with: of the file, and of the networks and ports that an earlier daemon kept.
/// Those that are not possible any more are left out; returns the reasons, a line each.
/// Errors: a mistake in either file.
pub(crate) fn at_start(path: &Path, options: &Daemon) -> anyhow::Result<(ServeConfig, Vec<String>)> {
    let mut file = read(path)?;
    let daemon = configured(file.clone(), options)?;
    let kept = match &daemon.state {
        Some(state) => state::read_beside(state, &file.path)?,
        None => Tables::default(),
    };
    let mut left_out = Vec::new();
    if daemon.can_change() {
        let check = |file: &ConfigFile| {
            let config = with_added(file.clone(), options, daemon.steward.is_none())?;
            check_sockets_of_added(&config)
        };
        left_out = add_possible(&mut file, &kept, &check);
    }
    Ok((configured(file, options)?, left_out))
}

/// Checks a file with what was added to it. `only_its_interfaces`: added ports may use the file's interfaces only.
/// Errors: the mistake and its place.
pub(crate) fn with_added(
    file: ConfigFile,
    options: &Daemon,
    only_its_interfaces: bool,
) -> Result<ServeConfig, String> {
    let config = configured(file, options).map_err(|error| steer::with_sources(&error))?;
    check_added(&config)?;
    if only_its_interfaces {
        check_interfaces_of_added(&config)?;
    }
    Ok(config)
}

/// Adds a port to a configuration that [`with_added`] has checked. `None`: it is wrong, or more must be checked than this
/// port (another queue changes the steward's policy, and a cable has another end).
pub(crate) fn with_another(config: ServeConfig, path: &Path, entry: &mut Entry<Port>) -> Option<ServeConfig> {
    let port = build_port(path, entry, config.ports.len() + 1).ok()?;
    with_numbers(entry, &port);
    let is_client = |port: &PortConfig| matches!(port.endpoint, Endpoint::Client(_));
    let can_connect = !is_client(&port) || config.ports.iter().any(is_client);
    let is_alone = port.nic.queues().is_none() && port.nic.cable().is_none();
    let config = (can_connect && is_alone).then_some(config)?;
    config.with_another(port).ok()
}

/// Adds the networks and ports that pass this check, and leaves the others out; returns the reasons, a line each.
pub(crate) fn add_possible(
    file: &mut ConfigFile,
    kept: &Tables,
    check: &dyn Fn(&ConfigFile) -> Result<(), String>,
) -> Vec<String> {
    let mut wrong = Vec::new();
    add_each(file, &kept.networks, check, &mut wrong);
    add_each(file, &kept.ports, check, &mut wrong);
    wrong
}

/// Adds all at once, if that is possible, otherwise each half separately: so few mistakes need few checks.
fn add_each<T: NamedTable>(
    file: &mut ConfigFile,
    kept: &[Entry<T>],
    check: &dyn Fn(&ConfigFile) -> Result<(), String>,
    wrong: &mut Vec<String>,
) {
    let before = T::of(&file.added).len();
    T::of_mut(&mut file.added).extend_from_slice(kept);
    let Err(why) = check(file) else { return };
    T::of_mut(&mut file.added).truncate(before);
    match kept {
        [] => {}
        [one] => {
            T::of_mut(&mut file.left_out).push(one.clone());
            wrong.push(why);
        }
        several => {
            let (first, rest) = several.split_at(several.len() / 2);
            add_each(file, first, check, wrong);
            add_each(file, rest, check, wrong);
        }
    }
}

/// Rejects ports of the file in added networks, and added ports with anything that is only available at the start:
/// descriptors, maps and sockets of other programs, and paths to VMMs that listen.
fn check_added(config: &ServeConfig) -> Result<(), String> {
    let Some(file) = &config.file else { return Ok(()) };
    let (of_file, added) = config.ports.split_at(file.tables.ports.len());
    for (port, entry) in of_file.iter().zip(&file.tables.ports) {
        let is_its = |network: &&Entry<Network>| port.nic.network() == Some(&network.name);
        if let Some(network) = file.added.networks.iter().find(is_its) {
            return Err(format!(
                "{}: network {} was added, but a port of the file needs a network of the file: put it there",
                file.place_of(entry, "network"),
                network.name
            ));
        }
    }
    let is_client = |port: &PortConfig| matches!(port.endpoint, Endpoint::Client(_));
    let connects = of_file.iter().any(is_client);
    for (port, entry) in added.iter().zip(&file.added.ports) {
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

/// Rejects added ports whose sockets are in other directories than those of the file's ports or `socket-directories`.
fn check_sockets_of_added(config: &ServeConfig) -> Result<(), String> {
    let Some(file) = &config.file else { return Ok(()) };
    let (of_file, added) = config.ports.split_at(file.tables.ports.len());
    let allowed = socket_directories(of_file, Some(file));
    for (port, entry) in added.iter().zip(&file.added.ports) {
        if let Some(path) = port.endpoint.path()
            && !allowed.iter().any(|directory| allows(directory, path))
        {
            return Err(format!(
                "{}: socket-path = {path:?}: add its directory to `socket-directories` below [daemon]",
                file.place_of(entry, "socket-path")
            ));
        }
    }
    Ok(())
}

/// Rejects added networks and ports with an interface that the file does not name: an attacker who took over the daemon
/// could have added them.
fn check_interfaces_of_added(config: &ServeConfig) -> Result<(), String> {
    let Some(file) = &config.file else { return Ok(()) };
    let (ports, added_ports) = config.ports.split_at(file.tables.ports.len());
    let (networks, added_networks) = config.networks.split_at(file.tables.networks.len());
    let interface_of = |network: &NetworkConfig| network.uplink.as_ref().map(|uplink| uplink.at.name.clone());
    let queues_of = |port: &PortConfig| port.wanted().map(|wanted| wanted.interface);
    let named: HashSet<String> = ports
        .iter()
        .filter_map(queues_of)
        .chain(networks.iter().filter_map(interface_of))
        .collect();
    let uplinks = added_networks.iter().zip(&file.added.networks);
    let is_other = |interface: &String| !named.contains(interface);
    let uplinks = uplinks.filter_map(|(network, entry)| {
        let interface = interface_of(network).filter(is_other)?;
        Some((file.place_of(entry, "uplink"), "uplink", interface))
    });
    let queues = added_ports.iter().zip(&file.added.ports);
    let queues = queues.filter_map(|(port, entry)| {
        let interface = queues_of(port).filter(is_other)?;
        Some((file.place_of(entry, "ifname"), "ifname", interface))
    });
    let other = uplinks.chain(queues).next();
    other.map_or(Ok(()), |(place, key, interface)| {
        Err(format!(
            "{place}: {key} = {interface:?}: what is added may use interfaces that ports or networks of the file have: name \
             it there, or start the daemon with --steward, whose policy limits what it may use"
        ))
    })
}

/// The configuration of a file alone.
/// Errors: [`FileError`], naming line and key.
#[cfg(test)]
pub(crate) fn judge(file: ConfigFile) -> Result<ServeConfig, FileError> {
    configured(file, &Daemon::default())
}

/// The configuration of a file; these options override those of its `[daemon]`.
/// Errors: [`FileError`], naming line and key.
pub(crate) fn configured(file: ConfigFile, options: &Daemon) -> Result<ServeConfig, FileError> {
    let mut file = file;
    for added in [&mut file.added, &mut file.left_out] {
        without_those_of(&file.tables.networks, &mut added.networks);
        without_those_of(&file.tables.ports, &mut added.ports);
    }
    let count = file.all::<Port>().count();
    let mut ports = Vec::new();
    for entry in file.tables.ports.iter_mut().chain(&mut file.added.ports) {
        let port = build_port(&file.path, entry, count)?;
        with_numbers(entry, &port);
        ports.push(port);
    }
    let networks = file.all().map(|entry| build_network(&file.path, entry));
    let networks = networks.collect::<Result<_, _>>()?;
    let daemon = |what: &str| wrong_in(&file.path, "[daemon]", &file.daemon, what);
    let built = build::daemon(&options.or(&file.daemon.value), ports);
    let built = built.map_err(|error| daemon(&format!("{error:#}")))?;
    let built = ServeConfig { networks, ..built };
    let taken = built.check().map_err(|wrong| {
        let (network, port) = match wrong.owner {
            Owner::Daemon => (None, None),
            Owner::Network(at) => (file.all::<Network>().nth(at), None),
            Owner::Port(at) => (None, file.all::<Port>().nth(at)),
        };
        let error = wrong.to_string();
        let network = network.map(|network| wrong_in_table(&file.path, network, &error));
        let port = port.map(|port| wrong_in_table(&file.path, port, &error));
        network.or(port).unwrap_or_else(|| daemon(&error))
    })?;
    Ok(ServeConfig {
        file: Some(file),
        taken,
        options: options.clone(),
        ..built
    })
}

/// The configuration of a network of a file.
/// Errors: [`FileError`], naming line and key.
pub(crate) fn build_network(path: &Path, entry: &Entry<Network>) -> Result<NetworkConfig, FileError> {
    build::network(&entry.name, &entry.value)
        .map_err(|error| wrong_in_table(path, entry, &format!("{error:#}")))
}

/// The configuration of one of the `ports` ports of a file.
/// Errors: [`FileError`], naming line and key.
pub(crate) fn build_port(path: &Path, entry: &Entry<Port>, ports: usize) -> Result<PortConfig, FileError> {
    let built = build::port(&entry.value, ports).and_then(|port| check_path(&port.endpoint).map(|()| port));
    let port = built.map_err(|error| wrong_in_table(path, entry, &format!("{error:#}")))?;
    Ok(PortConfig {
        name: entry.name.as_str().into(),
        ..port
    })
}

/// Rejects relative paths: the daemon's directory may change, and sockets are made in directories that were named.
fn check_path(endpoint: &Endpoint) -> anyhow::Result<()> {
    if let Some(path) = endpoint.path().filter(|path| !build::is_plain(path)) {
        let path = path.display().to_string();
        anyhow::bail!("socket-path = {path:?}: give an absolute path without `..`");
    }
    Ok(())
}

/// Replaces names of users and groups by numbers: the sandbox allows no look-up of names.
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

/// Removes added tables that the file has, too: those of the file replace them.
fn without_those_of<T: Table>(file: &[Entry<T>], added: &mut Vec<Entry<T>>) {
    added.retain(|entry| !file.iter().any(|of_file| of_file.name == entry.name));
}

fn wrong_in_table<T: NamedTable>(path: &Path, entry: &Entry<T>, what: &str) -> FileError {
    wrong_in(path, &format!("{} {}", T::KIND, entry.name), entry, what)
}

/// A mistake in an entry, with the line of the key that its text names.
fn wrong_in<T: Table>(path: &Path, of: &str, entry: &Entry<T>, what: &str) -> FileError {
    let line = Some(entry.line_of(what)).filter(|&line| line > 0 || entry.name.is_empty());
    let path = line.map_or(Path::new(ADDED), |_| path);
    let what = format!("{of}: {}", without_dashes(what));
    FileError::mistake(path, line.filter(|&line| line > 0), &what)
}

/// Replaces options of the command line by keys.
fn without_dashes(text: &str) -> String {
    let text = text.strip_prefix("--").unwrap_or(text);
    text.replace(" --", " ").replace("'--", "'").replace("(--", "(")
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
