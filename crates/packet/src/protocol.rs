//! IP protocol numbers (IANA, "Protocol Numbers"), which are the numbers of IPv6's extension headers, too.

/// Hop-by-hop options of IPv6.
pub const HOP_BY_HOP: u8 = 0;
/// ICMP.
pub const ICMP: u8 = 1;
/// TCP.
pub const TCP: u8 = 6;
/// UDP.
pub const UDP: u8 = 17;
/// DCCP.
pub const DCCP: u8 = 33;
/// Routing header of IPv6.
pub const ROUTING: u8 = 43;
/// Fragment header of IPv6.
pub const FRAGMENT: u8 = 44;
/// IPsec's authentication header (RFC 4302).
pub const AUTHENTICATION: u8 = 51;
/// ICMPv6.
pub const ICMP_V6: u8 = 58;
/// Destination options of IPv6.
pub const DESTINATION_OPTIONS: u8 = 60;
/// SCTP.
pub const SCTP: u8 = 132;
/// Mobility (RFC 6275).
pub const MOBILITY: u8 = 135;
/// UDP-Lite.
pub const UDP_LITE: u8 = 136;
/// Host identity (RFC 7401).
pub const HOST_IDENTITY: u8 = 139;
/// Shim6 (RFC 5533).
pub const SHIM6: u8 = 140;
