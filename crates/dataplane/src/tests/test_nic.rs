//! A NIC for tests of lanes: the test controls its ring, its completions and its link.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};

use common::binding::TX_METADATA_BYTES;
use packet::checksum::ChecksumAt;
use virtqueue::QueueFeatures;
use xsk::{Frame, OwnMemory, RxDesc, TxDesc, Umem, UmemOffset};

use crate::direct::{CHUNK_BYTES, DirectMemory};
use crate::fdb::PortNumber;
use crate::frame::bytes::GuestRam;
use crate::frame::gso::TXMD_CHECKSUM;
use crate::lane::Lane;
use crate::nic::coupled::Coupled;
use crate::nic::endpoint::{Chunks, NicQueue};
use crate::nic::lent::Lent;
use crate::nic::queue::{LinkState, Nic, Sends};
use crate::nic::tap::SendTap;
use crate::nic::xdp::XdpNic;
use crate::tests::test_guest::Memory;
use crate::tests::test_lanes::{copy_lane_of, direct_lane, send_direct_lane_of};
use crate::tests::test_port::Port;
use device::counters::PairCounters;
use device::offloads::Offloads;
use device::pair::QueuePair;
use model::config::Placement;

/// A sent frame, and the checksum that its metadata requests.
pub(crate) type Sent = (Vec<u8>, Option<ChecksumAt>);

/// The test's view of it.
pub(crate) struct Wire {
    pub(crate) umem: Umem,
    pub(crate) capacity: usize,
    /// Descriptors that one kick sends.
    pub(crate) each_kick: usize,
    pub(crate) link: LinkState,
    /// It reads by DMA: descriptors must not cross pages.
    pub(crate) by_dma: bool,
    /// A kick reported that it is gone.
    pub(crate) seen_gone: bool,
    pub(crate) ring: VecDeque<TxDesc>,
    pub(crate) done: VecDeque<Frame>,
    pub(crate) sent: Vec<Sent>,
    /// The sent frame whose last descriptor is missing.
    pub(crate) unfinished: Option<Sent>,
    /// Entries of the fill ring.
    pub(crate) fill: usize,
    /// Chunks that it has to receive into.
    pub(crate) given: VecDeque<Frame>,
    pub(crate) received: VecDeque<RxDesc>,
    /// The queue, when its lane was stopped.
    pub(crate) given_back: Option<NicQueue<TestNic>>,
}

/// Memory of the daemon: at least `chunks` chunks of 2048 bytes.
pub(crate) fn own_memory(chunks: usize) -> Umem {
    let memory = OwnMemory::new(chunks * 2048).expect("memory");
    Umem::aligned(Arc::new(memory), 2048, 0).expect("good")
}

/// A queue that has all chunks of its memory, and gives the NIC `to_receive` of them.
pub(crate) fn queue<N: Nic>(nic: N, umem: Umem, to_receive: usize, sends: Sends) -> NicQueue<N> {
    let chunks = Chunks {
        pool: umem.all_frames().expect("ours").collect(),
        first: UmemOffset::new(0),
        umem,
        to_receive,
        backing: String::new(),
    };
    NicQueue::new(nic, chunks, sends)
}

/// How a lane stands over a NIC that the test plays.
#[derive(Clone, Copy)]
pub(crate) struct Over {
    pub(crate) placement: Placement,
    /// Chunks of the daemon's.
    pub(crate) chunks: usize,
    /// Of these so many to receive into.
    pub(crate) to_receive: usize,
    /// Entries of the tx ring, and descriptors that one kick sends.
    pub(crate) ring: (usize, usize),
    /// Entries of the fill ring.
    pub(crate) fill: usize,
    /// Pieces of buffers that direct placement keeps.
    pub(crate) pieces: usize,
    pub(crate) sends: Sends,
}

impl Over {
    pub(crate) fn new(placement: Placement, chunks: usize) -> Self {
        let to_receive = match placement {
            Placement::Direct => 0,
            _ => chunks / 2,
        };
        Self {
            placement,
            chunks,
            to_receive,
            ring: (64, 64),
            fill: 64,
            pieces: 128,
            sends: Sends::PLAIN,
        }
    }

    /// Memory of a guest, and behind it what the lane needs of the daemon's.
    pub(crate) fn memory(self, bytes: u64) -> Memory {
        match self.placement {
            Placement::Copy => Memory::new(bytes, 0),
            _ => Memory::new(bytes, self.chunks * CHUNK_BYTES as usize),
        }
    }

    /// The lane of a guest with that memory.
    pub(crate) fn lane(
        self,
        pair: QueuePair,
        memory: &Memory,
        counters: &Arc<PairCounters>,
    ) -> (Box<dyn Lane>, Arc<Mutex<Wire>>) {
        self.lane_with(pair, memory, counters, None)
    }

    /// The same, in copy placement with a tap for packets that leave unsegmented.
    pub(crate) fn lane_with(
        self,
        pair: QueuePair,
        memory: &Memory,
        counters: &Arc<PairCounters>,
        send_tap: Option<SendTap>,
    ) -> (Box<dyn Lane>, Arc<Mutex<Wire>>) {
        self.lane_of((pair, memory, counters), send_tap, None)
    }

    /// The lane of that pair of a network's port, if there is one; and whether tags are taken off there.
    pub(crate) fn lane_of(
        self,
        (pair, memory, counters): (QueuePair, &Memory, &Arc<PairCounters>),
        send_tap: Option<SendTap>,
        port: Option<((PortNumber, u16), bool)>,
    ) -> (Box<dyn Lane>, Arc<Mutex<Wire>>) {
        let umem = match self.placement {
            Placement::Copy => own_memory(self.chunks),
            _ => Umem::unaligned(Arc::new(GuestRam(Arc::clone(&memory.map))), CHUNK_BYTES, 0).expect("good"),
        };
        let metadata = if self.sends.checksum { TX_METADATA_BYTES } else { 0 };
        let umem = umem.with_tx_metadata(metadata).expect("good");
        let mut wire = Wire::new(umem.clone(), self.ring.0, self.ring.1);
        (wire.fill, wire.by_dma) = (self.fill, self.sends.by_dma);
        let wire = Arc::new(Mutex::new(wire));
        let (nic, counters) = (TestNic(Arc::clone(&wire)), Arc::clone(counters));
        if self.placement == Placement::Copy {
            let mut queue = queue(nic, umem, self.to_receive, self.sends);
            while queue.pool.len() > self.chunks {
                let _ = queue.pool.take();
            }
            queue.send_tap = send_tap;
            return (copy_lane_of(pair, queue, counters, port), wire);
        }
        let own = memory.map.guest_len();
        let end = own + (self.chunks * CHUNK_BYTES as usize) as u64;
        let memory = DirectMemory::new(umem, own..end, self.to_receive, self.pieces).expect("inside");
        let queue = Coupled::new(nic, self.sends);
        let lane: Box<dyn Lane> = match self.placement {
            Placement::Direct => Box::new(direct_lane(pair, queue, memory, counters)),
            _ => send_direct_lane_of(pair, (queue, memory), counters, port),
        };
        (lane, wire)
    }
}

pub(crate) const PLACEMENTS: [Placement; 3] = [Placement::Copy, Placement::SendDirect, Placement::Direct];

/// A guest with a queue of its own and these offloads.
pub(crate) fn own_queue(over: Over, offloads: Offloads) -> (Port, Box<dyn Lane>, Arc<Mutex<Wire>>) {
    let (guest, pair) = Port::new(over.memory(1 << 20), 256, QueueFeatures::default(), offloads);
    let (lane, wire) = over.lane(pair, &guest.memory, &guest.counters);
    (guest, lane, wire)
}

/// All frames that have been sent.
pub(crate) fn sent(wire: &Mutex<Wire>) -> Vec<Vec<u8>> {
    let wire = wire.lock().expect("no panic");
    wire.sent.iter().map(|(frame, _)| frame.clone()).collect()
}

/// A frame at any place, as a driver may name it.
pub(crate) fn frame_at(offset: UmemOffset) -> Frame {
    static ANYWHERE: LazyLock<Umem> = LazyLock::new(|| {
        let memory = OwnMemory::new(4 << 20).expect("memory");
        Umem::unaligned(Arc::new(memory), 2048, 0).expect("good")
    });
    ANYWHERE.adopt(offset).expect("not that far")
}

impl Wire {
    /// With `capacity` entries in its ring, of which a kick sends `each_kick`.
    pub(crate) fn new(umem: Umem, capacity: usize, each_kick: usize) -> Self {
        Self {
            umem,
            capacity,
            each_kick,
            link: LinkState::Up,
            by_dma: false,
            seen_gone: false,
            ring: VecDeque::new(),
            done: VecDeque::new(),
            sent: Vec::new(),
            unfinished: None,
            fill: 0,
            given: VecDeque::new(),
            received: VecDeque::new(),
            given_back: None,
        }
    }

    /// Receives a frame of `len` bytes, or a piece of one (`more`).
    pub(crate) fn receive(&mut self, len: u32, more: bool) {
        let frame = self.given.pop_front().expect("the lane gave some");
        self.receive_into(frame, len, more);
    }

    /// Receives these bytes.
    pub(crate) fn arrive(&mut self, frame: &[u8]) {
        self.receive(frame.len() as u32, false);
        let at = self.received.back().expect("just now").data;
        self.umem.write(at, frame).expect("inside");
    }

    /// Reports a frame at any place, given or not, in the UMEM or not.
    pub(crate) fn receive_into(&mut self, frame: Frame, len: u32, more: bool) {
        let data = UmemOffset::new(frame.offset().get() + u64::from(xsk::XDP_PACKET_HEADROOM));
        self.received.push_back(RxDesc {
            frame,
            data,
            len,
            more,
        });
    }

    fn send(&mut self, desc: TxDesc) {
        assert!((1..=self.umem.max_sent_bytes()).contains(&desc.len));
        if !self.umem.is_unaligned() {
            // All in one chunk, and room for metadata before it: xp_aligned_validate_desc, net/xdp/xsk_queue.h.
            let chunk = u64::from(self.umem.chunk_size());
            let begin = desc.offset.get() - u64::from(self.umem.tx_metadata_len());
            let end = desc.offset.get() + u64::from(desc.len);
            assert_eq!(begin / chunk, (end - 1) / chunk, "across chunks");
            assert_eq!(desc.frame.offset().get(), begin / chunk * chunk, "another chunk");
        }
        if self.by_dma {
            // xp_unaligned_validate_desc, net/xdp/xsk_queue.h
            let begin = desc.offset.get() - u64::from(self.umem.tx_metadata_len());
            let last = desc.offset.get() + u64::from(desc.len) - 1;
            assert_eq!(begin / 4096, last / 4096, "across pages");
        }
        let read = |at, len| {
            let mut bytes = vec![0; len];
            self.umem.read(at, &mut bytes).expect("inside");
            bytes
        };
        let checksum = desc.metadata.then(|| {
            let before = desc.offset.get() - u64::from(self.umem.tx_metadata_len());
            let metadata = read(UmemOffset::new(before), 12);
            assert_eq!(metadata[..8], TXMD_CHECKSUM.to_ne_bytes());
            let word = |at: usize| u16::from_ne_bytes([metadata[at], metadata[at + 1]]);
            assert!(u32::from(word(8)) + u32::from(word(10)) + 2 <= desc.len);
            ChecksumAt {
                start: word(8),
                offset: word(10),
            }
        });
        let bytes = read(desc.offset, desc.len as usize);
        assert!(
            self.unfinished.is_none() || checksum.is_none(),
            "metadata in the middle"
        );
        let frame = self.unfinished.get_or_insert_with(|| (Vec::new(), checksum));
        frame.0.extend(bytes);
        if !desc.more {
            self.sent.extend(self.unfinished.take());
        }
        self.done.push_back(desc.frame);
    }
}

/// The lane's end.
pub(crate) struct TestNic(pub(crate) Arc<Mutex<Wire>>);

impl TestNic {
    fn wire(&self) -> MutexGuard<'_, Wire> {
        self.0.lock().expect("no panic")
    }
}

impl Lent for TestNic {
    fn give_back(queue: NicQueue<Self>, _counters: &PairCounters) -> Option<NicQueue<XdpNic>> {
        let wire = Arc::clone(&queue.nic.0);
        wire.lock().expect("no panic").given_back = Some(queue);
        None
    }
}

impl Nic for TestNic {
    fn room_to_nic(&mut self) -> usize {
        let wire = self.wire();
        wire.capacity - wire.ring.len()
    }

    fn to_nic(&mut self, frames: impl ExactSizeIterator<Item = TxDesc>) {
        let mut wire = self.wire();
        wire.ring.extend(frames);
        assert!(wire.ring.len() <= wire.capacity, "more than there is room for");
    }

    fn kick(&mut self) -> LinkState {
        let mut wire = self.wire();
        wire.seen_gone = wire.link == LinkState::Gone;
        if wire.link == LinkState::Up {
            for _ in 0..wire.each_kick {
                let Some(desc) = wire.ring.pop_front() else { break };
                wire.send(desc);
            }
        }
        wire.link
    }

    fn has_untaken(&mut self) -> bool {
        !self.wire().ring.is_empty()
    }

    fn unsent(&self) -> usize {
        let wire = self.wire();
        if wire.seen_gone {
            0
        } else {
            wire.ring.len() + wire.done.len()
        }
    }

    fn sent(&mut self, max: usize) -> impl Iterator<Item = Frame> + '_ {
        let mut wire = self.wire();
        let count = max.min(wire.done.len());
        wire.done.drain(..count).collect::<Vec<_>>().into_iter()
    }

    fn came_back(&mut self, _frames: usize) {}

    fn room_to_give(&mut self) -> usize {
        let wire = self.wire();
        wire.fill - wire.given.len()
    }

    fn give(&mut self, frames: &mut Vec<Frame>, note: impl FnOnce(&[Frame])) {
        let room = self.room_to_give().min(frames.len());
        note(&frames[..room]);
        self.wire().given.extend(frames.drain(..room));
    }

    fn from_nic(&mut self, max: usize) -> impl ExactSizeIterator<Item = RxDesc> + '_ {
        (0..max.min(self.received())).map(|_| self.wire().received.pop_front().expect("a frame"))
    }

    fn received(&mut self) -> usize {
        self.wire().received.len()
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
