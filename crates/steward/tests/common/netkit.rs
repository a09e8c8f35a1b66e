//! A netkit without a peer, to which queues of NICs can be leased (Linux 7.1). `ip` of today does not make one.

use std::ffi::CString;

use netlink_bindings::rt_link::{self, Ifinfomsg, NetkitMode, NetkitPairing};
use netlink_bindings::traits::Pusher;
use netlink_bindings::utils::{finalize_nested_header, push_header, push_nested_header};
use netlink_socket2::NetlinkSocket;
use steward::links::Link;

/// Of include/uapi/linux/if_link.h.
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const IFLA_NETKIT_MODE: u16 = 5;
const IFLA_NETKIT_PAIRING: u16 = 10;
const KIND: &[u8; 8] = b"netkit\0\0";

/// Makes one in the network namespace of this thread; the kernel's refusal if it has none of the kind.
pub(crate) fn make(name: &str) -> Result<(), String> {
    let c_name = CString::new(name).expect("a name");
    let mut request = rt_link::Request::new()
        .set_create()
        .set_excl()
        .op_newlink_do(&Ifinfomsg::default());
    let mut attributes = request.encode().push_ifname(&c_name).push_num_rx_queues(2);
    let bytes = attributes.as_vec_mut();
    let info = push_nested_header(bytes, IFLA_LINKINFO);
    push_header(bytes, IFLA_INFO_KIND, 7);
    bytes.extend(KIND);
    let data = push_nested_header(bytes, IFLA_INFO_DATA);
    for (attribute, value) in [
        (IFLA_NETKIT_MODE, NetkitMode::L2 as u32),
        (IFLA_NETKIT_PAIRING, NetkitPairing::Single as u32),
    ] {
        push_header(bytes, attribute, 4);
        bytes.extend(value.to_ne_bytes());
    }
    finalize_nested_header(bytes, data);
    finalize_nested_header(bytes, info);
    drop(attributes);
    let mut socket = NetlinkSocket::new();
    let answer = socket
        .request(&request)
        .map_err(|error| error.to_string())?
        .recv_ack();
    answer.map_err(|error| error.to_string())?;
    // A kernel that does not know the pairing makes one with a peer.
    match Link::by_name(name) {
        Ok(link) if link.has_leased_only => Ok(()),
        _ => Err("it has a peer".to_owned()),
    }
}
