//! Network interfaces, by rtnetlink.
//!
//! [`Link::by_name`] asks once; [`Changes`] waits for RTMGRP_LINK notifications, for RTMGRP_TC ones (`tc qdisc del`
//! removes the steward's filters), for those of IP addresses (a vxlan device's local address may move to another
//! interface), and for those of ethtool and IPsec: rtnetlink does not report `ethtool -L`. A notification is only a reason
//! to ask again: the answer is the state now, even if notifications were lost.
pub mod above;
pub mod all;
pub mod below;
pub mod bridge;
pub mod bridge_ports;
mod device;
pub mod filters;
pub mod ipsec;
pub mod neighbours;
pub mod routes;
pub mod tunnel;

use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use netlink_bindings::netdev;
use netlink_bindings::nlctrl;
use netlink_bindings::rt_link::{self, Ifinfomsg, IterableLinkAttrs, LinkinfoDataMsg, NetkitPairing};
use netlink_bindings::traits::NetlinkRequest;
use netlink_socket2::NetlinkSocket;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use xsk::NumaNode;

use crate::nic::Ethtool;

/// Inode of the network namespace of the calling thread; 0 if that cannot be read.
#[must_use]
pub fn namespace() -> u64 {
    fs::metadata("/proc/thread-self/ns/net").map_or(0, |metadata| metadata.ino())
}

/// What is known of an interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Link {
    /// Its index in the network namespace; 0: it does not exist.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Bytes.
    pub mtu: u32,
    /// Its address; zeros if it has none of six bytes.
    pub mac: [u8; 6],
    /// Name of its driver, as in `ethtool -i`; empty if the kernel does not report it.
    pub driver: String,
    /// Administratively up (`IFF_UP`).
    pub up: bool,
    /// Index of the bridge, bond or team that it is part of.
    pub master: Option<u32>,
    /// Receive queues in use, as `ethtool -L` shows; if the driver does not report it, those that were allocated.
    pub rx_queues: u32,
    /// The other end is a stack on the same machine, whose senders leave only the sum of the pseudo-header in TCP's and
    /// UDP's checksum field: a veth.
    pub partial_checksums: bool,
    /// It has no other end, only queues that are leased to it from NICs: a netkit without a peer (Linux 7.1). No
    /// program runs on it, and only a socket in zero-copy, which is the NIC's, moves frames.
    pub has_leased_only: bool,
    /// NUMA node of its device; none if it has no device, or if the kernel (before 5.14) or sysfs does not report it.
    pub node: Option<NumaNode>,
    /// An IOMMU translates addresses for its device: pages adjacent in memory need not be adjacent for the device.
    pub translated: bool,
}

/// Interface that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// No such interface.
    #[error("no interface {0:?} in this network namespace: `ip link` lists them")]
    Unknown(String),
    /// The kernel did not answer.
    #[error("cannot ask the kernel about interface {name:?}")]
    Ask {
        /// As given.
        name: String,
        /// Its answer.
        #[source]
        source: io::Error,
    },
    /// It carries no Ethernet frames: tun, WireGuard, PPP, IP tunnels, InfiniBand.
    #[error(
        "interface {0} carries IP or other packets, not Ethernet frames: choose an Ethernet interface (a tap, not a tun)"
    )]
    NotEthernet(String),
}

impl LinkError {
    /// The error of [`Link::ask`] for the interface of that name.
    fn of(name: String, source: io::Error) -> Self {
        // Errors of the kernel have a number.
        match (source.kind(), source.raw_os_error()) {
            (io::ErrorKind::Unsupported, None) => Self::NotEthernet(name),
            _ => Self::Ask { name, source },
        }
    }
}

/// Drivers of devices that are made of software, which have no zero-copy: kernels before Linux 6.3 do not say.
const SOFTWARE: [&str; 10] = [
    "veth",
    "netkit",
    "macvlan",
    "ipvlan",
    "802.1Q VLAN Support",
    "bridge",
    "bonding",
    "team",
    "tun",
    "dummy",
];
/// Largest MTU whose frames drivers put into one buffer in zero-copy.
const LONGEST_MTU_IN_ONE: u32 = 1500;

impl Link {
    /// Asks for an Ethernet interface by name.
    ///
    /// # Errors
    /// [`LinkError`], naming the interface.
    pub fn by_name(name: &str) -> Result<Self, LinkError> {
        let unknown = || LinkError::Unknown(name.to_owned());
        let c_name = CString::new(name).map_err(|_| unknown())?;
        if name.is_empty() || name.len() > 15 {
            return Err(unknown());
        }
        Self::ask(&Ifinfomsg::default(), Some(&c_name)).map_err(|source| match source.raw_os_error() {
            Some(code) if code == Errno::NODEV.raw_os_error() => unknown(),
            _ => LinkError::of(name.to_owned(), source),
        })
    }

    /// Asks for an Ethernet interface by name; `None` when it is gone.
    ///
    /// # Errors
    /// [`LinkError`], naming the interface.
    pub fn find_by_name(name: &str) -> Result<Option<Self>, LinkError> {
        match Self::by_name(name) {
            Err(LinkError::Unknown(_)) => Ok(None),
            asked => asked.map(Some),
        }
    }

    /// Asks for an interface by index; `None` when it is gone, or the kernel does not answer.
    #[must_use]
    pub fn by_index(index: u32) -> Option<Self> {
        Self::find(index).ok().flatten()
    }

    /// Asks for an interface by index; `None` when it is gone.
    ///
    /// # Errors
    /// [`LinkError::Ask`].
    pub fn find(index: u32) -> Result<Option<Self>, LinkError> {
        if index == 0 {
            return Ok(None);
        }
        match Self::ask(&header_of(index), None) {
            Ok(link) => Ok(Some(link)),
            Err(source) if source.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => Ok(None),
            Err(source) => Err(LinkError::of(format!("with index {index}"), source)),
        }
    }

    /// Why its program is attached in skb mode, although its driver has native XDP. A bond attaches a native program to
    /// its ports, whose frames AF_XDP sockets of the bond do not get (`xsk_rcv_check`, net/xdp/xsk.c).
    #[must_use]
    pub fn only_skb(&self) -> Option<&'static str> {
        (self.driver == "bonding")
            .then_some("a bond runs a native program on its ports, whose frames its sockets miss")
    }

    /// Why AF_XDP copies its frames, as far as that is known without binding. For streams a tap costs less then.
    #[must_use]
    pub fn copies(&self, sends: DriverSends) -> Option<&'static str> {
        let has_none = SOFTWARE.contains(&self.driver.as_str()) || !sends.zero_copy;
        let is_long = self.mtu > LONGEST_MTU_IN_ONE && sends.most_pieces == 1;
        match (has_none, is_long) {
            (true, _) => Some("the driver has no zero-copy"),
            (false, true) => Some("beyond MTU 1500 the driver has no multi-buffer in zero-copy"),
            (false, false) => None,
        }
    }

    /// Whether it sends frames to other hosts in packets of IP.
    #[must_use]
    pub fn is_tunnel(&self) -> bool {
        ["vxlan", "geneve"].contains(&self.driver.as_str())
    }

    /// Whether the interface of that index has its link now (`IFF_LOWER_UP`).
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn has_carrier(index: u32) -> io::Result<bool> {
        Ok(Self::flags(index)? & libc::IFF_LOWER_UP.cast_unsigned() != 0)
    }

    /// Whether the interface of that index is a loopback (`IFF_LOOPBACK`).
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn is_loopback(index: u32) -> io::Result<bool> {
        Ok(Self::flags(index)? & libc::IFF_LOOPBACK.cast_unsigned() != 0)
    }

    /// Its `IFF_` flags.
    fn flags(index: u32) -> io::Result<u32> {
        get_link(&header_of(index), None, |header, _| header.ifi_flags)
    }

    fn ask(header: &Ifinfomsg, name: Option<&CStr>) -> io::Result<Self> {
        get_link(header, name, Self::of)?
    }

    fn of(header: &Ifinfomsg, attributes: &IterableLinkAttrs<'_>) -> io::Result<Self> {
        if !matches!(header.ifi_type, libc::ARPHRD_ETHER | libc::ARPHRD_LOOPBACK) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let missing = |_| io::Error::new(io::ErrorKind::InvalidData, "incomplete answer from rtnetlink");
        let address = attributes.get_address().map_err(missing)?;
        let name = attributes.get_ifname().map_err(missing)?;
        let name = name.to_string_lossy().into_owned();
        let ethtool = Ethtool::open(&name);
        let in_use = ethtool
            .as_ref()
            .ok()
            .and_then(|ethtool| ethtool.receive_queues().ok());
        let driver = ethtool.and_then(|ethtool| ethtool.driver());
        let allocated = attributes.get_num_rx_queues().unwrap_or(1);
        let (buses, device) = (Path::new(device::BUSES), device_of(attributes));
        Ok(Self {
            index: u32::try_from(header.ifi_index).unwrap_or_default(),
            mtu: attributes.get_mtu().map_err(missing)?,
            mac: address.try_into().unwrap_or_default(),
            up: header.ifi_flags & libc::IFF_UP.cast_unsigned() != 0,
            master: attributes.get_master().ok(),
            rx_queues: in_use.filter(|&queues| queues > 0).unwrap_or(allocated),
            driver: driver.unwrap_or_default(),
            name,
            partial_checksums: attributes
                .get_linkinfo()
                .and_then(|info| info.get_kind())
                .is_ok_and(|kind| kind == c"veth"),
            has_leased_only: has_no_peer(attributes),
            node: device.and_then(|(bus, name)| device::node_of(buses, bus, name)),
            translated: device.is_some_and(|(bus, name)| device::is_translated(buses, bus, name)),
        })
    }
}

/// The header of a request about the interface of that index; 0: it is named by an attribute.
#[must_use]
pub fn header_of(index: u32) -> Ifinfomsg {
    Ifinfomsg {
        ifi_index: i32::try_from(index).unwrap_or(i32::MAX),
        ..Ifinfomsg::default()
    }
}

/// Calls `look` with each answer to a request for a dump.
///
/// # Errors
/// An error of the kernel.
pub fn dump<R: NetlinkRequest>(request: &R, mut look: impl FnMut(R::ReplyType<'_>)) -> io::Result<()> {
    let mut socket = NetlinkSocket::new();
    let mut replies = socket.request(request)?;
    while let Some(reply) = replies.recv() {
        look(reply.map_err(io::Error::from)?);
    }
    Ok(())
}

/// Queries an interface, and parses the answer.
///
/// # Errors
/// An error of the kernel.
pub fn get_link<T>(
    header: &Ifinfomsg,
    name: Option<&CStr>,
    read: impl FnOnce(&Ifinfomsg, &IterableLinkAttrs<'_>) -> T,
) -> io::Result<T> {
    let mut request = rt_link::Request::new().op_getlink_do(header);
    if let Some(name) = name {
        request.encode().push_ifname(name);
    }
    let mut socket = NetlinkSocket::new();
    let mut replies = socket.request(&request)?;
    let (header, attributes) = replies.recv_one().map_err(io::Error::from)?;
    Ok(read(&header, &attributes))
}

/// Checks that a tap device has these queues and no others: before it had an owner, everybody could attach one.
///
/// # Errors
/// The kernel's, or the number is another one.
pub fn check_tap_queues(name: &CStr, queues: usize) -> io::Result<()> {
    let counted = get_link(
        &Ifinfomsg::default(),
        Some(name),
        |_, attributes| match attributes.get_linkinfo().and_then(|info| info.get_data()) {
            Ok(LinkinfoDataMsg::Tun(tun)) => {
                tun.get_num_queues().ok().zip(tun.get_num_disabled_queues().ok())
            }
            _ => None,
        },
    )?;
    let unknown = || io::Error::other("the kernel does not report its number of queues");
    let (attached, detached) = counted.ok_or_else(unknown)?;
    if usize::try_from(attached) == Ok(queues) && detached == 0 {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "{queues} queues were made and {attached} are there ({detached} more are detached): another process attaches \
         some, `grep -l {} /proc/[0-9]*/fdinfo/*` lists those that have any",
        name.to_string_lossy()
    )))
}

/// Whether it is a netkit without a peer (`IFLA_NETKIT_PAIRING`, include/uapi/linux/if_link.h).
#[must_use]
pub fn has_no_peer(attributes: &IterableLinkAttrs<'_>) -> bool {
    let data = attributes.get_linkinfo().and_then(|info| info.get_data());
    let Ok(LinkinfoDataMsg::Netkit(netkit)) = data else {
        return false;
    };
    netkit.get_pairing().ok() == Some(NetkitPairing::Single as u32)
}

/// Bus and name of the device that the interface belongs to (`IFLA_PARENT_DEV_NAME`, include/uapi/linux/if_link.h).
fn device_of<'a>(attributes: &IterableLinkAttrs<'a>) -> Option<(&'a str, &'a str)> {
    let bus = attributes.get_parent_dev_bus_name().ok()?.to_str().ok()?;
    let name = attributes.get_parent_dev_name().ok()?.to_str().ok()?;
    Some((bus, name))
}

/// Features of a driver for AF_XDP sockets in zero-copy mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriverSends {
    /// It completes checksums that TX metadata asks for.
    pub checksum: bool,
    /// Most descriptors of a frame.
    pub most_pieces: usize,
    /// It may grant zero-copy; false where it is known not to.
    pub zero_copy: bool,
}

impl Default for DriverSends {
    /// No features are known: one descriptor for each frame.
    fn default() -> Self {
        Self {
            checksum: false,
            most_pieces: 1,
            zero_copy: true,
        }
    }
}

impl DriverSends {
    /// Asks for it (`xdp-features`, `xsk-features` and `xdp-zc-max-segs`, Documentation/netlink/specs/netdev.yaml; from
    /// Linux 6.3 on the kernel grants zero-copy only where the first has it, `xp_assign_dev`, net/xdp/xsk_buff_pool.c).
    /// Older kernels do not report it: then it is the default.
    #[must_use]
    pub fn by_index(index: u32) -> Self {
        DriverXdp::by_index(index).map_or_else(Self::default, |driver| driver.sends)
    }
}

/// A driver's XDP features, as the kernel reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriverXdp {
    /// It supports native XDP, including redirects.
    pub native: bool,
    /// It supports multi-buffer frames.
    pub pieces: bool,
    /// Its features in zero-copy mode.
    pub sends: DriverSends,
}

impl DriverXdp {
    /// Asks for it, as [`DriverSends::by_index`]; none, where the kernel does not say (before Linux 6.3).
    #[must_use]
    pub fn by_index(index: u32) -> Option<Self> {
        let mut socket = NetlinkSocket::new();
        let mut request = netdev::Request::new().op_dev_get_do();
        request.encode().push_ifindex(index);
        let mut replies = socket.request(&request).ok()?;
        let attributes = replies.recv_one().ok()?;
        let features = attributes.get_xsk_features().unwrap_or(0);
        let xdp = attributes.get_xdp_features().unwrap_or(0);
        let has = |act: netdev::XdpAct| xdp & act as u64 != 0;
        Some(Self {
            native: has(netdev::XdpAct::Basic) && has(netdev::XdpAct::Redirect),
            pieces: has(netdev::XdpAct::RxSg),
            sends: DriverSends {
                checksum: features & netdev::XskFlags::TxChecksum as u64 != 0,
                most_pieces: attributes.get_xdp_zc_max_segs().unwrap_or(1) as usize,
                zero_copy: has(netdev::XdpAct::XskZerocopy),
            },
        })
    }
}

/// Ethernet header and one VLAN tag, bytes: by this much a frame may be longer than the MTU.
const L2_BYTES: u32 = 18;
/// Longest frame for which a program without multi-buffer support can be attached, bytes: a page less headroom and the
/// kernel's own tail (veth and most drivers).
const LONGEST_WITHOUT_FRAGS: u32 = 3000;

/// Whether a program on an interface of this MTU needs multi-buffer support.
#[must_use]
pub fn wants_frags(mtu: u32) -> bool {
    mtu.saturating_add(L2_BYTES) > LONGEST_WITHOUT_FRAGS
}

/// Notifications that some interface changed.
#[derive(Debug)]
pub struct Changes {
    /// Readable when one of the others is.
    any: OwnedFd,
    route: OwnedFd,
    /// None, if the kernel has no such notifications, or this process may not have them.
    ethtool: Option<OwnedFd>,
    ipsec: Option<OwnedFd>,
}

impl Changes {
    /// Subscribes in the network namespace of the calling thread.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn subscribe() -> io::Result<Self> {
        let route = netlink_socket(None)?;
        let addresses = libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR;
        let groups = libc::RTMGRP_LINK | libc::RTMGRP_TC | addresses;
        bind(&route, &SocketAddrNetlink::new(0, groups.cast_unsigned()))?;
        // If the kernel provides none of these, only their notifications are missed.
        let ethtool = ethtool_changes().ok();
        let ipsec = ipsec_changes().ok();
        let any = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for socket in [Some(&route), ethtool.as_ref(), ipsec.as_ref()]
            .into_iter()
            .flatten()
        {
            epoll::add(&any, socket, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        Ok(Self {
            any,
            route,
            ethtool,
            ipsec,
        })
    }

    /// Waits for the next change, or until one of `also` is readable, at most `longest`. Lost messages (ENOBUFS) count
    /// as a change.
    pub fn wait(&mut self, also: &[BorrowedFd<'_>], longest: Option<Duration>) {
        let longest = longest.and_then(|longest| Timespec::try_from(longest).ok());
        let mut fds = vec![PollFd::new(&self.any, PollFlags::IN)];
        fds.extend(also.iter().map(|&fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let _ = poll(&mut fds, longest.as_ref());
        self.drain();
    }

    /// Discards pending notifications, without blocking.
    pub fn drain(&mut self) {
        let mut message = [0u8; 4096];
        // What they say is asked for again; here they are only taken out of the way. That some were lost is told once,
        // and more may follow.
        let all = [Some(&self.route), self.ethtool.as_ref(), self.ipsec.as_ref()];
        for socket in all.into_iter().flatten() {
            while !matches!(recv(socket, &mut message[..], RecvFlags::empty()), Err(errno) if errno != Errno::NOBUFS)
            {
            }
        }
    }
}

impl AsFd for Changes {
    /// Readable when there is a change.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.any.as_fd()
    }
}

/// A netlink socket that does not block. `protocol`: `None` is NETLINK_ROUTE, number 0.
///
/// # Errors
/// An error of the kernel.
pub fn netlink_socket(protocol: Option<Protocol>) -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(family, kind, flags, protocol)?)
}

/// Two sockets of rtnetlink that cannot change anything, whoever writes to them: the kernel asks for the capability of who
/// opened a socket, too (`netlink_ns_capable`, net/netlink/af_netlink.c). So a thread without capabilities opens them.
///
/// # Errors
/// An error of the kernel.
pub fn reading_sockets() -> io::Result<[OwnedFd; 2]> {
    let open = || {
        let own = capabilities(None)?;
        let effective = CapabilitySet::empty();
        set_capabilities(None, CapabilitySets { effective, ..own })?;
        Ok([netlink_socket(None)?, netlink_socket(None)?])
    };
    let opened = std::thread::scope(|scope| scope.spawn(open).join());
    opened.unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))
}

/// A socket that receives changes by ethtool: the group `monitor` of the family `ethtool`
/// (Documentation/networking/ethtool-netlink.rst).
fn ethtool_changes() -> io::Result<OwnedFd> {
    let mut ask = NetlinkSocket::new();
    let mut request = nlctrl::Request::new().op_getfamily_do();
    request.encode().push_family_name(c"ethtool");
    let mut replies = ask.request(&request)?;
    let family = replies.recv_one().map_err(io::Error::from)?;
    let missing = || io::Error::new(io::ErrorKind::NotFound, "no notifications of ethtool");
    let mut groups = family.get_mcast_groups().map_err(|_| missing())?;
    let monitor = groups.find(|group| group.get_name().is_ok_and(|name| name == c"monitor"));
    let group = monitor
        .and_then(|group| group.get_id().ok())
        .ok_or_else(missing)?;
    let socket = netlink_socket(Some(rustix::net::netlink::GENERIC))?;
    bind(&socket, &SocketAddrNetlink::new(0, 0))?;
    join_group(socket.as_fd(), group)?;
    Ok(socket)
}

/// A socket that receives changes of IPsec policies, with CAP_NET_ADMIN.
fn ipsec_changes() -> io::Result<OwnedFd> {
    // `XFRMGRP_POLICY` (include/uapi/linux/xfrm.h).
    const POLICY: u32 = 8;
    let socket = netlink_socket(Some(rustix::net::netlink::XFRM))?;
    bind(&socket, &SocketAddrNetlink::new(0, POLICY))?;
    Ok(socket)
}

/// Subscribes a netlink socket to a multicast group (netlink(7), NETLINK_ADD_MEMBERSHIP).
#[allow(unsafe_code)]
fn join_group(socket: BorrowedFd<'_>, group: u32) -> io::Result<()> {
    let (level, name) = (libc::SOL_NETLINK, libc::NETLINK_ADD_MEMBERSHIP);
    let len = size_of::<u32>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes from the address of a live number.
    match unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const group).cast(), len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
