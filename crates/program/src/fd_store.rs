//! Descriptors that the service manager keeps open while no steward runs (sd_notify(3), FDSTORE): the listener, so that
//! clients that connect wait and are not refused, and the sockets because of which NICs accept frames to stations of
//! leases ([`STATIONS`]).
//!
//! It does not report whether it keeps anything (FileDescriptorStoreMax). Without a service manager nothing is kept.
#![allow(unsafe_code)]

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

use rustix::net::{SocketType, sockopt};
use sd_notify::NotifyState;

/// First part of the names of sockets that keep stations accepted.
pub const STATIONS: &str = "stations-";

/// Descriptors that an earlier steward, or the socket unit, left in the store.
#[derive(Debug, Default)]
pub struct Passed {
    /// A socket that listens.
    pub listener: Option<OwnedFd>,
    /// Sockets that keep stations accepted.
    pub stations: Vec<Stored>,
}

/// A socket in the service manager's store.
#[derive(Debug)]
pub struct Stored {
    /// The name that it has there.
    pub name: String,
    /// The socket.
    pub fd: OwnedFd,
}

impl Passed {
    /// Takes the descriptors that were passed (sd_listen_fds_with_names(3)), and closes those of other kinds. To be
    /// called once.
    #[must_use]
    pub fn take() -> Self {
        let mut passed = Self::default();
        for (number, name) in sd_notify::listen_fds_with_names().into_iter().flatten() {
            // SAFETY: by that protocol the descriptor is this process's, open since before its start, and no other
            // code has it.
            let fd = unsafe { OwnedFd::from_raw_fd(number) };
            let listens = sockopt::socket_acceptconn(&fd).unwrap_or(false);
            if listens && sockopt::socket_type(&fd) == Ok(SocketType::SEQPACKET) {
                passed.listener.get_or_insert(fd);
            } else if name.starts_with(STATIONS) {
                passed.stations.push(Stored { name, fd });
            }
        }
        passed
    }

    /// Removes these sockets from the store: their successors are in it under names of their own.
    pub fn forget_stations(&mut self) {
        for stored in self.stations.drain(..) {
            forget(&stored.name);
        }
    }
}

/// Has the service manager keep a descriptor under a name; false: there is no service manager.
pub fn keep(fd: BorrowedFd<'_>, name: &str) -> bool {
    let state = [NotifyState::FdStore, NotifyState::FdName(name)];
    std::env::var_os("NOTIFY_SOCKET").is_some() && sd_notify::notify_with_fds(&state, &[fd]).is_ok()
}

/// Has the service manager close the descriptors that it keeps under a name.
pub fn forget(name: &str) {
    // Without a service manager there is nothing to forget.
    let _ = sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)]);
}
