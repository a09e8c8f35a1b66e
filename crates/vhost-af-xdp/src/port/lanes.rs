//! Builds lanes: from two vrings, guest memory and a NIC's queue.
//!
//! Everything that can fail or wait (memory, registration, bind) happens here, on the control
//! thread; the worker gets a lane that is ready to breathe.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use steward::client::LeaseError;
use xsk::{FramePool, OpenError, Umem, UmemError, UmemOffset, Unbound};

use crate::config::{Placement, Segments};
use crate::direct::registration::{self, Registered, Registration};
use crate::direct::{CHUNK_BYTES, DirectLane, DirectMemory, LONGEST_FRAME};
use crate::nic::binding::{Binding, L2_BYTES, SMALL_CHUNK};
use crate::nic::endpoint::{Chunks, ChunksError, NicQueue};
use crate::nic::interface::{Interface, InterfaceError, QueueRequest, RECEIVE_RING, SEND_RING};
use crate::nic::null::{NullConfig, NullNic};
use crate::nic::queue::{MOST_PIECES, Sends};
use crate::nic::xdp::XdpNic;
use crate::switch::guests::GuestLane;
use crate::switch::joined::CopyLane;
use crate::switch::lane::Lane;
use device::counters::PairCounters;
use device::net_device::{NetDevice, PairError, Path};
use device::pair::QueuePair;

/// Chunks of the bounce area for each queue pair: 768 KiB of the 1 MiB that direct placement may
/// keep resident per queue.
const BOUNCE_CHUNKS: usize = 192;
const BOUNCE_BYTES: u64 = BOUNCE_CHUNKS as u64 * CHUNK_BYTES as u64;
/// Entries of a null NIC's rings: nothing happens between two looks at it, so a few batches do, and
/// their frames stay in the cache.
const NULL_RING: usize = 256;
/// MTU of the null NIC and of a cable.
pub(crate) const NULL_MTU: u32 = 1500;

/// Why a lane cannot be built.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LaneError {
    #[error(transparent)]
    Pair(#[from] PairError),
    #[error(transparent)]
    Interface(#[from] InterfaceError),
    #[error(transparent)]
    Chunks(#[from] ChunksError),
    #[error(transparent)]
    Umem(#[from] UmemError),
    #[error("cannot duplicate a descriptor")]
    Duplicate(#[source] std::io::Error),
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    #[error("the queue's socket is in use")]
    Away,
}

impl LaneError {
    /// Whether this host is short of something, which may be mended while the VMM stays; nothing that the VMM or its
    /// guest did.
    pub(crate) fn is_of_host(&self) -> bool {
        match self {
            Self::Interface(InterfaceError::Open(error)) => !matches!(
                error,
                // Of memory that is the guest's, in direct placement.
                OpenError::MemoryHole { .. } | OpenError::MemoryKind { .. } | OpenError::Umem { .. }
            ),
            Self::Interface(_)
            | Self::Chunks(ChunksError::Memory(_))
            | Self::Duplicate(_)
            | Self::Thread(_)
            | Self::Away
            | Self::Pair(PairError::Duplicate(_)) => true,
            Self::Chunks(ChunksError::Umem(_)) | Self::Pair(_) | Self::Umem(_) => false,
        }
    }

    /// Whether it will be otherwise when the steward is back.
    pub(crate) fn is_away(&self) -> bool {
        matches!(
            self,
            Self::Interface(InterfaceError::Lease(LeaseError::Away { .. }))
        )
    }
}

/// One end of a cable between two ports, as a port has it.
#[derive(Debug, Clone)]
pub(crate) struct CableEnd {
    /// Its name.
    pub(crate) cable: Arc<str>,
    /// Which end: 0 or 1.
    pub(crate) end: usize,
}

/// A queue of the far side.
#[derive(Clone)]
pub(crate) enum FarSide {
    /// A queue of an interface.
    Queue {
        interface: Arc<Interface>,
        queue: u32,
        force_copy: bool,
    },
    /// An end of a cable to another port.
    Cable,
    /// A null NIC that makes frames of so many bytes.
    Null { frame_bytes: u32 },
}

impl FarSide {
    /// Length of the frames that a null NIC makes, bytes.
    fn frame_bytes(&self) -> u32 {
        match self {
            Self::Queue { .. } | Self::Cable => 0,
            Self::Null { frame_bytes } => *frame_bytes,
        }
    }

    /// Whether frames may come from a stack on the same machine, which leaves checksums unfinished.
    pub(crate) fn partial_checksums(&self) -> bool {
        match self {
            Self::Queue { interface, .. } => interface.link.partial_checksums,
            Self::Null { .. } | Self::Cable => false,
        }
    }

    /// Longest frame there is, bytes.
    pub(crate) fn frame_limit(&self) -> u32 {
        match self {
            Self::Queue { interface, .. } => interface.frame_limit(),
            Self::Cable | Self::Null { .. } => NULL_MTU + L2_BYTES,
        }
    }
}

/// What a pair says that copies until it is direct.
pub(crate) const NOT_YET: &str = "not direct yet: guest memory is being registered with the kernel";

/// What status shows of a lane, beside its counters.
pub(crate) struct LaneFacts {
    /// The data path really in use, in words.
    pub(crate) mode: String,
    /// Why not a better one.
    pub(crate) fallbacks: Vec<String>,
    /// Why it goes on by copying although it was to become direct.
    pub(crate) copies_on: OnceLock<String>,
    /// Frames may span several descriptors.
    pub(crate) multi_buffer: bool,
    /// Who completes checksums that the guest leaves to us; `None`: it leaves none.
    pub(crate) checksums: Option<Checksums>,
    /// Packet memory of this queue pair in our process, bytes.
    pub(crate) packet_bytes: u64,
    /// The kernel's bookkeeping for this queue's UMEM, bytes.
    pub(crate) kernel_bytes: u64,
    /// What backs the packet memory.
    pub(crate) backing: String,
    /// The socket once more, for its statistics; closed before the lane is stopped.
    pub(crate) socket: Option<OwnedFd>,
}

/// Who completes the checksums of frames from the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Checksums {
    /// We do, in the frame's own chunk.
    Daemon,
    /// The kernel, asked by TX metadata: it passes the wish on to the interface, or sums where that cannot (copy modes).
    Kernel,
    /// The NIC, asked by TX metadata.
    Nic,
}

impl fmt::Display for Checksums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Daemon => "daemon",
            Self::Kernel => "kernel (TX metadata)",
            Self::Nic => "NIC (TX metadata)",
        })
    }
}

/// Bytes of bounce area that a port of so many queue pairs appends to guest memory.
pub(crate) fn private_bytes(placement: Placement, pairs: u16) -> usize {
    match placement {
        Placement::Copy => 0,
        Placement::Direct => usize::from(pairs) * BOUNCE_CHUNKS * CHUNK_BYTES as usize,
    }
}

/// What a pair's lane is made of.
pub(crate) struct LaneParts<'a> {
    pub(crate) pair: u16,
    /// The port's: a lane may copy in a port that is direct otherwise, and a predecessor of it was.
    pub(crate) placement: Placement,
    /// How segments leave.
    pub(crate) segments: Segments,
    pub(crate) device: &'a NetDevice,
    pub(crate) far: FarSide,
    pub(crate) counters: Arc<PairCounters>,
}

impl LaneParts<'_> {
    /// Builds a lane.
    ///
    /// # Errors
    /// [`LaneError`]; nothing stays behind.
    pub(crate) fn build(self, placement: Placement) -> Result<(Box<dyn Lane>, LaneFacts), LaneError> {
        if let FarSide::Cable = &self.far {
            let lane = GuestLane::new(self.guest_side()?, self.counters);
            return Ok((Box::new(lane), LaneFacts::cable()));
        }
        match placement {
            Placement::Copy => self.build_copy(),
            Placement::Direct => {
                let registered = self.registration()?.run()?;
                self.build_direct(registered)
            }
        }
    }

    /// The guest's half alone.
    ///
    /// # Errors
    /// [`LaneError`].
    pub(crate) fn guest_side(&self) -> Result<QueuePair, LaneError> {
        let path = Path {
            frame_limit: self.far.frame_limit(),
            partial_checksums: self.far.partial_checksums(),
            in_place: self.placement == Placement::Direct,
        };
        Ok(self.device.queue_pair(self.pair, path)?)
    }

    /// Whether the guest leaves checksums to us.
    pub(crate) fn csum(&self) -> bool {
        self.device.negotiated().offloads.csum
    }

    fn build_copy(self) -> Result<(Box<dyn Lane>, LaneFacts), LaneError> {
        if let FarSide::Queue { interface, queue, .. } = &self.far
            && let Some(home) = interface.home(*queue)
        {
            return crate::nic::kept::build(&self, interface, home);
        }
        let guest = self.guest_side()?;
        let binding = match &self.far {
            FarSide::Queue {
                interface,
                force_copy,
                ..
            } => Some(interface.binding(self.placement, *force_copy, guest.frame_limit)),
            FarSide::Cable | FarSide::Null { .. } => None,
        };
        let mut chunks = Chunks::new(
            binding.map_or(SMALL_CHUNK, |binding| binding.chunk_bytes),
            SEND_RING,
        )?;
        let mut facts = LaneFacts::new(&chunks.umem, chunks.umem.len(), chunks.backing.clone());
        facts.checksums = self.csum().then_some(Checksums::Daemon);
        let lane: Box<dyn Lane> = match (&self.far, binding) {
            (FarSide::Queue { interface, queue, .. }, Some(binding)) => {
                facts.note(binding);
                let csum = self.csum();
                let request = QueueRequest {
                    queue: *queue,
                    force_copy: binding.force_copy,
                    header_bytes: 0,
                    multi_buffer: wants_pieces(interface, (self.segments, csum)),
                };
                let (umem, socket) = registration::prepare(interface, chunks.umem, (&request, csum))?;
                let (nic, sends) = facts.open(interface, (socket, guest.frame_limit), (&umem, &request))?;
                chunks.umem = umem;
                let refers = self.segments.refer(sends.zero_copy);
                let sends = Sends { refers, ..sends };
                let queue = NicQueue::new(nic, chunks, sends);
                Box::new(CopyLane::new(guest, queue, self.counters))
            }
            _ => {
                let config = NullConfig {
                    frame_bytes: self.far.frame_bytes(),
                    header_bytes: 0,
                };
                let nic = NullNic::new(chunks.umem.clone(), config, NULL_RING);
                let queue = NicQueue::new(nic, chunks, Sends::PLAIN);
                Box::new(CopyLane::new(guest, queue, self.counters))
            }
        };
        Ok((lane, facts))
    }

    /// What has to be registered for a direct lane.
    ///
    /// # Errors
    /// There is no memory.
    pub(crate) fn registration(&self) -> Result<Registration, LaneError> {
        let map = self.device.memory().ok_or(PairError::NoMemory)?;
        Ok(Registration {
            pair: self.pair,
            map: Arc::clone(map),
            far: self.far.clone(),
            negotiated: self.device.negotiated(),
        })
    }

    /// This pair's share of the bounce area, over guest RAM as UMEM.
    fn direct_memory(&self, umem: Umem) -> Result<DirectMemory, LaneError> {
        let map = self.device.memory().ok_or(PairError::NoMemory)?;
        let start = map.private_offset() + u64::from(self.pair) * BOUNCE_BYTES;
        let pool: FramePool = umem.frames(start..start + BOUNCE_BYTES)?.collect();
        let in_flight = self.device.longest_vring(self.pair).max(RECEIVE_RING) as usize;
        Ok(DirectMemory {
            umem,
            pool,
            in_flight,
            own_from: UmemOffset::new(start),
        })
    }

    /// Builds a direct lane on memory that is registered.
    ///
    /// # Errors
    /// [`LaneError`].
    pub(crate) fn build_direct(
        self,
        registered: Registered,
    ) -> Result<(Box<dyn Lane>, LaneFacts), LaneError> {
        let guest = self.guest_side()?;
        let memory = self.direct_memory(registered.umem.clone())?;
        let mut facts = LaneFacts::new(&registered.umem, BOUNCE_BYTES, "guest memory".to_owned());
        facts.checksums = self.csum().then_some(Checksums::Daemon);
        let lane: Box<dyn Lane> = match (&self.far, registered.queue) {
            (
                FarSide::Queue {
                    interface,
                    force_copy,
                    ..
                },
                Some((socket, request)),
            ) => {
                interface.check_direct(guest.frame_limit)?;
                facts.note(interface.binding(Placement::Direct, *force_copy, guest.frame_limit));
                let made = (socket, guest.frame_limit);
                let (nic, sends) = facts.open(interface, made, (&registered.umem, &request))?;
                let refers = self.segments.refer(sends.zero_copy);
                let sends = Sends { refers, ..sends };
                Box::new(DirectLane::new(guest, nic, memory, sends, self.counters))
            }
            _ => {
                let config = NullConfig {
                    frame_bytes: self.far.frame_bytes(),
                    header_bytes: self.device.negotiated().header_bytes,
                };
                let nic = NullNic::new(registered.umem, config, NULL_RING);
                let sends = Sends {
                    zero_copy: true,
                    ..Sends::PLAIN
                };
                Box::new(DirectLane::new(guest, nic, memory, sends, self.counters))
            }
        };
        Ok((lane, facts))
    }
}

impl LaneFacts {
    fn cable() -> Self {
        Self {
            mode: "cable".to_owned(),
            fallbacks: Vec::new(),
            copies_on: OnceLock::new(),
            multi_buffer: false,
            checksums: None,
            packet_bytes: 0,
            kernel_bytes: 0,
            backing: String::new(),
            socket: None,
        }
    }

    pub(crate) fn new(umem: &Umem, packet_bytes: u64, backing: String) -> Self {
        Self {
            mode: "null".to_owned(),
            fallbacks: Vec::new(),
            copies_on: OnceLock::new(),
            multi_buffer: false,
            checksums: None,
            packet_bytes,
            kernel_bytes: pool_bytes(umem),
            backing,
            socket: None,
        }
    }

    /// Why it is not in a better mode, as far as is known by now.
    pub(crate) fn fallbacks(&self) -> Vec<String> {
        let copies_on = self.copies_on.get();
        let said = self.fallbacks.iter();
        let still = said.filter(|said| copies_on.is_none() || *said != NOT_YET);
        still.chain(copies_on).cloned().collect()
    }

    /// Notes why zero-copy is not asked for, if it is not.
    pub(crate) fn note(&mut self, binding: Binding) {
        let note = binding.note.map(|note| format!("zero-copy not used: {note}"));
        self.fallbacks.extend(note);
    }

    /// Opens the queue for frames of so many bytes and notes what became of it, also what it does for frames that are sent.
    fn open(
        &mut self,
        interface: &Arc<Interface>,
        (socket, frame_limit): (Unbound, u32),
        (umem, request): (&Umem, &QueueRequest),
    ) -> Result<(XdpNic, Sends), LaneError> {
        let (socket, lease) = interface.open_queue(socket, request, frame_limit)?;
        let nic = XdpNic::new(socket, lease);
        let sends = self.describe(interface, &nic, umem)?;
        Ok((nic, sends))
    }

    /// Notes what became of a queue that is open.
    ///
    /// # Errors
    /// [`LaneError::Duplicate`].
    pub(crate) fn describe(
        &mut self,
        interface: &Interface,
        nic: &XdpNic,
        umem: &Umem,
    ) -> Result<Sends, LaneError> {
        let socket = nic.socket();
        self.mode = socket.mode().to_string();
        self.fallbacks.extend(
            interface
                .fallback()
                .map(|reason| format!("native not used: {reason}")),
        );
        self.fallbacks
            .extend(socket.fallbacks().iter().map(ToString::to_string));
        if interface.mode() == steer::Mode::Skb && interface.link.partial_checksums {
            // Native mode takes segmentation from the other end (veth_xdp_set, drivers/net/veth.c); generic XDP does not.
            self.fallbacks.push(
                "skb mode on a veth: super-frames of senders on its other end are dropped (too_long) until \
                 `ethtool -K PEER tso off gso off` there"
                    .to_owned(),
            );
        }
        self.multi_buffer = socket.multi_buffer();
        self.socket = Some(nic.duplicate().map_err(LaneError::Duplicate)?);
        let sends = sends(interface, nic, (self.multi_buffer, umem.tx_metadata_len() > 0));
        if self.checksums.is_some() && sends.checksum {
            self.checksums = Some(match sends.zero_copy {
                true => Checksums::Nic,
                false => Checksums::Kernel,
            });
        }
        Ok(sends)
    }
}

/// What a socket does for frames that are sent.
///
/// Checksums: what the driver says that it does in zero-copy mode. Where the kernel copies it makes a socket buffer of each frame,
/// and what metadata asks for is done like any sender's wish, whatever the device can (`xsk_build_skb`, net/xdp/xsk.c;
/// `validate_xmit_skb`, net/core/dev.c) - except that kernels before 6.18 forget it for devices that take buffers without a linear
/// part (virtio_net), and there is no asking for that. So beside drivers that know metadata only veth is trusted.
fn sends(interface: &Interface, nic: &XdpNic, (multi_buffer, metadata): (bool, bool)) -> Sends {
    let zero_copy = nic.is_zero_copy();
    let driver = interface.driver_sends();
    let most_pieces = if zero_copy {
        driver.most_pieces.clamp(1, MOST_PIECES)
    } else {
        MOST_PIECES
    };
    let is_veth = interface.link.partial_checksums;
    Sends {
        most_pieces: if multi_buffer { most_pieces } else { 1 },
        checksum: metadata && (driver.checksum || (is_veth && !zero_copy)),
        zero_copy,
        refers: false,
    }
}

/// Whether a queue of copy placement is to take frames in several pieces: for frames that are longer than a chunk, or,
/// where guests ask for segmentation (`cuts`), for segments that refer to their payload: by default only where the driver
/// takes several pieces in zero-copy mode.
pub(crate) fn wants_pieces(interface: &Interface, (segments, cuts): (Segments, bool)) -> bool {
    let refer = segments.refer(interface.driver_sends().most_pieces > 1);
    interface.frame_limit() > LONGEST_FRAME || (cuts && refer)
}

/// What a bind costs the kernel: `xp_create_and_assign_umem` (net/xdp/xsk_buff_pool.c) keeps a
/// `struct xdp_buff_xsk` and a pointer for every chunk; measured as 32 MiB per GiB of 4 KiB chunks
/// and 70 MiB per GiB of 2 KiB chunks on 6.18.
fn pool_bytes(umem: &Umem) -> u64 {
    umem.chunks() * 136
}
