//! A batch of descriptor chains: copied from the ring, translated, checked.
//!
//! Theory of operation: [`Chains`] is two flat arrays, of chains and of buffers.
//! [`Queue::pop`](crate::Queue::pop) fills them and the device reads them. A `Chains` is created once and
//! refilled; a batch ends early when the array of buffers is full, so the data path allocates nothing. A
//! chain's buffers are adjacent, device-readable ones first, as 2.7.4.2 demands of drivers.
//!
//! A [`Buffer`] was checked against the map when it was created, and stays valid: maps do not change.
#![allow(unsafe_code)]

use std::ops::Range;

use crate::layout::{DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Descriptor};
use crate::memory::{MapStart, RegionHint};
use crate::{GuestAddr, GuestFault, MemoryMap, QueueSize};

/// One buffer: a range of the map, checked to be inside one region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffer {
    /// Where it starts in the [`MemoryMap`], in bytes.
    pub offset: u64,
    /// Its length in bytes, never 0.
    pub len: u32,
    /// Bytes of the same region that lie before it, at most `u32::MAX`.
    pub room_before: u32,
}

impl Buffer {
    #[inline(always)]
    pub(crate) fn at(start: MapStart, len: u32) -> Self {
        Self {
            offset: start.offset,
            len,
            room_before: start.room_before.min(u64::from(u32::MAX)) as u32,
        }
    }
}

#[cfg(test)]
impl Buffer {
    /// Checks what every buffer guarantees, without the code that creates buffers.
    pub(crate) fn is_inside(&self, memory: &MemoryMap) -> bool {
        let region = memory.regions().iter().find(|region| {
            self.offset >= region.map_offset() && self.offset < region.map_offset() + region.len()
        });
        region.is_some_and(|region| {
            self.len > 0
                && self.offset + u64::from(self.len) <= region.map_offset() + region.len()
                && u64::from(self.room_before) == self.offset - region.map_offset()
        })
    }
}

/// Identifies a chain when it is returned to the driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChainId {
    /// Split ring: its first descriptor. Packed ring: its buffer id.
    pub head: u16,
    /// Ring entries that it occupies. Split ring: 1. Packed ring: the number of its descriptors in the ring.
    pub slots: u16,
}

impl ChainId {
    /// A chain of a split ring: one entry of the available ring, however many descriptors.
    pub(crate) const fn split(head: u16) -> Self {
        Self { head, slots: 1 }
    }
}

/// One descriptor chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// To be passed to [`Queue::push_used`](crate::Queue::push_used).
    pub id: ChainId,
    /// Buffers that the device reads. They come first.
    pub readable: u16,
    /// Buffers that the device writes.
    pub writable: u16,
    /// Index of the first buffer in [`Chains::buffers`].
    pub first: u32,
    /// Bytes that the device reads.
    pub readable_bytes: u32,
    /// Bytes that the device may write; before [`push_all_written`](crate::Queue::push_all_written): those that it wrote.
    pub writable_bytes: u32,
}

/// A reusable batch of chains.
#[derive(Clone, Debug, Default)]
pub struct Chains {
    /// The chains, in the order in which the driver made them available.
    pub chains: Vec<Chain>,
    /// Their buffers.
    pub buffers: Vec<Buffer>,
}

impl Chains {
    /// A batch of up to `batch` chains of a queue of `size` entries.
    #[must_use]
    pub fn for_queue(size: QueueSize, batch: usize) -> Self {
        // One chain of maximum length always fits. Usual ones have two buffers: header and payload.
        Self {
            chains: Vec::with_capacity(batch),
            buffers: Vec::with_capacity(usize::from(size.get()) + 2 * batch),
        }
    }

    /// Number of chains.
    #[must_use]
    pub fn len(&self) -> usize {
        self.chains.len()
    }

    /// Whether there is no chain.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chains.is_empty()
    }

    /// The chains.
    pub fn iter(&self) -> std::slice::Iter<'_, Chain> {
        self.chains.iter()
    }

    /// All buffers of `chain`.
    ///
    /// # Panics
    /// If `chain` is not of this batch.
    #[inline]
    #[must_use]
    pub fn buffers(&self, chain: &Chain) -> &[Buffer] {
        let first = chain.first as usize;
        &self.buffers[first..first + usize::from(chain.readable) + usize::from(chain.writable)]
    }

    /// Number of buffers of the chains at these indices.
    #[inline]
    #[must_use]
    pub fn count_buffers(&self, chains: Range<usize>) -> usize {
        let first = |at: usize| {
            self.chains
                .get(at)
                .map_or(self.buffers.len(), |chain| chain.first as usize)
        };
        first(chains.end) - first(chains.start)
    }

    /// The buffers of `chain` that the device reads.
    ///
    /// # Panics
    /// If `chain` is not of this batch.
    #[inline]
    #[must_use]
    pub fn readable(&self, chain: &Chain) -> &[Buffer] {
        &self.buffers(chain)[..usize::from(chain.readable)]
    }

    /// The buffers of `chain` that the device writes.
    ///
    /// # Panics
    /// If `chain` is not of this batch.
    #[inline]
    #[must_use]
    pub fn writable(&self, chain: &Chain) -> &[Buffer] {
        &self.buffers(chain)[usize::from(chain.readable)..]
    }

    /// Ring entries of the chains from index `from` on, for [`Queue::unpop`](crate::Queue::unpop). 0 if there
    /// are none.
    #[inline]
    #[must_use]
    pub fn slots(&self, from: usize) -> u16 {
        let chains = self.chains.get(from..).unwrap_or_default();
        chains.iter().map(|chain| chain.id.slots).sum()
    }

    /// Empties the batch.
    pub fn clear(&mut self) {
        self.chains.clear();
        self.buffers.clear();
    }

    /// Drops all chains but the first `len`. The caller must return the dropped ones by
    /// [`Queue::unpop`](crate::Queue::unpop).
    pub fn truncate(&mut self, len: usize) {
        if let Some(chain) = self.chains.get(len) {
            self.buffers.truncate(chain.first as usize);
            self.chains.truncate(len);
        }
    }

    /// Empties it and reserves room for `chains` chains and `size` buffers. Allocates only if it was created
    /// too small.
    pub(crate) fn prepare(&mut self, chains: usize, size: QueueSize) {
        self.clear();
        self.chains.reserve(chains);
        self.buffers.reserve(usize::from(size.get()));
    }

    /// Adds a chain of one buffer for each of `items`, until `single` returns `None` or the arrays are full; returns
    /// how many. The lengths of both arrays are written once, not for each chain, and nothing is allocated.
    #[inline(always)]
    pub(crate) fn push_singles<T, const WRITABLE: bool>(
        &mut self,
        items: &[T],
        single: impl Fn(&T) -> Option<(ChainId, Buffer)>,
    ) -> usize {
        let (read, write) = if WRITABLE { (0, 1) } else { (1, 0) };
        let first = self.buffers.len();
        let (chains, places) = (
            self.chains.spare_capacity_mut(),
            self.buffers.spare_capacity_mut(),
        );
        let most = items.len().min(chains.len()).min(places.len());
        // Slices of equal length, so that the compiler drops the bounds checks.
        let (items, chains, places) = (&items[..most], &mut chains[..most], &mut places[..most]);
        let mut count = 0;
        while count < most {
            let Some((id, buffer)) = single(&items[count]) else {
                break;
            };
            places[count].write(buffer);
            chains[count].write(Chain {
                id,
                readable: read,
                writable: write,
                first: (first + count) as u32,
                readable_bytes: if WRITABLE { 0 } else { buffer.len },
                writable_bytes: if WRITABLE { buffer.len } else { 0 },
            });
            count += 1;
        }
        // SAFETY: the first `count` elements of the spare capacity of both were written just now.
        unsafe {
            self.chains.set_len(self.chains.len() + count);
            self.buffers.set_len(first + count);
        }
        count
    }

    /// Whether another buffer fits without allocating.
    #[inline(always)]
    pub(crate) fn has_room(&self) -> bool {
        self.buffers.len() < self.buffers.capacity()
    }
}

impl<'a> IntoIterator for &'a Chains {
    type Item = &'a Chain;
    type IntoIter = std::slice::Iter<'a, Chain>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Why a chain was not taken.
pub(crate) enum Stop {
    /// The batch is full: the chain stays for the next one.
    BatchFull,
    /// The driver broke a rule.
    Fault(GuestFault),
}

impl From<GuestFault> for Stop {
    fn from(fault: GuestFault) -> Self {
        Self::Fault(fault)
    }
}

/// The assumed kind of the next chain: that of the chain before it, which is mostly right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One descriptor, which is itself a buffer.
    Single {
        /// For the device to write.
        writable: bool,
    },
    /// A list, or an indirect table.
    Other,
}

impl Kind {
    /// The kind of a chain whose first descriptor is `desc`.
    #[inline(always)]
    pub(crate) const fn of(desc: Descriptor) -> Self {
        if desc.has(DESC_NEXT | DESC_INDIRECT) {
            Self::Other
        } else {
            Self::Single {
                writable: desc.has(DESC_WRITE),
            }
        }
    }
}

/// Builds one chain, buffer by buffer, and applies the rules that concern buffers. Inlined wherever it is
/// used, so that the chain under construction stays in registers: in memory it would be written in halves and
/// read back whole, which stalls store forwarding and was measured at 25 ns a chain.
pub(crate) struct ChainBuilder<'a> {
    chains: &'a mut Chains,
    chain: Chain,
    /// Identifies the chain in faults.
    head: u16,
    size: QueueSize,
}

impl<'a> ChainBuilder<'a> {
    #[inline(always)]
    pub(crate) fn new(chains: &'a mut Chains, head: u16, size: QueueSize) -> Self {
        let first = chains.buffers.len() as u32;
        Self {
            chains,
            chain: Chain {
                first,
                ..Chain::default()
            },
            head,
            size,
        }
    }

    /// Adds the next buffer, and returns where it starts in the map.
    #[inline(always)]
    pub(crate) fn push(
        &mut self,
        memory: &MemoryMap,
        hint: &mut RegionHint,
        desc: Descriptor,
    ) -> Result<u64, Stop> {
        let head = self.head;
        if self.chain.readable + self.chain.writable >= self.size.get() {
            return Err(GuestFault::DescriptorLoop {
                head,
                limit: self.size.get(),
            }
            .into());
        }
        let buffer = translate(memory, hint, head, desc)?;
        let too_long = GuestFault::ChainTooLong { head };
        if desc.has(DESC_WRITE) {
            self.chain.writable += 1;
            self.chain.writable_bytes = self.chain.writable_bytes.checked_add(desc.len).ok_or(too_long)?;
        } else if self.chain.writable > 0 {
            return Err(GuestFault::WritableBeforeReadable { head }.into());
        } else {
            self.chain.readable += 1;
            self.chain.readable_bytes = self.chain.readable_bytes.checked_add(desc.len).ok_or(too_long)?;
        }
        if !self.chains.has_room() {
            return Err(Stop::BatchFull);
        }
        self.chains.buffers.push(buffer);
        Ok(buffer.offset)
    }

    /// Adds the finished chain to the batch.
    #[inline(always)]
    pub(crate) fn finish(self, id: ChainId) {
        self.chains.chains.push(Chain { id, ..self.chain });
    }

    /// Removes the buffers of the unfinished chain from the batch.
    pub(crate) fn abandon(self) {
        self.chains.buffers.truncate(self.chain.first as usize);
    }
}

/// A descriptor's buffer as a range of the map.
#[inline(always)]
pub(crate) fn translate(
    memory: &MemoryMap,
    hint: &mut RegionHint,
    head: u16,
    desc: Descriptor,
) -> Result<Buffer, GuestFault> {
    match memory.find(hint, desc.addr, u64::from(desc.len)) {
        Some(start) => Ok(Buffer::at(start, desc.len)),
        None => Err(bad_buffer(head, desc)),
    }
}

/// The fault of a buffer that cannot be translated.
#[cold]
pub(crate) fn bad_buffer(head: u16, desc: Descriptor) -> GuestFault {
    let (addr, len) = (GuestAddr(desc.addr), desc.len);
    if len == 0 {
        GuestFault::ZeroLength { head }
    } else if addr.checked_add(u64::from(len)).is_none() {
        GuestFault::AddressWrap { head, addr, len }
    } else {
        GuestFault::OutsideMemory { head, addr, len }
    }
}
