//! The configuration of a receiver, and the mode that it got.

use std::fmt;
use std::sync::Arc;

use xsk::{QueueId, UmemMemory};

/// Which mode of receiving to request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Request {
    /// zcrx if it is available, else copy; [`Receiver::fallbacks`](crate::Receiver::fallbacks) says why.
    #[default]
    Auto,
    /// zcrx, or fail.
    ForceZcrx,
    /// Ordinary receives, even where zcrx would work.
    ForceCopy,
}

/// Where payload comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// A receive queue of an interface. Steering connections to it (an n-tuple rule, and an RSS context without it) is
    /// the caller's task; payload that arrives at another queue is copied by the kernel, into the same buffers.
    Queue {
        /// The interface's index.
        ifindex: u32,
        /// The interface's queue.
        queue: QueueId,
    },
    /// No device (`ZCRX_REG_NODEV`, Linux 7.1): the kernel copies all payload, from any interface, loopback
    /// included. For tests, and for programs that want a single code path.
    #[default]
    NoDevice,
}

/// The memory that payload is received into.
#[derive(Clone)]
pub enum Memory {
    /// Memory of this crate: huge pages if there are any.
    Own {
        /// How long it is, rounded up to whole pages.
        bytes: usize,
    },
    /// The caller's memory. Only its private part is used ([`UmemMemory::private_from`]), by one receiver and its
    /// pieces at a time. With ordinary receives, receivers that [join](crate::Receiver::join) allocate as much.
    Given(Arc<dyn UmemMemory>),
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own { bytes } => write!(f, "Own({bytes} bytes)"),
            Self::Given(memory) => write!(f, "Given({} bytes)", memory.len()),
        }
    }
}

/// The mode of receiving in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// zcrx on a device's queue: the NIC writes payload where it is read.
    Zcrx,
    /// zcrx without a device: the kernel copies into the area.
    ZcrxNoDevice,
    /// Ordinary multishot receives into provided buffers.
    Copy,
    /// Ordinary receives that fill one block each.
    Blocks,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Zcrx => "zcrx",
            Self::ZcrxNoDevice => "zcrx without a device",
            Self::Copy => "copy",
            Self::Blocks => "copy (blocks)",
        })
    }
}

/// A better mode that was tried first and refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{tried} not used: {reason}")]
pub struct Fallback {
    /// What was tried.
    pub tried: &'static str,
    /// The kernel's answer, an errno; 0 if the kernel was not asked.
    pub errno: i32,
    /// What the errno means.
    pub reason: String,
}

/// The configuration of a receiver. Make one with [`Config::new`] and change what differs.
#[derive(Clone, Debug)]
pub struct Config {
    /// Which mode of receiving to request.
    pub request: Request,
    /// Where payload comes from.
    pub source: Source,
    /// The memory that payload is received into.
    pub memory: Memory,
    /// Whether own memory must be in huge pages, reserved or transparent; if not, they are used if available.
    pub huge_pages: bool,
    /// The buffers that zcrx hands out (`rx_buf_len`), bytes: a page, or, where driver and kernel can (Linux 7.0), a
    /// larger power of two, for which the memory must be of huge pages.
    pub buffer_bytes: u32,
    /// The buffers of ordinary receives, bytes. Each piece takes one, however short it is.
    pub copy_buffer_bytes: u32,
    /// Receive into blocks of so many bytes, a multiple of 4096: each piece is a whole block, except the last one of a
    /// connection and the one before a pause. It begins at a multiple of 4096, so that it can be written with O_DIRECT
    /// without a copy. Only ordinary receives do that: a NIC puts payload where its headers end. A piece is returned
    /// when its block is full, or the peer has finished sending.
    pub block_bytes: Option<u32>,
    /// Entries of the submission queue.
    pub requests: u32,
    /// Entries of the completion queue. When it is full, multishot receives end, and are armed again.
    pub completions: u32,
}

impl Config {
    /// The best mode that is available, and 16 MiB of own memory.
    pub fn new(source: Source) -> Self {
        Self {
            request: Request::default(),
            source,
            memory: Memory::Own { bytes: 16 << 20 },
            huge_pages: false,
            buffer_bytes: rustix::param::page_size() as u32,
            copy_buffer_bytes: 64 << 10,
            block_bytes: None,
            requests: 256,
            completions: 4096,
        }
    }
}
