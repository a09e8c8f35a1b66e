//! By a tap device to the host, or to the wire.
//!
//! What guests send is written from where it lies, as a guest's own device would do it: our copy of the
//! first bytes, by which the frame was judged, and behind it guest memory. The kernel copies each byte once and looks
//! at its copy. What is put together here, or comes to several, or is in too many pieces, or asks for what this kernel
//! does not do, waits in a queue of ours ([`Received`]), as for a guest, until the lane has its turn. Nothing overtakes
//! it. A GSO packet that is for the wire is cut on that way, in portions, as for a NIC: the kernel would segment it in one
//! go.
//!
//! The host takes what is written at once. Of what is for the wire so much waits in the kernel as the device allows;
//! then frames wait with those who send them, as they do for a NIC.

use std::io::ErrorKind;
use std::sync::Arc;

use device::counters::PairCounters;
use device::meter;
use offload::packet::HEADERS_MAX;
use offload::segment::GsoKind;
use virtqueue::driver::{Buffer, GuestRam};

use super::gso::GsoPacket;
use super::guest_frame::GuestFrame;
use super::inner_queue::Received;
use super::tap_frame::{parts_of, tap_header};
use crate::nic::queue::LinkState;
use crate::nic::tap::{Parts, Tap};

/// Most segments of a GSO packet that is written at once.
const SEGMENTS: u32 = 256;

/// Where a tap leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum To {
    Host,
    Wire,
}

/// What became of a frame that was to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Put {
    /// It is written, or lost and counted.
    Done,
    /// It is written, a GSO packet for the wire: of so many segments, each with so many bytes of headers.
    Whole { segments: u32, headers: u32 },
    /// There is no room for it now, and nothing was done.
    NoRoom,
    /// It has to wait with the others in the queue, and nothing was done.
    Refused,
}

/// See the module's head.
pub(crate) struct ToTap {
    pub(super) tap: Tap,
    pub(super) to: To,
    /// The uplink's, if it leads to the wire.
    pub(super) link: LinkState,
    pub(super) waiting: Received,
    /// The frame that `waiting` gave last found no room.
    pub(super) is_stuck: bool,
    pub(super) ram: Arc<GuestRam>,
    /// Its kernel cuts UDP packets, too.
    pub(super) cuts_udp: bool,
    pub(super) counters: Arc<PairCounters>,
    /// A guest's frame was written since the lane looked.
    pub(super) is_given: bool,
}

impl ToTap {
    /// Writes what waits, as far as there is room; frames that were taken.
    pub(super) fn write_waiting(&mut self) -> usize {
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
            match write(&self.tap, self.to, &parts, &self.counters) {
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
        frames
    }

    /// Writes a frame of a guest's, whose counters these are.
    pub(crate) fn put(&mut self, frame: GuestFrame<'_>, of_guest: &PairCounters) -> Put {
        if let Some(counter) = self.link.loses(of_guest) {
            counter.add(1);
            return Put::Done;
        }
        let len = frame.sending.len;
        let request = frame.sending.request;
        let Some(gso) = request.gso else {
            return self.put_as_it_is(frame);
        };
        if u32::from(gso.size) * SEGMENTS < len || (gso.kind == GsoKind::Udp && !self.cuts_udp) {
            return Put::Refused;
        }
        let mut headers = [0; HEADERS_MAX];
        // By these the kernel segments it.
        let Some(packet) = GsoPacket::open(frame, gso, of_guest, &mut headers) else {
            return Put::Done;
        };
        let put = self.put_as_it_is(frame.headed(&headers[..packet.plan.header_len()]));
        if put != Put::Done || self.to == To::Host {
            return put;
        }
        let segments = packet.plan.segments();
        of_guest.from_guest_super_frames.add(1);
        of_guest.from_guest_super_frames_unsegmented.add(1);
        of_guest.from_guest_checksums_left.add(segments.into());
        Put::Whole {
            segments,
            headers: packet.plan.header_len() as u32,
        }
    }

    fn put_as_it_is(&mut self, frame: GuestFrame<'_>) -> Put {
        let header = tap_header(frame);
        let Some(parts) = parts_of(&header, frame) else {
            return Put::Refused;
        };
        self.write_waiting();
        if self.is_stuck {
            return Put::NoRoom;
        }
        match write(&self.tap, self.to, &parts, &self.counters) {
            Written::Yes => {
                self.counters.to_guest_frames.add(1);
                meter::gave(1);
                self.counters.to_guest_bytes.add(frame.sending.len.into());
            }
            Written::Lost => {}
            Written::NoRoom => return Put::NoRoom,
        }
        self.is_given = true;
        Put::Done
    }
}

/// What became of a write.
enum Written {
    Yes,
    /// The kernel refused it, which was counted.
    Lost,
    NoRoom,
}

fn write(tap: &Tap, to: To, frame: &Parts<'_>, counters: &PairCounters) -> Written {
    match tap.write(frame) {
        Ok(()) => Written::Yes,
        Err(error) if to == To::Wire && error.kind() == ErrorKind::WouldBlock => Written::NoRoom,
        Err(_) => {
            counters.to_guest_host_refused.add(1);
            Written::Lost
        }
    }
}

/// Adds a buffer, which is in the memory, as one of as many as there can be.
pub(super) fn push<'a>(parts: &mut Parts<'a>, ram: &'a GuestRam, buffer: Buffer) {
    let offset = ram.map().translate(buffer.addr, buffer.len.into());
    let is_in = offset.is_some_and(|offset| parts.push(ram.map(), offset, buffer.len as usize));
    debug_assert!(is_in, "{buffer:?}");
}
