//! Starts the threads that answer clients: of the control socket, and of the HTTP gateway.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use anyhow::Context;

use crate::api::control_socket::{Access, Connections, Server};
use crate::api::gateway;
use crate::ports::NO_THREAD;
use crate::thread;

/// Most connections to the control socket at the same time.
const MOST: usize = 64;

/// Starts a thread for the control socket, if there is one, and one for the gateway, if there is one. The gateway may
/// make changes only if `is_allowed`.
/// Errors: a thread cannot be started.
pub(super) fn start(
    server: &Arc<Server>,
    control: Option<UnixListener>,
    gateway: Option<UnixStream>,
    is_allowed: bool,
) -> anyhow::Result<()> {
    if let Some(listener) = control {
        let (server, connections) = (Arc::clone(server), Connections::new(MOST));
        let access = Access {
            change: true,
            capture: true,
        };
        let body = move || server.accept(&listener, &connections, access);
        thread::start("control", body).context(NO_THREAD)?;
    }
    match gateway {
        Some(link) => gateway::serve(link, Arc::clone(server), is_allowed).context(NO_THREAD),
        None => Ok(()),
    }
}
