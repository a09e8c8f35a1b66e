//! The lane of a tap device, which joins a network with the host. In tap mode the network has a second one, at which
//! frames from the wire arrive. Only guests' questions for MAC addresses are written to it: other frames leave through
//! the uplink's queues.
//!
//! For the other lanes it is a guest that accepts GSO packets and partial checksums, with one difference: they write
//! frames to it directly from guest memory ([`crate::host::to_tap`]), with one system call per frame, in which the
//! kernel processes it. Frames from the tap are read into buffers of the daemon, with their segmentation and checksum
//! request. Then they are forwarded like a guest's frames ([`PortLane`]), by their addresses only. Guests without these
//! offloads get them segmented and with complete checksums, as they do from other guests.
//!
//! A poll reads as many frames as a guest's budget allows. The rest wait in the device's queue. The kernel drops frames
//! without room there, and counts them (`ip -s link`).

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use device::counters::PairCounters;
use device::offloads::Offloads;
use device::pair::{Direction, Fault, HEADER_BYTES, QueuePair, Vring};
use rustix::io::Errno;
use virtqueue::GuestAddr;
use virtqueue::driver::{Buffer, GuestRam, SplitDriver};

use crate::fdb::forwarding::Forwarding;
use crate::guest::rx_queue::RxQueue;
use crate::host::inner_queue::{BUFFERS, InnerQueueError, LONGEST_BYTES, Memory, Received};
use crate::host::to_tap::{ToTap, push};
use crate::lane::limits::BATCH;
use crate::lane::shared::{Shared, SharedGuard};
use crate::lane::{Lane, Siblings, Stopped, Work};
use crate::nic::tap::{Parts, Tap};
use crate::port_lane::PortLane;

/// While guests' frames are written to the tap, reading it is put off for this many rounds: acknowledgements of a
/// stream then arrive in fewer batches, each of which may cost a guest an interrupt. A guest that waits for an answer
/// sends nothing meanwhile, and gets the answer in the next round.
const PUT_OFF: u32 = 4;
/// After this many rounds without a frame in either direction, the tap is read only in one of [`READ_EACH`] rounds or
/// when the epoll set has reported it, until a frame passes again. A read is a system call: one in each round would
/// cost guests that exchange frames with each other a quarter of the cost of these frames.
const QUIET: u64 = 8;
/// See [`QUIET`].
const READ_EACH: u64 = 8;

/// See the module's head.
pub struct TapLane {
    lane: PortLane,
    to_tap: Shared<ToTap>,
    tap: Arc<Tap>,
    ram: Arc<GuestRam>,
    counters: Arc<PairCounters>,
    /// The driver's side of the queue that frames from the tap are put into.
    from_tap: SplitDriver,
    /// Free buffers, each for the longest frame. The last one is used first: its memory is in the cache.
    free: Vec<GuestAddr>,
    /// By chain of `from_tap`: its buffer.
    buffer_of: Vec<GuestAddr>,
    /// Rounds in a row in which frames were written to the tap, and reading it was put off.
    put_off: u32,
    /// Rounds in a row in which no frame was written or read.
    quiet: u64,
    is_gone: bool,
    /// The device may have frames: the epoll set has reported it since a read found it empty.
    has_frames: bool,
}

impl TapLane {
    /// The lane of this device. `segments_udp`: its kernel segments UDP GSO packets, too.
    /// Errors: [`InnerQueueError`].
    pub fn new(tap: Tap, segments_udp: bool, counters: Arc<PairCounters>) -> Result<Self, InnerQueueError> {
        let memory = Memory::new(BATCH as u64)?;
        let offloads = Offloads {
            guest_uso4: segments_udp,
            guest_uso6: segments_udp,
            ..Offloads::all()
        };
        let (to_guest, received) = memory.queue(offloads)?;
        let (from_guest, from_tap) = memory.queue(offloads)?;
        let pair = QueuePair { from_guest, to_guest };
        let tap = Arc::new(tap);
        let free = (0..BATCH).map(|_| memory.ram.alloc(LONGEST_BYTES.into(), 64));
        Ok(Self {
            lane: PortLane::of_tap(pair, Arc::clone(&counters)),
            from_tap,
            free: free.collect::<Result<_, _>>()?,
            to_tap: Shared::new(ToTap {
                tap: Arc::clone(&tap),
                waiting: Received::new(received, &memory)?,
                ram: Arc::clone(&memory.ram),
                segments_udp,
                counters: Arc::clone(&counters),
                is_given: false,
                given: [0; 2],
            }),
            tap,
            ram: memory.ram,
            counters,
            buffer_of: vec![GuestAddr(0); usize::from(BUFFERS)],
            put_off: 0,
            quiet: 0,
            is_gone: false,
            has_frames: true,
        })
    }

    /// Reads frames from the tap into the queue; returns whether there were any.
    fn read(&mut self) -> bool {
        let mut any = false;
        while !self.is_gone
            && let Some(&buffer) = self.free.last()
        {
            let mut parts = Parts::new();
            push(&mut parts, &self.ram, Buffer::writable(buffer, LONGEST_BYTES));
            let bytes = match self.tap.read(&parts) {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => {
                    self.is_gone = error.raw_os_error() == Some(Errno::BADFD.raw_os_error());
                    self.has_frames = false;
                    break;
                }
            };
            if bytes <= HEADER_BYTES as usize {
                break;
            }
            let len = LONGEST_BYTES.min(bytes as u32);
            // There are more descriptors than buffers.
            if let Some(chain) = self.from_tap.add(&[Buffer::readable(buffer, len)]) {
                self.buffer_of[usize::from(chain)] = buffer;
                self.free.pop();
            }
            any = true;
        }
        if any {
            // Without a kick: the lane reads the queue right after this.
            self.from_tap.publish();
        }
        any
    }

    /// Whether the tap is read in this round.
    fn is_read_due(&self) -> bool {
        let is_due = self.quiet < QUIET || self.quiet.is_multiple_of(READ_EACH);
        self.put_off == 0 && (self.has_frames || is_due)
    }

    /// Takes back the buffers of frames that are delivered or dropped.
    fn take_back(&mut self) {
        while let Some(used) = self.from_tap.take_used() {
            self.free.push(self.buffer_of[usize::from(used.head)]);
        }
    }
}

impl Lane for TapLane {
    fn poll(&mut self, siblings: &mut dyn Siblings) -> Result<usize, Fault> {
        let (mut written, mut is_given) = (0, false);
        if let Some(mut to_tap) = self.to_tap.lock() {
            written = to_tap.write_waiting();
            is_given = std::mem::take(&mut to_tap.is_given);
        }
        self.put_off = match is_given && self.put_off < PUT_OFF {
            true => self.put_off + 1,
            false => 0,
        };
        let has_read = self.is_read_due() && self.read();
        self.quiet = match has_read || is_given {
            true => 0,
            false => self.quiet + 1,
        };
        if self.free.len() == BATCH && self.lane.is_idle() {
            return Ok(written);
        }
        let moved = self.lane.poll(siblings)?;
        self.take_back();
        Ok(written + moved)
    }

    fn enable_notifications(&mut self, siblings: &mut dyn Siblings) -> Work {
        // While all buffers are in use there is nothing to read into: the tap is read when some are back.
        let is_next = self.has_frames && !self.free.is_empty();
        let has_waiting = |mut to_tap: SharedGuard<'_, ToTap>| to_tap.waiting.driver.enable_calls();
        match self.to_tap.lock().is_some_and(has_waiting) || is_next {
            true => Work::Now,
            false => self.lane.enable_notifications(siblings),
        }
    }

    fn disable_notifications(&mut self) {
        if let Some(mut to_tap) = self.to_tap.lock() {
            to_tap.waiting.driver.disable_calls();
        }
        self.lane.disable_notifications();
    }

    fn carried(&self) -> u64 {
        self.lane.carried()
    }

    fn receives(&self) -> bool {
        self.lane.receives()
    }

    fn change_vrings(&mut self, change: &mut dyn FnMut(Direction, &mut Vring)) {
        self.lane.change_vrings(change);
    }

    fn rx(&self) -> Option<&Shared<RxQueue>> {
        self.lane.rx()
    }

    fn tap(&self) -> Option<&Shared<ToTap>> {
        Some(&self.to_tap)
    }

    fn set_forwarding(&mut self, forwarding: &Arc<Forwarding>) {
        self.lane.set_forwarding(forwarding);
    }

    fn set_frame_limit(&mut self, _bytes: u32) {
        // Frames from the tap have no limit: the kernel has accepted them.
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.tap.as_fd())
    }

    fn note_event(&mut self) {
        self.has_frames = !self.is_gone;
    }

    fn stop(mut self: Box<Self>) -> Stopped {
        // Frames that wait for the tap are written. Frames from it are lost: the receivers' lanes cannot be reached
        // here.
        if let Some(mut to_tap) = self.to_tap.take() {
            to_tap.write_waiting();
        }
        self.take_back();
        let left = BATCH - self.free.len();
        self.counters.from_guest_queue_stopped.add(left as u64);
        Box::new(self.lane).stop()
    }
}
