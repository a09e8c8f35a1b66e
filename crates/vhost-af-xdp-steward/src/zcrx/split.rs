//! Header split: the NIC writes payload to the place where its reader wants it.

use std::io;

use host::nic::rings::{ENABLED, Split};
use netlink_bindings::ethtool;
use netlink_socket2::NetlinkSocket;

/// `ETHTOOL_MSG_RINGS_SET`, include/uapi/linux/ethtool_netlink_generated.h; see [`host::nic::rings`].
const RINGS_SET: u8 = 16;

/// Has the NIC of an interface split all frames. The NIC may restart its rings.
/// Errors: the driver's.
pub(super) fn turn_on(ifindex: u32, now: Split) -> io::Result<()> {
    let mut socket = NetlinkSocket::new();
    let mut request = ethtool::Request::new().op_rings_set_do();
    request.header_mut().cmd = RINGS_SET;
    let rings = request.encode();
    let rings = rings.nested_header().push_dev_index(ifindex).end_nested();
    let rings = rings.push_tcp_data_split(ENABLED);
    // Not every driver has a threshold.
    match now {
        Split::Above(1..) | Split::Off(1..) => drop(rings.push_hds_thresh(0)),
        _ => drop(rings),
    }
    let mut replies = socket.request(&request)?;
    replies.recv_ack().map_err(io::Error::from)
}
