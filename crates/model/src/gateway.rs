//! What the daemon passes to the gateway when it starts it.

use serde::{Deserialize, Serialize};

/// Its options: one argument of its command line, as JSON. Descriptors are given by number.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GatewayOptions {
    /// The socket to the daemon.
    pub link: i32,
    /// Where clients connect.
    pub listeners: Listeners<i32>,
    /// Layers of the sandbox, as option `--sandbox` has them.
    pub sandbox: String,
    /// The user that it becomes, as `UID:GID`; none: it keeps its user.
    pub user: Option<String>,
}

/// Listening sockets of the gateway.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Listeners<T> {
    /// Socket for reading and changing.
    pub all: Option<T>,
    /// Socket for reading.
    pub read_only: Option<T>,
    /// TCP socket for metrics alone.
    pub metrics: Option<T>,
    /// Who may make changes through `all`; none: everybody who can connect.
    pub changers: Option<Changers>,
    /// User that owns `all` and `read_only`.
    pub owner: u32,
}

/// User and group that may make changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changers {
    /// The user.
    pub user: u32,
    /// The group.
    pub group: u32,
}

impl<T> Listeners<T> {
    /// The same with other descriptors.
    ///
    /// # Errors
    /// The first one that `of` returns.
    pub fn try_map<U, E>(&self, of: impl Fn(&T) -> Result<U, E>) -> Result<Listeners<U>, E> {
        let each = |socket: &Option<T>| socket.as_ref().map(&of).transpose();
        Ok(Listeners {
            all: each(&self.all)?,
            read_only: each(&self.read_only)?,
            metrics: each(&self.metrics)?,
            changers: self.changers,
            owner: self.owner,
        })
    }
}
