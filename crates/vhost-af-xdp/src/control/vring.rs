//! A vring as the VMM describes it, message by message, before and between lanes.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use virtqueue::{MemoryMap, QueueSize, QueueSizeError, RingAddresses, RingError, RingFormat, RingLayout};

/// What is wrong with a vring.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VringError {
    /// SET_VRING_NUM with a size that no such ring has.
    #[error("vring {index}: {source}")]
    Size { index: u32, source: QueueSizeError },
    /// SET_VRING_BASE beyond 16 bits.
    #[error("vring {index}: base {base} does not fit into the 16-bit index of a split ring")]
    Base { index: u32, base: u32 },
    /// Kicked before SET_VRING_NUM or SET_VRING_ADDR.
    #[error("vring {index} was started before its size and addresses were set")]
    Incomplete { index: u32 },
    /// The rings are misaligned or not in guest memory.
    #[error("vring {index}: {source}")]
    Layout { index: u32, source: RingError },
    /// No such vring.
    #[error("vring {index} does not exist: this port has {count} (2 per queue pair)")]
    Unknown { index: u32, count: u32 },
    /// A kick, call or error descriptor that could block us.
    #[error("vring {index}: the {role} descriptor is not an eventfd")]
    NotEventfd { index: u32, role: &'static str },
    /// The descriptor could not be examined.
    #[error("vring {index}: cannot examine the {role} descriptor")]
    Examine {
        index: u32,
        role: &'static str,
        #[source]
        source: io::Error,
    },
}

/// State of one vring; all that a lane is made of.
#[derive(Default)]
pub(crate) struct VringState {
    pub(crate) size: Option<QueueSize>,
    /// In the VMM's address space (SET_VRING_ADDR).
    pub(crate) addresses: Option<RingAddresses>,
    /// The next chain to take, as the VMM says it or as the last lane left it.
    pub(crate) base: u32,
    pub(crate) kick: Option<OwnedFd>,
    pub(crate) call: Option<OwnedFd>,
    pub(crate) err: Option<OwnedFd>,
    /// SET_VRING_KICK came, GET_VRING_BASE did not yet.
    pub(crate) started: bool,
    pub(crate) enabled: bool,
}

impl VringState {
    /// Where the rings lie in the map.
    ///
    /// # Errors
    /// [`VringError`].
    pub(crate) fn layout(&self, index: u32, map: &MemoryMap, packed: bool) -> Result<RingLayout, VringError> {
        let (Some(size), Some(addresses)) = (self.size, self.addresses) else {
            return Err(VringError::Incomplete { index });
        };
        RingLayout::from_user(map, (RingFormat::of(packed), size), addresses)
            .map_err(|source| VringError::Layout { index, source })
    }
}

/// Takes over a kick, call or error descriptor. Only eventfds are accepted, and made non-blocking:
/// a worker writes to call descriptors, and must not hang on one that its owner filled up.
///
/// # Errors
/// [`VringError::NotEventfd`].
pub(crate) fn eventfd(
    index: u32,
    role: &'static str,
    file: Option<File>,
) -> Result<Option<OwnedFd>, VringError> {
    let Some(file) = file else { return Ok(None) };
    let fd = OwnedFd::from(file);
    let examine = |source| VringError::Examine { index, role, source };
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).map_err(examine)?;
    if link.as_os_str() != "anon_inode:[eventfd]" {
        return Err(VringError::NotEventfd { index, role });
    }
    let flags = fcntl_getfl(fd.as_fd()).map_err(|errno| examine(errno.into()))?;
    fcntl_setfl(fd.as_fd(), flags | OFlags::NONBLOCK).map_err(|errno| examine(errno.into()))?;
    Ok(Some(fd))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pipe_is_refused_as_call_descriptor() {
        let (reader, _writer) = std::io::pipe().expect("pipe");
        let error = eventfd(1, "call", Some(OwnedFd::from(reader).into())).expect_err("not an eventfd");
        assert!(
            error.to_string().contains("call descriptor is not an eventfd"),
            "{error}"
        );
    }

    #[test]
    fn blocking_eventfd_is_made_non_blocking() {
        let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).expect("eventfd");
        let taken = eventfd(0, "kick", Some(fd.into()))
            .expect("accepted")
            .expect("present");
        assert!(fcntl_getfl(&taken).expect("flags").contains(OFlags::NONBLOCK));
    }
}
