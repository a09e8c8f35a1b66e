//! Filters at interfaces, which outlive the process that attached them: before Linux 6.6 those that join a network with
//! the host, or with the wire.

use std::io;

use netlink_bindings::tc::{self, Tcmsg};
use netlink_socket2::NetlinkSocket;
use steer::{TapTo, network_of_filter};

use super::all::for_each;

/// `TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_EGRESS)` and the same of ingress, include/uapi/linux/pkt_sched.h.
const PLACES: [(TapTo, u32); 2] = [(TapTo::Host, 0xffff_fff3), (TapTo::Uplink, 0xffff_fff2)];

/// A filter of a network's.
#[derive(Debug, Clone, Copy)]
pub struct Filter {
    /// Index of the interface.
    pub uplink: u32,
    /// Where the network's tap leads.
    pub to: TapTo,
    /// The network's first queue.
    pub first: u32,
}

/// Those of networks, in this network namespace.
///
/// # Errors
/// An error of the kernel.
pub fn of_networks() -> io::Result<Vec<Filter>> {
    let mut interfaces = Vec::new();
    for_each(|index, _| interfaces.push(index))?;
    let mut found = Vec::new();
    for uplink in interfaces {
        for (to, parent) in PLACES {
            let header = Tcmsg {
                ifindex: uplink.cast_signed(),
                parent,
                ..Tcmsg::default()
            };
            let mut socket = NetlinkSocket::new();
            let mut replies = socket.request(&tc::Request::new().op_gettfilter_dump(&header))?;
            while let Some(reply) = replies.recv() {
                // It is gone, or has no such place.
                let Ok((header, attributes)) = reply else { break };
                let is_bpf = attributes.get_kind().is_ok_and(|kind| kind == c"bpf");
                let network = network_of_filter(header.handle).filter(|&(its, _)| is_bpf && its == to);
                found.extend(network.map(|(to, first)| Filter { uplink, to, first }));
            }
        }
    }
    Ok(found)
}
