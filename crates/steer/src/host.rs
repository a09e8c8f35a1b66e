//! The host as one more receiver of a network: the programs of `bpf/host.bpf.c`, between the uplink and a device
//! (a tap, or one end of a veth pair) by which frames go to and from who serves the network.
//!
//! They hang on tcx links, which go with the [`HostAccess`] or the process, unless they are pinned
//! ([`HostAccess::pin`]). Before Linux 6.6, which has none, they are filters of the qdisc clsact: these stay when the
//! process is killed, and who comes next puts its own in their place, or removes them ([`detach_host`]). A clsact that
//! was not there stays, without filters, as nobody can tell whether others use it by then.
//!
//! The device is its maker's. Frames come to it with checksums unfinished, packets uncut and VLAN tags beside them, as
//! far as its features say that it takes them so.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{TC_EGRESS, TC_INGRESS, TcAttachPoint, TcHook, TcHookBuilder, libbpf_sys};

use crate::capture::messages_of;
use crate::link;
use crate::netlink::as_int;
use crate::program::Program;
use crate::skel::host::HostSkelBuilder;

/// Why host and network are not joined.
///
/// `source` is what the kernel or libbpf returned.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum HostError {
    /// The kernel refused the programs.
    #[error("cannot load the programs between host and network")]
    Load {
        /// libbpf's messages; may be empty.
        detail: String,
        #[source]
        source: libbpf_rs::Error,
    },
    /// It refused one of them at its place.
    #[error(
        "cannot attach what joins host and network to the {at}, which takes tcx (Linux 6.6) or the modules sch_ingress \
         and cls_bpf"
    )]
    Attach {
        /// One of its two places, in words: the same each time, whatever index a device has that was made for it.
        at: &'static str,
        #[source]
        source: io::Error,
    },
}

/// Where the programs hang.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostHook {
    /// On tcx links, or where there are none on clsact.
    Best,
    /// On clsact.
    Clsact,
}

/// Host and network, joined for as long as this value lives, or longer ([`HostAccess::pin`]).
#[derive(Debug)]
pub struct HostAccess {
    network: u32,
    // First what sends frames to the network.
    egress: Hung,
    ingress: Hung,
}

#[derive(Debug)]
struct Hung {
    on: Hold,
    /// It outlives this value.
    stays: bool,
}

#[derive(Debug)]
enum Hold {
    Link(OwnedFd),
    Filter(Place),
}

/// Of our filters, so that the next ones take the place of those that a process left which was killed; and the
/// network's number, so that several have theirs on one interface.
const HANDLE: u32 = 0x7661_0000;
const PRIORITY: u32 = 1;

/// Names of pinned links: what begins so belongs to the network whose number follows.
const PINS: [&str; 2] = ["host-egress-", "host-ingress-"];

fn pin_paths(dir: &Path, network: u32) -> [PathBuf; 2] {
    PINS.map(|name| dir.join(format!("{name}{network}")))
}

impl HostAccess {
    /// Joins the host with the network of this number, whose program is `program`: frames go between the interface with
    /// index `uplink`, which the program is on, and this `device`.
    ///
    /// # Errors
    /// [`HostError`]; nothing is attached then.
    pub fn attach(
        program: &Program,
        network: u32,
        uplink: u32,
        device: u32,
        hook: HostHook,
    ) -> Result<Self, HostError> {
        let (loaded, detail) = messages_of(|| load(program, network, uplink, device));
        let loaded = loaded.map_err(|source| HostError::Load { detail, source })?;
        // First the way to the host: a network that only hears is no harm.
        let place = |ifindex, at| Place {
            ifindex,
            at,
            handle: HANDLE | network,
        };
        let ingress = hang(loaded.to_host.as_fd(), place(device, TC_INGRESS), hook)?;
        let egress = hang(loaded.to_network.as_fd(), place(uplink, TC_EGRESS), hook)?;
        Ok(Self {
            network,
            egress,
            ingress,
        })
    }

    /// Lets it outlive this value and the process: links are pinned into `dir`, in the place of those of a predecessor,
    /// which this one took over from. Who wants it off calls [`HostAccess::detach`] or [`detach_host`].
    ///
    /// # Errors
    /// The kernel's; it goes with this value then.
    pub fn pin(&mut self, dir: &Path) -> io::Result<()> {
        let [of_egress, of_ingress] = pin_paths(dir, self.network);
        for (hung, path) in [(&mut self.egress, of_egress), (&mut self.ingress, of_ingress)] {
            if let Hold::Link(link) = &hung.on {
                unpin(&path)?;
                link::pin(link.as_fd(), &path)?;
            }
            hung.stays = true;
        }
        Ok(())
    }

    /// Takes the programs off, also if they are pinned in `dir`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn detach(mut self, dir: Option<&Path>) -> io::Result<()> {
        (self.egress.stays, self.ingress.stays) = (false, false);
        dir.map_or(Ok(()), |dir| unpin_all(dir, self.network))
    }
}

/// Takes off what somebody has left who joined the host with the network of this number: links that are pinned in
/// `dir`, and a filter at the interface with index `uplink`.
///
/// # Errors
/// The kernel's.
pub fn detach_host(dir: Option<&Path>, network: u32, uplink: u32) -> io::Result<()> {
    remove_filter(Place {
        ifindex: uplink,
        at: TC_EGRESS,
        handle: HANDLE | network,
    });
    dir.map_or(Ok(()), |dir| unpin_all(dir, network))
}

/// Numbers of the networks whose links are pinned in `dir`.
#[must_use]
pub fn pinned_hosts(dir: &Path) -> Vec<u32> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let number = |name: &str| PINS.iter().find_map(|pin| name.strip_prefix(pin)?.parse().ok());
    entries
        .filter_map(|entry| number(entry.file_name().to_str()?))
        .collect()
}

/// The network whose filter has this handle, if it is one of ours.
#[must_use]
pub fn network_of_filter(handle: u32) -> Option<u32> {
    (handle & HANDLE == HANDLE).then_some(handle & !HANDLE)
}

fn unpin_all(dir: &Path, network: u32) -> io::Result<()> {
    pin_paths(dir, network).iter().try_for_each(|path| unpin(path))
}

/// Takes off the link that is pinned there, if there is one.
fn unpin(path: &Path) -> io::Result<()> {
    link::detach_pinned(path)?;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Where a program goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) ifindex: u32,
    pub(crate) at: TcAttachPoint,
    /// Of a filter.
    pub(crate) handle: u32,
}

fn hang(program: BorrowedFd<'_>, place: Place, hook: HostHook) -> Result<Hung, HostError> {
    let Place { ifindex, at, .. } = place;
    let (attach_type, at) = match at {
        TC_EGRESS => (libbpf_sys::BPF_TCX_EGRESS, "egress of the uplink"),
        _ => (libbpf_sys::BPF_TCX_INGRESS, "ingress of the host's device"),
    };
    let failed = |source| HostError::Attach { at, source };
    let hung = |on| Hung { on, stays: false };
    if hook == HostHook::Best {
        match link::create_at(program, ifindex, attach_type, 0) {
            // No such kind of link: before Linux 6.6.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            linked => return linked.map(|link| hung(Hold::Link(link))).map_err(failed),
        }
    }
    attach_filter(program, place).map_err(failed)?;
    Ok(hung(Hold::Filter(place)))
}

/// Attaches a program as a filter of clsact, which is made if it is missing. The filter stays until somebody removes it
/// or the interface.
pub(crate) fn attach_filter(program: BorrowedFd<'_>, place: Place) -> io::Result<()> {
    let mut filter = filter(program, place)?;
    let (attached, _) = messages_of(|| {
        // There already is as good.
        filter.create()?;
        filter.attach()
    });
    attached.map(drop).map_err(io::Error::other)
}

fn filter(program: BorrowedFd<'_>, place: Place) -> io::Result<TcHook> {
    Ok(TcHookBuilder::new(program)
        .ifindex(as_int(place.ifindex)?)
        .replace(true)
        .handle(place.handle)
        .priority(PRIORITY)
        .hook(place.at))
}

/// Removes a filter of ours. It is gone with its interface, or is replaced by the next one.
fn remove_filter(place: Place) {
    // By its handle alone: what program it is nobody looks at.
    if let Ok(mut filter) = filter(io::stderr().as_fd(), place) {
        let _ = messages_of(|| filter.detach());
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        if let (&Hold::Filter(place), false) = (&self.on, self.stays) {
            remove_filter(place);
        }
    }
}

struct Loaded {
    to_network: OwnedFd,
    to_host: OwnedFd,
}

fn load(program: &Program, network: u32, uplink: u32, device: u32) -> libbpf_rs::Result<Loaded> {
    let mut storage = MaybeUninit::uninit();
    let mut open = HostSkelBuilder::default().open(&mut storage)?;
    if let Some(values) = open.maps.rodata_data.as_deref_mut() {
        values.host_network = network;
        values.host_uplink = uplink;
        values.host_device = device;
    }
    open.maps
        .steer_stations
        .reuse_fd(program.networks.stations.as_fd())?;
    let skel = open.load()?;
    Ok(Loaded {
        to_network: skel.progs.to_network.as_fd().try_clone_to_owned()?,
        to_host: skel.progs.to_host.as_fd().try_clone_to_owned()?,
    })
}
