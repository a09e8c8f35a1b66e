//! A frame to a group of stations: a copy for each guest that has a buffer now.

use device::pair::Fault;

use super::lane::Peer;
use super::rate_limit::Cost;
use super::to_guest::{Bytes, Delivery, Fit};

/// Writes one of several copies of a frame for a guest, which loses it if it has no buffer now, or may not get it; the frames it got.
/// Errors: what the guest did wrong.
pub(super) fn write_copy(
    Peer {
        pair,
        buffers,
        counters,
        mut policer,
        ..
    }: Peer<'_>,
    len: u32,
    offload: [u8; 10],
    bytes: &mut impl Bytes,
) -> Result<usize, Fault> {
    if !policer.lets_pass(|| Cost::frame(len), counters) {
        return Ok(0);
    }
    let mut delivery = Delivery::begin_with(pair, buffers, counters, 1)?;
    match delivery.fit(len)? {
        Fit::Now => delivery.write(len, offload, bytes),
        Fit::Later => counters.to_guest_no_buffer.add(1),
        Fit::Never => {}
    }
    Ok(delivery.finish())
}
