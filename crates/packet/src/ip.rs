//! Headers of IPv4 (RFC 791) and IPv6 (RFC 8200).
//!
//! A view exists only over a header that is whole, of its version, and as long as it claims to be. Its length field is
//! checked where a caller wants that: [`Ipv4::packet`] is for callers that decide about a frame, whose receiver must
//! read the same; [`Ipv4::packet_or_rest`] for those that only look for a hash.

use crate::fields::{ipv4, ipv6};
use crate::{bytes, protocol, word};

/// Which part of a fragmented packet a packet is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fragment {
    /// It is whole.
    None,
    /// It is whole, and has a fragment header nevertheless (RFC 6946).
    Atomic,
    /// The first part.
    First,
    /// Another part: it has no headers of what the packet carries.
    Later,
}

/// What a packet carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Upper {
    /// Its protocol; of a later fragment what its header names.
    pub protocol: u8,
    /// Where it begins, bytes from the frame's first.
    pub at: usize,
    /// Which part of it is there.
    pub fragment: Fragment,
}

/// Which extension headers of IPv6 are followed to what the packet carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Follow {
    /// Options and routing: a fragment header is what the packet carries.
    Options,
    /// Those behind which every receiver goes on: options, routing, fragment.
    Usual,
    /// All of them: authentication, mobility, host identity and shim6, too, behind which only hosts that agreed on it go on.
    All,
}

/// The header of an IPv4 packet.
#[derive(Debug, Clone, Copy)]
pub struct Ipv4<'a> {
    header: &'a [u8; ipv4::BYTES],
    at: usize,
}

impl<'a> Ipv4<'a> {
    /// The header that begins at that byte of a frame, of which these are the first.
    #[inline]
    #[must_use]
    pub fn at(frame: &'a [u8], at: usize) -> Option<Self> {
        let header = bytes(frame, at)?;
        if header[0] >> 4 != 4 || usize::from(header[0] & 0xf) * 4 < ipv4::BYTES {
            return None;
        }
        Some(Self { header, at })
    }

    /// Where the packet ends by its own length.
    #[inline]
    #[must_use]
    pub fn end(&self) -> usize {
        self.at + usize::from(number(self.header, ipv4::LEN))
    }

    /// The known bytes of the frame without padding behind the packet. `known`: its first bytes, `len`: its length.
    /// `None`: the packet claims to be longer than the frame, or the header does not lie in the known bytes.
    #[inline]
    #[must_use]
    pub fn packet(&self, known: &'a [u8], len: usize) -> Option<&'a [u8]> {
        packet(known, len, (self.upper().at, self.end()))
    }

    /// The known bytes of the frame without padding; a length that cannot be right is ignored.
    #[inline]
    #[must_use]
    pub fn packet_or_rest(&self, known: &'a [u8]) -> &'a [u8] {
        packet_or_rest(known, (self.upper().at, self.end()))
    }

    /// What it carries.
    #[inline]
    #[must_use]
    pub fn upper(&self) -> Upper {
        let flags = number(self.header, ipv4::FRAGMENT);
        Upper {
            protocol: self.header[ipv4::PROTOCOL],
            at: self.at + usize::from(self.header[0] & 0xf) * 4,
            fragment: match (flags & 0x1fff, flags & 0x2000) {
                (0, 0) => Fragment::None,
                (0, _) => Fragment::First,
                _ => Fragment::Later,
            },
        }
    }

    /// The source address.
    #[inline]
    #[must_use]
    pub fn source(&self) -> &'a [u8; 4] {
        field(self.header, ipv4::SOURCE)
    }

    /// The destination address.
    #[inline]
    #[must_use]
    pub fn destination(&self) -> &'a [u8; 4] {
        field(self.header, ipv4::DESTINATION)
    }
}

/// The header of an IPv6 packet.
#[derive(Debug, Clone, Copy)]
pub struct Ipv6<'a> {
    header: &'a [u8; ipv6::BYTES],
    at: usize,
}

impl<'a> Ipv6<'a> {
    /// See [`Ipv4::at`].
    #[inline]
    #[must_use]
    pub fn at(frame: &'a [u8], at: usize) -> Option<Self> {
        let header = bytes(frame, at)?;
        (header[0] >> 4 == 6).then_some(Self { header, at })
    }

    #[inline]
    fn payload(&self) -> usize {
        self.at + ipv6::BYTES
    }

    /// Where the packet ends by its own length.
    #[inline]
    #[must_use]
    pub fn end(&self) -> usize {
        self.payload() + usize::from(number(self.header, ipv6::LEN))
    }

    /// See [`Ipv4::packet`].
    #[inline]
    #[must_use]
    pub fn packet(&self, known: &'a [u8], len: usize) -> Option<&'a [u8]> {
        packet(known, len, (self.payload(), self.end()))
    }

    /// See [`Ipv4::packet_or_rest`].
    #[inline]
    #[must_use]
    pub fn packet_or_rest(&self, known: &'a [u8]) -> &'a [u8] {
        packet_or_rest(known, (self.payload(), self.end()))
    }

    /// The first header behind this one: of an extension, or of what the packet carries.
    #[inline]
    #[must_use]
    pub fn next_header(&self) -> u8 {
        self.header[ipv6::NEXT]
    }

    /// How many routers may pass it on.
    #[inline]
    #[must_use]
    pub fn hop_limit(&self) -> u8 {
        self.header[ipv6::HOPS]
    }

    /// The source address.
    #[inline]
    #[must_use]
    pub fn source(&self) -> &'a [u8; 16] {
        field(self.header, ipv6::SOURCE)
    }

    /// The destination address.
    #[inline]
    #[must_use]
    pub fn destination(&self) -> &'a [u8; 16] {
        field(self.header, ipv6::DESTINATION)
    }

    /// What it carries. `known`: bytes of the frame in which all headers have to lie.
    ///
    /// `None`: a header does not end in the known bytes, or there is a second fragment header: a packet has one at most
    /// (RFC 8200, section 4), and what is in the next one belongs to the chain that the first fragment has to have
    /// whole (RFC 7112). Of a later fragment the header that says so is the last. Unknown numbers are protocols, those
    /// for experiments (253, 254) too: receivers go on behind them no more than behind others.
    #[inline]
    #[must_use]
    pub fn upper(&self, known: &[u8], follow: Follow) -> Option<Upper> {
        match self.next_header() {
            protocol @ (protocol::TCP | protocol::UDP | protocol::ICMP_V6) => Some(Upper {
                protocol,
                at: self.payload(),
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
    #[must_use]
    pub fn upper_with<'k>(
        &self,
        known: &'k [u8],
        follow: Follow,
        mut see: impl FnMut(u8, &'k [u8]),
    ) -> Option<Upper> {
        use protocol::*;
        let (mut protocol, mut at, mut fragment) = (self.next_header(), self.payload(), Fragment::None);
        // Each header has eight bytes at least, so that the known bytes bound their number.
        loop {
            let eights = |at: usize| Some(usize::from(*known.get(at + 1)?));
            let len = match protocol {
                HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS => (eights(at)? + 1) * 8,
                MOBILITY | HOST_IDENTITY | SHIM6 if follow == Follow::All => (eights(at)? + 1) * 8,
                AUTHENTICATION if follow == Follow::All => (eights(at)? + 2) * 4,
                FRAGMENT if follow == Follow::Options => break,
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

#[inline]
fn packet(known: &[u8], len: usize, (payload, end): (usize, usize)) -> Option<&[u8]> {
    if end > len {
        return None;
    }
    let packet = &known[..end.min(known.len())];
    if payload > packet.len() {
        return None;
    }
    Some(packet)
}

#[inline]
fn packet_or_rest(known: &[u8], (payload, end): (usize, usize)) -> &[u8] {
    match end > payload {
        true => &known[..end.min(known.len())],
        false => known,
    }
}

/// A field of a header.
#[inline(always)]
fn field<const HEADER: usize, const N: usize>(header: &[u8; HEADER], at: usize) -> &[u8; N] {
    // The places are constants: nothing of this remains.
    header[at..at + N].first_chunk().unwrap_or(&[0; N])
}

#[inline(always)]
fn number<const HEADER: usize>(header: &[u8; HEADER], at: usize) -> u16 {
    u16::from_be_bytes(*field(header, at))
}
