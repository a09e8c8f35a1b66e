//! The Ethernet header with its VLAN tags (IEEE 802.3; tags: IEEE 802.1Q, 802.1ad), and the LLC header (IEEE 802.2).

use crate::ethertype::{FIRST, LLC, MAC_CONTROL, SERVICE_VLAN, VLAN, is_tag};
use crate::word;

/// Bytes of the two addresses, after which a tag or the ethertype begins.
pub const ADDRESS_BYTES: usize = 12;
/// Bytes of a tag.
pub const TAG_BYTES: usize = 4;
/// Bytes of a header without tags.
pub const HEADER_BYTES: usize = ADDRESS_BYTES + 2;

/// An address.
pub type Mac = [u8; 6];

/// Number of bytes that [`head`] reads.
pub const LOOK_BYTES: usize = ADDRESS_BYTES + TAG_BYTES + 2;
/// First bytes of the 16 addresses that are reserved for the two ends of a link.
const RESERVED: [u8; 5] = [0x01, 0x80, 0xc2, 0x00, 0x00];
/// Last byte of the reserved address for pauses.
const PAUSE: u8 = 1;
/// The bits of a tag's second half that are the VLAN; the others are the priority.
const VLAN_BITS: u16 = 0xfff;

/// A parsed header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// The destination.
    pub to: Mac,
    /// The source.
    pub from: Mac,
    /// Its tags.
    pub tags: Tags,
}

/// The tags of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tags {
    /// None.
    None,
    /// One (802.1Q), of that VLAN; 0: the tag has a priority only.
    One(u16),
    /// The outermost is a service tag. Its number is not a VLAN of the network: for an 802.1Q bridge such a frame is
    /// untagged (IEEE 802.1Q, 6.9: a component reads its own type of tag only).
    Service,
    /// Several, of which the outermost is of that VLAN.
    Several(u16),
}

impl Tags {
    /// The frame's VLAN; 0: of none.
    #[inline]
    pub fn vlan(self) -> u16 {
        match self {
            Self::None | Self::Service => 0,
            Self::One(vlan) | Self::Several(vlan) => vlan,
        }
    }
}

/// Whether a frame has a tag, by its first bytes.
#[inline]
pub fn has_tag(frame: &[u8]) -> bool {
    word(frame, ADDRESS_BYTES).is_some_and(is_tag)
}

/// Which tags [`payload`] skips, and how many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skip {
    /// One VLAN tag, which receivers remove. After other tags a receiver may parse the payload differently.
    Vlan = 1,
    /// Up to two tags, VLAN or service.
    TwoTags = 2,
}

/// The payload of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Payload {
    /// Its ethertype: a tag's, if more of them follow than are skipped; or, below [`FIRST`], the length of an LLC frame.
    pub ethertype: u16,
    /// Where it begins, bytes from the frame's first.
    pub at: usize,
}

/// Finds the payload of a frame that begins with these bytes; `None`: they end before the ethertype.
#[inline(always)]
pub fn payload(frame: &[u8], skip: Skip) -> Option<Payload> {
    let mut ethertype = word(frame, ADDRESS_BYTES)?;
    let mut at = HEADER_BYTES;
    for _ in 0..skip as usize {
        match ethertype {
            VLAN => (),
            SERVICE_VLAN if skip == Skip::TwoTags => (),
            _ => break,
        }
        ethertype = word(frame, at + 2)?;
        at += TAG_BYTES;
    }
    Some(Payload { ethertype, at })
}

/// SNAP headers whose protocol is an ethertype: that of IEEE 802 (RFC 1042 for IP), and that of bridges (00-00-F8, IEEE
/// 802.1H). Wireless stations remove both, so some receivers accept such frames like those without LLC.
const SNAP: [u8; 6] = [0xaa, 0xaa, 0x03, 0, 0, 0];
const BRIDGE_TUNNEL: [u8; 6] = [0xaa, 0xaa, 0x03, 0, 0, 0xf8];

/// The payload of an LLC frame whose LLC header begins at byte `at`: of ethertype [`LLC`], unless SNAP names another.
/// No byte after the returned position was read.
#[cold]
#[inline(never)]
pub fn behind_llc(frame: &[u8], at: usize) -> Payload {
    let behind = at + SNAP.len() + 2;
    let known = &frame[at.min(frame.len())..behind.min(frame.len())];
    let named = known.strip_prefix(&SNAP).or(known.strip_prefix(&BRIDGE_TUNNEL));
    let named = named.and_then(|named| word(named, 0));
    Payload {
        ethertype: named.filter(|&named| named >= FIRST).unwrap_or(LLC),
        at: at + known.len(),
    }
}

/// Reads a header. `bytes`: the frame's first; those that a short frame does not have are 0.
#[inline]
pub fn head(bytes: &[u8; LOOK_BYTES]) -> Head {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r] = *bytes;
    let vlan = u16::from_be_bytes([o, p]) & VLAN_BITS;
    let tags = match (u16::from_be_bytes([m, n]), u16::from_be_bytes([q, r])) {
        (VLAN, inner) if is_tag(inner) => Tags::Several(vlan),
        (VLAN, _) => Tags::One(vlan),
        (other, _) if is_tag(other) => Tags::Service,
        _ => Tags::None,
    };
    Head {
        to: [a, b, c, d, e, f],
        from: [g, h, i, j, k, l],
        tags,
    }
}

/// The purpose of a frame that is only for the other end of its link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkControl {
    /// MAC control, such as a pause, which hardware handles.
    Mac,
    /// Spanning tree, LACP, 802.1X, LLDP and others.
    Protocol,
}

/// Whether a frame is for the other end of its link alone, so that no bridge forwards it. Such are frames to a reserved
/// address (IEEE 802.1Q, table 8-1), and MAC control (pauses, for instance) to any address (IEEE 802.3, clause 31).
/// With these a guest could make the switch behind the uplink block the port, or wait.
#[inline]
pub fn link_control(bytes: &[u8; LOOK_BYTES], tags: Tags) -> Option<LinkControl> {
    let [a, b, c, d, e, f, .., m, n, _, _, q, r] = *bytes;
    let kind = match tags {
        Tags::None => [m, n],
        _ => [q, r],
    };
    let is_reserved = [a, b, c, d, e] == RESERVED && f < 16;
    if u16::from_be_bytes(kind) == MAC_CONTROL || (is_reserved && f == PAUSE) {
        return Some(LinkControl::Mac);
    }
    is_reserved.then_some(LinkControl::Protocol)
}

/// Writes a VLAN into the priority tag of a frame with this head; its priority stays.
#[inline]
pub fn set_vlan(head: &mut [u8], vlan: u16) {
    if let [.., high, low] = &mut head[..ADDRESS_BYTES + TAG_BYTES] {
        let [first, second] = vlan.to_be_bytes();
        (*high, *low) = (*high & 0xf0 | first, second);
    }
}

/// A tag of a VLAN, without a priority.
#[inline]
pub fn tag(vlan: u16) -> [u8; TAG_BYTES] {
    any_tag(VLAN, vlan)
}

/// A tag of that type, with that VLAN and priority.
#[inline]
pub fn any_tag(proto: u16, tci: u16) -> [u8; TAG_BYTES] {
    let [a, b] = proto.to_be_bytes();
    let [c, d] = tci.to_be_bytes();
    [a, b, c, d]
}

/// The first bytes of a frame, with the tag that the NIC removed inserted again (`proto` and `tci` as in the header).
/// `bytes`: those without it.
#[inline]
pub fn with_tag(bytes: &[u8; LOOK_BYTES], (proto, tci): (u16, u16)) -> [u8; LOOK_BYTES] {
    let mut tagged = *bytes;
    tagged[ADDRESS_BYTES..][..TAG_BYTES].copy_from_slice(&any_tag(proto, tci));
    tagged[ADDRESS_BYTES + TAG_BYTES..].copy_from_slice(&bytes[ADDRESS_BYTES..][..2]);
    tagged
}

/// Inserts the tag of a VLAN into a whole untagged frame; 0: no tag.
pub fn tagged(frame: &[u8], vlan: u16) -> Vec<u8> {
    let (addresses, rest) = frame.split_at(ADDRESS_BYTES.min(frame.len()));
    match vlan {
        0 => frame.to_vec(),
        _ => [addresses, &tag(vlan), rest].concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(kind: &[u8]) -> Tags {
        let mut bytes = [0; LOOK_BYTES];
        bytes[ADDRESS_BYTES..][..kind.len()].copy_from_slice(kind);
        head(&bytes).tags
    }

    #[test]
    fn kinds_of_tags_are_distinguished() {
        assert_eq!(of(&[0x08, 0x00, 0x81, 0x00]), Tags::None);
        assert_eq!(of(&[0x81, 0x00, 0xe0, 0x64, 0x08, 0x00]), Tags::One(100));
        assert_eq!(of(&[0x81, 0x00, 0x00, 0x64, 0x81, 0x00]), Tags::Several(100));
        assert_eq!(of(&[0x81, 0x00, 0x00, 0x64, 0x91, 0x00]), Tags::Several(100));
        assert_eq!(of(&[0x88, 0xa8, 0x00, 0x64, 0x81, 0x00]), Tags::Service);
        assert_eq!(of(&[0x88, 0xa8, 0x00, 0x64, 0x08, 0x00]), Tags::Service);
        assert_eq!(of(&[0x91, 0x00, 0x00, 0x64, 0x08, 0x00]), Tags::Service);
        assert_eq!(of(&[0x81, 0x00, 0xe0, 0x00, 0x08, 0x06]), Tags::One(0));
        assert_eq!(of(&tag(4094)), Tags::One(4094));
    }

    #[test]
    fn tag_that_was_taken_off_is_the_outermost() {
        let of = |kind: &[u8], tag| {
            let mut bytes = [7; LOOK_BYTES];
            bytes[ADDRESS_BYTES..][..kind.len()].copy_from_slice(kind);
            let tagged = with_tag(&bytes, tag);
            assert_eq!(tagged[..ADDRESS_BYTES], bytes[..ADDRESS_BYTES]);
            head(&tagged).tags
        };
        assert_eq!(of(&[0x08, 0x00, 0x45, 0], (0x8100, 0xe064)), Tags::One(100));
        assert_eq!(of(&[0x81, 0x00, 0x00, 5], (0x8100, 100)), Tags::Several(100));
        assert_eq!(of(&[0x08, 0x06, 0x00, 1], (0x88a8, 9)), Tags::Service);
    }

    #[test]
    fn service_tag_is_of_no_vlan() {
        let vlan = |kind: &[u8]| of(kind).vlan();
        assert_eq!(vlan(&[0x81, 0x00, 0xe0, 0x64, 0x88, 0xa8]), 100);
        assert_eq!(vlan(&[0x88, 0xa8, 0x00, 0x64, 0x81, 0x00]), 0);
        assert_eq!(vlan(&[0x88, 0xa8, 0x00, 0x64, 0x08, 0x00]), 0);
        assert_eq!(vlan(&[0x91, 0x00, 0x00, 0x64, 0x08, 0x00]), 0);
    }
}
