//! Measures the cost of a worker's round with frames: for examples/round_cost.rs and path_cost.rs.
//!
//! One worker or two, like those of a daemon, with two ports of a network, or with one guest and the null NIC, and the
//! guests' drivers, all in the calling thread. The drivers run between the rounds, and only rounds are measured. So the
//! data of a round is in the caches of its own CPU: frames cost less than in a daemon, and other work is a larger share
//! of the round.

mod frames;

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use common::binding::TX_METADATA_BYTES;
use common::cycles;
use device::counters::PairCounters;
use device::offloads::Offloads;
use device::pair::QueuePair;
use packet::tunnel::{Endpoints, Outer};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use steer::HintSet;
use virtqueue::driver::{Buffer, QueueDriver};
use virtqueue::{Journal, QueueFeatures};
use xsk::{Umem, UmemOffset};

use self::frames::mac;
use super::{Command, Pace, Worker, WorkerHandle};
use crate::backend::arrivals::Origin;
use crate::direct::{CHUNK_BYTES, DirectMemory};
use crate::fdb::UnderlayOf;
use crate::fdb::remotes::{Remotes, Vtep, VtepNumber, Vteps};
use crate::fdb::vlans::Vlans;
use crate::fdb::{Fdb, FdbPort, PortNumber};
use crate::frame::bytes::GuestRam;
use crate::host::tap_lane::TapLane;
use crate::lane::limits::BATCH;
use crate::lane::new_lane::NewLane;
use crate::lane::role::Role;
use crate::lane::spread::{LanesChange, SharedLane};
use crate::lane::{Lane, LaneId};
use crate::nic::coupled::Coupled;
use crate::nic::endpoint::{Chunks, NicQueue, usual_place};
use crate::nic::hints::XdpMetadata;
use crate::nic::lent::Lent;
use crate::nic::null::{NullConfig, NullNic};
use crate::nic::queue::{MOST_PIECES, Sends};
use crate::nic::tap::{SendTap, Tap};
use crate::policy::filter::{Action, Filter, PortFilter, Rule};
use crate::policy::guard::{Addresses, Guard, SourceGuard};
use crate::policy::rate_limit::PortLimits;
use crate::port_lane::PortLane;
use crate::tests::test_guest::{HEADER, Memory};
use crate::tests::test_lanes::{copy_lane, direct_lane, send_direct_lane};
use crate::tests::test_xdp::XdpWire;
use crate::uplink::uplink_lane::UplinkLane;
use crate::worker::polling::Waits;
use model::rates::{Beyond, PortRates, Rate, Rates, Unit};

const NETWORK: &str = "between";
/// Receive buffers of a guest, and the most frames that it sends at a time.
const BUFFERS: usize = 256;
/// Chunks of a NIC's queue.
const CHUNKS: u32 = 512;
/// Bytes of a GSO packet in each descriptor.
const PAGE: u32 = 4096;
/// Offset of `num_buffers` in a virtio-net header.
const NUM_BUFFERS_AT: u64 = 10;
/// Longer than any pause here: the worker does not sleep.
const SPIN: Duration = Duration::from_secs(3600);

/// See the module's head.
pub struct Rounds {
    worker: (Worker, Pace),
    /// The worker of the second guest, if it is not the same.
    other: Option<(Worker, Pace)>,
    guests: Vec<Guest>,
    /// The kernel's half of the uplink or underlay that sends.
    wire: Option<XdpWire>,
    /// The kernel's side of the uplink's tap.
    kernel: Option<Kernel>,
    counters: Vec<Arc<PairCounters>>,
    _handles: Vec<WorkerHandle>,
}

/// A guest's drivers.
struct Guest {
    memory: Memory,
    from_guest: QueueDriver,
    to_guest: QueueDriver,
    /// The frame that it sends.
    frame: Vec<Buffer>,
    /// By the head that the driver knows them by.
    buffers: Vec<Buffer>,
    /// Frames that a NIC receives for it.
    arrivals: Option<Arrivals>,
    way: Way,
}

/// The kernel's side of a tap, which is a socket here that keeps frames apart.
struct Kernel {
    socket: OwnedFd,
    /// The frame that it sends, with its virtio-net header.
    frame: Vec<u8>,
    way: Way,
}

/// Frames that the null NIC receives. They are written into all chunks between the rounds, as lanes overwrite them.
struct Arrivals {
    umem: Umem,
    /// Frames, with the offsets of their first bytes.
    frames: Vec<(UmemOffset, Vec<u8>)>,
}

/// The direction of frames, and the queues and checks on their way.
#[derive(Debug, Clone, Copy, Default)]
pub struct Path {
    /// Sender and receiver of the frames.
    pub way: Way,
    /// Whether rings are packed.
    pub packed: bool,
    /// Bytes of a frame, without the virtio-net header: 60 to 1514, or those of a GSO packet.
    pub frame_bytes: u32,
    /// Frames that a guest sends or receives before it checks its queues again, at most [`BUFFERS`].
    pub at_once: usize,
    /// Which checks each frame passes.
    pub checks: Checks,
    /// The memory that the NIC reads and writes.
    pub placement: Placement,
    /// Kind of the frames.
    pub frames: Frames,
    /// Each of two guests has a worker of its own.
    pub two_workers: bool,
    /// Frames of a guest of a network leave in VXLAN, by the socket of an underlay.
    pub encapsulated: bool,
    /// The guest is of a network whose uplink is in tap mode.
    pub tap: bool,
    /// The guest is of a network with an uplink. Frames to it have the note of the XDP program.
    pub network: bool,
    /// The guests accepted the offloads of checksums, as Linux does.
    pub csum: bool,
}

impl Path {
    /// Rounds that move all frames: in each, a lane moves [`BATCH`] of them, or one GSO packet.
    #[must_use]
    pub fn rounds(&self) -> usize {
        self.at_once.div_ceil(BATCH)
    }

    /// Whether its guests are of a network.
    fn is_in_network(self) -> bool {
        self.way == Way::GuestToGuest || self.encapsulated || self.tap || self.network
    }
}

/// Kind of frames, and what comes with them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Frames {
    /// UDP datagrams.
    #[default]
    Plain,
    /// GSO packets of TCP, from guests that accepted `tso4` and `guest-tso4`.
    Gso,
    /// Segments of a TCP flow from the NIC, in order, to a guest that accepted `guest-tso4`.
    Gro,
    /// Datagrams from the NIC, with its hash, a timestamp and a mark before each.
    Hints,
    /// Datagrams as in `Hints`, with a VLAN tag that the NIC removed.
    Tag,
}

/// Which memory a NIC reads and writes: `config::Placement`, which is not public.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Placement {
    /// The daemon's memory.
    #[default]
    Copy,
    /// The NIC reads the guest's and writes the daemon's.
    SendDirect,
    /// The guest's memory, in both directions.
    Direct,
}

/// Checks of frames; every frame passes them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Checks {
    /// Nothing.
    #[default]
    None,
    /// This many filter rules on each side and in each direction, of which the last one allows the frames.
    Rules(u32),
    /// MAC and IP source guard for frames that a guest sends.
    Guard,
    /// Limits of bits and packets in each direction.
    Limits,
    /// Both guests are in a VLAN, and get its frames without tags.
    Vlan,
}

/// Sender and receiver of frames.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Way {
    /// From a guest to the null NIC or the tap.
    #[default]
    FromGuest,
    /// From the null NIC or the tap to a guest.
    ToGuest,
    /// Between two guests of a network, both ways.
    GuestToGuest,
}

impl Rounds {
    /// Prepares guests that send and receive frames on this path.
    ///
    /// # Panics
    /// If there is no memory or descriptor left.
    #[must_use]
    pub fn new(path: Path) -> Self {
        let waits = Waits {
            spin: SPIN,
            ..Waits::default()
        };
        let made = (0..1 + usize::from(path.two_workers)).map(|number| {
            let made = WorkerHandle::prepare(number, waits, &Arc::default());
            let (worker, handle) = made.expect("descriptors");
            ((worker, Pace::new(SPIN)), handle)
        });
        let (workers, handles): (Vec<_>, Vec<_>) = made.unzip();
        let mut workers = workers.into_iter();
        let count = if path.way == Way::GuestToGuest { 2 } else { 1 };
        let known = (0..count).map(|number| FdbPort {
            mac: mac(number),
            vlans: match path.checks {
                Checks::Vlan => Vlans::Access(100),
                _ => Vlans::Untagged,
            },
            source_guard: (path.checks == Checks::Guard).then(|| Arc::new(source_guard(number))),
            ..FdbPort::default()
        });
        let mut fdb = Fdb::new(known.map(Some).collect());
        if path.encapsulated {
            fdb = with_remote(fdb);
        }
        let fdb = Arc::new(fdb);
        for handle in &handles {
            handle.send(Command::Fdb(NETWORK.into(), Some(Arc::clone(&fdb))));
        }
        let filter = PortFilter::new(&filter(match path.checks {
            Checks::Rules(rules) => rules,
            _ => 0,
        }));
        let counters: Vec<_> = (0..count).map(|_| Arc::default()).collect();
        let guests = (0..count).zip(&counters).map(|(number, counters)| {
            let (guest, mut lane, role) = Guest::new(number, path, Arc::clone(counters));
            drop(lane.set_filter(filter.for_a_lane(0)));
            match path.checks {
                Checks::Guard => lane.set_guard(Some(&Guard {
                    mac: mac(number),
                    vlans: Vec::new(),
                    source_guard: Some(source_guard(number)),
                })),
                Checks::Limits => lane.set_limits(&limits()),
                Checks::None | Checks::Rules(_) | Checks::Vlan => {}
            }
            let worker = usize::from(number) % handles.len();
            let id = LaneId(1 + u64::from(number));
            let shared = SharedLane::of(&*lane, (id, &role), handles[worker].mail.clone());
            add(&handles[worker], id, lane, role);
            for (_, other) in handles.iter().enumerate().filter(|(at, _)| *at != worker) {
                let change = LanesChange::Add(shared.clone());
                other.send(Command::Spread(change, mpsc::channel().0));
            }
            guest
        });
        let mut guests: Vec<_> = guests.collect();
        let kernel = path.tap.then(|| Kernel::new(&handles[0], path));
        let wire = match path.way {
            _ if path.encapsulated => Some(add_sending(&handles[0], underlay(), None)),
            Way::FromGuest if path.network => Some(add_sending(&handles[0], uplink(), None)),
            Way::ToGuest if path.network => {
                guests[0].arrivals = Some(add_receiving(&handles[0], path));
                None
            }
            _ => None,
        };
        Self {
            worker: workers.next().expect("at least one"),
            other: workers.next(),
            guests,
            wire,
            kernel,
            counters,
            _handles: handles,
        }
    }

    /// The counters of its lanes.
    pub fn counters(&self) -> impl Iterator<Item = &PairCounters> {
        self.counters.iter().map(Arc::as_ref)
    }

    /// Each guest takes its received frames, and sends `frames`, at most [`BUFFERS`], if it sends any; returns how many
    /// were taken by guests, or by the NIC.
    pub fn play(&mut self, frames: usize) -> usize {
        if let Some(wire) = &mut self.wire {
            wire.send(|_, _| ());
        }
        if let Some(kernel) = &self.kernel {
            kernel.play(frames);
        }
        self.guests.iter_mut().map(|guest| guest.play(frames)).sum()
    }

    /// Runs a round of the worker; returns its cycles of the CPU's counter. `None`: there is no such counter. Of two
    /// workers the first has another round after the second, so that all frames arrive.
    #[inline(never)]
    pub fn round(&mut self) -> Option<u64> {
        let begun = cycles::counter();
        let run = |(worker, pace): &mut (Worker, Pace)| {
            if worker.read_mail() {
                worker.round(pace);
            }
        };
        run(&mut self.worker);
        if let Some(other) = &mut self.other {
            run(other);
            run(&mut self.worker);
        }
        Some(cycles::counter()?.saturating_sub(begun?))
    }
}

/// Adds a lane to a worker.
fn add(handle: &WorkerHandle, id: LaneId, lane: Box<dyn Lane>, role: Role) {
    let lane = NewLane {
        lane,
        role,
        node: None,
        on_fault: Box::new(|fault| panic!("{fault}")),
    };
    handle.send(Command::Add(id, lane, Arc::default()));
}

/// Adds the second guest's address as that of a station on another host.
fn with_remote(fdb: Fdb) -> Fdb {
    let remotes = Remotes::new(1);
    assert!(remotes.set(mac(1), VtepNumber(0)), "there is room");
    let ends = Endpoints {
        to: mac(9),
        from: mac(8),
        vlan: 0,
        local: [198, 18, 1, 1].into(),
        remote: [198, 18, 1, 2].into(),
        ttl: 64,
        is_geneve: false,
        port: 4789,
        vni: 100,
    };
    let outer = Outer::new(&ends).expect("one family");
    let confirm = AtomicBool::new(false);
    let vtep = Some(Arc::new(Vtep { outer, confirm }));
    fdb.with_remotes(Arc::new(remotes), Arc::new(Vteps(vec![vtep])))
}

/// The role of a queue of the network's uplink.
fn uplink() -> Role {
    Role::Uplink {
        network: NETWORK.into(),
        queue: 0,
    }
}

/// The role of a queue of the network's underlay.
fn underlay() -> Role {
    let underlay = UnderlayOf {
        network: NETWORK.into(),
        interface: 1,
    };
    Role::Underlay { underlay, queue: 0 }
}

/// Adds a queue of a network's uplink or underlay that sends to a worker.
fn add_sending(handle: &WorkerHandle, role: Role, tap: Option<Tap>) -> XdpWire {
    let (mut queue, wire) = XdpWire::queue(CHUNKS as usize, Sends::PLAIN);
    queue.send_tap = tap.map(|tap| SendTap {
        tap,
        segments_udp: true,
    });
    add_uplink(handle, role, queue);
    wire
}

/// Adds a queue of a network's uplink that receives to a worker; returns the frames.
fn add_receiving(handle: &WorkerHandle, path: Path) -> Arrivals {
    let queue = queue(path);
    let arrivals = Arrivals::new(&queue.umem, path);
    add_uplink(handle, uplink(), queue);
    arrivals
}

fn add_uplink<N: Lent + 'static>(handle: &WorkerHandle, role: Role, queue: NicQueue<N>) {
    let origin = Origin {
        frame_limit: 1518,
        partial_checksums: false,
    };
    let lane = UplinkLane::new(queue, origin, Arc::default());
    add(handle, LaneId(100), Box::new(lane), role);
}

impl Kernel {
    /// Adds to a worker the lane that the uplink in tap mode has for this direction: the queue whose tap sends GSO
    /// packets, or the tap that receives.
    fn new(handle: &WorkerHandle, path: Path) -> Self {
        let (family, flags) = (AddressFamily::UNIX, SocketFlags::NONBLOCK);
        let (socket, tap) = socketpair(family, SocketType::SEQPACKET, flags, None).expect("sockets");
        let tap = Tap::new(tap);
        if path.way == Way::FromGuest {
            add_sending(handle, uplink(), Some(tap));
        } else {
            let lane = TapLane::new(tap, true, Arc::default()).expect("memory");
            let network = NETWORK.into();
            add(handle, LaneId(100), Box::new(lane), Role::UplinkTap { network });
        }
        Self {
            socket,
            frame: frames::from_guest(path.frames, 1, path.frame_bytes),
            way: path.way,
        }
    }

    /// Takes the frames of guests, and sends `frames` if it sends any.
    fn play(&self, frames: usize) {
        let mut room = [0; 16];
        while rustix::io::read(&self.socket, &mut room).is_ok() {}
        let sent = if self.way == Way::ToGuest { frames } else { 0 };
        for _ in 0..sent {
            rustix::io::write(&self.socket, &self.frame).expect("room");
        }
    }
}

impl Guest {
    fn new(number: u8, path: Path, counters: Arc<PairCounters>) -> (Self, Box<dyn Lane>, Role) {
        let private = match path.placement {
            Placement::Copy => 0,
            Placement::SendDirect | Placement::Direct => CHUNKS * CHUNK_BYTES,
        };
        let memory = Memory::new(4 << 20, private as usize);
        let features = QueueFeatures {
            packed: path.packed,
            ..QueueFeatures::default()
        };
        let vring = || memory.vring(256, features, Journal::None);
        let ((from, from_guest), (to, mut to_guest)) = (vring(), vring());
        let pair = memory.side(from, to, offloads(path));
        let frame = frames::from_guest(path.frames, number, path.frame_bytes);
        let (at, len) = (memory.put(&frame), frame.len() as u32);
        let frame = (0..len).step_by(PAGE as usize).map(|skipped| {
            let at = at.checked_add(skipped.into()).expect("inside");
            Buffer::readable(at, PAGE.min(len - skipped))
        });
        let frame: Vec<_> = frame.collect();
        let mut buffers = vec![frame[0]; 256];
        for _ in 0..BUFFERS {
            let addr = memory.ram.alloc(2048, 2048).expect("memory");
            let buffer = Buffer::writable(addr, 2048);
            let head = to_guest.add(&[buffer]).expect("room");
            buffers[usize::from(head)] = buffer;
        }
        to_guest.publish();
        let (lane, arrivals) = lane((pair, counters), &memory, number, path);
        let guest = Self {
            memory,
            from_guest,
            to_guest,
            frame,
            buffers,
            arrivals,
            way: path.way,
        };
        (guest, lane, role(number, path))
    }

    fn play(&mut self, frames: usize) -> usize {
        let (mut taken, mut sent) = (0, 0);
        let mut rest = 0;
        while let Some(used) = self.to_guest.take_used() {
            // Heads are returned and reused one by one, so that the head stays the same.
            let buffer = self.buffers[usize::from(used.head)];
            if rest == 0 {
                taken += 1;
                let mut num_buffers = [0; 2];
                let at = buffer.addr.checked_add(NUM_BUFFERS_AT).expect("inside");
                self.memory.ram.read(at, &mut num_buffers);
                rest = u16::from_le_bytes(num_buffers);
            }
            rest -= 1;
            let head = self.to_guest.add(&[buffer]).expect("room");
            self.buffers[usize::from(head)] = buffer;
        }
        self.to_guest.publish();
        while self.from_guest.take_used().is_some() {
            sent += 1;
        }
        if let Some(Arrivals { umem, frames }) = &self.arrivals {
            for (at, bytes) in frames {
                umem.write(*at, bytes).expect("inside");
            }
        }
        if self.way == Way::ToGuest {
            return taken;
        }
        for _ in 0..frames.min(BUFFERS) {
            self.from_guest.add(&self.frame).expect("room");
        }
        self.from_guest.publish();
        if self.way == Way::FromGuest { sent } else { taken }
    }
}

impl Arrivals {
    fn new(umem: &Umem, path: Path) -> Self {
        let frames = (0..CHUNKS).map(|number| {
            // The NIC takes chunks from the last one on.
            let chunk = UmemOffset::new(u64::from((CHUNKS - 1 - number) * 2048));
            let (mut bytes, before) = frames::to_guest(path, number);
            // The rest of the chunk is zeros already.
            bytes.truncate(128);
            let at = usual_place(umem, chunk).get() - u64::from(before);
            (UmemOffset::new(at), bytes)
        });
        Self {
            umem: umem.clone(),
            frames: frames.collect(),
        }
    }
}

/// The offloads that the guests accepted.
fn offloads(path: Path) -> Offloads {
    let tcp = matches!(path.frames, Frames::Gso | Frames::Gro);
    Offloads {
        csum: path.csum,
        guest_csum: path.csum,
        tso4: tcp,
        guest_tso4: tcp,
        ..Offloads::NONE
    }
    .closed()
}

/// The role of a guest's lane.
fn role(number: u8, path: Path) -> Role {
    match path.is_in_network() {
        false => Role::Pair {
            port: "alone".into(),
            pair: 0,
        },
        true => Role::Member {
            network: NETWORK.into(),
            port: PortNumber(number.into()),
            pair: 0,
        },
    }
}

/// A guest's lane, and the frames that the NIC receives for it.
fn lane(
    (pair, counters): (QueuePair, Arc<PairCounters>),
    memory: &Memory,
    number: u8,
    path: Path,
) -> (Box<dyn Lane>, Option<Arrivals>) {
    if path.is_in_network() {
        let of = (PortNumber(number.into()), 0);
        return (Box::new(PortLane::new(pair, counters, of)), None);
    }
    if path.placement == Placement::Copy {
        let queue = queue(path);
        let arrivals = (path.way == Way::ToGuest).then(|| Arrivals::new(&queue.umem, path));
        return (Box::new(copy_lane(pair, queue, counters)), arrivals);
    }
    let (queue, memory) = coupled(memory, path);
    let lane: Box<dyn Lane> = match path.placement {
        Placement::Direct => Box::new(direct_lane(pair, queue, memory, counters)),
        _ => Box::new(send_direct_lane(pair, queue, memory, counters)),
    };
    (lane, None)
}

/// What the null NIC receives.
fn null_config(path: Path) -> NullConfig {
    NullConfig {
        frame_bytes: if path.way == Way::ToGuest {
            path.frame_bytes
        } else {
            0
        },
        header_bytes: if path.placement == Placement::Direct {
            HEADER
        } else {
            0
        },
        at_once: path.at_once,
    }
}

/// A queue of the null NIC, with chunks in the daemon's memory.
fn queue(path: Path) -> NicQueue<NullNic> {
    let chunks = Chunks::new(CHUNKS * 2048, 2048, CHUNKS / 2).expect("memory");
    let nic = NullNic::new(chunks.umem.clone(), null_config(path), CHUNKS as usize);
    let mut queue = NicQueue::new(nic, chunks, Sends::PLAIN);
    if path.network {
        queue.set_metadata(&XdpMetadata::of(HintSet::NONE, &[steer::note_layout()]));
    } else if matches!(path.frames, Frames::Hints | Frames::Tag) {
        queue.set_metadata(&XdpMetadata::of(HintSet::ALL, &[frames::layout()]));
    }
    queue
}

/// A queue of the null NIC with the guest's memory, followed by the daemon's. The NIC completes checksums.
fn coupled(memory: &Memory, path: Path) -> (Coupled<NullNic>, DirectMemory) {
    let (own, map) = (memory.map.guest_len(), Arc::clone(&memory.map));
    let umem = Umem::unaligned(Arc::new(GuestRam(map)), CHUNK_BYTES, 0)
        .and_then(|umem| umem.with_tx_metadata(TX_METADATA_BYTES))
        .expect("good");
    let nic = NullNic::new(umem.clone(), null_config(path), CHUNKS as usize);
    let to_receive = match path.placement {
        Placement::Direct => 0,
        _ => CHUNKS as usize / 2,
    };
    let end = own + u64::from(CHUNKS * CHUNK_BYTES);
    let memory = DirectMemory::new(umem, own..end, to_receive, CHUNKS as usize).expect("inside");
    let sends = Sends {
        most_pieces: MOST_PIECES,
        checksum: true,
        zero_copy: true,
        by_dma: false,
        refers: true,
    };
    (Coupled::new(nic, sends), memory)
}

/// The addresses from which a guest may send.
fn source_guard(number: u8) -> SourceGuard {
    let own = format!("198.18.0.{}", 1 + number).parse().expect("an address");
    SourceGuard {
        addresses: Addresses::new(&[own]),
        ..SourceGuard::default()
    }
}

/// Limits that no guest reaches.
fn limits() -> PortLimits {
    let most = |unit| Some(Rate::new(1 << 40, unit, Beyond::IsDropped));
    let rates = Rates {
        bits: most(Unit::Bits),
        packets: most(Unit::Packets),
    };
    PortLimits::new(PortRates {
        from_guest: rates,
        to_guest: rates,
    })
}

fn filter(rules: u32) -> Filter {
    let of = |direction: &str| {
        let others = (1..rules).map(move |port| format!("action=deny protocol=tcp destination-ports={port}"));
        let last = (rules > 0).then(|| "action=allow protocol=udp destination-ports=9".to_owned());
        let rules = others
            .chain(last)
            .map(|words| format!("direction={direction} {words}"));
        rules
            .map(|words| words.parse::<Rule>().expect("a rule"))
            .collect::<Vec<_>>()
    };
    let default = (rules == 0).then_some(Action::Allow);
    Filter {
        rule: [of("from-guest"), of("to-guest")].concat(),
        from_guest_default: default,
        to_guest_default: default,
    }
}
