//! What is written to a tap device leaves by another interface: the program of `bpf/send.bpf.c`.
//!
//! It hangs on the device, by tcx without a link or, before Linux 6.6, by a filter of the qdisc clsact, and goes with it.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{TC_INGRESS, libbpf_sys};

use crate::capture::messages_of;
use crate::host::{Place, attach_filter};
use crate::link;
use crate::skel::send::SendSkelBuilder;

/// Why what is written to a device leaves by no other.
///
/// `source` is what the kernel or libbpf returned.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum SendError {
    /// The kernel refused the program.
    #[error("cannot load the program that sends a tap's frames")]
    Load {
        /// libbpf's messages; may be empty.
        detail: String,
        #[source]
        source: libbpf_rs::Error,
    },
    /// It refused it at its place.
    #[error(
        "cannot attach the program that sends a tap's frames, which takes tcx (Linux 6.6) or the modules sch_ingress and \
         cls_bpf"
    )]
    Attach(#[source] io::Error),
}

/// Has all that is written to the tap `device`, named by its index, leave by the interface `uplink`, from that queue if
/// it has so many. As long as the device is there; it is to be down until then.
///
/// # Errors
/// [`SendError`]; nothing is attached then.
pub fn attach_redirect(device: u32, uplink: u32, queue: u32) -> Result<(), SendError> {
    let (loaded, detail) = messages_of(|| load(uplink, queue));
    let program = loaded.map_err(|source| SendError::Load { detail, source })?;
    let attached = match link::attach_without_link(program.as_fd(), device, libbpf_sys::BPF_TCX_INGRESS) {
        // No such place: before Linux 6.6.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => attach_filter(
            program.as_fd(),
            Place {
                ifindex: device,
                at: TC_INGRESS,
                handle: 1,
            },
        ),
        attached => attached,
    };
    attached.map_err(SendError::Attach)
}

fn load(uplink: u32, queue: u32) -> libbpf_rs::Result<OwnedFd> {
    let mut storage = MaybeUninit::uninit();
    let mut open = SendSkelBuilder::default().open(&mut storage)?;
    if let Some(values) = open.maps.rodata_data.as_deref_mut() {
        values.send_uplink = uplink;
        // 0: of no queue.
        values.send_queue = queue.saturating_add(1);
    }
    let skel = open.load()?;
    Ok(skel.progs.to_uplink.as_fd().try_clone_to_owned()?)
}
