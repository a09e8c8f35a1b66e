//! Ways between the uplink of a network and a device (a tap, or one end of a veth pair) by which frames go to and from
//! who serves the network: the programs of `bpf/tap.bpf.c`. One is to the host, as one more receiver of the network;
//! where no XDP program is on the uplink, another is to the wire.
//!
//! They hang on tcx links, which go with the [`TapAccess`] or the process, unless they are pinned
//! ([`TapAccess::pin`]). Before Linux 6.6, which has none, they are filters of the qdisc clsact: these stay when the
//! process is killed, and who comes next puts its own in their place, or removes them ([`detach_tap`]). A clsact that
//! was not there stays, without filters, as nobody can tell whether others use it by then.
//!
//! The device is its maker's. Frames come to it with checksums unfinished, packets uncut and VLAN tags beside them, as
//! far as its features say that it takes them so.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{TC_EGRESS, TC_INGRESS, TcAttachPoint, libbpf_sys};

use crate::capture::messages_of;
use crate::filter::{Place, attach_filter, remove_filter};
use crate::link;
use crate::mode::Mode;
use crate::program::Program;
use crate::send;
use crate::skel::tap::TapSkelBuilder;

/// Where a tap of a network leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TapTo {
    /// To the host, over the uplink.
    Host,
    /// To whoever is reached by the uplink.
    Uplink,
}

/// Why a tap leads nowhere.
///
/// `source` is what the kernel or libbpf returned.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum TapError {
    /// The kernel refused the programs.
    #[error("cannot load the programs between a tap and the uplink")]
    Load {
        /// libbpf's messages; may be empty.
        detail: String,
        #[source]
        source: libbpf_rs::Error,
    },
    /// It refused one of them at its place.
    #[error(
        "cannot attach what joins a tap with the uplink to the {at}, which takes tcx (Linux 6.6) or the modules \
         sch_ingress and cls_bpf"
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
pub enum Hook {
    /// On tcx links, or where there are none on clsact.
    Best,
    /// On clsact.
    Clsact,
}

/// A tap that leads somewhere, for as long as this value lives, or longer ([`TapAccess::pin`]).
#[derive(Debug)]
pub struct TapAccess {
    to: TapTo,
    network: u32,
    // First what sends frames to the network.
    from: Hung,
    towards: Hung,
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
const HANDLES: [(TapTo, u32); 2] = [(TapTo::Host, 0x7661_0000), (TapTo::Uplink, 0x7662_0000)];

/// Names of pinned links: at the uplink, and at the tap. What begins so belongs to the network whose number follows.
fn pins(to: TapTo) -> [&'static str; 2] {
    match to {
        TapTo::Host => ["host-egress-", "host-ingress-"],
        TapTo::Uplink => ["uplink-ingress-", "uplink-egress-"],
    }
}

fn pin_paths(dir: &Path, to: TapTo, network: u32) -> [PathBuf; 2] {
    pins(to).map(|name| dir.join(format!("{name}{network}")))
}

/// Where at the uplink frames are taken for the network.
fn place_of(to: TapTo) -> TcAttachPoint {
    match to {
        TapTo::Host => TC_EGRESS,
        TapTo::Uplink => TC_INGRESS,
    }
}

impl TapAccess {
    /// Joins the network of this number, whose program is `program`, by a `device` with the host, or with the wire:
    /// frames go between the interface with index `uplink`, which the program is for, and the device.
    ///
    /// # Errors
    /// [`TapError`]; nothing is attached then.
    pub fn attach(
        program: &Program,
        to: TapTo,
        network: u32,
        (uplink, device): (u32, u32),
        hook: Hook,
    ) -> Result<Self, TapError> {
        let (loaded, detail) = messages_of(|| load(program, to, network, (uplink, device)));
        let loaded = loaded.map_err(|source| TapError::Load { detail, source })?;
        let place = |ifindex, at| Place {
            ifindex,
            at,
            handle: handle(to, network),
        };
        // First the way out: a network that only hears is no harm.
        let towards = hang(
            loaded.towards.as_fd(),
            place(device, TC_INGRESS),
            "ingress of the tap",
            hook,
        )?;
        let at = match to {
            TapTo::Host => "egress of the uplink",
            TapTo::Uplink => "ingress of the uplink",
        };
        let from = hang(loaded.from.as_fd(), place(uplink, place_of(to)), at, hook)?;
        Ok(Self {
            to,
            network,
            from,
            towards,
        })
    }

    /// Lets it outlive this value and the process: links are pinned into `dir`, in the place of those of a predecessor,
    /// which this one took over from. Who wants it off calls [`TapAccess::detach`] or [`detach_tap`].
    ///
    /// # Errors
    /// The kernel's; it goes with this value then.
    pub fn pin(&mut self, dir: &Path) -> io::Result<()> {
        let hung = [&mut self.from, &mut self.towards];
        for (hung, path) in hung.into_iter().zip(pin_paths(dir, self.to, self.network)) {
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
        (self.from.stays, self.towards.stays) = (false, false);
        dir.map_or(Ok(()), |dir| unpin_all(dir, self.to, self.network))
    }
}

/// Takes off what somebody has left who let a tap of the network of this number lead there: links that are pinned in
/// `dir`, and a filter at the interface with index `uplink`.
///
/// # Errors
/// The kernel's.
pub fn detach_tap(dir: Option<&Path>, to: TapTo, network: u32, uplink: u32) -> io::Result<()> {
    remove_filter(Place {
        ifindex: uplink,
        at: place_of(to),
        handle: handle(to, network),
    });
    dir.map_or(Ok(()), |dir| unpin_all(dir, to, network))
}

/// Numbers of the networks whose links to there are pinned in `dir`.
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

/// The network whose filter at an uplink has this handle, if it is one of ours, and where its tap leads.
#[must_use]
pub fn network_of_filter(handle: u32) -> Option<(TapTo, u32)> {
    let (number, network) = (handle & 0xffff_0000, handle & 0xffff);
    let (to, _) = HANDLES.into_iter().find(|&(_, its)| its == number)?;
    Some((to, network))
}

fn handle(to: TapTo, network: u32) -> u32 {
    let number = HANDLES.into_iter().find(|&(its, _)| its == to);
    number.map_or(0, |(_, number)| number | network)
}

fn unpin_all(dir: &Path, to: TapTo, network: u32) -> io::Result<()> {
    pin_paths(dir, to, network)
        .iter()
        .try_for_each(|path| unpin(path))
}

/// Takes off the link that is pinned there, if there is one.
fn unpin(path: &Path) -> io::Result<()> {
    link::detach_pinned(path)?;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// `at`: the place in words.
fn hang(program: BorrowedFd<'_>, place: Place, at: &'static str, hook: Hook) -> Result<Hung, TapError> {
    let ifindex = place.ifindex;
    let attach_type = match place.at {
        TC_EGRESS => libbpf_sys::BPF_TCX_EGRESS,
        _ => libbpf_sys::BPF_TCX_INGRESS,
    };
    let failed = |source| TapError::Attach { at, source };
    let hung = |on| Hung { on, stays: false };
    if hook == Hook::Best {
        match link::create_at(program, ifindex, attach_type, 0) {
            // No such kind of link: before Linux 6.6.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            linked => return linked.map(|link| hung(Hold::Link(link))).map_err(failed),
        }
    }
    attach_filter(program, place).map_err(failed)?;
    Ok(hung(Hold::Filter(place)))
}

impl Drop for Hung {
    fn drop(&mut self) {
        if let (&Hold::Filter(place), false) = (&self.on, self.stays) {
            remove_filter(place);
        }
    }
}

struct Loaded {
    from: OwnedFd,
    towards: OwnedFd,
}

fn load(
    program: &Program,
    to: TapTo,
    network: u32,
    (uplink, device): (u32, u32),
) -> libbpf_rs::Result<Loaded> {
    let mut storage = MaybeUninit::uninit();
    let mut open = TapSkelBuilder::default().open(&mut storage)?;
    if let Some(values) = open.maps.rodata_data.as_deref_mut() {
        values.tap_network = network;
        values.tap_uplink = uplink;
        values.tap_device = device;
        values.tap_marks = (program.mode() == Mode::Tap).into();
    }
    open.progs.to_network.set_autoload(to == TapTo::Host);
    open.progs.to_host.set_autoload(to == TapTo::Host);
    open.progs.from_uplink.set_autoload(to == TapTo::Uplink);
    open.maps
        .steer_stations
        .reuse_fd(program.networks.stations.as_fd())?;
    let skel = open.load()?;
    let (from, towards) = match to {
        TapTo::Host => (
            &skel.progs.to_network,
            skel.progs.to_host.as_fd().try_clone_to_owned()?,
        ),
        TapTo::Uplink => (&skel.progs.from_uplink, send::load(uplink, None)?),
    };
    Ok(Loaded {
        from: from.as_fd().try_clone_to_owned()?,
        towards,
    })
}
