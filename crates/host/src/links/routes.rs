//! Where a tunnel device sends frames: the forwarding database of a VXLAN device, and the next hops of VTEPs (tunnel
//! endpoints).
//!
//! All of it is read through sockets that another process opened, perhaps in another network namespace. The kernel
//! checks the capabilities of a sender, too, so a process without them can only read.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use netlink_bindings::rt_link::{self, Ifinfomsg};
use netlink_bindings::rt_neigh::{self, IterableNeighbourAttrs, Ndmsg, OpGetneighDump};
use netlink_bindings::rt_route::{self, Rtmsg};
use netlink_bindings::traits::{NetlinkRequest, Protocol};
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use rustix::net::{RecvFlags, SendFlags, bind, recv, send};

use super::all::Seen;
use super::bridge::FdbDump;
use super::tunnel::Device;
use super::{header_of, netlink_socket};

/// The header of a netlink message (struct nlmsghdr, include/uapi/linux/netlink.h): its length, and where the type and the
/// sequence number are in it.
const HEADER_BYTES: usize = 16;
const TYPE_AT: usize = 4;
const SEQUENCE_AT: usize = 8;
/// `NLM_F_REQUEST`, `NLM_F_ACK`, `NLM_F_DUMP`.
const REQUEST: u16 = 1;
const ACK: u16 = 4;
const DUMP: u16 = 0x300;
/// `NLMSG_ERROR`, which is an acknowledgement, too, and `NLMSG_DONE`.
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// Largest datagram that the kernel sends to a reader with this much room (`NLMSG_GOODSIZE`, and dumps up to 32 KiB).
const DATAGRAM_BYTES: usize = 32 << 10;
/// Most bytes of messages that wait for a reader of changes; the kernel doubles it.
const WAITING_BYTES: usize = 4 << 20;
/// `RTM_NEWNEIGH` (include/uapi/linux/rtnetlink.h).
const RTM_NEWNEIGH: u16 = 28;
const RTM_DELNEIGH: u16 = 29;
/// `NTF_SELF` (include/uapi/linux/neighbour.h): an entry of the device, not of the bridge that it is a port of.
const NTF_SELF: u8 = 0x02;
/// `RTNLGRP_*`: links, neighbours, routes and rules of IPv4, those of IPv6, next hops (include/uapi/linux/rtnetlink.h).
const GROUPS: [u32; 7] = [1, 3, 7, 8, 11, 19, 32];
/// `RTN_UNICAST`.
const RTN_UNICAST: u8 = 1;
/// `NUD_STALE`: the kernel uses it, and checks it when it does.
const NUD_STALE: u16 = 0x04;
/// States in which the kernel sends to a neighbour: `NUD_VALID`.
const NUD_VALID: u16 = 0xde;

/// The kernel's tables, read through an rtnetlink socket.
#[derive(Debug)]
pub struct Tables {
    socket: OwnedFd,
    sequence: u32,
    datagram: Vec<u8>,
}

/// An entry of a vxlan device's forwarding database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum VxlanEntry {
    /// A MAC address, and the VTEP that has it. `None`: it was removed, or leads elsewhere than to the device's VNI at
    /// one VTEP.
    Unicast([u8; 6], Option<IpAddr>),
    /// A VTEP gets multicast frames and those to unknown addresses, or does not any more.
    Flood(IpAddr, bool),
}

/// The next hop of a VTEP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NextHop {
    /// Index of the interface.
    pub index: u32,
    /// Its IP address: the VTEP's own if there is no gateway.
    pub ip: IpAddr,
}

/// The MAC address of a next hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resolved {
    /// The address.
    pub mac: [u8; 6],
    /// The kernel has not confirmed it for a while; it does when it sends there.
    pub is_stale: bool,
}

/// [`Tables::device_named`], in this network namespace.
///
/// # Errors
/// As there.
pub fn device_named(name: &str) -> Result<Device, String> {
    Tables::open()?.device_named(name)
}

/// [`Tables::device_numbered`], in this network namespace.
///
/// # Errors
/// As there.
pub fn device_numbered(index: u32) -> Result<Device, String> {
    Tables::open()?.device_numbered(index)
}

impl Tables {
    fn open() -> Result<Self, String> {
        let socket = netlink_socket(None).map_err(|error| format!("no socket for rtnetlink: {error}"))?;
        Ok(Self::new(socket))
    }

    /// Reads through a non-blocking socket: rtnetlink answers during send(2), and continues a dump in recv(2), so nothing has
    /// to wait.
    pub fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            sequence: 0,
            datagram: vec![0; DATAGRAM_BYTES],
        }
    }

    /// Calls `each` for all entries of a vxlan device's own forwarding database.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn fdb(&mut self, vxlan: u32, mut each: impl FnMut(VxlanEntry)) -> io::Result<()> {
        self.ask(&FdbDump::of_device(vxlan), |(header, attributes)| {
            if u32::try_from(header.ndm_ifindex) == Ok(vxlan)
                && let Some(entry) = entry_of(&header, &attributes, true)
            {
                each(entry);
            }
        })
    }

    /// The next hop of a VTEP; `None`: there is no route to it.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn next_hop(&mut self, local: IpAddr, vtep: IpAddr) -> io::Result<Option<NextHop>> {
        let route = self.route(Some(local), vtep)?;
        Ok(route.map(|(next, _)| next))
    }

    /// The next hop of packets to a VTEP, from this address or from any, and the address that the kernel would choose.
    fn route(
        &mut self,
        local: Option<IpAddr>,
        vtep: IpAddr,
    ) -> io::Result<Option<(NextHop, Option<IpAddr>)>> {
        let (family, bits) = match vtep {
            IpAddr::V4(_) => (libc::AF_INET, 32),
            IpAddr::V6(_) => (libc::AF_INET6, 128),
        };
        let header = Rtmsg {
            rtm_family: family as u8,
            rtm_dst_len: bits,
            rtm_src_len: if local.is_some() { bits } else { 0 },
            ..Rtmsg::default()
        };
        let mut request = rt_route::Request::new().op_getroute_do(&header);
        request.encode().push_dst(vtep);
        if let Some(local) = local {
            request.encode().push_src(local);
        }
        let mut found = None;
        let asked = self.ask(&request, |(header, attributes)| {
            let ip = attributes
                .get_gateway()
                .or_else(|_| attributes.get_via())
                .unwrap_or(vtep);
            // Others than plain routes are the kernel's: local and broadcast addresses, lightweight tunnels.
            let is_plain = header.rtm_type == RTN_UNICAST && attributes.get_encap_type().is_err();
            let index = attributes.get_oif().ok().filter(|_| is_plain);
            found = index.map(|index| (NextHop { index, ip }, attributes.get_prefsrc().ok()));
        });
        match asked {
            Ok(()) => Ok(found),
            Err(error) if is_unreachable(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The MAC address of a next hop; `None`: the kernel has none that it would use.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn neighbour(&mut self, hop: NextHop) -> io::Result<Option<Resolved>> {
        let family = match hop.ip {
            IpAddr::V4(_) => libc::AF_INET,
            IpAddr::V6(_) => libc::AF_INET6,
        };
        let header = Ndmsg {
            ndm_family: family as u8,
            ndm_ifindex: hop.index.cast_signed(),
            ..Ndmsg::default()
        };
        let mut request = rt_neigh::Request::new().op_getneigh_do(&header);
        request.encode().push_dst(hop.ip);
        let mut found = None;
        let asked = self.ask(&request, |(header, attributes)| {
            let mac = attributes.get_lladdr().ok().and_then(|mac| mac.try_into().ok());
            found = mac
                .filter(|_| header.ndm_state & NUD_VALID != 0)
                .map(|mac| Resolved {
                    mac,
                    is_stale: header.ndm_state & NUD_STALE != 0,
                });
        });
        match asked {
            Ok(()) => Ok(found),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// VLAN and MAC address of the VLAN devices (802.1Q) on an interface, by index; without those that may set a priority.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn vlans_on(&mut self, interface: u32) -> io::Result<HashMap<u32, (u16, [u8; 6])>> {
        let request = rt_link::Request::new().op_getlink_dump(&Ifinfomsg::default());
        let mut found = HashMap::new();
        self.ask(&request, |(header, attributes)| {
            let seen = Seen::of(&attributes);
            let is_on = seen.below == Some(interface) && !seen.sets_priority;
            if let Some(vlan) = seen.vlan.filter(|&vlan| is_on && vlan != 0) {
                found.insert(header.ifi_index.cast_unsigned(), (vlan, seen.mac));
            }
        })?;
        Ok(found)
    }

    /// Reads a tunnel device by its name.
    ///
    /// # Errors
    /// There is none, or its packets have to pass through it: in words, with the remedy.
    pub fn device_named(&mut self, name: &str) -> Result<Device, String> {
        let text = CString::new(name).map_err(|_| format!("{name:?} is no name of an interface"))?;
        let device = self.device(&Ifinfomsg::default(), Some(&text));
        device.map_err(|why| format!("{name} {why}"))
    }

    /// Reads a tunnel device by its index.
    ///
    /// # Errors
    /// As [`Self::device_named`].
    pub fn device_numbered(&mut self, index: u32) -> Result<Device, String> {
        let device = self.device(&header_of(index), None);
        device.map_err(|why| format!("the interface with index {index} {why}"))
    }

    fn device(&mut self, header: &Ifinfomsg, name: Option<&CStr>) -> Result<Device, String> {
        let mut request = rt_link::Request::new().op_getlink_do(header);
        if let Some(name) = name {
            request.encode().push_ifname(name);
        }
        let mut found = Err("is gone".to_owned());
        let asked = self.ask(&request, |(header, attributes)| {
            found = Device::of(&header, &attributes);
        });
        asked.map_err(|error| format!("cannot be found: {error}"))?;
        let mut device = found?;
        if let Some(remote) = device.tunnel.remote {
            let route = self.route(None, remote);
            let route = route.map_err(|error| format!("has a remote whose route cannot be read: {error}"))?;
            // Without a route it stays unspecified.
            if let Some((_, Some(local))) = route {
                device.tunnel.local = local;
            }
        }
        Ok(device)
    }

    /// Sends a request, and calls `each` for each message of the answer.
    fn ask<R: NetlinkRequest>(
        &mut self,
        request: &R,
        mut each: impl FnMut(R::ReplyType<'_>),
    ) -> io::Result<()> {
        let Protocol::Raw { request_type, .. } = request.protocol() else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        self.sequence = self.sequence.wrapping_add(1);
        let (payload, flags) = (request.payload(), request.flags());
        let ends = if flags & DUMP == DUMP { 0 } else { ACK };
        let len = (HEADER_BYTES + payload.len()) as u32;
        let mut message = len.to_ne_bytes().to_vec();
        message.extend(request_type.to_ne_bytes());
        message.extend((flags | REQUEST | ends).to_ne_bytes());
        message.extend(self.sequence.to_ne_bytes());
        message.extend([0; 4]);
        message.extend(payload);
        send(&self.socket, &message, SendFlags::empty())?;
        loop {
            let (bytes, _) = recv(&self.socket, &mut self.datagram[..], RecvFlags::empty())?;
            for (kind, sequence, body) in messages(&self.datagram[..bytes]) {
                if sequence != self.sequence {
                    // Of an answer that was not read to its end.
                    continue;
                }
                match kind {
                    DONE => return Ok(()),
                    ERROR => {
                        let code = body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
                        return match code {
                            0 => Ok(()),
                            code => Err(io::Error::from_raw_os_error(-code)),
                        };
                    }
                    _ => each(R::decode_reply(body)),
                }
            }
        }
    }
}

/// No route, or one of type unreachable, prohibit (EACCES) or blackhole (EINVAL).
fn is_unreachable(error: &io::Error) -> bool {
    let codes = [libc::ENETUNREACH, libc::EHOSTUNREACH, libc::EACCES, libc::EINVAL];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

/// The messages of a datagram: the type, the sequence number and the body of each.
fn messages(mut datagram: &[u8]) -> impl Iterator<Item = (u16, u32, &[u8])> {
    std::iter::from_fn(move || {
        let len = u32::from_ne_bytes(*datagram.first_chunk()?) as usize;
        let kind = u16::from_ne_bytes(*datagram.get(TYPE_AT..)?.first_chunk()?);
        let sequence = u32::from_ne_bytes(*datagram.get(SEQUENCE_AT..)?.first_chunk()?);
        let body = datagram.get(HEADER_BYTES..len)?;
        datagram = datagram.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, sequence, body))
    })
}

/// The entry of a vxlan device's own database that a message tells of; `None`: it is the bridge's, or of a group.
fn entry_of(header: &Ndmsg, attributes: &IterableNeighbourAttrs<'_>, is_there: bool) -> Option<VxlanEntry> {
    let is_own = i32::from(header.ndm_family) == libc::AF_BRIDGE && header.ndm_flags & NTF_SELF != 0;
    let mac: [u8; 6] = attributes.get_lladdr().ok()?.try_into().ok()?;
    let vtep = attributes.get_dst().ok();
    if !is_own || mac[0] & 1 != 0 {
        return None;
    }
    if mac == [0; 6] {
        return vtep.map(|vtep| VxlanEntry::Flood(vtep, is_there));
    }
    // For an entry that a VLAN-aware bridge also has, the kernel sends a second message, without NDA_DST.
    if is_there && vtep.is_none() && attributes.get_nh_id().is_err() {
        return None;
    }
    let is_elsewhere = attributes.get_nh_id().is_ok()
        || attributes.get_port().is_ok()
        || attributes.get_vni().is_ok()
        || attributes.get_ifindex().is_ok();
    let vtep = vtep.filter(|_| is_there && !is_elsewhere);
    Some(VxlanEntry::Unicast(mac, vtep))
}

/// A change of what [`Tables`] reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// An entry of the forwarding database of a vxlan device, by its index.
    Entry(u32, VxlanEntry),
    /// A neighbour.
    Neighbour(NextHop),
    /// Some route or interface.
    Routes,
    /// Changes were lost.
    Lost,
}

/// Notifications of changes.
#[derive(Debug)]
pub struct TableChanges(OwnedFd);

impl TableChanges {
    /// Prepares a socket for a reader without privileges, of which there may be many: it gets entries of forwarding
    /// databases only from one vxlan device, and has room for some thousand changes at once. Needs CAP_NET_ADMIN.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn prepare(socket: BorrowedFd<'_>, vxlan: u32) -> io::Result<()> {
        // The kernel keeps such a socket's messages in several times their length.
        set_socket_recv_buffer_size_force(socket, WAITING_BYTES)?;
        only_fdb_of(socket, vxlan)
    }

    /// Subscribes by a socket that does not block.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn subscribe(socket: OwnedFd) -> io::Result<Self> {
        let groups = GROUPS.iter().fold(0, |groups, group| groups | 1 << (group - 1));
        bind(&socket, &SocketAddrNetlink::new(0, groups))?;
        Ok(Self(socket))
    }

    /// Calls `each` for each change of some that are pending; false: there were none.
    pub fn read(&self, each: &mut impl FnMut(Change)) -> bool {
        let mut datagram = [0; DATAGRAM_BYTES];
        match recv(&self.0, &mut datagram[..], RecvFlags::TRUNC) {
            Ok((_, len)) if len > DATAGRAM_BYTES => each(Change::Lost),
            Ok((bytes, _)) => messages(&datagram[..bytes])
                .filter_map(|(kind, _, body)| change_of(kind, body))
                .for_each(each),
            Err(Errno::NOBUFS) => each(Change::Lost),
            Err(Errno::INTR) => {}
            Err(_) => return false,
        }
        true
    }
}

/// Has a socket drop messages about entries of forwarding databases of other devices (socket(7), `SO_ATTACH_FILTER`). The
/// kernel sends each change in a datagram of its own.
#[allow(unsafe_code)]
fn only_fdb_of(socket: BorrowedFd<'_>, device: u32) -> io::Result<()> {
    /// Of `struct ndmsg`, behind the header of the message.
    const FAMILY_AT: u32 = HEADER_BYTES as u32;
    const INDEX_AT: u32 = FAMILY_AT + 4;
    let op = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let load = |size, at: u32| op(libc::BPF_LD | size | libc::BPF_ABS, 0, 0, at);
    let equal = |k, jt, jf| op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, jt, jf, k);
    let give = |bytes| op(libc::BPF_RET | libc::BPF_K, 0, 0, bytes);
    // A load takes the bytes for a number in network order.
    let kind = |kind: u16| u16::from_be_bytes(kind.to_ne_bytes()).into();
    let mut code = [
        load(libc::BPF_H, TYPE_AT as u32),
        equal(kind(RTM_NEWNEIGH), 1, 0),
        equal(kind(RTM_DELNEIGH), 0, 4),
        load(libc::BPF_B, FAMILY_AT),
        equal(libc::AF_BRIDGE as u32, 0, 2),
        load(libc::BPF_W, INDEX_AT),
        equal(u32::from_be_bytes(device.to_ne_bytes()), 0, 1),
        give(u32::MAX),
        give(0),
    ];
    let program = libc::sock_fprog {
        len: code.len() as u16,
        filter: code.as_mut_ptr(),
    };
    let len = size_of_val(&program) as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER);
    // SAFETY: the kernel reads `len` bytes from the address of a live value, which names a live array and its length.
    match unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const program).cast(), len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl AsFd for TableChanges {
    /// Readable when there are changes.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn change_of(kind: u16, body: &[u8]) -> Option<Change> {
    if ![RTM_NEWNEIGH, RTM_DELNEIGH].contains(&kind) {
        return Some(Change::Routes);
    }
    let (header, attributes) = OpGetneighDump::decode_request(body);
    let index = u32::try_from(header.ndm_ifindex).ok()?;
    if i32::from(header.ndm_family) == libc::AF_BRIDGE {
        let entry = entry_of(&header, &attributes, kind == RTM_NEWNEIGH)?;
        return Some(Change::Entry(index, entry));
    }
    let ip = attributes.get_dst().ok()?;
    Some(Change::Neighbour(NextHop { index, ip }))
}

#[cfg(test)]
mod tests {
    use testkit::netns::NetNs;

    use super::super::{Link, netlink_socket};
    use super::*;

    const REMOTE: [u8; 6] = [2, 0, 0, 0, 3, 1];

    fn host() -> NetNs {
        let ns = NetNs::new("tables");
        for line in [
            "link add u0 type veth peer name far",
            "link set far up",
            "link set u0 up",
            "address add 10.9.0.1/24 dev u0",
            "route add 10.77.0.0/16 via 10.9.0.254",
            "link add vx100 type vxlan id 100 dstport 4789 nolearning local 10.9.0.1",
            "link set vx100 up",
        ] {
            ns.ip(&line.split(' ').collect::<Vec<_>>());
        }
        ns
    }

    fn index(name: &str) -> u32 {
        Link::by_name(name).expect("it is there").index
    }

    fn socket() -> OwnedFd {
        netlink_socket(None).expect("a socket")
    }

    fn entries(tables: &mut Tables, vxlan: u32) -> Vec<VxlanEntry> {
        let mut entries = Vec::new();
        tables.fdb(vxlan, |entry| entries.push(entry)).expect("listed");
        entries.sort_unstable();
        entries
    }

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn entries_of_a_vxlan_device_are_those_of_addresses_at_one_vtep_and_of_all_vteps() {
        testkit::require!(Root);
        let ns = host();
        for line in [
            "fdb append 00:00:00:00:00:00 dev vx100 dst 10.9.0.2",
            "fdb append 00:00:00:00:00:00 dev vx100 dst 10.9.0.3",
            "fdb add 02:00:00:00:03:01 dev vx100 dst 10.9.0.2",
            "fdb add 02:00:00:00:03:02 dev vx100 dst 10.9.0.3",
            "fdb add 02:00:00:00:03:03 dev vx100 dst 10.9.0.3 vni 7",
            "fdb add 02:00:00:00:03:04 dev vx100 dst 10.9.0.3 port 8472",
        ] {
            ns.run("bridge", &line.split(' ').collect::<Vec<_>>());
        }
        let mac = |last| [2, 0, 0, 0, 3, last];
        let expected = [
            VxlanEntry::Unicast(mac(1), Some(address("10.9.0.2"))),
            VxlanEntry::Unicast(mac(2), Some(address("10.9.0.3"))),
            VxlanEntry::Unicast(mac(3), None),
            VxlanEntry::Unicast(mac(4), None),
            VxlanEntry::Flood(address("10.9.0.2"), true),
            VxlanEntry::Flood(address("10.9.0.3"), true),
        ];
        ns.enter(|| {
            let mut tables = Tables::new(socket());
            assert_eq!(entries(&mut tables, index("vx100")), expected);
        });
    }

    #[test]
    fn next_hop_is_the_vtep_or_a_gateway_and_resolved_as_the_kernel_has_it() {
        testkit::require!(Root);
        let ns = host();
        ns.ip(
            &"neighbour add 10.9.0.2 lladdr 02:00:00:00:00:02 dev u0 nud permanent"
                .split(' ')
                .collect::<Vec<_>>(),
        );
        ns.ip(
            &"neighbour add 10.9.0.254 lladdr 02:00:00:00:00:fe dev u0 nud stale"
                .split(' ')
                .collect::<Vec<_>>(),
        );
        ns.enter(|| {
            let (mut tables, local) = (Tables::new(socket()), address("10.9.0.1"));
            let mut hop = |to: &str| tables.next_hop(local, address(to)).expect("asked");
            let on = |ip: &str| NextHop {
                index: index("u0"),
                ip: address(ip),
            };
            assert_eq!(hop("10.9.0.2"), Some(on("10.9.0.2")));
            assert_eq!(hop("10.77.5.5"), Some(on("10.9.0.254")));
            assert_eq!(hop("192.0.2.1"), None);
            let mut source = |to: &str| tables.route(None, address(to)).expect("asked");
            let chosen = |ip| Some((on(ip), Some(local)));
            assert_eq!(source("10.9.0.2"), chosen("10.9.0.2"));
            assert_eq!(source("10.77.5.5"), chosen("10.9.0.254"));
            assert_eq!([source("192.0.2.1"), source("10.9.0.1")], [None, None]);
            let mut resolved = |ip: &str| tables.neighbour(on(ip)).expect("asked");
            let known = |last, is_stale| {
                let mac = [2, 0, 0, 0, 0, last];
                Some(Resolved { mac, is_stale })
            };
            assert_eq!(resolved("10.9.0.2"), known(2, false));
            assert_eq!(resolved("10.9.0.254"), known(0xfe, true));
            assert_eq!(resolved("10.9.0.3"), None);
        });
    }

    #[test]
    fn changes_of_entries_neighbours_and_routes_are_reported() {
        testkit::require!(Root);
        let ns = host();
        let (changes, vxlan, u0) = ns.enter(|| {
            let (socket, vxlan) = (socket(), index("vx100"));
            TableChanges::prepare(socket.as_fd(), vxlan).expect("prepared");
            let changes = TableChanges::subscribe(socket).expect("subscribed");
            (changes, vxlan, index("u0"))
        });
        let read = || {
            let mut all = Vec::new();
            while changes.read(&mut |change| all.push(change)) {}
            all
        };
        let entry = |vtep| Change::Entry(vxlan, VxlanEntry::Unicast(REMOTE, vtep));
        ns.run(
            "bridge",
            &"fdb add 02:00:00:00:03:01 dev vx100 dst 10.9.0.2"
                .split(' ')
                .collect::<Vec<_>>(),
        );
        assert_eq!(read(), [entry(Some(address("10.9.0.2")))]);
        ns.run(
            "bridge",
            &"fdb replace 02:00:00:00:03:01 dev vx100 dst 10.9.0.3"
                .split(' ')
                .collect::<Vec<_>>(),
        );
        assert_eq!(read().last(), Some(&entry(Some(address("10.9.0.3")))));
        ns.run(
            "bridge",
            &"fdb del 02:00:00:00:03:01 dev vx100 dst 10.9.0.3"
                .split(' ')
                .collect::<Vec<_>>(),
        );
        assert_eq!(read(), [entry(None)]);
        for (act, is_there) in [("append", true), ("del", false)] {
            let line = format!("fdb {act} 00:00:00:00:00:00 dev vx100 dst 10.9.0.2");
            ns.run("bridge", &line.split(' ').collect::<Vec<_>>());
            let flood = VxlanEntry::Flood(address("10.9.0.2"), is_there);
            assert_eq!(read(), [Change::Entry(vxlan, flood)]);
        }
        // Of other devices there are no messages.
        ns.ip(&["link add br0 type bridge"]);
        ns.ip(&["link set far master br0"]);
        while read().contains(&Change::Routes) {}
        let more = |number: u32| {
            let [_, high, middle, low] = number.to_be_bytes();
            format!("fdb add 02:00:00:{high:02x}:{middle:02x}:{low:02x} dev far master static")
        };
        ns.batch("bridge", (0..20_000).map(more));
        assert_eq!(read(), []);
        ns.ip(&"neighbour add 10.9.0.2 lladdr 02:00:00:00:00:02 dev u0"
            .split(' ')
            .collect::<Vec<_>>());
        let hop = NextHop {
            index: u0,
            ip: address("10.9.0.2"),
        };
        assert_eq!(read(), [Change::Neighbour(hop)]);
        ns.ip(&"route add 10.78.0.0/16 via 10.9.0.2"
            .split(' ')
            .collect::<Vec<_>>());
        assert_eq!(read(), [Change::Routes]);
    }
}
