//! What the kernel says of an interface that frames go through.

use netlink_bindings::rt_link::{self, Ifinfomsg};
use netlink_socket2::NetlinkSocket;

/// An interface at one moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Traffic {
    /// It has its link.
    pub(super) carrier: bool,
    /// Frames that it has sent, whoever gave them to it.
    pub(super) sent: u64,
}

impl Traffic {
    /// Asks the kernel; `None` if it does not answer.
    pub(super) fn of(ifindex: u32) -> Option<Self> {
        let header = Ifinfomsg {
            ifi_index: i32::try_from(ifindex).ok()?,
            ..Ifinfomsg::default()
        };
        let mut socket = NetlinkSocket::new();
        let request = rt_link::Request::new().op_getlink_do(&header);
        let mut replies = socket.request(&request).ok()?;
        let (_, attributes) = replies.recv_one().ok()?;
        Some(Self {
            carrier: attributes.get_carrier().ok()? != 0,
            sent: attributes.get_stats64().ok()?.tx_packets,
        })
    }
}
