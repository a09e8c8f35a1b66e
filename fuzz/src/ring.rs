//! What the targets of the two kinds of ring share. See `split_ring`.

use std::collections::VecDeque;
use std::sync::Arc;

use arbitrary::Arbitrary;
use virtqueue::driver::{Buffer, DriverFeatures, GuestRam, SplitDriver};
use virtqueue::layout::Descriptor;
use virtqueue::{
    Chain, ChainId, Chains, GuestAddr, MemoryMap, Queue, QueueFeatures, QueueSize, QueueStart, RingLayout,
};

#[derive(Arbitrary, Debug)]
struct Input {
    size: u8,
    event_idx: bool,
    indirect: bool,
    in_order: bool,
    start: u16,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    // The driver, as it should be.
    Add {
        indirect: bool,
        buffers: Vec<(u16, u16, bool)>,
    },
    Publish,
    EnableCalls,
    DisableCalls,
    // The driver, as it should not be.
    Word {
        offset: u16,
        value: u16,
    },
    Descriptor {
        at: u8,
        addr: Addr,
        len: Len,
        flags: u16,
        next: u8,
    },
    TableEntry {
        table: u16,
        at: u8,
        addr: Addr,
        len: Len,
        flags: u16,
        next: u8,
    },
    Entry {
        at: u16,
        head: u8,
    },
    Index {
        value: u16,
    },
    IndexBy {
        by: i8,
    },
    // The device.
    Pop {
        max: u8,
    },
    Unpop {
        keep: u8,
    },
    Use {
        chains: u8,
        len: u32,
    },
    Tell,
    EnableKicks,
    DisableKicks,
    Restart,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Addr {
    In(u16),
    High(u16),
    Any(u64),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Len {
    Short(u16),
    Any(u32),
}

impl Addr {
    fn get(self) -> u64 {
        match self {
            Self::In(offset) => u64::from(offset),
            Self::High(offset) => HIGH + u64::from(offset),
            Self::Any(addr) => addr,
        }
    }
}

impl Len {
    fn get(self) -> u32 {
        match self {
            Self::Short(len) => len.into(),
            Self::Any(len) => len,
        }
    }
}

const HIGH: u64 = 1 << 32;
const REGION: u64 = 1 << 16;
const MOST_STEPS: usize = 256;

/// A driver, a device, and what the test knows of both.
struct Scene {
    driver: SplitDriver,
    queue: Queue,
    memory: Arc<MemoryMap>,
    rings: RingLayout,
    features: QueueFeatures,
    chains: Chains,
    /// Taken by the device and not used yet.
    out: VecDeque<ChainId>,
    /// Shown by the driver and not come back; its buffers.
    shown: VecDeque<(u16, Vec<Buffer>)>,
    added: VecDeque<(u16, Vec<Buffer>)>,
    lied: bool,
    /// Elements used and not told yet.
    untold: u16,
}

/// Runs one input on a split ring.
pub fn run_split(data: &[u8]) {
    let Some(input) = crate::decode::<Input>(data) else {
        return;
    };
    let mut scene = Scene::new(&input);
    for step in input.steps.iter().take(MOST_STEPS) {
        if !scene.step(step) {
            return;
        }
    }
}

impl Scene {
    fn new(input: &Input) -> Self {
        let size = QueueSize::new(1 << (input.size % 7)).expect("a power of two");
        let features = QueueFeatures {
            event_idx: input.event_idx,
            indirect: input.indirect,
            in_order: input.in_order,
        };
        let ram = GuestRam::new(&[(GuestAddr(0), REGION), (GuestAddr(HIGH), REGION)]).expect("memory");
        let ram = Arc::new(ram);
        let known = DriverFeatures {
            event_idx: input.event_idx,
            in_order: input.in_order,
        };
        let mut driver = SplitDriver::new(&ram, size, known).expect("room");
        driver.start_at(input.start);
        let memory = Arc::new(MemoryMap::new(ram.regions().expect("descriptors"), 4096).expect("mapped"));
        let rings = RingLayout::from_user(&memory, size, driver.ring_user_addresses()).expect("inside");
        let start = QueueStart::at(input.start.into());
        let queue = Queue::new(&memory, rings, features, start).expect("a good ring");
        Self {
            driver,
            queue,
            rings,
            features,
            chains: Chains::for_queue(size, 32),
            memory,
            out: VecDeque::new(),
            shown: VecDeque::new(),
            added: VecDeque::new(),
            lied: false,
            untold: 0,
        }
    }

    /// False when the device has closed the port.
    fn step(&mut self, step: &Step) -> bool {
        match step {
            Step::Add { indirect, buffers } => self.add(*indirect && self.features.indirect, buffers),
            Step::Publish => {
                self.driver.publish();
                self.shown.append(&mut self.added);
            }
            Step::EnableCalls => drop(self.driver.enable_calls()),
            Step::DisableCalls => self.driver.disable_calls(),
            Step::Word { .. }
            | Step::Descriptor { .. }
            | Step::TableEntry { .. }
            | Step::Entry { .. }
            | Step::Index { .. }
            | Step::IndexBy { .. } => {
                self.lied = true;
                self.lie(step);
            }
            Step::Pop { max } => return self.pop((*max).into()),
            Step::Unpop { keep } => self.unpop((*keep).into()),
            Step::Use { chains, len } => self.give_back((*chains).into(), *len),
            Step::Tell => self.tell(),
            Step::EnableKicks => drop(self.queue.enable_kicks()),
            Step::DisableKicks => self.queue.disable_kicks(),
            Step::Restart => self.restart(),
        }
        true
    }

    fn add(&mut self, indirect: bool, buffers: &[(u16, u16, bool)]) {
        let writable_from = buffers
            .iter()
            .position(|buffer| buffer.2)
            .unwrap_or(buffers.len());
        let make = |(at, &(addr, len, _)): (usize, &(u16, u16, bool))| Buffer {
            addr: GuestAddr(HIGH + u64::from(addr)),
            // Inside the region, and not empty.
            len: u32::from(len).clamp(1, (REGION - u64::from(addr)) as u32),
            writable: at >= writable_from,
        };
        let buffers: Vec<_> = buffers.iter().enumerate().map(make).take(8).collect();
        // A table has as many entries as the queue at most; a liar's own books are not to be relied on.
        if buffers.is_empty() || buffers.len() > usize::from(self.driver.size().get()) || self.lied {
            return;
        }
        let head = if indirect {
            self.driver.add_indirect(&buffers)
        } else {
            self.driver.add(&buffers)
        };
        self.added.extend(head.map(|head| (head, buffers)));
    }

    fn lie(&mut self, step: &Step) {
        match *step {
            Step::Word { offset, value } => {
                // The rings are at the beginning of the first region.
                let offset = u64::from(offset % 8192) * 2;
                assert!(self.driver.ram().map().write_obj(offset, &value));
            }
            Step::Descriptor {
                at,
                addr,
                len,
                flags,
                next,
            } => {
                let at = u16::from(at) % self.driver.size().get();
                self.driver
                    .write_descriptor(at, descriptor(addr, len, flags, next));
            }
            Step::TableEntry {
                table,
                at,
                addr,
                len,
                flags,
                next,
            } => {
                let table = GuestAddr(u64::from(table / 2));
                let entry = descriptor(addr, len, flags, next);
                self.driver.write_table_entry(table, (at % 64).into(), entry);
            }
            Step::Entry { at, head } => self.driver.set_avail_entry(at, head.into()),
            Step::Index { value } => self.driver.set_avail_idx(value),
            Step::IndexBy { by } => {
                let index = self.driver.avail_idx().wrapping_add_signed(by.into());
                self.driver.set_avail_idx(index);
            }
            _ => unreachable!("not a lie"),
        }
    }

    fn pop(&mut self, max: usize) -> bool {
        let room = usize::from(self.queue.size().get()) - self.out.len();
        match self.queue.pop(&mut self.chains, max) {
            Err(fault) => {
                assert!(self.lied, "an honest driver was accused: {fault}");
                assert!(!fault.name().is_empty() && !fault.to_string().is_empty());
                return false;
            }
            Ok(count) => {
                assert_eq!(count, self.chains.len());
                assert!(
                    count <= max && count <= room,
                    "{count} chains, of {max}, room for {room}"
                );
            }
        }
        for chain in &self.chains {
            self.check(chain);
        }
        if !self.lied {
            let expected = self.shown.iter().skip(self.out.len() + usize::from(self.untold));
            for (chain, (head, buffers)) in self.chains.iter().zip(expected) {
                let lens = self.chains.segments(chain).iter().map(|segment| segment.len);
                assert_eq!(chain.id.head, *head, "out of order");
                assert!(lens.eq(buffers.iter().map(|buffer| buffer.len)));
            }
            let taken = self.out.len() + usize::from(self.untold) + self.chains.len();
            assert!(taken <= self.shown.len(), "chains out of nowhere");
        }
        self.out.extend(self.chains.iter().map(|chain| chain.id));
        true
    }

    fn check(&self, chain: &Chain) {
        let sum = |segments: &[virtqueue::Segment]| {
            segments.iter().map(|segment| u64::from(segment.len)).sum::<u64>()
        };
        assert_eq!(sum(self.chains.readable(chain)), u64::from(chain.readable_bytes));
        assert_eq!(sum(self.chains.writable(chain)), u64::from(chain.writable_bytes));
        let segments = self.chains.segments(chain);
        assert!(!segments.is_empty());
        for segment in segments {
            let (start, end) = (segment.offset, segment.offset + u64::from(segment.len));
            let inside = self.memory.regions().iter().any(|region| {
                let from = region.map_offset();
                from <= start && end <= from + region.len() && start - from >= segment.room_before.into()
            });
            assert!(segment.len > 0 && inside, "{segment:?} is in no region");
        }
    }

    /// The device changes its mind about the youngest chains.
    fn unpop(&mut self, keep: usize) {
        let keep = keep.min(self.chains.len());
        let back = self.chains.len() - keep;
        // Only those of the last pop that are still out.
        if back > self.out.len() {
            return;
        }
        self.queue.unpop(self.chains.slots(keep));
        self.chains.truncate(keep);
        self.out.truncate(self.out.len() - back);
    }

    fn give_back(&mut self, count: usize, len: u32) {
        for _ in 0..count.min(self.out.len()) {
            let id = self.out.pop_front().expect("counted");
            self.queue.push_used(id, len);
            self.untold += 1;
        }
        // What was given back cannot be unpopped.
        self.chains.clear();
    }

    fn tell(&mut self) {
        let before = self.driver.used_idx();
        self.queue.publish();
        let told = std::mem::take(&mut self.untold);
        if self.lied {
            return;
        }
        assert_eq!(self.driver.used_idx(), before.wrapping_add(told));
        for _ in 0..told {
            let (head, _) = self.shown.pop_front().expect("it was shown");
            let used = self.driver.take_used().expect("it was told");
            assert_eq!(used.head, head, "each comes back once, in order");
        }
        assert!(self.driver.take_used().is_none());
    }

    /// The device stops and another goes on.
    fn restart(&mut self) {
        self.tell();
        let count = u16::try_from(self.out.len()).expect("within the ring");
        self.queue.unpop(count);
        self.out.clear();
        self.chains.clear();
        let start = QueueStart::at(self.queue.base());
        self.queue = Queue::new(&self.memory, self.rings, self.features, start).expect("as before");
    }
}

fn descriptor(addr: Addr, len: Len, flags: u16, next: u8) -> Descriptor {
    Descriptor {
        addr: addr.get(),
        len: len.get(),
        flags,
        next: next.into(),
    }
}
