//! The sum of bytes by 256-bit vectors.
//!
//! Each vector of eight 32-bit words is split into its even and its odd words, zero-extended to 64 bits, which are
//! added to accumulators of their own: a shift, a mask and two additions for 32 bytes.
#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m256i, _mm256_add_epi64, _mm256_and_si256, _mm256_loadu_si256, _mm256_set1_epi64x,
    _mm256_setzero_si256, _mm256_srli_epi64, _mm256_storeu_si256,
};

use super::Sum;

/// The sum, or `None` if the processor has no AVX2 (detected once, cached by the standard library).
#[inline]
pub(super) fn sum(bytes: &[u8]) -> Option<Sum> {
    // SAFETY: the processor has AVX2, for which the function is compiled.
    std::arch::is_x86_feature_detected!("avx2").then(|| unsafe { sum_avx2(bytes) })
}

#[target_feature(enable = "avx2")]
fn sum_avx2(bytes: &[u8]) -> Sum {
    let (blocks, rest) = bytes.as_chunks::<64>();
    let even_words = _mm256_set1_epi64x(0xffff_ffff);
    let mut sums = [_mm256_setzero_si256(); 4];
    for block in blocks {
        for (half, pair) in block.as_chunks::<32>().0.iter().zip(sums.as_chunks_mut::<2>().0) {
            // SAFETY: the block is 32 bytes long, and the load needs no alignment.
            let words: __m256i = unsafe { _mm256_loadu_si256(half.as_ptr().cast()) };
            pair[0] = _mm256_add_epi64(pair[0], _mm256_and_si256(words, even_words));
            pair[1] = _mm256_add_epi64(pair[1], _mm256_srli_epi64::<32>(words));
        }
    }
    let all = _mm256_add_epi64(
        _mm256_add_epi64(sums[0], sums[1]),
        _mm256_add_epi64(sums[2], sums[3]),
    );
    let mut lanes = [0u64; 4];
    // SAFETY: four lanes of 64 bits are as long as the vector, and the store needs no alignment.
    unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), all) };
    lanes
        .iter()
        .fold(Sum::of_short(rest), |sum, &lane| sum + Sum(lane))
}
