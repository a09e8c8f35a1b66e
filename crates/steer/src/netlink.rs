//! The kernel's netlink messages about a rejected program.
//!
//! `bpf_link_create` returns an errno without the kernel's explanation (only a tracepoint has it); attaching
//! by netlink returns it. So after a rejection the same attachment is tried by netlink, for the text only.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use libbpf_rs::{Xdp, XdpFlags, libbpf_sys};

use crate::capture::{kernel_message, messages_of};
use crate::mode::Mode;

/// Tries by netlink the attachment that `BPF_LINK_CREATE` just rejected, for the kernel's explanation.
///
/// If it succeeds, because the obstacle is gone meanwhile, it is undone at once.
pub(crate) fn refusal_of(program: BorrowedFd<'_>, ifindex: u32, mode: Mode) -> Option<String> {
    let target = as_int(ifindex).ok()?;
    let flags = XdpFlags::from_bits_retain(mode.flag()) | XdpFlags::UPDATE_IF_NOEXIST;
    let (attached, said) = messages_of(|| Xdp::new(program).attach(target, flags));
    if attached.is_ok() {
        let opts = libbpf_sys::bpf_xdp_attach_opts {
            sz: size_of::<libbpf_sys::bpf_xdp_attach_opts>() as libbpf_sys::size_t,
            old_prog_fd: program.as_raw_fd(),
            ..Default::default()
        };
        // SAFETY: opts is valid for the call and contains its own size. With old_prog_fd only our program is detached.
        let (_, _) =
            messages_of(|| unsafe { libbpf_sys::bpf_xdp_detach(target, mode.flag(), &raw const opts) });
        return None;
    }
    kernel_message(&said)
}

/// An interface's index in the type of libbpf.
pub(crate) fn as_int(ifindex: u32) -> io::Result<i32> {
    i32::try_from(ifindex).map_err(|_| io::Error::from_raw_os_error(libc::ENODEV))
}
