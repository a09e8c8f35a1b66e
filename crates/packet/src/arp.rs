//! ARP between Ethernet and IPv4 (RFC 826).

use crate::ethernet::Mac;
use crate::{bytes, ethertype, word};

/// Bytes of a message.
pub const BYTES: usize = 28;

/// ARP request: which host has this IP address?
pub const REQUEST: u16 = 1;
/// ARP reply: the MAC address of that host.
pub const REPLY: u16 = 2;
/// Reverse ARP (RFC 903): asks for the address of a MAC address.
pub const REVERSE_REQUEST: u16 = 3;

/// Hardware, protocol and the lengths of their addresses: Ethernet, IPv4, 6, 4.
const ETHERNET_IPV4: [u8; 6] = {
    let [a, b] = ethertype::IPV4.to_be_bytes();
    [0, 1, a, b, 6, 4]
};

/// A message.
#[derive(Debug, Clone, Copy)]
pub struct Arp<'a> {
    /// [`REQUEST`], [`REPLY`] or another one.
    pub operation: u16,
    /// The sender's MAC address.
    pub sender_mac: &'a Mac,
    /// The sender's IP address.
    pub sender: &'a [u8; 4],
    /// The IP address that the message is about.
    pub target: &'a [u8; 4],
}

impl<'a> Arp<'a> {
    /// The message that begins at that byte of a frame; `None`: it is incomplete, or for other types of addresses.
    #[inline]
    pub fn at(frame: &'a [u8], at: usize) -> Option<Self> {
        let message: &[u8; BYTES] = bytes(frame, at)?;
        Some(Self {
            operation: word(message.strip_prefix(&ETHERNET_IPV4)?, 0)?,
            sender_mac: bytes(message, 8)?,
            sender: bytes(message, 14)?,
            target: bytes(message, 24)?,
        })
    }

    /// A message about the sender's own addresses.
    #[must_use]
    pub fn about(mac: Mac, address: [u8; 4], operation: u16) -> Vec<u8> {
        let end = [&mac[..], &address].concat();
        [&ETHERNET_IPV4[..], &operation.to_be_bytes(), &end, &end].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = [2, 0, 0, 0, 0, 7];

    #[test]
    fn message_is_read_as_it_was_written() {
        let message = Arp::about(MAC, [10, 0, 0, 7], REPLY);
        let addresses = [2, 0, 0, 0, 0, 7, 10, 0, 0, 7];
        assert_eq!(
            message,
            [&[0, 1, 8, 0, 6, 4, 0, 2][..], &addresses, &addresses].concat()
        );
        let mut frame = [&[0xee; 14][..], &message].concat();
        frame[14 + 24..].copy_from_slice(&[10, 0, 0, 8]);
        let arp = Arp::at(&frame, 14).expect("a message");
        let found = (arp.operation, *arp.sender_mac, *arp.sender, *arp.target);
        assert_eq!(found, (REPLY, MAC, [10, 0, 0, 7], [10, 0, 0, 8]));
    }

    #[test]
    fn short_message_and_other_addresses_are_none() {
        let message = Arp::about(MAC, [10, 0, 0, 7], REQUEST);
        assert!(Arp::at(&message, 1).is_none());
        for at in 0..6 {
            let mut other = message.clone();
            other[at] ^= 1;
            assert!(Arp::at(&other, 0).is_none(), "byte {at}");
        }
    }
}
