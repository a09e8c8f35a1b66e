//! Redirects frames written to a tap device to another interface, by the program in `bpf/send.bpf.c`.
//!
//! The program is attached to the device, by tcx without a link or, before Linux 6.6, as a filter of the
//! qdisc clsact. It is removed with the device.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use anyhow::Context;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{TC_INGRESS, libbpf_sys};

use crate::capture::messages_of;
use crate::filter::{Place, attach_filter};
use crate::link;
use crate::skel::send::SendSkelBuilder;

/// Redirects all frames written to the tap `device` to the interface `uplink`, both given by their indexes,
/// on transmit queue `queue` if that exists. Call it before the device is set up. It lasts until the device
/// is removed.
///
/// # Errors
/// The kernel refuses it; nothing is attached then.
pub fn attach_redirect(device: u32, uplink: u32, queue: u32) -> anyhow::Result<()> {
    let (loaded, _) = messages_of(|| load(uplink, Some(queue)));
    let program = loaded.context("cannot load the program that sends a tap's frames")?;
    let attached = match link::attach_without_link(program.as_fd(), device, libbpf_sys::BPF_TCX_INGRESS) {
        // No such hook: before Linux 6.6, or built without it.
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
    attached.context(
        "cannot attach the program for frames of a tap, which needs tcx (Linux 6.6) or the modules sch_ingress and cls_bpf",
    )
}

/// The program, for one transmit queue or any.
pub(crate) fn load(uplink: u32, queue: Option<u32>) -> libbpf_rs::Result<OwnedFd> {
    let mut storage = MaybeUninit::uninit();
    let mut open = SendSkelBuilder::default().open(&mut storage)?;
    if let Some(values) = open.maps.rodata_data.as_deref_mut() {
        values.send_uplink = uplink;
        values.send_queue = queue.map_or(0, |queue| queue.saturating_add(1));
    }
    let skel = open.load()?;
    Ok(skel.progs.to_uplink.as_fd().try_clone_to_owned()?)
}
