//! A configuration that is read again: its difference to what runs is applied, and nothing else is touched.
//!
//! The keeper reads the file, since it lies outside of the sandbox; what is wrong with it, it says, and nothing changes.
//! Then, in this order: ports that are gone or changed end, networks that are gone, too, and uplinks that are to be others
//! are given back; what the file says is what counts ([`keeper`](crate::guard::keeper)); networks have their uplinks, and
//! ports that are new or changed begin. A port of which the file says the same as before is not looked at: its VMM stays
//! connected, its frames go on, also to the other ports of a network whose uplink changes. So do those of a port that has
//! other limits and nothing else.
//!
//! One thread does it, and one reading after the other. What cannot be done for one port is said, and the others are as
//! the file has them; the next reading tries again.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use steer::with_sources;
use steward::text_file::FileError;

use crate::config::file::{ConfigFile, Table};
use crate::config::{Endpoint, NetworkConfig, NicConfig, PortConfig};
use crate::guard::keeper::Requests;
use crate::ports::{NO_THREAD, Ports};
use crate::rates::{PortRates, is_limit};
use crate::vhost_user::accept::VmmSource;

/// What came of a reading.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Outcome {
    /// What was done, a line each.
    pub(crate) done: Vec<String>,
    /// What was not, a line each.
    pub(crate) failed: Vec<String>,
}

/// The last readings, for `status`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Readings {
    pub(crate) path: PathBuf,
    /// When the one was that counts, seconds since 1970.
    pub(crate) read_at: u64,
    /// What was wrong with the last one, or could not be done.
    pub(crate) failed: Vec<String>,
}

/// For those who want it read again.
#[derive(Clone)]
pub(crate) struct Reload {
    wanted: Sender<Option<Sender<Outcome>>>,
    readings: Arc<Mutex<Readings>>,
}

/// What tables mean.
#[derive(Clone, Copy)]
pub(crate) struct Build {
    /// That of a port, in a file that has so many.
    pub(crate) port: fn(&Path, &Table, usize) -> Result<PortConfig, FileError>,
    pub(crate) network: fn(&Path, &Table) -> Result<NetworkConfig, FileError>,
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
    build: Build,
    reach: Reach,
    /// What was read, and counts.
    file: ConfigFile,
    /// What is said of the ports that run.
    running: Vec<Table>,
    /// What is said of the networks that there are.
    networks: Vec<Table>,
    readings: Arc<Mutex<Readings>>,
}

impl Reload {
    /// Reads the file of these ports again, whenever somebody wants that.
    pub(crate) fn start(
        file: ConfigFile,
        ports: Arc<Ports>,
        requests: Arc<Requests>,
        (build, reach): (Build, Reach),
    ) -> io::Result<Self> {
        let (wanted, asked) = mpsc::channel();
        let readings = Arc::new(Mutex::new(Readings {
            path: file.path.clone(),
            read_at: now(),
            failed: Vec::new(),
        }));
        let reader = Reader {
            ports,
            requests,
            build,
            reach,
            running: file.ports.clone(),
            networks: file.networks.clone(),
            file,
            readings: Arc::clone(&readings),
        };
        let thread = std::thread::Builder::new().name("reload".to_owned());
        thread.spawn(move || reader.work(&asked))?;
        Ok(Self { wanted, readings })
    }

    /// Some time soon.
    pub(crate) fn ask(&self) {
        let _ = self.wanted.send(None);
    }

    /// Waits for what comes of it.
    pub(crate) fn run(&self) -> Outcome {
        let (answer, outcome) = mpsc::channel();
        let _ = self.wanted.send(Some(answer));
        outcome
            .recv()
            .unwrap_or_else(|_| Outcome::failed("the daemon ends".to_owned()))
    }

    pub(crate) fn readings(&self) -> Readings {
        locked(&self.readings).clone()
    }
}

impl Outcome {
    /// Nothing was done; why.
    pub(crate) fn failed(why: String) -> Self {
        Self {
            done: Vec::new(),
            failed: vec![why],
        }
    }
}

fn locked(readings: &Mutex<Readings>) -> MutexGuard<'_, Readings> {
    readings.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// What is to be done of one kind of things.
struct Changes<C> {
    /// Names of those that end, and why.
    go: Vec<(String, String)>,
    /// Those that there were until now are among them if they are others.
    come: Vec<(Table, C)>,
}

/// What is to be done.
struct Difference {
    ports: Changes<PortConfig>,
    networks: Changes<NetworkConfig>,
    /// Ports that go on with other limits.
    limited: Vec<(Table, PortRates)>,
}

impl<C> Changes<C> {
    /// What is new in these tables, and what means another thing than in those from before.
    fn between(
        before: &[Table],
        now: &[Table],
        build: impl Fn(&Table) -> Result<C, String>,
    ) -> Result<Self, String> {
        let (mut go, mut come) = (Vec::new(), Vec::new());
        for table in before {
            match of_name(now, &table.name) {
                None => go.push((table.name.clone(), "is not in the file any more".to_owned())),
                Some(other) => match table.differences(other).as_slice() {
                    [] => {}
                    keys => go.push((table.name.clone(), format!("has another {}", keys.join(", ")))),
                },
            }
        }
        for table in now {
            let goes = go.iter().any(|(name, _)| *name == table.name);
            if goes || of_name(before, &table.name).is_none() {
                come.push((table.clone(), build(table)?));
            }
        }
        Ok(Self { go, come })
    }

    /// It goes to come as another one.
    fn comes_again(&self, name: &str) -> bool {
        self.come.iter().any(|(table, _)| table.name == name)
    }
}

fn of_name<'a>(tables: &'a [Table], name: &str) -> Option<&'a Table> {
    tables.iter().find(|table| table.name == name)
}

/// Lets a table take the place of the one of its name.
fn replace(tables: &mut [Table], by: &Table) {
    let known = tables.iter_mut().find(|table| table.name == by.name);
    known.into_iter().for_each(|known| known.clone_from(by));
}

impl Reader {
    fn work(mut self, asked: &Receiver<Option<Sender<Outcome>>>) {
        while let Ok(answer) = asked.recv() {
            let outcome = self.read();
            for line in &outcome.done {
                tracing::info!("configuration: {line}");
            }
            for line in &outcome.failed {
                tracing::error!("configuration: {line}");
            }
            locked(&self.readings).failed.clone_from(&outcome.failed);
            if let Some(answer) = answer {
                // Who asked may have gone.
                let _ = answer.send(outcome);
            }
        }
    }

    fn read(&mut self) -> Outcome {
        let nothing = |why: String| Outcome::failed(format!("{why}; nothing was changed"));
        let file = match self.requests.read() {
            Ok(file) => file,
            Err(error) => return nothing(with_sources(&error)),
        };
        let difference = match self.difference(&file) {
            Ok(difference) => difference,
            Err(why) => return nothing(why),
        };
        let mut outcome = Outcome::default();
        let daemon = file.daemon.differences(&self.file.daemon);
        if !daemon.is_empty() || file.directories != self.file.directories {
            let keys = if daemon.is_empty() {
                "socket-directories".to_owned()
            } else {
                daemon.join(", ")
            };
            let why = format!("{keys} of [daemon] changed, which counts when the daemon is started again");
            outcome.failed.push(why);
        }
        self.apply(file, difference, &mut outcome);
        if outcome.done.is_empty() && outcome.failed.is_empty() {
            outcome.done.push("read again, nothing changed".to_owned());
        }
        outcome
    }

    /// What a file says otherwise than what runs.
    /// Errors: what cannot be done at all, with its line.
    fn difference(&self, file: &ConfigFile) -> Result<Difference, String> {
        let port = |table: &Table| {
            let built = (self.build.port)(&file.path, table, file.ports.len());
            let port = built.map_err(|error| with_sources(&error))?;
            match self.reach.lacks(&port) {
                None => Ok(port),
                Some((key, why)) => Err(unreachable(
                    &file.path,
                    table,
                    key,
                    &format!("port {}: {why}", table.name),
                )),
            }
        };
        let network = |table: &Table| {
            let built = (self.build.network)(&file.path, table);
            let network = built.map_err(|error| with_sources(&error))?;
            match self.reach.lacks_uplink(&network) {
                None => Ok(network),
                Some(why) => Err(unreachable(
                    &file.path,
                    table,
                    "uplink",
                    &format!("network {}: {why}", table.name),
                )),
            }
        };
        let limited = self.limited(file)?;
        let mut running = self.running.clone();
        limited.iter().for_each(|(table, _)| replace(&mut running, table));
        Ok(Difference {
            limited,
            ports: Changes::between(&running, &file.ports, port)?,
            networks: Changes::between(&self.networks, &file.networks, network)?,
        })
    }

    /// Ports of which a file says other limits and nothing else.
    /// Errors: they cannot be, with the line.
    fn limited(&self, file: &ConfigFile) -> Result<Vec<(Table, PortRates)>, String> {
        let mut limited = Vec::new();
        for table in &file.ports {
            let known = of_name(&self.running, &table.name);
            let keys = known.map_or_else(Vec::new, |known| known.differences(table));
            if !keys.is_empty() && keys.iter().all(|key| is_limit(key)) {
                let built = (self.build.port)(&file.path, table, file.ports.len());
                let port = built.map_err(|error| with_sources(&error))?;
                limited.push((table.clone(), port.rates));
            }
        }
        Ok(limited)
    }

    fn apply(&mut self, file: ConfigFile, difference: Difference, outcome: &mut Outcome) {
        let Difference {
            ports,
            networks,
            limited,
        } = difference;
        for (name, why) in ports.go {
            if let Err(error) = self.ports.remove(&name) {
                outcome.failed.push(error.to_string());
            }
            let gone = self.running.iter().position(|table| table.name == name);
            let gone = gone.map(|at| self.running.remove(at));
            if let Some(path) = gone.as_ref().and_then(made_at) {
                // Whoever replaced it keeps it.
                let _ = self.requests.remove(&path);
            }
            outcome.done.push(format!("port {name} {why}: ended"));
        }
        for (name, why) in &networks.go {
            if networks.comes_again(name) {
                self.ports.free_uplink(name);
                outcome.done.push(format!("network {name} {why}"));
            } else {
                self.ports.remove_network(name);
                self.networks.retain(|table| table.name != *name);
                outcome.done.push(format!("network {name} {why}: ended"));
            }
        }
        if let Err(error) = self.requests.adopt() {
            outcome.failed.push(with_sources(&error));
            return;
        }
        for (table, rates) in limited {
            self.ports.set_rates(&table.name, rates);
            let name = &table.name;
            outcome
                .done
                .push(format!("port {name} goes on with other limits: {rates}"));
            replace(&mut self.running, &table);
        }
        for (table, network) in networks.come {
            self.have(table, network, outcome);
        }
        for (table, port) in ports.come {
            match self.add(&port) {
                Ok(()) => {
                    outcome.done.push(format!("port {} began", port.name));
                    self.running.push(table);
                }
                Err(error) => outcome.failed.push(format!("{error:#}")),
            }
        }
        locked(&self.readings).read_at = now();
        self.file = file;
    }

    /// A network begins, or has another uplink.
    fn have(&mut self, table: Table, network: NetworkConfig, outcome: &mut Outcome) {
        let known = self.networks.iter_mut().find(|known| known.name == network.name);
        let Some(known) = known else {
            match self.ports.add_network(&network) {
                Ok(()) => {
                    outcome.done.push(format!("network {} began", network.name));
                    self.networks.push(table);
                }
                Err(error) => outcome.failed.push(format!("{error:#}")),
            }
            return;
        };
        // It is tried again by itself, so what is said counts.
        *known = table;
        if let Err(error) = self.ports.set_uplink(&network.name, network.uplink) {
            outcome.failed.push(format!("{error:#}; it is tried again"));
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

/// What cannot be had any more, by file, line and name.
fn unreachable(path: &Path, table: &Table, key: &str, what: &str) -> String {
    let (path, line) = (path.display(), table.line_of(key));
    format!("{path} line {line}: {what}")
}

/// Where a port's socket is, if it was made here.
fn made_at(table: &Table) -> Option<PathBuf> {
    let is_client = table.get("client") == Some("true");
    table.get("socket-path").filter(|_| !is_client).map(PathBuf::from)
}

impl Reach {
    /// The key of a port that cannot be had any more, and the remedy.
    fn lacks(self, port: &PortConfig) -> Option<(&'static str, String)> {
        let again = "start the daemon again";
        if port.has_external_program() {
            let why = "sockets and maps of others are taken over before the daemon gives its privileges up";
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
                    "client: the daemon's sandbox has no paths to VMMs' sockets, since no port was one when it began: \
                     {again}"
                ),
            )),
            (_, NicConfig::Interface { name, .. }) => Some(("ifname", self.lacks_interface("ifname", name)?)),
            _ => None,
        }
    }

    /// Why the uplink of a network cannot be had any more, with the remedy.
    fn lacks_uplink(self, network: &NetworkConfig) -> Option<String> {
        self.lacks_interface("uplink", &network.uplink.as_ref()?.name)
    }

    fn lacks_interface(self, key: &str, name: &str) -> Option<String> {
        (!self.leases).then(|| {
            format!(
                "{key} {name}: the daemon began without what interfaces take (CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF, \
                 or a steward): start the daemon again with it"
            )
        })
    }
}
