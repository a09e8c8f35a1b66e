//! Removing tap devices, whose descriptors lessees have.
//!
//! A removal waits in the kernel until every write to the device has returned, and no signal interrupts that wait
//! (`netdev_run_todo`, net/core/dev.c). A hostile lessee's write can wait forever, for a page that never comes
//! (FUSE). So a child process removes the device. Neither a round of the steward nor its end waits for it longer than
//! [`LIMIT`]. The kernel takes the device off the list of interfaces before it waits, so another device can have its
//! name.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::netdevice::name_to_index;
use rustix::net::{SendFlags, send};

use crate::capabilities::ChildWork;
use crate::server::taps::tap::{Tap, removal_of};
use crate::sys::child::{self, Child};
use host::links::netlink_socket;

/// How long [`Removals::make_room`] and [`Removals::wait`] wait.
const LIMIT: Duration = Duration::from_secs(1);

/// Removals that have begun and are not known to have finished.
#[derive(Debug, Default)]
pub(crate) struct Removals(Vec<Child>);

impl Removals {
    /// Sets a device down, so that no frame passes any more, and begins to remove it. Does not wait.
    pub(crate) fn begin(&mut self, tap: &Tap) {
        if let Err(error) = self.start(tap) {
            tracing::error!("cannot remove {}: {error}", tap.name);
        }
    }

    /// The same, and waits until another device can have its name.
    /// Errors: in words.
    pub(crate) fn make_room(&mut self, tap: &Tap) -> Result<(), String> {
        let name = &tap.name;
        let failed = |error| format!("cannot remove {name}: {error}");
        let removed = self.start(tap).map_err(failed)?;
        let is_free = || Ok(index_of(tap)? != removed);
        match removed.is_none() || wait_until(is_free).map_err(failed)? {
            true => Ok(()),
            false => Err(format!(
                "{name} is still there {} s after its removal began: other changes of interfaces hold it up, or a \
                 process that has the device open (`grep -l {name} /proc/[0-9]*/fdinfo/*` lists those): try again later",
                LIMIT.as_secs()
            )),
        }
    }

    /// Returns the device's index; none: it is not there.
    fn start(&mut self, tap: &Tap) -> io::Result<Option<u32>> {
        let Some(index) = index_of(tap)? else {
            return Ok(None);
        };
        if let Err(error) = tap.set_up(false) {
            tracing::debug!("cannot set {} down: {error}", tap.name);
        }
        // By index: when the child runs, another device may have the name.
        let (socket, message) = (netlink_socket(None)?, removal_of(index));
        self.0
            .push(child::begin(&[socket.as_fd()], ChildWork::Interface, || {
                let _ = send(&socket, &message, SendFlags::empty());
            })?);
        Ok(Some(index))
    }

    /// Children that have not been seen to end.
    pub(crate) fn children(&self) -> impl Iterator<Item = &Child> {
        self.0.iter()
    }

    /// Forgets finished removals. Returns whether all are finished.
    pub(crate) fn forget_finished(&mut self) -> bool {
        self.0.retain(|child| !child.has_ended());
        self.0.is_empty()
    }

    /// Waits until all are finished, a second at most: a child that has not asked the kernel yet would end with this
    /// process.
    pub(crate) fn wait(&mut self) {
        let _ = wait_until(|| Ok(self.forget_finished()));
    }
}

fn index_of(tap: &Tap) -> io::Result<Option<u32>> {
    match name_to_index(netlink_socket(None)?, &tap.name) {
        Ok(index) => Ok(Some(index)),
        Err(Errno::NODEV) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether the condition holds within [`LIMIT`].
fn wait_until(mut condition: impl FnMut() -> io::Result<bool>) -> io::Result<bool> {
    let begun = Instant::now();
    while !condition()? {
        if begun.elapsed() > LIMIT {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(true)
}
