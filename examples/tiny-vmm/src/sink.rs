//! Where frames from the guest go, and where frames for it come from.

mod copy;
pub mod null;
pub mod xdp;

use std::os::fd::BorrowedFd;

use device::pair::{Cursor, Piece};
use virtqueue::{Buffer, MemoryMap};
use xsk::{Umem, UmemOffset};

/// Most frames that are moved at a time, and the kernel is called once for. Half a ring: the guest fills the other half
/// meanwhile.
pub const BATCH: usize = 128;
/// Longest frame that is carried, bytes: what fits a chunk of a UMEM beside the kernel's headroom.
pub const LONGEST_FRAME: usize = 1518;

/// A frame that the guest sends, where it has it.
pub struct FromGuest<'a> {
    memory: &'a MemoryMap,
    buffers: &'a [Buffer],
    start: Cursor,
    len: usize,
}

impl<'a> FromGuest<'a> {
    /// The first `len` bytes from `start` on; at most [`LONGEST_FRAME`], as the device has judged.
    #[must_use]
    pub fn new(memory: &'a MemoryMap, buffers: &'a [Buffer], start: Cursor, len: u32) -> Self {
        let len = (len as usize).min(LONGEST_FRAME);
        Self {
            memory,
            buffers,
            start,
            len,
        }
    }

    /// Length, bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // a frame is not empty
    pub fn len(&self) -> usize {
        self.len
    }

    /// Copies it out of guest memory, each byte once, into [`len`](Self::len) bytes at least; how long it is.
    ///
    /// # Panics
    /// If there is not room for it.
    pub fn copy_into(&self, bytes: &mut [u8]) -> usize {
        for (from, at) in self.pieces() {
            let to = &mut bytes[at..at + from.len as usize];
            // Inside the map, as checked when the descriptor was read.
            let _ = self.memory.copy_from_guest(from.offset, to);
        }
        self.len
    }

    /// The same into a UMEM, from `to` on. `None`: there is not room for it.
    pub fn copy_to_umem(&self, umem: &Umem, to: UmemOffset) -> Option<()> {
        for (from, at) in self.pieces() {
            copy::guest_to_umem(self.memory, from, umem, UmemOffset::new(to.get() + at as u64))?;
        }
        Some(())
    }

    /// What it consists of, and where in it each piece begins.
    fn pieces(&self) -> impl Iterator<Item = (Piece, usize)> {
        let mut done = 0;
        self.start.pieces(self.buffers).map(move |Piece { offset, len }| {
            let at = done;
            done = (at + len as usize).min(self.len);
            let len = (done - at) as u32;
            (Piece { offset, len }, at)
        })
    }
}

/// Frames for the guest, in the order in which they came.
pub struct ToGuest {
    bytes: Box<[[u8; LONGEST_FRAME]; BATCH]>,
    lens: [usize; BATCH],
    count: usize,
    next: usize,
}

impl Default for ToGuest {
    fn default() -> Self {
        Self {
            bytes: Box::new([[0; LONGEST_FRAME]; BATCH]),
            lens: [0; BATCH],
            count: 0,
            next: 0,
        }
    }
}

impl ToGuest {
    /// Whether all were given to the guest.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.next == self.count
    }

    /// Makes room for [`BATCH`] frames, if there is none left.
    pub fn clear_if_empty(&mut self) {
        if self.is_empty() {
            (self.next, self.count) = (0, 0);
        }
    }

    /// How many more frames fit.
    #[must_use]
    pub fn room(&self) -> usize {
        BATCH - self.count
    }

    /// Adds a frame of at most `len` bytes, which `write` writes. Without room, or longer than [`LONGEST_FRAME`], it is
    /// not added, and that is `false`.
    pub fn push(&mut self, len: usize, write: impl FnOnce(&mut [u8])) -> bool {
        if self.room() == 0 || len > LONGEST_FRAME {
            return false;
        }
        write(&mut self.bytes[self.count][..len]);
        self.lens[self.count] = len;
        self.count += 1;
        true
    }

    /// Frames that were not given to the guest yet.
    pub fn frames(&self) -> impl Iterator<Item = &[u8]> {
        (self.next..self.count).map(|at| &self.bytes[at][..self.lens[at]])
    }

    /// The first so many were.
    pub fn pass(&mut self, count: usize) {
        self.next = (self.next + count).min(self.count);
    }
}

/// What a sink has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SinkCounts {
    /// Frames taken of the guest.
    pub from_guest_frames: u64,
    /// Their bytes.
    pub from_guest_bytes: u64,
    /// Frames handed over for the guest.
    pub to_guest_frames: u64,
    /// Frames that were dropped here.
    pub dropped: u64,
}

/// What moves frames out of the VM, and into it. The thread that has the port calls it; never two at a time.
///
/// A sink that needs no more has room for a batch, sends at once, and has no frames for the guest.
pub trait Sink: Send {
    /// How many frames may be put now.
    fn room(&mut self) -> usize {
        BATCH
    }
    /// Takes a frame of the guest's; there is [`room`](Self::room).
    fn put(&mut self, frame: &FromGuest<'_>);
    /// What was put goes on its way. Once a batch.
    ///
    /// # Errors
    /// The way is gone.
    fn flush(&mut self) -> Result<(), SinkError> {
        Ok(())
    }
    /// Something that was put is not on its way yet: [`flush`](Self::flush) is to be called again.
    fn is_pending(&self) -> bool {
        false
    }
    /// Adds frames for the guest as far as there are some and they fit.
    ///
    /// # Errors
    /// The way is gone.
    fn take(&mut self, _frames: &mut ToGuest) -> Result<(), SinkError> {
        Ok(())
    }
    /// Frames for the guest that wait here are nobody's: they go. How many.
    fn discard(&mut self) -> usize {
        0
    }
    /// Tells of frames for the guest by being readable; `None`: there are some when a frame was put, or always.
    fn readable(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// What it has counted.
    fn counts(&self) -> SinkCounts {
        SinkCounts::default()
    }
}

/// Why a sink takes nothing any more.
#[derive(Debug, thiserror::Error)]
pub enum SinkError {
    /// The interface is gone. One that is down may come back: its sink drops frames meanwhile.
    #[error("AF_XDP: the kernel takes no frames any more: is the interface there, see `ip link show`")]
    Xdp(#[from] xsk::WakeError),
}
