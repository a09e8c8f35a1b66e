//! The Toeplitz hash: for each bit of the input that is set, 32 bits of the key from that place on, all of them XORed.
//!
//! Since that is linear, the contribution of a byte at one position is looked up: 256 sums for each of at most 36
//! input bytes, computed once per key. The tables take 36 KiB, of which a frame touches a cache line for each byte
//! of its input. That is fewer than with tables for half bytes, and it was faster in each setting than those, and
//! than masks, for which the compiler uses vector instructions (`examples/hash_cost.rs`).

/// Longest key, bytes: 36 bytes of input, and 32 bits for its last bit. It is also the minimum for
/// `rss_max_key_size` (VirtIO 1.3, 5.1.4.1).
pub const KEY_BYTES: usize = MOST_INPUT + 4;
/// Longest input: two addresses of IPv6 and two ports, bytes.
pub const MOST_INPUT: usize = 36;

/// The contribution of a byte, by its value.
type Sums = [u32; 256];

/// The tables of a key.
#[derive(Clone)]
pub struct Toeplitz {
    /// For each byte of the input.
    bytes: Box<[Sums]>,
}

impl Toeplitz {
    /// Computes the tables of a key.
    #[must_use]
    pub fn new(key: &[u8; KEY_BYTES]) -> Self {
        let bytes = key.windows(5).map(|window| {
            let window = window.iter().fold(0, |all, &byte| all << 8 | u64::from(byte));
            let mut sums = [0; 256];
            for value in 1..sums.len() {
                // Input bit N takes 32 bits of the key from bit N on, counted from the highest bit of the first byte
                // (Microsoft, "RSS Hashing Functions"). The lowest bit of a byte is its bit 7: the shift is 1.
                let lowest = value.trailing_zeros();
                #[allow(clippy::cast_possible_truncation)]
                let part = (window >> (1 + lowest)) as u32;
                sums[value] = sums[value & (value - 1)] ^ part;
            }
            sums
        });
        Self {
            bytes: bytes.collect(),
        }
    }

    /// The hash of an input in several parts.
    ///
    /// Bytes beyond [`MOST_INPUT`] are ignored.
    #[inline]
    #[must_use]
    pub fn hash(&self, input: &[&[u8]]) -> u32 {
        let (mut hash, mut tables) = (0, &self.bytes[..]);
        for part in input {
            let (now, later) = tables.split_at(part.len().min(tables.len()));
            let sums = now.iter().zip(*part);
            hash ^= sums.fold(0, |hash, (sums, &byte)| hash ^ sums[usize::from(byte)]);
            tables = later;
        }
        hash
    }
}

impl std::fmt::Debug for Toeplitz {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The tables are the key in another form, and unreadable.
        f.debug_struct("Toeplitz").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition, bit by bit.
    fn by_definition(key: &[u8; KEY_BYTES], input: &[u8]) -> u32 {
        let bit = |bytes: &[u8], at: usize| bytes[at / 8] >> (7 - at % 8) & 1;
        let mut hash = 0;
        for at in 0..input.len() * 8 {
            if bit(input, at) == 1 {
                let window = (at..at + 32).fold(0, |all, at| all << 1 | u32::from(bit(key, at)));
                hash ^= window;
            }
        }
        hash
    }

    proptest! {
        #[test]
        fn tables_give_what_the_definition_gives(
            key in prop::array::uniform32(any::<u8>()), rest: [u8; 8],
            input in prop::collection::vec(any::<u8>(), 0..=MOST_INPUT), cut in 0..=MOST_INPUT,
        ) {
            let mut whole = [0; KEY_BYTES];
            whole[..32].copy_from_slice(&key);
            whole[32..].copy_from_slice(&rest);
            let expected = by_definition(&whole, &input);
            let (one, other) = input.split_at(cut.min(input.len()));
            prop_assert_eq!(Toeplitz::new(&whole).hash(&[one, &[], other]), expected);
        }
    }
}
