//! `vhost-af-xdp-steward`: the privileged side, see the crate `steward`; and the kinds of leases that only some policies
//! allow, each loaded where one does.

use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser as _;
use program::fd_store::{self, Passed};
use program::log::report_end;
use program::steward::{DEFAULT_SOCKET, Options};
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketFlags, bind, connect, listen};
use rustix::thread::CapabilitySet;
use sd_notify::NotifyState;
use steer::with_sources;
use steward::capabilities;
use steward::policy::Policy;
use steward::server::{PolicySource, Server, Store, StoreError};
use steward_protocol::new_socket;
use vhost_af_xdp_steward::{netkit, zcrx};

const PROGRAM: &str = "vhost-af-xdp-steward";

fn main() -> ExitCode {
    let cli = match Options::try_parse() {
        Ok(cli) => cli,
        Err(error) => return complain(&error),
    };
    program::log::exit(PROGRAM, run(&cli))
}

/// Prints help and version in full, and a wrong option in one line.
fn complain(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.render().to_string();
    let what = text.lines().next().unwrap_or_default();
    let what = what.strip_prefix("error: ").unwrap_or(what);
    report_end(PROGRAM, &format!("{what}: `{PROGRAM} --help` lists the options"));
    ExitCode::from(2)
}

/// Checks before the start.
fn check_surroundings(policy: &Policy) -> Result<(), String> {
    let needed = capabilities::NEEDED | at_hand(policy.allows_zcrx());
    let lacking = program::capabilities::lacking(needed)
        .map_err(|error| format!("cannot see capabilities: {error}"))?;
    if !lacking.is_empty() {
        return Err(format!(
            "it lacks {}: start it as root, or with these capabilities (docs/deploy has a unit; \
             CAP_SYS_PTRACE is for `zcrx` only, docs/zcrx.md says how)",
            lacking.join(", ")
        ));
    }
    if !host::maps_bound_rings() && !policy.unbound {
        return Err("on this kernel a lessee has to bind its sockets itself, and could bind them to any free queue: use \
                    Linux 6.4 or later, or accept it by `unbound-sockets = true` under [limits] of the policy"
            .to_owned());
    }
    Ok(())
}

/// Capabilities in addition to those that any steward needs.
fn at_hand(leases_zcrx: bool) -> CapabilitySet {
    match leases_zcrx {
        true => capabilities::TO_TAKE_RINGS,
        false => CapabilitySet::empty(),
    }
}

fn run(cli: &Options) -> Result<(), String> {
    let paths = [
        Some(&cli.policy),
        Some(&cli.socket),
        cli.state.as_ref(),
        cli.pins.as_ref(),
    ];
    let has_control = |path: &&PathBuf| path.to_string_lossy().contains(char::is_control);
    if let Some(path) = paths.into_iter().flatten().find(has_control) {
        return Err(format!("{path:?} has control characters: choose a path without"));
    }
    let policy = match Policy::read(&cli.policy) {
        // Nothing is leased any more, so the policy does not matter.
        Err(_) if cli.take_back && !cli.check => Policy::for_one([])?,
        policy => policy.map_err(with_sources)?,
    };
    if cli.check {
        print!("{}", policy.shown);
        for warning in &policy.warnings {
            eprintln!("warning: {warning}");
        }
        return Ok(());
    }
    cli.log.start("info");
    if cli.take_back {
        return take_back(cli, policy);
    }
    check_surroundings(&policy)?;
    for warning in &policy.warnings {
        tracing::warn!("{warning}");
    }
    let signals = Signals::catch().map_err(|error| format!("cannot handle signals: {error}"))?;
    program::raise_descriptor_limit();
    serve(cli, policy, signals)
}

/// Signals of the process.
struct Signals {
    /// Readable after SIGHUP.
    reload: UnixStream,
    /// Readable after SIGTERM or SIGINT.
    end: UnixStream,
    /// SIGINT was received: the leases end, too.
    for_good: Arc<AtomicBool>,
}

impl Signals {
    fn catch() -> io::Result<Self> {
        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
        let for_good = Arc::new(AtomicBool::new(false));
        let (reload, end) = (readable_after(&[SIGHUP])?, readable_after(&[SIGTERM, SIGINT])?);
        signal_hook::flag::register(SIGINT, Arc::clone(&for_good))?;
        Ok(Self {
            reload,
            end,
            for_good,
        })
    }
}

/// Serves until a signal ends it.
fn serve(cli: &Options, policy: Policy, signals: Signals) -> Result<(), String> {
    let mut passed = Passed::take();
    let (listener, socket) = match passed.listener.take() {
        Some(listener) => (listener, None),
        None => {
            let path = cli.socket.display();
            let listener = listen_at(&cli.socket)
                .map_err(|error| format!("cannot listen at {path}: {error} (--socket PATH)"))?;
            (listener, Some(SocketFile(cli.socket.clone())))
        }
    };
    // Where the service manager keeps it, a client that connects during a restart waits and is not refused.
    let stored = socket.is_some() && fd_store::keep(listener.as_fd(), "listener");
    let mut server = server(cli, policy, listener)?
        .with_reload(signals.reload, PolicySource::File(cli.policy.clone()))
        .map_err(|error| format!("cannot handle signals: {error}"))?;
    // Leases that continue have stored sockets of their own for their stations.
    passed.forget_stations();
    // All files are open or created: from here on these capabilities are enough.
    program::capabilities::limit_to_with(capabilities::NEEDED, at_hand(server.policy().allows_zcrx()))
        .map_err(|error| format!("cannot give up capabilities: {error}"))?;
    tracing::info!(policy = %cli.policy.display(), "ready");
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    let served = server.run(signals.end.as_fd());
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    let for_good = signals.for_good.load(Ordering::Relaxed);
    match for_good {
        true => server.end_all(),
        false => server.end_lingering(),
    }
    drop(server);
    match socket {
        // The next steward listens there.
        Some(socket) if stored && !for_good => std::mem::forget(socket),
        _ => {}
    }
    served.map_err(|error| format!("cannot wait for requests: {error}"))
}

fn store(cli: &Options) -> Result<Store, StoreError> {
    let runtime = || {
        let list = std::env::var_os("RUNTIME_DIRECTORY")?;
        std::env::split_paths(&list).next()
    };
    let state = cli.state.clone().or_else(runtime);
    Store::open(
        &state.unwrap_or_else(|| PathBuf::from("/run/vhost-af-xdp-steward")),
        cli.pins
            .as_deref()
            .unwrap_or(Path::new("/sys/fs/bpf/vhost-af-xdp")),
        cli.grace,
    )
}

/// Undoes what an earlier steward left, and ends.
fn take_back(cli: &Options, policy: Policy) -> Result<(), String> {
    let nobody = new_socket(SocketFlags::empty()).map_err(|error| format!("no socket: {error}"))?;
    let store = store(cli).map_err(with_sources)?;
    let server = Server::new(policy, nobody).map_err(|error| format!("cannot start: {error}"))?;
    let server = server.with_part(zcrx::LOADER).with_netkits(&netkit::Devices);
    server.with_store(store).end_all();
    Ok(())
}

/// The socket file, removed at the end.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Readable after any of these signals.
fn readable_after(which: &[i32]) -> io::Result<UnixStream> {
    let (reader, writer) = UnixStream::pair()?;
    for &signal in which {
        signal_hook::low_level::pipe::register(signal, writer.try_clone()?)?;
    }
    Ok(reader)
}

/// A server that keeps its leases over a restart, if there is a place for them.
fn server(cli: &Options, policy: Policy, listener: OwnedFd) -> Result<Server, String> {
    let server = Server::new(policy, listener)
        .map_err(|error| format!("cannot start: {error}"))?
        .with_linger(cli.linger)
        .with_part(zcrx::LOADER)
        .with_netkits(&netkit::Devices);
    match store(cli) {
        Ok(store) => Ok(server.with_store(store)),
        // The operator set no place, and the steward is useful without one.
        Err(error)
            if !matches!(error, StoreError::Locked { .. }) && cli.state.is_none() && cli.pins.is_none() =>
        {
            tracing::warn!("leases end with this process: {}", with_sources(&error));
            Ok(server)
        }
        Err(error) => Err(format!("no place to keep leases: {}", with_sources(&error))),
    }
}

/// Listens at `path`, and replaces a socket file on which no process listens any more.
fn listen_at(path: &Path) -> io::Result<OwnedFd> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(parent) = parent.filter(|parent| !parent.exists()) {
        // The default directory is the steward's; the operator creates any other one.
        match path == Path::new(DEFAULT_SOCKET) {
            true => fs::create_dir_all(parent)?,
            false => {
                let text = format!(
                    "its directory is not there: `mkdir -p {}`, or choose another path",
                    parent.display()
                );
                return Err(io::Error::other(text));
            }
        }
    }
    let address = SocketAddrUnix::new(path)?;
    if let Ok(metadata) = fs::symlink_metadata(path) {
        if !metadata.file_type().is_socket() {
            let text = "a file is there that is not a socket: choose another path";
            return Err(io::Error::other(text));
        }
        match connect(new_socket(SocketFlags::empty())?, &address) {
            Err(Errno::CONNREFUSED) => fs::remove_file(path)?,
            _ => {
                let text = "another process listens there: stop it, or choose another path";
                return Err(io::Error::other(text));
            }
        }
    }
    let listener = new_socket(SocketFlags::empty())?;
    bind(&listener, &address)?;
    // Any user may connect; the policy decides what the user may do.
    fs::set_permissions(path, Permissions::from_mode(0o666))?;
    listen(&listener, 128)?;
    Ok(listener)
}
