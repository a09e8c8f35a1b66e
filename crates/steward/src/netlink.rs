//! Requests of rtnetlink that change interfaces.

use std::io;

use netlink_bindings::builtin::Nlmsghdr;
use netlink_bindings::traits::{self, NetlinkRequest};
use netlink_socket2::NetlinkSocket;

/// Sends a request that is only acknowledged.
///
/// # Errors
/// An error of the kernel.
pub fn acknowledged(request: &impl NetlinkRequest) -> io::Result<()> {
    let mut socket = NetlinkSocket::new();
    socket.request(request)?.recv_ack().map_err(io::Error::from)
}

/// A request of rtnetlink as it is sent, for a process that must not allocate.
pub fn message_of(request: &impl NetlinkRequest) -> Vec<u8> {
    let traits::Protocol::Raw { request_type, .. } = request.protocol() else {
        return Vec::new();
    };
    let payload = request.payload();
    let header = Nlmsghdr {
        len: u32::try_from(Nlmsghdr::len() + payload.len()).unwrap_or_default(),
        r#type: request_type,
        flags: request.flags() | (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16,
        seq: 1,
        pid: 0,
    };
    [header.as_slice(), payload].concat()
}
