//! The ring into which the program copies a network's multicast frames: BPF_MAP_TYPE_RINGBUF, read by mmap.
//!
//! # Theory of operation
//!
//! The kernel writes, one process reads (kernel/bpf/ringbuf.c):
//!
//! | pages of the map | writer | content |
//! |---|---|---|
//! | first | the reader | its position, bytes since the beginning |
//! | second | the kernel | the end of reserved records, bytes since the beginning |
//! | the rest, mapped twice in a row | the kernel | records: a head of eight bytes, then what the program wrote |
//!
//! A record is contiguous: one that crosses the end continues in the second mapping. Its head has its length;
//! bit 31 while the program has not finished it, bit 30 if it is to be skipped. All but the first page can be
//! mapped for reading only (`ringbuf_map_mmap_kern`), so no reader can write what the kernel or another
//! reader reads. A reader that writes a wrong position into the first page loses frames of its own network.
//!
//! The reader trusts none of these values: it bounds lengths and positions by the mapping.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, fence};

use libbpf_rs::{MapCore, MapHandle, MapType, libbpf_sys};
use xsk::Mapping;

use crate::capture::messages_of;

/// Bytes of a network's ring: over a hundred frames of 1,514 bytes, or a thousand short ones.
const RING_BYTES: usize = 256 << 10;
/// `BPF_RINGBUF_HDR_SZ`, include/uapi/linux/bpf.h
const HEAD_BYTES: usize = 8;
/// `BPF_RINGBUF_BUSY_BIT`, same place
const BUSY: u32 = 1 << 31;
/// `BPF_RINGBUF_DISCARD_BIT`, same place
const DISCARD: u32 = 1 << 30;
/// `struct steer_group`
const GROUP_BYTES: usize = 8;

/// The ring of one network.
#[derive(Debug)]
pub struct MulticastRing {
    map: MapHandle,
}

impl MulticastRing {
    /// Creates a ring.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn new() -> io::Result<Self> {
        let opts = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
            ..Default::default()
        };
        let (map, _) = messages_of(|| {
            MapHandle::create(
                MapType::RingBuf,
                Some("steer_groups"),
                0,
                0,
                RING_BYTES as u32,
                &opts,
            )
        });
        let map = map.map_err(io::Error::other)?;
        Ok(Self { map })
    }

    /// The same ring, with a duplicate descriptor.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn try_clone(&self) -> io::Result<Self> {
        let map = MapHandle::try_from(&self.map).map_err(io::Error::other)?;
        Ok(Self { map })
    }

    /// Pins it on a bpffs, so that it outlives the process, in the place of what is pinned there.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn pin(&mut self, path: &Path) -> io::Result<()> {
        // It may be left from a process that was killed.
        let _ = std::fs::remove_file(path);
        let (pinned, _) = messages_of(|| self.map.pin(path));
        pinned.map_err(io::Error::other)
    }

    /// Opens a pinned ring.
    ///
    /// # Errors
    /// The kernel's, or the ring has another size.
    pub fn open_pinned(path: &Path) -> io::Result<Self> {
        let (map, _) = messages_of(|| MapHandle::from_pinned_path(path));
        let map = map.map_err(io::Error::other)?;
        match (map.map_type(), map.max_entries() as usize) {
            (MapType::RingBuf, RING_BYTES) => Ok(Self { map }),
            _ => Err(io::Error::other(
                "the pinned object is not a ring of this version",
            )),
        }
    }
}

impl AsFd for MulticastRing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.as_fd()
    }
}

/// A multicast frame; its bytes are in the reader's buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// The queue on which it was received.
    pub queue: u16,
    /// VLAN as in [`Station`](crate::Station); the tag is in the frame.
    pub vlan: u16,
}

/// Reads a [`MulticastRing`], which must have one reader at a time. Needs no privilege and no bpf(2).
#[derive(Debug)]
pub struct MulticastReader {
    ring: OwnedFd,
    /// The first page.
    consumer: Mapping,
    /// The second page and the records.
    producer: Mapping,
    page: usize,
    /// Our position. The one in the first page is not read again.
    at: usize,
}

impl MulticastReader {
    /// Maps a ring.
    ///
    /// # Errors
    /// The kernel's; `ring` is no [`MulticastRing`], or not open for writing.
    pub fn new(ring: OwnedFd) -> io::Result<Self> {
        // SAFETY: sysconf accesses no memory of ours.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let page = usize::try_from(page).map_err(io::Error::other)?;
        // The kernel refuses a length beyond the map (remap_vmalloc_range), so all of it is backed.
        let consumer = Mapping::new(ring.as_fd(), page, 0)?;
        let producer = Mapping::read_only(ring.as_fd(), page + 2 * RING_BYTES, page as u64)?;
        let mut reader = Self {
            ring,
            consumer,
            producer,
            page,
            at: 0,
        };
        // Relaxed: written by an earlier reader, which has ended. Records begin at multiples of eight.
        reader.at = reader.consumed().load(Ordering::Relaxed) & !7;
        Ok(reader)
    }

    /// Releases all records unread.
    pub fn skip(&mut self) {
        // Relaxed: no record is read.
        self.at = self.produced().load(Ordering::Relaxed) & !7;
        self.publish();
    }

    fn consumed(&self) -> &AtomicUsize {
        // SAFETY: in a page that `new` mapped, and that lives as long as self; accessed by atomics only.
        unsafe { self.consumer.start().cast().as_ref() }
    }

    fn produced(&self) -> &AtomicUsize {
        // SAFETY: as above; mapped for reading, and only read.
        unsafe { self.producer.start().cast().as_ref() }
    }

    /// Pointer to a position in the records; at least RING_BYTES follow.
    fn records(&self, at: usize) -> NonNull<u8> {
        // SAFETY: a page and an offset below RING_BYTES: inside the second mapping.
        unsafe { self.producer.start().add(self.page + at % RING_BYTES) }
    }

    /// Whether there is a record to read. If not, the descriptor reports the next one, also if it is watched by edges.
    pub fn has_record(&mut self) -> bool {
        // The kernel reports a record only if it finds, after finishing it, that all before it were read
        // (`bpf_ringbuf_commit`). Orders the store of our position before the load of the record's head;
        // pairs with the xchg there. Without it both could miss each other.
        fence(Ordering::SeqCst);
        self.head().is_some()
    }

    /// The head of the next record, if that is finished.
    fn head(&mut self) -> Option<u32> {
        // Acquire: pairs with the kernel's smp_store_release of the position (`__bpf_ringbuf_reserve`), made after the
        // record's head is marked as busy. Without it a head from the previous round could be taken for a new one.
        let produced = self.produced().load(Ordering::Acquire);
        match produced.wrapping_sub(self.at) {
            0 => return None,
            // Another process has written into the first page: the records are lost.
            ahead if ahead > RING_BYTES => {
                self.at = produced & !7;
                self.publish();
                return None;
            }
            _ => {}
        }
        let head = self.records(self.at).cast::<AtomicU32>();
        // Acquire: pairs with the kernel's xchg of the head (`bpf_ringbuf_commit`), after the whole record is
        // written. SAFETY: `at` is a multiple of eight, RING_BYTES too, and the mapping page-aligned. It is
        // only read.
        let head = unsafe { head.as_ref() }.load(Ordering::Acquire);
        (head & BUSY == 0).then_some(head)
    }

    /// Reads the next frame into `frame`, whose content is replaced.
    pub fn read(&mut self, frame: &mut Vec<u8>) -> Option<Group> {
        loop {
            let head = self.head()?;
            let len = (head & !DISCARD) as usize;
            let group = (head & DISCARD == 0).then(|| self.copy(len, frame)).flatten();
            self.at = self.at.wrapping_add((len + HEAD_BYTES).next_multiple_of(8));
            self.publish();
            if group.is_some() {
                return group;
            }
        }
    }

    /// Copies the frame out of the record at `at`, which has `record_bytes` bytes.
    fn copy(&self, record_bytes: usize, frame: &mut Vec<u8>) -> Option<Group> {
        let room = record_bytes
            .min(RING_BYTES - HEAD_BYTES)
            .checked_sub(GROUP_BYTES)?;
        let record = self.records(self.at);
        // SAFETY: from an offset below RING_BYTES, head and record have RING_BYTES at most, and the mapping
        // twice that. The kernel does not write to a committed record until the position in the first page
        // has passed it, which only this reader changes.
        let head: [u8; GROUP_BYTES] = unsafe { record.add(HEAD_BYTES).cast().read() };
        let [a, b, c, d, q0, q1, v0, v1] = head;
        let len = u32::from_ne_bytes([a, b, c, d]) as usize;
        if len > room {
            return None;
        }
        frame.clear();
        frame.resize(len, 0);
        // SAFETY: as above; `frame` has `len` bytes, of our own memory.
        unsafe {
            let from = record.add(HEAD_BYTES + GROUP_BYTES).as_ptr();
            ptr::copy_nonoverlapping(from, frame.as_mut_ptr(), len);
        }
        Some(Group {
            queue: u16::from_ne_bytes([q0, q1]),
            vlan: u16::from_ne_bytes([v0, v1]),
        })
    }

    /// Releases what was read to the kernel.
    fn publish(&self) {
        // Release: pairs with the kernel's smp_load_acquire of the position (`__bpf_ringbuf_reserve`): the
        // copy is complete before the kernel writes there again.
        self.consumed().store(self.at, Ordering::Release);
        // The kernel commits a record and then reads our position, to wake us if we are at that record; we store
        // our position and then read the next head. Without a full barrier in between, both could miss each other.
        fence(Ordering::SeqCst);
    }
}

impl AsFd for MulticastReader {
    /// Readable while there is something to read.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}
