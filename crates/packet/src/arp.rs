//! ARP between Ethernet and IPv4 (RFC 826).

use crate::ethernet::Mac;
use crate::{bytes, ethertype};

/// Bytes of a message.
pub const BYTES: usize = 28;

/// Asks who has an address.
pub const REQUEST: u16 = 1;
/// Says who has it.
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
pub struct Arp<'a>(&'a [u8; BYTES]);

impl<'a> Arp<'a> {
    /// The message that begins at that byte of a frame; `None`: it is not whole, or of other addresses.
    #[inline]
    #[must_use]
    pub fn at(frame: &'a [u8], at: usize) -> Option<Self> {
        let message: &[u8; BYTES] = bytes(frame, at)?;
        message.starts_with(&ETHERNET_IPV4).then_some(Self(message))
    }

    /// [`REQUEST`], [`REPLY`] or another one.
    #[inline]
    #[must_use]
    pub fn operation(&self) -> u16 {
        u16::from_be_bytes([self.0[6], self.0[7]])
    }

    /// The sender's MAC address.
    #[inline]
    #[must_use]
    pub fn sender_mac(&self) -> Mac {
        std::array::from_fn(|at| self.0[8 + at])
    }

    /// The sender's IP address.
    #[inline]
    #[must_use]
    pub fn sender(&self) -> [u8; 4] {
        std::array::from_fn(|at| self.0[14 + at])
    }

    /// The IP address that the message is about.
    #[inline]
    #[must_use]
    pub fn target(&self) -> [u8; 4] {
        std::array::from_fn(|at| self.0[24 + at])
    }

    /// A message about the sender's own addresses.
    #[must_use]
    pub fn about(mac: Mac, address: [u8; 4], operation: u16) -> Vec<u8> {
        let end = [&mac[..], &address].concat();
        [&ETHERNET_IPV4[..], &operation.to_be_bytes(), &end, &end].concat()
    }
}
