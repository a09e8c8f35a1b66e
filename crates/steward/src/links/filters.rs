//! Filters at the egress of interfaces, that outlive who put them there: before Linux 6.6 those that join the host with
//! a network.

use std::io;

use netlink_bindings::tc::{self, Tcmsg};
use netlink_socket2::NetlinkSocket;
use steer::network_of_filter;

use super::tap::for_each;

/// `TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_EGRESS)`, include/uapi/linux/pkt_sched.h.
const EGRESS: u32 = 0xffff_fff3;

/// Those of networks' hosts, in this network namespace: index of the interface, and the network's first queue.
pub(crate) fn of_hosts() -> io::Result<Vec<(u32, u32)>> {
    let mut interfaces = Vec::new();
    for_each(|header, _| interfaces.push(header.ifi_index))?;
    let mut found = Vec::new();
    for ifindex in interfaces {
        let header = Tcmsg {
            ifindex,
            parent: EGRESS,
            ..Tcmsg::default()
        };
        let mut socket = NetlinkSocket::new();
        let mut replies = socket.request(&tc::Request::new().op_gettfilter_dump(&header))?;
        while let Some(reply) = replies.recv() {
            // It is gone, or has no such place.
            let Ok((header, attributes)) = reply else { break };
            let is_bpf = attributes.get_kind().is_ok_and(|kind| kind == c"bpf");
            if let (true, Some(first)) = (is_bpf, network_of_filter(header.handle)) {
                found.extend(u32::try_from(ifindex).ok().map(|index| (index, first)));
            }
        }
    }
    Ok(found)
}
