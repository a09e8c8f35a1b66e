//! Removing tap devices, whose descriptors holders have.
//!
//! The kernel waits until nobody writes to the device any more, and no signal ends that (`netdev_run_todo`,
//! net/core/dev.c). A hostile holder's write may wait for ever for memory that never answers. So a child removes the
//! device, for which neither the steward's rounds wait nor its end. Before the kernel waits, it takes the device from
//! the list of interfaces: another one can have its name.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::netdevice::name_to_index;
use rustix::net::{SendFlags, send};

use crate::capabilities::TO_TAKE_RINGS;
use crate::links::netlink_socket;
use crate::links::tap::{Tap, removal_of};
use crate::sys::child::{self, Child};

/// How long is waited for a removal, where it is.
const LIMIT: Duration = Duration::from_secs(1);

/// Those that have begun.
#[derive(Debug, Default)]
pub(super) struct Removals(Vec<Child>);

impl Removals {
    /// Sets a device down, so that nothing passes any more, and begins to remove it.
    pub(super) fn begin(&mut self, tap: &Tap) {
        if let Err(error) = self.remove(tap) {
            tracing::error!("cannot remove {}: {error}", tap.name);
        }
    }

    /// The same, and waits until another device can have its name.
    /// Errors: in words.
    pub(super) fn make_room(&mut self, tap: &Tap) -> Result<(), String> {
        let name = &tap.name;
        let failed = |error| format!("cannot remove {name}: {error}");
        let removed = self.remove(tap).map_err(failed)?;
        let is_free = || Ok(index_of(tap)? != removed);
        match removed.is_none() || wait_until(is_free).map_err(failed)? {
            true => Ok(()),
            false => Err(format!(
                "{name} is still there {} s after its removal began, which other changes of interfaces hold up, or \
                 who has the device (`grep -l {name} /proc/[0-9]*/fdinfo/*`): try again later",
                LIMIT.as_secs()
            )),
        }
    }

    /// The device's index; none: it is not there.
    fn remove(&mut self, tap: &Tap) -> io::Result<Option<u32>> {
        let Some(index) = index_of(tap)? else {
            return Ok(None);
        };
        if let Err(error) = tap.set_up(false) {
            tracing::debug!("cannot set {} down: {error}", tap.name);
        }
        // By its index: until the child is there, another device may have the name.
        let (socket, message) = (netlink_socket(None)?, removal_of(index));
        self.0.push(child::begin(&[socket.as_fd()], TO_TAKE_RINGS, || {
            let _ = send(&socket, &message, SendFlags::empty());
        })?);
        Ok(Some(index))
    }

    /// Children that are at work, as far as is known.
    pub(super) fn children(&self) -> impl Iterator<Item = &Child> {
        self.0.iter()
    }

    /// Forgets those that are done; whether all are.
    pub(super) fn forget_done(&mut self) -> bool {
        self.0.retain(|child| !child.has_ended());
        self.0.is_empty()
    }

    /// Waits until all are done, but not for long: children end with this process, unless the kernel is at it already.
    pub(super) fn wait(&mut self) {
        let _ = wait_until(|| Ok(self.forget_done()));
    }
}

fn index_of(tap: &Tap) -> io::Result<Option<u32>> {
    match name_to_index(netlink_socket(None)?, &tap.name) {
        Ok(index) => Ok(Some(index)),
        Err(Errno::NODEV) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether it becomes so in time.
fn wait_until(mut is_so: impl FnMut() -> io::Result<bool>) -> io::Result<bool> {
    let begun = Instant::now();
    while !is_so()? {
        if begun.elapsed() > LIMIT {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(true)
}
