//! Where fields are in the headers of IP, TCP and UDP, bytes from the header's first.

/// IPv4 (RFC 791).
pub mod ipv4 {
    /// Type of service: DSCP and ECN.
    pub const TOS: usize = 1;
    /// Length of the packet.
    pub const LEN: usize = 2;
    /// Identification.
    pub const ID: usize = 4;
    /// Flags and fragment offset.
    pub const FRAGMENT: usize = 6;
    /// "More fragments", and the offset.
    pub const FRAGMENT_BITS: u16 = 0x3fff;
    /// "Don't fragment".
    pub const DONT_FRAGMENT: u16 = 0x4000;
    /// Time to live.
    pub const TTL: usize = 8;
    /// What the packet carries.
    pub const PROTOCOL: usize = 9;
    /// Checksum of the header.
    pub const CHECKSUM: usize = 10;
    /// Source address.
    pub const SOURCE: usize = 12;
    /// Destination address.
    pub const DESTINATION: usize = 16;
    /// Bytes of a header without options.
    pub const BYTES: usize = 20;
}

/// IPv6 (RFC 8200).
pub mod ipv6 {
    /// The byte whose upper half has the lower bits of the traffic class, ECN among them.
    pub const LOW_CLASS: usize = 1;
    /// Length of everything after the header.
    pub const LEN: usize = 4;
    /// The next header.
    pub const NEXT: usize = 6;
    /// Hop limit.
    pub const HOPS: usize = 7;
    /// Source address.
    pub const SOURCE: usize = 8;
    /// Destination address.
    pub const DESTINATION: usize = 24;
    /// Bytes of the header.
    pub const BYTES: usize = 40;
}

/// TCP (RFC 9293, 3.1; CWR: RFC 3168, 6.1).
pub mod tcp {
    /// Sequence number.
    pub const SEQUENCE: usize = 4;
    /// Length of the header, in the upper half of the byte.
    pub const OFFSET: usize = 12;
    /// Flags.
    pub const FLAGS: usize = 13;
    /// No more data.
    pub const FIN: u8 = 1;
    /// Synchronizes sequence numbers.
    pub const SYN: u8 = 1 << 1;
    /// Resets the connection.
    pub const RST: u8 = 1 << 2;
    /// PSH: the receiver passes the data to the application without delay (RFC 9293, 3.1).
    pub const PSH: u8 = 1 << 3;
    /// Urgent data.
    pub const URG: u8 = 1 << 5;
    /// The congestion window was reduced.
    pub const CWR: u8 = 1 << 7;
    /// Checksum.
    pub const CHECKSUM: usize = 16;
    /// Bytes of a header without options.
    pub const BYTES: usize = 20;
}

/// UDP (RFC 768).
pub mod udp {
    /// Source port.
    pub const SOURCE: usize = 0;
    /// Destination port.
    pub const DESTINATION: usize = 2;
    /// Length of header and data.
    pub const LEN: usize = 4;
    /// Checksum.
    pub const CHECKSUM: usize = 6;
    /// Bytes of the header.
    pub const BYTES: usize = 8;
}
