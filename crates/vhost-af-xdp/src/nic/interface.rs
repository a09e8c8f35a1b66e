//! An interface with a steering program on it, and the queues of it that a port has.
//!
//! Order of the set-up: the program (it decides native or skb), then sockets and their queues
//! ([`super::interface_queue`]), then the queue's entry in the program's maps: from then on frames arrive. Undone in
//! reverse: entry, socket (with its place in the map), program with its last user.

use std::collections::BTreeMap;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use anyhow::bail;
use common::binding::{Binding, GuestBuffers, IntoGuest, L2_BYTES, LONGEST_FRAME, NoZeroCopy, QueueFacts};
use common::drivers;
use host::links::{DriverSends, Link};
use steer::{Mode, ModeRequest};
use steward_protocol::Wanted;
use xsk::{
    AttachMode, BindRequest, First, OpenError, PreferNode, QueueId, RingSize, Socket, SocketConfig, Umem,
};

use super::demand::Demand;
use super::error::InterfaceError;
use super::open_tap::OpenTap;
use super::queue_state::QueueState;
use super::shared_memory::{SharedMemory, Slice};
use super::steering::{Attached, Prepared, Steering};
use crate::config::{HintsConfig, Placement, QueueOptions};
use common::lock::Locked;
use dataplane::nic::hints::{SeenHints, XdpMetadata};
use dataplane::nic::{RECEIVE_RING, SEND_RING};

/// How long to wait for a busy queue. It stays busy for an RCU grace period after its last socket was closed: measured
/// 20 ms, and more than two seconds with six processes for each CPU.
pub(super) const BIND_TIMEOUT: Duration = Duration::from_secs(5);
/// The same for a queue that was busy the last time: it is retried again and again, and other ports wait meanwhile.
const BIND_AGAIN_TIMEOUT: Duration = Duration::from_millis(200);

impl QueueOptions {
    /// The options on an interface with a foreign program: they force zero-copy on a netkit that has only leased
    /// queues, because in copy mode it would take frames and lose them.
    pub(crate) fn on_given(self, link: &Link) -> anyhow::Result<Self> {
        let bind = match (link.has_leased_only, self.bind) {
            (false, bind) => bind,
            (true, BindRequest::ForceCopy) => bail!(
                "{} is a netkit without a peer, which cannot send in copy mode: leave force-copy out, and lease it a \
                 queue of a NIC with zero-copy",
                link.name
            ),
            (true, BindRequest::Auto | BindRequest::ForceZeroCopy) => BindRequest::ForceZeroCopy,
        };
        Ok(Self { bind, ..self })
    }
}

/// An interface in use.
pub(crate) struct Interface {
    // Dropped first: sockets go before the program does.
    queues: Vec<Mutex<QueueState>>,
    /// Number of the first of them.
    pub(super) first: u32,
    /// As it was when the program was attached; for the MTU see [`Self::mtu`]. Its NUMA node: if there are several.
    pub(crate) link: Link,
    /// Bytes, as last reported. Nothing is published through it.
    mtu: AtomicU32,
    /// See [`Self::name`].
    name: Mutex<String>,
    /// Queues that another socket had at the last bind.
    busy: Mutex<HashSet<u32>>,
    /// Where its program and sockets come from.
    pub(crate) steering: Steering,
    /// The queues are the uplink of a network.
    pub(super) is_of_network: bool,
    /// The queues get frames of certain VLANs only.
    pub(super) is_for_vlans: bool,
    demand: Demand,
    pub(crate) options: QueueOptions,
    /// Which hints frames of its queues had.
    pub(super) seen: Arc<SeenHints>,
    /// Requested metadata, and what lanes have got of it.
    pub(super) metadata_state: Mutex<MetadataState>,
    /// The memory that its queues have slices of, by option.
    memory: Option<Arc<SharedMemory>>,
    /// In tap mode; `None`: it is not open.
    pub(super) tap: Mutex<Option<OpenTap>>,
    /// The mode was not configured: the steward chose it.
    pub(crate) is_mode_chosen: bool,
    /// Why it is not in tap mode, although the steward would choose that.
    pub(crate) no_tap_because: Option<String>,
}

/// How to open a queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueueRequest {
    pub(crate) queue: u32,
    pub(crate) bind: BindRequest,
    pub(crate) multi_buffer: bool,
}

/// The requested hints of an interface's frames, and the metadata of its queues.
#[derive(Debug)]
pub(super) struct MetadataState {
    pub(super) asked: HintsConfig,
    /// By the number of each lent queue.
    pub(super) of: BTreeMap<u32, XdpMetadata>,
}

impl MetadataState {
    /// No queue is lent yet.
    pub(super) fn new(asked: HintsConfig) -> Self {
        let of = BTreeMap::new();
        Self { asked, of }
    }
}

impl Interface {
    /// An interface with the wanted queues, none of which is open.
    pub(super) fn new(attached: Attached, wanted: &Wanted, demand: Demand, options: QueueOptions) -> Self {
        let Attached { steering, link } = attached;
        Self {
            queues: wanted.range().map(|_| Mutex::default()).collect(),
            first: wanted.start_queue,
            mtu: AtomicU32::new(link.mtu),
            tap: Mutex::default(),
            is_mode_chosen: wanted.mode == ModeRequest::Auto,
            no_tap_because: None,
            name: Mutex::new(link.name.clone()),
            busy: Mutex::default(),
            link,
            steering,
            is_of_network: wanted.network,
            is_for_vlans: !wanted.filter.vlans.is_empty(),
            demand,
            options,
            seen: Arc::default(),
            metadata_state: Mutex::new(MetadataState::new(options.hints)),
            memory: None,
        }
    }

    /// Sets the memory that its queues may have slices of.
    pub(super) fn sharing(self, memory: Option<Arc<SharedMemory>>) -> Self {
        Self { memory, ..self }
    }

    /// Sets why it is not in tap mode (`no_tap_because`).
    pub(super) fn without_tap(self, why: String) -> Self {
        Self {
            no_tap_because: Some(why),
            ..self
        }
    }

    /// A queue's slice of the memory that all share; `None`: it has a UMEM of its own.
    pub(crate) fn slice(&self, queue: u32) -> Option<Slice> {
        let (memory, from) = (self.memory.as_ref()?, self.options.slices_from?);
        Some(memory.slice(from + queue.checked_sub(self.first)?))
    }

    /// Whether its queues have slices of a memory that others have, too.
    pub(super) fn shares(&self) -> bool {
        self.memory.is_some() && self.options.slices_from.is_some()
    }

    /// Closes its queues that no lane has.
    pub(crate) fn close_queues(&self) {
        for queue in &self.queues {
            queue.locked().close();
        }
    }

    /// Passes a queue's frames to the host, and leaves its socket bound; false if the steward cannot be reached.
    pub(super) fn pass_to_host(&self, queue: u32) -> bool {
        self.steering.ask(|lease| lease.deactivate(queue)).is_ok()
    }

    /// Locks the state of one of its queues.
    pub(super) fn state(&self, queue: u32) -> Result<MutexGuard<'_, QueueState>, InterfaceError> {
        self.check_queue(queue)?;
        let at = queue.checked_sub(self.first).map(|at| at as usize);
        let state = at.and_then(|at| self.queues.get(at));
        let state = state.ok_or_else(|| self.no_such_queue(queue))?;
        Ok(state.locked())
    }

    /// Whether a port that wants this has its queues here.
    pub(super) fn is_for(&self, wanted: &Wanted) -> bool {
        self.link.name == wanted.interface && self.first == wanted.start_queue
    }

    /// As long as the value exists, memory that the kernel gives this thread, or allocates for it, is on the NIC's NUMA
    /// node, if there is room.
    pub(super) fn near(&self) -> Option<PreferNode> {
        self.link.node.and_then(PreferNode::begin)
    }

    /// What the driver does for sockets in zero-copy mode.
    pub(crate) fn driver_sends(&self) -> DriverSends {
        self.steering.driver_sends(&self.link)
    }

    /// The interface as it is now.
    /// Errors: why it cannot be used any more.
    pub(crate) fn look(&self) -> anyhow::Result<Link> {
        self.steering.look(&self.link)
    }

    /// MTU as it is now, bytes.
    pub(crate) fn mtu(&self) -> u32 {
        self.mtu.load(Relaxed)
    }

    /// How many queues it has.
    pub(super) fn queue_count(&self) -> u32 {
        // A lease has few.
        u32::try_from(self.queues.len()).unwrap_or(u32::MAX)
    }

    /// Its name as it is now.
    pub(crate) fn name(&self) -> String {
        self.name.locked().clone()
    }

    /// Logs why frames for the guests may be lost, if they may.
    pub(crate) fn warn_of_losses(&self) {
        if let Some(why) = self.steering.loses() {
            tracing::warn!(interface = self.name(), "{why}");
        }
    }

    /// Stores a changed name or MTU; queues that are open keep their frame limit.
    pub(crate) fn take_note(&self, link: &Link) {
        self.mtu.store(link.mtu, Relaxed);
        self.name.locked().clone_from(&link.name);
    }

    /// Longest frame that the interface carries, bytes.
    pub(crate) fn frame_limit(&self) -> u32 {
        self.mtu().saturating_add(L2_BYTES)
    }

    /// Whether frames of `frame_limit` bytes fit into one chunk of guest memory.
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

    /// How its queues are bound for the longest frames that it carries, and what memory they get. `guest`: the receive
    /// buffers of the guest, if one is connected.
    /// Errors: zero-copy is forced, and cannot be.
    pub(crate) fn binding(&self, guest: Option<GuestBuffers>) -> Result<Binding, NoZeroCopy> {
        let direct = self.options.placement == Placement::Direct;
        let into_guest = direct.then(|| IntoGuest {
            steered_by: self.steering.steered_by(),
            is_own: self.steering.is_own(),
            translated: self.link.translated,
            guest,
        });
        let facts = QueueFacts {
            asked: self.options.bind,
            into_guest,
            native: self.steering.mode() == Mode::Native,
            driver: self.driver_sends(),
            line: drivers::line(&self.link.driver),
            shares: self.shares(),
            frame_limit: self.frame_limit(),
        };
        facts.binding()
    }

    /// Records whether a bind found the queue busy: then the next one waits [`BIND_AGAIN_TIMEOUT`] only.
    pub(super) fn note_busy(&self, queue: u32, busy: bool) {
        match busy {
            true => self.busy.locked().insert(queue),
            false => self.busy.locked().remove(&queue),
        };
    }

    /// The configuration of a queue's socket.
    fn socket_config(&self, request: &QueueRequest) -> Result<SocketConfig, InterfaceError> {
        self.check_queue(request.queue)?;
        let mut config = SocketConfig::new(self.link.index, QueueId(request.queue));
        config.attach = match self.steering.mode() {
            Mode::Native => AttachMode::Native,
            // In tap mode sockets only send.
            Mode::Skb | Mode::Tap => AttachMode::Skb,
        };
        config.bind = request.bind;
        config.rx = Some(RingSize::at_least(RECEIVE_RING));
        config.fill = RingSize::at_least(RECEIVE_RING);
        config.tx = Some(RingSize::at_least(SEND_RING));
        config.completion = RingSize::at_least(SEND_RING);
        config.multi_buffer = request.multi_buffer;
        config.max_tx_skb_budget = Some(SEND_RING);
        config.busy_poll = self.options.busy_poll;
        config.bind_timeout = match self.busy.locked().contains(&request.queue) {
            true => BIND_AGAIN_TIMEOUT,
            false => BIND_TIMEOUT,
        };
        Ok(config)
    }

    /// Opens a socket for a queue over the memory of another, and binds it.
    pub(super) fn share(&self, first: &First, request: &QueueRequest) -> Result<Socket, InterfaceError> {
        self.steering.share(first, &self.socket_config(request)?)
    }

    /// Opens a socket for a queue, and registers `umem` with it. The queue is not touched.
    pub(super) fn prepare(&self, umem: &Umem, request: &QueueRequest) -> Result<Prepared, InterfaceError> {
        let prepared = self.steering.prepare(umem, &self.socket_config(request)?);
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

    fn check_queue(&self, queue: u32) -> Result<(), InterfaceError> {
        match queue < self.link.rx_queues {
            true => Ok(()),
            false => Err(self.no_such_queue(queue)),
        }
    }

    fn no_such_queue(&self, queue: u32) -> InterfaceError {
        InterfaceError::NoSuchQueue {
            name: self.link.name.clone(),
            have: self.link.rx_queues,
            queue,
        }
    }
}
