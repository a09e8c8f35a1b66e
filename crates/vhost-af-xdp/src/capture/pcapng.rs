//! A pcapng file (draft-ietf-opsawg-pcapng): one section, one interface, a block for each frame, statistics at the end.
//!
//! Four kinds of blocks, written by hand, because the crate `pcap-file` 2.0 writes the halves of the time of
//! statistics in the wrong order. Tests read the output with that crate.

use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use packet::ethernet::{self, Payload, Skip};
use packet::ethertype::{IPV4, IPV6};
use packet::ip::{Ipv4, Ipv6};

use dataplane::policy::capture::{Record, SHOWN_BYTES, Seen};

const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const STATISTICS: u32 = 5;
const FRAME: u32 = 6;

/// Magic number, in the byte order of the file.
const MAGIC: u32 = 0x1a2b_3c4d;
const ETHERNET: u16 = 1;
const NANOSECONDS: u8 = 9;

/// Option codes: one that every block may have, and those of each kind of block.
const COMMENT: u16 = 1;
const APPLICATION: u16 = 4;
const INTERFACE_NAME: u16 = 2;
const INTERFACE_DESCRIPTION: u16 = 3;
const RESOLUTION: u16 = 9;
const FRAME_FLAGS: u16 = 2;
const FRAME_QUEUE: u16 = 6;
const TAKEN: u16 = 4;
const LOST: u16 = 5;

/// Directions of a frame as the guest sees them: the interface is the guest's.
const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;

/// See the module's head.
pub(super) struct PcapNg<W: Write> {
    to: W,
    /// A frame's time is the NIC's, if known.
    nic_clock: bool,
    block: Vec<u8>,
}

impl<W: Write> PcapNg<W> {
    pub(super) fn new(to: W, nic_clock: bool) -> Self {
        Self {
            to,
            nic_clock,
            block: Vec::new(),
        }
    }

    /// Writes the blocks before the first frame.
    pub(super) fn begin(&mut self, port: &str, notes: &[String]) -> io::Result<()> {
        self.block.clear();
        self.put(&MAGIC.to_le_bytes());
        self.put(&[1, 0, 0, 0]);
        // The length of the section is not known.
        self.put(&[0xff; 8]);
        self.option(
            APPLICATION,
            concat!("vhost-af-xdp ", env!("CARGO_PKG_VERSION")).as_bytes(),
        );
        for note in notes {
            self.option(COMMENT, note.as_bytes());
        }
        self.write(SECTION)?;
        self.put(&ETHERNET.to_le_bytes());
        self.put(&[0; 2]);
        self.put(&(SHOWN_BYTES as u32).to_le_bytes());
        self.option(INTERFACE_NAME, port.as_bytes());
        let description = "a guest's virtio-net device: outbound is what the guest sends";
        self.option(INTERFACE_DESCRIPTION, description.as_bytes());
        self.option(RESOLUTION, &[NANOSECONDS]);
        self.write(INTERFACE)
    }

    pub(super) fn frame(&mut self, record: &Record) -> io::Result<()> {
        let bytes = record.bytes();
        let received = record.about.received;
        let time = received.filter(|_| self.nic_clock).unwrap_or(record.at_ns);
        self.put(&0_u32.to_le_bytes());
        self.put_time(time);
        self.put(&u32::from(record.known).to_le_bytes());
        let len = record.about.len.unwrap_or_else(|| len_by_headers(bytes));
        self.put(&len.max(u32::from(record.known)).to_le_bytes());
        self.put(bytes);
        self.pad();
        let direction = if record.to_guest { INBOUND } else { OUTBOUND };
        self.option(FRAME_FLAGS, &direction.to_le_bytes());
        self.option(FRAME_QUEUE, &u32::from(record.pair).to_le_bytes());
        match record.about.seen {
            Seen::Passed => {}
            // Numbered as in `port rules`.
            Seen::Denied(Some(rule)) => {
                self.comment(&format!("denied by filter rule {}", u32::from(rule) + 1));
            }
            Seen::Denied(None) => self.comment("denied: no filter rule matches"),
            Seen::Refused => self.comment("refused: not what the port may send or get; `status` counts why"),
        }
        match (received, self.nic_clock) {
            (Some(received), false) => {
                self.comment(&format!("received by the NIC at {received} ns of its clock"));
            }
            (None, true) => self.comment("the host's time: the NIC's is not known"),
            _ => {}
        }
        if record.about.len.is_none() {
            self.comment("it arrived in several pieces: its length is taken from its headers");
        }
        self.write(FRAME)
    }

    /// Writes the blocks after the last frame.
    pub(super) fn end(&mut self, frames: u64, lost: u64) -> io::Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.put(&0_u32.to_le_bytes());
        self.put_time(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX));
        self.option(TAKEN, &(frames.saturating_add(lost)).to_le_bytes());
        self.option(LOST, &lost.to_le_bytes());
        self.write(STATISTICS)
    }

    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }

    fn put(&mut self, bytes: &[u8]) {
        self.block.extend_from_slice(bytes);
    }

    /// The upper half comes first, whatever the byte order.
    fn put_time(&mut self, ns: u64) {
        let [upper, lower] = [(ns >> 32) as u32, ns as u32];
        self.put(&upper.to_le_bytes());
        self.put(&lower.to_le_bytes());
    }

    fn pad(&mut self) {
        self.block.resize(self.block.len().next_multiple_of(4), 0);
    }

    fn comment(&mut self, text: &str) {
        self.option(COMMENT, text.as_bytes());
    }

    fn option(&mut self, code: u16, value: &[u8]) {
        // No option here is that long.
        let Ok(len) = u16::try_from(value.len()) else {
            return;
        };
        self.put(&code.to_le_bytes());
        self.put(&len.to_le_bytes());
        self.put(value);
        self.pad();
    }

    /// Writes the block with the prepared body.
    fn write(&mut self, kind: u32) -> io::Result<()> {
        // The end of the options.
        self.put(&[0; 4]);
        let len = u32::try_from(self.block.len() + 12)
            .unwrap_or(u32::MAX)
            .to_le_bytes();
        self.to.write_all(&kind.to_le_bytes())?;
        self.to.write_all(&len)?;
        self.to.write_all(&self.block)?;
        self.to.write_all(&len)?;
        self.block.clear();
        Ok(())
    }
}

/// The length of a frame according to the headers of its packet; 0: unknown.
fn len_by_headers(bytes: &[u8]) -> u32 {
    let end = ethernet::payload(bytes, Skip::Vlan).and_then(|Payload { ethertype, at }| match ethertype {
        IPV4 => Some(Ipv4::at(bytes, at)?.span.end),
        IPV6 => Some(Ipv6::at(bytes, at)?.span.end),
        _ => None,
    });
    // Fits: a 16-bit length and some headers.
    end.unwrap_or(0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use dataplane::policy::capture::About;

    fn record(len: Option<u32>, received: Option<u64>, seen: Seen, bytes: &[u8]) -> Record {
        let mut head = [0; SHOWN_BYTES];
        head[..bytes.len()].copy_from_slice(bytes);
        Record {
            at_ns: 0x0102_0304_0506_0708,
            to_guest: true,
            pair: 3,
            about: About { len, received, seen },
            known: bytes.len() as u16,
            head,
        }
    }

    /// A frame's block.
    fn block(nic_clock: bool, record: &Record) -> Vec<u8> {
        let mut file = PcapNg::new(Vec::new(), nic_clock);
        file.frame(record).expect("memory");
        file.to
    }

    #[test]
    fn block_of_a_frame_has_the_documented_bytes() {
        let wanted = [
            &[6, 0, 0, 0, 64, 0, 0, 0][..],
            &[0, 0, 0, 0],
            &[4, 3, 2, 1, 8, 7, 6, 5],
            &[5, 0, 0, 0, 60, 0, 0, 0],
            &[1, 2, 3, 4, 5, 0, 0, 0],
            &[2, 0, 4, 0, 1, 0, 0, 0],
            &[6, 0, 4, 0, 3, 0, 0, 0],
            &[0, 0, 0, 0],
            &[64, 0, 0, 0],
        ]
        .concat();
        let record = record(Some(60), None, Seen::Passed, &[1, 2, 3, 4, 5]);
        let wanted_len = wanted.len() as u8;
        let mut wanted = wanted;
        let last = wanted.len() - 4;
        (wanted[4], wanted[last]) = (wanted_len, wanted_len);
        assert_eq!(block(false, &record), wanted);
    }

    #[test]
    fn frame_has_the_time_of_the_requested_clock_and_a_comment_with_the_other() {
        let record = record(Some(60), Some(7), Seen::Denied(Some(4)), &[1]);
        let has = |block: &[u8], words: &str| String::from_utf8_lossy(block).contains(words);
        let host = block(false, &record);
        assert_eq!(host[12..20], [4, 3, 2, 1, 8, 7, 6, 5]);
        assert!(has(&host, "received by the NIC at 7 ns") && has(&host, "denied by filter rule 5"));
        let nic = block(true, &record);
        assert_eq!(nic[12..20], [0, 0, 0, 0, 7, 0, 0, 0]);
        assert!(!has(&nic, "received by the NIC"));
    }

    #[test]
    fn length_that_is_not_known_is_what_the_headers_say() {
        let mut v4 = vec![0; 64];
        v4[12..18].copy_from_slice(&[8, 0, 0x45, 0, 0x23, 0x28]);
        let mut v6 = vec![0; 64];
        v6[12..24].copy_from_slice(&[0x81, 0, 0, 5, 0x86, 0xdd, 0x60, 0, 0, 0, 1, 0]);
        for (bytes, len) in [(v4, 9014), (v6, 18 + 40 + 256), (vec![0; 64], 64), (vec![1], 1)] {
            let block = block(false, &record(None, None, Seen::Passed, &bytes));
            assert_eq!(u32::from_le_bytes(block[24..28].try_into().expect("four")), len);
        }
    }
}
