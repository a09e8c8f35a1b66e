//! What this machine's ip(8) has no words for: by netlink.

use std::io;

use netlink_bindings::rt_link::{self, Ifinfomsg, NetkitMode};
use netlink_bindings::team;
use netlink_socket2::NetlinkSocket;
use testkit::NetNs;

/// `NLA_STRING` (include/uapi/linux/netlink.h).
const STRING: u8 = 5;

/// Sets the mode of a team that has no port yet, as teamd does.
pub(crate) fn set_team_mode(netns: &NetNs, name: &str, mode: &str) {
    let index = netns.index_of(name);
    let mut request = team::Request::new().op_options_set_do();
    let option = request
        .encode()
        .push_team_ifindex(index)
        .nested_list_option()
        .nested_option();
    option
        .push_name(c"mode")
        .push_type(STRING)
        .push_data(&[mode.as_bytes(), &[0]].concat());
    netns.enter(|| {
        let mut socket = NetlinkSocket::new();
        let answer = socket.request(&request).expect("netlink").recv_ack();
        match answer.map_err(io::Error::from) {
            Ok(()) => {}
            // Nobody listens for what it reports of that: it is set (team_nl_send_multicast, drivers/net/team/team.c).
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            Err(error) => panic!("mode {mode} of {name}: {error}"),
        }
    });
}

/// Makes a netkit pair that carries Ethernet frames; the peer gets a name of the kernel's.
pub(crate) fn make_netkit(netns: &NetNs, name: &str) {
    let mut request = rt_link::Request::new()
        .set_create()
        .set_excl()
        .op_newlink_do(&Ifinfomsg::default());
    request
        .encode()
        .push_ifname_bytes(name.as_bytes())
        .nested_linkinfo()
        .nested_data_netkit()
        .push_mode(NetkitMode::L2 as u32);
    netns.enter(|| {
        let mut socket = NetlinkSocket::new();
        let answer = socket.request(&request).expect("netlink").recv_ack();
        answer.unwrap_or_else(|error| panic!("a netkit: {error}"));
    });
}
