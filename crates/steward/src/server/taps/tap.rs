//! Tap devices that a steward makes: between a network and the host or the wire (see `server::network_taps`), and to
//! send by an interface (see `server::send_taps`).
//!
//! A device exists as long as a process has a descriptor of it: it is never made persistent. Its alias (`ip link show`)
//! has its purpose, by which the next steward finds it.
//!
//! One of several queues has a descriptor for each, and the kernel spreads flows over them (`tun_automq_select_queue`,
//! drivers/net/tun.c). For each such device the kernel keeps 256 transmit queues with qdiscs (`MAX_TAP_QUEUES`), some 6
//! MiB. A lessee can detach queues and attach them again (`TUNSETQUEUE`). That concerns its own frames only: those of a
//! detached queue come by the others, and are dropped if there are none. Detached queues go with the device
//! (`tun_detach_all`).

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;

use netlink_bindings::rt_link::{self, Ifinfomsg, PushLinkAttrs};
use rustix::io::Errno;
use steer::TapTo;

use host::links::all::aliases;
use host::links::{check_tap_queues, header_of};

use crate::netlink::{acknowledged, message_of};
use crate::sys;

/// The purpose of a tap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// It joins a network with the host, or with the wire.
    Joins(TapTo),
    /// An interface sends the frames that are written to it.
    Send,
}

impl Purpose {
    const ALL: [Self; 3] = [Self::Joins(TapTo::Host), Self::Joins(TapTo::Uplink), Self::Send];

    /// First part of its name, and of its alias, of which the rest identifies the lease.
    fn begins(self) -> (&'static str, &'static str) {
        match self {
            Self::Joins(TapTo::Host) => ("vaxh", "vhost-af-xdp: the host on "),
            Self::Joins(TapTo::Uplink) => ("vaxu", "vhost-af-xdp: uplink "),
            Self::Send => ("vaxs", "vhost-af-xdp: sends by "),
        }
    }

    /// Limit of bytes of a queue that wait in the kernel after a write (`TUNSETSNDBUF`), with the kernel's bookkeeping:
    /// what 10 Gbit/s send in two milliseconds. Frames to the host do not wait.
    fn most_unsent(self) -> libc::c_int {
        match self {
            Self::Joins(TapTo::Host) => libc::c_int::MAX,
            Self::Joins(TapTo::Uplink) | Self::Send => 2 << 20,
        }
    }
}

/// `IN6_ADDR_GEN_MODE_NONE`, include/uapi/linux/if_link.h.
const NO_ADDRESS: u8 = 1;
/// Largest MTU of a tap: `MAX_MTU` without `ETH_HLEN`, drivers/net/tun.c. Interfaces have larger ones (veth, lo);
/// frames that a program redirects are not measured by it.
const MOST: u32 = 65_535 - 14;
/// `IPV6_MIN_MTU`, include/uapi/linux/ipv6.h: an interface of a smaller one has no IPv6.
const OF_IPV6: u32 = 1280;

/// A tap device and its purpose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tap {
    pub(crate) name: String,
    pub(crate) purpose: Purpose,
    /// Name of the network's interface, or of the one that it sends by, when it was leased first.
    pub(crate) uplink: String,
    /// The network's first queue, or the one that it sends from.
    pub(crate) first: u32,
}

/// A new device: it is removed when these descriptors are closed.
#[derive(Debug)]
pub(crate) struct NewTap {
    /// Of its queues.
    pub(crate) descriptors: Vec<OwnedFd>,
    /// It accepts and delivers UDP GSO packets (Linux 6.2).
    pub(crate) cuts_udp: bool,
}

impl Tap {
    /// For the network of that first queue of an interface, or for that queue, named by its index, which no other has.
    pub(crate) fn new(purpose: Purpose, uplink: &str, ifindex: u32, first: u32) -> Self {
        let (prefix, _) = purpose.begins();
        Self {
            name: format!("{prefix}{ifindex}-{first}"),
            purpose,
            uplink: uplink.to_owned(),
            first,
        }
    }

    /// Index of that interface when the device was made, by which it is found when it has another name now; 0: unknown.
    pub(crate) fn ifindex(&self) -> u32 {
        let digits = self.name.trim_start_matches(|c: char| !c.is_ascii_digit());
        let index = digits.split_once('-').map(|(index, _)| index.parse());
        index.and_then(Result::ok).unwrap_or_default()
    }

    /// By alias and name.
    fn of(alias: &str, name: &str) -> Option<Self> {
        let of = |purpose: Purpose| {
            let (prefix, begin) = purpose.begins();
            let (uplink, first) = alias.strip_prefix(begin)?.split_once(", queue ")?;
            name.strip_prefix(prefix)?;
            Some(Self {
                name: name.to_owned(),
                purpose,
                uplink: uplink.to_owned(),
                first: first.parse().ok()?,
            })
        };
        Purpose::ALL.into_iter().find_map(of)
    }

    fn alias(&self) -> String {
        let (_, begin) = self.purpose.begins();
        format!("{begin}{}, queue {}", self.uplink, self.first)
    }

    /// The MTU of a tap for an interface with this MTU.
    pub(crate) fn mtu_for(interface: u32) -> u32 {
        interface.min(MOST)
    }

    /// Makes it, down, with so many queues and an MTU in bytes: it has no address and looks for no neighbours.
    pub(crate) fn make(&self, queues: usize, mtu: u32) -> io::Result<NewTap> {
        let most_unsent = self.purpose.most_unsent();
        let (descriptors, cuts_udp) = sys::new_tap(&text(&self.name)?, most_unsent, queues)?;
        if queues > 1 {
            check_tap_queues(&text(&self.name)?, queues)?;
        }
        // A bridge that it becomes a port of has the lowest address of its ports, which should not be this one.
        let [fourth, fifth, sixth] = program::random()?;
        let (alias, mac) = (text(&self.alias())?, [0xfe, 0xff, 0xff, fourth, fifth, sixth]);
        self.change(&header(libc::IFF_NOARP, libc::IFF_NOARP), |attributes| {
            attributes.push_mtu(mtu).push_ifalias(&alias).push_address(&mac);
        })?;
        self.leave_without_address()?;
        Ok(NewTap {
            descriptors,
            cuts_udp,
        })
    }

    /// Changes flags and attributes of the device.
    fn change(&self, header: &Ifinfomsg, set: impl FnOnce(PushLinkAttrs<&mut Vec<u8>>)) -> io::Result<()> {
        let mut request = rt_link::Request::new().op_setlink_do(header);
        set(request.encode().push_ifname(&text(&self.name)?));
        acknowledged(&request)
    }

    /// Sets the device up or down.
    pub(crate) fn set_up(&self, up: bool) -> io::Result<()> {
        let flags = if up { libc::IFF_UP } else { 0 };
        self.change(&header(flags, libc::IFF_UP), |_| ())
    }

    /// Makes it a port of a bridge that neither learns at it nor floods to it: the programs at the uplink give it those
    /// frames. Frames are lost until it is up again.
    pub(crate) fn join_bridge(&self, bridge: u32) -> io::Result<()> {
        self.set_up(false)?;
        self.change(&Ifinfomsg::default(), |attributes| {
            attributes.push_master(bridge);
        })?;
        let set = self.set_port_flags();
        if set.is_err() {
            self.change(&Ifinfomsg::default(), |attributes| {
                attributes.push_master(0);
            })?;
        }
        set.and(self.set_up(true))
    }

    /// See [`Self::join_bridge`]. The kernel sends no ARP replies of a bridge by a port with `IFF_NOARP`.
    pub(crate) fn set_port_flags(&self) -> io::Result<()> {
        let mut request = rt_link::Request::new().op_newlink_do(&header(0, libc::IFF_NOARP));
        drop(
            request
                .encode()
                .push_ifname(&text(&self.name)?)
                .nested_linkinfo()
                .push_slave_kind(c"bridge")
                .nested_slave_data_bridge()
                .push_learning(0)
                .push_unicast_flood(0)
                .push_mcast_flood(0)
                .push_bcast_flood(0),
        );
        acknowledged(&request)
    }

    /// Makes IPv6 assign it no address and send nothing through it. There may be no IPv6: the host was booted
    /// without, or the MTU is too small for it.
    fn leave_without_address(&self) -> io::Result<()> {
        let set = self.change(&Ifinfomsg::default(), |attributes| {
            let of_inet6 = attributes.nested_af_spec().nested_inet6();
            drop(of_inet6.push_addr_gen_mode(NO_ADDRESS));
        });
        match set {
            Err(error) if error.raw_os_error() == Some(Errno::AFNOSUPPORT.raw_os_error()) => Ok(()),
            left => left,
        }
    }

    /// Changes its MTU, and sets it down if IPv6 starts with the new MTU: IPv6 would assign an address to an interface
    /// that is up at once.
    pub(crate) fn set_mtu(&self, mtu: u32, before: u32) -> io::Result<()> {
        let begins = before < OF_IPV6 && mtu >= OF_IPV6;
        if begins {
            self.set_up(false)?;
        }
        self.change(&Ifinfomsg::default(), |attributes| {
            attributes.push_mtu(mtu);
        })?;
        match begins {
            true => self.leave_without_address(),
            false => Ok(()),
        }
    }
}

/// The message that removes an interface, whoever has its descriptor.
pub(crate) fn removal_of(index: u32) -> Vec<u8> {
    message_of(&rt_link::Request::new().op_dellink_do(&header_of(index)))
}

/// All taps of stewards in this network namespace; if they cannot be listed, none, and the error is logged.
pub(crate) fn all_taps() -> Vec<Tap> {
    let all = aliases().unwrap_or_else(|error| {
        tracing::warn!("cannot look for devices of another steward: {error}");
        Vec::new()
    });
    let taps = all.iter().filter_map(|(name, alias)| Tap::of(alias, name));
    taps.collect()
}

/// A header with these flags, of those that change.
fn header(flags: libc::c_int, change: libc::c_int) -> Ifinfomsg {
    Ifinfomsg {
        ifi_flags: flags.cast_unsigned(),
        ifi_change: change.cast_unsigned(),
        ..Ifinfomsg::default()
    }
}

fn text(text: &str) -> io::Result<CString> {
    Ok(CString::new(text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_is_known_by_alias_and_name() {
        for purpose in Purpose::ALL {
            let tap = Tap::new(purpose, "eth0", 7, 2);
            assert_eq!(Tap::of(&tap.alias(), &tap.name), Some(tap.clone()));
            assert_eq!(tap.ifindex(), 7);
            assert_eq!(Tap::of("", &tap.name), None);
            assert_eq!(Tap::of(&tap.alias(), "eth0"), None, "another's");
            // IFNAMSIZ, with its end.
            let longest = Tap::new(purpose, "eth0", 9_999_999, 127);
            assert!(longest.name.len() < 16);
        }
    }
}
