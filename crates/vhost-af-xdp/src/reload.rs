//! Reload: reads the configuration file again and applies the difference to what runs; nothing else changes.
//!
//! The helper reads the file, which is outside of the sandbox. If it reports a mistake, nothing changes. Otherwise, in
//! this order: removed and changed ports end; removed networks end, and changed uplinks are released; the file takes
//! effect in the helper ([`helper`](crate::supervision::helper)); live changes are made ([`Table::is_live`]); networks
//! and uplinks start; new and changed ports start. A port whose table is the same as before is not touched: its VMM
//! stays connected and its traffic continues, also to other ports of a network whose uplink changes. The same holds
//! for a port or network that only differs in keys that can change at run time.
//!
//! One thread does this, one reload after the other. If a port cannot be changed, the error is logged, and the others
//! are changed nevertheless; the next reload tries again.
//!
//! Clients add, change and remove networks and ports that are not in the file by the same code ([`changes`]).

pub(crate) mod changes;

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use model::config::{ConfigFile, Entry, NamedTable, Network, Port, Table, TableKind, Tables};
use model::control::{Change, Changed, Refused};
use model::events::What;
use model::state::{Configuration, Source, Status};
use serde_json::{Map, Value};
use steer::with_sources;

use crate::config::file::{build_network, build_port};
use crate::config::{Endpoint, NetworkConfig, PortConfig};
use crate::journal::{JOURNAL, Subject};
use crate::ports::{NO_THREAD, Ports};
use crate::supervision::helper::Requests;
use crate::thread;
use crate::vhost_user::accept::VmmSource;
use common::lock::Locked;

/// Result of a reload or a change.
#[derive(Debug, Default)]
struct Outcome {
    /// What was done, a line each.
    done: Vec<String>,
    /// What failed, a line each.
    failed: Vec<String>,
    /// An uplink that cannot be opened is retried later.
    retries: bool,
}

/// A request to the reload thread.
enum Request {
    /// Read the file again.
    Read,
    Change(Change, Sender<Result<Changed, Refused>>),
}

/// Sends requests to the reload thread.
#[derive(Clone)]
pub(crate) struct Reload {
    sender: Sender<Request>,
    readings: Arc<Mutex<Readings>>,
}

/// Where the table of each port or network that runs is from, and its keys.
type Described = BTreeMap<String, (Source, Map<String, Value>)>;

/// What clients read of the configuration.
struct Readings {
    file: Configuration,
    ports: Described,
    networks: Described,
}

/// What a port that is added later can use; the sandbox forbids what the daemon did not need at its start.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reach {
    /// The daemon can connect to sockets of VMMs.
    pub(crate) vmms: bool,
    /// The daemon can lease queues of interfaces.
    pub(crate) leases: bool,
}

/// The reload thread.
struct Reader {
    ports: Arc<Ports>,
    requests: Arc<Requests>,
    reach: Reach,
    /// The configuration in force.
    file: ConfigFile,
    /// Where added networks and ports are kept for the next start.
    state: Option<PathBuf>,
    /// The tables of what runs.
    running: Tables,
    /// What failed in the last reload, a line each.
    failed: Vec<String>,
    readings: Arc<Mutex<Readings>>,
}

impl Reload {
    /// Starts the thread, which waits for requests.
    pub(crate) fn start(
        (file, state): (ConfigFile, Option<PathBuf>),
        ports: Arc<Ports>,
        requests: Arc<Requests>,
        reach: Reach,
    ) -> io::Result<Self> {
        let (sender, receiver) = mpsc::channel();
        // An added table that could not start is not among them.
        let networks = ports.networks();
        let is_network = |table: &&Entry<Network>| networks.iter().any(|network| network.name == table.name);
        let is_port = |table: &&Entry<Port>| ports.named(&table.name).is_some();
        let running = Tables {
            networks: file.all().filter(is_network).cloned().collect(),
            ports: file.all().filter(is_port).cloned().collect(),
        };
        let readings = Arc::new(Mutex::new(Readings {
            file: Configuration {
                path: file.path.clone(),
                read_at: now(),
                failed: Vec::new(),
            },
            ports: BTreeMap::new(),
            networks: BTreeMap::new(),
        }));
        let reader = Reader {
            ports,
            requests,
            reach,
            running,
            file,
            state,
            failed: Vec::new(),
            readings: Arc::clone(&readings),
        };
        reader.describe();
        if reader.state.is_some() {
            // The file may contain some of the added tables now.
            let _ = reader.keep();
        }
        thread::start("reload", move || reader.work(&receiver))?;
        Ok(Self { sender, readings })
    }

    /// Requests a reload; does not wait for it.
    pub(crate) fn ask(&self) {
        let _ = self.sender.send(Request::Read);
    }

    /// Applies a change and waits for the result.
    /// Errors: [`Refused`]; unless its message says otherwise, nothing has changed.
    pub(crate) fn change(&self, change: Change) -> Result<Changed, Refused> {
        let (answer, outcome) = mpsc::channel();
        let _ = self.sender.send(Request::Change(change, answer));
        outcome.recv().unwrap_or(Err(Refused::ending()))
    }

    /// Adds the configuration to the status of the daemon.
    pub(crate) fn add_configuration(&self, status: &mut Status) {
        let readings = self.readings.locked();
        for port in &mut status.ports {
            (port.source, port.configuration) = readings.ports.get(&port.name).cloned().unzip();
        }
        for network in &mut status.networks {
            (network.source, network.configuration) = readings.networks.get(&network.name).cloned().unzip();
        }
        status.configuration = Some(readings.file.clone());
    }
}

impl Outcome {
    /// Nothing was done, for this reason.
    fn failed(why: String) -> Self {
        Self {
            failed: vec![why],
            ..Self::default()
        }
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// Why a port or network of the file ends.
const GONE: &str = "is not in the file any more";

/// Changes of ports, or of networks.
struct Changes<T, C> {
    /// Names of those that end, and why.
    ending: Vec<(String, String)>,
    /// Those that start; a table that replaces one of the same name is in `ending`, too.
    starting: Vec<(Entry<T>, C)>,
    /// Those that keep running, with other values of live keys.
    changed: Vec<(Entry<T>, C)>,
}

/// All changes.
struct Difference {
    ports: Changes<Port, PortConfig>,
    networks: Changes<Network, NetworkConfig>,
}

impl<T: Table, C> Changes<T, C> {
    /// Compares these tables (`now`) with those before.
    fn between(
        before: &[Entry<T>],
        now: &[Entry<T>],
        why_gone: &str,
        build: impl Fn(&Entry<T>) -> Result<C, String>,
    ) -> Result<Self, String> {
        let is_gone = |table: &&Entry<T>| of_name(now, &table.name).is_none();
        let gone = before.iter().filter(is_gone);
        let mut changes = Self {
            ending: gone
                .map(|table| (table.name.clone(), why_gone.to_owned()))
                .collect(),
            starting: Vec::new(),
            changed: Vec::new(),
        };
        for table in now {
            let Some(known) = of_name(before, &table.name) else {
                changes.starting.push((table.clone(), build(table)?));
                continue;
            };
            let keys = known.differences(table);
            if keys.iter().any(|key| !known.value.is_live(key)) {
                let why = format!("has changed ({})", keys.join(", "));
                changes.ending.push((table.name.clone(), why));
                changes.starting.push((table.clone(), build(table)?));
            } else if !keys.is_empty() {
                changes.changed.push((table.clone(), build(table)?));
            }
        }
        Ok(changes)
    }

    /// Whether the table ends, and then starts with other values.
    fn restarts(&self, name: &str) -> bool {
        self.starting.iter().any(|(table, _)| table.name == name)
    }
}

fn of_name<'a, T>(tables: &'a [Entry<T>], name: &str) -> Option<&'a Entry<T>> {
    tables.iter().find(|table| table.name == name)
}

/// Replaces the table of that name, if there is one.
fn replace<T: Clone>(tables: &mut [Entry<T>], by: &Entry<T>) {
    let known = tables.iter_mut().find(|table| table.name == by.name);
    known.into_iter().for_each(|known| known.clone_from(by));
}

impl Reader {
    fn work(mut self, requests: &Receiver<Request>) {
        while let Ok(request) = requests.recv() {
            // The client may not wait for the answer any more.
            match request {
                Request::Read => drop(self.read_and_log()),
                Request::Change(change, answer) => drop(answer.send(self.change(&change))),
            }
        }
    }

    fn read_and_log(&mut self) -> Outcome {
        let outcome = self.read();
        log("configuration", &outcome);
        self.failed.clone_from(&outcome.failed);
        self.describe();
        outcome
    }

    /// Updates the copy that `status` and the API read.
    fn describe(&self) {
        let (ports, networks) = (&self.running.ports, &self.running.networks);
        let ports = ports.iter().map(|table| self.described(table)).collect();
        let networks = networks.iter().map(|table| self.described(table)).collect();
        let failed = self.all_failed();
        let mut readings = self.readings.locked();
        (readings.ports, readings.networks, readings.file.failed) = (ports, networks, failed);
    }

    /// Updates one port or network of that copy.
    fn describe_one<T: NamedTable>(&self, name: &str) {
        let running = of_name(T::of(&self.running), name).map(|table| self.described(table));
        let failed = self.all_failed();
        let mut readings = self.readings.locked();
        readings.file.failed = failed;
        let known = match T::KIND {
            TableKind::Port => &mut readings.ports,
            TableKind::Network => &mut readings.networks,
        };
        known.remove(name);
        known.extend(running);
    }

    /// What failed in the last reload, and what does not run, a line each.
    fn all_failed(&self) -> Vec<String> {
        [
            self.failed.clone(),
            self.absent::<Network>(),
            self.absent::<Port>(),
        ]
        .concat()
    }

    /// Added tables that do not run, a line each.
    fn absent<T: NamedTable>(&self) -> Vec<String> {
        let left_out = T::of(&self.file.left_out);
        // What runs is of the file or was added.
        if left_out.is_empty() && T::of(&self.running).len() == self.file.all::<T>().count() {
            return Vec::new();
        }
        let running = T::of(&self.running).iter().map(|table| table.name.as_str());
        let running: HashSet<_> = running.collect();
        let added = T::of(&self.file.added).iter().chain(left_out);
        let absent = added.filter(|table| !running.contains(table.name.as_str()));
        let line = |table: &Entry<T>| {
            let (kind, name) = (T::KIND, &table.name);
            format!("{kind} {name} could not start: the log says why; `vhost-af-xdp reload` tries again")
        };
        absent.map(line).collect()
    }

    fn described<T: NamedTable>(&self, table: &Entry<T>) -> (String, (Source, Map<String, Value>)) {
        let source = match of_name(T::of(&self.file.tables), &table.name) {
            Some(_) => Source::File,
            None => Source::Api,
        };
        let mut keys = table.value.keys();
        // There may be many rules; they have a request of their own.
        keys.remove("rule");
        (table.name.clone(), (source, keys))
    }

    fn read(&mut self) -> Outcome {
        let nothing = |why: String| Outcome::failed(format!("{why}; nothing was changed"));
        let mut file = match self.requests.read() {
            Ok(file) => file,
            Err(error) => return nothing(with_sources(&error)),
        };
        let all = Tables {
            networks: file.all().cloned().collect(),
            ports: file.all().cloned().collect(),
        };
        let difference = match self.difference((&self.running, GONE), &all, all.ports.len()) {
            Ok(difference) => difference,
            Err(why) => return nothing(why),
        };
        let mut outcome = Outcome {
            retries: true,
            ..Outcome::default()
        };
        let daemon = file.daemon.differences(&self.file.daemon);
        if !daemon.is_empty() {
            let keys = daemon.join(", ");
            let why = format!("{keys} of [daemon] changed: this takes effect when the daemon is restarted");
            outcome.failed.push(why);
            // The daemon keeps the options of its start, so that the next reload compares with these.
            file.daemon = self.file.daemon.clone();
        }
        let added = self.file.added.clone();
        if self.apply(difference, &mut outcome) {
            self.file = file;
        }
        if self.file.added != added {
            // The file contains some of them now.
            match self.keep() {
                Ok(kept) => outcome.done.push(kept),
                Err(unkept) => outcome.failed.push(unkept),
            }
        }
        self.readings.locked().file.read_at = now();
        if outcome.done.is_empty() && outcome.failed.is_empty() {
            outcome.done.push("read again, nothing changed".to_owned());
        }
        outcome
    }

    /// Compares tables (`now`) with those that run. `ports`: how many there will be.
    /// Errors: a change is not possible; names the line.
    fn difference(
        &self,
        (running, why_gone): (&Tables, &str),
        now: &Tables,
        ports: usize,
    ) -> Result<Difference, String> {
        let file = &self.file;
        let port = |table: &Entry<Port>| {
            let built = build_port(&file.path, table, ports);
            let port = built.map_err(with_sources)?;
            match self.reach.lacks(&port) {
                None => Ok(port),
                Some((key, why)) => Err(format!("{}: {why}", file.place_of(table, key))),
            }
        };
        let network = |table: &Entry<Network>| {
            let built = build_network(&file.path, table);
            let network = built.map_err(with_sources)?;
            match self.reach.lacks_uplink(&network) {
                None => Ok(network),
                Some(why) => Err(format!("{}: {why}", file.place_of(table, "uplink"))),
            }
        };
        Ok(Difference {
            networks: Changes::between(&running.networks, &now.networks, why_gone, network)?,
            ports: Changes::between(&running.ports, &now.ports, why_gone, port)?,
        })
    }

    /// Makes changes that the helper has checked last; returns whether its configuration is in force.
    fn apply(&mut self, difference: Difference, outcome: &mut Outcome) -> bool {
        let Difference { ports, networks } = difference;
        for (name, why) in &ports.ending {
            let reason = match self.ports.remove(name) {
                Ok(()) => {
                    outcome.done.push(format!("port {name} {why}: ended"));
                    why.clone()
                }
                Err(error) => {
                    outcome.failed.push(error.to_string());
                    error.to_string()
                }
            };
            let ports = &mut self.running.ports;
            let gone = ports.iter().position(|table| table.name == *name);
            let gone = gone.map(|at| ports.remove(at));
            if let Some(path) = gone.as_ref().and_then(listening_path) {
                // A file that has replaced the socket is not removed.
                let _ = self.requests.remove(&path);
            }
            JOURNAL.record(Subject::Port(name), What::Removed, Some(reason));
        }
        for (name, why) in &networks.ending {
            if networks.restarts(name) {
                self.ports.free_uplink(name);
                outcome.done.push(format!("network {name} {why}"));
            } else {
                self.ports.remove_network(name);
                self.running.networks.retain(|table| table.name != *name);
                outcome.done.push(format!("network {name} {why}: ended"));
            }
        }
        if let Err(error) = self.requests.adopt() {
            outcome.failed.push(with_sources(&error));
            return false;
        }
        for (table, port) in ports.changed {
            match self.change_live(&table, &port) {
                Ok(done) => outcome.done.push(done),
                Err(error) => outcome.failed.push(format!("{error:#}")),
            }
        }
        for (table, network) in networks.changed {
            match self.change_uplink(&table, &network) {
                Ok(done) => outcome.done.push(done),
                Err(error) => outcome.failed.push(format!("{error:#}")),
            }
        }
        for (table, network) in networks.starting {
            self.put_network(table, network, outcome);
        }
        for (table, port) in ports.starting {
            match self.add(&port) {
                Ok(()) => {
                    outcome.done.push(format!("port {} began", port.name));
                    JOURNAL.record(
                        Subject::Port(&port.name),
                        What::Added,
                        Some(port.endpoint.to_string()),
                    );
                    self.running.ports.push(table);
                }
                Err(error) => outcome.failed.push(format!("{error:#}")),
            }
        }
        true
    }

    /// Changes a port that keeps running; returns a message.
    fn change_live(&mut self, table: &Entry<Port>, port: &PortConfig) -> anyhow::Result<String> {
        let known = of_name(&self.running.ports, &table.name);
        let keys = known.map_or_else(Vec::new, |known| known.differences(table));
        self.ports.change(port)?;
        replace(&mut self.running.ports, table);
        JOURNAL.record(Subject::Port(&port.name), What::Changed, Some(keys.join(", ")));
        let name = &port.name;
        Ok(format!(
            "port {name} has changed ({}), and goes on",
            keys.join(", ")
        ))
    }

    /// Changes the uplink's hints of a network that keeps running; returns a message.
    fn change_uplink(&mut self, table: &Entry<Network>, network: &NetworkConfig) -> anyhow::Result<String> {
        if let Some(mut uplink) = network.uplink.clone() {
            let hints = uplink.options_with_hints().hints;
            self.ports.set_uplink_hints(&network.name, hints)?;
        }
        let known = of_name(&self.running.networks, &table.name);
        let keys = known.map_or_else(Vec::new, |known| known.differences(table));
        replace(&mut self.running.networks, table);
        let (name, keys) = (&network.name, keys.join(", "));
        Ok(format!("network {name} has changed ({keys}), and goes on"))
    }

    /// Starts a network, or replaces its uplink.
    fn put_network(&mut self, table: Entry<Network>, network: NetworkConfig, outcome: &mut Outcome) {
        let known = self
            .running
            .networks
            .iter_mut()
            .find(|known| known.name == network.name);
        let Some(known) = known else {
            match self.ports.add_network(&network) {
                Ok(()) => {
                    outcome.done.push(format!("network {} began", network.name));
                    self.running.networks.push(table);
                }
                Err(error) => outcome.failed.push(format!("{error:#}")),
            }
            return;
        };
        // The uplink is retried without another request, so the new table is in force even if it cannot be opened now.
        *known = table;
        if let Err(error) = self.ports.set_uplink(&network.name, network.uplink) {
            let retried = if outcome.retries { "; it is retried" } else { "" };
            outcome.failed.push(format!("{error:#}{retried}"));
        }
    }

    fn add(&self, port: &PortConfig) -> anyhow::Result<()> {
        let source = match &port.endpoint {
            Endpoint::Server(path) => {
                let made = self.requests.listen(&port.name);
                let listener = made.map_err(|error| {
                    let (name, path) = (&port.name, path.display());
                    anyhow::anyhow!("port {name}: cannot listen at {path}: {}", with_sources(&error))
                })?;
                VmmSource::Listen(listener)
            }
            Endpoint::Client(path) => VmmSource::Connect(path.clone()),
            Endpoint::Fd(_) => anyhow::bail!("port {}: {NO_THREAD}", port.name),
        };
        let added = self.ports.add(port, source);
        if let (Err(_), Endpoint::Server(path)) = (&added, &port.endpoint) {
            let _ = self.requests.remove(path);
        }
        added
    }
}

/// Logs the outcome.
fn log(of: &str, outcome: &Outcome) {
    for line in &outcome.done {
        tracing::info!("{of}: {line}");
    }
    for line in &outcome.failed {
        tracing::error!("{of}: {line}");
    }
}

/// The path of a port's socket, if the daemon listens on it.
fn listening_path(entry: &Entry<Port>) -> Option<PathBuf> {
    let socket = &entry.value.socket;
    socket.socket_path.clone().filter(|_| !socket.client)
}

impl Reach {
    /// The key of a port that the daemon cannot apply any more, and why, with the remedy.
    fn lacks(self, port: &PortConfig) -> Option<(&'static str, String)> {
        let again = "start the daemon again";
        if port.has_external_program() {
            let why = "sockets and maps of others are taken over before the daemon drops its privileges";
            return Some(("inhibit", format!("inhibit: {why}: {again}")));
        }
        match (&port.endpoint, &port.nic) {
            (Endpoint::Fd(fd), _) => Some((
                "fd",
                format!(
                    "fd {fd}: descriptors are inherited when the daemon is started: {again}, or use socket-path"
                ),
            )),
            (Endpoint::Client(_), _) if !self.vmms => Some((
                "client",
                format!(
                    "client: the daemon's sandbox has no paths to VMMs' sockets, since no port had it at the start: \
                     {again}"
                ),
            )),
            (_, nic) => {
                let name = &nic.queues()?.name;
                Some(("ifname", self.lacks_interface("ifname", name)?))
            }
        }
    }

    /// Why the daemon cannot open the uplink of a network any more, with the remedy.
    fn lacks_uplink(self, network: &NetworkConfig) -> Option<String> {
        self.lacks_interface("uplink", &network.uplink.as_ref()?.at.name)
    }

    fn lacks_interface(self, key: &str, name: &str) -> Option<String> {
        (!self.leases).then(|| {
            format!(
                "{key} {name}: the daemon started without privileges (CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF, \
                 or a steward): start the daemon again with it"
            )
        })
    }
}
