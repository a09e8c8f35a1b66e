//! The tap by which an interface's frames arrive.

use std::io;
use std::os::fd::OwnedFd;

use dataplane::nic::tap::Tap;
use steward_protocol::HostEnd;

/// The tap of an interface in tap mode, by which its frames arrive, for as long as the interface is open.
#[derive(Debug)]
pub(crate) struct OpenTap {
    pub(crate) queues: Vec<Tap>,
    /// Its name.
    pub(crate) name: String,
    /// Its interface index, which distinguishes it from the next device of that name.
    pub(crate) index: u32,
    /// The kernel can segment UDP, too.
    pub(crate) segments_udp: bool,
    /// The interface's [`changes`](super::steering::Steering::changes) at the last request.
    pub(crate) changes: u32,
}

impl OpenTap {
    /// A tap that the steward made; `changes`: see the field.
    pub(crate) fn new(end: HostEnd, queues: Vec<OwnedFd>, changes: u32) -> Self {
        Self {
            queues: queues.into_iter().map(Tap::new).collect(),
            name: end.interface,
            index: end.index,
            segments_udp: end.cuts_udp,
            changes,
        }
    }

    /// Duplicates the descriptors.
    /// Errors: no descriptor is left.
    pub(crate) fn again(&self) -> io::Result<Self> {
        Ok(Self {
            queues: self.queues.iter().map(Tap::again).collect::<Result<_, _>>()?,
            name: self.name.clone(),
            ..*self
        })
    }
}
