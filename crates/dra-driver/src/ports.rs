//! The ports of claims: prepared, released, restored.
//!
//! A prepared claim is a checkpoint, a directory, a port of the daemon for each allocated device, and files for the
//! container runtime. They are made in this order and removed in the reverse one. Each step may find its result there
//! already, so a claim is prepared and released as often as kubelet asks, and after a crash at any point. The daemon's
//! state file keeps ports over its restarts; where it has none, or lost it, [`Ports::restore`] adds them again.
//!
//! All of it blocks, and happens for one claim at a time, each for a [`TURN`] at most: the daemon changes one port at a
//! time, too.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use model::config::Mac;
use model::state::NetworkStatus;
use serde_json::{Map, Value};

use crate::cdi::Files;
use crate::checkpoint::{Allocated, Checkpoint, ClaimName, ClaimPort, Store};
use crate::daemon::{Daemon, DaemonError};
use crate::directory::Sockets;
use crate::names;

/// After a port could not be restored, how long until the next attempt.
const PAUSE: Duration = Duration::from_secs(10);

/// How long other claims wait while ports of a claim are added or removed, or those of all claims restored. What is left
/// follows at kubelet's next call, or when the daemon's networks are read next.
const TURN: Duration = Duration::from_secs(5);

/// A claim as the cluster has allocated it, with keys for each device.
#[derive(Debug)]
pub(crate) struct Claim {
    pub(crate) name: ClaimName,
    pub(crate) devices: Vec<(Allocated, Map<String, Value>)>,
}

/// Why a claim is not prepared or not released.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PortsError {
    #[error(
        "request {request}: device {device} is no network of the daemon any more (it has: {networks}): add the network \
             again, or delete the pod, so that the claim is allocated again"
    )]
    NoNetwork {
        request: String,
        device: String,
        networks: String,
    },
    #[error("request {request}: {source}")]
    Port { request: String, source: DaemonError },
    #[error(transparent)]
    Daemon(#[from] DaemonError),
    #[error("{done} of {all} ports are done, and the daemon is slow: kubelet's next call continues")]
    Slow { done: usize, all: usize },
    #[error("{path}: {source}: check that the driver may write there")]
    File { path: PathBuf, source: io::Error },
}

/// All prepared claims.
#[derive(Debug)]
pub(crate) struct Ports {
    pub(crate) daemon: Daemon,
    pub(crate) sockets: Sockets,
    pub(crate) files: Files,
    pub(crate) store: Store,
    /// Keys of sockets that claims need not name.
    pub(crate) defaults: Map<String, Value>,
    /// Names of the daemon's networks when they were read last: its whole state is too much to read for each claim.
    pub(crate) networks: Vec<String>,
    /// No port is restored before this time.
    pub(crate) paused: Option<Instant>,
    /// Claims of which the daemon may have some ports, and that are not to be restored: their release is not done.
    pub(crate) unfinished: HashSet<String>,
    /// Claims whose ports could not be restored, which was logged.
    pub(crate) failing: HashSet<String>,
}

impl Ports {
    /// Prepares a claim, or finds that it is prepared.
    ///
    /// # Errors
    /// Why it is not. What was made of a claim that was not prepared before is removed.
    pub(crate) fn prepare(&mut self, claim: &Claim) -> Result<Checkpoint, PortsError> {
        let uid = &claim.name.uid;
        if let Some(known) = self.store.get(uid).cloned() {
            let devices = claim.devices.iter().map(|(device, _)| device);
            if !known.ports.iter().map(|port| &port.device).eq(devices) {
                // It was allocated again, and kubelet did not release it before.
                self.release(uid)?;
            } else if !self.unfinished.contains(uid) {
                self.establish(&known)?;
                return Ok(known);
            }
        }
        let checkpoint = self.plan(claim)?;
        let stored = self.store.put(checkpoint.clone());
        stored.map_err(|source| file_error(self.store.path(uid), source))?;
        let established = self.establish(&checkpoint);
        self.unfinished.remove(uid);
        if !matches!(established, Ok(()) | Err(PortsError::Slow { .. }))
            && let Err(error) = self.release(uid)
        {
            let claim = claim.name.full();
            tracing::warn!(claim, uid, "{error}: what was prepared is removed later");
        }
        established.map(|()| checkpoint)
    }

    /// Removes all that was prepared for a claim.
    ///
    /// # Errors
    /// Why something is left; the checkpoint is, then.
    pub(crate) fn release(&mut self, uid: &str) -> Result<(), PortsError> {
        self.unfinished.insert(uid.to_owned());
        let claim = names::claim(uid);
        let prefix = format!("{}{claim}-", names::PORTS);
        let ports: Vec<String> = match self.store.get(uid) {
            Some(checkpoint) => checkpoint.ports.iter().map(|port| port.port.clone()).collect(),
            // It may be lost, or cannot be read: the names are known all the same.
            None => {
                let networks = self.daemon.networks()?;
                let ports = networks.into_iter().flat_map(|network| network.ports);
                ports.filter(|port| port.starts_with(&prefix)).collect()
            }
        };
        in_turn(&ports, |port| Ok(self.daemon.remove(port)?))?;
        let removed = self.files.remove(uid);
        removed.map_err(|source| file_error(self.files.cdi.clone(), source))?;
        let removed = self.sockets.remove(&claim);
        removed.map_err(|source| file_error(self.sockets.of(&claim), source))?;
        let removed = self.store.remove(uid);
        removed.map_err(|source| file_error(self.store.path(uid), source))?;
        self.unfinished.remove(uid);
        Ok(())
    }

    /// All claims that have a checkpoint; if that cannot be read, with the names in the claim's metadata.
    pub(crate) fn claims(&self) -> Vec<ClaimName> {
        let read = self.store.all().map(|checkpoint| checkpoint.claim.clone());
        let unreadable = self.store.unreadable().filter_map(|uid| self.files.claim(uid));
        read.chain(unreadable).collect()
    }

    /// Restores directories and files of all claims, when the driver starts: a reboot empties /run.
    pub(crate) fn restore_files(&self) {
        for checkpoint in self.store.all() {
            if let Err(error) = self.establish_files(checkpoint) {
                tracing::error!(claim = checkpoint.claim.full(), "{error}");
            }
        }
    }

    /// Adds ports of claims that the daemon has not, because it was restarted without them. `networks`: as they were a
    /// moment ago.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub(crate) fn restore(&mut self, networks: &[NetworkStatus]) -> Result<(), PortsError> {
        self.networks = names_of(networks);
        if self.absent(networks).is_empty() {
            self.paused = None;
            self.failing.clear();
            return Ok(());
        }
        if self.paused.is_some_and(|until| Instant::now() < until) {
            return Ok(());
        }
        self.paused = None;
        let end = Instant::now() + TURN;
        // Some may have been prepared since.
        for checkpoint in self.absent(&self.daemon.networks()?) {
            if Instant::now() > end {
                break;
            }
            let (claim, uid) = (checkpoint.claim.full(), &checkpoint.claim.uid);
            match self.establish(&checkpoint) {
                Ok(()) => {
                    tracing::info!(claim, uid, "ports added to the daemon again");
                    self.failing.remove(uid);
                }
                Err(error) => {
                    if self.failing.insert(uid.clone()) {
                        tracing::error!(claim, uid, "{error}; its pod has no network until then: retrying");
                    }
                    self.paused = Some(Instant::now() + PAUSE);
                    // Each further port would wait as long, and claims with it.
                    if matches!(error, PortsError::Daemon(_)) {
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// Claims with a port that is in none of these networks.
    fn absent(&self, networks: &[NetworkStatus]) -> Vec<Checkpoint> {
        let present: HashSet<&String> = networks.iter().flat_map(|network| &network.ports).collect();
        let is_absent = |checkpoint: &&Checkpoint| {
            let mut ports = checkpoint.ports.iter();
            ports.any(|port| !present.contains(&port.port))
        };
        let all = self.store.all();
        let finished = all.filter(|checkpoint| !self.unfinished.contains(&checkpoint.claim.uid));
        finished.filter(is_absent).cloned().collect()
    }

    /// Removes what belongs to no claim that has a checkpoint.
    ///
    /// # Errors
    /// The daemon does not answer, or a directory cannot be read.
    pub(crate) fn remove_strays(&mut self) -> Result<(), PortsError> {
        let uids: HashSet<&str> = self.store.uids().map(String::as_str).collect();
        let claims: HashSet<String> = uids.iter().map(|uid| names::claim(uid)).collect();
        let is_stray = |claim: &str| !claims.contains(claim);
        let networks = self.daemon.networks()?;
        for port in networks.iter().flat_map(|network| &network.ports) {
            let claim = port
                .strip_prefix(names::PORTS)
                .and_then(|rest| rest.split_once('-'));
            let Some((claim, _)) = claim.filter(|(claim, _)| is_stray(claim)) else {
                continue;
            };
            // Another port may have such a name.
            if self.daemon.socket(port)?.starts_with(self.sockets.of(claim)) {
                self.daemon.remove(port)?;
                tracing::info!(port, "removed: its claim is gone");
            }
        }
        let failed = |path: PathBuf| move |source| file_error(path, source);
        let directories = self.sockets.all().map_err(failed(self.sockets.of("")))?;
        for claim in directories.iter().filter(|claim| is_stray(claim)) {
            self.sockets
                .remove(claim)
                .map_err(failed(self.sockets.of(claim)))?;
        }
        let files = self.files.all().map_err(failed(self.files.cdi.clone()))?;
        for uid in files.iter().filter(|uid| !uids.contains(uid.as_str())) {
            self.files.remove(uid).map_err(failed(self.files.cdi.clone()))?;
        }
        Ok(())
    }

    /// The ports of a claim that is not prepared.
    fn plan(&mut self, claim: &Claim) -> Result<Checkpoint, PortsError> {
        let is_known = |(device, _): &(Allocated, _)| {
            self.networks
                .iter()
                .any(|network| names::device(network) == device.device)
        };
        if !claim.devices.iter().all(is_known) {
            self.networks = names_of(&self.daemon.networks()?);
        }
        let directory = self.sockets.of(&names::claim(&claim.name.uid));
        let plan = |(device, keys): &(Allocated, Map<String, Value>)| {
            let is_meant = |network: &&String| names::device(network) == device.device;
            let network = self
                .networks
                .iter()
                .find(is_meant)
                .ok_or_else(|| PortsError::NoNetwork {
                    request: device.request.clone(),
                    device: device.device.clone(),
                    networks: self.networks.join(", "),
                })?;
            let (port, socket) = names::port_and_socket(&claim.name.uid, &device.request, device.number);
            let mut keys = keys.clone();
            for (key, value) in &self.defaults {
                keys.entry(key.clone()).or_insert_with(|| value.clone());
            }
            let mac = || Mac(names::mac(&port)).to_string().into();
            keys.entry("mac").or_insert_with(mac);
            keys.insert("network".to_owned(), network.as_str().into());
            keys.insert(
                "socket-path".to_owned(),
                directory.join(&socket).to_string_lossy().into(),
            );
            Ok(ClaimPort {
                device: device.clone(),
                port,
                socket,
                keys,
            })
        };
        let ports = claim
            .devices
            .iter()
            .map(plan)
            .collect::<Result<_, PortsError>>()?;
        Ok(Checkpoint::new(claim.name.clone(), ports))
    }

    /// Makes all of a claim that is not there.
    fn establish(&self, checkpoint: &Checkpoint) -> Result<(), PortsError> {
        self.establish_files(checkpoint)?;
        in_turn(&checkpoint.ports, |it| {
            let added = self.daemon.put(&it.port, &it.keys);
            added.map_err(|source| match source {
                DaemonError::NoAnswer { .. } => source.into(),
                source => PortsError::Port {
                    request: it.device.request.clone(),
                    source,
                },
            })
        })
    }

    fn establish_files(&self, checkpoint: &Checkpoint) -> Result<(), PortsError> {
        let claim = names::claim(&checkpoint.claim.uid);
        let directory = self.sockets.of(&claim);
        let created = self.sockets.create(&claim);
        created.map_err(|source| file_error(directory.clone(), source))?;
        let written = self.files.write(checkpoint, &directory.to_string_lossy());
        written.map_err(|source| file_error(self.files.cdi.clone(), source))
    }
}

/// Calls `what` for each port of a claim.
///
/// # Errors
/// The first error of `what`; [`PortsError::Slow`] after a [`TURN`].
fn in_turn<T>(ports: &[T], mut what: impl FnMut(&T) -> Result<(), PortsError>) -> Result<(), PortsError> {
    let end = Instant::now() + TURN;
    for (done, port) in ports.iter().enumerate() {
        if Instant::now() > end {
            let all = ports.len();
            return Err(PortsError::Slow { done, all });
        }
        what(port)?;
    }
    Ok(())
}

fn file_error(path: PathBuf, source: io::Error) -> PortsError {
    PortsError::File { path, source }
}

fn names_of(networks: &[NetworkStatus]) -> Vec<String> {
    networks.iter().map(|network| network.name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use tempfile::TempDir;

    use super::*;
    use crate::directory::Access;

    const UID: &str = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0";

    /// Ports of a daemon that has none, and closes the connection when it is to change something; how often it was.
    fn ports(directory: &TempDir) -> (Ports, Arc<AtomicUsize>) {
        let path = |name: &str| directory.path().join(name);
        let (control, changes) = (path("control"), Arc::new(AtomicUsize::new(0)));
        let (listener, counted) = (UnixListener::bind(&control).expect("ours"), Arc::clone(&changes));
        // Ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, mut line) = (stream.expect("a client"), String::new());
                let read = BufReader::new(&stream).read_line(&mut line);
                read.expect("a request");
                match line.contains("change") {
                    true => drop(counted.fetch_add(1, Relaxed)),
                    false => stream.write_all(b"{\"ok\":[]}\n").expect("it is read"),
                }
            }
        });
        for name in ["cdi", "metadata"] {
            fs::create_dir(path(name)).expect("ours");
        }
        let access = Access {
            group: None,
            mode: 0o755,
            label: None,
        };
        let ports = Ports {
            daemon: Daemon { control },
            sockets: Sockets::open(path("s"), access).expect("ours"),
            files: Files {
                driver: "driver".to_owned(),
                cdi: path("cdi"),
                metadata: path("metadata"),
            },
            store: Store::open(path("claims")).expect("ours"),
            defaults: Map::new(),
            networks: Vec::new(),
            paused: None,
            unfinished: HashSet::new(),
            failing: HashSet::new(),
        };
        (ports, changes)
    }

    fn checkpoint(uid: &str) -> Checkpoint {
        let claim = ClaimName {
            namespace: "n".to_owned(),
            name: "c".to_owned(),
            uid: uid.to_owned(),
            in_pod: None,
        };
        let device = Allocated {
            request: "net".to_owned(),
            number: 0,
            pool: "node".to_owned(),
            device: "lan".to_owned(),
            share: None,
        };
        let (port, socket) = names::port_and_socket(uid, "net", 0);
        let keys = Map::new();
        Checkpoint::new(
            claim,
            vec![ClaimPort {
                device,
                port,
                socket,
                keys,
            }],
        )
    }

    #[test]
    fn daemon_that_does_not_answer_is_waited_for_once_for_all_claims() {
        let directory = tempfile::tempdir().expect("a directory");
        let (mut ports, changes) = ports(&directory);
        for uid in ["a", "b", "c"] {
            ports.store.put(checkpoint(uid)).expect("written");
        }
        for _ in 0..2 {
            ports.restore(&[]).expect("logged only");
            assert_eq!(changes.load(Relaxed), 1);
        }
    }

    /// A release may take several calls. If its ports were restored in between, it would never end.
    #[test]
    fn ports_of_a_claim_whose_release_goes_on_are_not_restored() {
        let directory = tempfile::tempdir().expect("a directory");
        let (mut ports, changes) = ports(&directory);
        ports.store.put(checkpoint("a")).expect("written");
        ports.release("a").expect_err("the daemon does not answer");
        assert_eq!(changes.load(Relaxed), 1);
        ports.restore(&[]).expect("nothing to do");
        assert_eq!(changes.load(Relaxed), 1);
    }

    #[test]
    fn what_is_left_of_a_claim_is_released_before_it_is_prepared_for_other_devices() {
        let directory = tempfile::tempdir().expect("a directory");
        let (mut ports, _) = ports(&directory);
        let before = checkpoint("a");
        ports.store.put(before.clone()).expect("written");
        ports.release("a").expect_err("the daemon does not answer");
        let name = before.claim.clone();
        let claim = Claim {
            name,
            devices: Vec::new(),
        };
        ports.prepare(&claim).expect_err("the daemon does not answer");
        assert_eq!(ports.store.get("a"), Some(&before));
    }

    /// A privileged container can write its files.
    #[test]
    fn files_of_a_claim_name_no_other_claim() {
        let directory = tempfile::tempdir().expect("a directory");
        let (ports, _) = ports(&directory);
        ports.files.write(&checkpoint("b"), "/s").expect("written");
        let of = |uid: &str| ports.files.metadata.join(uid);
        fs::rename(of("b"), of("a")).expect("ours");
        let claim = ports.files.claim("a").expect("named");
        assert_eq!((claim.full(), claim.uid), ("n/c".to_owned(), "a".to_owned()));
    }

    #[test]
    fn only_what_this_driver_made_is_removed_as_stray() {
        let directory = tempfile::tempdir().expect("a directory");
        let (mut ports, _) = ports(&directory);
        let kept = [
            "s/keep/a",
            "s/lost+found",
            "cdi/driver-2-UID.json",
            "cdi/driver-x.json",
        ];
        let removed = [
            "s/0f1e2d3c4b5a6978/net.sock",
            "metadata/UID/net.json",
            "cdi/driver-UID.json",
        ];
        let path = |name: &&str| directory.path().join(name.replace("UID", UID));
        for path in kept.iter().chain(&removed).map(path) {
            fs::create_dir_all(path.parent().expect("there")).expect("ours");
            fs::write(path, "").expect("ours");
        }
        ports.remove_strays().expect("removed");
        for (paths, is_there) in [(&kept[..], true), (&removed, false)] {
            for path in paths.iter().map(path) {
                assert_eq!(path.exists(), is_there, "{}", path.display());
            }
        }
    }

    #[test]
    fn two_drivers_do_not_share_a_directory_of_sockets() {
        let directory = tempfile::tempdir().expect("a directory");
        let (ports, _) = ports(&directory);
        let sockets = fs::File::open(ports.sockets.of("")).expect("there");
        let lock = || rustix::fs::flock(&sockets, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        assert!(lock().is_err());
        drop(ports);
        lock().expect("free");
    }
}
