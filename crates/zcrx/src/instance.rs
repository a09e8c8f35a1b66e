//! Instances of zcrx: how they are registered, passed on and imported.
//!
//! # Theory of operation
//!
//! An instance is a NIC queue (or none), an area and a refill ring. It is registered with an io_uring, and known to
//! requests of that ring by a small number. The kernel can wrap it into a descriptor of its own kind (export), which
//! can be passed to another process, and make it known to another ring (import). The queue is released when the last
//! ring and the last descriptor are gone.
//!
//! Area and refill ring are memory files, so that an importing process can map them. The users coordinate who writes
//! the refill ring: within a process several receivers write it in turns, under a lock ([`Share`]); of several
//! processes only one may use the instance.
//!
//! Registering and importing both take CAP_NET_ADMIN in the first user namespace (`io_register_zcrx`,
//! `io_uring/zcrx.c`, Linux 7.2: the check stands before the import). A process without it makes a ring that is not
//! enabled yet ([`Prepared`]); a process with the capability gets the ring by pidfd_getfd(2), since io_uring
//! descriptors are not passed over sockets, and imports for it ([`Instance::import_into`]).
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::fs::fstat;
use rustix::io::fcntl_dupfd_cloexec;
use xsk::{Backing, OwnMemory, UmemMemory};

use crate::abi::{self, AreaRegistration, Offsets, Region, Registration};
use crate::area::{Area, FileMemory};
use crate::config::{Config, Fallback, Memory, Source};
use crate::error::{OpenError, refused};
use crate::piece::Pool;
use crate::refill::{RefillRing, counters_at};
use crate::ring::Ring;

/// What receivers of one instance share.
pub(crate) struct Shared {
    pub(crate) pool: Arc<Pool>,
    refill: Mutex<RefillRing>,
    pub(crate) no_device: bool,
}

impl Shared {
    pub(crate) fn refill(&self) -> MutexGuard<'_, RefillRing> {
        self.refill.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The memory of a configuration.
pub(crate) fn memory(config: &Config) -> Result<Arc<dyn UmemMemory>, OpenError> {
    let bytes = match &config.memory {
        Memory::Given(memory) => return Ok(memory.clone()),
        Memory::Own { bytes } => *bytes,
    };
    let memory = OwnMemory::new(bytes)?;
    if config.huge_pages && memory.backing() == Backing::Pages4K {
        return Err(OpenError::NoHugePages { bytes });
    }
    Ok(Arc::new(memory))
}

/// The area of a configuration with buffers of so many bytes.
pub(crate) fn area(config: &Config, buffer_bytes: u32, most: u32) -> Result<Area, OpenError> {
    let memory = memory(config)?;
    let (len_bytes, private_from) = (memory.len(), memory.private_from());
    let area = Area::new(memory, buffer_bytes, most).ok_or(OpenError::NoBuffer {
        len_bytes,
        private_from,
        buffer_bytes,
    })?;
    area.claim().ok_or(OpenError::InUse { what: "memory" })
}

/// The area of a configuration, with the buffers of zcrx.
pub(crate) fn zcrx_area(config: &Config) -> Result<Area, OpenError> {
    let bytes = config.buffer_bytes;
    if !bytes.is_power_of_two() || (bytes as usize) < rustix::param::page_size() {
        let (what, must) = ("zcrx buffers", "a power of two, and a page at least");
        return Err(OpenError::Size { what, bytes, must });
    }
    area(config, bytes, u32::MAX)
}

/// Entries of a refill ring for all buffers of an area, as far as the kernel allows it.
pub(crate) fn refill_entries(area: &Area) -> u32 {
    let most = abi::MOST_REFILL_ENTRIES;
    area.buffers().min(most).next_power_of_two().min(most)
}

/// Registers an instance with a ring; returns its ID there.
/// Errors: [`OpenError::Zcrx`] if the kernel refuses; copy is still possible.
pub(crate) fn register(ring: BorrowedFd<'_>, config: &Config) -> Result<(Arc<Shared>, u32), OpenError> {
    let page = rustix::param::page_size() as u32;
    let buffer_bytes = config.buffer_bytes;
    let area = zcrx_area(config)?;
    let entries = refill_entries(&area);
    // The header's size is the kernel's; a page is more than any.
    let refill_bytes = entries as usize * size_of::<abi::RefillEntry>() + page as usize;
    let refill = Arc::new(OwnMemory::new(refill_bytes)?);
    let mut region = Region {
        address: refill.base().as_ptr() as u64,
        len: refill.len() as u64,
        flags: abi::REGION_TYPE_USER,
        ..Region::default()
    };
    let mut area_registration = AreaRegistration {
        address: area.address(),
        len: area.len(),
        ..AreaRegistration::default()
    };
    let mut registration = Registration {
        refill_entries: entries,
        buffer_bytes: if buffer_bytes == page { 0 } else { buffer_bytes },
        ..Registration::default()
    };
    match config.source {
        Source::Queue { ifindex, queue } => (registration.interface, registration.queue) = (ifindex, queue.0),
        Source::NoDevice => registration.flags = abi::REG_NODEV,
    }
    // SAFETY: both memories are kept by the pool and the refill ring below, and by the kernel's pins after them; their
    // bytes are reached through `Area` and `RefillRing` only.
    let counters = unsafe {
        abi::register_instance(
            ring,
            &mut registration,
            &mut area_registration,
            &mut region,
            counters_at(refill.len()).into(),
        )
    }
    .map_err(|error| OpenError::Zcrx(refused(config.source, &error)))?;
    let facts = Facts {
        offsets: registration.offsets,
        entries: registration.refill_entries,
        token: area_registration.token,
        counters,
        no_device: config.source == Source::NoDevice,
    };
    let shared = share(area, refill, facts)?;
    Ok((shared, registration.id))
}

/// What the kernel returned for an instance.
#[derive(Clone, Copy)]
pub(crate) struct Facts {
    pub(crate) offsets: Offsets,
    pub(crate) entries: u32,
    pub(crate) token: u64,
    pub(crate) counters: bool,
    pub(crate) no_device: bool,
}

pub(crate) fn share(area: Area, refill: Arc<dyn UmemMemory>, facts: Facts) -> Result<Arc<Shared>, OpenError> {
    let (len_bytes, entries) = (refill.len(), facts.entries);
    let refill = RefillRing::new(refill, facts.offsets, entries, facts.token, facts.counters)
        .ok_or(OpenError::Layout { entries, len_bytes })?;
    Ok(Arc::new(Shared {
        pool: Arc::new(Pool::new(area, false)),
        refill: Mutex::new(refill),
        no_device: facts.no_device,
    }))
}

/// What an importing process needs of an instance, in addition to its descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Where the area begins in its file, bytes.
    pub area_offset: u64,
    /// How long it is, bytes.
    pub area_bytes: u64,
    /// How long the refill ring's file is, bytes.
    pub refill_bytes: u64,
    /// The kernel's number of the area, in the upper bits.
    pub token: u64,
    /// Entries of the refill ring.
    pub refill_entries: u32,
    /// The size of a buffer, bytes.
    pub buffer_bytes: u32,
    /// Whether there is no device behind it.
    pub no_device: bool,
    /// Whether the kernel counts what it copies.
    pub counts_copies: bool,
}

impl Shape {
    /// Length of its encoded form.
    pub const BYTES: usize = 41;

    /// Encodes it, for another process on the same machine.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let words = [self.area_offset, self.area_bytes, self.refill_bytes, self.token];
        let halves = [self.refill_entries, self.buffer_bytes];
        let all = words.iter().flat_map(|word| word.to_le_bytes());
        let all = all.chain(halves.iter().flat_map(|half| half.to_le_bytes()));
        let all = all.chain([u8::from(self.no_device) | u8::from(self.counts_copies) << 1]);
        bytes.iter_mut().zip(all).for_each(|(byte, value)| *byte = value);
        bytes
    }

    /// Decodes it.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let word = |at: usize| (0..8).fold(0, |sum, n| sum | u64::from(bytes[at + n]) << (8 * n));
        let half = |at: usize| (0..4).fold(0, |sum, n| sum | u32::from(bytes[at + n]) << (8 * n));
        Self {
            area_offset: word(0),
            area_bytes: word(8),
            refill_bytes: word(16),
            token: word(24),
            refill_entries: half(32),
            buffer_bytes: half(36),
            no_device: bytes[40] & 1 != 0,
            counts_copies: bytes[40] & 2 != 0,
        }
    }
}

/// An instance of zcrx that one process registers and another receives by.
#[derive(Debug)]
pub struct Instance {
    descriptor: OwnedFd,
    area: OwnedFd,
    refill: OwnedFd,
    shape: Shape,
    /// Its memory, if this process registered it: no other receiver may use it.
    _registered: Option<Arc<Pool>>,
    /// The pool of the receiver of this process that uses it, or whose pieces still exist.
    user: Mutex<Weak<Pool>>,
}

/// An instance as imported into a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Imported {
    pub(crate) id: u32,
    pub(crate) offsets: Offsets,
    /// Of which ring and which instance.
    of: Pair,
}

/// Inode numbers of a ring and of an instance's area: the same in every process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pair {
    ring: u64,
    area: u64,
}

impl Pair {
    fn of(ring: BorrowedFd<'_>, area: BorrowedFd<'_>) -> Result<Self, OpenError> {
        let number = |file| match fstat(file) {
            Ok(stat) => Ok(stat.st_ino),
            Err(errno) => Err(OpenError::Setup {
                what: "looking at ring and instance",
                source: errno.into(),
            }),
        };
        let (ring, area) = (number(ring)?, number(area)?);
        Ok(Self { ring, area })
    }
}

impl Imported {
    /// Length of its encoded form.
    pub const BYTES: usize = 32;

    /// Encodes it, for another process on the same machine.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let Offsets {
            head, tail, entries, ..
        } = self.offsets;
        let mut bytes = [0; Self::BYTES];
        let all = [self.id, head, tail, entries];
        let all = all.iter().flat_map(|value| value.to_le_bytes());
        let of = [self.of.ring, self.of.area];
        let all = all.chain(of.iter().flat_map(|number| number.to_le_bytes()));
        bytes.iter_mut().zip(all).for_each(|(byte, value)| *byte = value);
        bytes
    }

    /// Decodes it.
    ///
    /// # Safety
    /// The bytes must encode what [`Instance::import_into`] returned for the ring and the instance that they are used
    /// with: they determine where the refill entries are written, which tell the kernel which buffers it may fill.
    pub unsafe fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let half = |at: usize| (0..4).fold(0, |sum, n| sum | u32::from(bytes[at + n]) << (8 * n));
        let word = |at: usize| u64::from(half(at)) | u64::from(half(at + 4)) << 32;
        let offsets = Offsets {
            head: half(4),
            tail: half(8),
            entries: half(12),
            ..Offsets::default()
        };
        Self {
            id: half(0),
            offsets,
            of: Pair {
                ring: word(16),
                area: word(24),
            },
        }
    }
}

impl Instance {
    /// Registers an instance for another process. The memory must be files, as own memory is. Takes CAP_NET_ADMIN.
    ///
    /// # Errors
    /// [`OpenError::Zcrx`] if the kernel refuses it, with what that means; [`OpenError::Export`] before Linux 7.0.
    pub fn register(config: &Config) -> Result<Self, OpenError> {
        let ring = Ring::new(config, false)?;
        let (shared, id) = register(ring.as_fd(), config)?;
        Self::of(&shared, ring.as_fd(), id)
    }

    /// Exports the instance of a ring.
    pub(crate) fn of(shared: &Shared, ring: BorrowedFd<'_>, id: u32) -> Result<Self, OpenError> {
        let refill = shared.refill();
        let area = &shared.pool.area;
        let shape = |area_offset| Shape {
            area_offset,
            area_bytes: area.len(),
            refill_bytes: refill.memory().len() as u64,
            token: refill.token(),
            refill_entries: refill.entries(),
            buffer_bytes: area.buffer_bytes(),
            no_device: shared.no_device,
            counts_copies: refill.has_counters(),
        };
        let (area_file, offset) = only_file(area.memory())?;
        let (refill_file, _) = only_file(refill.memory())?;
        Ok(Self {
            descriptor: abi::export_instance(ring, id).map_err(|source| OpenError::Export { source })?,
            area: area_file,
            refill: refill_file,
            shape: shape(offset + area.skipped() as u64),
            _registered: Some(shared.pool.clone()),
            user: Mutex::default(),
        })
    }

    /// The descriptors to pass on: the instance, the area's memory, the refill ring's.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 3] {
        [self.descriptor.as_fd(), self.area.as_fd(), self.refill.as_fd()]
    }

    /// The properties to pass on with the descriptors.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Assembles an instance from what another process passed on.
    ///
    /// # Safety
    /// Descriptors and shape must be those of one instance, and while pieces of it are read, nobody but the kernel may
    /// write to its area, neither the process that registered it nor another one that receives by it.
    pub unsafe fn from_parts([descriptor, area, refill]: [OwnedFd; 3], shape: Shape) -> Self {
        Self {
            descriptor,
            area,
            refill,
            shape,
            _registered: None,
            user: Mutex::default(),
        }
    }

    /// Makes the instance known to a ring that is not enabled yet, on behalf of its owner ([`Prepared`]). Takes
    /// CAP_NET_ADMIN here, and none there.
    ///
    /// # Errors
    /// [`OpenError::Import`].
    pub fn import_into(&self, ring: BorrowedFd<'_>) -> Result<Imported, OpenError> {
        let of = Pair::of(ring, self.area.as_fd())?;
        let (id, offsets) = abi::import_instance(ring, self.descriptor.as_fd())
            .map_err(|source| OpenError::Import { source })?;
        Ok(Imported { id, offsets, of })
    }

    /// Checks that `imported` is of this instance and of this ring: in another ring the ID is of another instance or
    /// of none.
    pub(crate) fn check(&self, imported: Imported, ring: BorrowedFd<'_>) -> Result<(), OpenError> {
        let Pair { ring, area } = Pair::of(ring, self.area.as_fd())?;
        match imported.of {
            of if of.ring != ring => Err(OpenError::ImportedElsewhere { of: "ring" }),
            of if of.area != area => Err(OpenError::ImportedElsewhere { of: "instance" }),
            _ => Ok(()),
        }
    }

    /// Maps area and refill ring for a receiver.
    pub(crate) fn take_up(&self, imported: Imported) -> Result<Arc<Shared>, OpenError> {
        // Two independent receivers would each return buffers that the other one still reads.
        let mut user = self.user.lock().unwrap_or_else(PoisonError::into_inner);
        if user.strong_count() > 0 {
            return Err(OpenError::InUse { what: "instance" });
        }
        let shape = self.shape;
        let map = |file: &OwnedFd, offset: u64, len: u64| {
            let file = fcntl_dupfd_cloexec(file, 0)?;
            let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
            FileMemory::map(file, offset, len)
        };
        let what = "mapping the instance's memory";
        let failed = |source| OpenError::Setup { what, source };
        let memory = map(&self.area, shape.area_offset, shape.area_bytes).map_err(failed)?;
        let refill = map(&self.refill, 0, shape.refill_bytes).map_err(failed)?;
        let len_bytes = memory.len();
        let area = Area::new(Arc::new(memory), shape.buffer_bytes, u32::MAX).ok_or(OpenError::NoBuffer {
            len_bytes,
            private_from: 0,
            buffer_bytes: shape.buffer_bytes,
        })?;
        let facts = Facts {
            offsets: imported.offsets,
            entries: shape.refill_entries,
            token: shape.token,
            counters: shape.counts_copies,
            no_device: shape.no_device,
        };
        let shared = share(area, Arc::new(refill), facts)?;
        *user = Arc::downgrade(&shared.pool);
        Ok(shared)
    }
}

/// The file that memory is mapped from, and where in it.
/// Errors: it is none, or several.
pub(crate) fn only_file(memory: &Arc<dyn UmemMemory>) -> Result<(OwnedFd, u64), OpenError> {
    let what = "the area cannot be passed on, its memory is no single file";
    let failed = |source| OpenError::Setup { what, source };
    let parts = memory.parts();
    let [part] = parts.as_slice() else {
        return Err(failed(io::ErrorKind::Unsupported.into()));
    };
    let file = fcntl_dupfd_cloexec(part.file, 0).map_err(|errno| failed(errno.into()))?;
    Ok((file, part.file_offset))
}

/// The ring of a future receiver, with which another process can register or import an instance: see
/// [`Receiver::start`](crate::Receiver::start) and [`Receiver::start_leased`](crate::Receiver::start_leased).
pub struct Prepared {
    pub(crate) ring: Ring,
}

impl Prepared {
    /// Makes the ring.
    ///
    /// # Errors
    /// [`OpenError::Ring`].
    pub fn new(config: &Config) -> Result<Self, OpenError> {
        Ok(Self {
            ring: Ring::new(config, true)?,
        })
    }
}

impl AsFd for Prepared {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}

/// A receiver's queue, for another thread of the process to receive by, too: see
/// [`Receiver::join`](crate::Receiver::join).
#[derive(Clone)]
pub struct Share {
    pub(crate) config: Config,
    /// None with ordinary receives: then each thread has buffers of its own.
    pub(crate) instance: Option<(Arc<Shared>, Arc<OwnedFd>)>,
    pub(crate) fallbacks: Vec<Fallback>,
}

impl Share {
    pub(crate) fn import(&self, ring: BorrowedFd<'_>) -> Result<Option<(Arc<Shared>, u32)>, OpenError> {
        let Some((shared, descriptor)) = &self.instance else {
            return Ok(None);
        };
        let (id, _) =
            abi::import_instance(ring, descriptor.as_fd()).map_err(|source| OpenError::Import { source })?;
        Ok(Some((shared.clone(), id)))
    }
}

/// A descriptor of an instance, for threads of this process.
pub(crate) fn export(ring: BorrowedFd<'_>, id: u32) -> Result<Arc<OwnedFd>, OpenError> {
    let descriptor = abi::export_instance(ring, id).map_err(|source| OpenError::Export { source })?;
    Ok(Arc::new(descriptor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_passed_comes_back_as_it_was() {
        let shape = Shape {
            area_offset: 1 << 40,
            area_bytes: 3 << 33,
            refill_bytes: 8192,
            token: 5 << 48,
            refill_entries: 1024,
            buffer_bytes: 4096,
            no_device: true,
            counts_copies: false,
        };
        assert_eq!(Shape::from_bytes(&shape.to_bytes()), shape);
        let offsets = Offsets {
            head: 1,
            tail: 64,
            entries: 0x0102_0304,
            ..Offsets::default()
        };
        let of = Pair {
            ring: 1 << 40,
            area: 0x0102_0304_0506_0708,
        };
        let imported = Imported { id: 7, offsets, of };
        // SAFETY: they are used with nothing.
        let came = unsafe { Imported::from_bytes(&imported.to_bytes()) };
        assert_eq!(came, imported);
    }

    #[test]
    fn what_was_imported_into_another_ring_or_of_another_instance_is_refused() {
        let config = Config {
            memory: Memory::Own { bytes: 1 << 16 },
            ..Config::new(Source::NoDevice)
        };
        let file = || rustix::fs::memfd_create("area", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let instance = || {
            let shape = Shape::from_bytes(&[0; Shape::BYTES]);
            // SAFETY: it has no memory, and is refused before it is looked for.
            unsafe { Instance::from_parts([file(), file(), file()], shape) }
        };
        let [ours, other] = [(); 2].map(|()| Prepared::new(&config).unwrap());
        let [wanted, another] = [(); 2].map(|()| instance());
        // As if the kernel had imported it.
        let imported = |ring: &Prepared, instance: &Instance| Imported {
            id: 0,
            offsets: Offsets::default(),
            of: Pair::of(ring.as_fd(), instance.area.as_fd()).unwrap(),
        };
        wanted.check(imported(&ours, &wanted), ours.as_fd()).unwrap();
        // A copy of a descriptor is of the same.
        let copy = ours.as_fd().try_clone_to_owned().unwrap();
        wanted.check(imported(&ours, &wanted), copy.as_fd()).unwrap();
        let refused = |ring: Prepared, of| {
            let refused = crate::Receiver::start(ring, &wanted, of, &config);
            refused.err().expect("refused").to_string()
        };
        let of_other_instance = imported(&ours, &another);
        let text = refused(ours, of_other_instance);
        assert!(text.contains("another instance"), "{text}");
        let ring = Prepared::new(&config).unwrap();
        let text = refused(ring, imported(&other, &wanted));
        assert!(text.contains("another ring"), "{text}");
    }
}
