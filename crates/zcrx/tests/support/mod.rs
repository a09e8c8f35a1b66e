//! Peers that send a pattern, and checkers of what arrives; over the loopback, or by a queue of a NIC.
#![allow(dead_code, reason = "each test file uses some of it")]

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::mpsc::{self, Sender};
use std::sync::{LazyLock, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_recv_buffer_size;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use zcrx::{Config, ConnectionId, Event, ListenerId, Memory, Mode, QueueId, Receiver, Request, Source};

/// Time limit for a transfer that hangs.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// The bytes that streams repeat, each from an offset of its own. Their number is a prime, and so no buffer's length.
/// Cached, because an emulated guest takes a second for each few megabytes that a program computes byte by byte.
static PERIOD: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let byte = |at: u64| (at.wrapping_mul(0x9e37_79b9) >> 7) ^ (at % 251);
    (0..65_521).map(|at| byte(at) as u8).collect()
});

/// The bytes of a stream from an offset to the end of its period.
fn pattern(seed: u64, at: u64) -> &'static [u8] {
    let length = PERIOD.len() as u64;
    let place = (at + seed % length * 131) % length;
    &PERIOD[usize::try_from(place).expect("inside")..]
}

pub(crate) fn stream(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        let next = pattern(seed, bytes.len() as u64);
        bytes.extend_from_slice(&next[..next.len().min(len - bytes.len())]);
    }
    bytes
}

/// A queue that has all connections to an address, and the network namespace of their peers.
pub(crate) struct Nic {
    source: Source,
    address: IpAddr,
    /// Connects, in the peers' namespace: of a thread that may move there, which not all of a test's may.
    peers: Mutex<Sender<(SocketAddr, Sender<TcpStream>)>>,
}

/// The NIC that ZCRX_NIC names, as `INTERFACE QUEUE ADDRESS PATH`: the kernel rig has one.
pub(crate) static NIC: LazyLock<Option<Nic>> = LazyLock::new(|| {
    let said = std::env::var("ZCRX_NIC").ok()?;
    let words: Vec<&str> = said.split(' ').collect();
    let &[interface, queue, address, peers] = words.as_slice() else {
        panic!("ZCRX_NIC '{said}' is not INTERFACE QUEUE ADDRESS PATH")
    };
    let index = std::fs::read_to_string(format!("/sys/class/net/{interface}/ifindex")).expect("an interface");
    Some(Nic {
        source: Source::Queue {
            ifindex: index.trim().parse().unwrap(),
            queue: QueueId(queue.parse().expect("a queue")),
        },
        address: address.parse().expect("an address"),
        peers: Mutex::new(connecting_in(peers)),
    })
});

/// Starts a thread in a network namespace that connects to requested addresses.
fn connecting_in(path: &str) -> Sender<(SocketAddr, Sender<TcpStream>)> {
    let namespace = File::open(path).expect("a network namespace");
    let (to_it, told) = mpsc::channel::<(SocketAddr, Sender<TcpStream>)>();
    std::thread::spawn(move || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).expect("we are root");
        for (address, to_asker) in told {
            let _ = to_asker.send(TcpStream::connect(address).expect("it listens"));
        }
    });
    to_it
}

/// Where payload comes from.
pub(crate) fn source() -> Source {
    NIC.as_ref().map_or(Source::NoDevice, |nic| nic.source)
}

/// How it comes by zcrx.
pub(crate) fn zcrx_mode() -> Mode {
    NIC.as_ref().map_or(Mode::ZcrxNoDevice, |_| Mode::Zcrx)
}

/// A peer's socket.
pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    let Some(nic) = NIC.as_ref() else {
        return TcpStream::connect(address).unwrap();
    };
    let (to_us, connected) = mpsc::channel();
    nic.peers.lock().unwrap().send((address, to_us)).unwrap();
    connected.recv_timeout(LIMIT).expect("connected")
}

/// Whether zcrx is available, on a NIC's queue or without a device; prints why not. With ZCRX_MUST it must be.
pub(crate) fn can_zcrx() -> bool {
    let config = Config {
        request: Request::ForceZcrx,
        ..small(64)
    };
    match Receiver::open(&config) {
        Ok(_) => true,
        Err(error) => {
            assert!(std::env::var_os("ZCRX_MUST").is_none(), "{error}");
            println!("SKIPPED: {error}");
            false
        }
    }
}

/// The available modes of receiving; with ZCRX_ONLY only zcrx, if that is available.
pub(crate) fn ways() -> Vec<Request> {
    match (can_zcrx(), std::env::var_os("ZCRX_ONLY").is_some()) {
        (true, true) => vec![Request::ForceZcrx],
        (true, false) => vec![Request::ForceCopy, Request::ForceZcrx],
        (false, _) => vec![Request::ForceCopy],
    }
}

/// How often a holder is killed: as ZCRX_KILLS says, else a few times.
pub(crate) fn kills() -> usize {
    std::env::var("ZCRX_KILLS").map_or(4, |kills| kills.parse().expect("a number"))
}

/// Whether a receiver's buffers have run out. On a NIC's queue no receive ends then: frames are lost, and TCP sends
/// them again. Segments out of order may hold the last buffers, so that the program never holds all of them.
pub(crate) fn is_dry(receiver: &Receiver) -> bool {
    let statistics = receiver.statistics();
    match receiver.mode() {
        Mode::Zcrx => statistics.pieces - statistics.returned >= u64::from(receiver.buffers()) / 2,
        _ => statistics.ran_out > 0,
    }
}

/// A configuration with so many buffers of a page; on a NIC's queue four times as many, as each segment takes one.
pub(crate) fn small(buffers: usize) -> Config {
    let buffers = NIC.as_ref().map_or(buffers, |_| 4 * buffers);
    Config {
        memory: Memory::Own {
            bytes: buffers * 4096,
        },
        copy_buffer_bytes: 4096,
        ..Config::new(source())
    }
}

pub(crate) fn listening(receiver: &mut Receiver) -> (ListenerId, SocketAddr) {
    let host = NIC.as_ref().map_or(Ipv4Addr::LOCALHOST.into(), |nic| nic.address);
    let listener = TcpListener::bind((host, 0)).unwrap();
    // Segments out of order must not take all buffers of a NIC's queue: the missing ones would find none.
    if NIC.is_some() {
        set_socket_recv_buffer_size(&listener, 64 << 10).unwrap();
    }
    let address = listener.local_addr().unwrap();
    (receiver.listen(listener).unwrap(), address)
}

/// Sends 8 bytes that identify its pattern, then so many bytes of it, and ends the stream.
pub(crate) fn sender(address: SocketAddr, seed: u64, len: usize) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut socket = connect(address);
        socket.write_all(&seed.to_le_bytes()).unwrap();
        socket.write_all(&stream(seed, len)).unwrap();
        socket.shutdown(Shutdown::Write).unwrap();
        // Until the other end closes: a reset would take what is on its way.
        let _ = socket.read(&mut [0; 1]);
    })
}

/// Compares the bytes of each peer with its pattern.
#[derive(Default)]
pub(crate) struct Checker {
    streams: HashMap<ConnectionId, (Vec<u8>, u64)>,
    pub(crate) ended: usize,
    pub(crate) bytes: u64,
}

impl Checker {
    pub(crate) fn take(&mut self, from: ConnectionId, bytes: &[u8]) {
        let (head, at) = self.streams.entry(from).or_default();
        let mut bytes = bytes;
        while head.len() < 8 && !bytes.is_empty() {
            head.push(bytes[0]);
            bytes = &bytes[1..];
        }
        let Ok(seed) = head.as_slice().try_into().map(u64::from_le_bytes) else {
            return;
        };
        self.bytes += bytes.len() as u64;
        while !bytes.is_empty() {
            let wanted = pattern(seed, *at);
            let (now, later) = bytes.split_at(wanted.len().min(bytes.len()));
            if now != &wanted[..now.len()] {
                let wrong = now.iter().zip(wanted).position(|(byte, wanted)| byte != wanted);
                panic!("seed {seed}, byte {}", *at + wrong.unwrap_or_default() as u64);
            }
            *at += now.len() as u64;
            bytes = later;
        }
    }

    pub(crate) fn end(&mut self, connection: ConnectionId, len: u64) {
        let (_, at) = self.streams.remove(&connection).expect("something came");
        assert_eq!(at, len, "the stream's length");
        self.ended += 1;
    }
}

/// Runs a receiver until so many streams of so many bytes have ended; each event goes by `each` first.
pub(crate) fn run(
    receiver: &mut Receiver,
    streams: usize,
    len: u64,
    mut each: impl FnMut(&mut Receiver, Event) -> Option<Event>,
) {
    let (mut checker, started) = (Checker::default(), Instant::now());
    while checker.ended < streams {
        assert!(
            started.elapsed() < LIMIT,
            "{} of {streams} ended, {:?}",
            checker.ended,
            receiver.statistics()
        );
        receiver.wait(Some(Duration::from_millis(200))).unwrap();
        while let Some(event) = receiver.next_event() {
            match each(receiver, event) {
                Some(Event::Accepted { socket, .. }) => {
                    receiver.add(socket).unwrap();
                }
                Some(Event::Received { from, piece }) => checker.take(from, &piece),
                Some(Event::Ended { connection, error }) => {
                    assert!(error.is_none(), "{error:?}");
                    checker.end(connection, len);
                    receiver.close(connection).unwrap();
                }
                _ => {}
            }
        }
    }
}
