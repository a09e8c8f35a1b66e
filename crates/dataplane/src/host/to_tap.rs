//! Writes frames to the tap device that leads to the host.
//!
//! Guests' frames are written directly from guest memory: first the checked copy of their first bytes, then the rest.
//! The kernel copies each byte once, and reads only its copy. Other frames wait in a queue of the daemon
//! ([`Received`]), as for a guest, until the lane is polled: frames that the daemon builds, that have several receivers
//! or too many pieces, or that request offloads that this kernel does not have. Frames stay in order: the queue is
//! written before a guest's frame. The kernel delivers frames to the host at once.

use std::sync::Arc;

use device::counters::PairCounters;
use device::meter;
use packet::HEADERS_MAX;
use packet::segment::GsoKind;
use virtqueue::driver::{Buffer, GuestRam};

use crate::frame::gso::GsoPacket;
use crate::guest::guest_frame::GuestFrame;
use crate::host::inner_queue::Received;
use crate::host::tap_frame::{push_frame, tap_header};
use crate::nic::tap::{Parts, Tap};

/// Most segments of a GSO packet that is written whole, for TCP and for UDP: the kernel rejects UDP packets with more
/// (`UDP_MAX_SEGMENTS`, include/linux/udp.h; 128 from Linux 6.9).
const SEGMENTS: u32 = 256;
const UDP_SEGMENTS: u32 = 64;

/// Result of writing a guest's frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TapPut {
    /// The frame is written, or dropped and counted.
    Done,
    /// The frame cannot be written directly from guest memory, and nothing was done: it has to take the queue.
    Queue,
}

/// See the module's head.
pub struct ToTap {
    pub(crate) tap: Arc<Tap>,
    pub(crate) waiting: Received,
    pub(crate) ram: Arc<GuestRam>,
    /// The kernel segments UDP GSO packets, too (Linux 6.2).
    pub(crate) segments_udp: bool,
    pub(crate) counters: Arc<PairCounters>,
    /// A guest's frame was written since the lane's last poll.
    pub(crate) is_given: bool,
    /// Guests' frames that were written, and their bytes. Counted by whoever writes, with the lock of the tap's queue:
    /// frames in that are counted by the same counters.
    pub(crate) given: [u64; 2],
}

impl ToTap {
    /// Writes the frames in the queue; returns how many the kernel accepted.
    #[inline]
    pub(crate) fn write_waiting(&mut self) -> usize {
        let (mut frames, mut any) = (0, false);
        while let Some(frame) = self.waiting.next() {
            let mut parts = Parts::new();
            for part in frame {
                push(&mut parts, &self.ram, *part);
            }
            frames += usize::from(self.write(&parts));
            any = true;
            self.waiting.post_again();
        }
        if any {
            self.waiting.driver.publish();
        }
        frames
    }

    /// Writes a guest's frame. `of_guest`: the guest's counters.
    pub(crate) fn put(&mut self, frame: GuestFrame<'_>, of_guest: &PairCounters) -> TapPut {
        let len = frame.sending.len;
        let Some(gso) = frame.sending.request.gso else {
            return self.put_as_it_is(frame);
        };
        let most = match gso.kind {
            GsoKind::Udp if !self.segments_udp => 0,
            GsoKind::Udp => UDP_SEGMENTS,
            _ => SEGMENTS,
        };
        if u32::from(gso.size) * most < len {
            return TapPut::Queue;
        }
        let mut headers = [0; HEADERS_MAX];
        // The kernel segments the packet by the daemon's copy of the headers.
        match GsoPacket::open(frame, gso, of_guest, &mut headers) {
            Some(packet) => self.put_as_it_is(frame.headed(&headers[..packet.plan.header_len()])),
            None => TapPut::Done,
        }
    }

    fn put_as_it_is(&mut self, frame: GuestFrame<'_>) -> TapPut {
        let header = tap_header(frame);
        let mut parts = Parts::new();
        if !push_frame(&mut parts, &header, frame) {
            return TapPut::Queue;
        }
        self.write_waiting();
        if self.write(&parts) {
            meter::count_delivered(1);
            let [frames, bytes] = &mut self.given;
            *frames += 1;
            *bytes += u64::from(frame.sending.len);
        }
        self.is_given = true;
        TapPut::Done
    }

    /// Writes a frame; returns whether the kernel accepted it, and counts it otherwise.
    fn write(&self, frame: &Parts<'_>) -> bool {
        let taken = self.tap.write(frame).is_ok();
        self.counters.to_guest_host_refused.add((!taken).into());
        taken
    }
}

/// Adds a buffer in `ram` to the parts of a frame, which have room for as many buffers as a frame can have.
pub(crate) fn push<'a>(parts: &mut Parts<'a>, ram: &'a GuestRam, buffer: Buffer) {
    let offset = ram.map().translate(buffer.addr, buffer.len.into());
    let is_in = offset.is_some_and(|offset| parts.push(ram.map(), offset, buffer.len as usize));
    debug_assert!(is_in, "{buffer:?}");
}
