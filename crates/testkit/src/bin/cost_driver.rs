//! What a frame costs the whole system: a virtio-net driver in a closed loop, with vhost-net or vhost-user.
//!
//! `cost_driver WAY BATCH SIZE ROUNDS END [END]`, END: `vhost-net:TAP` (a macvtap by its path) or
//! `vhost-user:SOCKET`. WAY: `from-guest`; `to-guest`, from a sender of this host at 10.66.0.9; `guest-to-guest`,
//! with two ENDs; `gso`, TCP packets of SIZE bytes from the guest; `stream`, the same to it, from a packet socket on
//! the interface `vb`; `idle`, which connects, posts buffers and does nothing. Prints JSON: nanoseconds a frame, which are instructions under QEMU's `-icount shift=0,sleep=off`, and
//! the part of the time for which the CPU was idle.
//!
//! Theory of operation. A round shows the device a batch, and waits until it is done with all of it: from the
//! guest, until the buffers are back; to a guest, until the frames are there. It asks for one call a batch, and does
//! nothing for a single frame ([`FixedRing`]). Driver, kernel, daemon and, to the guest, the sender share one CPU: all
//! of them are in the figure. Whoever starts it has to end it, should it wait in vain.

#![allow(unsafe_code)]

use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use testkit::driver::{
    F_CSUM, F_EVENT_IDX, F_GUEST_CSUM, F_GUEST_TSO4, F_HOST_TSO4, F_MRG_RXBUF, F_VERSION_1, HEADER,
};
use testkit::vhost_net::VhostNet;
use testkit::{Driver, DriverConfig, FixedRing, PacketPort, Pair};
use virtqueue::GuestAddr;
use virtqueue::driver::{Buffer, GuestRam};

const FEATURES: u64 = F_VERSION_1 | F_MRG_RXBUF | F_EVENT_IDX | F_CSUM | F_GUEST_CSUM | F_HOST_TSO4;
const RAM: u64 = 8 << 20;
/// Entries of a ring, and receive buffers that are posted: all but one.
const RING: u16 = 256;
const POSTED: u16 = RING - 1;
const BUFFER: u32 = 2048;
/// Last byte of the MAC address behind the NIC that guests send to.
const BEHIND_NIC: u8 = 0x99;
const START: Duration = Duration::from_millis(100);
const LEAST_BUSY: u64 = 40;
/// Headers of a UDP frame, and of a TCP frame.
const UDP_HEADERS: usize = 42;
const TCP_HEADERS: usize = 54;
/// `num_buffers` in a virtio-net header.
const NUM_BUFFERS_AT: u64 = 10;
const MSS: u16 = 1448;
const UDP_SEGMENT: libc::c_int = 103;
/// What one call of a sender carries: the kernel's limits.
const MOST_SEGMENTS: usize = 64;
const MOST_BYTES: usize = 65_000;

/// A guest, and what serves it.
enum Served {
    /// The device serves for as long as it is open.
    Kernel {
        _device: VhostNet,
        pair: Box<Pair>,
    },
    User(Driver),
}

impl Served {
    fn connect(end: &str, features: u64) -> Self {
        let config = DriverConfig {
            features,
            regions: vec![(GuestAddr(0), RAM)],
            ..DriverConfig::default()
        };
        match end.split_once(':').expect("KIND:NAME") {
            ("vhost-net", tap) => {
                let (device, features) = VhostNet::open(tap, features).expect("vhost-net and a tap device");
                assert_ne!(features & F_EVENT_IDX, 0, "vhost-net without event indices");
                let ram = Arc::new(GuestRam::new(&config.regions).expect("memory"));
                let pair = Box::new(Pair::new(&ram, &config, features));
                device.start(&ram, &pair).expect("vhost-net takes the rings");
                Self::Kernel {
                    _device: device,
                    pair,
                }
            }
            ("vhost-user", path) => {
                let driver = Driver::connect(Path::new(path), &config).expect("accepted");
                assert_ne!(
                    driver.features() & F_EVENT_IDX,
                    0,
                    "a back end without event indices"
                );
                Self::User(driver)
            }
            (kind, _) => panic!("{kind} is neither vhost-net nor vhost-user"),
        }
    }

    fn pair(&self) -> &Pair {
        match self {
            Self::Kernel { pair, .. } => pair,
            Self::User(driver) => &driver.pairs[0],
        }
    }
}

/// A guest whose buffers stay where they are.
struct Guest<'a> {
    ram: &'a GuestRam,
    buffers: Vec<Buffer>,
    receive: FixedRing<'a>,
    send: FixedRing<'a>,
}

impl<'a> Guest<'a> {
    /// A guest that sends this packet, which lies in so many buffers, header in front.
    fn new(served: &'a Served, packet: &[u8], copies: usize) -> Self {
        let pair = served.pair();
        let ram = pair.ram();
        let receive = |_| Buffer::writable(ram.alloc(BUFFER.into(), 64).expect("memory"), BUFFER);
        let send = |_| {
            let addr = ram.alloc(packet.len() as u64, 64).expect("memory");
            ram.write(addr, packet);
            Buffer::readable(addr, u32::try_from(packet.len()).expect("64 KiB at most"))
        };
        let receive: Vec<_> = (0..RING).map(receive).collect();
        let send: Vec<_> = (0..copies).map(send).collect();
        let mut guest = Self {
            ram,
            buffers: receive.clone(),
            receive: FixedRing::new(&pair.to_guest, &receive),
            send: FixedRing::new(&pair.from_guest, &send),
        };
        guest.receive.show(POSTED);
        guest.receive.disable_calls();
        guest
    }

    /// Takes TCP packets until they have so many bytes of payload, and gives their buffers again.
    fn take_stream(&mut self, bytes: usize) {
        let (mut payload, mut missing) = (0, 0);
        while payload < bytes || missing > 0 {
            let (entry, len) = self.receive.take();
            payload += len as usize;
            if missing == 0 {
                let mut count = [0; 2];
                let header = self.buffers[usize::from(entry)].addr;
                self.ram
                    .read(GuestAddr(header.get() + NUM_BUFFERS_AT), &mut count);
                missing = u16::from_le_bytes(count);
                payload -= HEADER + TCP_HEADERS;
            }
            missing -= 1;
            self.receive.show(1);
        }
    }

    fn check(&self) {
        self.receive.check();
        self.send.check();
    }
}

/// A sender of frames of one size, which the kernel cuts from larger ones.
struct Sender {
    socket: UdpSocket,
    payload: Vec<u8>,
    segment: usize,
}

impl Sender {
    fn new(size: usize) -> Self {
        let socket = UdpSocket::bind("10.66.0.9:0").expect("10.66.0.9 is an address of this host");
        socket.connect("10.66.0.1:9").expect("a route");
        let segment = size - UDP_HEADERS;
        let value = libc::c_int::try_from(segment).expect("a frame's");
        // SAFETY: `value` is an int that outlives the call, which is told its size.
        let done = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_UDP,
                UDP_SEGMENT,
                (&raw const value).cast(),
                size_of_val(&value) as libc::socklen_t,
            )
        };
        assert_eq!(done, 0, "UDP_SEGMENT");
        Self {
            socket,
            payload: vec![0; MOST_BYTES],
            segment,
        }
    }

    fn send(&self, count: u16) {
        let mut left = usize::from(count);
        while left > 0 {
            let now = left.min(MOST_SEGMENTS).min(MOST_BYTES / self.segment);
            self.socket
                .send(&self.payload[..now * self.segment])
                .expect("sent");
            left -= now;
        }
    }
}

/// The internet checksum's sum, not inverted.
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes
        .chunks(2)
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

/// A plain virtio-net header, and an IPv4 frame of that protocol from guest `from` to the address ending in `to`.
fn packet(size: usize, from: u8, to: u8, protocol: u8) -> Vec<u8> {
    let mut packet = vec![0; HEADER + size];
    let frame = &mut packet[HEADER..];
    frame[..12].copy_from_slice(&[0x52, 0x54, 0, 0, 9, to, 0x52, 0x54, 0, 0, 9, from]);
    frame[12] = 8;
    let ip = &mut frame[14..34];
    let length = u16::try_from(size - 14).expect("64 KiB at most");
    ip[0] = 0x45;
    ip[2..4].copy_from_slice(&length.to_be_bytes());
    (ip[8], ip[9]) = (64, protocol);
    ip[12..20].copy_from_slice(&[10, 66, 0, from, 10, 66, 0, to]);
    let checksum = !sum(ip);
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet
}

fn udp(size: usize, from: u8, to: u8) -> Vec<u8> {
    let mut packet = packet(size, from, to, 17);
    let udp = &mut packet[HEADER + 34..];
    udp[..4].copy_from_slice(&[4, 0, 4, 0]);
    udp[4..6].copy_from_slice(&u16::try_from(size - 34).expect("small").to_be_bytes());
    packet
}

/// TCP to be cut into segments, with the checksum of its pseudo-header (VirtIO 1.3, 5.1.6.2).
fn tcp(size: usize, from: u8, to: u8) -> Vec<u8> {
    let mut packet = packet(size, from, to, 6);
    packet[..2].copy_from_slice(&[1, 1]);
    let fields = [TCP_HEADERS as u16, MSS, 34, 16];
    for (at, field) in fields.into_iter().enumerate() {
        packet[2 + 2 * at..][..2].copy_from_slice(&field.to_le_bytes());
    }
    let mut pseudo = packet[HEADER + 26..HEADER + 34].to_vec();
    pseudo.extend([0, 6]);
    pseudo.extend(u16::try_from(size - 34).expect("64 KiB at most").to_be_bytes());
    let tcp = &mut packet[HEADER + 34..];
    tcp[..4].copy_from_slice(&[4, 0, 4, 0]);
    (tcp[12], tcp[13], tcp[14]) = (0x50, 0x10, 0xff);
    tcp[16..18].copy_from_slice(&sum(&pseudo).to_be_bytes());
    packet
}

/// Clock ticks for which the CPU was idle, and all of them.
fn ticks() -> [u64; 2] {
    let stat = std::fs::read_to_string("/proc/stat").expect("/proc");
    let fields: Vec<u64> = stat
        .lines()
        .next()
        .expect("cpu")
        .split_whitespace()
        .skip(1)
        .take(7)
        .flat_map(str::parse)
        .collect();
    [fields[3] + fields[4], fields.iter().sum()]
}

/// Does the rounds, after some that are not counted, and prints what a frame took. Idle time is known to a tick of 10
/// ms; so it does them again until the CPU was busy for [`LEAST_BUSY`] ticks.
fn measure(batch: u16, rounds: u32, mut round: impl FnMut()) {
    (0..rounds / 10 + 2).for_each(|_| round());
    let (ticks_before, begun) = (ticks(), Instant::now());
    let mut frames = 0.0;
    let (idle, all) = loop {
        (0..rounds).for_each(|_| round());
        frames += f64::from(rounds) * f64::from(batch);
        let now = ticks();
        let [idle, all] = [0, 1].map(|at| now[at] - ticks_before[at]);
        if all - idle >= LEAST_BUSY {
            break (idle as f64, all as f64);
        }
    };
    println!(
        r#"{{"ns": {:.1}, "idle": {:.4}}}"#,
        begun.elapsed().as_nanos() as f64 / frames,
        idle / all
    );
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [way, batch, size, rounds, ends @ ..] = &arguments[..] else {
        panic!("WAY BATCH SIZE ROUNDS END [END], see the head of this file");
    };
    let batch: u16 = batch.parse().expect("BATCH is a number");
    let size: usize = size.parse().expect("SIZE is a number");
    let rounds: u32 = rounds.parse().expect("ROUNDS is a number");
    let features = match way.as_str() {
        "stream" => FEATURES | F_GUEST_TSO4,
        _ => FEATURES,
    };
    let served: Vec<_> = ends.iter().map(|end| Served::connect(end, features)).collect();
    let packet = |from: usize| match (way.as_str(), served.len()) {
        ("gso", _) => tcp(size, 1, BEHIND_NIC),
        ("stream", _) => udp(64, 1, BEHIND_NIC),
        (_, 2) => udp(size, [1, 2][from], [2, 1][from]),
        _ => udp(size, 1, BEHIND_NIC),
    };
    let copies = if way == "gso" { 1 } else { RING.into() };
    let mut guests: Vec<_> = served
        .iter()
        .enumerate()
        .map(|(number, served)| Guest::new(served, &packet(number), copies))
        .collect();
    // Until the other side has seen the buffers.
    std::thread::sleep(START);
    match (way.as_str(), &mut guests[..]) {
        ("idle", _) => loop {
            std::thread::park();
        },
        ("from-guest" | "gso", [guest]) => {
            measure(batch, rounds, || {
                guest.send.show(batch);
                guest.send.wait(batch);
            });
        }
        ("guest-to-guest", [from, to]) => {
            // So that its address is known.
            to.send.show(1);
            to.send.wait(1);
            from.receive.wait(1);
            measure(batch, rounds, || {
                from.send.disable_calls();
                from.send.show(batch);
                to.receive.wait(batch);
                to.receive.show(batch);
                from.send.wait(batch);
            });
        }
        ("to-guest", [guest]) => {
            // So that its address is known.
            guest.send.show(1);
            guest.send.wait(1);
            let sender = Sender::new(size);
            measure(batch, rounds, || {
                sender.send(batch);
                guest.receive.wait(batch);
                guest.receive.show(batch);
            });
        }
        ("stream", [guest]) => {
            // So that its address is known.
            guest.send.show(1);
            guest.send.wait(1);
            let sender = PacketPort::here_with_header("vb");
            // PACKET_VNET_HDR takes the header's first ten bytes.
            let mut packet = tcp(size, BEHIND_NIC, 1);
            packet.drain(10..HEADER);
            measure(batch, rounds, || {
                (0..batch).for_each(|_| sender.send(&packet));
                guest.take_stream(usize::from(batch) * (size - TCP_HEADERS));
            });
        }
        _ => panic!("{way} with {} guests is no way", ends.len()),
    }
    guests.iter().for_each(Guest::check);
}
