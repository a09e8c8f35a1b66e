//! Facts about waiting frames that are not in their bytes.

use crate::switch::to_guest::Delivery;

/// See the module's head. Frames wait in their order, and are taken into a batch in which each has a number.
pub(crate) trait Extras {
    /// Whether the next frame may be in a batch with those that are: of several that are merged only one's goes along.
    fn may_merge(&self) -> bool;
    /// The next frame is in the batch now, behind the others; not `is_one`: it is none, and lost.
    fn push(&mut self, is_one: bool);
    /// The frame of that number is written next, the first of a run.
    fn apply(&self, number: usize, delivery: &mut Delivery<'_>);
    /// The batch is delivered.
    fn clear(&mut self);
}

/// Nothing.
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
