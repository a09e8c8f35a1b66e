//! Errors of vhost-user messages.

use super::eventfd::EventfdError;
use super::files::{MAX_FILES, NotMemory};
use crate::port::session::SessionError;

/// Bytes that are not a vhost-user message.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProtocolError {
    #[error("the VMM disconnected within a message")]
    Cut,
    #[error("{0} with flags {1:#x}: of a request they are 0x1 (version 1), or 0x9 to have it answered")]
    Flags(String, u32),
    #[error("{0} with {1} bytes: no message is that long")]
    Long(String, usize),
    #[error("cannot read the connection")]
    Read(#[source] std::io::Error),
}

/// Why a message is rejected.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MessageError {
    #[error(transparent)]
    Eventfd(#[from] EventfdError),
    #[error(transparent)]
    File(#[from] NotMemory),
    #[error("{request}: {bytes} bytes{of}, at least {needed} needed")]
    Short {
        request: &'static str,
        bytes: usize,
        of: String,
        needed: usize,
    },
    #[error("{request}: {bytes} bytes, at most {most} are possible")]
    Long {
        request: &'static str,
        bytes: usize,
        most: usize,
    },
    #[error(
        "{request}: {came} descriptors came with it, {}", possible(*.least, *.most, *.came)
    )]
    Files {
        request: &'static str,
        came: usize,
        least: usize,
        most: usize,
    },
    #[error("SET_MEM_TABLE: {0} regions, 1 to {MAX_FILES} are possible")]
    Regions(usize),
    #[error(
        "SET_MEM_TABLE: {descriptors} descriptors for {count} regions: if no more can be open here, raise the limit of \
         open files (`ulimit -n`, systemd: LimitNOFILE=)"
    )]
    TableFiles { descriptors: usize, count: usize },
    #[error("SET_MEM_TABLE: region {0} (from 0) is empty, or its end does not fit into 64 bits")]
    Region(usize),
    #[error("SET_LOG_BASE: the log is empty, or its end does not fit into 64 bits")]
    Log,
    #[error(
        "SET_VRING_ADDR: vring {index} has flags {flags:#x}, of which 0x1 is defined, or descriptors, available or \
         used ring are not aligned to 16, 2 and 4 bytes"
    )]
    Addresses { index: u32, flags: u32 },
    #[error("SET_VRING_ENABLE with state {0}: 0 and 1 are defined")]
    EnableState(u32),
    #[error(
        "{request}: {len} bytes from {offset} on, flags {flags:#x}, in a message with {bytes}: both numbers must be \
         equal, within the first 4096 bytes, and flags 0 to 3"
    )]
    Config {
        request: &'static str,
        offset: u32,
        len: u32,
        flags: u32,
        bytes: usize,
    },
    #[error("an inflight region for {queues} queues of {size} entries: it would have no entries")]
    NoQueues { queues: u16, size: u16 },
    #[error("{0} is not supported")]
    Unsupported(String),
    #[error("{0} was sent, but the protocol feature that it belongs to was not negotiated")]
    NotNegotiated(&'static str),
    #[error("vring {index}: {}", descriptor(*.said))]
    Descriptor { index: u32, said: bool },
    #[error(
        "IOTLB_MSG: the VMM has an IOMMU in front of this device, and there is no IOTLB here: leave the IOMMU device \
         out, or iommu_platform=on (QEMU) of this device, or leave access-platform out of what is offered (offer)"
    )]
    Iotlb,
    #[error("cannot wait for kicks of the control queue")]
    Watch(#[source] std::io::Error),
    #[error("SET_BACKEND_REQ_FD came without a Unix stream socket, or with one that holds bytes")]
    NoChannel,
}

impl From<MessageError> for SessionError {
    fn from(error: MessageError) -> Self {
        Self::Message(Box::new(error))
    }
}

/// How many descriptors a message may carry, and the remedy if there were too few.
fn possible(least: usize, most: usize, came: usize) -> String {
    let number = match (least, most) {
        (least, most) if least == most => format!("{most} belong there"),
        (least, most) => format!("{least} or {most} belong there"),
    };
    let remedy = match came < least {
        true => {
            ": if no more can be open here, raise the limit of open files (`ulimit -n`, systemd: LimitNOFILE=)"
        }
        false => "",
    };
    number + remedy
}

/// A vring's eventfd is missing although the message announced it (`said`), or is there although it did not.
fn descriptor(said: bool) -> &'static str {
    match said {
        true => {
            "its eventfd did not come with the message: if no more can be open here, raise the limit of open files \
             (`ulimit -n`, systemd: LimitNOFILE=)"
        }
        false => "a descriptor came with a message that says that there is none",
    }
}
