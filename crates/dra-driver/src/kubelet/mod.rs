//! The sockets that kubelet connects to: [`registration`] introduces the driver, [`service`] prepares and releases claims.

pub(crate) mod registration;
pub(crate) mod service;

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

use crate::names;

/// Messages of kubelet's plugin interface.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
pub(crate) mod messages {
    /// Registration.
    pub mod registration {
        tonic::include_proto!("pluginregistration");
    }
    /// Preparing and releasing claims.
    pub mod dra {
        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
    }
}

/// Paths of a driver's service and of its registration.
pub(crate) fn sockets(kubelet: &Path, driver: &str) -> [PathBuf; 2] {
    let registration = format!("{driver}-reg.sock");
    [
        kubelet.join("plugins").join(driver).join("dra.sock"),
        kubelet.join("plugins_registry").join(registration),
    ]
}

/// Listens at a path, instead of an earlier driver.
///
/// # Errors
/// The path is too long, or it cannot listen there.
pub(crate) fn listen(path: &Path) -> io::Result<UnixListener> {
    if !names::fits(path) {
        let longest = names::LONGEST_SOCKET;
        return Err(io::Error::other(format!(
            "the path is longer than {longest} bytes: choose a shorter one"
        )));
    }
    if fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket()) {
        fs::remove_file(path)?;
    }
    UnixListener::bind(path)
}
