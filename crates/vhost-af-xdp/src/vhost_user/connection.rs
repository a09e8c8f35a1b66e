//! What a connection of a VMM has beside its port.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;

use super::error::MessageError;
use crate::port::Port;
use crate::port::session::SessionError;

pub(crate) struct Connection {
    pub(crate) port: Arc<Port>,
    /// Protocol features that the VMM took. Set and read by the thread that reads the connection.
    protocol: AtomicU64,
}

impl Connection {
    pub(crate) fn new(port: &Arc<Port>) -> Self {
        Self {
            port: Arc::clone(port),
            protocol: AtomicU64::new(0),
        }
    }

    /// The VMM took these protocol features.
    pub(super) fn negotiate(&self, features: u64) {
        self.protocol.store(features, Relaxed);
    }

    /// A message is refused; the closing line says why.
    pub(super) fn refuse<R: Send + 'static>(&self, error: MessageError) -> Result<R, SessionError> {
        self.port.with_session(move |_, _| Err(error.into()))
    }

    /// Whether it took that protocol feature.
    pub(super) fn has(&self, feature: Protocol) -> bool {
        self.protocol.load(Relaxed) & feature.bits() == feature.bits()
    }
}
