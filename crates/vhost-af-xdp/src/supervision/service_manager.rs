//! Notifies a service manager that guests can connect (sd_notify(3), `Type=notify` of a unit).
//!
//! The daemon is in its sandbox then, and can open no path, so it connects the socket earlier.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The socket of the service manager, if there is one.
pub(crate) struct ServiceManager(Option<UnixDatagram>);

impl ServiceManager {
    /// The service manager that started this process, if it asks for notifications (`NOTIFY_SOCKET`).
    pub(crate) fn of_this_process() -> Self {
        Self::at(std::env::var_os("NOTIFY_SOCKET"))
    }

    fn at(place: Option<OsString>) -> Self {
        let socket = place.map(|place| connect(&place)).transpose();
        Self(socket.unwrap_or_else(|error| {
            tracing::warn!("cannot connect to the service manager (NOTIFY_SOCKET): {error}");
            None
        }))
    }

    /// Notifies the service manager that guests can connect.
    pub(crate) fn tell_ready(self) {
        if let Some(Err(error)) = self.0.map(|socket| socket.send(b"READY=1")) {
            tracing::warn!("cannot notify the service manager that this daemon is ready: {error}");
        }
    }
}

/// `place`: a path, or `@` and an abstract name.
fn connect(place: &OsStr) -> io::Result<UnixDatagram> {
    let address = match place.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(place)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::supervision::helper::make_directory;

    #[test]
    fn service_manager_is_notified_by_path_and_by_abstract_name() {
        let directory = make_directory().expect("a place");
        let path = directory.join("notify");
        let name = format!("vhost-af-xdp-test-{}", std::process::id());
        let abstract_name = SocketAddr::from_abstract_name(&name).expect("short");
        let sockets = [
            (UnixDatagram::bind(&path), path.into_os_string()),
            (UnixDatagram::bind_addr(&abstract_name), format!("@{name}").into()),
        ];
        for (socket, place) in sockets {
            let socket = socket.expect("bound");
            ServiceManager::at(Some(place)).tell_ready();
            let mut said = [0; 16];
            let count = socket.recv(&mut said).expect("it was sent");
            assert_eq!(&said[..count], b"READY=1");
        }
        std::fs::remove_dir_all(directory).expect("ours");
        // Without a service manager, or with one that is gone: no harm.
        ServiceManager::at(None).tell_ready();
        ServiceManager::at(Some("/nonexistent/notify".into())).tell_ready();
    }
}
