//! To the host: frames that are written to its tap device.
//!
//! What guests send to the host is written from where it lies, as a guest's own device would do it: our copy of the
//! first bytes, by which the frame was judged, and behind it guest memory. The kernel copies each byte once and looks
//! at its copy. What is put together here, or comes to several, or is in too many pieces, or asks for what this kernel
//! does not do, waits in a queue of ours ([`Received`]), as for a guest, until the lane has its turn. Nothing overtakes
//! it.

use std::sync::Arc;

use device::counters::PairCounters;
use device::meter;
use offload::segment::GsoKind;
use virtqueue::driver::{Buffer, GuestRam};

use super::guest_frame::GuestFrame;
use super::inner_queue::Received;
use super::tap_frame::{parts_of, tap_header};
use crate::nic::tap::{Parts, Tap};

/// Most segments of a GSO packet that is not looked at here.
const SEGMENTS: u32 = 256;

/// See the module's head.
pub(crate) struct ToHost {
    pub(super) tap: Tap,
    pub(super) waiting: Received,
    pub(super) ram: Arc<GuestRam>,
    /// Its kernel cuts UDP packets, too.
    pub(super) cuts_udp: bool,
    pub(super) counters: Arc<PairCounters>,
    /// A guest's frame was written since the lane looked.
    pub(super) is_given: bool,
}

impl ToHost {
    /// Writes what waits; frames that the host took.
    pub(super) fn write_waiting(&mut self) -> usize {
        let (mut frames, mut any) = (0, false);
        while let Some(frame) = self.waiting.next() {
            any = true;
            let mut parts = Parts::new();
            for part in frame {
                push(&mut parts, &self.ram, *part);
            }
            frames += usize::from(write(&self.tap, &parts, &self.counters));
            self.waiting.post_again();
        }
        if any {
            self.waiting.driver.publish();
        }
        frames
    }

    /// Writes a frame of a guest's; false, and nothing done: it has to wait with the others.
    pub(crate) fn put(&mut self, frame: GuestFrame<'_>) -> bool {
        let len = frame.sending.len;
        let request = frame.sending.request;
        if let Some(gso) = request.gso
            && (u32::from(gso.size) * SEGMENTS < len || (gso.kind == GsoKind::Udp && !self.cuts_udp))
        {
            return false;
        }
        let header = tap_header(frame);
        let Some(parts) = parts_of(&header, frame) else {
            return false;
        };
        self.write_waiting();
        self.is_given = true;
        if write(&self.tap, &parts, &self.counters) {
            self.counters.to_guest_frames.add(1);
            meter::gave(1);
            self.counters.to_guest_bytes.add(len.into());
        }
        true
    }
}

/// Whether the host took a frame; counted if not.
fn write(tap: &Tap, frame: &Parts<'_>, counters: &PairCounters) -> bool {
    let is_taken = tap.write(frame).is_ok();
    if !is_taken {
        counters.to_guest_host_refused.add(1);
    }
    is_taken
}

/// Adds a buffer, which is in the memory, as one of as many as there can be.
pub(super) fn push<'a>(parts: &mut Parts<'a>, ram: &'a GuestRam, buffer: Buffer) {
    let offset = ram.map().translate(buffer.addr, buffer.len.into());
    let is_in = offset.is_some_and(|offset| parts.push(ram.map(), offset, buffer.len as usize));
    debug_assert!(is_in, "{buffer:?}");
}
