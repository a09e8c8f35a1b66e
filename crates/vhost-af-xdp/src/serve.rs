//! `vhost-af-xdp serve`: starts ports, workers and watchers, and stops them.
//!
//! Threads: the main thread waits for signals. One accepts the VMMs of all ports, another connects to VMMs that listen,
//! and each session has one. One checks the interfaces of ports, and one watches the uplink of each network. One
//! answers `status`, one reloads the configuration, one watches the helper. Workers forward frames. All threads but
//! the workers sleep nearly always. A session's thread may wait for the kernel, the steward or its VMM; no other port
//! waits with it.

mod answering;
mod listening;

use std::io::{self, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::{Context, bail};
use client::text::tree::tree;
use common::drivers;
use rustix::thread::CapabilitySet;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::{Handle, Signals};

use self::listening::{Leftovers, listen_for_http, listen_for_status, vmm_source};

use super::config::{Endpoint, PortConfig, ServeConfig};
use super::port::Port;
use crate::api::capture::Captures;
use crate::api::control_socket::Server;
use crate::api::gateway;
use crate::check::{check_privileges, user_of};
use crate::config::QueueOptions;
use crate::config::build::machine_bytes;
use crate::nic::external::{self, Given};
use crate::nic::interfaces::Interfaces;
use crate::nic::numa::Nodes;
use crate::nic::shared_memory::SharedMemory;
use crate::nic::steering::StewardAt;
use crate::port_watch;
use crate::ports::{NO_THREAD, Ports, STOPPING, started};
use crate::reload::{self, Reload};
use crate::supervision::alarm::Alarm;
use crate::supervision::helper::{Helper, HelperOptions, Requests};
use crate::supervision::interrupt;
use crate::supervision::service_manager::ServiceManager;
use crate::supervision::sigbus;
use crate::supervision::watchdog::Watchdog;
use crate::vhost_user::accept::VmmSource;
use dataplane::worker::workers::Workers;
use device::features::F_RING_RESET;
use host::links::Changes;
use program::sandbox::{self, Calls, Layer, Plan, Reach, User};
use steer::with_sources;
use steward::capabilities;
use steward_client::Waiting;

/// Runs until a signal ends the daemon, or the only connection, passed in as a descriptor, is closed.
/// Errors: what prevents the start; nothing is left behind.
pub(crate) fn run(config: &ServeConfig) -> anyhow::Result<()> {
    Sandboxed::enter(config)?.serve()
}

/// A daemon in its [sandbox], before anything of guests is started.
pub(crate) struct Sandboxed<'a> {
    config: &'a ServeConfig,
    signals: Signals,
    /// Changes of interfaces, if any interface is used or may be later.
    changes: Option<Changes>,
    sources: Vec<(&'a PortConfig, VmmSource)>,
    control: Option<UnixListener>,
    /// The connection to the gateway process, if HTTP is configured.
    api: Option<UnixStream>,
    interfaces: Interfaces,
    nodes: Nodes,
    /// The socket of the steward that was configured.
    steward: Option<PathBuf>,
    helper: Helper,
    in_force: model::state::Sandbox,
    /// Notified when the daemon is ready.
    manager: ServiceManager,
}

impl<'a> Sandboxed<'a> {
    /// Does everything that needs privileges or the file system, and gives up both.
    /// Errors: what prevents it; nothing is left behind.
    pub(crate) fn enter(config: &'a ServeConfig) -> anyhow::Result<Self> {
        check_privileges(config)?;
        // Before the daemon opens descriptors of its own, which could be taken for inherited ones.
        external::check_inherited(config)?;
        program::raise_descriptor_limit();
        let given = Given::take(config)?;
        sigbus::install().context("cannot handle SIGBUS")?;
        interrupt::install().context("cannot handle SIGURG")?;
        let manager = ServiceManager::of_this_process();
        let signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1]).context("cannot handle signals")?;
        let changes = subscribe(config).context("cannot watch interfaces")?;
        let mut leftovers = Leftovers::default();
        let mut sources = Vec::new();
        for port in &config.ports {
            let source = vmm_source(port, &mut leftovers).with_context(|| format!("port {}", port.name));
            let source = started(source, config.is_added_port(&port.name))?;
            sources.extend(source.map(|source| (port, source)));
        }
        // Read now and cached: the sandbox does not allow it later.
        let _ = drivers::kernel();
        let _ = machine_bytes();
        let control = listen_for_status(&config.control, &mut leftovers)?;
        let listeners = listen_for_http(&config.api, &mut leftovers)?;
        let nodes = Nodes::read();
        let interfaces = open_given(config, given, nodes.clone())?;
        let steward = steward_of(config)?;
        let reach = reach(config, steward.as_deref());
        let user = user_of(config)?;
        let api = gateway::start(&listeners, user.as_ref(), &config.layers)?;
        // Only the gateway keeps these sockets: if it ends, clients get an error instead of waiting.
        drop(listeners);
        let Confined { helper, in_force } = leave_privileges(config, user, &mut leftovers, reach)?;
        Ok(Self {
            config,
            signals,
            changes,
            sources,
            control,
            api,
            interfaces,
            nodes,
            steward,
            helper,
            in_force,
            manager,
        })
    }

    fn serve(mut self) -> anyhow::Result<()> {
        let config = self.config;
        let workers = Workers::start(config.workers, &config.cpus, config.waits);
        let workers = Arc::new(workers.context("cannot start workers")?);
        let watchdog = Watchdog::start(Arc::clone(&workers)).context(NO_THREAD)?;
        let ending = Alarm::new().context("no descriptor left")?;
        let reach = self.later();
        let at = self.steward_at(&ending);
        let interfaces = self.interfaces.leased_from(at);
        let ports = Ports::new(interfaces, &workers, self.signals.handle());
        let ports = Arc::new(ports.context(NO_THREAD)?);
        ports.start(config, self.sources, &self.nodes)?;
        tracing::info!("sandbox: {}", self.in_force);
        tell_what_is_off(config);
        watch(&ports, self.changes)?;
        let idle_timeout = config.keys.process.idle_timeout;
        port_watch::start(Arc::clone(&ports), idle_timeout, self.signals.handle()).context(NO_THREAD)?;
        let reload = start_reload(config, &ports, self.helper.requests(), reach)?;
        let api = config.api.all.as_ref();
        let server = Arc::new(Server {
            captures: Captures::of(&ports),
            ports: Arc::clone(&ports),
            workers: Arc::clone(&workers),
            watchdog,
            sandbox: self.in_force,
            api: api.and_then(|(path, _)| std::path::absolute(path).ok()),
            reload,
            look: Mutex::default(),
        });
        answering::start(&server, self.control, self.api, config.api.all.is_some())?;
        self.manager.tell_ready();
        let lost = watch_helper(&self.helper, self.signals.handle())?;
        wait_for_the_end(&mut self.signals, &server);
        ending.raise();
        stop(&ports.all());
        ports.stop_networks();
        // Joining a worker that hangs could take for ever; they end with the process.
        std::mem::forget(workers);
        if lost.load(Ordering::Relaxed) {
            bail!("the helper of this daemon has ended, and the XDP program with it: start the daemon again");
        }
        Ok(())
    }

    /// Where queues are leased: from the configured steward, or from the helper. `ending` ends all waits for it.
    fn steward_at(&self, ending: &Alarm) -> StewardAt {
        let named = self.steward.clone();
        StewardAt {
            path: named.or_else(|| self.helper.steward()).unwrap_or_default(),
            is_own: self.config.steward.is_none(),
            waiting: Waiting {
                answer: self.config.steward_timeout,
                end: Some(ending.event()),
            },
        }
    }

    /// What ports that are added later can use.
    fn later(&self) -> reload::Reach {
        reload::Reach {
            vmms: connects_to_vmms(self.config) || !self.config.layers.has(Layer::Mounts),
            leases: self.steward.is_some() || self.helper.steward().is_some(),
        }
    }
}

/// Watches the interfaces of ports and the uplinks of networks.
fn watch(ports: &Arc<Ports>, changes: Option<Changes>) -> anyhow::Result<()> {
    if let Some(changes) = changes {
        ports.watch_links(changes).context(NO_THREAD)?;
    }
    ports.watch_uplinks().context(NO_THREAD)
}

/// Starts the reload thread, if the daemon has a configuration file.
fn start_reload(
    config: &ServeConfig,
    ports: &Arc<Ports>,
    requests: Option<Arc<Requests>>,
    reach: reload::Reach,
) -> anyhow::Result<Option<Reload>> {
    let (Some(file), Some(requests)) = (&config.file, requests) else {
        return Ok(None);
    };
    let started = Reload::start(
        (file.clone(), config.state.clone().filter(|_| config.can_change())),
        Arc::clone(ports),
        requests,
        reach,
    );
    started.map(Some).context(NO_THREAD)
}

/// Waits for a signal that ends the daemon, or until a thread closes `signals`.
fn wait_for_the_end(signals: &mut Signals, server: &Server) {
    for signal in signals.forever() {
        match (signal, &server.reload) {
            (SIGUSR1, _) => {
                let state = tree(&server.status(&[])).unwrap_or_default();
                // The daemon runs on if standard error is closed.
                let _ = write!(io::stderr(), "{state}");
            }
            (SIGHUP, Some(reload)) => reload.ask(),
            (SIGHUP, None) => tracing::info!("SIGHUP is ignored: there is no configuration file"),
            _ => return,
        }
    }
}

/// Logs the layers of the sandbox and the offloads that are switched off.
fn tell_what_is_off(config: &ServeConfig) {
    let layers = config.layers.off();
    if !layers.is_empty() {
        tracing::info!("sandbox: {} off by --sandbox", layers.join(", "));
    }
    for port in &config.ports {
        let offloads = port.offloads_off();
        if !offloads.is_empty() {
            tracing::info!(port = %port.endpoint, "{} off by offload", offloads.join(", "));
        }
        if port.offer.features() & F_RING_RESET != 0 {
            tracing::info!(
                port = %port.endpoint,
                "ring-reset is offered: only for a VMM that passes resets of single queues on, which no known release \
                 of QEMU does (docs/vmm.md); under another one a guest that resets a queue damages its own memory"
            );
        }
    }
}

/// The memory of all ports with `shared-umem`, if there are any.
fn shared_memory(config: &ServeConfig) -> Option<Arc<SharedMemory>> {
    let sharing = config
        .ports
        .iter()
        .filter(|port| port.options.slices_from.is_some());
    let slices = sharing.clone().map(|port| u32::from(port.queues)).sum();
    // They all have the same.
    let slice_bytes = sharing.map(|port| port.options.packet_bytes).next()?;
    Some(SharedMemory::new(slices, slice_bytes))
}

/// Opens the queues of other programs (`inhibit`), which the sandbox forbids later.
fn open_given(config: &ServeConfig, given: Given, nodes: Nodes) -> anyhow::Result<Interfaces> {
    let copy_bytes = config.ports.iter().map(PortConfig::copy_bytes);
    let interfaces = Interfaces::new(given, nodes, copy_bytes.sum()).sharing(shared_memory(config));
    for port in &config.ports {
        if let Some(wanted) = port.wanted() {
            let options = QueueOptions {
                hints: port.hints(),
                ..port.options
            };
            let opened = interfaces.open_given(&wanted, options);
            opened.map_err(|error| anyhow::anyhow!("port {}: {}", port.name, with_sources(&error)))?;
        }
    }
    Ok(interfaces)
}

/// The path of the configured steward with links resolved: links may lead out of the sandbox's mounts.
fn steward_of(config: &ServeConfig) -> anyhow::Result<Option<PathBuf>> {
    let Some(path) = &config.steward else {
        return Ok(None);
    };
    let missing = || {
        let path = path.display();
        format!("no steward at {path}: start vhost-af-xdp-steward, or name its socket with --steward")
    };
    sandbox::without_links(path).with_context(missing).map(Some)
}

/// Paths that the daemon connects to later.
fn reach(config: &ServeConfig, steward: Option<&Path>) -> Reach {
    if connects_to_vmms(config) {
        return Reach::Any("a port connects to the socket of its VMM (client), whose directory may change");
    }
    let directories = steward.and_then(Path::parent).map(Path::to_owned);
    Reach::Only(directories.into_iter().collect())
}

fn connects_to_vmms(config: &ServeConfig) -> bool {
    let connects = |port: &PortConfig| matches!(port.endpoint, Endpoint::Client(_));
    config.ports.iter().any(connects)
}

/// A process that has given up its privileges.
struct Confined {
    helper: Helper,
    in_force: model::state::Sandbox,
}

/// Starts the helper and enters the sandbox. From here on the helper removes the socket files.
fn leave_privileges(
    config: &ServeConfig,
    user: Option<User>,
    leftovers: &mut Leftovers,
    reach: Reach,
) -> anyhow::Result<Confined> {
    let (uid, gid) = match &user {
        Some(user) => (user.uid, user.gid),
        None => (
            rustix::process::geteuid().as_raw(),
            rustix::process::getegid().as_raw(),
        ),
    };
    let leases = match &config.steward {
        Some(_) => Vec::new(),
        None => config.queues(),
    };
    // Sockets and maps of other programs: opened already, but the daemon itself reads their interface's state.
    let external = config.ports.iter().any(PortConfig::has_external_program);
    let file = config.file.as_ref();
    // Its file may name interfaces after a reload.
    let may_be_steward =
        || program::capabilities::lacking(capabilities::NEEDED_BY_ONE).is_ok_and(|it| it.is_empty());
    let helper = Helper::start(&HelperOptions {
        is_steward: !leases.is_empty() || (config.steward.is_none() && file.is_some() && may_be_steward()),
        leases,
        user: uid,
        group: gid,
        busy_poll: config.busy_poll_budget(),
        files: leftovers.0.clone(),
        vmm_sockets: config.paths(),
        config: file.cloned(),
        options: config.options.clone(),
        state: config.state.clone(),
        directories: file.map_or_else(Vec::new, |_| config.socket_directories()),
        changes: config.can_change(),
    })?;
    leftovers.0.clear();
    let plan = Plan {
        layers: config.layers.clone(),
        user,
        reach,
        external,
        calls: Calls::Worker,
        keeps: match config.ports.iter().any(PortConfig::opens_sockets) {
            true => CapabilitySet::NET_RAW,
            false => CapabilitySet::empty(),
        },
    };
    let in_force = sandbox::enter(&plan)?;
    Ok(Confined { helper, in_force })
}

/// Ends the daemon when its helper ends, if the helper leased the queues; the returned flag is set then.
fn watch_helper(helper: &Helper, signals: Handle) -> anyhow::Result<Arc<AtomicBool>> {
    let (lost, private) = (Arc::new(AtomicBool::new(false)), helper.steward().is_some());
    let tell = Arc::clone(&lost);
    let gone = move || {
        tracing::error!("the helper of this daemon has ended; socket files will not be removed");
        if private {
            // Read after the signals' iterator has ended, which synchronizes.
            tell.store(true, Ordering::Relaxed);
            signals.close();
        }
    };
    helper.watch(gone).context("cannot watch the helper")?;
    Ok(lost)
}

/// Notifications of changes of interfaces.
fn subscribe(config: &ServeConfig) -> io::Result<Option<Changes>> {
    let has_interface = |port: &PortConfig| port.nic.queues().is_some();
    let wanted = config.file.is_some() || config.ports.iter().any(has_interface);
    wanted.then(Changes::subscribe).transpose()
}

/// Stops all ports and waits for them, but not for ever: one may hang, with a worker in memory that never answers, or
/// waiting for a steward that is stopped.
fn stop(ports: &[Arc<Port>]) {
    let deadline = Instant::now() + STOPPING;
    let (stopped, told) = mpsc::channel();
    for (index, port) in ports.iter().enumerate() {
        let stopped = stopped.clone();
        port.shut_down(move || {
            let _ = stopped.send(index);
        });
    }
    drop(stopped);
    let mut left: Vec<usize> = (0..ports.len()).collect();
    while let Ok(index) = told.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        left.retain(|&other| other != index);
    }
    for index in left {
        let (port, seconds) = (ports[index].name(), STOPPING.as_secs());
        tracing::warn!(port, "does not stop in {seconds} s: it ends as if killed");
    }
}
