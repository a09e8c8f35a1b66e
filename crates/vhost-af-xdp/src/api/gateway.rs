//! The daemon's side of the gateway, which answers HTTP (crate `gateway`): `serve` starts it before it enters its sandbox,
//! and receives connections for the control protocol from it.
//!
//! The daemon treats the gateway as if an attacker had taken it over: it gets few connections, which may read the
//! state, and change something if `--api` allows that, and never capture frames. If it ends, the daemon continues.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, bail};
use model::gateway::{GatewayOptions, Listeners};
use program::descriptors;
use program::handed::close_all_on_exec;
use program::log;
use program::sandbox::{Layers, User};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::RecvFlags;

use super::control_socket::{Access, Connections, Server};

use crate::thread;

/// The gateway's program, in the directory of this one.
const PROGRAM: &str = "vhost-af-xdp-gateway";
/// Most connections at a time: the gateway has three, and those of an earlier gateway process may still be open.
const MOST: usize = 8;

/// Starts the gateway for these sockets, if there are any; returns the daemon's end of the connection to it.
/// Errors: it cannot be started.
pub(crate) fn start(
    listeners: &Listeners<OwnedFd>,
    user: Option<&User>,
    layers: &Layers,
) -> anyhow::Result<Option<UnixStream>> {
    let sockets = [&listeners.all, &listeners.read_only, &listeners.metrics];
    if sockets.iter().all(|socket| socket.is_none()) {
        return Ok(None);
    }
    let program = std::env::current_exe()
        .context("no path to this program")?
        .with_file_name(PROGRAM);
    if !program.is_file() {
        bail!(
            "--api and --metrics need the program {}: install it there",
            program.display()
        );
    }
    let (ours, theirs) = UnixStream::pair().context("no socket pair")?;
    close_all_on_exec()?;
    let pass = |fd: BorrowedFd<'_>| fcntl_setfd(fd, FdFlags::empty()).map(|()| fd.as_raw_fd());
    let options = GatewayOptions {
        link: pass(theirs.as_fd())?,
        listeners: listeners.try_map(|socket| pass(socket.as_fd()))?,
        sandbox: layers.to_string(),
        // Without its groups, which the gateway does not need.
        user: user.map(|user| format!("{}:{}", user.uid, user.gid)),
    };
    let mut command = Command::new(&program);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command.args(["--options", &serde_json::to_string(&options)?]);
    log::pass_on(&mut command);
    // Not waited for, because the gateway may outlive the daemon. The socket pair shows when it ends.
    #[allow(clippy::zombie_processes)]
    let started = command.spawn();
    started.with_context(|| format!("cannot start {}", program.display()))?;
    Ok(Some(ours))
}

/// Serves connections of the gateway until it ends.
/// Errors: no thread can be started.
pub(crate) fn serve(link: UnixStream, server: Arc<Server>, may_change: bool) -> io::Result<()> {
    let connections = Connections::new(MOST);
    let access = Access {
        change: may_change,
        capture: false,
    };
    let body = move || {
        while let Some(stream) = receive(&link) {
            server.serve(stream, &connections, access);
        }
        tracing::error!("the gateway has ended: restart the daemon to get the API back");
    };
    thread::start("gateway", body).map(drop)
}

/// The next connection from the gateway; `None`: it has ended.
fn receive(link: &UnixStream) -> Option<UnixStream> {
    loop {
        let message = descriptors::receive(link, &mut [0], RecvFlags::empty()).ok()?;
        if message.bytes == 0 {
            return None;
        }
        if let Some(end) = message.descriptors.into_iter().next() {
            return Some(end.into());
        }
    }
}
