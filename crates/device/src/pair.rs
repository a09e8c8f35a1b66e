//! The guest's side of a lane: two vrings, the virtio-net header, and what is checked in it.
//!
//! A chain arrives here with every descriptor already copied out of guest memory and bounds-checked by the
//! `virtqueue` crate. This file checks the meaning: a chain from the guest is readable only, a chain to the
//! guest is writable only, the virtio-net header (VirtIO 1.3, 5.1.6) may be spread over descriptors, and it
//! may not request what was not negotiated. A guest may change the header between two reads (CVE-2024-11614),
//! so each decision uses the bytes of one read: the first two bytes show whether a frame requests an offload;
//! if it does, the ten bytes of offload fields are read, and only that copy is used.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use packet::checksum::OutOfFrame;
use packet::segment::{GsoKind, Malformed, Request};
use virtqueue::{Buffer, Chain, Chains, DirtyLog, GuestFault, MemoryMap, Queue};

use super::call::Call;
use super::counters::{Counter, PairCounters};
use super::offloads::Offloads;

/// Length of the virtio-net header with `num_buffers`, bytes (VirtIO 1.3, 5.1.6).
pub const HEADER_BYTES: u32 = 12;
/// Length of the header with a hash report after it, bytes: VIRTIO_NET_F_HASH_REPORT.
pub const HASH_HEADER_BYTES: u32 = 20;
/// Length of the legacy header without `num_buffers`, bytes.
pub const LEGACY_HEADER_BYTES: u32 = 10;
/// Shortest frame that has an Ethernet header, bytes.
pub const SHORTEST_FRAME: u32 = 14;

/// Longest GSO packet, bytes: the maximum IP packet, Ethernet header and two VLAN tags.
pub const LONGEST_GSO_PACKET: u32 = 65_535 + 22;

/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`.
const NEEDS_CSUM: u8 = 1;
/// `VIRTIO_NET_HDR_GSO_NONE`.
const GSO_NONE: u8 = 0;

/// Why a port was closed: the fault of its guest or VMM.
///
/// `head` is the chain's first descriptor; lengths are bytes.
#[derive(Debug, Clone, thiserror::Error)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum Fault {
    /// The virtqueue itself is invalid.
    #[error(transparent)]
    Ring(#[from] GuestFault),
    /// A frame without a whole virtio-net header.
    #[error("a chain of {bytes} bytes is shorter than the virtio-net header of {header} bytes")]
    ChainShorterThanHeader { bytes: u32, header: u32 },
    /// A writable descriptor where the guest sends.
    #[error("the transmit queue holds a chain with a device-writable descriptor (head {head})")]
    WritableInTransmit { head: u16 },
    /// A command without a byte for its answer.
    #[error("the control queue holds a chain without a device-writable byte for the answer (head {head})")]
    ControlWithoutAck { head: u16 },
    /// Writing to a call eventfd blocked a worker, or the thread that stopped a lane; or it took a worker very long.
    #[error(
        "the VMM made its call eventfd block, or it has so many waiters that a write takes very long, which blocks \
         a worker: this port accepts no VMM until the daemon is restarted"
    )]
    CallBlocks,
    /// A readable descriptor where the guest receives.
    #[error("the receive queue holds a chain with a device-readable descriptor (head {head})")]
    ReadableInReceive { head: u16 },
}

impl Fault {
    /// The reason as a stable name, for status and logs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Ring(fault) => fault.name(),
            Self::ChainShorterThanHeader { .. } => "chain-shorter-than-header",
            Self::ControlWithoutAck { .. } => "control-without-ack",
            Self::CallBlocks => "call-blocks",
            Self::WritableInTransmit { .. } => "writable-in-transmit",
            Self::ReadableInReceive { .. } => "readable-in-receive",
        }
    }
}

/// Which vring of the pair, by the direction of its frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The guest's transmit queue.
    FromGuest,
    /// The guest's receive queue.
    ToGuest,
}

/// Positions of the vrings of a stopped lane: the value for VHOST_USER_GET_VRING_BASE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bases {
    /// The transmit queue's.
    pub from_guest: u32,
    /// The receive queue's.
    pub to_guest: u32,
}

/// What remains of a stopped lane.
pub struct Stopped {
    /// Positions of its vrings.
    pub bases: Bases,
    /// Call eventfds of pending calls, to be written by a thread that may wait (`call.rs`).
    pub calls: Vec<OwnedFd>,
}

/// Properties of the guest that both vrings of a pair need.
#[derive(Clone)]
pub struct Guest {
    /// Guest memory; offsets of buffers refer to it.
    pub memory: Arc<MemoryMap>,
    /// Virtio-net header in front of each frame, bytes.
    pub header_bytes: u32,
    /// VIRTIO_NET_F_MRG_RXBUF: a frame may span several chains.
    pub mergeable: bool,
    /// Longest frame the interface carries: MTU, Ethernet header and a VLAN tag, bytes.
    pub frame_limit: u32,
    /// Offloads that the driver accepted.
    pub offloads: Offloads,
    /// Frames may come from a stack on the same machine, with partial checksums.
    pub partial_checksums: bool,
    /// The dirty log, while the guest is migrated.
    pub log: Option<Arc<DirtyLog>>,
}

/// One virtqueue with its eventfds.
pub struct Vring {
    /// The rings.
    pub queue: Queue,
    /// Kick eventfd; `None`: the driver does not kick, the ring is polled.
    pub kick: Option<OwnedFd>,
    /// How the driver is notified.
    pub call: Call,
    /// SET_VRING_ENABLE: a disabled ring is not used.
    pub enabled: bool,
    /// Properties of the guest: a copy for each vring, because different threads may use the two.
    pub guest: Guest,
    /// How many of the next chains of a transmit queue a dead predecessor had passed to the NIC.
    pub sent_before: usize,
}

/// The guest's half of a lane. Different threads may use the two vrings.
pub struct QueuePair {
    /// The guest's transmit queue.
    pub from_guest: Vring,
    /// The guest's receive queue.
    pub to_guest: Vring,
}

/// A chain of the transmit queue with a frame to send.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sending {
    /// Where the frame begins in the chain.
    pub start: Cursor,
    /// Length of the frame, bytes.
    pub len: u32,
    /// The requested offloads. A requested checksum is inside the frame, and a request for segmentation
    /// includes one for a checksum; no other bytes of a GSO packet have been checked.
    pub request: Request,
}

impl QueuePair {
    /// Sets the offloads that the driver accepts now.
    pub fn set_offloads(&mut self, offloads: Offloads) {
        self.from_guest.guest.offloads = offloads;
        self.to_guest.guest.offloads = offloads;
    }

    /// Positions and pending calls, when the lane stops.
    pub fn stopped(&mut self) -> Stopped {
        let vrings = [&mut self.to_guest, &mut self.from_guest];
        let calls = vrings.into_iter().filter_map(|vring| vring.call.take_due());
        Stopped {
            calls: calls.collect(),
            bases: self.bases(),
        }
    }

    /// The kick eventfds.
    pub fn kicks(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let kicks = [&self.from_guest.kick, &self.to_guest.kick];
        kicks.into_iter().flatten().map(AsFd::as_fd)
    }

    /// The positions of both vrings.
    pub fn bases(&self) -> Bases {
        Bases {
            from_guest: self.from_guest.queue.base(),
            to_guest: self.to_guest.queue.base(),
        }
    }
}

impl Vring {
    /// Publishes used buffers, and notifies the driver if it requests that.
    #[inline]
    pub fn publish(&mut self, counters: &PairCounters) {
        if self.queue.publish() {
            self.call.make(counters);
        }
    }

    /// Whether it is enabled and has no kick descriptor: its driver requires polling.
    pub fn is_polled(&self) -> bool {
        self.enabled && self.kick.is_none()
    }

    /// Logs later writes in `log`; `None` stops that.
    pub fn set_log(&mut self, log: Option<&Arc<DirtyLog>>) {
        self.guest.log = log.cloned();
        self.queue.set_log(log.cloned());
    }

    /// Logs that `len` bytes at `offset` of the map were written, by us or by the kernel. Call it after the
    /// write, and before it is published.
    #[inline]
    pub fn log_write(&self, offset: u64, len: u32) {
        if let Some(log) = &self.guest.log {
            self.guest.memory.log(log, offset, len.into());
        }
    }

    /// Takes at most `most` chains of the receive queue, each checked to be a buffer; returns their total size.
    ///
    /// # Errors
    /// The guest's fault.
    #[inline]
    pub fn pop_buffers(&mut self, chains: &mut Chains, most: usize) -> Result<u64, Fault> {
        // Cleared first: on a fault no chain of an earlier batch must look like a popped one.
        chains.clear();
        self.queue.pop(chains, most)?;
        let mut room = 0;
        for chain in chains.iter() {
            room += u64::from(chain.writable_bytes);
            if chain.readable != 0 {
                return Err(Fault::ReadableInReceive { head: chain.id.head });
            }
            if chain.writable_bytes < self.guest.header_bytes {
                return Err(Fault::ChainShorterThanHeader {
                    bytes: chain.writable_bytes,
                    header: self.guest.header_bytes,
                });
            }
        }
        Ok(room)
    }

    /// The frame in a chain of the transmit queue, if it is plain: in one buffer, after a header without requests,
    /// and neither too short nor too long. `None`: [`Vring::check`] must check it, with its own read.
    #[inline(always)]
    pub fn plain(&self, chain: &Chain, buffers: &[Buffer]) -> Option<Sending> {
        if self.sent_before > 0 {
            return None;
        }
        let (1, 0, Some(buffer)) = (chain.readable, chain.writable, buffers.first()) else {
            return None;
        };
        let len = buffer.len.checked_sub(self.guest.header_bytes)?;
        let is_usual = (SHORTEST_FRAME..=self.guest.frame_limit).contains(&len);
        let mut header = [0; 2];
        if !is_usual || !self.guest.memory.copy_from_guest(buffer.offset, &mut header) {
            return None;
        }
        let [flags, gso_type] = header;
        let asks = flags & NEEDS_CSUM != 0 || gso_type != GSO_NONE;
        let start = Cursor {
            buffer: 0,
            within: self.guest.header_bytes,
        };
        (!asks).then_some(Sending {
            start,
            len,
            request: Request::default(),
        })
    }

    /// Checks a chain of the transmit queue; `buffers` are the chain's own. `None`: the frame cannot be sent,
    /// which is counted. `unsendable`: no frame can be sent now; count them here.
    ///
    /// # Errors
    /// The guest's fault.
    #[inline]
    pub fn check(
        &mut self,
        chain: &Chain,
        buffers: &[Buffer],
        unsendable: Option<&Counter>,
        counters: &PairCounters,
    ) -> Result<Option<Sending>, Fault> {
        let mut sending = Sending::default();
        let is_one = self.check_into(chain, buffers, unsendable, counters, &mut sending)?;
        Ok(is_one.then_some(sending))
    }

    /// As [`Vring::check`], into `sending`; returns whether there is a frame to send. For callers with
    /// many chains: moving a value that was just built in pieces stalls store forwarding.
    ///
    /// # Errors
    /// As [`Vring::check`].
    #[inline(always)]
    pub fn check_into(
        &mut self,
        chain: &Chain,
        buffers: &[Buffer],
        unsendable: Option<&Counter>,
        counters: &PairCounters,
        sending: &mut Sending,
    ) -> Result<bool, Fault> {
        if unsendable.is_none()
            && let Some(plain) = self.plain(chain, buffers)
        {
            *sending = plain;
            return Ok(true);
        }
        if self.sent_before > 0 {
            // It was sent, or is lost; to send it twice would be worse.
            self.sent_before -= 1;
            counters.from_guest_fate_unknown.add(1);
            return Ok(false);
        }
        if chain.writable != 0 {
            return Err(Fault::WritableInTransmit { head: chain.id.head });
        }
        let bytes = chain.readable_bytes;
        if bytes < self.guest.header_bytes {
            return Err(Fault::ChainShorterThanHeader {
                bytes,
                header: self.guest.header_bytes,
            });
        }
        let len = bytes - self.guest.header_bytes;
        if !self.request(buffers, len, counters, &mut sending.request) {
            return Ok(false);
        }
        if len < SHORTEST_FRAME {
            counters.from_guest_runt.add(1);
            return Ok(false);
        }
        let longest = match sending.request.gso {
            None => self.guest.frame_limit,
            Some(_) => LONGEST_GSO_PACKET,
        };
        if len > longest {
            counters.from_guest_too_long.add(1);
            return Ok(false);
        }
        if let Some(counter) = unsendable {
            counter.add(1);
            return Ok(false);
        }
        sending.start = Cursor::after(buffers, self.guest.header_bytes);
        sending.len = len;
        Ok(true)
    }

    /// Parses the header of a frame of `len` bytes into `request`; false if the request is invalid, which is counted.
    #[inline(always)]
    fn request(&self, buffers: &[Buffer], len: u32, counters: &PairCounters, request: &mut Request) -> bool {
        *request = Request::default();
        // Every offload for frames from the guest needs this one.
        if !self.guest.offloads.csum {
            let [flags, gso_type] = self.header_start(buffers);
            let is_plain = flags & NEEDS_CSUM == 0 && gso_type == GSO_NONE;
            if !is_plain {
                counters.from_guest_offload_not_negotiated.add(1);
            }
            return is_plain;
        }
        let header: [u8; 10] = self.header_start(buffers);
        if header[0] & NEEDS_CSUM == 0 && header[1] == GSO_NONE {
            return true;
        }
        let work = self.work(&header, len, counters);
        work.map(|work| *request = work).is_some()
    }

    /// Parses a header with requests, for [`request`](Self::request).
    #[inline(never)]
    fn work(&self, header: &[u8; 10], len: u32, counters: &PairCounters) -> Option<Request> {
        let request = match Request::from_header(header) {
            Ok(request) => request,
            Err(why) => {
                counters.drop_malformed(why);
                return None;
            }
        };
        let accepted = request.gso.is_none_or(|gso| {
            let kind = match gso.kind {
                GsoKind::Tcp4 => self.guest.offloads.tso4,
                GsoKind::Tcp6 => self.guest.offloads.tso6,
                GsoKind::Udp => self.guest.offloads.uso,
            };
            kind && (self.guest.offloads.ecn || !gso.ecn)
        });
        if !accepted {
            counters.from_guest_offload_not_negotiated.add(1);
            return None;
        }
        if let Some(at) = request.csum
            && at.field() + 2 > len as usize
        {
            let len = len as usize;
            counters.drop_malformed(Malformed::Checksum(OutOfFrame { at, len }));
            return None;
        }
        Some(request)
    }

    /// The first bytes of the header, copied out of guest memory, each once.
    #[inline]
    fn header_start<const N: usize>(&self, buffers: &[Buffer]) -> [u8; N] {
        let mut header = [0; N];
        if buffers[0].len as usize >= N {
            let _ = self.guest.memory.copy_from_guest(buffers[0].offset, &mut header);
            return header;
        }
        // Descriptors of one byte are legal; `check` has checked that the chain has a whole header.
        let mut rest = &mut header[..];
        for piece in Cursor::default().pieces(buffers) {
            let (now, later) = rest.split_at_mut(rest.len().min(piece.len as usize));
            let _ = self.guest.memory.copy_from_guest(piece.offset, now);
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        header
    }
}

/// A run of bytes in guest memory, checked when its descriptor was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Offset in the memory map, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: u32,
}

impl Piece {
    /// The first `len` bytes and the rest; `len` is at most the piece's.
    #[inline]
    pub fn split(self, len: u32) -> (Self, Self) {
        let rest = Self {
            offset: self.offset + u64::from(len),
            len: self.len - len,
        };
        (Self { len, ..self }, rest)
    }
}

/// A position in the bytes of a chain.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cursor {
    /// Index of its buffer; at the end, the number of buffers.
    pub buffer: usize,
    /// Its offset in that buffer, bytes.
    pub within: u32,
}

impl Cursor {
    /// The position after the first `count` bytes.
    #[inline]
    pub fn after(buffers: &[Buffer], count: u32) -> Self {
        let mut left = count;
        for (at, buffer) in buffers.iter().enumerate() {
            if left < buffer.len {
                return Self {
                    buffer: at,
                    within: left,
                };
            }
            left -= buffer.len;
        }
        Self {
            buffer: buffers.len(),
            within: 0,
        }
    }

    /// Skips the next `len` bytes.
    pub fn pass(&mut self, buffers: &[Buffer], len: u32) {
        let mut left = len;
        while left > 0
            && let Some(piece) = self.next(buffers, left)
        {
            left -= piece.len;
        }
    }

    /// The next piece of at most `most` bytes (not 0); `None` at the end of the chain.
    #[inline]
    pub fn next(&mut self, buffers: &[Buffer], most: u32) -> Option<Piece> {
        loop {
            let buffer = buffers.get(self.buffer)?;
            let len = (buffer.len - self.within).min(most);
            if len == 0 {
                (self.buffer, self.within) = (self.buffer + 1, 0);
                continue;
            }
            let offset = buffer.offset + u64::from(self.within);
            self.within += len;
            return Some(Piece { offset, len });
        }
    }

    /// All pieces from here on, one per buffer.
    #[inline]
    pub fn pieces(self, buffers: &[Buffer]) -> impl Iterator<Item = Piece> + '_ {
        buffers[self.buffer..]
            .iter()
            .enumerate()
            .map(move |(at, buffer)| {
                let whole = Piece {
                    offset: buffer.offset,
                    len: buffer.len,
                };
                if at == 0 {
                    whole.split(self.within).1
                } else {
                    whole
                }
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffers(lens: &[u32]) -> Vec<Buffer> {
        lens.iter()
            .enumerate()
            .map(|(at, &len)| Buffer {
                offset: at as u64 * 4096,
                len,
                room_before: 0,
            })
            .collect()
    }

    fn pieces(from: Cursor, buffers: &[Buffer]) -> Vec<(u64, u32)> {
        let pieces = from.pieces(buffers);
        pieces.map(|piece| (piece.offset, piece.len)).collect()
    }

    #[test]
    fn header_in_a_descriptor_of_its_own_is_skipped_whole() {
        let buffers = buffers(&[12, 100]);
        let frame = Cursor::after(&buffers, 12);
        assert_eq!((frame.buffer, frame.within), (1, 0));
        assert_eq!(pieces(frame, &buffers), [(4096, 100)]);
    }

    #[test]
    fn header_across_descriptors_is_skipped_whole() {
        let buffers = buffers(&[5, 20, 100]);
        let frame = Cursor::after(&buffers, 12);
        assert_eq!((frame.buffer, frame.within), (1, 7));
        assert_eq!(pieces(frame, &buffers), [(4096 + 7, 13), (8192, 100)]);
    }

    #[test]
    fn cursor_reads_every_byte_once_across_descriptors_and_empty_ones() {
        let buffers = buffers(&[12, 5, 0, 7]);
        let mut cursor = Cursor::after(&buffers, 14);
        let mut next = |most| {
            let piece = cursor.next(&buffers, most);
            piece.map(|piece| (piece.offset, piece.len))
        };
        assert_eq!(next(2), Some((4096 + 2, 2)));
        assert_eq!(next(6), Some((4096 + 4, 1)));
        assert_eq!(next(6), Some((3 * 4096, 6)));
        assert_eq!(next(6), Some((3 * 4096 + 6, 1)));
        assert_eq!(next(6), None);
    }

    #[test]
    fn skipping_everything_leaves_nothing() {
        let buffers = buffers(&[12]);
        let end = Cursor::after(&buffers, 12);
        assert_eq!((end.buffer, end.within), (1, 0));
        assert!(pieces(end, &buffers).is_empty());
    }
}
