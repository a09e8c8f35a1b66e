//! Ethertypes (IANA, "IEEE 802 Numbers"; include/uapi/linux/if_ether.h).

/// IPv4.
pub const IPV4: u16 = 0x0800;
/// ARP.
pub const ARP: u16 = 0x0806;
/// Reverse ARP.
pub const RARP: u16 = 0x8035;
/// Transparent Ethernet bridging: an Ethernet frame in a tunnel.
pub const ETHERNET: u16 = 0x6558;
/// VLAN tag (IEEE 802.1Q).
pub const VLAN: u16 = 0x8100;
/// IPv6.
pub const IPV6: u16 = 0x86dd;
/// MAC control, such as a pause (IEEE 802.3, clause 31).
pub const MAC_CONTROL: u16 = 0x8808;
/// Service tag (IEEE 802.1ad).
pub const SERVICE_VLAN: u16 = 0x88a8;
/// Lowest ethertype; a lower number is the length of an LLC frame (IEEE 802.3).
pub const FIRST: u16 = 0x0600;
/// Stands for the ethertype of LLC frames that have none.
pub const LLC: u16 = 0;

/// Service tags from before the standard (`ETH_P_QINQ1` to 3), which switches may still use.
const OLD_SERVICE_VLAN_1: u16 = 0x9100;
const OLD_SERVICE_VLAN_2: u16 = 0x9200;
const OLD_SERVICE_VLAN_3: u16 = 0x9300;

/// Whether a tag follows.
#[inline]
pub fn is_tag(ethertype: u16) -> bool {
    matches!(
        ethertype,
        VLAN | SERVICE_VLAN | OLD_SERVICE_VLAN_1 | OLD_SERVICE_VLAN_2 | OLD_SERVICE_VLAN_3
    )
}
