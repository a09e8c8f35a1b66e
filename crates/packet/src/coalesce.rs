//! Merges consecutive segments of a flow into GSO packets: the kernel's GRO, for one batch of received frames.
//!
//! Theory of operation. The frames of a batch are added to a [`Batch`] in the order of their arrival
//! ([`Batch::add`]). It reads only their headers, keeps no reference to them, and allocates nothing. Each
//! frame either starts a unit or is appended to its flow's open unit. Then the units are taken in the order
//! of their first frames ([`Batch::run`]), so no frame overtakes one of its own flow, and nothing waits for a
//! later batch. If a guest has too few buffers for a unit, it is taken in several runs: every member of a
//! unit is a whole frame with a valid header, so any of them can start the rest.
//!
//! What is merged is what Linux merges (net/ipv4/tcp_offload.c `tcp_gro_receive`, net/ipv4/udp_offload.c
//! `udp_gro_receive_segment`, include/net/gro.h `gro_receive_network_flush`, net/core/gro.c `gro_list_prepare`):
//!
//! | layer | condition |
//! |---|---|
//! | all | checksum right or partial; IP packet ends where the frame does; at most 65,535 bytes of IP packet |
//! | Ethernet | addresses and VLAN tags equal |
//! | IPv4 | no options, no fragment, header checksum right; TOS, TTL, DF equal; id one more, or with DF the same |
//! | IPv6 | traffic class, flow label, hop limit, extension headers equal |
//! | TCP | in sequence; ports, acknowledgement, window, ECE equal; some payload, none longer than the first's |
//! | TCP flags | SYN, RST, URG: alone. CWR: only in the first. PSH, FIN, a shorter segment: end the unit |
//! | TCP options | equal but for the timestamps, which may not go back (Linux wants them equal) |
//! | UDP | ports equal, a checksum, none longer than the first; a shorter one ends the unit |
//!
//! The first frame's timestamps are kept: a delayed acknowledgement also echoes the oldest (RFC 7323, 4.3).
//!
//! The order of all frames with the same addresses, protocol and ports is kept, whatever their other headers.
//! A frame that is neither TCP nor UDP, or a fragment, has no known flow: it ends all units.
//!
//! Limits: [`MOST_FRAMES`] frames per batch, [`MOST_FLOWS`] open flows (a further one closes the oldest),
//! headers of up to [`HEADERS`] bytes.

use std::ops::Range;

use crate::fields::tcp;
use crate::layers::{self, Ip, Layers, Transport};
use crate::verify::Verdict;

mod group;
mod header;
#[cfg(test)]
mod tests;

use group::{Appended, Group};

/// Maximum number of frames in a batch.
pub const MOST_FRAMES: usize = 64;
/// Maximum number of open flows: the kernel's MAX_GRO_SKBS.
pub const MOST_FLOWS: usize = 8;
/// Maximum header bytes of a frame that is merged: Ethernet with two tags, IPv6, TCP with all possible options.
pub const HEADERS: usize = 128;

/// Which GSO packets may be built: those that the guest accepted (VirtIO 1.3, 5.1.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rules {
    /// TCP over IPv4: GUEST_TSO4.
    pub tcp4: bool,
    /// TCP over IPv6: GUEST_TSO6.
    pub tcp6: bool,
    /// The first segment of a GSO packet may have the flag CWR: GUEST_ECN.
    pub ecn: bool,
    /// UDP over IPv4: GUEST_USO4.
    pub udp4: bool,
    /// UDP over IPv6: GUEST_USO6.
    pub udp6: bool,
}

impl Rules {
    /// Whether any GSO packet may be built.
    #[inline]
    pub fn any(&self) -> bool {
        self.tcp4 || self.tcp6 || self.udp4 || self.udp6
    }

    /// Whether other frames may be appended to a frame with these headers, if its checksum is good: it has payload up to
    /// its end, and none of TCP's flags that stay alone or end a unit.
    #[inline]
    fn may_open(&self, headers: &[u8], frame_len: u32, layers: &Layers) -> bool {
        let flags = group::tcp_flags(headers, layers);
        self.allow(layers.version, layers.transport_kind)
            && layers.ip_len_end == frame_len
            && frame_len > layers.payload.into()
            && flags & (tcp::SYN | tcp::RST | tcp::URG | tcp::PSH | tcp::FIN) == 0
            && (self.ecn || flags & tcp::CWR == 0)
    }

    #[inline]
    pub(crate) fn allow(&self, version: Ip, transport: Transport) -> bool {
        match (version, transport) {
            (Ip::V4, Transport::Tcp) => self.tcp4,
            (Ip::V6, Transport::Tcp) => self.tcp6,
            (Ip::V4, Transport::Udp) => self.udp4,
            (Ip::V6, Transport::Udp) => self.udp6,
        }
    }
}

/// No frame: the end of a unit.
const NONE: u8 = u8::MAX;

/// The parsed properties of a frame.
#[derive(Debug, Clone, Copy)]
struct Entry {
    /// Length of the whole frame, bytes.
    len: u32,
    /// `None`: not TCP or UDP.
    layers: Option<Layers>,
    verdict: Verdict,
    /// PSH and FIN, if they are set: they end a unit, so that only its last frame has them.
    flags: u8,
    /// CWR is set.
    cwr: bool,
    /// It starts a unit.
    first: bool,
    /// The next frame of the unit.
    next: u8,
}

impl Entry {
    const EMPTY: Self = Self {
        len: 0,
        layers: None,
        verdict: Verdict::Unknown,
        flags: 0,
        cwr: false,
        first: true,
        next: NONE,
    };

    /// Payload bytes that it adds to a GSO packet.
    fn payload(&self) -> u32 {
        self.len - self.skip()
    }

    /// Bytes of headers.
    fn skip(&self) -> u32 {
        self.layers.map_or(0, |layers| u32::from(layers.payload))
    }
}

/// A batch of received frames, and which of them are merged. About 5 KiB: created once and reused.
#[derive(Debug, Clone)]
pub struct Batch {
    rules: Rules,
    entries: [Entry; MOST_FRAMES],
    count: usize,
    open: [Group; MOST_FLOWS],
    /// The group of the last frame.
    latest: usize,
}

/// The position in a batch of a caller that takes runs from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Position {
    /// Every unit that started before this frame was taken.
    frame: usize,
    /// The current unit continues with this frame.
    inside: Option<u8>,
}

/// Frames that are delivered as one: a frame, or some of a unit in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    first: u8,
    /// How many frames, at least 1.
    count: u8,
    /// Bytes of the frame, or GSO packet.
    bytes: u32,
    /// PSH and FIN of the last.
    flags: u8,
    /// The frame after the last one.
    next: u8,
}

impl Run {
    /// Bytes of the frame, or GSO packet, from the Ethernet header on.
    #[inline]
    pub fn bytes(&self) -> u32 {
        self.bytes
    }

    /// How many frames it is made of, at least 1.
    #[inline]
    pub fn frames(&self) -> usize {
        usize::from(self.count)
    }

    /// Whether it ends its unit.
    #[inline]
    pub fn is_whole(&self) -> bool {
        self.next == NONE
    }

    /// Number, in the batch, of the frame whose header becomes the GSO packet's.
    #[inline]
    pub fn first(&self) -> usize {
        usize::from(self.first)
    }
}

impl Batch {
    /// An empty one. Without a rule nothing is merged, and frames are only parsed.
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        Self {
            rules,
            entries: [Entry::EMPTY; MOST_FRAMES],
            count: 0,
            open: [Group::CLOSED; MOST_FLOWS],
            latest: 0,
        }
    }

    /// Removes all frames.
    pub fn clear(&mut self) {
        self.count = 0;
        self.close_all();
    }

    /// Number of frames.
    #[inline]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there is none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds the next frame. `headers`: its first bytes, at least [`crate::HEADERS_MAX`] of them or all; `frame_len`:
    /// its length in bytes; `check`: verifies its checksum, called once for a TCP or UDP packet. False, and nothing
    /// done, if the batch is full.
    #[inline]
    pub fn add(&mut self, headers: &[u8], frame_len: u32, check: impl FnOnce(&Layers) -> Verdict) -> bool {
        let frame = self.count;
        let Some(number) = u8::try_from(frame).ok().filter(|_| frame < MOST_FRAMES) else {
            return false;
        };
        self.count += 1;
        if let Some(appended) = self.find(headers, frame_len) {
            let at = self.latest;
            let layers = self.open[at].layers(frame_len);
            let verdict = check(&layers);
            let single = Entry {
                len: frame_len,
                layers: Some(layers),
                verdict,
                flags: appended.flags,
                ..Entry::EMPTY
            };
            if verdict == Verdict::Unknown {
                self.open[at].close();
                self.entries[frame] = single;
                return true;
            }
            self.entries[frame] = Entry {
                first: false,
                ..single
            };
            let last = self.open[at].append(&appended, number);
            self.entries[usize::from(last)].next = number;
            return true;
        }
        self.entries[frame] = self.start(number, headers, frame_len, check);
        true
    }

    /// The virtio-net header, without `num_buffers`, of a frame that is not added to the batch, which is empty: no other
    /// frame can be merged with it. `check` as in [`Self::add`]. `None`: the frame has to be added, or `check` returned
    /// `None`.
    #[inline]
    pub fn header_alone(
        &self,
        headers: &[u8],
        frame_len: u32,
        check: impl FnOnce(&Layers) -> Option<Verdict>,
    ) -> Option<[u8; 10]> {
        debug_assert!(self.is_empty(), "it would overtake frames of its flow");
        let Some(layers) = layers::parse(headers, frame_len) else {
            return Some([0; 10]);
        };
        match self.rules.may_open(headers, frame_len, &layers) {
            true => None,
            false => check(&layers).map(|verdict| header::of_frame(&layers, verdict)),
        }
    }

    /// Adds the next frame, `frame_len` bytes of which none is known: it is not merged. False, and nothing done, if the
    /// batch is full.
    #[inline]
    pub fn add_unread(&mut self, frame_len: u32) -> bool {
        let Some(entry) = self.entries.get_mut(self.count) else {
            return false;
        };
        *entry = Entry {
            len: frame_len,
            ..Entry::EMPTY
        };
        self.count += 1;
        self.close_all();
        true
    }

    /// Finds the open group that a frame can be appended to, if its checksum is good; makes it the latest.
    #[inline]
    fn find(&mut self, headers: &[u8], frame_len: u32) -> Option<Appended> {
        if !self.rules.any() {
            return None;
        }
        let others = (0..MOST_FLOWS).filter(|&at| at != self.latest);
        let at = std::iter::once(self.latest)
            .chain(others)
            .find(|&at| self.open[at].resembles(headers))?;
        self.latest = at;
        self.open[at].can_append(headers, frame_len)
    }

    /// Adds a frame that starts a unit, and may open a group.
    fn start(
        &mut self,
        number: u8,
        headers: &[u8],
        frame_len: u32,
        check: impl FnOnce(&Layers) -> Verdict,
    ) -> Entry {
        let single = Entry {
            len: frame_len,
            ..Entry::EMPTY
        };
        let Some(layers) = layers::parse(headers, frame_len) else {
            self.close_all();
            return single;
        };
        let verdict = check(&layers);
        let flags = group::tcp_flags(headers, &layers);
        let single = Entry {
            layers: Some(layers),
            verdict,
            cwr: flags & tcp::CWR != 0,
            ..single
        };
        if !self.rules.any() {
            return single;
        }
        for group in self.open.iter_mut().filter(|group| group.is_open()) {
            if group.is_same_flow(headers, &layers) {
                group.close();
            }
        }
        // Others end no group: acknowledgements are many.
        if verdict != Verdict::Unknown && self.rules.may_open(headers, frame_len, &layers) {
            let free = self.free();
            if self.open[free].open(headers, frame_len, &layers, number) {
                self.latest = free;
            }
        }
        single
    }

    /// A free slot for another group; closes the oldest group if there is none.
    fn free(&mut self) -> usize {
        let mut oldest = 0;
        for (at, group) in self.open.iter().enumerate() {
            if !group.is_open() {
                return at;
            }
            if group.first() < self.open[oldest].first() {
                oldest = at;
            }
        }
        self.open[oldest].close();
        oldest
    }

    fn close_all(&mut self) {
        self.open.iter_mut().for_each(Group::close);
    }

    /// The next frames to deliver as one: as many of a unit as make at most `room` bytes, but at least one;
    /// `None` at the end. Returns the same until [`Batch::advance`] is called.
    #[inline]
    #[must_use]
    pub fn run(&self, position: &Position, room: u32) -> Option<Run> {
        let first = match position.inside {
            Some(frame) => usize::from(frame),
            None => (position.frame..self.count).find(|&frame| self.entries[frame].first)?,
        };
        let entry = self.entries.get(first)?;
        // Frames have numbers below MOST_FRAMES.
        #[allow(clippy::cast_possible_truncation)]
        let mut run = Run {
            first: first as u8,
            count: 1,
            bytes: entry.len,
            flags: entry.flags,
            next: entry.next,
        };
        while let Some(member) = self.entries.get(usize::from(run.next)) {
            let bytes = run.bytes + member.payload();
            if bytes > room {
                break;
            }
            run = Run {
                count: run.count + 1,
                bytes,
                // Only the last of a unit has any.
                flags: member.flags,
                next: member.next,
                ..run
            };
        }
        Some(run)
    }

    /// Moves `position` past `run`.
    #[inline]
    pub fn advance(&self, position: &mut Position, run: &Run) {
        if position.inside.is_none() {
            position.frame = run.first() + 1;
        }
        position.inside = (run.next != NONE).then_some(run.next);
    }

    /// The frames of a run in their order, with the byte range of each that goes into the GSO packet.
    #[inline]
    pub fn members(&self, run: &Run) -> impl Iterator<Item = (usize, Range<u32>)> + '_ {
        let first = run.first;
        let (mut frame, mut left) = (first, run.count);
        std::iter::from_fn(move || {
            left = left.checked_sub(1)?;
            let number = usize::from(frame);
            let entry = self.entries.get(number)?;
            let skip = if frame == first { 0 } else { entry.skip() };
            frame = entry.next;
            Some((number, skip..entry.len))
        })
    }

    /// The virtio-net header of a run, without `num_buffers`, for a guest that accepted GUEST_CSUM.
    #[inline]
    #[must_use]
    pub fn header(&self, run: &Run) -> [u8; 10] {
        let entry = &self.entries[run.first()];
        match &entry.layers {
            None => [0; 10],
            Some(layers) if run.count == 1 => header::of_frame(layers, entry.verdict),
            Some(layers) => header::of_gso_packet(layers, entry.payload(), entry.cwr),
        }
    }

    /// The layers of a frame with a partial checksum.
    #[inline]
    #[must_use]
    pub fn partial(&self, frame: usize) -> Option<&Layers> {
        let entry = &self.entries[frame];
        let layers = entry.layers.as_ref();
        layers.filter(|_| entry.verdict == Verdict::Partial)
    }

    /// Makes the header of a run's first frame the GSO packet's: lengths, IPv4 header checksum, PSH and FIN, and the
    /// pseudo-header's sum in the checksum field (VirtIO 1.3, 5.1.6.4.1). `headers`: that frame from its first
    /// byte on, the same as were added. Does nothing to a run of one frame.
    pub fn rewrite(&self, run: &Run, headers: &mut [u8]) {
        let entry = &self.entries[run.first()];
        if run.count > 1
            && let Some(layers) = &entry.layers
        {
            header::rewrite(headers, layers, run.bytes, run.flags);
        }
    }
}
