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

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
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
/// What failed if the kernel reports an error of the socket.
const BROKEN: &str = "cannot exchange messages with the AF_XDP device plugin";

/// A connection on which the plugin has accepted us.
pub(crate) struct Plugin {
    socket: OwnedFd,
}

/// An answer, and its descriptors.
type Answer = (String, Vec<OwnedFd>);

impl Plugin {
    /// Connects to the plugin at `path` as the pod called `host`.
    pub(crate) fn connect(path: &Path, host: &str) -> anyhow::Result<Self> {
        let refused = || {
            format!(
                "no AF_XDP device plugin at {}: is the socket mounted into this container? A plugin serves it once, and \
                 removes it then",
                path.display()
            )
        };
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .with_context(refused)?;
        let address = SocketAddrUnix::new(path).with_context(refused)?;
        connect(&socket, &address).with_context(refused)?;
        let plugin = Self { socket };
        match plugin.ask(&format!("/connect,{host}"), 0)?.0.as_str() {
            "/host_ok" => {}
            "/host_nak" => bail!(
                "the AF_XDP device plugin does not know a pod called {host:?} with these devices (/host_nak): the pod's \
                 hostname must be its name"
            ),
            other => bail!(garbage("/connect", other)),
        }
        let (version, _) = plugin.ask("/version", 0)?;
        if version.starts_with('/') || version.is_empty() {
            bail!(garbage("/version", &version));
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
    pub(crate) fn map(&self, interface: &str) -> anyhow::Result<OwnedFd> {
        let request = format!("/xsk_map_fd,{interface}");
        let (answer, mut descriptors) = self.ask(&request, 1)?;
        match (answer.as_str(), descriptors.pop()) {
            ("/fd_ack", Some(map)) => Ok(map),
            ("/fd_ack", None) => bail!(wrong_count(&request, 0, 1)),
            ("/fd_nak", _) => bail!(
                "the AF_XDP device plugin has no device {interface:?} for this pod (/fd_nak): AFXDP_DEVICES lists its \
                 devices"
            ),
            (other, _) => bail!(garbage(&request, other)),
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
    fn ask(&self, request: &str, descriptors: usize) -> anyhow::Result<Answer> {
        if request.len() > MESSAGE_MAX {
            let len = request.len();
            bail!(
                "{request:?} is {len} bytes long, the AF_XDP device plugin's messages have {MESSAGE_MAX} at most: shorten \
                 the name"
            );
        }
        send(&self.socket, request.as_bytes(), SendFlags::NOSIGNAL).context(BROKEN)?;
        self.wait(request)?;
        let (answer, got) = self.receive(request)?;
        if got.len() > descriptors {
            bail!(wrong_count(request, got.len(), descriptors));
        }
        match answer.as_str() {
            "/nak" | "/error" => bail!("the AF_XDP device plugin refuses {request:?}: {answer}"),
            _ => Ok((answer, got)),
        }
    }

    fn wait(&self, request: &str) -> anyhow::Result<()> {
        let seconds = ANSWER_TIMEOUT.as_secs();
        let answered = descriptors::await_readable(&self.socket, Some(Instant::now() + ANSWER_TIMEOUT));
        match answered.context(BROKEN)? {
            true => Ok(()),
            false => bail!("the AF_XDP device plugin has not answered {request:?} for {seconds} s"),
        }
    }

    fn receive(&self, request: &str) -> anyhow::Result<Answer> {
        let mut bytes = [0; MESSAGE_MAX];
        let received = match descriptors::receive(&self.socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok(received) if received.bytes > 0 => received,
            Ok(_) | Err(Errno::CONNRESET) => {
                bail!("the AF_XDP device plugin has closed the connection instead of answering {request:?}")
            }
            Err(errno) => return Err(errno).context(BROKEN),
        };
        if received.is_truncated {
            bail!("the AF_XDP device plugin's answer to {request:?} is longer than {MESSAGE_MAX} bytes");
        }
        // Implementations in C send their whole buffer, with zeros behind the text.
        let text = bytes[..received.bytes]
            .split(|byte| *byte == 0)
            .next()
            .unwrap_or_default();
        Ok((String::from_utf8_lossy(text).into_owned(), received.descriptors))
    }
}

fn garbage(request: &str, answer: &str) -> String {
    format!("the AF_XDP device plugin's answer to {request:?} is {answer:?}, which is none of the protocol")
}

fn wrong_count(request: &str, count: usize, wanted: usize) -> String {
    format!("the AF_XDP device plugin answers {request:?} with {count} descriptors instead of {wanted}")
}
