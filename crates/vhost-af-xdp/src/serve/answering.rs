//! Threads that answer who asks the daemon: at its control socket, and for the process that answers HTTP.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use anyhow::Context;

use crate::api::capture::Captures;
use crate::api::control_socket;
use crate::api::rules_status::RulesStatus;
use crate::api::service::{self, Asked, Reset};
use crate::api::status::Status;
use crate::config::ServeConfig;
use crate::guard::watchdog::Watchdog;
use crate::ports::{NO_THREAD, Ports};
use crate::reload::Reload;
use crate::sandbox::InForce;
use crate::switch::workers::Workers;

/// What answers are made of.
pub(super) struct Answers<'a, R> {
    pub(super) ports: &'a Arc<Ports>,
    pub(super) workers: &'a Arc<Workers>,
    /// Takes a look.
    pub(super) read: &'a Arc<R>,
    /// For a daemon that has a file.
    pub(super) reload: Option<&'a Reload>,
}

impl<R: Fn() -> Status + Send + Sync + 'static> Answers<'_, R> {
    /// Starts a thread for each way that there is to ask. By HTTP something is changed only where that `is_allowed`.
    /// Errors: there is no thread.
    pub(super) fn start(
        &self,
        control: Option<UnixListener>,
        api: Option<UnixStream>,
        is_allowed: bool,
    ) -> anyhow::Result<()> {
        if let Some(listener) = control {
            self.at_control_socket(listener)?;
        }
        match api {
            Some(link) => self.for_http(link, is_allowed),
            None => Ok(()),
        }
    }

    fn at_control_socket(&self, listener: UnixListener) -> anyhow::Result<()> {
        let (read, reload, reset) = (Arc::clone(self.read), self.reload.cloned(), self.reset());
        let captures = Captures::of(self.ports);
        let body = move || control_socket::serve(&listener, &*read, reload.as_ref(), &*reset, &captures);
        let started = std::thread::Builder::new().name("status".to_owned()).spawn(body);
        started.map(drop).context(NO_THREAD)
    }

    /// The daemon goes on without it.
    fn for_http(&self, link: UnixStream, is_allowed: bool) -> anyhow::Result<()> {
        let (read, ports) = (Arc::clone(self.read), Arc::clone(self.ports));
        let rules = move |name: &str| ports.named(name).map(|port| RulesStatus::of(&port));
        let asked = Asked {
            read: move || read(),
            rules: Arc::new(rules),
            // Who answers by a socket on which nothing is changed is given no way to.
            reload: self.reload.filter(|_| is_allowed).cloned(),
            reset: is_allowed.then(|| self.reset()),
        };
        let lost =
            || tracing::error!("what answers HTTP has ended: start the daemon again to have the API again");
        service::start(link, asked, lost).context(NO_THREAD)
    }

    /// Resets statistics of workers.
    fn reset(&self) -> Reset {
        let workers = Arc::clone(self.workers);
        Arc::new(move || workers.reset_statistics())
    }
}

/// What takes a look at all that there is.
pub(super) fn status_of(
    config: &ServeConfig,
    (ports, workers): (&Arc<Ports>, &Arc<Workers>),
    watchdog: Watchdog,
    in_force: InForce,
    reload: Option<Reload>,
) -> Arc<impl Fn() -> Status + Send + Sync + use<>> {
    let (ports, workers) = (Arc::clone(ports), Arc::clone(workers));
    let api = config.api.all.as_ref();
    let api = api.and_then(|(path, _)| std::path::absolute(path).ok());
    Arc::new(move || {
        let readings = reload.as_ref().map(Reload::readings);
        let networks = ports.networks();
        let status = Status::read(&ports.all(), &networks, &workers, &watchdog, &in_force, readings);
        let api = api.clone();
        Status { api, ..status }
    })
}
