//! One queue pair of a [`Driver`](crate::Driver): frames out with a chosen layout, frames in to chosen buffers.
//!
//! Waits for calls and never polls the ring, so that a call that the device owed and did not make is seen.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vhost::vhost_user::message::VhostUserProtocolFeatures;
use virtqueue::driver::{Buffer, DriverFeatures, GuestRam, QueueDriver, Used};
use virtqueue::{GuestAddr, QueueSize, RingFormat, RingShape};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{DriverConfig, F_EVENT_IDX, F_IN_ORDER, F_MRG_RXBUF, F_RING_PACKED, HEADER};
use crate::wait;

/// The header of a frame without offloads.
const NO_OFFLOAD: [u8; HEADER] = [0; HEADER];
/// Room that a frame is given in guest memory, bytes; and a GSO packet.
const SLOT: u32 = 4096;
const LARGE_SLOT: u32 = 66 << 10;

/// How a frame, header in front, is spread over descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Header and frame in one.
    Whole,
    /// The header in one of its own, the frame in another.
    HeaderApart,
    /// In pieces of so many bytes, chained; the header is cut like the rest.
    Pieces(usize),
    /// As `Pieces`, in an indirect table.
    Indirect(usize),
}

/// A frame that came in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Its virtio-net header.
    pub header: [u8; HEADER],
    /// Its bytes.
    pub frame: Vec<u8>,
    /// Chains that it came in.
    pub chains: usize,
}

/// One vring with its eventfds.
pub struct Ring {
    /// The ring itself; has functions to lie with.
    pub driver: QueueDriver,
    features: DriverFeatures,
    pub(crate) kick: EventFd,
    pub(crate) call: EventFd,
}

impl Ring {
    fn new(ram: &Arc<GuestRam>, config: &DriverConfig, features: u64) -> Self {
        let eventfd = || EventFd::new(EFD_NONBLOCK).expect("a descriptor is left");
        let format = RingFormat::of(features & F_RING_PACKED != 0);
        let size = match format {
            RingFormat::Split => QueueSize::new(config.queue_size),
            RingFormat::Packed => QueueSize::packed(config.queue_size),
        };
        let size = size.expect("a good size");
        let features = DriverFeatures {
            event_idx: features & F_EVENT_IDX != 0,
            in_order: features & F_IN_ORDER != 0,
        };
        let driver = QueueDriver::new(ram, RingShape::new(format, size), features).expect("room for a ring");
        Self {
            driver,
            features,
            kick: eventfd(),
            call: eventfd(),
        }
    }

    /// Takes another ring of this kind, elsewhere in memory, in which nothing ever was.
    fn renew(&mut self, size: QueueSize) {
        let shape = RingShape::new(self.driver.format(), size);
        let ram = Arc::clone(self.driver.ram());
        self.driver = QueueDriver::new(&ram, shape, self.features).expect("room for a ring");
    }

    /// Shows the device what was added, and kicks it if it wants that.
    pub fn publish(&mut self) {
        if self.driver.publish() {
            self.kick();
        }
    }

    /// Kicks the device, whether it wants that or not.
    ///
    /// # Panics
    /// If the eventfd is full.
    pub fn kick(&self) {
        self.kick.write(1).expect("a kick fits");
    }

    /// Fills the call eventfd up: no call fits any more.
    ///
    /// # Panics
    /// If it is not empty.
    pub fn fill_call(&self) {
        self.call.write(u64::MAX - 1).expect("it is empty");
    }

    /// Waits for the next chain that comes back; `None` if there is none in time.
    ///
    /// # Panics
    /// If one is there and no call came for it.
    pub fn await_used(&mut self, limit: Duration) -> Option<Used> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(used) = self.driver.take_used() {
                return Some(used);
            }
            if self.driver.enable_calls() {
                continue;
            }
            if !wait::readable(&self.call, deadline.saturating_duration_since(Instant::now())) {
                // One may have come back just now; its call follows, but not before the device has a CPU again.
                let late = self.driver.take_used()?;
                assert!(
                    wait::readable(&self.call, wait::SOON),
                    "a lost call: the device used a chain and did not say so"
                );
                return Some(late);
            }
            let _ = self.call.read();
        }
    }
}

/// Memory for a frame.
#[derive(Clone, Copy, Debug)]
struct Slot {
    addr: GuestAddr,
    large: bool,
}

/// One queue pair.
pub struct Pair {
    ram: Arc<GuestRam>,
    /// The guest's receive queue.
    pub to_guest: Ring,
    /// The guest's transmit queue.
    pub from_guest: Ring,
    /// Buffers of the chains under way, by head: to read what came, and to post them again.
    posted: HashMap<u16, Vec<Buffer>>,
    /// Memory of the frames under way, by head.
    sending: HashMap<u16, Slot>,
    /// Memory that held frames, to be used again.
    free: Vec<Slot>,
    mergeable: bool,
    /// Receive chains may come back with nothing in them: they come back in any order, and some were with the NIC when
    /// the device was stopped.
    takes_empty: bool,
}

impl Pair {
    /// Rings for a device with those features, which nobody serves yet.
    pub fn new(ram: &Arc<GuestRam>, config: &DriverConfig, features: u64) -> Self {
        Self {
            ram: Arc::clone(ram),
            to_guest: Ring::new(ram, config, features),
            from_guest: Ring::new(ram, config, features),
            posted: HashMap::new(),
            sending: HashMap::new(),
            free: Vec::new(),
            mergeable: features & F_MRG_RXBUF != 0,
            takes_empty: config
                .protocol
                .contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD)
                && features & F_IN_ORDER == 0,
        }
    }

    /// The ring of a vring of that number: the receive queue's are even.
    pub fn ring(&self, index: usize) -> &Ring {
        match index % 2 {
            0 => &self.to_guest,
            _ => &self.from_guest,
        }
    }

    /// Resets the ring of a vring of that number, which the device has stopped: it is another one now. Receive buffers
    /// are posted there again; frames that were to be sent are forgotten, and their number is returned.
    ///
    /// # Panics
    /// If memory is full.
    pub fn renew(&mut self, index: usize) -> usize {
        self.resize(index, self.ring(index).driver.size())
    }

    /// As [`renew`](Self::renew), with so many entries.
    ///
    /// # Panics
    /// If memory is full, or the ring too short for the receive buffers.
    pub fn resize(&mut self, index: usize, size: QueueSize) -> usize {
        if index % 2 == 1 {
            self.reap_sent();
            let left = self.from_guest.driver.in_flight();
            self.from_guest.renew(size);
            self.free.extend(self.sending.drain().map(|(_, slot)| slot));
            return left;
        }
        let posted: Vec<_> = self.posted.drain().map(|(_, buffers)| buffers).collect();
        self.to_guest.renew(size);
        for buffers in posted {
            self.post_buffers(buffers);
        }
        self.to_guest.publish();
        0
    }

    /// Memory of the guest.
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// Sends one frame, and shows it to the device at once.
    pub fn send(&mut self, frame: &[u8], layout: Layout) {
        self.send_batch(&[frame], layout);
    }

    /// Sends frames, shown to the device together.
    ///
    /// # Panics
    /// If the ring has no room although the device was given time, or a frame is too long for this model (4084 bytes).
    pub fn send_batch(&mut self, frames: &[&[u8]], layout: Layout) {
        for frame in frames {
            self.add(NO_OFFLOAD, frame, layout);
        }
        self.from_guest.publish();
    }

    /// Sends frames with virtio-net headers of the caller's, shown to the device together.
    ///
    /// # Panics
    /// If the ring has no room although the device was given time, or a frame is longer than 66 KiB.
    pub fn send_asking(&mut self, frames: &[([u8; HEADER], &[u8])], layout: Layout) {
        for (header, frame) in frames {
            self.add(*header, frame, layout);
        }
        self.from_guest.publish();
    }

    fn add(&mut self, header: [u8; HEADER], frame: &[u8], layout: Layout) {
        let bytes = [&header[..], frame].concat();
        let slot = self.slot(bytes.len());
        self.ram.write(slot.addr, &bytes);
        let buffers: Vec<_> = pieces(slot.addr, bytes.len(), layout);
        let head = self.add_or_wait(&buffers, matches!(layout, Layout::Indirect(_)));
        self.sending.insert(head, slot);
    }

    /// Sends what the buffers hold, which the caller wrote, and returns the head.
    ///
    /// # Panics
    /// As [`send_batch`](Self::send_batch).
    pub fn send_buffers(&mut self, buffers: &[Buffer], indirect: bool) -> u16 {
        let head = self.add_or_wait(buffers, indirect);
        self.from_guest.publish();
        head
    }

    /// Sends frames that lie in these buffers, one each, which the caller wrote, shown to the device together.
    ///
    /// # Panics
    /// As [`send_batch`](Self::send_batch).
    pub fn send_each(&mut self, frames: &[Buffer]) {
        for frame in frames {
            self.add_or_wait(std::slice::from_ref(frame), false);
        }
        self.from_guest.publish();
    }

    fn add_or_wait(&mut self, buffers: &[Buffer], indirect: bool) -> u16 {
        loop {
            let ring = &mut self.from_guest;
            let head = if indirect {
                ring.driver.add_indirect(buffers)
            } else {
                ring.driver.add(buffers)
            };
            if let Some(head) = head {
                return head;
            }
            ring.publish();
            assert!(
                self.reap(wait::SOON),
                "the device gives nothing back: the transmit queue is full"
            );
        }
    }

    fn slot(&mut self, len: usize) -> Slot {
        let large = len > SLOT as usize;
        if let Some(at) = self.free.iter().rposition(|slot| slot.large == large) {
            return self.free.swap_remove(at);
        }
        let size = if large { LARGE_SLOT } else { SLOT };
        let addr = self.ram.alloc(size.into(), 64).expect("guest memory is left");
        Slot { addr, large }
    }

    /// Takes back one frame that was sent.
    fn reap(&mut self, limit: Duration) -> bool {
        let Some(used) = self.from_guest.await_used(limit) else {
            return false;
        };
        self.free.extend(self.sending.remove(&used.head));
        true
    }

    /// Whether less than half of the transmit ring is under way.
    pub fn has_room(&self) -> bool {
        let ring = &self.from_guest.driver;
        2 * ring.in_flight() < ring.size().get().into()
    }

    /// Takes back what the device has given back of what was sent, as Linux does before it sends. Looks at the ring and
    /// waits for no call.
    pub fn reap_sent(&mut self) {
        while let Some(used) = self.from_guest.driver.take_used() {
            self.free.extend(self.sending.remove(&used.head));
        }
    }

    /// Waits until the device has given everything back that was sent.
    ///
    /// # Panics
    /// If it does not.
    pub fn await_sent(&mut self) {
        while self.from_guest.driver.in_flight() > 0 {
            assert!(
                self.reap(wait::SOON),
                "{} frames never came back",
                self.from_guest.driver.in_flight()
            );
        }
    }

    /// Posts `count` receive chains, each of buffers with the given lengths, and shows them together.
    ///
    /// # Panics
    /// If ring or memory is full.
    pub fn post(&mut self, count: usize, lengths: &[u32]) {
        for _ in 0..count {
            let buffer = |&len: &u32| {
                let addr = self.ram.alloc(u64::from(len), 64).expect("guest memory is left");
                Buffer::writable(addr, len)
            };
            let buffers: Vec<_> = lengths.iter().map(buffer).collect();
            self.post_buffers(buffers);
        }
        self.to_guest.publish();
    }

    /// Posts one chain of buffers of the caller's choice; not shown yet, see [`Ring::publish`].
    ///
    /// # Panics
    /// If the ring is full.
    pub fn post_buffers(&mut self, buffers: Vec<Buffer>) {
        let head = self
            .to_guest
            .driver
            .add(&buffers)
            .expect("room in the receive queue");
        self.posted.insert(head, buffers);
    }

    /// Receive buffers that the device has.
    pub fn posted(&self) -> impl Iterator<Item = &Buffer> {
        self.posted.values().flatten()
    }

    /// Does not count on its receive buffers any more, for a queue that is to be reset.
    pub fn forget_posted(&mut self) {
        self.posted.clear();
    }

    /// The next frame, or `None` if none comes in time. Its chains are posted again.
    ///
    /// # Panics
    /// If the device breaks the rules: a used length shorter than the header, too few chains for `num_buffers`.
    pub fn receive(&mut self, limit: Duration) -> Option<Received> {
        let mut limit = Some(limit);
        self.receive_by(|ring| ring.await_used(limit.take().unwrap_or_default()))
    }

    /// What comes in before `last`, a frame like no other that was sent behind everything else on the same way.
    ///
    /// # Panics
    /// If it never comes; as [`receive`](Self::receive).
    #[track_caller]
    pub fn receive_before(&mut self, last: &[u8]) -> Vec<Received> {
        let mut before = Vec::new();
        loop {
            match self.receive(wait::SOON) {
                Some(got) if got.frame == last => return before,
                Some(got) => before.push(got),
                None => panic!("the last frame does not come; {} came before", before.len()),
            }
        }
    }

    /// The next frame if one is there now, else `None`. Looks at the ring and waits for no call, as there may be
    /// nobody to make one. Its chains are posted again.
    ///
    /// # Panics
    /// As [`receive`](Self::receive).
    pub fn poll(&mut self) -> Option<Received> {
        self.receive_by(|ring| ring.driver.take_used())
    }

    /// Takes a frame from the used chains that `next` finds.
    fn receive_by(&mut self, mut next: impl FnMut(&mut Ring) -> Option<Used>) -> Option<Received> {
        let (head, bytes) = loop {
            let used = next(&mut self.to_guest)?;
            let (head, bytes) = self.contents(used);
            if !(self.takes_empty && bytes.is_empty()) {
                break (head, bytes);
            }
            self.post_buffers(head);
            self.to_guest.publish();
        };
        let header: [u8; HEADER] = bytes
            .get(..HEADER)
            .expect("a whole header")
            .try_into()
            .expect("its length");
        let count = u16::from_le_bytes([header[10], header[11]]);
        assert!(
            count == 1 || (self.mergeable && count > 1),
            "num_buffers is {count}"
        );
        let mut frame = bytes[HEADER..].to_vec();
        let mut heads = vec![head];
        for _ in 1..count {
            let used = next(&mut self.to_guest).expect("all chains of a frame come together");
            let (head, bytes) = self.contents(used);
            frame.extend(bytes);
            heads.push(head);
        }
        let chains = heads.len();
        for buffers in heads {
            self.post_buffers(buffers);
        }
        self.to_guest.publish();
        Some(Received {
            header,
            frame,
            chains,
        })
    }

    /// The next receive chain that has come back, whatever is in it: its buffers, which are not posted again, and what
    /// the device says it wrote.
    ///
    /// # Panics
    /// If the device says that it wrote more than the chain holds.
    pub fn take_chain(&mut self) -> Option<(Vec<Buffer>, Vec<u8>)> {
        let used = self.to_guest.driver.take_used()?;
        Some(self.contents(used))
    }

    /// One chain that came back: its buffers, and the bytes that the device says it wrote.
    fn contents(&mut self, used: Used) -> (Vec<Buffer>, Vec<u8>) {
        let buffers = self.posted.remove(&used.head).expect("it was posted");
        let mut left = used.len as usize;
        let mut bytes = Vec::with_capacity(left);
        for buffer in &buffers {
            let len = left.min(buffer.len as usize);
            bytes.extend(self.ram.read_vec(buffer.addr, len));
            left -= len;
        }
        assert_eq!(left, 0, "the device says that it wrote more than the chain holds");
        (buffers, bytes)
    }
}

/// Cuts `len` bytes at `addr` into readable buffers.
fn pieces(addr: GuestAddr, len: usize, layout: Layout) -> Vec<Buffer> {
    let cut = |at: usize, len: usize| {
        let addr = addr.checked_add(at as u64).expect("inside memory");
        Buffer::readable(addr, u32::try_from(len).expect("short"))
    };
    match layout {
        Layout::HeaderApart if len > HEADER => vec![cut(0, HEADER), cut(HEADER, len - HEADER)],
        Layout::Whole | Layout::HeaderApart => vec![cut(0, len)],
        Layout::Pieces(size) | Layout::Indirect(size) => (0..len)
            .step_by(size)
            .map(|at| cut(at, size.min(len - at)))
            .collect(),
    }
}
