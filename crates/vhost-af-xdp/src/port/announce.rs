//! The frame that announces a guest's new place to switches, after a migration.
//!
//! A reverse-ARP request, broadcast, as VHOST_USER_SEND_RARP requires: no host answers it, and every switch that
//! forwards it learns the port of its source address (format: RFC 903).

use packet::arp::{self, Arp};
use packet::ethernet::Mac;
use packet::ethertype;

/// Shortest Ethernet frame without its check sum, bytes.
const SHORTEST: usize = 60;

/// A reverse-ARP request of `mac` for itself: without IP addresses.
pub(crate) fn rarp(mac: Mac) -> Vec<u8> {
    let message = Arp::about(mac, [0; 4], arp::REVERSE_REQUEST);
    let mut frame = [&[0xff; 6][..], &mac, &ethertype::RARP.to_be_bytes(), &message].concat();
    frame.resize(SHORTEST, 0);
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announcement_is_a_broadcast_from_the_guest() {
        let mac = [2, 1, 2, 3, 4, 5];
        let frame = rarp(mac);
        assert_eq!(frame.len(), SHORTEST);
        assert_eq!(frame[..6], [0xff; 6]);
        assert_eq!(frame[6..12], mac);
        assert_eq!(frame[12..22], [0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
        assert_eq!((&frame[22..28], &frame[32..38]), (&mac[..], &mac[..]));
    }
}
