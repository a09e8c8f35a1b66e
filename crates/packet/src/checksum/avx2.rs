//! The sum of bytes by 256-bit vectors.
//!
//! Each vector holds sixteen 16-bit words. An instruction multiplies signed words by one and adds pairs of them: so the
//! words are made signed first, by flipping their highest bits, which is as if [`BIAS`] were subtracted from each.
#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m256i, _mm256_add_epi32, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_set1_epi16,
    _mm256_setzero_si256, _mm256_storeu_si256, _mm256_xor_si256,
};

use super::Sum;

/// What is subtracted from each word.
const BIAS: u64 = 0x8000;
/// Most bytes: each lane of 32 bits gets two words of each vector, so it holds the sum of 2^16 words, which are -2^15 at
/// least. No frame is longer.
const MOST: usize = 1 << 20;

/// The sum, or `None` if the processor has no AVX2 (detected once, cached by the standard library), or there are too many
/// bytes.
#[inline]
pub(super) fn sum(bytes: &[u8]) -> Option<Sum> {
    let (vectors, rest) = bytes.as_chunks();
    let may = bytes.len() <= MOST && std::arch::is_x86_feature_detected!("avx2");
    // SAFETY: the processor has AVX2, for which the function is compiled.
    may.then(|| unsafe { sum_avx2(vectors) } + Sum::of_short(rest))
}

#[target_feature(enable = "avx2")]
fn sum_avx2(vectors: &[[u8; 32]]) -> Sum {
    let (flip, one) = (_mm256_set1_epi16(i16::MIN), _mm256_set1_epi16(1));
    let pairs = |vector: &[u8; 32]| {
        // SAFETY: the vector is 32 bytes long, and the load needs no alignment.
        let words: __m256i = unsafe { _mm256_loadu_si256(vector.as_ptr().cast()) };
        _mm256_madd_epi16(_mm256_xor_si256(words, flip), one)
    };
    let (blocks, last) = vectors.as_chunks::<4>();
    let mut sums = [_mm256_setzero_si256(); 2];
    for [a, b, c, d] in blocks {
        sums[0] = _mm256_add_epi32(_mm256_add_epi32(sums[0], pairs(a)), pairs(b));
        sums[1] = _mm256_add_epi32(_mm256_add_epi32(sums[1], pairs(c)), pairs(d));
    }
    for vector in last {
        sums[0] = _mm256_add_epi32(sums[0], pairs(vector));
    }
    let mut lanes = [0i32; 8];
    // SAFETY: eight lanes of 32 bits are as long as the vector, and the store needs no alignment.
    unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), _mm256_add_epi32(sums[0], sums[1])) };
    let signed: i64 = lanes.iter().map(|&lane| i64::from(lane)).sum();
    Sum(signed
        .cast_unsigned()
        .wrapping_add(16 * BIAS * vectors.len() as u64))
}
