//! What the targets of the two kinds of ring share. See `split_ring`.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use arbitrary::Arbitrary;
use virtqueue::driver::{Buffer, GuestRam, PackedDriver, QueueDriver, SplitDriver};
use virtqueue::layout::{Descriptor, PackedDescriptor};
use virtqueue::{
    Chain, ChainId, Chains, FileRange, GuestAddr, InflightFile, InflightRegion, InflightShape, Journal,
    MemoryMap, Queue, QueueFeatures, QueueStart, RingFormat, RingLayout, TrustedFiles,
};

#[derive(Arbitrary, Debug)]
struct Input {
    size: u8,
    event_idx: bool,
    indirect: bool,
    in_order: bool,
    start: u16,
    notes: Notes,
    steps: Vec<Step>,
}

/// Where the device notes what is under way.
#[derive(Arbitrary, Clone, Copy, Debug, PartialEq)]
enum Notes {
    None,
    Ring,
    Inflight,
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
        fields: Fields,
    },
    TableEntry {
        table: u16,
        at: u8,
        fields: Fields,
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
    /// The VMM writes to the inflight region.
    Note {
        offset: u16,
        value: u16,
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
    /// It stops, and another goes on from where it says that it stood.
    Restart,
    /// It dies, and another goes on from what the ring tells.
    Crash,
}

/// A descriptor of either kind of ring.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct Fields {
    addr: Addr,
    len: Len,
    flags: u16,
    /// Of a packed ring, the id.
    next: u8,
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

impl Fields {
    fn split(self) -> Descriptor {
        Descriptor {
            addr: self.addr.get(),
            len: self.len.get(),
            flags: self.flags,
            next: self.next.into(),
        }
    }

    fn packed(self) -> PackedDescriptor {
        PackedDescriptor {
            addr: self.addr.get(),
            len: self.len.get(),
            id: self.next.into(),
            flags: self.flags,
        }
    }
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
/// Slot 0 in the first lap, for what is taken and for what is used.
const FIRST_PACKED_BASE: u32 = 0x8000_8000;

/// A driver, a device, and what the test knows of both.
struct Scene {
    driver: QueueDriver,
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
    notes: Notes,
    inflight: Option<(OwnedFd, Arc<InflightRegion>)>,
    /// How many of `shown` the device has taken.
    taken: usize,
    /// Elements used and not told yet.
    untold: usize,
}

/// Runs one input on a split ring.
pub fn run_split(data: &[u8]) {
    run(data, RingFormat::Split);
}

/// Runs one input on a packed ring.
pub fn run_packed(data: &[u8]) {
    run(data, RingFormat::Packed);
}

fn run(data: &[u8], format: RingFormat) {
    let Some(input) = crate::decode::<Input>(data) else {
        return;
    };
    let mut scene = Scene::new(&input, format);
    for step in input.steps.iter().take(MOST_STEPS) {
        if !scene.step(step) {
            return;
        }
    }
    if !scene.lied {
        scene.finish();
    }
}

impl Scene {
    fn new(input: &Input, format: RingFormat) -> Self {
        let size = match format {
            RingFormat::Split => 1 << (input.size % 7),
            // Any number of entries.
            RingFormat::Packed => u32::from(input.size % 70) + 1,
        };
        let features = QueueFeatures {
            event_idx: input.event_idx,
            indirect: input.indirect,
            in_order: input.in_order,
            packed: format == RingFormat::Packed,
        };
        let ram = GuestRam::new(&[(GuestAddr(0), REGION), (GuestAddr(HIGH), REGION)]).expect("memory");
        let ram = Arc::new(ram);
        let mut driver = QueueDriver::for_device(&ram, size, features);
        let size = driver.size();
        match &mut driver {
            QueueDriver::Split(driver) => driver.start_at(input.start),
            QueueDriver::Packed(driver) => {
                driver.start_at((input.start >> 1) % size.get(), input.start & 1 != 0);
            }
        }
        let memory = Arc::new(
            MemoryMap::new(ram.regions().expect("descriptors"), 4096, &TrustedFiles).expect("mapped"),
        );
        let rings = driver.rings(&memory);
        let inflight = (input.notes == Notes::Inflight).then(|| {
            let shape = InflightShape {
                queues: 1,
                entries: size.get(),
                packed: features.packed,
            };
            let InflightFile { file, bytes } = InflightRegion::create(shape).expect("memory");
            let range = FileRange { offset: 0, bytes };
            let region =
                InflightRegion::open(file.as_fd(), range, shape, &TrustedFiles).expect("made for it");
            (file, Arc::new(region))
        });
        let start = QueueStart {
            base: driver.base(),
            journal: journal(input.notes, inflight.as_ref()),
            log: None,
        };
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
            notes: input.notes,
            inflight,
            taken: 0,
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
            | Step::IndexBy { .. }
            | Step::Note { .. } => {
                self.lied = true;
                self.lie(step);
            }
            Step::Pop { max } => return self.pop((*max).into()),
            Step::Unpop { keep } => self.unpop((*keep).into()),
            Step::Use { chains, len } => self.give_back((*chains).into(), *len),
            Step::Tell => self.tell(),
            Step::EnableKicks => drop(self.queue.enable_kicks()),
            Step::DisableKicks => self.queue.disable_kicks(),
            Step::Restart => return self.restart(),
            Step::Crash => return self.crash(),
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
        if let Step::Word { offset, value } = *step {
            // The rings are at the beginning of the first region.
            let offset = u64::from(offset % 8192) * 2;
            assert!(
                self.driver
                    .ram()
                    .map()
                    .copy_to_guest(offset, &value.to_le_bytes())
            );
            return;
        }
        if let Step::Note { offset, value } = *step {
            // What lies behind the end is refused (sealed), and nothing then.
            let at = u64::from(offset % 4096);
            let _ = self
                .inflight
                .as_ref()
                .map(|(file, _)| rustix::io::pwrite(file, &value.to_ne_bytes(), at));
            return;
        }
        match &self.driver {
            QueueDriver::Split(driver) => lie_split(driver, step),
            QueueDriver::Packed(driver) => lie_packed(driver, step),
        }
    }

    fn pop(&mut self, max: usize) -> bool {
        let room = usize::from(self.queue.size().get()).saturating_sub(self.out.len());
        match self.queue.pop(&mut self.chains, max) {
            Err(fault) => {
                assert!(self.lied, "an honest driver was accused: {fault}");
                assert!(!fault.name().is_empty() && !fault.to_string().is_empty());
                return false;
            }
            Ok(count) => {
                assert_eq!(count, self.chains.len());
                assert!(count <= max);
                // A liar may have any number out: then the device's own rings are the bound.
                assert!(self.lied || count <= room, "{count} chains, room for {room}");
            }
        }
        for chain in &self.chains {
            self.check(chain);
        }
        if !self.lied {
            self.check_order();
        }
        self.out.extend(self.chains.iter().map(|chain| chain.id));
        true
    }

    /// What an honest driver showed comes out, once and in order.
    fn check_order(&mut self) {
        for chain in &self.chains {
            let (at, got) = (self.taken, chain.id);
            let shown = self.shown.get(at).expect("a chain out of nowhere");
            assert_eq!(got.head, shown.0, "out of order");
            let lens = self.chains.buffers(chain).iter().map(|buffer| buffer.len);
            assert!(lens.eq(shown.1.iter().map(|buffer| buffer.len)));
            self.taken = at + 1;
        }
    }

    fn check(&self, chain: &Chain) {
        let sum =
            |buffers: &[virtqueue::Buffer]| buffers.iter().map(|buffer| u64::from(buffer.len)).sum::<u64>();
        assert_eq!(sum(self.chains.readable(chain)), u64::from(chain.readable_bytes));
        assert_eq!(sum(self.chains.writable(chain)), u64::from(chain.writable_bytes));
        let buffers = self.chains.buffers(chain);
        assert!(!buffers.is_empty());
        for buffer in buffers {
            let (start, end) = (buffer.offset, buffer.offset + u64::from(buffer.len));
            let inside = self.memory.regions().iter().any(|region| {
                let from = region.map_offset();
                from <= start && end <= from + region.len() && start - from >= buffer.room_before.into()
            });
            assert!(buffer.len > 0 && inside, "{buffer:?} is in no region");
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
        self.taken = self.taken.saturating_sub(back);
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
        self.queue.publish();
        let told = std::mem::take(&mut self.untold);
        let came = self.take_used();
        assert!(self.lied || came == told, "{told} were used, {came} came");
    }

    /// The driver takes what came back; how many.
    fn take_used(&mut self) -> usize {
        let mut came = 0;
        // The books of a liar say nothing.
        while !self.lied
            && let Some(used) = self.driver.take_used()
        {
            let (head, _) = self.shown.pop_front().expect("it was shown");
            assert_eq!(used.head, head, "each comes back once, in order");
            self.taken = self.taken.saturating_sub(1);
            came += 1;
        }
        came
    }

    fn restart(&mut self) -> bool {
        self.tell();
        let slots = self.out.iter().map(|id| id.slots).sum();
        self.queue.unpop(slots);
        self.taken = self.taken.saturating_sub(self.out.len());
        self.succeed(self.queue.base())
    }

    fn crash(&mut self) -> bool {
        let untold = std::mem::take(&mut self.untold);
        let (out, shown) = (self.out.len(), self.shown.len());
        self.taken = 0;
        let went_on = self.succeed(match &self.driver {
            QueueDriver::Split(driver) => driver.used_idx().into(),
            // What the VMM knew when the ring was new.
            QueueDriver::Packed(_) => FIRST_PACKED_BASE,
        });
        // The successor may tell what its predecessor had used, and nothing else.
        let came = self.take_used();
        assert!(self.lied || came <= untold, "{untold} were used, {came} came");
        let noted = self.queue.taken_before();
        match self.notes {
            Notes::None => assert_eq!(noted, 0),
            _ => assert!(
                !went_on || self.lied || (out..=shown).contains(&noted),
                "{noted} are noted as taken, of {shown}; {out} were"
            ),
        }
        went_on
    }

    fn succeed(&mut self, base: u32) -> bool {
        self.out.clear();
        self.chains.clear();
        let start = QueueStart {
            base,
            journal: journal(self.notes, self.inflight.as_ref()),
            log: None,
        };
        match Queue::new(&self.memory, self.rings, self.features, start) {
            Ok(queue) => self.queue = queue,
            Err(error) => {
                assert!(self.lied, "an honest driver's ring is refused: {error}");
                return false;
            }
        }
        true
    }

    /// An honest driver gets everything back.
    fn finish(&mut self) {
        for _ in 0..=self.shown.len() {
            self.pop(usize::MAX);
            self.give_back(usize::MAX, 0);
            self.tell();
        }
        assert!(
            self.shown.is_empty(),
            "{} chains never came back",
            self.shown.len()
        );
    }
}

fn journal(notes: Notes, inflight: Option<&(OwnedFd, Arc<InflightRegion>)>) -> Journal {
    match (notes, inflight) {
        (Notes::Ring, _) => Journal::Ring,
        (_, Some((_, region))) => Journal::Inflight(region.queue(0).expect("there is one")),
        _ => Journal::None,
    }
}

fn lie_split(driver: &SplitDriver, step: &Step) {
    match *step {
        Step::Descriptor { at, fields } => {
            driver.write_descriptor(u16::from(at) % driver.size().get(), fields.split());
        }
        Step::TableEntry { table, at, fields } => {
            driver.write_table_entry(GuestAddr(u64::from(table / 2)), (at % 64).into(), fields.split());
        }
        Step::Entry { at, head } => driver.set_avail_entry(at, head.into()),
        Step::Index { value } => driver.set_avail_idx(value),
        Step::IndexBy { by } => driver.set_avail_idx(driver.avail_idx().wrapping_add_signed(by.into())),
        _ => {}
    }
}

fn lie_packed(driver: &PackedDriver, step: &Step) {
    let (next_slot, wrap) = (driver.next_slot(), driver.wrap_counter());
    match *step {
        Step::Descriptor { at, fields } => {
            driver.write_slot(u16::from(at) % driver.size().get(), fields.packed());
        }
        Step::TableEntry { table, at, fields } => {
            driver.write_table_entry(GuestAddr(u64::from(table / 2)), (at % 64).into(), fields.packed());
        }
        // Makes a slot available, or what it is not.
        Step::Entry { at, head } => {
            let slot = at % driver.size().get();
            let flags = PackedDriver::available_flags(slot, head & 1 != 0) | u16::from(head >> 1);
            driver.write_slot(
                slot,
                PackedDescriptor {
                    flags,
                    ..driver.read_slot(slot)
                },
            );
        }
        Step::Index { value } => driver.set_driver_events(u32::from(value) << 8),
        Step::IndexBy { by } => {
            let flags = PackedDriver::available_flags(next_slot, wrap) ^ u16::from(by.unsigned_abs());
            driver.write_slot(
                next_slot,
                PackedDescriptor {
                    flags,
                    ..driver.read_slot(next_slot)
                },
            );
        }
        _ => {}
    }
}
