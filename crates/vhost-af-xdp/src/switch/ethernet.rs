//! The part of the Ethernet header that decides where a frame goes (IEEE 802.3; tags: IEEE 802.1Q, 802.1ad).

pub(crate) use acl::ethernet::{ADDRESS_BYTES, TAG_BYTES};
use acl::ethernet::{TAG, is_tag};

/// An address.
pub(crate) type Mac = [u8; 6];

/// Bytes that [`head`] looks at.
pub(crate) const LOOK_BYTES: usize = ADDRESS_BYTES + TAG_BYTES + 2;
/// What the 16 addresses begin with that are reserved for the two ends of a link.
const RESERVED: [u8; 5] = [0x01, 0x80, 0xc2, 0x00, 0x00];
/// The last byte of that of a pause.
const PAUSE: u8 = 1;
/// Type of MAC control.
const MAC_CONTROL: u16 = 0x8808;
/// The bits of a tag's second half that are the VLAN; the others are the priority.
const VLAN_BITS: u16 = 0xfff;

/// A parsed header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) to: Mac,
    pub(crate) from: Mac,
    pub(crate) tags: Tags,
}

/// The tags of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tags {
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
    pub(crate) fn vlan(self) -> u16 {
        match self {
            Self::None | Self::Service => 0,
            Self::One(vlan) | Self::Several(vlan) => vlan,
        }
    }
}

/// Whether a frame has a tag, by its first bytes.
pub(crate) fn has_tag(frame: &[u8]) -> bool {
    matches!(frame.get(ADDRESS_BYTES..), Some(&[high, low, ..]) if is_tag(u16::from_be_bytes([high, low])))
}

/// Reads a header. `bytes`: the frame's first; those that a short frame does not have are 0.
#[inline]
pub(crate) fn head(bytes: &[u8; LOOK_BYTES]) -> Head {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r] = *bytes;
    let vlan = u16::from_be_bytes([o, p]) & VLAN_BITS;
    let tags = match (u16::from_be_bytes([m, n]), u16::from_be_bytes([q, r])) {
        (TAG, inner) if is_tag(inner) => Tags::Several(vlan),
        (TAG, _) => Tags::One(vlan),
        (other, _) if is_tag(other) => Tags::Service,
        _ => Tags::None,
    };
    Head {
        to: [a, b, c, d, e, f],
        from: [g, h, i, j, k, l],
        tags,
    }
}

/// What a frame is for that goes to the other end of its link alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinkControl {
    /// MAC control, such as a pause: what takes it is no program.
    Mac,
    /// Spanning tree, LACP, 802.1X, LLDP and others.
    Protocol,
}

/// Whether a frame is for the other end of its link alone, so that no bridge forwards it: to a reserved address (IEEE
/// 802.1Q, table 8-1), or MAC control, such as a pause, to any address (IEEE 802.3, clause 31). With these a guest
/// could make the switch behind the uplink block the port, or wait.
#[inline]
pub(crate) fn link_control(bytes: &[u8; LOOK_BYTES], tags: Tags) -> Option<LinkControl> {
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
pub(crate) fn set_vlan(head: &mut [u8], vlan: u16) {
    if let [.., high, low] = &mut head[..ADDRESS_BYTES + TAG_BYTES] {
        let [first, second] = vlan.to_be_bytes();
        (*high, *low) = (*high & 0xf0 | first, second);
    }
}

/// A tag of a VLAN, without a priority.
#[inline]
pub(crate) fn tag(vlan: u16) -> [u8; TAG_BYTES] {
    any_tag(TAG, vlan)
}

/// A tag of that type, with that VLAN and priority.
#[inline]
pub(crate) fn any_tag(proto: u16, tci: u16) -> [u8; TAG_BYTES] {
    let [a, b] = proto.to_be_bytes();
    let [c, d] = tci.to_be_bytes();
    [a, b, c, d]
}

/// The first bytes of a frame with the tag that the NIC took off (`proto` and `tci` as in the header), by those that it
/// has without.
#[inline]
pub(crate) fn with_tag(bytes: &[u8; LOOK_BYTES], (proto, tci): (u16, u16)) -> [u8; LOOK_BYTES] {
    let mut tagged = *bytes;
    tagged[ADDRESS_BYTES..][..TAG_BYTES].copy_from_slice(&any_tag(proto, tci));
    tagged[ADDRESS_BYTES + TAG_BYTES..].copy_from_slice(&bytes[ADDRESS_BYTES..][..2]);
    tagged
}

/// A whole frame without a tag, as it is in a VLAN, 0: in none.
pub(crate) fn tagged(frame: &[u8], vlan: u16) -> Vec<u8> {
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
