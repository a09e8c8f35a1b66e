//! The internet checksum (RFC 1071): full, partial, incremental.
//!
//! A [`Sum`] is unfolded and in the byte order of memory, so that adding bytes needs no swapping: the ones'
//! complement sum is the same in either byte order, except that the result is byte-swapped (RFC 1071, section
//! 2B). Parameters and results are numbers, as `u16::from_be_bytes` reads them from a frame.
//!
//! Long sums use vector units: portable code adds 32-bit words to 64-bit accumulators, which no practical slice
//! overflows; `avx2` adds pairs of 16-bit words to 32-bit lanes, if the processor has it.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(test)]
mod tests;

use std::ops::Add;

use crate::fields::udp;

/// Below this the vector path is not faster, in bytes.
const VECTOR_MIN: usize = 128;

/// An unfolded ones' complement sum.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sum(u64);

impl Sum {
    /// The sum of bytes that begin at an even offset. An odd last byte counts as if a zero followed it (RFC
    /// 1071), so more bytes may be added only after an even number; otherwise see [`Sum::swapped`].
    #[must_use]
    #[inline]
    pub fn of(bytes: &[u8]) -> Self {
        if bytes.len() < VECTOR_MIN {
            return Self::of_short(bytes);
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(sum) = avx2::sum(bytes) {
            return sum;
        }
        Self::of_portable(bytes)
    }

    /// [`Sum::of`] with the target's baseline instructions only, for comparison.
    #[must_use]
    pub fn of_portable(bytes: &[u8]) -> Self {
        let (blocks, rest) = bytes.as_chunks::<32>();
        let mut lanes = [0u64; 8];
        for block in blocks {
            for (lane, word) in lanes.iter_mut().zip(block.as_chunks::<4>().0) {
                *lane += u64::from(u32::from_ne_bytes(*word));
            }
        }
        lanes
            .iter()
            .fold(Self::of_short(rest), |sum, &lane| sum + Self(lane))
    }

    /// Adds word by word: for headers and other short slices, and for the bytes after the last block.
    #[inline]
    pub(crate) fn of_short(bytes: &[u8]) -> Self {
        let (pairs, rest) = bytes.as_chunks::<8>();
        let pairs = pairs.iter().map(|pair| u64::from_ne_bytes(*pair));
        let (words, rest) = rest.as_chunks::<4>();
        let byte = |at: usize| rest.get(at).copied().unwrap_or(0);
        let last = [byte(0), byte(1), byte(2), 0];
        let words = words.iter().chain([&last]);
        let words: u64 = words.map(|word| u64::from(u32::from_ne_bytes(*word))).sum();
        Self(pairs.fold(words, |sum, pair| sum + (pair & 0xffff_ffff) + (pair >> 32)))
    }

    /// Adds a 16-bit field.
    #[must_use]
    #[inline]
    pub fn add_word(self, word: u16) -> Self {
        self + Self(u64::from(word.to_be()))
    }

    /// Adds a 32-bit field.
    #[must_use]
    #[inline]
    pub fn add_u32(self, value: u32) -> Self {
        self + Self(u64::from(value.to_be()))
    }

    /// The sum of the same bytes at offsets of the other parity: for a piece that begins at an odd offset.
    #[must_use]
    #[inline]
    pub fn swapped(self) -> Self {
        Self(u64::from(self.fold().swap_bytes().to_be()))
    }

    /// The sum in 16 bits: the value of a partial checksum field.
    #[must_use]
    #[inline]
    pub fn fold(self) -> u16 {
        let sum = (self.0 & 0xffff_ffff) + (self.0 >> 32);
        // At most 0x1fffe, because only sums up to 0xffff_fffe have the upper bit: the next addition is the last.
        let sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32);
        let sum = (sum & 0xffff) + (sum >> 16);
        u16::from_be(sum as u16)
    }

    /// The complement of the sum in 16 bits: the value of a checksum field. 0 stays 0; UDP writes 0xffff instead.
    #[must_use]
    #[inline]
    pub fn complement(self) -> u16 {
        !self.fold()
    }
}

/// Both sums together, in either order.
impl Add for Sum {
    type Output = Self;

    #[inline]
    fn add(self, other: Self) -> Self {
        let (sum, carry) = self.0.overflowing_add(other.0);
        Self(sum + u64::from(carry))
    }
}

/// The sum of IPv4's pseudo-header (RFC 9293, 3.1; RFC 768). `len`: bytes of the transport header and its payload.
#[must_use]
#[inline]
pub fn pseudo_v4(src: [u8; 4], dst: [u8; 4], protocol: u8, len: u32) -> Sum {
    let sum = Sum::default()
        .add_u32(u32::from_be_bytes(src))
        .add_u32(u32::from_be_bytes(dst));
    sum.add_word(protocol.into()).add_u32(len)
}

/// The sum of IPv6's pseudo-header (RFC 8200, 8.1). `len`: bytes of the transport header and its payload; `dst` is the
/// last destination if there is a routing header.
#[must_use]
#[inline]
pub fn pseudo_v6(src: [u8; 16], dst: [u8; 16], protocol: u8, len: u32) -> Sum {
    let sum = Sum::of_short(&src) + Sum::of_short(&dst);
    sum.add_word(protocol.into()).add_u32(len)
}

/// Where a transport checksum is in a frame, bytes (`csum_start` and `csum_offset` of a virtio-net header).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChecksumAt {
    /// Start of the covered bytes, from the frame's first.
    pub start: u16,
    /// Offset of the checksum field from `start`.
    pub offset: u16,
}

impl ChecksumAt {
    /// Offset of the checksum field from the frame's first byte.
    #[inline]
    #[must_use]
    pub fn field(self) -> usize {
        usize::from(self.start) + usize::from(self.offset)
    }

    /// The bytes to store for a sum: at UDP's offset a zero, which means "none" there, becomes 0xffff (RFC 768).
    #[inline]
    #[must_use]
    pub fn stored(self, sum: Sum) -> [u8; 2] {
        match sum.complement() {
            0 if usize::from(self.offset) == udp::CHECKSUM => [0xff; 2],
            checksum => checksum.to_be_bytes(),
        }
    }
}

/// A checksum field that is not inside its frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "a checksum from byte {}, stored {} bytes behind that, does not fit a frame of {len} bytes",
    at.start, at.offset
)]
pub struct OutOfFrame {
    /// Where it is.
    pub at: ChecksumAt,
    /// Bytes of the frame.
    pub len: usize,
}

/// Completes a partial checksum in place (VirtIO 1.3, 5.1.6.2; `net/core/dev.c` skb_checksum_help). The field holds the
/// sum of the pseudo-header; it gets the complement of the sum of everything from `start` on.
///
/// # Errors
/// [`OutOfFrame`] if the field is not inside the frame; nothing is changed.
#[inline]
pub fn complete(frame: &mut [u8], at: ChecksumAt) -> Result<(), OutOfFrame> {
    let field = at.field();
    if field + 2 > frame.len() {
        let len = frame.len();
        return Err(OutOfFrame { at, len });
    }
    let checksum = at.stored(Sum::of(&frame[at.start.into()..]));
    frame[field..field + 2].copy_from_slice(&checksum);
    Ok(())
}

/// The checksum after one 16-bit field that it covers changed from `old` to `new` (RFC 1624, equation 3).
#[must_use]
#[inline]
pub fn update(checksum: u16, old: u16, new: u16) -> u16 {
    let sum = Sum::default().add_word(!checksum).add_word(!old).add_word(new);
    sum.complement()
}
