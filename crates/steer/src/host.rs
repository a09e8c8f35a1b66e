//! The host as one more receiver of a network: the programs of `bpf/host.bpf.c`, between the uplink and one end of a veth
//! pair.
//!
//! They hang on tcx links, which go with the [`HostAccess`] or the process. Before Linux 6.6, which has none, they are
//! filters of the qdisc clsact: these stay when the process is killed, and who comes next puts its own in their place.
//! A clsact that was not there stays, without filters, as nobody can tell whether others use it by then.
//!
//! The pair is its maker's. Its host end must leave nothing to its other end, where XDP takes frames as they are:
//! segmentation, checksums and VLAN tags beside frames are switched off on it (`tso`, `gso`, `tx`, `txvlan`), and the
//! kernel does all of that before it hands a frame over.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{TC_EGRESS, TC_INGRESS, TcAttachPoint, TcHook, TcHookBuilder, libbpf_sys};

use crate::capture::messages_of;
use crate::link;
use crate::netlink::as_int;
use crate::program::Program;
use crate::skel::host::HostSkelBuilder;

/// Why host and network are not joined.
///
/// `ifindex` is the interface's index; `source` is what the kernel or libbpf returned.
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
    #[error("cannot attach to interface {ifindex} what joins host and network")]
    Attach {
        ifindex: u32,
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

/// Host and network, joined for as long as this value lives.
#[derive(Debug)]
pub struct HostAccess {
    // First what sends frames to the network.
    _egress: Hung,
    _ingress: Hung,
}

#[derive(Debug)]
enum Hung {
    Link(#[allow(dead_code, reason = "held open")] OwnedFd),
    Filter(TcHook),
}

/// Of our filters, so that the next ones take the place of those that a process left which was killed.
const HANDLE: u32 = 0x7661_7801;
const PRIORITY: u32 = 1;

impl HostAccess {
    /// Joins the host with the network of this number, whose program is `program`: frames go between the interface with
    /// index `uplink`, which the program is on, and the veth `host_end`.
    ///
    /// # Errors
    /// [`HostError`]; nothing is attached then.
    pub fn attach(
        program: &Program,
        network: u32,
        uplink: u32,
        host_end: u32,
        hook: HostHook,
    ) -> Result<Self, HostError> {
        let (loaded, detail) = messages_of(|| load(program, network, uplink, host_end));
        let loaded = loaded.map_err(|source| HostError::Load { detail, source })?;
        // First the way to the host: a network that only hears is no harm.
        let ingress = hang(loaded.to_host.as_fd(), host_end, TC_INGRESS, hook)?;
        let egress = hang(loaded.to_network.as_fd(), uplink, TC_EGRESS, hook)?;
        Ok(Self {
            _egress: egress,
            _ingress: ingress,
        })
    }
}

fn hang(program: BorrowedFd<'_>, ifindex: u32, at: TcAttachPoint, hook: HostHook) -> Result<Hung, HostError> {
    let attach_type = match at {
        TC_EGRESS => libbpf_sys::BPF_TCX_EGRESS,
        _ => libbpf_sys::BPF_TCX_INGRESS,
    };
    let failed = |source| HostError::Attach { ifindex, source };
    if hook == HostHook::Best {
        match link::create_at(program, ifindex, attach_type, 0) {
            // No such kind of link: before Linux 6.6.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            linked => return linked.map(Hung::Link).map_err(failed),
        }
    }
    let index = as_int(ifindex).map_err(failed)?;
    let (attached, _) = messages_of(|| {
        let mut filter = TcHookBuilder::new(program)
            .ifindex(index)
            .replace(true)
            .handle(HANDLE)
            .priority(PRIORITY)
            .hook(at);
        // There already is as good.
        filter.create()?;
        filter.attach()
    });
    attached
        .map(Hung::Filter)
        .map_err(|error| failed(io::Error::other(error)))
}

impl Drop for Hung {
    fn drop(&mut self) {
        if let Self::Filter(filter) = self {
            // It is gone with its interface, or is replaced by the next one.
            let _ = messages_of(|| filter.detach());
        }
    }
}

struct Loaded {
    to_network: OwnedFd,
    to_host: OwnedFd,
}

fn load(program: &Program, network: u32, uplink: u32, host_end: u32) -> libbpf_rs::Result<Loaded> {
    let mut storage = MaybeUninit::uninit();
    let mut open = HostSkelBuilder::default().open(&mut storage)?;
    if let Some(values) = open.maps.rodata_data.as_deref_mut() {
        values.host_network = network;
        values.host_uplink = uplink;
        values.host_end = host_end;
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
