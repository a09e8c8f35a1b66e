//! The ports of a daemon, which are added and removed while it runs.
//!
//! Adding a port opens its interface and its queues, as at the start; removing one disconnects its VMM, returns its
//! queues and waits for its session. Only the calling thread waits: no other port or worker does.

use std::error::Error;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use host::links::Changes;
use signal_hook::iterator::Handle;
use steer::with_sources;

use crate::config::{HintsConfig, NetworkConfig, PortConfig, ServeConfig, UplinkConfig};
use crate::network::Network;
use crate::nic::interfaces::Interfaces;
use crate::nic::numa::Nodes;
use crate::port::attachment::PatchPort;
use crate::port::watch::Watch;
use crate::port::{AttachedTo, Port, mac_of};
use crate::thread;
use crate::vhost_user::accept::{AcceptThread, Source, VmmSource};
use crate::vhost_user::connection;
use common::lock::Locked;
use dataplane::worker::workers::Workers;

/// How long a port may take to stop before it is abandoned: longer than a bind, or the wait for a steward, may take.
pub(crate) const STOPPING: Duration = Duration::from_secs(12);
/// Interval of checks whether a port has ended.
const LOOK: Duration = Duration::from_millis(5);

pub(crate) const NO_THREAD: &str = "cannot start a thread (ulimit -u, systemd: TasksMax=)";

/// See the module's head.
pub(crate) struct Ports {
    interfaces: Arc<Interfaces>,
    workers: Arc<Workers>,
    /// To end the daemon when a connection ends that was passed in.
    signals: Handle,
    networks: Mutex<Vec<Arc<Network>>>,
    running: Mutex<Vec<Running>>,
    watch: Arc<Watch>,
    /// For ports that listen.
    accepting: Arc<AcceptThread>,
    /// For ports that connect; started with the first one.
    connecting: Mutex<Option<Arc<AcceptThread>>>,
}

/// A port with what belongs to it.
struct Running {
    port: Arc<Port>,
    acceptor: Option<Arc<AcceptThread>>,
}

impl Ports {
    /// Without any ports yet.
    pub(crate) fn new(interfaces: Interfaces, workers: &Arc<Workers>, signals: Handle) -> io::Result<Self> {
        Ok(Self {
            interfaces: Arc::new(interfaces),
            workers: Arc::clone(workers),
            signals,
            networks: Mutex::default(),
            running: Mutex::default(),
            watch: Watch::new()?,
            accepting: AcceptThread::start("accept")?,
            connecting: Mutex::default(),
        })
    }

    /// Opens and starts the configured networks and ports, each port with its source of VMMs; places workers on the
    /// nodes of their NICs. A port or network that was added at run time before is left out if it cannot start.
    pub(crate) fn start(
        &self,
        config: &ServeConfig,
        sources: Vec<(&PortConfig, VmmSource)>,
        nodes: &Nodes,
    ) -> anyhow::Result<()> {
        for (at, network) in config.networks.iter().enumerate() {
            let is_added = (config.file.as_ref()).is_some_and(|file| at >= file.tables.networks.len());
            started(self.open_network(network), is_added)?;
        }
        let mut ready: Vec<(Arc<Port>, VmmSource)> = Vec::new();
        for (port, source) in sources {
            let ends = ready
                .iter()
                .filter_map(|(port, _)| port.attached.patch().cloned());
            let ends: Vec<_> = ends.collect();
            let opened = self.open_with_queues(port, &ends);
            if let Some(opened) = started(opened, config.is_added_port(&port.name))? {
                ready.push((opened, source));
            }
        }
        ready.iter().for_each(|(port, _)| port.close_queues());
        let networks = self.networks();
        let uplinks = networks.iter().flat_map(|network| network.nodes());
        let pairs = ready.iter().flat_map(|(port, _)| port.nodes());
        let pairs: Vec<_> = pairs.chain(uplinks).collect();
        self.workers
            .settle(&nodes.places(config.workers, &config.cpus, &pairs));
        for (port, source) in ready {
            self.run(port, source)?;
        }
        Ok(())
    }

    /// Opens and starts another port.
    /// Errors: why it cannot be added, naming the remedy; nothing of it stays.
    pub(crate) fn add(&self, port: &PortConfig, source: VmmSource) -> anyhow::Result<()> {
        let all = self.all();
        let ends: Vec<_> = all
            .iter()
            .filter_map(|port| port.attached.patch().cloned())
            .collect();
        let others: u64 = all.iter().map(|port| port.config.copy_bytes()).sum();
        self.interfaces.expect_copies(others + port.copy_bytes());
        let port = self.open_with_queues(port, &ends)?;
        port.close_queues();
        self.run(port, source)
    }

    /// Applies changes of a port's configuration that need no restart (`x-live`).
    /// Errors: why they cannot be applied, naming the remedy; nothing changes then.
    pub(crate) fn change(&self, config: &PortConfig) -> anyhow::Result<()> {
        let Some(port) = self.named(&config.name) else {
            return Ok(());
        };
        let refused = |error: &dyn Error| anyhow!("port {}: {}", config.name, with_sources(error));
        let hints = port.hints();
        port.set_hints(config.hints()).map_err(|error| refused(&error))?;
        if let AttachedTo::Network(end) = &port.attached {
            let changed = end.network.change(end.number, config, mac_of(config));
            changed.map_err(|error| {
                // Restores the earlier hints; an error of the steward shows later.
                let _ = port.set_hints(hints);
                refused(error.as_ref())
            })?;
        }
        port.set_rules(config);
        Ok(())
    }

    /// Ends a port, if there is one of that name, and waits until it has ended.
    /// Errors: it has not ended in time, and may still hold its queues.
    pub(crate) fn remove(&self, name: &str) -> anyhow::Result<()> {
        let gone = {
            let mut running = self.running();
            let at = running.iter().position(|it| it.port.name() == name);
            at.map(|at| running.remove(at))
        };
        let Some(gone) = gone else {
            return Ok(());
        };
        // First: a VMM that reconnects must find no socket.
        if let Some(acceptor) = gone.acceptor {
            acceptor.close(&gone.port);
        }
        gone.port.remove();
        leave(&gone.port.attached);
        let deadline = Instant::now() + STOPPING;
        while !gone.port.is_gone() {
            if Instant::now() >= deadline {
                let seconds = STOPPING.as_secs();
                bail!(
                    "port {name} does not stop in {seconds} s: it is abandoned, and may still hold its queues"
                );
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// All ports, in the order in which they were added.
    pub(crate) fn all(&self) -> Vec<Arc<Port>> {
        let running = self.running();
        running.iter().map(|it| Arc::clone(&it.port)).collect()
    }

    /// The port with a name.
    pub(crate) fn named(&self, name: &str) -> Option<Arc<Port>> {
        let running = self.running();
        let it = running.iter().find(|it| it.port.name() == name);
        it.map(|it| Arc::clone(&it.port))
    }

    /// Checks the interfaces of all ports on a thread of its own, and informs networks when interfaces change.
    pub(crate) fn watch_links(self: &Arc<Self>, mut changes: Changes) -> io::Result<()> {
        self.watch.add_changes(&changes)?;
        let ports = Arc::clone(self);
        let body = move || {
            loop {
                let next = ports.look_at_interfaces();
                let came = ports.watch.wait(next);
                let all = ports.all();
                if came.changes {
                    changes.drain();
                    all.iter().for_each(|port| port.look_again());
                    ports.networks().iter().for_each(|network| network.look_again());
                }
                let told = all.iter().filter(|port| came.leases.contains(&port.looks.port));
                told.for_each(|port| port.looks.retry());
            }
        };
        thread::start("links", body).map(drop)
    }

    /// Checks the interfaces of ports that are due; returns when the next one is due.
    fn look_at_interfaces(&self) -> Option<Instant> {
        let ports = self.all();
        let with_interface = ports.iter().filter(|port| port.config.nic.queues().is_some());
        let looked = with_interface.inspect(|port| port.look_if_due());
        looked.filter_map(|port| port.looks.next()).min()
    }

    /// Opens a port and its queues. `ends`: ends of cables that are in use.
    fn open_with_queues(&self, port: &PortConfig, ends: &[PatchPort]) -> anyhow::Result<Arc<Port>> {
        let attached = self.join(port, ends)?;
        let (interfaces, workers) = (Arc::clone(&self.interfaces), Arc::clone(&self.workers));
        let opened = Port::open(port.clone(), interfaces, workers, attached.clone(), &self.watch);
        let opened = opened.and_then(|port| port.open_queues().map(|()| port));
        opened.map_err(|error| {
            leave(&attached);
            anyhow!("port {}: {}", port.name, with_sources(&error))
        })
    }

    /// Connects a port with its network or cable, if it has one. `ends`: ends of cables that are in use.
    fn join(&self, port: &PortConfig, ends: &[PatchPort]) -> anyhow::Result<AttachedTo> {
        if let Some(name) = port.nic.network() {
            let network = self.network(name);
            let network =
                network.with_context(|| format!("port {}: there is no network {name}", port.name))?;
            let end = network
                .join(port, mac_of(port))
                .map_err(|error| anyhow!("port {}: {}", port.name, with_sources(error)))?;
            return Ok(AttachedTo::Network(end));
        }
        let cable = port.nic.cable().map(|name| {
            let cable: Arc<str> = format!("cable {name}").into();
            let taken = |end: usize| ends.iter().any(|it| it.cable == cable && it.end == end);
            // A cable has two ports, one at each end (config.rs).
            let end = usize::from(taken(0));
            PatchPort { cable, end }
        });
        Ok(cable.map_or(AttachedTo::Nothing, AttachedTo::Patch))
    }

    /// Opens a network, which ports can join then.
    fn open_network(&self, network: &NetworkConfig) -> anyhow::Result<()> {
        let (interfaces, workers) = (Arc::clone(&self.interfaces), Arc::clone(&self.workers));
        let opened = Network::open(network.clone(), interfaces, workers);
        let opened = opened.map_err(|error| anyhow!("network {}: {}", network.name, with_sources(error)))?;
        self.networks.locked().push(opened);
        Ok(())
    }

    /// All networks, in the order in which they were added.
    pub(crate) fn networks(&self) -> Vec<Arc<Network>> {
        self.networks.locked().clone()
    }

    fn network(&self, name: &str) -> Option<Arc<Network>> {
        let networks = self.networks.locked();
        networks.iter().find(|network| network.name == name).cloned()
    }

    /// Opens another network, and watches its uplink.
    /// Errors: why it cannot be added, naming the remedy; nothing of it stays.
    pub(crate) fn add_network(self: &Arc<Self>, network: &NetworkConfig) -> anyhow::Result<()> {
        self.open_network(network)?;
        self.watch_uplinks().context(NO_THREAD)
    }

    /// Closes the uplink of a network, if there is one of that name, before it gets another one or none.
    pub(crate) fn free_uplink(&self, name: &str) {
        if let Some(network) = self.network(name) {
            network.release_uplink();
        }
    }

    /// Sets the uplink of a network; frames between its ports are not interrupted.
    /// Errors: why the uplink cannot be opened.
    pub(crate) fn set_uplink(
        self: &Arc<Self>,
        name: &str,
        uplink: Option<UplinkConfig>,
    ) -> anyhow::Result<()> {
        let network = self.network(name);
        let network = network.with_context(|| format!("there is no network {name}"))?;
        let done = network.have(uplink);
        self.network_changed(name);
        self.watch_uplinks().context(NO_THREAD)?;
        done.map_err(|error| anyhow!("network {name}: {}", with_sources(&error)))
    }

    /// Sets the hints of frames of a network's uplink.
    /// Errors: the steward refuses them; then nothing changes.
    pub(crate) fn set_uplink_hints(&self, name: &str, hints: HintsConfig) -> anyhow::Result<()> {
        let network = self.network(name);
        let network = network.with_context(|| format!("there is no network {name}"))?;
        let switched = network.set_hints(hints);
        switched.map_err(|error| anyhow!("network {name}: {}", with_sources(&error)))
    }

    /// Ends a network that has no ports any more, if there is one of that name.
    pub(crate) fn remove_network(&self, name: &str) {
        let network = self.network(name);
        self.networks.locked().retain(|network| network.name != name);
        if let Some(network) = network {
            network.stop();
        }
    }

    /// Starts a thread to watch each uplink that is not watched yet.
    pub(crate) fn watch_uplinks(self: &Arc<Self>) -> io::Result<()> {
        for network in self.networks() {
            let (ports, name) = (Arc::clone(self), network.name.clone());
            network.watch(move || ports.network_changed(&name))?;
        }
        Ok(())
    }

    /// Informs the ports of a network that the uplink's link state or MTU may have changed.
    fn network_changed(&self, name: &str) {
        let ports = self.all();
        let members = ports
            .iter()
            .filter(|port| port.config.nic.network() == Some(name));
        members.for_each(Port::network_changed);
    }

    /// Stops the uplinks of all networks when the daemon ends.
    pub(crate) fn stop_networks(&self) {
        self.networks().iter().for_each(|network| network.stop());
    }

    fn run(&self, port: Arc<Port>, source: VmmSource) -> anyhow::Result<()> {
        port.start();
        let (acceptor, failed) = match self.serve(&port, source).context(NO_THREAD) {
            Ok(acceptor) => (acceptor, None),
            Err(error) => (None, Some(error)),
        };
        tracing::info!(port = %port.config.name, "ready");
        let (name, started) = (Arc::clone(&port.config.name), Arc::clone(&port));
        self.running().push(Running { port, acceptor });
        started.looks.retry();
        if let Some(error) = failed {
            // A port that is not served is useless.
            let _ = self.remove(&name);
            return Err(error);
        }
        Ok(())
    }

    /// Serves the VMMs of a source; returns their acceptor.
    fn serve(&self, port: &Arc<Port>, source: VmmSource) -> io::Result<Option<Arc<AcceptThread>>> {
        let (acceptor, source) = match source {
            VmmSource::Once(stream) => {
                let (signals, served) = (self.signals.clone(), Arc::clone(port));
                // When a connection that was passed in ends, the daemon ends.
                let then = move |_| {
                    if !served.removed.is_raised() {
                        signals.close();
                    }
                };
                return connection::start(port, stream, then).map(|()| None);
            }
            VmmSource::Listen(listener) => (Arc::clone(&self.accepting), Source::Listener(listener)),
            VmmSource::Connect(path) => {
                let mut connecting = self.connecting.locked();
                let acceptor = match &*connecting {
                    Some(acceptor) => Arc::clone(acceptor),
                    None => AcceptThread::start("connect")?,
                };
                (Arc::clone(connecting.insert(acceptor)), Source::Path(path))
            }
        };
        acceptor.open(port, source)?;
        Ok(Some(acceptor))
    }

    fn running(&self) -> MutexGuard<'_, Vec<Running>> {
        self.running.locked()
    }
}

/// The result of a start. If a port or network that was added at run time fails, it is only logged.
pub(crate) fn started<T>(started: anyhow::Result<T>, is_added: bool) -> anyhow::Result<Option<T>> {
    match started {
        Err(error) if is_added => {
            tracing::error!(
                "{error:#}: left out, as it was added at run time: `vhost-af-xdp reload` tries again"
            );
            Ok(None)
        }
        started => started.map(Some),
    }
}

/// Removes a port from its network, if it has one.
fn leave(attached: &AttachedTo) {
    if let AttachedTo::Network(end) = attached {
        end.network.leave(end.number);
    }
}
