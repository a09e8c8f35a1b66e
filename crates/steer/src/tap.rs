//! Connects the uplink of a network with a device (a tap, or one end of a veth pair) whose other side is the
//! process that serves the network, by the programs in `bpf/tap.bpf.c`. One device leads to the host, as
//! another receiver of the network. If no XDP program is on the uplink, another device leads to the wire. A
//! guest that has queues of the interface for itself has such a device, too ([`TapUser::Queues`]).
//!
//! The programs are attached by tcx links, which end with the [`TapAccess`] or the process unless they are pinned
//! ([`TapAccess::pin`]). Before Linux 6.6, which has no tcx, they are filters of the qdisc clsact. Filters stay when
//! the process is killed: the next process replaces them, or removes them ([`detach_tap`]). A clsact that was made for
//! them stays, without filters, because others may use it by then.
//!
//! The caller creates and removes the device. Frames reach it with partial checksums, unsegmented, and with
//! VLAN tags in the metadata, as far as its features allow that.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::Context;
use libbpf_rs::query::{LinkInfo, LinkTypeInfo};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapHandle, ProgramMut, TC_EGRESS, TC_INGRESS, TcAttachPoint, libbpf_sys};

use crate::capture::messages_of;
use crate::filter::{Place, attach_filter, has_filter, remove_filter};
use crate::mode::Mode;
use crate::program::Program;
use crate::send;
use crate::skel::tap::TapSkelBuilder;
use crate::{link, map};

/// Where a tap of a network leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TapTo {
    /// To the host, over the uplink.
    Host,
    /// To the LAN.
    Uplink,
}

/// The receivers of a tap's frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TapUser {
    /// A network's addresses. The number: that of the network, its first queue.
    Network(u32),
    /// The frames for a range of queues, by their filter and configuration. Leads to the wire only.
    Queues {
        /// The first queue, whose filter and configuration are used.
        first: u32,
        /// Number of queues.
        count: u32,
    },
}

impl TapUser {
    /// The number of the network, or of the first queue.
    fn number(self) -> u32 {
        match self {
            Self::Network(number) | Self::Queues { first: number, .. } => number,
        }
    }
}

/// How the programs are attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
    /// By tcx links, or by clsact if the kernel has none.
    Best,
    /// By filters of clsact.
    Clsact,
}

/// A tap, or one end of a veth pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TapDevice {
    /// Its index.
    pub index: u32,
    /// Its address.
    pub mac: [u8; 6],
}

/// A tap that is connected with the uplink as long as this value exists, or longer ([`TapAccess::pin`]).
#[derive(Debug)]
pub struct TapAccess {
    to: TapTo,
    network: u32,
    /// In the order of [`pins`]. The first one is dropped first: it sends frames to the tap.
    attachments: Vec<Attachment>,
    wire: MapHandle,
}

#[derive(Debug)]
struct Attachment {
    by: AttachedBy,
    /// It outlives this value.
    stays: bool,
}

#[derive(Debug)]
enum AttachedBy {
    Link(OwnedFd),
    Filter(Place),
}

impl TapTo {
    /// Both destinations.
    pub const ALL: [Self; 2] = [Self::Host, Self::Uplink];

    /// The uplink's hook at which frames are taken for the network.
    fn uplink_hook(self) -> TcAttachPoint {
        match self {
            Self::Host => TC_EGRESS,
            Self::Uplink => TC_INGRESS,
        }
    }

    /// Handle of the filters of a network. It is fixed, so that the next process replaces filters of one that
    /// was killed, and contains the network's number, so that several networks can share an interface.
    fn handle(self, network: u32) -> u32 {
        let base = match self {
            Self::Host => 0x7661_0000,
            Self::Uplink => 0x7662_0000,
        };
        base | network
    }
}

/// Prefixes of the names of pinned links, at the uplink and at the tap. The network's number follows.
fn pins(to: TapTo) -> &'static [&'static str] {
    match to {
        TapTo::Host => &["host-egress-", "host-ingress-", "host-device-"],
        TapTo::Uplink => &["uplink-ingress-", "uplink-egress-", "uplink-device-"],
    }
}

fn pin_paths(dir: &Path, to: TapTo, network: u32) -> impl Iterator<Item = PathBuf> {
    pins(to)
        .iter()
        .map(move |name| dir.join(format!("{name}{network}")))
}

impl TapAccess {
    /// Connects a network or queues, by the addresses or filters of `program`, with the host or the wire: frames pass
    /// between the interface with index `uplink`, which the program is for, and the tap `device`.
    ///
    /// # Errors
    /// The kernel refuses it; nothing is attached then.
    pub fn attach(
        program: &Program,
        to: TapTo,
        user: TapUser,
        (uplink, device): (u32, TapDevice),
        hook: Hook,
    ) -> anyhow::Result<Self> {
        let network = user.number();
        let (loaded, _) = messages_of(|| load(program, to, user, (uplink, device)));
        let loaded = loaded.context("cannot load the programs between a tap and the uplink")?;
        let place = |ifindex, at| Place {
            ifindex,
            at,
            handle: to.handle(network),
        };
        // The program that takes frames from the tap first, the one that sends frames to it last.
        let mut attachments = vec![attach_at(
            loaded.at_tap.as_fd(),
            place(device.index, TC_INGRESS),
            "ingress of the tap",
            hook,
        )?];
        attachments.push(attach_at(
            loaded.to_device.as_fd(),
            place(device.index, TC_EGRESS),
            "egress of the tap",
            hook,
        )?);
        let at = match to {
            TapTo::Host => "egress of the uplink",
            TapTo::Uplink => "ingress of the uplink",
        };
        let at_uplink = attach_at(
            loaded.at_uplink.as_fd(),
            place(uplink, to.uplink_hook()),
            at,
            hook,
        )?;
        attachments.insert(0, at_uplink);
        Ok(Self {
            to,
            network,
            attachments,
            wire: loaded.wire,
        })
    }

    /// Has a bridge, of which this tap to the host is a port, get guests' questions for MAC addresses (ARP, ND), which it
    /// can answer or send on. `wire`: index of the network's tap to the wire, whose copies of them are dropped; 0: no
    /// bridge gets them.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn set_wire(&self, wire: u32) -> libbpf_rs::Result<()> {
        map::set(&self.wire, &0u32, &wire)
    }

    /// Whether all programs are still attached: other processes can detach a link, and remove a filter or its qdisc.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.attachments.iter().all(Attachment::is_there)
    }

    /// Whether a link was detached. The kernel sends no notification of that, but does for a removed filter.
    #[must_use]
    pub fn has_detached_link(&self) -> bool {
        self.attachments.iter().any(Attachment::is_detached_link)
    }

    /// Makes the attachments outlive this value and the process: pins links into `dir`, and replaces a
    /// predecessor's. [`TapAccess::detach`] or [`detach_tap`] removes them.
    ///
    /// # Errors
    /// The kernel's; then the attachments end with this value.
    pub fn pin(&mut self, dir: &Path) -> io::Result<()> {
        let paths = pin_paths(dir, self.to, self.network);
        for (attachment, path) in self.attachments.iter_mut().zip(paths) {
            if let AttachedBy::Link(link) = &attachment.by {
                unpin(&path)?;
                link::pin(link.as_fd(), &path)?;
            }
            attachment.stays = true;
        }
        Ok(())
    }

    /// Detaches the programs, even if they are pinned in `dir`.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn detach(mut self, dir: Option<&Path>) -> io::Result<()> {
        for attachment in &mut self.attachments {
            attachment.stays = false;
        }
        dir.map_or(Ok(()), |dir| unpin_all(dir, self.to, self.network))
    }
}

/// Detaches the programs that another process left attached for the tap of a network: links pinned in `dir`,
/// and a filter at the interface with index `uplink`.
///
/// # Errors
/// An error of the kernel.
pub fn detach_tap(dir: Option<&Path>, to: TapTo, network: u32, uplink: u32) -> io::Result<()> {
    remove_filter(Place {
        ifindex: uplink,
        at: to.uplink_hook(),
        handle: to.handle(network),
    });
    dir.map_or(Ok(()), |dir| unpin_all(dir, to, network))
}

/// Numbers of the networks whose links for taps of this kind are pinned in `dir`.
#[must_use]
pub fn pinned_taps(dir: &Path, to: TapTo) -> Vec<u32> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let number = |name: &str| {
        pins(to)
            .iter()
            .find_map(|pin| name.strip_prefix(pin)?.parse().ok())
    };
    entries
        .filter_map(|entry| number(entry.file_name().to_str()?))
        .collect()
}

/// Destination and network number of the tap whose filter has this handle; `None`: the filter is not ours.
#[must_use]
pub fn network_of_filter(handle: u32) -> Option<(TapTo, u32)> {
    let network = handle & 0xffff;
    let to = TapTo::ALL.into_iter().find(|to| to.handle(network) == handle)?;
    Some((to, network))
}

fn unpin_all(dir: &Path, to: TapTo, network: u32) -> io::Result<()> {
    pin_paths(dir, to, network).try_for_each(|path| unpin(&path))
}

/// Detaches the link pinned at `path`, if there is one, and removes the pin.
fn unpin(path: &Path) -> io::Result<()> {
    link::detach_pinned(path)?;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Attaches a program by a link, or else as a filter. `at`: the hook, in words.
fn attach_at(
    program: BorrowedFd<'_>,
    place: Place,
    at: &'static str,
    hook: Hook,
) -> anyhow::Result<Attachment> {
    let ifindex = place.ifindex;
    let attach_type = match place.at {
        TC_EGRESS => libbpf_sys::BPF_TCX_EGRESS,
        _ => libbpf_sys::BPF_TCX_INGRESS,
    };
    let failed = || {
        format!(
            "cannot attach what joins a tap with the uplink to the {at}, which takes tcx (Linux 6.6) or the modules \
             sch_ingress and cls_bpf"
        )
    };
    let attachment = |by| Attachment { by, stays: false };
    if hook == Hook::Best {
        // First at its hook, like an XDP program: another program before it could pass the frame to the host.
        match link::create_at(program, ifindex, attach_type, libbpf_sys::BPF_F_BEFORE) {
            // No such kind of link: before Linux 6.6.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            linked => {
                return linked
                    .map(|link| attachment(AttachedBy::Link(link)))
                    .with_context(failed);
            }
        }
    }
    attach_filter(program, place).with_context(failed)?;
    Ok(attachment(AttachedBy::Filter(place)))
}

impl Attachment {
    /// Whether the program is still there. A failed query of a link counts as yes, so that none is attached twice.
    fn is_there(&self) -> bool {
        match &self.by {
            AttachedBy::Link(_) => !self.is_detached_link(),
            AttachedBy::Filter(place) => has_filter(*place),
        }
    }

    /// A link that was detached, or whose interface is gone, has no interface (`tcx_link_fill_info`, kernel/bpf/tcx.c).
    fn is_detached_link(&self) -> bool {
        let AttachedBy::Link(link) = &self.by else {
            return false;
        };
        let (info, _) = messages_of(|| LinkInfo::from_fd(link.as_fd()));
        matches!(info, Ok(LinkInfo { info: LinkTypeInfo::Tcx(tcx), .. }) if tcx.ifindex == 0)
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        if let (&AttachedBy::Filter(place), false) = (&self.by, self.stays) {
            remove_filter(place);
        }
    }
}

struct Loaded {
    at_uplink: OwnedFd,
    at_tap: OwnedFd,
    /// For the other hook of the tap.
    to_device: OwnedFd,
    wire: MapHandle,
}

fn load(
    program: &Program,
    to: TapTo,
    user: TapUser,
    (uplink, device): (u32, TapDevice),
) -> libbpf_rs::Result<Loaded> {
    let is_network = matches!(user, TapUser::Network(_));
    let mut storage = MaybeUninit::uninit();
    let mut open = TapSkelBuilder::default().open(&mut storage)?;
    if let Some(values) = open.maps.rodata_data.as_deref_mut() {
        values.tap_network = user.number();
        if let TapUser::Queues { count, .. } = user {
            values.tap_queues = count;
        }
        values.tap_uplink = uplink;
        (values.tap_device, values.tap_mac) = (device.index, device.mac);
        values.tap_marks = (program.mode() == Mode::Tap).into();
    }
    open.progs.to_network.set_autoload(to == TapTo::Host);
    open.progs.to_host.set_autoload(to == TapTo::Host);
    open.progs.to_host_device.set_autoload(to == TapTo::Host);
    open.progs
        .from_uplink
        .set_autoload(to == TapTo::Uplink && is_network);
    open.progs.from_queues.set_autoload(!is_network);
    open.progs.to_device.set_autoload(to == TapTo::Uplink);
    let maps = &mut open.maps;
    maps.steer_stations
        .reuse_fd(program.maps.networks.stations.as_fd())?;
    maps.steer_limits.reuse_fd(program.maps.networks.limits.as_fd())?;
    maps.steer_queues.reuse_fd(program.maps.queues.as_fd())?;
    maps.steer_entries.reuse_fd(program.maps.entries.as_fd())?;
    maps.steer_counts.reuse_fd(program.maps.counts.as_fd())?;
    let skel = open.load()?;
    let owned = |program: &ProgramMut<'_>| program.as_fd().try_clone_to_owned();
    Ok(match to {
        TapTo::Host => Loaded {
            at_uplink: owned(&skel.progs.to_network)?,
            at_tap: owned(&skel.progs.to_host)?,
            to_device: owned(&skel.progs.to_host_device)?,
            wire: MapHandle::try_from(&skel.maps.tap_wire)?,
        },
        TapTo::Uplink => Loaded {
            at_uplink: match is_network {
                true => owned(&skel.progs.from_uplink)?,
                false => owned(&skel.progs.from_queues)?,
            },
            at_tap: send::load(uplink, None)?,
            to_device: owned(&skel.progs.to_device)?,
            wire: MapHandle::try_from(&skel.maps.tap_wire)?,
        },
    })
}
