//! Filters of the qdisc clsact: programs at ingress and egress of an interface where the kernel has no tcx (before
//! Linux 6.6). A filter stays until it, or the interface, is removed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use libbpf_rs::{TcAttachPoint, TcHook, TcHookBuilder};

use crate::capture::messages_of;
use crate::netlink::as_int;

const PRIORITY: u32 = 1;

/// Where a program is attached.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) ifindex: u32,
    pub(crate) at: TcAttachPoint,
    /// Handle, if it is a filter: a filter replaces one with the same handle.
    pub(crate) handle: u32,
}

/// Attaches a program as a filter of clsact, which is created if it is missing.
pub(crate) fn attach_filter(program: BorrowedFd<'_>, place: Place) -> io::Result<()> {
    let mut filter = filter(program, place)?;
    let (attached, _) = messages_of(|| {
        // No error if it exists already.
        filter.create()?;
        filter.attach()
    });
    attached.map(drop).map_err(io::Error::other)
}

fn filter(program: BorrowedFd<'_>, place: Place) -> io::Result<TcHook> {
    Ok(TcHookBuilder::new(program)
        .ifindex(as_int(place.ifindex)?)
        .replace(true)
        .handle(place.handle)
        .priority(PRIORITY)
        .hook(place.at))
}

/// Whether a filter from [`attach_filter`] still exists.
pub(crate) fn has_filter(place: Place) -> bool {
    // The handle alone identifies it: the descriptor is not used.
    let filter = filter(io::stderr().as_fd(), place);
    filter.is_ok_and(|mut filter| messages_of(|| filter.query()).0.is_ok())
}

/// Removes a filter from [`attach_filter`]. Errors are ignored: either the interface is gone, and the filter
/// with it, or the next filter will replace this one.
pub(crate) fn remove_filter(place: Place) {
    // The handle alone identifies it: the descriptor is not used.
    if let Ok(mut filter) = filter(io::stderr().as_fd(), place) {
        let _ = messages_of(|| filter.detach());
    }
}
