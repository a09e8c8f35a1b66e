//! A lane: one virtio queue pair joined with one NIC queue.
//!
//! A lane *breathes*: each breath takes a batch from the guest to the NIC and a batch from the NIC
//! to the guest, publishes both, and returns how many frames moved. When nothing moves for the
//! spin time the worker *arms* it (asks for kicks) and sleeps.
//!
//! Transitions (the worker is the only one that makes them):
//!
//! ```text
//!     polling ──arm() = Idle──▶ armed ──wake──▶ disarm() ─▶ polling
//!     polling ──arm() = Busy──▶ polling        (work came while arming: no kick will tell of it)
//!     polling ──breathe() = Err──▶ faulted     (left alone until control takes it away)
//!     any ──taken by control──▶ stop()         (consumed; the vring bases remain, and calls to be made)
//! ```

use std::os::fd::BorrowedFd;

use device::pair::Stopped;

use device::pair::{Fault, QueuePair};

/// Most chains or frames one breath moves in each direction: a lane's turn. Segments count as the frames that they are.
///
/// The kernel's copy-mode transmit path costs the same per frame from 32 on; 64 keeps the batch's
/// descriptors in the first-level cache.
pub(crate) const BATCH: usize = 64;

/// Descriptors that the guest gives frames in, as much work as a frame: a turn has so many for each of its frames. A chain of a
/// Linux guest's has two, or some 18 for dozens of segments; one that is made to be work has thousands for a single frame, each
/// with a copy of its own.
pub(crate) const DESCRIPTORS_A_FRAME: u64 = 4;

/// Most segments of a super-frame that leave in one go, where it is built in one go; what they are more than a turn the
/// lane owes ([`Turns`]). Few enough that the other direction, with the guest's acknowledgements, waits for some 200 µs at
/// most.
pub(crate) const SEGMENTS: usize = 256;

/// A turn reads no further buffers for frames to the guest once it has read so many descriptors of them: one buffer may have as many
/// as the queue has entries. Usual guests have far fewer in all buffers of a turn.
pub(crate) const DESCRIPTORS: usize = 4096;

/// What a lane sends for its guest, turn by turn: a guest whose frames become many has no more turns than its neighbours.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// Frames that this turn has left.
    left: usize,
    /// Frames that were sent beyond the turns so far.
    owed: usize,
}

impl Turns {
    /// A turn begins; how many frames it has.
    #[inline]
    pub(crate) fn begin(&mut self) -> usize {
        self.left = BATCH.saturating_sub(self.owed);
        self.owed = self.owed.saturating_sub(BATCH);
        self.left
    }

    /// So many frames were sent, which may be more than there were left.
    #[inline]
    pub(crate) fn spend(&mut self, frames: usize) {
        self.owed += frames.saturating_sub(self.left);
        self.left = self.left.saturating_sub(frames);
    }
}

/// How many chains a lane takes from its guest at once. A guest whose frames become many fills a turn with a few chains, and
/// those behind them would be read in vain each time.
#[derive(Debug)]
pub(crate) struct Takes {
    most: usize,
}

impl Default for Takes {
    fn default() -> Self {
        Self { most: BATCH }
    }
}

impl Takes {
    /// Most chains to take now.
    #[inline]
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Of `taken` chains `used` were sent, the others were put back.
    #[inline]
    pub(crate) fn note(&mut self, taken: usize, used: usize) {
        if used < taken {
            self.most = (used * 2).clamp(2, BATCH);
        } else if used == self.most {
            self.most = (used * 2).min(BATCH);
        }
    }
}

/// What is left to do when a lane is asked to rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rest {
    /// Nothing: a kick or a frame will wake.
    Idle,
    /// Something that no file descriptor announces (frames the NIC has not sent yet): look again
    /// within a millisecond.
    Soon,
    /// Work is there: do not sleep.
    Busy,
}

/// See the module's head. Implementations: [`super::copy::CopyLane`], [`crate::direct::DirectLane`],
/// [`super::cable::CableLane`].
pub(crate) trait Lane: Send {
    /// Moves a batch each way; frames moved.
    ///
    /// # Errors
    /// What the guest did wrong. The lane must not breathe again.
    fn breathe(&mut self) -> Result<usize, Fault>;
    /// Asks for kicks where the lane waits for the guest, and looks again.
    ///
    /// # Errors
    /// As [`Self::breathe`].
    fn arm(&mut self) -> Result<Rest, Fault>;
    /// The guest's half.
    fn guest(&self) -> &QueuePair;
    /// The guest's half, to change.
    fn guest_mut(&mut self) -> &mut QueuePair;
    /// The eventfds that tell of work.
    fn wakers(&self) -> Vec<BorrowedFd<'_>> {
        self.guest().kicks().collect()
    }
    /// The NIC's descriptor, readable when frames arrive.
    fn nic(&self) -> Option<BorrowedFd<'_>>;
    /// Whether arriving frames must wake the lane, as [`Self::arm`] decided: not while some wait there
    /// already, for the guest's buffers. Deciding it anew would lose a frame that came after `arm`.
    fn awaits_nic(&self) -> bool;
    /// Goes on with another map of the guest's memory; the caller took the lane from its worker. Copy
    /// placement only: a direct lane's socket is bound to its map, so it is stopped and built anew.
    fn replace_guest(&mut self, guest: QueuePair);
    /// Sends a frame of ours by the NIC, if there is room for it now: it is an announcement, and the
    /// network may lose those.
    fn inject(&mut self, frame: &[u8]);
    /// Takes back what the kernel holds, publishes what is done, closes the NIC's queue. On a control thread, so it calls nobody.
    fn stop(self: Box<Self>) -> Stopped;

    /// Tells the driver that no kicks are needed while the lane is polled.
    fn disarm(&mut self) {
        let guest = self.guest_mut();
        guest.from_guest.queue.disable_kicks();
        guest.to_guest.queue.disable_kicks();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_that_do_not_fit_a_turn_are_not_taken_again_and_again() {
        let mut takes = Takes::default();
        assert_eq!(takes.most(), BATCH);
        takes.note(BATCH, 2);
        assert_eq!(takes.most(), 4);
        // All that were taken were sent: there may be more. That there were few says nothing.
        takes.note(4, 4);
        takes.note(3, 3);
        assert_eq!(takes.most(), 8);
        (0..8).for_each(|_| takes.note(takes.most(), takes.most()));
        assert_eq!(takes.most(), BATCH);
        // Nothing could be sent.
        takes.note(BATCH, 0);
        assert_eq!(takes.most(), 2);
    }
}
