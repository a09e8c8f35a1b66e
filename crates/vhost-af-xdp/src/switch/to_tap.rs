//! Writes frames to a tap device, to the host or to the wire.
//!
//! What guests send is written from where it lies, as a guest's own device would do it: our copy of the first bytes, by
//! which the frame was judged, and behind it guest memory. The kernel copies each byte once and looks at its copy only.
//! Other frames wait in a queue of ours ([`Received`]), as for a guest, until the lane has its turn: frames that are
//! put together here, have several receivers or too many pieces, or ask for what this kernel does not do. They stay in
//! order: the queue is written before a guest's frame is. A GSO packet that goes through the queue to the wire is
//! segmented here, in portions, as for a NIC: the kernel would segment it in one go.
//!
//! The kernel delivers frames to the host at once. Frames to the wire wait in the kernel up to the device's limit
//! (`TUNSETSNDBUF`); beyond it they wait in their senders' queues, as they do for a NIC.

use std::io::ErrorKind;
use std::sync::Arc;

use device::counters::PairCounters;
use device::meter;
use device::pair::HEADER_BYTES;
use offload::packet::HEADERS_MAX;
use offload::segment::GsoKind;
use steer::TapTo;
use virtqueue::driver::{Buffer, GuestRam};

use super::ethernet::{self, TAG_BYTES};
use super::gso::GsoPacket;
use super::guest_frame::GuestFrame;
use super::inner_queue::Received;
use super::tap_frame::{parts_of, tap_header};
use crate::nic::queue::LinkState;
use crate::nic::tap::{Parts, Tap};

/// Most segments of a GSO packet that is written at once, of TCP and of UDP: the kernel refuses UDP packets of more
/// (`UDP_MAX_SEGMENTS`, include/linux/udp.h; 128 from Linux 6.9).
const SEGMENTS: u32 = 256;
const UDP_SEGMENTS: u32 = 64;

/// What became of a guest's frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TapPut {
    /// It is written, or dropped and counted.
    Done,
    /// It is written, a GSO packet to the wire, unsegmented. `headers`: bytes of headers of each segment.
    Whole { segments: u32, headers: u32 },
    /// There is no room for it now, and nothing was done.
    NoRoom,
    /// It cannot be written from where it lies, and nothing was done: pass it through the queue.
    Queue,
}

/// See the module's head.
pub(crate) struct ToTap {
    pub(super) tap: Tap,
    pub(super) to: TapTo,
    /// The uplink's, if it leads to the wire.
    pub(super) link: LinkState,
    /// Longest frame of the uplink, with a tag, if it leads to the wire.
    pub(super) frame_limit: u32,
    pub(super) waiting: Received,
    /// There was no room for the frame that [`Received::next`] returned last: it is the next one to be written.
    pub(super) is_stuck: bool,
    pub(super) ram: Arc<GuestRam>,
    /// The kernel segments UDP GSO packets, too (Linux 6.2).
    pub(super) cuts_udp: bool,
    pub(super) counters: Arc<PairCounters>,
    /// The tap is a member of a network, with counters of its own: frames that are written to it are delivered there.
    pub(super) is_member: bool,
    /// Frames may be in `waiting`. Of a member others put some there.
    pub(super) may_wait: bool,
    /// A guest's frame was written since the lane's last turn.
    pub(super) is_given: bool,
}

impl ToTap {
    /// Writes the frames in the queue as far as there is room; how many the kernel took.
    #[inline]
    pub(super) fn write_waiting(&mut self) -> usize {
        match self.may_wait {
            true => self.write_all(),
            false => 0,
        }
    }

    fn write_all(&mut self) -> usize {
        let (mut frames, mut any) = (0, false);
        loop {
            let frame = match std::mem::take(&mut self.is_stuck) {
                true => Some(self.waiting.last()),
                false => self.waiting.next(),
            };
            let Some(frame) = frame else { break };
            let mut parts = Parts::new();
            for part in frame {
                push(&mut parts, &self.ram, *part);
            }
            let written = match self.link.loses(&self.counters) {
                // The kernel would drop it without a word.
                Some(counter) => {
                    counter.add(1);
                    Written::Lost
                }
                None => write(&self.tap, self.to, &parts, &self.counters),
            };
            match written {
                Written::Yes => frames += 1,
                Written::Lost => {}
                Written::NoRoom => {
                    self.is_stuck = true;
                    break;
                }
            }
            any = true;
            self.waiting.post_again();
        }
        if any {
            self.waiting.driver.publish();
        }
        self.may_wait = self.is_member || self.is_stuck;
        frames
    }

    /// Writes a frame of ours, if there is room for it now.
    pub(super) fn inject(&self, frame: &[u8]) {
        let mut parts = Parts::new();
        let header = [0; HEADER_BYTES as usize];
        if parts.push_bytes(&header) && parts.push_bytes(frame) {
            write(&self.tap, self.to, &parts, &self.counters);
        }
    }

    /// Writes a guest's frame. `of_guest`: the guest's counters.
    pub(crate) fn put(&mut self, frame: GuestFrame<'_>, of_guest: &PairCounters) -> TapPut {
        if let Some(counter) = self.link.loses(of_guest) {
            counter.add(1);
            return TapPut::Done;
        }
        let len = frame.sending.len;
        let request = frame.sending.request;
        let Some(gso) = request.gso else {
            return self.put_as_it_is(frame);
        };
        let most = match gso.kind {
            GsoKind::Udp if !self.cuts_udp => 0,
            GsoKind::Udp => UDP_SEGMENTS,
            _ => SEGMENTS,
        };
        if u32::from(gso.size) * most < len {
            return TapPut::Queue;
        }
        let mut headers = [0; HEADERS_MAX];
        // The kernel segments it by our copy of the headers.
        let Some(packet) = GsoPacket::open(frame, gso, of_guest, &mut headers) else {
            return TapPut::Done;
        };
        if self.to == TapTo::Uplink {
            let (longest, limit) = (packet.plan.segment_bytes_max(), self.frame_limit);
            if longest > limit {
                of_guest.from_guest_segment_too_long.add(1);
                return TapPut::Done;
            }
            let is_tagged = ethernet::is_tag(u16::from_be_bytes([headers[12], headers[13]]));
            // As long as only frames with a tag are: the kernel takes frames of that length, but no segments.
            if longest > limit - TAG_BYTES as u32 && !is_tagged {
                return TapPut::Queue;
            }
        }
        let put = self.put_as_it_is(frame.headed(&headers[..packet.plan.header_len()]));
        if put != TapPut::Done || self.to == TapTo::Host {
            return put;
        }
        let segments = packet.plan.segments();
        of_guest.from_guest_super_frames.add(1);
        of_guest.from_guest_super_frames_unsegmented.add(1);
        of_guest.from_guest_checksums_left.add(segments.into());
        TapPut::Whole {
            segments,
            headers: packet.plan.header_len() as u32,
        }
    }

    fn put_as_it_is(&mut self, frame: GuestFrame<'_>) -> TapPut {
        let header = tap_header(frame);
        let Some(parts) = parts_of(&header, frame) else {
            return TapPut::Queue;
        };
        self.write_waiting();
        if self.is_stuck {
            return TapPut::NoRoom;
        }
        match write(&self.tap, self.to, &parts, &self.counters) {
            Written::Yes => {
                meter::gave(1);
                if self.is_member {
                    self.counters.to_guest_frames.add(1);
                    self.counters.to_guest_bytes.add(frame.sending.len.into());
                }
            }
            Written::Lost => {}
            Written::NoRoom => return TapPut::NoRoom,
        }
        self.is_given = true;
        TapPut::Done
    }
}

/// What became of a write.
enum Written {
    Yes,
    /// The kernel refused it, which is counted.
    Lost,
    NoRoom,
}

fn write(tap: &Tap, to: TapTo, frame: &Parts<'_>, counters: &PairCounters) -> Written {
    match tap.write(frame) {
        Ok(()) => Written::Yes,
        Err(error) if to == TapTo::Uplink && error.kind() == ErrorKind::WouldBlock => Written::NoRoom,
        Err(_) => {
            counters.to_guest_host_refused.add(1);
            Written::Lost
        }
    }
}

/// Adds a buffer, which lies in the memory. There is room for as many as a frame can have.
pub(super) fn push<'a>(parts: &mut Parts<'a>, ram: &'a GuestRam, buffer: Buffer) {
    let offset = ram.map().translate(buffer.addr, buffer.len.into());
    let is_in = offset.is_some_and(|offset| parts.push(ram.map(), offset, buffer.len as usize));
    debug_assert!(is_in, "{buffer:?}");
}
