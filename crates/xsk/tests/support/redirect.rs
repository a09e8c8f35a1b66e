//! Every frame to the socket of its queue. The examples use this file, too.

#[path = "bpf.rs"]
mod bpf;

use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// The program on an interface; detached when dropped.
pub(crate) struct Redirect {
    map: OwnedFd,
    _program: OwnedFd,
    _link: OwnedFd,
}

impl Redirect {
    /// Loads the program, with support for frames in several buffers, and attaches it.
    pub(crate) fn attach(ifindex: u32, native: bool) -> io::Result<Self> {
        let map = bpf::make_map(bpf::BPF_MAP_TYPE_XSKMAP, 64)?;
        let program = bpf::load_redirect(&map, 0, true)?;
        let link = bpf::attach(&program, ifindex, native)?;
        Ok(Self {
            map,
            _program: program,
            _link: link,
        })
    }

    /// From now on the frames of `queue` go to `socket`.
    pub(crate) fn steer(&self, queue: u32, socket: impl AsFd) -> io::Result<()> {
        bpf::put(&self.map, queue, socket)
    }
}
