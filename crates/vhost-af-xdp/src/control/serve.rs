//! `vhost-af-xdp serve`: starts ports, workers and watchers, and ends them.
//!
//! Threads: the main one waits for signals; one a port speaks vhost-user; one watches interfaces;
//! one answers `status`; one sees that the keeper lives; the workers move frames. All but the workers sleep nearly always.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::net::{SocketType, sockopt};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::{Handle, Signals};
use vhost::vhost_user::{BackendReqHandler, Error};

use super::config::{Endpoint, PortConfig, ServeConfig};
use super::control_socket;
use super::external::Brought;
use super::front;
use super::interface::Interfaces;
use super::keeper::{Keeper, Orders};
use super::kept;
use super::listener::{self, Access};
use super::port::{Port, with_sources};
use super::sigbus;
use super::status::Status;
use super::status_view;
use crate::data::cable::{PortEnd, Wire};
use crate::data::worker::Workers;
use crate::sandbox::{self, Extra, Plan, User, attempts};
use steward::links::Changes;

/// Pause between attempts to connect to a VMM that is not there: short, because the guest's outage lasts as
/// long, and cheap.
const CONNECT_PAUSE: Duration = Duration::from_millis(20);
/// Pause before a VMM that did wrong is met again: doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Pause before a port whose queues could not be set up tries again.
const RETRY: Duration = Duration::from_secs(1);

/// What a port's thread meets VMMs with.
enum Meeting {
    Listen(UnixListener),
    Connect(PathBuf),
    Once(UnixStream),
}

/// Runs until a signal ends it, or the one connection that was passed in is over.
///
/// What needs a privilege, or the file system, comes first; then the [sandbox]; then all that has to do with guests.
///
/// # Errors
/// What prevents the start; nothing stays behind then.
pub(crate) fn run(config: &ServeConfig) -> anyhow::Result<()> {
    config.check()?;
    allow_descriptors();
    // First of all: what is opened from here on must not get a number that was to be inherited.
    let brought = Brought::take(config).map_err(|error| anyhow::anyhow!(with_sources(&error)))?;
    sigbus::install().context("cannot handle SIGBUS")?;
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1]).context("cannot handle signals")?;
    let changes = Changes::subscribe().context("cannot watch interfaces")?;
    let mut leftovers = Leftovers::default();
    let mut meetings = Vec::new();
    for port in &config.ports {
        meetings.push(meet(&port.endpoint, &mut leftovers)?);
    }
    let control = config
        .control
        .as_deref()
        .and_then(|path| listen_for_status(path, &mut leftovers));
    let interfaces = open_brought(config, brought)?;
    let (keeper, in_force) = leave_privileges(config, &mut leftovers)?;
    if let Some(attempt) = &config.attempt {
        return attempts::run(attempt);
    }

    let workers =
        Workers::start(config.workers, &config.cpus, config.spin).context("cannot start workers")?;
    let workers = Arc::new(workers);
    let steward = config.steward.clone().or_else(|| keeper.steward());
    let interfaces = interfaces.leased_from(steward.unwrap_or_default(), config.steward.is_none());
    let ports = open_ports(config, interfaces, &workers)?;
    tracing::info!("sandbox: {in_force}");
    tell_what_is_off(config);
    let read = {
        let (ports, workers) = (ports.clone(), Arc::clone(&workers));
        move || Status::read(&ports, &workers, &in_force)
    };
    if let Some(listener) = control {
        let read = read.clone();
        let body = move || control_socket::serve(&listener, read);
        let _ = std::thread::Builder::new().name("status".to_owned()).spawn(body);
    }
    watch_links(changes, ports.clone())?;
    let handle = signals.handle();
    let lost = watch_keeper(&keeper, handle.clone())?;
    for (port, meeting) in ports.iter().zip(meetings) {
        start_attending(port, meeting, handle.clone())?;
    }
    for signal in signals.forever() {
        match signal {
            // Whether anybody reads is no matter to the guests.
            SIGUSR1 => drop(write!(io::stderr(), "{}", status_view::render(&read()))),
            SIGHUP => tracing::info!("SIGHUP is ignored: there is nothing to read again"),
            _ => break,
        }
    }
    ports.iter().for_each(|port| port.shut_down());
    if lost.load(Ordering::Relaxed) {
        bail!("the keeper of this daemon has ended, and the XDP program with it: start the daemon again");
    }
    Ok(())
}

/// What was taken away from the sandbox and from what guests are offered, a line each.
fn tell_what_is_off(config: &ServeConfig) {
    let layers = config.layers.off();
    if !layers.is_empty() {
        tracing::warn!("sandbox: {} off by --sandbox", layers.join(", "));
    }
    for port in &config.ports {
        let offloads = port.offloads_off();
        if !offloads.is_empty() {
            tracing::warn!(port = %port.endpoint, "{} off by --offload", offloads.join(", "));
        }
    }
}

/// As many descriptors as this process may have: a guest's memory and rings have some tens.
fn allow_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    let _ = setrlimit(Resource::Nofile, raised);
}

fn start_attending(port: &Arc<Port>, meeting: Meeting, signals: Handle) -> anyhow::Result<()> {
    tracing::info!(port = %port.config.endpoint, "ready");
    let name = format!("port {}", port.config.endpoint);
    let port = Arc::clone(port);
    let body = move || {
        attend(&port, meeting);
        // Only a connection that was passed in ends by itself, and the daemon with it.
        signals.close();
    };
    std::thread::Builder::new()
        .name(name.chars().take(15).collect())
        .spawn(body)
        .context("no thread")?;
    Ok(())
}

/// Opens the sockets that are kept as long as the daemon runs: what is allowed to open them is given up.
fn open_brought(config: &ServeConfig, brought: Brought) -> anyhow::Result<Interfaces> {
    let interfaces = Interfaces::new(brought);
    for port in &config.ports {
        kept::settle_all(port, &interfaces)
            .map_err(|error| anyhow::anyhow!("port {}: {}", port.endpoint, with_sources(&error)))?;
    }
    Ok(interfaces)
}

/// Starts the keeper and enters the sandbox. From here on the keeper removes what is left over.
fn leave_privileges(
    config: &ServeConfig,
    leftovers: &mut Leftovers,
) -> anyhow::Result<(Keeper, sandbox::InForce)> {
    let root = rustix::process::geteuid().is_root();
    let user = match &config.user {
        None if root => User::nobody(),
        user => user.clone(),
    };
    let user = user.filter(|_| config.layers.user);
    user.as_ref().map_or(Ok(()), User::check)?;
    let owner = user.as_ref().map_or_else(
        || {
            (
                rustix::process::geteuid().as_raw(),
                rustix::process::getegid().as_raw(),
            )
        },
        User::owner,
    );
    let leases = match &config.steward {
        Some(_) => Vec::new(),
        None => config.queues(),
    };
    // Their sockets and maps are open; the interface is looked at from here.
    let brings = config.ports.iter().any(PortConfig::brings);
    let keeper = Keeper::start(&Orders {
        leases: &leases,
        owner,
        files: &leftovers.0,
        meets: &config.paths(),
    })?;
    leftovers.0.clear();
    let plan = Plan {
        layers: config.layers,
        user,
        no_interface: !brings,
        keeps: match config.ports.iter().any(PortConfig::opens_sockets) {
            true => CapabilitySet::NET_RAW,
            false => CapabilitySet::empty(),
        },
        extra: Extra {
            bpf_map: brings,
            interfaces: brings,
        },
    };
    let in_force = sandbox::enter(&plan)?;
    Ok((keeper, in_force))
}

/// Opens what the ports' frames go to.
fn open_ports(
    config: &ServeConfig,
    interfaces: Interfaces,
    workers: &Arc<Workers>,
) -> anyhow::Result<Vec<Arc<Port>>> {
    let interfaces = Arc::new(interfaces);
    let mut cables = cables(config).context("cannot make a cable")?;
    let mut ports = Vec::new();
    for port in &config.ports {
        let cable = port.nic.cable().and_then(|name| cables.get_mut(name)?.pop());
        let opened = Port::open(port.clone(), Arc::clone(&interfaces), Arc::clone(workers), cable);
        let port =
            opened.map_err(|error| anyhow::anyhow!("port {}: {}", port.endpoint, with_sources(&error)))?;
        ports.push(Arc::new(port));
    }
    Ok(ports)
}

/// Ends the daemon when its keeper ends and the leases with it; true in what is returned then.
fn watch_keeper(keeper: &Keeper, signals: Handle) -> anyhow::Result<Arc<AtomicBool>> {
    let (lost, private) = (Arc::new(AtomicBool::new(false)), keeper.steward().is_some());
    let tell = Arc::clone(&lost);
    let gone = move || {
        tracing::error!("the keeper of this daemon has ended; socket files will not be removed");
        if private {
            // Read after the signals' iterator has ended, which synchronizes.
            tell.store(true, Ordering::Relaxed);
            signals.close();
        }
    };
    keeper.watch(gone).context("cannot watch the keeper")?;
    Ok(lost)
}

/// The cables by name, each with its two ends.
fn cables(config: &ServeConfig) -> io::Result<HashMap<String, Vec<PortEnd>>> {
    let mut pairs: HashMap<String, Vec<u16>> = HashMap::new();
    for port in &config.ports {
        if let Some(name) = port.nic.cable() {
            // The ends are handed out from the back.
            pairs.entry(name.to_owned()).or_default().insert(0, port.queues);
        }
    }
    let ends = |(name, pairs): (String, Vec<u16>)| {
        let [first, second] = <[u16; 2]>::try_from(pairs).map_err(|_| io::ErrorKind::InvalidInput)?;
        let wire = Arc::new(Wire::new([first, second])?);
        Ok((name, vec![(Arc::clone(&wire), 0), (wire, 1)]))
    };
    pairs.into_iter().map(ends).collect()
}

/// Socket files of ours, removed if the start fails before the keeper takes over.
#[derive(Default)]
struct Leftovers(Vec<PathBuf>);

impl Drop for Leftovers {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = fs::remove_file(path);
        }
    }
}

fn meet(endpoint: &Endpoint, leftovers: &mut Leftovers) -> anyhow::Result<Meeting> {
    Ok(match endpoint {
        Endpoint::Server(path) => {
            let listened = listener::listen_at(path, &Access::OWN);
            let listener = listened.with_context(|| format!("cannot listen at {}", path.display()))?;
            leftovers.0.push(path.clone());
            Meeting::Listen(listener)
        }
        Endpoint::Client(path) => Meeting::Connect(path.clone()),
        Endpoint::Fd(fd) => inherited(*fd)?,
    })
}

/// A descriptor that the parent left us: SO_ACCEPTCONN tells which kind it is.
#[allow(unsafe_code)]
fn inherited(fd: i32) -> anyhow::Result<Meeting> {
    if fd < 3 || fs::read_link(format!("/proc/self/fd/{fd}")).is_err() {
        bail!("--fd {fd}: no such descriptor was inherited (0 to 2 are not accepted)");
    }
    // SAFETY: the descriptor is open, as was just seen, and by the meaning of --fd it is ours
    // alone; nothing in this process has opened descriptors under a number that the parent chose.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let domain = sockopt::socket_domain(&socket)
        .map_err(|_| anyhow::anyhow!("--fd {fd}: not a socket: pass a Unix stream socket"))?;
    if domain != rustix::net::AddressFamily::UNIX || sockopt::socket_type(&socket)? != SocketType::STREAM {
        bail!("--fd {fd}: not a Unix stream socket, which vhost-user needs: pass one");
    }
    let _ = rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC);
    if sockopt::socket_acceptconn(&socket)? {
        return Ok(Meeting::Listen(socket.into()));
    }
    if rustix::net::getpeername(&socket).is_err() {
        bail!("--fd {fd}: a socket that neither listens nor is connected: pass one that does");
    }
    Ok(Meeting::Once(socket.into()))
}

/// Listens for `status`. Not having that is no reason not to serve.
fn listen_for_status(path: &Path, leftovers: &mut Leftovers) -> Option<UnixListener> {
    match control_socket::listen(path) {
        Ok(listener) => {
            leftovers.0.push(path.to_owned());
            Some(listener)
        }
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "no control socket: `status` will not find this daemon (choose another place with --control PATH)");
            None
        }
    }
}

fn watch_links(mut changes: Changes, ports: Vec<Arc<Port>>) -> anyhow::Result<()> {
    let body = move || {
        loop {
            // All are asked, whatever the first says.
            let again = ports.iter().filter(|port| port.check_link()).count() > 0;
            let leased: Vec<_> = ports.iter().filter_map(|port| port.watched()).collect();
            let also: Vec<_> = leased.iter().filter_map(|interface| interface.watch()).collect();
            // What a steward tells while another thread waits for its answer, that thread reads.
            let longest = (again || !also.is_empty()).then_some(RETRY);
            changes.wait(&also, longest);
        }
    };
    std::thread::Builder::new()
        .name("links".to_owned())
        .spawn(body)
        .context("cannot start a thread")?;
    Ok(())
}

/// Meets VMMs, one after the other.
fn attend(port: &Arc<Port>, meeting: Meeting) {
    let mut pause = FIRST_PAUSE;
    match meeting {
        Meeting::Once(stream) => {
            serve_connection(port, stream);
        }
        Meeting::Listen(listener) => {
            let mut said = false;
            loop {
                match listener.accept() {
                    Ok((stream, _)) => {
                        said = false;
                        if serve_connection(port, stream) {
                            rest(&mut pause);
                        } else {
                            pause = FIRST_PAUSE;
                        }
                    }
                    Err(error) => {
                        if !said {
                            tracing::warn!(port = %port.config.endpoint, "cannot accept a connection, trying again: {error}{}", crate::shortage(&error.to_string()));
                            said = true;
                        }
                        rest(&mut pause);
                    }
                }
            }
        }
        Meeting::Connect(path) => {
            let mut said = false;
            loop {
                match UnixStream::connect(&path) {
                    Ok(stream) => {
                        said = false;
                        if serve_connection(port, stream) {
                            rest(&mut pause);
                            continue;
                        }
                        pause = FIRST_PAUSE;
                    }
                    Err(error) if !said && error.kind() == io::ErrorKind::PermissionDenied => {
                        tracing::warn!(path = %path.display(), "the VMM's socket may not be connected to by this user ({}): let it, or choose another with --user; trying again", rustix::process::geteuid().as_raw());
                        said = true;
                    }
                    Err(error) if !said => {
                        tracing::info!(path = %path.display(), %error, "no VMM there yet, trying again");
                        said = true;
                    }
                    Err(_) => {}
                }
                std::thread::sleep(CONNECT_PAUSE);
            }
        }
    }
}

fn rest(pause: &mut Duration) {
    std::thread::sleep(*pause);
    *pause = (*pause * 2).min(LONGEST_PAUSE);
}

/// Speaks vhost-user until the connection ends; true if the VMM or its guest did wrong.
pub(crate) fn serve_connection(port: &Arc<Port>, stream: UnixStream) -> bool {
    let (Ok(connection), Ok(ahead)) = (stream.try_clone(), stream.try_clone()) else {
        tracing::warn!(port = %port.config.endpoint, "no descriptors left, the connection is dropped: raise the limit of open files (`ulimit -n`, systemd: LimitNOFILE=)");
        return true;
    };
    port.begin_session(connection);
    tracing::info!(port = %port.config.endpoint, "a VMM connected");
    let mut requests = BackendReqHandler::from_stream(stream, Arc::clone(port));
    loop {
        match front::take(&ahead, port) {
            Ok(true) => continue,
            Ok(false) => {}
            Err(error) => return port.end_session(false, format!("vhost-user: {error}")),
        }
        match requests.handle_request() {
            Ok(()) | Err(Error::SocketRetry(_)) => {}
            Err(error @ (Error::Disconnected | Error::SocketBroken(_))) => {
                return port.end_session(true, error.to_string());
            }
            Err(error) => return port.end_session(false, format!("vhost-user: {error}")),
        }
    }
}
