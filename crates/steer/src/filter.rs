//! Filters of the qdisc clsact: programs at ingress and egress of an interface where the kernel has no tcx (before
//! Linux 6.6). A filter stays until somebody removes it, or the interface.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use libbpf_rs::{TcAttachPoint, TcHook, TcHookBuilder};

use crate::capture::messages_of;
use crate::netlink::as_int;

const PRIORITY: u32 = 1;

/// Where a program goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) ifindex: u32,
    pub(crate) at: TcAttachPoint,
    /// Of a filter.
    pub(crate) handle: u32,
}

/// Attaches a program as a filter of clsact, which is made if it is missing. The filter stays until somebody removes it
/// or the interface.
pub(crate) fn attach_filter(program: BorrowedFd<'_>, place: Place) -> io::Result<()> {
    let mut filter = filter(program, place)?;
    let (attached, _) = messages_of(|| {
        // There already is as good.
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

/// Removes a filter of ours. It is gone with its interface, or is replaced by the next one.
pub(crate) fn remove_filter(place: Place) {
    // By its handle alone: what program it is nobody looks at.
    if let Ok(mut filter) = filter(io::stderr().as_fd(), place) {
        let _ = messages_of(|| filter.detach());
    }
}
