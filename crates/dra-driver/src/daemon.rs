//! Requests to the daemon, by its control socket (docs/control.md). They block the calling thread.

use std::path::PathBuf;
use std::time::Duration;

use client::connection::{self, Error};
use model::config::TableKind;
use model::control::{Change, Kind, Refused};
use model::state::NetworkStatus;
use serde_json::{Map, Value};

/// Most time for a change, within the time that kubelet gives the driver.
const CHANGE: Duration = Duration::from_secs(20);

/// Why the daemon did not do what was requested.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DaemonError {
    #[error("no daemon answers at {path}: {source}: start it, or name its socket with --control", path = .path.display())]
    NoAnswer { path: PathBuf, source: Box<Error> },
    #[error("{}: {}", .0.message, .0.remedy)]
    Refused(Box<Refused>),
}

/// A daemon.
#[derive(Debug, Clone)]
pub(crate) struct Daemon {
    pub(crate) control: PathBuf,
}

impl Daemon {
    /// Its networks.
    ///
    /// # Errors
    /// It does not answer.
    pub(crate) fn networks(&self) -> Result<Vec<NetworkStatus>, DaemonError> {
        connection::part(&self.control, &["networks"]).map_err(|error| self.error(error))
    }

    /// The path of a port's socket.
    ///
    /// # Errors
    /// It does not answer, or has no such port.
    pub(crate) fn socket(&self, port: &str) -> Result<PathBuf, DaemonError> {
        connection::part(&self.control, &["ports", port, "endpoint"]).map_err(|error| self.error(error))
    }

    /// Adds a port, unless it has one with these keys.
    ///
    /// # Errors
    /// It does not answer, or refuses.
    pub(crate) fn put(&self, port: &str, keys: &Map<String, Value>) -> Result<(), DaemonError> {
        self.change(Change::Put {
            table: TableKind::Port,
            name: port.to_owned(),
            keys: keys.clone(),
            only_new: false,
        })
    }

    /// Removes a port, if it has one.
    ///
    /// # Errors
    /// It does not answer, or refuses.
    pub(crate) fn remove(&self, port: &str) -> Result<(), DaemonError> {
        let (table, name) = (TableKind::Port, port.to_owned());
        match self.change(Change::Remove { table, name }) {
            Err(DaemonError::Refused(refused)) if refused.kind == Kind::NoPort => Ok(()),
            done => done,
        }
    }

    fn change(&self, change: Change) -> Result<(), DaemonError> {
        let changed = connection::change_within(&self.control, change, CHANGE);
        let changed = changed.map_err(|error| self.error(error))?;
        // For instance that the state file cannot be written: the driver adds the port to the next daemon, too.
        for failed in changed.failed {
            tracing::warn!("daemon: {failed}");
        }
        Ok(())
    }

    fn error(&self, error: Error) -> DaemonError {
        match error {
            Error::Refused(refused) => DaemonError::Refused(refused.into()),
            source => DaemonError::NoAnswer {
                path: self.control.clone(),
                source: source.into(),
            },
        }
    }
}
