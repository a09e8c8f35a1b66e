//! What the kernel says of an interface that frames go through.

use netlink_bindings::rt_link::{self, Ifinfomsg};
use netlink_socket2::NetlinkSocket;

/// Frames that the interface has sent, whoever gave them to it; `None` if the kernel does not answer.
pub(super) fn sent(ifindex: u32) -> Option<u64> {
    let header = Ifinfomsg {
        ifi_index: i32::try_from(ifindex).ok()?,
        ..Ifinfomsg::default()
    };
    let mut socket = NetlinkSocket::new();
    let request = rt_link::Request::new().op_getlink_do(&header);
    let mut replies = socket.request(&request).ok()?;
    let (_, attributes) = replies.recv_one().ok()?;
    Some(attributes.get_stats64().ok()?.tx_packets)
}
