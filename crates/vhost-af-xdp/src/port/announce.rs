//! The frame that announces a guest's new place to switches, after a migration.
//!
//! A reverse-ARP request, broadcast, as VHOST_USER_SEND_RARP requires: no host answers it, and every switch on the way
//! learns the port of its source address (RFC 903 has the format).

use std::iter;

/// Shortest Ethernet frame without its check sum, bytes.
const SHORTEST: usize = 60;

/// A reverse-ARP request of `mac` for itself.
pub(crate) fn rarp(mac: [u8; 6]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(SHORTEST);
    frame.extend([0xff; 6]);
    frame.extend(mac);
    // EtherType RARP; hardware Ethernet, protocol IPv4, their address lengths; "request reverse".
    frame.extend([0x80, 0x35, 0, 1, 0x08, 0x00, 6, 4, 0, 3]);
    // Sender and target: the same address, and no protocol address.
    for _ in 0..2 {
        frame.extend(mac);
        frame.extend([0; 4]);
    }
    frame.extend(iter::repeat_n(0, SHORTEST - frame.len()));
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
