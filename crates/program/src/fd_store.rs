//! Descriptors that the service manager keeps open while no steward runs (sd_notify(3), FDSTORE): the listener, so that
//! clients that connect wait and are not refused, and the sockets because of which NICs accept frames to stations of
//! leases ([`STATIONS`]).
//!
//! Whether it keeps anything (FileDescriptorStoreMax) it does not say; without one nothing is kept.
#![allow(unsafe_code)]

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

use rustix::net::{SocketType, sockopt};
use sd_notify::NotifyState;

/// Names of sockets that keep stations accepted begin so.
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
    /// Takes what was passed (sd_listen_fds_with_names(3)); to be called once. What is of no use is closed.
    #[must_use]
    pub fn take() -> Self {
        let mut passed = Self::default();
        for (number, name) in sd_notify::listen_fds_with_names().into_iter().flatten() {
            // SAFETY: by that protocol the descriptor is ours, open since before we began, and no other code in this
            // process has it.
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

    /// Takes them out of the store: their successors are in it under names of their own.
    pub fn forget_stations(&mut self) {
        for stored in self.stations.drain(..) {
            forget(&stored.name);
        }
    }
}

/// Lets the service manager keep a descriptor under a name; false if there is none that could.
pub fn keep(fd: BorrowedFd<'_>, name: &str) -> bool {
    let state = [NotifyState::FdStore, NotifyState::FdName(name)];
    std::env::var_os("NOTIFY_SOCKET").is_some() && sd_notify::notify_with_fds(&state, &[fd]).is_ok()
}

/// Lets it close what it has under a name.
pub fn forget(name: &str) {
    // Without a service manager there is nothing to forget.
    let _ = sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)]);
}
