//! SIGBUS: guest memory that vanishes under us hurts only its own port.
//!
//! Theory of operation. Guest RAM is a file of the VMM, mapped by the daemon. A VMM can truncate it at any time (unless
//! it sealed it), huge pages can run out, memory can fail; the next access to such a page is SIGBUS, whose default
//! action ends the process with all its ports. So:
//!
//!  1. Each mapping of a file of the VMM (guest memory, dirty log, inflight region) is entered in a static table
//!     before its first byte is accessed, and stays there until it is unmapped: such files are mapped only through a
//!     [`ForeignFiles`], here [`Watched`].
//!  2. The handler looks up the fault's address in the table. If an entry contains it, the handler replaces the whole
//!     mapping (the guest's part of a map) by zero pages of the daemon (one mmap with MAP_FIXED; mappings are back to
//!     back, so the range begins and ends on the page size of its neighbours), sets the session's flag and raises its
//!     alarm. Then the CPU repeats the access that faulted, now on zeros.
//!  3. The alarm wakes the control thread, as for a guest's fault. It finds the flag, and the port closes as
//!     `memory-truncated`. Until then workers move zeros. The data path never checks the flag.
//!  4. Any other address is a fault of the daemon itself: the default action follows, as without a handler.
//!
//! The handler does system calls and atomics, nothing else (signal-safety(7)).
//!
//! Invariant: an entry that the handler finds stays valid while it runs, because the faulting thread holds the map, and
//! with it the entry. Other entries may change owners meanwhile; the handler skips these. If it combined the start of
//! one owner with the length of the next, it could replace memory of a third ([`Entry::holds`]).

#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};

use rustix::mm::{MapFlags, ProtFlags};
use virtqueue::{ForeignFiles, Guard};

use super::interrupt;
use crate::supervision::alarm::Alarm;
use program::signal_handler;

/// The reason of a port that closes because its guest's memory vanished.
pub(crate) const TRUNCATED: &str =
    "guest memory vanished: the VMM truncated the file behind it, or there was no (huge) page left for it";

/// Most mappings at a time, of all ports: guest memory, log and inflight region, each twice while it changes.
const MOST: usize = 4096;

/// An entry: a range of guest memory and its watch. Free while `len` is 0 and `claimed` is not set.
struct Entry {
    claimed: AtomicBool,
    /// Number of its owners so far; incremented before the other fields are set for a new one.
    owners: AtomicUsize,
    start: AtomicUsize,
    /// Bytes; published last and withdrawn first.
    len: AtomicUsize,
    watch: AtomicPtr<Watch>,
}

static ENTRIES: [Entry; MOST] = [const { Entry::free() }; MOST];

/// Notified when memory of a session vanishes.
pub(crate) struct Watch {
    hit: AtomicBool,
    connection: Option<UnixStream>,
    alarm: Option<Alarm>,
}

impl Watch {
    /// Watches a session over `connection`; `alarm` is raised on a hit.
    pub(crate) fn new(connection: Option<UnixStream>, alarm: Option<Alarm>) -> Arc<Self> {
        Arc::new(Self {
            hit: AtomicBool::new(false),
            connection,
            alarm,
        })
    }

    /// The session's connection.
    pub(crate) fn connection(&self) -> Option<&UnixStream> {
        self.connection.as_ref()
    }

    /// Whether memory vanished.
    pub(crate) fn is_hit(&self) -> bool {
        // Observes the handler's store: the control thread reads this after the alarm, which the handler raises after
        // its store.
        self.hit.load(Ordering::Acquire)
    }

    /// Flags the session; called by the handler.
    fn tell(&self) {
        // Published before the alarm that makes the control thread read it; see `is_hit`.
        self.hit.store(true, Ordering::Release);
        if let Some(alarm) = &self.alarm {
            // std would set errno, which belongs to the code that was interrupted; rustix, which `raise` calls, does
            // not use it.
            alarm.raise();
        }
    }
}

/// The table is full.
#[derive(Debug, thiserror::Error)]
#[error(
    "more than {MOST} memory maps of guests at once in one process: spread the ports over more processes"
)]
struct TooMany;

/// Keeps a range in the table, and the watch that the handler follows.
struct Entered {
    entry: &'static Entry,
    _watch: Arc<Watch>,
}

/// Files of a session's VMM: a fault in a mapping of one ends that session.
pub(crate) struct Watched {
    pub(crate) watch: Arc<Watch>,
    /// Most guest memory, bytes.
    pub(crate) most_bytes: u64,
}

impl ForeignFiles for Watched {
    fn guard(&self, start: NonNull<u8>, bytes: usize) -> io::Result<Guard> {
        // Acquire pairs with the release in `Entered::drop`: the last owner has withdrawn the entry.
        let claim = |entry: &&Entry| {
            entry
                .claimed
                .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
                .is_ok()
        };
        let entry = ENTRIES
            .iter()
            .find(claim)
            .ok_or_else(|| io::Error::other(TooMany))?;
        entry.enter(start.addr().get(), bytes, Arc::as_ptr(&self.watch).cast_mut());
        Ok(Box::new(Entered {
            entry,
            _watch: Arc::clone(&self.watch),
        }))
    }

    fn most_guest_bytes(&self) -> u64 {
        self.most_bytes
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.entry.leave();
        // Publishes the withdrawal to the next claimant.
        self.entry.claimed.store(false, Ordering::Release);
    }
}

impl Entry {
    const fn free() -> Self {
        Self {
            claimed: AtomicBool::new(false),
            owners: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            watch: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Fills it in; the caller has claimed it.
    fn enter(&self, start: usize, len: usize, watch: *mut Watch) {
        // Publishes that the last owner has withdrawn its length to `holds` that sees this count; the fence publishes
        // the count to one that sees a field of this owner. Without them `holds` could combine fields of two owners.
        self.owners.fetch_add(1, Ordering::Release);
        fence(Ordering::Release);
        self.watch.store(watch, Ordering::Relaxed);
        self.start.store(start, Ordering::Relaxed);
        // Publishes start and watch to the handler (`holds`); without it, it could take the last owner's.
        self.len.store(len, Ordering::Release);
    }

    /// Withdraws the entry.
    fn leave(&self) {
        self.len.store(0, Ordering::Relaxed);
    }

    /// The range, if `addr` is in it.
    fn holds(&self, addr: usize) -> Option<Range<usize>> {
        // This and the fence pair with the count and the fence in `enter`.
        let owners = self.owners.load(Ordering::Acquire);
        // Observes the start that `enter` published.
        let len = self.len.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let of_one = self.owners.load(Ordering::Relaxed) == owners;
        (of_one && addr.wrapping_sub(start) < len).then(|| start..start.wrapping_add(len))
    }
}

/// Installs the handler, for the process.
pub(crate) fn install() -> io::Result<()> {
    // SAFETY: it does system calls and atomics only, see the head. SIGURG is blocked meanwhile: an alternate stack has
    // room for one frame with all registers.
    unsafe { signal_handler::install(libc::SIGBUS, on_sigbus, 0, &[interrupt::SIGNAL]) }
}

extern "C" fn on_sigbus(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo (SA_SIGINFO), and for SIGBUS with a positive code si_addr is set.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code <= 0 || !replace(addr) {
        // SAFETY: both are async-signal-safe. The signal is blocked until this handler returns, and is delivered then.
        unsafe {
            libc::signal(libc::SIGBUS, libc::SIG_DFL);
            libc::raise(libc::SIGBUS);
        }
    }
}

/// Replaces the mapping that contains `addr` by zero pages; false if none does.
fn replace(addr: usize) -> bool {
    let Some((entry, range)) = ENTRIES.iter().find_map(|entry| Some((entry, entry.holds(addr)?))) else {
        return false;
    };
    // SAFETY: the range is the guest's part of a map that the faulting thread holds, see the head. Its bytes are read
    // and written by raw copies and atomics only, which allow others to change them.
    let replaced = unsafe {
        rustix::mm::mmap_anonymous(
            ptr::with_exposed_provenance_mut(range.start),
            range.len(),
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE,
        )
    };
    // SAFETY: the guard holds an Arc of it, and the map holds the guard.
    let watch = unsafe { &*entry.watch.load(Ordering::Relaxed) };
    watch.tell();
    replaced.is_ok()
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use virtqueue::{
        DirtyLog, FileRange, GuestAddr, InflightRegion, InflightShape, MemoryMap, Region, TrustedFiles,
    };

    use super::*;

    const LEN: u64 = 64 << 10;

    fn files(watch: &Arc<Watch>) -> Watched {
        Watched {
            watch: Arc::clone(watch),
            most_bytes: LEN,
        }
    }

    /// A file that is not sealed.
    fn file(bytes: u64) -> OwnedFd {
        let file = memfd_create("file", MemfdFlags::CLOEXEC).expect("memfd");
        ftruncate(&file, bytes).expect("room");
        file
    }

    /// Guest memory that is a whole file.
    fn memory_of(file: &OwnedFd) -> Region {
        Region {
            guest_addr: GuestAddr(0),
            user_addr: 0,
            len: LEN,
            file: file.try_clone().expect("a descriptor"),
            file_offset: 0,
        }
    }

    /// A watched map of a file; its watch; the alarm; the file.
    fn watched() -> (MemoryMap, Arc<Watch>, Alarm, OwnedFd) {
        let file = file(LEN);
        let alarm = Alarm::new().expect("an eventfd");
        let watch = Watch::new(None, Some(alarm.clone()));
        let map = MemoryMap::new(vec![memory_of(&file)], 4096, &files(&watch)).expect("mapped");
        (map, watch, alarm, file)
    }

    fn byte(map: &MemoryMap, offset: u64) -> u8 {
        let mut byte = [0];
        assert!(map.copy_from_guest(offset, &mut byte));
        byte[0]
    }

    #[test]
    fn truncated_memory_reads_as_zeros_and_ends_only_its_session() {
        install().expect("installed");
        let (map, watch, alarm, file) = watched();
        let (other, other_watch, other_alarm, _other_file) = watched();
        assert!(map.copy_to_guest(LEN - 1, &[0xff]) && map.copy_to_guest(LEN, &[7]));
        assert!(other.copy_to_guest(0, &[7]));
        ftruncate(&file, 0).expect("not sealed");
        assert!(!watch.is_hit());
        assert_eq!(byte(&map, LEN - 1), 0);
        assert!(watch.is_hit());
        assert!(alarm.is_raised() && !other_alarm.is_raised());
        assert!(map.copy_to_guest(8, &[1]), "all of it can be written");
        assert_eq!(byte(&map, LEN), 7, "the private part stays as it was");
        assert_eq!((byte(&other, 0), other_watch.is_hit()), (7, false));
    }

    /// A VMM that truncates the file after its size was checked, and before its first byte is read.
    struct Truncating<'a>(&'a Arc<Watch>, &'a OwnedFd);

    impl ForeignFiles for Truncating<'_> {
        fn guard(&self, start: NonNull<u8>, bytes: usize) -> io::Result<Guard> {
            ftruncate(self.1, 0)?;
            files(self.0).guard(start, bytes)
        }

        fn most_guest_bytes(&self) -> u64 {
            LEN
        }
    }

    #[test]
    fn file_that_is_gone_before_its_first_byte_is_read_ends_only_its_session() {
        install().expect("installed");
        let shape = InflightShape {
            queues: 1,
            entries: 256,
            packed: false,
        };
        let bytes = shape.bytes().expect("a shape that there is");
        let (inflight, watch) = (file(bytes), Watch::new(None, None));
        let region = InflightRegion::open(
            inflight.as_fd(),
            FileRange { offset: 0, bytes },
            shape,
            &Truncating(&watch, &inflight),
        );
        assert!(
            region.is_ok() && watch.is_hit(),
            "its zeros are a region never used"
        );

        let (bitmap, watch) = (file(4096), Watch::new(None, None));
        let page = FileRange {
            offset: 0,
            bytes: 4096,
        };
        let log = DirtyLog::open(bitmap.as_fd(), page, &Truncating(&watch, &bitmap)).expect("mapped");
        log.note(GuestAddr(0), 1);
        assert!(watch.is_hit());

        let (ram, watch) = (file(LEN), Watch::new(None, None));
        let map = MemoryMap::new(vec![memory_of(&ram)], 0, &Truncating(&watch, &ram)).expect("mapped");
        assert_eq!((byte(&map, 0), watch.is_hit()), (0, true));
    }

    /// The watchdog sends the signal to workers at any time.
    #[test]
    fn signal_of_the_watchdog_waits_for_the_handler() {
        install().expect("installed");
        // SAFETY: sigaction is plain data, for which zeros are a value, and is only read out.
        let blocked = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut action);
            libc::sigismember(&raw const action.sa_mask, interrupt::SIGNAL)
        };
        assert_eq!(blocked, 1);
    }

    /// One map is unmapped and another one takes its entry, while a handler searches the table for a third address.
    #[test]
    fn entry_that_changes_hands_has_the_start_and_length_of_one_owner() {
        // Below vm.mmap_min_addr, in the order of long and short: the short one's start with the long one's length
        // would reach beyond both.
        const LONG: (usize, usize) = (1024, 1024);
        const SHORT: (usize, usize) = (2048, 64);
        static ENTRY: Entry = Entry::free();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..2_000_000 {
                    for (start, len) in [LONG, SHORT] {
                        ENTRY.enter(start, len, ptr::null_mut());
                        ENTRY.leave();
                    }
                }
                done.store(true, Ordering::Relaxed);
            });
            while !done.load(Ordering::Relaxed) {
                if let Some(range) = ENTRY.holds(SHORT.0) {
                    assert_eq!(range, SHORT.0..SHORT.0 + SHORT.1);
                }
                assert_eq!(ENTRY.holds(SHORT.0 + SHORT.1), None, "nobody's");
            }
        });
    }

    #[test]
    fn entry_goes_with_its_guard() {
        // Where nothing is ever mapped (vm.mmap_min_addr), so that no other test's map can be there.
        let base = NonNull::new(ptr::without_provenance_mut(4096)).expect("not null");
        let entered = |addr| ENTRIES.iter().any(|entry| entry.holds(addr).is_some());
        let guarded = files(&Watch::new(None, None)).guard(base, 4096).expect("room");
        assert_eq!([4095, 4096, 8191, 8192].map(entered), [false, true, true, false]);
        drop(guarded);
        assert!(!entered(4096));
    }

    const CHILD: &str = "VHOST_AF_XDP_TEST_SIGBUS";

    #[test]
    fn fault_outside_guest_memory_has_its_default_action() {
        use std::os::unix::process::ExitStatusExt;
        if std::env::var_os(CHILD).is_some() {
            install().expect("installed");
            let (map, _watch, _alarm, file) = watched();
            // The same file once more, mapped where the table does not know it.
            let region = Region {
                guest_addr: GuestAddr(0),
                user_addr: 0,
                len: LEN,
                file: file.try_clone().expect("a descriptor"),
                file_offset: 0,
            };
            let unknown = MemoryMap::new(vec![region], 0, &TrustedFiles).expect("mapped");
            ftruncate(&file, 0).expect("not sealed");
            assert_eq!(byte(&map, 0), 0);
            let _ = byte(&unknown, 0);
            unreachable!("the access must not come back");
        }
        let this = std::env::current_exe().expect("a test is a program");
        let status = std::process::Command::new(this)
            .args(["fault_outside_guest_memory_has_its_default_action"])
            .env(CHILD, "1")
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .status();
        assert_eq!(status.expect("it runs").signal(), Some(libc::SIGBUS));
    }
}
