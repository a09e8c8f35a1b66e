//! The chain of headers behind that of IPv6 (RFC 8200).

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
/// Bytes of a fragment header.
pub const FRAGMENT_BYTES: usize = 8;
/// IPsec's authentication header (RFC 4302).
pub const AUTHENTICATION: u8 = 51;
const DESTINATION_OPTIONS: u8 = 60;
/// Mobility (RFC 6275).
pub const MOBILITY: u8 = 135;
/// Host identity (RFC 7401).
pub const HOST_IDENTITY: u8 = 139;
/// Shim6 (RFC 5533).
pub const SHIM: u8 = 140;

/// What the headers lead to.
pub struct Upper {
    /// Its number; `None`: it is in a fragment before.
    pub protocol: Option<u8>,
    /// Where it begins.
    pub at: usize,
    /// It is one of fragments, or calls itself so.
    pub fragment: bool,
}

impl Upper {
    /// Follows the headers, of which the first has that number and begins there; `None`: they do not end in the bytes
    /// that are known, or there is a second fragment header: a packet has one at most (RFC 8200, section 4), and what is in
    /// the next one belongs to the chain that the first fragment has to have whole (RFC 7112). Of a later fragment the
    /// header that says so is the last. Unknown numbers are protocols, those for experiments (253, 254) too: receivers
    /// go on behind them no more than behind others. `ends`: numbers of headers that are not
    /// followed, as if they were of protocols.
    pub fn behind((first, begin): (u8, usize), known: &[u8], ends: &[u8]) -> Option<Self> {
        let (mut next, mut at, mut fragment) = (first, begin, false);
        // Each has eight bytes at least, so that those that are known bound them.
        loop {
            let bytes = match next {
                HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS | MOBILITY | HOST_IDENTITY | SHIM
                    if !ends.contains(&next) =>
                {
                    (usize::from(*known.get(at + 1)?) + 1) * 8
                }
                AUTHENTICATION if !ends.contains(&next) => (usize::from(*known.get(at + 1)?) + 2) * 4,
                FRAGMENT if fragment => return None,
                FRAGMENT => {
                    let [_, _, high, low, ..] = *known.get(at..)?.first_chunk::<FRAGMENT_BYTES>()?;
                    fragment = true;
                    if u16::from_be_bytes([high, low]) & !7 != 0 {
                        return Some(Self {
                            protocol: None,
                            at: at + FRAGMENT_BYTES,
                            fragment,
                        });
                    }
                    FRAGMENT_BYTES
                }
                protocol => {
                    return Some(Self {
                        protocol: Some(protocol),
                        at,
                        fragment,
                    });
                }
            };
            next = *known.get(at)?;
            at += bytes;
            if at > known.len() {
                return None;
            }
        }
    }
}
