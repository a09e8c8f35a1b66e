//! The driver of one packed virtqueue (VirtIO 1.3, 2.8.21 and 2.8.22).

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::ring::DriverRing;
use super::{Buffer, DriverFeatures, GuestRam, RamError, Used};
use crate::cell::Cell;
use crate::layout::{self, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, PackedDescriptor};
use crate::packed_notify::{self as notify, EventSuppression};
use crate::position::Position;
use crate::{GuestAddr, QueueSize, RingFormat, RingShape};

/// The driver's side of one packed virtqueue. A chain is named by its buffer id.
#[derive(Debug)]
pub struct PackedDriver {
    ring: DriverRing,
    /// Ids that are free, front first.
    free_ids: VecDeque<u16>,
    free_slots: u16,
    /// Slots of each chain in flight, by id.
    slots: Vec<u16>,
    /// Where the next descriptor is written.
    next: Position,
    /// Where the next used descriptor is read.
    used: Position,
    /// Slots added and not published, and the second word of the first of them, which is kept back.
    unpublished: u16,
    first: (u16, u64),
}

impl Deref for PackedDriver {
    type Target = DriverRing;

    fn deref(&self) -> &DriverRing {
        &self.ring
    }
}

impl PackedDriver {
    /// Makes a ring of `size` entries in `ram`.
    ///
    /// # Errors
    /// No room.
    pub fn new(ram: &Arc<GuestRam>, size: QueueSize, features: DriverFeatures) -> Result<Self, RamError> {
        let (entries, shape) = (size.get(), RingShape::new(RingFormat::Packed, size));
        Ok(Self {
            ring: DriverRing::new(ram, shape, features)?,
            free_ids: (0..entries).collect(),
            free_slots: entries,
            slots: vec![0; usize::from(entries)],
            next: Position::START,
            used: Position::START,
            unpublished: 0,
            first: (0, 0),
        })
    }

    /// Moves to slot `offset` of a lap with wrap counter `wrap`, as after some laps, and prepares the ring as a device
    /// would have left it: for tests of the wrap. Only before the first `add`.
    pub fn start_at(&mut self, offset: u16, wrap: bool) {
        assert!(self.ring.order.is_empty(), "chains are under way");
        assert!(offset < self.ring.size.get(), "a slot of the ring");
        let at = Position { offset, wrap };
        (self.next, self.used) = (at, at);
        for step in 1..=self.ring.size.get() {
            let passed = at.back(step, self.ring.size);
            let flags = passed.used_flags();
            self.write_slot(
                passed.offset,
                PackedDescriptor {
                    flags,
                    ..PackedDescriptor::default()
                },
            );
        }
    }

    /// Slots that are free.
    pub fn free_descriptors(&self) -> usize {
        self.free_slots.into()
    }

    /// The position from which the device must continue, in the form of VHOST_USER_SET_VRING_BASE.
    pub fn base(&self) -> u32 {
        u32::from(self.used.to_bits()) * 0x1_0001
    }

    /// Puts a chain of `buffers` into the ring, not yet visible. Returns its id; `None` if there are not
    /// enough slots.
    ///
    /// # Panics
    /// If there is no buffer.
    pub fn add(&mut self, buffers: &[Buffer]) -> Option<u16> {
        assert!(!buffers.is_empty(), "a chain has at least one buffer");
        if usize::from(self.free_slots) < buffers.len() {
            return None;
        }
        let id = self.free_ids.pop_front()?;
        for (i, buffer) in buffers.iter().enumerate() {
            let next = if i + 1 < buffers.len() { DESC_NEXT } else { 0 };
            self.push(id, buffer.addr, buffer.len, write_flag(buffer) | next);
        }
        self.note(id, buffers.len() as u16);
        Some(id)
    }

    /// As [`add`](Self::add), with an indirect table: one slot of the ring, however many buffers.
    ///
    /// # Panics
    /// If there is no buffer, or no memory for a table.
    pub fn add_indirect(&mut self, buffers: &[Buffer]) -> Option<u16> {
        assert!(!buffers.is_empty(), "a chain has at least one buffer");
        if self.free_slots == 0 {
            return None;
        }
        let id = self.free_ids.pop_front()?;
        let table = self.ring.table(id, buffers.len());
        for (i, buffer) in buffers.iter().enumerate() {
            let desc = PackedDescriptor {
                addr: buffer.addr.get(),
                len: buffer.len,
                id: 0,
                flags: write_flag(buffer),
            };
            self.write_table_entry(table, i as u16, desc);
        }
        let len = layout::DESC_BYTES as u32 * buffers.len() as u32;
        self.push(id, table, len, DESC_INDIRECT);
        self.note(id, 1);
        Some(id)
    }

    /// Writes the next descriptor; the first one of a batch keeps its second word until `publish`.
    fn push(&mut self, id: u16, addr: GuestAddr, len: u32, flags: u16) {
        let at = self.next;
        let desc = PackedDescriptor {
            addr: addr.get(),
            len,
            id,
            flags: flags | at.available_flags(),
        };
        let [low, high] = desc.to_words();
        Cell::store(self.word(at.offset, false), low, Ordering::Relaxed);
        if self.unpublished == 0 {
            self.first = (at.offset, high);
        } else {
            Cell::store(self.word(at.offset, true), high, Ordering::Relaxed);
        }
        self.unpublished += 1;
        self.next = at.forward(1, self.ring.size);
    }

    fn note(&mut self, id: u16, slots: u16) {
        self.free_slots -= slots;
        self.slots[usize::from(id)] = slots;
        self.ring.order.push_back(id);
    }

    /// Makes all added chains visible with one store. Returns whether the device wants a kick; `false` if
    /// nothing was added.
    pub fn publish(&mut self) -> bool {
        let slots = std::mem::take(&mut self.unpublished);
        if slots == 0 {
            return false;
        }
        let (slot, word) = self.first;
        let batch = notify::Batch {
            first: self.word(slot, true),
            word,
            end: self.next,
            slots,
            size: self.ring.size,
        };
        notify::publish(
            &batch,
            self.events(self.ring.offsets.used),
            self.ring.features.event_idx,
        )
    }

    /// Takes the next chain that the device returned, and frees its slots.
    ///
    /// # Panics
    /// If the device returns a chain that it does not hold, or with in-order one out of order.
    pub fn take_used(&mut self) -> Option<Used> {
        // Pairs with the device's release store of the first used descriptor of a batch: those that follow it,
        // and the frames, are visible (2.8.22).
        let word = Cell::load(self.word(self.used.offset, true), Ordering::Acquire);
        let desc = PackedDescriptor::from_words(0, word);
        if !self.used.is_used(desc.flags) {
            return None;
        }
        let id = desc.id;
        self.ring.came_back(id);
        let slots = self.slots[usize::from(id)];
        self.free_ids.push_back(id);
        self.free_slots += slots;
        self.used = self.used.forward(slots, self.ring.size);
        Some(Used {
            head: id,
            len: desc.len,
        })
    }

    /// Asks for a call with the next chain that the device returns. `true`: it has returned one already.
    pub fn enable_calls(&mut self) -> bool {
        let (events, slot) = (
            self.events(self.ring.offsets.avail),
            self.word(self.used.offset, true),
        );
        let found = notify::enable(events, self.used, slot, self.ring.features.event_idx);
        self.used.is_used(PackedDescriptor::flags_of(found))
    }

    /// Tells the device that no calls are needed.
    pub fn disable_calls(&mut self) {
        self.set_driver_events(EventSuppression::NEVER.0);
    }

    /// Slot that the next descriptor goes to.
    pub fn next_slot(&self) -> u16 {
        self.next.offset
    }

    /// The wrap counter there.
    pub fn wrap_counter(&self) -> bool {
        self.next.wrap
    }

    /// AVAIL and USED bits that make slot `offset` available in a lap with wrap counter `wrap`.
    #[must_use]
    pub fn available_flags(offset: u16, wrap: bool) -> u16 {
        Position { offset, wrap }.available_flags()
    }

    /// Writes slot `slot`, unchecked.
    pub fn write_slot(&self, slot: u16, desc: PackedDescriptor) {
        let offset = self.ring.offsets.desc + layout::desc_bytes(slot);
        self.ring.write_words(offset, desc.to_words());
    }

    /// The descriptor in slot `slot`.
    #[must_use]
    pub fn read_slot(&self, slot: u16) -> PackedDescriptor {
        let high = Cell::load(self.word(slot, true), Ordering::Acquire);
        PackedDescriptor::from_words(Cell::load(self.word(slot, false), Ordering::Relaxed), high)
    }

    /// Writes entry `index` of a table in guest memory, unchecked.
    pub fn write_table_entry(&self, table: GuestAddr, index: u16, desc: PackedDescriptor) {
        let offset = self.ring.table_entry(table, index);
        self.ring.write_words(offset, desc.to_words());
    }

    /// Sets the driver's event suppression: slot and wrap counter in bits 0 to 15, flags in bits 16 to 31.
    pub fn set_driver_events(&self, value: u32) {
        Cell::store(self.events(self.ring.offsets.avail), value, Ordering::Relaxed);
    }

    /// The device's event suppression in memory, in the same form.
    pub fn device_events(&self) -> u32 {
        Cell::load(self.events(self.ring.offsets.used), Ordering::Relaxed)
    }

    fn word(&self, slot: u16, second: bool) -> &AtomicU64 {
        self.ring
            .word(self.ring.offsets.desc + layout::desc_bytes(slot) + 8 * u64::from(second))
    }

    fn events(&self, offset: u64) -> &AtomicU32 {
        self.ring.word(offset)
    }
}

fn write_flag(buffer: &Buffer) -> u16 {
    if buffer.writable { DESC_WRITE } else { 0 }
}
