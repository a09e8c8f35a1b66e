//! Frames by table: what a guest with a lock may send, and why not.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use device::pair::Sending;
use model::config::Prefixes;
use packet::checksum::ChecksumAt;
use packet::ethernet::{self, Mac, Tags};
use packet::ip::is_long;
use packet::segment::Request;
use packet::{HEADERS_MAX, SHORT_HEAD};
use proptest::prelude::*;

use super::{Refusal, SourceGuard, check_content};

const MAC: Mac = [0x52, 0x54, 0, 0, 0, 1];
const OTHER: Mac = [0x52, 0x54, 0, 0, 0, 2];
const OWN_V4: &str = "192.0.2.10";
const OTHER_V4: &str = "192.0.2.11";
const OWN_V6: &str = "2001:db8::10";
const IN_NETWORK: &str = "2001:db8:1::77";
const OTHER_V6: &str = "2001:db8::11";
/// Of [`MAC`].
const LINK_LOCAL: &str = "fe80::5054:ff:fe00:1";
const NOBODY: &str = "::";

fn guard() -> SourceGuard {
    let prefixes =
        [OWN_V4, OWN_V6, "2001:db8:1::/64", "198.51.100.0/24"].map(|text| text.parse().expect("valid"));
    let ips = Some(Prefixes(prefixes.into()));
    SourceGuard::of(&model::config::Guard {
        ips,
        ..Default::default()
    })
    .expect("addresses")
}

fn v4(text: &str) -> [u8; 4] {
    text.parse::<Ipv4Addr>().expect("valid").octets()
}

fn v6(text: &str) -> [u8; 16] {
    text.parse::<Ipv6Addr>().expect("valid").octets()
}

/// A frame of the guest's, of that EtherType.
fn frame(kind: u16, packet: &[u8]) -> Vec<u8> {
    [&OTHER[..], &MAC, &kind.to_be_bytes(), packet].concat()
}

fn ports(from: u16, to: u16) -> Vec<u8> {
    [
        &from.to_be_bytes()[..],
        &to.to_be_bytes(),
        &[0, 20, 0, 0],
        &[0; 12],
    ]
    .concat()
}

/// IPv4 with so many bytes of options and this word of flags and offset.
fn ipv4(from: &str, to: &str, protocol: u8, fragment: u16, options: usize, payload: &[u8]) -> Vec<u8> {
    let header_bytes = 20 + options;
    let len = u16::try_from(header_bytes + payload.len()).expect("short");
    let mut header = vec![0x40 | (header_bytes / 4) as u8, 0];
    header.extend(len.to_be_bytes());
    header.extend([0, 1]);
    header.extend(fragment.to_be_bytes());
    header.extend([64, protocol, 0, 0]);
    header.extend(v4(from));
    header.extend(v4(to));
    header.resize(header_bytes, 1);
    frame(0x0800, &[&header, payload].concat())
}

fn udp(from: &str, to: &str, from_port: u16, to_port: u16) -> Vec<u8> {
    ipv4(from, to, 17, 0, 0, &ports(from_port, to_port))
}

fn ipv6(from: &str, next: u8, payload: &[u8]) -> Vec<u8> {
    let len = u16::try_from(payload.len()).expect("short");
    let header = [
        &[0x60, 0, 0, 0][..],
        &len.to_be_bytes(),
        &[next, 255],
        &v6(from),
        &v6("ff02::1"),
    ]
    .concat();
    frame(0x86dd, &[&header, payload].concat())
}

fn neighbour(from: &str, kind: u8, target: &str, options: &[u8]) -> Vec<u8> {
    ipv6(from, 58, &message(kind, target, options))
}

fn message(kind: u8, target: &str, options: &[u8]) -> Vec<u8> {
    [&[kind, 0, 0, 0, 0, 0, 0, 0][..], &v6(target), options].concat()
}

fn link_layer(kind: u8, mac: Mac) -> Vec<u8> {
    [&[kind, 1][..], &mac].concat()
}

/// Extension headers of these kinds, of eight bytes each, before `last`.
fn extended(kinds: &[u8], last: u8, payload: &[u8]) -> (u8, Vec<u8>) {
    let mut bytes = Vec::new();
    for next in kinds[1..].iter().chain([&last]) {
        bytes.extend([*next, 0, 1, 4, 0, 0, 0, 0]);
    }
    bytes.extend(payload);
    (kinds[0], bytes)
}

/// A fragment header before `payload`.
fn fragment(next: u8, offset: u16, more: bool, payload: &[u8]) -> Vec<u8> {
    let [high, low] = ((offset << 3) | u16::from(more)).to_be_bytes();
    [&[next, 0, high, low, 0, 0, 0, 9][..], payload].concat()
}

fn arp(operation: u16, mac: Mac, sender: &str, target: &str) -> Vec<u8> {
    let head = [&[0, 1, 8, 0, 6, 4][..], &operation.to_be_bytes()].concat();
    frame(
        0x0806,
        &[&head[..], &mac, &v4(sender), &[0; 6], &v4(target)].concat(),
    )
}

fn verdict(guard: &SourceGuard, frame: &[u8]) -> Result<usize, Refusal> {
    let mut first = [0; SHORT_HEAD];
    let known = frame.len().min(first.len());
    first[..known].copy_from_slice(&frame[..known]);
    let tags = ethernet::head(first.first_chunk().expect("long enough")).tags;
    let of = |most| guard.check(MAC, &frame[..frame.len().min(most)], frame.len() as u32, tags);
    if !is_long(&first) {
        assert_eq!(of(SHORT_HEAD), of(HEADERS_MAX), "{frame:02x?}");
    }
    of(HEADERS_MAX)
}

#[track_caller]
fn allowed(frame: &[u8]) {
    assert!(
        verdict(&guard(), frame).is_ok(),
        "{:?} {frame:02x?}",
        verdict(&guard(), frame)
    );
}

#[track_caller]
fn refused(why: Refusal, frame: &[u8]) {
    assert_eq!(verdict(&guard(), frame), Err(why), "{frame:02x?}");
}

/// Types of tags.
const TAGS: [u16; 5] = [0x8100, 0x88a8, 0x9100, 0x9200, 0x9300];

fn tagged(frame: &[u8], vlan: u16) -> Vec<u8> {
    tagged_as(TAGS[0], frame, vlan)
}

fn tagged_as(kind: u16, frame: &[u8], vlan: u16) -> Vec<u8> {
    let tag = [kind, vlan].map(u16::to_be_bytes).concat();
    [&frame[..12], &tag, &frame[12..]].concat()
}

#[test]
fn no_checksum_is_stored_in_the_bytes_that_the_verdict_rests_on() {
    let advertisement = neighbour(OWN_V6, 136, OWN_V6, &link_layer(2, MAC));
    for (frame, end) in [
        (arp(2, MAC, OWN_V4, OTHER_V4), 42),
        (udp(OWN_V4, OTHER_V4, 1, 2), 34 + 4),
        (ipv4(OWN_V4, OTHER_V4, 6, 0, 4, &[0; 20]), 38),
        (ipv4(OWN_V4, OTHER_V4, 1, 0, 0, &[8; 8]), 34 + 1),
        (ipv6(OWN_V6, 6, &[0; 20]), 54),
        (ipv6(OWN_V6, 17, &ports(1, 2)), 54 + 4),
        (ipv6(OWN_V6, 58, &[128; 8]), 54 + 1),
        (advertisement.clone(), advertisement.len()),
    ] {
        let stored_at = |at: usize| {
            let (start, offset, len) = (0, at as u16, frame.len() as u32);
            let request = Request::of_partial(ChecksumAt { start, offset });
            let sending = Sending {
                len,
                request,
                ..Sending::default()
            };
            check_content(Some(&guard()), MAC, (&frame, Tags::None), &sending)
        };
        assert_eq!(stored_at(end), Ok(()), "{frame:02x?}");
        assert_eq!(stored_at(end - 1), Err(Refusal::Checksum), "{frame:02x?}");
    }
}

#[test]
fn hosts_are_the_single_addresses() {
    let single = [OWN_V4, OWN_V6].map(|text| text.parse::<IpAddr>().expect("valid"));
    assert_eq!(guard().hosts().collect::<Vec<_>>(), single);
}

#[test]
fn spoofed_arp_is_rejected() {
    for operation in [1, 2] {
        allowed(&arp(operation, MAC, OWN_V4, OTHER_V4));
        allowed(&arp(operation, MAC, OWN_V4, OWN_V4));
        refused(Refusal::Arp, &arp(operation, MAC, OTHER_V4, OWN_V4));
        refused(Refusal::Arp, &arp(operation, OTHER, OWN_V4, OTHER_V4));
    }
    // A probe, which asks before one uses it.
    allowed(&arp(1, MAC, "0.0.0.0", OWN_V4));
    refused(Refusal::Arp, &arp(1, MAC, "0.0.0.0", OTHER_V4));
    refused(Refusal::Arp, &arp(2, MAC, "0.0.0.0", OWN_V4));
    // Reverse, inverse, and none.
    for operation in [0, 3, 4, 8, 9] {
        refused(Refusal::Arp, &arp(operation, MAC, OWN_V4, OTHER_V4));
    }
    let good = arp(2, MAC, OWN_V4, OTHER_V4);
    for len in 14..good.len() {
        refused(Refusal::Arp, &good[..len]);
    }
    // Other hardware, other protocols, other lengths of addresses.
    for at in 14..20 {
        let mut odd = good.clone();
        odd[at] ^= 1;
        refused(Refusal::Arp, &odd);
    }
}

#[test]
fn ipv4_is_from_the_ports_address() {
    for options in [0, 4, 40] {
        for protocol in [1, 6, 17, 47, 4, 41, 132] {
            let of = |from| ipv4(from, OTHER_V4, protocol, 0, options, &ports(1, 2));
            allowed(&of(OWN_V4));
            for from in [OTHER_V4, "0.0.0.0", "224.0.0.1", "255.255.255.255"] {
                refused(Refusal::Source, &of(from));
            }
        }
    }
    // Later fragments, and one that claims to be one, by their source as well.
    for offset in [1, 185, 0x2001, 0x1fff] {
        allowed(&ipv4(OWN_V4, OTHER_V4, 17, offset, 0, &[]));
        refused(Refusal::Source, &ipv4(OTHER_V4, OTHER_V4, 17, offset, 0, &[0; 8]));
        refused(
            Refusal::Source,
            &ipv4("0.0.0.0", "255.255.255.255", 17, offset, 0, &ports(68, 67)),
        );
    }
}

#[test]
fn headers_that_contradict_themselves_are_refused() {
    let good = udp(OWN_V4, OTHER_V4, 1, 2);
    for (at, value) in [(14, 0x44), (14, 0x65), (14, 0x4f), (16, 0xff), (17, 21)] {
        let mut bad = good.clone();
        bad[at] = value;
        refused(Refusal::Headers, &bad);
    }
    for len in 14..good.len() {
        refused(Refusal::Headers, &good[..len]);
    }
    let good = ipv6(OWN_V6, 17, &ports(1, 2));
    for (at, value) in [(14, 0x40), (18, 1), (19, 3)] {
        let mut bad = good.clone();
        bad[at] = value;
        refused(Refusal::Headers, &bad);
    }
    for len in 14..good.len() {
        refused(Refusal::Headers, &good[..len]);
    }
    // What is behind the packet, by its own length, is padding, and tells of nothing.
    let hidden = ipv6(LINK_LOCAL, 58, &message(136, OWN_V6, &link_layer(2, MAC)));
    allowed(&[&hidden[..], &link_layer(2, OTHER)].concat());
}

#[test]
fn dhcp_is_asked_and_not_answered() {
    allowed(&udp("0.0.0.0", "255.255.255.255", 68, 67));
    allowed(&udp(OWN_V4, "192.0.2.1", 68, 67));
    refused(Refusal::Source, &udp("0.0.0.0", "192.0.2.1", 68, 67));
    refused(Refusal::Source, &udp("0.0.0.0", "255.255.255.255", 68, 68));
    refused(Refusal::Source, &udp(OTHER_V4, "255.255.255.255", 68, 67));
    let mut more = udp("0.0.0.0", "255.255.255.255", 68, 67);
    more[20] |= 0x20;
    refused(Refusal::Source, &more);
    for (from, to) in [(67, 68), (67, 67), (4000, 68), (67, 4000)] {
        refused(Refusal::DhcpServer, &udp(OWN_V4, OTHER_V4, from, to));
        refused(
            Refusal::DhcpServer,
            &ipv4(OWN_V4, OTHER_V4, 17, 0, 40, &ports(from, to)),
        );
        // The first of fragments; the others do not have the ports.
        refused(
            Refusal::DhcpServer,
            &ipv4(OWN_V4, OTHER_V4, 17, 0x2000, 0, &ports(from, to)),
        );
    }
    // One that leaves them to the second.
    for len in 0..8 {
        refused(
            Refusal::Headers,
            &ipv4(OWN_V4, OTHER_V4, 17, 0x2000, 0, &ports(67, 68)[..len]),
        );
    }
    for (from, to) in [(547, 546), (547, 547), (4000, 546)] {
        refused(Refusal::DhcpServer, &ipv6(OWN_V6, 17, &ports(from, to)));
        refused(
            Refusal::DhcpServer,
            &ipv6(OWN_V6, 44, &fragment(17, 0, true, &ports(from, to))),
        );
    }
    allowed(&ipv6(LINK_LOCAL, 17, &ports(546, 547)));
    let server = SourceGuard {
        dhcp_server: true,
        ..guard()
    };
    assert!(verdict(&server, &udp(OWN_V4, "255.255.255.255", 67, 68)).is_ok());
    assert!(verdict(&server, &ipv6(LINK_LOCAL, 17, &ports(547, 546))).is_ok());
    let spoofed = udp(OTHER_V4, "255.255.255.255", 67, 68);
    assert_eq!(verdict(&server, &spoofed), Err(Refusal::Source));
}

#[test]
fn ipv6_is_from_the_ports_address() {
    for (next, payload) in [
        (6, &[0; 20][..]),
        (17, &[0; 20]),
        (58, &[128; 20]),
        (59, &[]),
        (50, &[0; 20]),
    ] {
        for from in [OWN_V6, IN_NETWORK, LINK_LOCAL] {
            allowed(&ipv6(from, next, payload));
        }
        for from in [OTHER_V6, "fe80::1", NOBODY, "ff02::1", "::ffff:192.0.2.10"] {
            refused(Refusal::Source, &ipv6(from, next, payload));
            // A later fragment.
            refused(
                Refusal::Source,
                &ipv6(from, 44, &fragment(next, 5, true, &[0; 8])),
            );
        }
        allowed(&ipv6(OWN_V6, 44, &fragment(next, 5, false, &[0; 8])));
    }
}

#[test]
fn host_without_an_address_may_look_for_one() {
    for kind in [131, 132, 143] {
        allowed(&ipv6(NOBODY, 58, &[kind; 24]));
        let (first, bytes) = extended(&[0], 58, &[kind; 24]);
        allowed(&ipv6(NOBODY, first, &bytes));
    }
    allowed(&ipv6(NOBODY, 58, &[133, 0, 0, 0, 0, 0, 0, 0]));
    for target in [OWN_V6, IN_NETWORK, LINK_LOCAL] {
        allowed(&neighbour(NOBODY, 135, target, &[]));
    }
    // It would make another one give its address up.
    refused(Refusal::Neighbour, &neighbour(NOBODY, 135, OTHER_V6, &[]));
    refused(Refusal::Source, &neighbour(NOBODY, 136, OWN_V6, &[]));
    refused(Refusal::Source, &ipv6(NOBODY, 58, &[128; 24]));
}

#[test]
fn spoofed_neighbour_discovery_is_rejected() {
    let own = |kind| link_layer(kind, MAC);
    let others = |kind| link_layer(kind, OTHER);
    for target in [OWN_V6, IN_NETWORK, LINK_LOCAL] {
        allowed(&neighbour(OWN_V6, 136, target, &own(2)));
        allowed(&neighbour(LINK_LOCAL, 136, target, &[]));
        refused(Refusal::Neighbour, &neighbour(OWN_V6, 136, target, &others(2)));
        refused(Refusal::Neighbour, &neighbour(OWN_V6, 136, target, &others(1)));
        // The second one, too.
        refused(
            Refusal::Neighbour,
            &neighbour(OWN_V6, 136, target, &[own(2), others(2)].concat()),
        );
        let nonce = [14, 1, 0, 0, 0, 0, 0, 0];
        refused(
            Refusal::Neighbour,
            &neighbour(OWN_V6, 136, target, &[&nonce[..], &others(2)].concat()),
        );
        allowed(&neighbour(OWN_V6, 136, target, &[&nonce[..], &own(2)].concat()));
    }
    refused(Refusal::Neighbour, &neighbour(OWN_V6, 136, OTHER_V6, &own(2)));
    allowed(&neighbour(OWN_V6, 135, OTHER_V6, &own(1)));
    refused(Refusal::Neighbour, &neighbour(OWN_V6, 135, OTHER_V6, &others(1)));
    allowed(&ipv6(
        LINK_LOCAL,
        58,
        &[&[133, 0, 0, 0, 0, 0, 0, 0][..], &own(1)].concat(),
    ));
    refused(
        Refusal::Neighbour,
        &ipv6(
            LINK_LOCAL,
            58,
            &[&[133, 0, 0, 0, 0, 0, 0, 0][..], &others(1)].concat(),
        ),
    );
    // Options of no length, and beyond the end, and half of one.
    for options in [
        &[2, 0, 0, 0, 0, 0, 0, 0][..],
        &[2, 2, 0, 0, 0, 0, 0, 0],
        &[2, 1, 0],
        &[2],
    ] {
        refused(Refusal::Neighbour, &neighbour(OWN_V6, 136, OWN_V6, options));
    }
    // Fragmented, or in one fragment.
    let announced = message(136, OWN_V6, &own(2));
    for more in [false, true] {
        refused(
            Refusal::Neighbour,
            &ipv6(OWN_V6, 44, &fragment(58, 0, more, &announced)),
        );
    }
    // Longer than what is looked at.
    refused(
        Refusal::Headers,
        &neighbour(OWN_V6, 136, OWN_V6, &[2, 25].map(|_| 0).repeat(100)),
    );
    refused(Refusal::Neighbour, &neighbour(OWN_V6, 141, OWN_V6, &[]));
    // Short ones.
    refused(Refusal::Headers, &ipv6(OWN_V6, 58, &announced[..20]));
    refused(Refusal::Headers, &ipv6(OWN_V6, 58, &[]));
}

#[test]
fn routers_say_what_they_say_only_where_they_may_be() {
    let router = SourceGuard {
        router: true,
        ..guard()
    };
    for kind in [134, 137, 138] {
        let bare = message(kind, OTHER_V6, &link_layer(1, OTHER));
        let mut said = vec![ipv6(LINK_LOCAL, 58, &bare)];
        // Behind headers that extend it (RFC 7113), and in fragments.
        for kinds in [
            &[0][..],
            &[60],
            &[43],
            &[60, 60],
            &[0, 43, 60],
            &[135],
            &[139],
            &[140],
            &[60; 20],
        ] {
            let (first, bytes) = extended(kinds, 58, &bare);
            said.push(ipv6(LINK_LOCAL, first, &bytes));
        }
        // Twelve bytes of authentication.
        said.push(ipv6(LINK_LOCAL, 51, &[&[58, 1][..], &[0; 10], &bare].concat()));
        for more in [false, true] {
            said.push(ipv6(LINK_LOCAL, 44, &fragment(58, 0, more, &bare)));
            let (first, bytes) = extended(&[60], 58, &bare);
            said.push(ipv6(LINK_LOCAL, 44, &fragment(first, 0, more, &bytes)));
        }
        for frame in said {
            refused(Refusal::Router, &frame);
            refused(Refusal::Router, &tagged(&frame, 0));
            assert!(verdict(&router, &frame).is_ok(), "{frame:02x?}");
        }
        // Not where it could be judged.
        for kinds in [&[60; 40][..], &[0; 26]] {
            let (first, bytes) = extended(kinds, 58, &bare);
            refused(Refusal::Headers, &ipv6(LINK_LOCAL, first, &bytes));
            let (first, bytes) = extended(&[60, 60], 58, &bare);
            refused(
                Refusal::Headers,
                &ipv6(LINK_LOCAL, 44, &fragment(first, 0, true, &bytes[..16])),
            );
            refused(
                Refusal::Headers,
                &ipv6(LINK_LOCAL, 44, &fragment(first, 0, true, &bytes[..8])),
            );
        }
        assert_eq!(verdict(&router, &ipv6(OTHER_V6, 58, &bare)), Err(Refusal::Source));
    }
    for kind in [5, 9] {
        let frame = ipv4(OWN_V4, OTHER_V4, 1, 0, 4, &[kind; 16]);
        refused(Refusal::Router, &frame);
        assert!(verdict(&router, &frame).is_ok());
    }
}

#[test]
fn second_fragment_header_is_refused() {
    let datagram = ports(1000, 2000);
    for (outer, inner) in [
        ((0, true), (0, true)),
        ((0, true), (9, false)),
        ((0, false), (9, true)),
    ] {
        let nested = fragment(17, inner.0, inner.1, &datagram);
        refused(
            Refusal::Headers,
            &ipv6(OWN_V6, 44, &fragment(44, outer.0, outer.1, &nested)),
        );
        let (first, between) = extended(&[60], 44, &nested);
        let behind = fragment(first, outer.0, outer.1, &between);
        refused(Refusal::Headers, &ipv6(OWN_V6, 44, &behind));
    }
    // What is in a later fragment is not looked at.
    let nested = fragment(17, 0, true, &datagram);
    allowed(&ipv6(OWN_V6, 44, &fragment(44, 9, true, &nested)));
}

#[test]
fn headers_for_experiments_are_protocols() {
    let advertisement = message(136, OTHER_V6, &link_layer(2, OTHER));
    for next in [253, 254] {
        let (first, behind) = extended(&[60, next], 58, &advertisement);
        for (next, payload) in [(next, &advertisement), (first, &behind)] {
            allowed(&ipv6(OWN_V6, next, payload));
            refused(Refusal::Source, &ipv6(OTHER_V6, next, payload));
            refused(Refusal::Source, &ipv6(NOBODY, next, payload));
        }
    }
}

#[test]
fn nothing_but_ip_and_arp_is_sent() {
    for kind in [
        0x8035, 0x88cc, 0x8863, 0x8864, 0x8847, 0x888e, 0x9100, 0x05ff, 46, 0,
    ] {
        refused(Refusal::Protocol, &frame(kind, &[0; 46]));
    }
    // IPv4 in 802.3 with LLC and SNAP.
    let packet = udp(OTHER_V4, OTHER_V4, 67, 68);
    let snap = [&[0xaa, 0xaa, 3, 0, 0, 0, 8, 0][..], &packet[14..]].concat();
    refused(Refusal::Protocol, &frame(snap.len() as u16, &snap));
    refused(Refusal::Protocol, &frame(0x0800, &[])[..13]);
}

#[test]
fn tag_hides_nothing() {
    for kind in TAGS {
        for vlan in [0, 100] {
            let tagged = |frame: &[u8]| tagged_as(kind, frame, vlan);
            allowed(&tagged(&arp(1, MAC, OWN_V4, OTHER_V4)));
            allowed(&tagged(&neighbour(OWN_V6, 136, OWN_V6, &link_layer(2, MAC))));
            refused(Refusal::Arp, &tagged(&arp(1, MAC, OTHER_V4, OWN_V4)));
            refused(Refusal::Source, &tagged(&udp(OTHER_V4, OWN_V4, 1, 2)));
            refused(Refusal::DhcpServer, &tagged(&ipv6(OWN_V6, 17, &ports(547, 546))));
        }
    }
}

/// Frames that are near to good ones.
fn near_frames() -> impl Strategy<Value = Vec<u8>> {
    let good = vec![
        arp(1, MAC, OWN_V4, OTHER_V4),
        udp(OWN_V4, OTHER_V4, 1, 2),
        udp("0.0.0.0", "255.255.255.255", 68, 67),
        ipv4(OWN_V4, OTHER_V4, 1, 0x2000, 8, &[8; 32]),
        ipv6(OWN_V6, 6, &[0; 20]),
        neighbour(OWN_V6, 136, OWN_V6, &link_layer(2, MAC)),
        neighbour(NOBODY, 135, OWN_V6, &[]),
        ipv6(LINK_LOCAL, 44, &fragment(17, 0, true, &ports(546, 547))),
        ipv6(LINK_LOCAL, 0, &extended(&[0, 60, 43], 58, &[128; 12]).1),
    ];
    let change = (any::<prop::sample::Index>(), any::<u8>());
    let changes = prop::collection::vec(change, 0..4);
    let tag = prop::option::of(prop::sample::select(&TAGS[..]));
    (prop::sample::select(good), changes, tag, 0..300usize).prop_map(|(mut frame, changes, tag, longer)| {
        if let Some(kind) = tag {
            frame = tagged_as(kind, &frame, 7);
        }
        for (at, byte) in changes {
            let at = at.index(frame.len() - 12) + 12;
            frame[at] = byte;
        }
        frame.resize(frame.len() + longer, 0x5a);
        frame
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn verdict_rests_on_the_bytes_that_it_names(frame in near_frames(), others in any::<u8>()) {
        if let Ok(end) = verdict(&guard(), &frame) {
            prop_assert!(end <= frame.len() && end >= 14);
            let mut changed = frame.clone();
            changed[end..].fill(others);
            prop_assert_eq!(verdict(&guard(), &changed), Ok(end));
        }
    }

    #[test]
    fn any_bytes_get_a_verdict(frame in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = verdict(&guard(), &frame);
    }
}
