//! The protocol of the control socket: JSON, one message on a line.
//!
//! A client sends a [`Request`] and reads an [`Answer`], as often as it likes on a connection:
//!
//! ```text
//!     {"get": ["ports", "vm1", "mac"]}
//!     {"ok": "52:54:00:00:00:01"}
//!     {"change": {"remove": {"name": "vm2"}}}
//!     {"error": {"kind": "no-port", "message": "there is no port \"vm2\"", "remedy": "..."}}
//! ```
//!
//! `events` and `capture` use up the connection. After `events` the daemon sends an answer with a [`Read`] at once, and
//! a further one whenever something happens. After `capture` it sends one answer, then frames, in binary.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::TableKind;

/// Longest request, its newline included: 10,000 filter rules are shorter.
pub const LONGEST_REQUEST: usize = 4 << 20;

/// A message of a client.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// The [`Status`](crate::state::Status), or the part of it at this path: names of fields, and in a list the name of
    /// an entry or its index. `["ports", NAME, "rules"]` is the [`RulesStatus`](crate::state::RulesStatus) of a port.
    Get(Vec<String>),
    /// Change something; answered with [`Changed`].
    Change(Change),
    /// Send the events after a sequence number, then each new one; answered with [`Read`](crate::events::Read).
    Events {
        /// 0: all that are kept.
        after: u64,
    },
    /// Send frames of a port; answered with [`CaptureBegun`].
    Capture(CaptureRequest),
}

/// What to change.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Change {
    /// Read the configuration file again.
    Reload,
    /// Add a port or network, or replace one, with these keys.
    Put {
        /// Whether it is a port or a network.
        #[serde(default)]
        table: TableKind,
        /// Its name.
        name: String,
        /// Keys of `[port.NAME]` or `[network.NAME]`.
        keys: Map<String, Value>,
        /// Fail if one of this name exists.
        only_new: bool,
    },
    /// Change these keys of a port or network; null: remove the key.
    Patch {
        /// Whether it is a port or a network.
        #[serde(default)]
        table: TableKind,
        /// Its name.
        name: String,
        /// Keys of `[port.NAME]` or `[network.NAME]`.
        keys: Map<String, Value>,
        /// Allow the change to disconnect the port's guest.
        #[serde(default)]
        disconnect: bool,
    },
    /// Remove a port, or a network without ports.
    Remove {
        /// Whether it is a port or a network.
        #[serde(default)]
        table: TableKind,
        /// Its name.
        name: String,
    },
    /// Reset the statistics of workers.
    ResetWorkers,
}

/// What was done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Changed {
    /// The kind of change.
    pub what: Done,
    /// What was done, in words, one line each.
    pub done: Vec<String>,
    /// What failed, one line each: parts of a reload, or to keep a change for the next start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(skip)]
    pub failed: Vec<String>,
}

/// See [`Changed`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[schemars(inline)]
pub enum Done {
    /// There was nothing to change.
    Nothing,
    /// A port or network was added.
    Added,
    /// A port or network was changed; guests stay connected.
    Changed,
    /// A port was stopped and started; its guest was disconnected.
    Replaced,
    /// A port or network was removed.
    Removed,
    /// The configuration file was read again.
    Reloaded,
    /// The statistics of workers were reset.
    Reset,
}

/// What to capture.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureRequest {
    /// Name of the port.
    pub port: String,
    /// Frames that the guest sends.
    pub from_guest: bool,
    /// Frames that the guest receives.
    pub to_guest: bool,
}

/// The answer to a capture request; the frames follow it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureBegun {
    /// What is not captured.
    pub notes: Vec<String>,
}

/// A message of the daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer<T> {
    /// The result of the request.
    Ok(T),
    /// Why the daemon refused the request.
    Error(Refused),
}

impl Change {
    /// The port or network that it is about.
    #[must_use]
    pub fn table(&self) -> Option<(TableKind, &str)> {
        match self {
            Self::Put { table, name, .. }
            | Self::Patch { table, name, .. }
            | Self::Remove { table, name } => Some((*table, name)),
            Self::Reload | Self::ResetWorkers => None,
        }
    }
}

impl<T> Answer<T> {
    /// As a result.
    ///
    /// # Errors
    /// The daemon refused.
    pub fn into_result(self) -> Result<T, Refused> {
        match self {
            Self::Ok(answer) => Ok(answer),
            Self::Error(refused) => Err(refused),
        }
    }
}

impl<T> From<Result<T, Refused>> for Answer<T> {
    fn from(result: Result<T, Refused>) -> Self {
        result.map_or_else(Self::Error, Self::Ok)
    }
}

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refused {
    /// The kind of reason.
    pub kind: Kind,
    /// What is wrong, with the values.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
    /// Keys that it is about.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<String>,
}

/// Kinds of reasons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The line is not a valid request.
    NoRequest,
    /// Nothing is at that path.
    NoSuch,
    /// There is no port of that name.
    NoPort,
    /// There is no network of that name.
    NoNetwork,
    /// The daemon has no configuration file.
    NoFile,
    /// A port or network of that name exists.
    Exists,
    /// The port or network is in the configuration file.
    InFile,
    /// The network has ports.
    InUse,
    /// A key or its value is wrong.
    Mistake,
    /// The guest would have to be disconnected.
    Disconnects,
    /// The host lacks a resource, or another process uses it.
    Failed,
    /// This connection may not do that.
    NotAllowed,
    /// There are too many of these already.
    Busy,
    /// The daemon ends.
    Ending,
}

impl Kind {
    /// What to do about it.
    fn remedy(self) -> &'static str {
        match self {
            Self::NoRequest => "send a request as docs/control.md describes it, on a line",
            Self::NoSuch => "{\"get\": []} shows everything",
            Self::NoPort => "`port list` lists their names",
            Self::NoNetwork => "`network list` lists their names",
            Self::NoFile => "start it with --config FILE, which may have no port",
            Self::Exists => "change it with `port set` or `network set` (PATCH), or remove it before",
            Self::InFile => "change the file, and reload it: `vhost-af-xdp reload`, or POST /v1/reload",
            Self::InUse => "remove these ports first, or give them another network",
            Self::Mistake => "docs/keys.md describes the keys",
            Self::Disconnects => {
                "to allow that: `port set --disconnect`, PATCH with ?disconnect=true, or PUT"
            }
            Self::Failed => "remove the cause, then retry",
            Self::NotAllowed => "use the control socket of the daemon",
            Self::Busy => "retry when one of them is done",
            Self::Ending => "retry after its restart",
        }
    }
}

impl Refused {
    /// A refusal for a reason of this kind.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            remedy: kind.remedy().to_owned(),
            keys: Vec::new(),
        }
    }

    /// There is no port or network of that name.
    #[must_use]
    pub fn absent(table: TableKind, name: &str) -> Self {
        let kind = match table {
            TableKind::Port => Kind::NoPort,
            TableKind::Network => Kind::NoNetwork,
        };
        Self::new(kind, format!("there is no {table} {name:?}"))
    }

    /// The daemon ends.
    #[must_use]
    pub fn ending() -> Self {
        Self::new(Kind::Ending, "the daemon ends")
    }
}

/// A message as a line.
///
/// # Errors
/// It cannot be JSON.
pub fn line(message: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let mut text = serde_json::to_vec(message)?;
    text.push(b'\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn requests_are_written_as_documented() {
        let keys = Map::from_iter([("vlan".to_owned(), json!(5))]);
        let (name, disconnect) = ("vm1".to_owned(), false);
        for (request, wanted) in [
            (Request::Get(Vec::new()), json!({"get": []})),
            (Request::Events { after: 7 }, json!({"events": {"after": 7}})),
            (Request::Change(Change::Reload), json!({"change": "reload"})),
            (
                Request::Change(Change::Patch {
                    table: TableKind::Port,
                    name: name.clone(),
                    keys,
                    disconnect,
                }),
                json!({"change": {"patch": {
                    "table": "port", "name": "vm1", "keys": {"vlan": 5}, "disconnect": false
                }}}),
            ),
        ] {
            assert_eq!(serde_json::to_value(&request).expect("JSON"), wanted);
            assert_eq!(serde_json::from_value::<Request>(wanted).expect("read"), request);
        }
        let misspelt = json!({"change": {"remove": {"name": "vm1", "tabel": "network"}}});
        serde_json::from_value::<Request>(misspelt).expect_err("it would remove a port");
        // A table that is not named is a port.
        let (table, remove) = (TableKind::Port, json!({"change": {"remove": {"name": "vm1"}}}));
        let remove = serde_json::from_value::<Request>(remove).expect("a request");
        assert_eq!(remove, Request::Change(Change::Remove { table, name }));
    }

    #[test]
    fn answer_is_ok_or_an_error_with_remedy() {
        let answer = |result: Result<u8, Refused>| serde_json::to_value(Answer::from(result)).expect("JSON");
        assert_eq!(answer(Ok(3)), json!({"ok": 3}));
        let error = &answer(Err(Refused::absent(TableKind::Port, "x")))["error"];
        assert_eq!(error["kind"], "no-port");
        assert_eq!(error["message"], "there is no port \"x\"");
        assert!(error["remedy"].is_string() && error.get("keys").is_none());
    }
}
