//! Facts about waiting frames that are not in their bytes.

use crate::guest::to_guest::Delivery;

/// See the module's head. Frames wait in order, and are taken into a batch in which each has a number.
pub(crate) trait Extras {
    /// Whether the next frame may be added to the batch: of merged frames, only the first one's facts are kept.
    fn may_merge(&self) -> bool;
    /// The next frame was added to the batch; not `is_one`: it was invalid, and is lost.
    fn push(&mut self, is_one: bool);
    /// The run of frames that begins with this number is written next.
    fn apply(&self, number: usize, delivery: &mut Delivery<'_>);
    /// The batch was delivered.
    fn clear(&mut self);
}

/// No facts.
impl Extras for () {
    #[inline]
    fn may_merge(&self) -> bool {
        true
    }

    #[inline]
    fn push(&mut self, _is_one: bool) {}

    #[inline]
    fn apply(&self, _number: usize, _delivery: &mut Delivery<'_>) {}

    #[inline]
    fn clear(&mut self) {}
}
