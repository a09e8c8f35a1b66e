//! Sockets that the daemon listens on, created before it enters the sandbox: those for VMMs, the control socket, and
//! those for HTTP. If the start fails, the daemon removes their files; later the helper does.

use std::fs;
use std::net::TcpListener;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use anyhow::{Context, bail};
use model::gateway::{Changers, Listeners};
use rustix::net::{SocketType, sockopt};

use crate::api::control_socket;
use crate::config::{ApiConfig, Control, Endpoint, PortConfig};
use crate::listener::{self, Access};
use crate::vhost_user::accept::VmmSource;

/// Socket files of the daemon, removed if the start fails before the helper takes over.
#[derive(Default)]
pub(super) struct Leftovers(pub(super) Vec<PathBuf>);

impl Drop for Leftovers {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = fs::remove_file(path);
        }
    }
}

pub(super) fn vmm_source(port: &PortConfig, leftovers: &mut Leftovers) -> anyhow::Result<VmmSource> {
    Ok(match &port.endpoint {
        Endpoint::Server(path) => {
            let listened = listener::listen_at(path, &port.access);
            let listener = listened.with_context(|| format!("cannot listen at {}", path.display()))?;
            leftovers.0.push(path.clone());
            VmmSource::Listen(listener)
        }
        Endpoint::Client(path) => VmmSource::Connect(path.clone()),
        Endpoint::Fd(fd) => inherited(*fd)?,
    })
}

/// A descriptor that the parent process passed; SO_ACCEPTCONN shows whether it is a listening socket.
#[allow(unsafe_code)]
fn inherited(fd: i32) -> anyhow::Result<VmmSource> {
    // SAFETY: the descriptor was inherited (`external::check_inherited`), by the meaning of --fd it is ours alone, and
    // it is named once (config.rs).
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let domain = sockopt::socket_domain(&socket)
        .map_err(|_| anyhow::anyhow!("fd {fd}: not a socket: pass a Unix stream socket"))?;
    if domain != rustix::net::AddressFamily::UNIX || sockopt::socket_type(&socket)? != SocketType::STREAM {
        bail!("fd {fd}: not a Unix stream socket, which vhost-user needs: pass one");
    }
    let _ = rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC);
    if sockopt::socket_acceptconn(&socket)? {
        return Ok(VmmSource::Listen(socket.into()));
    }
    if rustix::net::getpeername(&socket).is_err() {
        bail!("fd {fd}: a socket that neither listens nor is connected: pass one that does");
    }
    Ok(VmmSource::Once(socket.into()))
}

/// Listens on the control socket. If the default path is not available, the daemon runs without one.
pub(super) fn listen_for_status(
    control: &Control,
    leftovers: &mut Leftovers,
) -> anyhow::Result<Option<UnixListener>> {
    let (path, listened) = match control {
        Control::None => return Ok(None),
        Control::Path(path) => {
            let listened = control_socket::listen(path);
            let listened = listened.with_context(|| format!("--control {}", path.display()))?;
            (path.clone(), listened)
        }
        // The default, not requested by an option; guests do not need it.
        Control::Default => {
            let usual = control_socket::default_path();
            match control_socket::listen(&usual) {
                Ok(listened) => (usual, listened),
                Err(error) => {
                    tracing::warn!(
                        "no control socket, `status` will not find this daemon: {error} (--control PATH)"
                    );
                    return Ok(None);
                }
            }
        }
    };
    leftovers.0.push(path);
    Ok(Some(listened))
}

/// Listens for HTTP, if that is configured.
pub(super) fn listen_for_http(
    api: &ApiConfig,
    leftovers: &mut Leftovers,
) -> anyhow::Result<Listeners<OwnedFd>> {
    let mut local = |option: &str, socket: &Option<(PathBuf, Access)>| -> anyhow::Result<Option<OwnedFd>> {
        let Some((path, access)) = socket else {
            return Ok(None);
        };
        let listened = listener::listen_at(path, access);
        let listener = listened.with_context(|| format!("{option} {}", path.display()))?;
        leftovers.0.push(path.clone());
        Ok(Some(listener.into()))
    };
    let all = local("--api", &api.all)?;
    let read_only = local("--api-read-only", &api.read_only)?;
    let metrics = api.metrics.map(|address| {
        let listened = TcpListener::bind(address);
        listened
            .with_context(|| format!("--metrics {address}: choose an address of this host and a free port"))
    });
    Ok(Listeners {
        all,
        read_only,
        metrics: metrics.transpose()?.map(OwnedFd::from),
        changers: api.all.as_ref().and_then(|(_, access)| changers(access)),
        owner: (api.all.as_ref().or(api.read_only.as_ref())).map_or(0, |(_, access)| owner(access)),
    })
}

fn owner(access: &Access) -> u32 {
    access
        .owner
        .unwrap_or_else(|| rustix::process::geteuid().as_raw())
}

/// Who may make changes, if the socket's mode lets other users connect; `None`: everybody who can connect.
fn changers(access: &Access) -> Option<Changers> {
    let others_connect = access.mode & 0o002 != 0;
    others_connect.then(|| Changers {
        user: owner(access),
        group: access
            .group
            .unwrap_or_else(|| rustix::process::getegid().as_raw()),
    })
}
