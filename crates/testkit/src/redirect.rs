//! An XDP program that gives every frame to the socket of its queue.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use libbpf_rs::libbpf_sys as sys;

use crate::bpf;

/// The program on an interface; detached when dropped.
#[must_use]
pub struct Redirect {
    map: OwnedFd,
    _program: OwnedFd,
    _link: OwnedFd,
}

impl Redirect {
    /// Loads the program, with support for frames in several buffers, and attaches it natively or in skb mode.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn attach(ifindex: u32, native: bool) -> io::Result<Self> {
        let map = bpf::make_map(sys::BPF_MAP_TYPE_XSKMAP, 64)?;
        let program = bpf::load_redirect(&map, 0, true)?;
        let link = bpf::attach(&program, ifindex, native)?;
        Ok(Self {
            map,
            _program: program,
            _link: link,
        })
    }

    /// From now on the frames of `queue` go to `socket`.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn steer(&self, queue: u32, socket: impl AsFd) -> io::Result<()> {
        bpf::put(&self.map, queue, socket)
    }
}
