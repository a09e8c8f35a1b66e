//! Frames whose VLAN tag is beside the frame, as from a VLAN device on a driver with `txvlan`: a program at the egress
//! of the interface, before all others, has the kernel put it there (`bpf_skb_vlan_push`).
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use libbpf_rs::libbpf_sys as sys;

use crate::{NetNs, PacketPort, bpf};

/// Its frames are tagged, for as long as it lives; those of other sockets are not.
#[must_use]
pub struct TaggedPort {
    port: PacketPort,
    _link: OwnedFd,
}

impl TaggedPort {
    /// At an interface, with tags of that type, 0x8100 or 0x88a8, and number. One at a time.
    ///
    /// # Panics
    /// If the kernel refuses it, for want of tcx (Linux 6.6) for example.
    pub fn on((netns, interface): (&NetNs, &str), kind: u16, vlan: u8) -> Self {
        let program = bpf::load_tagger(kind, vlan).expect("a program that tags");
        let index = netns.index_of(interface);
        let link = netns.enter(|| bpf::link(&program, index, sys::BPF_TCX_EGRESS, bpf::BPF_F_BEFORE));
        let port = PacketPort::open(netns, interface);
        let mark = 1u32;
        // SAFETY: the kernel reads four bytes of a live value.
        let marked = unsafe {
            libc::setsockopt(
                port.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_MARK,
                (&raw const mark).cast(),
                4,
            )
        };
        assert_eq!(marked, 0, "SO_MARK");
        Self {
            port,
            _link: link.expect("tcx"),
        }
    }

    /// What sends them.
    pub fn port(&self) -> &PacketPort {
        &self.port
    }
}
