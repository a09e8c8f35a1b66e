//! What a frame costs the whole system: a virtio-net driver in a closed loop, with vhost-net or vhost-user.
//!
//! `cost_driver WAY BATCH SIZE ROUNDS END [END]`, END: `vhost-net:TAP` (a macvtap by its path) or
//! `vhost-user:SOCKET`. WAY: `from-guest`; `to-guest`, from a sender of this host at 10.66.0.9; `guest-to-guest`,
//! with two ENDs; `gso`, TCP packets of SIZE bytes from the guest; `idle`, which connects, posts buffers and does
//! nothing. Prints JSON: nanoseconds a frame, which are instructions under QEMU's `-icount shift=0,sleep=off`, and
//! the part of the time for which the CPU was idle.
//!
//! Theory of operation. A round shows the device a batch, and waits until it is done with all of it: from the
//! guest, until the buffers are back; to a guest, until the frames are there. It asks for one call a batch, as a
//! driver that coalesces does. Driver, kernel, daemon and, to the guest, the sender share one CPU: all of them are
//! in the figure.

#![allow(unsafe_code)]

use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use testkit::driver::{F_CSUM, F_EVENT_IDX, F_GUEST_CSUM, F_HOST_TSO4, F_MRG_RXBUF, F_VERSION_1, HEADER};
use testkit::vhost_net::VhostNet;
use testkit::{Driver, DriverConfig, Pair};
use virtqueue::GuestAddr;
use virtqueue::driver::{Buffer, GuestRam};

const FEATURES: u64 = F_VERSION_1 | F_MRG_RXBUF | F_EVENT_IDX | F_CSUM | F_GUEST_CSUM | F_HOST_TSO4;
const RAM: u64 = 8 << 20;
/// Receive buffers that are posted; all but one of a ring.
const POSTED: u16 = 255;
const BUFFER: u32 = 2048;
const LIMIT: Duration = Duration::from_secs(5);
/// Headers of a UDP frame, and of a TCP frame.
const UDP_HEADERS: usize = 42;
const TCP_HEADERS: usize = 54;
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
    fn connect(end: &str) -> Self {
        let config = DriverConfig {
            features: FEATURES,
            regions: vec![(GuestAddr(0), RAM)],
            ..DriverConfig::default()
        };
        match end.split_once(':').expect("KIND:NAME") {
            ("vhost-net", tap) => {
                let (device, features) = VhostNet::open(tap, FEATURES).expect("vhost-net and a tap device");
                assert_ne!(features & F_EVENT_IDX, 0, "vhost-net without event indices");
                let ram = Arc::new(GuestRam::new(&config.regions).expect("memory"));
                let pair = Box::new(Pair::new(&ram, &config, features));
                device.start(&ram, &pair).expect("vhost-net takes the rings");
                Self::Kernel {
                    _device: device,
                    pair,
                }
            }
            ("vhost-user", path) => Self::User(Driver::connect(Path::new(path), &config).expect("accepted")),
            (kind, _) => panic!("{kind} is neither vhost-net nor vhost-user"),
        }
    }

    fn pair(&mut self) -> &mut Pair {
        match self {
            Self::Kernel { pair, .. } => pair,
            Self::User(driver) => &mut driver.pairs[0],
        }
    }
}

/// A guest whose buffers stay where they are.
struct Guest {
    served: Served,
    receive: Vec<Buffer>,
    send: Vec<Buffer>,
}

impl Guest {
    fn new(end: &str) -> Self {
        let mut served = Served::connect(end);
        let ram = Arc::clone(served.pair().ram());
        let alloc = |_| Buffer::writable(ram.alloc(BUFFER.into(), 64).expect("memory"), BUFFER);
        let receive: Vec<_> = (0..POSTED).map(alloc).collect();
        let mut guest = Self {
            served,
            receive,
            send: Vec::new(),
        };
        guest.post(POSTED);
        guest
    }

    /// Writes the packet into memory, header in front, `copies` times.
    fn prepare(&mut self, packet: &[u8], copies: usize) {
        let ram = Arc::clone(self.served.pair().ram());
        let place = |_| {
            let addr = ram.alloc(packet.len() as u64, 64).expect("memory");
            ram.write(addr, packet);
            Buffer::readable(addr, u32::try_from(packet.len()).expect("64 KiB at most"))
        };
        self.send = (0..copies).map(place).collect();
    }

    /// Posts receive buffers.
    fn post(&mut self, count: u16) {
        let ring = &mut self.served.pair().to_guest;
        for buffer in &self.receive[..count.into()] {
            ring.driver.add(std::slice::from_ref(buffer)).expect("room");
        }
        ring.driver.disable_calls();
        ring.publish();
    }

    fn show(&mut self, count: u16) {
        let ring = &mut self.served.pair().from_guest;
        for at in 0..usize::from(count) {
            let buffer = &self.send[at % self.send.len()];
            ring.driver.add(std::slice::from_ref(buffer)).expect("room");
        }
    }

    fn await_received(&mut self, count: u16) {
        assert!(
            self.served.pair().to_guest.await_count(count, LIMIT),
            "frames do not arrive"
        );
    }

    fn await_sent(&mut self, count: u16) {
        assert!(
            self.served.pair().from_guest.await_count(count, LIMIT),
            "buffers do not come back"
        );
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

/// Does the rounds, after some that are not counted, and prints what a frame took.
fn measure(batch: u16, rounds: u32, mut round: impl FnMut()) {
    (0..rounds / 10 + 2).for_each(|_| round());
    let (ticks_before, begun) = (ticks(), Instant::now());
    (0..rounds).for_each(|_| round());
    let (elapsed, ticks_after) = (begun.elapsed(), ticks());
    let [idle, all] = [0, 1].map(|at| (ticks_after[at] - ticks_before[at]) as f64);
    let frames = f64::from(rounds) * f64::from(batch);
    println!(
        r#"{{"ns": {:.1}, "idle": {:.3}}}"#,
        elapsed.as_nanos() as f64 / frames,
        idle / all.max(1.0)
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
    let mut guests: Vec<_> = ends.iter().map(|end| Guest::new(end)).collect();
    // Until the other side has seen the buffers.
    std::thread::sleep(LIMIT / 10);
    match (way.as_str(), &mut guests[..]) {
        ("idle", _) => loop {
            std::thread::park();
        },
        ("from-guest" | "gso", [guest]) => {
            let (packet, copies) = match way.as_str() {
                "gso" => (tcp(size, 1, 0x99), 1),
                _ => (udp(size, 1, 0x99), batch.into()),
            };
            guest.prepare(&packet, copies);
            measure(batch, rounds, || {
                guest.show(batch);
                guest.served.pair().from_guest.publish();
                guest.await_sent(batch);
            });
        }
        ("guest-to-guest", [from, to]) => {
            from.prepare(&udp(size, 1, 2), batch.into());
            // So that its address is known.
            to.prepare(&udp(size, 2, 1), 1);
            to.show(1);
            to.served.pair().from_guest.publish();
            to.await_sent(1);
            from.await_received(1);
            measure(batch, rounds, || {
                from.show(batch);
                let ring = &mut from.served.pair().from_guest;
                ring.driver.disable_calls();
                ring.publish();
                to.await_received(batch);
                to.post(batch);
                from.await_sent(batch);
            });
        }
        (way, [guest]) if way.starts_with("to-guest") => {
            let sender = Sender::new(size);
            measure(batch, rounds, || {
                sender.send(batch);
                guest.await_received(batch);
                guest.post(batch);
            });
        }
        _ => panic!("{way} with {} guests is no way", ends.len()),
    }
}
