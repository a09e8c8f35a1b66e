//! An interface with our steering program on it, and sockets on its queues.
//!
//! Order of things: program first (it decides native or skb), then socket and bind, then the
//! queue's entry in the program's maps, which is when frames begin to come to us. Undone in
//! reverse by dropping: socket (with its place in the map), entry ([`QueueGuard`]), program with its
//! last user.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use steer::{Mode, QueueConf, QueueCounters, VirtioHeader};
use steward::client::{LeaseError, Waiting};
use steward::links::{DriverSends, Link, LinkError};
use steward::protocol::{Reason, Refusal, Steered, Wanted};
use xsk::{
    AttachMode, BindRequest, OpenError, OwnMemory, Probe, QueueId, RingSize, Socket, SocketConfig, Umem,
    Unbound,
};

use super::demand::Demand;
use super::external::{Brought, ExternalError};
use super::steering::Steering;
use crate::config::Placement;
use crate::direct::LONGEST_FRAME;
use crate::nic::binding::{self, Binding, L2_BYTES, Wish};
use crate::nic::endpoint::COPY_BYTES;
use crate::nic::kept::Home;
use crate::nic::xdp::QueueLease;

/// Entries of RX and fill ring; a steward's sockets come with the former.
pub(crate) const RECEIVE_RING: u32 = steward::protocol::RECEIVE_RING;
/// Entries of TX and completion ring.
pub(crate) const SEND_RING: u32 = 1024;
/// A queue stays busy after its last owner went until all CPUs have seen it: 20 ms here, more than two seconds with six processes a CPU.
const BIND_TIMEOUT: Duration = Duration::from_secs(5);
/// The same for a queue that was not free the last time: that is tried again and again, and other ports wait meanwhile.
const BIND_AGAIN_TIMEOUT: Duration = Duration::from_millis(200);
/// Memory of a socket that only asks whether a queue is free: one chunk.
const PROBE_BYTES: u32 = 4096;
/// How long the program of a daemon that was killed may stay: its keeper takes it off, some 30 ms later.
const PREDECESSOR: Duration = Duration::from_millis(1000);

/// Why an interface or one of its queues cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InterfaceError {
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// What the daemon's own steward says.
    #[error("{0}")]
    Refused(Refusal),
    #[error(transparent)]
    External(#[from] ExternalError),
    /// The limit of locked memory.
    #[error(
        "this daemon locks {all_bytes} bytes of memory in all, and RLIMIT_MEMLOCK is {limit_bytes}, for all processes of the user \
         together: raise it (`ulimit -l {}`, systemd: LimitMEMLOCK={target_bytes}), or use fewer queues",
        target_bytes.div_ceil(1024)
    )]
    MemoryLock {
        all_bytes: u64,
        limit_bytes: u64,
        target_bytes: u64,
    },
    /// More queues asked for than there are.
    #[error(
        "{name} has {have} receive queue(s), queue {queue} was asked for: use a lower start-queue or fewer queues, or add channels with `ethtool -L`"
    )]
    NoSuchQueue { name: String, have: u32, queue: u32 },
    /// A frame would not fit into a chunk of guest memory.
    #[error("{name} has MTU {mtu}, memory=direct carries frames of {limit} bytes: lower the MTU to {most} or use memory=copy", most = limit - L2_BYTES)]
    MtuTooLargeForDirect { name: String, mtu: u32, limit: u32 },
}

/// An interface in use.
pub(crate) struct Interface {
    /// As it was when the program was attached; for the MTU see [`Self::mtu`].
    pub(crate) link: Link,
    mtu: AtomicU32,
    /// See [`Self::name`].
    name: Mutex<String>,
    /// Queues that were somebody else's when they were to be bound last.
    busy: Mutex<HashSet<u32>>,
    steering: Steering,
    demand: Demand,
}

/// How a queue is to be opened.
pub(crate) struct QueueRequest {
    pub(crate) queue: u32,
    pub(crate) force_copy: bool,
    /// The program writes this many bytes of virtio-net header; 0: none.
    pub(crate) header_bytes: u32,
    pub(crate) multi_buffer: bool,
}

/// Ends a queue's entry in the program.
struct QueueGuard {
    interface: Arc<Interface>,
    queue: u32,
}

impl Drop for QueueGuard {
    fn drop(&mut self) {
        self.interface.steering.disable(self.queue);
    }
}

impl Interface {
    fn new(link: Link, steering: Steering, demand: Demand) -> Self {
        Self {
            mtu: AtomicU32::new(link.mtu),
            name: Mutex::new(link.name.clone()),
            busy: Mutex::default(),
            link,
            steering,
            demand,
        }
    }

    /// How the steering program is attached.
    pub(crate) fn mode(&self) -> Mode {
        self.steering.mode()
    }

    /// Why it is not attached natively, if that was tried.
    pub(crate) fn fallback(&self) -> Option<&str> {
        self.steering.fallback()
    }

    /// Whether no queue can be opened at the moment because the steward is away; those that are go on.
    pub(crate) fn is_away(&self) -> bool {
        self.steering.is_away()
    }

    /// Asks what the program did with a queue's frames, until `deadline` at most.
    pub(crate) fn sample(&self, queue: u32, deadline: Instant) {
        self.steering.sample(queue, deadline);
    }

    /// What the program had done with a queue's frames when it was asked last.
    pub(crate) fn counters(&self, queue: u32) -> Option<QueueCounters> {
        self.steering.counters(queue)
    }

    /// How frames come to the queues, and why not in a better way.
    pub(crate) fn steered(&self) -> (Steered, String) {
        self.steering.steered()
    }

    /// What the driver does for sockets in zero-copy mode.
    pub(crate) fn driver_sends(&self) -> DriverSends {
        self.steering.driver_sends(&self.link)
    }

    /// The interface as it is now, or why it cannot be used any more.
    pub(crate) fn look(&self) -> Result<Link, String> {
        self.steering.look(&self.link)
    }

    /// Readable when there is something to [`look`](Self::look) at that rtnetlink does not tell.
    pub(crate) fn watch(&self) -> Option<BorrowedFd<'_>> {
        self.steering.watch()
    }

    /// MTU as it is now, bytes.
    pub(crate) fn mtu(&self) -> u32 {
        self.mtu.load(Relaxed)
    }

    /// Its name as it is now.
    pub(crate) fn name(&self) -> String {
        self.name.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes note of a changed name or MTU; queues that are open keep their frame limit.
    pub(crate) fn take_note(&self, link: &Link) {
        self.mtu.store(link.mtu, Relaxed);
        self.name
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone_from(&link.name);
    }

    /// Longest frame that the interface carries, bytes.
    pub(crate) fn frame_limit(&self) -> u32 {
        self.mtu().saturating_add(L2_BYTES)
    }

    /// Whether frames of so many bytes fit into one chunk of guest memory.
    ///
    /// # Errors
    /// [`InterfaceError::MtuTooLargeForDirect`].
    pub(crate) fn check_direct(&self, frame_limit: u32) -> Result<(), InterfaceError> {
        if frame_limit <= LONGEST_FRAME {
            return Ok(());
        }
        Err(InterfaceError::MtuTooLargeForDirect {
            name: self.link.name.clone(),
            mtu: frame_limit - L2_BYTES,
            limit: LONGEST_FRAME,
        })
    }

    /// How a queue of a port of that placement is bound for frames of so many bytes, and what memory it gets.
    pub(crate) fn binding(&self, placement: Placement, force_copy: bool, frame_limit: u32) -> Binding {
        let wish = Wish {
            force_copy,
            direct: placement == Placement::Direct,
            native: self.mode() == Mode::Native,
            driver: binding::driver(&self.link, self.driver_sends()),
            frame_limit,
        };
        wish.binding()
    }

    /// Binds a socket to its queue and directs the queue's frames of up to `frame_limit` bytes to it.
    ///
    /// # Errors
    /// [`InterfaceError`], naming interface, queue and remedy.
    pub(crate) fn open_queue(
        self: &Arc<Self>,
        socket: Unbound,
        request: &QueueRequest,
        frame_limit: u32,
    ) -> Result<(Socket, QueueLease), InterfaceError> {
        let socket = self.bind_queue(socket, request, frame_limit)?;
        let guard = QueueGuard {
            interface: Arc::clone(self),
            queue: request.queue,
        };
        Ok((socket, QueueLease::new(guard)))
    }

    /// As [`Self::open_queue`], for a socket that is kept as long as the interface.
    ///
    /// # Errors
    /// As [`Self::open_queue`].
    pub(crate) fn bind_queue(
        &self,
        socket: Unbound,
        request: &QueueRequest,
        frame_limit: u32,
    ) -> Result<Socket, InterfaceError> {
        let bound = socket.bind();
        match &bound {
            Err(OpenError::Busy { .. }) => self.busy().insert(request.queue),
            _ => self.busy().remove(&request.queue),
        };
        let socket = bound?;
        let virtio_header = match request.header_bytes {
            0 => None,
            _ => Some(VirtioHeader::Basic),
        };
        let conf = QueueConf {
            virtio_header,
            frame_limit,
        };
        self.steering.enable(request.queue, socket.as_fd(), conf)?;
        Ok(socket)
    }

    fn busy(&self) -> MutexGuard<'_, HashSet<u32>> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the sockets of these queues stay here when guests go.
    fn is_home_of(&self, wanted: &Wanted) -> bool {
        self.link.name == wanted.interface && wanted.range().all(|queue| self.home(queue).is_some())
    }

    /// Where a queue's socket is while no guest has it, if it stays when guests go.
    pub(crate) fn home(&self, queue: u32) -> Option<&Home> {
        self.steering.home(queue)
    }

    /// Opens a socket on a queue that no frame reaches.
    ///
    /// # Errors
    /// As [`Self::open_queue`].
    pub(crate) fn try_queue(
        &self,
        umem: &Umem,
        queue: u32,
        force_copy: bool,
    ) -> Result<Socket, InterfaceError> {
        let request = QueueRequest {
            queue,
            force_copy,
            header_bytes: 0,
            multi_buffer: false,
        };
        Ok(self.prepare(umem, &request)?.bind()?)
    }

    /// Opens a socket for a queue, and registers `umem` with it. The queue is not touched.
    ///
    /// # Errors
    /// [`InterfaceError`].
    pub(crate) fn prepare(&self, umem: &Umem, request: &QueueRequest) -> Result<Unbound, InterfaceError> {
        self.check_queue(request.queue)?;
        let mut config = SocketConfig::new(self.link.index, QueueId(request.queue));
        config.attach = match self.mode() {
            Mode::Native => AttachMode::Native,
            Mode::Skb => AttachMode::Skb,
        };
        config.bind = if request.force_copy {
            BindRequest::ForceCopy
        } else {
            BindRequest::Auto
        };
        config.rx = Some(RingSize::at_least(RECEIVE_RING));
        config.fill = RingSize::at_least(RECEIVE_RING);
        config.tx = Some(RingSize::at_least(SEND_RING));
        config.completion = RingSize::at_least(SEND_RING);
        config.multi_buffer = request.multi_buffer;
        config.max_tx_skb_budget = Some(SEND_RING);
        config.bind_timeout = match self.busy().contains(&request.queue) {
            true => BIND_AGAIN_TIMEOUT,
            false => BIND_TIMEOUT,
        };
        let prepared = self.steering.prepare((umem, self.demand), &config, &self.link);
        prepared.map_err(|error| match error {
            InterfaceError::Open(OpenError::MemoryLock {
                needed_bytes,
                limit_bytes: Some(limit),
            }) => InterfaceError::MemoryLock {
                all_bytes: self.demand.in_all(needed_bytes),
                limit_bytes: limit,
                target_bytes: self.demand.target(needed_bytes, limit),
            },
            error => error,
        })
    }

    /// What tells when a queue is free, where the driver allows.
    pub(crate) fn probe(&self, request: &QueueRequest) -> Option<Probe> {
        if self.driver_sends().most_pieces > 1 {
            return None;
        }
        let memory = OwnMemory::new(PROBE_BYTES as usize).ok()?;
        let umem = Umem::aligned(Arc::new(memory), PROBE_BYTES, 0).ok()?;
        self.prepare(&umem, request).ok().map(Probe::new)
    }

    /// Whether the interface has that queue.
    ///
    /// # Errors
    /// [`InterfaceError::NoSuchQueue`].
    pub(crate) fn check_queue(&self, queue: u32) -> Result<(), InterfaceError> {
        let have = self.link.rx_queues;
        if queue < have {
            return Ok(());
        }
        Err(InterfaceError::NoSuchQueue {
            name: self.link.name.clone(),
            have,
            queue,
        })
    }
}

/// A steward to lease from.
#[derive(Clone, Default)]
pub(crate) struct StewardAt {
    /// Where it listens.
    pub(crate) path: PathBuf,
    /// It is this daemon's own.
    pub(crate) private: bool,
    /// How long its answers are waited for.
    pub(crate) waiting: Waiting,
}

/// Where interfaces come from.
pub(crate) struct Interfaces {
    /// The daemon's start.
    began: Instant,
    steward: StewardAt,
    /// What somebody else made for ports.
    brought: Brought,
    /// Bytes that all ports lock while they copy.
    copy_bytes: u64,
    /// Those of them that are open and not taken yet.
    ready: Mutex<Vec<Arc<Interface>>>,
}

impl Default for Interfaces {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            steward: StewardAt::default(),
            brought: Brought::default(),
            copy_bytes: 0,
            ready: Mutex::default(),
        }
    }
}

impl Interfaces {
    /// For so many queue pairs in all. Brought by somebody else, as far as that was.
    pub(crate) fn new(brought: Brought, pairs: u64) -> Self {
        Self {
            brought,
            copy_bytes: pairs * u64::from(COPY_BYTES),
            ..Self::default()
        }
    }

    /// All others are leased from that steward.
    pub(crate) fn leased_from(self, steward: StewardAt) -> Self {
        Self { steward, ..self }
    }

    /// The interface for a port's queues: one with a program of somebody else's, or a lease of its own.
    ///
    /// # Errors
    /// [`InterfaceError`].
    pub(crate) fn open(&self, wanted: &Wanted) -> Result<Arc<Interface>, InterfaceError> {
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        let ours = |interface: &Arc<Interface>| interface.is_home_of(wanted);
        if let Some(at) = ready.iter().position(ours) {
            return Ok(ready.swap_remove(at));
        }
        drop(ready);
        if let Some(interface) = self.open_brought(wanted)? {
            return Ok(interface);
        }
        loop {
            match Steering::lease(&self.steward, wanted) {
                // The keeper of a daemon that was killed just now may not be done yet.
                Err(InterfaceError::Refused(refusal))
                    if refusal.reason == Reason::Program && self.began.elapsed() < PREDECESSOR =>
                {
                    std::thread::sleep(PREDECESSOR / 50);
                }
                leased => {
                    let (steering, link) = leased?;
                    return Ok(Arc::new(Interface::new(link, steering, self.demand(wanted))));
                }
            }
        }
    }

    /// The interface, if it has a program of somebody else's.
    ///
    /// # Errors
    /// [`InterfaceError`].
    pub(crate) fn open_brought(&self, wanted: &Wanted) -> Result<Option<Arc<Interface>>, InterfaceError> {
        let brought = self
            .brought
            .open(&wanted.interface, wanted.mode, &wanted.range())?;
        Ok(brought.map(|(external, link)| {
            let steering = Steering::External(external);
            Arc::new(Interface::new(link, steering, self.demand(wanted)))
        }))
    }

    fn demand(&self, wanted: &Wanted) -> Demand {
        Demand {
            copy_bytes: self.copy_bytes,
            pairs: wanted.queues,
        }
    }

    /// Keeps one that was opened ahead for the port that will ask for it.
    pub(crate) fn keep(&self, interface: Arc<Interface>) {
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        ready.push(interface);
    }
}
