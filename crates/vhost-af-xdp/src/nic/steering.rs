//! The source of an interface's program and sockets: leased from a steward, for many daemons or [the daemon's
//! own](crate::supervision::helper), or foreign (`external.rs`).
//!
//! A lease's interface may be in another network namespace: the steward reports its state and its changes.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use common::binding::SteeredBy;
use host::links::{DriverSends, Link};
use program::backoff::Backoff;
use steer::{Mode, QueueConf, QueueCounters};
use steward_client::{Lease, LeaseError, Waiting};
use steward_protocol::{Facts, Hinted, StationChange, Steered, Wanted};
use xsk::{First, OpenError, Socket, SocketConfig, Umem, Unbound};

use super::error::InterfaceError;
use super::external::External;
use crate::config::HintsConfig;
use common::lock::Locked;

/// A queue is free an RCU grace period after its socket was closed (`SOCK_RCU_FREE`, net/xdp/xsk.c): measured 14 to 23
/// ms, several times that on a busy machine.
pub(super) const RELEASE: Duration = Duration::from_millis(20);
/// How long memory of a closed socket may still count as locked: the kernel releases it some 20 ms later. On a busy CPU
/// it is more, as with queues ([`super::interface`]).
const UNLOCK_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause before it is tried again; doubles.
const UNLOCK_PAUSE: Duration = Duration::from_millis(10);

/// Text for the log and `status` while the steward is away.
pub(crate) const AWAY: &str =
    "the steward is away: queues in use go on, changes wait until vhost-af-xdp-steward is started again";

pub(crate) enum Steering {
    /// Program and sockets are a steward's.
    Leased(Box<Leased>),
    /// The program is foreign, and the sockets may be.
    External(External),
}

/// How frames are steered to an interface's queues.
#[derive(Clone)]
pub(crate) struct SteeringReport {
    pub(crate) by: Steered,
    /// Why they are not steered in a better way; may be empty.
    pub(crate) note: String,
}

/// An interface with its program.
pub(crate) struct Attached {
    pub(crate) steering: Steering,
    /// The interface when it was attached.
    pub(crate) link: Link,
}

/// A steward to lease from.
#[derive(Clone, Default)]
pub(crate) struct StewardAt {
    /// Where it listens.
    pub(crate) path: PathBuf,
    /// It is this daemon's own helper.
    pub(crate) is_own: bool,
    /// How long to wait for its answers.
    pub(crate) waiting: Waiting,
}

/// Queues leased from a steward.
pub(crate) struct Leased {
    lease: Lease,
    /// The steward is this daemon's own.
    is_own: bool,
    /// As they were when the lease began.
    facts: Facts,
    /// How often a check found a change. Nothing is published through it.
    changes: AtomicU32,
    /// The steward was away at the last check. Nothing is published through it.
    away: AtomicBool,
    /// How often the steward had come back by then.
    returns: AtomicU32,
    /// The program's counters for each queue, at the steward's last answer.
    counted: Mutex<HashMap<u32, QueueCounters>>,
    /// The limit on locked memory was too low the last time. Nothing is published through it.
    short: AtomicBool,
}

/// A socket that has memory, and no queue yet.
pub(crate) enum Prepared {
    /// Made by this daemon.
    Own(Unbound),
    /// The steward binds it.
    Leased(steward_client::Prepared),
}

impl Prepared {
    /// Its memory.
    pub(crate) fn umem(&self) -> &Umem {
        match self {
            Self::Own(unbound) => unbound.umem(),
            Self::Leased(prepared) => prepared.umem(),
        }
    }
}

impl Steering {
    /// Leases queues of an interface.
    pub(crate) fn lease(
        steward: &StewardAt,
        wanted: &Wanted,
        hints: HintsConfig,
    ) -> Result<Attached, InterfaceError> {
        let waiting = steward.waiting.clone();
        let taken = Lease::take_hinted(&steward.path, wanted, hints.request(), waiting);
        let lease = taken.map_err(|error| match error {
            error if steward.is_own => InterfaceError::of_helper(error),
            error => error.into(),
        })?;
        let facts = lease.facts();
        let link = link_of(&facts);
        let leased = Leased {
            lease,
            is_own: steward.is_own,
            facts,
            changes: AtomicU32::new(0),
            away: AtomicBool::new(false),
            returns: AtomicU32::new(0),
            counted: Mutex::default(),
            short: AtomicBool::new(false),
        };
        Ok(Attached {
            steering: Self::Leased(Box::new(leased)),
            link,
        })
    }

    fn leased(&self) -> Option<&Leased> {
        match self {
            Self::External(_) => None,
            Self::Leased(leased) => Some(leased),
        }
    }

    /// How the program is attached, if one is, at the last report.
    pub(crate) fn attached(&self) -> Option<Mode> {
        match self {
            Self::External(external) => external.attached(),
            Self::Leased(leased) => leased.lease.facts().mode,
        }
    }

    /// How the program was attached when the interface was opened; without a program, the mode that sockets are bound
    /// for.
    pub(crate) fn mode(&self) -> Mode {
        match self {
            Self::External(external) => external.mode,
            Self::Leased(leased) => leased.facts.mode.unwrap_or(Mode::Skb),
        }
    }

    /// Why it is not attached natively, if that was tried.
    pub(crate) fn fallback(&self) -> Option<&str> {
        let facts = &self.leased()?.facts;
        (!facts.impaired && !facts.note.is_empty()).then_some(facts.note.as_str())
    }

    /// How frames are steered to the queues, and why not in a better way.
    pub(crate) fn report(&self) -> SteeringReport {
        match self {
            Self::External(_) => SteeringReport {
                by: Steered::ByQueue,
                note: "the XDP program is not ours".to_owned(),
            },
            Self::Leased(leased) => {
                let facts = leased.lease.facts();
                SteeringReport {
                    by: facts.steered,
                    note: if self.is_away() && !leased.is_own {
                        AWAY.to_owned()
                    } else {
                        facts.steering
                    },
                }
            }
        }
    }

    /// Why frames for the guests may be lost, with the remedy.
    pub(crate) fn loses(&self) -> Option<String> {
        let facts = self.leased()?.lease.facts();
        facts.loses.then_some(facts.steering)
    }

    /// What decides whether a frame in one of the queues is the guest's.
    pub(crate) fn steered_by(&self) -> SteeredBy {
        match self.leased().map(|leased| leased.lease.facts().steered) {
            None => SteeredBy::Foreign,
            Some(Steered::ByQueue) => SteeredBy::Nic,
            Some(_) => SteeredBy::Program,
        }
    }

    /// Whether program and sockets come from this daemon's own steward.
    pub(crate) fn is_own(&self) -> bool {
        self.leased().is_some_and(|leased| leased.is_own)
    }

    /// Whether no queue can be opened at the moment because the steward is away; open queues continue.
    pub(crate) fn is_away(&self) -> bool {
        self.leased().is_some_and(|leased| leased.lease.is_away())
    }

    /// The metadata before frames, by the steward's report, or by the configuration of a foreign program; `None`:
    /// unknown.
    pub(crate) fn hinted(&self) -> Option<Hinted> {
        match self {
            Self::External(external) => external.hinted(),
            Self::Leased(leased) => leased.lease.hinted(),
        }
    }

    /// Requests the program's counters of the queues, until `deadline` at most; of a foreign program only how it is
    /// attached.
    pub(crate) fn sample(&self, link: &Link, queues: impl Iterator<Item = u32>, deadline: Instant) {
        match self {
            Self::External(external) => external.ask_attached(link),
            Self::Leased(leased) => {
                for queue in queues {
                    if let Ok(counters) = leased.lease.counters(queue, deadline) {
                        leased.counted.locked().insert(queue, counters);
                    }
                }
            }
        }
    }

    /// The program's counters of a queue at the last request.
    pub(crate) fn counters(&self, queue: u32) -> Option<QueueCounters> {
        self.leased()?.counted.locked().get(&queue).copied()
    }

    /// What the driver does for sockets in zero-copy mode.
    pub(crate) fn driver_sends(&self, link: &Link) -> DriverSends {
        match self {
            Self::External(_) => DriverSends::by_index(link.index),
            Self::Leased(leased) => leased.facts.sends,
        }
    }

    /// A socket for a queue, with registered memory, not bound to the queue yet, whose present socket continues.
    pub(crate) fn prepare(&self, umem: &Umem, config: &SocketConfig) -> Result<Prepared, InterfaceError> {
        match self {
            Self::External(external) => external.prepare(umem, config).map(Prepared::Own),
            Self::Leased(leased) => leased.prepare(umem, config),
        }
    }

    /// A socket for a queue over the memory of another one, bound and put into the program's map.
    pub(crate) fn share(&self, first: &First, config: &SocketConfig) -> Result<Socket, InterfaceError> {
        match self {
            // Such sockets have memory of their own (config.rs).
            Self::External(_) => Err(InterfaceError::InUse),
            Self::Leased(leased) => leased.done(leased.lease.share(first, config)),
        }
    }

    /// Binds the socket that was prepared last for its queue, and puts it into the program's map: the queue's frames go
    /// there after [`Self::activate`].
    pub(crate) fn bind(&self, prepared: Prepared) -> Result<Socket, InterfaceError> {
        match (self, prepared) {
            (Self::External(external), Prepared::Own(unbound)) => {
                let queue = unbound.queue().0;
                let socket = unbound.bind()?;
                external.place(queue, socket.as_fd())?;
                Ok(socket)
            }
            (Self::Leased(leased), Prepared::Leased(prepared)) => leased.done(leased.lease.bind(prepared)),
            // Each makes its own kind.
            _ => Err(InterfaceError::InUse),
        }
    }

    /// Whether program and sockets are a steward's. Then a queue can get a new socket while the interface is in use,
    /// and [`Self::bind`] finds out cheaply when a queue is free: otherwise an attempt that is too early may take more
    /// time than to wait before it.
    pub(crate) fn is_leased(&self) -> bool {
        self.leased().is_some()
    }

    /// Waits until no socket has a queue, `longest` at most: then its driver neither reads nor writes the memory of the
    /// last socket any more. With a foreign program that cannot be queried, and this waits for the time that the kernel
    /// usually takes.
    pub(crate) fn await_free(&self, queue: u32, longest: Duration) -> Result<(), InterfaceError> {
        match self {
            Self::External(_) => {
                sleep(RELEASE.min(longest));
                Ok(())
            }
            Self::Leased(leased) => leased.done(leased.lease.await_free(queue, longest)),
        }
    }

    /// Sends a request to the steward. A foreign program has none: it is not changed, and the answer is the default.
    /// Errors: [`InterfaceError`]: the steward refuses it, or is away.
    pub(crate) fn ask<T: Default>(
        &self,
        request: impl FnOnce(&Lease) -> Result<T, LeaseError>,
    ) -> Result<T, InterfaceError> {
        match self {
            Self::External(_) => Ok(T::default()),
            Self::Leased(leased) => leased.done(request(&leased.lease)),
        }
    }

    /// Sends a queue's frames to the socket that was prepared last, and is bound, from now on.
    pub(crate) fn activate(&self, queue: u32, conf: QueueConf) -> Result<(), InterfaceError> {
        self.ask(|lease| lease.activate(queue, conf))
    }

    /// Changes the addresses of the network that the queues were leased for.
    pub(crate) fn set_stations(&self, changes: &[StationChange]) -> Result<(), InterfaceError> {
        self.ask(|lease| lease.set_stations(changes))
    }

    /// Changes the addresses of a network in a tunnel: see [`Lease::set_tunnel_stations`].
    pub(crate) fn set_tunnel_stations(
        &self,
        share: u32,
        changes: &[StationChange],
    ) -> Result<(), InterfaceError> {
        self.ask(|lease| lease.set_tunnel_stations(share, changes))
    }

    /// How often the steward came back: see [`Lease::returns`].
    pub(crate) fn returns(&self) -> u32 {
        self.leased().map_or(0, |leased| leased.lease.returns())
    }

    /// How often [`look`](Self::look) found something changed; it wraps.
    pub(crate) fn changes(&self) -> u32 {
        self.leased().map_or(0, |leased| leased.changes.load(Relaxed))
    }

    /// The same, and how often something changed behind the bridge that the interface is part of.
    pub(crate) fn changes_of_host(&self) -> u32 {
        let behind = self.leased().map_or(0, |leased| leased.lease.behind_changes());
        self.changes().wrapping_add(behind)
    }

    /// The interface as it is now.
    /// Errors: why it cannot be used any more.
    pub(crate) fn look(&self, opened: &Link) -> anyhow::Result<Link> {
        match self {
            Self::External(_) => Link::by_index(opened.index)
                .ok_or_else(|| gone(&format!("interface {} is gone", opened.name), &opened.name)),
            Self::Leased(leased) => leased.look(),
        }
    }

    /// Readable when there is a change for [`look`](Self::look) that rtnetlink does not report.
    pub(crate) fn watch(&self) -> Option<BorrowedFd<'_>> {
        Some(self.leased()?.lease.as_fd())
    }
}

impl Leased {
    fn prepare(&self, umem: &Umem, config: &SocketConfig) -> Result<Prepared, InterfaceError> {
        let deadline = Instant::now() + UNLOCK_TIMEOUT;
        // A shortage that was there the last time does not pass by itself.
        let may_wait = !self.short.load(Relaxed);
        let mut pauses = Backoff::new(UNLOCK_PAUSE, UNLOCK_TIMEOUT);
        loop {
            let registered = self.lease.register(umem, config);
            let is_short = matches!(registered, Err(LeaseError::Open(OpenError::MemoryLock { .. })));
            let waits = is_short && may_wait;
            match waits
                .then(|| pauses.failed_before(deadline, Instant::now()))
                .flatten()
            {
                Some(pause) => sleep(pause),
                None => {
                    self.short.store(is_short, Relaxed);
                    return self.done(registered).map(Prepared::Leased);
                }
            }
        }
    }

    /// Converts an error of the steward, or of the daemon's own helper.
    fn done<T>(&self, answer: Result<T, LeaseError>) -> Result<T, InterfaceError> {
        answer.map_err(|error| match error {
            error if self.is_own => InterfaceError::of_helper(error),
            error => error.into(),
        })
    }

    fn look(&self) -> anyhow::Result<Link> {
        let changes = self.done(self.lease.take_changes())?;
        if changes.is_some() {
            self.changes.fetch_add(1, Relaxed);
        }
        let (facts, away, returns) = (self.lease.facts(), self.lease.is_away(), self.lease.returns());
        let was_away = self.away.swap(away, Relaxed);
        // It may have been away between two checks.
        let is_back = self.returns.swap(returns, Relaxed) != returns;
        let said = match away && !was_away {
            true => Some(AWAY),
            false => is_back.then_some("the steward is back, and the lease goes on"),
        };
        if let Some(said) = said {
            // The daemon ends with its own helper, and logs that.
            if !self.is_own {
                tracing::info!(interface = facts.name, "{said}");
            }
        }
        // An interface that is down keeps its queues; without a program, or without a queue, it is useless.
        if facts.mode.is_none() || (facts.impaired && facts.up) {
            return Err(match facts.ifindex {
                0 => gone(&facts.note, &self.facts.name),
                _ => anyhow!(facts.note),
            });
        }
        if facts.generation != self.facts.generation {
            bail!("the XDP program of {} was attached again", facts.name);
        }
        Ok(link_of(&facts))
    }
}

/// The interface is gone; it is requested again as `name`, which may differ from its last name.
fn gone(why: &str, name: &str) -> anyhow::Error {
    anyhow!("{why}, trying {name} again")
}

/// The link, as rtnetlink would report it.
fn link_of(facts: &Facts) -> Link {
    xsk::note_name(facts.ifindex, &facts.name);
    Link {
        index: facts.ifindex,
        name: facts.name.clone(),
        mtu: facts.mtu,
        // The steward leases no netkit that has only leased queues.
        has_leased_only: false,
        mac: facts.mac,
        up: facts.up,
        rx_queues: facts.rx_queues,
        driver: facts.driver.clone(),
        partial_checksums: facts.partial_checksums,
        node: facts.node,
        master: None,
        translated: facts.translated,
    }
}
