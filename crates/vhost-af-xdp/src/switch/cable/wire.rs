//! What joins two ports: for each queue pair of each end an inbox of frames with what they ask for.
//!
//! Bounded in frames and bytes. A sender that finds an inbox full leaves its frames in the guest's ring. One lock an
//! inbox, taken once a batch; an allocation a frame, which for the super-frames that travel here is little beside the copy.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use offload::segment::Request;
use rustix::event::{EventfdFlags, eventfd};

/// Most frames that wait in an inbox.
const MOST_FRAMES: usize = 1024;
/// Most bytes of frames that wait in an inbox.
const MOST_BYTES: usize = 4 << 20;

/// A frame on its way.
#[derive(Debug)]
pub(crate) struct Parcel {
    /// What its sender asked to have done, checked: every offset lies inside the frame.
    pub(crate) request: Request,
    /// Bytes of headers, for a super-frame.
    pub(crate) header_len: u16,
    /// The frame.
    pub(crate) bytes: Vec<u8>,
}

/// See the module's head.
pub(crate) struct Wire {
    ends: [Vec<Inbox>; 2],
}

/// Frames that wait for one queue pair.
pub(crate) struct Inbox {
    slots: Mutex<Slots>,
    /// How many wait, so that their lane looks without the lock. A hint: whoever reads it late is woken.
    count: AtomicUsize,
    arrived: OwnedFd,
}

#[derive(Default)]
struct Slots {
    waiting: VecDeque<Parcel>,
    bytes: usize,
    /// A lane delivers what arrives.
    open: bool,
    /// That lane sleeps, and is to be woken.
    asleep: bool,
}

impl Wire {
    /// A wire between two ports of so many queue pairs.
    ///
    /// # Errors
    /// No descriptor left.
    pub(crate) fn new(pairs: [u16; 2]) -> io::Result<Self> {
        let end = |pairs: u16| (0..pairs).map(|_| Inbox::new()).collect::<io::Result<Vec<_>>>();
        Ok(Self {
            ends: [end(pairs[0])?, end(pairs[1])?],
        })
    }

    /// The inbox of a pair of an end.
    pub(crate) fn inbox(&self, end: usize, pair: u16) -> &Inbox {
        &self.ends[end][usize::from(pair)]
    }

    /// Where frames of an end's pair go: the same pair of the other end, or its first one. `None`: nobody is there.
    pub(crate) fn target(&self, end: usize, pair: u16) -> Option<&Inbox> {
        let others = &self.ends[1 - end];
        let same = others.get(usize::from(pair)).filter(|inbox| inbox.lock().open);
        same.or_else(|| others.first().filter(|inbox| inbox.lock().open))
    }
}

impl Inbox {
    fn new() -> io::Result<Self> {
        Ok(Self {
            slots: Mutex::default(),
            count: AtomicUsize::new(0),
            arrived: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frames that it takes now, each of the longest.
    pub(crate) fn room(&self, longest: usize) -> usize {
        let slots = self.lock();
        let frames = MOST_FRAMES.saturating_sub(slots.waiting.len());
        frames.min(MOST_BYTES.saturating_sub(slots.bytes) / longest)
    }

    /// Takes all of `parcels` in, and wakes the lane. They are lost if it has gone meanwhile; how many.
    pub(crate) fn push(&self, parcels: &mut Vec<Parcel>) -> usize {
        let mut slots = self.lock();
        if !slots.open {
            return parcels.drain(..).count();
        }
        slots.bytes += parcels.iter().map(|parcel| parcel.bytes.len()).sum::<usize>();
        slots.waiting.extend(parcels.drain(..));
        self.count.store(slots.waiting.len(), Ordering::Release);
        if std::mem::take(&mut slots.asleep) {
            let _ = rustix::io::write(&self.arrived, &1u64.to_ne_bytes());
        }
        0
    }

    /// Moves at most `most` frames into `parcels`.
    pub(crate) fn take(&self, parcels: &mut VecDeque<Parcel>, most: usize) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut slots = self.lock();
        let count = most.min(slots.waiting.len());
        let bytes: usize = slots
            .waiting
            .range(..count)
            .map(|parcel| parcel.bytes.len())
            .sum();
        parcels.extend(slots.waiting.drain(..count));
        slots.bytes -= bytes;
        self.count.store(slots.waiting.len(), Ordering::Release);
    }

    /// A lane delivers from now on.
    pub(crate) fn open(&self) {
        self.lock().open = true;
    }

    /// It does no more; how many frames wait, which are lost.
    pub(crate) fn close(&self) -> usize {
        let mut slots = self.lock();
        self.count.store(0, Ordering::Release);
        std::mem::take(&mut *slots).waiting.len()
    }

    /// The lane is about to sleep; false if it must not, because frames wait.
    pub(crate) fn sleep(&self) -> bool {
        let mut slots = self.lock();
        slots.asleep = slots.waiting.is_empty();
        slots.asleep
    }
}

/// Written when frames arrive for a lane that sleeps.
impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.arrived.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parcels(lens: &[usize]) -> Vec<Parcel> {
        let parcel = |&len: &usize| Parcel {
            request: Request::default(),
            header_len: 0,
            bytes: vec![0; len],
        };
        lens.iter().map(parcel).collect()
    }

    #[test]
    fn inbox_is_bounded_in_frames_and_bytes() {
        let wire = Wire::new([1, 1]).expect("descriptors");
        let inbox = wire.inbox(1, 0);
        inbox.open();
        assert_eq!(inbox.room(1500), MOST_FRAMES);
        assert_eq!(inbox.room(1 << 20), 4);
        inbox.push(&mut parcels(&[3 << 20]));
        assert_eq!(inbox.room(1 << 20), 1);
        let mut taken = VecDeque::new();
        inbox.take(&mut taken, 9);
        assert_eq!((taken.len(), inbox.room(1 << 20)), (1, 4));
    }

    #[test]
    fn frames_go_to_the_same_pair_or_to_the_first_that_is_there() {
        let wire = Wire::new([2, 3]).expect("descriptors");
        assert!(wire.target(0, 1).is_none(), "nobody is there");
        wire.inbox(1, 0).open();
        assert!(std::ptr::eq(
            wire.target(0, 1).expect("the first"),
            wire.inbox(1, 0)
        ));
        wire.inbox(1, 1).open();
        assert!(std::ptr::eq(
            wire.target(0, 1).expect("the same"),
            wire.inbox(1, 1)
        ));
    }

    #[test]
    fn closed_inbox_says_what_is_lost() {
        let wire = Wire::new([1, 1]).expect("descriptors");
        let inbox = wire.inbox(0, 0);
        inbox.open();
        assert_eq!(inbox.push(&mut parcels(&[1, 2])), 0);
        assert!(!inbox.sleep(), "frames wait");
        assert_eq!(inbox.close(), 2);
        assert_eq!(inbox.push(&mut parcels(&[1])), 1);
        assert!(inbox.sleep());
    }
}
