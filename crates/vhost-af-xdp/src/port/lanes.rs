//! Builds lanes, each from two vrings, guest memory and an attachment.
//!
//! Everything that can fail or wait (memory, registration, bind) happens here, on the control thread; the worker gets a
//! lane that is ready to be polled.

use std::sync::Arc;

use common::binding::{BufferOrder, GuestBuffers, SMALL_CHUNK};
use virtqueue::MemoryMap;
use xsk::{OpenError, Umem, UmemError};

use super::attachment::{Attachment, Member};
use crate::config::Placement;
use crate::nic::error::InterfaceError;
use crate::nic::interface_queue::InterfaceQueue;
use crate::nic::lane_facts::LaneFacts;
use crate::nic::mode::Fallback;
use crate::port::registration::{Registered, Registration};
use dataplane::backend::own_queue::CopyQueue;
use dataplane::direct::{CHUNK_BYTES, DirectMemory, DirectQueue};
use dataplane::host::from_tap::FromTap;
use dataplane::lane::Lane;
use dataplane::nic::coupled::Coupled;
use dataplane::nic::endpoint::{COPY_BYTES, Chunks, ChunksError, NicQueue};
use dataplane::nic::null::{NullConfig, NullNic};
use dataplane::nic::queue::{Nic, Sends};
use dataplane::nic::xdp::XdpNic;
use dataplane::nic::{RECEIVE_RING, SEND_RING};
use dataplane::port_lane::PortLane;
use device::counters::PairCounters;
use device::net_device::{NetDevice, PairError, Path};
use device::pair::QueuePair;

/// Chunks of the bounce area for each queue pair: 768 KiB of the 1 MiB that direct placement may
/// keep resident per queue.
const BOUNCE_CHUNKS: usize = 192;
/// Chunks that a NIC receives into if it does not receive into guest memory: as many as for a queue in copy placement,
/// 3.6 MiB.
const RECEIVE_CHUNKS: usize = {
    let all = (COPY_BYTES / CHUNK_BYTES) as usize;
    all - all * 2 / 5
};
/// Entries of a null NIC's rings: a few batches are enough, because the null NIC does nothing between two polls, and
/// so few frames stay in the cache.
const NULL_RING: usize = 256;

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
}

impl LaneError {
    /// Whether the cause is this host, for example a shortage, and not the VMM or its guest: then a retry may succeed
    /// while the VMM stays connected.
    pub(crate) fn is_of_host(&self) -> bool {
        match self {
            Self::Pair(error) => matches!(error, PairError::Duplicate(_)),
            Self::Chunks(error) => matches!(error, ChunksError::Memory(_)),
            // These three are errors of guest memory, in direct placement.
            Self::Interface(InterfaceError::Open(error)) => !matches!(
                error,
                OpenError::MemoryHole { .. } | OpenError::MemoryKind { .. } | OpenError::Umem { .. }
            ),
            Self::Interface(InterfaceError::Umem(_)) | Self::Umem(_) => false,
            Self::Interface(_) | Self::Duplicate(_) | Self::Thread(_) => true,
        }
    }
}

/// Bytes of the daemon's memory that a port of `pairs` queue pairs appends to guest memory.
pub(crate) fn private_bytes(placement: Placement, pairs: u16) -> usize {
    usize::from(pairs) * own_chunks(placement) * CHUNK_BYTES as usize
}

/// Chunks of the daemon's memory behind guest memory, for each queue pair.
fn own_chunks(placement: Placement) -> usize {
    BOUNCE_CHUNKS * usize::from(placement.has_guest_ram()) + receive_chunks(placement)
}

/// How many of them the NIC receives into.
fn receive_chunks(placement: Placement) -> usize {
    match placement {
        Placement::SendDirect => RECEIVE_CHUNKS,
        Placement::Copy | Placement::Direct => 0,
    }
}

/// A lane, and the facts about it.
pub(crate) struct BuiltLane {
    pub(crate) lane: Box<dyn Lane>,
    pub(crate) facts: LaneFacts,
    pub(crate) lent: Option<LentQueue>,
}

impl BuiltLane {
    /// A lane that uses no NIC queue.
    fn new(lane: Box<dyn Lane>, facts: LaneFacts) -> Self {
        let lent = None;
        Self { lane, facts, lent }
    }
}

/// A queue that is lent to a lane.
pub(crate) struct LentQueue {
    queue: InterfaceQueue,
    counters: Arc<PairCounters>,
}

impl LentQueue {
    /// Returns the queue after its lane was stopped.
    pub(crate) fn give_back(self, nic: NicQueue<XdpNic>) {
        self.queue.give_back(nic, &self.counters);
    }
}

/// See [`LaneParts::copying_side`].
pub(crate) struct CopyingSide {
    pair: QueuePair,
    /// In tap mode, where frames to the pair's guest are read.
    from_tap: Option<FromTap>,
}

/// The parts that a pair's lane is built from.
pub(crate) struct LaneParts<'a> {
    pub(crate) pair: u16,
    /// The port's placement. If it is direct, a lane may copy nevertheless, also one that replaces a direct lane.
    pub(crate) placement: Placement,
    pub(crate) device: &'a NetDevice,
    pub(crate) attachment: Attachment,
    pub(crate) counters: Arc<PairCounters>,
}

impl LaneParts<'_> {
    /// Builds a lane.
    /// Errors: [`LaneError`]; nothing stays behind.
    pub(crate) fn build(self, placement: Placement) -> Result<BuiltLane, LaneError> {
        match (&self.attachment, placement) {
            (Attachment::Patch(_), _) => {
                let lane = PortLane::of_cable(self.guest_side()?, self.counters);
                Ok(BuiltLane::new(Box::new(lane), LaneFacts::cable()))
            }
            (Attachment::Network(end), _) => {
                let of = (end.number, self.pair);
                let lane = PortLane::new(self.guest_side()?, self.counters, of);
                Ok(BuiltLane::new(Box::new(lane), LaneFacts::network()))
            }
            (_, Placement::SendDirect | Placement::Direct) => {
                let registered = self.registration()?.run()?;
                self.build_direct(registered)
            }
            (Attachment::Queue(queue) | Attachment::Member(Member { queue, .. }), Placement::Copy) => {
                let queue = queue.clone();
                self.build_copy(queue)
            }
            (&Attachment::Null { frame_bytes }, Placement::Copy) => self.build_null(frame_bytes),
        }
    }

    /// The guest's half of the lane.
    pub(crate) fn guest_side(&self) -> Result<QueuePair, LaneError> {
        let path = Path {
            frame_limit: self.attachment.frame_limit(),
            partial_checksums: self.attachment.partial_checksums(),
            in_place: self.placement.has_guest_ram(),
        };
        Ok(self.device.queue_pair(self.pair, path)?)
    }

    /// Whether the guest may leave checksums open.
    fn csum(&self) -> bool {
        self.device.negotiated().offloads.csum
    }

    /// Properties of the guest's receive buffers, for a NIC that writes into them.
    fn guest_buffers(&self) -> Result<GuestBuffers, LaneError> {
        let has_inflight = self.device.has_inflight(2 * self.pair);
        let order = match (self.device.negotiated().ring.in_order, has_inflight) {
            (true, _) => BufferOrder::InOrder,
            (false, false) => BufferOrder::NoRegion,
            (false, true) => BufferOrder::Any,
        };
        let huge_pages = self.memory()?.huge_bytes() > 0;
        Ok(GuestBuffers { order, huge_pages })
    }

    fn memory(&self) -> Result<&Arc<MemoryMap>, LaneError> {
        Ok(self.device.memory().ok_or(PairError::NoMemory)?)
    }

    /// The guest's half of a lane of copy placement.
    pub(crate) fn copying_side(&self) -> Result<CopyingSide, LaneError> {
        let pair = self.guest_side()?;
        let interface = self.attachment.queue().map(|queue| &queue.interface);
        let from_tap = match interface.filter(|interface| interface.is_by_tap()) {
            None => None,
            Some(interface) => Some(FromTap::new(
                interface.receive_by_tap(self.pair, &pair.to_guest.guest.offloads)?,
            )),
        };
        Ok(CopyingSide { pair, from_tap })
    }

    /// Builds a lane of copy placement on a queue, which it is lent.
    fn build_copy(self, queue: InterfaceQueue) -> Result<BuiltLane, LaneError> {
        if self.pair == 0 {
            // As soon as this queue is lent, frames arrive at all pairs.
            queue.interface.forget_frames_of_tap(&self.counters)?;
        }
        let guest = self.copying_side()?;
        let nic = queue.lend(&self.counters)?;
        let mut facts = LaneFacts::new(&nic.umem, nic.packet_bytes, nic.backing.clone(), self.csum());
        facts
            .fallbacks
            .extend(nic.no_tap_because.clone().map(Fallback::DaemonSegments));
        let slice = queue.interface.slice(queue.number);
        facts.shared = slice.map(|slice| Arc::clone(slice.memory()));
        let described = facts.describe(&queue.interface, None, &nic.nic, nic.sends);
        let counters = Arc::clone(&self.counters);
        let lent = LentQueue { queue, counters };
        if let Err(error) = described {
            lent.give_back(nic);
            return Err(LaneError::Duplicate(error));
        }
        Ok(BuiltLane {
            lane: self.copying(guest, nic),
            facts,
            lent: Some(lent),
        })
    }

    /// A lane of copy placement.
    pub(crate) fn copying(self, guest: CopyingSide, nic: NicQueue<XdpNic>) -> Box<dyn Lane> {
        let CopyingSide {
            pair: guest,
            from_tap,
        } = guest;
        match (&self.attachment, from_tap) {
            (Attachment::Member(Member { end, untags, .. }), _) => {
                let own = CopyQueue::new(&guest.to_guest, nic, *untags, &self.counters);
                let of = (end.number, self.pair);
                Box::new(PortLane::with_queue(guest, self.counters, of, own))
            }
            (_, Some(from_tap)) => {
                let own = CopyQueue::by_tap(nic, from_tap);
                Box::new(PortLane::alone(guest, self.counters, own))
            }
            (_, None) => {
                let own = CopyQueue::new(&guest.to_guest, nic, false, &self.counters);
                Box::new(PortLane::alone(guest, self.counters, own))
            }
        }
    }

    /// Builds a lane of copy placement on a NIC that makes frames of `frame_bytes`.
    fn build_null(self, frame_bytes: u32) -> Result<BuiltLane, LaneError> {
        let guest = self.guest_side()?;
        let chunks = Chunks::new(COPY_BYTES, SMALL_CHUNK, SEND_RING)?;
        let facts = LaneFacts::new(
            &chunks.umem,
            chunks.umem.len(),
            chunks.backing.clone(),
            self.csum(),
        );
        let nic = null_nic(&chunks.umem, frame_bytes, 0);
        let queue = NicQueue::new(nic, chunks, Sends::PLAIN);
        let own = CopyQueue::new(&guest.to_guest, queue, false, &self.counters);
        let lane = PortLane::alone(guest, self.counters, own);
        Ok(BuiltLane::new(Box::new(lane), facts))
    }

    /// What has to be registered for a direct lane.
    pub(crate) fn registration(&self) -> Result<Registration, LaneError> {
        Ok(Registration {
            map: Arc::clone(self.memory()?),
            queue: self.attachment.queue().cloned(),
            guest: self.guest_buffers()?,
            populate: self.pair == 0,
        })
    }

    /// The UMEM of guest RAM, with this pair's share of the daemon's memory behind it.
    fn direct_memory(&self, umem: Umem) -> Result<DirectMemory, LaneError> {
        let map = self.memory()?;
        let start = map.guest_len() + u64::from(self.pair) * self.own_bytes();
        let own = start..start + self.own_bytes();
        let in_flight = self.device.longest_vring(self.pair).max(RECEIVE_RING) as usize;
        let memory = DirectMemory::new(umem, own, receive_chunks(self.placement), in_flight)?;
        Ok(memory.in_huge_pages(map.huge_bytes()))
    }

    /// Size of that share, bytes.
    fn own_bytes(&self) -> u64 {
        private_bytes(self.placement, 1) as u64
    }

    /// Builds a direct lane on memory that is registered.
    pub(crate) fn build_direct(self, registered: Registered) -> Result<BuiltLane, LaneError> {
        if let Attachment::Network(_) = &self.attachment {
            let placement = self.placement;
            return self.build(placement);
        }
        let guest = self.guest_side()?;
        let memory = self.direct_memory(registered.umem.clone())?;
        let mut facts = LaneFacts::new(
            &registered.umem,
            self.own_bytes(),
            "guest memory".to_owned(),
            self.csum(),
        );
        // Frames in the daemon's memory have no header; they get one when they are copied.
        let header_bytes = match self.placement {
            Placement::Direct => self.device.negotiated().header_bytes,
            Placement::SendDirect | Placement::Copy => 0,
        };
        let lane: Box<dyn Lane> = match (&self.attachment, registered.socket) {
            (Attachment::Queue(queue) | Attachment::Member(Member { queue, .. }), Some(socket)) => {
                queue.interface.check_direct(guest.from_guest.guest.frame_limit)?;
                let coupled = queue.couple(socket, header_bytes)?;
                let guest_buffers = Some(self.guest_buffers()?);
                let described = facts.describe(&queue.interface, guest_buffers, &coupled.nic, coupled.sends);
                described.map_err(LaneError::Duplicate)?;
                if let Attachment::Member(Member {
                    asked: Placement::Direct,
                    ..
                }) = self.attachment
                {
                    facts.fallbacks.push(Fallback::SendsOnly);
                }
                self.join(guest, coupled, memory)
            }
            (attachment, _) => {
                let frame_bytes = match attachment {
                    Attachment::Null { frame_bytes } => *frame_bytes,
                    _ => 0,
                };
                let nic = null_nic(&registered.umem, frame_bytes, header_bytes);
                let sends = Sends {
                    zero_copy: true,
                    ..Sends::PLAIN
                };
                self.join(guest, Coupled::new(nic, sends), memory)
            }
        };
        Ok(BuiltLane::new(lane, facts))
    }

    /// Makes the lane of a guest and a queue that is coupled with its memory.
    fn join<N: Nic + 'static>(
        self,
        guest: QueuePair,
        queue: Coupled<N>,
        memory: DirectMemory,
    ) -> Box<dyn Lane> {
        let mut guest = guest;
        match (&self.attachment, self.placement) {
            (Attachment::Member(Member { end, untags, .. }), _) => {
                let own = DirectQueue::send_only(&mut guest, queue, memory, (*untags, &self.counters));
                let of = (end.number, self.pair);
                Box::new(PortLane::with_queue(guest, self.counters, of, own))
            }
            (_, Placement::SendDirect) => {
                let own = DirectQueue::send_only(&mut guest, queue, memory, (false, &self.counters));
                Box::new(PortLane::alone(guest, self.counters, own))
            }
            (_, Placement::Direct | Placement::Copy) => {
                let own = DirectQueue::new(&mut guest, queue, memory, &self.counters);
                Box::new(PortLane::alone(guest, self.counters, own))
            }
        }
    }
}

/// A NIC that makes frames of `frame_bytes`.
fn null_nic(umem: &Umem, frame_bytes: u32, header_bytes: u32) -> NullNic {
    let config = NullConfig {
        frame_bytes,
        header_bytes,
        at_once: usize::MAX,
    };
    NullNic::new(umem.clone(), config, NULL_RING)
}
