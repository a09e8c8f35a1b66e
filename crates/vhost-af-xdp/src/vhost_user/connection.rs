//! A connection of a VMM, to its end.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;
use vhost::vhost_user::{BackendReqHandler, Error};

use super::alarm::Alarm;
use super::front;
use crate::port::Port;
use crate::port::visit::Ended;

/// What a connection has beside its port.
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

    /// Whether it took that protocol feature.
    pub(super) fn has(&self, feature: Protocol) -> bool {
        self.protocol.load(Relaxed) & feature.bits() == feature.bits()
    }
}

/// Speaks vhost-user until the connection ends.
pub(crate) fn serve(port: &Arc<Port>, stream: UnixStream) -> Ended {
    let (Ok(connection), Ok(ahead), Ok(alarm)) = (stream.try_clone(), stream.try_clone(), Alarm::new())
    else {
        port.warn("no descriptors left, the connection is dropped: raise the limit of open files (`ulimit -n`, systemd: LimitNOFILE=)".to_owned());
        return Ended::Wrong;
    };
    if !port.begin_session(connection, alarm.clone()) {
        return Ended::Wrong;
    }
    let connection = Arc::new(Connection::new(port));
    let mut requests = BackendReqHandler::from_stream(stream, Arc::clone(&connection));
    loop {
        let came = alarm.await_message(&ahead);
        match came.and_then(|()| front::take(&ahead, &connection)) {
            Ok(true) => continue,
            Ok(false) => {}
            Err(error) => return port.end_session(false, format!("vhost-user: {error}")),
        }
        match requests.handle_request() {
            Ok(()) | Err(Error::SocketRetry(_)) => {}
            Err(error @ (Error::Disconnected | Error::SocketBroken(_))) => {
                return port.end_session(true, error.to_string());
            }
            Err(error) => return port.end_session(false, format!("vhost-user: {error}")),
        }
    }
}
