//! Headers of IPv4 (RFC 791) and IPv6 (RFC 8200).
//!
//! A view exists only for a complete header of its version. The packet's length field is checked on request. Callers
//! that decide about a frame must parse it as its receiver does, and use [`Span::packet`]; callers that only compute a
//! hash use [`Span::packet_or_rest`].

use crate::ethernet::{self, Payload, Skip};
use crate::ethertype::{FIRST, IPV4, IPV6, is_tag};
use crate::fields::{ipv4, ipv6};
use crate::protocol::*;
use crate::{SHORT_HEAD, bytes, word};

/// Which part of a fragmented packet a packet is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fragment {
    /// It is whole.
    None,
    /// It is whole, and has a fragment header nevertheless (RFC 6946).
    Atomic,
    /// The first part.
    First,
    /// A later part, without the headers of the payload.
    Later,
}

/// The payload of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Upper {
    /// Its protocol; for a later fragment as its IP or fragment header names it.
    pub protocol: u8,
    /// Where it begins, bytes from the frame's first.
    pub at: usize,
    /// Which part of it this packet has.
    pub fragment: Fragment,
}

/// Ends of the first IP header, and of the packet by its length field, in bytes from the frame's first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The header's end, with options of IPv4.
    pub payload: usize,
    /// The packet's end.
    pub end: usize,
}

impl Span {
    /// The known bytes of the frame without padding behind the packet. `known`: its first bytes, `len`: its length.
    /// `None`: the packet claims to be longer than the frame, or the header does not lie in the known bytes.
    #[inline]
    pub fn packet(self, known: &[u8], len: usize) -> Option<&[u8]> {
        if self.end > len {
            return None;
        }
        let packet = &known[..self.end.min(known.len())];
        if self.payload > packet.len() {
            return None;
        }
        Some(packet)
    }

    /// The known bytes of the frame without padding; an impossible length is ignored.
    #[inline]
    pub fn packet_or_rest(self, known: &[u8]) -> &[u8] {
        match self.end > self.payload {
            true => &known[..self.end.min(known.len())],
            false => known,
        }
    }
}

/// Which extension headers of IPv6 are skipped to find the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Follow {
    /// Those that every receiver skips: options, routing, fragment.
    Usual,
    /// All: also authentication, mobility, host identity and shim6, which only hosts skip that agreed on them.
    All,
}

/// The header of an IPv4 packet.
#[derive(Debug, Clone, Copy)]
pub struct Ipv4<'a> {
    /// The source address.
    pub source: &'a [u8; 4],
    /// The destination address.
    pub destination: &'a [u8; 4],
    /// Where header and packet end.
    pub span: Span,
    /// What it carries.
    pub upper: Upper,
}

impl<'a> Ipv4<'a> {
    /// The header that begins at that byte of a frame, of which these are the first.
    #[inline(always)]
    pub fn at(frame: &'a [u8], at: usize) -> Option<Self> {
        let header: &[u8; ipv4::BYTES] = bytes(frame, at)?;
        let header_bytes = usize::from(header[0] & 0xf) * 4;
        if header[0] >> 4 != 4 || header_bytes < ipv4::BYTES {
            return None;
        }
        let payload = at + header_bytes;
        let fragment = word(header, ipv4::FRAGMENT)?;
        Some(Self {
            source: bytes(header, ipv4::SOURCE)?,
            destination: bytes(header, ipv4::DESTINATION)?,
            span: Span {
                payload,
                end: at + usize::from(word(header, ipv4::LEN)?),
            },
            upper: Upper {
                protocol: header[ipv4::PROTOCOL],
                at: payload,
                fragment: match (fragment & 0x1fff, fragment & 0x2000) {
                    (0, 0) => Fragment::None,
                    (0, _) => Fragment::First,
                    _ => Fragment::Later,
                },
            },
        })
    }
}

/// The header of an IPv6 packet.
#[derive(Debug, Clone, Copy)]
pub struct Ipv6<'a> {
    /// The source address.
    pub source: &'a [u8; 16],
    /// The destination address.
    pub destination: &'a [u8; 16],
    /// Where header and packet end.
    pub span: Span,
    /// The first header behind this one: of an extension, or of what the packet carries.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
}

impl<'a> Ipv6<'a> {
    /// See [`Ipv4::at`].
    #[inline(always)]
    pub fn at(frame: &'a [u8], at: usize) -> Option<Self> {
        let header: &[u8; ipv6::BYTES] = bytes(frame, at)?;
        if header[0] >> 4 != 6 {
            return None;
        }
        let payload = at + ipv6::BYTES;
        Some(Self {
            source: bytes(header, ipv6::SOURCE)?,
            destination: bytes(header, ipv6::DESTINATION)?,
            span: Span {
                payload,
                end: payload + usize::from(word(header, ipv6::LEN)?),
            },
            next_header: header[ipv6::NEXT],
            hop_limit: header[ipv6::HOPS],
        })
    }

    /// Finds the payload. `known`: the bytes of the frame that must contain all headers.
    ///
    /// `None`: a header exceeds the known bytes, or there is a second fragment header: a packet has at most one (RFC
    /// 8200, section 4), and the header after it belongs to the chain that the first fragment must contain whole (RFC
    /// 7112). In a later fragment, the fragment header is the last one that is read. Unknown numbers count as
    /// protocols, also those for experiments (253, 254): receivers do not skip them either.
    #[inline]
    pub fn upper(&self, known: &[u8], follow: Follow) -> Option<Upper> {
        match self.next_header {
            protocol @ (TCP | UDP | ICMP_V6) => Some(Upper {
                protocol,
                at: self.span.payload,
                fragment: Fragment::None,
            }),
            _ => self.walk(known, follow),
        }
    }

    #[cold]
    #[inline(never)]
    fn walk(&self, known: &[u8], follow: Follow) -> Option<Upper> {
        self.upper_with(known, follow, |_, _| ())
    }

    /// The same, without a call; `see` is called with number and bytes of each extension header.
    #[inline]
    pub fn upper_with<'k>(
        &self,
        known: &'k [u8],
        follow: Follow,
        mut see: impl FnMut(u8, &'k [u8]),
    ) -> Option<Upper> {
        let (mut protocol, mut at, mut fragment) = (self.next_header, self.span.payload, Fragment::None);
        // Each header has eight bytes at least, so that the known bytes bound their number.
        loop {
            let eights = |at: usize| Some(usize::from(*known.get(at + 1)?));
            let len = match protocol {
                HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => (eights(at)? + 1) * 8,
                MOBILITY | HOST_IDENTITY | SHIM6 if follow == Follow::All => (eights(at)? + 1) * 8,
                AUTHENTICATION if follow == Follow::All => (eights(at)? + 2) * 4,
                FRAGMENT if fragment == Fragment::None => 8,
                FRAGMENT => return None,
                _ => break,
            };
            let header = known.get(at..at + len)?;
            see(protocol, header);
            if protocol == FRAGMENT {
                fragment = match word(header, 2)? {
                    offset if offset & !7 != 0 => Fragment::Later,
                    more if more & 1 != 0 => Fragment::First,
                    _ => Fragment::Atomic,
                };
            }
            (protocol, at) = (header[0], at + len);
            if fragment == Fragment::Later {
                break;
            }
        }
        Some(Upper {
            protocol,
            at,
            fragment,
        })
    }
}

/// Whether the headers that decide about a frame with these first bytes may end behind them: with IPv4 options, IPv6
/// extension headers, ICMPv6, which may announce addresses, LLC, or tags that are not skipped. Then [`HEADERS_MAX`](crate::HEADERS_MAX) are needed.
#[inline]
pub fn is_long(head: &[u8; SHORT_HEAD]) -> bool {
    let payload = ethernet::payload(head, Skip::TwoTags);
    payload.is_some_and(|Payload { ethertype, at }| match ethertype {
        IPV4 => head[at] & 0xf > 5,
        IPV6 => !matches!(head[at + ipv6::NEXT], TCP | UDP),
        other => other < FIRST || is_tag(other),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packet_ends_where_its_length_says_if_the_frame_has_it() {
        let known: Vec<u8> = (0..60).collect();
        let of = |payload, end, len| Span { payload, end }.packet(&known, len).map(<[u8]>::len);
        assert_eq!(of(34, 50, 60), Some(50));
        assert_eq!(of(34, 60, 60), Some(60));
        assert_eq!(of(34, 61, 60), None, "longer than the frame");
        assert_eq!(of(34, 1000, 1000), Some(60), "the rest is not known");
        assert_eq!((of(34, 34, 60), of(34, 33, 60)), (Some(34), None));
        assert_eq!((of(60, 1000, 1000), of(61, 1000, 1000)), (Some(60), None));
    }

    #[test]
    fn length_that_cannot_be_right_is_ignored_where_only_a_hash_is_wanted() {
        let known: Vec<u8> = (0..60).collect();
        let of = |payload, end| Span { payload, end }.packet_or_rest(&known).len();
        assert_eq!((of(34, 35), of(34, 60), of(34, 61)), (35, 60, 60));
        assert_eq!((of(34, 34), of(34, 0)), (60, 60));
    }

    #[test]
    fn ipv4_says_which_fragment_it_is() {
        for (bits, fragment) in [
            (0x0000_u16, Fragment::None),
            (0x4000, Fragment::None),
            (0x2000, Fragment::First),
            (0x2001, Fragment::Later),
            (0x0001, Fragment::Later),
            (0x1fff, Fragment::Later),
        ] {
            let mut packet = [0; 28];
            packet[0] = 0x45;
            packet[ipv4::FRAGMENT..][..2].copy_from_slice(&bits.to_be_bytes());
            let found = Ipv4::at(&packet, 0).expect("a header").upper.fragment;
            assert_eq!(found, fragment, "{bits:#x}");
        }
    }

    #[test]
    fn head_is_long_if_the_headers_that_decide_may_end_behind_it() {
        // Two tags are skipped.
        for tags in [&[][..], &[0x8100], &[0x88a8, 0x8100]] {
            for (ethertype, first, next, long) in [
                (IPV4, 0x45, ICMP_V6, false),
                (IPV4, 0x46, TCP, true),
                (IPV6, 0x60, TCP, false),
                (IPV6, 0x60, UDP, false),
                (IPV6, 0x60, ICMP_V6, true),
                (IPV6, 0x60, HOP_BY_HOP, true),
                (0x0806, 0, 0, false),
                (0x05ff, 0, 0, true),
                (0x0600, 0, 0, false),
                (0x8847, 0, 0, false),
            ] {
                let tags = tags
                    .iter()
                    .flat_map(|tag: &u16| [tag.to_be_bytes(), [0, 7]].concat());
                let mut head: Vec<u8> = [0; 12].into_iter().chain(tags).collect();
                head.extend(ethertype.to_be_bytes());
                head.extend([first, 0, 0, 0, 0, 0, next]);
                head.resize(SHORT_HEAD, 0);
                let head = head.first_chunk().expect("resized");
                assert_eq!(is_long(head), long, "{head:02x?}");
            }
        }
        let three = [&[0; 12][..], &[0x81, 0, 0, 7].repeat(3), &[8, 0, 0x45], &[0; 37]].concat();
        assert!(is_long(three.first_chunk().expect("as many")));
    }

    /// A packet whose first header has this number; the headers, and eight bytes.
    fn ipv6(next: u8, headers: &[&[u8]]) -> Vec<u8> {
        let mut packet = [0; ipv6::BYTES];
        (packet[0], packet[ipv6::NEXT]) = (0x60, next);
        [&packet[..], &headers.concat(), &[0; 8]].concat()
    }

    fn upper(packet: &[u8], follow: Follow) -> Option<(u8, usize, Fragment)> {
        let upper = Ipv6::at(packet, 0)?.upper(packet, follow)?;
        Some((upper.protocol, upper.at, upper.fragment))
    }

    /// A header of `len` bytes, whose length is this number.
    fn header(next: u8, number: u8, len: usize) -> Vec<u8> {
        [&[next, number], &vec![0xee; len - 2][..]].concat()
    }

    #[test]
    fn options_and_routing_are_followed_by_their_lengths() {
        let chain = [
            header(ROUTING, 0, 8),
            header(DESTINATION_OPTIONS, 2, 24),
            header(UDP, 1, 16),
        ];
        let packet = ipv6(HOP_BY_HOP, &chain.each_ref().map(Vec::as_slice));
        for follow in [Follow::Usual, Follow::All] {
            assert_eq!(upper(&packet, follow), Some((UDP, 40 + 48, Fragment::None)));
            assert_eq!(upper(&packet[..40 + 47], follow), None, "a header is not whole");
        }
        assert_eq!(
            upper(&ipv6(TCP, &[]), Follow::Usual),
            Some((TCP, 40, Fragment::None))
        );
        assert_eq!(
            upper(&ipv6(253, &[]), Follow::All),
            Some((253, 40, Fragment::None))
        );
    }

    #[test]
    fn headers_that_hosts_agree_on_are_followed_only_if_all_are() {
        for (number, len) in [
            (MOBILITY, (3 + 1) * 8),
            (HOST_IDENTITY, (3 + 1) * 8),
            (SHIM6, (3 + 1) * 8),
            (AUTHENTICATION, (3 + 2) * 4),
        ] {
            let packet = ipv6(number, &[&header(UDP, 3, len)]);
            assert_eq!(upper(&packet, Follow::All), Some((UDP, 40 + len, Fragment::None)));
            assert_eq!(upper(&packet, Follow::Usual), Some((number, 40, Fragment::None)));
        }
    }

    #[test]
    fn fragment_header_says_which_part_it_is() {
        for (offset, fragment) in [
            ([0, 0], Fragment::Atomic),
            ([0, 1], Fragment::First),
            ([0, 6], Fragment::Atomic),
            ([0, 8], Fragment::Later),
            ([0, 9], Fragment::Later),
            ([1, 0], Fragment::Later),
        ] {
            let own = [&[UDP, 9][..], &offset, &[0; 4]].concat();
            let packet = ipv6(FRAGMENT, &[&own]);
            assert_eq!(
                upper(&packet, Follow::Usual),
                Some((UDP, 48, fragment)),
                "{offset:?}"
            );
            assert_eq!(upper(&packet, Follow::All), Some((UDP, 48, fragment)));
            // A second one, and options: behind a later fragment there are no headers.
            for next in [FRAGMENT, DESTINATION_OPTIONS] {
                let mut first = own.clone();
                first[0] = next;
                let packet = ipv6(FRAGMENT, &[&first, &[UDP, 0, 0, 0, 0, 0, 0, 0]]);
                let expected = match (fragment, next) {
                    (Fragment::Later, _) => Some((next, 48, fragment)),
                    (_, FRAGMENT) => None,
                    _ => Some((UDP, 56, fragment)),
                };
                assert_eq!(upper(&packet, Follow::Usual), expected, "{offset:?} {next}");
            }
        }
    }
}
