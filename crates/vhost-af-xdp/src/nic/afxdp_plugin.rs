//! Client of the handshake in which the AF_XDP device plugin for Kubernetes gives a pod the socket maps of its
//! interfaces.
//!
//! The protocol is that of github.com/intel/afxdp-plugins-for-kubernetes, version 0.1 (`constants/constants.go` and
//! `internal/udsserver/udsserver.go` there): text without a terminator, one message a packet of a SOCK_SEQPACKET
//! socket, 64 bytes at most.
//!
//! ```text
//!     us                       plugin
//!     /connect,HOSTNAME        /host_ok              or /host_nak: no such pod, or without these devices
//!     /version                 0.1
//!     /xsk_map_fd,INTERFACE    /fd_ack + descriptor  or /fd_nak: not a device of this pod        (once an interface)
//!     /fin                     /fin_ack
//! ```
//!
//! Any answer may be `/nak` (not understood) or `/error` (the plugin failed) instead. The plugin answers one connection
//! in the lifetime of a container and then removes its socket; the descriptors stay valid. The plugin is trusted with a
//! map only: its messages are checked here by length and word, and the descriptor by its user.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use program::descriptors;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, send, socket_with,
};

/// Longest message, bytes (`udsMsgBufSize`).
const MESSAGE_MAX: usize = 64;
/// How long an answer may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The version of the protocol that this is written for.
const VERSION: &str = "0.1";

/// Why there is no map from the plugin.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PluginError {
    #[error("no AF_XDP device plugin at {}: is the socket mounted into this container? A plugin serves it once, and \
             removes it then", .path.display())]
    Connect {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "the AF_XDP device plugin does not know a pod called {0:?} with these devices (/host_nak): the pod's hostname \
         must be its name"
    )]
    Host(String),
    #[error(
        "the AF_XDP device plugin has no device {0:?} for this pod (/fd_nak): AFXDP_DEVICES lists its devices"
    )]
    Device(String),
    #[error("the AF_XDP device plugin refuses {request:?}: {answer}")]
    Refused { request: String, answer: String },
    #[error("the AF_XDP device plugin's answer to {request:?} is {answer:?}, which is none of the protocol")]
    Garbage { request: String, answer: String },
    #[error("the AF_XDP device plugin answers {request:?} with {count} descriptors instead of {wanted}")]
    Descriptors {
        request: String,
        count: usize,
        wanted: usize,
    },
    #[error("{request:?} is {len} bytes long, the AF_XDP device plugin's messages have {MESSAGE_MAX} at most: shorten \
             the name", len = .request.len())]
    Long { request: String },
    #[error("the AF_XDP device plugin's answer to {0:?} is longer than {MESSAGE_MAX} bytes")]
    LongAnswer(String),
    #[error("the AF_XDP device plugin has not answered {request:?} for {} s", ANSWER_TIMEOUT.as_secs())]
    Silent { request: String },
    #[error("the AF_XDP device plugin has closed the connection instead of answering {0:?}")]
    Gone(String),
    #[error("cannot exchange messages with the AF_XDP device plugin")]
    Io(#[from] io::Error),
}

/// A connection on which the plugin has accepted us.
pub(crate) struct Plugin {
    socket: OwnedFd,
}

/// An answer, and its descriptors.
type Answer = (String, Vec<OwnedFd>);

impl Plugin {
    /// Connects to the plugin at `path` as the pod called `host`.
    pub(crate) fn connect(path: &Path, host: &str) -> Result<Self, PluginError> {
        let refused = |errno: Errno| PluginError::Connect {
            path: path.to_owned(),
            source: errno.into(),
        };
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(refused)?;
        let address = SocketAddrUnix::new(path).map_err(refused)?;
        connect(&socket, &address).map_err(refused)?;
        let plugin = Self { socket };
        match plugin.ask(&format!("/connect,{host}"), 0)?.0.as_str() {
            "/host_ok" => {}
            "/host_nak" => return Err(PluginError::Host(host.to_owned())),
            other => return Err(garbage("/connect", other)),
        }
        let (version, _) = plugin.ask("/version", 0)?;
        if version.starts_with('/') || version.is_empty() {
            return Err(garbage("/version", &version));
        }
        if version != VERSION {
            tracing::warn!(
                version,
                "the AF_XDP device plugin speaks another version than {VERSION}"
            );
        }
        Ok(plugin)
    }

    /// The socket map of an interface.
    pub(crate) fn map(&self, interface: &str) -> Result<OwnedFd, PluginError> {
        let request = format!("/xsk_map_fd,{interface}");
        let (answer, mut descriptors) = self.ask(&request, 1)?;
        match (answer.as_str(), descriptors.pop()) {
            ("/fd_ack", Some(map)) => Ok(map),
            ("/fd_ack", None) => Err(PluginError::Descriptors {
                request,
                count: 0,
                wanted: 1,
            }),
            ("/fd_nak", _) => Err(PluginError::Device(interface.to_owned())),
            (other, _) => Err(garbage(&request, other)),
        }
    }

    /// Ends the exchange. The descriptors stay valid after any answer, so a wrong one is only logged.
    pub(crate) fn finish(self) {
        match self.ask("/fin", 0) {
            Ok((answer, _)) if answer == "/fin_ack" => {}
            Ok((answer, _)) => {
                tracing::warn!(answer, "the AF_XDP device plugin does not acknowledge the end");
            }
            Err(error) => {
                tracing::warn!(%error, "the AF_XDP device plugin does not acknowledge the end");
            }
        }
    }

    /// Sends a request, and waits for the answer, which may have `descriptors` descriptors at most.
    fn ask(&self, request: &str, descriptors: usize) -> Result<Answer, PluginError> {
        if request.len() > MESSAGE_MAX {
            return Err(PluginError::Long {
                request: request.to_owned(),
            });
        }
        send(&self.socket, request.as_bytes(), SendFlags::NOSIGNAL).map_err(io::Error::from)?;
        self.wait(request)?;
        let (answer, got) = self.receive(request)?;
        if got.len() > descriptors {
            return Err(PluginError::Descriptors {
                request: request.to_owned(),
                count: got.len(),
                wanted: descriptors,
            });
        }
        match answer.as_str() {
            "/nak" | "/error" => Err(PluginError::Refused {
                request: request.to_owned(),
                answer,
            }),
            _ => Ok((answer, got)),
        }
    }

    fn wait(&self, request: &str) -> Result<(), PluginError> {
        match descriptors::is_readable(&self.socket, Some(Instant::now() + ANSWER_TIMEOUT))? {
            true => Ok(()),
            false => Err(PluginError::Silent {
                request: request.to_owned(),
            }),
        }
    }

    fn receive(&self, request: &str) -> Result<Answer, PluginError> {
        let mut bytes = [0; MESSAGE_MAX];
        let received = match descriptors::receive(&self.socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok(received) if received.bytes > 0 => received,
            Ok(_) | Err(Errno::CONNRESET) => return Err(PluginError::Gone(request.to_owned())),
            Err(errno) => return Err(io::Error::from(errno).into()),
        };
        if received.is_truncated {
            return Err(PluginError::LongAnswer(request.to_owned()));
        }
        // Implementations in C send their whole buffer, with zeros behind the text.
        let text = bytes[..received.bytes]
            .split(|byte| *byte == 0)
            .next()
            .unwrap_or_default();
        Ok((String::from_utf8_lossy(text).into_owned(), received.descriptors))
    }
}

fn garbage(request: &str, answer: &str) -> PluginError {
    PluginError::Garbage {
        request: request.to_owned(),
        answer: answer.to_owned(),
    }
}
