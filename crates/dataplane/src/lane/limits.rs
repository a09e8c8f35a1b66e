//! How much a lane does before the worker polls the next one.

/// Most chains or frames that one poll moves in each direction: the budget of a lane. Segments count as frames.
///
/// The kernel's copy-mode transmit path costs the same per frame from 32 on; 64 keeps the batch's
/// descriptors in the first-level cache.
pub(crate) const BATCH: usize = 64;

/// This many descriptors of a guest's chains count as one frame of a budget. A chain of a Linux guest has two, or some
/// 18 for dozens of segments. A hostile chain has thousands for one frame, each with a copy of its own.
pub(crate) const DESCRIPTORS_A_FRAME: u64 = 4;

/// This many bytes count as one frame of a budget: a GSO packet that is passed whole to another guest is copied once,
/// and costs by its bytes. Frames of most interfaces are shorter.
pub(crate) const BYTES_A_FRAME: u64 = 8192;

/// The same in a network, whose guests share a worker: a budget of long packets has as many bytes as one of frames of
/// an MTU of 1500, so that neighbours get equal shares of bytes.
pub(crate) const SHARED_BYTES_A_FRAME: u64 = 1536;

/// Shorter segments are many for their bytes: a packet that the kernel segments so costs by its segments.
pub(crate) const SHORT_SEGMENT_BYTES: u64 = 1024;

/// How often the cost of a look-up of an unknown flow counts for its sender: a guest that floods with new flows gets a
/// fifth of its neighbours' share, not half of it. Where frames of many senders share a lane (an uplink, a tap), it
/// counts once: there all of them would pay.
pub(crate) const LOOK_UP_WEIGHT: u64 = 4;

/// Most segments of a GSO packet that are built at once. Those beyond a budget are a deficit of the lane's next polls.
/// Few enough that the other direction, with the guest's acknowledgements, waits for some 200 µs at most.
pub(crate) const SEGMENTS: usize = 256;

/// A poll takes no further buffers for frames to the guest once it has read this many of their descriptors: one buffer
/// may have as many as the queue has entries. Usual guests have far fewer in all buffers of a poll.
pub(crate) const DESCRIPTORS: usize = 4096;
