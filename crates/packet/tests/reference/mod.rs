//! A reader of headers that is slow and obvious, to compare the crate's with: it takes bytes from the front, one field
//! after the other, and keeps everything it finds. For `tests/headers.rs` and the fuzz target `headers`.

use packet::arp::Arp;
use packet::ethernet::{self, Payload, Skip};
use packet::icmp::Options;
use packet::ip::{Follow, Fragment, Ipv4, Ipv6, Upper};
use packet::layers::{self, Ip, Transport};
use packet::{HEADERS_MAX, ethertype};

/// Bytes that are read from the front.
#[derive(Clone)]
struct Reader<'a> {
    bytes: &'a [u8],
    /// How many were taken.
    at: usize,
}

impl<'a> Reader<'a> {
    fn new(bytes: &'a [u8], at: usize) -> Option<Self> {
        let mut reader = Self { bytes, at: 0 };
        reader.take(at)?;
        Some(reader)
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.bytes.split_at_checked(count)?;
        self.bytes = rest;
        self.at += count;
        Some(taken)
    }

    fn number(&mut self, count: usize) -> Option<usize> {
        let bytes = self.take(count)?.iter();
        Some(bytes.fold(0, |number, &byte| number * 256 + usize::from(byte)))
    }
}

/// An IP packet.
#[derive(Debug, PartialEq, Eq)]
struct Packet {
    version: usize,
    source: Vec<u8>,
    destination: Vec<u8>,
    /// What its length field says.
    end: usize,
    hop_limit: usize,
    /// End of the IP header, with options.
    payload: usize,
    /// Extension headers, and what they lead to.
    extensions: Vec<(usize, Vec<u8>)>,
    upper: Option<(usize, usize, Fragment)>,
}

fn ipv4(frame: &[u8], at: usize) -> Option<Packet> {
    let mut reader = Reader::new(frame, at)?;
    let first = reader.number(1)?;
    let (version, words) = (first / 16, first % 16);
    reader.take(1)?;
    let end = at + reader.number(2)?;
    reader.take(2)?;
    let flags = reader.number(2)?;
    let hop_limit = reader.number(1)?;
    let protocol = reader.number(1)?;
    reader.take(2)?;
    let (source, destination) = (reader.take(4)?.to_vec(), reader.take(4)?.to_vec());
    let (more, offset) = (flags / 0x2000 % 2 == 1, flags % 0x2000);
    let fragment = match (more, offset) {
        (false, 0) => Fragment::None,
        (true, 0) => Fragment::First,
        _ => Fragment::Later,
    };
    (version == 4 && words >= 5).then_some(Packet {
        version,
        source,
        destination,
        end,
        hop_limit,
        payload: at + words * 4,
        extensions: Vec::new(),
        upper: Some((protocol, at + words * 4, fragment)),
    })
}

/// `known`: the bytes in which skipped headers must end.
fn ipv6(frame: &[u8], at: usize, known: &[u8], follow: Follow) -> Option<Packet> {
    let mut reader = Reader::new(frame, at)?;
    let version = reader.number(4)? >> 28;
    let length = reader.number(2)?;
    let first = reader.number(1)?;
    let hop_limit = reader.number(1)?;
    let (source, destination) = (reader.take(16)?.to_vec(), reader.take(16)?.to_vec());
    let mut extensions = Vec::new();
    let upper = Reader::new(known, at + 40).and_then(|reader| chain(reader, first, follow, &mut extensions));
    (version == 6).then_some(Packet {
        version,
        source,
        destination,
        end: at + 40 + length,
        hop_limit,
        payload: at + 40,
        extensions,
        // These need no bytes of their own to be known.
        upper: upper.or([6, 17, 58]
            .contains(&first)
            .then_some((first, at + 40, Fragment::None))),
    })
}

fn chain(
    mut reader: Reader<'_>,
    first: usize,
    follow: Follow,
    seen: &mut Vec<(usize, Vec<u8>)>,
) -> Option<(usize, usize, Fragment)> {
    let followed: &[usize] = match follow {
        Follow::Usual => &[0, 43, 44, 60],
        Follow::All => &[0, 43, 44, 51, 60, 135, 139, 140],
    };
    let (mut kind, mut fragment) = (first, Fragment::None);
    while followed.contains(&kind) {
        let mut ahead = reader.clone();
        let (_, length) = (ahead.number(1), ahead.number(1));
        let bytes = match kind {
            44 if fragment != Fragment::None => return None,
            44 => 8,
            51 => (length? + 2) * 4,
            _ => (length? + 1) * 8,
        };
        let header = reader.take(bytes)?;
        seen.push((kind, header.to_vec()));
        if kind == 44 {
            let (offset, more) = (
                header[2..4]
                    .iter()
                    .fold(0, |sum, &byte| sum * 256 + u32::from(byte))
                    / 8,
                header[3] % 2,
            );
            fragment = match (offset, more) {
                (0, 0) => Fragment::Atomic,
                (0, _) => Fragment::First,
                _ => Fragment::Later,
            };
        }
        kind = header[0].into();
        if fragment == Fragment::Later {
            break;
        }
    }
    Some((kind, reader.at, fragment))
}

/// Ethertype and position of the payload after at most so many of these tags.
fn behind_tags(frame: &[u8], tags: &[usize], most: usize) -> Option<(usize, usize)> {
    let mut reader = Reader::new(frame, 12)?;
    let mut skipped = 0;
    loop {
        let ethertype = reader.number(2)?;
        if !tags.contains(&ethertype) || skipped == most {
            return Some((ethertype, reader.at));
        }
        reader.take(2)?;
        skipped += 1;
    }
}

/// The known bytes of a packet; `None`: it is not inside a frame of `len` bytes, or its header not in the known ones.
fn sound<'a>(packet: &Packet, known: &'a [u8], len: usize) -> Option<&'a [u8]> {
    let of_packet = &known[..packet.end.min(known.len())];
    (packet.end <= len && packet.payload <= of_packet.len()).then_some(of_packet)
}

fn compare_ip(known: &[u8], len: usize, at: usize) {
    let (v4, reference) = (Ipv4::at(known, at), ipv4(known, at));
    assert_eq!(v4.is_some(), reference.is_some(), "IPv4");
    if let (Some(ip), Some(packet)) = (v4, reference) {
        assert_eq!(
            (&ip.source[..], &ip.destination[..]),
            (&packet.source[..], &packet.destination[..])
        );
        assert_eq!(ip.span.end, packet.end);
        assert_eq!(ip.span.packet(known, len), sound(&packet, known, len));
        compare_upper(Some(ip.upper), packet.upper);
    }
    let whole = Ipv6::at(known, at);
    assert_eq!(
        whole.is_some(),
        ipv6(known, at, known, Follow::All).is_some(),
        "IPv6"
    );
    let Some(ip) = whole else { return };
    for follow in [Follow::Usual, Follow::All] {
        let packet = ipv6(known, at, known, follow).expect("it was there");
        assert_eq!(
            (&ip.source[..], &ip.destination[..]),
            (&packet.source[..], &packet.destination[..])
        );
        assert_eq!(
            (ip.span.end, usize::from(ip.hop_limit)),
            (packet.end, packet.hop_limit)
        );
        let strict = ip.span.packet(known, len);
        assert_eq!(strict, sound(&packet, known, len));
        for known in [Some(known), strict].into_iter().flatten() {
            let packet = ipv6(known, at, known, follow).expect("it was there");
            let mut seen = Vec::new();
            let upper = ip.upper_with(known, follow, |kind, header| {
                seen.push((kind.into(), header.to_vec()));
            });
            assert_eq!(upper, ip.upper(known, follow));
            assert_eq!(seen, packet.extensions);
            compare_upper(upper, packet.upper);
        }
    }
}

fn compare_upper(upper: Option<Upper>, reference: Option<(usize, usize, Fragment)>) {
    let found = upper.map(|upper| (upper.protocol.into(), upper.at, upper.fragment));
    assert_eq!(found, reference);
}

/// TCP or UDP that is no fragment: where IP, transport, payload begin and the packet ends.
fn compare_layers(frame: &[u8], len: usize) {
    let known = &frame[..frame.len().min(HEADERS_MAX)];
    let reference = || {
        let (ethertype, ip) = behind_tags(known, &[0x8100, 0x88a8], 2)?;
        let packet = match ethertype {
            0x0800 => ipv4(known, ip)?,
            0x86dd => ipv6(known, ip, known, Follow::Usual)?,
            _ => return None,
        };
        let (protocol, transport, fragment) = packet.upper?;
        let mut reader = Reader::new(known, transport)?;
        let bytes = match protocol {
            17 => 8,
            6 => {
                reader.clone().take(12)?;
                let words = reader.clone().take(13)?[12] / 16;
                usize::from(words) * 4
            }
            _ => return None,
        };
        reader.take(bytes)?;
        let is_sound = packet.end <= len && reader.at <= packet.end && (protocol == 17 || bytes >= 20);
        (is_sound && fragment == Fragment::None)
            .then_some(((packet.version, protocol), [ip, transport, reader.at, packet.end]))
    };
    let found = layers::parse(frame, len as u32).map(|found| {
        let version = if found.version == Ip::V4 { 4 } else { 6 };
        let protocol = if found.transport_kind == Transport::Tcp {
            6
        } else {
            17
        };
        let places = [found.ip, found.transport, found.payload].map(usize::from);
        let [ip, transport, payload] = places;
        (
            (version, protocol),
            [ip, transport, payload, found.ip_len_end as usize],
        )
    });
    assert_eq!(found, reference());
}

fn compare_llc(frame: &[u8], at: usize) {
    let behind = &frame[at.min(frame.len())..];
    let snap = |organisation: [u8; 3]| {
        let named = behind
            .strip_prefix(&[0xaa, 0xaa, 3])?
            .strip_prefix(&organisation)?;
        let named = usize::from(*named.first()?) * 256 + usize::from(*named.get(1)?);
        (named >= 0x0600).then_some(named)
    };
    let named = snap([0; 3]).or_else(|| snap([0, 0, 0xf8]));
    let Payload { ethertype, at: end } = ethernet::behind_llc(frame, at);
    assert_eq!(usize::from(ethertype), named.unwrap_or(0));
    assert_eq!(end, at + behind.len().min(8));
}

fn compare_arp(frame: &[u8], at: usize) {
    let reference = || {
        let mut reader = Reader::new(frame, at)?;
        let kinds = [2, 2, 1, 1].map(|bytes| reader.number(bytes));
        let operation = reader.number(2)?;
        let sender_mac = reader.take(6)?;
        let sender = reader.take(4)?;
        reader.take(6)?;
        let target = reader.take(4)?;
        (kinds == [1, 0x0800, 6, 4].map(Some)).then_some((operation, sender_mac, sender, target))
    };
    let message = Arp::at(frame, at);
    assert_eq!(message.is_some(), reference().is_some());
    if let (Some(message), Some((operation, sender_mac, sender, target))) = (message, reference()) {
        assert_eq!(usize::from(message.operation), operation);
        assert_eq!(message.sender_mac, sender_mac);
        assert_eq!((&message.sender[..], &message.target[..]), (sender, target));
    }
}

fn compare_options(bytes: &[u8]) {
    let (mut expected, mut rest) = (Vec::new(), bytes);
    while !rest.is_empty() {
        let len = rest.get(1).map_or(0, |&eights| usize::from(eights) * 8);
        if len == 0 || len > rest.len() {
            expected.push(None);
            break;
        }
        expected.push(Some((rest[0], &rest[2..len])));
        rest = &rest[len..];
    }
    assert_eq!(Options::new(bytes).collect::<Vec<_>>(), expected);
}

/// Compares all readers on a frame of `len` bytes that begins with these, all of them or [`HEADERS_MAX`].
///
/// # Panics
/// If one of them finds something else than the reference.
pub(crate) fn compare(known: &[u8], len: usize) {
    for (skip, tags, most) in [
        (Skip::Vlan, &[0x8100][..], 1),
        (Skip::TwoTags, &[0x8100, 0x88a8], 2),
    ] {
        let found = ethernet::payload(known, skip);
        let places = found.map(|Payload { ethertype, at }| (usize::from(ethertype), at));
        assert_eq!(places, behind_tags(known, tags, most), "{skip:?}");
        let Some(Payload { ethertype, at }) = found else {
            continue;
        };
        if ethertype < ethertype::FIRST {
            compare_llc(known, at);
        }
        // Whatever the ethertype is: each parser must handle any bytes.
        compare_ip(known, len, at);
        compare_arp(known, at);
        compare_options(known.get(at..).unwrap_or_default());
    }
    compare_layers(known, len);
}
