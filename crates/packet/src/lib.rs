//! Headers of frames, from Ethernet to TCP and UDP, and the offloads of network cards: the internet checksum,
//! segmenting GSO packets into frames for the wire, and coalescing received frames into GSO packets. Pure functions on
//! bytes; no I/O, no dependency on virtio beyond the ten bytes of its header.
//!
//! # Headers
//! 1. [`ethertype`], [`protocol`], [`icmp`]: numbers. [`fields`]: offsets.
//! 2. [`ethernet`]: addresses, VLAN tags, LLC; what a frame carries.
//! 3. [`ip`]: IPv4, IPv6 and its extension headers; what a packet carries. [`arp`]: ARP. [`icmp`]: neighbour discovery.
//! 4. [`layers`]: where the headers of a TCP or UDP packet begin, for offloads.
//! 5. [`tunnel`]: the headers of VXLAN and Geneve; partial checksums of packets inside.
//!
//! Callers choose how strict a parser is: which tags it skips ([`ethernet::Skip`]), which extension headers it skips
//! ([`ip::Follow`]), and whether the length field must be right ([`ip::Span::packet`]) or is a hint.
//!
//! # Offloads
//! 1. [`checksum`]: full, partial and incremental.
//! 2. [`verify`]: the state of a received packet's checksum.
//! 3. [`coalesce`]: consecutive segments of a flow made into GSO packets, for a guest that takes them.
//! 4. [`segment`]: a guest's request ([`segment::Request`]), and the resulting frames ([`segment::Plan`]).
//!
//! # Segmenting a GSO packet
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
//! Every byte may come from a hostile guest: bytes that cannot be handled result in a [`segment::Malformed`],
//! a `None` or an [`checksum::OutOfFrame`], never a panic; work is bounded by the length of the frame.

// Tests that fuzz targets share name the crate as those do.
#[cfg(test)]
extern crate self as packet;

pub mod arp;
pub mod checksum;
pub mod coalesce;
pub mod ethernet;
pub mod ethertype;
pub mod fields;
pub mod icmp;
pub mod ip;
pub mod layers;
pub mod protocol;
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

/// Most bytes of headers that are read: two tags, IPv6 and TCP at their longest leave 134 for extension headers. This
/// bounds the work that a hostile sender can cause.
pub const HEADERS_MAX: usize = 256;

/// First bytes of a frame that contain all headers up to the ports, behind at most one VLAN tag, unless [`ip::is_long`].
pub const SHORT_HEAD: usize = 64;

/// `N` bytes of a frame from `at` on; `None`: the frame is too short.
#[inline(always)]
pub fn bytes<const N: usize>(frame: &[u8], at: usize) -> Option<&[u8; N]> {
    frame.get(at..at + N)?.first_chunk()
}

/// A number of 16 bits in network order; `None`: the frame ends before.
#[inline(always)]
pub fn word(frame: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes(frame, at)?))
}

/// Bytes of headers that were parsed.
///
/// # Panics
/// If the headers end before.
#[inline]
fn field<const N: usize>(headers: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&headers[at..at + N]);
    field
}

/// A number of 16 bits in headers that were parsed.
#[inline]
fn be16(headers: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(field(headers, at))
}

/// A number of 32 bits in headers that were parsed.
#[inline]
fn be32(headers: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(field(headers, at))
}

#[inline]
fn put16(headers: &mut [u8], at: usize, value: u16) {
    headers[at..at + 2].copy_from_slice(&value.to_be_bytes());
}
