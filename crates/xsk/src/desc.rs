//! The descriptor of the rx and tx rings, as the kernel lays it out.

/// `struct xdp_desc`, `include/uapi/linux/if_xdp.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Descriptor {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) options: u32,
}

/// The frame goes on in the next descriptor (`XDP_PKT_CONTD`).
pub(crate) const CONTINUED: u32 = 1 << 0;
/// There is metadata before the frame (`XDP_TX_METADATA`).
pub(crate) const METADATA: u32 = 1 << 1;

const _: () = assert!(size_of::<Descriptor>() == 16 && align_of::<Descriptor>() == 8);
