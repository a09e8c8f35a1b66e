//! A configuration that is read again: its difference to what runs is applied, and nothing else is touched.
//!
//! The helper reads the file, since it lies outside of the sandbox; what is wrong with it, it says, and nothing
//! changes. Then, in this order: ports that are gone or changed end, networks that are gone, too, and uplinks that are
//! to be others are given back; what the file says is what counts ([`helper`](crate::supervision::helper)); networks have
//! their uplinks, and ports that are new or changed begin. A port of which the file says the same as before is not
//! looked at: its VMM stays connected, its frames go on, also to the other ports of a network whose uplink changes. So
//! do those of a port or network in which only keys differ that can change at run time ([`Table::is_live`]).
//!
//! One thread does it, and one reading after the other. What cannot be done for one port is said, and the others are as
//! the file has them; the next reading tries again.
//!
//! Networks and ports that are not in the file come, change and go by the same way ([`changes`]).

pub(crate) mod changes;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use model::config::{ConfigFile, Entry, NamedTable, Network, Port, Table, TableKind, Tables};
use model::control::{Change, Changed, Refused};
use model::events::What;
use model::state::{Configuration, Source, TableConfiguration};
use steer::with_sources;

use crate::config::file::{build_network, build_port};
use crate::config::{Endpoint, NetworkConfig, PortConfig};
use crate::journal::{JOURNAL, Of};
use crate::ports::{NO_THREAD, Ports};
use crate::supervision::helper::Requests;
use crate::vhost_user::accept::VmmSource;

/// What came of a reading.
#[derive(Debug, Default)]
struct Outcome {
    /// What was done, a line each.
    done: Vec<String>,
    /// What was not, a line each.
    failed: Vec<String>,
    /// An uplink that is not available is opened later.
    retries: bool,
}

/// What somebody wants.
enum Wanted {
    /// That the file is read again.
    Reading,
    Change(Change, Sender<Result<Changed, Refused>>),
}

/// For those who want it read again.
#[derive(Clone)]
pub(crate) struct Reload {
    wanted: Sender<Wanted>,
    readings: Arc<Mutex<Configuration>>,
}

/// What cannot be had any more in the sandbox.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reach {
    /// Sockets of VMMs.
    pub(crate) vmms: bool,
    /// Queues of interfaces.
    pub(crate) leases: bool,
}

/// The thread that does it.
struct Reader {
    ports: Arc<Ports>,
    requests: Arc<Requests>,
    reach: Reach,
    /// What was read, and counts.
    file: ConfigFile,
    /// Where added networks and ports are kept for the next start.
    state: Option<PathBuf>,
    /// What runs.
    running: Tables,
    /// What of the last reading could not be done.
    failed: Vec<String>,
    readings: Arc<Mutex<Configuration>>,
}

impl Reload {
    /// Reads the file of these ports again, whenever somebody wants that.
    pub(crate) fn start(
        (file, state): (ConfigFile, Option<PathBuf>),
        ports: Arc<Ports>,
        requests: Arc<Requests>,
        reach: Reach,
    ) -> io::Result<Self> {
        let (wanted, asked) = mpsc::channel();
        // What was added, and could not start, is not among them.
        let networks = ports.networks();
        let is_network = |table: &&Entry<Network>| networks.iter().any(|network| network.name == table.name);
        let is_port = |table: &&Entry<Port>| ports.named(&table.name).is_some();
        let running = Tables {
            networks: file.all().filter(is_network).cloned().collect(),
            ports: file.all().filter(is_port).cloned().collect(),
        };
        let readings = Arc::new(Mutex::new(Configuration {
            path: file.path.clone(),
            read_at: now(),
            failed: Vec::new(),
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
            // The file may have taken over some of it.
            reader.keep();
        }
        let thread = std::thread::Builder::new().name("reload".to_owned());
        thread.spawn(move || reader.work(&asked))?;
        Ok(Self { wanted, readings })
    }

    /// Some time soon.
    pub(crate) fn ask(&self) {
        let _ = self.wanted.send(Wanted::Reading);
    }

    /// Waits for what comes of a change.
    /// Errors: [`Refused`]; all is as it was before, if that says nothing else.
    pub(crate) fn change(&self, change: Change) -> Result<Changed, Refused> {
        let (answer, outcome) = mpsc::channel();
        let _ = self.wanted.send(Wanted::Change(change, answer));
        outcome.recv().unwrap_or(Err(Refused::ending()))
    }

    pub(crate) fn readings(&self) -> Configuration {
        locked(&self.readings).clone()
    }
}

impl Outcome {
    /// Nothing was done; why.
    fn failed(why: String) -> Self {
        Self {
            failed: vec![why],
            ..Self::default()
        }
    }
}

fn locked(readings: &Mutex<Configuration>) -> MutexGuard<'_, Configuration> {
    readings.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// Why something of the file ends.
const GONE: &str = "is not in the file any more";

/// What is to be done of one kind of things.
struct Changes<T, C> {
    /// Names of those that end, and why.
    go: Vec<(String, String)>,
    /// Those that there were until now are among them if they are others.
    come: Vec<(Entry<T>, C)>,
    /// Those that go on, of which something is said otherwise.
    changed: Vec<(Entry<T>, C)>,
}

/// What is to be done.
struct Difference {
    ports: Changes<Port, PortConfig>,
    networks: Changes<Network, NetworkConfig>,
}

impl<T: Table, C> Changes<T, C> {
    /// What is new in these tables, and what means another thing than in those from before.
    fn between(
        before: &[Entry<T>],
        now: &[Entry<T>],
        why_gone: &str,
        build: impl Fn(&Entry<T>) -> Result<C, String>,
    ) -> Result<Self, String> {
        let is_gone = |table: &&Entry<T>| of_name(now, &table.name).is_none();
        let gone = before.iter().filter(is_gone);
        let mut changes = Self {
            go: gone
                .map(|table| (table.name.clone(), why_gone.to_owned()))
                .collect(),
            come: Vec::new(),
            changed: Vec::new(),
        };
        for table in now {
            let Some(known) = of_name(before, &table.name) else {
                changes.come.push((table.clone(), build(table)?));
                continue;
            };
            let keys = known.differences(table);
            if keys.iter().any(|key| !known.value.is_live(key)) {
                let why = format!("has changed ({})", keys.join(", "));
                changes.go.push((table.name.clone(), why));
                changes.come.push((table.clone(), build(table)?));
            } else if !keys.is_empty() {
                changes.changed.push((table.clone(), build(table)?));
            }
        }
        Ok(changes)
    }

    /// It goes to come as another one.
    fn comes_again(&self, name: &str) -> bool {
        self.come.iter().any(|(table, _)| table.name == name)
    }
}

fn of_name<'a, T>(tables: &'a [Entry<T>], name: &str) -> Option<&'a Entry<T>> {
    tables.iter().find(|table| table.name == name)
}

/// Lets a table take the place of the one of its name.
fn replace<T: Clone>(tables: &mut [Entry<T>], by: &Entry<T>) {
    let known = tables.iter_mut().find(|table| table.name == by.name);
    known.into_iter().for_each(|known| known.clone_from(by));
}

impl Reader {
    fn work(mut self, asked: &Receiver<Wanted>) {
        while let Ok(wanted) = asked.recv() {
            // Who asked may have gone.
            match wanted {
                Wanted::Reading => drop(self.read_and_tell()),
                Wanted::Change(change, answer) => drop(answer.send(self.change(&change))),
            }
        }
    }

    fn read_and_tell(&mut self) -> Outcome {
        let outcome = self.read();
        tell("configuration", &outcome);
        self.failed.clone_from(&outcome.failed);
        self.describe();
        outcome
    }

    /// For those who ask how ports and networks are configured.
    fn describe(&self) {
        let (ports, networks) = (self.described::<Port>(), self.described::<Network>());
        let absent = [self.absent::<Network>(), self.absent::<Port>()].concat();
        let mut readings = locked(&self.readings);
        (readings.ports, readings.networks) = (ports, networks);
        readings.failed = [self.failed.as_slice(), &absent].concat();
    }

    /// What was added and does not run, a line each.
    fn absent<T: NamedTable>(&self) -> Vec<String> {
        let added = T::of(&self.file.added).iter().chain(T::of(&self.file.left_out));
        let absent = added.filter(|table| of_name(T::of(&self.running), &table.name).is_none());
        let line = |table: &Entry<T>| {
            let (kind, name) = (T::KIND, &table.name);
            format!("{kind} {name} could not start: the log says why; `vhost-af-xdp reload` tries again")
        };
        absent.map(line).collect()
    }

    fn described<T: NamedTable>(&self) -> BTreeMap<String, TableConfiguration> {
        let described = T::of(&self.running).iter().map(|table| {
            let source = match of_name(T::of(&self.file.tables), &table.name) {
                Some(_) => Source::File,
                None => Source::Api,
            };
            let mut keys = table.value.keys();
            // There may be many; they are asked for by themselves.
            keys.remove("rule");
            (table.name.clone(), TableConfiguration { source, keys })
        });
        described.collect()
    }

    fn read(&mut self) -> Outcome {
        let nothing = |why: String| Outcome::failed(format!("{why}; nothing was changed"));
        let mut file = match self.requests.read() {
            Ok(file) => self.with_rules(file, &Tables::default()),
            Err(error) => return nothing(with_sources(&error)),
        };
        let difference = match self.difference(&file, None) {
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
            // The daemon runs with those of its start: the next reading is compared with these, too.
            file.daemon = self.file.daemon.clone();
        }
        let added = self.file.added.clone();
        self.apply(file, difference, &mut outcome);
        if self.file.added != added {
            // The file has some of them now.
            outcome.done.push(self.keep());
        }
        locked(&self.readings).read_at = now();
        if outcome.done.is_empty() && outcome.failed.is_empty() {
            outcome.done.push("read again, nothing changed".to_owned());
        }
        outcome
    }

    /// What a file says otherwise than what runs; `of`: only of the port or network of that name.
    /// Errors: what cannot be done at all, with its line.
    fn difference(&self, file: &ConfigFile, of: Option<(TableKind, &str)>) -> Result<Difference, String> {
        let port = |table: &Entry<Port>| {
            let built = build_port(&file.path, table, file.all::<Port>().count());
            let port = built.map_err(|error| with_sources(&error))?;
            match self.reach.lacks(&port) {
                None => Ok(port),
                Some((key, why)) => Err(format!("{}: {why}", file.place_of(table, key))),
            }
        };
        let network = |table: &Entry<Network>| {
            let built = build_network(&file.path, table);
            let network = built.map_err(|error| with_sources(&error))?;
            match self.reach.lacks_uplink(&network) {
                None => Ok(network),
                Some(why) => Err(format!("{}: {why}", file.place_of(table, "uplink"))),
            }
        };
        Ok(Difference {
            networks: self.changes_to(file, of, network)?,
            ports: self.changes_to(file, of, port)?,
        })
    }

    fn changes_to<T: NamedTable, C>(
        &self,
        file: &ConfigFile,
        of: Option<(TableKind, &str)>,
        build: impl Fn(&Entry<T>) -> Result<C, String>,
    ) -> Result<Changes<T, C>, String> {
        let is_meant = |table: &&Entry<T>| of.is_none_or(|of| of == (T::KIND, table.name.as_str()));
        let running = T::of(&self.running).iter().filter(is_meant).cloned();
        let now = file.all().filter(is_meant).cloned();
        let why_gone = if of.is_none() { GONE } else { "was removed" };
        let (running, now): (Vec<_>, Vec<_>) = (running.collect(), now.collect());
        Changes::between(&running, &now, why_gone, build)
    }

    fn apply(&mut self, file: ConfigFile, difference: Difference, outcome: &mut Outcome) {
        let Difference { ports, networks } = difference;
        for (name, why) in &ports.go {
            if let Err(error) = self.ports.remove(name) {
                outcome.failed.push(error.to_string());
            }
            let ports = &mut self.running.ports;
            let gone = ports.iter().position(|table| table.name == *name);
            let gone = gone.map(|at| ports.remove(at));
            if let Some(path) = gone.as_ref().and_then(made_at) {
                // Whoever replaced it keeps it.
                let _ = self.requests.remove(&path);
            }
            JOURNAL.tell(Of::Port(name), What::Removed, Some(why.clone()));
            outcome.done.push(format!("port {name} {why}: ended"));
        }
        for (name, why) in &networks.go {
            if networks.comes_again(name) {
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
            self.describe();
            return;
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
        for (table, network) in networks.come {
            self.have(table, network, outcome);
        }
        for (table, port) in ports.come {
            match self.add(&port) {
                Ok(()) => {
                    outcome.done.push(format!("port {} began", port.name));
                    JOURNAL.tell(Of::Port(&port.name), What::Added, Some(port.endpoint.to_string()));
                    self.running.ports.push(table);
                }
                Err(error) => outcome.failed.push(format!("{error:#}")),
            }
        }
        self.file = file;
        self.describe();
    }

    /// A port goes on as another one; in words.
    fn change_live(&mut self, table: &Entry<Port>, port: &PortConfig) -> anyhow::Result<String> {
        let known = of_name(&self.running.ports, &table.name);
        let keys = known.map_or_else(Vec::new, |known| known.differences(table));
        self.ports.change(port)?;
        replace(&mut self.running.ports, table);
        JOURNAL.tell(Of::Port(&port.name), What::Changed, Some(keys.join(", ")));
        let name = &port.name;
        Ok(format!(
            "port {name} has changed ({}), and goes on",
            keys.join(", ")
        ))
    }

    /// A network goes on with its uplink as another one; in words.
    fn change_uplink(&mut self, table: &Entry<Network>, network: &NetworkConfig) -> anyhow::Result<String> {
        if let Some(uplink) = &network.uplink {
            self.ports.set_uplink_hints(&network.name, uplink.hints)?;
        }
        let known = of_name(&self.running.networks, &table.name);
        let keys = known.map_or_else(Vec::new, |known| known.differences(table));
        replace(&mut self.running.networks, table);
        let (name, keys) = (&network.name, keys.join(", "));
        Ok(format!("network {name} has changed ({keys}), and goes on"))
    }

    /// A network begins, or has another uplink.
    fn have(&mut self, table: Entry<Network>, network: NetworkConfig, outcome: &mut Outcome) {
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
        // It is tried again by itself, so what is said counts.
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

/// Says what was done, and what was not.
fn tell(of: &str, outcome: &Outcome) {
    for line in &outcome.done {
        tracing::info!("{of}: {line}");
    }
    for line in &outcome.failed {
        tracing::error!("{of}: {line}");
    }
}

/// Where a port's socket is, if it was made here.
fn made_at(entry: &Entry<Port>) -> Option<PathBuf> {
    let socket = &entry.value.socket;
    socket.socket_path.clone().filter(|_| !socket.client)
}

impl Reach {
    /// The key of a port that cannot be had any more, and the remedy.
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

    /// Why the uplink of a network cannot be had any more, with the remedy.
    fn lacks_uplink(self, network: &NetworkConfig) -> Option<String> {
        self.lacks_interface("uplink", &network.uplink.as_ref()?.name)
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
