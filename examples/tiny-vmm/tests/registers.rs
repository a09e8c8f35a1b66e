//! A hostile driver at the registers: every offset, every width, odd values, in any order. No KVM is needed.
#![cfg(target_arch = "x86_64")]

use std::os::fd::OwnedFd;
use std::sync::Arc;

use notifier::notifiers::Serve;
use rustix::event::{EventfdFlags, eventfd};
use testkit::soak;
use tiny_vmm::entropy::{Entropy, EntropyQueue, EntropyShared, Random};
use tiny_vmm::layout::RAM_BYTES;
use tiny_vmm::memory::Memory;
use tiny_vmm::mmio::{Device, F_VERSION_1, Transport};
use tiny_vmm::net::{Net, NetConfig, NetQueue, NetShared};
use tiny_vmm::sink::null::Null;

const MAGIC: u64 = 0x00;
const DEVICE_FEATURES: u64 = 0x10;
const DEVICE_FEATURES_SEL: u64 = 0x14;
const DRIVER_FEATURES: u64 = 0x20;
const DRIVER_FEATURES_SEL: u64 = 0x24;
const QUEUE_SEL: u64 = 0x30;
const QUEUE_NUM_MAX: u64 = 0x34;
const QUEUE_NUM: u64 = 0x38;
const QUEUE_READY: u64 = 0x44;
const INTERRUPT_STATUS: u64 = 0x60;
const INTERRUPT_ACK: u64 = 0x64;
const STATUS: u64 = 0x70;
const QUEUE_DESC: u64 = 0x80;
const CONFIG_GENERATION: u64 = 0xfc;
const CONFIG: u64 = 0x100;
const NEEDS_RESET: u32 = 64;
const F_CTRL_VQ: u64 = 1 << 17;
const F_MQ: u64 = 1 << 22;
const F_RING_PACKED: u64 = 1 << 34;

const PAIRS: u16 = 2;

struct Rig {
    transport: Transport<Net>,
    queues: Vec<NetQueue>,
    memory: Memory,
    call: OwnedFd,
}

impl Rig {
    fn new() -> Self {
        Self::with_memory(RAM_BYTES)
    }

    fn with_memory(bytes: u64) -> Self {
        let memory = Memory::new(bytes).expect("memory");
        let call = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        let config = NetConfig {
            mac: [2, 0, 0, 0, 0, 1],
            pairs: PAIRS,
            polled: false,
            call: Some(call.try_clone().expect("a descriptor")),
        };
        let shared = NetShared::new(config, &memory, Box::new(Null::new(10, 64))).expect("a device");
        Self {
            queues: (0..shared.queues())
                .map(|queue| NetQueue::new(&shared, queue))
                .collect(),
            transport: Transport::new(Net(shared)),
            memory,
            call,
        }
    }

    fn read(&mut self, offset: u64) -> u32 {
        read(&mut self.transport, offset)
    }

    fn write(&mut self, offset: u64, value: u32) {
        self.transport.write(offset, &value.to_le_bytes());
    }

    fn offered(&mut self) -> u64 {
        let mut half = |select| {
            self.write(DEVICE_FEATURES_SEL, select);
            u64::from(self.read(DEVICE_FEATURES))
        };
        half(0) | half(1) << 32
    }

    fn choose(&mut self, features: u64) {
        for half in [0, 1] {
            self.write(DRIVER_FEATURES_SEL, half);
            self.write(DRIVER_FEATURES, (features >> (32 * half)) as u32);
        }
    }

    /// Up to FEATURES_OK.
    fn begin(&mut self, features: u64) {
        self.write(STATUS, 0);
        self.write(STATUS, 1);
        self.write(STATUS, 3);
        self.choose(features);
        self.write(STATUS, 11);
    }

    /// A queue with its rings from `at` on.
    fn set_up(&mut self, queue: u32, entries: u32, at: u64) {
        self.write(QUEUE_SEL, queue);
        self.write(QUEUE_NUM, entries);
        for (part, offset) in [QUEUE_DESC, QUEUE_DESC + 0x10, QUEUE_DESC + 0x20]
            .into_iter()
            .enumerate()
        {
            let address = at.wrapping_add(part as u64 * 0x2000);
            self.write(offset, address as u32);
            self.write(offset + 4, (address >> 32) as u32);
        }
        self.write(QUEUE_READY, 1);
    }

    /// Since it was asked last.
    fn interrupts(&self) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(&self.call, &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(_) => 0,
        }
    }

    fn look_at_all(&mut self) {
        for queue in &mut self.queues {
            queue.look();
        }
    }
}

fn read<D: Device>(transport: &mut Transport<D>, offset: u64) -> u32 {
    let mut word = [0xaa; 4];
    transport.read(offset, &mut word);
    u32::from_le_bytes(word)
}

/// A generator of numbers, the same each time (Marsaglia's xorshift).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

#[test]
fn every_offset_and_width_is_answered() {
    let values = [
        0,
        1,
        2,
        4,
        15,
        64,
        128,
        255,
        0x7fff_ffff,
        0x8000_0000,
        u64::from(u32::MAX),
        u64::MAX,
    ];
    for start in [0, 1, 3, 11, 15] {
        let mut rig = Rig::new();
        rig.write(STATUS, start);
        for offset in (0..0x200).chain([0xfff, u64::from(u32::MAX), u64::MAX]) {
            for width in [0, 1, 2, 3, 4, 8, 16] {
                for value in values {
                    let bytes = [value.to_le_bytes(), value.to_le_bytes()].concat();
                    rig.transport.write(offset, &bytes[..width]);
                    let mut back = vec![0xaa; width];
                    rig.transport.read(offset, &mut back);
                    if offset < CONFIG && (width != 4 || offset % 4 != 0) {
                        assert!(
                            back.iter().all(|&byte| byte == 0),
                            "{width} bytes at {offset:#x}: {back:?}"
                        );
                    }
                }
            }
            rig.look_at_all();
        }
        assert_eq!(rig.read(MAGIC), u32::from_le_bytes(*b"virt"));
    }
}

#[test]
fn no_order_of_accesses_panics_and_a_reset_always_helps() {
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    let mut rig = Rig::new();
    let offered = rig.offered();
    let mut started = 0;
    for round in 0..soak::count(150, 4_000) {
        rig.begin(offered & (numbers.next() | F_VERSION_1));
        for queue in 0..=2 * u32::from(PAIRS) + 1 {
            let at = match numbers.below(4) {
                0 => numbers.next(),
                1 => RAM_BYTES - numbers.below(0x8000),
                _ => 0x10_0000 + u64::from(queue) * 0x10_0000,
            };
            let entries = [0, 1, 3, 16, 256, 257, u32::MAX][numbers.below(7) as usize];
            rig.set_up(queue, entries, at);
        }
        // Nonsense in the rings, in every second round.
        if round % 2 == 0 {
            let mut bytes = vec![0; 0x60_0000];
            bytes.fill_with(|| numbers.next() as u8);
            rig.memory.write(0x10_0000, &bytes).expect("inside");
        }
        for _ in 0..20 {
            let offset = numbers.below(0x140);
            let bytes = numbers.next().to_le_bytes();
            let width = [1, 2, 4, 4, 4, 8][numbers.below(6) as usize];
            rig.transport.write(offset, &bytes[..width]);
            rig.transport.read(offset, &mut [0; 8][..width]);
        }
        rig.write(STATUS, 15);
        started += u32::from(rig.read(STATUS) & 4 != 0);
        rig.look_at_all();
        rig.look_at_all();
    }
    assert!(started > 20, "it never got so far");
    rig.write(STATUS, 0);
    assert_eq!(rig.read(STATUS), 0);
    assert_eq!(rig.offered(), offered);
}

#[test]
fn features_that_were_not_offered_are_not_ok() {
    let mut rig = Rig::new();
    let offered = rig.offered();
    for features in [offered | 1 << 63, offered & !F_VERSION_1, 0, u64::MAX] {
        rig.begin(features);
        assert_eq!(rig.read(STATUS) & 8, 0, "{features:#x}");
        // Without FEATURES_OK a driver is not ready either.
        rig.write(STATUS, 15);
        assert_eq!(rig.read(STATUS) & 4, 0, "{features:#x}");
    }
    rig.begin(offered);
    assert_eq!(rig.read(STATUS), 11);
    // What is settled stays.
    rig.choose(0);
    rig.write(STATUS, 15);
    assert_eq!(rig.read(STATUS), 15);
    assert_eq!(rig.transport.save().features(), offered);
}

#[test]
fn features_beyond_64_bits_are_none() {
    let mut rig = Rig::new();
    for select in [2, 3, u32::MAX] {
        rig.write(DEVICE_FEATURES_SEL, select);
        assert_eq!(rig.read(DEVICE_FEATURES), 0);
        rig.write(DRIVER_FEATURES_SEL, select);
        rig.write(DRIVER_FEATURES, u32::MAX);
    }
    assert_eq!(rig.transport.save().features(), 0);
}

#[test]
fn queue_that_there_is_not_has_no_entries_and_takes_nothing() {
    let mut rig = Rig::new();
    rig.begin(F_VERSION_1);
    for queue in [2 * u32::from(PAIRS) + 1, 0xffff, 0x1_0000, u32::MAX] {
        rig.set_up(queue, 16, 0x10_0000);
        assert_eq!((rig.read(QUEUE_NUM_MAX), rig.read(QUEUE_READY)), (0, 0));
    }
}

#[test]
fn queue_that_is_ready_is_not_changed() {
    let mut rig = Rig::new();
    rig.begin(F_VERSION_1);
    rig.set_up(0, 16, 0x10_0000);
    let before = rig.transport.save();
    rig.set_up(0, 8, 0x20_0000);
    assert_eq!(rig.transport.save(), before);
    rig.write(QUEUE_READY, 0);
    assert_eq!(rig.read(QUEUE_READY), 0);
}

#[test]
fn rings_outside_of_memory_need_a_reset_and_the_driver_is_told() {
    let mut rig = Rig::new();
    for (at, entries) in [
        (RAM_BYTES, 16),
        (u64::MAX, 16),
        (u64::MAX - 0xfff, 256),
        (1, 16),
        (0x10_0000, 3),
    ] {
        rig.begin(F_VERSION_1);
        rig.set_up(0, entries, at);
        rig.set_up(1, entries, at);
        rig.write(STATUS, 15);
        // An interrupt, one.
        assert_eq!(rig.interrupts(), 1, "{at:#x}");
        assert_eq!(rig.read(STATUS) & NEEDS_RESET, NEEDS_RESET, "{at:#x}");
        // A configuration change, said exactly; used buffers, always.
        assert_eq!(rig.read(INTERRUPT_STATUS), 3);
        rig.write(INTERRUPT_ACK, 3);
        assert_eq!(rig.read(INTERRUPT_STATUS), 1);
        rig.look_at_all();
    }
    rig.write(STATUS, 0);
    assert_eq!((rig.read(STATUS), rig.read(INTERRUPT_STATUS)), (0, 0));
}

#[test]
fn frames_for_a_pair_that_was_taken_away_keep_others_back_no_longer() {
    let mut rig = Rig::new();
    rig.begin(F_VERSION_1 | F_CTRL_VQ | F_MQ);
    for queue in 0..4 {
        rig.set_up(queue, 16, 0x10_0000 * (1 + u64::from(queue)));
    }
    rig.write(STATUS, 15);
    let shared = Arc::clone(&rig.transport.device().0);
    // The sink has frames for the first pair, which has no buffers for them.
    rig.queues[0].look();
    assert!(!shared.port().with(|port| port.takes_from_sink()), "they wait");
    let _ = rustix::io::read(shared.again(), &mut [0; 8]);
    rig.write(QUEUE_SEL, 0);
    rig.write(QUEUE_READY, 0);
    assert!(shared.port().with(|port| port.takes_from_sink()));
    // What the worker sleeps on.
    assert!(rustix::io::read(shared.again(), &mut [0; 8]).is_ok());
}

#[test]
fn fault_in_a_ring_needs_a_reset_and_the_next_driver_is_served() {
    let mut rig = Rig::new();
    for _ in 0..3 {
        rig.begin(F_VERSION_1);
        rig.set_up(0, 16, 0x10_0000);
        rig.set_up(1, 16, 0x20_0000);
        rig.write(STATUS, 15);
        assert_eq!(rig.read(STATUS), 15);
        // The available index of the transmit queue jumps by more than there are entries.
        rig.memory
            .write(0x20_2002, &1000_u16.to_le_bytes())
            .expect("inside");
        assert_eq!(rig.interrupts(), 0);
        rig.queues[1].look();
        // Looked at once more, it has nothing more to say.
        rig.queues[1].look();
        assert_eq!(rig.interrupts(), 1);
        assert_eq!(rig.read(INTERRUPT_STATUS), 3);
        assert_eq!(rig.read(STATUS), 15 | NEEDS_RESET);
        rig.memory.write(0x20_2002, &[0; 2]).expect("inside");
    }
}

/// Packed rings of a length that no split ring may have, as a driver has set them up on the way to `status`.
#[test]
fn saved_driver_goes_on_in_another_device_wherever_it_stands() {
    let drivers = |status| {
        let mut rig = Rig::new();
        rig.begin(F_VERSION_1 | F_RING_PACKED);
        rig.set_up(0, 3, 0x10_0000);
        rig.set_up(1, 3, 0x20_0000);
        rig.write(STATUS, status);
        rig
    };
    for before in [11, 15] {
        let saved = drivers(before).transport.save();
        let mut rig = Rig::new();
        assert!(rig.transport.restore(&saved));
        assert_eq!(rig.read(STATUS), before);
        rig.write(STATUS, 15);
        assert_eq!(rig.read(STATUS), 15, "saved at {before}");
        // A buffer that is not one, in the transmit queue: it is served.
        let buffer = [&[0; 14][..], &0x80_u16.to_le_bytes()].concat();
        rig.memory.write(0x20_0000, &buffer).expect("inside");
        rig.queues[1].look();
        assert_eq!(rig.read(STATUS), 15 | NEEDS_RESET);
        // And so it is saved, though nobody has read that yet.
        let mut next = Rig::new();
        assert!(next.transport.restore(&rig.transport.save()));
        assert_eq!(next.read(STATUS), 15 | NEEDS_RESET);
    }
}

#[test]
fn saved_driver_whose_queues_cannot_go_on_has_to_reset() {
    let mut saved = Vec::new();
    // Rings that the next device finds outside of its memory, and some that no device takes.
    for entries in [16, 3, 0] {
        let mut rig = Rig::new();
        rig.begin(F_VERSION_1);
        rig.set_up(0, entries, 0x10_0000);
        rig.set_up(1, entries, 0x20_0000);
        rig.write(STATUS, 15);
        saved.push(rig.transport.save());
    }
    for saved in saved {
        let mut rig = Rig::with_memory(0x10_0000);
        assert!(rig.transport.restore(&saved));
        assert!(rig.transport.device().needs_reset());
        assert_eq!(rig.interrupts(), 1, "its driver is told");
        assert_eq!(rig.read(STATUS), 15 | NEEDS_RESET);
        assert_eq!(rig.read(INTERRUPT_STATUS), 3);
        rig.look_at_all();
        rig.write(STATUS, 0);
        assert_eq!(rig.read(STATUS), 0);
    }
}

#[test]
fn saved_device_with_another_number_of_queues_is_refused() {
    let mut rig = Rig::new();
    rig.begin(F_VERSION_1);
    let saved = rig.transport.save();
    let memory = Memory::new(RAM_BYTES).expect("memory");
    let mut entropy = Transport::new(Entropy::new(
        &EntropyShared::new(&memory, None).expect("a device"),
    ));
    assert!(!entropy.restore(&saved), "it has one queue");
    assert_eq!(read(&mut entropy, STATUS), 0);
}

#[test]
fn config_space_ends_where_it_ends() {
    let mut rig = Rig::new();
    let mut whole = [0xaa; 0x100];
    rig.transport.read(CONFIG, &mut whole);
    assert_eq!(whole[..6], [2, 0, 0, 0, 0, 1]);
    assert_eq!(whole[8..10], PAIRS.to_le_bytes());
    let generation = rig.read(CONFIG_GENERATION);
    let mut past = [0xaa; 4];
    rig.transport.read(CONFIG + 0xfe, &mut past);
    assert_eq!(past, [0; 4]);
    rig.transport.write(CONFIG, &[9; 6]);
    rig.transport.read(CONFIG, &mut whole);
    assert_eq!(whole[0], 2, "it is read-only");
    assert_eq!(rig.read(CONFIG_GENERATION), generation);
}

#[test]
fn entropy_device_takes_no_nonsense_either() {
    let memory = Memory::new(RAM_BYTES).expect("memory");
    let shared = EntropyShared::new(&memory, None).expect("a device");
    let mut queue = EntropyQueue(Arc::clone(&shared));
    let mut transport = Transport::new(Entropy::new(&shared));
    let mut numbers = Numbers(7);
    for _ in 0..2_000 {
        for _ in 0..20 {
            let value = match numbers.below(3) {
                0 => numbers.next() as u32,
                _ => [0, 1, 3, 11, 15, 16, 0x10_0000][numbers.below(7) as usize],
            };
            transport.write(numbers.below(0x40) * 4, &value.to_le_bytes());
            queue.look();
        }
    }
    transport.write(STATUS, &[0; 4]);
    assert_eq!(read(&mut transport, STATUS), 0);
}

#[test]
fn frames_for_a_pair_that_is_not_set_up_are_counted() {
    let mut rig = Rig::new();
    // VIRTIO_NET_F_CTRL_VQ and _MQ; the second pair alone.
    rig.begin(F_VERSION_1 | 1 << 17 | 1 << 22);
    rig.set_up(2, 8, 0x1_0000);
    rig.set_up(3, 8, 0x2_0000);
    rig.write(STATUS, 15);
    assert_eq!(rig.read(STATUS), 15);
    rig.look_at_all();
    let port = rig.transport.device().0.port();
    assert_eq!(port.with(|port| port.no_pair()), 10);
}

/// A driver of one split ring with one buffer, all in the device's memory.
fn ask_for_random_bytes(transport: &mut Transport<Entropy>, memory: &Memory) {
    let rings: [(u64, &[u8]); 2] = [
        // A descriptor of 64 bytes at 0x2_0000 that the device writes; then the available ring with that one.
        (0x1_0000, &[0, 0, 2, 0, 0, 0, 0, 0, 64, 0, 0, 0, 2, 0, 0, 0]),
        (0x1_2000, &[0, 0, 1, 0, 0, 0]),
    ];
    for (at, bytes) in rings {
        memory.write(at, bytes).expect("there is memory");
    }
    for (offset, value) in [
        (STATUS, 3),
        (DRIVER_FEATURES_SEL, 1),
        (DRIVER_FEATURES, 1),
        (STATUS, 11),
        (QUEUE_NUM, 8),
        (QUEUE_DESC, 0x1_0000),
        (QUEUE_DESC + 0x10, 0x1_2000),
        (QUEUE_DESC + 0x20, 0x1_4000),
        (QUEUE_READY, 1),
        (STATUS, 15),
    ] {
        transport.write(offset, &u32::to_le_bytes(value));
    }
}

#[test]
fn entropy_device_without_random_bytes_gives_no_buffer_back() {
    let cases: [(Random, u32, u8); 3] = [
        (|bytes| Ok(bytes.len()), 15, 1),
        (|_| Ok(0), 15 | NEEDS_RESET, 0),
        (|_| Err(std::io::ErrorKind::Other.into()), 15 | NEEDS_RESET, 0),
    ];
    for (random, status, used) in cases {
        let memory = Memory::new(RAM_BYTES).expect("memory");
        let shared = EntropyShared::with_random(&memory, None, random).expect("descriptors");
        let mut transport = Transport::new(Entropy::new(&shared));
        ask_for_random_bytes(&mut transport, &memory);
        EntropyQueue(Arc::clone(&shared)).look();
        assert_eq!(shared.hosts_fault().is_some(), used == 0, "not its driver's");
        let mut index = [0; 2];
        memory.read(0x1_4002, &mut index).expect("there is memory");
        assert_eq!((read(&mut transport, STATUS), index), (status, [used, 0]));
    }
}
