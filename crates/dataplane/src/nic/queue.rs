//! A NIC queue for a lane, or a null NIC in its place.
//!
//! [`Nic`] has all operations of a lane on it, in batches. Two implementations: [`super::xdp::XdpNic`], an
//! AF_XDP socket, and [`super::null::NullNic`], which makes and drops frames in this process. Lanes
//! are generic over it, so nothing is dispatched dynamically per frame.
//!
//! Values carry ownership: a [`Frame`] passed to [`Nic::give`] or inside a [`TxDesc`] belongs to the NIC until
//! [`Nic::from_nic`] or [`Nic::sent`] returns it. These return what the driver reports: the caller checks whether the
//! NIC had that frame ([`super::chunk_tracker`], [`crate::direct::in_flight`]).

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use device::counters::{Counter, PairCounters};
use xsk::{Frame, RxDesc, TxDesc};

/// Most pieces of one multi-buffer frame (the kernel's limit where it copies, MAX_SKB_FRAGS + 1).
pub const MOST_PIECES: usize = 18;

/// Shortest frame that a NIC may read by DMA, bytes. Intel's NICs cannot handle shorter ones; their drivers pad those
/// of the network stack (`i40e_lan_xmit_frame`, `igb_xmit_frame`), but not those of AF_XDP sockets.
pub(crate) const SHORTEST_BY_DMA: u32 = 17;

/// The state of the interface, as a transmit kick reported it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkState {
    /// Frames are being sent.
    Up,
    /// The interface is down; frames wait in the ring until it is up again.
    Down,
    /// The interface is gone; this NIC will never move a frame again.
    Gone,
}

impl LinkState {
    /// The counter of frames that cannot be sent now; `None`: they can.
    #[inline]
    pub(crate) fn loses(self, counters: &PairCounters) -> Option<&Counter> {
        match self {
            Self::Up => None,
            Self::Down => Some(&counters.from_guest_interface_down),
            Self::Gone => Some(&counters.from_guest_interface_gone),
        }
    }
}

/// Capabilities of a queue for frames that are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sends {
    /// Most descriptors of a frame; one without multi-buffer.
    pub most_pieces: usize,
    /// It completes checksums, requested by metadata before the frame; then the UMEM has room for metadata.
    pub checksum: bool,
    /// No CPU copies frames when they are sent: a NIC reads them by DMA, and a null NIC not at all.
    pub zero_copy: bool,
    /// The NIC reads frames by DMA. Then a descriptor must not cross a 4 KiB page boundary: adjacent pages need not be
    /// contiguous for DMA, and if they are not, the kernel silently drops the descriptor
    /// (`xp_unaligned_validate_desc`, net/xdp/xsk_queue.h). And no frame may be shorter than [`SHORTEST_BY_DMA`].
    pub by_dma: bool,
    /// Segments refer to their payload, in guest memory or in a chunk that it was copied to, if the other conditions
    /// for that hold.
    pub refers: bool,
}

impl Sends {
    /// Whether a frame is too short to be sent as it is.
    #[inline]
    pub(crate) fn must_fill_up(self, len: u32) -> bool {
        self.by_dma && len < SHORTEST_BY_DMA
    }

    /// Frames as they are, in one piece.
    pub const PLAIN: Self = Self {
        most_pieces: 1,
        checksum: false,
        zero_copy: false,
        by_dma: false,
        refers: false,
    };
}

/// The rings of one queue of a NIC.
pub trait Nic: Send {
    /// Descriptors that can be passed to [`Self::to_nic`] now.
    fn room_to_nic(&mut self) -> usize;
    /// Queues frames for sending, at most [`Self::room_to_nic`]; [`Self::kick`] sends them.
    fn to_nic(&mut self, frames: impl ExactSizeIterator<Item = TxDesc>);
    /// Kicks the kernel to send queued frames. Cheap when there are none, or when no kick is needed.
    fn kick(&mut self) -> LinkState;
    /// The kernel has not taken all that was queued.
    fn has_untaken(&mut self) -> bool {
        false
    }
    /// Queued descriptors that are not completed.
    fn unsent(&self) -> usize;
    /// Frames that the driver reports as completed, and that belong to the caller again; the caller calls
    /// [`Self::came_back`] with the number of those that the NIC had.
    fn sent(&mut self, max: usize) -> impl Iterator<Item = Frame> + '_;
    /// Subtracts `frames` of those that [`Self::sent`] yielded from [`Self::unsent`].
    fn came_back(&mut self, frames: usize);
    /// Frames that can be passed to [`Self::give`] now.
    fn room_to_give(&mut self) -> usize;
    /// Gives the NIC empty frames to receive into: as many, from the front, as it has room for now. They are shown
    /// to `note` before the NIC has them.
    ///
    /// A frame that was just received does not imply room for another: the kernel publishes a
    /// received frame before it releases the fill ring's entry (`xsk_flush`, net/xdp/xsk.c).
    fn give(&mut self, frames: &mut Vec<Frame>, note: impl FnOnce(&[Frame]));
    /// Received frames. What is not taken from the iterator stays with the NIC.
    fn from_nic(&mut self, max: usize) -> impl ExactSizeIterator<Item = RxDesc> + '_;
    /// Descriptors that [`Self::from_nic`] would yield now.
    fn received(&mut self) -> usize;
    /// Becomes readable when frames arrive; `None` for a NIC that is only polled.
    fn fd(&self) -> Option<BorrowedFd<'_>>;
    /// The same descriptor, for a worker that waits for frames without the lock of the queue.
    fn socket(&self) -> Option<Arc<OwnedFd>> {
        None
    }
    /// See [`Lane::has_edges`](crate::lane::Lane::has_edges).
    fn has_edges(&self) -> bool {
        false
    }
}
