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
    fn frame_has_a_tag_by_its_ethertype() {
        for (ethertype, is_tagged) in [([0x81, 0x00], true), ([0x88, 0xa8], true), ([0x08, 0x00], false)] {
            let frame = [&[1; ADDRESS_BYTES][..], &ethertype].concat();
            assert_eq!(has_tag(&frame), is_tagged, "{ethertype:x?}");
            assert!(!has_tag(&frame[..ADDRESS_BYTES + 1]));
        }
    }

    #[test]
    fn payload_is_behind_the_tags_that_are_skipped() {
        let frame = |kinds: &[u8]| [&[1; ADDRESS_BYTES][..], kinds, &[0; 8]].concat();
        let of = |kinds: &[u8], skip| payload(&frame(kinds), skip).map(|found| (found.ethertype, found.at));
        let (one, two) = (Skip::Vlan, Skip::TwoTags);
        assert_eq!(of(&[0x08, 0x00], one), Some((0x800, 14)));
        assert_eq!(of(&[0x81, 0x00, 0, 5, 0x08, 0x00], one), Some((0x800, 18)));
        let vlans = [0x81, 0x00, 0, 5, 0x81, 0x00, 0, 6, 0x08, 0x00];
        assert_eq!(
            (of(&vlans, one), of(&vlans, two)),
            (Some((0x8100, 18)), Some((0x800, 22)))
        );
        let service = [0x88, 0xa8, 0, 5, 0x81, 0x00, 0, 6, 0x08, 0x00];
        assert_eq!(
            (of(&service, one), of(&service, two)),
            (Some((0x88a8, 14)), Some((0x800, 22)))
        );
        let other = [0x91, 0x00, 0, 5, 0x08, 0x00];
        assert_eq!(of(&other, two), Some((0x9100, 14)));
        for len in 0..16 {
            assert!(payload(&frame(&vlans)[..len], one).is_none(), "{len} bytes");
        }
    }

    #[test]
    fn snap_names_what_an_llc_frame_carries() {
        let of = |llc: &[u8]| {
            let frame = [&[1; HEADER_BYTES][..], llc].concat();
            let found = behind_llc(&frame, HEADER_BYTES);
            (found.ethertype, found.at)
        };
        assert_eq!(of(&[0xaa, 0xaa, 3, 0, 0, 0, 0x08, 0x00, 0x45]), (0x800, 22));
        assert_eq!(of(&[0xaa, 0xaa, 3, 0, 0, 0xf8, 0x08, 0x06, 0]), (0x806, 22));
        // A length, another organization, spanning tree, and SNAP that is not whole.
        assert_eq!(of(&[0xaa, 0xaa, 3, 0, 0, 0, 0x05, 0xff, 0]), (LLC, 22));
        assert_eq!(of(&[0xaa, 0xaa, 3, 0, 0, 0, 0x06, 0x00, 0]), (0x600, 22));
        assert_eq!(of(&[0xaa, 0xaa, 3, 0, 0, 1, 0x08, 0x00, 0]), (LLC, 22));
        assert_eq!(of(&[0x42, 0x42, 3]), (LLC, 17));
        assert_eq!(of(&[0xaa, 0xaa, 3, 0, 0, 0, 0x08]), (LLC, 21));
        assert_eq!(
            behind_llc(&[1; HEADER_BYTES], HEADER_BYTES + 9).at,
            HEADER_BYTES + 9
        );
    }

    #[test]
    fn frames_for_the_other_end_of_a_link_are_recognized() {
        let of = |to: [u8; 6], kinds: &[u8]| {
            let mut bytes = [0; LOOK_BYTES];
            bytes[..6].copy_from_slice(&to);
            bytes[ADDRESS_BYTES..][..kinds.len()].copy_from_slice(kinds);
            link_control(&bytes, head(&bytes).tags)
        };
        let reserved = |last| [0x01, 0x80, 0xc2, 0, 0, last];
        let (lldp, pause, ip) = ([0x88, 0xcc], [0x88, 0x08], [0x08, 0x00]);
        for last in [0, 2, 14, 15] {
            assert_eq!(of(reserved(last), &lldp), Some(LinkControl::Protocol), "{last}");
        }
        assert_eq!(of(reserved(1), &ip), Some(LinkControl::Mac));
        for (to, kinds) in [
            (reserved(16), lldp),
            (reserved(17), ip),
            ([0x01, 0x80, 0xc2, 0, 1, 1], ip),
        ] {
            assert_eq!(of(to, &kinds), None, "{to:x?}");
        }
        // MAC control to any address, also behind a tag.
        assert_eq!(of([2; 6], &pause), Some(LinkControl::Mac));
        assert_eq!(
            of([2; 6], &[0x81, 0x00, 0, 5, 0x88, 0x08]),
            Some(LinkControl::Mac)
        );
        assert_eq!(of([2; 6], &[0x81, 0x00, 0, 5, 0x08, 0x00]), None);
        assert_eq!(of([2; 6], &ip), None);
    }

    #[test]
    fn vlan_is_written_and_the_priority_stays() {
        let mut frame = tagged(&[9; 60], 5);
        assert_eq!(frame, [&[9; 12][..], &[0x81, 0, 0, 5], &[9; 48]].concat());
        frame[14] = 0xef;
        set_vlan(&mut frame, 0xabc);
        assert_eq!(frame, [&[9; 12][..], &[0x81, 0, 0xea, 0xbc], &[9; 48]].concat());
        assert_eq!(tagged(&[9; 60], 0), [9; 60]);
        assert_eq!(tagged(&[9; 3], 5), [9, 9, 9, 0x81, 0, 0, 5]);
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
