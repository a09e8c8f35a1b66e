//! Types of ICMP's and ICMPv6's messages (IANA, "ICMP Parameters" and "ICMPv6 Parameters"), and the options of neighbour
//! discovery (RFC 4861).

/// ICMP: redirect (RFC 792).
pub const V4_REDIRECT: u8 = 5;
/// ICMP: router advertisement (RFC 1256).
pub const V4_ROUTER_ADVERTISEMENT: u8 = 9;

/// Multicast listener query (RFC 2710).
pub const LISTENER_QUERY: u8 = 130;
/// Multicast listener report (RFC 2710).
pub const LISTENER_REPORT: u8 = 131;
/// Multicast listener done (RFC 2710).
pub const LISTENER_DONE: u8 = 132;
/// Router solicitation (RFC 4861).
pub const ROUTER_SOLICITATION: u8 = 133;
/// Router advertisement (RFC 4861).
pub const ROUTER_ADVERTISEMENT: u8 = 134;
/// Neighbour solicitation (RFC 4861).
pub const NEIGHBOUR_SOLICITATION: u8 = 135;
/// Neighbour advertisement (RFC 4861).
pub const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// Redirect (RFC 4861).
pub const REDIRECT: u8 = 137;
/// Router renumbering (RFC 2894).
pub const ROUTER_RENUMBERING: u8 = 138;
/// Inverse neighbour solicitation (RFC 3122).
pub const INVERSE_SOLICITATION: u8 = 141;
/// Inverse neighbour advertisement (RFC 3122).
pub const INVERSE_ADVERTISEMENT: u8 = 142;
/// Multicast listener report, version 2 (RFC 3810).
pub const LISTENER_REPORT_V2: u8 = 143;

/// Where the target's address is in neighbour solicitations and advertisements, bytes from the message's first.
pub const TARGET_AT: usize = 8;

/// Where the options of a message begin, bytes from its first; `None`: it is none of those that hosts send.
#[inline]
pub fn options_at(kind: u8) -> Option<usize> {
    match kind {
        ROUTER_SOLICITATION => Some(8),
        NEIGHBOUR_SOLICITATION | NEIGHBOUR_ADVERTISEMENT => Some(24),
        _ => None,
    }
}

/// Iterates over the options of a neighbour discovery message: kind and value of each. An option that exceeds the
/// bytes, or has length 0, is `None`, and ends the iteration.
#[derive(Debug, Clone)]
pub struct Options<'a>(&'a [u8]);

impl<'a> Options<'a> {
    /// Kinds of options whose value is a MAC address: the sender's, and the target's.
    pub const MAC_KINDS: [u8; 2] = [1, 2];

    /// The options in these bytes.
    pub fn new(options: &'a [u8]) -> Self {
        Self(options)
    }
}

impl<'a> Iterator for Options<'a> {
    type Item = Option<(u8, &'a [u8])>;

    fn next(&mut self) -> Option<Self::Item> {
        let rest = std::mem::take(&mut self.0);
        if rest.is_empty() {
            return None;
        }
        let eights = rest.get(1).map_or(0, |&eights| usize::from(eights));
        let Some((&[kind, _, ref value @ ..], rest)) = rest.split_at_checked(eights * 8) else {
            return Some(None);
        };
        self.0 = rest;
        Some(Some((kind, value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_begin_behind_the_fields_of_their_message() {
        assert_eq!(options_at(ROUTER_SOLICITATION), Some(8));
        assert_eq!(options_at(NEIGHBOUR_SOLICITATION), Some(24));
        assert_eq!(options_at(NEIGHBOUR_ADVERTISEMENT), Some(24));
        assert_eq!(options_at(ROUTER_ADVERTISEMENT), None);
    }

    #[test]
    fn options_end_with_one_that_is_not_whole() {
        let (mac, long) = (
            [1, 1, 2, 0, 0, 0, 0, 7],
            [[5, 2, 9, 9, 9, 9, 9, 9], [8; 8]].concat(),
        );
        let of = |options: &[&[u8]]| {
            Options::new(&options.concat())
                .map(|option| option.map(|(kind, value)| (kind, value.to_vec())))
                .collect::<Vec<_>>()
        };
        let (first, second) = (Some((1, mac[2..].to_vec())), Some((5, long[2..].to_vec())));
        assert_eq!(of(&[]), []);
        assert_eq!(of(&[&mac, &long]), [first.clone(), second]);
        assert_eq!(of(&[&mac, &long[..15]]), [first.clone(), None]);
        assert_eq!(of(&[&mac, &[5]]), [first.clone(), None]);
        assert_eq!(of(&[&mac, &[5, 0, 0, 0, 0, 0, 0, 0], &mac]), [first, None]);
    }
}
