//! Eventfds of a VMM: which are taken.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

/// A descriptor that is not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EventfdError {
    /// A kick, call or error descriptor that could block us.
    #[error("vring {index}: the {role} descriptor is not an eventfd")]
    NotEventfd { index: u32, role: &'static str },
    #[error("vring {index}: cannot examine the {role} descriptor")]
    Examine {
        index: u32,
        role: &'static str,
        #[source]
        source: io::Error,
    },
}

/// Takes over a kick, call or error descriptor. Only eventfds are accepted, and made non-blocking:
/// a worker writes to call descriptors, and must not hang on one that its owner filled up.
pub(crate) fn take(
    index: u32,
    role: &'static str,
    file: Option<File>,
) -> Result<Option<OwnedFd>, EventfdError> {
    let Some(file) = file else { return Ok(None) };
    let fd = OwnedFd::from(file);
    let examine = |source| EventfdError::Examine { index, role, source };
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).map_err(examine)?;
    if link.as_os_str() != "anon_inode:[eventfd]" {
        return Err(EventfdError::NotEventfd { index, role });
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
        let error = take(1, "call", Some(OwnedFd::from(reader).into())).expect_err("not an eventfd");
        assert!(
            error.to_string().contains("call descriptor is not an eventfd"),
            "{error}"
        );
    }

    #[test]
    fn blocking_eventfd_is_made_non_blocking() {
        let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).expect("eventfd");
        let taken = take(0, "kick", Some(fd.into()))
            .expect("accepted")
            .expect("present");
        assert!(fcntl_getfl(&taken).expect("flags").contains(OFlags::NONBLOCK));
    }
}
