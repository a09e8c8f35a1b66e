//! A guest that gets frames from a tap, which is played by a socket that keeps frames apart.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use device::offloads::Offloads;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use virtqueue::driver::{Buffer, QueueDriver};
use virtqueue::{Journal, QueueFeatures};

use super::*;
use crate::nic::endpoint::Chunks;
use crate::nic::null::{NullConfig, NullNic};
use crate::nic::queue::Sends;
use crate::policy::rate_limit::PortLimits;
use crate::tests::test_guest::{HEADER, Memory};
use model::rates::{PortRates, Rate, Rates};

const BEFORE: usize = HEADER as usize;
const NOTHING: [u8; BEFORE] = [0; BEFORE];
/// Of TCP over IPv4, segments of 1000 bytes.
const TCP: [u8; BEFORE] = [1, 1, 54, 0, 232, 3, 34, 0, 16, 0, 0, 0];

struct World {
    memory: Memory,
    from_tap: FromTap,
    guest: RxQueue,
    /// That nothing comes to.
    queue: NicQueue<NullNic>,
    receives: QueueDriver,
    /// Receive buffers by the number that the driver knows them by.
    buffers: Vec<Buffer>,
    counters: Arc<PairCounters>,
    kernel: OwnedFd,
}

impl World {
    fn new(offloads: Offloads, mergeable: bool) -> Self {
        Self::with_ring(64, offloads, mergeable)
    }

    fn with_ring(size: u32, offloads: Offloads, mergeable: bool) -> Self {
        let memory = Memory::new(4 << 20, 0);
        let vring = || memory.vring(size, QueueFeatures::default(), Journal::None);
        let (mut to_guest, receives) = vring();
        (to_guest.guest.offloads, to_guest.guest.mergeable) = (offloads, mergeable);
        let counters = Arc::<PairCounters>::default();
        let (family, flags) = (AddressFamily::UNIX, SocketFlags::NONBLOCK);
        let (kernel, tap) = socketpair(family, SocketType::SEQPACKET, flags, None).expect("sockets");
        let chunks = Chunks::new(1 << 20, 2048, 64).expect("memory");
        let config = NullConfig {
            frame_bytes: 0,
            header_bytes: 0,
            at_once: 0,
        };
        let nic = NullNic::new(chunks.umem.clone(), config, 64);
        Self {
            from_tap: FromTap::new(Some(Tap::new(tap))),
            guest: RxQueue::new(to_guest, Arc::clone(&counters)),
            queue: NicQueue::new(nic, chunks, Sends::PLAIN),
            memory,
            receives,
            buffers: vec![Buffer::writable(virtqueue::GuestAddr(0), 0); 64],
            counters,
            kernel,
        }
    }

    fn post(&mut self, count: usize, len: u32) {
        for _ in 0..count {
            let addr = self.memory.ram.alloc(len.into(), 64).expect("memory is left");
            let buffer = Buffer::writable(addr, len);
            let id = self.receives.add(&[buffer]).expect("room in the ring");
            self.buffers[usize::from(id)] = buffer;
        }
        self.receives.publish();
    }

    /// The kernel has a frame.
    fn give(&self, header: [u8; BEFORE], frame: &[u8]) {
        rustix::io::write(&self.kernel, &[&header[..], frame].concat()).expect("room");
    }

    fn deliver(&mut self) {
        let delivered = self.from_tap.deliver(&mut self.queue, &mut self.guest);
        delivered.expect("no fault");
    }

    /// A poll for the guest; returns its frames, with the header of the first buffer.
    fn budget(&mut self) -> Vec<(Vec<u8>, usize)> {
        self.from_tap.note_event();
        self.deliver();
        let mut got: Vec<(Vec<u8>, usize)> = Vec::new();
        let mut missing = 0;
        while let Some(used) = self.receives.take_used() {
            let buffer = self.buffers[usize::from(used.head)];
            let bytes = self.memory.ram.read_vec(buffer.addr, used.len as usize);
            if missing == 0 {
                missing = usize::from(bytes[10]);
                got.push((bytes, missing));
            } else if let Some((frame, _)) = got.last_mut() {
                frame.extend(bytes);
            }
            missing -= 1;
        }
        assert_eq!(missing, 0, "buffers of a frame come together");
        got
    }
}

fn frame(len: usize, number: u8) -> Vec<u8> {
    (0..len).map(|at| at as u8 ^ number).collect()
}

fn with_buffers(header: [u8; BEFORE], frame: &[u8], count: u8) -> (Vec<u8>, usize) {
    let mut bytes = [&header[..], frame].concat();
    bytes[10] = count;
    (bytes, count.into())
}

#[test]
fn frames_come_into_as_many_buffers_as_they_need_whether_expected_or_not() {
    for (mergeable, count, len) in [
        (true, 60, 1526),
        (true, 20, 4096),
        (true, 60, 1200),
        (false, 4, 65_562),
    ] {
        let mut world = World::new(Offloads::all(), mergeable);
        world.post(count, len);
        let (small, large) = (frame(60, 1), frame(40_000, 2));
        let needed = match mergeable {
            true => (40_000 + HEADER).div_ceil(len) as u8,
            false => 1,
        };
        world.give(NOTHING, &small);
        world.give(TCP, &large);
        let got = world.budget();
        let wanted = [
            with_buffers(NOTHING, &small, 1),
            with_buffers(TCP, &large, needed),
        ];
        assert!(
            got == wanted,
            "{len}: {:?}",
            got.iter().map(|got| got.0.len()).collect::<Vec<_>>()
        );
        // Expected now: straight into the buffers, if there are enough.
        if !mergeable {
            world.give(TCP, &large);
            assert!(world.budget() == [with_buffers(TCP, &large, 1)]);
        }
        assert_eq!(world.counters.to_guest_offload_malformed.get(), 0);
    }
}

#[test]
fn frame_waits_for_buffers_and_others_behind_it() {
    let mut world = World::new(Offloads::all(), true);
    world.post(3, 1526);
    let (large, behind) = (frame(9000, 1), frame(60, 2));
    world.give(TCP, &large);
    world.give(NOTHING, &behind);
    assert_eq!(world.budget(), []);
    assert!(world.from_tap.short);
    world.post(8, 1526);
    let got = world.budget();
    assert!(got == [with_buffers(TCP, &large, 6), with_buffers(NOTHING, &behind, 1)]);
}

#[test]
fn frame_that_never_fits_is_counted_and_the_next_one_comes() {
    for mergeable in [true, false] {
        let mut world = World::new(Offloads::all(), mergeable);
        world.post(64, 100);
        world.give(TCP, &frame(9000, 1));
        world.give(NOTHING, &frame(60, 2));
        let got = [world.budget(), world.budget()].concat();
        assert!(got == [with_buffers(NOTHING, &frame(60, 2), 1)]);
        assert_eq!(world.counters.to_guest_buffer_too_small.get(), 1);
        assert_eq!(world.counters.to_guest_frames.get(), 1);
    }
}

/// A ring with fewer entries than a batch has frames.
#[test]
fn frame_that_the_whole_ring_does_not_hold_is_counted_and_the_next_one_comes() {
    for size in [2, 4, 16] {
        let mut world = World::with_ring(size, Offloads::all(), true);
        world.post(size as usize, 1526);
        world.give(TCP, &frame(60_000, 1));
        world.give(NOTHING, &frame(60, 2));
        let got = [world.budget(), world.budget()].concat();
        assert!(got == [with_buffers(NOTHING, &frame(60, 2), 1)], "{size}");
        assert_eq!(world.counters.to_guest_buffer_too_small.get(), 1);
    }
}

#[test]
fn frame_that_asks_for_what_the_guest_did_not_accept_or_lies_is_dropped() {
    let with = |at: usize, value: u8| {
        let mut header = TCP;
        header[at] = value;
        header
    };
    let no_tso = Offloads {
        guest_tso4: false,
        ..Offloads::all()
    };
    let cases = [
        (Offloads::NONE, TCP),
        (no_tso, TCP),
        (Offloads::NONE, with(1, 0)),
        // Neither a kind, nor a checksum, nor a size, nor one that the packet has; the checksum behind it.
        (Offloads::all(), with(1, 9)),
        (Offloads::all(), with(0, 0)),
        (Offloads::all(), {
            let mut header = with(4, 0);
            header[5] = 0;
            header
        }),
        (Offloads::all(), with(5, 0x40)),
        (Offloads::all(), with(7, 0x40)),
    ];
    for (offloads, header) in cases {
        let mut world = World::new(offloads, true);
        world.post(32, 1526);
        world.give(header, &frame(9000, 1));
        world.give(NOTHING, &frame(60, 2));
        let got = world.budget();
        assert!(got == [with_buffers(NOTHING, &frame(60, 2), 1)], "{header:?}");
        assert_eq!(world.counters.to_guest_offload_malformed.get(), 1, "{header:?}");
    }
}

#[test]
fn guest_without_checksums_gets_no_data_valid() {
    let mut world = World::new(Offloads::NONE, true);
    world.post(1, 1526);
    let mut valid = NOTHING;
    valid[0] = 2;
    world.give(valid, &frame(60, 1));
    assert!(world.budget() == [with_buffers(NOTHING, &frame(60, 1), 1)]);
}

#[test]
fn frame_beyond_the_limit_never_comes_into_a_buffer() {
    let mut world = World::new(Offloads::NONE, true);
    world.post(2, 1526);
    let packets = Some(Rate {
        per_second: 1,
        burst: 1,
    });
    let rates = PortRates {
        to_guest: Rates { packets, bits: None },
        ..PortRates::default()
    };
    world.guest.limit = PortLimits::new(rates).to_guest;
    for number in [1, 2] {
        world.give(NOTHING, &frame(60, number));
    }
    assert!(world.budget() == [with_buffers(NOTHING, &frame(60, 1), 1)]);
    assert_eq!(world.counters.to_guest_limit.get(), 1);
    let untouched = world.buffers[1];
    assert_eq!(world.memory.ram.read_vec(untouched.addr, 72), [0; 72]);
}

#[test]
fn lane_that_found_nothing_reads_again_only_now_and_then() {
    let mut world = World::new(Offloads::all(), true);
    world.post(8, 1526);
    world.budget();
    let due = (0..32).filter(|_| {
        let is_due = world.from_tap.has_frames(&mut world.queue);
        if is_due {
            world.deliver();
        }
        is_due
    });
    assert_eq!(due.count(), 4);
}
