//! Frames of NIC queues whose queue pair the guest has switched off.
//!
//! The NIC spreads frames over its queues whatever the guest does, and an AF_XDP socket gets the frames
//! of its own queue only. A guest that uses fewer pairs than the port has (one CPU, `ethtool -L`, or
//! a driver that has not come that far yet) would lose what arrives at the others. So the lane of a
//! pair that is off copies its frames in here, and the lane of the first pair, which is always on (VirtIO
//! 1.3, 5.1.6.5.5), delivers them. That is the slow path: a lock and an allocation a frame.
//!
//! Bounded: what does not fit is dropped and counted by the lane that has it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

/// Most frames that wait: some batches, and at most half a MiB of usual ones.
const MOST: usize = 256;

/// See the module's head. Shared by the lanes of one port.
pub(crate) struct Spill {
    frames: Mutex<VecDeque<Vec<u8>>>,
    /// How many there are, so that the first pair looks without the lock. A hint: whoever reads it late
    /// is woken by the eventfd, which is written after it.
    count: AtomicUsize,
    arrived: OwnedFd,
}

/// A lane's end of the port's [`Spill`].
pub(crate) enum SpillEnd {
    /// The first pair's, which delivers.
    Delivers(std::sync::Arc<Spill>),
    /// Another's, which gives while it is off.
    Gives(std::sync::Arc<Spill>),
}

impl Spill {
    /// An empty one.
    ///
    /// # Errors
    /// No descriptor left.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            frames: Mutex::default(),
            count: AtomicUsize::new(0),
            arrived: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Takes a frame in; false if there is no room.
    pub(crate) fn push(&self, frame: Vec<u8>) -> bool {
        let mut frames = self.frames.lock().unwrap_or_else(PoisonError::into_inner);
        if frames.len() >= MOST {
            return false;
        }
        frames.push_back(frame);
        self.count.store(frames.len(), Ordering::Release);
        true
    }

    /// Wakes the lane of the first pair: after the last of a batch.
    pub(crate) fn wake(&self) {
        let _ = rustix::io::write(&self.arrived, &1u64.to_ne_bytes());
    }

    /// The oldest frame.
    pub(crate) fn pop(&self) -> Option<Vec<u8>> {
        if self.is_empty() {
            return None;
        }
        let mut frames = self.frames.lock().unwrap_or_else(PoisonError::into_inner);
        let frame = frames.pop_front();
        self.count.store(frames.len(), Ordering::Release);
        frame
    }

    /// Drops what waits: nobody is left to deliver it. How many there were.
    pub(crate) fn clear(&self) -> usize {
        let mut frames = self.frames.lock().unwrap_or_else(PoisonError::into_inner);
        self.count.store(0, Ordering::Release);
        frames.drain(..).count()
    }

    /// Whether nothing waits.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }
}

impl AsFd for Spill {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.arrived.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_in_order_and_no_more_than_fit() {
        let spill = Spill::new().expect("an eventfd");
        for number in 0..MOST {
            assert!(spill.push(vec![number as u8]));
        }
        assert!(!spill.push(vec![0]), "one too many");
        for number in 0..MOST {
            assert_eq!(spill.pop(), Some(vec![number as u8]));
        }
        assert!(spill.is_empty() && spill.pop().is_none());
        assert!(spill.push(vec![1]));
        assert_eq!((spill.clear(), spill.clear()), (1, 0));
        assert!(spill.is_empty() && spill.pop().is_none());
    }
}
