//! `vhost-af-xdp-steward`: the privileged side, see the library.

use std::fs::{self, Permissions};
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with, sockopt,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use steward::policy::Policy;
use steward::protocol::DEFAULT_SOCKET;
use steward::server::Server;

const EXAMPLES: &str = "\
Examples:
  Serve leases by the policy in /etc/vhost-af-xdp/steward.toml:
    vhost-af-xdp-steward
  See how a policy is understood, and change nothing:
    vhost-af-xdp-steward --policy steward.toml --check
  A policy: user vhost may lease queues 0 to 3 of eth1, with up to 1 GiB of locked memory:
    [[allow]]
    user = \"vhost\"
    interface = \"eth1\"
    queues = \"0-3\"
    memlock = \"1 GiB\"
  Then, as user vhost, without any capability:
    vhost-af-xdp serve --steward /run/vhost-af-xdp/steward.sock --socket-path /tmp/vm1.sock --ifname eth1

It needs CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF and CAP_SYS_RESOURCE.";

/// Leases NIC queues to processes without privileges, by a policy.
#[derive(Debug, Parser)]
#[command(name = "vhost-af-xdp-steward", version, max_term_width = 100, after_help = EXAMPLES)]
struct Cli {
    /// Who may lease what; must not be writable by others
    #[arg(long, value_name = "PATH", default_value = "/etc/vhost-af-xdp/steward.toml")]
    policy: PathBuf,
    /// Where holders connect; everybody may, the policy decides. A socket passed by systemd comes first
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Print the policy as it is understood, and exit
    #[arg(long)]
    check: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vhost-af-xdp-steward: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<(), String> {
    let policy = Policy::read(&cli.policy).map_err(|error| match std::error::Error::source(&error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    })?;
    if cli.check {
        print!("{policy}");
        return Ok(());
    }
    tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        .init();
    let end = end_signal().map_err(|error| format!("cannot handle signals: {error}"))?;
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            ..limit
        },
    );
    let (listener, socket) = match passed() {
        Some(listener) => (listener, None),
        None => {
            let listener = listen_at(&cli.socket)
                .map_err(|error| format!("cannot listen at {}: {error}", cli.socket.display()))?;
            (listener, Some(SocketFile(cli.socket.clone())))
        }
    };
    let mut server = Server::new(policy, listener).map_err(|error| format!("cannot start: {error}"))?;
    tracing::info!(policy = %cli.policy.display(), "ready");
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    let served = server.run(end.as_fd());
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    drop(server);
    drop(socket);
    served.map_err(|error| format!("cannot wait for requests: {error}"))
}

/// The socket file, removed at the end.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Readable after SIGTERM or SIGINT.
fn end_signal() -> io::Result<UnixStream> {
    let (reader, writer) = UnixStream::pair()?;
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::low_level::pipe::register(signal, writer.try_clone()?)?;
    }
    Ok(reader)
}

/// The listening socket that systemd passed (sd_listen_fds(3)), if it did and it is one.
#[allow(unsafe_code)]
fn passed() -> Option<OwnedFd> {
    let number = sd_notify::listen_fds().ok()?.next()?;
    // SAFETY: by that protocol the descriptor is ours, open since before we began, and nobody else in this process has it.
    let socket = unsafe { OwnedFd::from_raw_fd(number) };
    let listens = sockopt::socket_acceptconn(&socket).unwrap_or(false);
    let kind = sockopt::socket_type(&socket).ok();
    (listens && kind == Some(SocketType::SEQPACKET)).then_some(socket)
}

/// Listens at `path`, in the place of a socket that nobody listens on any more.
fn listen_at(path: &Path) -> io::Result<OwnedFd> {
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        fs::create_dir_all(parent)?;
    }
    let address = SocketAddrUnix::new(path)?;
    let socket = || {
        socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
    };
    if fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket()) {
        match connect(socket()?, &address) {
            Err(Errno::CONNREFUSED) => fs::remove_file(path)?,
            _ => {
                return Err(io::Error::new(
                    io::ErrorKind::AddrInUse,
                    "another process listens there",
                ));
            }
        }
    }
    let listener = socket()?;
    bind(&listener, &address)?;
    // Everybody may connect and is judged by the policy.
    fs::set_permissions(path, Permissions::from_mode(0o666))?;
    listen(&listener, 128)?;
    Ok(listener)
}
