//! A message: a header of eight bytes, then payload. The server sends it back unchanged.
//!
//! | bytes | what |
//! |---|---|
//! | 0 to 3 | [`MARK`] |
//! | 4 to 7 | length in bytes, this header included, big-endian |
//!
//! A client sends its next message when it has the reply to the last one. So a server holds at most one message of a
//! connection that it sends back, and one that it receives. It disconnects a client that sends anything else.

/// First bytes of each message.
const MARK: [u8; 4] = *b"Echo";
/// Bytes of the header.
pub(super) const HEADER: usize = 8;
/// Longest message in bytes.
pub(super) const LONGEST: usize = 64 << 10;
/// Shortest message in bytes.
pub(super) const SHORTEST: usize = 64;

/// Result of parsing the first bytes of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Begun {
    /// Too few bytes are there.
    Unknown,
    /// The message has this many bytes.
    Length(usize),
    /// The bytes are not those of a message.
    Garbage,
}

/// Parses the bytes of a message that were received so far.
#[inline]
pub(super) fn begun(bytes: &[u8]) -> Begun {
    let marks = bytes.iter().zip(MARK).all(|(byte, mark)| *byte == mark);
    let length = bytes.get(4..HEADER).and_then(|bytes| bytes.try_into().ok());
    match (marks, length.map(u32::from_be_bytes)) {
        (true, None) => Begun::Unknown,
        (true, Some(length)) if (SHORTEST..=LONGEST).contains(&(length as usize)) => {
            Begun::Length(length as usize)
        }
        (true | false, _) => Begun::Garbage,
    }
}

/// Makes the message with this number of a connection: each has a payload of its own, and no two pieces of it are
/// alike.
///
/// `into` has the message's length.
pub(super) fn write(into: &mut [u8], connection: u32, number: u64) {
    let length = u32::try_from(into.len()).unwrap_or(u32::MAX);
    for (word, at) in into.chunks_mut(8).zip(0u64..) {
        let value = mixed(u64::from(connection) << 48 ^ number << 16 ^ at).to_le_bytes();
        let count = word.len();
        word.copy_from_slice(&value[..count]);
    }
    let header = [MARK, length.to_be_bytes()].concat();
    if let Some(head) = into.get_mut(..HEADER) {
        head.copy_from_slice(&header);
    }
}

/// The last step of SplitMix64: near numbers become unlike ones.
fn mixed(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_says_how_long_it_is_as_soon_as_it_can() {
        for length in [SHORTEST, 1000, LONGEST] {
            let mut message = vec![0; length];
            write(&mut message, 3, 7);
            for come in 0..HEADER {
                assert_eq!(begun(&message[..come]), Begun::Unknown);
            }
            assert_eq!(begun(&message[..HEADER]), Begun::Length(length));
            assert_eq!(begun(&message), Begun::Length(length));
        }
    }

    #[test]
    fn garbage_is_seen_at_its_first_byte_and_in_the_length() {
        assert_eq!(begun(b"G"), Begun::Garbage);
        assert_eq!(begun(b"EchO"), Begun::Garbage);
        for length in [0, SHORTEST as u32 - 1, LONGEST as u32 + 1, u32::MAX] {
            let bytes = [&MARK[..], &length.to_be_bytes()].concat();
            assert_eq!(begun(&bytes), Begun::Garbage, "{length}");
        }
    }

    #[test]
    fn messages_differ_by_connection_by_number_and_within() {
        let made = |connection, number| {
            let mut message = vec![0; SHORTEST];
            write(&mut message, connection, number);
            message
        };
        assert_eq!(made(1, 1), made(1, 1));
        assert_ne!(made(1, 1), made(2, 1));
        assert_ne!(made(1, 1), made(1, 2));
        let message = made(1, 1);
        assert_ne!(message[8..16], message[16..24]);
    }
}
