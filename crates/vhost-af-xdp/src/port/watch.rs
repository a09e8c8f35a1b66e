//! When the interfaces of ports are checked, and by which thread.
//!
//! One thread waits for all reports about interfaces: rtnetlink, the leases of ports, and retry times. It checks the
//! interfaces of ports without a session, one after the other, and does not wait for a port's lock. A check of the
//! interface of a port with a session may rebuild its lanes, and so wait for its VMM: the session thread does that, and
//! an event wakes it.
//!
//! epoll watches leases, and keeps none open: a closed one is not watched any more. A lease is reported once; the next
//! check arms it again.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use host::links::Changes;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use crate::nic::wakers::Event;
use common::lock::Locked;

/// Epoll data of other events than reports of leases, which have the numbers of their ports.
const CHANGES: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

/// What the thread that checks interfaces waits for.
pub(crate) struct Watch {
    epoll: OwnedFd,
    wake: Event,
}

/// The reports that ended a wait.
#[derive(Default)]
pub(crate) struct Reports {
    /// Some interface changed.
    pub(crate) changes: bool,
    /// The ports whose leases have reports, by number.
    pub(crate) leases: Vec<u64>,
}

impl Watch {
    /// Watches only its own wake-up event at first.
    pub(crate) fn new() -> io::Result<Arc<Self>> {
        let (epoll, wake) = (epoll::create(epoll::CreateFlags::CLOEXEC)?, Event::new()?);
        let data = epoll::EventData::new_u64(WAKE);
        epoll::add(&epoll, &wake, data, epoll::EventFlags::IN)?;
        Ok(Arc::new(Self { epoll, wake }))
    }

    /// Also watches changes of interfaces.
    pub(crate) fn add_changes(&self, changes: &Changes) -> io::Result<()> {
        let data = epoll::EventData::new_u64(CHANGES);
        Ok(epoll::add(&self.epoll, changes, data, epoll::EventFlags::IN)?)
    }

    /// Waits for reports, until that time at most.
    pub(crate) fn wait(&self, until: Option<Instant>) -> Reports {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut space = [MaybeUninit::uninit(); 64];
        let ready = epoll::wait(&self.epoll, &mut space, left.as_ref());
        let mut came = Reports::default();
        for event in ready.map_or(&[][..], |(events, _)| &*events) {
            match event.data.u64() {
                CHANGES => came.changes = true,
                WAKE => self.wake.clear(),
                port => came.leases.push(port),
            }
        }
        came
    }
}

/// When the interface of a port is checked, and by which thread.
pub(crate) struct Looks {
    watch: Arc<Watch>,
    /// The port's number in the watch's epoll set.
    pub(crate) port: u64,
    /// Set when the session thread has to check it.
    event: Event,
    wanted: AtomicBool,
    /// The time of the next check, at the latest.
    due: Mutex<Option<Instant>>,
    /// How often interfaces changed. Nothing is published through it.
    changes: AtomicU32,
}

impl Looks {
    pub(super) fn new(watch: &Arc<Watch>) -> io::Result<Self> {
        static PORTS: AtomicU64 = AtomicU64::new(0);
        Ok(Self {
            watch: Arc::clone(watch),
            port: PORTS.fetch_add(1, Relaxed),
            event: Event::new()?,
            wanted: AtomicBool::new(false),
            due: Mutex::default(),
            changes: AtomicU32::new(0),
        })
    }

    /// Makes a check happen soon.
    pub(crate) fn retry(&self) {
        self.wanted.store(true, Relaxed);
        self.watch.wake.tell();
    }

    /// Some interface changed.
    pub(super) fn note_change(&self) {
        self.changes.fetch_add(1, Relaxed);
        self.retry();
    }

    /// How often interfaces changed; it wraps.
    pub(super) fn changes(&self) -> u32 {
        self.changes.load(Relaxed)
    }

    /// Whether a check is due.
    pub(super) fn is_due(&self) -> bool {
        self.wanted.load(Relaxed) || self.due.locked().is_some_and(|due| due <= Instant::now())
    }

    /// The time of the next check, if no report comes before.
    pub(crate) fn next(&self) -> Option<Instant> {
        *self.due.locked()
    }

    /// Wakes the session thread for a check.
    pub(super) fn hand_over(&self) {
        self.forget();
        self.event.tell();
    }

    /// A check begins, which covers all earlier reports.
    pub(super) fn forget(&self) {
        self.wanted.store(false, Relaxed);
        *self.due.locked() = None;
    }

    /// The session thread begins a check.
    pub(super) fn take(&self) {
        self.event.clear();
    }

    /// A check ended; `due`: the time of the next one at the latest, `None`: it waits for a report.
    pub(super) fn note(&self, due: Option<Instant>) {
        *self.due.locked() = due;
        if due.is_some() {
            self.watch.wake.tell();
        }
    }

    /// Waits for one report of the lease.
    pub(super) fn watch_lease(&self, lease: BorrowedFd<'_>) {
        let (data, flags) = (
            epoll::EventData::new_u64(self.port),
            epoll::EventFlags::IN | epoll::EventFlags::ONESHOT,
        );
        if epoll::add(&self.watch.epoll, lease, data, flags) == Err(Errno::EXIST) {
            let _ = epoll::modify(&self.watch.epoll, lease, data, flags);
        }
    }
}

impl AsFd for Looks {
    /// Readable when the session thread has to check.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
