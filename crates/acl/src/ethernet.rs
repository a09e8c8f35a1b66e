//! Tags of Ethernet frames (IEEE 802.1Q, 802.1ad).

/// Bytes of the two addresses, behind which a tag stands.
pub const ADDRESS_BYTES: usize = 12;
/// Bytes of a tag.
pub const TAG_BYTES: usize = 4;
/// Type of a VLAN tag: `ETH_P_8021Q`.
pub const TAG: u16 = 0x8100;
/// Type of a service tag: `ETH_P_8021AD`.
const SERVICE_TAG: u16 = 0x88a8;
/// What others took for a service tag before there was one (`ETH_P_QINQ1` to 3). A switch that frames go to may still.
const OLD_SERVICE_TAGS: [u16; 3] = [0x9100, 0x9200, 0x9300];

/// Whether a type says that a tag follows.
#[inline]
#[must_use]
pub fn is_tag(kind: u16) -> bool {
    matches!(kind, TAG | SERVICE_TAG) || OLD_SERVICE_TAGS.contains(&kind)
}
