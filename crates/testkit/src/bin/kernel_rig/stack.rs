//! What a guest leaves to the device, with a TCP/IP stack at the far end that looks at every checksum.
//!
//! The far end is the kernel's own stack, with checksums verified by software. The guest speaks just enough TCP for it:
//! it opens a connection, sends a stream in GSO packets with partial checksums, which daemon, kernel or NIC cut and
//! complete, closes its half, and receives a stream in whatever the daemon makes of it. It sends again what is not acknowledged,
//! and never has more under way than the far end's NIC has buffers for. Then come datagrams, one by one and as GSO
//! packets. All of it arrives byte by byte, and no stack counts a wrong checksum: one that is wrong on purpose shows
//! that it would.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::time::Duration;

use testkit::driver::{F_GUEST_ALL, F_HOST_ALL, HEADER};
use testkit::gso_packet::fold;
use testkit::{DriverConfig, Layout, Rig, VethPair, Wire, wait};

use crate::kit::{self, Seen};
use crate::setting::{self, Setting};

const GUEST: [u8; 4] = [10, 77, 0, 2];
const FAR: [u8; 4] = [10, 77, 0, 1];
const PORT: u16 = 7000;
const TCP: u8 = 6;
const UDP: u8 = 17;
/// TCP flags.
const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const PSH: u8 = 0x08;
const ACK: u8 = 0x10;
/// Bytes of a frame before the transport header, and before the payload of TCP.
const NETWORK_END: usize = 34;
const TCP_END: usize = NETWORK_END + 20;

/// Bytes each way.
const STREAM: usize = 600_000;
/// Payload of a segment, and of a GSO packet.
const SEGMENT: u16 = 1448;
const PACKET: usize = 20_000;
/// Most that is under way: some 30 segments.
const WINDOW: u32 = 45_000;
/// After which what is not acknowledged is sent again.
const AGAIN: Duration = Duration::from_secs(3);
/// How often in a row.
const TRIES: usize = 20;
/// Datagrams of so many bytes, one by one; and so many in a GSO packet.
const DATAGRAMS: [usize; 3] = [1, 999, 1472];
const IN_PACKET: usize = 15;

/// Goes through it; panics if it does not go well.
pub(crate) fn run(wire: &Wire, setting: Setting) -> Seen {
    let veth = wire.lay();
    if wire.driver() == "igb" {
        // QEMU's takes UDP packets that are to be cut, and makes IP fragments of them (eth_get_gso_type, net/eth.c).
        veth.near
            .run("ethtool", &["-K", VethPair::NIC, "tx-udp-segmentation", "off"]);
    }
    let peer = make_stack(&veth);
    let config = DriverConfig::with(F_HOST_ALL | F_GUEST_ALL);
    let serve = setting.serve().offload("all");
    let mut rig = kit::start_with(veth, &serve, &config);
    rig.pair().post(120, &[2048]);
    let mut guest = Guest { rig, peer };
    guest.await_far_end();
    let seen = Seen::of(&guest.rig.daemon);
    assert_eq!(seen.mode, setting.expected(wire.driver()), "{}", seen.note);
    streams_are_intact(&mut guest);
    datagrams_are_intact(&mut guest);
    assert_eq!(guest.wrong_checksums(), 0, "seen by the far end's stack");
    guest.send_wrong_checksum();
    let seen_wrong = wait::until(wait::SOON, || guest.wrong_checksums() == 1);
    assert!(seen_wrong, "the far end does not look at checksums");
    let daemon = &guest.rig.daemon;
    for name in [
        "from_guest_super_frames",
        "from_guest_checksums",
        "to_guest_frames",
    ] {
        let count = daemon.counter(name);
        println!("{name}: {count}");
        assert!(count > 0, "{name}: {:#}", daemon.status());
    }
    kit::assert_no_strays(daemon);
    println!(
        "to_guest_super_frames: {}",
        daemon.counter("to_guest_super_frames")
    );
    seen
}

/// The far end talks, and looks at every checksum itself; its NIC's address.
fn make_stack(veth: &VethPair) -> [u8; 6] {
    let far = &veth.far;
    let guest = GUEST.map(|byte| byte.to_string()).join(".");
    let address = format!("{}/24", FAR.map(|byte| byte.to_string()).join("."));
    far.ip(&["link", "set", VethPair::WIRE, "arp", "on"]);
    far.ip(&["address", "add", &address, "dev", VethPair::WIRE]);
    far.ip(&[
        "neigh replace",
        &guest,
        "lladdr",
        setting::GUEST,
        "dev",
        VethPair::WIRE,
        "nud permanent",
    ]);
    far.run("ethtool", &["-K", VethPair::WIRE, "rx", "off"]);
    let text = far.with_sysfs(&format!("cat /sys/class/net/{}/address", VethPair::WIRE));
    mac(text.trim())
}

fn mac(text: &str) -> [u8; 6] {
    let bytes: Vec<_> = text
        .split(':')
        .map_while(|byte| u8::from_str_radix(byte, 16).ok())
        .collect();
    bytes.try_into().unwrap_or_else(|_| panic!("no address: {text}"))
}

/// Bytes without a pattern that segments could share.
fn stream(seed: u32) -> Vec<u8> {
    (0..STREAM as u32)
        .map(|at| (at.wrapping_mul(0x9e37_79b9) ^ seed) as u8 ^ (at >> 9) as u8)
        .collect()
}

fn pseudo_header(protocol: u8, len: usize) -> Vec<u8> {
    [&GUEST[..], &FAR, &[0, protocol], &(len as u16).to_be_bytes()].concat()
}

/// A guest with just enough of a stack.
struct Guest {
    rig: Rig,
    /// The far end's address.
    peer: [u8; 6],
}

impl Guest {
    /// A frame with that in it, whose checksum field holds the sum of the pseudo-header.
    fn frame(&self, protocol: u8, transport: &[u8]) -> Vec<u8> {
        let [high, low] = ((20 + transport.len()) as u16).to_be_bytes();
        let mut network = [
            &[0x45, 0, high, low, 0, 1, 0x40, 0, 64, protocol, 0, 0][..],
            &GUEST,
            &FAR,
        ]
        .concat();
        let checksum = !fold(&network);
        network[10..12].copy_from_slice(&checksum.to_be_bytes());
        let mut bytes = [&self.peer[..], &mac(setting::GUEST), &[8, 0], &network, transport].concat();
        let at = NETWORK_END + if protocol == TCP { 16 } else { 6 };
        let partial = fold(&pseudo_header(protocol, transport.len()));
        bytes[at..at + 2].copy_from_slice(&partial.to_be_bytes());
        bytes
    }

    /// Sends it, the checksum left to the device, and cut into pieces of so many bytes if it is longer.
    fn send(&mut self, protocol: u8, transport: &[u8], headers: usize, piece: u16) {
        self.rig.pair().reap_sent();
        let bytes = self.frame(protocol, transport);
        let is_long = transport.len() > headers + usize::from(piece);
        let (kind, offset) = match protocol {
            TCP => (1, 16),
            _ => (5, 6),
        };
        let mut header = [0; HEADER];
        header[0] = 1;
        if is_long {
            header[1] = kind;
            header[2..4].copy_from_slice(&((NETWORK_END + headers) as u16).to_le_bytes());
            header[4..6].copy_from_slice(&piece.to_le_bytes());
        }
        (header[6], header[8]) = (NETWORK_END as u8, offset);
        let layout = if is_long {
            Layout::Pieces(4096)
        } else {
            Layout::Whole
        };
        self.rig.pair().send_asking(&[(header, &bytes)], layout);
    }

    /// The next packet of that protocol that is whole, from the transport header on.
    fn receive(&mut self, protocol: u8, limit: Duration) -> Option<Vec<u8>> {
        loop {
            let got = self.rig.pair().receive(limit)?;
            let frame = got.frame;
            if frame.len() < TCP_END || frame[12..14] != [8, 0] || frame[23] != protocol {
                continue;
            }
            let end = 14 + usize::from(u16::from_be_bytes([frame[16], frame[17]]));
            let transport = &frame[NETWORK_END..end];
            if got.header[..2] == [0, 0] {
                // Nothing is said of its checksum.
                let pseudo = pseudo_header(protocol, transport.len());
                assert_eq!(
                    fold(&[&pseudo, transport].concat()),
                    0xffff,
                    "a wrong checksum arrived"
                );
            }
            return Some(transport.to_vec());
        }
    }

    /// Sends datagrams until one arrives.
    fn await_far_end(&mut self) {
        let socket = self
            .rig
            .veth
            .far
            .enter(|| UdpSocket::bind((Ipv4Addr::from(FAR), PORT + 1)).expect("it is free"));
        socket.set_read_timeout(Some(wait::QUIET)).expect("not zero");
        let arrives = wait::until(wait::SOON, || {
            self.send_datagrams(PORT + 1, b"there?", u16::MAX);
            socket.recv(&mut [0; 16]).is_ok()
        });
        assert!(arrives, "{:#}", self.rig.daemon.status());
    }

    fn send_datagrams(&mut self, port: u16, payload: &[u8], piece: u16) {
        let len = ((8 + payload.len()) as u16).to_be_bytes();
        let header = [&PORT.to_be_bytes()[..], &port.to_be_bytes(), &len, &[0, 0]].concat();
        self.send(UDP, &[&header, payload].concat(), header.len(), piece);
    }

    /// A whole datagram, as a guest sends it that leaves nothing to the device, but for its sum.
    fn send_wrong_checksum(&mut self) {
        let header = [
            &PORT.to_be_bytes()[..],
            &(PORT + 1).to_be_bytes(),
            &[0, 12],
            &[0, 0],
        ]
        .concat();
        // The sum of the pseudo-header is not that of the datagram.
        let bytes = self.frame(UDP, &[&header, &b"bad!"[..]].concat());
        self.rig.pair().send(&bytes, Layout::Whole);
    }

    /// Wrong checksums that the far end has seen, and what else it would not have.
    fn wrong_checksums(&self) -> u64 {
        let said = self.rig.veth.far.output_of("cat", &["/proc/net/snmp"]);
        let counted = |protocol: &str, names: &[&str]| -> u64 {
            let mut lines = said.lines().filter(|line| line.starts_with(protocol));
            let (Some(head), Some(values)) = (lines.next(), lines.next()) else {
                panic!("no {protocol} in {said}");
            };
            let pairs = head.split(' ').zip(values.split(' '));
            let found = pairs.filter(|(name, _)| names.contains(name));
            found
                .map(|(_, value)| value.parse::<u64>().expect("a number"))
                .sum()
        };
        counted("Ip:", &["InHdrErrors"])
            + counted("Tcp:", &["InCsumErrors"])
            + counted("Udp:", &["InCsumErrors"])
    }
}

/// The guest's half of a connection.
struct Connection<'a> {
    guest: &'a mut Guest,
    /// The next byte to be sent, and the first that is not acknowledged.
    next: u32,
    acked: u32,
    /// The next byte to be received.
    expected: u32,
    ended: bool,
}

impl<'a> Connection<'a> {
    fn open(guest: &'a mut Guest) -> Self {
        // Numbers wrap on their way.
        let first = 0xffff_fff0u32;
        let mut connection = Self {
            guest,
            next: first,
            acked: first,
            expected: 0,
            ended: false,
        };
        for _ in 0..TRIES {
            connection.send(SYN, first, &[]);
            if let Some(got) = connection.guest.receive(TCP, AGAIN)
                && got[13] & (SYN | ACK) == SYN | ACK
            {
                connection.expected = word(&got, 4).wrapping_add(1);
                connection.next = first.wrapping_add(1);
                connection.acked = connection.next;
                connection.send(ACK, connection.next, &[]);
                return connection;
            }
        }
        panic!("the far end does not answer");
    }

    fn send(&mut self, flags: u8, sequence: u32, payload: &[u8]) {
        let acknowledged = if flags & ACK == 0 { 0 } else { self.expected };
        let words = [sequence.to_be_bytes(), acknowledged.to_be_bytes()].concat();
        let ports = [PORT.to_be_bytes(), PORT.to_be_bytes()].concat();
        let rest = [0x50, flags, 0xff, 0xff, 0, 0, 0, 0];
        let header = [&ports[..], &words, &rest].concat();
        self.guest
            .send(TCP, &[&header, payload].concat(), header.len(), SEGMENT);
    }

    /// Sends all of it, and what follows it.
    fn stream(&mut self, bytes: &[u8]) {
        let start = self.next;
        let mut tries = 0;
        let all = bytes.len() as u32;
        while self.acked.wrapping_sub(start) < all {
            let sent = self.next.wrapping_sub(start);
            let under_way = self.next.wrapping_sub(self.acked);
            let len = PACKET.min((all - sent) as usize);
            if len > 0 && under_way + len as u32 <= WINDOW {
                let payload = &bytes[sent as usize..sent as usize + len];
                self.send(ACK | PSH, self.next, payload);
                self.next = self.next.wrapping_add(len as u32);
            } else if self.take(AGAIN).is_some() {
                tries = 0;
            } else {
                tries += 1;
                assert!(tries < TRIES, "nothing is acknowledged any more");
                self.next = self.acked;
            }
        }
    }

    /// Takes a packet; what was new in it, or `None` if none came.
    fn take(&mut self, limit: Duration) -> Option<Vec<u8>> {
        let got = self.guest.receive(TCP, limit)?;
        let (sequence, acknowledged, flags) = (word(&got, 4), word(&got, 8), got[13]);
        let payload = &got[usize::from(got[12] >> 4) * 4..];
        if acknowledged.wrapping_sub(self.acked) <= WINDOW + 1 {
            self.acked = acknowledged;
        }
        if sequence != self.expected {
            return Some(Vec::new());
        }
        self.ended |= flags & FIN != 0;
        let end = payload.len() as u32 + u32::from(flags & FIN != 0);
        self.expected = self.expected.wrapping_add(end);
        Some(payload.to_vec())
    }

    /// Closes its half, and receives all that comes until the far end closes its own.
    fn end(&mut self) -> Vec<u8> {
        let (last, mut bytes, mut tries) = (self.next, Vec::new(), 0);
        self.send(FIN | ACK, last, &[]);
        self.next = last.wrapping_add(1);
        while !self.ended {
            let Some(new) = self.take(AGAIN) else {
                tries += 1;
                assert!(
                    tries < TRIES,
                    "nothing comes any more, after {} bytes",
                    bytes.len()
                );
                if self.acked == last {
                    self.send(FIN | ACK, last, &[]);
                }
                continue;
            };
            tries = 0;
            bytes.extend(new);
            self.send(ACK, self.next, &[]);
        }
        bytes
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// A stream each way of one connection.
fn streams_are_intact(guest: &mut Guest) {
    let (out, back) = (stream(1), stream(2));
    let listener = guest
        .rig
        .veth
        .far
        .enter(|| TcpListener::bind((Ipv4Addr::from(FAR), PORT)).expect("it is free"));
    let answer = back.clone();
    let far = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().expect("it connects");
        socket.set_read_timeout(Some(4 * wait::SOON)).expect("not zero");
        let mut got = Vec::new();
        socket.read_to_end(&mut got).expect("it goes on");
        socket.write_all(&answer).expect("it goes on");
        got
    });
    let mut connection = Connection::open(guest);
    connection.stream(&out);
    let got = connection.end();
    assert!(
        got == back,
        "{} bytes arrive in the guest, others than were sent",
        got.len()
    );
    let got = far.join().expect("it ends");
    assert!(
        got == out,
        "{} bytes arrive at the far end, others than were sent",
        got.len()
    );
}

/// Datagrams arrive whole: single ones, and those that a GSO packet was cut into.
fn datagrams_are_intact(guest: &mut Guest) {
    let socket = guest
        .rig
        .veth
        .far
        .enter(|| UdpSocket::bind((Ipv4Addr::from(FAR), PORT)).expect("it is free"));
    socket.set_read_timeout(Some(wait::SOON)).expect("not zero");
    let bytes = stream(3);
    let mut got = vec![0; 4096];
    for len in DATAGRAMS {
        for datagrams in [1, IN_PACKET] {
            let sent = &bytes[..len * datagrams];
            guest.send_datagrams(PORT, sent, len as u16);
            for piece in sent.chunks(len) {
                let len = socket.recv(&mut got).expect("it arrives");
                assert!(&got[..len] == piece, "a datagram of {len} bytes is another");
            }
        }
    }
}
