//! A unit to which more frames may be appended.
//!
//! The first frame's header is kept with a mask of the bytes that must be equal in each later frame of the
//! unit. So the usual frame is recognised by comparing about ten words, without a parser: all bytes that
//! determine the positions of its layers are among them. Fields that may differ are checked separately:
//! lengths, IPv4 id and header checksum, TCP sequence number, three flags, timestamps, the checksum.

use super::{HEADERS, MOST_FRAMES};
use crate::checksum::Sum;
use crate::fields::ipv4::{self, DONT_FRAGMENT};
use crate::fields::tcp::{self, CWR, FIN, PSH};
use crate::fields::{ipv6, udp};
use crate::layers::{Ip, Layers, Transport};
use crate::{be16, be32, field};

/// Longest IP packet, bytes.
const LONGEST_PACKET: u32 = 65_535;
#[derive(Debug, Clone)]
pub(super) struct Group {
    /// Number of frames; 0: closed.
    count: u8,
    first: u8,
    last: u8,
    /// Header of the first frame, with zeros where later frames may differ.
    want: [u8; HEADERS],
    mask: [u8; HEADERS],
    layers: Layers,
    /// Payload of the first frame, bytes: no later one is longer.
    size: u32,
    /// Payload of all frames, bytes.
    bytes: u32,
    /// Sequence number of the next frame.
    next_seq: u32,
    /// IPv4 id of the first frame; `fixed_id`: the same in all.
    id: u16,
    df: bool,
    fixed_id: bool,
    /// Offset of the timestamps, if there are any, and those of the last frame.
    stamps_at: Option<u8>,
    stamps: [u32; 2],
}

/// A frame that can be appended.
#[derive(Debug, Clone, Copy)]
pub(super) struct Appended {
    payload: u32,
    /// PSH and FIN.
    pub(super) flags: u8,
    fixed_id: bool,
    stamps: [u32; 2],
}

impl Group {
    /// A closed group.
    pub(super) const CLOSED: Self = Self {
        count: 0,
        first: 0,
        last: 0,
        want: [0; HEADERS],
        mask: [0; HEADERS],
        layers: Layers {
            ip: 0,
            transport: 0,
            payload: 0,
            version: Ip::V4,
            transport_kind: Transport::Tcp,
            ip_len_end: 0,
        },
        size: 0,
        bytes: 0,
        next_seq: 0,
        id: 0,
        df: false,
        fixed_id: false,
        stamps_at: None,
        stamps: [0; 2],
    };

    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.count > 0
    }

    /// Number of the first frame.
    pub(super) fn first(&self) -> u8 {
        self.first
    }

    #[inline]
    pub(super) fn close(&mut self) {
        self.count = 0;
    }

    /// Layers of a frame with the header of the first and a length of `frame_len` bytes.
    #[inline]
    pub(super) fn layers(&self, frame_len: u32) -> Layers {
        Layers {
            ip_len_end: frame_len,
            ..self.layers
        }
    }

    /// Opens it with a frame that `Rules::may_open` allows, if others can be appended to it; false if none can.
    pub(super) fn open(&mut self, headers: &[u8], frame_len: u32, layers: &Layers, number: u8) -> bool {
        let len = usize::from(layers.payload);
        let payload = frame_len.saturating_sub(u32::from(layers.payload));
        if len > HEADERS {
            return false;
        }
        let (ip, transport) = (usize::from(layers.ip), usize::from(layers.transport));
        let (mut id, mut df) = (0, false);
        if layers.version == Ip::V4 {
            let fragment = be16(headers, ip + ipv4::FRAGMENT);
            if headers[ip] != 0x45 || fragment & !DONT_FRAGMENT != 0 || !has_good_header_sum(headers, ip) {
                return false;
            }
            (id, df) = (be16(headers, ip + ipv4::ID), fragment & DONT_FRAGMENT != 0);
        }
        let mut next_seq = 0;
        let (mut stamps_at, mut stamps) = (None, [0; 2]);
        match layers.transport_kind {
            Transport::Tcp => {
                next_seq = be32(headers, transport + tcp::SEQUENCE).wrapping_add(payload);
                stamps_at = timestamps(&headers[..len], transport + tcp::BYTES);
                if let Some(at) = stamps_at {
                    stamps = stamps_of(headers, at);
                }
            }
            Transport::Udp => {
                if u32::from(be16(headers, transport + udp::LEN)) != frame_len - u32::from(layers.transport) {
                    return false;
                }
            }
        }
        *self = Self {
            count: 1,
            first: number,
            last: number,
            layers: *layers,
            size: payload,
            bytes: payload,
            next_seq,
            id,
            df,
            fixed_id: false,
            stamps_at,
            stamps,
            ..Self::CLOSED
        };
        self.make_mask(&headers[..len]);
        true
    }

    fn make_mask(&mut self, headers: &[u8]) {
        let (ip, transport) = (usize::from(self.layers.ip), usize::from(self.layers.transport));
        let mask = &mut self.mask[..headers.len()];
        mask.fill(0xff);
        let differing: &[usize] = match self.layers.version {
            // Total length and id; header checksum.
            Ip::V4 => &[2, 3, 4, 5, 10, 11],
            // Payload length.
            Ip::V6 => &[4, 5],
        };
        differing.iter().for_each(|at| mask[ip + at] = 0);
        match self.layers.transport_kind {
            Transport::Tcp => {
                // Sequence number; checksum.
                [4, 5, 6, 7, 16, 17]
                    .iter()
                    .for_each(|at| mask[transport + at] = 0);
                mask[transport + tcp::FLAGS] = !(CWR | PSH | FIN);
            }
            // Length; checksum.
            Transport::Udp => mask[transport + 4..transport + 8].fill(0),
        }
        if let Some(at) = self.stamps_at {
            mask[usize::from(at)..usize::from(at) + 8].fill(0);
        }
        for ((want, mask), byte) in self.want.iter_mut().zip(&self.mask).zip(headers) {
            *want = byte & mask;
        }
    }

    /// Whether a frame has the same header as the first, except for fields that may differ.
    #[inline]
    pub(super) fn resembles(&self, headers: &[u8]) -> bool {
        let len = usize::from(self.layers.payload);
        if !self.is_open() || headers.len() < len {
            return false;
        }
        // At least 42 bytes, at most HEADERS: the last word overlaps the one before.
        let differs = |at: usize| (word(headers, at) & word(&self.mask, at)) != word(&self.want, at);
        let mut at = 0;
        while at + 8 <= len {
            if differs(at) {
                return false;
            }
            at += 8;
        }
        !differs(len - 8)
    }

    /// Whether a frame that [`resembles`](Self::resembles) the first is the next one of the unit.
    #[inline]
    pub(super) fn can_append(&self, headers: &[u8], frame_len: u32) -> Option<Appended> {
        let Layers {
            ip,
            transport,
            payload: len,
            version,
            transport_kind,
            ..
        } = self.layers;
        let (ip, transport) = (usize::from(ip), usize::from(transport));
        let payload = frame_len.checked_sub(u32::from(len))?;
        let packet = u32::from(len) - ip as u32 + self.bytes + payload;
        if payload == 0
            || payload > self.size
            || packet > LONGEST_PACKET
            || packet_end(headers, ip, version) != frame_len
        {
            return None;
        }
        let mut appended = Appended {
            payload,
            flags: 0,
            fixed_id: self.fixed_id,
            stamps: [0; 2],
        };
        if version == Ip::V4 {
            appended.fixed_id = self.accepts_id(be16(headers, ip + ipv4::ID))?;
            if !has_good_header_sum(headers, ip) {
                return None;
            }
        }
        match transport_kind {
            Transport::Tcp => {
                let flags = headers[transport + tcp::FLAGS];
                if flags & CWR != 0 || be32(headers, transport + tcp::SEQUENCE) != self.next_seq {
                    return None;
                }
                appended.flags = flags & (PSH | FIN);
                if let Some(at) = self.stamps_at {
                    appended.stamps = stamps_of(headers, at);
                    let back = |new: u32, old: u32| new.wrapping_sub(old) > i32::MAX as u32;
                    if back(appended.stamps[0], self.stamps[0]) || back(appended.stamps[1], self.stamps[1]) {
                        return None;
                    }
                }
            }
            Transport::Udp => {
                if u32::from(be16(headers, transport + udp::LEN)) != frame_len - transport as u32 {
                    return None;
                }
            }
        }
        Some(appended)
    }

    /// `Some` if an id continues the unit's; the value: whether all ids are the same.
    #[inline]
    fn accepts_id(&self, id: u16) -> Option<bool> {
        let ahead = id.wrapping_sub(self.id);
        let fixed = if self.count == 1 {
            self.df && ahead == 0
        } else {
            self.fixed_id
        };
        let expected = if fixed { 0 } else { u16::from(self.count) };
        (ahead == expected).then_some(fixed)
    }

    /// Appends frame `number`, and returns the number of the previous last one.
    #[inline]
    pub(super) fn append(&mut self, appended: &Appended, number: u8) -> u8 {
        let last = self.last;
        self.last = number;
        self.count += 1;
        self.bytes += appended.payload;
        self.next_seq = self.next_seq.wrapping_add(appended.payload);
        self.fixed_id = appended.fixed_id;
        self.stamps = appended.stamps;
        if appended.flags != 0 || appended.payload < self.size || usize::from(self.count) == MOST_FRAMES {
            self.close();
        }
        last
    }

    /// Whether a frame belongs to the same flow: addresses, protocol, ports.
    pub(super) fn is_same_flow(&self, headers: &[u8], layers: &Layers) -> bool {
        self.layers.version == layers.version
            && self.layers.transport_kind == layers.transport_kind
            && ports(&self.want, &self.layers) == ports(headers, layers)
            && addresses(&self.want, &self.layers) == addresses(headers, layers)
    }
}

/// Flags of a TCP packet; 0 for UDP.
#[inline]
pub(super) fn tcp_flags(headers: &[u8], layers: &Layers) -> u8 {
    match layers.transport_kind {
        Transport::Tcp => headers[usize::from(layers.transport) + tcp::FLAGS],
        Transport::Udp => 0,
    }
}

fn ports(headers: &[u8], layers: &Layers) -> u32 {
    be32(headers, layers.transport.into())
}

fn addresses<'a>(headers: &'a [u8], layers: &Layers) -> Option<&'a [u8]> {
    let ip = usize::from(layers.ip);
    match layers.version {
        Ip::V4 => headers.get(ip + ipv4::SOURCE..ip + ipv4::BYTES),
        Ip::V6 => headers.get(ip + ipv6::SOURCE..ip + ipv6::BYTES),
    }
}

/// End of the IP packet according to its length field.
#[inline]
fn packet_end(headers: &[u8], ip: usize, version: Ip) -> u32 {
    let end = match version {
        Ip::V4 => ip + usize::from(be16(headers, ip + ipv4::LEN)),
        Ip::V6 => ip + ipv6::BYTES + usize::from(be16(headers, ip + ipv6::LEN)),
    };
    end as u32
}

/// Whether the checksum of an IPv4 header without options is valid.
#[inline]
fn has_good_header_sum(headers: &[u8], ip: usize) -> bool {
    let header: [u8; ipv4::BYTES] = field(headers, ip);
    Sum::of_short(&header).fold() == 0xffff
}

/// Where the values of the timestamps option are (RFC 7323, 3.2), among options that begin at `at` and end with
/// `headers`.
fn timestamps(headers: &[u8], at: usize) -> Option<u8> {
    let mut at = at;
    loop {
        match headers.get(at)? {
            0 => return None,
            1 => at += 1,
            8 if headers.get(at + 1) == Some(&10) && at + 10 <= headers.len() => {
                return u8::try_from(at + 2).ok();
            }
            _ => at += usize::from(*headers.get(at + 1)?).max(2),
        }
    }
}

/// TSval and TSecr.
#[inline]
fn stamps_of(headers: &[u8], at: u8) -> [u32; 2] {
    let at = usize::from(at);
    [be32(headers, at), be32(headers, at + 4)]
}

/// Eight bytes, in the order of memory.
#[inline]
fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(field(bytes, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_are_found_behind_other_options() {
        let value = [0, 0, 0, 1, 0, 0, 0, 2];
        let of = |before: &[u8], kind: [u8; 2]| timestamps(&[before, &kind, &value].concat(), 0);
        assert_eq!(of(&[], [8, 10]), Some(2));
        assert_eq!(of(&[1, 1], [8, 10]), Some(4));
        assert_eq!(of(&[2, 4, 5, 180, 1], [8, 10]), Some(7));
        assert_eq!(of(&[8, 3, 9], [8, 10]), Some(5), "behind one of another length");
        assert_eq!(of(&[5, 0], [8, 10]), Some(4), "behind one without a length");
        assert_eq!(
            (of(&[0], [8, 10]), of(&[0, 1], [8, 10])),
            (None, None),
            "behind the end"
        );
        assert_eq!(of(&[], [8, 11]), None);
        assert_eq!(of(&[], [9, 10]), None);
        let cut = [&[8, 10][..], &value[..7]].concat();
        assert_eq!(
            (timestamps(&cut, 0), timestamps(&[], 0), timestamps(&[5], 0)),
            (None, None, None)
        );
        assert_eq!(
            timestamps(&[&[8, 10, 8, 10][..], &value].concat(), 2),
            Some(4),
            "from there on"
        );
    }
}
