//! A sender on the network that sets traps for a device that joins segments: what its frames become in two guests of
//! one daemon.
//!
//! Each frame carries a number, so whatever a guest gets can be taken apart again: a frame must be one that was sent,
//! byte for byte; a GSO packet, cut by the letter of what its virtio-net header says, must be frames of one flow in
//! their order, all of them sound, whose headers differ in nothing but what a NIC that joins segments may lose
//! (identification, checksums, PSH, FIN, CWR, timestamps). All frames must arrive, once.

use std::collections::HashMap;

use rstest::rstest;
use rustix::process::Signal;
use testkit::daemon::Placement;
use testkit::driver::{F_EVENT_IDX, F_GUEST_ALL, F_MRG_RXBUF, F_VERSION_1};
use testkit::gso_packet::{ACK, CWR, ECE, FIN, Ip, PSH, Transport};
use testkit::pair::Received;
use testkit::{DriverConfig, GsoPacket, Noise, TwoGuests, require, wait};

const BURST: usize = 64;
const BURSTS: usize = 24;
const SYN: u8 = 2;
const RST: u8 = 4;
const URG: u8 = 0x20;

/// Where the layers of a frame are: IP, transport, payload.
#[derive(Clone, Copy)]
struct Layers {
    ip: usize,
    transport: usize,
    payload: usize,
    tcp: bool,
    v4: bool,
}

struct Sent {
    bytes: Vec<u8>,
    flow: usize,
    layers: Layers,
    /// It may be part of a GSO packet.
    sound: bool,
}

/// RFC 1071.
fn fold(bytes: &[u8]) -> u16 {
    let mut sum = bytes.chunks(2).fold(0u32, |sum, word| {
        sum + u32::from(word[0]) * 256 + u32::from(*word.get(1).unwrap_or(&0))
    });
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

fn put(frame: &mut [u8], at: usize, word: u16) {
    frame[at..at + 2].copy_from_slice(&word.to_be_bytes());
}

fn sum_ip(frame: &mut [u8], layers: Layers) {
    if layers.v4 {
        put(frame, layers.ip + 10, 0);
        let len = usize::from(frame[layers.ip] & 0xf) * 4;
        let sum = !fold(&frame[layers.ip..layers.ip + len]);
        put(frame, layers.ip + 10, sum);
    }
}

/// Flows that a sender has: sequence numbers and identifications go on.
struct Flows {
    noise: Noise,
    next: [(u32, u16); 6],
}

impl Flows {
    fn frame(&mut self, number: u32) -> Sent {
        let noise = &mut self.noise;
        // Two flows differ in their port only.
        let flow = noise.one(&[0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 3, 4, 5]);
        let (tcp, v4) = (flow < 4, flow % 3 != 2);
        let trap = noise.index(40);
        let options = if trap == 0 { 1 } else { 0 };
        let ip = match (v4, trap) {
            (true, _) => Ip::V4(options),
            (false, 1) => Ip::V6(noise.one(&[&[0, 60][..], &[43], &[60, 60, 60]]).to_vec()),
            (false, _) => Ip::V6(vec![]),
        };
        let payload_len = if noise.index(8) == 0 {
            noise.one(&[8, 9, 99, 1001])
        } else {
            1000
        };
        let flags = match trap {
            2 => noise.one(&[SYN, RST, URG]) | ACK,
            3 => ACK | FIN,
            4 => ACK | CWR,
            5 => ACK | ECE,
            6 => ACK | PSH,
            _ => ACK,
        };
        let model = GsoPacket {
            tags: if trap == 7 { noise.index(3) } else { 0 },
            flow: 5000 + flow as u16,
            transport: if tcp {
                Transport::Tcp(flags, noise.one(&[3, 3, 3, 3, 3, 3, 3, 3, 0]))
            } else {
                Transport::Udp
            },
            ..GsoPacket::udp(ip, payload_len)
        };
        let mut bytes = model.bytes();
        let payload = model.header_len();
        let transport = payload
            - usize::from(if tcp {
                bytes[payload - payload_of(&model) + 12] >> 4
            } else {
                2
            }) * 4;
        let layers = Layers {
            ip: 14 + 4 * model.tags,
            transport,
            payload,
            tcp,
            v4,
        };
        bytes[payload..payload + 4].copy_from_slice(&number.to_be_bytes());
        let (sequence, id) = &mut self.next[flow];
        if tcp {
            // In sequence, or over what was sent, or with a hole.
            *sequence = sequence.wrapping_add(noise.one(&[
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                0,
                1,
                500,
                u32::MAX,
                0u32.wrapping_sub(1000),
            ]));
            bytes[transport + 4..transport + 8].copy_from_slice(&sequence.to_be_bytes());
            *sequence = sequence.wrapping_add(payload_len as u32);
        }
        if v4 {
            *id = id.wrapping_add(noise.one(&[1, 1, 1, 1, 1, 1, 1, 0, 2, 0xffff]));
            put(&mut bytes, layers.ip + 4, *id);
        }
        let alone = (trap == 0 && v4) || (trap == 2 && tcp);
        let sound = spoil(&mut bytes, layers, trap, noise) && !alone;
        Sent {
            bytes,
            flow,
            layers,
            sound,
        }
    }
}

/// Bytes of a TCP header that begins so far before the payload.
fn payload_of(model: &GsoPacket) -> usize {
    match model.transport {
        Transport::Tcp(_, options) => 20 + 4 * options,
        Transport::Udp => 8,
    }
}

/// Sets a trap in the headers, and the checksums; false if the frame is none that may be joined with others.
fn spoil(bytes: &mut Vec<u8>, layers: Layers, trap: usize, noise: &mut Noise) -> bool {
    let field = layers.transport + if layers.tcp { 16 } else { 6 };
    match (trap, layers.v4) {
        (8, true) => bytes[layers.ip + 8] = 1,
        (8, false) => bytes[layers.ip + 7] = 1,
        // TOS, or the traffic class; the flow label.
        (9, _) => bytes[layers.ip + 1] ^= noise.one(&[1, 3, 0x10, 0x80]),
        (10, true) => bytes[layers.ip + 6] ^= 0x40,
        (10, false) => bytes[layers.ip + 3] ^= 1,
        // More fragments to come, or a later one.
        (11, true) => bytes[layers.ip + noise.one(&[6, 7])] |= 0x20,
        // The acknowledgement, the window, the urgent pointer, reserved bits.
        (12, _) if layers.tcp => bytes[layers.transport + noise.one(&[8, 11, 14, 15, 18])] ^= 1,
        (13, _) if layers.tcp => bytes[layers.transport + 12] ^= 2,
        // Timestamps, which go back.
        (14, _) if layers.tcp && layers.payload - layers.transport == 32 => bytes[layers.transport + 25] ^= 1,
        // Addresses of Ethernet.
        (15, _) => bytes[noise.index(12)] ^= 2,
        _ => {}
    }
    sum_ip(bytes, layers);
    let sum = !fold(&bytes[layers.transport..]);
    put(bytes, field, if sum == 0 && !layers.tcp { 0xffff } else { sum });
    match trap {
        16 => put(bytes, field, sum ^ 0x0101),
        17 if !layers.tcp => put(bytes, field, 0),
        18 if layers.v4 => bytes[layers.ip + 11] ^= 1,
        // Padding, of zeros or not, as short frames have it.
        19 => bytes.resize(bytes.len() + 6, noise.one(&[0, 0xaa])),
        20 if !layers.tcp => {
            // UDP's length is not IP's.
            let len = (bytes.len() - layers.transport - 1) as u16;
            put(bytes, layers.transport + 4, len);
        }
        11 => return !layers.v4,
        _ => return true,
    }
    matches!((trap, layers.tcp, layers.v4), (17 | 20, true, _) | (18, _, false))
}

/// A frame without what may be lost where segments are joined.
fn bare(frame: &[u8], layers: Layers) -> Vec<u8> {
    let mut bare = frame.to_vec();
    if layers.v4 {
        put(&mut bare, layers.ip + 4, 0);
        put(&mut bare, layers.ip + 10, 0);
    }
    if layers.tcp {
        put(&mut bare, layers.transport + 16, 0);
        bare[layers.transport + 13] &= !(PSH | FIN | CWR);
        if layers.payload - layers.transport == 32 {
            bare[layers.transport + 24..layers.payload].fill(0);
        }
    } else {
        put(&mut bare, layers.transport + 6, 0);
    }
    bare
}

/// The frames that a GSO packet is made of, by what it says.
fn cut(got: &Received, layers: Layers) -> Vec<Vec<u8>> {
    let word = |at: usize| usize::from(u16::from_le_bytes([got.header[at], got.header[at + 1]]));
    let (frame, size) = (&got.frame, word(4));
    assert_eq!(got.header[0], 1, "a GSO packet's checksum is partial");
    assert_eq!((word(2), word(6)), (layers.payload, layers.transport));
    assert_eq!(word(8), if layers.tcp { 16 } else { 6 });
    let kind = match (layers.tcp, layers.v4) {
        (true, true) => 1,
        (true, false) => 4,
        (false, _) => 5,
    };
    let cwr = layers.tcp && frame[layers.transport + 13] & CWR != 0;
    assert_eq!(got.header[1], kind | if cwr { 0x80 } else { 0 });
    let total = |frame: &[u8]| {
        let at = layers.ip + if layers.v4 { 2 } else { 4 };
        let from = layers.ip + if layers.v4 { 0 } else { 40 };
        from + usize::from(u16::from_be_bytes([frame[at], frame[at + 1]]))
    };
    assert_eq!(total(frame), frame.len(), "IP's length");
    let addresses = match layers.v4 {
        true => &frame[layers.ip + 12..layers.ip + 20],
        false => &frame[layers.ip + 8..layers.ip + 40],
    };
    let protocol = if layers.tcp { 6 } else { 17 };
    let pseudo = [
        addresses,
        &((frame.len() - layers.transport) as u32).to_be_bytes(),
        &[0, protocol],
    ]
    .concat();
    let field = layers.transport + word(8);
    assert_eq!(
        frame[field..field + 2],
        fold(&pseudo).to_be_bytes(),
        "the pseudo-header's sum"
    );
    if layers.v4 {
        assert_eq!(fold(&frame[layers.ip..layers.ip + 20]), 0xffff, "IP's checksum");
    }
    let sequence = [0, 1, 2, 3].map(|at| frame[layers.transport + 4 + at]);
    let pieces = frame[layers.payload..].chunks(size).enumerate();
    let segment = |(at, payload): (usize, &[u8])| {
        let mut segment = [&frame[..layers.payload], payload].concat();
        let len = segment.len();
        match layers.v4 {
            true => put(&mut segment, layers.ip + 2, (len - layers.ip) as u16),
            false => put(&mut segment, layers.ip + 4, (len - layers.ip - 40) as u16),
        }
        if layers.tcp {
            let sequence = u32::from_be_bytes(sequence).wrapping_add((at * size) as u32);
            segment[layers.transport + 4..layers.transport + 8].copy_from_slice(&sequence.to_be_bytes());
        } else {
            put(
                &mut segment,
                layers.transport + 4,
                (len - layers.transport) as u16,
            );
        }
        segment
    };
    pieces.map(segment).collect()
}

/// What was sent and has not arrived, and what came last of each flow in each guest.
#[derive(Default)]
struct Ledger {
    sent: Vec<Sent>,
    missing: HashMap<Vec<u8>, usize>,
    last: HashMap<(usize, usize), usize>,
    joined: usize,
}

impl Ledger {
    fn note(&mut self, sent: Sent) {
        self.missing
            .insert(bare(&sent.bytes, sent.layers), self.sent.len());
        self.sent.push(sent);
    }

    /// Takes what a guest got off the list.
    fn arrived(&mut self, guest: usize, got: &Received) {
        if got.header[1] == 0 {
            let whole = |sent: &Sent| sent.bytes == got.frame;
            let number = (0..self.sent.len()).rev().find(|&at| whole(&self.sent[at]));
            let number = number.unwrap_or_else(|| panic!("nobody sent {:02x?}", got.frame));
            self.take(guest, number, &bare(&got.frame, self.sent[number].layers));
            return;
        }
        // Its layers are those of the frame whose headers it has, which the number at the beginning of the payload
        // names.
        let payload = usize::from(u16::from_le_bytes([got.header[2], got.header[3]]));
        let first = [0, 1, 2, 3].map(|at| got.frame[payload + at]);
        let layers = self.sent[u32::from_be_bytes(first) as usize].layers;
        let segments = cut(got, layers);
        assert!(segments.len() > 1, "one segment is no GSO packet");
        self.joined += segments.len();
        for segment in segments {
            let bare = bare(&segment, layers);
            let number = self.missing.get(&bare).copied();
            let number = number.unwrap_or_else(|| panic!("nobody sent {segment:02x?}"));
            assert!(
                self.sent[number].sound,
                "{:02x?} was joined",
                self.sent[number].bytes
            );
            self.take(guest, number, &bare);
        }
    }

    fn take(&mut self, guest: usize, number: usize, bare: &[u8]) {
        assert_eq!(self.missing.remove(bare), Some(number), "it came twice");
        let last = self.last.insert((guest, self.sent[number].flow), number);
        assert!(last < Some(number), "{number} came behind {last:?}");
    }
}

#[rstest]
fn traps_for_who_joins_segments_catch_nobody(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(1, 2)] seed: u64,
) {
    require!(Root);
    let config = DriverConfig {
        features: F_VERSION_1 | F_MRG_RXBUF | F_EVENT_IDX | F_GUEST_ALL,
        ..DriverConfig::default()
    };
    let mut guests = TwoGuests::new(placement, &config);
    guests.liar.pairs[0].post(2 * BURST, &[2048]);
    guests.honest.pairs[0].post(2 * BURST, &[2048]);
    // Direct placement: the buffers are with the NIC when their guest's frame has been sent.
    let sent = testkit::frame::last();
    guests.liar.pairs[0].send(&sent, testkit::Layout::Whole);
    let _ = guests.wire.receive_before(&sent);
    guests.assert_honest_guest_sends();
    let mut flows = Flows {
        noise: Noise::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        next: [(0xffff_0000, 0xfff0); 6],
    };
    let mut ledger = Ledger::default();
    for _ in 0..BURSTS {
        // What comes while the daemon does not run it finds together.
        guests.daemon.process().signal(Signal::STOP);
        for _ in 0..BURST {
            let sent = flows.frame(ledger.sent.len() as u32);
            guests.wire.send(&sent.bytes);
            ledger.note(sent);
        }
        guests.daemon.process().signal(Signal::CONT);
        let all_arrive = wait::until(wait::SOON, || {
            for (at, guest) in [&mut guests.liar, &mut guests.honest].into_iter().enumerate() {
                while let Some(got) = guest.pairs[0].poll() {
                    ledger.arrived(at, &got);
                }
            }
            ledger.missing.is_empty()
        });
        assert!(
            all_arrive,
            "missing: {:?}; {:#}",
            ledger.missing.values(),
            guests.daemon.status()
        );
    }
    if placement == Placement::Copy {
        assert!(
            ledger.joined > BURSTS * BURST / 10,
            "{} frames were joined",
            ledger.joined
        );
    }
}
