//! The frames that `txonly` sends: Ethernet, IPv4, UDP, a sequence number.
//!
//! ```text
//!   0  destination, source, 0x0800               Ethernet, 14 bytes
//!  14  198.18.0.1 → 198.18.0.2, protocol 17      IPv4, 20 bytes, RFC 2544's addresses for benchmarks
//!  34  port 9 → 9 (discard), checksum 0 = none   UDP, 8 bytes; RFC 768 allows it over IPv4
//!  42  sequence number, big-endian               8 bytes, counts up from 0 over the run
//!  50  bytes that count up                       to the frame's length
//! ```

use std::fmt;
use std::str::FromStr;

/// Where the sequence number stands, in bytes from the start.
pub(super) const SEQUENCE_AT: u64 = 42;

const ETHERNET: usize = 14;
const IPV4: usize = 20;

/// An Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mac(pub(super) [u8; 6]);

/// Not six pairs of hexadecimal digits with colons between.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("not six pairs of hexadecimal digits")]
pub(super) struct NoMac;

impl FromStr for Mac {
    type Err = NoMac;

    fn from_str(text: &str) -> Result<Self, NoMac> {
        let mut bytes = [0; 6];
        let mut pairs = text.split(':');
        for byte in &mut bytes {
            let pair = pairs.next().filter(|pair| pair.len() == 2).ok_or(NoMac)?;
            if !pair.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(NoMac);
            }
            *byte = u8::from_str_radix(pair, 16).map_err(|_| NoMac)?;
        }
        if pairs.next().is_some() {
            Err(NoMac)
        } else {
            Ok(Self(bytes))
        }
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// A frame of `len` bytes, sequence number 0. `len` is at least 60 and at most 65,535.
pub(super) fn template(to: Mac, from: Mac, len: u32) -> Vec<u8> {
    let ip_len = u16::try_from(len as usize - ETHERNET).unwrap_or(u16::MAX);
    let udp_len = ip_len.saturating_sub(IPV4 as u16);
    let mut frame = Vec::with_capacity(len as usize);
    frame.extend(to.0);
    frame.extend(from.0);
    frame.extend([0x08, 0x00]);
    frame.extend([0x45, 0]);
    frame.extend(ip_len.to_be_bytes());
    // id 0, "don't fragment", TTL 64, UDP, checksum still 0
    frame.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    frame.extend([198, 18, 0, 1, 198, 18, 0, 2]);
    let sum = internet_checksum(&frame[ETHERNET..ETHERNET + IPV4]);
    frame[ETHERNET + 10..ETHERNET + 12].copy_from_slice(&sum.to_be_bytes());
    frame.extend([0, 9, 0, 9]);
    frame.extend(udp_len.to_be_bytes());
    frame.extend([0; 2 + 8]);
    frame.extend((frame.len()..len as usize).map(|at| at as u8));
    frame
}

/// RFC 1071, over an even number of bytes.
fn internet_checksum(header: &[u8]) -> u16 {
    let mut sum: u32 = header
        .chunks_exact(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_is_valid_udp_of_every_size() {
        let word = |frame: &[u8], at: usize| u32::from(u16::from_be_bytes([frame[at], frame[at + 1]]));
        for len in [60, 64, 65, 1513, 1514, 4096] {
            let frame = template(Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 2]), len);
            assert_eq!(frame.len(), len as usize);
            assert_eq!(frame[..14], [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0]);
            assert_eq!((frame[14], frame[23]), (0x45, 17), "IPv4 without options, UDP");
            assert_eq!(word(&frame, 16), len - 14, "IPv4 total length");
            // RFC 1071: the sum over a valid header, checksum included, has a complement of 0.
            assert_eq!(internet_checksum(&frame[14..34]), 0);
            assert_eq!(
                (word(&frame, 38), word(&frame, 40)),
                (len - 34, 0),
                "UDP length, no checksum"
            );
            assert_eq!(frame[SEQUENCE_AT as usize..][..8], [0; 8]);
        }
    }

    #[test]
    fn checksum_is_the_one_of_a_known_header() {
        // IPv4, UDP, 192.168.0.1 to 192.168.0.199, 115 bytes.
        let header = [
            0x45, 0x00, 0x00, 0x73, 0x00, 0x00, 0x40, 0x00, 0x40, 0x11, 0, 0, 0xc0, 0xa8, 0x00, 0x01, 0xc0,
            0xa8, 0x00, 0xc7,
        ];
        assert_eq!(internet_checksum(&header), 0xb861);
    }

    #[test]
    fn mac_is_six_pairs_with_colons_and_nothing_else() {
        assert_eq!("02:00:ab:CD:ef:01".parse(), Ok(Mac([2, 0, 0xab, 0xcd, 0xef, 1])));
        assert_eq!(Mac([2, 0, 0xab, 0xcd, 0xef, 1]).to_string(), "02:00:ab:cd:ef:01");
        for bad in [
            "",
            "02:00:00:00:00",
            "02:00:00:00:00:00:00",
            "2:0:0:0:0:1",
            "02:00:00:00:00:+1",
            "02-00-00-00-00-01",
        ] {
            assert_eq!(bad.parse::<Mac>(), Err(NoMac), "{bad}");
        }
    }
}
