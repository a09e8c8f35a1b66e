//! Which headers are parsed: hop limits, payloads of SNAP, and extension headers of IPv6.

use packet::ethertype::{ARP, LLC};
use packet::ip::is_long;

use super::*;

#[test]
fn what_a_router_may_have_passed_on_is_not_of_the_link() {
    let rules = Rules::new(&[], Action::Deny, Direction::ToGuest);
    for (kinds, own) in [(&[133u16, 134, 135, 136][..], 255u8), (&[130, 131, 132, 143], 1)] {
        for kind in kinds {
            let passes = [0, 1, 64, 254, 255].map(|hops| {
                let packet = Packet {
                    source: "2001:db8::1".parse().expect("an address"),
                    destination: "2001:db8::2".parse().expect("an address"),
                    protocol: 58,
                    ports: (0, kind << 8),
                    hops,
                    ..udp(0)
                };
                (hops, rules.find(&key(&packet), 0).allows)
            });
            assert_eq!(
                passes,
                [0, 1, 64, 254, 255].map(|hops| (hops, hops == own)),
                "{kind}"
            );
        }
    }
}

/// A packet after a header of IEEE 802.2 with SNAP of that organisation, and after a tag if it has one.
fn behind_snap(packet: &Packet, organisation: [u8; 3]) -> Vec<u8> {
    let mut bytes = packet.bytes();
    let at = if packet.vlan.is_some() { 16 } else { 12 };
    let len = u16::try_from(bytes.len() - at + 6).expect("short").to_be_bytes();
    let [a, b, c] = organisation;
    bytes.splice(at..at, [len[0], len[1], 0xaa, 0xaa, 3, a, b, c]);
    bytes
}

#[test]
fn packet_behind_snap_is_judged_as_what_it_is() {
    let v6 = Packet {
        source: "2001:db8::1".parse().expect("an address"),
        destination: "2001:db8::2".parse().expect("an address"),
        ..udp(53)
    };
    let arp = Packet {
        ethertype: Some(ARP),
        ..udp(0)
    };
    let tagged = Packet {
        vlan: Some(7),
        ..v6.clone()
    };
    let packets = [udp(53), v6, arp, tagged];
    for (packet, organisation) in packets
        .iter()
        .flat_map(|packet| [(packet, [0; 3]), (packet, [0, 0, 0xf8])])
    {
        let bytes = behind_snap(packet, organisation);
        let looked = FlowKey::of(&bytes, bytes.len()).expect("whole");
        assert_eq!(looked.key, key(packet), "{packet:?}");
        assert!(is_long(bytes.first_chunk().unwrap_or(&[0; 64])));
        // It ends within its packet.
        if packet.ethertype.is_none() {
            assert_eq!(
                FlowKey::of(&bytes[..bytes.len() - 9], bytes.len() - 9),
                Err(Malformed)
            );
        }
    }
    let other = behind_snap(&udp(53), [0, 0, 0x0c]);
    let looked = FlowKey::of(&other, other.len()).expect("whole");
    assert_eq!((looked.key.ethertype(), looked.key.protocol()), (LLC, 0));
    // The bytes with the other organisation count as read, too.
    assert_eq!(looked.bytes, 22);
    for organisation in [[0; 3], [0, 0, 0xf8]] {
        let mut tag = behind_snap(&udp(53), organisation);
        tag[20..22].copy_from_slice(&[0x81, 0]);
        assert_eq!(FlowKey::of(&tag, tag.len()), Err(Malformed));
    }
}

#[test]
fn second_fragment_header_is_judged_by_nobody() {
    let packet = Packet {
        source: "2001:db8::1".parse().expect("an address"),
        destination: "2001:db8::2".parse().expect("an address"),
        ..udp(53)
    };
    // Next header, offset and more fragments of each header before UDP.
    let with = |headers: &[(u8, u16, bool)]| {
        let mut frame = packet.bytes();
        frame[20] = 44;
        frame[19] += u8::try_from(8 * headers.len()).expect("short");
        let further = headers.iter().flat_map(|&(next, offset, more)| {
            let [high, low] = ((offset << 3) | u16::from(more)).to_be_bytes();
            [next, 0, high, low, 0, 0, 0, 9]
        });
        frame.splice(54..54, further.collect::<Vec<_>>());
        FlowKey::of(&frame, frame.len()).map(|looked| looked.key.destination_port())
    };
    assert_eq!(with(&[(17, 0, true)]), Ok(Some(53)));
    for (outer, inner) in [
        ((0, true), (0, true)),
        ((0, true), (3, false)),
        ((0, false), (3, true)),
    ] {
        assert_eq!(
            with(&[(44, outer.0, outer.1), (17, inner.0, inner.1)]),
            Err(Malformed)
        );
    }
    assert_eq!(
        with(&[(44, 3, true), (17, 0, true)]),
        Ok(None),
        "a later fragment"
    );
}

#[test]
fn headers_that_are_protocols_of_their_own_are_not_followed() {
    let packet = Packet {
        source: "2001:db8::1".parse().expect("an address"),
        destination: "2001:db8::2".parse().expect("an address"),
        ..udp(53)
    };
    // A header of 8 bytes in front of UDP, 24 for AH, as its length counts otherwise.
    let behind = |header: u8, bytes: usize| {
        let mut frame = packet.bytes();
        frame[20] = header;
        frame[19] += u8::try_from(bytes).expect("short");
        let mut further = vec![0; bytes];
        (further[0], further[1]) = (17, if header == 51 { 4 } else { 0 });
        frame.splice(54..54, further);
        let key = FlowKey::of(&frame, frame.len()).expect("whole").key;
        (key.protocol(), key.destination_port())
    };
    // Hop-by-hop, routing, destination options.
    for header in [0, 43, 60] {
        assert_eq!(behind(header, 8), (17, Some(53)), "{header}");
    }
    for (header, bytes) in [(51, 24), (135, 8), (139, 8), (140, 8), (253, 8), (254, 8)] {
        assert_eq!(behind(header, bytes), (header, None), "{header}");
    }
    let rules = compiled(&[rule("action=allow protocol=ah")], Action::Deny);
    let of_v4 = Packet {
        protocol: 51,
        ..udp(0)
    };
    let of_v6 = Packet {
        protocol: 51,
        ..packet
    };
    assert!(
        [of_v4, of_v6]
            .iter()
            .all(|packet| rules.find(&key(packet), 0).allows)
    );
}
