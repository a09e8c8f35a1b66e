//! Frames as owned values.
//!
//! A [`Frame`] is the right to use one chunk of a UMEM. It can be neither copied nor cloned, so a push into a
//! ring consumes it, and a received or completed frame from the kernel makes a new one:
//!
//! ```text
//!   Umem::frames / Umem::adopt ──▶ Frame ──push──▶ fill ring ──▶ kernel ──▶ rx ring ──▶ Frame
//!                                    │                                                    │
//!                                    └─────push──▶ tx ring ──▶ kernel ──▶ completion ─────┴──▶ Frame
//! ```
//!
//! A `Frame` has no destructor: dropping one leaks its chunk until a new UMEM is made over the memory. The type guards
//! against confusion, not against memory errors: UMEM bytes are only ever reached through bounds-checked raw copies, so
//! that even a caller that breaks the contract of [`Umem::adopt`](crate::Umem::adopt) only garbles frames.

use crate::units::UmemOffset;

/// The right to use one chunk of a UMEM.
///
/// A frame that was pushed into a ring cannot be used again:
///
/// ```compile_fail,E0382
/// fn send_twice(frame: xsk::Frame, fill: &mut xsk::FillRing, other: &mut xsk::FillRing) {
///     fill.reserve(1).push(frame);
///     other.reserve(1).push(frame); // use of moved value: `frame`
/// }
/// ```
///
/// Nor can its offset be read afterwards, nor can it be copied:
///
/// ```compile_fail,E0382
/// fn look_back(frame: xsk::Frame, fill: &mut xsk::FillRing) -> xsk::UmemOffset {
///     fill.reserve(1).push(frame);
///     frame.offset()
/// }
/// ```
///
/// ```compile_fail,E0599
/// fn double(frame: &xsk::Frame) -> xsk::Frame {
///     frame.clone()
/// }
/// ```
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a frame that is dropped is lost to its UMEM; put it back into a pool or a ring"]
#[repr(transparent)]
pub struct Frame(u64);

impl Frame {
    #[inline]
    pub(crate) const fn new(offset: u64) -> Self {
        Self(offset)
    }

    /// Where the chunk starts.
    #[inline]
    pub const fn offset(&self) -> UmemOffset {
        UmemOffset::new(self.0)
    }

    /// Converts the frame to its offset, for memory whose chunks the caller tracks. The opposite of
    /// [`Umem::adopt`](crate::Umem::adopt).
    #[inline]
    pub const fn into_offset(self) -> UmemOffset {
        UmemOffset::new(self.0)
    }
}

/// Free frames, last in first out, so that the chunk used next is the one most likely still in the cache.
///
/// Allocates only when it grows past its initial capacity.
#[derive(Debug, Default)]
pub struct FramePool {
    frames: Vec<Frame>,
}

impl FramePool {
    /// An empty pool with capacity for `frames`.
    pub fn with_capacity(frames: usize) -> Self {
        Self {
            frames: Vec::with_capacity(frames),
        }
    }

    /// Takes the frame put back last.
    #[inline]
    pub fn take(&mut self) -> Option<Frame> {
        self.frames.pop()
    }

    /// Puts a frame back.
    #[inline]
    pub fn put(&mut self, frame: Frame) {
        self.frames.push(frame);
    }

    /// The number of free frames.
    #[inline]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether no frame is free.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }
}

impl Extend<Frame> for FramePool {
    #[inline]
    fn extend<I: IntoIterator<Item = Frame>>(&mut self, frames: I) {
        self.frames.extend(frames);
    }
}

impl FromIterator<Frame> for FramePool {
    fn from_iter<I: IntoIterator<Item = Frame>>(frames: I) -> Self {
        Self {
            frames: frames.into_iter().collect(),
        }
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_hands_out_the_warmest_frame_first() {
        let mut pool: FramePool = [0, 2048, 4096].map(Frame::new).into_iter().collect();
        assert_eq!(pool.len(), 3);
        let top = pool.take().map(|frame| frame.offset().get());
        assert_eq!(top, Some(4096));
        pool.put(Frame::new(6144));
        assert_eq!(pool.take(), Some(Frame::new(6144)));
        assert_eq!(pool.take(), Some(Frame::new(2048)));
        assert_eq!(pool.take(), Some(Frame::new(0)));
        assert!(pool.is_empty());
        assert_eq!(pool.take(), None);
    }

    #[test]
    fn frame_is_one_word() {
        assert_eq!(size_of::<Frame>(), 8);
        assert!(!std::mem::needs_drop::<Frame>());
    }
}
