//! Layout of the rings in guest memory: offsets, sizes and flags (VirtIO 1.3, 2.7.5 to 2.7.10 for split rings,
//! 2.8.10 and 2.8.13 for packed ones).
//!
//! Everything is little-endian (VERSION_1). The structures are described by offsets, not by Rust types,
//! because no Rust value may live there: each field is loaded or stored separately.

use virtio_bindings::virtio_ring as abi;

/// The chain continues in descriptor `next`.
pub const DESC_NEXT: u16 = abi::VRING_DESC_F_NEXT as u16;
/// The buffer is for the device to write.
pub const DESC_WRITE: u16 = abi::VRING_DESC_F_WRITE as u16;
/// The buffer is a table of descriptors.
pub const DESC_INDIRECT: u16 = abi::VRING_DESC_F_INDIRECT as u16;
/// `avail.flags`: the driver needs no call. A hint, and unused with event idx.
pub const AVAIL_NO_INTERRUPT: u16 = abi::VRING_AVAIL_F_NO_INTERRUPT as u16;
/// `used.flags`: the device needs no kick. A hint, and unused with event idx.
pub const USED_NO_NOTIFY: u16 = abi::VRING_USED_F_NO_NOTIFY as u16;

/// Packed ring: equal to the driver's wrap counter where a descriptor is available.
pub const PACKED_AVAIL: u16 = 1 << abi::VRING_PACKED_DESC_F_AVAIL;
/// Packed ring: equal to [`PACKED_AVAIL`] where a descriptor was used, and unlike it where it is available.
pub const PACKED_USED: u16 = 1 << abi::VRING_PACKED_DESC_F_USED;
/// Bytes of an event suppression structure (slot and wrap counter u16, flags u16), and its alignment.
pub const EVENT_BYTES: u64 = 4;

/// Bytes of one descriptor: address u64, length u32, flags u16, next u16.
pub const DESC_BYTES: u64 = 16;
/// Bytes of one used element: id u32, length u32.
pub const USED_ELEM_BYTES: u64 = 8;
/// Both rings: flags u16 at 0, idx u16 at 2, then the entries.
pub const RING_FLAGS: u64 = 0;
/// See [`RING_FLAGS`].
pub const RING_IDX: u64 = 2;
/// See [`RING_FLAGS`].
pub const RING_ENTRIES: u64 = 4;

/// Alignment of the descriptor table, of the available ring and of the used ring (table in 2.7).
pub const DESC_ALIGN: u64 = 16;
/// See [`DESC_ALIGN`].
pub const AVAIL_ALIGN: u64 = 2;
/// See [`DESC_ALIGN`].
pub const USED_ALIGN: u64 = 4;

/// Bytes of the descriptor table of a queue with `size` entries.
#[must_use]
pub const fn desc_bytes(size: u16) -> u64 {
    DESC_BYTES * size as u64
}

/// Bytes of the available ring, `used_event` included.
#[must_use]
pub const fn avail_bytes(size: u16) -> u64 {
    6 + 2 * size as u64
}

/// Bytes of the used ring, `avail_event` included.
#[must_use]
pub const fn used_bytes(size: u16) -> u64 {
    6 + USED_ELEM_BYTES * size as u64
}

/// Offset of `used_event` in the available ring.
#[must_use]
pub const fn used_event_offset(size: u16) -> u64 {
    RING_ENTRIES + 2 * size as u64
}

/// Offset of `avail_event` in the used ring.
#[must_use]
pub const fn avail_event_offset(size: u16) -> u64 {
    RING_ENTRIES + USED_ELEM_BYTES * size as u64
}

/// One descriptor, copied out of guest memory: the guest cannot change it any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// Guest address of the buffer or of the indirect table.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u32,
    /// `DESC_*` bits; unknown bits are ignored.
    pub flags: u16,
    /// Index of the next descriptor, if [`DESC_NEXT`] is set.
    pub next: u16,
}

impl Descriptor {
    /// From the two words in memory, in the machine's own order.
    #[inline(always)]
    #[must_use]
    pub const fn from_words(low: u64, high: u64) -> Self {
        Self {
            addr: low,
            len: high as u32,
            flags: (high >> 32) as u16,
            next: (high >> 48) as u16,
        }
    }

    /// The two words, in the machine's own order.
    #[must_use]
    pub const fn to_words(self) -> [u64; 2] {
        let high = self.len as u64 | (self.flags as u64) << 32 | (self.next as u64) << 48;
        [self.addr, high]
    }

    /// Whether any bit of `flags` is set.
    #[inline(always)]
    #[must_use]
    pub const fn has(self, flags: u16) -> bool {
        self.flags & flags != 0
    }
}

/// One descriptor of a packed ring, copied out of guest memory. Available and used ones have the same form
/// (2.8.13).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedDescriptor {
    /// Guest address of the buffer or of the indirect table. Unused in a used descriptor.
    pub addr: u64,
    /// Its length in bytes; in a used descriptor, the bytes that were written.
    pub len: u32,
    /// Buffer ID. The ID of a list is that of its last descriptor.
    pub id: u16,
    /// `DESC_*` and `PACKED_*` bits.
    pub flags: u16,
}

impl PackedDescriptor {
    /// From the two words in memory, in the machine's own order.
    #[inline(always)]
    #[must_use]
    pub const fn from_words(low: u64, high: u64) -> Self {
        Self {
            addr: low,
            len: high as u32,
            id: (high >> 32) as u16,
            flags: Self::flags_of(high),
        }
    }

    /// The flags in the second word.
    #[inline(always)]
    #[must_use]
    pub const fn flags_of(high: u64) -> u16 {
        (high >> 48) as u16
    }

    /// The two words, in the machine's own order.
    #[inline(always)]
    #[must_use]
    pub const fn to_words(self) -> [u64; 2] {
        let high = self.len as u64 | (self.id as u64) << 32 | (self.flags as u64) << 48;
        [self.addr, high]
    }

    /// Its buffer in the form of the split ring: the rules on buffers are the same for both.
    #[inline(always)]
    #[must_use]
    pub(crate) const fn buffer(self) -> Descriptor {
        Descriptor {
            addr: self.addr,
            len: self.len,
            flags: self.flags,
            next: 0,
        }
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_specification() {
        assert_eq!(
            (desc_bytes(256), avail_bytes(256), used_bytes(256)),
            (4096, 518, 2054)
        );
        assert_eq!(used_event_offset(256) + 2, avail_bytes(256));
        assert_eq!(avail_event_offset(256) + 2, used_bytes(256));
    }

    #[test]
    fn packed_descriptor_bytes_are_exact() {
        let desc = PackedDescriptor {
            addr: 0x1122_3344_5566_7788,
            len: 0x99aa_bbcc,
            id: 0x0102,
            flags: 0x8083,
        };
        let [low, high] = desc.to_words();
        let bytes = [low.to_le_bytes(), high.to_le_bytes()].concat();
        let expected = [
            0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0xcc, 0xbb, 0xaa, 0x99, 0x02, 0x01, 0x83, 0x80,
        ];
        assert_eq!(bytes, expected);
        assert_eq!(PackedDescriptor::from_words(low, high), desc);
    }

    #[test]
    fn descriptor_bytes_are_exact() {
        let desc = Descriptor {
            addr: 0x1122_3344_5566_7788,
            len: 0x99aa_bbcc,
            flags: 0x0003,
            next: 0x0102,
        };
        let [low, high] = desc.to_words();
        let bytes = [low.to_le_bytes(), high.to_le_bytes()].concat();
        let expected = [
            0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0xcc, 0xbb, 0xaa, 0x99, 0x03, 0x00, 0x02, 0x01,
        ];
        assert_eq!(bytes, expected);
        assert_eq!(Descriptor::from_words(low, high), desc);
    }
}
