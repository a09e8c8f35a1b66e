//! A session: sequences of vhost-user messages with descriptors, and what a guest writes to its rings meanwhile,
//! against the daemon's own connection loop and workers, on a port of the null NIC.
//!
//! Invariants: no panic; the conversation ends when the connection does; the port is then idle, and has given back
//! every descriptor.
//!
//! The daemon's side of a connection runs on a thread that lives as long as the process. Memory is in files made
//! once, whose content is thrown away before each input.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use arbitrary::Arbitrary;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use vhost_af_xdp::fuzzing::NullPort;

#[derive(Arbitrary, Debug)]
struct Input {
    direct: bool,
    start: Start,
    /// Features to acknowledge in the beginning, of those that `features_of` knows.
    features: u16,
    steps: Vec<Step>,
}

/// How far a good VMM got before this one took over.
#[derive(Arbitrary, Debug, PartialEq)]
enum Start {
    Connected,
    Greeted,
    Running,
}

#[derive(Arbitrary, Debug)]
enum Step {
    Message(Message, Option<Lie>),
    Ring(Ring),
    Kick {
        vring: u8,
    },
    /// What is in the way of calls: an eventfd that is full.
    FillCall {
        vring: u8,
    },
    Truncate,
    Wait,
    Bytes(Vec<u8>),
}

/// What a message says that is not so.
#[derive(Arbitrary, Debug)]
struct Lie {
    size: Option<i8>,
    flags: Option<u8>,
    files: Option<Vec<File>>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum File {
    Memory,
    Unsealed,
    Short,
    Event,
    Pipe,
    Socket,
    Null,
}

#[derive(Arbitrary, Debug)]
enum Message {
    /// Requests that have no payload.
    Plain(u8),
    Number {
        request: u8,
        value: Number,
    },
    Features(u16),
    Protocol(u32),
    State {
        request: u8,
        vring: Index,
        value: u16,
    },
    Addresses {
        vring: Index,
        flags: u8,
        place: Place,
    },
    Event {
        request: u8,
        vring: Index,
        file: Option<File>,
    },
    Table(Vec<Region>),
    Slot {
        add: bool,
        region: Region,
    },
    Config {
        set: bool,
        offset: u16,
        len: u16,
        flags: u8,
    },
    Log {
        bytes: u32,
        offset: u16,
    },
    Inflight {
        set: bool,
        bytes: u32,
        offset: u16,
        queues: u16,
        size: u16,
    },
    Backend,
    Other {
        request: u8,
        payload: Vec<u8>,
    },
}

#[derive(Arbitrary, Debug)]
enum Number {
    Small(u16),
    Bit(u8),
    Any(u64),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Index {
    Known(u8),
    Any(u32),
}

#[derive(Arbitrary, Debug)]
enum Place {
    /// Where the rings are.
    Right,
    /// In memory, anywhere.
    At(u16, u16, u16),
    Any(u64, u64, u64),
}

#[derive(Arbitrary, Debug)]
struct Region {
    slot: u8,
    pages: u8,
    offset: u8,
    wild: Option<(u64, u64, u64, u64)>,
    file: File,
}

/// What the guest writes.
#[derive(Arbitrary, Debug)]
enum Ring {
    Descriptor {
        vring: u8,
        at: u8,
        addr: Addr,
        len: u32,
        a: u16,
        b: u16,
    },
    Available {
        vring: u8,
        at: u8,
        head: u16,
    },
    Index {
        vring: u8,
        value: u16,
    },
    Word {
        offset: u16,
        value: u16,
    },
}

#[derive(Arbitrary, Debug)]
enum Addr {
    In(u16),
    Any(u64),
}

const GUEST: u64 = 0x10_0000;
/// Below anything that is mapped privately in a process with a sanitizer, which the daemon would see and refuse.
const USER: u64 = 0x6000_0000;
const BYTES: u64 = 256 << 10;
const QUEUE: u32 = 64;
/// Bytes that each vring takes up: descriptors, available ring, used ring on a page each.
const RING: u64 = 0x4000;
const MOST_STEPS: usize = 64;

/// Everything that outlives an input.
struct World {
    to_daemon: [Sender<UnixStream>; 2],
    ended: Receiver<()>,
    ports: [&'static NullPort; 2],
    memory: OwnedFd,
    unsealed: OwnedFd,
    short: OwnedFd,
    events: [OwnedFd; 4],
    pipe: OwnedFd,
    socket: OwnedFd,
    null: OwnedFd,
}

impl World {
    fn new() -> Self {
        let (say_ended, ended) = channel();
        let mut to_daemon = Vec::new();
        let mut ports = Vec::new();
        for direct in [false, true] {
            let port: &'static NullPort = Box::leak(Box::new(NullPort::new(2, direct)));
            let (sender, connections) = channel::<UnixStream>();
            let say_ended = say_ended.clone();
            std::thread::spawn(move || {
                for connection in connections {
                    port.serve(&connection);
                    drop(connection);
                    if say_ended.send(()).is_err() {
                        return;
                    }
                }
            });
            to_daemon.push(sender);
            ports.push(port);
        }
        let file = |bytes, seals| {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = rustix::fs::memfd_create("fuzz", flags).expect("memfd");
            rustix::fs::ftruncate(&file, bytes).expect("room");
            rustix::fs::fcntl_add_seals(&file, seals).expect("seals");
            file
        };
        let event = || {
            let flags = rustix::event::EventfdFlags::NONBLOCK | rustix::event::EventfdFlags::CLOEXEC;
            rustix::event::eventfd(0, flags).expect("eventfd")
        };
        Self {
            to_daemon: to_daemon.try_into().expect("two"),
            ended,
            ports: ports.try_into().ok().expect("two"),
            memory: file(BYTES, SealFlags::SHRINK),
            unsealed: file(BYTES, SealFlags::empty()),
            short: file(4096, SealFlags::SHRINK),
            events: [(); 4].map(|()| event()),
            pipe: std::io::pipe().expect("pipe").0.into(),
            socket: UnixStream::pair().expect("sockets").0.into(),
            null: std::fs::File::open("/dev/null").expect("there is one").into(),
        }
    }

    fn reset(&self) {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::ftruncate(&self.unsealed, BYTES).expect("room");
        for file in [&self.memory, &self.unsealed] {
            rustix::fs::fallocate(file, hole, 0, BYTES).expect("a hole");
        }
        for event in &self.events {
            let _ = rustix::io::read(event, &mut [0; 8]);
        }
    }

    fn file(&self, file: File, vring: usize) -> BorrowedFd<'_> {
        match file {
            File::Memory => self.memory.as_fd(),
            File::Unsealed => self.unsealed.as_fd(),
            File::Short => self.short.as_fd(),
            File::Event => self.events[vring % 4].as_fd(),
            File::Pipe => self.pipe.as_fd(),
            File::Socket => self.socket.as_fd(),
            File::Null => self.null.as_fd(),
        }
    }
}

/// The world belongs to the fuzzer's one thread; tests share it in turn.
static WORLD: OnceLock<std::sync::Mutex<World>> = OnceLock::new();

/// Runs one input.
///
/// # Panics
/// When an invariant is broken.
pub fn run(data: &[u8]) {
    let Some(input) = crate::decode::<Input>(data) else {
        return;
    };
    let world = WORLD
        .get_or_init(|| World::new().into())
        .lock()
        .expect("no panic before");
    world.reset();
    let before = descriptors();
    let (vmm, daemon) = UnixStream::pair().expect("sockets");
    vmm.set_write_timeout(Some(Duration::from_secs(5)))
        .expect("not zero");
    let port = usize::from(input.direct);
    world.to_daemon[port].send(daemon).expect("the thread lives");
    let mut vmm = Vmm {
        world: &world,
        socket: vmm,
    };
    vmm.begin(&input);
    for step in input.steps.iter().take(MOST_STEPS) {
        if !vmm.step(step) {
            break;
        }
    }
    drop(vmm);
    let ended = world.ended.recv_timeout(Duration::from_secs(8));
    assert!(
        ended.is_ok(),
        "the connection is closed, and the session does not end"
    );
    assert!(
        world.ports[port].is_idle(),
        "the session is over, and the port not idle"
    );
    // The daemon's thread may still be dropping the connection itself. Fewer are no leak: other corpora, which are read
    // on other threads, had files open before.
    let deadline = Instant::now() + Duration::from_secs(10);
    while descriptors() > before {
        assert!(
            Instant::now() < deadline,
            "{before} descriptors before and {} after",
            descriptors()
        );
        std::thread::yield_now();
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

struct Vmm<'a> {
    world: &'a World,
    socket: UnixStream,
}

const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const SET_MEM_TABLE: u32 = 5;
const SET_LOG_BASE: u32 = 6;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const SET_BACKEND_REQ_FD: u32 = 21;
const GET_CONFIG: u32 = 24;
const SET_CONFIG: u32 = 25;
const GET_INFLIGHT_FD: u32 = 31;
const SET_INFLIGHT_FD: u32 = 32;
const ADD_MEM_REG: u32 = 37;
const REM_MEM_REG: u32 = 38;
/// RESET_OWNER, GET_QUEUE_NUM, GET_MAX_MEM_SLOTS, GET_STATUS, RESET_DEVICE, POSTCOPY_*, CHECK_DEVICE_STATE among
/// others.
const PLAIN: [u32; 14] = [1, 3, 4, 15, 17, 28, 29, 30, 34, 36, 40, 41, 43, 44];
/// SET_FEATURES, SET_PROTOCOL_FEATURES, SET_LOG_FD, SEND_RARP, NET_SET_MTU, SET_STATUS and neighbours.
const NUMBERS: [u32; 8] = [2, 16, 7, 19, 20, 39, 42, 22];
/// SET_VRING_NUM, SET_VRING_BASE, GET_VRING_BASE, SET_VRING_ENABLE, SET_VRING_ENDIAN.
const STATES: [u32; 5] = [8, 10, 11, 18, 23];
/// SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR, VRING_KICK.
const EVENTS: [u32; 4] = [12, 13, 14, 35];
/// Features that a driver may choose among: merged buffers, indirect, event index, version 1, in order, packed,
/// multiqueue, log, status, protocol features.
const FEATURES: [u32; 10] = [15, 28, 29, 32, 35, 34, 22, 26, 16, 30];

fn features_of(choice: u16) -> u64 {
    (0..)
        .zip(FEATURES)
        .filter(|(bit, _)| choice & (1 << bit) != 0)
        .map(|(_, feature)| 1u64 << feature)
        .sum()
}

fn words<const N: usize>(words: [u32; N]) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_ne_bytes).collect()
}

fn longs<const N: usize>(longs: [u64; N]) -> Vec<u8> {
    longs.into_iter().flat_map(u64::to_ne_bytes).collect()
}

impl Region {
    fn bytes(&self) -> Vec<u8> {
        let at = u64::from(self.slot % 8) * BYTES;
        let (guest, len, user, offset) = self.wild.unwrap_or((
            GUEST + at,
            u64::from(self.pages % 65) * 4096,
            USER + at,
            u64::from(self.offset) * 1024,
        ));
        longs([guest, len, user, offset])
    }
}

impl Index {
    fn number(self) -> u32 {
        match self {
            Self::Known(index) => (index % 5).into(),
            Self::Any(index) => index,
        }
    }
}

impl Vmm<'_> {
    fn begin(&mut self, input: &Input) {
        if input.start == Start::Connected {
            return;
        }
        let plain = |vmm: &mut Self, request, payload: &[u8]| vmm.send(request, payload, &[], None);
        plain(self, SET_OWNER, &[]);
        plain(self, GET_FEATURES, &[]);
        plain(self, GET_PROTOCOL_FEATURES, &[]);
        // All that the daemon may offer: MQ, LOG_SHMFD, RARP, REPLY_ACK, MTU, BACKEND_REQ, CONFIG, INFLIGHT, RESET,
        // SLOTS, STATUS.
        let offered =
            1 | 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15 | 1 << 16;
        plain(self, SET_PROTOCOL_FEATURES, &longs([offered]));
        let features = features_of(input.features) | 1 << 32 | 1 << 30;
        plain(self, SET_FEATURES, &longs([features]));
        if input.start == Start::Running {
            let table = [words([1, 0]), longs([GUEST, BYTES, USER, 0])].concat();
            self.send(SET_MEM_TABLE, &table, &[File::Memory], None);
            for vring in 0..2 {
                self.send(SET_VRING_NUM, &words([vring, QUEUE]), &[], None);
                self.send(SET_VRING_ADDR, &addresses(vring, 0, &Place::Right), &[], None);
                self.send_event(SET_VRING_CALL, vring, Some(File::Event), None);
                self.send_event(SET_VRING_KICK, vring, Some(File::Event), None);
                self.send(SET_VRING_ENABLE, &words([vring, 1]), &[], None);
            }
        }
    }

    /// False when the connection is over.
    fn step(&mut self, step: &Step) -> bool {
        match step {
            Step::Message(message, lie) => return self.message(message, lie.as_ref()),
            Step::Bytes(bytes) => return rustix::net::send(&self.socket, bytes, SendFlags::NOSIGNAL).is_ok(),
            Step::Ring(ring) => self.write(ring),
            Step::Kick { vring } => self.signal(*vring, 1),
            Step::FillCall { vring } => self.signal(*vring, u64::MAX - 1),
            Step::Truncate => {
                let _ = rustix::fs::ftruncate(&self.world.unsealed, 0);
            }
            Step::Wait => std::thread::sleep(Duration::from_micros(50)),
        }
        true
    }

    fn signal(&self, vring: u8, by: u64) {
        let _ = rustix::io::write(&self.world.events[usize::from(vring) % 4], &by.to_ne_bytes());
    }

    fn write(&self, ring: &Ring) {
        let ring_of = |vring: u8| u64::from(vring % 4) * RING;
        let (offset, bytes) = match *ring {
            Ring::Descriptor {
                vring,
                at,
                ref addr,
                len,
                a,
                b,
            } => {
                let addr = match *addr {
                    Addr::In(offset) => GUEST + u64::from(offset),
                    Addr::Any(addr) => addr,
                };
                let bytes = [
                    &addr.to_le_bytes()[..],
                    &len.to_le_bytes(),
                    &a.to_le_bytes(),
                    &b.to_le_bytes(),
                ];
                (ring_of(vring) + u64::from(at % 64) * 16, bytes.concat())
            }
            Ring::Available { vring, at, head } => {
                let offset = ring_of(vring) + 0x1004 + u64::from(at % 64) * 2;
                (offset, (head % 70).to_le_bytes().to_vec())
            }
            Ring::Index { vring, value } => (ring_of(vring) + 0x1002, value.to_le_bytes().to_vec()),
            Ring::Word { offset, value } => (u64::from(offset), value.to_le_bytes().to_vec()),
        };
        let _ = rustix::io::pwrite(&self.world.memory, &bytes, offset);
    }

    fn message(&mut self, message: &Message, lie: Option<&Lie>) -> bool {
        let pick = |among: &[u32], choice: u8| among[usize::from(choice) % among.len()];
        match message {
            Message::Plain(choice) => self.send(pick(&PLAIN, *choice), &[], &[], lie),
            Message::Number { request, value } => {
                let value = match *value {
                    Number::Small(value) => value.into(),
                    Number::Bit(bit) => 1 << (bit % 64),
                    Number::Any(value) => value,
                };
                self.send(pick(&NUMBERS, *request), &longs([value]), &[], lie)
            }
            Message::Features(choice) => self.send(SET_FEATURES, &longs([features_of(*choice)]), &[], lie),
            Message::Protocol(bits) => self.send(SET_PROTOCOL_FEATURES, &longs([u64::from(*bits)]), &[], lie),
            Message::State {
                request,
                vring,
                value,
            } => {
                let payload = words([vring.number(), u32::from(*value)]);
                self.send(pick(&STATES, *request), &payload, &[], lie)
            }
            Message::Addresses { vring, flags, place } => {
                let payload = addresses(vring.number(), u32::from(*flags), place);
                self.send(SET_VRING_ADDR, &payload, &[], lie)
            }
            Message::Event { request, vring, file } => {
                self.send_event(pick(&EVENTS, *request), vring.number(), *file, lie)
            }
            Message::Table(regions) => {
                let regions = &regions[..regions.len().min(9)];
                let mut payload = words([regions.len() as u32, 0]);
                payload.extend(regions.iter().flat_map(Region::bytes));
                let files: Vec<_> = regions.iter().map(|region| region.file).collect();
                self.send(SET_MEM_TABLE, &payload, &files, lie)
            }
            Message::Slot { add, region } => {
                let payload = [longs([0]), region.bytes()].concat();
                let files = [region.file];
                let (request, files) = if *add {
                    (ADD_MEM_REG, &files[..])
                } else {
                    (REM_MEM_REG, &[][..])
                };
                self.send(request, &payload, files, lie)
            }
            Message::Config {
                set,
                offset,
                len,
                flags,
            } => {
                let request = if *set { SET_CONFIG } else { GET_CONFIG };
                let len = u32::from(*len % 300);
                let mut payload = words([u32::from(*offset), len, u32::from(*flags % 3)]);
                payload.resize(payload.len() + len as usize, 0x5a);
                self.send(request, &payload, &[], lie)
            }
            Message::Log { bytes, offset } => {
                let payload = longs([u64::from(*bytes), u64::from(*offset)]);
                self.send(SET_LOG_BASE, &payload, &[File::Memory], lie)
            }
            Message::Inflight {
                set,
                bytes,
                offset,
                queues,
                size,
            } => {
                let mut payload = longs([u64::from(*bytes), u64::from(*offset)]);
                payload.extend(queues.to_ne_bytes());
                payload.extend(size.to_ne_bytes());
                payload.extend([0; 4]);
                let (request, files) = if *set {
                    (SET_INFLIGHT_FD, &[File::Memory][..])
                } else {
                    (GET_INFLIGHT_FD, &[][..])
                };
                self.send(request, &payload, files, lie)
            }
            Message::Backend => self.send(SET_BACKEND_REQ_FD, &[], &[File::Socket], lie),
            Message::Other { request, payload } => {
                self.send(u32::from(*request), &payload[..payload.len().min(512)], &[], lie)
            }
        }
    }

    fn send_event(&mut self, request: u32, vring: u32, file: Option<File>, lie: Option<&Lie>) -> bool {
        // Bit 8: there is no descriptor.
        let value = u64::from(vring & 0xff) | if file.is_none() { 1 << 8 } else { 0 };
        self.send(request, &longs([value]), file.as_slice(), lie)
    }

    fn send(&mut self, request: u32, payload: &[u8], files: &[File], lie: Option<&Lie>) -> bool {
        let size = payload.len() as u32;
        let size = lie
            .and_then(|lie| lie.size)
            .map_or(size, |by| size.wrapping_add_signed(by.into()));
        // Version 1; the reply to each is wanted.
        let flags = lie.and_then(|lie| lie.flags).map_or(0b1001, u32::from);
        let files = lie.and_then(|lie| lie.files.as_deref()).unwrap_or(files);
        let vring = payload.first().copied().unwrap_or(0);
        let files: Vec<_> = files
            .iter()
            .take(12)
            .map(|file| self.world.file(*file, vring.into()))
            .collect();
        let message = [&words([request, flags, size])[..], payload].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(12))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            assert!(
                control.push(SendAncillaryMessage::ScmRights(&files)),
                "room for 12"
            );
        }
        let sent = rustix::net::sendmsg(
            &self.socket,
            &[IoSlice::new(&message)],
            &mut control,
            SendFlags::NOSIGNAL,
        );
        // Answers are thrown away, so that the daemon never waits for room.
        let mut answer = [0u8; 4096];
        while let Ok((1.., _)) = rustix::net::recv(&self.socket, &mut answer[..], RecvFlags::DONTWAIT) {}
        sent.is_ok()
    }
}

/// Payload of SET_VRING_ADDR.
fn addresses(vring: u32, flags: u32, place: &Place) -> Vec<u8> {
    let (desc, used, avail) = match *place {
        Place::Right => {
            let base = USER + u64::from(vring % 4) * RING;
            (base, base + 0x2000, base + 0x1000)
        }
        Place::At(desc, used, avail) => {
            let at = |offset: u16| USER + u64::from(offset) * 8;
            (at(desc), at(used), at(avail))
        }
        Place::Any(desc, used, avail) => (desc, used, avail),
    };
    [words([vring, flags]), longs([desc, used, avail, 0])].concat()
}
