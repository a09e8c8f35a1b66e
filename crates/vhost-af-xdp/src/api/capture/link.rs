//! The messages that the daemon sends to `vhost-af-xdp capture`, after the answer to its request on the control socket.
//! Numbers are little endian:
//!
//! ```text
//!     frame:  1, flags, seen, 0, pair:2, known:2, rule:2, 0:2, len:4, at_ns:8, received:8, bytes:known
//!     end:    2, why, 0:6, lost:8
//! ```

use dataplane::policy::capture::{About, Record, SHOWN_BYTES, Seen};

/// Why a capture has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The client has closed its side.
    Asked,
    /// The port was removed, or replaced.
    PortGone,
}

/// A message of the daemon.
#[derive(Debug)]
pub(crate) enum Message {
    Frame(Box<Record>),
    End { why: End, lost: u64 },
}

/// The daemon sent something else than a message.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the daemon sent an invalid capture message: is it another version?")]
pub(crate) struct NoMessage;

const FRAME: u8 = 1;
const END: u8 = 2;
const FRAME_BYTES: usize = 32;
const END_BYTES: usize = 16;
/// Longest message, bytes.
pub(crate) const SHOWN: usize = FRAME_BYTES + SHOWN_BYTES;

const TO_GUEST: u8 = 1;
const HAS_LEN: u8 = 2;
const HAS_RECEIVED: u8 = 4;
const HAS_RULE: u8 = 8;

pub(crate) fn put_record(record: &Record, to: &mut Vec<u8>) {
    let About { len, received, seen } = record.about;
    let (seen, rule) = match seen {
        Seen::Passed => (0, None),
        Seen::Denied(rule) => (1, rule),
        Seen::Refused => (2, None),
    };
    let flag = |flag, is_set| if is_set { flag } else { 0 };
    let flags = flag(TO_GUEST, record.to_guest)
        | flag(HAS_LEN, len.is_some())
        | flag(HAS_RECEIVED, received.is_some())
        | flag(HAS_RULE, rule.is_some());
    to.extend([FRAME, flags, seen, 0]);
    to.extend(record.pair.to_le_bytes());
    to.extend(record.known.to_le_bytes());
    to.extend(rule.unwrap_or(0).to_le_bytes());
    to.extend([0; 2]);
    to.extend(len.unwrap_or(0).to_le_bytes());
    to.extend(record.at_ns.to_le_bytes());
    to.extend(received.unwrap_or(0).to_le_bytes());
    to.extend(record.bytes());
}

pub(crate) fn put_end(why: End, lost: u64, to: &mut Vec<u8>) {
    let why = u8::from(why == End::PortGone);
    to.extend([END, why, 0, 0, 0, 0, 0, 0]);
    to.extend(lost.to_le_bytes());
}

/// Parses the first message of these bytes; returns it with its length. `None`: it is not complete.
/// Errors: it is not a message.
pub(crate) fn message_of(bytes: &[u8]) -> Result<Option<(Message, usize)>, NoMessage> {
    match bytes.first() {
        None => Ok(None),
        Some(&FRAME) => frame_of(bytes),
        Some(&END) => Ok(bytes.first_chunk::<END_BYTES>().map(|bytes| {
            let why = if bytes[1] == 0 { End::Asked } else { End::PortGone };
            let lost = long(bytes, 8);
            (Message::End { why, lost }, END_BYTES)
        })),
        Some(_) => Err(NoMessage),
    }
}

fn frame_of(bytes: &[u8]) -> Result<Option<(Message, usize)>, NoMessage> {
    let Some((header, rest)) = bytes.split_first_chunk::<FRAME_BYTES>() else {
        return Ok(None);
    };
    let word = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    let known = word(6);
    if usize::from(known) > SHOWN_BYTES {
        return Err(NoMessage);
    }
    let Some(shown) = rest.get(..known.into()) else {
        return Ok(None);
    };
    let has = |flag| header[1] & flag != 0;
    let seen = match header[2] {
        0 => Seen::Passed,
        1 => Seen::Denied(has(HAS_RULE).then(|| word(8))),
        2 => Seen::Refused,
        _ => return Err(NoMessage),
    };
    let len = u32::from_le_bytes([header[12], header[13], header[14], header[15]]);
    let mut record = Record {
        at_ns: long(header, 16),
        to_guest: has(TO_GUEST),
        pair: word(4),
        about: About {
            len: has(HAS_LEN).then_some(len),
            received: has(HAS_RECEIVED).then(|| long(header, 24)),
            seen,
        },
        known,
        head: [0; SHOWN_BYTES],
    };
    record.head[..shown.len()].copy_from_slice(shown);
    Ok(Some((
        Message::Frame(Box::new(record)),
        FRAME_BYTES + shown.len(),
    )))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    let its = bytes.get(at..).and_then(<[u8]>::first_chunk);
    its.map_or(0, |&its| u64::from_le_bytes(its))
}
