//! Entry points of the fuzz targets (`fuzz/`): parts of the daemon, without the daemon.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use crate::config::{self, Endpoint, ExternalProgram, NicConfig, PortConfig, Segments};
use crate::config::{FileKinds, MemoryRules, QueueOptions};
use crate::nic::interfaces::Interfaces;
use crate::port::watch::Watch;
use crate::port::{AttachedTo, Port};
use crate::supervision::sigbus;
use crate::vhost_user::connection::{self, Connection};
use crate::vhost_user::message::{self, Message, ReceiveError};
use dataplane::nic::endpoint::COPY_BYTES;
use dataplane::worker::polling::Waits;
use dataplane::worker::workers::Workers;
use device::features::OnRequest;
use device::offloads::Offloads;
use xsk::BindRequest;

/// A port of the null NIC with a worker of its own.
pub struct NullPort(Arc<Port>);

impl NullPort {
    /// Creates a port with so many queue pairs, in direct placement or in copy placement.
    ///
    /// # Panics
    /// If there is no thread or descriptor left.
    #[must_use]
    pub fn new(queues: u16, direct: bool) -> Self {
        sigbus::install().expect("a handler");
        let workers = Workers::start(1, &[], Waits::default()).expect("a thread");
        let placement = if direct {
            config::Placement::Direct
        } else {
            config::Placement::Copy
        };
        let config = PortConfig {
            keys: Arc::default(),
            name: "fuzz".into(),
            access: crate::listener::Access::OWN,
            endpoint: Endpoint::Server(PathBuf::from("fuzz")),
            queues,
            nic: NicConfig::Null { frame_bytes: 64 },
            memory: MemoryRules {
                most_bytes: 1 << 40,
                files: FileKinds::Shared,
            },
            options: QueueOptions {
                bind: BindRequest::Auto,
                placement,
                packet_bytes: COPY_BYTES,
                segments: Segments::Auto,
                busy_poll: None,
                hints: crate::config::HintsConfig::default(),
                slices_from: None,
            },
            external: ExternalProgram::None,
            asked: placement,
            mac: None,
            vlans: Vec::new(),
            offload: Offloads::all(),
            offer: OnRequest::all(),
            rates: model::rates::PortRates::default(),
        };
        let (interfaces, workers) = (Arc::new(Interfaces::default()), Arc::new(workers));
        let watch = Watch::new().expect("a descriptor");
        let port = Port::open(config, interfaces, workers, AttachedTo::Nothing, &watch);
        let port = port.expect("nothing is opened");
        port.start();
        Self(port)
    }

    /// Serves one connection until it ends.
    pub fn serve(&self, connection: &UnixStream) {
        connection::serve_connection(&self.0, connection);
    }

    /// Whether there is no session.
    pub fn is_idle(&self) -> bool {
        let shown = self.0.published.snapshot();
        shown.is_some_and(|shown| shown.session.is_none())
    }

    /// Handles GET_CONFIG; `None` if it is rejected, or returns no bytes.
    #[must_use]
    pub fn config(&self, offset: u32, len: u32) -> Option<Vec<u8>> {
        let flags = 0;
        let reply = Connection::new(&self.0).handle(Message::GetConfig { offset, len, flags });
        let bytes = reply.ok()?.payload.split_off(12);
        (!bytes.is_empty()).then_some(bytes)
    }

    /// Handles SET_CONFIG.
    pub fn set_config(&self) {
        let _ = Connection::new(&self.0).handle(Message::SetConfig);
    }
}

/// Parses the messages of a VMM that negotiated these protocol features, up to the end of the connection: returns the
/// kind of each, or its error.
#[must_use]
pub fn messages(stream: &UnixStream, features: u64) -> Vec<String> {
    let mut kinds = Vec::new();
    loop {
        match message::Request::receive(stream) {
            Ok(mut request) => kinds.push(match request.decode(features) {
                Ok(message) => {
                    let said = format!("{message:?}");
                    said.split(['(', ' ']).next().unwrap_or_default().to_owned()
                }
                Err(error) => error.to_string(),
            }),
            Err(ReceiveError::Disconnected) => return kinds,
            Err(error) => {
                kinds.push(error.to_string());
                return kinds;
            }
        }
    }
}
