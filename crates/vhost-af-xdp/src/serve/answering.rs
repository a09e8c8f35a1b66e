//! Starts the threads that answer clients: of the control socket, and of the HTTP gateway.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};

use anyhow::Context;
use model::state::{Sandbox, Status};

use crate::api::capture::Captures;
use crate::api::control_socket::{Access, Connections, Server};
use crate::api::{gateway, rules_status, status};
use crate::config::ServeConfig;
use crate::ports::{NO_THREAD, Ports};
use crate::reload::Reload;
use crate::supervision::watchdog::Watchdog;
use crate::thread;
use dataplane::worker::workers::Workers;

/// Most connections to the control socket at the same time.
const MOST: usize = 64;

/// What the threads need to answer requests.
pub(super) struct Answers<'a, R> {
    pub(super) ports: &'a Arc<Ports>,
    pub(super) workers: &'a Arc<Workers>,
    /// Reads the daemon's status, at least what is at a path.
    pub(super) read: &'a Arc<R>,
    /// Changes the configuration at run time; `None`: the daemon has no configuration file.
    pub(super) reload: Option<&'a Reload>,
}

impl<R: Fn(&[String]) -> Status + Send + Sync + 'static> Answers<'_, R> {
    /// Starts a thread for the control socket, if there is one, and one for the gateway, if there is one. The gateway
    /// may make changes only if `is_allowed`.
    /// Errors: a thread cannot be started.
    pub(super) fn start(
        &self,
        control: Option<UnixListener>,
        gateway: Option<UnixStream>,
        is_allowed: bool,
    ) -> anyhow::Result<()> {
        let (read, ports, workers) = (
            Arc::clone(self.read),
            Arc::clone(self.ports),
            Arc::clone(self.workers),
        );
        let server = Arc::new(Server {
            read: Box::new(move |path| read(path)),
            rules: Box::new(move |name| ports.named(name).map(|port| rules_status::read(&port))),
            reload: self.reload.cloned(),
            reset: Box::new(move || workers.reset_statistics()),
            captures: Captures::of(self.ports),
            look: Mutex::default(),
        });
        if let Some(listener) = control {
            let (server, connections) = (Arc::clone(&server), Connections::new(MOST));
            let access = Access {
                change: true,
                capture: true,
            };
            let body = move || server.accept(&listener, &connections, access);
            thread::start("control", body).context(NO_THREAD)?;
        }
        match gateway {
            Some(link) => gateway::serve(link, server, is_allowed).context(NO_THREAD),
            None => Ok(()),
        }
    }
}

/// Returns a function that reads the daemon's status, at least what is at a path.
pub(super) fn status_of(
    config: &ServeConfig,
    (ports, workers): (&Arc<Ports>, &Arc<Workers>),
    watchdog: Watchdog,
    in_force: Sandbox,
    reload: Option<Reload>,
) -> Arc<impl Fn(&[String]) -> Status + Send + Sync + use<>> {
    let (ports, workers) = (Arc::clone(ports), Arc::clone(workers));
    let api = config.api.all.as_ref();
    let api = api.and_then(|(path, _)| std::path::absolute(path).ok());
    Arc::new(move |path: &[String]| {
        let (ports, networks) = (ports.all(), ports.networks());
        let mut status = status::read(path, (&ports, &networks), &workers, &watchdog, &in_force);
        if let Some(reload) = &reload {
            reload.add_configuration(&mut status);
        }
        let api = api.clone();
        Status { api, ..status }
    })
}
