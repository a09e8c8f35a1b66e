//! The frames that `txonly` sends: Ethernet, IPv4, UDP, a sequence number.
//!
//! ```text
//!   0  destination, source, 0x0800               Ethernet, 14 bytes
//!  14  198.18.0.1 → 198.18.0.2, protocol 17      IPv4, 20 bytes, RFC 2544's addresses for benchmarks
//!  34  port 9 → 9 (discard), checksum 0 = none   UDP, 8 bytes; RFC 768 allows it over IPv4
//!  42  sequence number, big-endian               8 bytes, counts up from 0 over the run
//!  50  bytes that count up                       to the frame's length
//! ```

use packet::checksum::Sum;
use packet::ethernet::HEADER_BYTES as ETHERNET;
pub(super) use packet::ethernet::Mac;
use packet::fields::ipv4;
use packet::{ethertype, protocol};

/// Where the source port stands, in bytes from the start.
pub(super) const SOURCE_PORT_AT: u64 = 34;
/// Source port of the first of several flows.
pub(super) const FIRST_SOURCE_PORT: u16 = 1024;
/// Where the sequence number stands, in bytes from the start.
pub(super) const SEQUENCE_AT: u64 = 42;

const IPV4: usize = ipv4::BYTES;

/// A frame of `len` bytes, sequence number 0. `len` is at least 60 and at most 65,535.
pub(super) fn template(to: Mac, from: Mac, len: u32) -> Vec<u8> {
    let ip_len = u16::try_from(len as usize - ETHERNET).unwrap_or(u16::MAX);
    let udp_len = ip_len.saturating_sub(IPV4 as u16);
    let mut frame = Vec::with_capacity(len as usize);
    frame.extend(to);
    frame.extend(from);
    frame.extend(ethertype::IPV4.to_be_bytes());
    frame.extend([0x45, 0]);
    frame.extend(ip_len.to_be_bytes());
    // id 0, "don't fragment", TTL 64, UDP, checksum still 0
    frame.extend([0, 0, 0x40, 0, 64, protocol::UDP, 0, 0]);
    frame.extend([198, 18, 0, 1, 198, 18, 0, 2]);
    let sum = Sum::of(&frame[ETHERNET..ETHERNET + IPV4]).complement();
    frame[ETHERNET + ipv4::CHECKSUM..][..2].copy_from_slice(&sum.to_be_bytes());
    frame.extend([0, 9, 0, 9]);
    frame.extend(udp_len.to_be_bytes());
    frame.extend([0; 2 + 8]);
    frame.extend((frame.len()..len as usize).map(|at| at as u8));
    frame
}

/// The address that is `number` after `first`.
pub(super) fn counted(first: Mac, number: u32) -> Mac {
    let [a, b, last @ ..] = first;
    let [c, d, e, f] = u32::from_be_bytes(last).wrapping_add(number).to_be_bytes();
    [a, b, c, d, e, f]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_count_up() {
        assert_eq!(counted([2, 0, 0, 0, 0, 0xff], 2), [2, 0, 0, 0, 1, 1]);
    }

    #[test]
    fn frame_is_valid_udp_of_every_size() {
        let word = |frame: &[u8], at: usize| u32::from(u16::from_be_bytes([frame[at], frame[at + 1]]));
        for len in [60, 64, 65, 1513, 1514, 4096] {
            let frame = template([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2], len);
            assert_eq!(frame.len(), len as usize);
            assert_eq!(frame[..14], [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0]);
            assert_eq!((frame[14], frame[23]), (0x45, 17), "IPv4 without options, UDP");
            assert_eq!(word(&frame, 16), len - 14, "IPv4 total length");
            // RFC 1071: the sum over a valid header, checksum included, has a complement of 0.
            assert_eq!(Sum::of(&frame[14..34]).complement(), 0);
            assert_eq!(
                (word(&frame, 38), word(&frame, 40)),
                (len - 34, 0),
                "UDP length, no checksum"
            );
            assert_eq!(frame[SEQUENCE_AT as usize..][..8], [0; 8]);
        }
    }
}
