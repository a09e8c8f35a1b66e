//! Why a receiver did not open. Each message names the value and the remedy.

use std::io;

use rustix::io::Errno;
use xsk::MemoryError;

use crate::config::{Fallback, Source};

/// Why a receiver did not open, or an instance was not registered, exported or imported.
#[derive(Debug, thiserror::Error)]
#[allow(
    missing_docs,
    reason = "`source` is the kernel's answer, the others are as asked for"
)]
pub enum OpenError {
    /// No io_uring.
    #[error(
        "no io_uring with {requests} requests and {completions} completions: {source}; {}",
        ring_text(source)
    )]
    Ring {
        requests: u32,
        completions: u32,
        source: io::Error,
    },
    /// No memory.
    #[error("no memory to receive into: {0}")]
    Memory(#[from] MemoryError),
    /// Huge pages were asked for.
    #[error(
        "{bytes} bytes of huge pages were asked for, and there are none: reserve some (/proc/sys/vm/nr_hugepages), \
         or do without `huge_pages`"
    )]
    NoHugePages { bytes: usize },
    /// The memory has no room for a buffer.
    #[error(
        "{len_bytes} bytes of memory, from byte {private_from} on private, have no room for a buffer of {buffer_bytes} \
         bytes: pass more"
    )]
    NoBuffer {
        len_bytes: usize,
        private_from: usize,
        buffer_bytes: u32,
    },
    /// Another receiver uses the memory or the instance.
    #[error(
        "the {what} is in use by another receiver of this process, or by pieces of one: drop those first, or pass \
         another"
    )]
    InUse { what: &'static str },
    /// An invalid size.
    #[error("{what} of {bytes} bytes: it must be {must}")]
    Size {
        what: &'static str,
        bytes: u32,
        must: &'static str,
    },
    /// zcrx was forced and is refused.
    #[error("{0}; do not force it, and copy is used")]
    Zcrx(Fallback),
    /// The ring of provided buffers was refused.
    #[error("the kernel refuses a ring of {buffers} provided buffers: {source}; it needs Linux 5.19")]
    Provided { buffers: u32, source: io::Error },
    /// A system call of the set-up failed.
    #[error("{what}: {source}")]
    Setup { what: &'static str, source: io::Error },
    /// The instance cannot be exported.
    #[error("the zcrx instance cannot be exported: {source}; Linux 7.0 and later can (ZCRX_CTRL_EXPORT)")]
    Export { source: io::Error },
    /// The instance cannot be imported.
    #[error("the zcrx instance cannot be imported: {}", import_text(source))]
    Import { source: io::Error },
    /// What was imported is of another ring, or of another instance.
    #[error(
        "what was imported is of another {of} than this: pass what `Instance::import_into` said of this instance and \
         of this ring"
    )]
    ImportedElsewhere { of: &'static str },
    /// The kernel's answer makes no sense.
    #[error("the kernel's refill ring of {entries} entries does not lie in its {len_bytes} bytes as it says")]
    Layout { entries: u32, len_bytes: usize },
}

fn ring_text(source: &io::Error) -> &'static str {
    match Errno::from_io_error(source) {
        Some(Errno::NOMEM) => {
            "its memory cannot be locked: raise RLIMIT_MEMLOCK (`ulimit -l`, `LimitMEMLOCK=` of its unit), or ask for \
             fewer"
        }
        _ => {
            "it needs Linux 6.1, /proc/sys/kernel/io_uring_disabled at 0 (or 1 with CAP_SYS_ADMIN), and a seccomp \
             filter that lets it pass"
        }
    }
}

fn import_text(source: &io::Error) -> String {
    let what = match Errno::from_io_error(source) {
        Some(Errno::PERM) => {
            "importing takes CAP_NET_ADMIN in the first user namespace, as registering does; have who has it import \
             for you (Prepared)"
        }
        Some(Errno::BADF) => "the descriptor is none of a zcrx instance",
        Some(Errno::INVAL) => "the kernel does not know ZCRX_REG_IMPORT (Linux 7.0 and later do)",
        _ => "the kernel refuses it",
    };
    format!("{what}: {source}")
}

/// What the kernel's answer to a registration means.
pub(crate) fn refused(source: Source, error: &io::Error) -> Fallback {
    let errno = error.raw_os_error().unwrap_or(0);
    let (tried, what) = match source {
        Source::Queue { .. } => ("zcrx", queue_text(errno)),
        Source::NoDevice => ("zcrx without a device", no_device_text(errno)),
    };
    let place = match source {
        Source::Queue { ifindex, queue } => format!(" (interface {ifindex}, queue {queue})"),
        Source::NoDevice => String::new(),
    };
    let reason = format!("{what}{place}: {error}");
    Fallback { tried, errno, reason }
}

fn common_text(errno: i32) -> &'static str {
    match errno {
        libc::EPERM => {
            "it takes CAP_NET_ADMIN in the first user namespace; who has it may register and import for you (Prepared)"
        }
        libc::ENOMEM => "memory cannot be locked: raise RLIMIT_MEMLOCK, or grant CAP_IPC_LOCK",
        libc::EFAULT => "the memory cannot be pinned; use anonymous memory, a memfd or hugetlbfs",
        _ => "the kernel refuses it",
    }
}

/// `zcrx_register_netdev`, `io_uring/zcrx.c`, and `netif_mp_open_rxq`, `net/core/netdev_rx_queue.c`.
fn queue_text(errno: i32) -> &'static str {
    match errno {
        libc::EOPNOTSUPP => {
            "the driver's queues take no memory of others, or the kernel is built without it (CONFIG_IO_URING_ZCRX)"
        }
        libc::ENODEV => "there is no such interface in this network namespace",
        libc::ERANGE => {
            "the interface has no such queue, or the memory is not contiguous enough for the buffer size"
        }
        libc::EEXIST => {
            "an XDP program is attached to the interface, or the queue has memory of others already"
        }
        libc::EBUSY => "an AF_XDP socket in zero-copy mode holds the queue",
        libc::EINVAL => {
            "header/data split is not on (`ethtool -G … tcp-data-split on`, hds-thresh 0), or the kernel has no zcrx \
             (Linux 6.15 and later do)"
        }
        errno => common_text(errno),
    }
}

fn no_device_text(errno: i32) -> &'static str {
    match errno {
        libc::EINVAL => "the kernel does not know ZCRX_REG_NODEV (Linux 7.1 and later do)",
        libc::EOPNOTSUPP => {
            "without a device buffers are pages, or the kernel is built without zcrx (CONFIG_IO_URING_ZCRX)"
        }
        errno => common_text(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xsk::QueueId;

    #[test]
    fn a_refusal_says_errno_place_and_meaning() {
        let source = Source::Queue {
            ifindex: 7,
            queue: QueueId(3),
        };
        let fallback = refused(source, &io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        assert_eq!((fallback.tried, fallback.errno), ("zcrx", libc::EOPNOTSUPP));
        let text = fallback.to_string();
        assert!(
            text.contains("interface 7, queue 3") && text.contains("driver's queues"),
            "{text}"
        );
        let fallback = refused(Source::NoDevice, &io::Error::from_raw_os_error(libc::EINVAL));
        assert!(fallback.to_string().contains("Linux 7.1"), "{fallback}");
    }
}
