//! What goes with frames that wait, beside their bytes.

use crate::switch::to_guest::Delivery;

/// See the module's head. Frames wait in their order, and are taken into a batch in which each has a number.
pub(crate) trait Beside {
    /// Whether the next frame may be in a batch with those that are: of several that are merged only one's goes along.
    fn may_join(&self) -> bool;
    /// The next frame is in the batch now, behind the others; not `is_one`: it is none, and lost.
    fn join(&mut self, is_one: bool);
    /// The frame of that number is written next, the first of a run.
    fn tell(&self, number: usize, delivery: &mut Delivery<'_>);
    /// The batch is delivered.
    fn clear(&mut self);
}

/// Nothing.
impl Beside for () {
    #[inline]
    fn may_join(&self) -> bool {
        true
    }

    #[inline]
    fn join(&mut self, _is_one: bool) {}

    #[inline]
    fn tell(&self, _number: usize, _delivery: &mut Delivery<'_>) {}

    #[inline]
    fn clear(&mut self) {}
}
