//! What the kernel tests share: a veth pair, a UMEM.

#![allow(dead_code, reason = "each test file uses a part")]

pub(crate) mod map;
pub(crate) mod rig;

use std::sync::Arc;

use testkit::privilege::{Need, have};
use testkit::{NetNs, PacketPort, VethPair, wait};
use xsk::{FramePool, OwnMemory, Umem};

/// A veth pair: its near end for the AF_XDP socket, its far end for a packet socket.
pub(crate) struct Veth {
    pair: VethPair,
    /// Index of the near end.
    pub(crate) near: u32,
}

impl Veth {
    /// A packet socket on the far end.
    pub(crate) fn peer(&self) -> PacketPort {
        PacketPort::open(&self.pair.far, VethPair::WIRE)
    }

    /// Makes a second pair in the same namespaces: index of its near end, and a packet socket on its far end.
    pub(crate) fn second(&self) -> (u32, PacketPort) {
        let (nic, wire) = ("nic1", "wire1");
        self.pair.join_as(nic, wire, 1, 1500);
        let show = ["-o", "link", "show", nic];
        let has_carrier = || self.pair.near.output_of("ip", &show).contains("LOWER_UP");
        assert!(wait::until(wait::SOON, has_carrier), "no carrier");
        (
            self.pair.near.index_of(nic),
            PacketPort::open(&self.pair.far, wire),
        )
    }

    /// The namespace of the near end.
    pub(crate) fn near_namespace(&self) -> &NetNs {
        &self.pair.near
    }
}

/// Runs `claim` on a thread in the near namespace of a fresh veth pair with `queues` queues and an MTU of `mtu` bytes.
pub(crate) fn with_veth(queues: u32, mtu: u32, claim: impl FnOnce(&Veth) + Send) {
    if !have(&[Need::Root]) {
        return;
    }
    let pair = VethPair::with(queues, mtu);
    let veth = Veth {
        near: pair.near.index_of(VethPair::NIC),
        pair,
    };
    let show = ["-o", "link", "show", VethPair::NIC];
    let has_carrier = || veth.near_namespace().output_of("ip", &show).contains("LOWER_UP");
    assert!(wait::until(wait::SOON, has_carrier), "no carrier");
    veth.near_namespace().enter(|| claim(&veth));
}

/// A UMEM of our own, 2048-byte chunks, and all its frames.
pub(crate) fn own_umem(chunks: usize) -> (Umem, FramePool) {
    let umem = Umem::aligned(Arc::new(OwnMemory::new(chunks * 2048).unwrap()), 2048, 0).unwrap();
    let pool = umem.all_frames().unwrap().collect();
    (umem, pool)
}
