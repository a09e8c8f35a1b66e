//! Receive buffers in as many pieces as the queue has entries, through whole lanes: neither a turn nor the memory of a lane is
//! as long as the guest wants it.

use std::sync::{Arc, Mutex};

use offload::segment::Request;
use virtqueue::driver::{Buffer, DriverFeatures, GuestRam, QueueDriver};
use virtqueue::{
    GuestAddr, Journal, MemoryMap, Queue, QueueFeatures, QueueSize, QueueStart, RingFormat, RingLayout,
    TrustedFiles,
};
use xsk::{FramePool, OwnMemory, Umem, UmemOffset};

use super::cable::{CableEnd, CableLane, Parcel, Wire as Cable};
use super::call::{Blocks, Call};
use super::copy::CopyLane;
use super::copy_bytes::GuestRam as Ram;
use super::counters::LaneCounters;
use super::direct::{CHUNK_BYTES, DirectLane, DirectMemory};
use super::guest::{GuestSide, Vring};
use super::lane::{DESCRIPTORS, Lane};
use super::nic::Sends;
use super::offloads::Offloads;
use super::test_nic::{TestNic, Wire};

/// Entries of the queue, and pieces of a buffer: more than a turn reads.
const QUEUE: u32 = 2 * DESCRIPTORS as u32;
const BUFFERS: usize = 8;
const FRAME: u32 = 60;

/// A guest with `first` and then buffers of [`QUEUE`] bytes, each a descriptor of its own.
fn guest(memory: &Arc<MemoryMap>, ram: &Arc<GuestRam>, first: &[Buffer]) -> (GuestSide, QueueDriver) {
    let size = QueueSize::new(QUEUE).expect("a power of two");
    let shape = (RingFormat::Split, size);
    let vring = || {
        let driver = QueueDriver::new(ram, shape, DriverFeatures::default()).expect("room");
        let rings = RingLayout::from_user(memory, shape, driver.ring_user_addresses()).expect("inside");
        let features = QueueFeatures {
            indirect: true,
            ..QueueFeatures::default()
        };
        let start = QueueStart {
            base: driver.base(),
            journal: Journal::None,
            log: None,
        };
        let vring = Vring {
            queue: Queue::new(memory, rings, features, start).expect("a good ring"),
            kick: None,
            call: Call::new(None, Blocks::default()),
            enabled: true,
        };
        (vring, driver)
    };
    let ((to_guest, mut driver), (from_guest, _)) = (vring(), vring());
    if !first.is_empty() {
        driver.add(first).expect("room in the ring");
    }
    for _ in 0..BUFFERS {
        let begin = ram.alloc(QUEUE.into(), 1).expect("memory is left").get();
        let bytes: Vec<_> = (0..u64::from(QUEUE))
            .map(|at| Buffer::writable(GuestAddr(begin + at), 1))
            .collect();
        driver.add_indirect(&bytes).expect("room in the ring");
    }
    driver.publish();
    let side = GuestSide {
        sent_before: 0,
        memory: Arc::clone(memory),
        from_guest,
        to_guest,
        header_bytes: 12,
        mergeable: true,
        frame_limit: 1518,
        offloads: Offloads::NONE,
        partial_checksums: false,
        log: None,
        spill: None,
    };
    (side, driver)
}

/// Guest memory, and the daemon's map of it with so many bytes of its own behind.
fn memory(private: usize) -> (Arc<GuestRam>, Arc<MemoryMap>) {
    let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), 4 << 20)]).expect("memory"));
    let regions = ram.regions().expect("descriptors");
    let map = MemoryMap::new(regions, private, &TrustedFiles).expect("mapped");
    (ram, Arc::new(map))
}

/// Breathes until all buffers are used; how many were used by each breath.
fn breaths(lane: &mut dyn Lane, driver: &mut QueueDriver) -> Vec<usize> {
    let mut used = Vec::new();
    while used.iter().sum::<usize>() < BUFFERS && used.len() < 2 * BUFFERS {
        lane.breathe().expect("no fault");
        let lens = std::iter::from_fn(|| driver.take_used()).map(|used| used.len);
        used.push(lens.inspect(|&len| assert_eq!(len, 12 + FRAME)).count());
    }
    used
}

#[test]
fn turn_of_a_copy_lane_is_not_made_longer_by_the_pieces_of_buffers() {
    let looked_at = Offloads {
        guest_csum: true,
        guest_tso4: true,
        ..Offloads::NONE
    };
    for offloads in [Offloads::NONE, looked_at] {
        let (ram, memory) = memory(0);
        let (guest, mut driver) = guest(&memory, &ram, &[]);
        let guest = GuestSide { offloads, ..guest };
        let umem =
            Umem::aligned(Arc::new(OwnMemory::new(64 * 2048).expect("memory")), 2048, 0).expect("good");
        let mut wire = Wire::new(umem.clone(), 64, 64);
        wire.fill = 32;
        let wire = Arc::new(Mutex::new(wire));
        let pool: FramePool = umem.all_frames().expect("ours").collect();
        let memory = (umem, pool, 32);
        let nic = TestNic(Arc::clone(&wire));
        let mut lane = CopyLane::new(guest, nic, memory, Sends::PLAIN, Arc::default());
        for _ in 0..BUFFERS {
            wire.lock().expect("no panic").receive(FRAME, false);
        }
        assert_eq!(breaths(&mut lane, &mut driver), [1; BUFFERS], "{offloads:?}");
    }
}

#[test]
fn turn_of_a_cable_is_not_made_longer_by_the_pieces_of_buffers() {
    let (ram, memory) = memory(0);
    let (guest, mut driver) = guest(&memory, &ram, &[]);
    let wire = Arc::new(Cable::new([1, 1]).expect("descriptors"));
    let end = CableEnd {
        wire: Arc::clone(&wire),
        end: 0,
        pair: 0,
    };
    let mut lane = CableLane::new(guest, end, Arc::default());
    let parcel = || Parcel {
        request: Request::default(),
        header_len: 0,
        bytes: vec![0; FRAME as usize],
    };
    let mut parcels: Vec<_> = (0..BUFFERS).map(|_| parcel()).collect();
    assert_eq!(wire.inbox(0, 0).push(&mut parcels), 0);
    assert_eq!(breaths(&mut lane, &mut driver), [1; BUFFERS]);
}

#[test]
fn direct_lane_keeps_few_pieces_of_buffers_and_uses_them_all() {
    let short = Buffer::writable(GuestAddr(64), 100);
    // Buffers that wait each with a chunk of its own, and those behind one that is too small for that.
    for first in [&[][..], &[short]] {
        let private = 32 * CHUNK_BYTES as usize;
        let (ram, memory) = memory(private);
        let _first = ram.alloc(4096, 64).expect("memory");
        let (guest, mut driver) = guest(&memory, &ram, first);
        let own = memory.private_offset();
        let umem = Umem::unaligned(Arc::new(Ram(Arc::clone(&memory))), CHUNK_BYTES, 0).expect("good");
        let mut wire = Wire::new(umem.clone(), 64, 64);
        wire.fill = 32;
        let wire = Arc::new(Mutex::new(wire));
        let pool: FramePool = umem.frames(own..own + private as u64).expect("inside").collect();
        let direct = DirectMemory {
            umem,
            pool,
            in_flight: QUEUE as usize,
            own_from: UmemOffset::new(own),
        };
        let counters = Arc::new(LaneCounters::default());
        let nic = TestNic(Arc::clone(&wire));
        let mut lane = DirectLane::new(guest, nic, direct, Sends::PLAIN, Arc::clone(&counters));
        for _ in 0..2 * BUFFERS {
            lane.breathe().expect("no fault");
        }
        let taken = lane.guest().bases().to_guest as usize;
        assert!((1..=2).contains(&taken), "{taken} buffers taken");
        let mut used = 0;
        for _ in 0..BUFFERS + first.len() {
            // One frame needs the short buffer and the next one.
            if used < BUFFERS + first.len() {
                wire.lock().expect("no panic").receive(FRAME, false);
            }
            lane.breathe().expect("no fault");
            used += std::iter::from_fn(|| driver.take_used()).count();
        }
        assert_eq!(used, BUFFERS + first.len());
        assert_eq!(counters.bounced_frames.get(), used as u64);
    }
}
