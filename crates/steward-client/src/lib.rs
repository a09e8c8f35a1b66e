//! The lessee's side of a lease.
//!
//! One connection is one lease: dropping the [`Lease`] ends it, as does the end of the process. All methods take
//! `&self`; threads may share it, and send one request at a time.
//!
//! The steward reports changes of the interface without a request. A thread that waits for them polls the lease's
//! descriptor ([`AsFd`]) and calls [`Lease::take_changes`], which does not wait. Changes that another thread's request
//! receives are kept.
//!
//! A steward may end and start again (a restart, an upgrade, a crash). Sockets are not affected, frames continue.
//! The lease connects again, with growing pauses, and sends the token that it had sent before ([`Request::Resume`]).
//! No call blocks for that: each call of [`Lease::take_changes`] continues it, and the descriptor becomes readable
//! when a call is due. Meanwhile requests fail with [`LeaseError::Away`]. A steward that does not know the lease any
//! more ends it with [`LeaseError::Refused`].

mod connection;
mod error;
pub mod listing;
mod reconnect;
mod sockets;
mod zcrx;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::net::SocketFlags;
use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
use steer::{MulticastReader, QueueConf, QueueCounters, Station};

use self::connection::{Connection, Incoming, Known, Message, Phase};
pub use self::error::LeaseError;
pub use self::sockets::Prepared;
pub use self::zcrx::{Area, QueueLease, Refill};
use steward_protocol::{
    ADVERTISED_CHANGES_MAX, AddressChange, Answer, BEHIND_MAX, CHANGES_MAX, FRAME_LIMITS, Facts, HintRequest,
    Hinted, HostEnd, NetkitEnd, NetkitWanted, Request, SendTapEnd, StationChange, TAP_QUEUES_MAX, Token,
    VTEP_CHANGES_MAX, VtepChange, Wanted,
};

/// Pause between two attempts to get a lock that another thread holds.
const PAUSE: Duration = Duration::from_millis(1);

/// Limits for waiting on a steward.
#[derive(Debug, Clone)]
pub struct Waiting {
    /// Time limit for one answer; attaching a program takes longest, some 100 ms.
    pub answer: Duration,
    /// When this becomes readable, waiting ends.
    pub end: Option<Arc<OwnedFd>>,
}

impl Default for Waiting {
    fn default() -> Self {
        Self {
            answer: Duration::from_secs(10),
            end: None,
        }
    }
}

/// A lease of queues.
#[derive(Debug)]
pub struct Lease {
    path: PathBuf,
    waiting: Waiting,
    token: Token,
    /// Readable when the connection is, or when `timer` is.
    waker: OwnedFd,
    /// Readable when the next step of reconnecting is due.
    timer: OwnedFd,
    /// Locked for a request until its answer.
    state: Mutex<Connection>,
    /// A copy of the state after the last request; no thread blocks while it holds this lock.
    seen: Mutex<Known>,
}

impl Lease {
    /// Asks the steward at `path` for a lease. `waiting` limits this and all later requests.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn take(path: &Path, wanted: &Wanted, waiting: Waiting) -> Result<Self, LeaseError> {
        Self::take_with(path, wanted, None, waiting)
    }

    /// Like [`Lease::take`], with hints before the frames of the queues: see [`Lease::hinted`].
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn take_hinted(
        path: &Path,
        wanted: &Wanted,
        hint_request: HintRequest,
        waiting: Waiting,
    ) -> Result<Self, LeaseError> {
        Self::take_with(path, wanted, Some(hint_request), waiting)
    }

    fn take_with(
        path: &Path,
        wanted: &Wanted,
        hint_request: Option<HintRequest>,
        waiting: Waiting,
    ) -> Result<Self, LeaseError> {
        let waker = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io::Error::from)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags).map_err(io::Error::from)?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&waker, &timer, data, epoll::EventFlags::IN).map_err(io::Error::from)?;
        let facts = Facts {
            name: wanted.interface.clone(),
            ..Facts::default()
        };
        let known = Known {
            facts,
            ..Known::default()
        };
        let lease = Self {
            path: path.to_owned(),
            waiting,
            token: program::random()?,
            waker,
            timer,
            state: Mutex::new(Connection::new(known.clone())),
            seen: Mutex::new(known),
        };
        lease.state().hint_request = hint_request;
        lease.state().socket = Some(lease.connect(SocketFlags::empty())?);
        if let Some(hint_request) = hint_request {
            lease.ask_done(&Request::Hints(hint_request))?;
        }
        let answered = lease.ask(&Request::Lease(wanted.clone()))?;
        let Answer::Facts(facts) = answered.answer else {
            return Err(LeaseError::Mismatch);
        };
        lease.state().known.facts = facts;
        lease.ask_done(&Request::Keep { token: lease.token })?;
        if let Some(hint_request) = hint_request {
            lease.ask_for_hints(hint_request)?;
        }
        let mut state = lease.state();
        state.phase = Phase::Here;
        lease.show(&state);
        drop(state);
        Ok(lease)
    }

    /// Changes the hints that the lease requests, now or as soon as the steward is back. The lease must be from
    /// [`Lease::take_hinted`].
    ///
    /// # Errors
    /// [`LeaseError`]. Unless that is [`LeaseError::Away`], the next steward gets the earlier request. A steward that
    /// did not answer in time may still apply the new one, and then sends a notification.
    pub fn ask_for_hints(&self, hint_request: HintRequest) -> Result<(), LeaseError> {
        let before = self.state().hint_request.replace(hint_request);
        let asked = self.ask(&Request::Hints(hint_request)).inspect_err(|error| {
            if !matches!(error, LeaseError::Away { .. }) {
                self.state().hint_request = before;
            }
        });
        let Answer::Hinted(hinted) = asked?.answer else {
            return Err(LeaseError::Mismatch);
        };
        let mut state = self.state();
        state.known.hinted = Some(hinted);
        self.show(&state);
        Ok(())
    }

    /// The hints before frames, as last reported; `None`: none were requested.
    pub fn hinted(&self) -> Option<Hinted> {
        self.seen().hinted.clone()
    }

    /// How often the steward has reported that [`Lease::behind`] changed; it wraps. [`Lease::take_changes`] updates
    /// it.
    pub fn behind_changes(&self) -> u32 {
        self.seen().behind
    }

    /// How often the steward has come back after it was away, since the lease was taken.
    pub fn returns(&self) -> u32 {
        self.seen().returns
    }

    /// Whether the steward is away, and the lease is not known to be over.
    pub fn is_away(&self) -> bool {
        self.seen().away
    }

    /// Facts about the interface, as last reported.
    pub fn facts(&self) -> Facts {
        self.seen().facts.clone()
    }

    /// Sends the queue's frames to the socket that was bound last, from now on.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn activate(&self, queue: u32, conf: QueueConf) -> Result<(), LeaseError> {
        self.ask_done(&Request::Activate { queue, conf })
    }

    /// Drops the queue's frames from now on, until it is activated or deactivated. The request is sent even if
    /// [`Waiting::end`] is readable.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn withhold(&self, queue: u32) -> Result<(), LeaseError> {
        let conf = QueueConf {
            virtio_header: None,
            // No longer than an Ethernet header, so every frame is too long.
            frame_limit: *FRAME_LIMITS.start(),
            hints: false,
        };
        let request = Request::Activate { queue, conf };
        match self.ask_to_the_end(&request, self.deadline())?.answer {
            Answer::Done => Ok(()),
            _ => Err(LeaseError::Mismatch),
        }
    }

    /// Sends the queue's frames to the host, from now on.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn deactivate(&self, queue: u32) -> Result<(), LeaseError> {
        self.ask_done(&Request::Deactivate { queue })
    }

    /// Changes any number of stations of the network that the lease is for. Changes made before an error stay; the
    /// whole call can be repeated. When the generation of the lease ([`Facts::generation`]) changed, its stations may
    /// be lost: set all again then.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn set_stations(&self, changes: &[StationChange]) -> Result<(), LeaseError> {
        changes.chunks(CHANGES_MAX).try_for_each(|changes| {
            let changes = changes.to_vec();
            self.ask_done(&Request::Stations { changes })
        })
    }

    /// A reader of the network's multicast and broadcast frames. Use one reader at a time; the next one continues where
    /// the last one stopped. When the generation of the lease changes, the ring may be another one.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn groups(&self) -> Result<MulticastReader, LeaseError> {
        let mut answered = self.ask(&Request::Groups)?;
        match (answered.answer, answered.descriptors.pop()) {
            (Answer::Done, Some(ring)) => Ok(MulticastReader::new(ring)?),
            _ => Err(LeaseError::Mismatch),
        }
    }

    /// Connects the network that the lease is for to the host, or asks again how it is connected, which may change with
    /// the facts of the lease ([`Lease::take_changes`]). `has`: index of the device whose descriptor the caller has,
    /// or 0. Returns a descriptor if the device is another one; the caller's device is gone then.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn host(&self, has: u32) -> Result<(HostEnd, Option<OwnedFd>), LeaseError> {
        let (host, mut tap) = self.tap(&Request::Host { has }, (has, 1))?;
        Ok((host, tap.pop()))
    }

    /// Like [`Lease::host`], for the wire, with a lease of [`steer::ModeRequest::Tap`]: see [`Request::Uplink`].
    /// `queues`: for a new device, no more than the lease has. It is limited to [`TAP_QUEUES_MAX`]. Read the frames of
    /// each queue from its own descriptor.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn uplink(&self, has: u32, queues: u32) -> Result<(HostEnd, Vec<OwnedFd>), LeaseError> {
        let queues = queues.clamp(1, TAP_QUEUES_MAX as u32);
        self.tap(&Request::Uplink { has, queues }, (has, queues as usize))
    }

    fn tap(
        &self,
        request: &Request,
        (has, queues): (u32, usize),
    ) -> Result<(HostEnd, Vec<OwnedFd>), LeaseError> {
        let answered = self.ask(request)?;
        let (taps, is_same) = (answered.descriptors, |host: &HostEnd| host.index == has);
        match answered.answer {
            Answer::Host(host) if taps.len() == queues || (taps.is_empty() && is_same(&host)) => {
                Ok((host, taps))
            }
            _ => Err(LeaseError::Mismatch),
        }
    }

    /// A tap device that sends GSO packets unsegmented from a queue of the lease. It is refused while a process has the
    /// descriptor of an earlier one. `None` if `only_with_tso` is set and the NIC has no TSO.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn send_tap(
        &self,
        queue: u32,
        only_with_tso: bool,
    ) -> Result<Option<(SendTapEnd, OwnedFd)>, LeaseError> {
        let mut answered = self.ask(&Request::SendTap { queue, only_with_tso })?;
        match (answered.answer, answered.descriptors.pop()) {
            (Answer::SendTap(end), Some(tap)) => Ok(Some((end, tap))),
            (Answer::Done, None) => Ok(None),
            _ => Err(LeaseError::Mismatch),
        }
    }

    /// Stations behind the bridge that the interface is part of ([`HostEnd::bridge`]), in order.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn behind(&self) -> Result<Vec<Station>, LeaseError> {
        let first = Station { vlan: 0, mac: [0; 6] };
        let mut stations: Vec<Station> = Vec::new();
        loop {
            let after = stations.last().copied().unwrap_or(first);
            let Answer::Behind(next) = self.ask(&Request::Behind { after })?.answer else {
                return Err(LeaseError::Mismatch);
            };
            let is_last = next.len() < CHANGES_MAX;
            stations.extend(next);
            if is_last || stations.len() >= BEHIND_MAX {
                return Ok(stations);
            }
        }
    }

    /// Changes the addresses of guests that the network advertises to other hosts: see [`Request::Advertise`]. Changes
    /// made before an error stay; the whole call can be repeated.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn advertise(&self, changes: &[AddressChange]) -> Result<(), LeaseError> {
        changes.chunks(ADVERTISED_CHANGES_MAX).try_for_each(|changes| {
            let changes = changes.to_vec();
            self.ask_done(&Request::Advertise { changes })
        })
    }

    /// Has the program drop packets for the tunnel from unknown hosts: see [`Request::DropUnknown`].
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn drop_unknown(&self, share: u32) -> Result<(), LeaseError> {
        self.ask_done(&Request::DropUnknown { share })
    }

    /// Has the program decapsulate frames for a tunnel device: see [`Request::Tunnel`]. Returns two rtnetlink
    /// sockets in the interface's network namespace, non-blocking, which can read and not change. Call it again when
    /// the steward reports a change ([`Lease::take_changes`]).
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn tunnel(&self, share: u32, device: &str) -> Result<[OwnedFd; 2], LeaseError> {
        let device = device.to_owned();
        let answered = self.ask(&Request::Tunnel { share, device })?;
        let (Answer::Done, Ok(sockets)) = (answered.answer, answered.descriptors.try_into()) else {
            return Err(LeaseError::Mismatch);
        };
        // No frames are lost any more that come to other queues.
        let Answer::Facts(facts) = self.ask(&Request::Facts)?.answer else {
            return Err(LeaseError::Mismatch);
        };
        let mut state = self.state();
        state.known.facts = facts;
        self.show(&state);
        Ok(sockets)
    }

    /// Changes the hosts from which the program takes packets of that tunnel: see [`Request::Vteps`]. Changes made before
    /// an error stay.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn change_vteps(&self, share: u32, changes: &[VtepChange]) -> Result<(), LeaseError> {
        changes.chunks(VTEP_CHANGES_MAX).try_for_each(|changes| {
            let changes = changes.to_vec();
            self.ask_done(&Request::Vteps { share, changes })
        })
    }

    /// Changes addresses of a network in a tunnel: see [`Request::TunnelStations`]. As [`Self::set_stations`].
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn set_tunnel_stations(&self, share: u32, changes: &[StationChange]) -> Result<(), LeaseError> {
        changes.chunks(CHANGES_MAX).try_for_each(|changes| {
            let changes = changes.to_vec();
            self.ask_done(&Request::TunnelStations { share, changes })
        })
    }

    /// Leases the only queue of the lease on to a new netkit, in the given network namespace or, without one, in the
    /// steward's. Returns the netkit, and a map with one entry for the socket that receives the frames. The netkit
    /// exists as long as the lease. In the steward's namespace only root may request it, elsewhere the namespace's
    /// owner, too. A repeated call returns the same netkit, or makes a new one if that is gone.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn netkit(
        &self,
        wanted: NetkitWanted,
        namespace: Option<BorrowedFd<'_>>,
    ) -> Result<(NetkitEnd, OwnedFd), LeaseError> {
        let (request, files) = (Request::Netkit(wanted), namespace.as_slice());
        let mut answered = self.ask_by(&mut self.state(), &request, files, self.deadline())?;
        match (answered.answer, answered.descriptors.pop()) {
            (Answer::Netkit(netkit), Some(map)) => Ok((netkit, map)),
            _ => Err(LeaseError::Mismatch),
        }
    }

    /// The program's counters of the queue. Waits until `deadline` at most, including for a request of another
    /// thread.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn counters(&self, queue: u32, deadline: Instant) -> Result<QueueCounters, LeaseError> {
        let silent = LeaseError::Silent(self.waiting.answer);
        let mut state = self.state_by(deadline).ok_or(silent)?;
        let answered = self.ask_by(&mut state, &Request::Counters { queue }, &[], deadline)?;
        match answered.answer {
            Answer::Counters(counters) => Ok(counters),
            _ => Err(LeaseError::Mismatch),
        }
    }

    /// The current facts, if the interface or its hints changed since the last call; otherwise `None`. Also continues
    /// to reconnect to a steward that is away. `None` while another thread waits for an answer; that thread stores
    /// changes for a later call.
    ///
    /// # Errors
    /// [`LeaseError::Gone`], or [`LeaseError::Refused`], when the lease is over.
    pub fn take_changes(&self) -> Result<Option<Facts>, LeaseError> {
        let Some(mut state) = self.state_by(Instant::now()) else {
            return Ok(None);
        };
        let read = self.read_changes(&mut state);
        self.show(&state);
        read?;
        Ok(std::mem::take(&mut state.changed).then(|| state.known.facts.clone()))
    }

    fn read_changes(&self, state: &mut Connection) -> Result<(), LeaseError> {
        if state.over {
            return Err(LeaseError::Gone);
        }
        while self.reconnect(state)? {
            match state.receive()? {
                Incoming::Nothing => break,
                // An answer to a request that timed out.
                Incoming::Message(message) if message.serial != 0 => {}
                Incoming::Message(message) => state.note(message.answer)?,
                Incoming::End => self.disconnected(state)?,
            }
        }
        Ok(())
    }

    fn ask_done(&self, request: &Request) -> Result<(), LeaseError> {
        match self.ask(request)?.answer {
            Answer::Done => Ok(()),
            _ => Err(LeaseError::Mismatch),
        }
    }

    /// Sends a request, and waits for the answer. All requests can be repeated: the second has the effect of the first.
    fn ask(&self, request: &Request) -> Result<Message, LeaseError> {
        self.ask_by(&mut self.state(), request, &[], self.deadline())
    }

    fn ask_by(
        &self,
        state: &mut Connection,
        request: &Request,
        files: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<Message, LeaseError> {
        let asked = self.ask_again(state, request, files, (&self.waiting, deadline));
        self.show(state);
        asked
    }

    /// Like [`Self::ask_by`], without descriptors, and even if [`Waiting::end`] is readable.
    fn ask_to_the_end(&self, request: &Request, deadline: Instant) -> Result<Message, LeaseError> {
        let (mut state, answer) = (self.state(), self.waiting.answer);
        let waiting = Waiting { answer, end: None };
        let asked = self.ask_again(&mut state, request, &[], (&waiting, deadline));
        self.show(&state);
        asked
    }

    /// Repeats a request over new connections.
    fn ask_again(
        &self,
        state: &mut Connection,
        request: &Request,
        files: &[BorrowedFd<'_>],
        (waiting, deadline): (&Waiting, Instant),
    ) -> Result<Message, LeaseError> {
        loop {
            self.await_connection(state, waiting, deadline)?;
            if let Some(message) = state.ask(request, files, waiting, deadline)? {
                return Ok(message);
            }
            self.disconnected(state)?;
        }
    }

    fn seen(&self) -> MutexGuard<'_, Known> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes the state for readers without the lock.
    fn show(&self, state: &Connection) {
        let away = matches!(state.phase, Phase::Away { .. } | Phase::Asked { .. });
        *self.seen() = Known {
            away,
            ..state.known.clone()
        };
    }

    /// The time limit for a request that is sent now.
    fn deadline(&self) -> Instant {
        Instant::now() + self.waiting.answer
    }

    fn state(&self) -> MutexGuard<'_, Connection> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the state; `None` if that is not possible until `deadline`.
    fn state_by(&self, deadline: Instant) -> Option<MutexGuard<'_, Connection>> {
        loop {
            match self.state.try_lock() {
                Ok(state) => return Some(state),
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return None,
                // Rare: another thread waits for an answer.
                Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
            }
        }
    }
}

impl AsFd for Lease {
    /// Readable when there may be changes, or when it is time to look for the steward: then call
    /// [`Lease::take_changes`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.waker.as_fd()
    }
}
