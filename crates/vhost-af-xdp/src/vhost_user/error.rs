//! Messages that say what cannot be.

use vhost::vhost_user::message::{FrontendReq, MAX_ATTACHED_FD_ENTRIES};

use super::eventfd::EventfdError;
use super::files::NotMemory;
use crate::port::session::SessionError;

/// What is wrong with a message.
#[derive(Debug, thiserror::Error)]
pub(super) enum MessageError {
    #[error(transparent)]
    Eventfd(#[from] EventfdError),
    #[error(transparent)]
    File(#[from] NotMemory),
    #[error("{request:?}: {bytes} bytes{of}, at least {needed} needed")]
    Short {
        request: FrontendReq,
        bytes: usize,
        of: String,
        needed: usize,
    },
    #[error("SET_MEM_TABLE: {0} regions, 1 to {MAX_ATTACHED_FD_ENTRIES} are possible")]
    Regions(usize),
    #[error(
        "SET_MEM_TABLE: {descriptors} descriptors for {count} regions: if no more can be open here, raise the limit of \
         open files (`ulimit -n`, systemd: LimitNOFILE=)"
    )]
    Files { descriptors: usize, count: usize },
    #[error("SET_MEM_TABLE: region {0} (from 0) is empty, or its end does not fit into 64 bits")]
    Region(usize),
    #[error("SET_VRING_ENABLE with state {0}: 0 and 1 are defined")]
    EnableState(u32),
    #[error("{0} is not supported")]
    Unsupported(&'static str),
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

/// What is wrong where a vring's eventfd did not come although it was `said` to, or came although it was said not to.
fn descriptor(said: bool) -> &'static str {
    match said {
        true => {
            "its eventfd did not come with the message: if no more can be open here, raise the limit of open files \
             (`ulimit -n`, systemd: LimitNOFILE=)"
        }
        false => "a descriptor came with a message that says that there is none",
    }
}
