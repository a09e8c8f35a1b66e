//! What a frame costs the whole system: a virtio-net driver in a closed loop, with vhost-net or vhost-user.
//!
//! `cost_driver WAY BATCH SIZE ROUNDS END…`, END: `vhost-net:TAP` (a macvtap by its path) or `vhost-user:SOCKET`, a
//! guest each. WAY: `from-guest` and `to-guest`, from a sender of this host at 10.66.0.99, with any number of guests;
//! `guest-to-guest`, with two; `gso`, TCP packets of SIZE bytes from a guest; `stream`, the same to it, from a packet
//! socket on the interface `vb`; `idle`: all guests connect, post buffers and do nothing. With `xdp:INTERFACE` for END
//! there is no guest, but an AF_XDP socket of this process, which sends (`from-guest`) or receives (`to-guest`).
//!
//! `to-host` and `from-host`, datagrams, and `stream-to-host` and `stream-from-host`, SIZE bytes of TCP, are traffic of
//! the host's own, beside the guests, which do nothing: between a socket at 10.66.0.98, the address of `va`, and one at
//! 10.66.0.99 in the network namespace `far`.
//!
//! Prints JSON: nanoseconds a frame, which are instructions under QEMU's `-icount shift=0,sleep=off`, the part of the
//! time for which the CPU was idle, and how many frames the interface `va` has sent for each that the guests sent. With
//! COST_UNDERLAY, what this interface has sent; and how many frames passed `va`, where the kernel encapsulates. It counts
//! until the CPU was busy for COST_TICKS ticks of 10 ms, 40 unless that is set. COST_MTU: what GSO packets are for.
//! COST_CARRIER: a NIC; each round of `gso` waits until it has sent all bytes, as a faster device above it would drop some.
//!
//! Theory of operation. A round shows the device a batch of each guest, and waits until it is done with all of them:
//! from the guest, until the buffers are back; to a guest, until the frames are there, [`MOST_UNDER_WAY`] at once. It
//! asks for one call a batch, and does nothing for a single frame ([`FixedRing`]). Driver, kernel, daemon and, to the
//! guest, the sender share one CPU: all of them are in the figure. Whoever starts it has to end it, should it wait in
//! vain.

#![allow(unsafe_code)]

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::num::ParseIntError;
use std::os::fd::{AsFd as _, AsRawFd};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use testkit::driver::{
    F_CSUM, F_EVENT_IDX, F_GUEST_CSUM, F_GUEST_TSO4, F_HOST_TSO4, F_MRG_RXBUF, F_VERSION_1, HEADER,
};
use testkit::vhost_net::VhostNet;
use testkit::{Driver, DriverConfig, FixedRing, PacketPort, Pair, Redirect};
use virtqueue::GuestAddr;
use virtqueue::driver::{Buffer, GuestRam};
use xsk::{Frame, FramePool, Kick, OwnMemory, QueueId, Socket, SocketConfig, TxDesc, Umem};

const FEATURES: u64 = F_VERSION_1 | F_MRG_RXBUF | F_EVENT_IDX | F_CSUM | F_GUEST_CSUM | F_HOST_TSO4;
const RAM: u64 = 8 << 20;
/// Entries of a ring, and receive buffers that are posted: all but one.
const RING: u16 = 256;
const POSTED: u16 = RING - 1;
const BUFFER: u32 = 2048;
/// Chunks of a socket without a guest: more than are in its rings and those of a NIC.
const ALONE_FRAMES: usize = 3 * 2048;
/// Most frames to guests that are under way at once: what a veth's ring holds, so that none is dropped.
const MOST_UNDER_WAY: u16 = 256;
/// Last byte of the MAC address behind the NIC that guests send to.
const BEHIND_NIC: u8 = 0x99;
/// The far end's address, the host's own, and the namespace of the former, where the host's sockets are measured.
const FAR: Ipv4Addr = Ipv4Addr::new(10, 66, 0, 99);
const HOST: Ipv4Addr = Ipv4Addr::new(10, 66, 0, 98);
const FAR_NETNS: &str = "/run/netns/far";
const DISCARD: u16 = 9;
/// A socket's, so that no batch is lost.
const SOCKET_BYTES: usize = 4 << 20;
const START: Duration = Duration::from_millis(100);
/// Until a NIC is up again that got an XDP program.
const START_NIC: Duration = Duration::from_secs(5);
/// Pause between two looks whether the carrier has sent a round.
const CARRIER_PAUSE: Duration = Duration::from_micros(200);
/// What is not counted: so many rounds, or frames if those are fewer. The daemon looks at idle guests for 256 rounds.
const WARM_UP_ROUNDS: usize = 600;
const WARM_UP_FRAMES: usize = 50_000;
const LEAST_BUSY: u64 = 40;
/// Headers of a UDP frame, and of a TCP frame.
const UDP_HEADERS: usize = 42;
const TCP_HEADERS: usize = 54;
/// `num_buffers` in a virtio-net header.
const NUM_BUFFERS_AT: u64 = 10;
/// Headers of a TCP segment with timestamps, and an interface's MTU.
const SEGMENT_HEADERS: u16 = 52;
const MTU: u16 = 1500;
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

    /// Sends a frame, so that a switch learns its address, and has time to install a flow.
    fn make_known(&mut self) {
        self.send.show(1);
        self.send.wait(1);
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
    /// To the guest of this number.
    fn to_guest(size: usize, number: u8) -> Self {
        Self::new(size, FAR, Ipv4Addr::new(10, 66, 0, number))
    }

    fn new(size: usize, from: Ipv4Addr, to: Ipv4Addr) -> Self {
        let socket = UdpSocket::bind((from, 0)).expect("an address of this host");
        socket.connect((to, DISCARD)).expect("a route");
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
    let mtu = number("COST_MTU", MTU);
    let fields = [TCP_HEADERS as u16, mtu - SEGMENT_HEADERS, 34, 16];
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

/// A number of the environment.
fn number<N: FromStr<Err = ParseIntError>>(name: &str, otherwise: N) -> N {
    std::env::var(name).map_or(otherwise, |value| value.parse().expect("a number"))
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

/// A counter of an interface.
fn count(interface: &str, counter: &str) -> u64 {
    let path = format!("/sys/class/net/{interface}/statistics/{counter}");
    let count = std::fs::read_to_string(path).expect("an interface");
    count.trim().parse().expect("a number")
}

/// Frames that the NIC under test has sent, and those that passed the device in whose place it is used.
fn passed() -> [u64; 2] {
    match std::env::var("COST_UNDERLAY") {
        Ok(underlay) if !underlay.is_empty() => {
            let [out, back] = ["tx_packets", "rx_packets"].map(|way| count("va", way));
            [count(&underlay, "tx_packets"), out + back]
        }
        _ => [count("va", "tx_packets"), 0],
    }
}

/// Does rounds of so many frames, after some that are not counted, and prints what a frame took. Idle time is known to a
/// tick of 10 ms; so it does them again until the CPU was busy for [`LEAST_BUSY`] ticks, or COST_TICKS.
fn measure(frames_a_round: usize, rounds: u32, mut round: impl FnMut()) {
    let uncounted = (WARM_UP_FRAMES / frames_a_round).min(WARM_UP_ROUNDS);
    (0..uncounted.max(2)).for_each(|_| round());
    let least_busy = number("COST_TICKS", LEAST_BUSY);
    let passed_before = passed();
    let (ticks_before, begun) = (ticks(), Instant::now());
    let mut rounds_done = 0.0;
    let (idle, all) = loop {
        (0..rounds).for_each(|_| round());
        rounds_done += f64::from(rounds);
        let now = ticks();
        let [idle, all] = [0, 1].map(|at| now[at] - ticks_before[at]);
        if all - idle >= least_busy {
            break (idle as f64, all as f64);
        }
    };
    let (ns, frames) = (
        begun.elapsed().as_nanos() as f64,
        rounds_done * frames_a_round as f64,
    );
    let now = passed();
    let [sent, by_kernel] = [0, 1].map(|at| (now[at] - passed_before[at]) as f64 / frames);
    println!(
        r#"{{"ns": {:.1}, "idle": {:.4}, "sent": {sent:.3}, "by_kernel": {by_kernel:.3}}}"#,
        ns / frames,
        idle / all,
    );
}

/// An AF_XDP socket without a guest, on the first queue of an interface, in the best mode that there is.
struct Alone {
    pool: FramePool,
    socket: Socket,
    _program: Redirect,
}

impl Alone {
    /// A socket that sends this frame.
    fn open(interface: &str, frame: &[u8]) -> Self {
        let index = format!("/sys/class/net/{interface}/ifindex");
        let index = std::fs::read_to_string(index).expect("an interface");
        let index = index.trim().parse().expect("a number");
        let program = Redirect::attach(index, true).expect("an XDP program in native mode");
        let memory = OwnMemory::new(ALONE_FRAMES * BUFFER as usize).expect("memory");
        let umem = Umem::aligned(Arc::new(memory), BUFFER, 0).expect("a UMEM");
        let write = |chunk: &Frame| umem.write(chunk.offset(), frame).expect("a chunk holds it");
        let pool = umem.all_frames().expect("whole chunks").inspect(write).collect();
        let socket = Socket::open(&umem, &SocketConfig::new(index, QueueId(0))).expect("a free queue");
        program.steer(0, &socket).expect("a place in the map");
        Self {
            pool,
            socket,
            _program: program,
        }
    }

    fn sleep_until(&self, flags: PollFlags) {
        poll(&mut [PollFd::new(&self.socket, flags)], None).expect("no signal");
    }

    /// Sends a batch as soon as there is room for it.
    fn send(&mut self, batch: u32, size: u32) {
        self.pool.extend(self.socket.completion.peek(u32::MAX));
        while self.socket.tx.free() < batch {
            self.sleep_until(PollFlags::OUT);
        }
        let mut sending = self.socket.tx.reserve(batch);
        while sending.room() > 0 {
            let frame = self.pool.take().expect("more than the rings hold");
            sending.push(TxDesc::whole(frame, size));
        }
        sending.submit();
        // Once for each 32 frames in copy mode.
        while self.socket.tx.needs_wakeup()
            && self.socket.kick_tx().expect("the interface is up") == Kick::Again
        {}
    }

    /// Receives a batch, and gives its frames back to the fill ring.
    fn receive(&mut self, batch: u32) {
        let mut missing = batch;
        while missing > 0 {
            let received = self.socket.rx.peek(missing);
            missing -= received.len() as u32;
            if received.len() == 0 {
                drop(received);
                self.sleep_until(PollFlags::IN);
                continue;
            }
            let mut fill = self.socket.fill.reserve(received.len() as u32);
            received.for_each(|desc| fill.push(desc.frame));
            fill.submit();
            if self.socket.fill.needs_wakeup() {
                self.socket.wake_rx().expect("the interface is up");
            }
        }
    }

    fn measure(&mut self, way: &str, batch: u16, size: usize, rounds: u32) {
        let (frames, batch) = (usize::from(batch), u32::from(batch));
        match way {
            "from-guest" => {
                std::thread::sleep(START_NIC);
                measure(frames, rounds, || self.send(batch, size as u32));
            }
            "to-guest" => {
                self.socket.fill.refill(&mut self.pool, u32::MAX);
                std::thread::sleep(START_NIC);
                let sender = Sender::to_guest(size, 1);
                measure(frames, rounds, || {
                    sender.send(batch as u16);
                    self.receive(batch);
                });
            }
            _ => panic!("{way} is no way of a socket"),
        }
    }
}

/// Does something where an address is: in this namespace, or in the far end's.
fn at<T: Send>(address: Ipv4Addr, work: impl FnOnce() -> T + Send) -> T {
    let inside = || {
        if address == FAR {
            let netns = File::open(FAR_NETNS).expect("the far end's namespace");
            move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network)).expect("we are root");
        }
        work()
    };
    std::thread::scope(|scope| scope.spawn(inside).join().expect("it does not panic"))
}

/// Traffic of the host's own, one way.
fn measure_host(way: &str, batch: u16, size: usize, rounds: u32) {
    let (from, to) = match way.ends_with("to-host") {
        true => (FAR, HOST),
        false => (HOST, FAR),
    };
    let frames = usize::from(batch);
    let mut payload = vec![0; size];
    if way.starts_with("stream") {
        let listener = at(to, || TcpListener::bind((to, DISCARD))).expect("an address");
        set_socket_recv_buffer_size_force(&listener, SOCKET_BYTES).expect("we are root");
        let mut sender = at(from, || TcpStream::connect((to, DISCARD))).expect("a route");
        sender.set_nodelay(true).expect("TCP");
        let (mut receiver, _) = listener.accept().expect("it is connected");
        return measure(frames, rounds, || {
            (0..batch).for_each(|_| sender.write_all(&payload).expect("connected"));
            (0..batch).for_each(|_| receiver.read_exact(&mut payload).expect("connected"));
        });
    }
    let receiver = at(to, || UdpSocket::bind((to, DISCARD))).expect("an address");
    set_socket_recv_buffer_size_force(&receiver, SOCKET_BYTES).expect("we are root");
    let sender = at(from, || Sender::new(size, from, to));
    measure(frames, rounds, || {
        sender.send(batch);
        for _ in 0..batch {
            receiver.recv(&mut payload).expect("it is bound");
        }
    });
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [way, batch, size, rounds, ends @ ..] = &arguments[..] else {
        panic!("WAY BATCH SIZE ROUNDS END…, see the head of this file");
    };
    let batch: u16 = batch.parse().expect("BATCH is a number");
    let size: usize = size.parse().expect("SIZE is a number");
    let rounds: u32 = rounds.parse().expect("ROUNDS is a number");
    let way = way.as_str();
    if let [end] = ends
        && let Some(interface) = end.strip_prefix("xdp:")
    {
        let frame = udp(size, 1, BEHIND_NIC);
        return Alone::open(interface, &frame[HEADER..]).measure(way, batch, size, rounds);
    }
    let features = match way {
        "stream" => FEATURES | F_GUEST_TSO4,
        _ => FEATURES,
    };
    let served: Vec<_> = ends.iter().map(|end| Served::connect(end, features)).collect();
    let packet = |from: u8| match way {
        "gso" => tcp(size, from, BEHIND_NIC),
        way if way.starts_with("stream") => udp(64, from, BEHIND_NIC),
        "guest-to-guest" => udp(size, from, 3 - from),
        _ => udp(size, from, BEHIND_NIC),
    };
    let copies = match way {
        "gso" | "idle" => 1,
        _ => RING.into(),
    };
    let mut guests: Vec<_> = served
        .iter()
        .zip((1..=u8::MAX).cycle())
        .map(|(served, number)| Guest::new(served, &packet(number), copies))
        .collect();
    // Until the other side has seen the buffers.
    std::thread::sleep(START);
    if !matches!(way, "idle" | "guest-to-guest") {
        guests.iter_mut().for_each(Guest::make_known);
        std::thread::sleep(START);
    }
    let frames = usize::from(batch) * guests.len();
    match (way, &mut guests[..]) {
        ("idle", _) => {
            println!("connected");
            loop {
                std::thread::park();
            }
        }
        ("from-guest" | "gso", guests) => {
            let carrier = std::env::var("COST_CARRIER").unwrap_or_default();
            let carried = || match carrier.as_str() {
                "" => u64::MAX,
                carrier => count(carrier, "tx_bytes"),
            };
            let mut bytes = carried();
            measure(frames, rounds, || {
                guests.iter_mut().for_each(|guest| guest.send.show(batch));
                guests.iter_mut().for_each(|guest| guest.send.wait(batch));
                bytes = bytes.saturating_add((frames * size) as u64);
                while carried() < bytes {
                    std::thread::sleep(CARRIER_PAUSE);
                }
            });
        }
        ("guest-to-guest", [from, to]) => {
            to.make_known();
            from.receive.wait(1);
            measure(batch.into(), rounds, || {
                from.send.disable_calls();
                from.send.show(batch);
                to.receive.wait(batch);
                to.receive.show(batch);
                from.send.wait(batch);
            });
        }
        ("to-guest", guests) => {
            let senders: Vec<_> = (1..)
                .zip(&*guests)
                .map(|(to, _)| Sender::to_guest(size, to))
                .collect();
            let at_once = usize::from((MOST_UNDER_WAY / batch).max(1));
            measure(frames, rounds, || {
                for (senders, guests) in senders.chunks(at_once).zip(guests.chunks_mut(at_once)) {
                    senders.iter().for_each(|sender| sender.send(batch));
                    for guest in guests {
                        guest.receive.wait(batch);
                        guest.receive.show(batch);
                    }
                }
            });
        }
        ("stream", [guest]) => {
            let sender = PacketPort::here_with_header("vb");
            // PACKET_VNET_HDR takes the header's first ten bytes.
            let mut packet = tcp(size, BEHIND_NIC, 1);
            packet.drain(10..HEADER);
            measure(frames, rounds, || {
                (0..batch).for_each(|_| sender.send(&packet));
                guest.take_stream(usize::from(batch) * (size - TCP_HEADERS));
            });
        }
        (way, _) if way.ends_with("host") => measure_host(way, batch, size, rounds),
        _ => panic!("{way} with {} guests is no way", ends.len()),
    }
    guests.iter().for_each(Guest::check);
}
