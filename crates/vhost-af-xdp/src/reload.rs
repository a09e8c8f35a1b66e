//! A configuration that is read again: its difference to what runs is applied, and nothing else is touched.
//!
//! The keeper reads the file, since it lies outside of the sandbox; what is wrong with it, it says, and nothing changes.
//! Then, in this order: ports that are gone or changed end; what the file says is what counts
//! ([`keeper`](crate::guard::keeper)); ports that are new or changed begin. A port of which the file says the same as
//! before is not looked at: its VMM stays connected, its frames go on.
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
use crate::config::{Endpoint, NicConfig, PortConfig};
use crate::guard::keeper::Requests;
use crate::ports::{NO_THREAD, Ports};
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

/// What a port's table means in a file that has so many.
pub(crate) type Build = fn(&Path, &Table, usize) -> Result<PortConfig, FileError>;

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

/// What is to be done.
struct Difference {
    /// Names of ports that end, and why.
    go: Vec<(String, String)>,
    come: Vec<(Table, PortConfig)>,
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
        let named = |tables: &[Table], name: &str| tables.iter().find(|table| table.name == name).cloned();
        let (mut go, mut come) = (Vec::new(), Vec::new());
        for table in &self.running {
            match named(&file.ports, &table.name) {
                None => go.push((table.name.clone(), "is not in the file any more".to_owned())),
                Some(other) => match table.differences(&other).as_slice() {
                    [] => {}
                    keys => go.push((table.name.clone(), format!("has another {}", keys.join(", ")))),
                },
            }
        }
        for table in &file.ports {
            let is_there = named(&self.running, &table.name).is_some();
            if is_there && !go.iter().any(|(name, _)| *name == table.name) {
                continue;
            }
            let port =
                (self.build)(&file.path, table, file.ports.len()).map_err(|error| with_sources(&error))?;
            if let Some((key, why)) = self.reach.lacks(&port) {
                let (path, line) = (file.path.display(), table.line_of(key));
                return Err(format!("{path} line {line}: port {}: {why}", table.name));
            }
            come.push((table.clone(), port));
        }
        Ok(Difference { go, come })
    }

    fn apply(&mut self, file: ConfigFile, difference: Difference, outcome: &mut Outcome) {
        let Difference { go, come } = difference;
        for (name, why) in go {
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
        if let Err(error) = self.requests.adopt() {
            outcome.failed.push(with_sources(&error));
            return;
        }
        for (table, port) in come {
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
            (_, NicConfig::Interface { name, .. }) if !self.leases => Some((
                "ifname",
                format!(
                    "ifname {name}: the daemon began without what interfaces take (CAP_NET_ADMIN, CAP_NET_RAW and \
                     CAP_BPF, or a steward): {again} with it"
                ),
            )),
            _ => None,
        }
    }
}
