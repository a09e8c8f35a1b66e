//! What network cards do for a TCP/IP stack, in software: the internet checksum, cutting a GSO packet into frames
//! that fit the wire, and making frames of the wire into GSO packets. Pure functions on bytes; no I/O, no
//! allocation, no dependency on virtio beyond the ten bytes of its header.
//!
//! # Layers
//! 1. [`checksum`]: full, partial and incremental.
//! 2. [`layers`]: where the layers of a frame begin, for both directions.
//! 3. [`verify`]: the state of a received packet's checksum.
//! 4. [`tunnel`]: the same of a packet inside VXLAN or Geneve.
//! 5. [`coalesce`]: consecutive segments of a flow made into GSO packets, for a guest that takes them.
//! 6. [`segment`]: a guest's request ([`segment::Request`]), and the resulting frames ([`segment::Plan`]).
//!
//! # A GSO packet, cut
//! ```
//! use packet::{checksum, segment::{Gso, GsoKind, Plan}};
//! # let mut frame = vec![0u8; 54 + 3000];
//! # frame[12..14].copy_from_slice(&[8, 0]);
//! # frame[14] = 0x45;
//! # frame[16..18].copy_from_slice(&3040u16.to_be_bytes());
//! # frame[23] = 6;
//! # frame[46] = 0x50;
//! # let partial = checksum::pseudo_v4([0; 4], [0; 4], 6, 3020).fold();
//! # frame[50..52].copy_from_slice(&partial.to_be_bytes());
//! // `frame` holds Ethernet, IPv4, TCP and 3000 bytes, its TCP checksum the sum of the pseudo-header.
//! let plan = Plan::new(&frame, frame.len() as u32, Gso { kind: GsoKind::Tcp4, ecn: false, size: 1460 })?;
//! assert_eq!(plan.segments(), 3);
//! for index in 0..plan.segments() {
//!     let payload = plan.payload(index);
//!     let mut segment = vec![0; plan.header_len()];
//!     plan.write_header(index, &mut segment);
//!     segment.extend(&frame[payload.start as usize..payload.end as usize]);
//!     checksum::complete(&mut segment, plan.checksum_at())?; // unless the NIC does it
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Trust
//! Every byte may come from a hostile guest: what cannot be handled is a [`segment::Malformed`], a `None` or an
//! [`checksum::OutOfFrame`], never a panic; work is bounded by the length of the frame.

pub mod checksum;
pub mod coalesce;
pub mod layers;
pub mod segment;
pub mod tunnel;
pub mod verify;

/// Values of a virtio-net header's `flags` and `gso_type` (VirtIO 1.3, 5.1.6; include/uapi/linux/virtio_net.h).
mod net_header {
    pub(crate) const NEEDS_CSUM: u8 = 1;
    pub(crate) const DATA_VALID: u8 = 2;
    pub(crate) const GSO_NONE: u8 = 0;
    pub(crate) const GSO_TCPV4: u8 = 1;
    pub(crate) const GSO_TCPV6: u8 = 4;
    pub(crate) const GSO_UDP_L4: u8 = 5;
    pub(crate) const GSO_ECN: u8 = 0x80;
}
