//! How a ring entry's 64-bit address identifies a chunk and an offset in it.

use crate::frame::Frame;
use crate::units::UmemOffset;

/// The part of an address without the 16 bits of distance (`XSK_UNALIGNED_BUF_ADDR_MASK`).
pub(crate) const ADDRESS_MASK: u64 = (1 << 48) - 1;

/// How a ring entry's 64-bit address identifies a chunk and an offset in it.
///
/// Aligned mode: one number; the chunk is the number rounded down. Unaligned mode: a base in the low 48 bits and
/// the distance from it in the high 16 (`xp_unaligned_add_offset_to_addr`, `include/net/xsk_buff_pool.h`). A
/// completion returns the address as it was sent, so base and distance also identify the frame. There is one
/// exception: Linux 6.18 keeps a flag in the lowest bit of an address on its way through copy mode, and clears
/// that bit in the completion (`xsk_skb_destructor_set_addr`, `net/xdp/xsk.c`; observed on 6.18). So a base that
/// is sent is always even: an odd base is sent [`ODD_SHIFT`] bytes lower, with a distance that much larger, and
/// the large distance in the completion shows that.
///
/// Each mode is a set of constants; there is no branch on the mode.
#[derive(Clone, Copy, Debug)]
pub struct AddressCodec {
    base_mask: u64,
    delta_shift: u32,
    delta_max: u64,
    odd_shift: u64,
}

/// How far an odd base is moved down in unaligned mode, bytes. More than any distance inside a chunk.
const ODD_SHIFT: u64 = 0x8001;

impl AddressCodec {
    pub(crate) fn new(chunk_size: u32, unaligned: bool) -> Self {
        if unaligned {
            Self {
                base_mask: ADDRESS_MASK,
                delta_shift: 48,
                delta_max: 0xffff - ODD_SHIFT,
                odd_shift: ODD_SHIFT,
            }
        } else {
            let delta_max = u64::from(chunk_size) - 1;
            Self {
                base_mask: !delta_max,
                delta_shift: 0,
                delta_max,
                odd_shift: 0,
            }
        }
    }

    /// The frame that an address belongs to. (In aligned mode the high bits are zero.)
    #[inline]
    pub(crate) fn frame(self, address: u64) -> Frame {
        let moved_down = (address >> 63) * ODD_SHIFT;
        Frame::new((address & self.base_mask) + moved_down)
    }

    /// The offset of an address: base plus distance. (In aligned mode the high bits are zero.)
    #[inline]
    pub(crate) fn data(self, address: u64) -> UmemOffset {
        UmemOffset::new((address & ADDRESS_MASK) + (address >> 48))
    }

    /// The address of `data` in the chunk of `frame`.
    ///
    /// Data outside the chunk is sent from the right place, but its completion identifies another frame; that is the
    /// caller's fault and caught in debug builds. The same happens, uncaught, to an odd frame in the first 32 KiB.
    #[inline]
    pub(crate) fn address(self, frame: &Frame, data: UmemOffset) -> u64 {
        let base = frame.offset().get();
        let delta = data.get().wrapping_sub(base);
        debug_assert!(
            delta <= self.delta_max,
            "data at {data} is not in the chunk at {base:#x}"
        );
        let down = (base & 1) * self.odd_shift;
        if delta <= self.delta_max && down <= base {
            (base - down) + ((delta + down) << self.delta_shift)
        } else {
            data.get()
        }
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_address_names_chunk_and_place() {
        let codec = AddressCodec::new(2048, false);
        let address = codec.address(&Frame::new(4096), UmemOffset::new(4096 + 300));
        assert_eq!(address, 4396);
        assert_eq!(codec.frame(address), Frame::new(4096));
        assert_eq!(codec.data(address).get(), 4396);
    }

    #[test]
    fn unaligned_address_carries_the_distance_in_its_high_bits() {
        let codec = AddressCodec::new(4096, true);
        let address = codec.address(&Frame::new(0x1_2344), UmemOffset::new(0x1_2344 + 268));
        assert_eq!(address, 0x1_2344 | 268 << 48);
        // As the kernel makes them for received frames, odd or not.
        assert_eq!(codec.frame(0x7777 | 256 << 48), Frame::new(0x7777));
        assert_eq!(codec.data(0x7777 | 256 << 48).get(), 0x7777 + 256);
    }

    #[test]
    fn every_frame_sent_is_told_from_its_completion_without_the_lowest_bit() {
        let codec = AddressCodec::new(4096, true);
        for base in [
            0,
            2,
            0x8001,
            0x8002,
            0x1_2345,
            0x1_2346,
            0x7fff_ffff_efff,
            0xffff_ffff_f000,
        ] {
            for delta in [0, 1, 12, 268, 4095, 0x7ffe] {
                let address = codec.address(&Frame::new(base), UmemOffset::new(base + delta));
                assert_eq!(codec.data(address).get(), base + delta);
                assert_eq!(address & 1, 0, "{base:#x}+{delta}");
                assert_eq!(codec.frame(address), Frame::new(base), "{base:#x}+{delta}");
            }
        }
        // No room to move down: sent from the right place all the same.
        let low = codec.address(&Frame::new(0x7fff), UmemOffset::new(0x7fff + 12));
        assert_eq!(codec.data(low).get(), 0x7fff + 12);
    }
}
