//! From a tap into a guest's buffers, with one readv(2) per frame: the receive path where the interface is in tap mode
//! and the guest has its queues for itself. The kernel segments frames and completes checksums as far as the guest did
//! not accept such offloads ([`Tap::set_offloads`]). Frames for which the guest has no buffers wait in the tap. The
//! kernel drops frames that find no room there, and counts them.
//!
//! The virtio-net header is read into the daemon's memory, checked, and written before the frame once the frame is
//! there. Bytes beyond the offered buffers go into the daemon's memory, too. Such a frame is assembled there, and
//! copied into the buffers when the guest has enough. The length of the next frame, and the number of frames in a
//! batch, are predicted from earlier ones, because unused offers cost, too: no buffers are offered beyond the expected
//! frames.
//!
//! A frame that a rate limit or filter rules may deny must not be read into the guest's buffers: with a limit or rules
//! all frames are read into the daemon's memory, and copied from there.

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};

use device::counters::PairCounters;
use device::meter;
use device::offloads::Offloads;
use device::pair::{Fault, HEADER_BYTES, Vring};
use packet::HEADERS_MAX;
use packet::checksum::ChecksumAt;
use packet::segment::{GsoKind, Request};
use rustix::io::Errno;

use crate::backend::receiver::{Receive, when_frames_wait};
use crate::guest::rx_queue::{Admission, RxQueue};
use crate::guest::to_guest::{Delivery, Fit};
use crate::lane::Work;
use crate::lane::limits::{BATCH, BYTES_A_FRAME};
use crate::nic::endpoint::NicQueue;
use crate::nic::queue::Nic;
use crate::nic::tap::{Parts, Tap};
use crate::policy::filter::Facts;
use crate::policy::rate_limit::Cost;

/// Bytes of the longest frame: a GSO packet with a tag.
const LONGEST: usize = 65_560;
/// Shortest frame, bytes.
const SHORTEST: u32 = 14;
/// Rounds between two reads of the tap after a read that found nothing, unless the epoll set reports frames. A polling
/// worker finds frames this way; a read in each round would cost its other guests.
const READ_EACH: u32 = 8;
/// Bytes that one poll moves.
const POLL_BYTES: u64 = BATCH as u64 * BYTES_A_FRAME;

/// See the module's head. The state of a lane between two polls.
pub struct FromTap {
    /// `None`: this lane has no tap, or the tap is gone.
    tap: Option<Tap>,
    /// The part of a frame that was not read into the guest's buffers, or all of it.
    room: Box<[u8]>,
    /// The frame in `room`, if it waits for buffers.
    held: Option<Held>,
    /// Predicted length of the next frame.
    expected: u32,
    /// Predicted frames of a batch, in eighths. Falls by at most one with each batch: after a large batch, small ones
    /// lower the prediction only slowly.
    frames: usize,
    /// Buffers of the last frame, or of longer ones a while ago.
    buffers: usize,
    /// The tap may have frames: it was not found empty since the epoll set reported some.
    has_frames: bool,
    /// The frame that is held waits for more buffers than the guest had.
    short: bool,
    /// Rounds since the tap was read last.
    rounds: u32,
    /// Cost of filter rules beyond earlier budgets, in frames: polls are skipped for it.
    deficit: usize,
}

/// A frame that waits: its bytes, and its parsed header.
#[derive(Debug, Clone, Copy)]
struct Held {
    len: u32,
    header: [u8; 10],
}

/// Result of a read.
enum ReadResult {
    Nothing,
    /// An invalid or lost frame, which is counted.
    Invalid,
    /// The frame is in the guest's buffers.
    InPlace(Held),
    /// The frame is in the daemon's memory.
    InOwnMemory(Held),
}

impl FromTap {
    /// Reads from a tap; without one no frames arrive.
    pub fn new(tap: Option<Tap>) -> Self {
        let bytes = if tap.is_some() { LONGEST } else { 0 };
        Self {
            tap,
            room: vec![0; bytes].into(),
            held: None,
            expected: 1,
            frames: 8,
            buffers: 1,
            has_frames: true,
            short: false,
            rounds: 0,
            deficit: 0,
        }
    }

    /// Whether frames may wait that no event reports.
    fn may_have_frames(&self) -> bool {
        self.held.is_some() || (self.has_frames && self.tap.is_some())
    }

    fn fill(&mut self, delivery: &mut Delivery<'_>, admission: &mut Admission<'_>) -> Result<(), Fault> {
        let (mut came, mut refused) = (0, 0);
        while came < BATCH {
            if let Some(Held { len, header }) = self.held {
                let fit = delivery.fit(len)?;
                if fit == Fit::Now {
                    delivery.write(len, header, &mut &self.room[..len as usize]);
                    count(&header, delivery.counters);
                }
                if fit == Fit::Later {
                    self.short = true;
                    break;
                }
                self.held = None;
            }
            // Reading a frame that is then denied is as much work.
            if delivery.bytes() + refused >= POLL_BYTES {
                self.has_frames = true;
                break;
            }
            let is_expected = came < self.frames.div_ceil(8);
            if is_expected {
                if !delivery.has_buffer(self.buffers)? {
                    break;
                }
                if self.expected > delivery.room_for_frame() && delivery.vring().guest.mergeable {
                    delivery.fetch_more()?;
                }
            }
            let before = delivery.left();
            let has_header = delivery.vring().guest.header_bytes == HEADER_BYTES;
            match self.read(delivery, is_expected && has_header && admission.admits_all()) {
                ReadResult::Nothing => break,
                ReadResult::Invalid => {}
                ReadResult::InPlace(Held { len, header }) => {
                    delivery.take_in_place(len, header);
                    count(&header, delivery.counters);
                    self.buffers = (before - delivery.left()).max(self.buffers - self.buffers.div_ceil(4));
                }
                ReadResult::InOwnMemory(frame) => {
                    let bytes = &self.room[..frame.len as usize];
                    let is_admitted = admits(admission, bytes, &frame.header, delivery.counters);
                    self.held = is_admitted.then_some(frame);
                    refused += if is_admitted { 0 } else { u64::from(frame.len) };
                }
            }
            came += 1;
            self.frames = self.frames.max((came + usize::from(!is_expected)) * 8);
        }
        self.frames = (came * 8).max(self.frames - 1).clamp(8, BATCH * 8);
        Ok(())
    }

    /// Reads a frame, if `may_be_in_place` into the guest's next buffers.
    #[inline]
    fn read(&mut self, delivery: &mut Delivery<'_>, may_be_in_place: bool) -> ReadResult {
        let Some(tap) = &self.tap else {
            return ReadResult::Nothing;
        };
        let mut header = [0; HEADER_BYTES as usize];
        let mut parts = Parts::new();
        parts.push_room(&mut header);
        let offered = match may_be_in_place {
            true => delivery.offer(&mut parts, self.expected),
            false => 0,
        };
        let from = (offered as usize).min(LONGEST);
        parts.push_room(&mut self.room[from..]);
        let bytes = loop {
            match tap.read(&parts) {
                Ok(bytes) => break bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.has_frames = false;
                    return ReadResult::Nothing;
                }
                Err(error) if error.raw_os_error() == Some(Errno::BADFD.raw_os_error()) => {
                    self.tap = None;
                    return ReadResult::Nothing;
                }
                // The kernel had a frame, and could not write it there: it is lost.
                Err(_) => {
                    delivery.counters.to_guest_host_refused.add(1);
                    return ReadResult::Invalid;
                }
            }
        };
        self.has_frames = true;
        let [header @ .., _, _] = header;
        let len = (bytes as u32).saturating_sub(HEADER_BYTES);
        self.expected = len.max(self.expected - self.expected / 4);
        let Some(header) = checked(header, len, &delivery.vring().guest.offloads) else {
            delivery.counters.to_guest_offload_malformed.add(1);
            return ReadResult::Invalid;
        };
        let frame = Held { len, header };
        if may_be_in_place && len <= offered {
            return ReadResult::InPlace(frame);
        }
        delivery.read_back(&mut self.room[..from]);
        ReadResult::InOwnMemory(frame)
    }
}

impl Receive for FromTap {
    /// Whether a round reads the tap.
    #[inline]
    fn has_frames<N: Nic>(&mut self, _queue: &mut NicQueue<N>) -> bool {
        self.rounds = self.rounds.saturating_add(1);
        self.may_have_frames() || (self.rounds >= READ_EACH && self.tap.is_some())
    }

    fn deliver<N: Nic>(&mut self, _queue: &mut NicQueue<N>, guest: &mut RxQueue) -> Result<usize, Fault> {
        self.rounds = 0;
        if self.deficit >= BATCH {
            self.deficit -= BATCH;
            return Ok(0);
        }
        self.short = false;
        let most = self.frames.div_ceil(8) * self.buffers;
        let (mut delivery, mut admission) = guest.begin(most)?;
        let done = self.fill(&mut delivery, &mut admission);
        let frames = done.map(|()| delivery.finish())?;
        self.deficit += guest.take_work();
        meter::count_taken(frames);
        Ok(frames)
    }

    fn enable_notifications<N: Nic>(&mut self, _queue: &mut NicQueue<N>, to_guest: &mut Vring) -> Work {
        match self.may_have_frames() {
            true => when_frames_wait(to_guest, self.short),
            false => Work::None,
        }
    }

    /// Frames from the tap have no limit: the kernel has accepted them.
    fn set_frame_limit(&mut self, _bytes: u32) {}

    /// The socket receives nothing, so nothing waits for it.
    fn awaits_nic(&self) -> bool {
        false
    }

    fn tap(&self) -> Option<BorrowedFd<'_>> {
        self.tap.as_ref().map(Tap::as_fd)
    }

    fn note_event(&mut self) {
        self.has_frames = true;
    }

    /// Frames in the tap remain for its next reader.
    fn finish<N: Nic>(&mut self, _queue: &mut NicQueue<N>, guest: &mut RxQueue) {
        let held = u64::from(self.held.is_some());
        guest.counters.to_guest_queue_stopped.add(held);
    }
}

/// Whether filter rules and rate limit admit a frame; counts a denied one.
fn admits(admission: &mut Admission<'_>, frame: &[u8], header: &[u8; 10], counters: &PairCounters) -> bool {
    if admission.admits_all() {
        return true;
    }
    let request = Request::from_header(header).unwrap_or_default();
    if let Some(filter) = &mut admission.filter {
        let facts = Facts {
            stored: request.csum.map(ChecksumAt::field),
            ..Facts::of_len(frame.len())
        };
        if !filter.allows(&frame[..frame.len().min(HEADERS_MAX)], facts, counters) {
            return false;
        }
    }
    let headers = u16::from_le_bytes([header[2], header[3]]);
    let cost = || cost(frame.len() as u32, &request, headers.into());
    admission.policer.allows(cost, counters)
}

/// Counts a frame that was delivered, if it is a GSO packet.
#[inline]
fn count(header: &[u8; 10], counters: &PairCounters) {
    let [_, gso_type, ..] = header;
    if *gso_type != 0 {
        counters.to_guest_super_frames.add(1);
    }
}

/// The cost of a packet of `len` bytes, with `headers` bytes of headers, on a wire.
fn cost(len: u32, request: &Request, headers: u32) -> Cost {
    let Some(gso) = request.gso else {
        return Cost::frame(len);
    };
    let frames = len.saturating_sub(headers).div_ceil(gso.size.into()).max(1);
    Cost {
        frames,
        bytes: u64::from(len) + u64::from(frames - 1) * u64::from(headers),
    }
}

/// The header of a frame of `len` bytes, if it is valid and requests only accepted offloads.
#[inline]
fn checked(header: [u8; 10], len: u32, offloads: &Offloads) -> Option<[u8; 10]> {
    if len < SHORTEST {
        return None;
    }
    // A guest without GUEST_CSUM gets no DATA_VALID either (VirtIO 1.3, 5.1.6.4.1).
    if header == [0; 10] || (!offloads.guest_csum && header[0] & NEEDS_CSUM == 0 && header[1] == 0) {
        return Some([0; 10]);
    }
    let request = Request::from_header(&header).ok()?;
    let is_in_frame = |at: usize| at + 2 <= len as usize;
    let has_checksum = request.csum.is_none_or(|at| is_in_frame(at.field()));
    let is_taken = request.gso.is_none_or(|gso| {
        let kind = match gso.kind {
            GsoKind::Tcp4 => offloads.guest_tso4,
            GsoKind::Tcp6 => offloads.guest_tso6,
            GsoKind::Udp => offloads.guest_uso4 && offloads.guest_uso6,
        };
        kind && (offloads.guest_ecn || !gso.ecn) && u32::from(gso.size) < len
    });
    (offloads.guest_csum && has_checksum && is_taken).then_some(header)
}

/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`, VirtIO 1.3, 5.1.6.
const NEEDS_CSUM: u8 = 1;

#[cfg(test)]
#[path = "from_tap_tests.rs"]
mod tests;
